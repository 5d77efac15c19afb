"""Child processes of the tests, and small training runs for the tests of training, checkpoints and the command line."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

HANGS = 600  # seconds after which a child counts as hung, however busy the machine is

# In float32 on a GPU, too, and eagerly: tests compare numbers, and change what a step does by replacing Python, which no replay of a graph
# runs. test_gpu_defaults.py and tests/cuda/test_graph.py have what a GPU does by itself.
TINY = {
    "precision": "float32", "graph": False,
    "model.hidden_size": 16, "model.intermediate_size": 32, "model.num_hidden_layers": 1, "model.num_attention_heads": 2,
    "model.num_key_value_heads": 1, "model.head_dim": 8, "batch_size": 4, "seq_len": 16, "steps": 8, "eval_every": 0, "save_every": 0,
    "eval_tokens": 64, "sample.tokens": 0, "plot": False, "optim.warmup": 2,
}  # fmt: skip


def status_of_child(call: Callable[[], bool], seconds: int = 30) -> int:
    """The wait status of a forked child that calls it: 0 if it returns True, in so many seconds. The child ends here,
    whatever the call raises; else it would go on with the tests of its parent, beside it.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            status = not call()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def text_file(path: Path, size: int = 20_000, seed: int = 0) -> Path:
    """A file of random words."""
    rng = np.random.default_rng(seed)
    words = [b"def", b"return", b"x", b"y", b"for", b"in", b"(", b")", b":", b"\n", b"    ", b"1"]
    path.write_bytes(b" ".join(words[i] for i in rng.integers(0, len(words), size // 3))[:size])
    return path


def options(data: Path, out: Path, **changes) -> dict:
    return {
        **TINY,
        "data": os.fspath(data),
        "out": os.fspath(out),
        **{k.replace("__", "."): v for k, v in changes.items()},
    }


def arguments(values: dict) -> list[str]:
    out = []
    for name, value in values.items():
        name = "model" if name == "model.preset" else name
        out += [f"--no-{name}"] if value is False else [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return out


def start(*args: str, **kwargs) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "xtrain", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def python(*args: str, cpu: int | None = None, **kwargs) -> subprocess.CompletedProcess:
    """Runs Python and waits. `cpu`: seconds of processor time, in all threads, after which the system kills it. What is promised
    of speed is tested in these, which a busy machine gives later but does not take away."""
    if cpu is not None:
        kwargs["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    return subprocess.run([sys.executable, *args], **{"capture_output": True, "text": True, "timeout": HANGS, **kwargs})


def xtrain(*args: str, **kwargs) -> subprocess.CompletedProcess:
    """Runs the command and waits."""
    return python("-m", "xtrain", *args, **kwargs)


def wait_until(condition, process: subprocess.Popen, what: str) -> None:
    """Returns when the condition holds; AssertionError when the process ends before."""
    deadline = time.monotonic() + HANGS
    while not condition():
        assert process.poll() is None, f"{what}: the process ended: {process.stderr.read()}"
        assert time.monotonic() < deadline, f"{what}: not within {HANGS} s"
        time.sleep(0.01)


def metrics(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def weights(directory: Path) -> bytes:
    """Every byte that a resumed run continues from."""
    names = ("model.safetensors", "optimizer.safetensors", "ema.safetensors")
    return b"".join((directory / name).read_bytes() for name in names if (directory / name).exists())


def raced(given: str, change: str, call: str, seconds: float) -> None:
    """In a process of its own, `call` again and again while another thread runs `change`. It may raise IndexError or ValueError, but the
    process lives.
    """
    code = f"""
import threading, time
import numpy as np
import xtrain as xt
import xtrain.functional as F
from xtrain import _C
{given}
done = threading.Event()
def changes():
    while not done.is_set():
{textwrap.indent(change, " " * 8)}
thread = threading.Thread(target=changes, daemon=True)
thread.start()
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    try:
{textwrap.indent(call, " " * 8)}
    except (IndexError, ValueError):
        pass
done.set()
thread.join()
print("done")
"""
    done = python("-c", code, timeout=60)
    assert done.stdout == "done\n", done.stdout + done.stderr
