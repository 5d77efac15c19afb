"""Finds the command that a command line names, and runs it."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .. import _early
from .._version import __version__
from ..errors import nearest
from .guard import fail, guard

_USAGE = """\
usage: xtrain COMMAND [options]

  train      train a language model (xtrain train --help lists every option)
  sample     generate text from a run or a model directory
  chat       talk with a model that has a chat template
  export     write a model as a GGUF file, for llama.cpp
  verify     check the files of a run or a model directory against their manifest
  prepare    turn text, JSON lines or Parquet into a token file for `train --data` (also: tokenize)
  tokenizer  train a tokenizer on text: xtrain tokenizer train FILES --vocab N
  bench      measure matrix products, attention or every op: xtrain bench gemm | attention | ops
  check      prove every kernel right on this machine
  doctor     show versions, CPU, BLAS, devices, and what is missing

  --version, --help
"""
_COMMANDS = (
    "train",
    "sample",
    "chat",
    "export",
    "verify",
    "prepare",
    "tokenize",
    "tokenizer",
    "bench",
    "check",
    "doctor",
)
_MODULES = {"tokenize": "prepare"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):  # a sample is any text: what the locale cannot show must not end a run
        if not isinstance(stream, io.TextIOWrapper):
            continue
        posix = stream.errors == "surrogateescape" and stream.encoding.lower() != "utf-8"  # LC_ALL=C, no UTF-8 mode
        if stream.errors == "strict" or posix:
            stream.reconfigure(errors="replace")
    return guard(_dispatch, list(sys.argv[1:] if argv is None else argv))


def _dispatch(arguments: list[str]) -> int:
    _early.end()  # inside guard: a Ctrl-C that waited has its answer
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] in ("--version", "-V"):
        print(f"xtrain {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in _COMMANDS:
        return fail(f"unknown command {name!r}{nearest(name, _COMMANDS)}", 2)
    if "-h" in rest or "--help" in rest:
        print(_module(name).USAGE, end="")
        return 0
    return _module(name).command(rest)


def _module(name: str) -> Any:
    """The module of a command, with USAGE and `command(arguments)`, which returns the exit status."""
    return import_module(f".{_MODULES.get(name, name)}", __package__)
