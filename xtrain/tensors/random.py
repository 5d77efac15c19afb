"""Generator: a stream of random numbers of its own, independent of that of manual_seed."""

from __future__ import annotations

import os
import secrets
import threading
from typing import TYPE_CHECKING

from .. import _C
from .._types import Device

if TYPE_CHECKING:
    from typing_extensions import Self

_DEFAULT = 67280421310721  # PyTorch's
_lock = threading.RLock()  # of all generators, so that one can be copied; a signal's handler may draw, too


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that held it is not in the child


os.register_at_fork(after_in_child=_forked)


class Generator:
    """A seed and the number of the next fill. `rand`, `randn` and `randint` take one as `generator`; each fill counts
    it up by one, and leaves the generator of `manual_seed` as it is.

    The numbers are those that manual_seed(seed) gives, on every device: `device` is an attribute without an effect.
    Several threads may share one.
    """

    def __init__(self, device: Device = "cpu") -> None:
        self.device = _C.device(device if device is not None else "cpu")
        self._seed, self._fill = _DEFAULT, 0

    def manual_seed(self, seed: int) -> Self:
        """Starts again from a seed in [0, 2^64); returns self. ValueError for other numbers."""
        self.set_state((seed, 0))
        return self

    def seed(self) -> int:
        """Starts again from a seed that the system chose, and returns it."""
        seed = secrets.randbits(64)
        self.set_state((seed, 0))
        return seed

    def initial_seed(self) -> int:
        """The seed."""
        return self._seed

    def get_state(self) -> tuple[int, int]:
        """(seed, number of the next fill)."""
        with _lock:
            return self._seed, self._fill

    def set_state(self, new_state: tuple[int, int]) -> None:
        """Goes on from a state. ValueError for what get_state does not give."""
        numbers = tuple(new_state) if isinstance(new_state, (tuple, list)) else ()
        if len(numbers) != 2 or not all(isinstance(n, int) and 0 <= n < 2**64 for n in numbers):
            raise ValueError(f"Generator: seed and fill must be integers in [0, 2**64), got {new_state!r}")
        with _lock:
            self._seed, self._fill = numbers

    def key(self) -> tuple[int, int]:
        """What the core takes for the next fill: (seed, number of the fill), each as a signed number of 64 bits."""
        with _lock:
            now = self._seed, self._fill
            self._fill = (self._fill + 1) % 2**64
        return now[0] - (now[0] >> 63 << 64), now[1] - (now[1] >> 63 << 64)

    def __repr__(self) -> str:
        seed, fill = self.get_state()
        return f"Generator(seed={seed}, fill={fill})"
