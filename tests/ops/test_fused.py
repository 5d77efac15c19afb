"""Fused ops beside the ops that they stand for: the same bits, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.table import FLOATS, UNIT_ROUNDOFF, array, bits


def random(shape: tuple[int, ...], dtype: str, seed: int):
    return xt.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=dtype)


# ---- residual addition and RMSNorm -----------------------------------------------------------------------------------

# On a GPU: narrow plans of one to four pieces a lane, whole blocks, rows read twice, rows that are not aligned.
WIDTHS = [1, 24, 33, 128, 192, 384, 768, 1024, 2048, 4100, 17000, 17001, 40000]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm_has_the_bits_of_two_ops(dtype: str, width: int) -> None:
    """Both outputs are used, so both gradients meet in the sum; the inputs get one gradient."""
    rows = 3 if width > 4000 else 37
    found = []
    for fused in (False, True):
        x, residual, weight = (
            random(s, dtype, i).requires_grad_() for i, s in enumerate([(rows, width), (rows, width), (width,)])
        )
        if fused:
            total, out = F.add_rms_norm(x, residual, weight, 1e-6)
        else:
            total = x + residual
            out = F.rms_norm(total, weight, 1e-6)
        _C.backward([total, out], [random((rows, width), dtype, 4), random((rows, width), dtype, 5)], False)
        found.append([bits(t) for t in (total, out, x.grad, residual.grad, weight.grad)])
    assert found[0] == found[1]
    assert found[1][2] == found[1][3]


@pytest.mark.parametrize("width", [24, 33, 768, 1024, 4100, 17000, 17001])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_add_layer_norm_has_the_bits_of_two_ops(dtype: str, width: int) -> None:
    """As add_rms_norm; a second backward adds to the gradients of weight and bias."""
    rows = 3 if width > 4000 else 37
    found = []
    for fused in (False, True):
        shapes = [(rows, width), (rows, width), (width,), (width,)]
        x, residual, weight, bias = (random(s, dtype, i).requires_grad_() for i, s in enumerate(shapes))
        outs = []
        for _ in range(2):
            if fused:
                total, out = F.add_layer_norm(x, residual, weight, bias)
            else:
                total = x + residual
                out = F.layer_norm(total, (width,), weight, bias)
            _C.backward([total, out], [random((rows, width), dtype, 4), random((rows, width), dtype, 5)], False)
            outs += [total, out]
        found.append([bits(t) for t in (*outs, x.grad, residual.grad, weight.grad, bias.grad)])
    assert found[0] == found[1]


@pytest.mark.parametrize("used", [0, 1])
def test_add_rms_norm_with_one_output(used: int) -> None:
    """The output that nobody uses has no gradient; dweight is then nothing, or the norm's own."""
    found = []
    for fused in (False, True):
        x, residual, weight = (random(s, "float32", i).requires_grad_() for i, s in enumerate([(5, 48)] * 2 + [(48,)]))
        total = x + residual
        outs = F.add_rms_norm(x, residual, weight, 1e-6) if fused else (total, F.rms_norm(total, weight, 1e-6))
        outs[used].backward(random((5, 48), "float32", 4))
        found.append([bits(x.grad), bits(residual.grad), None if weight.grad is None else bits(weight.grad)])
    nothing = bits(xt.zeros(48))
    assert [g or nothing for g in found[0]] == [g or nothing for g in found[1]]


def test_add_rms_norm_adds_to_a_gradient_in_place() -> None:
    """A second backward adds to weight.grad; one tensor as both inputs gets both gradients."""
    found = []
    for fused in (False, True):
        x, weight = random((9, 40), "float32", 0).requires_grad_(), random((40,), "float32", 1).requires_grad_()
        for _ in range(2):
            total = x + x
            outs = F.add_rms_norm(x, x, weight, 1e-6) if fused else (total, F.rms_norm(total, weight, 1e-6))
            (outs[0] * outs[1]).sum().backward()
        found.append([bits(x.grad), bits(weight.grad)])
    assert found[0] == found[1]


def test_add_rms_norm_protects_the_sum() -> None:
    x = random((4, 8), "float32", 0).requires_grad_()
    total, out = F.add_rms_norm(x, random((4, 8), "float32", 1))
    with xt.no_grad():
        total.mul_(2.0)
    with pytest.raises(RuntimeError, match="saved by 'add_rms_norm' was changed in place"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("op", "shapes"),
    [("gelu_mlp", [(4, 3), (5, 3), (5,), (3, 5), (3,)]), ("swiglu_mlp", [(4, 3), (5, 3), (5, 3), (3, 5)])],
)
def test_an_mlp_protects_what_it_keeps(op: str, shapes: list) -> None:
    """All of its tensors but the last bias, whose gradient needs no value."""
    for changed in range(len(shapes)):
        leaves = [random(shape, "float32", 0).requires_grad_() for shape in shapes]
        out = getattr(_C, op)(*leaves)
        with xt.no_grad():
            leaves[changed].mul_(2.0)
        if changed == 4:
            out.sum().backward()
            continue
        with pytest.raises(RuntimeError, match=f"saved by '{op}' was changed in place"):
            out.sum().backward()


