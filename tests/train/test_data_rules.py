"""Rules of the data: which windows there are, in which order, on which side of the split, and what another data set is."""

from __future__ import annotations

import os

import numpy as np
import pytest

from xtrain import data
from xtrain.data import corpus as corpora
from xtrain.data.file_array import DataFile, FileArray
from xtrain.errors import DataError
from xtrain.tokenizers import ByteTokenizer


def test_every_window_is_there() -> None:
    """At each multiple of seq_len whose seq_len + 1 tokens lie in one segment; also the last that just fits."""
    lengths = (11, 10, 21, 5, 6, 31, 35)
    segments = [np.arange(n) + 1000 * i for i, n in enumerate(lengths)]
    for seq_len in (5, 10):
        want = [s[at : at + seq_len + 1] for s in segments for at in range(0, len(s) - seq_len, seq_len)]
        windows = data.Windows(segments, seq_len)
        assert np.array_equal(windows.gather(np.arange(len(windows))), np.array(want))


def test_the_first_id_behind_the_vocabulary_is_refused() -> None:
    segment = np.array([1, 2, 3, 9, 4, 5, 6])
    assert data.Windows([segment], 6, vocab_size=10).gather(np.array([0])).max() == 9
    with pytest.raises(DataError, match=r"must be in \[0, 9\), got 9 at position 3 of piece 0"):
        data.Windows([segment], 6, vocab_size=9).gather(np.array([0]))


def test_the_position_at_the_end_of_an_epoch() -> None:
    """It is the beginning of the next one; nothing stands behind the last window."""
    loader = data.Loader([np.arange(41)], 2, 10)
    assert len(loader.windows) == 4
    for epoch, index in ((0, 2), (1, 0), (1, 2), (2, 0)):
        loader.next_batch()
        assert loader.state_dict() == {"epoch": epoch, "index": index}
    for index in (4, 5):
        with pytest.raises(DataError, match="position must be inside the data"):
            loader.load_state_dict({"epoch": 0, "index": index})
    loader.load_state_dict({"epoch": 0, "index": 3})


def test_epochs_have_orders_of_their_own() -> None:
    loader = data.Loader([np.arange(1001)], 100, 10)
    first, second = (loader.next_batch()[0][:, 0].tolist() for _ in range(2))
    assert first != second and sorted(first) == sorted(second)


def test_the_order_is_the_same_on_every_machine() -> None:
    """Of every version, too: a run that is resumed with another one sees each window once."""
    assert data.permute(np.arange(10), 10, 5, 0).tolist() == [8, 0, 9, 4, 2, 7, 6, 5, 1, 3]
    assert data.permute(np.arange(10), 10, 5, 1).tolist() == [0, 2, 3, 9, 5, 1, 4, 7, 8, 6]
    assert data.permute(np.arange(5), 1000003, 7, 2).tolist() == [787361, 138722, 828036, 324894, 142647]


def test_validation_is_not_trained_on(tmp_path) -> None:
    text = bytes(range(1, 201))
    (tmp_path / "a.txt").write_bytes(text)
    opened = data.open_data(tmp_path / "a.txt", val_fraction=0.1)
    assert bytes(opened.train[0][:]) == text[:180] and bytes(opened.val[0][:]) == text[180:]


