"""scaled_dot_product_attention with a mask, dropout, sinks and a softcap, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F

B, H, K, SQ, SKV, D = 2, 6, 2, 5, 7, 3
SDPA = F.scaled_dot_product_attention


def inputs(seed: int = 0, groups: int = H) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((B, H, SQ, D)), *(rng.standard_normal((B, groups, SKV, D)) for _ in "kv")


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, added: np.ndarray) -> np.ndarray:
    k, v = (np.repeat(x, H // x.shape[1], 1) for x in (k, v))
    scores = np.broadcast_to(q @ np.swapaxes(k, -1, -2) / np.sqrt(D) + added, (B, H, SQ, SKV))
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total > 0, total, 1) @ v


MASKS = [(B, H, SQ, SKV), (B, 1, SQ, SKV), (B, 1, 1, SKV), (SQ, SKV), (1, SKV), (SKV,), (SQ, 1)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("groups", [H, K])
def test_masks(shape: tuple[int, ...], groups: int) -> None:
    q, k, v = inputs(groups=groups)
    rng = np.random.default_rng(1)
    seen = rng.random(shape) < 0.6
    added = np.where(rng.random(shape) < 0.2, -np.inf, rng.standard_normal(shape))
    for mask, number in ((seen, np.where(seen, 0.0, -np.inf)), (added, added)):
        got = SDPA(xt.tensor(q), xt.tensor(k), xt.tensor(v), xt.tensor(mask), enable_gqa=groups != H)
        np.testing.assert_allclose(got.cpu().numpy(), attention(q, k, v, number), rtol=1e-11, atol=1e-12)


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient() -> None:
    q, k, v = (xt.tensor(x, requires_grad=True) for x in inputs())
    seen = np.ones((SQ, SKV), bool)
    seen[1] = False
    for mask in (xt.tensor(seen), xt.tensor(np.where(seen, 0.0, -np.inf))):
        y = SDPA(q, k, v, mask)
        assert not y[:, :, 1].any().item() and not y.isnan().any().item()
        q.grad = k.grad = v.grad = None
        y.sum().backward()
        for x in (q, k, v):
            assert x.grad.isfinite().all().item()
        assert not q.grad[:, :, 1].any().item() and q.grad[:, :, 0].any().item()


def test_gradients_through_a_mask() -> None:
    q, k, v = (xt.tensor(x[:1, :2], requires_grad=True) for x in inputs())
    bias = xt.tensor(np.random.default_rng(2).standard_normal((2, SQ, SKV)), requires_grad=True)
    assert xt.testing.grad_check(lambda *x: SDPA(*x[:3], attn_mask=x[3], scale=0.3), [q, k, v, bias]).ok


def test_a_causal_mask_is_is_causal() -> None:
    q, k, v = (xt.tensor(x) for x in inputs())
    lower = xt.tril(xt.ones(SQ, SKV, dtype=xt.bool), SKV - SQ)
    np.testing.assert_allclose(
        SDPA(q, k, v, lower).cpu().numpy(), SDPA(q, k, v, is_causal=True).cpu().numpy(), rtol=1e-11, atol=1e-13
    )


def test_sixteen_bits_are_computed_in_float32() -> None:
    q, k, v = (xt.tensor(x).bfloat16() for x in inputs())
    mask = xt.ones(SQ, SKV, dtype=xt.bool)
    exact = SDPA(q.double(), k.double(), v.double(), mask)
    got = SDPA(q, k, v, mask)
    assert got.dtype is xt.bfloat16 and got.tolist() == exact.bfloat16().tolist()


def test_dropout_of_weights() -> None:
    q, k = (xt.zeros(1, 1, n, 1) for n in (400, 50))
    xt.manual_seed(3)
    seen = SDPA(q, k, xt.ones(1, 1, 50, 1), dropout_p=0.25)
    again = SDPA(q, k, xt.ones(1, 1, 50, 1), dropout_p=0.25)
    xt.manual_seed(3)
    assert SDPA(q, k, xt.ones(1, 1, 50, 1), dropout_p=0.25).tolist() == seen.tolist() != again.tolist()
    kept = seen.reshape(-1).double().cpu().numpy() * 50 * 0.75  # of 50 weights 1 / 50, each kept with 0.75
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)
    assert abs(kept.mean() - 37.5) < 5 * np.sqrt(50 * 0.75 * 0.25 / 400) and kept.std() > 2
    first = SDPA(xt.zeros(1, 1, 4, 1), xt.zeros(1, 1, 4, 1), xt.arange(4).float().reshape(1, 1, 4, 1), None, 0.5, True)
    assert first[0, 0, 0, 0].item() == 0.0, "the first query sees the first key alone"
    assert not SDPA(q, k, xt.ones(1, 1, 50, 1), dropout_p=1.0).any().item()


def test_what_a_mask_refuses() -> None:
    q, k, v = (xt.tensor(x) for x in inputs(groups=K))
    mask = xt.ones(SQ, SKV, dtype=xt.bool)
    for call, kind, text in (
        (lambda: SDPA(q, q, q, mask), ValueError, r"attn_mask must broadcast to \(2, 6, 5, 5\), got \(5, 7\)"),
        (lambda: SDPA(q, q, q, xt.ones(1, 1, 1, 1, 5)), ValueError, r"attn_mask must broadcast to .*, got \(1, 1, 1, 1, 5\)"),
        (lambda: SDPA(q, k, v, mask), ValueError, "key must have query's number of heads, or a divisor .*, got 2 and 6"),
        (lambda: SDPA(q, q[:, :4], q[:, :4], enable_gqa=True, dropout_p=0.5), ValueError, "key must have .*, got 4 and 6"),
        (lambda: SDPA(q, q, q, xt.ones(5, 5, dtype=xt.int64)), TypeError, "attn_mask must have dtype bool or a floating one, got int64"),
        (lambda: SDPA(q, q, q, [True]), TypeError, "attn_mask must be a Tensor or None, got list"),
        (lambda: SDPA(q, q, q, xt.ones(5, 5), backend="flash"), ValueError, "backend must be None with attn_mask or dropout_p, got 'flash'"),
        (lambda: SDPA(q[0], k, v, mask), ValueError, "query, key and value must have 4 dims, got "),
        (lambda: SDPA(q, k, v[:, :, :3], mask, enable_gqa=True), ValueError, r"query, key and value must be \[B, H, Sq, D\], .*, got "),
    ):  # fmt: skip
        with pytest.raises(kind, match=f"scaled_dot_product_attention: {text}"):
            call()


# ---- sinks and a softcap ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", xt.attention_backends(xt.get_default_device()))
def test_sinks_and_softcap_are_those_of_the_composed_form(backend: str) -> None:
    sinks = np.random.default_rng(4).standard_normal(H)
    weight = xt.tensor(np.random.default_rng(5).standard_normal((B, H, SQ, D)))
    causal = xt.tensor(np.tril(np.ones((SQ, SKV), bool), SKV - SQ))
    results = []
    for seen in ({"is_causal": True, "backend": backend}, {"attn_mask": causal}):
        leaves = [xt.tensor(x, requires_grad=True) for x in (*inputs(groups=K), sinks)]
        y = SDPA(*leaves[:3], sinks=leaves[3], softcap=0.8, enable_gqa=True, **seen)
        (y * weight).sum().backward()
        results.append([y.detach(), *(x.grad for x in leaves)])
    for ours, composed in zip(*results, strict=True):
        np.testing.assert_allclose(ours.cpu().numpy(), composed.cpu().numpy(), rtol=1e-11, atol=1e-12)


def test_the_gradient_of_a_sink_sums_over_thousands_of_rows() -> None:
    """Of its own head, whose share of the softmax differs from that of the next one: what a GPU adds up in parts."""
    rng = np.random.default_rng(6)
    q, dout = (rng.standard_normal((B, H, 1500, D)) for _ in range(2))
    k, v = (rng.standard_normal((B, K, SKV, D)) for _ in range(2))
    sinks = np.linspace(-2.0, 2.0, H)
    leaf = xt.tensor(sinks, requires_grad=True)
    y = SDPA(*(xt.tensor(x) for x in (q, k, v)), sinks=leaf, enable_gqa=True)
    y.backward(xt.tensor(dout))
    k, v = (np.repeat(x, H // K, 1) for x in (k, v))
    weights = np.exp(q @ np.swapaxes(k, -1, -2) / np.sqrt(D))
    share = np.exp(sinks)[:, None] / (weights.sum(-1) + np.exp(sinks)[:, None])  # [B, H, S]
    out = weights / (weights.sum(-1) + np.exp(sinks)[:, None])[..., None] @ v
    want = -(share * (dout * out).sum(-1)).sum((0, 2))
    np.testing.assert_allclose(leaf.grad.cpu().numpy(), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", xt.attention_backends(xt.get_default_device()))
@pytest.mark.parametrize("sink", [-np.inf, -300.0, 300.0])
def test_sinks_far_from_the_scores(sink: float, backend: str) -> None:
    leaves = [xt.tensor(x, dtype=xt.float32, requires_grad=True) for x in (*inputs(), np.full(H, sink))]
    y = SDPA(*leaves[:3], sinks=leaves[3], backend=backend)
    y.sum().backward()
    plain = SDPA(*leaves[:3], backend=backend)
    assert y.tolist() == (plain if sink < 0 else plain * 0).tolist()
    for x in leaves:
        assert x.grad.isfinite().all().item()
    assert not leaves[3].grad.any().item()


@pytest.mark.parametrize("backend", xt.attention_backends(xt.get_default_device()))
@pytest.mark.parametrize("first", [-1.0, -np.inf], ids=["sinks", "without_one"])
def test_a_query_without_keys_beside_a_sink(first: float, backend: str) -> None:
    rows = inputs()[1]  # more queries than keys
    q, k, v = (xt.tensor(x.copy(), requires_grad=True) for x in (rows, rows[:, :, :SQ], inputs()[2][:, :, :SQ]))
    sinks = xt.tensor(np.array([first, *np.linspace(-1.0, 1.0, H - 1)]), requires_grad=True)
    y = SDPA(q, k, v, is_causal=True, sinks=sinks, softcap=2.0, backend=backend)
    y.sum().backward()
    assert not y[:, :, : SKV - SQ].any().item() and y.isfinite().all().item()
    assert all(x.grad.isfinite().all().item() for x in (q, k, v, sinks)) and sinks.grad.any().item()


@pytest.mark.parametrize("softcap", [1e-300, 1e300])
def test_a_softcap_that_is_0_or_infinite_in_float32_is_refused(softcap: float) -> None:
    with pytest.raises(
        ValueError, match=f"softcap must be positive and finite in float32, got {softcap:g}".replace("+", "[+]")
    ):
        SDPA(*[xt.ones(1, 1, 2, 3)] * 3, softcap=softcap)


def test_sinks_and_softcap_of_the_composed_form_are_checked() -> None:
    q = xt.ones(2, 6, 5, 3)
    for options, kind, message in (
        ({"softcap": 0.0}, ValueError, "softcap must be positive and finite in float32, got 0.0"),
        ({"softcap": 1e300}, ValueError, r"softcap must be positive and finite in float32, got 1e\+300"),
        ({"sinks": xt.ones(5)}, ValueError, r"sinks must have shape \(6,\), got \(5,\)"),
        (
            {"sinks": xt.ones(6, dtype=xt.float64)},
            TypeError,
            "sinks must have the dtype of query, float32, got float64",
        ),
    ):
        with pytest.raises(kind, match="scaled_dot_product_attention: " + message):
            SDPA(q, q, q, xt.ones(5, 5), **options)


def test_a_row_that_only_sees_far_keys_sees_them() -> None:
    """-inf alone hides a key: of numbers that are all the same the weights are, too."""
    v = xt.arange(5).float().reshape(1, 1, 5, 1)
    assert SDPA(xt.ones(1, 1, 2, 3), xt.ones(1, 1, 5, 3), v, xt.full((2, 5), -1e32)).tolist() == [[[[2.0], [2.0]]]]
