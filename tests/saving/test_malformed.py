"""Files whose content is no model, configuration, manifest or tokenizer: one short sentence each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from clock import ends_within
from runs import options, text_file, xtrain

import xtrain as xt
from xtrain import data, saving
from xtrain.errors import CheckpointError, ConfigError, DataError, shown
from xtrain.models import Qwen3, Qwen3Config
from xtrain.saving.safetensors import SafetensorsFile
from xtrain.tokenizers import FileTokenizer, load_tokenizer
from xtrain.train import Trainer
from xtrain.train.metrics import read_metrics
from xtrain.train.options import with_file

pytestmark = pytest.mark.on_cpu

DEEP = 100_000


def one_sentence(
    kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object], text: str = ""
) -> None:
    """The call raises one of these errors, with a message of one line that a terminal can show."""
    with pytest.raises(kinds, match=text or None) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and "\0" not in message and len(message) < 600, message[:200]


# ---- TOML

TOML = {
    "digits": ("steps = " + "9" * 5000, "is not valid TOML: Exceeds the limit"),
    "hexadecimal": ("steps = 0x" + "f" * 5000, "steps must be less than 2[*][*]1023, got 20000 bits"),
    "float": ("[optim]\nlr = " + "9" * 400, "lr must be less than 2[*][*]1023"),
    "arrays": ("steps = " + "[" * DEEP, "is nested too deeply"),
    "tables": ("steps = " + "{a=" * DEEP, "is nested too deeply"),
    "long array": ("steps = [" + "1," * DEEP + "]", "steps must be a whole number, got "),
    "long text": ("steps = '" + "a" * DEEP + "'", "steps must be a whole number, got "),
    "long choice": ("precision = '" + "a" * DEEP + "'", "precision must be one of "),
    "long name": ("a" * DEEP + " = 1", "unknown option a"),
    "NUL": ('out = "a\\u0000b"', "out must not hold a NUL character"),
    "bytes": (b"\xff\xfe", "is not valid TOML"),
    "date": ("steps = 1979-05-27", "steps must be a whole number"),
}


@pytest.mark.parametrize("name", TOML)
def test_toml(tmp_path, name: str) -> None:
    content, text = TOML[name]
    (tmp_path / "x.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    one_sentence(ConfigError, lambda: with_file(tmp_path / "x.toml", {}), text)


def test_toml_that_is_a_pipe_or_has_no_end(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    one_sentence(ConfigError, lambda: with_file(tmp_path / "pipe.toml", {}), "cannot be read: it is not a regular file")
    with open(tmp_path / "x.toml", "wb") as file:
        file.truncate(1 << 40)
    one_sentence(ConfigError, lambda: with_file(tmp_path / "x.toml", {}), "must have at most 16777216 bytes")


def test_metrics_with_a_hole(tmp_path) -> None:
    """A line without an end is not read into memory: what comes before it counts."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n')
    os.truncate(path, 1 << 40)
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]
    path.write_text('{"step": 1}\n' + "x" * 5000 + '\n{"step": 2}')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    longest = '{"step": 3}'.ljust((1 << 20) - 1)
    path.write_text(f'{{"step": 1}}\n{longest}\n{{"step": 4}}\n')  # a line of 1 MiB is one
    assert read_metrics(path) == [{"step": 1}, {"step": 3}, {"step": 4}]
    path.write_text(f'{{"step": 1}}\n{longest} \n{{"step": 4}}\n')
    assert read_metrics(path) == [{"step": 1}]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        read_metrics(tmp_path / "pipe")


def test_a_path_with_nul() -> None:
    one_sentence(ConfigError, lambda: with_file("a\0b", {}))


