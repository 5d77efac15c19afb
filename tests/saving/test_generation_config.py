"""generation_config.json: it says what ends a sequence, and saving keeps it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import options, text_file

import xtrain as xt
from xtrain import lora, models, saving
from xtrain.cli import main
from xtrain.errors import CheckpointError, DataError
from xtrain.generation import generate_text
from xtrain.saving.generation_config import end_tokens, listed
from xtrain.tokenizers import ByteTokenizer, load_tokenizer
from xtrain.train import Trainer, parts
from xtrain.train.config import TrainConfig

pytestmark = pytest.mark.on_cpu
SIZES = dict(vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
# Not as this library would write it: other spaces, another order, a number in another form, no line break at the end.
FILE = '{"top_p": 9.0e-1,"eos_token_id":[52, 53],\n\n    "do_sample": true, "of a later version": {"a": [1, null]}}'
PLAIN = {"eos_token_id": 7}


def directory(path: Path, file: str | None = FILE, eos: object = 52, family: str = "Llama") -> Path:
    """Of a model from elsewhere: without a manifest, and with this generation_config.json."""
    xt.manual_seed(1)
    shutil.rmtree(path, ignore_errors=True)
    getattr(models, family)(getattr(models, f"{family}Config")(**SIZES, eos_token_id=eos)).save_pretrained(path)
    (path / "manifest.json").unlink()
    (path / "generation_config.json").unlink()
    if file is not None:
        (path / "generation_config.json").write_text(file)
    return path


def a_tokenizer(path: Path) -> Path:
    """Give a directory a tokenizer of words."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "end": 9}, "unk_token": "b"}
    text = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (path / "tokenizer.json").write_text(json.dumps(text))
    return path


def held(path: Path) -> dict:
    return json.loads((path / "generation_config.json").read_text())


def ending(eos: int | None) -> SimpleNamespace:
    """A tokenizer whose documents end with this token."""
    return SimpleNamespace(eos=eos, files=dict)


class Counts(models.Llama):
    """Each token is followed by the next number."""

    def last_logits(self, ids, positions, caches, rows=None):
        logits = np.zeros((ids.shape[0], 256), np.float32)
        logits[np.arange(ids.shape[0]), (ids.numpy()[:, -1] + 1) % 256] = 9.0
        return xt.tensor(logits)


def made(model: models.LanguageModel) -> int:
    """How many tokens follow 49: the numbers from 50 on."""
    model.__class__ = Counts
    return model.generate([49], 20, temperature=0.0).shape[0] - 1


@pytest.mark.parametrize(
    ("file", "eos", "count"),
    [
        (None, 52, 3),
        (None, [55, 52], 3),
        ('{"eos_token_id": [60, 53]}', 52, 4),
        ('{"eos_token_id": 54}', 52, 5),
        ('{"eos_token_id": [4294967295, 54]}', 52, 5),
        ('{"eos_token_id": null}', 52, 20),
        ('{"eos_token_id": []}', 52, 20),
        ('{"top_k": 5}', 52, 20),
    ],
)
def test_the_file_alone_says_what_ends_a_sequence(tmp_path, file: str | None, eos: object, count: int) -> None:
    """As in transformers: config.json counts where there is no such file. A text ends at the tokenizer's end, too."""
    for load in (models.load, models.Llama.from_pretrained):
        assert made(load(directory(tmp_path / load.__qualname__, file, eos))) == count
    tuples = Counts(models.LlamaConfig(**SIZES, eos_token_id=(55, 52)))
    assert generate_text(tuples, ByteTokenizer(), [49], 20, temperature=0.0) == "123"
    text = generate_text(Counts(models.LlamaConfig(**SIZES)), ByteTokenizer(), [49], 20, temperature=0.0)
    assert text == bytes(range(49, 70)).decode(), "2 and 0 end it, and do not come"
    model = models.load(tmp_path / "load_model")
    model.__class__ = Counts
    assert len(generate_text(model, ByteTokenizer(), [49], 20, temperature=0.0)) == (count if count < 20 else 21)
    assert model.generate([49], 20, temperature=0.0, eos=(58,)).tolist()[-1] == 58


