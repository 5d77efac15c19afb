"""Functions of tensors, with PyTorch's names and arguments. Usually imported as F.

Shapes use B batch, S sequence, C channels, H query heads, K kv heads, D head dim, V vocabulary. All functions are
batched, differentiable unless they say otherwise, deterministic, and take float32, float64, bfloat16 and float16;
statistics and sums are kept in float32 (float64 for float64). A wrong argument raises ValueError or TypeError with one
sentence, an id out of range IndexError.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn, overload

from . import _C
from ._C import Tensor
from ._draw import captured_generator
from ._lazy import absent
from ._types import Size, as_sizes, is_real, need_input, need_tensors
from .tensors.arithmetic import repeat_interleave
from .tensors.convolution import causal_conv1d as causal_conv1d
from .tensors.convolution import conv1d as conv1d
from .tensors.documents import check_bounds as _check_bounds
from .tensors.documents import check_rows as _check_rows
from .tensors.documents import document_bounds as document_bounds
from .tensors.documents import sees as _sees

_linear, _embedding, _rms_norm, _rope = _C.linear, _C.embedding, _C.rms_norm, _C.rope
_swiglu, _softmax, _attention, _cross_entropy = _C.swiglu, _C.softmax, _C.scaled_dot_product_attention, _C.cross_entropy
_gelu, _sample, _linear_cross_entropy, _add_rms_norm, _layer_norm, _add_layer_norm = (
    _C.gelu,
    _C.sample,
    _C.linear_cross_entropy,
    _C.add_rms_norm,
    _C.layer_norm,
    _C.add_layer_norm,
)
_bias_gelu, _dropout = _C.bias_gelu, _C.dropout
# Numbers between these round to neither 0 nor infinity in float32.
_NOTHING, _INFINITE = 2.0**-150, 2.0**128 - 2.0**103
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b.

    input [..., in], weight [out, in], bias [out] or None -> [..., out]. One matrix product over all leading dims.
    """
    return _linear(input, weight, bias)


def embedding(input: Tensor, weight: Tensor) -> Tensor:
    """y[...] = weight[input[...]].

    input: int64 or int32 ids of any shape, weight [V, C] -> [*input.shape, C]. IndexError names the position of an id
    outside [0, V). The gradient of a row adds its occurrences in order, so it is deterministic.
    """
    return _embedding(input, weight)


