"""Dropout: the numbers of the generator, nothing kept of the mask, and inside attention against NumPy."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C, nn
from xtrain import functional as F
from xtrain.models import GPT2, GPT2Config
from xtrain.optable.references import philox_uniform
from xtrain.optable.table import array, bits, tensor


def factors(state: tuple[int, int], shape: tuple[int, ...], p: float) -> np.ndarray:
    """What the elements are multiplied by, from the definition of the generator alone."""
    return np.where(philox_uniform(state[0], shape, 0.0, 1.0, state[1]) >= np.float32(p), 1 / (1 - p), 0.0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_an_element_is_dropped_where_its_number_is_small(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((7, 33))
    a = tensor(x, dtype).requires_grad_()
    xt.manual_seed(11)
    xt.rand(3)
    state = xt.get_rng_state()
    y = F.dropout(a, 0.3)
    assert xt.get_rng_state() == (state[0], state[1] + 1), "a fill of the generator"
    xt.set_rng_state(state)
    kept = array(xt.rand(7, 33)) >= np.float32(0.3)
    assert ((array(y) != 0) == kept).all()
    wide = np.float64 if dtype == "float64" else np.float32
    factor = factors(state, (7, 33), 0.3).astype(wide)
    assert np.array_equal(array(y), array(tensor(array(a).astype(wide) * factor, dtype)))
    dy = tensor(np.random.default_rng(1).standard_normal((7, 33)), dtype)
    xt.rand(5)  # the backward does not ask the generator
    y.backward(dy)
    assert np.array_equal(array(a.grad), array(tensor(array(dy).astype(wide) * factor, dtype)))


def test_edges() -> None:
    x = xt.tensor([1.0, float("inf"), float("nan"), -2.0])
    assert F.dropout(x, 0.0) is x and F.dropout(x, 0.5, training=False) is x
    zeros = array(F.dropout(x, 1.0))
    assert zeros[[0, 3]].tolist() == [0.0, 0.0] and np.isnan(zeros[1:3]).all(), "0 times infinity is no number"
    for p in (-0.1, 1.5):
        with pytest.raises(ValueError, match=r"dropout: p must be in \[0, 1\]"):
            F.dropout(x, p)
    assert F.dropout(xt.zeros(0, 3), 0.5).shape == (0, 3)
    a = xt.rand(6, 5)
    xt.manual_seed(2)
    across = array(F.dropout(a.t(), 0.5))
    xt.manual_seed(2)
    assert np.array_equal(array(F.dropout(a.t().contiguous(), 0.5)), across), "elements count as the shape has them"


def test_nothing_of_the_mask_is_kept() -> None:
    a = xt.rand(1000, 100).requires_grad_()
    gc.collect()
    before = _C.memory_stats(a.device)["allocated"]
    y = F.dropout(a, 0.5)
    gc.collect()
    assert _C.memory_stats(a.device)["allocated"] - before < 1.2 * y.nbytes


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, factor: np.ndarray, scale: float) -> list:
    """Causal attention whose weights are multiplied by factor [B, H, S, S], and the gradients of q, k and v: by hand."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.where(np.tril(np.ones(factor.shape[-2:], bool)), scale * q @ k.swapaxes(2, 3), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = (dout @ v.swapaxes(2, 3)) * factor
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))
    dq, dk, dv = scale * ds @ k, scale * ds.swapaxes(2, 3) @ q, (p * factor).swapaxes(2, 3) @ dout
    gathered = [x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv)]
    return [(p * factor) @ v, dq, *gathered]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_inside_attention(kv_heads: int, recomputed: bool) -> None:
    rng = np.random.default_rng(3)
    shapes = (2, 4, 9, 6), (2, kv_heads, 9, 6), (2, kv_heads, 9, 6)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    dout = rng.standard_normal(shapes[0])
    inputs = [tensor(x, "float64").requires_grad_() for x in arrays]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True, enable_gqa=True)

    xt.manual_seed(9)
    state = xt.get_rng_state()
    y = xt.checkpoint(attend, *inputs) if recomputed else attend(*inputs)
    y.backward(tensor(dout, "float64"))
    want = attention(*arrays, dout, factors(state, (2, 4, 9, 9), 0.4), 6**-0.5)
    for got, expected in zip([y, *(x.grad for x in inputs)], want, strict=True):
        assert np.abs(array(got) - expected).max() < 1e-12


