"""Llama, Mistral, Qwen2 and Gemma 2: what their configs read and refuse. Numbers are compared in parity/models/test_hf_families.py."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import models, nn
from xtrain.models.gemma2 import GemmaNorm
from xtrain.models.registry import MODULES, architecture
from xtrain.optable.references import rope
from xtrain.optable.table import array, bits

SMALL = dict(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
DECODERS = [kind for kind in MODULES if kind not in ("gpt2",)]


@pytest.mark.parametrize("kind", DECODERS)
def test_shapes_and_counts(kind: str) -> None:
    found = architecture(kind)
    for change in ({}, {"tie_word_embeddings": True}, {"head_dim": 10}):
        config = found.config(**{**SMALL, **change})
        model = found.model(config)
        assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == dict(found.tensor_shapes(config))
        assert found.count_parameters(config) == model.num_parameters()
        if found.config.windowed:
            assert found.count_parameters(found.config.from_dict(config.to_dict())) == model.num_parameters()


def test_biases() -> None:
    def biases(config) -> set[str]:
        names = dict(architecture(config.model_type).tensor_shapes(config))
        return {name.split(".")[-2] for name in names if name.endswith(".bias")}

    qkv, mlp = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert biases(models.LlamaConfig(**SMALL)) == biases(models.MistralConfig(**SMALL)) == set()
    assert biases(models.LlamaConfig(**SMALL, attention_bias=True)) == qkv | {"o_proj"}
    assert biases(models.LlamaConfig(**SMALL, mlp_bias=True)) == mlp
    assert biases(models.Qwen2Config(**SMALL)) == qkv


@pytest.mark.parametrize(
    "kind,change,words",
    [
        ("mistral", dict(sliding_window=0), "sliding_window must be None or an integer >= 1, got 0"),
        ("mistral", dict(sliding_window=True), "sliding_window must be None or an integer >= 1, got True"),
        ("mistral", dict(layer_types=["sliding_attention"] * 2), "layer_types is not supported"),
        ("mistral", dict(attention_bias=True), "attention_bias must be False"),
        ("qwen2", dict(attention_bias=True), "attention_bias must be False"),
        ("llama", dict(use_sliding_window=True), "use_sliding_window is not supported, got True"),
        ("llama", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types is not supported"),
        ("qwen2", dict(use_sliding_window=1), "use_sliding_window must be True or False, got 1"),
        ("qwen2", dict(use_sliding_window=True, sliding_window=None), "sliding_window must be an integer >= 1 with"),
        ("qwen3", dict(max_window_layers=-1), "max_window_layers must be an integer >= 0, got -1"),
        (
            "qwen3",
            dict(layer_types=["full_attention"] * 3, use_sliding_window=True),
            "layer_types must have .* 2 .*, got 3",
        ),
        (
            "qwen3",
            dict(layer_types=["full_attention", "chunked"]),
            "layer_types must be full_attention or sliding.*, got 'chunked'",
        ),
        (
            "qwen2",
            dict(layer_types=["full_attention", "sliding_attention"]),
            "layer_types must be full_attention without",
        ),
        ("qwen2", dict(attn_logit_softcapping=30.0), "attn_logit_softcapping is not supported, got 30.0"),
        ("gemma2", dict(attn_logit_softcapping=0), "attn_logit_softcapping must be None or positive and finite in flo"),
        ("gemma2", dict(final_logit_softcapping=1e39), "final_logit_softcapping must be None or .* float32, got 1e"),
        ("gemma2", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar must be a positive number, got 0"),
        ("gemma2", dict(hidden_activation="gelu"), "hidden_activation must be 'gelu_pytorch_tanh', got 'gelu'"),
        ("gemma2", dict(layer_types=["full_attention"]), "layer_types must have num_hidden_layers 2 entries, got 1"),
        ("gemma2", dict(use_bidirectional_attention=True), "use_bidirectional_attention is not supported, got True"),
        ("gemma2", dict(logits_scaling=2.0), "logits_scaling is not supported, got 2.0"),
        ("llama", dict(pretraining_tp=2), "pretraining_tp is not supported, got 2"),
        ("llama", dict(mlp_bias="yes"), "mlp_bias must be True or False, got 'yes'"),
        ("qwen3", dict(mlp_bias=True), "mlp_bias is not supported, got True"),
        ("llama", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_scaling is not supported"),
        ("llama", dict(rope_scaling=dict(type="dynamic", factor=4.0)), "rope_scaling is not supported"),
        ("llama", dict(rope_scaling=LLAMA3 | dict(partial_rotary_factor=0.5)), "rope_scaling is not supported"),
        ("llama", dict(rope_scaling=LLAMA3 | dict(factor=0)), "rope_scaling must have a positive factor"),
        (
            "llama",
            dict(rope_scaling=LLAMA3 | dict(attention_factor=2.0)),
            "rope_scaling must not have attention_factor",
        ),
        (
            "llama",
            dict(rope_scaling=LLAMA3 | dict(low_freq_factor=4.0)),
            "rope_scaling must have low_freq_factor below high_freq",
        ),
        ("llama", dict(rope_scaling="linear"), "rope_scaling must be an object, got 'linear'"),
        ("llama", dict(rope_scaling={**LLAMA3, "x": 1, 3: 4}), "rope_scaling must not have 3"),
        ("llama", dict(rope_scaling=LLAMA3 | dict(factor=10**400)), "rope_scaling must have a positive factor"),
        (
            "llama",
            dict(rope_scaling=dict(type="linear", factor=1e-10)),
            "rope_scaling must have a factor of at least 1e-09, got",
        ),
        ("llama", dict(rope_theta=1e-10), "rope_theta must be at least 1e-09, got 1e-10"),
        ("llama", dict(eos_token_id="2"), "eos_token_id must be None, a token id or a list of token ids, got '2'"),
        ("llama", dict(eos_token_id=[1, 2.0]), r"eos_token_id must be None, .*, got \[1, 2.0\]"),
        ("qwen3", dict(eos_token_id=True), "eos_token_id must be None, .*, got True"),
        ("qwen3", dict(eos_token_id=-1), "eos_token_id must be None, .*, got -1"),
        ("llama", dict(rope_theta=10**400), "rope_theta must be a positive number, got 10000"),
        ("llama", dict(rope_parameters=dict(full_attention=LLAMA3)), "rope_parameters is not supported"),
        ("llama", dict(layer_types=3), "layer_types must be a list, got 3"),
        ("llama", dict(hidden_act="gelu"), "hidden_act must be 'silu', got 'gelu'"),
        (
            "llama",
            dict(num_attention_heads=5, num_key_value_heads=5),
            "head_dim must be given where num_attention_heads 5",
        ),
        ("llama", dict(model_type="qwen2"), "model_type must be 'llama', got 'qwen2'"),
    ],
)
def test_keys_that_change_the_result_are_refused(kind: str, change: dict, words: str) -> None:
    config = architecture(kind).config
    with pytest.raises(ValueError, match=f"^{config.__name__}: {words}"):
        config.from_dict({**SMALL, **change})


def test_what_a_file_leaves_out() -> None:
    """head_dim follows from the heads of queries, not from those of keys; a dtype may have PyTorch's name."""
    config = models.LlamaConfig.from_dict({"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2})
    assert config.head_dim == config.per_head == 8 and config.dtype == "float32"
    assert models.LlamaConfig.from_dict({**SMALL, "torch_dtype": "torch.bfloat16"}).dtype == "bfloat16"
    assert models.LlamaConfig.from_dict({**SMALL, "dtype": None}).dtype == "float32"
    assert models.LlamaConfig.from_dict({**SMALL, "dtype": "float16", "torch_dtype": "float16"}).dtype == "float16"
    with pytest.raises(ValueError, match="^LlamaConfig: torch_dtype must agree with dtype 'float32', got 'float16'$"):
        models.LlamaConfig.from_dict({**SMALL, "dtype": "float32", "torch_dtype": "float16"})


def test_a_config_and_its_file(tmp_path) -> None:
    """Neither direction changes what it is given, or hands out its own lists; what no model has is not written."""
    values = {**SMALL, "torch_dtype": "torch.float16", "rope_theta": 10000.0, "a_key": [1]}
    given = dict(values)
    config = models.Qwen3Config.from_dict(values)
    assert values == given and config.to_dict()["a_key"] == [1]
    config.to_dict()["another"] = 3
    assert "another" not in config.to_dict() and "layer_types" not in config.extra
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.to_dict()["layer_types"].append("more")
    assert len(config.layer_types) == config.num_hidden_layers
    config.dtype = "int8"
    with pytest.raises(ValueError, match="^Qwen3Config: dtype must be one of "):
        config.to_dict()
    (tmp_path / "config.json").write_bytes(b'{"hidden_size": "\xff"}')
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ValueError, match=r"^Qwen3Config: \S+config\.json must be JSON, got "):
            models.Qwen3Config.from_json(path)


def test_scaled_frequencies_are_used() -> None:
    """Linear scaling by 2 makes position 2 i what position i was. Llama 3's makes another model."""

    def logits(scaling, positions) -> bytes:
        xt.manual_seed(2)
        model = models.Llama(models.LlamaConfig(**SMALL, rope_scaling=scaling, initializer_range=0.3))
        return bits(model(xt.tensor([[5, 6, 7, 8]]), xt.tensor(positions)))

    plain = logits(None, [0, 1, 2, 3])
    assert logits({"rope_type": "linear", "factor": 2.0}, [0, 2, 4, 6]) == plain
    assert logits({"rope_type": "linear", "factor": 2.0}, [0, 1, 2, 3]) != plain
    assert logits({**LLAMA3, "original_max_position_embeddings": 16}, [0, 1, 2, 3]) != plain


def test_windows_of_layers() -> None:
    """As transformers reads them; a file says them in full."""
    kinds = ["sliding_attention", "full_attention"]
    for kind, keys, windows in (
        ("llama", {}, [None, None]),
        ("mistral", {"sliding_window": 5}, [5, 5]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("qwen2", {"sliding_window": 5, "max_window_layers": 1}, [None, None]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, [None, 5]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": kinds}, [5, None]),
        ("gemma2", {"sliding_window": 5}, [5, None]),
        ("gemma2", {"sliding_window": 5, "layer_types": kinds[::-1]}, [None, 5]),
        ("gemma2", {"sliding_window": None}, [None, None]),
    ):
        config = architecture(kind).config.from_dict({**SMALL, **keys})
        again = type(config).from_dict(config.to_dict())
        for found in (config, again):
            assert [found.window(layer) for layer in range(2)] == windows, (kind, keys)
        assert [layer.self_attn.window for layer in architecture(kind).model(config).model.layers] == windows


@pytest.mark.parametrize("kind, keys", [
    ("mistral", {}),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}),
    ("gemma2", {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1, "tie_word_embeddings": False}),
])  # fmt: skip
def test_generation_obeys_the_window(kind: str, keys: dict) -> None:
    """Token by token through the cache, prompts of several lengths: the tokens of a model that sees the whole text anew."""
    xt.manual_seed(3)
    model = architecture(kind).model(
        architecture(kind).config(**SMALL, **keys, sliding_window=3, initializer_range=0.4, eos_token_id=None)
    )
    prompts = [[5, 6, 7, 8, 9, 10, 11], [1, 2]]
    for row, found in zip(prompts, model.generate(prompts, 12, temperature=0.0), strict=True):
        text = list(row)
        for _ in range(12):
            text.append(int(model(xt.tensor([text]))[0, -1].argmax().item()))
        assert [token for token in found.tolist() if token >= 0][-12:] == text[-12:]


def test_two_forms_of_a_scaling_agree() -> None:
    """rope_scaling and rope_parameters: either, or both when they say the same; both are written."""
    wanted = LLAMA3
    for forms in (
        dict(rope_scaling=LLAMA3, rope_theta=5e5),
        dict(rope_scaling={**LLAMA3, "type": "llama3"}, rope_theta=5e5),
        dict(rope_parameters={**LLAMA3, "rope_theta": 5e5}),
        dict(rope_scaling=LLAMA3, rope_parameters={**LLAMA3, "rope_theta": 5e5}),
    ):
        config = models.LlamaConfig.from_dict({**SMALL, **forms})
        assert config.rope_scaling == wanted and config.rope_theta == 5e5
        written = config.to_dict()
        assert written["rope_scaling"] == wanted and written["rope_parameters"] == {**wanted, "rope_theta": 5e5}
        assert models.LlamaConfig.from_dict(written) == config
    for forms, words in (
        (
            dict(rope_scaling=LLAMA3, rope_parameters={**LLAMA3, "factor": 2.0}),
            "rope_scaling must agree with rope_param",
        ),
        (
            dict(rope_scaling=LLAMA3, rope_parameters={"rope_type": "default"}),
            "rope_scaling must agree with rope_param",
        ),
        (dict(rope_theta=1e4, rope_parameters={"rope_theta": 5e5}), "rope_theta must agree with rope_parameters"),
    ):
        with pytest.raises(ValueError, match=f"^LlamaConfig: {words}"):
            models.LlamaConfig.from_dict({**SMALL, **forms})
    assert models.LlamaConfig.from_dict(SMALL).to_dict()["rope_scaling"] is None


@pytest.mark.parametrize("kind", DECODERS)
def test_a_model_takes_its_own_config(kind: str) -> None:
    found = architecture(kind)
    with pytest.raises(TypeError, match=f"^{found.config.family}: config must be a {found.config.__name__}, got int"):
        found.model(3)


def gemma2_logits(model: models.Gemma2, ids: np.ndarray) -> np.ndarray:
    """The formulas of Gemma 2, in float64: ids [S] -> logits [S, V]."""
    config, w = model.config, {name: array(value) for name, value in model.state_dict().items()}
    heads, kv, d, s = config.num_attention_heads, config.kv_heads, config.per_head, len(ids)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * (1 + w[f"{name}.weight"])

    def cap(x: np.ndarray, c: float | None) -> np.ndarray:
        return x if c is None else c * np.tanh(x / c)

    x = w["model.embed_tokens.weight"][ids] * np.float64(np.float32(config.hidden_size**0.5))
    for i, kind in enumerate(config.layer_types or ("sliding_attention", "full_attention")):
        at = f"model.layers.{i}"
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (
            (h @ w[f"{at}.self_attn.{name}_proj.weight"].T).reshape(s, -1, d).swapaxes(0, 1) for name in ("q", "k", "v")
        )
        q, k = (rope(t.swapaxes(0, 1), config.rope_theta).swapaxes(0, 1) for t in (q, k))
        k, v = (t.repeat(heads // kv, 0) for t in (k, v))
        scores = cap(q @ k.swapaxes(1, 2) / np.sqrt(config.query_pre_attn_scalar), config.attn_logit_softcapping)
        ahead = np.arange(s)[:, None] - np.arange(s)
        seen = (ahead >= 0) & (ahead < (config.sliding_window if kind == "sliding_attention" else s))
        p = np.exp(np.where(seen, scores, -np.inf))
        h = (p / p.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(s, heads * d) @ w[
            f"{at}.self_attn.o_proj.weight"
        ].T
        x = x + norm(h, f"{at}.post_attention_layernorm")
        h = norm(x, f"{at}.pre_feedforward_layernorm")
        gate, up = (h @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        x = x + norm((gate * up) @ w[f"{at}.mlp.down_proj.weight"].T, f"{at}.post_feedforward_layernorm")
    return cap(norm(x, "model.norm") @ w["model.embed_tokens.weight"].T, config.final_logit_softcapping)


@pytest.mark.parametrize("caps", [(1.5, 2.0), (None, None)])
def test_gemma2_has_its_formulas(caps: tuple) -> None:
    """Logits, those of the last token, and the loss, which never makes them; the table's scale in bfloat16 has 8 bits."""
    attn, final = caps
    config = models.Gemma2Config(
        **SMALL, head_dim=8, sliding_window=3, attn_logit_softcapping=attn, final_logit_softcapping=final,
        query_pre_attn_scalar=3, initializer_range=0.5,
    )  # fmt: skip
    xt.manual_seed(5)
    model = models.Gemma2(config, dtype=xt.float64)
    assert all(not array(p).any() for name, p in model.named_parameters() if "norm" in name)  # 1 + 0
    with xt.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(p, -0.5, 0.5)
    ids = np.random.default_rng(1).integers(0, 61, (3, 9))
    want = np.stack([gemma2_logits(model, row) for row in ids])
    assert np.abs(array(model(xt.tensor(ids))) - want).max() <= 1e-12 * np.abs(want).max()
    assert (
        np.abs(array(model.last_logits(xt.tensor(ids), None, None)) - want[:, -1]).max() <= 1e-12 * np.abs(want).max()
    )
    flat = xt.tensor(want[:, :-1].reshape(-1, 61))
    loss = F.cross_entropy(flat, xt.tensor(ids[:, 1:].reshape(-1))).item()
    for _ in range(2):
        got = model.loss(xt.tensor(ids[:, :-1].copy()), xt.tensor(ids[:, 1:].copy())).item()
        assert abs(got - loss) <= 1e-12 * loss
        model.register_forward_hook(lambda *_: None)  # the second way: the cross entropy of self(ids)
    table = models.Gemma2(config, dtype=xt.bfloat16).model.embed_tokens
    scaled = array(table.weight[7]) * 4.90625  # sqrt(24) is 4.899
    assert np.array_equal(array(table(xt.tensor([7]))[0]), array(xt.tensor(scaled).to(xt.bfloat16)))


def test_gemma2_norms_are_rounded_once() -> None:
    """cast((1 + weight) x rstd): neither 1 + weight nor x rstd is rounded before."""
    xt.manual_seed(2)
    x, norm = xt.randn(9, 64, dtype=xt.bfloat16), GemmaNorm(64, 1e-6, dtype=xt.bfloat16)
    nn.init.uniform_(norm.weight, -0.5, 0.5)
    wide = array(x).astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (1 + array(norm.weight).astype(np.float64))
    assert np.mean(array(norm(x)) == array(xt.tensor(want).to(xt.bfloat16))) > 0.99


@pytest.mark.parametrize("dtype", [xt.float32, xt.bfloat16])
def test_gemma2_recomputes_the_same_bits(dtype: xt.dtype) -> None:
    ids = xt.tensor(np.random.default_rng(4).integers(0, 61, (2, 9)))
    found = []
    for policy in ("none", "cheap", "block", "full"):
        xt.manual_seed(6)
        model = models.Gemma2(models.Gemma2Config(**SMALL, sliding_window=4, initializer_range=0.3), dtype=dtype)
        for layer in model.model.layers:
            nn.init.uniform_(layer.input_layernorm.weight, -0.5, 0.5)
            nn.init.uniform_(layer.pre_feedforward_layernorm.weight, -0.5, 0.5)
        model.recompute = policy
        loss = model.loss(ids, ids)
        loss.backward()
        found.append([bits(loss), *(bits(p.grad) for p in model.parameters())])
    assert found.count(found[0]) == 4


def test_gemma2_members_are_called() -> None:
    """A hook sees each norm, layer and part once a forward; the logits keep their bits."""
    xt.manual_seed(6)
    model = models.Gemma2(models.Gemma2Config(**SMALL, sliding_window=4, initializer_range=0.3))
    ids = xt.tensor([[1, 2, 3, 4]])
    want, seen = bits(model(ids)), []
    names = [name for name, _ in model.named_modules() if name.count(".") >= 2]
    for name, module in model.named_modules():
        if name in names:
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    assert bits(model(ids)) == want and sorted(seen) == sorted(names)
