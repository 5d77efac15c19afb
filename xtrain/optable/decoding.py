"""Entry of the op table for all layers of a decoder in a step of generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import _C
from .references import attention, rms_norm, rope, swiglu
from .table import Case, Error, Ids, N, R, Spec, T, U, V, case, f32, i64, op

EPS = 1e-6
_OF_LAYER = ("norm", "q", "k", "v", "q_norm", "k_norm", "o", "mlp_norm", "gate", "up", "down", "keys", "values")
_NAMES = {True: _OF_LAYER, False: tuple(name for name in _OF_LAYER if name not in ("q_norm", "k_norm"))}


def _case(
    layers: int, batch: int, channels: int, heads: int, kv_heads: int, dim: int, inner: int, length: int,
    qk_norm: bool = True, vocab: int = 0, **options: Any,
) -> Case:  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = dict(
        q=(heads * dim, channels), k=(kv_heads * dim, channels), v=(kv_heads * dim, channels),
        o=(channels, heads * dim), gate=(inner, channels), up=(inner, channels), down=(channels, inner),
    )  # fmt: skip
    specs: dict[str, Spec] = {}
    for name, shape in shapes.items():
        reach = 1.7 * max(shape[1], 1) ** -0.5
        specs[name] = U(-reach, reach, *shape)
    specs["norm"] = specs["mlp_norm"] = U(0.5, 1.5, channels)
    specs["q_norm"] = specs["k_norm"] = U(0.5, 1.5, dim)
    specs["keys"] = specs["values"] = N(batch, kv_heads, length, dim)
    inputs = [specs[name] for _ in range(layers) for name in _NAMES[qk_norm]]
    if vocab:
        inputs += [U(0.5, 1.5, channels), U(-1.7 * channels**-0.5, 1.7 * channels**-0.5, vocab, channels)]
    return case(N(batch, channels), Ids(0, length, batch), *inputs, qk_norm=qk_norm, **options)


def _has_head(arrays: tuple[Any, ...], qk_norm: bool) -> bool:
    return len(arrays) % len(_NAMES[qk_norm]) != 0


def _layers(arrays: tuple[Any, ...], qk_norm: bool) -> Iterator[dict[str, Any]]:
    names = _NAMES[qk_norm]
    for start in range(0, len(arrays) - 2 * _has_head(arrays, qk_norm), len(names)):
        yield dict(zip(names, arrays[start : start + len(names)], strict=True))


def _call(x: Any, positions: Any, *arrays: Any, qk_norm: bool, **options: Any) -> list[Any]:
    weights: list[Any] = []
    caches: list[Any] = []
    for layer in _layers(arrays, qk_norm):
        weights += [_C.contiguous(layer[name]) for name in _NAMES[qk_norm][:-2]]
        caches += [_C.contiguous(_C.clone(layer[name])) for name in ("keys", "values")]
    last = (_C.contiguous(one) for one in arrays[-2:]) if _has_head(arrays, qk_norm) else (None, None)
    options["last_norm"], options["head"] = last
    options.setdefault("plain", False)  # the op's own default is True, and would keep one launch out of every case
    return [_C.decoder_step(x, positions, weights, caches, **options), *caches]


def _compute(
    x: np.ndarray, positions: np.ndarray, *arrays: Any, qk_norm: bool, plain: bool = False, **options: Any
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """The stream, the caches, and what was added up to the stream."""
    caches: list[np.ndarray] = []
    size = np.abs(x)
    for w in _layers(arrays, qk_norm):
        keys, values = w["keys"].copy(), w["values"].copy()
        batch, dim = len(x), keys.shape[3]
        h = rms_norm(x, w["norm"], EPS)
        q, k, v = ((h @ w[name].T).reshape(batch, len(w[name]) // dim, dim) for name in "qkv")
        if qk_norm:
            q, k = rms_norm(q, w["q_norm"], EPS), rms_norm(k, w["k_norm"], EPS)
        q, k = (rope(part, positions=positions, **options) for part in (q, k))
        out = np.zeros_like(q)
        for b, position in enumerate(positions.tolist()):
            keys[b, :, position], values[b, :, position] = k[b], v[b]
            seen = slice(b, b + 1), slice(None), slice(0, position + 1)
            out[b] = attention(q[b : b + 1, :, None], keys[seen], values[seen])[0, :, 0]
        out = out.reshape(batch, w["o"].shape[1])
        x = x + out @ w["o"].T
        h = rms_norm(x, w["mlp_norm"], EPS)
        inside = swiglu(h @ w["gate"].T, h @ w["up"].T)
        x = x + inside @ w["down"].T
        size = size + np.abs(out) @ np.abs(w["o"]).T + np.abs(inside) @ np.abs(w["down"]).T
        caches += keys, values
    if _has_head(arrays, qk_norm):
        h = rms_norm(x, arrays[-2], EPS)
        x, size = h @ arrays[-1].T, (np.abs(h) + size / np.sqrt((x**2).mean(1, keepdims=True))) @ np.abs(arrays[-1]).T
    return x, caches, size


def _reference(*arrays: Any, **options: Any) -> list[np.ndarray]:
    out, caches, _ = _compute(*arrays, **options)
    return [out, *caches]


def _sizes(*arrays: Any, **options: Any) -> list[np.ndarray]:
    out, caches, size = _compute(*arrays, **options)
    return [size + np.abs(out).max(initial=0.0), *(np.full(one.shape, np.abs(one).max(initial=0.0)) for one in caches)]


def _terms(x: np.ndarray, positions: np.ndarray, *arrays: np.ndarray, qk_norm: bool, **_: Any) -> float:
    first = next(_layers(arrays, qk_norm))
    layers = len(arrays) // len(_NAMES[qk_norm])
    return 8.0 * layers * (x.shape[1] + first["o"].shape[1] + first["down"].shape[1] + first["keys"].shape[2] + 32)


_CASES = [
    (1, 1, 8, 2, 1, 4, 8, 5), (2, 3, 32, 4, 2, 64, 96, 70), (2, 2, 24, 3, 3, 6, 10, 9), (1, 9, 64, 2, 1, 128, 32, 130),
    (1, 0, 8, 2, 1, 4, 8, 5),
]  # fmt: skip


def _refused(at: int | str, value: Any) -> Any:
    """A call that is right, C 8, H 2, K 1, D 4, F 6, L 5, but for an argument, by number, or a tensor of the layer."""

    def call() -> Any:
        sizes = dict(
            norm=(8,), q=(8, 8), k=(4, 8), v=(4, 8), q_norm=(4,), k_norm=(4,), o=(8, 8), mlp_norm=(8,),
            gate=(6, 8), up=(6, 8), down=(8, 6), keys=(1, 1, 5, 4), values=(1, 1, 5, 4),
        )  # fmt: skip
        layer = {name: value() if name == at else f32(*size) for name, size in sizes.items()}
        tensors = list(layer.values())
        arguments: list[Any] = [f32(1, 8), i64(1), tensors[:-2], tensors[-2:], EPS, 1e4, None, None]
        if isinstance(at, int):
            arguments[at] = value()
        return _C.decoder_step(*arguments[:6], last_norm=arguments[6], head=arguments[7])

    return call


op(
    "decoder_step",
    "decoder_step",
    [_case(*sizes) for sizes in _CASES]
    + [_case(*_CASES[1], qk_norm=False), _case(*_CASES[1], plain=True), _case(*_CASES[3], plain=True, qk_norm=False)]
    + [_case(*_CASES[1], theta=1e6, factor=8.0, original_length=64.0), _case(2, 5, 96, 4, 2, 64, 160, 520, big=True)]
    + [_case(*_CASES[1], vocab=50), _case(*_CASES[2], vocab=7, qk_norm=False, plain=True)],
    _call,
    _reference,
    nondiff=True,
    strided="no",
    accumulations=_terms,
    roundings=32,
    magnitude=_sizes,
    errors=(
        Error(_refused(0, lambda: i64(1, 8)), T, r"decoder_step: x must have a floating .*int64"),
        Error(_refused(0, lambda: f32(8)), V, r"decoder_step: x must have 2 dimensions.*\(8,\)"),
        Error(_refused(1, lambda: f32(1)), T, r"decoder_step: positions must have dtype int64, got float32"),
        Error(_refused(1, lambda: i64(2)), V, r"decoder_step: positions must have shape \(1,\), got \(2,\)"),
        Error(_refused(2, lambda: [f32(8)] * 8), V, r"decoder_step: weights must .*11 tensors.*1 layers, got 8"),
        Error(_refused(3, lambda: [f32(1, 1, 5, 4)]), V, r"decoder_step: caches must .*keys.*got 1 tensors"),
        Error(_refused("keys", lambda: f32(5, 4)), V, r"decoder_step: keys must have 4 dimensions.*\(5, 4\)"),
        Error(_refused("keys", lambda: f32(1, 1, 5, 3)), V, r"decoder_step: keys .*even last dim.*\(1, 1, 5, 3\)"),
        Error(_refused("keys", lambda: f32(1, 3, 5, 4)), V, r"decoder_step: query heads must be a multiple.*2 and 3"),
        Error(_refused("q", lambda: f32(8)), V, r"decoder_step: q must have 2 dimensions"),
        Error(_refused("q", lambda: f32(8, 7)), V, r"decoder_step: q must have shape \(8, 8\), got \(8, 7\)"),
        Error(_refused("gate", lambda: f32(8)), V, r"decoder_step: gate must have 2 dimensions"),
        Error(_refused("up", lambda: f32(7, 8)), V, r"decoder_step: up must have shape \(6, 8\), got \(7, 8\)"),
        Error(_refused("k_norm", lambda: f32(5)), V, r"decoder_step: k_norm must have shape \(4,\), got \(5,\)"),
        Error(_refused("o", lambda: _C.full((8, 8), 1.0, _C.float64)), T, r"decoder_step: .*o must .*float64"),
        Error(_refused("o", lambda: _C.transpose(f32(8, 8), 0, 1)), V, r"decoder_step: o must be contiguous"),
        Error(_refused("v", lambda: f32(4, 8).requires_grad_()), R, r"decoder_step: v must not require a gradient"),
        Error(_refused(7, lambda: f32(8)), V, r"decoder_step: last_norm and head .*together, got head alone"),
        Error(_refused(6, lambda: f32(8)), V, r"decoder_step: last_norm and head .*together, got last_norm alone"),
        Error(_refused(4, lambda: -1.0), V, r"decoder_step: eps must be at least 0, got -1"),
        Error(_refused(5, lambda: 0.0), V, r"decoder_step: theta must be positive, got 0"),
    ),
)  # fmt: skip
