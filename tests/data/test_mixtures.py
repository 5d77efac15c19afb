"""Several sources with weights: which source a row comes from, positions, runs, and what is refused."""

from __future__ import annotations

import json
import os
from array import array
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import metrics, options, python, text_file, weights

import xtrain as xt
from xtrain import data
from xtrain.data import sources
from xtrain.data.mixture import Turns, labels_of, parse_sources, shares_of
from xtrain.data.packing import Documents, PackedLoader
from xtrain.data.token_files import HEADER, HEADER_BYTES, MAGIC, write_index
from xtrain.errors import ConfigError, DataError
from xtrain.tokenizers import ByteTokenizer
from xtrain.train import Trainer, train

TIMES = ("time", "wall_time", "tokens_per_second", "memory")


def records(directory: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics(directory)]


# ---- turns -----------------------------------------------------------------------------------------------------------

_RNG = np.random.default_rng(0)
WEIGHTS = [
    ["1"], ["0.7", "0.3"], ["1", "1", "1"], ["0.999", "0.001"], ["1e-9", "1"], ["0.1", "0.2", "0.3", "0.4"],
    ["0.6", "0.1", "0.1", "0.1", "0.1"], ["0.30000000000000004", "0.1", "3e5"],
    *([repr(float(w)) for w in _RNG.random(k) ** 3 + 1e-3] for k in (2, 3, 5, 8, 13)),
]  # fmt: skip


@pytest.mark.parametrize("texts", WEIGHTS, ids=lambda texts: f"{len(texts)}: {texts[0]}")
def test_every_source_is_within_a_row_of_its_share(texts: list[str]) -> None:
    """After any number of rows, and by Tijdeman's bound."""
    shares = shares_of([(str(i), text) for i, text in enumerate(texts)])
    assert sum(shares) == 1
    turns, bound = Turns(shares), 1 - Fraction(1, max(2 * len(texts) - 2, 1))
    for number in range(1, 1500):
        source = int(turns.draw(1)[0])
        assert 0 <= source < len(shares) and sum(turns.rows) == number and turns.reachable(turns.rows)
        assert all(abs(rows - share * number) <= bound for rows, share in zip(turns.rows, shares, strict=True))
    if len(texts) > 1:
        assert not turns.reachable([turns.rows[0] + 2, turns.rows[1] - 2, *turns.rows[2:]])


def test_the_turns_are_the_same_on_every_machine() -> None:
    assert Turns([Fraction(7, 10), Fraction(3, 10)]).draw(20).tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0] + [
        0,
        1,
        0,
        0,
        0,
        1,
        0,
        0,
        1,
        0,
    ]
    assert Turns([Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]).draw(12).tolist() == [0, 1, 0, 2, 1, 0] * 2


# ---- batches ---------------------------------------------------------------------------------------------------------


def mixture_of_two() -> data.Mixture:
    """Two sources in memory whose tokens tell them apart; the second has 3 windows, or documents."""
    parts = []
    for name, first, count in (("a", 0, 30), ("b", 1000, 3)):
        tokens = first + np.arange(count * 8 + 1)
        documents = [Documents(np.arange(0, len(tokens), 5), 0, len(tokens))]
        parts.append(data.Corpus(name, [tokens], [tokens], 1.0, 2000, ByteTokenizer(), train_documents=documents))
    return data.Mixture(
        "m", [], [], None, 2000, None, sources=parts, exact_shares=[Fraction(2, 3), Fraction(1, 3)]
    )  # fmt: skip


def make(pack: bool, batch_size: int) -> data.MixedLoader:
    mixture = mixture_of_two()
    return (mixture.packed_loader if pack else mixture.loader)(batch_size, 8, seed=5)


