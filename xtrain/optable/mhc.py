"""Entries of the op table: hyper-connections (mhc_pre, sinkhorn, mhc_post, and the two halves of a whole layer).

Parameters and coefficients are float32 whatever the streams are: in the 16-bit formats the calls widen them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import _C
from .references import sigmoid
from .table import Error, N, Spec, T, U, V, case, f32, i64, op

# ---- references ------------------------------------------------------------------------------------------------------


def mhc_pre(
    x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any = None, norm_eps: float = 1e-6, hc_eps: float = 1e-6
) -> list[Any]:
    """h_in, h_post and h_res as the formulas have them, token by token."""
    n, c = x.shape[-2:]
    v = x.reshape(*x.shape[:-2], n * c)
    r = 1 / np.sqrt((v * v).mean(-1, keepdims=True) + norm_eps)
    q = r * ((v if gamma is None else v * gamma.reshape(-1)) @ phi.T)
    z = np.repeat(alpha, (n, n, n * n)) * q + bias
    h_pre = sigmoid(z[..., :n]) + hc_eps
    h_res = z[..., 2 * n :].reshape(*x.shape[:-1], n)
    return [(h_pre[..., None] * x).sum(-2), 2 * sigmoid(z[..., n : 2 * n]), h_res]


def sinkhorn(z: Any, iters: int = 20, eps: float = 1e-6, form: str = "P", transpose: bool = False) -> Any:
    """A matrix of numbers after `iters` normalisations of its columns and rows."""
    if form == "P":
        a = np.exp(z - z.max(-2, keepdims=True, initial=-np.inf))
    else:
        a = np.exp(z - z.max(-1, keepdims=True, initial=-np.inf))
        a = a / a.sum(-1, keepdims=True) + eps
    for stage in range(2 * iters - (form == "D")):
        a = a / (a.sum(-1 if stage % 2 else -2, keepdims=True) + eps)
    return np.swapaxes(a, -1, -2) if transpose else a


def mhc_post(x: Any, y: Any, h_post: Any, h_res: Any) -> Any:
    """The streams mixed, and y added to each."""
    return h_res @ x + h_post[..., None] * y[..., None, :]


# ---- calls: everything but the streams is widened --------------------------------------------------------------------


def wide(t: Any) -> Any:
    return t if t.dtype is _C.float64 else _C.cast(t, _C.float32)


def call_pre(x: Any, *parameters: Any, **options: Any) -> tuple[Any, Any, Any]:
    return _C.mhc_pre(x, *map(wide, parameters), **options)


def call_post(x: Any, y: Any, h_post: Any, h_res: Any) -> Any:
    return _C.mhc_post(x, y, wide(h_post), wide(h_res))


def options_of(kwargs: dict[str, Any]) -> list[Any]:
    return [1e-6, 1e-6, kwargs.get("iters", 20), 1e-6, kwargs.get("form", "P"), kwargs.get("transpose", False)]


def call_given(y: Any, x: Any, *parameters: Any, **options: Any) -> list[Any]:
    """A layer whose output does not depend on its input."""
    h_in, h_post, m, carry = _C.mhc_open(x, *map(wide, parameters), *options_of(options))
    return [h_in, _C.mhc_close(carry, y, h_post, m)]


def call_layer(x: Any, *parameters: Any, **options: Any) -> Any:
    """A nonlinear layer: y = tanh(h_in)."""
    h_in, h_post, m, carry = _C.mhc_open(x, *map(wide, parameters), *options_of(options))
    return _C.mhc_close(carry, _C.tanh(h_in), h_post, m)


def given(y: Any, x: Any, *parameters: Any, **options: Any) -> list[Any]:
    h_in, h_post, h_res = mhc_pre(x, *parameters)
    return [h_in, mhc_post(x, y, h_post, sinkhorn(h_res, **options))]


def layer(x: Any, *parameters: Any, **options: Any) -> Any:
    h_in = mhc_pre(x, *parameters)[0]
    return given(np.tanh(h_in), x, *parameters, **options)[1]


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_wide(torch: Any, t: Any) -> Any:
    return t if t.dtype == torch.float64 else t.float()


def torch_pre(
    torch: Any, x: Any, *parameters: Any, norm_eps: float = 1e-6, hc_eps: float = 1e-6
) -> tuple[Any, Any, Any]:
    phi, alpha, bias, *gamma = (torch_wide(torch, p) for p in parameters)
    n, streams = x.shape[-2], torch_wide(torch, x)
    v = streams.flatten(-2)
    r = torch.rsqrt(v.square().mean(-1, keepdim=True) + norm_eps)
    q = r * torch.nn.functional.linear(v * gamma[0].flatten() if gamma else v, phi)
    z = alpha.repeat_interleave(torch.tensor([n, n, n * n])) * q + bias
    h_pre = z[..., :n].sigmoid() + hc_eps
    h_in = torch.einsum("...i,...ic->...c", h_pre, streams).to(x.dtype)
    return h_in, 2 * z[..., n : 2 * n].sigmoid(), z[..., 2 * n :].unflatten(-1, (n, n))


def torch_sinkhorn(
    torch: Any, z: Any, iters: int = 20, eps: float = 1e-6, form: str = "P", transpose: bool = False
) -> Any:
    a = (z - z.amax(-2, keepdim=True)).exp() if form == "P" else z.softmax(-1) + eps
    for stage in range(2 * iters - (form == "D")):
        a = a / (a.sum(-1 if stage % 2 else -2, keepdim=True) + eps)
    return a.mT if transpose else a


def torch_post(torch: Any, x: Any, y: Any, h_post: Any, h_res: Any) -> Any:
    h_post, h_res = torch_wide(torch, h_post), torch_wide(torch, h_res)
    return (h_res @ x.to(h_res.dtype) + h_post[..., None] * y[..., None, :].to(h_res.dtype)).to(x.dtype)


def torch_given(torch: Any, y: Any, x: Any, *parameters: Any, **options: Any) -> list[Any]:
    h_in, h_post, h_res = torch_pre(torch, x, *parameters)
    return [h_in, torch_post(torch, x, y, h_post, torch_sinkhorn(torch, h_res, **options))]


def torch_layer(torch: Any, x: Any, *parameters: Any, **options: Any) -> Any:
    h_in = torch_pre(torch, x, *parameters)[0]
    return torch_given(torch, h_in.tanh(), x, *parameters, **options)[1]


# ---- cases: (tokens.., n, C), RMS of the streams, deviation of the logits --------------------------------------------

SHAPES: list[tuple[tuple[int, ...], float, float]] = [
    ((5, 4, 6), 1.0, 1.0),
    ((2, 3, 2, 5), 0.1, 1.0),
    ((3, 3, 7), 4.0, 0.3),
    ((1, 1, 3), 1.0, 1.0),
    ((0, 4, 5), 1.0, 1.0),
    ((7, 5, 1), 1.0, 1.0),
    ((17, 8, 9), 0.1, 0.1),
    ((2, 6, 5), 4.0, 1.0),
    ((3, 7, 2), 1.0, 1.0),
    ((33, 4, 33), 4.0, 5.0),
    ((1, 4, 257), 0.1, 3.0),
    ((4, 2, 531), 1.0, 1.0),
    ((18, 4, 24), 0.1, 1.0),  # rows in whole pieces of 16 bytes: tensor cores, on a GPU
    ((17, 2, 40), 4.0, 1.0),
]
WHOLE = ((530, 4, 136), 1.0, 1.0)
BIG = ((257, 4, 150), 4.0, 1.0)


def spread(deviation: float, *shape: int) -> Spec:
    return U(-math.sqrt(3) * deviation, math.sqrt(3) * deviation, *shape)


def inputs(shape: tuple[int, ...], rms: float, deviation: float, gamma: bool = True) -> list[Spec]:
    """x, phi, alpha, bias and gamma; the entries of z get about the deviation asked for."""
    n, c = shape[-2:]
    m = n * n + 2 * n
    specs = [spread(rms, *shape), spread(deviation / math.sqrt(n * c), m, n * c), U(0.5, 1.2, 3), U(-0.3, 0.3, m)]
    return [*specs, U(0.5, 1.5, n, c)] if gamma else specs


def sizes_pre(x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any = None, **options: Any) -> list[Any]:
    """The absolute values added up to h_in, h_post and h_res; errors of z come through the slopes of its sigmoids."""
    n, c = x.shape[-2:]
    h_in = np.abs(mhc_pre(np.abs(x), phi, alpha, bias, gamma, **options)[0])
    v = np.abs(x).reshape(*x.shape[:-2], n * c)
    r = 1 / np.sqrt((v * v).mean(-1, keepdims=True) + options.get("norm_eps", 1e-6))
    z = np.repeat(np.abs(alpha), (n, n, n * n)) * r
    z = z * ((v if gamma is None else v * np.abs(gamma).reshape(-1)) @ np.abs(phi).T) + np.abs(bias)
    slope = 0.25 * (z[..., :n, None] * np.abs(x)).sum(-2)
    return [h_in + slope, 2 + z[..., n : 2 * n], z[..., 2 * n :].reshape(*x.shape[:-1], n)]


def sizes_given(y: Any, x: Any, *parameters: Any, **options: Any) -> list[Any]:
    h_in, _, z = sizes_pre(x, *parameters)
    m = sinkhorn(mhc_pre(x, *parameters)[2], **options) * (1 + 2 * z.max(initial=0.0))
    return [h_in, mhc_post(np.abs(x), np.abs(y), np.full(x.shape[:-1], 4 + z.max(initial=0.0)), m)]


def sizes_layer(x: Any, *parameters: Any, **options: Any) -> list[Any]:
    h_in = sizes_pre(x, *parameters)[0]
    return [sizes_given(h_in, x, *parameters, **options)[1]]


def terms(x: Any, *rest: Any, **options: Any) -> float:
    return math.prod(x.shape[-2:]) / 2 + 24


def bad_pre(**changed: Any) -> Any:
    """mhc_pre of 4 streams of 8 channels with one argument changed."""
    good: dict[str, Any] = dict(x=f32(3, 4, 8), phi=f32(24, 32), alpha=f32(3), bias=f32(24))
    return _C.mhc_pre(**(good | changed))


op(
    "mhc_pre",
    "mhc_pre_fwd mhc_pre_bwd",
    [case(*inputs(*shape)) for shape in SHAPES]
    + [case(*inputs(*SHAPES[0]), norm_eps=0.5, hc_eps=0.25), case(*inputs(*BIG), big=True)]
    + [case(*inputs(*WHOLE), big=True)],
    call_pre,
    mhc_pre,
    torch=torch_pre,
    magnitude=sizes_pre,
    accumulations=terms,
    grad_roundings=6,
    out_dtype="loss",
    errors=(
        Error(lambda: bad_pre(phi=f32(25, 32)), V, r"mhc_pre: phi must have shape \(24, 32\), got \(25, 32\)"),
        Error(lambda: bad_pre(alpha=f32(2)), V, r"mhc_pre: alpha must have shape \(3,\), got \(2,\)"),
        Error(lambda: bad_pre(bias=f32(23)), V, r"mhc_pre: bias must have shape \(24,\), got \(23,\)"),
        Error(lambda: bad_pre(gamma=f32(32)), V, r"mhc_pre: gamma must have shape \(4, 8\), got \(32,\)"),
        Error(lambda: bad_pre(x=f32(3, 5, 8)), V, r"mhc_pre: phi must have shape \(35, 40\), got \(24, 32\)"),
        Error(lambda: bad_pre(x=f32(3, 9, 8)), V, r"mhc_pre: x must have 1 to 8 streams, got 9 in shape \(3, 9, 8\)"),
        Error(lambda: bad_pre(x=f32(3, 4, 0)), V, r"mhc_pre: x must have channels, got shape \(3, 4, 0\)"),
        Error(lambda: bad_pre(x=f32(8)), V, r"mhc_pre: x must have 2 to 8 dimensions, got shape \(8,\)"),
        Error(lambda: bad_pre(x=i64(3, 4, 8)), T, r"mhc_pre: x must have a floating point dtype, got int64"),
        Error(lambda: bad_pre(alpha=i64(3)), T, r"mhc_pre: alpha must have dtype float32, got int64"),
        Error(
            lambda: bad_pre(phi=_C.full((24, 32), 1.0, _C.bfloat16)),
            T,
            r"mhc_pre: phi must have dtype float32, got bfloat16",
        ),
        Error(lambda: bad_pre(norm_eps=-1.0), V, r"mhc_pre: norm_eps must be in \[0, 1\], got -1"),
        Error(lambda: bad_pre(hc_eps=math.nan), V, r"mhc_pre: hc_eps must be in \[0, 1\], got nan"),
    ),
)
op(
    "mhc_pre",
    "mhc_pre_fwd mhc_pre_bwd",
    [case(*inputs(*shape, gamma=False)) for shape in SHAPES],
    call_pre,
    mhc_pre,
    variant="no gamma",
    torch=torch_pre,
    magnitude=sizes_pre,
    accumulations=terms,
    grad_roundings=6,
    out_dtype="loss",
)

SINKHORN = [((3, 4, 4), 1.0), ((2, 3, 2, 2), 5.0), ((5, 3, 3), 0.1), ((8, 8), 1.0), ((0, 4, 4), 1.0), ((1, 1), 1.0)]
SINKHORN += [((17, 5, 5), 3.0), ((2, 6, 6), 1.0), ((3, 7, 7), 1.0), ((33, 4, 4), 5.0)]
for form in ("P", "D"):
    op(
        "sinkhorn",
        "sinkhorn_fwd sinkhorn_bwd",
        [case(spread(deviation, *shape), form=form) for shape, deviation in SINKHORN]
        + [
            case(N(5, 4, 4), form=form, iters=1),
            case(N(5, 3, 3), form=form, iters=2, eps=0.01),
            case(N(5, 4, 4), form=form, iters=3, eps=0.0, transpose=True),
            case(N(3, 4, 4), form=form, iters=100),
            case(U(-40, 40, 5, 4, 4), form=form, fd=False),
            # Some elements vanish between the stages.
            case(U(-43, 43, 33, 7, 7), form=form, iters=40, eps=0.0, fd=False),
            case(U(-43, 43, 33, 8, 8), form=form, iters=70, eps=0.0, fd=False),
            case(U(-43, 43, 400, 4, 4), form=form, iters=100, eps=0.0, fd=False),
            case(N(4097, 4, 4), form=form, transpose=True, big=True),
        ],
        _C.sinkhorn,
        sinkhorn,
        variant=form,
        dtypes=("float64", "float32"),
        torch=torch_sinkhorn,
        accumulations=lambda z, iters=20, **_: (2 * iters + 8) * (z.shape[-1] + 4) + 8 * np.abs(z).max(initial=0.0),
        errors=()
        if form == "D"
        else (
            Error(lambda: _C.sinkhorn(f32(2, 4, 4), iters=0), V, r"sinkhorn: iters must be at least 1, got 0"),
            Error(lambda: _C.sinkhorn(f32(2, 4, 4), form="Q"), V, r"sinkhorn: form must be 'P' or 'D', got 'Q'"),
            Error(lambda: _C.sinkhorn(f32(2, 4, 4), eps=-1.0), V, r"sinkhorn: eps must be in \[0, 1\], got -1"),
            Error(
                lambda: _C.sinkhorn(f32(2, 4, 5)), V, r"sinkhorn: logits must be square matrices, got shape \(2, 4, 5\)"
            ),
            Error(lambda: _C.sinkhorn(f32(9, 9)), V, r"sinkhorn: logits must have 1 to 8 streams, got 9"),
            Error(lambda: _C.sinkhorn(f32(4)), V, r"sinkhorn: logits must have 2 to 8 dimensions, got shape \(4,\)"),
            Error(
                lambda: _C.sinkhorn(_C.full((4, 4), 1.0, _C.bfloat16)),
                T,
                r"sinkhorn: logits must have dtype float32 or float64, got bfloat16",
            ),
            Error(lambda: _C.sinkhorn(i64(4, 4)), T, r"sinkhorn: logits must have .*float32.*int64"),
        ),
    )


def bad_post(**changed: Any) -> Any:
    """mhc_post of 4 streams of 8 channels with one argument changed."""
    good: dict[str, Any] = dict(x=f32(3, 4, 8), y=f32(3, 8), h_post=f32(3, 4), h_res=f32(3, 4, 4))
    return _C.mhc_post(**(good | changed))


def post_inputs(shape: tuple[int, ...], rms: float) -> list[Spec]:
    *tokens, n, c = shape
    return [spread(rms, *shape), N(*tokens, c), U(0.0, 2.0, *tokens, n), U(0.0, 1.0, *tokens, n, n)]


op(
    "mhc_post",
    "mhc_post_fwd mhc_post_bwd",
    [case(*post_inputs(shape, rms)) for shape, rms, _ in SHAPES] + [case(*post_inputs(*BIG[:2]), big=True)],
    call_post,
    mhc_post,
    torch=torch_post,
    magnitude=lambda x, y, h_post, h_res: mhc_post(np.abs(x), np.abs(y), h_post, h_res),
    accumulations=lambda x, *_: x.shape[-2] + 4,
    errors=(
        Error(lambda: bad_post(y=f32(3, 9)), V, r"mhc_post: y must have shape \(3, 8\), got \(3, 9\)"),
        Error(lambda: bad_post(h_post=f32(3, 5)), V, r"mhc_post: h_post must have shape \(3, 4\), got \(3, 5\)"),
        Error(lambda: bad_post(h_res=f32(3, 4, 5)), V, r"mhc_post: h_res must have shape \(3, 4, 4\), got \(3, 4, 5\)"),
        Error(lambda: bad_post(h_post=i64(3, 4)), T, r"mhc_post: h_post must have dtype float32, got int64"),
        Error(
            lambda: bad_post(h_res=_C.full((3, 4, 4), 1.0, _C.float64)),
            T,
            r"mhc_post: h_res must have dtype float32, got float64",
        ),
        Error(
            lambda: bad_post(y=_C.full((3, 8), 1.0, _C.bfloat16)), T, r"mhc_post: y must have .*float32, got bfloat16"
        ),
        Error(lambda: bad_post(x=f32(3, 9, 8)), V, r"mhc_post: x must have 1 to 8 streams, got 9"),
        Error(
            lambda: bad_post(x=f32(3, 4, 0), y=f32(3, 0)), V, r"mhc_post: x must have channels, got shape \(3, 4, 0\)"
        ),
    ),
)

LAYER = [{}, {"form": "D"}, {"form": "D", "transpose": True}, {"form": "P", "iters": 3, "transpose": True}]
LAYER_KERNELS = "mhc_pre_fwd mhc_pre_bwd sinkhorn_fwd sinkhorn_bwd mhc_post_fwd mhc_post_bwd"
op(
    "mhc_open",
    LAYER_KERNELS,
    [
        case(N(*shape[:-2], shape[-1]), *inputs(shape, rms, deviation), **LAYER[i % 4])
        for i, (shape, rms, deviation) in enumerate(SHAPES)
    ],
    call_given,
    given,
    torch=torch_given,
    magnitude=sizes_given,
    accumulations=lambda y, x, *_, **__: terms(x) + 60,
    grad_roundings=8,
    out_dtype="loss",
    errors=(
        Error(
            lambda: _C.mhc_open(f32(3, 4, 8), f32(24, 32), f32(3), f32(24), iters=0),
            V,
            r"mhc_open: iters must be at least 1, got 0",
        ),
        Error(
            lambda: _C.mhc_open(f32(3, 4, 8), f32(25, 32), f32(3), f32(24)),
            V,
            r"mhc_open: phi must have shape \(24, 32\), got \(25, 32\)",
        ),
    ),
)
op(
    "mhc_close",
    LAYER_KERNELS,
    [case(*inputs(*shape), **LAYER[i % 4]) for i, shape in enumerate(SHAPES)]
    + [case(*inputs(*shape), big=True) for shape in (BIG, WHOLE)],
    call_layer,
    layer,
    torch=torch_layer,
    magnitude=sizes_layer,
    accumulations=lambda x, *_, **__: terms(x) + 60,
    roundings=4,
    grad_roundings=8,
    errors=(
        Error(
            lambda: _C.mhc_close(f32(3, 4, 8), f32(3, 8), f32(3, 4), f32(3, 5, 5)),
            V,
            r"mhc_close: h_res must have shape \(3, 4, 4\), got \(3, 5, 5\)",
        ),
    ),
)
