"""Entries of the op table: matrix products, layers, attention."""

from __future__ import annotations

import numpy as np

from .. import _C
from .references import cross_entropy, gelu, swiglu
from .table import (
    TAILS,
    Error,
    I,
    Ids,
    N,
    T,
    U,
    V,
    case,
    f32,
    i64,
    op,
    same_torch,
)

# ---- matrix products -------------------------------------------------------------------------------------------------

MATMUL = [
    ((2, 3), (3, 4)),
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((5, 2, 3), (3, 4)),
    ((2, 1, 2, 3), (4, 3, 2)),
    ((1, 1), (1, 1)),
    ((0, 3), (3, 4)),
    ((2, 0), (0, 4)),
    ((2, 3), (3, 0)),
    ((0, 2, 3), (0, 3, 4)),
    ((31, 33), (33, 32)),
    ((3, 5, 33), (33, 1)),
    ((1, 257), (257, 33)),
    ((33, 257), (257, 31)),
]
op(
    "matmul",
    "copy",
    [case(N(*a), N(*b)) for a, b in MATMUL]
    + [case(N(257, 300), N(300, 265), big=True), case(N(6, 65, 64), N(6, 64, 129), big=True)],
    _C.matmul,
    np.matmul,
    accumulations=lambda a, b: a.shape[-1] + 2,
    magnitude=lambda a, b: np.abs(a) @ np.abs(b),
    torch=same_torch("matmul"),
    selects="gemm",
    strided="close",
    errors=(
        Error(lambda: _C.matmul(f32(2, 3), f32(4, 5)), V, r"matmul: .*\(2, 3\).*\(4, 5\)|matmul: .*3.*4"),
        Error(lambda: _C.matmul(f32(), f32(3)), V, r"matmul: .*\(\)|matmul: input .*0"),
        Error(lambda: _C.matmul(f32(2, 2, 3), f32(3, 3, 4)), V, r"matmul: .*"),
        Error(
            lambda: _C.matmul(f32(2, 3), _C.full((3, 4), 1.0, _C.float64)), T, r"matmul: other must .*float32.*float64"
        ),
        Error(lambda: _C.matmul(f32(2, 3), f32(3, 4), backend="magic"), V, r".*backend.*magic.*"),
        Error(lambda: _C.matmul(f32(2, 3), 5), T, r"matmul: other must .*int"),  # pyright: ignore[reportArgumentType]  (refused)
        Error(lambda: _C.matmul(i64(2, 3), i64(3, 2)), T, r"matmul: input must .*float.*int64"),
    ),
)
LINEAR = [
    ((2, 3), (4, 3)),
    ((2, 5, 3), (4, 3)),
    ((3,), (4, 3)),
    ((0, 3), (4, 3)),
    ((2, 0), (4, 0)),
    ((1, 1), (1, 1)),
    ((33, 31), (257, 31)),
    ((2, 17, 33), (32, 33)),
]
op(
    "linear",
    "copy",
    [case(N(*x), N(*w)) for x, w in LINEAR] + [case(N(4, 65, 128), N(300, 128), big=True)],
    _C.linear,
    lambda x, w: x @ w.T,
    accumulations=lambda x, w: x.shape[-1] + 2,
    magnitude=lambda x, w: np.abs(x) @ np.abs(w).T,
    torch=lambda torch, x, w: torch.nn.functional.linear(x, w),
    selects="gemm",
    strided="close",
    errors=(
        Error(
            lambda: _C.linear(f32(2, 3), f32(4, 5)),
            V,
            r"linear: the last dim of input must be 5, as .*\(4, 5\) is, got shape \(2, 3\)",
        ),
        Error(lambda: _C.linear(f32(2, 3), f32(3)), V, r"linear: weight must .*2.*"),
        Error(lambda: _C.linear(f32(2, 3), f32(4, 3), f32(5)), V, r"linear: bias must .*\(4,\).*\(5,\)"),
        Error(
            lambda: _C.linear(f32(2, 3), _C.full((4, 3), 1.0, _C.bfloat16)),
            T,
            r"linear: weight must .*float32.*bfloat16",
        ),
        Error(lambda: _C.linear(f32(), f32(4, 3)), V, r"linear: input must .*"),
    ),
)
op(
    "linear",
    "copy binary reduce",
    [case(N(*x), N(*w), N(w[0])) for x, w in LINEAR],
    _C.linear,
    lambda x, w, b: x @ w.T + b,
    variant="bias",
    accumulations=lambda x, w, b: x.shape[-1] + 2,
    roundings=2,
    magnitude=lambda x, w, b: np.abs(x) @ np.abs(w).T + np.abs(b),
    torch=lambda torch, x, w, b: torch.nn.functional.linear(x, w, b),
    selects="gemm",
    strided="close",
)

