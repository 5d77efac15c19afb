"""Finds the benchmark of a name: each is a module with OPTIONS (name -> default) and command(values) -> exit status."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import ConfigError, nearest

BENCHMARKS = ("gemm", "ops")


def _module(name: str) -> Any:
    if name not in BENCHMARKS:
        raise ConfigError(f"bench measures {' or '.join(BENCHMARKS)}, got {name!r}{nearest(name, BENCHMARKS)}")
    return importlib.import_module(f".{name}", __package__)


def options_of(name: str) -> dict[str, Any]:
    return dict(_module(name).OPTIONS)


def command(name: str, values: dict[str, Any]) -> int:
    return _module(name).command(values)