def test_rows_that_cannot_have_been() -> None:
    """A whole row more than the share is one that no mixture of these weights has."""
    turns = Turns([Fraction(1, 2), Fraction(1, 2)])
    assert [turns.reachable(rows) for rows in ([1, 0], [1, 1], [2, 0], [0, 2], [2, 1])] == [
        True, True, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("pack", [False, True])
def test_row_n_is_the_same_in_batches_of_any_size(pack: bool) -> None:
    """It is the next row of its source, as that alone would give it; a source that ends begins its next epoch."""
    found = []
    for size in (1, 4, 6):
        loader = make(pack, size)
        batches = [loader.next_batch() for _ in range(96 // size)]
        assert len(batches[0]) == (3 if pack else 2)
        found.append([np.concatenate(arrays) for arrays in zip(*batches, strict=True)])
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))
    ids = found[0][0]
    turns = (ids[:, 0] >= 1000).astype(int)
    assert turns.tolist() == Turns([Fraction(2, 3), Fraction(1, 3)]).draw(96).tolist()
    first = next(iter(make(pack, 6)))
    assert all(np.array_equal(a.numpy(), b[:6]) for a, b in zip(first, found[0], strict=True))
    if not pack:
        second = ids[turns == 1][:30, 0].reshape(-1, 3)
        assert (np.sort(second, 1) == [1000, 1008, 1016]).all() and len({tuple(row) for row in second.tolist()}) > 1
        alone = data.Loader([np.arange(241)], 64, 8, 5)
        assert np.array_equal(ids[turns == 0], alone.next_batch()[0])
    else:
        alone = PackedLoader([np.arange(241)], [Documents(np.arange(0, 241, 5), 0, 241)], 64, 8, 5)
        assert all(np.array_equal(a[turns == 0], b) for a, b in zip(found[0], alone.next_batch(), strict=True))


def test_what_a_packed_mixture_says_of_itself() -> None:
    """Documents of 3 places leave 2 of a row of 8 empty, those of 4 none."""
    loaders = [
        PackedLoader([first + np.arange(240)], [Documents(np.arange(0, 240, size), 0, 240)], 5, 8, 5)
        for first, size in ((0, 4), (1000, 5))
    ]
    loader, filled = data.MixedLoader(loaders, [Fraction(1, 5), Fraction(4, 5)], ["a", "b"]), [0, 0]
    for _ in range(6):
        ids, targets, _ = loader.next_batch()
        for i, mine in enumerate((ids[:, 0] < 1000, ids[:, 0] >= 1000)):
            filled[i] += int((targets[mine] != -100).sum())
    found = loader.metrics()
    assert [found["tokens/a"], found["tokens/b"]] == filled == [6 * 6, 24 * 8]
    assert found["token_efficiency"] == round(float((targets != -100).mean()), 4) < 1
    assert loader.documents == 60 + 48 and loader.efficiency() == pytest.approx(0.2 * 0.75 + 0.8)


def test_a_changed_source_is_named() -> None:
    """Beside the identity of something else, which is not asked for parts of its own, too."""
    mixture, other = mixture_of_two(), mixture_of_two()
    other.sources[1] = data.Corpus("b", [np.arange(9)], [], 1.0, 2000, None)
    known = mixture.identity()
    assert mixture.changed(known, known) is None and other.changed(known, other.identity(known)) == "b"
    for another in ({"sources": known["sources"][:1]}, {"sources": 3}, {"sha256": ""}):
        assert mixture.changed(another, mixture.identity(another)) == "a"


@pytest.mark.parametrize("pack", [False, True])
def test_sources_of_one_size_have_orders_of_their_own(pack: bool) -> None:
    mixture = mixture_of_two()
    documents = [Documents(np.arange(0, 241, 8), 0, 241)] if pack else None
    mixture.sources = [
        data.Corpus(name, [first + np.arange(241)], [], 1.0, 2000, None, train_documents=documents)
        for name, first in (("a", 0), ("b", 1000))
    ]
    ids = (mixture.packed_loader if pack else mixture.loader)(60, 8, seed=5).next_batch()[0][:, 0]
    assert len(set(ids.tolist())) == 50
    assert (ids[ids < 1000][:20] != ids[ids >= 1000] - 1000).any()


@pytest.mark.parametrize("pack", [False, True])
def test_tokens_of_each_source_are_in_the_vocabulary_of_the_model(pack: bool) -> None:
    mixture = mixture_of_two()
    loader = (mixture.packed_loader if pack else mixture.loader)(4, 8, 5, 1000)
    with pytest.raises(DataError, match=r"token ids of b must be in \[0, 1000\), got 10"):
        loader.next_batch()


@pytest.mark.parametrize("pack", [False, True])
def test_a_position_continues_exactly(pack: bool) -> None:
    """After epochs of the small source, too; it is JSON, and its metrics go on."""
    loader = make(pack, 5)
    for _ in range(12):
        state, other = json.loads(json.dumps(loader.state_dict())), make(pack, 5)
        other.load_state_dict(state)
        assert all(np.array_equal(a, b) for a, b in zip(loader.next_batch(), other.next_batch(), strict=True))
        assert other.metrics() == loader.metrics() and other.state_dict() == loader.state_dict()
    early = loader.state_dict()
    other = make(pack, 5)
    other.load_state_dict(early)
    was = json.dumps(early)
    for one in (make(pack, 5), other):
        taken = one.state_dict()
        text = json.dumps(taken)
        one.next_batch()
        assert json.dumps(taken) == text and json.dumps(early) == was, "a position that was taken does not go on"
    found = loader.metrics()
    assert found["epochs/b"] > 3 and sum(loader.state_dict()["rows"]) == 60
    if not pack:
        assert (found["tokens/a"], found["tokens/b"]) == (40 * 8, 20 * 8)
        assert (found["epochs/a"], found["epochs/b"]) == (round(40 / 30, 4), round(20 / 3, 4))
    else:
        assert 0 < found["token_efficiency"] <= 1 and found["tokens/b"] <= 20 * 8
    good = loader.state_dict()
    for bad, words in (
        ({"rows": [38, 22]}, r"one of these weights, got \[38, 22\] rows"),
        ({"rows": [60]}, "that of 2 sources"),
        ({"rows": [40, -20]}, "that of 2 sources"),
        ({"rows": [40.0, 20.0]}, "that of 2 sources"),
        ({"tokens": good["tokens"][:1]}, "that of 2 sources"),
        ({"sources": good["sources"][:1]}, "that of 2 sources"),
        ({"sources": [good["sources"][0], {**good["sources"][1], "epoch": -1}]}, "inside the data"),
    ):
        begun = make(pack, 5)
        begun.next_batch()
        was = begun.state_dict()
        with pytest.raises(DataError, match=f"^data: the position must be {words}"):
            begun.load_state_dict({**good, **bad})
        assert begun.state_dict() == was


# ---- what is opened --------------------------------------------------------------------------------------------------


def test_what_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "c:1"):
        text_file(tmp_path / name, 3000)
    train_tokens = 2 * data.open_data("a.txt").train_tokens
    assert parse_sources("a.txt") is None and parse_sources("c:1") is None and parse_sources("no.txt") is None
    assert parse_sources(" a.txt:0.7, b.txt : 3e-1") == [("a.txt", "0.7"), ("b.txt", "3e-1")]
    assert parse_sources("c:1:2,python:1") == [("c:1", "2"), ("python", "1")]
    assert parse_sources("python:1,./python:2") == [("python", "1"), ("./python", "2")], "Python's own, and a file"
    Path("d:2").mkdir()
    assert parse_sources("d:2") is None, "a folder"
    assert data.sources_text({Path("a.txt"): 7, "python": 0.5}) == "a.txt:7,python:0.5"
    assert data.sources_text({"a": 0.123456789012345, "b": 1234567}) == "a:0.123456789012345,b:1234567"
    opened = data.open_data({"a.txt": 3, "b.txt": 1})
    assert isinstance(opened, data.Mixture) and opened.shares == [0.75, 0.25]
    assert opened.train_tokens == train_tokens and len(opened.segments) == 4 and opened.bytes_per_token == 1.0
    assert labels_of(["x/a", "y/a", "x/b/"]) == ["x/a", "y/a", "b"]
    Path("run.toml").write_text('steps = 3\n[data]\n"a.txt" = 7\n"b.txt" = 3\n')
    trainer = Trainer({**options(Path("a.txt"), tmp_path / "r"), **xt.train.options.read_toml("run.toml")}, quiet=True)
    assert trainer.config.data == f"{tmp_path}/a.txt:7,{tmp_path}/b.txt:3"  # so that it resumes from any folder


