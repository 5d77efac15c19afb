"""prepare in several processes, and after an interruption."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from runs import HANGS

from xtrain import data
from xtrain.cli import main
from xtrain.data import encoding, records
from xtrain.data.readers import Document
from xtrain.data.token_files import open_token_file
from xtrain.errors import DataError
from xtrain.files import write_file
from xtrain.tokenizers import ByteTokenizer

pytestmark = pytest.mark.on_cpu


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """40 documents, of which every seventh has a prompt; 4 to a batch."""
    monkeypatch.setattr(records, "_BATCH", 4)
    folder = tmp_path / "texts"
    folder.mkdir()
    rows = []
    for i in range(40):
        text = "word " * (i % 5) + str(i)
        rows.append({"prompt": text, "completion": f"{i}!"} if i % 7 == 0 else {"text": text if i % 11 else ""})
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "b.txt").write_text("the last one")
    return folder


@pytest.mark.parametrize("lines", ["", "\n\n", '{"text": ""}\n{"text": ""}\n'])
def test_a_file_without_text_is_no_folder(lines: str, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(DataError, match=r"^data: \S*a\.jsonl holds no document that is not empty$"):
        data.prepare(tmp_path / "a.jsonl", tmp_path / "x.tokens")
    with pytest.raises(DataError, match=rf"^data: {tmp_path} holds no text files, or empty ones alone$"):
        data.prepare(tmp_path, tmp_path / "x.tokens")
    assert not (tmp_path / "x.tokens").exists()


@pytest.mark.parametrize("content", ["text".encode("utf-16"), b"a\0b"])
def test_a_file_that_is_no_text_is_not_called_empty(content: bytes, tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(
        DataError, match=r"^data: \S*a\.txt holds no UTF-8 text: it has a zero byte, or begins as a binary"
    ):
        data.prepare(tmp_path / "a.txt", tmp_path / "x.tokens")


def written(source: Path, name: str, **options) -> bytes:
    out = source.parent / name
    data.prepare(source, out, **options)
    return out.read_bytes()


def test_any_number_of_processes_writes_the_same_bytes(source) -> None:
    want = written(source, "one.tokens")
    assert open_token_file(source.parent / "one.tokens").loss_mask is not None
    assert written(source, "three.tokens", processes=3) == want
    for bad in (0, 257, True, 1.5):
        with pytest.raises(DataError, match=r"data: processes must be an integer in \[1, 256\], got"):
            data.prepare(source, source.parent / "x.tokens", processes=bad)


def test_a_batch_has_a_limit_in_bytes(monkeypatch) -> None:
    """Counted for each batch anew, and in every kind of document."""
    monkeypatch.setattr(records, "_BATCH_BYTES", 10)
    said = {"messages": [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": "efg"}]}
    contents = [b"123456", b"12345", b"1234", {"prompt": "abc", "completion": "de"}, b"1", said, b"1"]
    found = records.batches(Document(str(i), content) for i, content in enumerate(contents))
    assert [[int(one.place) for one in batch] for batch in found] == [[0, 1], [2, 3, 4], [5], [6]]


def test_progress_is_told_again_and_again(source, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["xtrain.data.prepare"], "_SHOWN", 15)
    told: list[int] = []
    written(source, "x.tokens", progress=told.append)
    starts = [*open_token_file(source.parent / "x.tokens").documents[:].tolist()]
    assert told == [starts[15], starts[30]]


def test_a_broken_document_is_named_by_another_process(source) -> None:
    with open(source / "a.jsonl", "a") as file:
        file.write('{"body": "x"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 41 must have text, messages"):
        written(source, "x.tokens", processes=2)
    assert not (source.parent / "x.tokens").exists()


class Interrupted(ByteTokenizer):
    """Encodes so many texts, and is then interrupted."""

    left = 10**9
    seen = 0

    def encode(self, text: bytes) -> np.ndarray:
        if self.left <= 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.seen += 1
        return super().encode(text)


def test_an_interrupted_run_goes_on(source) -> None:
    want, part = written(source, "one.tokens"), source.parent / "x.tokens.part"
    tokenizer = Interrupted()
    written(source, "all.tokens", tokenizer=tokenizer)
    whole, tokenizer.left = tokenizer.seen, 25
    with pytest.raises(KeyboardInterrupt):
        written(source, "x.tokens", tokenizer=tokenizer, resume=True)
    assert not (source.parent / "x.tokens").exists()
    kept = sorted(path.name for path in part.iterdir())
    assert kept[0] == "00000000.npz" and len(kept) > 3
    tokenizer.left, tokenizer.seen = 10**9, 0
    found = written(source, "x.tokens", tokenizer=tokenizer, resume=True)
    assert found == (source.parent / "all.tokens").read_bytes() and not part.exists()
    assert 0 < tokenizer.seen <= whole - 4 * 2
    assert len(found) == len(want)


def test_another_work_begins_anew(source) -> None:
    part = source.parent / "x.tokens.part"
    tokenizer = Interrupted()
    tokenizer.left = 25
    with pytest.raises(KeyboardInterrupt):
        written(source, "x.tokens", tokenizer=tokenizer, resume=True)
    assert part.is_dir()
    rows = (source / "a.jsonl").read_text().replace("word", "WORD")
    (source / "a.jsonl").write_text(rows)
    os.utime(source / "a.jsonl", ns=(1, 1))
    assert written(source, "x.tokens", resume=True) == written(source, "y.tokens")
    part.mkdir()
    (part / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="must be a folder of kept batches, but it holds other files"):
        written(source, "x.tokens", resume=True)
    assert (part / "thesis.txt").read_text() == "mine"


class Changed(Interrupted):
    """Another tokenizer of the same name."""

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": b"another"}


Changed.__name__ = Interrupted.__name__


@pytest.mark.parametrize("change", [None, "time", "field", "tokenizer"])
def test_what_makes_another_work(tmp_path, monkeypatch, change: str | None) -> None:
    """Each by itself; and one file of the other work that is damaged, or cannot be written, is told."""
    monkeypatch.setattr(records, "_BATCH", 4)
    path, out = tmp_path / "a.jsonl", tmp_path / "x.tokens"
    path.write_text("".join(json.dumps({"text": f"t{i}", "body": f"b{i}"}) + "\n" for i in range(40)))
    tokenizer = Interrupted()
    tokenizer.left = 25
    with pytest.raises(KeyboardInterrupt):
        data.prepare(path, out, tokenizer, field="text", resume=True)
    if change == "time":
        os.utime(path, ns=(1, 1))
    again, field = (Changed if change == "tokenizer" else Interrupted)(), "body" if change == "field" else "text"
    if change is None:
        first = tmp_path / "x.tokens.part" / "00000000.npz"
        content = first.read_bytes()
        for damaged in (content[: len(content) // 2], b"PK\3\4" + content[4:200], b"", b"no zip file"):
            first.write_bytes(damaged)
            with pytest.raises(DataError, match=r"00000000\.npz is damaged, remove it: "):
                data.prepare(path, out, again, field=field, resume=True)
        first.write_bytes(content)
    data.prepare(path, out, again, field=field, resume=True)
    assert (again.seen == 40) == (change is not None)


def kept_batch(folder: Path) -> tuple[encoding.Kept, Path]:
    """A folder with one batch of three documents."""
    kept = encoding.Kept(folder / "x.part", [], ByteTokenizer(), None)
    ids, mask = np.arange(5, dtype=np.uint32), np.array([True, False, True])
    kept.store(0, [records.Encoded(ids, None, 5), records.Encoded(ids[:0], None, 0), records.Encoded(ids[:3], mask, 9)])
    return kept, folder / "x.part" / "00000000.npz"


def as_lists(batch: list) -> list:
    return [(one.tokens.tolist(), None if one.learned is None else one.learned.tolist(), one.text) for one in batch]


def loaded(kept: encoding.Kept, path: Path) -> list | None:
    """What a batch holds; None after a DataError of one short line."""
    try:
        return as_lists(kept.load(0) or [])
    except DataError as error:
        text = str(error)
        assert text.startswith(f"data: {path} is damaged, remove it: ") and text.isprintable(), repr(text)
        assert 0 < len(text.partition("remove it: ")[2]) <= 120, text
        return None


def test_a_kept_batch_with_any_flipped_bit_is_refused_or_whole(tmp_path) -> None:
    kept, path = kept_batch(tmp_path)
    content = path.read_bytes()
    want = as_lists(kept.load(0) or [])
    assert want == [([0, 1, 2, 3, 4], None, 5), ([], None, 0), ([0, 1, 2], [True, False, True], 9)]
    refused = 0
    for at in range(len(content)):
        for bit in (at % 8, (at + 3) % 8):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            found = loaded(kept, path)
            refused += found is None
            assert found in (None, want), (at, bit)
    assert refused > len(content)


def test_a_kept_batch_of_other_arrays_or_of_no_file_is_refused(tmp_path) -> None:
    kept, path = kept_batch(tmp_path)
    with np.load(path) as file:
        good = dict(file)
    bad: list[dict] = [
        {"tokens": good["tokens"][:-1]}, {"tokens": good["tokens"].astype(np.int64)}, {"tokens": np.uint32(3)},
        {"tokens": good["tokens"].reshape(2, 4)}, {"learned": good["learned"][:-1]}, {"learned": good["learned"].astype(np.uint8)},
        {"counts": np.array([6, -1, 3])}, {"counts": np.array([5, 3])}, {"counts": np.array([5.0, 0.0, 3.0])},
        {"all_learned": good["all_learned"][:2]}, {"texts": np.array([1, 2])}, {"texts": np.array([None] * 3)},
    ]  # fmt: skip
    for change in bad:
        np.savez(path, **{**good, **change})
        assert loaded(kept, path) is None, change
    np.savez(path, **{name: array for name, array in good.items() if name != "counts"})
    assert loaded(kept, path) is None
    count = 10**7  # of zeros: packed they take a thousandth of their memory
    np.savez_compressed(path, **{**good, "tokens": np.zeros(count, np.uint32), "learned": np.ones(count, bool), "counts": np.array([count, 0, 0])})  # fmt: skip
    with pytest.raises(DataError, match=r"is damaged, remove it: tokens is larger than its file$"):
        kept.load(0)
    path.unlink()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(path)
        with pytest.raises(DataError, match=r"00000000\.npz is damaged, remove it: .*it is not a regular file$"):
            kept.load(0)
        path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    assert loaded(kept, path) is None
    path.unlink()
    assert kept.load(0) is None


def test_a_kept_batch_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch) -> None:
    """Nobody is told to remove it: the disk, the rights or the memory may be others the next time."""
    kept, path = kept_batch(tmp_path)

    class Broken(ZipFile):
        def read(self, *_):
            raise error

    for error, words in (
        (OSError(errno.EIO, "Input/output error"), "cannot be read: Input/output error"),
        (PermissionError(errno.EACCES, "Permission denied", str(path)), "cannot be read: Permission denied"),
        (MemoryError(), "does not fit into memory"),
        (OSError(errno.EINVAL, "Invalid argument"), "is damaged, remove it: "),  # zipfile seeks a place below 0
    ):
        with monkeypatch.context() as patched, pytest.raises(DataError) as raised:
            patched.setattr(encoding, "ZipFile", Broken)
            kept.load(0)
        assert str(raised.value).startswith(f"data: {path} {words}"), error
    path.unlink()
    for make, words in ((Path.mkdir, "Is a directory"), (lambda path: path.symlink_to(path), "Too many levels of ")):
        make(path)
        with pytest.raises(DataError, match=rf"00000000\.npz cannot be read: {words}"):
            kept.load(0)
        path.unlink() if path.is_symlink() else path.rmdir()


def test_a_batch_that_cannot_be_kept_is_not_there(source, monkeypatch) -> None:
    def full(path, write) -> None:
        if path.suffix == ".npz":
            raise OSError(28, "No space left on device")
        write_file(path, write)

    monkeypatch.setattr(encoding, "write_file", full)
    with pytest.raises(DataError, match=r"00000000\.npz cannot be written: No space left on device$"):
        written(source, "x.tokens", resume=True)
    assert [path.name for path in (source.parent / "x.tokens.part").iterdir()] == ["key.json"]


def test_a_process_that_has_ended_is_told() -> None:
    def result() -> list:
        raise BrokenProcessPool("a child terminated abruptly")

    with pytest.raises(DataError, match=r"^data: a process that encodes has ended: is there too little memory\?$"):
        encoding._finish((0, result, False), None)


SLOW = """
import sys, time
from xtrain import data
from xtrain.tokenizers import ByteTokenizer