JOINED = [(x, (w, (w[0] + 3, w[1]), (1, w[1]))) for x, w in LINEAR]
JOINED_ERRORS = (
    Error(lambda: _C.linear_joined(f32(2, 3), []), V, r"linear_joined: weights must .*1 to 8.*0"),
    Error(lambda: _C.linear_joined(f32(2, 3), [f32(4, 3)] * 9), V, r"linear_joined: weights must .*1 to 8.*9"),
    Error(
        lambda: _C.linear_joined(f32(2, 3), [f32(4, 3), f32(4, 5)]), V, r"linear_joined: .*weight must .*3.*\(4, 5\)"
    ),
    Error(lambda: _C.linear_joined(f32(2, 3), [f32(3)]), V, r"linear_joined: .*weight must .*2.*"),
    Error(
        lambda: _C.linear_joined(f32(2, 3), [f32(4, 3), _C.full((4, 3), 1.0, _C.bfloat16)]),
        T,
        r"linear_joined: .*weight must .*float32.*bfloat16",
    ),
    Error(lambda: _C.linear_joined(f32(), [f32(4, 3)]), V, r"linear_joined: input must .*"),
    Error(lambda: _C.linear_joined(i64(2, 3), [i64(4, 3)]), T, r"linear_joined: input must .*float.*int64"),
)
for variant, place in (("", _C.pack), ("apart", list)):  # weights that lie together, and others
    op(
        "linear_joined",
        "copy",
        [case(N(*x), *(N(*one) for one in w)) for x, w in JOINED]
        + [case(N(4, 65, 128), N(200, 128), N(100, 128), big=True)],
        lambda x, *w, place=place: _C.linear_joined(x, list(place(w))),
        lambda x, *w: x @ np.concatenate(w).T,
        variant=variant,
        accumulations=lambda x, *w: x.shape[-1] + 2,
        magnitude=lambda x, *w: np.abs(x) @ np.abs(np.concatenate(w)).T,
        torch=lambda torch, x, *w: torch.nn.functional.linear(x, torch.cat(w)),
        selects="gemm",
        strided="close",
        errors=() if variant else JOINED_ERRORS,
    )