def test_inside_the_attention_of_gpt2() -> None:
    config = GPT2Config(
        vocab_size=31, n_embd=12, n_layer=1, n_head=3, n_positions=8, attn_pdrop=0.4, resid_pdrop=0.0, embd_pdrop=0.0,
        dtype="float64", scale_attn_by_inverse_layer_idx=True,
    )  # fmt: skip
    model = GPT2(config)
    attn = model.transformer.h[0].attn
    attn.c_attn.weight = nn.Parameter(tensor(np.random.default_rng(0).standard_normal((12, 36)), "float64"))
    attn.c_proj.weight = nn.Parameter(tensor(np.eye(12), "float64"))
    x = np.random.default_rng(1).standard_normal((16, 12))
    xt.manual_seed(4)
    state = xt.get_rng_state()
    got = array(attn(tensor(x, "float64"), 2, 8))
    q, k, v = (
        part.reshape(2, 8, 3, 4).swapaxes(1, 2) for part in np.split(x @ array(attn.c_attn.weight), 3, -1)
    )  # biases are zero
    want = attention(q, k, v, np.zeros_like(q), factors(state, (2, 3, 8, 8), 0.4), 0.5)[0]
    assert np.abs(got - want.swapaxes(1, 2).reshape(16, 12)).max() < 1e-12


def test_the_generator_of_a_captured_step() -> None:
    """What a replay does: the state is written, the step reads it, and the process goes on behind it."""
    x = xt.rand(200)

    def step():
        a = F.dropout(x, 0.3)
        return F.dropout(a * 2.0, 0.5)

    for seed in (1, (1 << 64) - 3):
        xt.manual_seed(seed)
        xt.rand(3)
        start = xt.get_rng_state()
        want = [bits(step()) for _ in range(3)]
        end = xt.get_rng_state()
        xt.set_rng_state(start)
        generator = xt._draw.CapturedGenerator(x.device)
        generator.write()
        with generator.installed():
            assert bits(step()) == want[0] and generator.count == 2
        assert xt.get_rng_state() == start
        for each in want:
            generator.write()
            with generator.installed():
                assert bits(step()) == each
            generator.skip()
        assert xt.get_rng_state() == end


def test_a_recomputed_mask_in_a_captured_step() -> None:
    """checkpoint goes back to the state of its forward: the numbers beside the state on the device go back, too."""
    x = xt.rand(50)

    def step():
        a = x.clone().requires_grad_()
        F.dropout(xt.checkpoint(lambda z: F.dropout(z * z, 0.5), a), 0.5).sum().backward()
        return bits(a.grad)

    xt.manual_seed(6)
    want = step()
    xt.manual_seed(6)
    generator = xt._draw.CapturedGenerator(x.device)
    generator.write()
    with generator.installed():
        assert step() == want
    assert generator.count == 2


@pytest.mark.on_cpu
def test_a_number_that_is_p_keeps_its_element() -> None:
    """An element is dropped below p: at the largest of a hundred numbers all others are."""
    numbers = philox_uniform(5, (100,), 0.0, 1.0, 9)
    last = int(numbers.argmax())
    kept = array(_C.dropout(xt.ones(100), float(numbers[last]), key=(5, 9)))
    assert np.flatnonzero(kept).tolist() == [last]


@pytest.mark.on_cpu
@pytest.mark.parametrize("key", [(), (5,), (5, 9, 1)])
def test_a_key_is_two_numbers(key) -> None:
    with pytest.raises(
        ValueError, match=f"^dropout: key must be a seed and the number of a fill, got {len(key)} numbers$"
    ):
        _C.dropout(xt.ones(3), 0.5, key=key)
