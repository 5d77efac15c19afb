"""Entries of the op table: elements and rows picked and put by tensors of indices, running sums, and checksums."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _C
from .table import FLOATS, INTS, Bools, Case, Error, I, Ids, N, T, V, case, f32, i64, op


def window(x: np.ndarray, index: np.ndarray, dim: int) -> tuple[slice, ...]:
    """The part of x that index reaches: whole along dim."""
    return tuple(slice(None) if d == dim % x.ndim else slice(0, n) for d, n in enumerate(index.shape))


def gather(x: np.ndarray, index: np.ndarray, dim: int) -> np.ndarray:
    return np.take_along_axis(x[window(x, index, dim)], index, dim)


def scatter(x: np.ndarray, index: np.ndarray, src: np.ndarray, dim: int, add: bool = False) -> np.ndarray:
    """Element after element, in row-major order."""
    out = x.copy()
    for at in np.ndindex(index.shape):
        place = list(at)
        place[dim] = index[at]
        out[tuple(place)] = src[at] + (out[tuple(place)] if add else 0)
    return out


def index_put(x: np.ndarray, *rest: np.ndarray, accumulate: bool = False) -> np.ndarray:
    *indices, values = rest
    out, places = x.copy(), np.broadcast_arrays(*indices)
    for at in np.ndindex(places[0].shape):
        place = tuple(int(i[at]) for i in places)
        out[place] = values[at] + (out[place] if accumulate else 0)
    return out


def several(index: np.ndarray) -> float:
    """At most how many terms the sum in one place has, for the tolerance."""
    return float(index.size + 2)


# (input, index, dim): also indices that are smaller than the input
PICKED = [
    ((5, 4), (3, 4), 0),
    ((5, 4), (2, 3), 0),
    ((5, 4), (5, 7), 1),
    ((3, 5, 4), (3, 6, 2), -2),
    ((40, 50), (3, 4), 0),
    ((7,), (33,), 0),
    ((1,), (1,), 0),
    ((5, 0), (2, 0), 0),
    ((5, 4), (0, 4), 0),
    ((2, 257), (2, 31), -1),
    ((3, 1, 33), (2, 5, 32), 1),
]
_SIZES = r"index must have at most the sizes of input .*\(2, 3\).*dim 0.*\(2, 4\)"
ERRORS = (
    (lambda f: f(f32(2, 3), 0, f32(2, 3)), T, r"index must be int64 or int32, got float32"),
    (lambda f: f(f32(2, 3), 0, i64(2)), V, r"index must have 2 dimensions, got shape \(2,\)"),
    (lambda f: f(f32(), 0, i64()), V, r"input must have 1 to 8 dimensions, got shape \(\)"),
    (lambda f: f(f32(2, 3), 2, i64(2, 3)), I, r"dim must be in \[-2, 1\], got 2"),
    (lambda f: f(f32(2, 3), 0, i64(2, 4)), V, _SIZES),
    (lambda f: f(f32(2, 3), 0, _C.full((2, 3), 2, _C.int64)), I, r"index must be in \[0, 2\), got 2 at position 0"),
    (lambda f: f(f32(2, 3), 0, _C.full((1, 3), -1, _C.int64)), I, r"index must be in \[0, 2\), got -1 at position 0"),
)


def along_errors(name: str, put: bool) -> tuple[Error, ...]:
    f = getattr(_C, name)

    def call(x: Any, dim: int, index: Any) -> Any:
        return f(x, dim, index, f32(*index.shape)) if put else f(x, dim, index)

    own = tuple(Error(lambda make=make: make(call), kind, rf"{name}: {text}") for make, kind, text in ERRORS)
    if not put:
        return own
    return (
        *own,
        Error(lambda: f(f32(2, 3), 0, i64(2, 3), f32(2, 2)), V, rf"{name}: src must .*\(2, 3\).*\(2, 2\)"),
        Error(lambda: f(f32(2, 3), 0, i64(2, 3), i64(2, 3)), T, rf"{name}: src must .*float32.*int64"),
    )


def put_cases(*, one: bool = False) -> list[Case]:
    """one: a single index along dim, so that no place is named twice."""
    cases = []
    for x, index, dim in PICKED:
        shape = list(index)
        if one and 0 not in index:
            shape[dim] = 1
        cases.append(case(N(*x), Ids(0, x[dim], *shape), N(*shape), dim=dim))
    return [*cases, case(N(300, 70), Ids(0, 300, 1 if one else 900, 70), N(1 if one else 900, 70), dim=0, big=True)]


op(
    "gather",
    "positions embedding_fwd embedding_bwd",
    [case(N(*x), Ids(0, x[dim], *index), dim=dim) for x, index, dim in PICKED]
    + [case(N(300, 70), Ids(0, 300, 900, 70), dim=0, big=True)],
    lambda x, index, dim: _C.gather(x, dim, index),
    gather,
    accumulations=0,
    roundings=0,
    torch=lambda torch, x, index, dim: torch.gather(x, dim, index),
    errors=along_errors("gather", put=False),
)
op(
    "scatter",
    "positions scatter embedding_fwd where",
    put_cases(),
    lambda x, index, src, dim: _C.scatter(x, dim, index, src),
    scatter,
    accumulations=0,
    roundings=0,
    errors=along_errors("scatter", put=True),
)
op(
    "scatter",
    "positions scatter embedding_fwd where",
    put_cases(one=True),
    lambda x, index, src, dim: _C.scatter(x, dim, index, src),
    scatter,
    variant="once",
    accumulations=0,
    roundings=0,
    torch=lambda torch, x, index, src, dim: torch.scatter(x, dim, index, src),
)
op(
    "scatter_add",
    "positions embedding_bwd embedding_fwd",
    put_cases(),
    lambda x, index, src, dim: _C.scatter_add(x, dim, index, src),
    lambda x, index, src, dim: scatter(x, index, src, dim, add=True),
    accumulations=lambda x, index, src, dim: several(index),
    magnitude=lambda x, index, src, dim: scatter(abs(x), index, abs(src), dim, add=True),
    torch=lambda torch, x, index, src, dim: torch.scatter_add(x, dim, index, src),
    errors=(
        *along_errors("scatter_add", put=True),
        Error(
            lambda: _C.scatter_add(i64(2), 0, i64(2), i64(2)),
            T,
            r"scatter_add: input must have a floating .* got int64",
        ),
    ),
)

# (input, indices): negative ones count from the end
ROWS = [
    ((5, 3), ((2, 4),)),
    ((5, 3), ((4,), (4,))),
    ((5, 3), ((2, 1), (3,))),
    ((4, 5, 3), ((2,), (1, 2))),
    ((5,), ((),)),
    ((5, 0), ((3,),)),
    ((5, 3), ((0,),)),
    ((7, 33), ((31,),)),
    ((7, 2, 257), ((3,), (3,))),
]


def row_cases(values: bool) -> list[Case]:
    cases = []
    for shape, indices in [*ROWS, ((211, 64), ((4, 300),))]:
        kept = np.broadcast_shapes(*indices) + shape[len(indices) :]
        ids = [Ids(-n, n, *index) for n, index in zip(shape, indices, strict=False)]
        cases.append(case(N(*shape), *ids, *([N(*kept)] if values else []), big=shape[0] == 211))
    return cases


op(
    "index",
    "positions embedding_fwd embedding_bwd",
    row_cases(values=False),
    lambda x, *indices: _C.index(x, list(indices)),
    lambda x, *indices: x[indices],
    accumulations=0,
    roundings=0,
    torch=lambda torch, x, *indices: x[indices],
    errors=(
        Error(lambda: _C.index(f32(2, 3), []), V, r"index: indices must be 1 to 2 tensors .*\(2, 3\), got 0"),
        Error(lambda: _C.index(f32(2), [i64(2)] * 2), V, r"index: indices must be 1 to 1 tensors .*\(2,\), got 2"),
        Error(lambda: _C.index(f32(2, 3), [f32(2)]), T, r"index: indices must be int64 or int32, got float32"),
        Error(lambda: _C.index(f32(2, 3), [i64(2), i64(3)]), V, r"index: .*\(2,\).*\(3,\)"),
        Error(
            lambda: _C.index(f32(2, 3), [_C.tensor(np.array([0, -3]))]),
            I,
            r"index: index must be in \[-2, 2\), got -3 at position 1",
        ),
        Error(
            lambda: _C.index(f32(2, 3), [i64(2), _C.tensor(np.array([0, 3]))]),
            I,
            r"index: index must be in \[-3, 3\), got 3 at position 1",
        ),
        Error(
            lambda: _C.index(f32(2, 3), [i64(1, 1, 1, 1, 1, 1, 1, 1)]), V, r"index: the result must have at most 8 .*9"
        ),
    ),
)
for accumulate in (False, True):
    op(
        "index_put",
        "positions embedding_bwd embedding_fwd" if accumulate else "positions scatter embedding_fwd where",
        row_cases(values=True),
        lambda x, *rest, add=accumulate: _C.index_put(x, list(rest[:-1]), rest[-1], add),
        lambda x, *rest, add=accumulate: index_put(x, *rest, accumulate=add),
        variant="accumulate" if accumulate else "",
        accumulations=(lambda x, *rest: several(rest[0])) if accumulate else 0,
        roundings=1 if accumulate else 0,
        magnitude=(lambda x, *rest: index_put(abs(x), *rest[:-1], abs(rest[-1]), accumulate=True))
        if accumulate
        else None,
        torch=(lambda torch, x, *rest: torch.index_put(x, rest[:-1], rest[-1], True)) if accumulate else None,
        errors=(
            Error(
                lambda: _C.index_put(i64(2), [i64(2)], i64(2), True),
                T,
                r"index_put: input must have a floating .* got int64",
            ),
        )
        if accumulate
        else (
            Error(lambda: _C.index_put(f32(2, 3), [i64(2)], f32(2)), V, r"index_put: values must .*\(2, 3\).*\(2,\)"),
            Error(lambda: _C.index_put(f32(2), [i64(2)], i64(2)), T, r"index_put: values must .*float32.*int64"),
        ),
    )

# ---- running sums ----------------------------------------------------------------------------------------------------

SUMS = [((2, 3, 4), 1), ((5,), 0), ((), 0), ((0,), 0), ((2, 0, 3), 1), ((2, 0, 3), -1), ((1, 1), 0), ((3, 2, 300), 1)]
SUMS += [((n,), 0) for n in (31, 32, 33, 257)] + [((257, 3), 0), ((3, 257), -1), ((33, 31), 1)]
op(
    "cumsum",
    "cumsum",
    [case(N(*s), dim=d) for s, d in SUMS] + [case(N(129, 523), dim=1, big=True), case(N(64, 40, 300), dim=1, big=True)],
    _C.cumsum,
    lambda x, dim: np.cumsum(x, dim) if x.ndim else x,
    accumulations=lambda x, dim: x.shape[dim] if x.ndim else 0,
    magnitude=lambda x, dim: np.cumsum(np.abs(x), dim) if x.ndim else np.abs(x),
    torch=lambda torch, x, dim: torch.cumsum(x, dim),
    errors=(
        Error(lambda: _C.cumsum(f32(2, 3), 2), I, r"cumsum: dim must be in \[-2, 1\], got 2"),
        Error(lambda: _C.cumsum("no", 0), T, r"cumsum: input must be a Tensor, got str"),  # pyright: ignore[reportArgumentType]  (refused)
    ),
)


# ---- checksums -------------------------------------------------------------------------------------------------------


def checksum(x: np.ndarray, dtype: str) -> int:
    """Of the elements as `dtype`: the sum that csrc/contract/optimizer.h defines."""
    if dtype == "bfloat16":
        raw = (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        raw = np.asarray(x, dtype).tobytes()
    words = np.frombuffer(raw + bytes(-len(raw) % 8), "<u8")
    z = words + np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (len(raw) + int((z ^ z >> np.uint64(31)).sum(dtype=np.uint64))) % 2**64


def checksum_cases(kind: Any) -> list[Case]:
    """Lists of one tensor up to more than a launch takes; pieces, words and pairs of words that are cut off."""
    several = [kind(*shape) for shape in ((3,), (), (0,), (5, 7), (1, 257), (1,))]
    cases = [case(kind(n)) for n in (2, 0, 1, 7, 8, 33)] + [case(), case(kind()), case(*several, repeats=300)]
    return [*cases, case(kind(129, 523), kind(16384), kind(70001), big=True)]


for name in (*FLOATS, *INTS, "bool"):
    op(
        "checksums",
        "checksums",
        checksum_cases(N if name in FLOATS else Bools if name == "bool" else lambda *shape: Ids(-1000, 1000, *shape)),
        lambda *tensors, repeats=1: _C.checksums(list(tensors) * repeats),
        lambda *arrays, name=name, repeats=1: np.array([checksum(x, name) for x in arrays] * repeats, np.uint64),
        variant=name,
        dtypes=(name,),
        nondiff=True,
        out_dtype="int64",
        errors=(
            Error(lambda: _C.checksums(f32(2)), T, r"checksums: tensors must .*Tensor"),  # pyright: ignore[reportArgumentType]  (refused)
            Error(
                lambda: _C.checksums([f32(2), _C.empty((2,), _C.float32, "meta")]),
                V,
                r"checksums: every tensor must be on the device of tensors\[0\], \w+.*, got meta:0",
            ),
        )
        if name == "float32"
        else (),
    )
