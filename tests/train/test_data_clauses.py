"""What data promise, a test for each clause: windows, batches, the split, token files, tokenizers."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import python

import xtrain as xt
from xtrain import data
from xtrain.data import corpus as corpora
from xtrain.data.file_array import DataFile, FileArray
from xtrain.data.identity import same_data
from xtrain.errors import DataError
from xtrain.tokenizers import ByteTokenizer, load_tokenizer

pytestmark = pytest.mark.on_cpu


class Letters:
    """One token for each two bytes, ids of 0 to 99, no end-of-document token."""

    vocab_size = 100
    eos: int | None = None

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text[::2], np.uint8) % 100

    def decode(self, ids) -> str:
        return repr(list(ids))

    def files(self) -> dict[str, bytes]:
        return {}


# ---- windows and batches


def test_a_bad_token_is_named_by_its_place_in_its_piece() -> None:
    pieces = [np.arange(41), np.arange(41)]
    pieces[1] = pieces[1].copy()
    pieces[1][27] = -3
    windows = data.Windows(pieces, 10, "numbers", vocab_size=50)
    with pytest.raises(DataError, match=r"of numbers must be in \[0, 50\), got -3 at position 27 of piece 1"):
        windows.gather(np.arange(8))
    with pytest.raises(DataError, match="got -3 at position 27 of piece 1"):
        data.Windows(pieces, 10).gather(np.array([6]))  # no vocabulary is known: a negative id is none of any


def test_batches_are_int64_and_dense() -> None:
    loader = data.Loader([np.arange(200, dtype=np.uint8)], 4, 10)
    ids, targets = loader.next_batch()
    for part in (ids, targets):
        assert part.dtype == np.int64 and part.flags.c_contiguous and part.shape == (4, 10)
    a, b = next(iter(loader))
    assert isinstance(a, xt.Tensor) and a.dtype is b.dtype is xt.int64 and (a.numpy() + 1 == b.numpy()).all()
    large = data.Loader([np.full(50, 2**40)], 1, 10)
    assert large.next_batch()[0].max() == 2**40


def test_batches_and_positions_that_cannot_be() -> None:
    with pytest.raises(DataError, match=r"a batch of 1000000000000000000 x 10 tokens .* does not fit into memory"):
        data.Loader([np.arange(100)], 10**18, 10)
    with pytest.raises(DataError, match="a batch of 100000000000000 x 10 tokens"):
        data.Loader([np.arange(100)], 10**14, 10)
    loader = data.Loader([np.arange(100)], 1, 10)
    for position in ({"epoch": -1, "index": 0}, {"epoch": 0, "index": -1}):
        with pytest.raises(DataError, match="the position must be inside the data"):
            loader.load_state_dict(position)


@pytest.mark.parametrize("kind", ["loader", "packed_loader"])
@pytest.mark.parametrize("mixed", [False, True])
def test_seeds_and_positions_of_other_kinds(kind: str, mixed: bool, tmp_path) -> None:
    """A seed is any integer, NumPy's too. A position of another kind of loader, or one that is damaged, is one sentence,
    and leaves the loader where it was.
    """
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.arange(200) % 50)
    opened = data.open_data(f"{tmp_path}/a.npy:1,{tmp_path}/b.npy:2" if mixed else tmp_path / "a.npy")
    make: Any = getattr(opened, kind)
    want = make(2, 8, 5).next_batch()[0]
    for seed in (np.int64(5), np.uint8(5), xt.tensor(5)):
        assert np.array_equal(make(2, 8, seed).next_batch()[0], want)
    for seed, kind_of in ((1.5, "float"), (None, "NoneType"), ("x", "str")):
        with pytest.raises(TypeError, match=f"^data: seed must be an int, got {kind_of}$"):
            make(2, 8, seed)

    loader = make(2, 8)
    loader.next_batch()
    before = loader.state_dict()
    names = list(before)
    entries = ", ".join(names[:-1]) + f" and {names[-1]}"
    other = data.open_data(tmp_path / "a.npy")
    others = [other.loader(2, 8).state_dict(), other.packed_loader(2, 8).state_dict(), {}, None, [], "x"]
    wrong = [state for state in others if not isinstance(state, dict) or list(state) != names]
    wrong += [{**before, names[0]: value} for value in ("0", 0.5, None)]
    for state in wrong:
        with pytest.raises(DataError, match=f"^data: the position must have {entries}, .*, got ") as caught:
            loader.load_state_dict(state)
        assert "\n" not in str(caught.value)
        assert loader.state_dict() == before
    if not mixed:
        loader.load_state_dict({name: np.int64(number) for name, number in before.items()})
        assert loader.state_dict() == before
    else:
        with pytest.raises(DataError, match="^data: the position must have epoch.*, whole numbers, got None$"):
            loader.load_state_dict({**before, "sources": [None, None]})
        assert loader.state_dict() == before


@pytest.mark.parametrize("kind", ["loader", "packed_loader"])
@pytest.mark.parametrize("mixed", [False, True])
def test_batches_of_nothing_are_refused(kind: str, mixed: bool, tmp_path) -> None:
    """Each size by its name, before the data is looked at; so are windows for validation."""
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.arange(200) % 50)
    source = f"{tmp_path}/a.npy:1,{tmp_path}/b.npy:2" if mixed else tmp_path / "a.npy"
    opened = data.open_data(source)
    make: Any = getattr(opened, kind)
    assert make(1, 1).next_batch()[0].shape == (1, 1)
    assert make(np.int64(2), np.int32(3)).next_batch()[0].shape == (2, 3)
    for sizes, name, value in (((0, 8), "batch_size", 0), ((-3, 8), "batch_size", -3), ((4, 0), "seq_len", 0), ((4, -1), "seq_len", -1)):  # fmt: skip
        with pytest.raises(DataError, match=rf"^data: {name} must be at least 1, got {value}$"):
            make(*sizes)
    for sizes, name in (((2.0, 8), "batch_size"), ((2, 8.0), "seq_len")):
        with pytest.raises(TypeError, match=f"^data: {name} must be an int, got float$"):
            make(*sizes)
    with pytest.raises(DataError, match="^data: seq_len must be at least 1, got 0$"):
        opened.val_windows(0, 100)


@pytest.mark.parametrize("pack", [False, True])
def test_masks_that_do_not_fit_are_refused(pack: bool) -> None:
    """Each has an entry for each token of its piece; pieces that are too short for a window have one, too."""
    tokens, mask = [np.arange(20), np.arange(3)], np.ones(20, np.uint8)

    def make(masks: Any) -> Any:
        return corpora.Corpus("x", tokens, tokens, None, 20, None, train_masks=masks, val_masks=masks)

    def loader(corpus: Any) -> Any:
        return (corpus.packed_loader if pack else corpus.loader)(2, 4)

    for masks in (None, [None, None], [mask, None], [mask, mask[:3]]):
        loader(make(masks)).next_batch()
    for masks, sentence in (
        ([mask[:19], None], "the mask of piece 0 of x must have 20 entries, one a token, got 19"),
        ([np.ones(21), None], "the mask of piece 0 of x must have 20 entries, one a token, got 21"),
        ([None, mask[:2]], "the mask of piece 1 of x must have 3 entries, one a token, got 2"),
        ([mask], "masks of x must be 2, one a piece or None, got 1"),
    ):
        with pytest.raises(DataError, match=f"^data: {sentence}$"):
            loader(make(masks))
        with pytest.raises(DataError, match="^data: " + sentence.replace(" of x", r" of x \(validation part\)")):
            make(masks).val_batch(4, 8)


@pytest.mark.parametrize("pack", [False, True])
def test_without_a_model_the_vocabulary_is_that_of_the_data(pack: bool) -> None:
    corpus = corpora.Corpus("x", [np.arange(40) % 8], [np.arange(8)], None, 7, None)
    make = corpus.packed_loader if pack else corpus.loader
    make(2, 4, vocab_size=8).next_batch()
    with pytest.raises(DataError, match=r"token ids of x must be in \[0, 7\), got 7"):
        make(9, 4).next_batch()
    assert corpus.val_set(7, 7, vocab_size=8, documents=pack)[3] == [1]
    with pytest.raises(DataError, match=r"token ids of x \(validation part\) must be in \[0, 7\), got 7 at position 7"):
        corpus.val_set(7, 7, documents=pack)


def test_a_short_validation_part_is_evaluated_in_shorter_sequences() -> None:
    corpus = corpora.Corpus("x", [np.arange(100)], [np.arange(8)], None, 100, None)
    assert corpus.val_windows(32, 1000).tolist() == [list(range(8))]
    corpus.val = [np.arange(101)]
    assert (
        len(corpus.val_windows(10, 40)) == 4
        and len(corpus.val_windows(10, 39)) == 3
        and len(corpus.val_windows(10, 1)) == 1
    )


# ---- the split


def test_every_side_gets_a_token() -> None:
    """Also where the fraction of a short text is less than one."""
    train, val = corpora._split_segments([np.arange(10)], 0.01, "x")
    assert len(train[0]) == 9 and val[0].tolist() == [9]
    with pytest.raises(DataError, match="too short to be split"):
        corpora._split_segments([np.arange(1)], 0.01, "x")


def test_of_few_files_the_smallest_is_for_validation(tmp_path) -> None:
    for name, size in (("a.txt", 30), ("b.txt", 10), ("c.txt", 20)):
        (tmp_path / name).write_bytes(name[:1].encode() * size)
    opened = data.open_data(tmp_path, val_fraction=1e-9)
    assert bytes(opened.val[0]) == b"b" * 10 + b"\0"


def test_python_is_the_name_of_a_source(tmp_path, monkeypatch) -> None:
    """./python is a file or folder of that name."""
    (tmp_path / "other" / "python").mkdir(parents=True)
    np.save(tmp_path / "other" / "python" / "a.npy", np.arange(9))
    monkeypatch.chdir(tmp_path / "other")
    assert corpora.holds_tokens("./python") and not corpora.holds_tokens("python")
    (tmp_path / "python").write_text("my own text " * 20)
    monkeypatch.chdir(tmp_path)
    assert data.open_data("./python").train_tokens < 300 and data.open_data("python").train_tokens > 10_000_000


def test_what_of_a_folder_is_text(tmp_path) -> None:
    for name in ("node_modules/a.txt", ".hidden/b.txt", ".c.txt", "__pycache__/d.txt", "site-packages/e.txt", ".git/f"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("not this")
    for name in ("one.txt", "two/three.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"this {name}")
    (tmp_path / "zeros.bin").write_bytes(b"\0" * 50)
    opened = data.open_data(tmp_path)
    both = bytes(opened.train[0]) + bytes(opened.val[0])
    assert sorted(both.strip(b"\0").split(b"\0")) == [b"this one.txt", b"this two/three.txt"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_cannot_be_read_is_an_error(kind: str) -> None:
    """By a user who is not root, who may read everything."""
    code = """
