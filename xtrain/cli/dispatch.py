"""The `xtrain` command. Each subcommand imports what it needs, so that help and errors are quick.

Exit status: 0 done; 1 the work failed; 2 wrong usage; 130 or 143 stopped by Ctrl-C or SIGTERM (training has saved its
state then).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from .. import _early
from .._version import __version__
from ..errors import CheckpointError, ConfigError, DataError, NonFiniteError, nearest

_USAGE = """\
usage: xtrain COMMAND [options]

  train    train a language model (xtrain train --help lists every option)
  sample   generate text from a run or a model directory
  prepare  turn text into a memory-mapped token file for `train --data`
  bench    measure matrix products or every op: xtrain bench gemm | ops
  check    prove every kernel right on this machine
  doctor   show versions, CPU, BLAS, devices, and what is missing

  --version, --help
"""

_TRAIN_USAGE = """\
usage: xtrain train [CONFIG.toml] [--key value | --key=value | --flag | --no-flag] ...

Trains a language model and writes runs/<name>/: metrics.jsonl, loss.png, config.toml and checkpoints, each of which is
a Hugging Face model directory. Options come from the defaults below, then the TOML file, then the command line. Ctrl-C
or SIGTERM finish the step, save and exit with status 130 or 143; a second Ctrl-C stops at once. A resumed run continues
bit for bit.
"""

_SAMPLE_USAGE = """\
usage: xtrain sample DIR [options]

Generates text from the newest checkpoint of a run directory, from one checkpoint, or from any Hugging Face model
directory.

  --prompt TEXT         text to continue [default: the end-of-document token, else a line break]
  --max-tokens N        tokens to generate [tokens; default 256]
  --temperature X       divides the logits; 0 takes the likeliest token [default 0.8]
  --top-k N             sample among the k likeliest tokens; 0 for all [tokens; default 0]
  --top-p X             sample among the likeliest tokens of this total probability [default 1.0]
  --seed N              of the random numbers [default 0]
  --threads N           CPU threads; 0 for all [threads; default 0]
"""

_PREPARE_USAGE = """\
usage: xtrain prepare SOURCE OUT.tokens [--tokenizer DIR]

Writes the text of SOURCE (a file, a folder, or 'python' for the standard library's source) as a token file.

  --tokenizer DIR       a model directory with a tokenizer.json [default: bytes]
"""

_BENCH_USAGE = """\
usage: xtrain bench gemm|ops [options]

Measures this machine. Contenders take turns on the same random inputs, after a warm-up; a number is a median.

bench gemm: matrix products of every backend beside NumPy, and PyTorch when it is installed.
  --sizes LIST          of squares, training, head (the layers of a 124M model, forward and both gradients), N, MxNxK,
                        and MxNxK:nt (t: stored transposed) [default squares,training; on CUDA 256 to 8192,training]
  --dtypes LIST         of float32, tf32 (CUDA), bfloat16, float16, float64 [default float32,bfloat16; on CUDA tf32 too]
  --backends LIST       names that xt.gemm_backends(device) lists [default all]

bench ops: every op of the op table, forward and backward, in GB/s beside a measured copy.
  --op LIST             names of ops [default all]
  --dtypes LIST         of float32, bfloat16, float16, float64 [default float32]

both:
  --device NAME         where to measure [default cpu]
  --threads N           CPU threads; 0 for all; not with CUDA [threads; default 0]
  --json FILE           write every number to FILE
  --plot FILE           draw bars: .png, .svg or .pdf (needs the extra `plot`)
"""

_CHECK_USAGE = """\
usage: xtrain check [options]

Runs every op of the op table, forward and backward, in every dtype and on every backend, and compares it with plain
NumPy in float64. Prints the worst error as a part of its computed tolerance. Exit status 1 when one is above 1, when an
op or a kernel has no entry in the table, or when a kernel is missing; 2 when an op of --op takes none of the dtypes.

  --op LIST             names of ops [default all]
  --dtype LIST          names of dtypes [default all]
  --device NAME         what to check [default cpu]
  --threads N           CPU threads; 0 for all [threads; default 0]
  --json FILE           write every number to FILE
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):  # a sample is any text: what the locale cannot show must not end a run
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    return _guard(_answered, list(sys.argv[1:] if argv is None else argv))


