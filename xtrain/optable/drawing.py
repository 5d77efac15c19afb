"""Entries of the op table that draw, and for generation: sample, advance_, dropout, attention over a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _C
from .attention import torch_composed
from .references import attention, attention_scale, dropout, sample
from .table import TAILS, Case, Distinct, Error, Ids, N, R, Spec, T, Ties, V, case, f32, i64, op

_RANDOM = Ids(0, 1 << 40, 2)  # a seed and a step


def _sample_cases() -> list[Case]:
    options: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 5}, {"top_k": 1}, {"top_p": 0.9}, {"top_p": 1e-9},
        {"top_k": 40, "top_p": 0.5}, {"top_k": 1500, "top_p": 0.9}, {"top_k": 1 << 40, "temperature": 3.0},
    ]  # fmt: skip
    shapes: list[Spec] = [N(3, 1), N(3, 33), Ties(2, 257), Distinct(2, 50), N(2, 3001), Ties(2, 2100), N(0, 5)]
    cases = [case(shape, _RANDOM, **each) for shape in shapes for each in options]
    return cases + [case(N(9, 20001), _RANDOM, big=True, **each) for each in (options[0], options[5], options[7])]


op(
    "sample",
    "sample",
    _sample_cases(),
    _C.sample,
    lambda x, random, **options: sample(x, np.asarray(random), **options),
    out_dtype="int64",
    accumulations=0,
    roundings=0,
    errors=(
        Error(lambda: _C.sample(i64(2, 3), i64(2)), T, r"sample: logits must have a floating point dtype, got int64"),
        Error(lambda: _C.sample(f32(3), i64(2)), V, r"sample: logits must have 2 dims?.*\(3,\)"),
        Error(lambda: _C.sample(f32(2, 0), i64(2)), V, r"sample: logits must have 1 to 4194304 columns, got 0"),
        Error(lambda: _C.sample(f32(2, 3), f32(2)), T, r"sample: random must have dtype int64, got float32"),
        Error(lambda: _C.sample(f32(2, 3), i64(3)), V, r"sample: random must have shape \(2,\), got \(3,\)"),
        Error(lambda: _C.sample(f32(2, 3), i64(2), -1.0), V, r"sample: temperature must be at least 0 .*, got -1"),
        Error(lambda: _C.sample(f32(2, 3), i64(2), float("inf")), V, r"sample: temperature must be .* finite, got inf"),
        Error(lambda: _C.sample(f32(2, 3), i64(2), 1.0, 0), V, r"sample: top_k must be at least 1, got 0"),
        Error(lambda: _C.sample(f32(2, 3), i64(2), 1.0, None, 0.0), V, r"sample: top_p must be in \(0, 1\], got 0"),
        Error(lambda: _C.sample(f32(2, 3), i64(2), 1.0, None, 1.5), V, r"sample: top_p must be in \(0, 1\], got 1.5"),
    ),
)  # fmt: skip


def _advance(tokens: Any, state: Any, made: Any, slot: int) -> list[Any]:
    ids, state, made = _C.full((len(tokens), 1), 7, _C.int64, tokens.device), _C.clone(state), _C.clone(made)
    _C.select(state, 0, len(state) - 1).fill_(slot)
    _C.advance_(ids, state, made, tokens)
    return [ids, state, made]


def _advance_reference(tokens: np.ndarray, state: np.ndarray, made: np.ndarray, slot: int) -> list[np.ndarray]:
    state, made, kept = state.copy(), made.copy(), 0 <= slot < len(made)
    if kept:
        made[slot] = tokens
    state[: len(tokens)] += 1
    state[-2:] = state[-2] + 1, slot + 1 if kept and slot + 1 < len(made) else 0
    return [np.maximum(tokens, 0)[:, None], state, made]


def _advance_bad(**bad: Any) -> Any:
    good: dict[str, Any] = dict(ids=i64(2, 1), state=i64(5), made=i64(3, 2), tokens=i64(2))
    return _C.advance_(**(good | bad))


op(
    "advance_",
    "advance",
    [
        case(Ids(-3, 5, rows), Ids(-2, 9, rows + 3), Ids(0, 9, slots, rows), slot=slot)
        for rows, slots in ((1, 1), (3, 4), (33, 16), (257, 3), (1000, 2), (0, 2), (2, 0))
        for slot in sorted({-1, 0, 1, slots - 1, slots})
    ]
    + [case(Ids(-3, 5, 5000), Ids(-2, 9, 5003), Ids(0, 9, 16, 5000), big=True, slot=7)],
    _advance,
    _advance_reference,
    nondiff=True,
    strided="no",
    dtypes=("int64",),
    accumulations=0,
    roundings=0,
    errors=(
        Error(lambda: _advance_bad(tokens=f32(2)), T, r"advance_: tokens must have dtype int64, got float32"),
        Error(lambda: _advance_bad(tokens=i64(2, 1)), V, r"advance_: tokens must have 1 dim.*\(2, 1\)"),
        Error(lambda: _advance_bad(ids=i64(2)), V, r"advance_: ids must have shape \(2, 1\), got \(2,\)"),
        Error(lambda: _advance_bad(state=i64(4)), V, r"advance_: state must have shape \(5,\), got \(4,\)"),
        Error(lambda: _advance_bad(state=f32(5)), T, r"advance_: state must have dtype int64, got float32"),
        Error(lambda: _advance_bad(made=i64(3, 1)), V, r"advance_: made must have shape \(3, 2\), got \(3, 1\)"),
        Error(lambda: _advance_bad(made=_C.transpose(i64(2, 3), 0, 1)), V, r"advance_: made must be contiguous"),
    ),
)


# ---- dropout ---------------------------------------------------------------------------------------------------------

_DROPPED = [(2, 3, 4), (), (0,), *((n,) for n in TAILS), (3, 33), (7, 1031)]


def _torch_dropout(torch: Any, x: Any, p: float, key: Any) -> Any:
    factors = dropout(np.ones(tuple(x.shape)), p, key)
    return (x.double() * torch.as_tensor(factors, device=x.device)).to(x.dtype)


op(
    "dropout",
    "dropout",
    [case(N(*s), p=(0.1, 0.5, 0.9)[i % 3], key=(7 + i, i << 33)) for i, s in enumerate(_DROPPED)]
    + [case(N(5, 9), p=p, key=(2**62 + 1, 2**40)) for p in (0.0, 1.0)]
    + [case(N(301, 523), p=0.2, key=(3, 4), big=True)],
    lambda x, p, key: _C.dropout(x, p, key=key),
    dropout,
    accumulations=2,
    torch=_torch_dropout,
    errors=(
        Error(lambda: _C.dropout(i64(2), 0.5), T, r"dropout: input must have a floating point dtype, got int64"),
        Error(lambda: _C.dropout(f32(2), -0.1), V, r"dropout: p must be in \[0, 1\], got -0\.1"),
        Error(lambda: _C.dropout(f32(2), float("nan")), V, r"dropout: p must be in \[0, 1\], got -?nan"),
        Error(lambda: _C.dropout(f32(2), 0.5, key=(1, 2, 3)), V, r"dropout: key must be .*seed.*, got 3 numbers"),
        Error(lambda: _C.dropout(f32(2), 0.5, key=(1, 2), random=i64(2)), V, r"dropout: key must be left out .*random"),
        Error(lambda: _C.dropout(f32(2), 0.5, random=f32(2)), T, r"dropout: random must have dtype int64, got float32"),
        Error(lambda: _C.dropout(f32(2), 0.5, random=i64(3)), V, r"dropout: random must have shape \(2,\), got \(3,\)"),
        Error(
            lambda: _C.dropout(f32(2), 0.5, random=i64(2), offset=-1), V, r"dropout: offset must be at least 0, got -1"
        ),
    ),
)
op(
    "dropout",
    "dropout",
    [case(N(*s), _RANDOM, p=0.4, offset=i << 20) for i, s in enumerate(_DROPPED)],
    lambda x, random, p, offset: _C.dropout(x, p, random=random, offset=offset),
    lambda x, random, p, offset: dropout(x, p, (int(random[0]), int(random[1]) + offset)),
    variant="random",
    accumulations=2,
)


# ---- attention over cached keys and values ---------------------------------------------------------------------------


def _cached_case(batch: int, heads: int, kv_heads: int, length: int, dim: int, **options: Any) -> Case:
    new, kept = N(batch, kv_heads, 1, dim), N(batch, kv_heads, length, dim)
    return case(N(batch, heads, 1, dim), new, new, kept, kept, Ids(0, length, batch), **options)


def _cached(query: Any, key: Any, value: Any, keys: Any, values: Any, positions: Any, **options: Any) -> list[Any]:
    keys, values = _C.contiguous(_C.clone(keys)), _C.contiguous(_C.clone(values))
    return [_C.cached_attention(query, key, value, keys, values, positions, **options), keys, values]


def _with_new(key: np.ndarray, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    keys = keys.copy()
    for b, position in enumerate(np.asarray(positions, np.int64)):
        keys[b, :, position] = key[b, :, 0]
    return keys


def _cached_reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray,
    scale: float | None = None, plain: bool = False, window: int | None = None, softcap: float | None = None,
    of: Any = attention,
) -> list[np.ndarray]:  # fmt: skip
    keys, values, out = _with_new(k, keys, positions), _with_new(v, values, positions), np.zeros_like(q)
    for b, position in enumerate(np.asarray(positions, np.int64)):
        seen = slice(b, b + 1), slice(None), slice(max(0, position + 1 - (window or position + 1)), position + 1)
        out[b : b + 1] = of(q[b : b + 1], keys[seen], values[seen], scale=scale, softcap=softcap)
    return [out, keys, values]


def _cached_torch(
    torch: Any, q: Any, k: Any, v: Any, keys: Any, values: Any, positions: Any,
    scale: float | None = None, plain: bool = False, window: int | None = None, softcap: float | None = None,
) -> list[Any]:  # fmt: skip
    keys, values, out = keys.clone(), values.clone(), torch.zeros_like(q)
    for b, position in enumerate(positions.tolist()):
        keys[b, :, position], values[b, :, position] = k[b, :, 0], v[b, :, 0]
        seen = slice(b, b + 1), slice(None), slice(max(0, position + 1 - (window or position + 1)), position + 1)
        some = q[b : b + 1], keys[seen], values[seen]
        if softcap:
            out[b : b + 1] = torch_composed(torch, *some, scale=scale, softcap=softcap)
        else:
            attend = torch.nn.functional.scaled_dot_product_attention
            out[b : b + 1] = attend(*some, scale=scale, enable_gqa=True)
    return [out, keys, values]


def _cached_sizes(*arrays: Any, **options: Any) -> list[np.ndarray]:
    return [_cached_reference(*arrays, of=attention_scale, **options)[0]]


_CACHED = [
    (1, 1, 1, 1, 1), (2, 2, 2, 7, 5), (1, 4, 2, 65, 64), (2, 8, 1, 130, 64), (3, 6, 2, 64, 128), (2, 5, 5, 200, 128),
    (1, 14, 2, 33, 64), (2, 4, 2, 70, 96), (0, 2, 1, 4, 8),
]  # fmt: skip


_WINDOWS = [(1, 3), (5, 70), (3, 1)]  # of which sizes, and how many positions


def _refused(at: int, value: Any, **options: Any) -> Any:
    """A call that is right, H 4, K 2, L 5, D 8, but for argument number `at`."""

    def call() -> Any:
        new, kept = f32(1, 2, 1, 8), f32(1, 2, 5, 8)
        arguments: list[Any] = [f32(1, 4, 1, 8), new, new, kept, _C.clone(kept), i64(1)]
        arguments[at] = value()
        return _C.cached_attention(*arguments, **options)

    return call


op(
    "cached_attention",
    "cached_attention",
    [_cached_case(*sizes) for sizes in _CACHED]
    + [_cached_case(*sizes, plain=True) for sizes in _CACHED[1:6]]
    + [_cached_case(*_CACHED[at], plain=plain, window=size) for at, size in _WINDOWS for plain in (False, True)]
    + [_cached_case(2, 4, 2, 90, 64, scale=0.3), _cached_case(4, 16, 8, 1500, 128, big=True)]
    + [_cached_case(*_CACHED[at], plain=plain, softcap=0.7, window=40) for at in (1, 3) for plain in (False, True)],
    _cached,
    _cached_reference,
    nondiff=True,
    strided="close",
    accumulations=lambda q, k, v, keys, *_, **__: q.shape[-1] + keys.shape[2] + 16,
    roundings=3,
    magnitude=_cached_sizes,
    torch=_cached_torch,
    errors=(
        Error(_refused(0, lambda: i64(1, 4, 1, 8)), T, r"cached_attention: query must have a floating .*int64"),
        Error(_refused(0, lambda: f32(1, 4, 8)), V, r"cached_attention: query must have 4 dimensions.*\(1, 4, 8\)"),
        Error(_refused(0, lambda: f32(1, 4, 2, 8)), V, r"cached_attention: query must have shape \(1, 4, 1, 8\), got"),
        Error(_refused(0, lambda: f32(1, 3, 1, 8)), V, r"cached_attention: query heads must be a multiple .*3 and 2"),
        Error(_refused(1, lambda: f32(1, 2, 2, 8)), V, r"cached_attention: key must have shape \(1, 2, 1, 8\), got"),
        Error(_refused(2, lambda: f32(1, 1, 1, 8)), V, r"cached_attention: value must have shape \(1, 2, 1, 8\), got"),
        Error(_refused(3, lambda: _C.full((1, 2, 5, 8), 1.0, _C.float64)), T, r"cached_attention: .*keys.*"),
        Error(_refused(4, lambda: f32(1, 2, 4, 8)), V, r"cached_attention: values must have shape \(1, 2, 5, 8\), got"),
        Error(_refused(3, lambda: _C.transpose(f32(1, 2, 8, 5), 2, 3)), V, r"cached_attention: keys must be contig"),
        Error(_refused(5, lambda: f32(1)), T, r"cached_attention: positions must have dtype int64, got float32"),
        Error(_refused(5, lambda: i64(2)), V, r"cached_attention: positions must have shape \(1,\), got \(2,\)"),
        Error(_refused(5, lambda: i64(1), window=0), V, r"cached_attention: window must be at least 1, got 0"),
        Error(_refused(5, lambda: i64(1), softcap=0.0), V, r"cached_attention: softcap must be positive .*got 0"),
        Error(_refused(0, lambda: f32(1, 4, 1, 8).requires_grad_()), R, r"cached_attention: query must not require"),
    ),
)  # fmt: skip