def test_a_folder_that_moves_keeps_its_sides(tmp_path) -> None:
    sides = []
    for name in ("one", "two/deeper"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for i in range(60):
            (folder / f"{i}.txt").write_text(f"text {i:03d}")
        sides.append(bytes(data.open_data(folder, val_fraction=0.3).val[0][:]))
    assert sides[0] == sides[1] and 5 * 9 < len(sides[0]) < 35 * 9


def test_documents_end_with_a_token(tmp_path) -> None:
    for name, text in (("a", "first"), ("b", "second"), ("c", "the third one")):
        (tmp_path / name).write_text(text)
    opened = data.open_data(tmp_path, val_fraction=0.01)
    assert bytes(opened.train[0]) == b"second\0the third one\0" and bytes(opened.val[0]) == b"first\0"


def test_validation_windows_are_spread() -> None:
    segment = np.arange(1001)
    corpus = corpora.Corpus("x", [segment], [segment], None, 2000, None)
    assert corpus.val_windows(10, 50)[:, 0].tolist() == [0, 200, 400, 600, 800]
    assert corpus.val_windows(10, 10**9).shape == (100, 11) and corpus.val_windows(10, 1).shape == (1, 11)


def test_files_named_val_are_for_validation(tmp_path) -> None:
    for name, value in (("a.npy", 1), ("validation.npy", 2), ("z.npy", 3)):
        np.save(tmp_path / name, np.full(50, value))
    opened = data.open_data(tmp_path)
    assert [int(s[:].max()) for s in opened.train] == [1, 3] and [int(s[:].max()) for s in opened.val] == [2]


def test_bytes_per_token_of_token_files(tmp_path) -> None:
    """Bits per byte divide by it: tokens of four bytes of text each."""

    class Fours(ByteTokenizer):
        eos = None

        def encode(self, text: bytes) -> np.ndarray:
            return np.frombuffer(text, np.uint8)[::4]

    (tmp_path / "a.txt").write_bytes(b"abcd" * 100)
    data.prepare(tmp_path / "a.txt", tmp_path / "a.tokens", Fours())
    assert 3.9 < data.open_data(tmp_path / "a.tokens").bytes_per_token < 4.1


def test_any_changed_token_is_another_data_set() -> None:
    x = np.arange(20000, dtype=np.uint16)
    base = data.identity([x])["sha256"]
    for at in (0, 9999, 19999):
        other = x.copy()
        other[at] ^= 1
        assert data.identity([other])["sha256"] != base
    assert data.identity([x[:10000], x[10000:]])["sha256"] != base
    assert data.identity([x.view(np.uint8)])["sha256"] != base


def test_a_file_that_was_written_again_is_read_again(tmp_path) -> None:
    """With the same size and, put back, the same time: the time of its inode tells."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 1000)
    about = os.stat(path)
    known = data.identity(data.open_data(path).segments)
    path.write_bytes(b"b" * 1000)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert data.identity(data.open_data(path).segments, known)["sha256"] != known["sha256"]


def test_short_reads_are_continued(tmp_path, monkeypatch) -> None:
    """A system may give fewer bytes than were asked for."""
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(100)))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real(fd, [parts[0][:7]], offset))
    assert FileArray(DataFile(path), np.uint8, 0, 100)[10:90].tolist() == list(range(10, 90))


def test_a_token_file_has_the_size_that_it_says(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("some text of a few words")
    data.prepare(tmp_path / "a.txt", tmp_path / "a.tokens")
    whole = (tmp_path / "a.tokens").read_bytes()
    for wrong in (whole[:-1], whole + b"x"):
        (tmp_path / "a.tokens").write_bytes(wrong)
        with pytest.raises(DataError, match="is damaged: its header says"):
            data.open_tokens(tmp_path / "a.tokens")


def test_tokens_have_the_width_of_their_vocabulary(tmp_path) -> None:
    """The largest id of each vocabulary comes back."""
    (tmp_path / "a.txt").write_text("x")
    for vocab in (256, 257, 65536, 65537, 131072):

        class Large(ByteTokenizer):
            eos = None
            vocab_size = vocab

            def encode(self, text: bytes) -> np.ndarray:
                return np.array([self.vocab_size - 1, 0, 1], np.uint32)

        data.prepare(tmp_path / "a.txt", tmp_path / "a.tokens", Large())
        tokens, _, known = data.open_tokens(tmp_path / "a.tokens")
        assert tokens[:].tolist() == [vocab - 1, 0, 1] and known == vocab


def test_files_of_a_folder_are_sorted(tmp_path) -> None:
    """By path, whatever the system lists first; a file with a zero byte among its first 8192 is no text."""
    for name in ("b.txt", "a/z.txt", "a.txt", "a/b.txt", "Z.txt", "m.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    (tmp_path / "binary").write_bytes(b"x" * 8000 + b"\0" + b"x" * 100)
    from xtrain.data.text import is_text, text_files

    assert text_files(os.fspath(tmp_path)) == ["Z.txt", "a.txt", "a/b.txt", "a/z.txt", "b.txt", "binary", "m.txt"]
    assert not is_text((tmp_path / "binary").read_bytes()) and is_text(b"x" * 8192 + b"\0")


def test_bytes_that_are_no_text_are_shown() -> None:
    assert ByteTokenizer().decode([65, 255, 66, 0xE2, 0x82]) == "A\ufffdB\ufffd"