def test_a_file_of_earlier_versions_says_nothing(tmp_path) -> None:
    """It is what they wrote beside a model without a tokenizer, whatever ends it. With one more key it is another's."""
    earlier = '{\n  "do_sample": true,\n  "temperature": 0.7,\n  "top_k": 40\n}\n'
    model = models.load(directory(tmp_path / "a", earlier))
    model.save_pretrained(tmp_path / "b")
    assert held(tmp_path / "b") == {"bos_token_id": 1, "eos_token_id": 52}
    assert made(model) == made(models.load(tmp_path / "b")) == 3
    model.generation_config = json.loads(earlier)
    assert made(model) == 3, "given in a program, too"
    for other in ('{"do_sample": true, "temperature": 0.7}', earlier.replace("}", ', "eos_token_id": null}')):
        assert made(models.load(directory(tmp_path / "c", other))) == 20


@pytest.mark.parametrize(
    ("file", "eos", "end"),
    [
        (None, [7, 9], 7),
        ('{"eos_token_id": [5, 9]}', 7, 5),
        ('{"eos_token_id": null}', 7, None),
        ('{"eos_token_id": []}', 7, None),
        ('{"top_k": 40}', 7, None),
        ("{}", 7, None),
        ('{"do_sample": true, "temperature": 0.7, "top_k": 40}', 7, 7),
    ],
)
def test_the_tokenizer_goes_by_the_same_rule(tmp_path, file: str | None, eos: object, end: int | None) -> None:
    """Else texts would end where `generate` goes on. What tokenizer_config.json names is the tokenizer's own."""
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    path = a_tokenizer(directory(tmp_path / "a", file, eos))
    assert load_tokenizer(path).eos == end
    assert listed(end_tokens(models.load(path)))[:1] == listed(end)
    if end is None:
        (path / "tokenizer_config.json").write_text('{"eos_token": "end"}')
        assert load_tokenizer(path).eos == 9


@pytest.mark.parametrize("tokenizer", [None, ending(None), ending(52)])
def test_a_file_comes_back_byte_for_byte(tmp_path, tokenizer) -> None:
    """And so do the ends of config.json; through two saves, shards, LoRA and a checkpoint, too."""
    model = models.load(directory(tmp_path / "a", eos=[52, 9]))
    model.save_pretrained(tmp_path / "b", tokenizer=tokenizer)
    models.load(tmp_path / "b").save_pretrained(tmp_path / "c", 2000, tokenizer=tokenizer)
    saving.save_checkpoint(tmp_path / "d", models.load(tmp_path / "c"), None, {}, tokenizer)
    lora.apply(model, r=2, target_modules=["q_proj"], base_model_name_or_path=str(tmp_path / "a"))
    model.save_pretrained(tmp_path / "e", tokenizer=tokenizer)
    for name in "bcde":
        assert (tmp_path / name / "generation_config.json").read_text() == FILE
        assert json.loads((tmp_path / name / "config.json").read_text())["eos_token_id"] == [52, 9]
        assert made(models.load(tmp_path / name)) == 3
    (tmp_path / "e" / "generation_config.json").unlink()
    (tmp_path / "e" / "manifest.json").unlink()
    assert models.load(tmp_path / "e").generation_config == json.loads(FILE), "that of the model below"
    (tmp_path / "e" / "generation_config.json").write_text('{"eos_token_id": 60}')
    assert models.load(tmp_path / "e").generation_config == {"eos_token_id": 60}, "that of the adapter"


