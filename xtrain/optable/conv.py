"""Entries of the op table: convolutions in one dimension."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _C
from ..tensors.convolution import both_sides
from .references import sigmoid
from .table import Case, Error, N, Spec, T, V, case, f32, i64, op

# ---- references: the sums, tap by tap --------------------------------------------------------------------------------


def conv1d(
    x: Any, w: Any, bias: Any = None, stride: int = 1, padding: Any = 0, dilation: int = 1, groups: int = 1
) -> np.ndarray:
    """y[b, o, t] = bias[o] + the sum of weight times what the taps see of the padded row."""
    batch, channels, length = x.shape
    out, width, kernel = w.shape
    front, behind = both_sides("conv1d", padding, kernel, stride, dilation)
    padded = np.concatenate([np.zeros((batch, channels, front)), x, np.zeros((batch, channels, behind))], 2)
    places = (length + front + behind - dilation * (kernel - 1) - 1) // stride + 1
    y = np.zeros((batch, out, places)) + (0 if bias is None else bias[:, None])
    for g in range(groups):
        rows = slice(g * out // groups, (g + 1) * out // groups)
        for k in range(kernel):
            seen = padded[:, g * width : (g + 1) * width, k * dilation :][:, :, : (places - 1) * stride + 1 : stride]
            y[:, rows] += np.einsum("oc,bct->bot", w[rows, :, k], seen)
    return y


def before_silu(x: Any, w: Any, *rest: Any, state: Any = None) -> np.ndarray:
    """x [B, S, C], w [C, K] and perhaps a bias: each channel with its last K inputs."""
    taps, steps = w.shape[1], x.shape[1]
    before = np.zeros((x.shape[0], taps - 1, x.shape[2])) if state is None else state
    seen = np.concatenate([before, x], 1)
    z = np.zeros(x.shape) + (rest[0] if rest else 0)
    return z + sum((w[:, k] * seen[:, k : k + steps] for k in range(taps)), np.zeros(x.shape))


def causal(x: Any, w: Any, *bias: Any, activation: str | None = None, state: Any = None) -> np.ndarray:
    z = before_silu(x, w, *bias, state=state)
    return z * sigmoid(z) if activation else z


def causal_step(x: Any, w: Any, state: Any, *bias: Any, activation: str | None = None) -> list[np.ndarray]:
    return [causal(x, w, *bias, activation=activation, state=state), np.concatenate([state, x], 1)[:, x.shape[1] :]]


def causal_size(x: Any, w: Any, *bias: Any, activation: str | None = None, state: Any = None) -> np.ndarray:
    """The absolute values added up to z, the sum before silu, times 1.1: the largest slope of silu."""
    del activation
    before = None if state is None else np.abs(state)
    return 1.1 * before_silu(np.abs(x), np.abs(w), *map(np.abs, bias), state=before)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_conv1d(torch: Any, x: Any, w: Any, bias: Any = None, padding: Any = 0, **options: Any) -> Any:
    if padding == "causal":
        x, padding = torch.nn.functional.pad(x, (options.get("dilation", 1) * (w.shape[2] - 1), 0)), 0
    return torch.nn.functional.conv1d(x, w, bias, padding=padding, **options)


def torch_causal(torch: Any, x: Any, w: Any, *bias: Any, activation: str | None = None, state: Any = None) -> Any:
    """In the accumulator's format and rounded once, as here."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    before = torch.zeros(x.shape[0], w.shape[1] - 1, x.shape[2]) if state is None else state
    seen = torch.cat([before.to(wide), x.to(wide)], 1).transpose(1, 2)
    if not x.numel():
        return x * 1 + 0 * w.sum() + 0 * sum(b.sum() for b in bias)
    z = torch.nn.functional.conv1d(seen, w.to(wide).unsqueeze(1), *(b.to(wide) for b in bias), groups=x.shape[2])
    return (torch.nn.functional.silu(z) if activation else z).transpose(1, 2).to(x.dtype)


def torch_step(torch: Any, x: Any, w: Any, state: Any, *bias: Any, activation: str | None = None) -> list[Any]:
    y = torch_causal(torch, x, w, *bias, activation=activation, state=state)
    return [y, torch.cat([state, x], 1)[:, x.shape[1] :]]


# ---- entries ---------------------------------------------------------------------------------------------------------


def sides(x: Any, w: Any, bias: Any = None, padding: Any = 0, **options: Any) -> Any:
    """The arguments of the core: padding in front and behind."""
    front, behind = both_sides("conv1d", padding, w.shape[2], options.get("stride", 1), options.get("dilation", 1))
    return _C.conv1d(x, w, bias, padding=front, padding_behind=behind, **options)


