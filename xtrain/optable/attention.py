"""Entries of the op table: attention."""

from __future__ import annotations

from typing import Any

from .. import _C
from ..functional import document_bounds
from .references import attention, attention_scale
from .table import Case, Error, N, T, V, case, f32, i64, op

# (q shape, kv shape) as (B, H, S, D)

SDPA = [
    ((2, 2, 3, 4), (2, 2, 3, 4)),
    ((1, 1, 1, 1), (1, 1, 1, 1)),
    ((2, 6, 5, 8), (2, 2, 5, 8)),
    ((1, 2, 33, 24), (1, 1, 33, 24)),
    ((1, 1, 31, 2), (1, 1, 31, 2)),
    ((0, 2, 3, 4), (0, 2, 3, 4)),
    ((2, 2, 3, 4), (2, 2, 7, 4)),
]


def sdpa_cases(**kwargs: Any) -> list[Case]:
    return [case(N(*q), N(*kv), N(*kv), enable_gqa=q[1] != kv[1], **kwargs) for q, kv in SDPA]


def torch_sdpa(
    torch: Any, q: Any, k: Any, v: Any, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    lengths: Any = None, window: int | None = None,
) -> Any:  # fmt: skip
    mask = torch_mask(torch, q, k, is_causal, lengths, window)
    is_causal = is_causal and mask is None
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def torch_mask(torch: Any, q: Any, k: Any, is_causal: bool, lengths: Any, window: int | None) -> Any:
    """PyTorch's mask of the keys that each query sees; None where it needs none."""
    mask = None
    if is_causal and q.shape[2] != k.shape[2]:  # PyTorch aligns its triangle to the first key, xtrain to the last
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    if lengths or window:
        mask = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)
        if is_causal:
            mask = mask.tril(k.shape[2] - q.shape[2]).triu(k.shape[2] - q.shape[2] - (window or k.shape[2]) + 1)
        if lengths:
            document = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths])
            mask &= (document[:, :, None] == document[:, None]).unsqueeze(1)
    return mask


# Head dims 64, 96 and 128 reach the kernels of a GPU's copy engine: tiles of 64 to 192 rows and their tails, one query,
# several heads of queries to one of keys. More keys reach kernels that are chosen from 1024 (causal), 2048 and 4097
# keys on.
BIG = [
    ((3, 6, 130, 32), (3, 2, 130, 32), True),
    ((1, 2, 1, 64), (1, 2, 65, 64), False),
    ((1, 4, 193, 64), (1, 2, 193, 64), True),
    ((2, 2, 66, 96), (2, 1, 129, 96), True),
    ((1, 2, 140, 128), (1, 1, 140, 128), True),
    ((1, 2, 65, 128), (1, 2, 130, 128), False),
    ((1, 2, 70, 64), (1, 1, 2100, 64), True),
    ((1, 2, 200, 64), (1, 1, 2100, 64), False),
    ((1, 2, 70, 128), (1, 1, 4200, 128), True),
]
ATTENTION_BIG = [
    case(N(*q), N(*kv), N(*kv), is_causal=causal, enable_gqa=q[1] != kv[1], big=True) for q, kv, causal in BIG
]
op(
    "scaled_dot_product_attention",
    "copy",
    sdpa_cases(is_causal=True) + sdpa_cases() + sdpa_cases(is_causal=True, scale=0.3)[:3] + ATTENTION_BIG,
    _C.scaled_dot_product_attention,
    attention,
    selects="attention",
    strided="close",
    accumulations=lambda q, k, v, **_: q.shape[-1] + k.shape[2] + 16,
    roundings=3,
    grad_roundings=8,
    magnitude=attention_scale,
    torch=torch_sdpa,
    errors=(
        Error(
            lambda: _C.scaled_dot_product_attention(f32(2, 2, 3, 4), f32(2, 2, 3, 5), f32(2, 2, 3, 5)),
            V,
            r"scaled_dot_product_attention: key must .*4.*\(2, 2, 3, 5\)|scaled_dot_product_attention: key .*5",
        ),
        Error(
            lambda: _C.scaled_dot_product_attention(f32(2, 4, 3, 4), f32(2, 2, 3, 4), f32(2, 2, 3, 4)),
            V,
            r"scaled_dot_product_attention: .*enable_gqa.*",
        ),
        Error(
            lambda: _C.scaled_dot_product_attention(f32(2, 3, 3, 4), f32(2, 2, 3, 4), f32(2, 2, 3, 4), enable_gqa=True),
            V,
            r"scaled_dot_product_attention: .*3.*2|scaled_dot_product_attention: .*2.*3",
        ),
        Error(
            lambda: _C.scaled_dot_product_attention(f32(2, 3, 4), f32(2, 3, 4), f32(2, 3, 4)),
            V,
            r"scaled_dot_product_attention: query must .*4.*",
        ),
        Error(
            lambda: _C.scaled_dot_product_attention(f32(2, 2, 3, 4), f32(2, 2, 3, 4), f32(2, 2, 5, 4)),
            V,
            r"scaled_dot_product_attention: value must .*",
        ),
        Error(
            lambda: _C.scaled_dot_product_attention(f32(1, 1, 2, 2), f32(1, 1, 2, 2), f32(1, 1, 2, 2), backend="magic"),
            V,
            r".*backend.*magic",
        ),
        Error(
            lambda: _C.scaled_dot_product_attention(
                f32(1, 1, 2, 2), f32(1, 1, 2, 2), _C.full((1, 1, 2, 2), 1.0, _C.float64)
            ),
            T,
            r"scaled_dot_product_attention: value must .*float32.*float64",
        ),
        Error(
            lambda: _C.scaled_dot_product_attention(i64(1, 1, 2, 2), i64(1, 1, 2, 2), i64(1, 1, 2, 2)),
            T,
            r"scaled_dot_product_attention: query must .*float.*int64",
        ),
    ),
)

