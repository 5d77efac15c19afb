"""Clauses of cached_attention: what is stored, what is seen, and which kernel of a GPU has which shapes; and of decoder_step, which is
the layers of a model one after the other.
"""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain import functional as F
from xtrain.generation import KVCache
from xtrain.models import Llama, LlamaConfig, Qwen3, Qwen3Config, decoder

DTYPES = ["float32", "bfloat16", "float16", "float64"]


def inputs(batch: int, heads: int, kv_heads: int, length: int, dim: int, dtype: str = "float32", seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads, 1, dim), *[(batch, kv_heads, 1, dim)] * 2, *[(batch, kv_heads, length, dim)] * 2]
    return [xt.tensor(rng.standard_normal(shape)).to(getattr(xt, dtype)) for shape in shapes]


def bits(x: xt.Tensor) -> bytes:
    return x.to(xt.float64).cpu().numpy().tobytes()


def test_one_row_is_stored_and_the_others_stay() -> None:
    """At the position of each sequence; what lies behind it is neither read nor written."""
    q, k, v, keys, values = inputs(2, 4, 2, 70, 64)
    keys[0, :, 4:], values[1, :, 68:] = float("nan"), float("nan")
    before = [keys.cpu().numpy().copy(), values.cpu().numpy().copy()]
    out = _C.cached_attention(q, k, v, keys, values, xt.tensor([3, 67]))
    for new, kept, old in ((k, keys, before[0]), (v, values, before[1])):
        old[0, :, 3], old[1, :, 67] = new.cpu().numpy()[0, :, 0], new.cpu().numpy()[1, :, 0]
        assert np.array_equal(kept.cpu().numpy(), old, equal_nan=True)
    assert np.isfinite(out.cpu().numpy()).all()


def test_the_first_position_gives_the_value() -> None:
    q, k, v, keys, values = inputs(2, 6, 2, 5, 8)
    out = _C.cached_attention(q, k, v, keys, values, xt.tensor([0, 0]))
    assert (out.cpu().numpy() == np.repeat(v.cpu().numpy(), 3, 1)).all()


def test_more_sequences_than_a_grid_has_rows() -> None:
    """65,535 at most in the second place of a CUDA grid."""
    q, k, v, keys, values = inputs(65537, 1, 1, 1, 64)
    out = _C.cached_attention(q, k, v, keys, values, xt.zeros(65537, dtype=xt.int64))
    assert bits(out) == bits(v) == bits(values) and bits(keys) == bits(k)


@pytest.mark.parametrize("plain", [False, True])
def test_positions_outside(plain: bool) -> None:
    """NaN for that sequence alone, and nothing is stored."""
    q, k, v, keys, values = inputs(3, 2, 1, 6, 64)
    before = bits(keys), bits(values)
    out = _C.cached_attention(q, k, v, keys, values, xt.tensor([-1, 6, 2**40]), plain=plain).cpu().numpy()
    assert np.isnan(out).all() and (bits(keys), bits(values)) == before
    out = _C.cached_attention(q, k, v, keys, values, xt.tensor([-1, 5, 6]), plain=plain).cpu().numpy()
    assert [bool(np.isnan(row).all()) for row in out] == [True, False, True] and np.isfinite(out[1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(2, 4, 2, 150, 64), (1, 7, 1, 129, 128), (2, 3, 3, 64, 64), (1, 12, 2, 300, 128)])