def test_a_value_that_is_changed_is_written(tmp_path) -> None:
    for change in ({"top_p": 0.5}, {"do_sample": 1}, {"eos_token_id": 52}):
        model = models.load(directory(tmp_path / "a"))
        model.generation_config.update(change)
        model.save_pretrained(tmp_path / "b")
        assert json.dumps(held(tmp_path / "b")) == json.dumps(json.loads(FILE) | change)
    model.generation_config = None
    model.save_pretrained(tmp_path / "b")
    assert held(tmp_path / "b") == {"bos_token_id": 1, "eos_token_id": 52}, "as of a model without a file"


@pytest.mark.parametrize(
    ("file", "eos", "end", "ends", "in_config"),
    [
        (None, [7, 9], 7, [7, 9], [7, 9]),
        (None, [7, 9], 9, [9, 7], [9, 7]),
        (None, [7, 9], 5, [5, 7, 9], [5, 7, 9]),
        (None, 9, 5, [5, 9], [5, 9]),
        (None, 5, 5, 5, 5),
        (None, 2, 5, 5, 5),  # 2 is what LlamaConfig has without being asked
        (None, None, 5, 5, 5),
        (None, [7, 9], None, [7, 9], [7, 9]),
        ({"eos_token_id": [7, 9]}, 7, 9, [9, 7], [9, 7]),
        ({"eos_token_id": [7, 9]}, 7, 5, [5, 7, 9], [5, 7]),
        ({"eos_token_id": 7}, 7, 5, [5, 7], [5, 7]),
        ({"eos_token_id": 2}, 2, 5, [5, 2], 5),
        ({"top_k": 4}, None, 5, 5, 5),
    ],
)
def test_the_end_of_a_tokenizer_is_one_more(tmp_path, file, eos, end, ends, in_config) -> None:
    """It stands first, where a tokenizer looks for the end of a document; no end of the model is lost."""
    path = directory(tmp_path / "a", None if file is None else json.dumps(file), eos)
    models.load(path).save_pretrained(tmp_path / "b", tokenizer=ending(end))
    assert held(tmp_path / "b")["eos_token_id"] == ends
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == in_config
    if file is not None:
        assert held(tmp_path / "b") == file | {"eos_token_id": ends}


def test_a_new_file_says_nothing_about_sampling(tmp_path) -> None:
    """A reader draws then as it does without a file. It names the special tokens, as that of transformers does."""
    for keys, want in (
        ({}, {"bos_token_id": 1, "eos_token_id": 2}),
        (
            {"bos_token_id": None, "eos_token_id": [7, 9], "pad_token_id": 0},
            {"eos_token_id": [7, 9], "pad_token_id": 0},
        ),
        ({"bos_token_id": None, "eos_token_id": None}, {}),
    ):
        models.Llama(models.LlamaConfig(**SIZES, **keys)).save_pretrained(tmp_path / "m")
        assert held(tmp_path / "m") == want and models.load(tmp_path / "m").generation_config == want


@pytest.mark.parametrize("kind", ["weights", "own tokenizer", "other tokenizer"])
def test_checkpoints_of_a_run_keep_it(tmp_path, kind: str) -> None:
    """Of a model directory with weights, and of one without whose tokenizer is that of the run; after a resume, too. The
    bytes' own end, 0, is added. In other tokens the ends of the directory mean nothing: 52 would be the digit 4.
    """
    start = directory(tmp_path / "start")
    if kind != "weights":
        (start / "model.safetensors").unlink()
    if kind == "own tokenizer":
        for name, content in ByteTokenizer().files().items():
            (start / name).write_bytes(content)
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run", model__preset=str(start), device="cpu")
    values = {name: value for name, value in values.items() if name == "model.preset" or not name.startswith("model.")}
    trainer = Trainer(values, quiet=True)
    for _ in range(2):
        trainer.train_step()
    assert (0 in listed(end_tokens(trainer.model))) == (kind == "other tokenizer")
    trainer.save()
    assert Trainer({"resume": str(tmp_path / "run")}, quiet=True).run().step == 8
    for name in ("checkpoint-00000002", "checkpoint-00000008"):
        other = kind == "other tokenizer"
        want = {"bos_token_id": 1, "eos_token_id": 0} if other else json.loads(FILE) | {"eos_token_id": [0, 52, 53]}
        assert held(tmp_path / "run" / name) == want
        config = json.loads((tmp_path / "run" / name / "config.json").read_text())
        assert config["eos_token_id"] == (0 if other else [0, 52])
        assert made(models.load(tmp_path / "run" / name)) == (20 if other else 3)


