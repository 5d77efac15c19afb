"""Trouble on a GPU: a kernel that goes wrong, a device that is lost, a driver that is too old, memory that another process has, Ctrl-C,
exceptions, threads and forks. Each is a sentence, and the process or the run goes on, or stops with its checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from runs import HANGS, options, python, text_file, weights

import xtrain as xt
from xtrain import _C, saving
from xtrain.models import Qwen3, Qwen3Config
from xtrain.train import Trainer

pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"),
]
SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=16)  # fmt: skip

# A kernel of our own, through the driver: it writes to address 16, or stops the device as a lost one does. Both end the CUDA context.
BREAK = """
import ctypes
def break_device(how):
    text = {"illegal address": "st.global.u32 [p], 1;", "device lost": "trap;"}[how]
    ptx = ".version 6.0\\n.target sm_50\\n.address_size 64\\n.visible .entry bad() { .reg .u64 p; mov.u64 p, 16; %s ret; }\\n" % text
    cuda = ctypes.CDLL("libcuda.so.1")
    def call(name, *arguments):
        status = getattr(cuda, name)(*arguments)
        assert status == 0, (name, status)
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), ptx.encode())
    call("cuModuleGetFunction", ctypes.byref(function), module, b"bad")
    call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    assert cuda.cuCtxSynchronize() != 0  # it has gone wrong before the next call
"""
WAYS = ("illegal address", "device lost")


def model_of(seed: int) -> Qwen3:
    xt.manual_seed(seed)
    return Qwen3(Qwen3Config(**SIZES)).to("cuda")


def batch(seed: int):
    ids = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], (4, 17))
    return xt.tensor(ids[:, :-1], device="cuda"), xt.tensor(ids[:, 1:], device="cuda")


def steps(model: Qwen3, count: int, optimizer=None) -> bytes:
    """The parameters' bytes after steps."""
    optimizer = optimizer or xt.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(count):
        optimizer.zero_grad()
        model.loss(*batch(number)).backward()
        optimizer.step()
    return b"".join(bytes(_C.to_bytes(p.detach().cpu())) for p in model.parameters())


@pytest.mark.parametrize("how", WAYS)
def test_a_broken_device_is_a_sentence_and_the_cpu_goes_on(how: str) -> None:
    """Every later use of the device says so, nothing hangs or crashes, and the process ends as it wants to."""
    code = f"""{BREAK}
import xtrain as xt
x = xt.ones(1000, device="cuda")
kept = xt.arange(5)
break_device({how!r})
for use in (x.tolist, xt.cuda.synchronize, lambda: (x + 1).sum().item(), lambda: xt.ones(3, device="cuda").tolist(), x.cpu):
    try:
        use()
        print("no error")
    except xt.CudaError as error:
        print("\\n" not in str(error) and len(str(error)) > 20)
print((kept * 2).tolist(), (xt.ones(3, 3) @ xt.ones(3, 3)).sum().item())
del x
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n" * 5 + "[0, 2, 4, 6, 8] 27.0\n"


def test_what_was_queued_last_comes_first() -> None:
    code = f"""{BREAK}
import xtrain as xt
kept = [xt.zeros(3, device="cuda") for _ in range(20)]
last = xt.arange(5, device="cuda")
break_device("illegal address")
try:
    xt.cuda.synchronize()
except xt.CudaError as error:
    print(str(error).split("queued last (newest first): ")[1].split(", ")[0])
"""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # choosing among devices would say less
    done = python("-c", code, env={**os.environ, "CUDA_VISIBLE_DEVICES": first})
    assert done.stdout == "arange(5)\n", done.stdout + done.stderr


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_a_run_on_a_broken_device_ends_with_its_checkpoint(tmp_path, how: str, graph: bool) -> None:
    """No checkpoint is written from what cannot be read; the last one is whole, and a resume ends in the bits of a calm run."""
    data = text_file(tmp_path / "text.txt")
    changes = dict(device="cuda", steps=12, save_every=3, graph=graph, keep=0)
    Trainer(options(data, tmp_path / "calm", **changes), quiet=True).run()
    values = options(data, tmp_path / "run", **changes)
    code = f"""{BREAK}
from xtrain.train import Trainer
trainer = Trainer({values!r}, quiet=True)
loader = trainer.loader
next_batch = loader.next_batch
def broken():
    if trainer.step == 7:
        break_device({how!r})
    return next_batch()
loader.next_batch = broken
trainer.run()
"""
    done = python("-c", code)
    assert done.returncode != 0 and "CudaError" in done.stderr, done.stderr
    names = sorted(path.name for path in (tmp_path / "run").glob("*checkpoint*"))
    assert names == ["checkpoint-00000003", "checkpoint-00000006"], names
    again = python("-m", "xtrain", "train", "--resume", str(tmp_path / "run"))
    assert again.returncode == 0, again.stderr
    last = "checkpoint-00000012"
    assert weights(tmp_path / "run" / last) == weights(tmp_path / "calm" / last)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_driver_that_is_too_old_is_a_sentence(tmp_path) -> None:
    """A driver library of CUDA 9 comes first: it has none of the functions of later ones."""
    source, library = tmp_path / "old.c", tmp_path / "libcuda.so.1"
    source.write_text(
        "int cuInit(unsigned f) { (void)f; return 0; }\nint cuDriverGetVersion(int *v) { *v = 9000; return 0; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True, timeout=HANGS)
    code = """
import xtrain as xt
why = xt.cuda.why_unavailable()
print(xt.cuda.is_available(), "\\n" in why, why.startswith("CUDA is not available: "))
try:
    xt.ones(3, device="cuda")
except RuntimeError as error:
    print("CUDA is not available: " in str(error), "\\n" in str(error))
