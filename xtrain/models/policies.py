"""Layers of a model under a policy of recomputation: what training computes again in backward instead of keeping it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._C import Tensor
from ..autograd import checkpoint, recompute
from ..nn.layers import add_norm
from ..nn.module import Module, is_stock
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


def runs_in_line(layer: Any, kind: type[Module]) -> bool:
    """Whether a layer need not be called (see run_in_line): it is exactly of its family's kind. A recording, which puts
    a wrapper in the place of `forward`, calls it: it compares layers.
    """
    return is_stock(layer, kind) and "forward" not in layer.__dict__


def run_two_parts(
    x: Tensor, y: Tensor | None, norms: tuple[Module, Module], attention: _Layer, mlp: _Layer, *args: Any
) -> tuple[Tensor, Tensor]:
    """`run` of a layer that adds attention(norm(x), *args) to its stream and then mlp(norm(x)); norms: the two, in this
    order. The stream comes in and goes out as two terms x and y [B*S, C]: the norm that reads their sum computes it in
    the same kernel. y: None for the first layer.
    """
    before, between = norms
    x, h = (x, before(x)) if y is None else add_norm(before, x, y)
    x, h = add_norm(between, x, attention(h, *args))
    return x, mlp(h)


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
