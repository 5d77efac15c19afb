"""What a reader of directories promises, a test for each clause of DirectoryReader and CheckedFile."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from xtrain.errors import CheckpointError
from xtrain.saving import DirectoryReader
from xtrain.saving.directory import DirectoryWriter
from xtrain.saving.reader import is_count
from xtrain.tokenizers import load_tokenizer

pytestmark = pytest.mark.on_cpu


def saved(folder, pieces: list[bytes], name: str = "data"):
    with DirectoryWriter(folder) as writer:
        writer.write(name, pieces)
        writer.publish()
    return folder


def listed(folder, **entry) -> None:
    """A manifest of these words for the file `data`."""
    (folder / "manifest.json").write_text(json.dumps({"format": 2, "files": {"data": entry}}))


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_file_that_should_be_there_is_missed(tmp_path) -> None:
    """It is not taken for one that never was: a lost tokenizer is no tokenizer of bytes."""
    folder = saved(tmp_path / "m", [b"{}"], "tokenizer.json")
    assert DirectoryReader(folder).has("tokenizer.json") and not DirectoryReader(folder).has("other.json")
    (folder / "tokenizer.json").unlink()
    assert DirectoryReader(folder).has("tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: No such file"):
        load_tokenizer(folder)


def test_a_manifest_that_is_a_broken_link_is_an_error(tmp_path) -> None:
    folder = saved(tmp_path / "m", [b"x"])
    (folder / "manifest.json").unlink()
    os.symlink("nowhere", folder / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        DirectoryReader(folder)


def test_every_one_of_many_pieces_is_checked(tmp_path) -> None:
    """More than wait for their hash at a time."""
    pieces = [bytes([i]) * 10 for i in range(100)]
    folder = saved(tmp_path / "m", pieces)
    DirectoryReader(folder).verify()
    content = b"".join(pieces)
    for piece in (0, 3, 31, 32, 63, 64, 99):
        damaged = bytearray(content)
        damaged[piece * 10 + 4] ^= 1
        (folder / "data").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"bytes {piece * 10} to {piece * 10 + 9} have another SHA-256"):
            DirectoryReader(folder).verify()


def test_an_error_in_the_block_is_the_one_that_is_raised(tmp_path) -> None:
    """Then nothing of what was read is used, and nothing needs to be checked; the file is closed in any case."""
    folder = saved(tmp_path / "m", [b"x" * 100])
    (folder / "data").write_bytes(b"y" * 100)
    with pytest.raises(KeyError), DirectoryReader(folder).open("data") as file:
        file.read(0, 100)
        raise KeyError
    assert file._file.closed
    with pytest.raises(CheckpointError, match="is damaged"), DirectoryReader(folder).open("data") as file:
        file.read(0, 100)
    assert file._file.closed


def test_an_end_that_comes_too_early(tmp_path) -> None:
    """Also behind bytes that were there."""
    (tmp_path / "data").write_bytes(b"x" * 10)
    with DirectoryReader(tmp_path).open("data") as file:
        assert file.peek(2, 10) == b"x" * 8
        for start, stop in ((0, 15), (10, 11), (20, 30)):
            with pytest.raises(CheckpointError, match=rf"is truncated: it ends at byte \d+, not {stop}"):
                file.peek(start, stop)


@pytest.mark.parametrize(
    "entry",
    [
        {"size": True, "pieces": [[True, sha(b"x")]]},
        {"size": 1, "pieces": [[2, sha(b"x")], [-1, sha(b"x")]]},
        {"size": 1, "pieces": [[1.0, sha(b"x")]]},
        {"size": 1, "pieces": [[1, 3]]},
        {"size": 1, "pieces": [[1]]},
        {"size": 1, "pieces": None},
        {"size": 1, "pieces": []},
        {"size": 2, "pieces": [[1, sha(b"x")]]},
    ],
)
def test_pieces_that_cannot_be(tmp_path, entry: dict) -> None:
    (tmp_path / "data").write_bytes(b"x")
    listed(tmp_path, **entry)
    with pytest.raises(CheckpointError, match="must list the pieces of data, and their sizes must add up to its size"):
        DirectoryReader(tmp_path)


def test_a_message_about_a_long_name_is_short(tmp_path) -> None:
    entry = {"size": 1, "pieces": None}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 2, "files": {"m" * 5000: entry}}))
    with pytest.raises(CheckpointError, match="must list the pieces of m{99}") as caught:
        DirectoryReader(tmp_path)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 300


def test_pieces_of_nothing_are_passed_over(tmp_path) -> None:
    (tmp_path / "data").write_bytes(b"xyz")
    listed(tmp_path, size=3, pieces=[[0, "a"], [2, sha(b"xy")], [0, "b"], [1, sha(b"z")], [0, "c"]])
    reader = DirectoryReader(tmp_path)
    reader.verify()
    assert reader.read("data") == b"xyz"
    with reader.open("data") as file:
        assert file.read(2, 3) == b"z"
    with (
        pytest.raises(CheckpointError, match="no pieces in the manifest are bytes 1 to 1"),
        reader.open("data") as file,
    ):
        file.read(1, 2)


def test_formats_of_a_manifest(tmp_path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    for number in (0, 3, "2", None, 2.5):
        (tmp_path / "manifest.json").write_text(json.dumps({"format": number, "files": {}}))
        with pytest.raises(CheckpointError, match="must have format 1 or 2, got"):
            DirectoryReader(tmp_path)
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": 1, "files": {"data": {"size": 1, "sha256": sha(b"x")}}})
    )
    assert DirectoryReader(tmp_path).read("data") == b"x"
    (tmp_path / "data").write_bytes(b"y")
    with pytest.raises(CheckpointError, match="its SHA-256 is not the one in the manifest"):
        DirectoryReader(tmp_path).open("data")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0b", "a\nb", "\x1b[31m", "\ud800"])
def test_names_that_are_no_plain_names(tmp_path, name: str) -> None:
    """In one printable line, before anything is opened."""
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 2, "files": {name: {"size": 0, "pieces": []}}}))
    with pytest.raises(CheckpointError, match="must list plain file names, got") as caught:
        DirectoryReader(tmp_path)
    assert str(caught.value).isprintable()


def test_what_is_a_number_of_bytes() -> None:
    """Whole, and no more than a file can have."""
    assert [is_count(value) for value in (0, 2**63 - 1)] == [True, True]
    assert not any(is_count(value) for value in (-1, 2**63, True, 1.0, "1", None))