@overload
def rms_norm(
    input: Tensor, normalized_shape: Size, weight: Tensor | None = None, eps: float | None = None
) -> Tensor: ...
@overload
def rms_norm(input: Tensor, weight: Tensor, eps: float | None = None, /) -> Tensor: ...
def rms_norm(input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dims (Zhang & Sennrich 2019, Root Mean Square Layer
    Normalization).

    input [..., *normalized_shape], weight of normalized_shape or None. The mean is taken in float32 (float64 for
    float64); the quotient is rounded to the input's dtype before the weight, as Hugging Face does. eps None is the
    machine epsilon of the dtype. A tensor in second place is taken as the weight: rms_norm(x, weight, eps).
    """
    if isinstance(normalized_shape, Tensor):
        if weight is not None:
            eps = weight
        weight, normalized_shape = normalized_shape, normalized_shape.shape
    else:
        normalized_shape = as_sizes("rms_norm", normalized_shape)
    need_input("rms_norm", input)
    if eps is None:
        eps = _EPSILON.get(input.dtype.name, 1e-6)
    dims = len(normalized_shape)
    if dims == 1:
        if input.ndim and input.shape[-1] != normalized_shape[0]:
            raise ValueError(
                f"rms_norm: input must end in normalized_shape ({normalized_shape[0]},), got shape {tuple(input.shape)}"
            )
        return _rms_norm(input, weight, eps)
    shape = tuple(input.shape)
    if dims == 0 or shape[-dims:] != tuple(normalized_shape):
        raise ValueError(f"rms_norm: input must end in normalized_shape {tuple(normalized_shape)}, got shape {shape}")
    if weight is not None:
        need_tensors("rms_norm", weight=weight)
        if tuple(weight.shape) != tuple(normalized_shape):
            raise ValueError(f"rms_norm: weight must have shape {tuple(normalized_shape)}, got {tuple(weight.shape)}")
        weight = weight.reshape((-1,))
    return _rms_norm(input.reshape((*shape[:-dims], -1)), weight, eps).reshape(shape)


def layer_norm(
    input: Tensor,
    normalized_shape: Size,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dims (Ba, Kiros & Hinton 2016, Layer
    Normalization).

    input [..., *normalized_shape], weight and bias of normalized_shape or None. The variance is divided by the number
    of elements. Mean and variance are taken in float32 (float64 for float64), and the result is rounded once.
    """
    need_input("layer_norm", input)
    dims = as_sizes("layer_norm", normalized_shape)
    shape = tuple(input.shape)
    if not dims or shape[-len(dims) :] != dims:
        raise ValueError(f"layer_norm: input must end in normalized_shape {dims}, got shape {shape}")
    if len(dims) == 1:
        return _layer_norm(input, weight, bias, eps)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            need_tensors("layer_norm", **{name: vector})
        if vector is not None and tuple(vector.shape) != dims:
            raise ValueError(f"layer_norm: {name} must have shape {dims}, got {tuple(vector.shape)}")
    scale, shift = (None if vector is None else vector.reshape(-1) for vector in (weight, bias))
    return _layer_norm(input.reshape((*shape[: -len(dims)], -1)), scale, shift, eps).reshape(shape)


def add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """(input + residual, rms_norm of that sum over the last dim) in one pass over memory.

    input and residual [..., C], weight [C] or None, all of one dtype -> two tensors of input's shape. The sum is
    rounded to the dtype before the norm: the bits, also of the gradients, are those of `+` and rms_norm one after the
    other. eps None is the machine epsilon of the dtype.
    """
    need_input("add_rms_norm", input)
    return _add_rms_norm(input, residual, weight, _EPSILON.get(input.dtype.name, 1e-6) if eps is None else eps)


def add_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(input + residual, layer_norm of that sum over the last dim) in one pass over memory.

    input and residual [..., C], weight and bias [C] or None, all of one dtype -> two tensors of input's shape. The sum
    is rounded to the dtype before the norm: the bits, also of the gradients, are those of `+` and layer_norm one after
    the other.
    """
    return _add_layer_norm(input, residual, weight, bias, eps)


def rope(
    x: Tensor,
    *,
    theta: float = 10000.0,
    positions: Tensor | None = None,
    period: int | None = None,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_length: float = 0.0,
) -> Tensor:
    """Rotary position embedding, half-split form (Su et al. 2021, RoFormer).

    x [rows, H, D] or [B, S, H, D], D even -> same shape. With a = x[..., :D/2], b = x[..., D/2:] and angle_i = position
    * theta^(-2i/D): y = (a cos - b sin, b cos + a sin). The position of a row is row % period (S of the sequence; in
    the 4-dim form the row's place in its sequence by default), or positions[row] (int64, one per row).

    Longer contexts: with `factor` f alone, angles are divided by f (Chen et al. 2023, position interpolation). With
    original_length L in tokens, as Llama 3.1 does (rope_type "llama3"): the frequencies whose waves are longer than L /
    low_freq_factor are divided by f, those of waves shorter than L / high_freq_factor stay, and between them both are
    mixed. ValueError for a factor or theta that is not positive, and for low_freq_factor >= high_freq_factor.
    """
    return _rope(x, theta, positions, period, factor, low_freq_factor, high_freq_factor, original_length)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float = 1e-6,
    *,
    theta: float = 10000.0,
    positions: Tensor | None = None,
    period: int | None = None,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_length: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """rope(rms_norm(x, D, weight, eps)) of q and of k in one pass over memory.

    q [B, S, H, D] or [rows, H, D], k alike with heads of its own, q_weight and k_weight [D], D even, all of one dtype
    -> two dense tensors of the shapes of q and k. theta, positions, period and scaling as in rope. Rows may lie apart,
    as columns of a joined product do. The normalised tensors are not kept. On the CPU the bits, also of the gradients,
    are those of rms_norm and rope one after the other.
    """
    scaling = factor, low_freq_factor, high_freq_factor, original_length
    return _C.qk_norm_rope(q, k, q_weight, k_weight, eps, theta, positions, period, *scaling)


def silu(input: Tensor) -> Tensor:
    """x * sigmoid(x), elementwise (Hendrycks & Gimpel 2016; Elfwing et al. 2017)."""
    return _C.silu(input)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """x * Phi(x), Phi the normal distribution function (Hendrycks & Gimpel 2016); approximate="tanh" uses the tanh
    formula.
    """
    return _gelu(input, approximate)


def bias_gelu(input: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """gelu(input + bias, approximate) in one pass over memory: a linear layer without its bias, and then this.

    input [..., C], bias [C], of one float dtype -> [..., C]. The sum is not rounded to a 16-bit dtype; in float32 and
    float64 the bits are those of an addition and gelu.
    """
    return _bias_gelu(input, bias, approximate)


def relu(input: Tensor) -> Tensor:
    """max(x, 0), elementwise; the gradient at 0 is 0."""
    return _C.relu(input)


def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), elementwise."""
    return _C.sigmoid(input)


def tanh(input: Tensor) -> Tensor:
    """Hyperbolic tangent, elementwise."""
    return _C.tanh(input)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up (Shazeer 2020, GLU Variants Improve Transformer).

    gate and up [..., F] -> [..., F]. With one tensor [..., 2F] its halves are gate and up.
    """
    return _swiglu(gate, up)


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) / sum exp(x - max) along dim."""
    return _softmax(input, dim)


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    """x - log(sum exp(x)) along dim, shifted by the maximum so that it does not overflow; 16-bit floats are computed in
    float32.
    """
    need_input("log_softmax", input)
    wide = input.float() if input.itemsize < 4 else input
    shifted = wide - wide.detach().amax(dim, True)
    result = shifted - shifted.exp().sum(dim, True).log()
    return result if wide is input else result.to(input.dtype)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale * Q K^T) V per head (Vaswani et al. 2017, Attention Is All You Need).

    query [B, H, Sq, D], key and value [B, K, Skv, D] of any strides -> [B, H, Sq, D]. scale None is 1 / sqrt(D). K must
    be H, or divide H with enable_gqa (grouped queries, Ainslie et al. 2023). is_causal: query i sees keys j <= i + Skv
    - Sq, so the last query sees everything (PyTorch aligns the first query instead; both agree when Sq == Skv).
    backend: a name out of attention_backends(device).

    documents: int32 [B, 2, S], of `document_bounds`, for rows that hold several documents: a token sees its own alone;
    Sq must be Skv. window, with is_causal: a query sees this many keys, itself included (Child et al. 2019, Beltagy et
    al. 2020: sliding windows). ValueError for documents that do not fill their row one behind the other, on a GPU
    at the next wait; and for a window below 1.

    sinks [H], of query's dtype: one more logit of each head in the denominator, learned, with no value (gpt-oss, arXiv
    2508.10925), so that a query may attend to nothing. softcap: a score s becomes softcap * tanh(s / softcap) before
    anything is masked (Gemma 2, arXiv 2408.00118). TypeError for sinks of another dtype, ValueError for another shape
    or device, and for a softcap that is not positive and finite in float32. Every backend takes both; on a GPU "flash"
    of float32 leaves a softcap to "materialized".

    attn_mask, which broadcasts to [B, H, Sq, Skv]: bool, true where a query sees a key, or floats, added to the
    scores; a query that sees no key gets zeros. dropout_p: each weight is 0 with this probability, the others are
    divided by 1 - p (give 0 while evaluating). Both are composed of other functions, in float32 (float64): several
    tensors [B, H, Sq, Skv] are kept for the backward, where is_causal alone keeps none. ValueError for a mask beside
    is_causal, documents or a window.
    """
    if attn_mask is None and not dropout_p:
        return _attention(query, key, value, is_causal, scale, enable_gqa, backend, documents, window, sinks, softcap)
    _check_composed(query, key, value, attn_mask, is_causal, enable_gqa, backend, documents, window, sinks, softcap)
    wide = _C.float64 if query.dtype == _C.float64 else _C.float32
    q, k, v = (x.to(wide) for x in (query, key, value))
    if k.shape[1] != q.shape[1]:
        k, v = (repeat_interleave(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q * (query.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if softcap is not None:
        scores = (scores * (1 / softcap)).tanh() * softcap
    if is_causal or documents is not None:
        attn_mask = _sees(query.shape[2], key.shape[2], is_causal, documents, window, query.device)
    sees = None
    if attn_mask is not None and attn_mask.dtype == _C.bool:
        sees = attn_mask.any(-1, True)
        scores = _C.where(attn_mask | ~sees, scores, -math.inf)
    elif attn_mask is not None:
        sees = (attn_mask > -math.inf).any(-1, True)
        scores = scores + _C.where(sees, attn_mask.to(wide), 0.0)
    if sinks is not None:
        column = sinks.to(wide).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = _C.cat((scores, column), -1)
    weights = _softmax(scores, -1)
    if sinks is not None:
        weights = weights[..., :-1]
    if sees is not None:
        weights = _C.where(sees, weights, 0.0)
    return (dropout(weights, dropout_p) @ v).to(query.dtype)


def _check_composed(
    query: Tensor, key: Tensor, value: Tensor, mask: object, is_causal: bool, enable_gqa: bool, backend: str | None,
    documents: Tensor | None, window: int | None, sinks: Tensor | None, softcap: float | None,
) -> None:  # fmt: skip
    """TypeError or ValueError for arguments of composed attention, as of the op."""
    refuse = _refuse_attention
    batch, heads, rows, cols = _attention_sizes(query, key, value, enable_gqa)
    if backend is not None:
        refuse("backend must be None with attn_mask or dropout_p", repr(backend))
    if documents is not None:
        _check_bounds("scaled_dot_product_attention", documents, batch, rows, name="query", device=query.device)
        if rows != cols:
            refuse("documents must be None where query and key differ in length", f"{rows} and {cols} tokens")
    if window is not None and (window < 1 or not is_causal):
        refuse("window must be at least 1" if window < 1 else "window must be None without is_causal", window)
    if sinks is not None:
        need_tensors("scaled_dot_product_attention", sinks=sinks)
        if sinks.dtype != query.dtype:
            refuse(f"sinks must have the dtype of query, {query.dtype.name}", sinks.dtype.name, TypeError)
        if tuple(sinks.shape) != (heads,):
            refuse(f"sinks must have shape ({heads},)", tuple(sinks.shape))
    if softcap is not None and not _NOTHING < softcap < _INFINITE:
        refuse("softcap must be positive and finite in float32", softcap)
    if mask is not None and documents is not None:
        refuse("attn_mask must be None with documents", "both")
    if mask is not None:
        _check_mask(mask, is_causal, (batch, heads, rows, cols))
    if documents is not None:  # last: a GPU reports it later, and a call that is refused has asked for nothing
        _check_rows(documents)


def _refuse_attention(rule: str, got: object, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"scaled_dot_product_attention: {rule}, got {got}")


def _attention_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, int, int, int]:
    """B, H, Sq and Skv of query [B, H, Sq, D], key and value [B, K, Skv, D]. TypeError or ValueError for tensors that
    are not alike, or do not fit.
    """
    refuse = _refuse_attention
    need_tensors("scaled_dot_product_attention", query=query, key=key, value=value)
    if not query.dtype.is_floating_point:
        refuse("query must have a floating point dtype", query.dtype.name, TypeError)
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            refuse(f"{name} must have the dtype of query, {query.dtype.name}", x.dtype.name, TypeError)
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes):
        refuse("query, key and value must have 4 dims", shapes)
    (batch, heads, rows, width), (_, groups, cols, _), _ = shapes
    if shapes[1] != (batch, groups, cols, width) or shapes[2][:3] != (batch, groups, cols):
        refuse("query, key and value must be [B, H, Sq, D], [B, K, Skv, D] and [B, K, Skv, D]", shapes)
    if groups != heads and not (enable_gqa and groups and heads % groups == 0):
        refuse("key must have query's number of heads, or a divisor of it with enable_gqa", f"{groups} and {heads}")
    return batch, heads, rows, cols


def _check_mask(mask: object, is_causal: bool, most: tuple[int, int, int, int]) -> None:
    """TypeError or ValueError for an attn_mask that is not None; most: B, H, Sq, Skv, to which it broadcasts."""
    refuse = _refuse_attention
    if not isinstance(mask, Tensor):
        refuse("attn_mask must be a Tensor or None", type(mask).__name__, TypeError)
    if is_causal:
        refuse("attn_mask must be None with is_causal", "both")
    if mask.dtype != _C.bool and not mask.dtype.is_floating_point:
        refuse("attn_mask must have dtype bool or a floating one", mask.dtype.name, TypeError)
    shape = tuple(mask.shape)
    if len(shape) > 4 or any(n not in (1, size) for n, size in zip(reversed(shape), reversed(most), strict=False)):
        refuse(f"attn_mask must broadcast to {most}", shape)


def sample(
    logits: Tensor, random: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Draw a token from each row: logits [B, V] -> int64 [B], on the device of logits. No gradient.

    Tokens are ordered by their logits; of equal ones the first comes first. temperature: logits are divided by it; 0
    takes the first in this order. top_k: the first k are left. top_p: of these, the fewest whose probabilities reach
    top_p (Holtzman et al. 2020, nucleus sampling). random: int64 [2], the seed and the step of Philox4x32-10, read on
    the device when the work is done; row b takes block b of the step.

    Probabilities are integers, 2^40 for the most likely token, so that the same tokens are drawn on every device. What
    is 2^-41 times as likely has none. A row with a NaN, or whose largest logit is not finite, gives -1. ValueError for
    options out of range and for V above 2^22.
    """
    return _sample(logits, random, temperature, top_k, top_p)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log softmax(input)[target] per row.

    input [N, V] logits, target [N] int64 or int32 -> scalar for reduction "mean" (over the rows that are not ignored)
    or "sum", [N] for "none". Rows whose target is ignore_index count nothing. IndexError names the position of a target
    outside [0, V). Class weights are refused.

    label_smoothing s in [0, 1]: the loss of a row is (1 - s) times the one above + s times the mean of -log softmax
    over all V (Szegedy et al. 2016, Rethinking the Inception Architecture). It is composed of other functions: two more
    tensors of the logits' shape, in float32 (float64).
    """
    if weight is not None:
        raise NotImplementedError(f"cross_entropy: weight must be None, got {type(weight).__name__}")
    if not label_smoothing:
        return _cross_entropy(input, target, ignore_index, reduction)
    if not (is_real(label_smoothing) and 0.0 <= label_smoothing <= 1.0):
        raise ValueError(f"cross_entropy: label_smoothing must be in [0, 1], got {label_smoothing!r}")
    hard = _cross_entropy(input, target, ignore_index, reduction)
    kept = target != ignore_index
    even = -log_softmax(input.float() if input.itemsize < 4 else input).mean(-1)
    even = _C.where(kept, even, 0.0)
    if reduction != "none":
        even = even.sum()
    if reduction == "mean":
        even = even / kept.sum()
    return hard * (1.0 - label_smoothing) + even * label_smoothing


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    chunk_rows: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """cross_entropy(linear(x, weight), targets): the head of a language model and its loss in one op.

    x [rows, C], weight [V, C] of one dtype, targets [rows] int64 or int32 -> scalar for reduction "mean" (over the rows
    that are not ignored) or "sum", [rows] for "none", in nats; float32 (float64 for float64). Rows whose target is
    ignore_index count nothing; when all are, the mean is NaN. IndexError names the position of a target outside [0, V).

    z_loss: adds z_loss * (log sum exp of the logits)^2 to the loss of a row that counts, which keeps logits from
    drifting (Chowdhery et al. 2022, PaLM, section 5). ValueError for a negative one.

    softcap: a logit z becomes softcap * tanh(z / softcap), in float32 (float64), before anything else (Gemma 2, arXiv
    2408.00118). ValueError for one that is not positive and finite in float32.

    The logits stay inside. Few of them are kept for the backward, which turns them into their own gradient. A second
    backward through the same graph (retain_graph=True) computes them again. On the CPU the bits are those of the two
    functions.

    Many (above 1.25 GiB; from 64 MiB on where that moves fewer bytes) exist chunk_rows rows at a time. None chooses
    even shares of at most 1.25 GiB. A number takes the place of this rule: more rows than that go in chunks of it,
    fewer are kept. If a gradient is needed, the forward makes it with each chunk, in float32 (float64), for the sum of
    the losses, and the backward multiplies it by the upstream gradient and rounds once: so a forward without backward
    should run under no_grad(). The choice follows from sizes and dtype alone. Gradients of "none" are made by the
    backward.
    """
    return _linear_cross_entropy(
        x, weight, targets, ignore_index=ignore_index, reduction=reduction, z_loss=z_loss, chunk_rows=chunk_rows,
        softcap=softcap,
    )  # fmt: skip


def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """x * mask / (1 - p), mask 0 with probability p (Srivastava et al. 2014); x itself when not training or p is 0.

    The mask comes from the default generator: `manual_seed` repeats it on any device. Element i of x is zeroed where
    number i of uniform(x.shape) from the same state is below p. The mask is not kept: the backward makes it again. In
    a captured step (cuda.graph) each replay has the mask of the generator's state then, as an eager step would.
    """
    need_input("dropout", input)
    if not (is_real(p) and 0.0 <= p <= 1.0):
        raise ValueError(f"dropout: p must be in [0, 1], got {p!r}")
    if not training or p == 0.0:
        return input
    captured = captured_generator()
    if captured is None:
        return _dropout(input, p)
    return _dropout(input, p, random=captured.random, offset=captured.next())


# ---- hyper-connections (docs/reference/mhc.md; nn.HyperConnection puts them together) --------------------------------


def mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's input and the coefficients of its hyper-connection, from n residual streams (Xie et al. 2025, mHC:
    Manifold-Constrained Hyper-Connections, equations 14 to 18).

    x [.., n, C] of any float dtype, n in 1..8 -> (h_in [.., C] of x's dtype, h_post [.., n], h_res [.., n, n]). phi
    [n^2 + 2n, n C] (one row an output: n of h_pre, n of h_post, n^2 of h_res row by row), alpha [3], bias [n^2 + 2n],
    gamma [n, C] or None (ones). Parameters and coefficients are float32, for float64 streams float64. For every token,
    with v = x as a vector, stream after stream, and a = alpha for the three blocks of rows:

        r = 1 / sqrt(mean(v^2) + norm_eps)        z = a * (r * phi (v * gamma)) + bias
        h_pre = sigmoid(z_pre) + hc_eps           h_in = sum_j h_pre_j x_j
        h_post = 2 sigmoid(z_post)                h_res = z_res: logits, for `sinkhorn`

    A token of zeros gives z = bias and h_in = 0; its gradient with respect to x is large (r = 1 / sqrt(norm_eps)) but
    finite. Huge z give h_pre and h_post at their ends. ValueError or TypeError for other shapes and dtypes.
    """
    return _C.mhc_pre(x, phi, alpha, bias, gamma, norm_eps=norm_eps, hc_eps=hc_eps)


