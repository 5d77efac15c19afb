"""What model directories and checkpoints promise, a test for each clause: which files, which dtype, what is refused."""

from __future__ import annotations

import json
import os
import struct
from types import SimpleNamespace

import pytest

import xtrain as xt
from xtrain import _C, saving
from xtrain.errors import CheckpointError
from xtrain.models import Qwen3, Qwen3Config
from xtrain.optable.table import bits
from xtrain.saving.safetensors import SafetensorsFile, chunks

pytestmark = pytest.mark.on_cpu

SIZES = dict(
    vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)  # fmt: skip


def model(**changes) -> Qwen3:
    return Qwen3(Qwen3Config(**{**SIZES, **changes}))


class Ends:
    """A tokenizer of two files, whose documents end with token 7."""

    vocab_size, eos = 31, 7

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": b"{}", "merges.txt": b"a b"}


def rewrite(directory, tensors: dict) -> None:
    """Other tensors in place of those of a directory, as from elsewhere: without a manifest."""
    (directory / "manifest.json").unlink(missing_ok=True)
    (directory / "model.safetensors").write_bytes(b"".join(bytes(memoryview(c)) for c in chunks(tensors)))


def test_what_a_directory_says_of_itself(tmp_path) -> None:
    """The dtype under both names, the end of a document in both files, and the tokenizer's files as they are."""
    saving.save_model(model().to(xt.bfloat16), tmp_path / "m", tokenizer=Ends())
    config, generation = (
        json.loads((tmp_path / "m" / f"{name}.json").read_text()) for name in ("config", "generation_config")
    )
    assert (
        config["dtype"] == config["torch_dtype"] == "bfloat16"
        and config["eos_token_id"] == generation["eos_token_id"] == 7
    )
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == b"{}" and (
        tmp_path / "m" / "merges.txt"
    ).read_bytes() == b"a b"
    saving.save_model(model(), tmp_path / "n")
    generation = json.loads((tmp_path / "n" / "generation_config.json").read_text())
    assert generation == {} and sorted(os.listdir(tmp_path / "n")) == [
        "config.json", "generation_config.json", "manifest.json", "model.safetensors",
    ]  # fmt: skip


def dtypes(m: xt.nn.Module) -> set[str]:
    return {p.dtype.name for p in m.parameters()}


def test_the_dtype_of_a_model_that_is_loaded(tmp_path) -> None:
    """That of the file, or the one asked for; float32 where the tensors of a file differ."""
    m = model().to(xt.bfloat16)
    saving.save_model(m, tmp_path / "m")
    assert dtypes(saving.load_model(tmp_path / "m")) == {"bfloat16"}
    for dtype in (xt.float32, xt.float64):
        assert dtypes(saving.load_model(tmp_path / "m", dtype=dtype)) == {dtype.name}
    tensors = dict(m.state_dict())
    for other in (xt.float32, xt.float16):
        rewrite(tmp_path / "m", {**tensors, "model.norm.weight": tensors["model.norm.weight"].to(other)})
        assert dtypes(saving.load_model(tmp_path / "m")) == {"float32"}


def test_coefficients_of_streams_stay_wide(tmp_path) -> None:
    """They are float32 in a bfloat16 model, and do not count when its dtype is found."""
    m = model(mhc_streams=2).to(xt.bfloat16)
    saving.save_model(m, tmp_path / "m")
    again = saving.load_model(tmp_path / "m")
    assert {k: (v.dtype.name, bits(v)) for k, v in again.state_dict().items()} == {
        k: (v.dtype.name, bits(v)) for k, v in m.state_dict().items()
    }
    assert dtypes(again) == {"bfloat16", "float32"}


def test_a_checkpoint_takes_the_dtype_of_its_model(tmp_path) -> None:
    m = model()
    saving.save_checkpoint(tmp_path / "checkpoint-00000001", m, None, {"step": 1})
    other = model().to(xt.float64)
    saving.load_checkpoint(tmp_path / "checkpoint-00000001", other)
    assert dtypes(other) == {"float64"} and other.model.norm.weight.tolist() == m.model.norm.weight.tolist()


def test_tensors_that_do_not_fit_are_refused_whoever_loads_them(tmp_path) -> None:
    """load_tensors too, which is given a model: before it changes it."""
    m = model()
    whole = {name: tensor.clone() for name, tensor in m.state_dict().items()}
    before = {name: bits(tensor) for name, tensor in m.state_dict().items()}
    for change, words in (
        ({"model.norm.weight": xt.zeros(4, 4)}, r"model\.norm\.weight must have shape \(16,\), got \(4, 4\)"),
        ({"more": xt.zeros(1)}, "holds unknown tensor more"),
        ({"model.norm.weight": None}, r"lacks tensor model\.norm\.weight"),
    ):
        tensors = {name: tensor for name, tensor in {**whole, **change}.items() if tensor is not None}
        with pytest.raises(CheckpointError, match=words):
            saving.model.load_tensors(m, tensors, tmp_path)
        assert {name: bits(tensor) for name, tensor in m.state_dict().items()} == before


def test_a_tied_head_needs_its_table(tmp_path) -> None:
    """A head without the table that it equals is no model."""
    m = model(tie_word_embeddings=True)
    table = m.state_dict()["model.embed_tokens.weight"]
    tensors = {
        name: tensor.clone() for name, tensor in saving.model.model_tensors(m).items() if "embed_tokens" not in name
    }
    with pytest.raises(CheckpointError, match=r"lm_head\.weight must equal model\.embed_tokens\.weight"):
        saving.model.load_tensors(m, {**tensors, "lm_head.weight": table}, tmp_path)


