"""Reading what a manifest lists: no damaged byte is used, whoever loads it, and older formats stay readable."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc

import pytest
from runs import options, text_file

import xtrain as xt
from xtrain import saving
from xtrain.errors import CheckpointError
from xtrain.models import Qwen3, Qwen3Config
from xtrain.saving import directory as writing
from xtrain.saving import reader
from xtrain.saving.safetensors import SafetensorsFile
from xtrain.tokenizers import load_tokenizer
from xtrain.train import Trainer

SIZES = dict(
    vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8,
)  # fmt: skip


def saved(directory, **options):
    """A model directory, and the state_dict that went into it."""
    model = Qwen3(Qwen3Config(**SIZES))
    saving.save_model(model, directory, **options)
    return {name: saving.model.raw_bytes(tensor).tobytes() for name, tensor in model.state_dict().items()}


def flip(path, byte: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def as_format_1(directory) -> None:
    """Rewrites the manifest as version 0.1 wrote it."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in directory.iterdir()
        if path.name != "manifest.json"
    }
    (directory / "manifest.json").write_text(json.dumps({"format": 1, "files": files}, indent=2))


@pytest.mark.parametrize("number", [1, 2])
def test_every_flipped_byte_is_refused_by_load_model(tmp_path, number: int) -> None:
    """Header, every tensor and its neighbours, and the files beside them."""
    saved(tmp_path / "m")
    if number == 1:
        as_format_1(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    with SafetensorsFile(file) as opened:
        borders = [at for entry in opened.entries.values() for at in (entry.start, entry.stop - 1)]
    for path, places in ((file, [0, 7, 8, 60, *borders]), (tmp_path / "m" / "config.json", [0, 100, 300])):
        for byte in places:
            flip(path, byte)
            with pytest.raises(CheckpointError) as error:
                saving.load_model(tmp_path / "m")
            assert "\n" not in str(error.value) and str(path) in str(error.value)
            flip(path, byte)
    saving.load_model(tmp_path / "m")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("grid", [7, 64, 1 << 18])
def test_what_changes_after_a_file_was_opened_is_not_used(tmp_path, monkeypatch, number: int, grid: int) -> None:
    """Format 1 is hashed as a whole when it is opened: what is read after that is hashed again, in pieces."""
    monkeypatch.setattr(reader, "_GRID", grid, raising=False)
    want = saved(tmp_path / "m")
    if number == 1:
        as_format_1(tmp_path / "m")
    file, config = tmp_path / "m" / "model.safetensors", tmp_path / "m" / "config.json"
    found = saving.DirectoryReader(tmp_path / "m")
    with SafetensorsFile(found.open(file.name)) as opened:
        entries, order = opened.entries, sorted(opened.entries)
        got = {name: bytes(opened.read(name)) for name in order}
    assert {name: got[name] for name in want} == want
    borders = [at for entry in entries.values() for at in (entry.start, entry.stop - 1)]
    for byte in borders:
        with (
            pytest.raises(CheckpointError, match="is damaged: bytes "),
            SafetensorsFile(found.open(file.name)) as opened,
        ):
            flip(file, byte)
            for name in order:
                opened.read(name)
        flip(file, byte)
    with pytest.raises(CheckpointError, match=r"config\.json is damaged: bytes "), found.open(config.name) as opened:
        flip(config, 30)
        opened.read(0, opened.size)
    flip(config, 30)
    assert found.json(config.name)["model_type"] == "qwen3"


def test_reading_format_1_takes_no_memory_beside_its_tensor(tmp_path) -> None:
    (tmp_path / "d").mkdir()
    size = 48 << 20
    with open(tmp_path / "d" / "x", "wb") as stream:
        stream.truncate(size)
    as_format_1(tmp_path / "d")
    tracemalloc.start()
    try:
        with saving.DirectoryReader(tmp_path / "d").open("x") as file:
            data = file.read(1000, size - 1000)
        assert len(data) == size - 2000 and tracemalloc.get_traced_memory()[1] < size + (16 << 20)
    finally:
        tracemalloc.stop()


def test_a_tensor_of_format_1_is_read_with_little_beside_it(tmp_path, monkeypatch) -> None:
    """The rest of the pieces at its ends: 512 KiB at most."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(bytes(range(256)) * (3 << 12))
    as_format_1(tmp_path / "d")
    with saving.DirectoryReader(tmp_path / "d").open("x") as file:
        peek, read = file.peek, []
        monkeypatch.setattr(file, "peek", lambda start, stop: read.append(stop - start) or peek(start, stop))
        for start, stop in ((1 << 20, (1 << 20) + 1), ((1 << 20) - 1, (1 << 20) + 1), (5, 3 << 20)):
            read.clear()
            assert bytes(file.read(start, stop)) == bytes(at % 256 for at in range(start, stop))
            assert sum(read) <= stop - start + (512 << 10), (start, stop)


def test_shards_are_checked(tmp_path) -> None:
    want = saved(tmp_path / "m", shard_bytes=3000)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2
    for path in (*files, tmp_path / "m" / "model.safetensors.index.json"):
        flip(path, path.stat().st_size - 2)
        with pytest.raises(CheckpointError, match="is damaged"):
            saving.load_model(tmp_path / "m")
        flip(path, path.stat().st_size - 2)
    model = saving.load_model(tmp_path / "m")
    assert {name: saving.model.raw_bytes(t).tobytes() for name, t in model.state_dict().items()} == want


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_pieces_of_any_size(tmp_path, monkeypatch, piece: int) -> None:
    """A tensor of many pieces, hashed by threads or at once; a flip in the first, a middle and the last is named."""
    monkeypatch.setattr(writing, "PIECE", piece)
    monkeypatch.setattr(saving.reader, "_INLINE", 16)
    tensor = xt.arange(200, dtype="int64")
    with saving.DirectoryWriter(tmp_path / "d") as writer:
        writer.write("t.safetensors", saving.chunks({"t": tensor, "none": xt.zeros(0)}))
        writer.publish()
    files = json.loads((tmp_path / "d" / "manifest.json").read_text())["files"]
    assert max(size for size, _ in files["t.safetensors"]["pieces"]) <= piece
    file = tmp_path / "d" / "t.safetensors"
    for byte in (None, 3, 1600, 900, file.stat().st_size - 1):
        if byte is not None:
            flip(file, byte)
        try:
            with SafetensorsFile(saving.DirectoryReader(tmp_path / "d").open(file.name)) as opened:
                got = opened.tensor("t").tolist()
            assert byte is None and got == list(range(200))
        except CheckpointError as error:
            assert byte is not None, error
            if "bytes" in str(error) and byte > 8:
                first, last = map(int, str(error).partition("bytes ")[2].partition(" have")[0].split(" to "))
                assert first <= byte <= last
        if byte is not None:
            flip(file, byte)


def test_a_file_that_the_manifest_does_not_list_is_not_used(tmp_path) -> None:
    saved(tmp_path / "m")
    manifest = tmp_path / "m" / "manifest.json"
    values = json.loads(manifest.read_text())
    for name in ("model.safetensors", "config.json"):
        manifest.write_text(json.dumps({**values, "files": {k: v for k, v in values["files"].items() if k != name}}))
        with pytest.raises(CheckpointError, match=f"{name} is not what was saved: manifest.json does not list it"):
            saving.load_model(tmp_path / "m")
    manifest.write_text(json.dumps(values))
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not what was saved"):
        load_tokenizer(tmp_path / "m")


def test_without_a_manifest_a_directory_is_read_as_it_is(tmp_path) -> None:
    saved(tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()
    before = saving.load_model(tmp_path / "m").state_dict()["model.norm.weight"].tolist()
    file = tmp_path / "m" / "model.safetensors"
    with SafetensorsFile(file) as opened:
        flip(file, opened.entries["model.norm.weight"].start)
    assert saving.load_model(tmp_path / "m").state_dict()["model.norm.weight"].tolist() != before


@pytest.mark.parametrize("number", [1, 2])
def test_a_resumed_run_uses_no_damaged_byte(tmp_path, number: int) -> None:
    """Also when the damage comes after the newest checkpoint was chosen and checked."""
    run = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run"), quiet=True)
    run.directory.mkdir()
    run.train_step()
    path = run.save()
    if number == 1:
        as_format_1(path)
    for name in ("model.safetensors", "optimizer.safetensors", "trainer_state.json"):
        flip(path / name, (path / name).stat().st_size // 2)
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            saving.load_checkpoint(path, run.model, run.optimizer)
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            saving.verify_checkpoint(path)
        flip(path / name, (path / name).stat().st_size // 2)
    assert saving.load_checkpoint(path, run.model, run.optimizer)["step"] == 1


FORGED = {
    "format": lambda v: v.update(format=3),
    "no format": lambda v: v.pop("format"),
    "files": lambda v: v.update(files=[]),
    "name": lambda v: v["files"].update({"../x": v["files"]["config.json"]}),
    "empty name": lambda v: v["files"].update({"": v["files"]["config.json"]}),
    "NUL": lambda v: v["files"].update({"a\0b": v["files"]["config.json"]}),
    "surrogate": lambda v: v["files"].update({"a\ud800": v["files"]["config.json"]}),
    "entry": lambda v: v["files"].update({"config.json": 3}),
    "no pieces": lambda v: v["files"]["config.json"].pop("pieces"),
    "negative": lambda v: v["files"]["config.json"].update(size=-1),
    "huge": lambda v: v["files"]["config.json"].update(size=2**70),
    "float": lambda v: v["files"]["config.json"].update(size=1.5),
    "true": lambda v: v["files"]["config.json"].update(size=True),
    "sum": lambda v: v["files"]["config.json"]["pieces"].append([1, "0"]),
    "pair": lambda v: v["files"]["config.json"]["pieces"].append([0]),
    "hash": lambda v: v["files"]["config.json"]["pieces"].append([0, None]),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_manifest_is_one_sentence(tmp_path, kind: str) -> None:
    saved(tmp_path / "m")
    manifest = tmp_path / "m" / "manifest.json"
    values = json.loads(manifest.read_text())
    FORGED[kind](values)
    manifest.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"manifest.json must ") as error:
        saving.load_model(tmp_path / "m")
    assert "\n" not in str(error.value) and "\0" not in str(error.value)


@pytest.mark.parametrize("name", ["NUL", "surrogate"])
def test_a_newer_checkpoint_with_a_forged_manifest_is_skipped(tmp_path, name: str) -> None:
    run = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run"), quiet=True)
    run.directory.mkdir()
    run.train_step()
    first = run.save()
    run.train_step()
    manifest = run.save() / "manifest.json"
    values = json.loads(manifest.read_text())
    FORGED[name](values)
    manifest.write_text(json.dumps(values))
    said: list[str] = []
    assert saving.newest_valid(run.directory, said.append) == first
    assert len(said) == 1


def test_more_than_the_machine_has_is_not_read(tmp_path, monkeypatch) -> None:
    """A system that promises more memory than it has would kill the process."""
    saved(tmp_path / "model")
    with SafetensorsFile(tmp_path / "model" / "model.safetensors") as opened:
        monkeypatch.setattr(reader, "host_memory", lambda: 63)
        with pytest.raises(CheckpointError, match="64 bytes do not fit into memory"):
            opened.tensor("model.norm.weight")


def test_what_is_no_regular_file_is_one_sentence(tmp_path) -> None:
    """A FIFO would wait for a writer for ever; a sparse file of 1 TiB does not fit into memory."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for path, text in (
        ("fifo", "not a regular file"),
        ("folder", "Is a directory|not a regular file"),
        ("no", "No such"),
    ):
        with pytest.raises(CheckpointError, match=text):
            SafetensorsFile(tmp_path / path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFile("a\0b")
    size = 1 << 43
    header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    sparse = tmp_path / "sparse.safetensors"
    sparse.write_bytes(len(header).to_bytes(8, "little") + header)
    try:
        os.truncate(sparse, 8 + len(header) + size)
    except OSError as error:
        pytest.skip(f"this file system has no sparse files of {size} bytes: {error}")
    with SafetensorsFile(sparse) as opened, pytest.raises(CheckpointError, match="do not fit into memory"):
        opened.tensor("t")