def sinkhorn(logits: Tensor, *, iters: int = 20, eps: float = 1e-6, form: str = "P", transpose: bool = False) -> Tensor:
    """Nearly doubly stochastic matrices, by alternating normalisations (Sinkhorn & Knopp 1967, Concerning nonnegative
    matrices and doubly stochastic matrices).

    logits Z [.., n, n] of float32 or float64, n in 1..8 -> A of the same shape, or A^T with transpose.

        form "P" (the mHC paper): A = exp(Z - column maxima); iters times: A /= column sums + eps, A /= row sums + eps
        form "D" (DeepSeek's code): A = softmax of the rows of Z, + eps; A /= column sums + eps; iters - 1 times: rows,
        then columns

    So the rows of P and the columns of D sum to 1 within eps, the others as far as the iterations have come (logits of
    deviation 1 after 20: mostly 3e-6; of deviation 3: up to 5e-2). D with transpose is P of Z^T, exactly for eps = 0.
    The gradient is that of these very steps; nothing is kept of them but the logits. Finite logits give finite matrices
    and gradients: what lies further below the maximum of its column (P) or row (D) than exp can tell (float32: 87)
    counts as zero, and a row (P) or column (D) of zeros stays one: a divisor that is no normal number acts as 1.
    ValueError for iters outside 1..100000, eps outside [0, 1], unknown forms, and logits that are not square or have
    n > 8; TypeError for other dtypes.
    """
    return _C.sinkhorn(logits, iters=iters, eps=eps, form=form, transpose=transpose)


def mhc_post(x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """out_i = sum_j h_res_ij x_j + h_post_i y: the way back into the streams (Xie et al. 2025).

    x [.., n, C] and y [.., C], the layer's output, of one float dtype; h_post [.., n] and the mixing matrix h_res
    [.., n, n] (of `sinkhorn`, not logits) of float32, for float64 streams float64 -> [.., n, C]. Rows of h_res are
    output streams. Sums in float32 (float64), rounded once. ValueError or TypeError for other shapes and dtypes.
    """
    return _C.mhc_post(x, y, h_post, h_res)


if not TYPE_CHECKING:
    __getattr__ = absent(__name__)
