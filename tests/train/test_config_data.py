"""Options (one set of dataclasses; defaults, TOML file, command line, in that order) and data (from text to shuffled batches)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from xtrain import data
from xtrain.cli.train import help_text, parse_arguments
from xtrain.errors import ConfigError, DataError
from xtrain.tokenizers import ByteTokenizer
from xtrain.train import options
from xtrain.train.config import KEYS, TrainConfig, build, to_toml

# ---- options -----------------------------------------------------------------------------------------------------------------------


def test_precedence(tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('steps = 7\nbatch_size = 3\nmodel = "tiny"\n[optim]\nlr = 0.5\nbeta2 = 0.9\n')
    path, values = parse_arguments([str(file), "--steps", "9", "--optim.lr=0.25"])
    config = build(options.with_file(path, values))
    assert (config.steps, config.batch_size, config.optim.lr, config.optim.beta2, config.model.preset) == (
        9,
        3,
        0.25,
        0.9,
        "tiny",
    )
    assert config.seq_len == TrainConfig().seq_len


def test_every_option_has_a_help_text_and_shows_up() -> None:
    text = help_text(200)
    for name, key in KEYS.items():
        assert len(key.meta["help"]) > 8, name
        spelled = "--model " if name == "model.preset" else f"--{name if '.' in name else name.replace('_', '-')}"
        assert spelled in text, name
        if key.kind in (int, float) and key.meta["unit"]:
            assert key.meta["unit"] in text


@pytest.mark.parametrize("name", ["data", "model", "device", "steps", "batch-size", "seq-len", "seed", "out", "resume"])
def test_option_names_that_scripts_rely_on(name: str) -> None:
    assert options.find_key(name)


def test_unknown_options_name_the_nearest(tmp_path) -> None:
    for word, hint in [
        ("--stpes", "--steps"),
        ("--lr", "--optim.lr"),
        ("--learning-rate", "did you mean"),
        ("--batchsize", "--batch-size"),
        ("--model.hiden_size", "--model.hidden_size"),
    ]:
        with pytest.raises(ConfigError, match=f"unknown option {word}") as error:
            parse_arguments([word, "3"])
        assert hint in str(error.value)
    file = tmp_path / "bad.toml"
    file.write_text("[optim]\nmomentum = 3\n")
    with pytest.raises(ConfigError, match=r"unknown option optim\.momentum in .*bad\.toml; did you mean"):
        options.read_toml(file)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--steps", "zero"], "steps must be a whole number, got 'zero'"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--steps", "1.5"], "steps must be a whole number"),
        (["--optim.lr", "nan"], "optim.lr must be finite"),
        (["--optim.lr=-1"], "optim.lr must be at least 0.0, got -1.0"),
        (["--steps"], "--steps needs a value"),
        (["--optim.schedule", "sine"], "must be one of cosine, linear, constant, wsd, got 'sine'"),
        (["--plot=maybe"], "plot must be true or false"),
        (["a.toml", "b.toml"], "unexpected argument 'b.toml'"),
        (["-x"], "unexpected argument"),
        (["--no-plot=3"], "takes no value"),
        (["--precision", "float16"], "precision must be one of"),
        (["--val-fraction", "0.9"], "at most 0.5"),
    ],
)
def test_bad_values(args: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(parse_arguments(args)[1])
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_rules_between_options() -> None:
    for values, text in [
        ({"optim.warmup": 50, "steps": 10}, "optim.warmup must be at most steps"),
        ({"grad_accum": 9, "batch_size": 4}, "grad_accum must be at most batch_size"),
        ({"model.num_attention_heads": 4, "model.num_key_value_heads": 3}, "must divide"),
        ({"model.head_dim": 7}, "even"),
        ({"optim.beta1": 1.0}, "less than 1"),
    ]:
        with pytest.raises(ConfigError, match=text):
            build(values)


def test_bad_toml(tmp_path) -> None:
    file = tmp_path / "c.toml"
    for content, text in [
        (b"steps = ", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b"[steps]\na=1", "must be a value"),
        (b'steps = "3"', "must be a whole number"),
        (b"steps = true", "must be a whole number"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=text):
            options.read_toml(file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        options.read_toml(tmp_path / "none.toml")


def test_saved_configuration_reads_back(tmp_path) -> None:
    config = build(
        {
            "steps": 12,
            "optim.lr": 0.125,
            "sample.prompt": 'a "quoted" \\ line\n',
            "model.hidden_size": 32,
            "plot": False,
        }
    )
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert build(options.read_toml(file)) == config


# ---- data ----------------------------------------------------------------------------------------------------------------------------


def tokens_of(corpus) -> tuple[bytes, bytes]:
    return tuple(b"".join(np.asarray(s, np.uint8).tobytes() for s in part) for part in (corpus.train, corpus.val))


def test_a_text_file(tmp_path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(1, 101)) * 10)
    corpus = data.open_data(file, val_fraction=0.1)
    train, val = tokens_of(corpus)
    assert train + val == file.read_bytes()
    assert len(val) == 100
    assert isinstance(corpus.train[0], data.FileArray)
    assert corpus.bytes_per_token == 1.0


def test_a_folder_is_split_by_file(tmp_path) -> None:
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(f"document {i} ".encode() * 20)
    (tmp_path / "binary.bin").write_bytes(b"\0\1\2" * 100)
    (tmp_path / ".hidden").write_bytes(b"secret")
    (tmp_path / "empty.txt").write_bytes(b"")
    corpus = data.open_data(tmp_path, val_fraction=0.2)
    train, val = (set(part.strip(b"\0").split(b"\0")) for part in tokens_of(corpus))
    assert len(train | val) == 40
    assert not train & val
    assert train and val
    again = data.open_data(tmp_path, val_fraction=0.2)
    assert tokens_of(again) == tokens_of(corpus)
    assert data.identity(again.segments) == data.identity(corpus.segments)
    (tmp_path / "new.txt").write_bytes(b"one more" * 30)
    _, val_after = (
        set(part.strip(b"\0").split(b"\0")) for part in tokens_of(data.open_data(tmp_path, val_fraction=0.2))
    )
    assert val <= val_after, "a file may not change sides when another is added"


def test_python_source_is_large_and_real() -> None:
    corpus = data.open_data("python")
    assert corpus.train_tokens + corpus.val_tokens > 10_000_000
    assert 0.02 < corpus.val_tokens / corpus.train_tokens < 0.1
    assert b"import " in np.asarray(corpus.train[0][:200_000], np.uint8).tobytes()


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<i8"])
def test_token_files(tmp_path, dtype: str) -> None:
    ids = np.random.default_rng(0).integers(0, 200, 5000).astype(dtype)
    np.save(tmp_path / "t.npy", ids)
    corpus = data.open_data(tmp_path / "t.npy")
    assert np.array_equal(np.concatenate([*corpus.train, *corpus.val]), ids)
    assert corpus.vocab_size == ids.max() + 1


def test_prepare_round_trip(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"hello")
    (tmp_path / "in" / "b.txt").write_bytes(b"world")
    out = tmp_path / "x.tokens"
    assert data.prepare(tmp_path / "in", out) == 12
    ids, text_bytes, vocab = data.open_tokens(out)
    assert bytes(ids[:]) == b"hello\0world\0"
    assert (text_bytes, vocab) == (12, 256)
    assert isinstance(ids, data.FileArray)


@pytest.mark.parametrize("out", ["a.txt", "./a.txt", "link", "hard"])
@pytest.mark.parametrize("source", ["a.txt", "link", "."])
def test_prepare_keeps_the_text_it_is_made_of(tmp_path, monkeypatch, source: str, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"years of work")
    Path("link").symlink_to("a.txt")
    os.link("a.txt", "hard")
    before = sorted(os.listdir())
    with pytest.raises(DataError, match=f"the tokens must go into another file than the text of .*, got {out}$"):
        data.prepare(source, out)
    assert Path("a.txt").read_bytes() == b"years of work" and sorted(os.listdir()) == before


def test_prepare_may_write_into_its_source_again(tmp_path) -> None:
    """Tokens are no text, and so no part of it."""
    (tmp_path / "a.txt").write_bytes(b"hello")
    assert [data.prepare(tmp_path, tmp_path / "x.tokens") for _ in range(2)] == [6, 6]


def test_files_of_runs_are_no_data(tmp_path) -> None:
    """Only beside a run's lock: elsewhere these names are anyone's."""
    for place in (".", "run", "mine"):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "text.txt").write_text("text")
    before = data.open_data(tmp_path)
    for place in (".", "run"):
        (tmp_path / place / ".lock").touch()
        for name in ("config.toml", "metrics.jsonl", "loss.png"):
            (tmp_path / place / name).write_text("of a run")
        for name in ("checkpoint-00000008", "set-aside-1-checkpoint-00000009"):
            (tmp_path / place / name).mkdir()
            (tmp_path / place / name / "config.json").write_text("{}")
    assert data.identity(data.open_data(tmp_path).segments) == data.identity(before.segments)
    (tmp_path / "mine" / "config.toml").write_text("mine")
    assert data.open_data(tmp_path).train_tokens > before.train_tokens
    (tmp_path / "mine" / "metrics.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"mine/metrics\.jsonl must be read first"):
        data.open_data(tmp_path)


def test_data_errors(tmp_path) -> None:
    empty, short, folder = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "folder"
    empty.touch()
    short.write_bytes(b"abc")
    folder.mkdir()
    damaged = tmp_path / "d.tokens"
    damaged.write_bytes(data.MAGIC + b"\1\0\0\0" + b"\1\0\0\0" + (10**12).to_bytes(8, "little") + b"\0" * 100)
    wrong = tmp_path / "w.npy"
    np.save(wrong, np.zeros((3, 3)))
    broken = tmp_path / "b.npy"
    broken.write_bytes(b"not numpy")
    for source, text in [
        (tmp_path / "none", "does not exist"),
        (empty, "is empty"),
        (folder, "holds no text files"),
        (damaged, "damaged"),
        (wrong, "1-D array of integers"),
        (broken, "not a .npy file"),
    ]:
        with pytest.raises(DataError, match=text) as error:
            data.open_data(source)
        assert "\n" not in str(error.value)
        assert source.name in str(error.value)
    with pytest.raises(DataError, match=r"too short: a sequence takes 17 tokens.*has [12]"):
        data.open_data(short).loader(4, 16)
    pickled = tmp_path / "p.npy"
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError):
        data.open_data(pickled)


def test_token_outside_the_vocabulary_names_its_position() -> None:
    ids = np.arange(100) % 10
    ids[57] = 77
    with pytest.raises(DataError, match=r"must be in \[0, 10\), got 77 at position 57"):
        loader = data.Loader([ids], 4, 9, vocab_size=10)
        for _ in range(5):
            loader.next_batch()


# ---- the loader ------------------------------------------------------------------------------------------------------------------------


def test_without_replacement_and_next_token_targets() -> None:
    segments = [np.arange(0, 103), np.arange(1000, 1057), np.arange(5000, 5003)]
    loader = data.Loader(segments, 3, 10, seed=4)
    total = len(loader.windows)
    assert total == 10 + 5
    starts: list[int] = []
    while loader.epoch == 0:
        ids, targets = loader.next_batch()
        assert ids.shape == targets.shape == (3, 10)
        assert np.array_equal(targets, ids + 1), "targets are the ids one later, inside one segment"
        starts += ids[:, 0].tolist()
    first, second = starts[:total], []
    assert sorted(first) == sorted([*range(0, 100, 10), *range(1000, 1050, 10)])
    assert first != sorted(first)
    while loader.epoch == 1:
        second += loader.next_batch()[0][:, 0].tolist()
    assert sorted(second[:total]) == sorted(first)
    assert second[:total] != first


def test_batches_across_the_end_of_an_epoch() -> None:
    loader = data.Loader([np.arange(71)], 4, 10)  # 7 windows, 4 at a time
    seen = np.concatenate([loader.next_batch()[0][:, 0] for _ in range(7)])
    assert np.array_equal(np.bincount(seen // 10), [4] * 7)


def test_batch_larger_than_the_data() -> None:
    loader = data.Loader([np.arange(31)], 10, 10)
    assert np.bincount(loader.next_batch()[0][:, 0] // 10).max() <= 4


@pytest.mark.parametrize("stop", [0, 1, 6, 7, 20])
def test_position_continues_exactly(stop: int) -> None:
    a = data.Loader([np.arange(251)], 4, 10, seed=9)
    want = [a.next_batch()[0].tobytes() for _ in range(30)]
    b = data.Loader([np.arange(251)], 4, 10, seed=9)
    for _ in range(stop):
        b.next_batch()
    c = data.Loader([np.arange(251)], 4, 10, seed=9)
    c.load_state_dict(b.state_dict())
    assert [c.next_batch()[0].tobytes() for _ in range(30 - stop)] == want[stop:]


def test_seeds_give_other_orders() -> None:
    orders = {data.Loader([np.arange(2001)], 50, 10, seed=s).next_batch()[0].tobytes() for s in range(20)}
    assert len(orders) == 20


def test_permutation_is_one() -> None:
    for count in (1, 2, 3, 7, 64, 65, 1000):
        for epoch in range(3):
            assert sorted(data.permute(np.arange(count), count, 5, epoch).tolist()) == list(range(count))


def test_bad_position() -> None:
    loader = data.Loader([np.arange(101)], 4, 10)
    for state in ({"epoch": 0, "index": 99}, {"epoch": -1, "index": 0}, {"epoch": 0, "index": -1}):
        with pytest.raises(DataError, match="position"):
            loader.load_state_dict(state)


def test_byte_tokenizer() -> None:
    t = ByteTokenizer()
    text = "naïve 漢字 \U0001f600".encode()
    assert t.encode(text).tolist() == list(text)
    assert t.decode(t.encode(text)) == text.decode()
    assert t.decode([0xFF, 65]) == "\ufffdA"
    assert sys.getsizeof(t) < 1000
