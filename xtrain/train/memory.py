"""Whether the memory of a machine can hold a model, asked before anything of its size is made."""

from __future__ import annotations

from typing import Any

from .. import _C, cuda
from .._host import host_memory
from ..models.registry import Architecture


def check_model_fits(architecture: Architecture, config: Any, device: str) -> None:
    """Raise OutOfMemoryError for a model that is larger than the machine's memory: the system may promise that memory
    page by page, and kill the process when it is used.

    Weights are drawn on the host in float32. Training takes 16 bytes a parameter in both precisions: weight, gradient
    and moments, and in bfloat16 the float32 weight. Modules, tensors and their graph are on the host in any case: 98 kB
    a layer of one channel.
    """
    count = architecture.count_parameters(config)
    limits = [("cpu", host_memory(), 16 if device == "cpu" else 4, 100_000)]
    if device != "cpu":
        limits.append((device, cuda.get_device_properties(device)["memory_total"], 16, 0))
    for place, memory, each, layer in limits:
        if each * count + layer * config.num_hidden_layers > memory:
            sizes = (f"{name} {getattr(config, name)}" for name in architecture.sizes if getattr(config, name))
            raise _C.OutOfMemoryError(
                f"model: out of memory on {place}, whose {memory / 1e9:.3g} GB must hold {each} bytes a parameter "
                f"and {layer // 1000} kB a layer: {', '.join(sizes)}"
            )
