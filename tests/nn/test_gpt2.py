"""GPT-2: what its config refuses, dropout, positions, files of the first release, members that are replaced. Numbers are
compared with transformers in parity/models/test_hf_families.py."""

from __future__ import annotations

import gc
import json
import re

import numpy as np
import pytest

import xtrain as xt
from xtrain import nn, saving
from xtrain.errors import CheckpointError
from xtrain.models import GPT2, GPT2Config, load
from xtrain.models.gpt2 import ARCHITECTURE
from xtrain.models.registry import RECOMPUTE
from xtrain.optable.table import array, bits
from xtrain.saving.safetensors import chunks
from xtrain.testing import record
from xtrain.train import Trainer

SIZES = dict(vocab_size=61, n_positions=24, n_embd=24, n_layer=2, n_head=4, initializer_range=0.2)
STILL = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
IDS = np.random.default_rng(0).integers(0, 61, (3, 12))


def make(**changes) -> GPT2:
    xt.manual_seed(1)
    return GPT2(GPT2Config(**{**SIZES, **STILL, **changes}))


def step(model) -> list[bytes]:
    model.zero_grad()
    loss = model.loss(xt.tensor(IDS[:, :-1]), xt.tensor(IDS[:, 1:]))
    loss.backward()
    return [bits(loss), *(bits(p.grad) for p in model.parameters())]


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(n_head=5), "n_head must divide n_embd 24, got 5"),
        (dict(n_embd=0), "n_embd must be an integer >= 1, got 0"),
        (dict(n_layer=True), "n_layer must be an integer >= 0, got True"),
        (dict(n_inner=0), "n_inner must be an integer >= 1, got 0"),
        (dict(attn_pdrop=1.0), r"attn_pdrop must be in \[0, 1\), got 1.0"),
        (dict(layer_norm_epsilon=0.0), "layer_norm_epsilon must be a positive number, got 0.0"),
        (dict(activation_function=["gelu"]), r"activation_function must be one of gelu_new, .*, got \['gelu'\]"),
        (dict(initializer_range=10**400), "initializer_range must be a positive number, got 10000"),
        (dict(activation_function="relu"), "activation_function must be one of gelu_new, .*, got 'relu'"),
        (dict(scale_attn_weights=1), "scale_attn_weights must be True or False, got 1"),
        (dict(model_type="gpt3"), "model_type must be 'gpt2', got 'gpt3'"),
        (dict(eos_token_id=[[1]]), r"eos_token_id must be None, a token id or a list of token ids, got \[\[1\]\]"),
        (dict(dtype="int8"), "dtype must be one of float32, .*, got 'int8'"),
    ],
)
def test_configs_that_no_model_has(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"^GPT2Config: {words}"):
        GPT2Config(**{**SIZES, **change})


@pytest.mark.parametrize("key", ["reorder_and_upcast_attn", "add_cross_attention", "quantization_config"])
def test_keys_that_change_the_result_are_refused(key: str) -> None:
    assert GPT2Config.from_dict({**SIZES, key: False}).extra == {key: False}
    with pytest.raises(ValueError, match=f"^GPT2Config: {key} is not supported, got True"):
        GPT2Config.from_dict({**SIZES, key: True})


def test_shapes_and_counts() -> None:
    for tied in (True, False):
        model = make(tie_word_embeddings=tied, n_inner=50)
        shapes = dict(ARCHITECTURE.tensor_shapes(model.config))
        assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == shapes
        assert ARCHITECTURE.count_parameters(model.config) == model.num_parameters()
    table, places = 61 * 24, 24 * 24
    weights = make().num_parameters() - places
    assert make().flops_per_token(10) == 6 * weights + 12 * 2 * 24 * 10
    untied = make(tie_word_embeddings=False)
    assert untied.flops_per_token(0) == 6 * (untied.num_parameters() - table - places)


def test_starting_values() -> None:
    model = make(n_embd=96, n_head=4, vocab_size=500)
    for name, p in model.named_parameters():
        values = array(p)
        if name.endswith("bias"):
            assert not values.any()
        elif "ln_" in name:
            assert (values == 1).all()
        else:
            want = 0.2 / 2 if name.endswith("c_proj.weight") else 0.2  # over the root of 2 n_layer
            assert abs(values.std() - want) < 0.05 * want, name


def test_batched_sequences_do_not_meet() -> None:
    """A token sees its past in its own sequence alone, and each position has its embedding."""
    model = make().eval()
    whole = array(model(xt.tensor(IDS)))
    for row in range(3):
        assert np.abs(array(model(xt.tensor(IDS[row : row + 1])))[0] - whole[row]).max() < 1e-5
    assert np.abs(array(model(xt.tensor(IDS[:, :5]))) - whole[:, :5]).max() < 1e-5
    positions = xt.tensor(np.tile(np.arange(12), 3))
    assert bits(model(xt.tensor(IDS), positions)) == bits(model(xt.tensor(IDS)))
    moved = array(model(xt.tensor(IDS), xt.tensor(np.tile(np.arange(1, 13), 3))))
    assert np.abs(moved - whole).max() > 1e-3
    for shape in ((3, 12), (12,)):  # as rope takes them
        assert bits(model(xt.tensor(IDS), positions[: np.prod(shape)].view(shape))) == bits(model(xt.tensor(IDS)))
    with pytest.raises(IndexError, match="^GPT2: ids must have at most n_positions 24 tokens per sequence, got 25$"):
        model(xt.tensor(np.zeros((1, 25), np.int64)))
    assert model(xt.tensor(IDS[:0])).shape == (0, 12, 61)


