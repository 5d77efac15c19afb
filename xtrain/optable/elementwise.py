"""Entries of the op table: elementwise functions, arithmetic with broadcasting, reductions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from .. import _C
from .references import erf, gelu, sigmoid
from .table import (
    INTS,
    TAILS,
    Apart,
    Away,
    Bools,
    Case,
    Distinct,
    Error,
    I,
    Ids,
    N,
    T,
    Ties,
    U,
    V,
    case,
    elementwise_cases,
    f32,
    i64,
    op,
    same_torch,
)

# ---- elementwise, one input ------------------------------------------------------------------------------------------

Wide = N


def Kinked(*shape: int) -> Any:
    return Apart(0.1, 3.0, *shape)


def Positive(*shape: int) -> Any:
    return U(0.3, 3.0, *shape)


def absolute(x: Any) -> Any:
    return np.abs(x)


UNARY: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "neg": (Wide, np.negative, dict(accumulations=0)),
    "abs": (Kinked, np.abs, dict(accumulations=0)),
    "exp": (Wide, np.exp, {}),
    "log": (Positive, np.log, {}),
    "sqrt": (Positive, np.sqrt, {}),
    "rsqrt": (Positive, lambda x: 1 / np.sqrt(x), {}),
    "reciprocal": (Away, lambda x: 1 / x, {}),
    "sin": (Wide, np.sin, {}),
    "cos": (Wide, np.cos, {}),
    "tanh": (Wide, np.tanh, {}),
    "sigmoid": (Wide, sigmoid, {}),
    "relu": (Kinked, lambda x: np.maximum(x, 0), dict(accumulations=0)),
    "erf": (Wide, erf, {}),
    "silu": (Wide, lambda x: x * sigmoid(x), dict(torch=lambda torch, x: torch.nn.functional.silu(x))),
    # x * (1 + erf(..)) cancels for negative x: the error is one of |x|, not of |gelu(x)|
    "gelu": (Wide, gelu, dict(magnitude=absolute, torch=lambda torch, x: torch.nn.functional.gelu(x))),
}
for name, (kind, reference, options) in UNARY.items():
    op(
        name,
        "unary unary_bwd",
        elementwise_cases(kind),
        getattr(_C, name),
        reference,
        **{"torch": same_torch(name), **options},
        errors=(Error(lambda f=name: getattr(_C, f)("no"), T, rf"{name}: input must be a Tensor, got str"),),
    )
op(
    "gelu",
    "unary unary_bwd",
    [case(*c.inputs, approximate="tanh", big=c.big) for c in elementwise_cases(N)],
    _C.gelu,
    lambda x, approximate: gelu(x, tanh=True),
    variant="tanh",
    magnitude=lambda x, **_: np.abs(x),
    torch=lambda torch, x, approximate: torch.nn.functional.gelu(x, approximate=approximate),
    errors=(Error(lambda: _C.gelu(f32(2), "fast"), V, r"gelu: approximate must .*none.*tanh.*fast"),),
)
for name in ("neg", "abs"):
    op(
        name,
        "unary",
        [case(Ids(-9, 9, 3, 33)), case(Ids(-9, 9))],
        getattr(_C, name),
        UNARY[name][1],
        variant="int",
        dtypes=("int64", "int32"),
        torch=same_torch(name),
    )

# ---- elementwise, two inputs, broadcasting ---------------------------------------------------------------------------


def floor(torch: Any, a: Any, b: Any) -> Any:
    return torch.div(a, b, rounding_mode="floor")


BINARY: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "add": (N, N, np.add, dict(accumulations=0, magnitude=lambda a, b: np.abs(a) + np.abs(b))),
    "sub": (N, N, np.subtract, dict(accumulations=0, magnitude=lambda a, b: np.abs(a) + np.abs(b))),
    "mul": (N, N, np.multiply, dict(accumulations=0)),
    "div": (N, Away, np.divide, dict(accumulations=1)),
    "pow": (
        Positive,
        N,
        np.power,
        dict(grad_roundings=10, magnitude=lambda a, b: np.abs(a**b) * (1 + np.abs(b * np.log(a)))),
    ),
    # torch.floor_divide has no derivative
    "floor_divide": (N, Away, np.floor_divide, dict(accumulations=0, torch=lambda torch, a, b: floor(torch, a, b))),
    "remainder": (N, Away, np.remainder, dict(accumulations=1, magnitude=lambda a, b: np.abs(a) + np.abs(b))),
    "maximum": (N, N, np.maximum, dict(accumulations=0)),
    "minimum": (N, N, np.minimum, dict(accumulations=0)),
}
DIVISIONS = ("floor_divide", "remainder")
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def binary_cases(a: Any, b: Any) -> list[Case]:
    broadcasts = [
        ((2, 3), (2, 3)),
        ((2, 1, 3), (4, 1)),
        ((), (3,)),
        ((5,), ()),
        ((1,), (1,)),
        ((0,), (1,)),
        ((3, 0), (1, 0)),
        ((2, 3, 4), (3, 1)),
    ]
    tails = [((n,), (n,)) for n in TAILS] + [((3, n), (n,)) for n in (31, 33)]
    return [case(a(*x), b(*y)) for x, y in broadcasts + tails] + [
        case(a(129, 523), b(523), big=True),
        case(a(129, 523), b(129, 523), big=True),
    ]


def binary_errors(name: str) -> tuple[Error, ...]:
    f = getattr(_C, name)
    return (
        Error(lambda: f(f32(3), f32(4)), V, rf"{name}: .*\(3,\).*\(4,\)"),
        Error(lambda: f(f32(2, 3), f32(3, 2)), V, rf"{name}: .*\(2, 3\).*\(3, 2\)"),
        Error(lambda: f(f32(3), "x"), T, rf"{name}: other must be .*got .*str"),
        Error(lambda: f(f32(3)), T, rf"{name}: .*other"),
    )


for name, (a, b, reference, options) in BINARY.items():
    cases = binary_cases(a, b)
    if name in DIVISIONS:  # which jump: no difference quotients but where the quotient stays between 2.08 and 2.9
        cases = [replace(c, fd=False) for c in cases] + [case(U(5.2, 5.8, 3, 33), U(2.0, 2.5, 33))]
    op(
        name,
        "binary unary",
        cases,
        getattr(_C, name),
        reference,
        **{"torch": same_torch(name), **options},
        errors=binary_errors(name),
    )
    if name not in ("div", *DIVISIONS):
        small = (lambda *s: Ids(0, 5, *s)) if name == "pow" else (lambda *s: Ids(0, 11, *s))
        op(
            name,
            "binary",
            [case(small(3, 33), small(33)), case(small(2), small(2)), case(small(0), small(0))],
            getattr(_C, name),
            reference,
            variant="int",
            dtypes=INTS,
            torch=same_torch(name),
        )
for name in DIVISIONS:
    op(
        name,
        "binary",
        [case(Ids(0, 99, 3, 33), Ids(1, 11, 33)), case(Ids(0, 99, 2), Ids(1, 5, 2)), case(Ids(0, 9, 0), Ids(1, 9, 0))],
        getattr(_C, name),
        BINARY[name][2],
        variant="int",
        dtypes=INTS,
        torch=same_torch(name),
        errors=(
            Error(lambda f=getattr(_C, name): f(_C.full((2,), 1, _C.bool), True), T, rf"{name}: bool tensors cannot"),
        ),
    )
    op(  # both signs; by 0, too, where PyTorch refuses
        name,
        "binary",
        [case(Ids(-50, 50, 3, 33), Ids(-4, 4, 33)), case(Ids(-50, 50, 257), Ids(-4, 4, 257))],
        getattr(_C, name),
        BINARY[name][2],
        variant="signs",
        dtypes=("int64", "int32"),
    )
for name in ("maximum", "minimum"):
    op(
        name,
        "binary",
        [case(Ties(5, 33), Ties(5, 33), fd=False)],
        getattr(_C, name),
        BINARY[name][2],
        variant="ties",
        torch=same_torch(name),
    )
for name, reference in COMPARE.items():
    op(
        name,
        "binary",
        [c for c in binary_cases(Ties, Ties)],
        getattr(_C, name),
        reference,
        out_dtype="bool",
        torch=same_torch(name),
        errors=binary_errors(name),
    )
    op(
        name,
        "binary",
        [case(Ids(0, 4, 5, 33), Ids(0, 4, 33))],
        getattr(_C, name),
        reference,
        variant="int",
        dtypes=INTS,
        out_dtype="bool",
        torch=same_torch(name),
    )
for name, value in [
    ("add", 1.5),
    ("sub", 2),
    ("mul", -0.25),
    ("div", 3.0),
    ("pow", 3),
    ("pow", 0.5),
    ("floor_divide", 0.375),
    ("remainder", -0.7),
    ("maximum", 0.2),
    ("minimum", -0.2),
]:
    a, _, reference, options = BINARY[name]
    op(
        name,
        "binary",
        [
            *(
                case(a(*shape), fd=name not in DIVISIONS, big=shape == (129, 523))
                for shape in ((2, 3), (), (0,), (257,), (129, 523))
            ),
            *([case(U(2.2 * abs(value), 2.8 * abs(value), 3, 33))] if name in DIVISIONS else []),  # between two jumps
        ],
        lambda x, f=getattr(_C, name), v=value: f(x, v),
        lambda x, f=reference, v=value: f(x, float(v)),
        variant=f"x,{value}",
        torch=lambda torch, x, n=name, v=value: (
            floor(torch, x, v)
            if n == "floor_divide"
            else getattr(torch, n)(x, v)
            if n in ("add", "sub", "mul", "div", "pow", "remainder")
            else getattr(torch, n)(x, torch.tensor(v, dtype=x.dtype))
        ),
        magnitude=lambda x, f=reference, v=value: np.abs(f(x, float(v))) + (abs(x) + abs(v)),
        accumulations=8,
    )
for name, value in [("sub", 2.0), ("div", 3.0), ("pow", 2.0), ("remainder", 2.5)]:
    op(
        name,
        "binary",
        [
            case(Away(2, 3), fd=name not in DIVISIONS),
            case(Away(257), fd=name not in DIVISIONS),
            *([case(U(value / 2.8, value / 2.2, 3, 33))] if name in DIVISIONS else []),
        ],
        lambda x, f=getattr(_C, name), v=value: f(v, x),
        lambda x, f=BINARY[name][2], v=value: f(v, x),
        variant=f"{value},x",
        torch=lambda torch, x, n=name, v=value: getattr(torch, n)(torch.tensor(v, dtype=x.dtype), x),
        magnitude=lambda x, f=BINARY[name][2], v=value: np.abs(f(v, x)) * 4 + abs(x),
    )

op(
    "where",
    "where",
    [
        *(case(Bools(*s), N(*s), N(*s)) for s in [(2, 3), (), (0,), (1,), *((n,) for n in TAILS)]),
        case(Bools(3, 1), N(4), N(3, 4)),
        case(Bools(129, 523), N(129, 523), N(523), big=True),
    ],
    _C.where,
    np.where,
    accumulations=0,
    torch=same_torch("where"),
    errors=(
        Error(lambda: _C.where(f32(2), f32(2), f32(2)), T, r"where: condition must .*bool.*float32"),
        Error(
            lambda: _C.where(_C.full((2,), True, _C.bool), f32(3), f32(3)),
            V,
            r"where: .*\(2,\).*\(3,\)|where: .*\(3,\).*\(2,\)",
        ),
    ),
)
op(
    "where",
    "where",
    [case(Bools(3, 5), N(3, 5))],
    lambda c, x: _C.where(c, x, 0.5),
    lambda c, x: np.where(c, x, 0.5),
    variant="number",
    torch=lambda torch, c, x: torch.where(c, x, torch.tensor(0.5, dtype=x.dtype)),
    accumulations=0,
)

# ---- reductions ------------------------------------------------------------------------------------------------------


def axis(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, (tuple, list)) else dim


def counted(x: np.ndarray, dim: Any = None, keepdim: bool = False) -> float:
    axes = range(x.ndim) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return max(1, math.prod(x.shape[d] for d in axes)) + 2


def reduce_cases(kind: Any, empty: bool) -> list[Case]:
    cases = [
        case(kind(2, 3, 4)),
        case(kind(2, 3, 4), dim=1),
        case(kind(2, 3, 4), dim=-1, keepdim=True),
        case(kind(2, 3, 4), dim=(0, 2)),
        case(kind()),
        case(kind(1, 1), dim=0),
        case(kind(0, 3), dim=1),
        case(kind(5, 257), dim=0),
        case(kind(257, 5), dim=0, keepdim=True),
        *(case(kind(n)) for n in TAILS),
        *(case(kind(3, n), dim=1) for n in TAILS),
        case(kind(301, 523), big=True),
        case(kind(301, 523), dim=0, big=True),
        case(kind(301, 523), dim=1, big=True),
    ]
    return cases + ([case(kind(0)), case(kind(2, 0), dim=1)] if empty else [])


def reduce_errors(name: str) -> tuple[Error, ...]:
    f = getattr(_C, name)
    dims = () if name == "argmax" else (Error(lambda: f(f32(2, 3), (0, 0)), V, rf"{name}: dim .*0"),)
    return (
        Error(lambda: f(f32(2, 3), 2), I, rf"{name}: dim must .*-2.*1.*got 2"),
        Error(lambda: f(f32(2, 3), -3), I, rf"{name}: dim must .*got -3"),
        Error(lambda: f(f32(2, 3), "a"), T, rf"{name}: dim must .*str"),
        *dims,
    )


for name, reference, scale in [("sum", np.sum, np.sum), ("mean", np.mean, np.mean)]:
    op(
        name,
        "reduce",
        reduce_cases(N, empty=name == "sum"),
        getattr(_C, name),
        lambda x, dim=None, keepdim=False, f=reference: f(x, axis=axis(dim), keepdims=keepdim),
        accumulations=counted,
        magnitude=lambda x, dim=None, keepdim=False, f=scale: f(np.abs(x), axis=axis(dim), keepdims=keepdim),
        torch=same_torch(name),
        errors=reduce_errors(name),
    )
op(
    "mean",
    "reduce",
    [case(N(0), fd=False), case(N(2, 0), dim=1, fd=False)],
    _C.mean,
    lambda x, dim=None: np.full(() if dim is None else (2,), np.nan),
    variant="empty",
    torch=same_torch("mean"),
    errors=(Error(lambda: _C.mean(i64(3)), T, r"mean: input must .*float.*int64"),),
)
op(
    "sum",
    "reduce",
    [case(Ids(0, 200, 4, 33)), case(Ids(0, 200, 4, 33), dim=0), case(Ids(0, 200, 0))],
    _C.sum,
    lambda x, dim=None: np.sum(x, axis=dim, dtype=np.int64),
    variant="int",
    dtypes=INTS,
    out_dtype="int64",
    torch=same_torch("sum"),
)
op(
    "sum",
    "reduce",
    [case(Bools(4, 33)), case(Bools(4, 33), dim=1)],
    _C.sum,
    lambda x, dim=None: np.sum(x, axis=dim, dtype=np.int64),
    variant="bool",
    dtypes=("bool",),
    out_dtype="int64",
    torch=same_torch("sum"),
)
for name, reference in [("amax", np.max), ("amin", np.min)]:
    extremum = lambda x, dim=None, keepdim=False, f=reference: f(x, axis=axis(dim), keepdims=keepdim)  # noqa: E731
    to_torch = lambda torch, x, dim=(), keepdim=False, n=name: getattr(torch, n)(x, dim, keepdim)  # noqa: E731
    op(
        name,
        "reduce",
        reduce_cases(Distinct, empty=False),
        getattr(_C, name),
        extremum,
        accumulations=0,
        roundings=0,
        torch=to_torch,
        errors=(
            *reduce_errors(name),
            Error(
                lambda f=getattr(_C, name): f(f32(2, 0), 1), V, rf"{name}: input must have elements along .*\(2, 0\)"
            ),
        ),
    )
    op(
        name,
        "reduce",
        [case(Ties(4, 33), fd=False), case(Ties(4, 33), dim=1, fd=False)],
        getattr(_C, name),
        extremum,
        variant="ties",
        accumulations=0,
        torch=to_torch,
    )
    op(
        name,
        "reduce",
        [case(Ids(-99, 99, 4, 33)), case(Ids(-99, 99, 4, 33), dim=0)],
        getattr(_C, name),
        extremum,
        variant="int",
        dtypes=("int64", "int32"),
        torch=to_torch,
    )
op(
    "argmax",
    "reduce",
    [c for c in reduce_cases(Ties, empty=False) if not isinstance(c.kwargs.get("dim"), tuple)],
    _C.argmax,
    lambda x, dim=None, keepdim=False: np.argmax(x, axis=dim, keepdims=keepdim),
    out_dtype="int64",
    errors=(*reduce_errors("argmax"), Error(lambda: _C.argmax(f32(0)), V, r"argmax: .*")),
)
op(
    "argmax",
    "reduce",
    [case(Distinct(4, 33)), case(Distinct(4, 33), dim=0), case(Distinct(4, 33), dim=-1, keepdim=True)],
    _C.argmax,
    lambda x, dim=None, keepdim=False: np.argmax(x, axis=dim, keepdims=keepdim),
    variant="distinct",
    out_dtype="int64",
    torch=same_torch("argmax"),
)