def test_numbers_of_the_command_line(tmp_path) -> None:
    for option in ("--steps=" + "9" * 5000, "--optim.lr=" + "9" * 5000, "--steps=1e999"):
        done = xtrain("train", option, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and len(done.stderr) < 300, done.stderr[:200]


# ---- a model directory

VALUES = [
    "null", "-1", "1e999", "NaN", "9" * 400, "9" * 5000, '"x"', json.dumps("a" * DEEP), "[]", "{}", "[[1,2],[3]]",
    "[" * 500 + "]" * 500, '[1,"a"]', '"\\ud800"', '"\\u0000"', '"a\\nb"', "[" + "1," * DEEP + "1]", "1.5", "[null]",
    '{"rope_type":5}', '{"rope_type":"default","rope_theta":"x"}',
]  # fmt: skip
MORE = ["layer_types", "rope_scaling", "quantization_config", "partial_rotary_factor", "mhc_streams", "mhc_form"]


@pytest.fixture
def directory(tmp_path) -> Path:
    sizes = dict(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    Qwen3(Qwen3Config(**sizes)).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_config_json(directory) -> None:
    """Any value of any key is taken, or refused in one sentence."""
    (directory / "manifest.json").unlink()
    good = json.loads((directory / "config.json").read_text())
    refused = 0
    for key in [*good, *MORE]:
        rest = json.dumps({name: value for name, value in good.items() if name != key})[:-1]
        for value in VALUES:
            (directory / "config.json").write_text(f'{rest}, "{key}": {value}}}')
            try:
                saving.load_model(directory)
            except (CheckpointError, xt.OutOfMemoryError) as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 600, (key, str(error)[:200])
    assert refused > 300


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
@pytest.mark.parametrize("content", ["", "\0", "[" * DEEP, '{"a":' * DEEP, "\ufeff{}", "5", '{"format": ' + "9" * 5000])
def test_json_that_is_none(directory, name: str, content: str) -> None:
    (directory / "manifest.json").unlink()
    (directory / name).write_text(content)
    one_sentence(CheckpointError, lambda: saving.load_model(directory), name)


@pytest.mark.parametrize("place", ["format", "files", "config.json", "size", "pieces", "piece", "length", "hash"])
def test_values_of_a_manifest(directory, place: str) -> None:
    manifest = directory / "manifest.json"
    values = json.loads(manifest.read_text())
    entry = values["files"]["config.json"]
    holder, key = {
        "format": (values, "format"), "files": (values, "files"), "config.json": (values["files"], "config.json"),
        "size": (entry, "size"), "pieces": (entry, "pieces"), "piece": (entry["pieces"], 0),
        "length": (entry["pieces"][0], 0), "hash": (entry["pieces"][0], 1),
    }[place]  # fmt: skip
    holder[key] = "here"
    text = json.dumps(values)
    for value in VALUES:
        manifest.write_text(text.replace('"here"', value))
        one_sentence(CheckpointError, lambda: saving.load_model(directory))


@pytest.mark.parametrize("name", ['"\\ud800"', '"a\\u0000"', '"../x"', '""', '"a\\nb"', json.dumps("a" * DEEP)])
def test_names_of_a_manifest(directory, name: str) -> None:
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"config.json"', name, 1))
    one_sentence(CheckpointError, lambda: saving.load_model(directory))


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "a\nb"])
def test_a_tensor_with_a_name_for_no_line(tmp_path, name: str) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    one_sentence(CheckpointError, lambda: SafetensorsFile(tmp_path / "x.safetensors"), "must take 8 bytes")


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_an_index_with_a_name_for_no_line(directory, name: str) -> None:
    (directory / "manifest.json").unlink()
    index = {"weight_map": {**dict.fromkeys(load_names(directory), "model-1.safetensors"), name: "model-1.safetensors"}}
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    one_sentence(CheckpointError, lambda: saving.load_model(directory), "which does not hold it")


def load_names(directory: Path) -> list[str]:
    with SafetensorsFile(directory / "model.safetensors") as file:
        return list(file.entries)


@ends_within(30)
def test_a_manifest_that_is_a_pipe(directory) -> None:
    (directory / "manifest.json").unlink()
    os.mkfifo(directory / "manifest.json")
    one_sentence(CheckpointError, lambda: saving.load_model(directory), "it is not a regular file")


def test_an_index(directory) -> None:
    (directory / "manifest.json").unlink()
    (directory / "model.safetensors").unlink()
    for value in VALUES:
        for form in ('{"weight_map": %s}', '{"weight_map": {"a": %s}}'):
            (directory / "model.safetensors.index.json").write_text(form % value)
            one_sentence(CheckpointError, lambda: saving.load_model(directory))


