"""Layers with parameters. Hyper-connections are in mhc.py."""

from typing import TYPE_CHECKING

from .._lazy import absent
from . import init, utils
from .containers import ModuleDict, ModuleList, Sequential
from .layers import (
    GELU,
    Conv1d,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    Identity,
    LayerNorm,
    Linear,
    ReLU,
    RMSNorm,
    SiLU,
)
from .mhc import HyperConnection, StreamContraction, expand_streams, recompute_streams
from .module import Module, Parameter

__all__ = [
    "Conv1d", "CrossEntropyLoss", "Dropout", "Embedding", "GELU", "HyperConnection", "Identity", "LayerNorm", "Linear",
    "Module", "ModuleDict", "ModuleList", "Parameter", "ReLU", "RMSNorm", "Sequential", "SiLU", "StreamContraction",
    "expand_streams", "init", "recompute_streams", "utils",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = absent(__name__)
