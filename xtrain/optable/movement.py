"""Entries of the op table: views, copies, casts, cat and split, in-place changes, creation and random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _C
from .references import philox_normal, philox_randint, philox_uniform
from .table import FLOATS, INTS, TAILS, Away, Case, Error, I, N, R, T, Ties, U, V, case, f32, op, same_torch

# ---- views and copies ------------------------------------------------------------------------------------------------

VIEW: dict[str, list[tuple[tuple[int, ...], dict[str, Any], Any]]] = {
    "reshape": [
        ((2, 3, 4), dict(shape=(6, 4)), None),
        ((2, 3, 4), dict(shape=(-1,)), None),
        ((0, 3), dict(shape=(3, 0)), None),
        ((), dict(shape=(1, 1)), None),
    ],
    "view": [
        ((2, 3, 4), dict(shape=(6, 4)), None),
        ((2, 12), dict(shape=(2, -1, 4)), None),
        ((1,), dict(shape=()), None),
    ],
    "transpose": [
        ((2, 3, 4), dict(dim0=0, dim1=2), None),
        ((2, 3), dict(dim0=-1, dim1=-2), None),
        ((3,), dict(dim0=0, dim1=0), None),
    ],
    "permute": [
        ((2, 3, 4), dict(dims=(2, 0, 1)), None),
        ((2, 3, 4), dict(dims=(-1, 0, 1)), None),
        ((), dict(dims=()), None),
    ],
    "expand": [
        ((3, 1), dict(shape=(2, 3, 4)), None),
        ((1,), dict(shape=(0,)), None),
        ((), dict(shape=(3,)), None),
        ((2, 1), dict(shape=(-1, 5)), None),
    ],
    "slice": [
        ((7, 3), dict(dim=0, start=1, stop=6, step=2), None),
        ((7,), dict(dim=0, start=-3, stop=99), None),
        ((7,), dict(dim=0, start=5, stop=2), None),
    ],
    "select": [
        ((4, 3), dict(dim=0, index=2), None),
        ((4, 3), dict(dim=-1, index=-1), None),
        ((1,), dict(dim=0, index=0), None),
    ],
    "unsqueeze": [((2, 3), dict(dim=1), None), ((2, 3), dict(dim=-1), None), ((), dict(dim=0), None)],
    "squeeze": [((2, 1, 3, 1), {}, None), ((2, 1, 3), dict(dim=1), None), ((2, 3), dict(dim=0), None)],
    "clone": [((2, 3), {}, None), ((0,), {}, None), ((), {}, None), ((257,), {}, None)],
    "contiguous": [((2, 3), {}, None), ((33,), {}, None)],
}


def np_slice(x: np.ndarray, dim: int, start: int, stop: int, step: int = 1) -> np.ndarray:
    return np.moveaxis(np.moveaxis(x, dim, 0)[start:stop:step], 0, dim)


VIEW_REFERENCE: dict[str, Any] = {
    "reshape": lambda x, shape: x.reshape(shape),
    "view": lambda x, shape: x.reshape(shape),
    "transpose": lambda x, dim0, dim1: x.swapaxes(dim0, dim1),
    "permute": lambda x, dims: x.transpose(dims),
    "expand": lambda x, shape: np.broadcast_to(
        x, [x.shape[i - len(shape)] if n == -1 else n for i, n in enumerate(shape)]
    ),
    "slice": np_slice,
    "select": lambda x, dim, index: x.take(index, axis=dim),
    "unsqueeze": lambda x, dim: np.expand_dims(x, dim),
    "squeeze": lambda x, dim=None: x.squeeze() if dim is None else x.squeeze(dim) if x.shape[dim] == 1 else x,
    "clone": lambda x: x,
    "contiguous": lambda x: x,
}
VIEW_TORCH: dict[str, Any] = {
    "slice": lambda torch, x, dim, start, stop, step=1: x[
        (slice(None),) * (dim % x.ndim) + (slice(start, stop, step),)
    ],
    "contiguous": lambda torch, x: x.contiguous(),
    "reshape": lambda torch, x, shape: x.reshape(shape),
    "view": lambda torch, x, shape: x.view(shape),
    "expand": lambda torch, x, shape: x.expand(shape),
}
VIEW_ERRORS: dict[str, list[tuple[Any, Any, str]]] = {
    "reshape": [
        (lambda: _C.reshape(f32(2, 3), (4, 2)), V, r"reshape: shape must .*6.*\(4, 2\)|reshape: .*\(4, 2\).*6"),
        (lambda: _C.reshape(f32(2, 3), (-1, -1)), V, r"reshape: shape .*-1"),
        (lambda: _C.reshape(f32(2, 3), (-2, 3)), V, r"reshape: shape .*-2"),
        (lambda: _C.reshape(f32(0), (-1, 0)), V, r"reshape: shape .*"),
        (lambda: _C.reshape(f32(2), (1,) * 8 + (2,)), V, r"reshape: .*8.*9|reshape: .*9.*8"),
    ],
    "view": [(lambda: _C.view(_C.transpose(f32(2, 3), 0, 1), (6,)), V, r"view: .*(stride|reshape|contiguous)")],
    "transpose": [(lambda: _C.transpose(f32(2, 3), 0, 2), I, r"transpose: dim.* must .*got 2")],
    "permute": [
        (lambda: _C.permute(f32(2, 3), (0, 0)), V, r"permute: dims .*0"),
        (lambda: _C.permute(f32(2, 3), (0,)), V, r"permute: dims .*"),
        (lambda: _C.permute(f32(2, 3), (0, 5)), I, r"permute: .*5"),
    ],
    "expand": [
        (lambda: _C.expand(f32(2, 3), (2, 4)), V, r"expand: .*\(2, 4\)|expand: .*4"),
        (lambda: _C.expand(f32(2, 3), (3,)), V, r"expand: .*"),
    ],
    "slice": [
        (lambda: _C.slice(f32(4), 0, 0, 4, 0), V, r"slice: step must .*got 0"),
        (lambda: _C.slice(f32(4), 0, 0, 4, -1), V, r"slice: step must .*got -1"),
        (lambda: _C.slice(f32(4), 1, 0, 4), I, r"slice: dim must .*got 1"),
    ],
    "select": [
        (lambda: _C.select(f32(4, 3), 0, 4), I, r"select: index must .*got 4"),
        (lambda: _C.select(f32(4, 3), 0, -5), I, r"select: index must .*got -5"),
    ],
    "unsqueeze": [
        (lambda: _C.unsqueeze(f32(2), 3), I, r"unsqueeze: dim must .*got 3"),
        (lambda: _C.unsqueeze(f32(*(1,) * 8), 0), V, r"unsqueeze: .*8"),
    ],
    "squeeze": [(lambda: _C.squeeze(f32(2), 3), I, r"squeeze: dim must .*got 3")],
}
for name, rows in VIEW.items():
    op(
        name,
        "copy" if name in ("clone", "contiguous", "reshape") else "",
        [case(N(*shape), **kwargs) for shape, kwargs, _ in rows],
        getattr(_C, name),
        VIEW_REFERENCE[name],
        accumulations=0,
        roundings=0,
        torch=VIEW_TORCH.get(name, same_torch(name)),
        strided="no" if name == "view" else "bits",
        errors=tuple(Error(*e) for e in VIEW_ERRORS.get(name, [])),
    )
op("detach", "", [case(N(2, 3))], _C.detach, lambda x: x, nondiff=True, torch=same_torch("detach"))
op(
    "to_device",
    "",
    [case(N(2, 3))],
    lambda x: _C.to_device(x, _C.device("cpu")),
    lambda x: x,
    torch=lambda torch, x: x.to("cpu"),
    errors=(Error(lambda: _C.to_device(f32(2), "tpu"), V, r".*tpu"),),
)
op(
    "clone",
    "copy",
    [case(N(129, 523), big=True)],
    _C.clone,
    lambda x: x,
    variant="big",
    accumulations=0,
    roundings=0,
    torch=same_torch("clone"),
)

for target in FLOATS:
    op(
        "cast",
        "copy",
        [case(N(*s), fd=target == "float64") for s in [(2, 3), (), (0,), (257,)]],
        lambda x, d=target: _C.cast(x, getattr(_C, d)),
        lambda x: x,
        variant=target,
        out_dtype=target,
        torch=lambda torch, x, d=target: x.to(getattr(torch, d)),
    )
for target in (*INTS, "bool"):
    op(
        "cast",
        "copy",
        [case(U(0, 200, 5, 33)), case(Ties(5, 33))] if target != "uint8" else [case(U(0, 200, 5, 33))],
        lambda x, d=target: _C.cast(x, getattr(_C, d)),
        lambda x, d=target: (x != 0) if d == "bool" else np.trunc(x).astype(d),
        variant=target,
        out_dtype=target,
        torch=lambda torch, x, d=target: x.to(getattr(torch, d)),
        errors=(Error(lambda: _C.cast(f32(2), 3), T, r"cast: .*dtype'? must .*int"),),  # pyright: ignore[reportArgumentType]  (refused)
    )

op(
    "cat",
    "copy",
    [
        case(N(2, 3), N(2, 4), N(2, 0), dim=1),
        case(N(2, 3), N(1, 3), dim=0),
        case(
            N(
                3,
            ),
            N(
                1,
            ),
            dim=-1,
        ),
        case(
            N(
                257,
            ),
            N(
                33,
            ),
            dim=0,
        ),
        case(N(2, 3), dim=0),
        case(N(2, 33, 5), N(2, 31, 5), dim=1),
    ],
    lambda *xs, dim: _C.cat(list(xs), dim),
    lambda *xs, dim: np.concatenate(xs, dim),
    accumulations=0,
    roundings=0,
    torch=lambda torch, *xs, dim: torch.cat(xs, dim),
    errors=(
        Error(lambda: _C.cat([]), V, r"cat: tensors must .*"),
        Error(lambda: _C.cat([f32(2, 3), f32(3, 3)], 1), V, r"cat: .*\(3, 3\)|cat: .*3"),
        Error(lambda: _C.cat([f32(2), f32(2, 2)], 0), V, r"cat: .*"),
        Error(lambda: _C.cat([f32(2), 5], 0), T, r"cat: tensors.* must .*int"),  # pyright: ignore[reportArgumentType]  (refused)
        Error(lambda: _C.cat([f32(2)], 1), I, r"cat: dim must .*got 1"),
    ),
)
op(
    "pack",
    "copy",
    [case(N(2, 3), N(5), N()), case(N(0, 3), N(33, 1)), case(N(1)), case(N(257), N(3, 2, 0), N(31))],
    lambda *x: _C.pack(x),
    lambda *x: list(x),
    accumulations=0,
    roundings=0,
    torch=lambda torch, *x: [one.clone() for one in x],
    errors=(
        Error(lambda: _C.pack([]), V, r"pack: tensors must hold 1 to 64 .*0"),
        Error(lambda: _C.pack([f32(2), _C.full((2,), 0, _C.int64)]), T, r"pack: every tensor must .*float32.*int64"),
    ),
)
op(
    "split",
    "copy",
    [
        case(N(5, 3), split_size=(2, 3), dim=0),
        case(N(5, 3), split_size=2, dim=0),
        case(N(2, 6), split_size=(1, 0, 5), dim=-1),
        case(N(33, 2), split_size=32, dim=0),
    ],
    lambda x, split_size, dim: _C.split(x, split_size, dim),
    lambda x, split_size, dim: np.split(
        x,
        np.cumsum(split_size)[:-1] if isinstance(split_size, tuple) else range(split_size, x.shape[dim], split_size),
        dim,
    ),
    accumulations=0,
    roundings=0,
    torch=lambda torch, x, split_size, dim: torch.split(
        x, list(split_size) if isinstance(split_size, tuple) else split_size, dim
    ),
    errors=(
        Error(lambda: _C.split(f32(5), (2, 2), 0), V, r"split: split_size.* must .*5.*"),
        Error(lambda: _C.split(f32(5), (6, -1), 0), V, r"split: split_size.*-1"),
        Error(lambda: _C.split(f32(5), 0, 0), V, r"split: split_size must .*0"),
        Error(lambda: _C.split(f32(200), 1, 0), V, r"split: .*"),
    ),
)

# ---- in place (no gradients: refused while recording, see test_autograd.py) ------------------------------------------

INPLACE_ERRORS = (
    lambda f: Error(lambda: f(f32(2), f32(3)), V, r"_: .*\(3,\)"),
    lambda f: Error(lambda: f(f32(1), f32(3)), V, r"_: .*"),
    lambda f: Error(
        lambda: f(_C.expand(f32(1), (3,)), 1.0), (V, R), r"_: .*(overlap|expand|repeat|stride|share|several|one place)"
    ),
)
for name, reference in [
    ("copy_", lambda x, y: np.broadcast_to(y, x.shape)),
    ("add_", np.add),
    ("sub_", np.subtract),
    ("mul_", np.multiply),
    ("div_", np.divide),
]:
    f = getattr(_C, name)
    y = Away if name == "div_" else N
    op(
        name,
        "copy" if name == "copy_" else "binary",
        [
            case(N(2, 3), y(2, 3)),
            case(N(2, 3), y(3)),
            case(N(2, 3), y()),
            case(N(0), y(0)),
            case(N(257), y(257)),
            case(N(129, 523), y(523), big=True),
        ],
        lambda x, o, f=f: f(_C.clone(x), o),
        reference,
        nondiff=True,
        accumulations=1,
        magnitude=lambda a, b, f=reference: np.abs(f(a, b)) + np.abs(a) + np.abs(b),
        torch=lambda torch, x, o, n=name: getattr(x.clone(), n)(o),
        errors=tuple(e(f) for e in INPLACE_ERRORS),
    )
    op(
        name,
        "fill" if name == "copy_" else "binary",
        [case(N(2, 3)), case(N(33))],
        lambda x, f=f: f(_C.clone(x), 1.5),
        lambda x, f=reference: f(x, np.array(1.5)),
        variant="number",
        nondiff=True,
        magnitude=lambda x: 2 * np.abs(x) + 1.5,
        torch=lambda torch, x, n=name: getattr(x.clone(), n)(torch.tensor(1.5, dtype=x.dtype)),
    )
op(
    "fill_",
    "fill",
    [case(N(2, 3)), case(N()), case(N(0)), case(N(257)), case(N(129, 523), big=True)],
    lambda x: _C.fill_(_C.clone(x), 1.5),
    lambda x: np.full(x.shape, 1.5),
    nondiff=True,
    torch=lambda torch, x: x.clone().fill_(1.5),
    errors=(Error(lambda: _C.fill_(f32(2), "x"), T, r"fill_: value must .*str"),),  # pyright: ignore[reportArgumentType]  (refused)
)

# ---- creation: no tensor inputs --------------------------------------------------------------------------------------

HUGE = (2**40, 2**40)
CREATE_ERRORS = (
    lambda f, n: Error(
        lambda: f(HUGE), (V, _C.OutOfMemoryError), rf"{n}: .*(overflow|too large|too big|fit|bytes|exceed).*"
    ),
    lambda f, n: Error(lambda: f((2, -1)), V, rf"{n}: .*shape.* must .*-1"),
    lambda f, n: Error(lambda: f((1,) * 9), V, rf"{n}: .*shape.* must .*8.*9"),
    lambda f, n: Error(lambda: f(("a",)), T, rf"{n}: .*shape'? must .*str"),
)


def create(
    name: str, kernels: str, cases: list[Case], call: Any, reference: Any, shaped: Any = None, **options: Any
) -> None:
    errors = tuple(e(shaped, name) for e in CREATE_ERRORS) if shaped else ()
    op(name, kernels, cases, call, reference, nondiff=True, errors=errors + options.pop("errors", ()), **options)


create(
    "empty",
    "",
    [case(shape=(2, 3)), case(shape=(0,)), case(shape=())],
    lambda shape: _C.fill_(_C.empty(shape, _C.float32), 0.0),
    np.zeros,
    lambda s: _C.empty(s),
    out_dtype="float32",
    dtypes=("float32",),
)
for d in (*FLOATS, *INTS, "bool"):
    create(
        "full",
        "fill",
        [case(shape=s) for s in [(2, 3), (), (0,), (257,)]],
        lambda shape, d=d: _C.full(shape, 1, getattr(_C, d)),
        lambda shape, d=d: np.ones(shape, bool if d == "bool" else d if d in INTS else np.float64),
        lambda s: _C.full(s, 1.0, _C.float32),
        variant=d,
        out_dtype=d,
        dtypes=(d,),
    )
for d in (*FLOATS, "int64", "int32", "uint8"):
    ends = [case(start=0, end=5, step=1), case(start=0, end=0, step=1), case(start=1, end=200, step=3)] + (
        [] if d == "uint8" else [case(start=5, end=-5, step=-2)]
    )
    create(
        "arange",
        "arange",
        ends,
        lambda start, end, step, d=d: _C.arange(start, end, step, getattr(_C, d)),
        lambda start, end, step, d=d: np.arange(start, end, step).astype(d if d in INTS else np.float64),
        variant=d,
        out_dtype=d,
        dtypes=(d,),
        torch=lambda torch, start, end, step, d=d: torch.arange(start, end, step, dtype=getattr(torch, d)),
        errors=(
            Error(lambda: _C.arange(0, 5, 0, _C.int64), V, r"arange: step must .*0"),
            Error(lambda: _C.arange(0, 5, -1, _C.int64), V, r"arange: .*-1"),
            Error(lambda: _C.arange(0, float("nan"), 1, _C.float32), V, r"arange: .*nan"),
            Error(lambda: _C.arange(0, 1e300, 1, _C.float32), (V, _C.OutOfMemoryError), r"arange: .*"),
        ),
    )
create(
    "arange",
    "arange",
    [case(start=0.5, end=3.0, step=0.25)],
    lambda start, end, step: _C.arange(start, end, step, _C.float32),
    lambda start, end, step: np.arange(start, end, step),
    variant="fraction",
    out_dtype="float32",
    dtypes=("float32",),
)


def seeded(f: Any) -> Any:
    def call(**kwargs: Any) -> Any:
        _C.manual_seed(1234)
        return f(**kwargs)

    return call


SHAPES = [(2, 3), (), (0,), *((n,) for n in TAILS), (301, 523)]
for d in FLOATS:
    dt = getattr(_C, d)
    create(
        "uniform",
        "random",
        [case(shape=s) for s in SHAPES],
        seeded(lambda shape, dt=dt: _C.uniform(shape, -1.0, 3.0, dt, None)),
        lambda shape: philox_uniform(1234, shape, -1.0, 3.0),
        lambda s: _C.uniform(s, 0.0, 1.0, _C.float32, None),
        variant=d,
        out_dtype=d,
        dtypes=(d,),
        magnitude=lambda shape: np.full(shape, 4.0),
        errors=(
            Error(lambda: _C.uniform((2,), 1.0, 0.0, _C.float32, None), V, r"uniform: .*"),
            Error(lambda: _C.uniform((2,), 0.0, 1.0, _C.int64, None), T, r"uniform: dtype must .*int64"),
        ),
    )
    create(
        "normal",
        "random",
        [case(shape=s) for s in SHAPES],
        seeded(lambda shape, dt=dt: _C.normal(shape, 1.0, 2.0, dt, None)),
        lambda shape: philox_normal(1234, shape, 1.0, 2.0),
        lambda s: _C.normal(s, 0.0, 1.0, _C.float32, None),
        variant=d,
        out_dtype=d,
        dtypes=(d,),
        magnitude=lambda shape: np.abs(philox_normal(1234, shape, 0.0, 2.0)) + 1.0,
        accumulations=8 * 2.0 ** (29 if d == "float64" else 0),
        errors=(Error(lambda: _C.normal((2,), 0.0, -1.0, _C.float32, None), V, r"normal: std must .*-1"),),
    )
for d in INTS:
    create(
        "randint",
        "random",
        [case(shape=s) for s in SHAPES],
        seeded(lambda shape, dt=getattr(_C, d): _C.randint(3, 200, shape, dt, None)),
        lambda shape, d=d: philox_randint(1234, shape, 3, 200).astype(d),
        lambda s: _C.randint(0, 5, s, _C.int64, None),
        variant=d,
        out_dtype=d,
        dtypes=(d,),
        errors=(Error(lambda: _C.randint(5, 5, (2,), _C.int64, None), V, r"randint: .*5"),),
    )