def shapes(batch: int, channels: int, length: int, out: int, kernel: int, groups: int = 1) -> tuple[Spec, ...]:
    return N(batch, channels, length), N(out, channels // groups, kernel), N(out)


CONV1D: list[Case] = [
    case(*shapes(2, 4, 10, 6, 3)),
    case(*shapes(2, 4, 11, 6, 3, 2), stride=2, padding=1, dilation=2, groups=2),
    case(*shapes(1, 6, 13, 6, 4, 6), padding="causal", groups=6),
    case(*shapes(3, 6, 17, 12, 5, 3), stride=3, padding=2, dilation=2, groups=3),
    case(*shapes(2, 8, 9, 5, 1)),  # the columns are the input
    case(*shapes(2, 3, 4, 5, 7), padding=3),  # the kernel is longer than the row
    case(*shapes(2, 3, 5, 4, 4), padding="same", dilation=3),
    case(*shapes(0, 4, 10, 6, 3)),
    case(*shapes(1, 1, 1, 1, 1)),
    case(*shapes(2, 2, 33, 4, 2), stride=40, padding=5),
    case(*shapes(2, 5, 1030, 5, 3, 5), stride=2, padding=1, groups=5),  # more than one block of a row
]
CONV1D_ERRORS = (
    Error(lambda: _C.conv1d(f32(2, 3), f32(4, 3, 2)), V, r"conv1d: input must have 3 dim.*\(2, 3\)"),
    Error(lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3)), V, r"conv1d: weight must have 3 dim.*\(4, 3\)"),
    Error(lambda: _C.conv1d(i64(1, 3, 5), i64(4, 3, 2)), T, r"conv1d: input must .*float.*int64"),
    Error(
        lambda: _C.conv1d(f32(1, 3, 5), _C.full((4, 3, 2), 1.0, _C.float16)),
        T,
        r"conv1d: weight must .*float32.*float16",
    ),
    Error(lambda: _C.conv1d(f32(1, 3, 5), f32(4, 2, 2)), V, r"conv1d: weight must have 3 channels.*\(4, 2, 2\)"),
    Error(
        lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3, 2), groups=2),
        V,
        r"conv1d: groups must divide the channels of input, 3, got 2",
    ),
    Error(
        lambda: _C.conv1d(f32(1, 4, 5), f32(3, 2, 2), groups=2),
        V,
        r"conv1d: groups must divide the outputs of weight, 3, got 2",
    ),
    Error(
        lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3, 4), padding=1, dilation=3),
        V,
        r"conv1d: the kernel must fit into the padded row of 6, got 4 taps with dilation 3",
    ),
    Error(lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3, 0)), V, r"conv1d: weight must have a tap, .*\(4, 3, 0\)"),
    Error(lambda: _C.conv1d(f32(1, 3, 0), f32(4, 3, 1)), V, r"conv1d: the kernel must fit .* 0, got 1 taps"),
    Error(lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3, 2), f32(3)), V, r"conv1d: bias must .*\(4,\).*\(3,\)"),
    Error(lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3, 2), stride=0), V, r"conv1d: stride must be at least 1, got 0"),
    Error(lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3, 2), padding=-1), V, r"conv1d: padding must be at least 0, got -1"),
    Error(
        lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3, 2), dilation=2**62),
        V,
        r"conv1d: dilation must be at most 2\^40, got 4611686018427387904",
    ),
    Error(
        lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3, 2), padding_behind=-1),
        V,
        r"conv1d: padding must be at least 0, got -1",
    ),
    *(
        Error(
            lambda name=name: _C.conv1d(f32(1, 3, 5), f32(4, 3, 2), **{name: 2**41}),
            V,
            rf"conv1d: {name.removesuffix('_behind')} must be at most 2\^40, got {2**41}",
        )
        for name in ("stride", "padding", "padding_behind", "groups")
    ),
    Error(
        lambda: _C.conv1d(f32(1, 3, 6), f32(4, 3, 4), dilation=2, stride=3),
        V,
        r"conv1d: the kernel must fit into the padded row of 6, got 4 taps with dilation 2",
    ),
    Error(
        lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3, 2), _C.full((4,), 1.0, _C.float64)),
        T,
        r"conv1d: bias must .*float32.*float64",
    ),
    Error(lambda: _C.conv1d(f32(1, 3, 5), f32(4, 3, 2), algorithm="magic"), V, r"conv1d: algorithm must .*'magic'"),
)
for variant, kernels, selects in (
    ("direct", "conv1d_fwd conv1d_bwd reduce", None),
    ("products", "conv1d_columns conv1d_fold copy reduce", "gemm"),
):
    op(
        "conv1d",
        kernels,
        [*CONV1D, case(*shapes(3, 24, 700, 20, 5, 4), padding=2, groups=4, big=True)],
        lambda x, w, b, algorithm=variant, **options: sides(x, w, b, algorithm=algorithm, **options),
        conv1d,
        variant=variant,
        accumulations=lambda x, w, b, **_: w[0].size + 2,
        magnitude=lambda x, w, b, **options: conv1d(np.abs(x), np.abs(w), np.abs(b), **options),
        torch=torch_conv1d,
        selects=selects,
        errors=CONV1D_ERRORS if variant == "direct" else (),
    )
op(
    "conv1d",
    "conv1d_fwd conv1d_bwd conv1d_columns conv1d_fold",
    [case(*c.inputs[:2], **c.kwargs) for c in CONV1D[:4]],
    sides,
    conv1d,
    variant="chosen",
    accumulations=lambda x, w, **_: w[0].size + 2,
    magnitude=lambda x, w, **options: conv1d(np.abs(x), np.abs(w), **options),
    torch=torch_conv1d,
    selects="gemm",
)

