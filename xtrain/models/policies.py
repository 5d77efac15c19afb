"""Layers of a model under a policy of recomputation: what training computes again in backward instead of keeping it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._C import Tensor
from ..autograd import checkpoint, recompute
from .registry import RECOMPUTE

_Layer = Callable[..., Tensor]


def check_policy(family: str, policy: str) -> None:
    """ValueError for a policy that there is not."""
    if policy not in RECOMPUTE:
        raise ValueError(f"{family}: recompute must be one of {', '.join(RECOMPUTE)}, got {policy!r}")


def run_layers(layers: Iterable[_Layer], policy: str, x: Tensor, *args: Any) -> Tensor:
    """x through all layers, each of which is called with x and args. "block" computes each again from its input, "full"
    groups of about the root of all from the group's input, and then each layer from its own.
    """
    layers = list(layers)
    count = len(layers)
    if policy == "full":
        size = math.isqrt(max(count - 1, 0)) + 1  # groups, and layers in a group: about the root of all
        if -(-count // size) + size >= count:  # as many inputs at once as without groups
            return _group(layers, x, *args)
        for start in range(0, count, size):
            x = checkpoint(functools.partial(_group, layers[start : start + size]), x, *args)
        return x
    for layer in layers:
        x = checkpoint(layer, x, *args) if policy == "block" else layer(x, *args)
    return x


def run_in_line(
    layers: Iterable[Any],
    in_line: Callable[[Any], bool],
    x: Tensor,
    args: Sequence[Any],
    caches: Sequence[Any] | None,
    more: Sequence[Any] = (),
) -> tuple[Tensor, Tensor | None]:
    """x through all layers, as two terms (or one and None): the last addition of a layer that is `in_line`, and so need
    not be called, moves into the norm that reads the sum. Such a layer has `run(x, y, *args, cache, *more)`, where the
    stream is x + y; others are called with x, args, their cache and more.
    """
    y = None
    for i, layer in enumerate(layers):
        cache = None if caches is None else caches[i]
        if in_line(layer):
            x, y = layer.run(x, y, *args, cache, *more)
        else:
            x, y = layer(x if y is None else x + y, *args, cache, *more), None
    return x, y


@recompute()
def _cheaply(layer: _Layer, *args: Any) -> Tensor:
    return layer(*args)


def _group(layers: Sequence[_Layer], x: Tensor, *args: Any) -> Tensor:
    for layer in layers:
        x = checkpoint(_cheaply, layer, x, *args)
    return x
