"""Clauses of decoder_step: it is the layers of a model one after the other, and what it stores."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.generation import KVCache
from xtrain.models import Llama, LlamaConfig, Qwen3, Qwen3Config, decoder

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

    for change in ("none", "mlp", "hook", "bias", "eps", "norm"):
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
        assert (decoder._step_weights(layer) is None) == (change != "none"), change