@pytest.mark.parametrize("shape", [(1,), (0,), (35,), (12, 3), (36, 1)])
def test_positions_have_one_entry_per_token(shape: tuple[int, ...]) -> None:
    """One position for all tokens would be broadcast over them."""
    words = rf"^GPT2: positions must have one entry per token of ids, shape \(36,\), \(B, S\) or \(S,\), got {re.escape(str(shape))}$"
    with pytest.raises(ValueError, match=words):
        make()(xt.tensor(IDS), xt.zeros(shape, dtype=xt.int64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_additions_inside_norms_have_the_bits_of_additions(dtype: str) -> None:
    """add_layer_norm takes all additions. A hook brings back those around its member, one at a time or all."""

    def ops(model) -> tuple[int, int, int]:
        with record() as recording, xt.no_grad():
            model.loss(xt.tensor(IDS[:, :-1]), xt.tensor(IDS[:, 1:]))
        names = [step.name for step in recording.steps]
        return tuple(names.count(name) for name in ("add_layer_norm", "layer_norm", "add"))

    model = make().to(xt._C.dtype(dtype))
    want = step(model)
    assert ops(model) == (4, 1, 1)  # the one addition is that of positions
    trunk = model.transformer
    for members, expected in (
        ([trunk.h[1]], (2, 3, 3)),
        ([trunk.ln_f], (3, 2, 2)),
        ([trunk.h[0].ln_2], (3, 2, 2)),
        ([trunk.h[1].ln_1], (3, 2, 2)),
        ([trunk.ln_f, *trunk.h, *(n for h in trunk.h for n in (h.ln_1, h.ln_2))], (0, 5, 5)),
    ):
        handles = [member.register_forward_hook(lambda *_: None) for member in members]
        assert ops(model) == expected
        assert step(model) == want
        for handle in handles:
            handle.remove()


def test_caches_are_one_per_layer() -> None:
    model = make()
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"^GPT2: caches must be one per layer, 2, got {count}$"):
            model(xt.tensor(IDS), caches=(model.make_caches(3, 12) * 2)[:count])


def test_generation_with_a_cache_is_generation_without() -> None:
    model = make().eval()
    out = array(model.generate(IDS[:, :4], 12, temperature=0.0, eos=()))
    current = IDS[:, :4]
    for _ in range(12):
        current = np.concatenate([current, array(model(xt.tensor(current)))[:, -1].argmax(-1)[:, None]], 1)
    assert np.array_equal(out, current)


@pytest.mark.parametrize("which", list(STILL))
def test_dropout_trains_and_rests(which: str) -> None:
    """Each of the three makes training random and repeatable, and does nothing in eval."""
    model = make(**{which: 0.4})
    assert step(model.eval()) == step(make())
    model.train()
    xt.manual_seed(5)
    first = step(model)
    xt.manual_seed(5)
    assert step(model) == first != step(model)


def test_generation_drops_nothing() -> None:
    """Also of a model that trains, whose parts keep their modes."""
    drops = make(**dict.fromkeys(STILL, 0.4))
    drops.transformer.h[0].eval()
    modes = [module.training for module in drops.modules()]
    assert drops.generate(IDS, 6, temperature=0).tolist() == make().generate(IDS, 6, temperature=0).tolist()
    with pytest.raises(IndexError):
        drops.generate([[61]], 1)
    assert [module.training for module in drops.modules()] == modes and len(set(modes)) == 2


def test_scores_are_divided_by_the_number_of_their_layer() -> None:
    one = dict(n_layer=1)
    assert step(make(**one, scale_attn_by_inverse_layer_idx=True)) == step(make(**one)), "the first is 1"
    assert step(make(scale_attn_by_inverse_layer_idx=True)) != step(make())


def test_composed_attention_is_attention() -> None:
    """The path of dropout with a rate that drops nothing in float32."""
    plain, composed = make(scale_attn_by_inverse_layer_idx=True), make(scale_attn_by_inverse_layer_idx=True)
    for block in composed.transformer.h:
        block.attn.dropout = 1e-30
    want, got = step(plain), step(composed)
    for w, g in zip(want, got, strict=True):
        w, g = np.frombuffer(w), np.frombuffer(g)
        assert np.abs(w - g).max() <= 1e-5 * np.abs(w).max() + 1e-8


def test_files_of_the_first_release(tmp_path) -> None:
    """Without the prefix, and with the masks of attention."""
    model = make()
    saving.save_model(model, tmp_path / "new")
    tensors = {name.removeprefix("transformer."): t for name, t in model.state_dict().items()}
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = xt.ones(1, 1, 24, 24)
        tensors[f"h.{layer}.attn.masked_bias"] = xt.zeros(())
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.safetensors").write_bytes(b"".join(map(bytes, chunks(tensors, {"format": "pt"}))))
    (tmp_path / "old" / "config.json").write_text((tmp_path / "new" / "config.json").read_text())
    again = load(tmp_path / "old")
    assert type(again) is GPT2 and [bits(p) for p in again.parameters()] == [bits(p) for p in model.parameters()]
    tensors["transformer.wte.weight"] = tensors["wte.weight"] + 1.0
    (tmp_path / "old" / "model.safetensors").write_bytes(b"".join(map(bytes, chunks(tensors, {"format": "pt"}))))
    with pytest.raises(CheckpointError, match="holds tensor transformer.wte.weight twice, by two names"):
        load(tmp_path / "old")
    del tensors["transformer.wte.weight"]
    del tensors["h.1.ln_2.bias"]
    (tmp_path / "old" / "model.safetensors").write_bytes(b"".join(map(bytes, chunks(tensors, {"format": "pt"}))))
    with pytest.raises(CheckpointError, match="lacks tensor transformer.h.1.ln_2.bias"):
        load(tmp_path / "old")


@pytest.mark.parametrize(
    "name", ["transformer.h.1.ln_1", "transformer.h.0.attn", "transformer.h.1.mlp.c_fc", "transformer.h.0"]
)
def test_members_are_called(name: str) -> None:
    model, seen = make(), []
    place, _, last = name.rpartition(".")
    owner = model
    for part in place.split("."):
        owner = getattr(owner, part)
    getattr(owner, last).register_forward_hook(lambda *_: seen.append(1))
    assert step(model) == step(make()) and len(seen) == 1


def test_a_head_of_its_own_is_called() -> None:
    model = make(tie_word_embeddings=False)
    want = array(model.loss(xt.tensor(IDS), xt.tensor(IDS)))
    model.lm_head.register_forward_hook(lambda module, args, out: out * 2.0)
    assert abs(array(model.loss(xt.tensor(IDS), xt.tensor(IDS))) - want) > 1e-3


def test_fine_tuning_by_the_command(tmp_path) -> None:
    """A model directory goes on training, with its family and its dropout."""
    saving.save_model(make(vocab_size=256, embd_pdrop=0.1, attn_pdrop=0.1), tmp_path / "m")
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    given = dict(model=str(tmp_path / "m"), data=str(tmp_path / "text.txt"), steps=3, seq_len=16, batch_size=2)
    trainer = Trainer(given | {"out": str(tmp_path / "run"), "sample.tokens": 0, "eval_tokens": 32}, quiet=True)
    trainer.run()
    saved = sorted((tmp_path / "run").glob("checkpoint-*"))[-1]
    assert json.loads((saved / "config.json").read_text())["model_type"] == "gpt2"
    again = load(saved)
    assert again.config.attn_pdrop == 0.1
    state = xt.get_rng_state()
    assert trainer.evaluate() == trainer.evaluate() and xt.get_rng_state() == state, "an evaluation drops nothing"
    assert trainer.model.training and trainer.model.transformer.drop.training
    assert [bits(p) for p in again.parameters()] == [bits(p) for p in trainer.model.parameters()]
    assert isinstance(again.transformer.h[0].ln_1, nn.LayerNorm)


def held() -> int:
    """Bytes of living tensors."""
    gc.collect()
    return xt._C.memory_stats(xt.get_default_device())["allocated"]


def recomputed(policy: str, rate: float) -> tuple[list[object], int]:
    """The bits of a step, and the bytes that its forward leaves."""
    model = make(n_layer=5, resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate)
    model.recompute = policy
    assert model.gradient_checkpointing == (policy in ("block", "full"))
    xt.manual_seed(3)
    ids, targets = xt.tensor(IDS[:, :-1]), xt.tensor(IDS[:, 1:])
    before = held()
    loss = model.loss(ids, targets)
    kept = held() - before
    loss.backward()
    found = [bits(loss), *(bits(p.grad) for p in model.parameters()), xt.get_rng_state()]
    assert bits(model.eval()(ids)) == bits(make(n_layer=5).eval()(ids)), "evaluation knows no policy"
    return found, kept


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_policies_have_the_same_bits(rate: float) -> None:
    """And keep less each; dropout draws the same numbers again."""
    found = {policy: recomputed(policy, rate) for policy in RECOMPUTE}
    assert all(result == found["none"][0] for result, _ in found.values())
    kept = [kept for _, kept in found.values()]
    assert kept == sorted(set(kept), reverse=True)


def test_policies_are_names() -> None:
    model = make()
    assert model.recompute == "none" and model.gradient_checkpointing is False
    model.gradient_checkpointing = True
    assert model.recompute == "block"
    model.recompute, model.gradient_checkpointing = "full", True
    assert model.recompute == "full", "it is on already"
    model.gradient_checkpointing = False
    assert model.recompute == "none"
    with pytest.raises(ValueError, match="^GPT2: recompute must be one of none, cheap, block, full, got 'all'$"):
        model.recompute = "all"