def test_ids_that_no_tokenizer_has_made_are_those_of_the_directory(tmp_path) -> None:
    start = directory(tmp_path / "start")
    (start / "model.safetensors").unlink()
    config = TrainConfig()
    config.model.preset = str(start)
    model = parts.make_model(config, None, SimpleNamespace(tokenizer=None, vocab_size=256), "cpu")
    assert end_tokens(model) == [52, 53] and model.config.eos_token_id == 52


@pytest.mark.parametrize("bad", ["true", '"5"', "-1", "4294967296", "5.0", "[true]", "[5, null]", "[[5]]", "{}"])
def test_an_end_that_is_no_token_is_refused(tmp_path, bad: str) -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    rule = r"generation_config\.json: eos_token_id must be null, a token id or a list of token ids, got "
    path = directory(tmp_path / "a", f'{{"eos_token_id": {bad}}}')
    with pytest.raises(CheckpointError, match=rule):
        models.load(path)
    with pytest.raises(DataError, match=rule):
        load_tokenizer(a_tokenizer(path))
    for file in ("[1]", "{", "5"):
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            models.load(directory(tmp_path / "a", file))


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ([0], ""),
        ([0, 3], ""),
        ([3, 0, 5, 7, 299], "xtrain: warning: a GGUF file has room for 3 ends of a sequence: 7 left out\n"),
        ([3, 0, 5, 256], ""),
        ([0, 3, 5, 7], "xtrain: warning: a GGUF file has room for 3 ends of a sequence: 7 left out\n"),
        ([0, 3, 3, 5, 5], ""),
    ],
)
def test_a_gguf_file_has_them(tmp_path, capsys, ends: list[int], told: str) -> None:
    """The tokenizer's as the end of a document, then the ends of a turn and of a message: llama.cpp stops at each."""
    gguf = pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    path = directory(tmp_path / "m", json.dumps({"eos_token_id": ends}), 4)
    found = ends_of_gguf(gguf, path)
    assert capsys.readouterr().err == told
    known = list(dict.fromkeys(end for end in ends if end < 256))
    assert list(found.values()) == known[:3] and list(found) == ["eos", "eot", "eom"][: len(found)]


def test_a_gguf_file_has_the_end_of_its_family(tmp_path) -> None:
    """2 of Llama, as in transformers, where no file names an end: the tokenizer, which reads files, knows none."""
    gguf = pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    path = directory(tmp_path / "m", None, 4)
    config = json.loads((path / "config.json").read_text())
    del config["eos_token_id"]
    (path / "config.json").write_text(json.dumps(config))
    assert ends_of_gguf(gguf, path) == {"eos": 2}


def ends_of_gguf(gguf: Any, path: Path) -> dict[str, int]:
    """Give a model directory a tokenizer, export it, and return the ids of ends in the file by their names."""
    cutter = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True}
    bpe = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    text = {"version": "1.0", "added_tokens": [], "pre_tokenizer": cutter, "model": bpe}
    (path / "tokenizer.json").write_text(json.dumps(text))
    assert main(["export", str(path), "--gguf", f"{path}.gguf"]) == 0
    fields = gguf.GGUFReader(f"{path}.gguf").fields
    names = {name: f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")}
    return {name: fields[key].contents() for name, key in names.items() if key in fields}
