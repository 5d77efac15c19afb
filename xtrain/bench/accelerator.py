"""What a benchmark needs on a CUDA device: waiting, random inputs made there, a sample of a large result, memory.

A call on such a device returns when its work is queued. A clock that is read then has measured the queueing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import _C
from .._C import Tensor
from ..errors import ConfigError
from ..optable.table import Spec


def on_cuda(device: str) -> bool:
    """Whether the device of this name is a GPU."""
    return device != "cpu"


def find_torch(torch: Any, device: str) -> Any:
    """`torch` if it can work on this device, else None."""
    return torch if torch is None or not on_cuda(device) or torch.cuda.is_available() else None


def waiter(device: str, torch: Any) -> Callable[[], None] | None:
    """Waits for all that a device was asked for by xtrain and by PyTorch; None for the CPU, whose work is done at once.

    One for all contenders: a turn must neither begin in the shadow of another's work nor end before its own.
    """
    if not on_cuda(device):
        return None
    place = _C.device(device)

    def wait() -> None:
        _C.synchronize(place)
        if torch is not None:
            torch.cuda.synchronize(device)

    return wait


def release(device: str, torch: Any) -> None:
    """Give back memory that both libraries keep for later: each could otherwise starve the other."""
    if on_cuda(device):
        _C.memory_trim(_C.device(device))
        if torch is not None:
            torch.cuda.empty_cache()


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    """Tensors without a named device are made there."""
    before = _C.get_default_device()
    _C.set_default_device(_C.device(device))
    try:
        yield
    finally:
        _C.set_default_device(before)


@contextlib.contextmanager
def precision(tf32: bool, torch: Any) -> Iterator[None]:
    """float32 products strictly in float32, or with TF32 units, in both libraries; 16-bit sums are kept in float32."""
    before, kept = _C.tf32(), {}
    products = None if torch is None else torch.backends.cuda.matmul
    wanted = {
        "allow_tf32": tf32,
        "allow_bf16_reduced_precision_reduction": False,
        "allow_fp16_reduced_precision_reduction": False,
    }
    try:
        _C.allow_tf32(tf32)
        if products is not None:
            for name, value in wanted.items():
                kept[name] = getattr(products, name)
                setattr(products, name, value)
        yield
    finally:
        _C.allow_tf32(before)
        for name, value in kept.items():
            setattr(products, name, value)


def usable(names: Sequence[str], device: str, explicit: bool) -> tuple[list[str], list[str]]:
    """(product backends that work on this device, a sentence for each that does not).

    ConfigError for one that does not work and was asked for.
    """
    x = _C.normal((16, 16), 0.0, 1.0, _C.float32, _C.device(device))
    good, missing = [], []
    for name in names:
        try:
            _C.matmul(x, x, backend=name)
            good.append(name)
        except RuntimeError as error:
            why = " ".join(str(error).split())
            if explicit:
                raise ConfigError(f"--backends {name}: {why}") from None
            missing.append(f"{name} left out: {why}")
    return good, missing


# ---- numbers ---------------------------------------------------------------------------------------------------------


def draw(spec: Spec, dtype: str, device: str) -> Tensor:
    """Random values of a specification, made on the device; the seed is the caller's (`_C.manual_seed`)."""
    place, kind = _C.device(device), getattr(_C, dtype)
    if spec.kind == "normal":
        return _C.normal(spec.shape, 0.0, 1.0, kind, place)
    if spec.kind == "uniform":
        return _C.uniform(spec.shape, spec.low, spec.high, kind, place)
    if spec.kind == "apart":
        sizes = _C.uniform(spec.shape, spec.low, spec.high, kind, place)
        return _C.where(_C.gt(_C.normal(spec.shape, 0.0, 1.0, kind, place), 0.0), sizes, _C.neg(sizes))
    if spec.kind == "ties":
        return _C.cast(_C.randint(-2, 3, spec.shape, _C.int32, place), kind)
    if spec.kind == "int":
        return _C.randint(int(spec.low), int(spec.high), spec.shape, _C.int64, place)
    if spec.kind == "bool":
        return _C.ne(_C.randint(0, 2, spec.shape, _C.uint8, place), 0)
    raise AssertionError(f"no benchmark draws inputs of the kind {spec.kind} on a device")


def spread(t: Tensor, dim: int, count: int) -> Tensor:
    """A view of at least `count` (fewer if there are none) and less than twice as many of t's slices: evenly apart, the
    last one among them.
    """
    n = t.shape[dim]
    step = max(1, (n - 1) // max(1, count - 1))
    return _C.slice(t, dim, (n - 1) % step, n, step)


def to_host(t: Tensor) -> np.ndarray:
    """The values of a (small) tensor as a float64 array."""
    return _C.to_device(_C.cast(_C.contiguous(t), _C.float64), _C.device("cpu")).numpy()