# ---- QK-norm and RoPE ------------------------------------------------------------------------------------------------

SHAPES = [(2, 5, 4, 2, 8), (1, 7, 3, 1, 6), (2, 9, 5, 3, 32), (3, 33, 4, 4, 64), (2, 40, 6, 2, 128), (1, 5, 2, 1, 256)]


def norms_and_ropes(q, k, q_weight, k_weight, eps, **options):
    """The four ops that qk_norm_rope stands for."""
    return tuple(F.rope(F.rms_norm(x, w, eps), **options) for x, w in ((q, q_weight), (k, k_weight)))


def qk_leaves(batch: int, seq: int, heads: int, kv_heads: int, dim: int, dtype: str):
    shapes = [(batch, seq, heads, dim), (batch, seq, kv_heads, dim), (dim,), (dim,)]
    return [random(s, dtype, i).requires_grad_() for i, s in enumerate(shapes)]


def qk_run(f, leaves, **options):
    """Both outputs, the gradients of both inputs, and those of both weights."""
    for leaf in leaves:
        leaf.grad = None
    outs = f(*leaves, 1e-6, **options)
    _C.backward(list(outs), [random(tuple(o.shape), o.dtype.name, 7 + i) for i, o in enumerate(outs)], False)
    return [bits(t) for t in (*outs, leaves[0].grad, leaves[1].grad)], [leaf.grad for leaf in leaves[2:]]


PIECES = range(1, 33)  # of 16 bytes of half a head, where a GPU adds squares up in the order of rms_norm


def pieces_of_half(dim: int, dtype: str) -> float:
    return dim / 2 * getattr(xt, dtype).itemsize / 16


