"""NumPy float64 references for the op table: plain formulas, written without looking at the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def normal_cdf(x: np.ndarray) -> np.ndarray:
    """The normal distribution's. By erfc: (1 + erf) / 2 has no digits left for x far below zero."""
    return 0.5 * _erfc(-x / math.sqrt(2))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate * sigmoid(gate) * up


def gelu(x: np.ndarray, tanh: bool = False) -> np.ndarray:
    if tanh:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * normal_cdf(x)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def layer_norm(
    x: np.ndarray, weight: np.ndarray | float = 1.0, bias: np.ndarray | float = 0.0, eps: float = 1e-5
) -> np.ndarray:
    centred = x - np.mean(x, -1, keepdims=True)
    return centred / np.sqrt(np.mean(centred * centred, -1, keepdims=True) + eps) * weight + bias


def rope_frequencies(
    half: int,
    theta: float,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_length: float = 0.0,
) -> np.ndarray:
    """theta^(-i/half), scaled for longer contexts."""
    f = theta ** (-np.arange(half) / half)
    if not original_length:
        return f / factor
    wave = 2 * np.pi / f
    kept = (original_length / wave - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return kept * f + (1 - kept) * f / factor


def rope(
    x: np.ndarray,
    theta: float = 10000.0,
    positions: np.ndarray | None = None,
    period: int | None = None,
    **scaling: float,
) -> np.ndarray:
    """Half-split rotation. Tokens are all leading dims; position = token % period; for [B, S, H, D] the period is S."""
    half = x.shape[-1] // 2
    tokens = math.prod(x.shape[:-2])
    counted = np.arange(tokens) % (period or (x.shape[1] if x.ndim == 4 else max(tokens, 1)))
    places = np.reshape(counted if positions is None else positions, -1)
    angle = places[:, None] * rope_frequencies(half, theta, **scaling)
    cos, sin = (f(angle).reshape(*x.shape[:-2], 1, half) for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def cross_entropy(
    x: np.ndarray,
    target: np.ndarray,
    ignore_index: int = -100,
    reduction: str = "mean",
    magnitude: bool = False,
    z_loss: float = 0.0,
) -> np.ndarray:
    """Negative log likelihood of the rows of x. magnitude=True: the absolute values that are added, summed, instead."""
    peak = x.max(1) if x.size else np.zeros(len(x))
    lse = peak + np.log(np.exp(x - peak[:, None]).sum(1))
    chosen = x[np.arange(len(x)), np.where(target == ignore_index, 0, target)]
    hard = np.abs(lse) + np.abs(chosen) + 1 if magnitude else lse - chosen
    losses = np.where(target == ignore_index, 0.0, hard + z_loss * (np.abs(lse) + magnitude) ** 2)
    if reduction == "none":
        return losses
    return losses.sum() / ((target != ignore_index).sum() if reduction == "mean" else 1)


def linear_cross_entropy(
    x: np.ndarray,
    weight: np.ndarray,
    target: np.ndarray,
    ignore_index: int = -100,
    reduction: str = "mean",
    magnitude: bool = False,
    chunk_rows: int | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> np.ndarray:
    """cross_entropy of the logits x weight^T; with magnitude, of the absolute values that are added up to them. Chunks
    change nothing.
    """
    logits = np.abs(x) @ np.abs(weight).T if magnitude else x @ weight.T
    if softcap and not magnitude:
        logits = softcap * np.tanh(logits / softcap)
    return cross_entropy(logits, target, ignore_index, reduction, magnitude, z_loss)


def attention_weights(
    q: np.ndarray,
    k: np.ndarray,
    is_causal: bool = False,
    scale: float | None = None,
    lengths: Sequence[Sequence[int]] | None = None,
    window: int | None = None,
    sinks: np.ndarray | None = None,
    softcap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(scores, probabilities) of [B, H, Sq, Skv]; causal aligned so that the last query sees every key. lengths: of the
    documents of each row.
    """
    k = np.repeat(k, q.shape[1] // max(k.shape[1], 1), 1)
    scores = q @ k.swapaxes(-1, -2) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    sq, skv = scores.shape[-2:]
    if is_causal:
        ahead = np.arange(sq)[:, None] + (skv - sq) - np.arange(skv)
        scores = np.where((ahead >= 0) & (ahead < (window or ahead.size + 1)), scores, -np.inf)
    for b, row in enumerate(lengths or ()):
        document = np.repeat(np.arange(len(row)), row)
        scores[b] = np.where(document[:, None] == document, scores[b], -np.inf)
    all_scores = scores
    if sinks is not None:
        all_scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], -1)
    p = np.exp(all_scores - all_scores.max(-1, keepdims=True)) if scores.size else all_scores
    return scores, (p / p.sum(-1, keepdims=True))[..., :skv]


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **seen: Any,
) -> np.ndarray:
    return attention_weights(q, k, is_causal, scale, **seen)[1] @ np.repeat(v, q.shape[1] // max(v.shape[1], 1), 1)


def attention_scale(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **seen: Any,
) -> np.ndarray:
    """A score of size s moves its probability by s * u: P (1 + |scores|) |v|."""
    scores, p = attention_weights(q, k, is_causal, scale, **seen)
    bound = attention_weights(np.abs(q), np.abs(k), False, scale)[0]
    return (p * (1 + np.where(np.isfinite(scores), bound, 0))) @ np.repeat(
        np.abs(v), q.shape[1] // max(v.shape[1], 1), 1
    )


# ---- Philox4x32-10 (Salmon et al., SC 2011) --------------------------------------------------------------------------


def philox_block(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds on counters [n, 4] (uint32 values in uint64) with one key."""
    c = counter.astype(np.uint64)
    k0, k1, low = key[0], key[1], np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[:, 0] * np.uint64(0xD2511F53), c[:, 2] * np.uint64(0xCD9E8D57)
        shift = np.uint64(32)
        c = np.stack(
            [(p1 >> shift) ^ c[:, 1] ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c[:, 3] ^ np.uint64(k1), p0 & low], 1
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def philox_words(seed: int, stream: int, count: int) -> np.ndarray:
    """`count` uint32 words of the stream: word i is word i % 4 of block i / 4, as in csrc/xtrain.h."""
    block = np.arange((count + 3) // 4, dtype=np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    rest = np.full((len(block), 2), [stream & 0xFFFFFFFF, stream >> 32], np.uint64)
    counter = np.concatenate([(block & mask)[:, None], (block >> np.uint64(32))[:, None], rest], 1)
    return philox_block(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:count]


def philox_uniform(seed: int, shape: tuple[int, ...], low: float, high: float, stream: int = 0) -> np.ndarray:
    words = philox_words(seed, stream, math.prod(shape))
    return (low + (high - low) * ((words >> np.uint64(8)) * 2.0**-24)).reshape(shape)


def philox_normal(seed: int, shape: tuple[int, ...], mean: float, std: float, stream: int = 0) -> np.ndarray:
    """Box-Muller on the pairs of words (0, 1) and (2, 3) of a block."""
    count = math.prod(shape)
    words = philox_words(seed, stream, (count + 3) // 4 * 4).reshape(-1, 2)
    # u in (0, 1], rounded to float32 as the kernel rounds it: near 1 the logarithm magnifies that rounding
    u = (words[:, 0].astype(np.float32).astype(np.float64) * 2.0**-32 + 2.0**-33).astype(np.float32).astype(np.float64)
    angle = 2 * math.pi * (words[:, 1] * 2.0**-32)
    radius = np.sqrt(-2 * np.log(u))
    z = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:count]
    return (mean + std * z).reshape(shape)


def philox_randint(seed: int, shape: tuple[int, ...], low: int, high: int, stream: int = 0) -> np.ndarray:
    words = philox_words(seed, stream, 2 * math.prod(shape)).reshape(-1, 2)
    value = words[:, 0] | words[:, 1] << np.uint64(32)
    return (low + (value % np.uint64(high - low)).astype(np.int64)).reshape(shape)


def dropout(x: np.ndarray, p: float, key: tuple[int, int]) -> np.ndarray:
    """x / (1 - p) where its number, a multiple of 2^-24, reaches p as a float32; 0 elsewhere."""
    kept = philox_uniform(key[0], x.shape, 0.0, 1.0, key[1]) >= np.float32(p)
    return x * np.where(kept, 1 / (1 - p) if p < 1 else 0.0, 0.0)


def sample(
    logits: np.ndarray,
    random: np.ndarray,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> np.ndarray:
    """Tokens [B] of logits [B, V] by the rules of functional.sample, with Python's integers and a whole sort."""
    words = philox_words(int(random[0]), int(random[1]), 4 * len(logits)).reshape(-1, 4)
    tokens = []
    for row, word in zip(logits, words):
        order = np.argsort(-row, kind="stable")
        most = row[order[0]] if not np.isnan(row).any() else np.nan
        if not np.isfinite(most) or temperature == 0:
            tokens.append(int(order[0]) if np.isfinite(most) else -1)
            continue
        weights = [int(w) for w in np.floor(2.0**40 * np.exp((row - most) / temperature))]
        kept = [int(j) for j in order[:top_k]]
        total = sum(weights[j] for j in kept)
        if top_p is not None and top_p < 1:
            before = np.cumsum([0] + [weights[j] for j in kept])[:-1]
            kept = [j for j, b in zip(kept, before) if b < max(1, math.ceil(top_p * total))]
        number = (int(word[1]) << 32 | int(word[0])) * sum(weights[j] for j in kept) >> 64
        kept.sort()
        sums = np.cumsum([weights[j] for j in kept])
        tokens.append(kept[int((sums <= number).sum())])
    return np.array(tokens, np.int64)