# ---- documents and windows: (q shape, kv shape), lengths, options ----------------------------------------------------

# Documents of one token, of the whole row and across tiles of 16, 64 and 128 rows; windows of one key, within a tile
# and over several.
_SEEN: list[tuple[tuple[int, ...], tuple[int, ...], Any, dict[str, Any]]] = [
    ((2, 2, 9, 4), (2, 2, 9, 4), ((3, 1, 5), (9,)), {}),
    ((2, 2, 9, 4), (2, 2, 9, 4), ((2, 7), (1, 1, 7)), {"is_causal": False}),
    ((2, 6, 9, 8), (2, 2, 9, 8), ((3, 6), (1, 8)), {"window": 2}),
    ((1, 2, 9, 4), (1, 2, 9, 4), None, {"window": 1}),
    ((1, 2, 5, 4), (1, 1, 9, 4), None, {"window": 3}),
    ((0, 2, 3, 4), (0, 2, 3, 4), None, {"window": 2}),
]
_SEEN_BIG: list[tuple[tuple[int, ...], tuple[int, ...], Any, dict[str, Any]]] = [
    ((1, 2, 260, 64), (1, 1, 260, 64), ((1, 63, 65, 128, 3),), {}),
    ((1, 2, 200, 64), (1, 1, 200, 64), ((40, 160),), {"window": 70}),
    ((1, 1, 150, 128), (1, 1, 150, 128), ((50, 100),), {"is_causal": False}),
    ((1, 2, 70, 64), (1, 1, 330, 64), None, {"window": 65}),
    ((1, 4, 200, 128), (1, 2, 200, 128), ((70, 130),), {"window": 90}),
    ((1, 2, 140, 32), (1, 1, 140, 32), ((9, 131),), {}),
]


def _seen_cases(rows: Any, big: bool) -> list[Case]:
    base = {"is_causal": True}
    return [
        case(N(*q), N(*kv), N(*kv), enable_gqa=q[1] != kv[1], lengths=lengths, big=big, **{**base, **options})
        for q, kv, lengths, options in rows
    ]


def _attend(q: Any, k: Any, v: Any, lengths: Any = None, **options: Any) -> Any:
    documents = None if lengths is None else document_bounds(lengths, device=q.device)
    return _C.scaled_dot_product_attention(q, k, v, documents=documents, **options)


def _refused(documents: Any = None, keys: int = 6, causal: bool = True, **options: Any) -> Any:
    def call() -> Any:
        given = None if documents is None else documents()
        q, kv = f32(2, 2, 6, 4), f32(2, 2, keys, 4)
        return _C.scaled_dot_product_attention(q, kv, kv, causal, documents=given, **options)

    return call


_OP = "scaled_dot_product_attention: "
op(
    "scaled_dot_product_attention",
    "copy",
    _seen_cases(_SEEN, False) + _seen_cases(_SEEN_BIG, True),
    _attend,
    attention,
    variant="documents",
    selects="attention",
    strided="close",
    accumulations=lambda q, k, v, **_: q.shape[-1] + k.shape[2] + 16,
    roundings=3,
    grad_roundings=8,
    magnitude=attention_scale,
    torch=torch_sdpa,
    errors=(
        Error(_refused(window=0), V, _OP + "window must be at least 1, got 0"),
        Error(_refused(window=2, causal=False), V, _OP + "window must be None without is_causal, got 2"),
        Error(_refused(lambda: i64(2, 2, 6)), T, _OP + "documents must have dtype int32, got int64"),
        Error(_refused(lambda: document_bounds([[6]])), V, _OP + r"documents must have shape \(2, 2, 6\), got \(1, "),
        Error(
            _refused(lambda: document_bounds([[6], [6]]), keys=7), V,
            _OP + "documents must be None where query and key differ in length, got 6 and 7 tokens",
        ),
    ),
)  # fmt: skip

# ---- sinks and a softcap: (q shape, kv shape), whether there are sinks, options --------------------------------------

