"""`xtrain export`: the order of rotary channels and the vocabulary without any package, the file by gguf's own reader."""

import json
import os
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import xtrain as xt
from xtrain import models
from xtrain.cli import export, main
from xtrain.cli.export import whole
from xtrain.errors import DataError
from xtrain.models.gguf_vocabulary import _WORDS, CONTROL, NORMAL, UNUSED, USER_DEFINED, find_begin, write_vocabulary
from xtrain.models.to_gguf import check_config, frequency_divisors, neighbours, write_config, write_tensors

pytestmark = pytest.mark.on_cpu
SHAPE = dict(vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
BPE = {
    "added_tokens": [
        {"id": 0, "content": "<|end|>", "special": True, **PLAIN},
        {"id": 9, "content": "<note>", "special": False, **PLAIN},
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True},
    "model": {
        "type": "BPE",
        "vocab": {"<|end|>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4, "c": 5, "d": 6, "e": 7, "Ġab": 8},
        "merges": [["a", "b"], ["Ġ", "ab"]],
    },
}


# Words cut by qwen2's expression, and again by GPT-2's.
TWICE = [{"type": "Split", "pattern": {"Regex": _WORDS["qwen2"]}}, {"type": "ByteLevel", "use_regex": True}]


class Writer:
    """Takes down what is added."""

    def __init__(self):
        self.said = {}

    def __getattr__(self, name):
        return lambda value: self.said.__setitem__(name.removeprefix("add_"), value)


def test_rotation_of_halves_is_rotation_of_neighbours():
    """Rotary pairs (i, i + D/2) of [heads, D], put in llama.cpp's order, are its pairs (2 i, 2 i + 1), head by head."""
    heads, channels = 3, 8
    rng = np.random.default_rng(0)
    x, angle = rng.standard_normal((heads * channels, 5)), rng.standard_normal(channels // 2)

    def turned(first, second):
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return first * c - second * s, second * c + first * s

    halves = x.reshape(heads, 2, channels // 2, 5)
    want = neighbours(np.stack(turned(halves[:, 0], halves[:, 1]), 1).reshape(x.shape), heads)
    pairs = neighbours(x, heads).reshape(heads, channels // 2, 2, 5)
    got = np.stack(turned(pairs[:, :, 0], pairs[:, :, 1]), 2).reshape(x.shape)
    assert np.array_equal(got, want)
    assert np.array_equal(neighbours(x[:, 0], heads), neighbours(x, heads)[:, 0]), "a bias goes with its rows"


@pytest.mark.parametrize("merges", [["a b", "Ġ ab"], BPE["model"]["merges"]])
def test_vocabulary(merges):
    writer = Writer()
    write_vocabulary(writer, "t", json.dumps(BPE | {"model": BPE["model"] | {"merges": merges}}).encode(), 11, 0)
    assert writer.said["token_list"] == ["<|end|>", "a", "b", "ab", "Ġ", "c", "d", "e", "Ġab", "<note>", "[PAD10]"]
    assert writer.said["token_types"] == [CONTROL, *[NORMAL] * 8, USER_DEFINED, UNUSED]
    assert writer.said["token_merges"] == ["a b", "Ġ ab"]
    fewer = Writer()
    write_vocabulary(fewer, "t", json.dumps(BPE).encode(), 5, None)
    assert fewer.said["token_list"] == ["<|end|>", "a", "b", "ab", "Ġ"], "what the model has no rows for is left out"
    plain = {name: writer.said[name] for name in ("tokenizer_model", "tokenizer_pre", "add_bos_token", "eos_token_id")}
    assert plain == {"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "add_bos_token": False, "eos_token_id": 0}


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
}


@pytest.mark.parametrize(
    ("settings", "processor", "config_id", "want"),
    [
        ({}, None, None, (None, False)),
        ({}, None, 3, (3, False)),
        ({}, None, 0, (0, False)),
        ({}, None, True, (None, False)),
        ({"bos_token": "<|end|>"}, None, 3, (0, False)),
        ({"bos_token": {"content": "<|end|>"}, "add_bos_token": True}, None, None, (0, True)),
        ({"bos_token": "<|end|>"}, TEMPLATE, None, (0, True)),
        (
            {"bos_token": "<|end|>"},
            {"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE]},
            None,
            (0, True),
        ),
        ({"bos_token": "<|end|>", "add_bos_token": False}, TEMPLATE, None, (0, False)),
        ({"bos_token": "a"}, TEMPLATE, None, (1, False)),
    ],
)
def test_the_token_that_begins_a_text(settings, processor, config_id, want):
    files = {
        "tokenizer.json": json.dumps({**BPE, "post_processor": processor}).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }
    found = find_begin(files, config_id)
    assert found == want
    writer = Writer()
    write_vocabulary(writer, "t", files["tokenizer.json"], 11, 0, found)
    assert writer.said.get("bos_token_id") == want[0] and writer.said["add_bos_token"] is want[1]
    if found[0]:
        fewer = Writer()
        write_vocabulary(fewer, "t", files["tokenizer.json"], 1, 0, (found[0], True))
        assert "bos_token_id" not in fewer.said and fewer.said["add_bos_token"] is False


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    out = tmp_path / "x.gguf"
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises((DataError, KeyboardInterrupt)) as caught, whole(out) as temporary:
            assert temporary.parent == tmp_path
            temporary.write_bytes(b"half of it")
            raise error
        if isinstance(error, OSError):
            assert str(caught.value) == f"export: {out} cannot be written: No space left on device"
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit) as ended, whole(out) as temporary:
        temporary.write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143 and list(tmp_path.iterdir()) == []
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.append(os.fstat(file).st_ino), fsync(file)))
    with whole(out) as temporary:
        temporary.write_bytes(b"all of it")
        assert not out.exists() and not flushed
    assert flushed == [out.stat().st_ino, tmp_path.stat().st_ino]
    assert list(tmp_path.iterdir()) == [out] and out.read_bytes() == b"all of it"


@pytest.mark.parametrize(("digits", "name"), [(r"\p{N}", "qwen2"), (r"\p{N}{1,3}", "llama-bpe"), (r"\p{N}{1,2}", None)])
def test_words_by_name(digits, name):
    words = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    steps = [{"type": "Split", "pattern": {"Regex": words}}, {"type": "ByteLevel", "use_regex": False}]
    content = {**BPE, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    writer = Writer()
    if name is None:
        with pytest.raises(DataError, match="t: pre_tokenizer must cut text as one of gpt-2, qwen2, llama-bpe does"):
            write_vocabulary(writer, "t", json.dumps(content).encode(), 11, None)
    else:
        write_vocabulary(writer, "t", json.dumps(content).encode(), 11, None)
        assert writer.said["tokenizer_pre"] == name and "eos_token_id" not in writer.said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram"}}, "t: the tokenizer must be byte-level BPE, got 'Unigram'"),
        ({"pre_tokenizer": None}, "t: pre_tokenizer must cut text as one of"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "t: pre_tokenizer must cut text"),
        ({"model": {**BPE["model"], "merges": []}}, "t: merges must not be empty"),
        ({"model": {**BPE["model"], "byte_fallback": True}}, "t: the tokenizer must be byte-level BPE, got 'BPE'"),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "t: pre_tokenizer must cut text"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": TWICE}}, "t: pre_tokenizer must cut text"),
    ],
)
def test_tokenizers_without_a_place_are_refused(change, message):
    with pytest.raises(DataError, match=message):
        write_vocabulary(Writer(), "t", json.dumps({**BPE, **change}).encode(), 11, 0)


def test_models_without_a_place_are_refused():
    four = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    scaling = {"rope_type": "llama3", "factor": 2.0, **four}
    check_config(models.LlamaConfig(**SHAPE, rope_scaling=scaling))
    with pytest.raises(DataError, match="rope_scaling must be None or of type linear for qwen2, got 'llama3'"):
        check_config(models.Qwen2Config(**SHAPE, num_key_value_heads=2, rope_scaling=scaling))
    with pytest.raises(DataError, match="export: model_type must be llama, mistral, qwen2 or qwen3, got 'gpt2'"):
        check_config(models.GPT2Config(vocab_size=12, n_embd=16, n_layer=1, n_head=4))
    streams = models.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=4, mhc_streams=2)
    with pytest.raises(DataError, match="must be llama, mistral, qwen2 or qwen3, got 'xtrain_qwen3_mhc'"):
        check_config(streams)
    context = models.MistralConfig(**SHAPE, num_key_value_heads=2, max_position_embeddings=4096)
    check_config(context)
    context.sliding_window = 9
    with pytest.raises(DataError, match="sliding_window must be None or at least max_position_embeddings 4096, got 9"):
        check_config(context)


def test_frequencies_of_llama3_are_those_of_rope():
    """functional.rope turns the pair i by position * frequency / divisor: found again from its sines and cosines."""
    config = models.LlamaConfig(
        **{**SHAPE, "hidden_size": 128},
        rope_theta=500.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    divisors = frequency_divisors(config)
    assert divisors.dtype == np.float32 and divisors.shape == (16,)
    assert divisors[0] == 1 and divisors[-1] == 8 and any(1.01 < value < 7.99 for value in divisors)
    x = np.zeros((1, 2, 1, 32))
    x[..., :16] = 1
    turned = xt.functional.rope(xt.tensor(x, dtype=xt.float64), theta=500.0, **config.scaling).numpy()[0, 1, 0]
    angle = np.arctan2(turned[16:], turned[:16])
    want = 500.0 ** (-np.arange(0, 32, 2) / 32) / divisors
    assert np.max(np.abs(angle - want) / want) < 1e-6


def test_bad_command_lines(tmp_path, capsys, monkeypatch):
    there = tmp_path / "there.gguf"
    there.write_text("")
    dangling = tmp_path / "dangling.gguf"
    dangling.symlink_to(tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "gguf", None)
    for words, message in [
        ([], "--gguf needs a value: the file to write"),
        (["--gguf", str(there)], f"--gguf must be a file that does not exist, got {there}"),
        (["--gguf", str(dangling)], f"--gguf must be a file that does not exist, got {dangling}"),
        (["--gguf", "x", "--dtype", "float64"], "--dtype must be float32, float16 or bfloat16, got 'float64'"),
        (["--gguf", "x", "--dtype", "int8"], "--dtype must be float32, float16 or bfloat16, got 'int8'"),
        (["--gguf", "x"], "export needs the package gguf: pip install 'xtrain[gguf]'"),
    ]:
        assert main(["export", str(tmp_path), *words]) != 0
        assert message in capsys.readouterr().err


class Library:
    """As much of the package gguf as writing tensors takes."""

    class RopeScalingType:
        LINEAR = "linear"

    MODEL_ARCH_NAMES = {1: "llama", 2: "qwen2"}
    GGMLQuantizationType = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
    known = staticmethod(lambda name: name)

    def get_tensor_name_map(self, kind, blocks):
        return SimpleNamespace(get_name=lambda name, try_suffixes: self.known(name))

    quants = SimpleNamespace(quantize=lambda values, kind: values)


class Tensors(Writer):
    """Takes down the kind and the values of each tensor."""

    def __init__(self):
        super().__init__()
        self.kinds, self.values = {}, {}

    def add_tensor(self, name, values, raw_dtype=None):
        self.kinds[name], self.values[name] = raw_dtype, values


LLAMA3 = {
    "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def test_numbers_of_the_model(monkeypatch):
    """Each under its name, and none of them equal to another."""
    monkeypatch.setitem(sys.modules, "gguf", Library())
    config = models.LlamaConfig(
        vocab_size=12, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=10, max_position_embeddings=77, rope_theta=5000.0, rms_norm_eps=1e-5, rope_scaling={"rope_type": "linear", "factor": 8},
    )  # fmt: skip
    writer = Writer()
    write_config(writer, config, "name")
    assert writer.said == {
        "name": "name", "context_length": 77, "embedding_length": 24, "block_count": 3, "feed_forward_length": 40, "head_count": 4,
        "head_count_kv": 2, "key_length": 10, "value_length": 10, "rope_dimension_count": 10, "rope_freq_base": 5000.0,
        "layer_norm_rms_eps": 1e-5, "vocab_size": 12, "rope_scaling_type": "linear", "rope_scaling_factor": 8.0,
    }  # fmt: skip
    plain = Writer()
    write_config(plain, models.LlamaConfig(**SHAPE, rope_scaling=LLAMA3), "name")
    assert "rope_scaling_type" not in plain.said, "that scaling is a tensor"


@pytest.mark.parametrize(("held", "asked", "matrices"), [("bfloat16", None, "BF16"), ("float32", "float16", "F16")])
def test_matrices_have_a_dtype_and_vectors_are_float32(held, asked, matrices, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", Library())
    config = models.LlamaConfig(**SHAPE, rope_scaling=LLAMA3)
    tensors = {
        f"{name}.weight": xt.ones(*shape).to(getattr(xt, held)) for name, shape in (("a.up", (4, 2)), ("a.norm", (4,)))
    }
    writer = Tensors()
    assert write_tensors(writer, config, tensors, asked) == 3
    assert writer.kinds == {"a.up.weight": matrices, "a.norm.weight": "F32", "rope_freqs.weight": None}
    assert np.array_equal(writer.values["rope_freqs.weight"], frequency_divisors(config))
    for scaling in (None, {"rope_type": "linear", "factor": 8.0}):
        writer = Tensors()
        assert write_tensors(writer, models.LlamaConfig(**SHAPE, rope_scaling=scaling), tensors, asked) == 2
        assert "rope_freqs.weight" not in writer.kinds


def test_a_parameter_without_a_place_is_refused(monkeypatch):
    library = Library()
    library.known = {"a.up.weight": "up"}.get
    monkeypatch.setitem(sys.modules, "gguf", library)
    tensors = {"a.up.weight": xt.ones(2, 2), "a.extra.weight": xt.ones(2)}
    with pytest.raises(
        DataError, match=r"^export: llama of llama\.cpp has no place for the parameter 'a\.extra\.weight'$"
    ):
        write_tensors(Tensors(), models.LlamaConfig(**SHAPE), tensors, None)


def save(folder, family):
    xt.manual_seed(3)
    tied = family == "Qwen2"
    config = getattr(models, f"{family}Config")(
        **SHAPE, num_key_value_heads=2, tie_word_embeddings=tied, rms_norm_eps=1e-5, rope_theta=5000.0, eos_token_id=0
    )
    model = getattr(models, family)(config)
    model.save_pretrained(folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", **BPE}))
    return model


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_the_reader_of_gguf_finds_the_model(family, dtype, tmp_path, capsys):
    gguf = pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    model = save(tmp_path / "model", family)
    out = tmp_path / "model.gguf"
    assert main(["export", str(tmp_path / "model"), "--gguf", str(out), *(["--dtype", dtype] if dtype else [])]) == 0
    reader = gguf.GGUFReader(out)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = family.lower()
    assert fields["general.architecture"] == kind
    want = {"embedding_length": 16, "block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2}
    want |= {"feed_forward_length": 24, "rope.freq_base": 5000.0, "rope.dimension_count": 4, "vocab_size": 12}
    assert {name: fields[f"{kind}.{name}"] for name in want} == want
    assert fields[f"{kind}.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5, rel=1e-6)
    assert fields["tokenizer.ggml.eos_token_id"] == 0 and len(fields["tokenizer.ggml.tokens"]) == 12
    found = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    assert len(found) == len(state)
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    for theirs, ours in pairs.items():
        values = state[ours]
        if family == "Llama" and ("attn_q" in theirs or "attn_k" in theirs):
            values = neighbours(values, 4 if "attn_q" in theirs else 2)
        if dtype and values.ndim == 2:
            values = xt.tensor(values).to(xt.bfloat16).to(xt.float32).numpy()
        assert np.array_equal(found[theirs], values), theirs
    assert ("output.weight" in found) == (family == "Llama")
    assert ("blk.0.attn_q.bias" in found) == (family == "Qwen2")


def test_export_takes_the_averages_where_it_is_told_to(tmp_path, monkeypatch):
    save(tmp_path / "model", "Llama")
    asked = []

    def load_model(path, **options):
        asked.append(options)
        raise DataError("enough")

    monkeypatch.setattr(export.saving, "load_model", load_model)
    monkeypatch.setattr(export.to_gguf, "package", lambda op: None)
    for flag in ([], ["--ema"]):
        assert main(["export", str(tmp_path / "model"), "--gguf", str(tmp_path / "x"), *flag]) == 1
    assert asked == [{"ema": False}, {"ema": True}]