import os, sys
from xtrain import data
from xtrain.errors import DataError
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    data.open_data(sys.argv[1])
except DataError as error:
    print(error)
"""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "a.txt").write_text("text")
        closed = folder / "closed"
        closed.mkdir() if kind == "folder" else closed.write_text("text")
        closed.chmod(0)
        done = python("-c", code, os.fspath(folder if kind == "folder" else closed))
    assert done.stdout == f"data: {closed} cannot be read: Permission denied\n", done


def test_an_error_below_a_folder_is_one_of_the_folder(tmp_path, monkeypatch) -> None:
    """Whatever the reason: an unreadable part of the data is never left out."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "below").mkdir()
    real = os.scandir

    def scandir(path):
        if os.fspath(path).endswith("below"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"below cannot be read: Permission denied"):
        data.open_data(tmp_path)


def test_a_folder_of_too_much_text_is_to_be_prepared(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("x" * 10)
    (tmp_path / "b.txt").write_text("x" * 11)
    monkeypatch.setattr(corpora, "MAX_FOLDER_BYTES", 20)
    with pytest.raises(DataError, match=r"GiB of text; write a token file first: xtrain prepare .* data\.tokens"):
        data.open_data(tmp_path)
    monkeypatch.setattr(corpora, "MAX_FOLDER_BYTES", 21)
    data.open_data(tmp_path)


def test_bytes_per_token_count_text_only(tmp_path) -> None:
    """Of a tokenizer: bytes of the texts by tokens, its end-of-document tokens among them."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"0123456789" * 2)
    with pytest.warns(UserWarning, match="^data: the tokenizer has no end of a document"):
        opened = data.open_data(tmp_path, Letters())
    assert opened.bytes_per_token == 2.0 and opened.train_tokens == opened.val_tokens == 10

    class WithEnd(Letters):
        eos = 99

    opened = data.open_data(tmp_path, WithEnd())
    assert opened.bytes_per_token == 40 / 22 and int(opened.train[0][-1]) == 99
    assert data.open_data(tmp_path).bytes_per_token == 1.0


def test_what_token_files_say_of_themselves(tmp_path) -> None:
    """The largest vocabulary of several files; bytes of text only where all files know them."""
    (tmp_path / "text").write_bytes(b"abcd" * 20)
    (tmp_path / "in").mkdir()
    with pytest.warns(UserWarning, match="the tokenizer has no end of a document"):
        data.prepare(tmp_path / "text", tmp_path / "in" / "a.tokens", Letters())
    data.prepare(tmp_path / "text", tmp_path / "in" / "b.tokens")
    opened = data.open_data(tmp_path / "in")
    assert opened.vocab_size == 256 and opened.bytes_per_token == (80 + 81) / (40 + 81)
    np.save(tmp_path / "in" / "c.npy", np.arange(300))
    assert data.open_data(tmp_path / "in").bytes_per_token is None


# ---- files


def test_arrays_in_files(tmp_path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(np.arange(100, dtype="<u2").tobytes())
    array = FileArray(DataFile(path), "<u2", 0, 100)
    assert np.asarray(array, np.float32).dtype == np.float32 and np.asarray(array).dtype == np.uint16
    assert array.__array__(np.float32).dtype == np.float32
    assert (
        array[90:1000].tolist() == list(range(90, 100))
        and array[50:40].tolist() == []
        and array[-2:].tolist() == [98, 99]
    )
    for step in (2, -1):
        with pytest.raises(IndexError, match=f"the step of a slice must be 1, got {step}"):
            array[::step]
    with pytest.raises(ValueError, match="an array of them must be a copy"):
        array.__array__(copy=False)


def test_no_child_gets_a_descriptor(tmp_path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"x" * 10)
    file = DataFile(path)
    number = file._descriptor().number
    assert not os.get_inheritable(number)


def header(version: int = 1, width: int = 1, count: int = 10, text: int = 0, vocab: int = 0) -> bytes:
    return struct.pack("<8sIIQQI", b"xtokens\0", version, width, count, text, vocab).ljust(64, b"\0")


def test_token_files_of_other_kinds_are_refused(tmp_path) -> None:
    path = tmp_path / "a.tokens"
    for content, words in (
        (
            header(version=3) + b"x" * 10,
            "must have version 1 or 2 and 1, 2 or 4 bytes per token, got version 3 and 1 bytes",
        ),
        (header(width=8) + b"x" * 80, "got version 1 and 8 bytes"),
        (header(width=3) + b"x" * 30, "got version 1 and 3 bytes"),
        (header(count=0), "is empty"),
        (header()[:40], "is not a token file; write one with xtrain prepare"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            data.open_tokens(path)
    path.write_bytes(header(text=123, vocab=77) + bytes(range(10)))
    tokens, text, vocab = data.open_tokens(path)
    assert (tokens[:].tolist(), text, vocab) == (list(range(10)), 123, 77)


def test_npy_files_of_other_kinds_are_refused(tmp_path) -> None:
    path = tmp_path / "a.npy"
    for array, words in (
        (np.zeros((2, 3), np.int64), "must hold a 1-D array of integers, got 2-D int64"),
        (np.zeros(3), "got 1-D float64"),
        (np.zeros(3, bool), "got 1-D bool"),
        (np.array(3), "got 0-D int64"),
        (np.zeros(0, np.int64), "is empty"),
    ):
        np.save(path, array)
        with pytest.raises(DataError, match=words):
            data.open_tokens(path)
    with open(path, "wb") as stream:  # a header of another length
        np.lib.format.write_array(stream, np.arange(7, dtype=">u2"), version=(2, 0))
        size = stream.tell()
    content = path.read_bytes()
    longer = content[:8] + struct.pack("<I", size - 14 - 12 + 64) + b" " * 64 + content[12:]
    path.write_bytes(content)
    assert data.open_tokens(path)[0][:].tolist() == list(range(7))
    path.write_bytes(longer.replace(b" " * 64, b"", 1)[:12] + b" " * 64 + content[12:])
    assert data.open_tokens(path)[0][:].tolist() == list(range(7))


def test_one_npy_file_is_data(tmp_path) -> None:
    np.save(tmp_path / "a.npy", np.arange(50))
    opened = data.open_data(tmp_path / "a.npy")
    assert opened.vocab_size == 50 and opened.bytes_per_token is None


def test_what_prepare_writes(tmp_path) -> None:
    """The vocabulary holds the end-of-document token, and a source without text leaves nothing."""

    class Behind(Letters):
        vocab_size = 256
        eos = 256

    (tmp_path / "in").mkdir()
    for name, text in (("a", b"abcd"), ("b", b"efgh"), ("c", b""), ("d", b"\0\0")):
        (tmp_path / "in" / name).write_bytes(text)
    out = tmp_path / "x.tokens"
    assert data.prepare(tmp_path / "in", out, Behind()) == 6
    tokens, text_bytes, vocab = data.open_tokens(out)
    assert tokens[:].tolist() == [97, 99, 256, 1, 3, 256] and (text_bytes, vocab) == (8, 257)
    assert data.prepare(tmp_path / "in", out) == 10 and data.open_tokens(out)[1:] == (10, 256)  # separators are text
    (tmp_path / "in" / "x").write_bytes(b"")  # an empty file is no text that would be lost
    assert data.prepare(tmp_path / "in", tmp_path / "in" / "x") == 10
    before = out.read_bytes()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "d").write_bytes(b"\0")
    with pytest.raises(DataError, match="holds no text files"):
        data.prepare(tmp_path / "none", out)
    assert out.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["in", "none", "x.tokens"]


# ---- identity


def test_the_identity_is_known_by_the_whole_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    monkeypatch.chdir(tmp_path)
    opened = data.open_data("a.txt")
    known = data.identity(opened.segments)
    about = os.stat("a.txt")
    stamp = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
    assert known["files"] == {os.fspath(tmp_path / "a.txt"): stamp}
    assert data.identity(opened.segments, known) is known


def test_the_fingerprint_of_version_0_1_is_as_it_was() -> None:
    """Of a long segment 64 pieces, which do not touch; of a short one all."""
    segments = [np.arange(300_000, dtype=np.uint32) % 1009, np.arange(50, dtype=np.uint8)]
    wanted = hashlib.sha256()
    for segment, starts in ((segments[0], [i * (300_000 - 1024) / 63 for i in range(64)]), (segments[1], [0] * 64)):
        wanted.update(len(segment).to_bytes(8, "little"))
        for start in starts:
            wanted.update(segment[int(start) : int(start) + 1024].astype("<i8").tobytes())
    assert same_data(wanted.hexdigest(), segments, {})


def test_what_is_in_memory_is_always_hashed(tmp_path) -> None:
    """Beside files that did not change: the stamps say nothing of it."""
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    inside = data.open_data(tmp_path / "a.txt").segments
    known = data.identity([*inside, np.arange(10)])
    assert data.identity([*inside, np.arange(1, 11)], known)["sha256"] != known["sha256"]


# ---- tokenizers


def test_files_of_bytes_encode_as_bytes(tmp_path) -> None:
    """The tokenizer.json of a model of bytes gives other programs the same ids for any text."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    files = ByteTokenizer().files()
    other = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in ("def f(x):\n\treturn  x", "  two  spaces ", "äöü € \U0001f600 \xa0\xad\xac", "\r\n\x01\x7f's"):
        ids = other.encode(text, add_special_tokens=False).ids
        assert ids == list(text.encode()) and other.decode(ids) == text
    assert sorted(other.get_vocab().values()) == list(range(256))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert type(load_tokenizer(tmp_path)) is ByteTokenizer, "and here they are bytes again"


def words_tokenizer(folder, **settings):
    """A tokenizer.json with a gap in its ids, a special token, and a template that adds one."""
    folder.mkdir()
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<unk>": 2, "end": 9, "<s>": 10}, "unk_token": "<unk>"}
    special = {
        "id": 10,
        "content": "<s>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    template = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [10], "tokens": ["<s>"]}},
    }  # fmt: skip
    content = {
        "version": "1.0",
        "added_tokens": [special],
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": template,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for name, value in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return load_tokenizer(folder)


def test_a_tokenizer_of_a_file(tmp_path) -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    found = words_tokenizer(tmp_path / "m")
    assert found.encode(b"a b end c").tolist() == [0, 1, 9, 2] and found.encode(b"a").dtype == np.uint32
    assert found.vocab_size == 11, "ids may have gaps: the largest counts"
    assert found.encode(b"a \xff").tolist() == [0, 2], "what is no UTF-8 is U+FFFD, and not left out"
    assert "<s>" in found.decode([10, 0]), "special tokens are shown"
    (tmp_path / "m" / "chat_template.jinja").write_text("template")
    assert set(load_tokenizer(tmp_path / "m").files()) == {"tokenizer.json", "chat_template.jinja"}


@pytest.mark.parametrize(
    "settings,eos",
    [
        ({"generation_config": {"eos_token_id": 9}, "config": {"eos_token_id": 1}}, 9),
        ({"config": {"eos_token_id": 1}}, 1),
        ({"generation_config": {"eos_token_id": [9, 1]}}, 9),
        ({"generation_config": {"eos_token_id": []}, "config": {"eos_token_id": 1}}, None),
        ({"generation_config": {"eos_token_id": 0}}, 0),
        ({"tokenizer_config": {"eos_token": "end"}}, 9),  # a name alone
        ({"tokenizer_config": {"eos_token": {"content": "end"}}}, 9),
        ({"tokenizer_config": {"eos_token": "absent"}}, None),
        ({"tokenizer_config": {"eos_token": ["end"]}}, None),
        ({"tokenizer_config": {"eos_token": "end"}, "config": {"eos_token_id": 1}}, 1),
        ({}, None),
    ],
)
def test_the_end_of_a_document(tmp_path, settings: dict, eos: int | None) -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    found = words_tokenizer(tmp_path / "m", **settings).eos
    assert found == eos and type(found) is type(eos)


def test_an_end_that_is_no_id_is_refused(tmp_path) -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    for number, bad in enumerate((-1, 2**32, True, [True, 9])):
        for name in ("generation_config", "config"):
            with pytest.raises(DataError, match=rf"{name}\.json: eos_token_id must be null, a token id or a list of"):
                words_tokenizer(tmp_path / f"{name}{number}", **{name: {"eos_token_id": bad}})


def test_a_panic_of_the_package_is_a_data_error(tmp_path, monkeypatch) -> None:
    """Its panics are no Exception; Ctrl-C stays what it is."""
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    found = words_tokenizer(tmp_path / "m")

    class PanicException(BaseException):
        pass

    class Fails:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def encode_batch(self, *args, **options):
            raise self.error

    monkeypatch.setattr(found, "_implementation", Fails(PanicException("index out of bounds")))
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be used: index out of bounds"):
        found.encode(b"a")
    monkeypatch.setattr(found, "_implementation", Fails(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        found.encode(b"a")


def test_a_tokenizer_without_its_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"tokenizer\.json needs the package tokenizers: pip install 'xtrain\[hf\]'"):
        load_tokenizer(tmp_path)
