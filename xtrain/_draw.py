"""Draws from probabilities that tensors hold, and the generator of a captured step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from . import _C
from ._C import Tensor
from ._types import is_whole

_this_thread = threading.local()


class CapturedGenerator:
    """The default generator inside a step that is captured: its state is read on the device when the step is replayed.

    random: int64 [2] on the device of the step, the seed and the number of the first fill, which `write` puts there.
    count: fills that the step has drawn.
    """

    def __init__(self, device: _C.device) -> None:
        self.random = _C.full((2,), 0, _C.int64, device)
        self._first, self.count = _C.get_rng_state(), 0

    def next(self) -> int:
        """How much is added to the number on the device for the next fill; the state of the process goes on, too."""
        (seed, first), (now, stream) = self._first, _C.get_rng_state()
        if now != seed or stream < first:
            raise RuntimeError("cuda.graph: a captured step must not set the seed: set it before the call")
        _C.set_rng_state((seed, stream + 1))
        self.count = max(self.count, stream + 1 - first)
        return stream - first

    def write(self) -> None:
        """Put the state of the process where the step reads it."""
        words = [word - (1 << 64) if word >> 63 else word for word in _C.get_rng_state()]
        self.random.copy_(_C.tensor(words, _C.int64, "cpu"))

    def skip(self) -> None:
        """Draw what a replay has drawn."""
        seed, stream = _C.get_rng_state()
        _C.set_rng_state((seed, (stream + self.count) % (1 << 64)))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, dropout of this thread draws from here. The state of the process is put back."""
        self._first = _C.get_rng_state()
        _this_thread.generator = self
        try:
            yield
        finally:
            (seed, first), (now, stream) = self._first, _C.get_rng_state()
            if now == seed:  # a step may leave out numbers, as DataParallel does between leaves
                self.count = max(self.count, stream - first)
            _this_thread.generator = None
            _C.set_rng_state(self._first)


def captured_generator() -> CapturedGenerator | None:
    """The generator of the step that this thread is capturing; None outside of a capture."""
    return getattr(_this_thread, "generator", None)


def multinomial(input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """num_samples indices drawn from each row of weights [V] or [B, V]: int64 [num_samples] or [B, num_samples].

    Weights are at least 0, finite, of a float dtype, and need not add up to 1. Without replacement a row gives no index
    twice. Random numbers are Philox's, with a seed from the default generator: the same indices on every device. A
    weight below 2^-41 of the largest is never drawn (functional.sample). Waits for the device once. ValueError for a
    row with no weight above 0, or with fewer than num_samples of them without replacement. No gradient.
    """
    if not isinstance(input, _C.Tensor):
        raise TypeError(f"multinomial: input must be a Tensor, got {type(input).__name__}")
    if input.ndim not in (1, 2) or input.shape[-1] == 0:
        raise ValueError(f"multinomial: input must have shape (V,) or (B, V) with V >= 1, got {tuple(input.shape)}")
    if not input.dtype.is_floating_point:
        raise TypeError(f"multinomial: input must have a floating point dtype, got {input.dtype.name}")
    if not is_whole(num_samples) or num_samples < 1:
        raise ValueError(f"multinomial: num_samples must be an integer >= 1, got {num_samples!r}")
    if not replacement and num_samples > input.shape[-1]:
        raise ValueError(
            f"multinomial: num_samples must be at most {input.shape[-1]} without replacement, got {num_samples}"
        )
    weights = input.detach().reshape(-1, input.shape[-1])
    if weights.dtype != _C.float64:
        weights = weights.to(_C.float32)
    random = _C.cat([_C.randint(0, 2**53, (1,), _C.int64, "cpu"), _C.full((1,), 0, _C.int64, "cpu")]).to(input.device)
    step = _C.arange(0, 2, 1, _C.int64, input.device)  # adds 0 to the seed, 1 to the step
    left, columns = _C.log(weights), _C.arange(0, weights.shape[1], 1, _C.int64, input.device)
    drawn: list[Tensor] = []
    for _ in range(num_samples):
        tokens = _C.sample(left, random)
        drawn.append(tokens.unsqueeze(1))
        random = random + step
        if not replacement:
            left = _C.where(_C.eq(columns, drawn[-1]), float("-inf"), left)
    out = _C.cat(drawn, 1)
    if out.numel() and _C.amin(out).item() < 0:
        rule = "one weight above 0" if replacement or num_samples == 1 else f"{num_samples} weights above 0"
        raise ValueError(
            f"multinomial: each row of input must have at least {rule}, all of them finite and none negative"
        )
    return out.reshape(-1) if input.ndim == 1 else out