def test_a_mixture_of_tokens_whose_text_is_not_known(tmp_path, monkeypatch) -> None:
    """The larger vocabulary, and no bytes a token; where all are known, bytes of a token of the mean row."""
    for name, most in (("a", 10), ("b", 50)):
        np.save(tmp_path / f"{name}.npy", np.arange(2000, dtype=np.uint16) % most)
    opened = data.open_data({tmp_path / "a.npy": 1, tmp_path / "b.npy": 1})
    assert opened.vocab_size == 50 and opened.bytes_per_token is None
    parts = {name: data.Corpus(name, [np.arange(9)], [], size, 9, None) for name, size in (("c", 2.0), ("d", 4.0))}
    monkeypatch.setattr(sources, "holds_tokens", lambda name: True)
    monkeypatch.setattr(sources, "open_source", lambda name, *_: parts[name])
    assert data.open_data({"c": 3, "d": 1}).bytes_per_token == 2.5


def test_texts_are_encoded_as_the_tokens_are(monkeypatch) -> None:
    """By the tokenizer of a token file that stands anywhere, or the one that is given."""

    class Other(ByteTokenizer):
        pass

    asked: list[tuple[str, Any]] = []
    made: dict[str, Any] = {"t": Other(), "n": None}

    def opened(name: str, tokenizer: Any, val_fraction: float) -> data.Corpus:
        asked.append((name, tokenizer))
        own = made.get(name, tokenizer or ByteTokenizer())
        return data.Corpus(name, [np.arange(9)], [], 1.0, 256, own)

    monkeypatch.setattr(sources, "holds_tokens", lambda name: name in made)
    monkeypatch.setattr(sources, "open_source", opened)
    data.open_data({"a": 1, "t": 1, "b": 1})
    assert asked == [("t", None), ("a", made["t"]), ("b", made["t"])]
    given = Other()
    data.open_data({"a": 1, "b": 1}, given)
    assert asked[3:] == [("a", given), ("b", given)]
    data.open_data({"a": 1, "t": 1}, given)
    assert asked[-2:] == [("t", given), ("a", given)]
    for names, unknown, known in (("nt", "n", "t"), ("tn", "n", "t"), ("na", "n", "a")):
        words = f"data: {unknown} does not say which tokenizer made it, and {known} has one; give --tokenizer"
        with pytest.raises(DataError, match=f"^{words}$"):
            data.open_data(dict.fromkeys(names, 1))
    assert data.open_data({"n": 1}).tokenizer is None
    made["u"] = ByteTokenizer()
    with pytest.raises(DataError, match="^data: t and u were made by different tokenizers$"):
        data.open_data({"t": 1, "u": 1})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a.txt:0,b.txt:1", "the weight of a.txt must be a number greater than 0, at most 1e300, got '0'"),
        ("a.txt:1,b.txt:-1", "the weight of b.txt must be a number greater than 0, at most 1e300, got '-1'"),
        ("a.txt:nan,b.txt:1", "the weight of a.txt must be a number greater than 0, at most 1e300, got 'nan'"),
        ("a.txt:inf,b.txt:1", "the weight of a.txt must be a number greater than 0, at most 1e300, got 'inf'"),
        ("a.txt:1e301,b.txt:1", "the weight of a.txt must be a number greater than 0, at most 1e300, got '1e301'"),
        ("a.txt:1e-400,b.txt:1", "the weight of a.txt must be a number greater than 0, at most 1e300, got '1e-400'"),
        ("a.txt:1_0,b.txt:1", "the weight of a.txt must be a number greater than 0, at most 1e300, got '1_0'"),
        ("a.txt:much,b.txt:1", "the weight of a.txt must be a number greater than 0, at most 1e300, got 'much'"),
        ("a.txt:" + "1" * 41, f"the weight of a.txt must be a number greater than 0, at most 1e300, got '{'1' * 41}'"),
        ("a.txt:1,b.txt", "a source must be followed by : and its weight (a.tokens:0.7), got 'b.txt'"),
        ("a.txt:1,", "a source must be followed by : and its weight (a.tokens:0.7), got ''"),
        ("a.txt:1,b:x/y", "a source must be followed by : and its weight (a.tokens:0.7), got 'b:x/y'"),
        (":1,a.txt:1", "a source must be followed by : and its weight (a.tokens:0.7), got ':1'"),
        ("a.txt:1,no.txt:1", "no.txt does not exist; give 'python', a text file, a folder, or a token file"),
        ("a.txt,b.txt", "a.txt,b.txt does not exist; give 'python', a text file, a folder, or a token file, "
                        "or several with weights (a.tokens:0.7,b.tokens:0.3)"),
        ("a.txt:1,./a.txt:2", "./a.txt must be named once, with the sum of its weights"),
        ("a.txt:1,link.txt:2", "link.txt must be named once, with the sum of its weights"),
        ("a.txt:1,x.jsonl:1", "x.jsonl must be read first: xtrain prepare x.jsonl data.tokens writes its documents"),
        ({}, "a table of sources must have one, got none"),
        ({"a.txt": {"txt": 1}}, "the weight of a.txt must be a number, got a table; quote a name that has dots"),
        ({"a.txt": True}, "the weight of a.txt must be a number greater than 0, at most 1e300, got True"),
        ({"a.txt": "1"}, "the weight of a.txt must be a number greater than 0, at most 1e300, got '1'"),
        ({"a.txt": 0}, "the weight of a.txt must be a number greater than 0, at most 1e300, got 0"),
        ({"a.txt": 1e301}, "the weight of a.txt must be a number greater than 0, at most 1e300, got 1e+301"),
        ({"a,b.txt": 1}, "the name of a source must be text without a comma, got 'a,b.txt'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(source: Any, words: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "x.jsonl"):
        text_file(tmp_path / name, 3000)
    (tmp_path / "link.txt").symlink_to("a.txt")
    with pytest.raises(DataError) as caught:
        data.open_data(source)
    assert str(caught.value) == f"data: {words}"


@pytest.mark.parametrize("source", [[1, 2, 3], b"a.txt", 3, None, np.arange(3)])
def test_a_source_of_another_type_is_one_sentence(source: Any) -> None:
    """Python's own words named no argument, or asked for the type that was given."""
    kind = type(source).__name__
    with pytest.raises(TypeError, match=f"^data: source must be a path, text or a mapping .* got {kind} "):
        data.open_data(source)


def test_a_source_shorter_than_a_row_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path / "a.txt", 3000)
    (tmp_path / "short.txt").write_bytes(b"word " * 4)
    with pytest.raises(DataError, match=r"^data: short\.txt is too short: a sequence takes 33 tokens"):
        data.open_data("a.txt:1,short.txt:1").loader(4, 32)
    (tmp_path / "x,y").mkdir()
    (tmp_path / "a.txt").rename(tmp_path / "x,y" / "a.txt")
    monkeypatch.chdir(tmp_path / "x,y")
    with pytest.raises(ConfigError, match="^data: the path of a source must have no comma, got '.*/x,y/a.txt'$"):
        Trainer(options(Path("a.txt:1"), tmp_path / "run"), quiet=True)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path) -> str:
    """Token files of short documents, for pack; the second is small: an epoch of it ends within a run."""
    rng = np.random.default_rng(3)
    for name, count in (("a", 200), ("b", 7)):
        lines = [
            json.dumps({"text": "".join(rng.choice(list("abcdef \n"), int(size)))})
            for size in rng.integers(4, 40, count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        data.prepare(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.tokens")
    return f"{tmp_path}/a.tokens:0.7,{tmp_path}/b.tokens:0.3"


@pytest.mark.parametrize("pack", [False, True])
def test_a_run_that_was_killed_goes_on_bit_for_bit(pack: bool, two: str, tmp_path) -> None:
    """Stopped at step 3, resumed, killed later, resumed: the run that never stopped."""
    values = options(Path(two), tmp_path / "whole", steps=12, pack=pack, eval_every=5, batch_size=3)
    whole = train(file=None, quiet=True, **values)
    values |= {"out": str(tmp_path / "run"), "save_every": 2}
    train(quiet=True, callbacks=[lambda trainer, record: record["step"] == 3], **values)
    code = (
        "import sys; from xtrain.train import Trainer; import os, signal; Trainer({'resume': sys.argv[1]}, callbacks="
        "[lambda t, r: r['step'] == 7 and os.kill(os.getpid(), signal.SIGKILL)]).run()"
    )
    assert python("-c", code, str(tmp_path / "run")).returncode == -9
    again = train(quiet=True, resume=str(tmp_path / "run"))
    assert weights(again.checkpoint) == weights(whole.checkpoint)
    found = records(tmp_path / "run")
    assert found == records(tmp_path / "whole") and [record["step"] for record in found] == list(range(1, 13))
    assert (
        found[-1]["epochs/b.tokens"] > 1
        and "val_loss/a.tokens" in found[4]
        and ("token_efficiency" in found[0]) == pack
    )


def test_what_changes_is_refused(two: str, tmp_path) -> None:
    """The source is named; other weights are refused, the same in another way of writing and moved files are not."""
    run = Trainer(options(Path(two), tmp_path / "run", steps=2), quiet=True)
    run.run()
    resume = {"resume": str(tmp_path / "run")}
    a, b = tmp_path / "a.tokens", tmp_path / "b.tokens"
    for other in (f"{a}:0.5,{b}:0.5", str(a), f"{a}:1", f"{a}:7,{b}:3,python:1"):
        with pytest.raises(
            ConfigError, match=r"^resume: data was '.*' in this run, got other weights, '.*'; start a new run$"
        ):
            Trainer({**resume, "data": other}, quiet=True)
    (tmp_path / "c.tokens").write_bytes(b.read_bytes())
    assert Trainer({**resume, "data": {str(a): 7, str(tmp_path / "c.tokens"): 3}}, quiet=True).step == 2
    content = bytearray(b.read_bytes())
    content[HEADER_BYTES + 30] ^= 1
    b.write_bytes(content)
    for given in ({}, {"data": {str(b): 70, str(a): 30}}):
        with pytest.raises(ConfigError) as caught:
            Trainer({**resume, **given}, quiet=True)
        assert str(caught.value).endswith(f"in this run, and {str(b)!r} now holds something else")


@pytest.mark.parametrize("pack", [False, True])
def test_the_validation_loss_is_that_of_the_mixture(pack: bool, tmp_path) -> None:
    """Of each source by itself, and their mean by the weights; a short validation part is padded, which changes nothing."""
    text_file(tmp_path / "a.txt", 20_000)
    text_file(tmp_path / "b.txt", 200, seed=1)  # 10 validation tokens, of 16
    two = f"{tmp_path}/a.txt:3,{tmp_path}/b.txt:1"
    trainer = Trainer(options(Path(two), tmp_path / "run", pack=pack, eval_tokens=200), quiet=True)
    assert trainer.val_rows == [6, 1] and trainer.val.shape == (7, 17)
    found = trainer.evaluate()
    for part in trainer.corpus.parts:
        block, targets = part.val_batch(16, 100)
        assert part.name.endswith("a.txt") or targets.shape == (1, 9)
        device = trainer.model.model.embed_tokens.weight.device
        ids, targets = (xt.from_numpy(array).to(device) for array in (block[:, :-1].copy(), targets))
        loss = trainer.model.loss(ids, targets).item()
        assert abs(found[f"val_loss/{os.path.basename(part.name)}"] - loss) < 1e-5
    assert abs(found["val_loss"] - 0.75 * found["val_loss/a.txt"] - 0.25 * found["val_loss/b.txt"]) < 1e-12
    assert abs(found["val_bpb"] * np.log(2) - found["val_loss"]) < 1e-12


def test_what_is_said(two: str, tmp_path, capsys) -> None:
    train(**options(Path(two), tmp_path / "run", steps=5))
    said = capsys.readouterr().out
    assert "mix    a.tokens: 70.0% of the rows" in said and "mix    b.tokens: 96 tokens, " in said
    assert "nats per token: a.tokens " in said


_PEAK = """
import sys
from xtrain.train import Trainer
trainer = Trainer(dict(data=f"{sys.argv[1]}:2,{sys.argv[2]}:1", model="tiny", steps=8, seq_len=64, batch_size=8, threads=1,
    out=sys.argv[3], plot=False, pack=True, eval_tokens=512, **{"sample.tokens": 0}), quiet=True)
trainer.run()
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak of memory is read from /proc")
@pytest.mark.skipif(
    bool(os.environ.get("XTRAIN_SANITIZE")), reason="ASan keeps freed memory, which the test would see grow"
)
def test_memory_does_not_grow_with_the_sources(tmp_path) -> None:
    """Of 16 and 128 MiB of tokens each, in documents of 4096. Pieces of 8 MiB are hashed; two or three are there at once."""
    peaks = []
    for size in (1 << 24, 1 << 27):
        files = [tmp_path / f"{name}{size}.tokens" for name in "ab"]
        for file in files:
            with open(file, "wb") as stream:  # zeros that take no room on the disk
                stream.seek(HEADER_BYTES + size)
                place, length = write_index(stream, array("Q", range(0, size, 4096)), ByteTokenizer())
                stream.seek(0)
                stream.write(HEADER.pack(MAGIC, 2, 1, size, size, 256, place, length))
        done = python("-c", _PEAK, *map(str, files), str(tmp_path / f"run{size}"))
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] <= 24 << 10, peaks  # KiB; the sources have grown by 224 MiB