# ---- a tokenizer

MODEL = '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[]}}'


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    (tmp_path / "tokenizer.json").write_text(MODEL)
    return tmp_path


@pytest.mark.parametrize(
    "content",
    [
        "{}", "[]", "", "\0", "[" * DEEP, "9" * 5000, '{"version":"1.0"}',
        '{"model":{"type":"BPE","vocab":{"a":-1},"merges":[]}}',
        '{"model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}',
        '{"model":{"type":"WordLevel","vocab":{},"unk_token":"x"}}',
        '{"model":{"type":"Unigram","vocab":[],"unk_id":7}}',
        '{"version":"1.0","normalizer":{"type":"Replace","pattern":{"Regex":"("},"content":""},"model":{"type":"BPE","vocab":{},"merges":[]}}',
    ],
)  # fmt: skip
def test_tokenizer_json(tokenizer, content: str) -> None:
    (tokenizer / "tokenizer.json").write_text(content)
    one_sentence(DataError, lambda: load_tokenizer(tokenizer).encode(b"hello"), "tokenizer.json cannot be (read|used)")


def test_a_vocabulary_with_gaps(tokenizer) -> None:
    (tokenizer / "tokenizer.json").write_text(MODEL.replace('"a":0', '"a":7'))
    found = load_tokenizer(tokenizer)
    assert found.vocab_size == 8 and found.encode(b"aa").tolist() == [7, 7]


def test_a_panic_of_the_package_is_an_error(tokenizer) -> None:
    """It is a BaseException, so that nothing catches it."""

    class PanicException(BaseException):
        pass

    class Panicking:
        def encode_batch(self, *_, **__):
            raise PanicException("index out of bounds\nat lib.rs")

    found = load_tokenizer(tokenizer)
    assert isinstance(found, FileTokenizer)
    found._implementation = Panicking()
    one_sentence(DataError, lambda: found.encode(b"hello"), "cannot be used: index out of bounds at lib.rs")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
def test_files_beside_a_tokenizer(tokenizer, name: str) -> None:
    """What is no object says nothing; an end of documents that is no token is refused."""
    text = text_file(tokenizer / "text.txt", 1000)
    text.write_bytes(b"a" * 1000)
    for value in [*VALUES, "[" * DEEP, "[true]", "300"]:
        for form in ("%s", '{"eos_token_id": %s}', '{"xtrain": %s}'):
            (tokenizer / name).write_text(form % value)
            try:
                found = load_tokenizer(tokenizer)
                assert found.eos in (None, 1, 300)
                data.prepare(text, tokenizer / "x.tokens", found)
                tokens, _, vocab = data.open_tokens(tokenizer / "x.tokens")
                assert int(tokens[:].max()) < vocab
            except DataError as error:
                assert (
                    "eos_token_id must be null, a token id or a list of token ids, got " in str(error)
                    and len(str(error)) < 600
                )


# ---- how values are shown


def test_what_has_no_repr_is_shown() -> None:
    deep: list = []
    for _ in range(DEEP):
        deep = [deep]
    assert shown(10**5000) == "a long int" and shown(deep) == "a long list"
    assert shown(ValueError("a\0b")) == "a\\x00b"
    assert shown("a" * 200) == "'" + "a" * 99 + "..." and shown(ValueError("a\nb  c")) == "a b c"


@pytest.mark.parametrize("change", [{"step": 10**4000}, {"loader": []}, {"rng": [10**400, 1]}, {"config": {"data": 1}}])
def test_a_state_that_is_none(tmp_path, change, monkeypatch) -> None:
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run"), quiet=True)
    trainer.directory.mkdir()
    trainer.save()
    whole = saving.load_checkpoint
    monkeypatch.setattr(saving, "load_checkpoint", lambda *a: {**whole(*a), **change})
    if "config" in change:
        monkeypatch.setattr("xtrain.data.corpus.same_data", lambda *_: False)
    one_sentence((CheckpointError, ConfigError), lambda: Trainer({"resume": str(tmp_path / "run")}, quiet=True))