def _answered(arguments: list[str]) -> int:
    _early.end()  # inside _guard: a Ctrl-C that waited has its answer
    return _dispatch(arguments)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] in ("--version", "-V"):
        print(f"xtrain {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in _COMMANDS:
        return _fail(f"unknown command {name!r}{nearest(name, list(_COMMANDS))}", 2)
    usage, command = _COMMANDS[name]
    if "-h" in rest or "--help" in rest:
        print(usage, end="")
        if name == "train":
            from ..train.options import help_text

            print("\n" + help_text())
        return 0
    return command(rest)


def _fail(message: str, status: int) -> int:
    with contextlib.suppress(OSError):  # the status still tells
        print(f"xtrain: error: {message}", file=sys.stderr)
    return status


def _guard(command: Any, arguments: list[str]) -> int:
    """Run a command; every error becomes one line on standard error (with a traceback when XTRAIN_DEBUG is set)."""
    try:
        status = command(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _fail("stopped by Ctrl-C", 130)
    except BrokenPipeError:  # `xtrain ... | head`
        _forget_output()
        return 1
    except Exception as error:
        if os.environ.get("XTRAIN_DEBUG"):
            raise
        if isinstance(error, ConfigError):
            return _fail(str(error), 2)
        if isinstance(error, (DataError, CheckpointError, NonFiniteError)):
            return _fail(str(error), 1)
        if isinstance(error, OSError) and (place := _place_of(error)):
            return _fail(f"{place}: {error.strerror or error}", 1)
        text = " ".join(str(error).split()) or "no message"
        if isinstance(error, MemoryError) and str(error):  # xtrain's and NumPy's say what was asked
            return _fail(text, 1)
        return _fail(f"{type(error).__name__}: {text} (XTRAIN_DEBUG=1 shows where)", 1)


def _forget_output() -> None:
    """What is left in sys.stdout goes nowhere; Python would try once more at the end, and complain."""
    with contextlib.suppress(OSError, AttributeError, ValueError):  # there is none, or it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _place_of(error: OSError) -> str | None:
    """The file an error is about. Everything that writes files names them; a print on a full disk does not."""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        _forget_output()
        return "standard output"
    return None if error.filename is None else os.fsdecode(error.filename)


def _train(arguments: list[str]) -> int:
    from ..train import options

    file, values = options.parse_arguments(arguments)
    if file is not None:
        values = options.with_file(file, values)
    from ..train import Trainer

    result = Trainer(values).run()
    return {None: 0, "SIGINT": 130, "SIGTERM": 143}[result.stopped]


def _simple_options(
    arguments: list[str], known: dict[str, Any], positional: int, usage: str
) -> tuple[list[str], dict[str, Any]]:
    """Return (`positional` plain arguments, options by name); an option has the type of its default in `known`."""
    places, values, rest = [], dict(known), list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            places.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        key = name.replace("-", "_")
        if key not in known:
            raise ConfigError(f"unknown option --{name}{nearest(name, [k.replace('_', '-') for k in known], '--')}")
        if not equals:
            if not rest:
                raise ConfigError(f"--{name} needs a value")
            text = rest.pop(0)
        kind = str if known[key] is None else type(known[key])
        try:
            values[key] = kind(text)
        except ValueError:
            raise ConfigError(f"--{name} must be a {'whole ' if kind is int else ''}number, got {text!r}") from None
    if len(places) != positional:
        raise ConfigError(
            f"expected {positional or 'no'} argument{'s' * (positional != 1)}, got {len(places)}; "
            f"{usage.splitlines()[0]}"
        )
    return places, values


def _sample(arguments: list[str]) -> int:
    from ..generation import LONGEST_SAMPLE, generate_text

    known = {"prompt": None, "max_tokens": 256, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 0, "threads": 0}
    (directory,), values = _simple_options(arguments, known, 1, _SAMPLE_USAGE)
    limits = (
        ("max_tokens", 1, LONGEST_SAMPLE),
        ("temperature", 0, None),
        ("top_k", 0, None),
        ("top_p", 0, 1),
        ("seed", 0, 2**63 - 1),
        ("threads", 0, 256),
    )
    for name, low, high in limits:
        if not values[name] >= low or (high is not None and values[name] > high) or values[name] == float("inf"):
            rule = f"at least {low}" if high is None else f"in [{low}, {high}]"
            raise ConfigError(f"--{name.replace('_', '-')} must be {rule}, got {values[name]}")
    if values["top_p"] == 0:
        raise ConfigError("--top-p must be greater than 0, got 0.0")
    from .. import _C, saving
    from ..tokenizers import load_tokenizer
    from ..train import rundir

    path = rundir.resolve_run_directory(directory)
    if values["threads"]:
        _C.set_num_threads(values["threads"])
    tokenizer = load_tokenizer(path)
    model = saving.load_model(path)
    prompt = values["prompt"]
    if prompt:
        ids = tokenizer.encode(prompt.encode("utf-8", "surrogateescape"))
    else:
        ids = tokenizer.encode(b"\n") if tokenizer.eos is None else [tokenizer.eos]
    chosen = {name: values[name] for name in ("temperature", "top_k", "top_p", "seed")}
    text = generate_text(model, tokenizer, ids, values["max_tokens"], **chosen)
    print(text if prompt else text.lstrip("\0"))
    return 0


def _prepare(arguments: list[str]) -> int:
    (source, out), values = _simple_options(arguments, {"tokenizer": None}, 2, _PREPARE_USAGE)
    from ..data import prepare
    from ..tokenizers import load_tokenizer

    count = prepare(source, out, load_tokenizer(values["tokenizer"]) if values["tokenizer"] else None)
    print(f"{out}: {count:,} tokens")
    return 0


def _doctor(arguments: list[str]) -> int:
    _simple_options(arguments, {}, 0, "usage: xtrain doctor")
    from .doctor import report

    text, healthy = report()
    print(text)
    return 0 if healthy else 1


def _bench(arguments: list[str]) -> int:
    from ..bench import run

    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("bench needs to know what to measure: xtrain bench gemm or xtrain bench ops")
    options = run.options_of(arguments[0])
    _, values = _simple_options(arguments[1:], options, 0, _BENCH_USAGE)
    return run.command(arguments[0], values)


def _check(arguments: list[str]) -> int:
    from ..bench.check import OPTIONS, command

    _, values = _simple_options(arguments, OPTIONS, 0, _CHECK_USAGE)
    return command(values)


_COMMANDS = {
    "train": (_TRAIN_USAGE, _train),
    "sample": (_SAMPLE_USAGE, _sample),
    "prepare": (_PREPARE_USAGE, _prepare),
    "bench": (_BENCH_USAGE, _bench),
    "check": (_CHECK_USAGE, _check),
    "doctor": (
        "usage: xtrain doctor\n\nShows versions, CPU, BLAS, devices, and what is missing and how to get it.\n",
        _doctor,
    ),
}