def same_weights(got, want, dtype: str) -> None:
    """A GPU adds up dweight in another order."""
    for g, w in zip(got, want, strict=True):
        if g.device.type == "cpu":
            assert bits(g) == bits(w)
        else:
            scale = np.abs(array(w)).max()
            assert np.abs(array(g) - array(w)).max() <= 8 * UNIT_ROUNDOFF[dtype] * scale + 400 * 2.0**-24 * scale


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_qk_norm_rope_has_the_bits_of_four_ops(dtype: str, shape) -> None:
    leaves = qk_leaves(*shape, dtype)
    for options in ({}, dict(theta=1e6, period=3), dict(positions=xt.tensor(np.arange(shape[1]) * 37 % 11))):
        (got, weights), (want, of_four) = (qk_run(f, leaves, **options) for f in (F.qk_norm_rope, norms_and_ropes))
        if leaves[0].device.type == "cpu" or pieces_of_half(shape[-1], dtype) in PIECES:
            assert got == want, options
        else:  # another plan, whose sums have another order
            for g, w in zip(got, want, strict=True):
                g, w = np.frombuffer(g), np.frombuffer(w)
                assert np.abs(g - w).max() <= 16 * UNIT_ROUNDOFF[dtype] * np.abs(w).max(), options
        same_weights(weights, of_four, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_qk_norm_rope_of_columns_of_a_joined_product(dtype: str) -> None:
    """q and k are columns of [B*S, (H + 2 K) D]: read where they lie, with the bits of dense inputs."""
    batch, seq, heads, kv_heads, dim = 2, 6, 4, 2, 64
    joined = random((batch * seq, (heads + 2 * kv_heads) * dim), dtype, 0)
    q = joined[:, : heads * dim].view(batch, seq, heads, dim)
    k = joined[:, heads * dim : (heads + kv_heads) * dim].view(batch, seq, kv_heads, dim)
    weights = [random((dim,), dtype, i) for i in (1, 2)]
    leaves = [[t.detach().requires_grad_() for t in pair] for pair in ((q, k), (q.clone(), k.clone()))]
    found = [qk_run(F.qk_norm_rope, [*pair, *(w.detach().requires_grad_() for w in weights)]) for pair in leaves]
    assert found[0][0] == found[1][0]
    assert [bits(g) for g in found[0][1]] == [bits(g) for g in found[1][1]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_qk_norm_rope_of_heads_that_lie_apart(dtype: str) -> None:
    """Inputs and gradients [B, heads, S, D] in memory: with one sequence they are read where they lie."""
    shapes = [(1, 4, 6, 64), (1, 2, 6, 64)]
    found = []
    for dense in (False, True):
        x = [random(s, dtype, i).transpose(1, 2) for i, s in enumerate(shapes)]
        dys = [random(s, dtype, 5 + i).transpose(1, 2) for i, s in enumerate(shapes)]
        x, dys = ([t.contiguous() if dense else t for t in ts] for ts in (x, dys))
        leaves = [
            *(t.detach().requires_grad_() for t in x),
            *(random((64,), dtype, i).requires_grad_() for i in (2, 3)),
        ]
        outs = F.qk_norm_rope(*leaves, 1e-6)
        _C.backward(list(outs), dys, False)
        found.append([bits(t) for t in (*outs, *(leaf.grad for leaf in leaves))])
    assert found[0] == found[1]


def test_qk_norm_rope_adds_to_gradients_in_place() -> None:
    """Two backwards; and one weight for both parts, whose gradient gets both shares."""
    q, k, w, _ = qk_leaves(2, 70, 8, 2, 32, "float32")  # of several pieces
    found = []
    for f in (F.qk_norm_rope, norms_and_ropes):
        w.grad = None
        for _ in range(3):
            a, b = f(q, k, w, w, 1e-6)
            (a.sum() + (b * b).sum()).backward()
        found.append(array(w.grad))
    assert np.abs(found[0] - found[1]).max() <= 64 * UNIT_ROUNDOFF["float32"] * np.abs(found[1]).max()


@pytest.mark.parametrize("wanted", range(4))
def test_qk_norm_rope_with_one_gradient(wanted: int) -> None:
    leaves = qk_leaves(2, 5, 4, 2, 32, "float32")
    for leaf in leaves:
        leaf.grad = None
    qk_run(F.qk_norm_rope, leaves)
    want = bits(leaves[wanted].grad)
    alone = [t.detach().requires_grad_() if i == wanted else t.detach() for i, t in enumerate(leaves)]
    outs = F.qk_norm_rope(*alone, 1e-6)
    dys = [random(tuple(o.shape), "float32", 7 + i) for i, o in enumerate(outs)]
    keep = [i for i, o in enumerate(outs) if o.requires_grad]
    _C.backward([outs[i] for i in keep], [dys[i] for i in keep], False)
    assert bits(alone[wanted].grad) == want and all(alone[i].grad is None for i in range(4) if i != wanted)


def test_qk_norm_rope_repeats() -> None:
    leaves = qk_leaves(3, 50, 6, 2, 64, "bfloat16")
    first = qk_run(F.qk_norm_rope, leaves)
    for _ in range(5):
        again = qk_run(F.qk_norm_rope, leaves)
        assert again[0] == first[0] and [bits(g) for g in again[1]] == [bits(g) for g in first[1]]


def refused_muon() -> None:
    p = xt.zeros(2, 2)
    numbers = xt.tensor(np.array([0.9, 0, 1, 1, 1, 1e-7, 1]), device="cpu")
    _C.muon_([p], [p], [xt.zeros(2, 2)], [], xt.tensor(0.1, dtype=xt.float64), numbers, True, 1, xt.float64)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: _C.add_layer_norm(xt.zeros(2, 3), xt.zeros(2, 3, dtype=xt.float64)), "float32.*float64"),
        (lambda: _C.swiglu_mlp(xt.zeros(2, 3), xt.zeros(4, 3), xt.zeros(5, 3), xt.zeros(2, 4)), r"up must have shape \(4, 3\), got \(5, 3\)"),
        (lambda: _C.ema_([xt.zeros(2)], [xt.zeros(2)], xt.tensor(0.0), 0.5), "step must have dtype int64, got float32"),
        (lambda: _C.scaled_dot_product_attention(*[xt.zeros(1, 1, 2, 2)] * 3, window=1), "window must be None without is_causal, got 1"),
        (refused_muon, "ns_dtype must be float32, bfloat16 or float16 for float32 parameters, got float64"),
    ],
)  # fmt: skip
def test_what_would_read_wrong_memory_is_refused(call, sentence) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        call()


def test_qk_norm_rope_of_a_period_beyond_its_rows() -> None:
    """Takes no memory for the rows that there are not."""
    q, w = random((5, 2, 4), "float32", 0), xt.ones(4)
    far, near = (F.qk_norm_rope(q, q, w, w, 1e-6, period=period) for period in (2**40, 5))
    assert [bits(t) for t in far] == [bits(t) for t in near]
