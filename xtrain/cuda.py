"""CUDA devices: which there are, what they hold, waiting for them. Nothing here runs before it is called.

    if xt.cuda.is_available():
        model.to("cuda")
        ...
        xt.cuda.synchronize()
        print(xt.cuda.memory_summary())

All work of a device is queued on one stream and runs in order; only reading a value (`item`, `numpy`, `tolist`) and
`synchronize` wait for it. `device` arguments take a device, its name or its index; None is the default device
(`xt.set_default_device`) where that is a CUDA device, else the first one. ValueError for a device that is no CUDA
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from . import _C
from ._graph import Graph as Graph

_Device = _C.device | str | int | None
_R = TypeVar("_R")


def _device(device: _Device) -> _C.device:
    if device is None:
        default = _C.get_default_device()
        return default if default.type == "cuda" else _C.device("cuda")
    found = _C.device(f"cuda:{device}") if isinstance(device, int) else _C.device(device)
    if found.type != "cuda":
        raise ValueError(f"cuda: device must be a CUDA device, got {str(device)!r}")
    return found


def is_available() -> bool:
    """Whether tensors can live on a CUDA device."""
    return device_count() > 0


def device_count() -> int:
    """How many CUDA devices tensors can live on; 0 without a driver, a GPU, or xtrain's CUDA library."""
    try:
        return _C.cuda_device_count()
    except RuntimeError:
        return 0


def why_unavailable() -> str | None:
    """One sentence that says what is missing, or None when CUDA is available."""
    try:
        _C.cuda_device_count()
    except RuntimeError as error:
        return str(error)
    return None


def get_device_name(device: _Device = None) -> str:
    """The name of a device, such as "NVIDIA H200". RuntimeError without CUDA."""
    return _C.cuda_info(_device(device))["name"]


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    """(major, minor) of a device's compute capability. RuntimeError without CUDA."""
    return _C.cuda_info(_device(device))["capability"]


def get_device_properties(device: _Device = None) -> dict[str, Any]:
    """A dict: name, capability, multiprocessors, memory_total and memory_free (bytes), driver and runtime versions
    (13000 is 13.0), built_for (compute capabilities of xtrain's kernels), uuid (as nvidia-smi has it) and blas.
    RuntimeError without CUDA."""
    return _C.cuda_info(_device(device))


# TFLOP/s of products without sparsity, by data sheets: bfloat16, TF32, float32. The first that is part of a name.
_PEAKS = {
    "B200": (2250.0, 1125.0, 75.0),
    "GH200": (989.4, 494.7, 66.9),
    "H200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.2),
    "H100 NVL": (835.0, 417.5, 60.0),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
    "RTX 4090": (165.2, 82.6, 82.6),
}


def peak_flops(precision: str, device: _Device = None) -> int | None:
    """Operations a second that a device's products can reach, as its data sheet says; None for a device that is not
    listed here. precision: "bfloat16", "tf32" or "float32" (ValueError else). RuntimeError without CUDA."""
    kinds = ("bfloat16", "tf32", "float32")
    if precision not in kinds:
        raise ValueError(f"peak_flops: precision must be one of {', '.join(kinds)}, got {precision!r}")
    name = get_device_name(device)
    found = next((peaks for known, peaks in _PEAKS.items() if known in name), None)
    return None if found is None else round(found[kinds.index(precision)] * 1e12)


def synchronize(device: _Device = None) -> None:
    """Wait for the work queued on a device. RuntimeError without CUDA.

    Raises what the device found meanwhile: IndexError for a token id or a label out of range, ValueError for documents
    that overlap or leave a gap, CudaError for a kernel that failed.
    """
    _C.synchronize(_device(device))


def counters(device: _Device = None) -> dict[str, int]:
    """What a device has been asked for since the process began, as a dict of counts: kernel `launches`,
    `synchronizations` (the host waited), copies `to_host` and `from_host`, `allocations` (blocks of memory), and
    `driver_allocations` (those that were not kept from before). RuntimeError without CUDA.

    A training step is asynchronous when the counts of synchronizations and of copies to the host stand still.
    """
    found = _C.cuda_counters(_device(device))
    return {name: value for name, value in found.items() if not name.startswith("pool_")}


def current_stream(device: _Device = None) -> int:
    """The address of the stream of a device's work, for libraries that take one. RuntimeError without CUDA."""
    return _C.cuda_stream(_device(device))


