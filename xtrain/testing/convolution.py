"""What a convolution makes, costs and adds up, from its parameters alone: for tests, tolerances and rates."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._types import as_int
from .formats import format_of, tolerance

_LEAST = {"batch": 0, "in_channels": 0, "out_channels": 0, "groups": 1}
_PER_DIM = {"size": 0, "kernel": 1, "stride": 1, "padding": 0, "dilation": 1}


@dataclass(frozen=True, init=False)
class Convolution:
    """The parameters of a convolution in one to three dimensions.

    input [batch, in_channels, *size], weight [out_channels, in_channels / groups, *kernel] -> [batch, out_channels,
    *output]. size and kernel give the dimensions, as an int (one) or a tuple; stride, padding (zeros on both sides) and
    dilation are an int for all of them, or one for each. ValueError for numbers out of range, groups that do not
    divide, other lengths, and a kernel that does not fit into the padded input; TypeError for what is no int.
    """

    batch: int
    in_channels: int
    out_channels: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __init__(
        self,
        batch: int,
        in_channels: int,
        out_channels: int,
        size: int | Sequence[int],
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> None:
        for name, value in zip(_LEAST, (batch, in_channels, out_channels, groups), strict=True):
            object.__setattr__(self, name, _at_least(name, value, _LEAST[name]))
        dims = len(size) if isinstance(size, Sequence) else 1
        if not 1 <= dims <= 3:
            raise ValueError(f"Convolution: size must have 1 to 3 dimensions, got {dims}")
        for name, value in zip(_PER_DIM, (size, kernel, stride, padding, dilation), strict=True):
            values = tuple(value) if isinstance(value, Sequence) else (value,) * dims
            if len(values) != dims:
                raise ValueError(f"Convolution: {name} must have {dims} numbers, as size has, got {len(values)}")
            object.__setattr__(self, name, tuple(_at_least(name, v, _PER_DIM[name]) for v in values))
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups:
                raise ValueError(f"Convolution: groups must divide {name}, {channels}, got {groups}")
        for n, k, p, d in zip(self.size, self.kernel, self.padding, self.dilation, strict=True):
            if d * (k - 1) + 1 > n + 2 * p:
                raise ValueError(
                    f"Convolution: kernel must fit into the padded size {n + 2 * p}, got {k} with dilation {d}"
                )

    @property
    def output(self) -> tuple[int, ...]:
        """Places along each dimension: (size + 2 padding - dilation (kernel - 1) - 1) // stride + 1."""
        rows = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of input, weight, bias and output."""
        return {
            "input": (self.batch, self.in_channels, *self.size),
            "weight": (self.out_channels, self.in_channels // self.groups, *self.kernel),
            "bias": (self.out_channels,),
            "output": (self.batch, self.out_channels, *self.output),
        }

    @property
    def terms(self) -> int:
        """Products that are added up to one output: channels of a group times taps, zeros of the padding included."""
        return self.in_channels // self.groups * math.prod(self.kernel)

    @property
    def flops(self) -> int:
        """A multiplication and an addition a term, for all outputs; a gradient of input or weight costs as many."""
        return 2 * math.prod(self.shapes["output"]) * self.terms

    @property
    def multiplications(self) -> int:
        """Terms that are no zero of the padding: what a direct loop that skips them multiplies."""
        inside = math.prod(sum(_taps_inside(*row)) for row in self._rows())
        return self.batch * self.out_channels * (self.in_channels // self.groups) * inside

    def bytes(self, dtype: Any, bias: bool = False) -> int:
        """Fewest that a forward moves: input, weight (and bias) read once, the output written once."""
        names = ("input", "weight", "output", *(("bias",) if bias else ()))
        bits = re.search(r"\d+", format_of(dtype, "dtype").name)  # "bfloat16"; a bool has a byte
        return -(-sum(math.prod(self.shapes[name]) for name in names) * (int(bits[0]) if bits else 8) // 8)

    def accumulations(self, of: str = "output") -> int:
        """Terms of the longest sum: of an element of the output, or of the gradient of the input, weight or bias.

        Padding adds nothing, so no more terms count than some element has. ValueError for other words.
        """
        if of == "output":
            return (
                self.in_channels // self.groups * math.prod(max(_taps_inside(*row), default=0) for row in self._rows())
            )
        if of == "input":
            return self.out_channels // self.groups * math.prod(_most_users(*row) for row in self._rows())
        if of == "weight":
            return self.batch * math.prod(_most_uses(*row) for row in self._rows())
        if of == "bias":
            return self.batch * math.prod(self.output)
        raise ValueError(f"Convolution: of must be 'output', 'input', 'weight' or 'bias', got {of!r}")

    def tolerance(
        self, compute: Any, out: Any = None, acc: Any = None, *, of: str = "output", magnitude: float = 1.0
    ) -> tuple[float, float]:
        """testing.tolerance with as many accumulations: (rtol, atol) of an output, or of a gradient."""
        return tolerance(compute, out, acc, max(1, self.accumulations(of)), magnitude)

    def _rows(self) -> list[tuple[int, int, int, int, int, int]]:
        """(size, places, kernel, stride, padding, dilation) of each dimension."""
        return list(zip(self.size, self.output, self.kernel, self.stride, self.padding, self.dilation, strict=True))


def _at_least(name: str, value: int, least: int) -> int:
    value = as_int("Convolution", name, value)
    if value < least:
        raise ValueError(f"Convolution: {name} must be at least {least}, got {value}")
    return value


def _uses_of_tap(size: int, places: int, k: int, stride: int, padding: int, dilation: int) -> range:
    """The places whose tap k reads an element of the row: first <= t < last."""
    at = k * dilation - padding
    first = max(0, -(at // stride))
    return range(first, max(first, min(places, (size - 1 - at) // stride + 1)))


def _taps_inside(size: int, places: int, kernel: int, stride: int, padding: int, dilation: int) -> list[int]:
    """For each place, how many taps read an element of the row."""
    count = [0] * places
    for k in range(kernel):
        for t in _uses_of_tap(size, places, k, stride, padding, dilation):
            count[t] += 1
    return count


def _most_uses(size: int, places: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The most places at which one tap reads an element of the row."""
    return max(len(_uses_of_tap(size, places, k, stride, padding, dilation)) for k in range(kernel))


def _most_users(size: int, places: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The most pairs of place and tap that read one element of the row."""
    count = [0] * size
    for k in range(kernel):
        for t in _uses_of_tap(size, places, k, stride, padding, dilation):
            count[t * stride + k * dilation - padding] += 1
    return max(count, default=0)
