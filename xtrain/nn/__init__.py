"""Layers with parameters. Hyper-connections are in mhc.py."""

from . import init
from .containers import ModuleList, Sequential
from .layers import GELU, Dropout, Embedding, LayerNorm, Linear, RMSNorm, SiLU
from .mhc import HyperConnection, StreamContraction, expand_streams, recompute_streams
from .module import Module, Parameter

__all__ = [
    "Dropout", "Embedding", "GELU", "HyperConnection", "LayerNorm", "Linear", "Module", "ModuleList", "Parameter",
    "RMSNorm", "Sequential", "SiLU", "StreamContraction", "expand_streams", "init", "recompute_streams",
]  # fmt: skip
