"""Files of data that change, end or are something else: what is seen, and in which words."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
from runs import options, text_file

from xtrain import data
from xtrain.data.file_array import _MOST_OPEN, DataFile
from xtrain.data.identity import _sampled
from xtrain.errors import ConfigError, DataError
from xtrain.train import Trainer


def change(path: Path, at: int, size: int = 1) -> None:
    content = bytearray(path.read_bytes())
    for byte in range(at, at + size):
        content[byte] ^= 1
    path.write_bytes(content)


def begun(source: Path, out: Path) -> Trainer:
    run = Trainer(options(source, out), quiet=True)
    run.directory.mkdir()
    run.train_step()
    run.save()
    return run


@pytest.mark.parametrize("kind", ["text", "tokens", "npy", "folder"])
@pytest.mark.parametrize("at", [0.0, 0.3337, 0.999])
def test_one_changed_byte_is_another_data_set(tmp_path, kind: str, at: float) -> None:
    text = text_file(tmp_path / "text.txt", 400_000)
    source = changed = text
    if kind == "tokens":
        source = changed = tmp_path / "t.tokens"
        data.prepare(text, source)
    elif kind == "npy":
        source = changed = tmp_path / "t.npy"
        np.save(source, np.frombuffer(text.read_bytes(), np.uint8).astype(np.int32))
    elif kind == "folder":
        source = tmp_path / "folder"
        source.mkdir()
        for name in ("a.txt", "b.txt"):
            changed = source / name
            changed.write_bytes(text.read_bytes())
    begun(source, tmp_path / "run")
    head = 128 if kind == "npy" else 64 if kind == "tokens" else 0
    change(changed, head + int((changed.stat().st_size - head - 8) * at) // 8 * 8)
    with pytest.raises(ConfigError, match="^resume: data was .* now holds something else$"):
        Trainer({"resume": str(tmp_path / "run")}, quiet=True)


def test_a_file_that_did_not_change_is_not_read_again(tmp_path, monkeypatch) -> None:
    source = text_file(tmp_path / "text.txt")
    begun(source, tmp_path / "run")
    with monkeypatch.context() as context:
        context.setattr(
            data.identity.__globals__["_hash"].__globals__["hashlib"], "sha256", lambda *_: pytest.fail("read")
        )
        known = json.loads((tmp_path / "run/checkpoint-00000001/trainer_state.json").read_text())["data"]
        assert data.identity(data.open_data(source).segments, known) == known
    source.write_bytes(source.read_bytes())  # another time, the same bytes: hashed and found the same
    again = Trainer({"resume": str(tmp_path / "run")}, quiet=True)
    assert again.identity["sha256"] == known["sha256"] and again.identity["files"] != known["files"]


def test_data_that_moved_is_the_same(tmp_path) -> None:
    begun(text_file(tmp_path / "text.txt"), tmp_path / "run")
    (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
    assert Trainer({"resume": str(tmp_path / "run"), "data": str(tmp_path / "moved.txt")}, quiet=True).step == 1


def test_a_run_of_version_0_1_resumes(tmp_path) -> None:
    """It has a sampled fingerprint, and is given an identity with its next checkpoint."""
    run = begun(text_file(tmp_path / "text.txt"), tmp_path / "run")
    state, manifest = (tmp_path / "run/checkpoint-00000001" / name for name in ("trainer_state.json", "manifest.json"))
    values = json.loads(state.read_text())
    state.write_text(json.dumps({**values, "data": _sampled(run.corpus.segments)}))
    entries = json.loads(manifest.read_text())
    entries["files"]["trainer_state.json"] = _entry(state)
    manifest.write_text(json.dumps(entries))
    again = Trainer({"resume": str(tmp_path / "run")}, quiet=True)
    assert again.identity == run.identity
    change(tmp_path / "text.txt", 0)
    with pytest.raises(ConfigError, match="now holds something else"):
        Trainer({"resume": str(tmp_path / "run")}, quiet=True)


def _entry(path: Path) -> dict:
    import hashlib

    content = path.read_bytes()
    return {"size": len(content), "pieces": [[len(content), hashlib.sha256(content).hexdigest()]]}


@pytest.mark.parametrize("kind", ["text", "tokens", "npy"])
def test_a_file_that_is_truncated_in_mid_run_is_a_data_error(tmp_path, kind: str) -> None:
    """A mapping would end the process with SIGBUS."""
    source = text_file(tmp_path / "text.txt", 100_000)
    if kind == "tokens":
        data.prepare(source, tmp_path / "t.tokens")
        source = tmp_path / "t.tokens"
    elif kind == "npy":
        np.save(tmp_path / "t.npy", np.zeros(100_000, np.int16))
        source = tmp_path / "t.npy"
    run = Trainer(options(source, tmp_path / "run"), quiet=True)
    run.train_step()
    os.truncate(source, 100)
    with pytest.raises(
        DataError, match=rf"^data: {source} was truncated while it was in use: it has 100 bytes, it had "
    ):
        for _ in range(50):
            run.train_step()


def test_a_file_that_is_replaced_is_read_on_or_refused(tmp_path) -> None:
    """The open one is read on; opened again after many others it is another file."""
    source = text_file(tmp_path / "text.txt")
    corpus = data.open_data(source)
    before = corpus.train[0][:100].tobytes()
    other = text_file(tmp_path / "other.txt")
    os.replace(other, source)
    assert corpus.train[0][:100].tobytes() == before
    kept = [DataFile(text_file(tmp_path / f"{i}.txt", 100)) for i in range(_MOST_OPEN)]
    with pytest.raises(DataError, match="was replaced by another file while it was in use"):
        corpus.train[0][:100]
    del kept


def test_descriptors_are_few_and_given_back(tmp_path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not show descriptors")
    DataFile._open.clear()  # files of other tests, which ours would close
    gc.collect()  # and what waits for the collector
    before = count()
    files = []
    for i in range(3 * _MOST_OPEN):
        np.save(tmp_path / f"{i:03}.npy", np.arange(i, i + 1000))
        files.append(data.open_tokens(tmp_path / f"{i:03}.npy")[0])
    assert count() - before <= _MOST_OPEN
    assert [int(tokens[999:1000][0]) for tokens in files] == [i + 999 for i in range(len(files))]
    assert count() - before <= _MOST_OPEN
    del files
    assert count() == before


def test_an_array_in_a_file(tmp_path) -> None:
    values = np.arange(-50, 950, dtype="<i4")
    np.save(tmp_path / "a.npy", values)
    tokens, _, _ = data.open_tokens(tmp_path / "a.npy")
    for where in (slice(None), slice(3, 7), slice(-5, None), slice(990, 2000), slice(7, 3), slice(1000, None)):
        assert np.array_equal(tokens[where], values[where])
    part = tokens.part(100, 900).part(1, 10)
    assert len(part) == 9 and np.array_equal(np.asarray(part), values[101:110])
    with pytest.raises(IndexError, match="the step of a slice must be 1, got 2"):
        tokens[::2]
    with pytest.raises(ValueError, match="must be a copy"):
        np.array(tokens, copy=False)


BAD = {
    "fifo.npy": lambda path: os.mkfifo(path),
    "fifo.txt": lambda path: os.mkfifo(path),
    "magic.npy": lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"),
    "brackets.npy": lambda path: path.write_bytes(b"\x93NUMPY\x01\x00\x40\x1f" + b"(" * 8000),
    "code.npy": lambda path: path.write_bytes(b"\x93NUMPY\x01\x00\x20\x00" + b"{'descr': __import__('os')}".ljust(32)),
    "dtype.npy": lambda path: path.write_bytes(
        b"\x93NUMPY\x01\x00\x50\x00" + b"{'descr': '<i99', 'fortran_order': False, 'shape': (3,)}".ljust(80)
    ),
    "negative.npy": lambda path: path.write_bytes(
        b"\x93NUMPY\x01\x00\x50\x00" + b"{'descr': '<i4', 'fortran_order': False, 'shape': (-3,)}".ljust(80)
    ),
    "huge.npy": lambda path: path.write_bytes(
        b"\x93NUMPY\x01\x00\x50\x00" + b"{'descr': '<i4', 'fortran_order': False, 'shape': (10**30,)}".ljust(80)
    ),
    "objects.npy": lambda path: np.save(path, np.array([{}], dtype=object), allow_pickle=True),
    "version.npy": lambda path: path.write_bytes(b"\x93NUMPY\x09\x00" + b"\0" * 200),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_data_is_one_sentence(tmp_path, name: str) -> None:
    BAD[name](tmp_path / name)
    with pytest.raises(DataError, match=r"^data: .*" + name) as error:
        data.open_data(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_fifo_in_a_folder_is_no_text(tmp_path) -> None:
    text_file(tmp_path / "a.txt")
    text_file(tmp_path / "b.txt")
    os.mkfifo(tmp_path / "c.txt")
    assert len(data.open_data(tmp_path).segments) == 2