CAUSAL = [(2, 5, 3, 4), (1, 1, 136, 4), (2, 70, 7, 3), (1, 40, 264, 2), (1, 65, 33, 8), (2, 2, 5, 6), (1, 10, 4, 1)]
CAUSAL += [(0, 3, 4, 4), (2, 0, 8, 4), (1, 9, 16, 5), (3, 150, 8, 7), (2, 70, 256, 3)]


def causal_errors(name: str, call: Any) -> tuple[Error, ...]:
    return (
        Error(lambda: call(f32(2, 3), f32(3, 2)), V, rf"{name}: input must have 3 dim.*\(2, 3\)"),
        Error(lambda: call(f32(1, 2, 3), f32(3)), V, rf"{name}: weight must have 2 to 3 dim.*\(3,\)"),
        Error(lambda: call(f32(1, 2, 3), f32(4, 2)), V, rf"{name}: weight must have shape \(3, K\).*got \(4, 2\)"),
        Error(lambda: call(f32(1, 2, 3), f32(3, 2, 2)), V, rf"{name}: weight must have .*\(3, 1, K\).*\(3, 2, 2\)"),
        Error(lambda: call(f32(1, 2, 3), f32(3, 9)), V, rf"{name}: weight must have 1 to 8 taps .*conv1d.*, got 9"),
        Error(lambda: call(f32(1, 2, 3), f32(3, 0)), V, rf"{name}: weight must have 1 to 8 taps .*, got 0"),
        Error(lambda: call(f32(1, 2, 3), f32(3, 2), bias=f32(2)), V, rf"{name}: bias must .*\(3,\).*\(2,\)"),
        Error(
            lambda: call(f32(1, 2, 3), f32(3, 2), bias=_C.full((3,), 1.0, _C.float64)),
            T,
            rf"{name}: bias must .*float32.*float64",
        ),
        Error(
            lambda: call(f32(1, 2, 3), f32(3, 2), activation="gelu"), V, rf"{name}: activation must .*'silu'.*'gelu'"
        ),
        Error(lambda: call(i64(1, 2, 3), i64(3, 2)), T, rf"{name}: input must .*float.*int64"),
        Error(
            lambda: call(f32(1, 2, 3), _C.full((3, 2), 1.0, _C.float64)), T, rf"{name}: weight must .*float32.*float64"
        ),
    )


for variant, activation in (("", None), ("silu", "silu")):
    options: dict[str, Any] = {"activation": activation} if activation else {}
    op(
        "causal_conv1d",
        "causal_conv1d_fwd causal_conv1d_bwd",
        [case(N(b, s, c), N(c, k), N(c), **options) for b, s, c, k in CAUSAL]
        + [case(N(2, 300, 264), N(264, 4), N(264), big=True, **options)],
        _C.causal_conv1d,
        causal,
        variant=variant,
        accumulations=lambda x, w, b, **_: w.shape[1] + 12,
        magnitude=causal_size,
        torch=torch_causal,
        errors=() if variant else causal_errors("causal_conv1d", _C.causal_conv1d),
    )
op(
    "causal_conv1d",
    "causal_conv1d_fwd causal_conv1d_bwd",
    [case(N(2, 5, 8), N(8, 4), activation="silu")],
    lambda x, w, **options: _C.causal_conv1d(x, w.unsqueeze(1), **options),  # Conv1d's weight
    causal,
    variant="no_bias",
    accumulations=lambda x, w, **_: w.shape[1] + 12,
    magnitude=causal_size,
    torch=torch_causal,
)


def step_without_state(x: Any, w: Any, **options: Any) -> Any:
    return _C.causal_conv1d_step(x, w, f32(1, 1, 3) if x.dtype is _C.float32 else x, **options)


op(
    "causal_conv1d_step",
    "causal_conv1d_fwd causal_conv1d_bwd",
    [case(N(b, s, c), N(c, k), N(b, k - 1, c), N(c)) for b, s, c, k in CAUSAL]
    + [case(N(b, s, c), N(c, k), N(b, k - 1, c), N(c), activation="silu") for b, s, c, k in CAUSAL[:6]],
    _C.causal_conv1d_step,
    causal_step,
    accumulations=lambda x, w, *_, **__: w.shape[1] + 12,
    magnitude=lambda x, w, state, bias, **options: [causal_size(x, w, bias, state=state), np.abs(state)],
    torch=torch_step,
    errors=(
        *causal_errors("causal_conv1d_step", step_without_state),
        Error(
            lambda: _C.causal_conv1d_step(f32(1, 2, 3), f32(3, 2), f32(1, 2, 3)),
            V,
            r"causal_conv1d_step: state must have shape \(1, 1, 3\), got \(1, 2, 3\)",
        ),
        Error(
            lambda: _C.causal_conv1d_step(f32(1, 2, 3), f32(3, 2), _C.full((1, 1, 3), 0.0, _C.float16)),
            T,
            r"causal_conv1d_step: state must .*float32.*float16",
        ),
    ),
)