def test_both_kernels_and_attention_agree(dtype: str, sizes) -> None:
    """With scaled_dot_product_attention over what is stored, to what the format can show; step after step."""
    q, k, v, keys, values = inputs(*sizes, dtype=dtype)
    unit = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    other = keys.clone(), values.clone()
    for position in (0, 62, 63, 64, sizes[3] - 1):
        place = xt.full((sizes[0],), min(position, sizes[3] - 1), dtype=xt.int64)
        fast = _C.cached_attention(q, k, v, keys, values, place)
        plain = _C.cached_attention(q, k, v, *other, place, plain=True)
        end = place[0].item() + 1
        want = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], enable_gqa=True)
        scale = values.to(xt.float64).abs().max().item() * (3 * unit + 300 * min(unit, 2.0**-24))
        for got in (fast, plain):
            assert (got.to(xt.float64) - want.to(xt.float64)).abs().max().item() <= scale
    assert bits(keys) == bits(other[0]) and bits(values) == bits(other[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_company_and_again(dtype: str) -> None:
    """A sequence's result depends neither on the others nor on the room behind its position."""
    q, k, v, keys, values = inputs(4, 8, 2, 140, 64, dtype)
    places = xt.tensor([10, 139, 64, 63])
    out = [_C.cached_attention(q, k, v, keys, values, places) for _ in range(3)]
    assert bits(out[0]) == bits(out[1]) == bits(out[2])
    alone = [part[1:2].clone() for part in (q, k, v, keys, values)]
    assert bits(_C.cached_attention(*alone, places[1:2])) == bits(out[0][1:2])
    short = [part[2:3].clone() for part in (q, k, v)] + [part[2:3, :, :65].clone() for part in (keys, values)]
    assert bits(_C.cached_attention(*short, places[2:3])) == bits(out[0][2:3])


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_heads_apart_are_read_where_they_are(number: int, plain: bool) -> None:
    """Each head of the query, key or value in the left half of rows twice as wide."""
    given, want = inputs(2, 6, 2, 5, 8), inputs(2, 6, 2, 5, 8)
    wide = xt.full((*given[number].shape[:3], 16), 9.0)
    wide[..., :8] = given[number]
    given[number] = wide[..., :8]
    place = xt.tensor([2, 4])
    assert bits(_C.cached_attention(*given, place, plain=plain)) == bits(_C.cached_attention(*want, place, plain=plain))
    assert bits(given[3]) == bits(want[3]) and bits(given[4]) == bits(want[4])


def test_columns_of_one_product_are_taken_as_they_are() -> None:
    """query, key and value as views of [B, (H + 2 K) D], as a joined product makes them."""
    joined = xt.tensor(np.random.default_rng(2).standard_normal((2, 8 * 64)).astype(np.float32))
    views = [joined[:, a:b].view(2, n, 1, 64) for a, b, n in ((0, 256, 4), (256, 384, 2), (384, 512, 2))]
    _, _, _, keys, values = inputs(2, 4, 2, 9, 64)
    places = xt.tensor([4, 8])
    want = _C.cached_attention(*[view.contiguous() for view in views], keys.clone(), values.clone(), places)
    assert bits(_C.cached_attention(*views, keys, values, places)) == bits(want)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_elements_apart_are_read_where_they_are(number: int) -> None:
    """Two elements a head, every other one of four."""
    given, want = inputs(2, 2, 1, 5, 2), inputs(2, 2, 1, 5, 2)
    wide = xt.full((*given[number].shape[:3], 4), 9.0)
    wide[..., ::2] = given[number]
    given[number] = wide[..., ::2]
    place = xt.tensor([2, 4])
    assert bits(_C.cached_attention(*given, place)) == bits(_C.cached_attention(*want, place))
    assert bits(given[3]) == bits(want[3]) and bits(given[4]) == bits(want[4])


def test_what_is_refused() -> None:
    names = ("query", "key", "value", "keys", "values")
    for number, name in enumerate(names):
        given = inputs(1, 2, 1, 3, 4)
        given[number].requires_grad_()
        with pytest.raises(
            RuntimeError, match=f"^cached_attention: {name} must not require a gradient while recording"
        ):
            _C.cached_attention(*given, xt.tensor([0]))
    for number in (3, 4):
        given = inputs(1, 2, 2, 3, 4)
        given[number] = given[number].transpose(1, 2).contiguous().transpose(1, 2)
        with pytest.raises(ValueError, match=f"^cached_attention: {names[number]} must be contiguous, got strides"):
            _C.cached_attention(*given, xt.tensor([0]))
    one = [
        xt.ones(2),
        *[xt.ones(2, 2)] * 4,
        xt.ones(2),
        *[xt.ones(2, 2)] * 3,
    ]  # the weights of a layer without norms of heads
    with pytest.raises(RuntimeError, match="^decoder_step: x must not require a gradient while recording"):
        _C.decoder_step(xt.ones(1, 2).requires_grad_(), xt.tensor([0]), one, [xt.ones(1, 1, 3, 2)] * 2)
    with pytest.raises(ValueError, match="must be a multiple of key heads, got 3 and 2$"):
        _C.cached_attention(*inputs(1, 3, 2, 3, 4), xt.tensor([0]))


@pytest.mark.on_cpu
def test_heads_without_elements() -> None:
    """Nothing is copied from where nothing is, which UBSan sees (make sanitize)."""
    out = _C.cached_attention(*inputs(2, 4, 2, 5, 0), xt.tensor([0, 3]))
    assert tuple(out.shape) == (2, 4, 1, 0)


@pytest.mark.parametrize("number", [3, 4])
def test_changes_are_counted(number: int) -> None:
    """Autograd sees that keys and values have changed since they were saved."""
    given = inputs(1, 1, 1, 3, 2)
    x = xt.ones(1, 1, 3, 2).requires_grad_()
    y = (x * given[number]).sum()
    with xt.no_grad():
        _C.cached_attention(*given, xt.tensor([1]))
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


# ---- all layers of a step -----------------------------------------------------------------------------------------------------------

SIZES = dict(
    vocab_size=31, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64, initializer_range=0.3,
)  # fmt: skip
PLACES = [3, 0, 11]


def filled(config: object, dtype: xt.dtype) -> tuple[xt.nn.Module, list[KVCache], xt.Tensor]:
    """A model, caches that hold random keys and values, and where three rows stand."""
    xt.manual_seed(3)
    model = {Qwen3Config: Qwen3, LlamaConfig: Llama}[type(config)](config, dtype=dtype)
    positions, caches = xt.tensor(PLACES), model.make_caches(3, 12)
    for parameter in model.parameters():
        if len(parameter.shape) == 1:
            parameter.data.copy_(xt.rand(*parameter.shape).to(dtype) + 0.5)
    for cache in caches:
        cache.key, cache.value = (xt.randn(3, 2, 12, 8).to(dtype) for _ in range(2))
        cache.positions = positions
    return model, caches, positions


def weights_of(model: xt.nn.Module) -> list[xt.Tensor]:
    found = [decoder._step_weights(layer) for layer in model.model.layers]
    return [weight for layer in found if layer is not None for weight in layer[0]]


def stepped(
    model: xt.nn.Module, x: xt.Tensor, positions: xt.Tensor, caches: list[xt.Tensor], **options: object
) -> xt.Tensor:
    attn = model.model.layers[0].self_attn
    eps = model.config.rms_norm_eps
    return _C.decoder_step(x, positions, weights_of(model), caches, eps, attn.theta, **attn.scaling, **options)


SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("config", [Qwen3Config(**SIZES), LlamaConfig(**SIZES, rope_scaling=SCALED)])
@pytest.mark.parametrize(("dtype", "unit"), [(xt.float64, 2.0**-53), (xt.bfloat16, 2.0**-8)])
def test_a_step_is_the_layers_of_a_model(config: object, dtype: xt.dtype, unit: float) -> None:
    model, caches, positions = filled(config, dtype)
    x = xt.randn(3, 32).to(dtype)
    kept = [one.clone() for cache in caches for one in (cache.key, cache.value)]
    with xt.no_grad():
        got = stepped(model, x, positions, kept)
        want, y = x, None
        for layer, cache in zip(model.model.layers, caches, strict=True):
            want, y = layer.run(want, y, 3, 1, positions, cache)
        want = want + y
    stored = [one for cache in caches for one in (cache.key, cache.value)]
    for a, b in zip([got, *kept], [want, *stored], strict=True):
        a, b = a.to(xt.float64).cpu().numpy(), b.to(xt.float64).cpu().numpy()
        assert np.abs(a - b).max() <= 64 * unit * np.abs(b).max()


def test_rows_outside_the_cache() -> None:
    """NaN for that row alone, and nothing is stored for it; the others have their bits."""
    model, caches, positions = filled(Qwen3Config(**SIZES), xt.float32)
    x, old = xt.randn(3, 32), [one for cache in caches for one in (cache.key, cache.value)]
    with xt.no_grad():
        want = stepped(model, x, positions, [one.clone() for one in old]).cpu().numpy()
        for place in (-1, 12, 2**40):
            kept = [one.clone() for one in old]
            got = stepped(model, x, xt.tensor([3, place, 11]), kept).cpu().numpy()
            assert np.isnan(got[1]).all() and np.array_equal(got[::2], want[::2]), place
            assert all(np.array_equal(a[1].cpu().numpy(), b[1].cpu().numpy()) for a, b in zip(kept, old)), place


def test_changes_of_the_caches_are_counted() -> None:
    """A gradient that needs what was there before is refused."""
    model, caches, positions = filled(Qwen3Config(**SIZES), xt.float32)
    kept = [one for cache in caches for one in (cache.key, cache.value)]
    for changed in (0, 5):
        weight = xt.ones(8, requires_grad=True)
        y = (kept[changed] * weight).sum()
        with xt.no_grad():
            stepped(model, xt.randn(3, 32), positions, kept)
        with pytest.raises(RuntimeError, match="in place"):
            y.backward()


def test_members_that_the_op_does_not_replace() -> None:
    """A layer gives its weights only where it is computed as the op computes it."""

    class Other(decoder.MLP):
        pass

    for change in ("none", "mlp", "hook", "bias", "eps", "norm", "window"):
        layer = filled(Qwen3Config(**SIZES), xt.float32)[0].model.layers[1]
        if change == "mlp":
            layer.mlp.__class__ = Other
        elif change == "hook":
            layer.self_attn.o_proj.register_forward_hook(lambda *_: None)
        elif change == "bias":
            layer.mlp.up_proj.bias = xt.nn.Parameter(xt.ones(40))
        elif change == "eps":
            layer.self_attn.q_norm.eps = 0.5
        elif change == "norm":
            layer.self_attn.q_norm = None
        elif change == "window":
            layer.self_attn.window = 8
        assert (decoder._step_weights(layer) is None) == (change != "none"), change