JOINED_BIAS_ERRORS = (
    Error(
        lambda: _C.linear_joined(f32(2, 3), [f32(4, 3)] * 2, [f32(4)]),
        V,
        r"linear_joined: biases must .*weight, 2.*got 1",
    ),
    Error(
        lambda: _C.linear_joined(f32(2, 3), [f32(4, 3)], [f32(5)]),
        V,
        r"linear_joined: every bias must .*\(4,\).*\(5,\)",
    ),
    Error(
        lambda: _C.linear_joined(f32(2, 3), [f32(4, 3)], [_C.full((4,), 1.0, _C.bfloat16)]),
        T,
        r"linear_joined: every bias must .*float32.*bfloat16",
    ),
)
for variant, place, place_biases in (
    ("bias", _C.pack, _C.pack),
    ("bias_apart", _C.pack, list),
    ("bias_all_apart", list, list),
):
    op(
        "linear_joined",
        "copy binary reduce",
        [case(N(*x), *(N(*one) for one in w), *(N(one[0]) for one in w)) for x, w in JOINED]
        + [case(N(4, 65, 128), N(200, 128), N(100, 128), N(200), N(100), big=True)],
        lambda x, *w, place=place, place_biases=place_biases: _C.linear_joined(
            x, list(place(w[: len(w) // 2])), list(place_biases(w[len(w) // 2 :]))
        ),
        lambda x, *w: x @ np.concatenate(w[: len(w) // 2]).T + np.concatenate(w[len(w) // 2 :]),
        variant=variant,
        accumulations=lambda x, *w: x.shape[-1] + 2,
        roundings=2,
        magnitude=lambda x, *w: (
            np.abs(x) @ np.abs(np.concatenate(w[: len(w) // 2])).T + np.abs(np.concatenate(w[len(w) // 2 :]))
        ),
        torch=lambda torch, x, *w: torch.nn.functional.linear(
            x, torch.cat(w[: len(w) // 2]), torch.cat(w[len(w) // 2 :])
        ),
        selects="gemm",
        strided="close",
        errors=JOINED_BIAS_ERRORS if variant == "bias" else (),
    )

# an op of three products: y = h d^T, h = silu(x g^T) (x u^T), whose terms are bounded by those of |x| |g|^T |x| |u|^T
SWIGLU_MLP = [case(N(*x), N(*w), N(*w), N(k, w[0])) for (x, w), k in zip(LINEAR[1:5], (1, 5, 2, 3))]
for variant, place in (("", _C.pack), ("apart", list)):
    op(
        "swiglu_mlp",
        "copy swiglu_fwd swiglu_bwd",
        SWIGLU_MLP[:2]
        if variant
        else [*SWIGLU_MLP, case(N(4, 65, 128), N(200, 128), N(200, 128), N(100, 200), big=True)],
        lambda x, g, u, d, place=place: _C.swiglu_mlp(x, *place((g, u)), down=d),
        lambda x, g, u, d: swiglu(x @ g.T, x @ u.T) @ d.T,
        variant=variant,
        accumulations=lambda x, g, u, d: 2 * x.shape[-1] + len(g) + 16,
        roundings=5,  # of gate, up, h and y; the slope of silu is below 1.1
        grad_roundings=12,
        magnitude=lambda x, g, u, d: np.abs(x) @ np.abs(g).T * (np.abs(x) @ np.abs(u).T) @ np.abs(d).T,
        torch=lambda torch, x, g, u, d: (
            lambda linear: linear(torch.nn.functional.silu(linear(x, g)) * linear(x, u), d)
        )(torch.nn.functional.linear),
        selects="gemm",
        strided="close",
        errors=()
        if variant
        else (
            Error(
                lambda: _C.swiglu_mlp(f32(2, 3), f32(4, 5), f32(4, 5), f32(2, 4)),
                V,
                r"swiglu_mlp: the last dim of input must be 5, as .*\(4, 5\) is, got shape \(2, 3\)",
            ),
            Error(
                lambda: _C.swiglu_mlp(f32(2, 3), f32(4, 3), f32(5, 3), f32(2, 4)),
                V,
                r"swiglu_mlp: up must .*\(4, 3\).*\(5, 3\)",
            ),
            Error(
                lambda: _C.swiglu_mlp(f32(2, 3), f32(4, 3), f32(4, 3), f32(4, 2)),
                V,
                r"swiglu_mlp: down must .*\(4, 4\).*\(4, 2\)",
            ),
            Error(lambda: _C.swiglu_mlp(f32(2, 3), f32(4), f32(4), f32(2, 4)), V, r"swiglu_mlp: gate must .*2.*"),
            Error(
                lambda: _C.swiglu_mlp(f32(2, 3), f32(4, 3), f32(4, 3), _C.full((2, 4), 1.0, _C.bfloat16)),
                T,
                r"swiglu_mlp: down must .*float32.*bfloat16",
            ),
            Error(
                lambda: _C.swiglu_mlp(i64(2, 3), i64(4, 3), i64(4, 3), i64(2, 4)),
                T,
                r"swiglu_mlp: input must .*float.*int64",
            ),
        ),
    )

# ---- per-token layers ------------------------------------------------------------------------------------------------

op(
    "embedding",
    "embedding_fwd embedding_bwd",
    [
        case(Ids(0, 7, 2, 5), N(7, 3)),
        case(Ids(0, 7), N(7, 3)),
        case(Ids(0, 7, 0), N(7, 3)),
        case(Ids(0, 1, 4), N(1, 1)),
        case(Ids(0, 3, 33), N(3, 33)),
        case(Ids(0, 50, 3, 31), N(50, 257)),
        case(Ids(7, 10, 3, 31), N(900, 5)),  # few of many ids
        case(Ids(0, 2000, 3), N(2000, 1)),
        case(Ids(0, 211, 4, 300), N(211, 64), big=True),
    ],
    _C.embedding,
    lambda ids, w: w[ids],
    accumulations=0,
    roundings=0,
    torch=lambda torch, ids, w: torch.nn.functional.embedding(ids, w),
    errors=(
        Error(
            lambda: _C.embedding(_C.tensor(np.array([[0, 1], [7, 2]])), f32(7, 3)),
            I,
            r"embedding: id must be in \[0, 7\), got 7 at position 2",
        ),
        Error(
            lambda: _C.embedding(_C.tensor(np.array([0, 1, -1])), f32(7, 3)),
            I,
            r"embedding: id must be in \[0, 7\), got -1 at position 2",
        ),
        Error(lambda: _C.embedding(f32(2), f32(7, 3)), T, r"embedding: input must .*int.*float32"),
        Error(lambda: _C.embedding(i64(2), f32(7)), V, r"embedding: weight must .*2.*"),
        Error(lambda: _C.embedding(i64(2), i64(7, 3)), T, r"embedding: weight must .*float.*int64"),
    ),
)


SWIGLU = [(2, 3), (5,), (), (0, 4), (2, 3, 4), *((n,) for n in TAILS), (3, 33)]
op(
    "swiglu",
    "swiglu_fwd swiglu_bwd",
    [case(N(*s), N(*s)) for s in SWIGLU if s != ()] + [case(N(301, 523), N(301, 523), big=True)],
    _C.swiglu,
    swiglu,
    grad_roundings=6,
    torch=lambda torch, g, u: torch.nn.functional.silu(g) * u,
    errors=(
        Error(lambda: _C.swiglu(f32(2, 3), f32(2, 4)), V, r"swiglu: up must .*\(2, 3\).*\(2, 4\)"),
        Error(lambda: _C.swiglu(f32(2, 3)), V, r"swiglu: .*even.*3"),
        Error(lambda: _C.swiglu(f32(2, 4), _C.full((2, 4), 1.0, _C.float16)), T, r"swiglu: up must .*float32.*float16"),
        Error(lambda: _C.swiglu(i64(2, 4)), T, r"swiglu: gate must .*float.*int64"),
    ),
)
op(
    "swiglu",
    "swiglu_fwd swiglu_bwd",
    [case(N(*s[:-1], 2 * s[-1])) for s in SWIGLU if s != ()] + [case(N(301, 1046), big=True)],
    _C.swiglu,
    lambda x: swiglu(*np.split(x, 2, -1)),
    variant="halves",
    torch=lambda torch, x: (lambda g, u: torch.nn.functional.silu(g) * u)(*x.chunk(2, -1)),
    grad_roundings=6,
)
BIAS_GELU = [(2, 3), (5,), (0, 4), (2, 3, 4), *((n,) for n in TAILS), *((3, n) for n in TAILS), (2, 33, 16)]
for approximate in ("none", "tanh"):
    op(
        "bias_gelu",
        "bias_gelu_fwd bias_gelu_bwd reduce",
        [case(N(*s), N(s[-1]), approximate=approximate) for s in BIAS_GELU]
        + [case(N(301, 528), N(528), approximate=approximate, big=True)],
        _C.bias_gelu,
        lambda x, b, approximate: gelu(x + b, tanh=approximate == "tanh"),
        variant="" if approximate == "none" else "tanh",
        accumulations=lambda x, b, **_: 12,
        # x + b may cancel, and so may x (1 + erf): the error is one of |x| + |b|
        magnitude=lambda x, b, **_: np.abs(x) + np.abs(b),
        grad_roundings=6,
        torch=lambda torch, x, b, approximate: torch.nn.functional.gelu(x + b, approximate=approximate),
        errors=(
            Error(lambda: _C.bias_gelu(f32(2, 3), f32(2)), V, r"bias_gelu: bias must have shape \(3,\), got \(2,\)"),
            Error(lambda: _C.bias_gelu(f32(), f32(1)), V, r"bias_gelu: input must have 1 to .* dim.*"),
            Error(lambda: _C.bias_gelu(i64(2, 3), i64(3)), T, r"bias_gelu: input must .*float.*int64"),
            Error(
                lambda: _C.bias_gelu(f32(2, 3), _C.full((3,), 1.0, _C.float16)),
                T,
                r"bias_gelu: bias must .*float32.*float16",
            ),
            Error(
                lambda: _C.bias_gelu(f32(2, 3), f32(3), "fast"), V, r"bias_gelu: approximate must .*none.*tanh.*fast"
            ),
        )
        if approximate == "none"
        else (),
    )

# an op of two products: y = h d^T + e, h = gelu(x w^T + b)
GELU_MLP = [((2, 3), 4, 5), ((2, 5, 3), 4, 2), ((3,), 4, 3), ((0, 3), 4, 1), ((33, 31), 257, 32)]
for approximate in ("none", "tanh"):
    op(
        "gelu_mlp",
        "copy bias_gelu_fwd bias_gelu_bwd reduce",
        [
            case(N(*x), N(f, x[-1]), N(f), N(k, f), N(k), approximate=approximate, big=len(x) == 3 and f > 100)
            for x, f, k in (GELU_MLP if approximate == "none" else [*GELU_MLP[:2], ((4, 65, 128), 200, 100)])
        ],
        _C.gelu_mlp,
        lambda x, w, b, d, e, approximate: gelu(x @ w.T + b, tanh=approximate == "tanh") @ d.T + e,
        variant="" if approximate == "none" else "tanh",
        accumulations=lambda x, w, b, d, e, **_: 2 * x.shape[-1] + len(w) + 24,
        roundings=5,  # of the product, h and y; the slope of GELU is below 1.13
        grad_roundings=12,
        magnitude=lambda x, w, b, d, e, **_: (np.abs(x) @ np.abs(w).T + np.abs(b)) @ np.abs(d).T + np.abs(e),
        torch=lambda torch, x, w, b, d, e, approximate: (
            lambda library: library.linear(library.gelu(library.linear(x, w, b), approximate=approximate), d, e)
        )(torch.nn.functional),
        selects="gemm",
        strided="close",
        errors=(
            Error(
                lambda: _C.gelu_mlp(f32(2, 3), f32(4, 5), f32(4), f32(2, 4), f32(2)),
                V,
                r"gelu_mlp: the last dim of input must be 5, as .*\(4, 5\) is, got shape \(2, 3\)",
            ),
            Error(
                lambda: _C.gelu_mlp(f32(2, 3), f32(4, 3), f32(3), f32(2, 4), f32(2)),
                V,
                r"gelu_mlp: bias must have shape \(4,\), got \(3,\)",
            ),
            Error(
                lambda: _C.gelu_mlp(f32(2, 3), f32(4, 3), f32(4), f32(4, 2), f32(4)),
                V,
                r"gelu_mlp: down must .*\(4, 4\).*\(4, 2\)",
            ),
            Error(
                lambda: _C.gelu_mlp(f32(2, 3), f32(4, 3), f32(4), f32(2, 4), f32(4)),
                V,
                r"gelu_mlp: down_bias must have shape \(2,\), got \(4,\)",
            ),
            Error(lambda: _C.gelu_mlp(f32(2, 3), f32(4), f32(4), f32(2, 4), f32(2)), V, r"gelu_mlp: weight must .*2.*"),
            Error(lambda: _C.gelu_mlp(f32(2, 3), f32(4, 3), f32(4), f32(2), f32(2)), V, r"gelu_mlp: down must .*2.*"),
            Error(
                lambda: _C.gelu_mlp(f32(2, 3), f32(4, 3), f32(4), f32(2, 4), _C.full((2,), 1.0, _C.bfloat16)),
                T,
                r"gelu_mlp: down_bias must .*float32.*bfloat16",
            ),
            Error(
                lambda: _C.gelu_mlp(i64(2, 3), i64(4, 3), i64(4), i64(2, 4), i64(2)),
                T,
                r"gelu_mlp: input must .*float.*int64",
            ),
            Error(
                lambda: _C.gelu_mlp(f32(2, 3), f32(4, 3), f32(4), f32(2, 4), f32(2), "fast"),
                V,
                r"gelu_mlp: approximate must .*none.*tanh.*fast",
            ),
        )
        if approximate == "none"
        else (),
    )


def softmax(x: np.ndarray, dim: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(dim, keepdims=True)) if x.size else x
    return e / e.sum(dim, keepdims=True)


op(
    "softmax",
    "softmax_fwd softmax_bwd",
    [
        *(case(N(*s)) for s in [(2, 3), (5,), (2, 3, 4), (0, 4), (1, 1), *((3, n) for n in TAILS)]),
        case(N(2, 3, 4), dim=0),
        case(N(2, 3, 4), dim=1),
        case(N(5, 33), dim=0),
        case(U(-80, 80, 4, 33), fd=False),
        case(N(301, 523), big=True),
    ],
    _C.softmax,
    softmax,
    accumulations=lambda x, dim=-1: x.shape[dim] + 16,
    magnitude=lambda x, dim=-1: softmax(x, dim) * (1 + np.abs(x - (x.max(dim, keepdims=True) if x.size else 0))),
    torch=lambda torch, x, dim=-1: torch.softmax(x, dim),
    errors=(
        Error(lambda: _C.softmax(f32(2, 3), 2), I, r"softmax: dim must .*got 2"),
        Error(lambda: _C.softmax(i64(2, 3)), T, r"softmax: input must .*float.*int64"),
    ),
)

CE = [((4, 7), (4,)), ((1, 1), (1,)), ((3, 31), (3,)), ((5, 33), (5,)), ((3, 257), (3,))]
for reduction in ("mean", "sum", "none"):
    op(
        "cross_entropy",
        "cross_entropy_fwd cross_entropy_bwd",
        [case(N(*x), Ids(0, x[1], *t)) for x, t in CE]
        + [case(N(300, 523), Ids(0, 523, 300), big=True)]
        + ([case(N(0, 4), Ids(0, 4, 0), fd=False)] if reduction != "mean" else []),
        lambda x, t, r=reduction: _C.cross_entropy(x, t, reduction=r),
        lambda x, t, r=reduction: cross_entropy(x, t, reduction=r),
        variant=reduction,
        accumulations=lambda x, t: sum(x.shape) + 16,
        out_dtype="loss",
        magnitude=lambda x, t, r=reduction: cross_entropy(x, t, reduction=r, magnitude=True),
        torch=lambda torch, x, t, r=reduction: torch.nn.functional.cross_entropy(x, t, reduction=r),
    )
op(
    "cross_entropy",
    "cross_entropy_fwd cross_entropy_bwd",
    [case(N(8, 5), Ids(0, 5, 8)), case(N(33, 5), Ids(0, 5, 33)), case(N(8, 5), Ids(0, 5, 8), z_loss=0.1)],
    lambda x, t, **k: _C.cross_entropy(x, t, ignore_index=2, **k),
    lambda x, t, **k: cross_entropy(x, t, ignore_index=2, **k),
    variant="ignored",
    accumulations=lambda x, t, **k: sum(x.shape) + 16,
    out_dtype="loss",
    magnitude=lambda x, t, **k: cross_entropy(x, t, ignore_index=2, magnitude=True, **k),
    torch=lambda torch, x, t, z_loss=0.0: (
        torch.nn.functional.cross_entropy(x, t, ignore_index=2)
        + z_loss * (torch.logsumexp(x if x.dtype == torch.float64 else x.float(), 1) ** 2)[t != 2].mean()
    ),
    errors=(
        Error(
            lambda: _C.cross_entropy(f32(3, 5), _C.tensor(np.array([0, 5, 1]))),
            I,
            r"cross_entropy: target.*1.*5|cross_entropy: target.*5.*1",
        ),
        Error(lambda: _C.cross_entropy(f32(3, 5), _C.tensor(np.array([0, 1, -3]))), I, r"cross_entropy: target.*-3"),
        Error(lambda: _C.cross_entropy(f32(3, 5), i64(4)), V, r"cross_entropy: target must .*\(3,\).*\(4,\)"),
        Error(lambda: _C.cross_entropy(f32(3, 5), f32(3)), T, r"cross_entropy: target must .*int.*float32"),
        Error(lambda: _C.cross_entropy(f32(5), i64(1)), V, r"cross_entropy: .*"),
        Error(
            lambda: _C.cross_entropy(f32(3, 5), i64(3), reduction="total"), V, r"cross_entropy: reduction must .*total"
        ),
        Error(lambda: _C.cross_entropy(i64(3, 5), i64(3)), T, r"cross_entropy: input must .*float.*int64"),
    ),
)