class Slow(ByteTokenizer):
    def encode(self, text):
        print("encodes", flush=True)
        time.sleep({encodes})
        return super().encode(text)

if __name__ == "__main__":
    try:
        data.prepare(sys.argv[1], sys.argv[2], Slow(), processes=2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
else:
    print("begins", flush=True)
    time.sleep({begins})
"""


def slow(source: Path, begins: float, encodes: float) -> subprocess.Popen:
    """A run whose processes take so many seconds to begin, and for a text; in a group of its own."""
    script = source.parent / "slow.py"
    script.write_text(SLOW.format(begins=begins, encodes=encodes))
    command = [sys.executable, str(script), str(source), str(source.parent / "x.tokens")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_processes_end_with_the_one_that_was_killed(source) -> None:
    """They hold its output, so that a pipe behind it would wait for ever, and memory."""
    run = slow(source, begins=0, encodes=HANGS)
    assert run.stdout is not None
    try:
        assert "encodes\n" in run.stdout, "it ended before"
        run.kill()
        run.communicate(timeout=60)
    finally:
        if run.returncode is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL


def test_ctrl_c_reaches_the_first_process_alone(source) -> None:
    """A terminal sends it to all of them."""
    run = slow(source, begins=1, encodes=0)
    assert run.stdout is not None
    assert "begins\n" in run.stdout, "it ended before"
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=HANGS)
    assert (out.splitlines()[-1], err, run.returncode) == ("interrupted", "", 0)


def test_the_command(source, capsys) -> None:
    want, out = written(source, "one.tokens"), source.parent / "x.tokens"
    assert main(["tokenize", str(source), str(out), "--processes", "2", "--resume"]) == 0
    assert out.read_bytes() == want and not (source.parent / "x.tokens.part").exists()
    assert main(["prepare", str(source), str(out), "--processes", "0"]) == 2
    assert "--processes must be in [1, 256], got 0" in capsys.readouterr().err


def test_a_tokenizer_in_several_processes(source) -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    folder = source.parent / "tokenizer"
    assert main(["tokenizer", "train", str(source / "b.txt"), "--vocab", "260", "--out", str(folder)]) == 0
    from xtrain.tokenizers import find_tokenizer

    tokenizer = find_tokenizer(folder)
    want = written(source, "one.tokens", tokenizer=tokenizer)
    assert written(source, "two.tokens", tokenizer=tokenizer, processes=2, resume=True) == want