def graph(
    step: Callable[..., _R], *, optimizers: Iterable[Any] = (), warmup: int = 2, device: _Device = None
) -> Graph[_R]:
    """A callable that does what `step` does, with one launch a call.

        def step(ids, targets):
            optimizer.zero_grad()
            loss = model.loss(ids, targets)
            loss.backward()
            optimizer.step()
            return loss

        fast = xt.cuda.graph(step, optimizers=[optimizer])
        for ids, targets in batches:
            loss = fast(ids, targets)

    The first `warmup` calls run `step`; then one call captures its work on the device as a CUDA graph, and that call
    and all others replay it. Each call is one step, with the same bits as `step`. With XTRAIN_CUDA_SYNC=1 every call
    runs `step`.

    What holds for `step`, from the first call or from the capture on:

    - Its arguments are tensors without gradient, of one shape and dtype in all calls, on any device; the call copies
      them to tensors of its own on `device`, which `step` gets. ValueError or TypeError else.
    - It returns tensors on `device`, in tuples, lists and dicts, or None. What a call returned is overwritten by the
      next: `.clone()` keeps it.
    - Its Python code runs no more once captured. Numbers and branches stay as they were in the capture.
    - `optimizers` lists those that it calls. A learning rate of AdamW may change between calls; other options may
      not, nor the state (RuntimeError, ValueError).
    - While it is captured, it must not make the host wait (`item`, `tolist`, `numpy`, `repr`, `synchronize`), copy from
      the host, draw random numbers but by dropout, use more memory than its last eager run, or products of other
      sizes: RuntimeError. Then nothing has run, gradients that it made are None, and `step` itself still works.
    - A tensor from outside stays in memory as long as the graph. One that takes its place later (parameters of a
      converted model) is not seen by the graph.

    The graph holds memory for all tensors of the step, which nothing else uses; a tensor of it that outlives it keeps
    it all. RuntimeError without CUDA.

    device: None is that of the parameters of `optimizers`, and without optimizers the first one.
    warmup: at least 1. The last of these runs plans the memory, so what a step makes once, such as the state of
    an optimizer, should be made before that, hence 2.
    """
    return Graph(step, optimizers, warmup, None if device is None else _device(device))


def memory_allocated(device: _Device = None) -> int:
    """Bytes of a device that tensors occupy; 0 without CUDA."""
    return _C.memory_stats(_device(device))["allocated"]


def max_memory_allocated(device: _Device = None) -> int:
    """The most bytes of a device's pool in use at once, the working memory of kernels included; 0 without CUDA."""
    peak = _C.memory_stats(_device(device))["peak"]
    return max(peak, _C.cuda_counters(_device(device))["pool_peak"]) if peak else 0


def memory_reserved(device: _Device = None) -> int:
    """Bytes that the pool of a device has taken from the system, in use or kept for the next tensor; 0 without CUDA."""
    device = _device(device)
    return _C.cuda_counters(device)["pool_reserved"] if is_available() else 0


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Start `max_memory_allocated` over from what is in use now."""
    _C.memory_reset_peak(_device(device))


def empty_cache(device: _Device = None) -> None:
    """Give what the pool of a device keeps for reuse back to the system. Waits, and raises what `synchronize` would."""
    _C.memory_trim(_device(device))


def memory_summary(device: _Device = None) -> str:
    """A few lines on the memory of a device, for people."""
    missing = why_unavailable()
    if missing:
        return missing
    device = _device(device)
    stats, pool, info = _C.memory_stats(device), _C.cuda_counters(device), _C.cuda_info(device)
    gib = 2.0**30
    rows = [
        ("tensors", f"{stats['allocated'] / gib:9.3f} GiB in {stats['live_storages']} storages"),
        ("peak", f"{max_memory_allocated(device) / gib:9.3f} GiB, working memory included"),
        ("pool", f"{pool['pool_reserved'] / gib:9.3f} GiB taken, {pool['pool_used'] / gib:.3f} GiB in use"),
        ("device", f"{info['memory_free'] / gib:9.3f} GiB free of {info['memory_total'] / gib:.3f} GiB"),
    ]
    return "\n".join([f"{device} ({info['name']})", *(f"  {name:8}{text}" for name, text in rows)])