def test_an_index_that_lies_is_refused(tmp_path) -> None:
    saving.save_model(model(), tmp_path / "m", shard_bytes=3000)
    (tmp_path / "m" / "manifest.json").unlink()
    index = tmp_path / "m" / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    where = values["weight_map"]
    files = list(where.values())
    first = next(file for file in files if files.count(file) > 1)
    second = next(file for file in files if file != first)
    inside = next(name for name, file in where.items() if file == first)
    for changes, words in (
        ({inside: second}, f"holds tensor {inside}, which the index places in {second}"),
        ({"ghost": first}, f"places tensor ghost in {first}, which does not hold it"),
        ({inside: 3}, "must map tensor names to files in weight_map"),
    ):
        index.write_text(json.dumps({**values, "weight_map": {**where, **changes}}))
        with pytest.raises(CheckpointError, match=words):
            saving.load_model(tmp_path / "m")
    del where[inside]
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"holds tensor {inside}, which the index places in None"):
        saving.load_model(tmp_path / "m")


def test_what_a_checkpoint_must_list(tmp_path) -> None:
    path = tmp_path / "checkpoint-00000001"
    saving.save_checkpoint(path, model(), None, {"step": 1})
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("config.json", "trainer_state.json"):
        files = {key: value for key, value in manifest["files"].items() if key != name}
        (path / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
        with pytest.raises(CheckpointError, match=f"does not list {name}"):
            saving.verify_checkpoint(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: there is none"):
        saving.verify_checkpoint(path)


# ---- safetensors


def header(tmp_path, content, data: bytes = b"\0" * 8, length: int | None = None):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path = tmp_path / "t.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content,words",
    [
        ({"a": {**ENTRY, "more": 1}}, "must have exactly dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "must have exactly dtype, shape and data_offsets"),
        ({"a": [1]}, "must have exactly dtype, shape and data_offsets"),
        ({"a": {**ENTRY, "shape": [True, 2]}}, "must have a shape of whole numbers"),
        ({"a": {**ENTRY, "shape": [2.0]}}, "must have a shape of whole numbers"),
        ({"a": {**ENTRY, "shape": [-2]}}, "must have a shape of whole numbers"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, r"must have data_offsets \[begin, end\]"),
        ({"a": {**ENTRY, "shape": [3]}}, "must take 12 bytes for F32"),
        ({"a": {**ENTRY, "shape": [1]}}, "must take 4 bytes for F32"),
        ({"a": {**ENTRY, "shape": [2**62, 2**62]}}, "must take "),
        ({"a": {**ENTRY, "dtype": "F31"}}, "has unknown dtype 'F31'"),
        ({"a": ENTRY, "__metadata__": {"x": 3}}, "__metadata__ must map text to text"),
        ({"a": ENTRY, "__metadata__": []}, "__metadata__ must map text to text"),
        (b' {"a": 1}', "header must be a JSON object that starts with"),
        (b"[1]", "header must be a JSON object that starts with"),
    ],
)
def test_headers_that_are_refused(tmp_path, content, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        SafetensorsFile(header(tmp_path, content))


def test_lengths_of_headers(tmp_path, monkeypatch) -> None:
    good = json.dumps({"a": ENTRY}).encode()
    with SafetensorsFile(header(tmp_path, good)) as file:
        assert file.tensor("a").tolist() == [0.0, 0.0]
    with pytest.raises(CheckpointError, match=r"is truncated: the header takes \d+ bytes"):
        SafetensorsFile(header(tmp_path, good, b"", len(good) + 1))
    monkeypatch.setattr("xtrain.saving.safetensors.MAX_HEADER", len(good) - 1)
    with pytest.raises(CheckpointError, match="header length must be at most"):
        SafetensorsFile(header(tmp_path, good))
    with pytest.raises(CheckpointError, match="a safetensors header must have at most"):
        list(chunks({"a" * 100: xt.ones(2)}))


def test_tensors_that_cannot_be_held(tmp_path) -> None:
    deep = {"a": {"dtype": "F32", "shape": [1] * 8 + [2], "data_offsets": [0, 8]}}
    with (
        SafetensorsFile(header(tmp_path, deep)) as file,
        pytest.raises(CheckpointError, match="at most 8 dimensions, got 9"),
    ):
        file.tensor("a")
    with SafetensorsFile(header(tmp_path, {"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}})) as file:
        assert file.read("a") == bytearray(8)
        with pytest.raises(CheckpointError, match="has dtype F8_E4M3, which xtrain cannot hold"):
            file.tensor("a")


def test_strided_tensors_are_written_in_row_major_order(tmp_path) -> None:
    x = xt.arange(6).reshape(2, 3).T
    data = b"".join(bytes(memoryview(c)) for c in chunks({"x": x}))
    (tmp_path / "x").write_bytes(data)
    with SafetensorsFile(tmp_path / "x") as file:
        assert file.tensor("x").tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_model_without_a_type_has_its_own_file(tmp_path) -> None:
    """What the registry does not know is saved, and load_model says what it knows."""
    own = xt.nn.Linear(2, 2)
    own.config = SimpleNamespace(to_dict=lambda: {"model_type": "mine"}, model_type="mine")
    saving.save_model(own, tmp_path / "m")
    with pytest.raises(CheckpointError, match="model_type must be .*, got 'mine'"):
        saving.load_model(tmp_path / "m")
    before = _C.get_rng_state()
    saving.save_model(model(), tmp_path / "n")
    state = _C.get_rng_state()
    saving.load_model(tmp_path / "n")
    assert _C.get_rng_state() == state != before