print(xt.ones(2).tolist())
"""
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
    done = python("-c", code, env={**os.environ, "LD_LIBRARY_PATH": path, "XTRAIN_TEST_DEVICE": "cpu"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False False True\nTrue False\n[1.0, 1.0]\n", done.stdout


HOLDER = """
import sys
import xtrain as xt
held, size = [], 1 << 34
while size >= 1 << 20:
    try:
        held.append(xt.empty(size, dtype="uint8", device="cuda"))
    except xt.OutOfMemoryError:
        size //= 2
print("full", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1",
    reason="other tests share the memory (run it alone, with -n 0)",
)
def test_memory_that_another_process_has() -> None:
    """What does not fit is refused in a sentence, what is there goes on, and what does not fit now fits when the other one has ended."""
    code = """
import sys
import xtrain as xt
x = xt.ones(1000, device="cuda")
print("ready", flush=True)
sys.stdin.readline()
try:
    xt.empty(1 << 31, dtype="uint8", device="cuda")
    print("no error", flush=True)
except xt.OutOfMemoryError as error:
    print("out of memory on cuda:0" in str(error) and "\\n" not in str(error), (x + 1).sum().item(), flush=True)
sys.stdin.readline()
print(xt.empty(1 << 31, dtype="uint8", device="cuda").shape, (x + 1).sum().item(), flush=True)
"""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as user:
        assert user.stdout.readline() == "ready\n", user.stderr.read()
        with subprocess.Popen([sys.executable, "-c", HOLDER], **pipes) as holder:
            assert holder.stdout.readline() == "full\n", holder.stderr.read()
            user.stdin.write("\n")
            user.stdin.flush()
            assert user.stdout.readline() == "True 2000.0\n"
            holder.stdin.close()
            assert holder.wait(timeout=HANGS) == 0
        user.stdin.write("\n")
        user.stdin.flush()
        assert user.stdout.readline() == "(2147483648,) 2000.0\n", user.stderr.read()
        user.stdin.close()
        assert user.wait(timeout=HANGS) == 0


def test_ctrl_c_during_a_long_launch() -> None:
    """It is answered when the device is done with what is queued; afterwards the same process computes on."""
    code = """
import sys
import xtrain as xt
x = xt.rand(6000, 6000, device="cuda")
xt.cuda.synchronize()
print("ready", flush=True)
try:
    while True:
        for _ in range(4):
            y = xt.matmul(x, x, backend="naive")
        y.sum().item()
except KeyboardInterrupt:
    pass
print((xt.ones(2, device="cuda") + 1).tolist(), xt.matmul(x, x).shape)
"""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        threading.Event().wait(0.5)  # inside the launches
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0 and out == "[2.0, 2.0] (6000, 6000)\n", out + err


def test_an_exception_between_forward_and_backward() -> None:
    """The graph goes with it, and the next steps have the bits of a run without it."""
    calm = steps(model_of(3), 4)
    model = model_of(3)
    optimizer = xt.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.zero_grad()
    xt.cuda.synchronize()
    before = xt.cuda.memory_allocated()

    def forward() -> None:
        loss = model.loss(*batch(0))
        assert loss.requires_grad
        raise ValueError("between")

    for _ in range(3):
        with pytest.raises(ValueError, match="^between$"):
            forward()
        assert xt.cuda.memory_allocated() == before
    assert steps(model, 4, optimizer) == calm


def test_two_threads_train_on_one_device() -> None:
    """Each its own model: the bits of each alone."""
    alone = [steps(model_of(seed), 6) for seed in (1, 2)]
    models, found = [model_of(1), model_of(2)], [b"", b""]

    def train(i: int) -> None:
        found[i] = steps(models[i], 6)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert found == alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork (POSIX)")
def test_a_fork_between_two_steps(tmp_path) -> None:
    """The child cannot use the device, and may end; the parent's run goes on to the same bits."""
    data = text_file(tmp_path / "text.txt")
    changes = dict(device="cuda", steps=8, save_every=4, keep=0)
    Trainer(options(data, tmp_path / "calm", **changes), quiet=True).run()
    values = options(data, tmp_path / "run", **changes)
    code = f"""
import os, warnings
warnings.simplefilter("ignore")
from xtrain.train import Trainer
trainer = Trainer({values!r}, quiet=True)
next_batch = trainer.loader.next_batch
def forked():
    if trainer.step == 3:
        child = os.fork()
        if child == 0:
            trainer.loader.next_batch = next_batch
            try:
                trainer.train_step()
            except RuntimeError as error:
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    return next_batch()
trainer.loader.next_batch = forked
trainer.run()
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    last = "checkpoint-00000008"
    assert weights(tmp_path / "run" / last) == weights(tmp_path / "calm" / last)
    assert saving.find_checkpoints(tmp_path / "run")[0].name == last


THREADS = {
    "products": "while True: x @ x",
    "steps": "w = x.clone().requires_grad_()\n    while True: (w @ w).sum().backward()",
    "reads": "while True: (x * 2).sum().item()",
    "copies": "while True: x.cpu()",
}


@pytest.mark.parametrize("work", [*THREADS, "all"])
def test_exit_beside_threads_that_use_the_gpu(work: str) -> None:
    """The driver is torn down at exit, and does not bear calls meanwhile: no crash, no hang."""
    code = "import threading, time\nimport xtrain as xt\nx = xt.rand(1024, 1024, device='cuda')\nx.sum().item()\n"
    for name in THREADS if work == "all" else [work]:
        code += f"def {name}():\n    {THREADS[name]}\nthreading.Thread(target={name}, daemon=True).start()\n"
    done = python("-c", f"{code}time.sleep(0.3)")
    assert done.returncode == 0, done.stderr