_SINKS: list[tuple[tuple[int, ...], tuple[int, ...], bool, dict[str, Any]]] = [
    ((2, 2, 3, 4), (2, 2, 3, 4), True, {}),
    ((1, 1, 1, 1), (1, 1, 1, 1), True, {"is_causal": False, "scale": 0.3}),
    ((2, 6, 9, 8), (2, 2, 9, 8), True, {"lengths": ((3, 6), (1, 8)), "window": 2, "softcap": 0.7}),
    ((2, 4, 5, 3), (2, 1, 7, 3), True, {"softcap": 30.0}),
    ((1, 2, 33, 24), (1, 1, 33, 24), False, {"is_causal": False, "softcap": 1.5}),
    ((0, 2, 3, 4), (0, 2, 3, 4), True, {"softcap": 1.0}),
]
_SINKS_BIG: list[tuple[tuple[int, ...], tuple[int, ...], bool, dict[str, Any]]] = [
    ((3, 6, 130, 32), (3, 2, 130, 32), True, {}),
    ((2, 4, 193, 64), (2, 2, 193, 64), True, {"window": 70, "softcap": 2.0}),
    ((2, 2, 66, 128), (2, 1, 129, 128), True, {"is_causal": False}),
    ((1, 2, 70, 64), (1, 1, 2100, 64), False, {"softcap": 3.0}),
    ((1, 1, 20, 64), (1, 1, 9000, 64), True, {"softcap": 3.0}),
    ((2, 4, 150, 128), (2, 2, 150, 128), False, {"softcap": 5.0, "lengths": ((70, 80), (1, 149))}),
    ((1, 4, 130, 256), (1, 2, 200, 256), False, {"softcap": 2.0, "is_causal": False, "scale": 0.2}),
    ((1, 2, 201, 256), (1, 1, 201, 256), False, {"softcap": 50.0, "window": 70}),
    ((1, 2, 97, 96), (1, 1, 97, 96), True, {"softcap": 1.0}),
    ((2, 2, 70, 192), (2, 1, 70, 192), False, {"softcap": 4.0}),
    ((2, 2, 100, 32), (2, 1, 90, 32), False, {"softcap": 0.5, "is_causal": False}),
]


def _sinks_cases(rows: Any, big: bool) -> list[Case]:
    base = {"is_causal": True}
    return [
        case(N(*q), N(*kv), N(*kv), *[N(q[1])] * sinks, enable_gqa=q[1] != kv[1], big=big, **{**base, **options})
        for q, kv, sinks, options in rows
    ]


def torch_composed(
    torch: Any, q: Any, k: Any, v: Any, sinks: Any = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, lengths: Any = None, window: int | None = None, softcap: float | None = None,
) -> Any:  # fmt: skip
    """Attention in the steps of its definition, in float32 or float64: PyTorch has no op with sinks or a softcap."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(group, 1) for x in (k, v))
    scores = q.to(wide) @ keys.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    mask = torch_mask(torch, q, k, is_causal, lengths, window or k.shape[2])
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ values).to(q.dtype)


def _attend_sinks(q: Any, k: Any, v: Any, sinks: Any = None, **options: Any) -> Any:
    return _attend(q, k, v, sinks=sinks, **options)


def _with_sinks(reference: Any) -> Any:
    return lambda q, k, v, sinks=None, **options: reference(q, k, v, sinks=sinks, **options)


def _no_softcap(value: float) -> Error:
    return Error(_refused(softcap=value), V, _OP + f"softcap must be positive and finite in float32, got {value:g}")


op(
    "scaled_dot_product_attention",
    "copy attention_sinks_fwd attention_sinks_bwd",
    _sinks_cases(_SINKS, False) + _sinks_cases(_SINKS_BIG, True),
    _attend_sinks,
    _with_sinks(attention),
    variant="sinks",
    selects="attention",
    strided="close",
    accumulations=lambda q, k, v, *_, **__: q.shape[-1] + k.shape[2] + 16,
    roundings=4,  # out is rounded before the sink has its share, too
    grad_roundings=8,
    magnitude=_with_sinks(attention_scale),
    torch=torch_composed,
    errors=(
        *(_no_softcap(value) for value in (0.0, -1.0, float("nan"), float("inf"))),
        Error(lambda: _refused(sinks=f32(3))(), V, _OP + r"sinks must have shape \(2,\), got \(3,\)"),
        Error(lambda: _refused(sinks=f32(2, 1))(), V, _OP + r"sinks must .*1.*\(2, 1\)|sinks must have shape \(2,\)"),
        Error(lambda: _refused(sinks=_C.full((2,), 1.0, _C.float64))(), T, _OP + "sinks must .*float32.*float64"),
        Error(
            lambda: _refused(sinks=_C.full((2,), 1.0, _C.float32, "meta"))(), V, _OP + "sinks must .*meta",
        ),
    ),
)  # fmt: skip
