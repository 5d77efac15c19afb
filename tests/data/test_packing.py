"""Rows of whole documents: what the loader puts where, models that see one document at a time, and runs with pack."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clock import ends_within
from runs import weights

import xtrain as xt
import xtrain.functional as F
from xtrain import data, models
from xtrain.data import packing
from xtrain.data.packing import Documents, PackedLoader, best_fit
from xtrain.errors import ConfigError, DataError
from xtrain.models.registry import architecture
from xtrain.optable.table import array, bits
from xtrain.train import train

SMALL = dict(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2,
)  # fmt: skip


# ---- where documents lie ---------------------------------------------------------------------------------------------


def test_documents_of_a_part() -> None:
    """Two starts at one token are a document without tokens; what lies before the first start is one, too."""
    starts = np.array([2, 5, 5, 9], np.uint64)

    def spans(documents: Documents) -> list[tuple[int, int]]:
        return [tuple(documents.bounds(i, i + 1).tolist()) for i in range(len(documents))]

    assert spans(Documents(starts, 0, 12)) == [(0, 2), (2, 5), (5, 5), (5, 9), (9, 12)]
    assert spans(Documents(starts, 2, 9)) == [(0, 3), (3, 3), (3, 7)]  # counted from token 2
    assert spans(Documents(starts, 6, 8)) == [(0, 2)] and spans(Documents(None, 3, 7)) == [(0, 4)]
    assert Documents(starts, 0, 12).bounds(1, 4).tolist() == [2, 5, 5, 9]
    assert Documents(starts, 1, 12).rows(2, 7).tolist() == [[0, 0, 2, 2, 2, 2, 6], [2, 2, 6, 6, 6, 6, 7]]
    assert not len(Documents(starts, 4, 4))


def test_best_fit() -> None:
    """The largest first, each into the fullest bin with room: so it fits in no bin that was made before its own."""
    assert best_fit([3, 8, 5, 2, 2], 10) == [[1, 4], [2, 0, 3]]
    assert best_fit([4, 6, 5, 5, 1, 9], 10) == [[5, 4], [1, 0], [2, 3]]
    assert best_fit([6, 7, 3], 10) == [[1, 2], [0]]
    assert best_fit([], 4) == [] and best_fit([4, 4], 4) == [[0], [1]]
    rng = np.random.default_rng(0)
    for room in (7, 64, 1000):
        sizes = rng.integers(1, room + 1, 300).tolist()
        bins = best_fit(sizes, room)
        assert sorted(place for each in bins for place in each) == list(range(300))
        full = [sum(sizes[place] for place in each) for each in bins]
        assert max(full) <= room
        for number, each in enumerate(bins):
            assert all(before + sizes[each[0]] > room for before in full[:number])


def corpus(lengths: list[int]) -> tuple[np.ndarray, Documents]:
    """Tokens that are all different, so that a place in a row tells its place in the data."""
    count = sum(lengths)
    return np.arange(count), Documents(np.cumsum([0, *lengths[:-1]]), 0, count)


def test_each_document_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 documents, rows of 8 places: every pair of neighbours within a document once, no other one ever."""
    monkeypatch.setattr(packing, "CHUNK", 5)
    lengths = [3, 1, 9, 2, 30, 4, 4, 5, 17, 1, 2, 6]
    tokens, documents = corpus(lengths)
    loader = PackedLoader([tokens], [documents], 1, 8, seed=3)
    wanted = {int(t) for t in tokens[1:]} - {int(t) for t in np.cumsum(lengths)}
    orders = []
    for epoch in range(2):
        seen: list[int] = []
        while True:
            ids, targets, bounds = loader.next_batch()
            read = targets[0] != data.IGNORED
            assert read.sum() == loader.filled and (targets[0][read] == ids[0][read] + 1).all()
            seen += targets[0][read].tolist()
            starts, ends = bounds[0]
            assert starts[0] == 0 and ends[-1] == 8 and all(starts[end] == end for end in ends if end < 8)
            for start in {int(start) for start in starts[read]}:  # neighbours in the row are neighbours in the data
                piece = ids[0, start : ends[start]]
                assert (np.diff(piece) == 1).all()
            if loader.chunk == loader.chunks - 1 and loader.row == len(loader._rows(epoch, loader.chunk)):
                break
        assert sorted(seen) == sorted(wanted)
        orders.append(seen)
        assert loader.epoch == epoch
        loader.load_state_dict({"epoch": epoch + 1, "chunk": 0, "row": 0})
    assert orders[0] != orders[1]


@ends_within(30)
def test_it_goes_on_from_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHUNK", 4)
    tokens, documents = corpus([3, 9, 2, 30, 4, 4, 5, 17, 2, 6])
    loader, found = PackedLoader([tokens], [documents], 2, 8, seed=1), []
    for _ in range(12):
        epochs = loader.epochs
        found.append((loader.state_dict(), [part.tobytes() for part in loader.next_batch()]))
        assert epochs < loader.epochs, "each row is a part of an epoch"
    assert found[-1][0]["epoch"] >= 1
    for state, want in found:
        again = PackedLoader([tokens], [documents], 2, 8, seed=1)
        again.load_state_dict(state)
        assert [part.tobytes() for part in again.next_batch()] == want
    for state in (
        {"epoch": 0, "chunk": 3, "row": 0},
        {"epoch": 0, "chunk": 0, "row": 99},
        {"epoch": -1, "chunk": 0, "row": 0},
        {"epoch": 0, "chunk": -1, "row": 0},
        {"epoch": 0, "chunk": 0, "row": -1},
    ):
        with pytest.raises(DataError, match="the position must be inside the data"):
            loader.load_state_dict(state)


def test_the_rows_of_a_chunk_are_drawn() -> None:
    """Documents that fill a row each are drawn, and then their rows: otherwise the large ones would always come first."""
    tokens, documents = corpus([9] * 40)
    ids = PackedLoader([tokens], [documents], 40, 8, seed=1).next_batch()[0]
    rows = (ids[:, 0] // 9).tolist()
    assert sorted(rows) == list(range(40)) and rows != data.permute(np.arange(40), 40, 1, 0).tolist()


def test_what_is_not_learned() -> None:
    tokens, documents = corpus([4, 3])
    mask = np.array([1, 0, 1, 1, 1, 1, 0], np.uint8)
    ids, targets, bounds = PackedLoader([tokens], [documents], 1, 6, masks=[mask]).next_batch()
    assert ids.tolist() == [[0, 1, 2, 4, 5, 0]] and targets.tolist() == [[-100, 2, 3, 5, -100, -100]]
    assert bounds.tolist() == [[[0, 0, 0, 3, 3, 5], [3, 3, 3, 5, 5, 6]]]
    with pytest.raises(DataError, match="must have a document of at least 2 tokens, got 3 documents"):
        PackedLoader([np.arange(3)], [Documents(np.arange(3), 0, 3)], 1, 4)
    with pytest.raises(DataError, match=r"token ids of data must be in \[0, 6\), got 6 at position 6 of piece 0"):
        PackedLoader([tokens], [documents], 1, 6, vocab_size=6).next_batch()


def test_what_is_left_of_a_row_is_no_long_document() -> None:
    """Rows of 64 places with at most 3 documents of 4, 6 and 3 places: attention over the rest is as over documents of 6."""
    tokens, documents = corpus([5, 7, 4])
    _, targets, bounds = PackedLoader([tokens], [documents], 1, 64).next_batch()
    starts = np.unique(bounds[0, 0])
    assert np.diff([*starts, 64]).tolist() == [6, 4, 3] + [6] * 8 + [3] and np.all(targets[0, 13:] == -100)
    assert bounds[0, 1].tolist() == np.repeat([*starts[1:], 64], np.diff([*starts, 64])).tolist()


@pytest.mark.parametrize("masked", [False, True])
def test_documents_of_several_pieces(masked: bool) -> None:
    """Each with tokens, documents and a mask of its own; the second has no mask."""
    segments = [np.arange(0, 9), np.arange(100, 107), np.arange(200, 212)]
    documents = [Documents(np.array([0, 4]), 0, 9), Documents(None, 0, 7), Documents(np.array([0, 5]), 0, 12)]
    masks = [np.arange(9) % 2, None, np.arange(12) % 3 > 0] if masked else None
    loader = PackedLoader(segments, documents, 5, 6, vocab_size=212, masks=masks)
    assert loader.documents == 5
    _, targets, _ = loader.next_batch()
    learned = [*range(1, 4), *range(5, 9), *range(101, 107), *range(201, 205), *range(206, 212)]
    if masked:
        learned = [t for t in learned if t // 100 == 1 or (t % 2 if t < 100 else (t - 200) % 3)]
    assert sorted(targets[targets != data.IGNORED].tolist()) == learned
    again = PackedLoader(segments, documents, 5, 6, vocab_size=212, masks=masks)
    ids, wanted, _ = next(iter(again))
    assert wanted.tolist() == targets.tolist() and ids.tolist() != targets.tolist()
    with pytest.raises(DataError, match=r"got 211 at position 11 of piece 2"):
        PackedLoader(segments, documents, 5, 6, vocab_size=211).next_batch()


def test_orders_are_those_of_a_seed_an_epoch_and_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that fill a row each: which ones a chunk has, and where it puts them."""
    monkeypatch.setattr(packing, "CHUNK", 8)
    tokens, documents = corpus([9] * 24)
    chosen, places = [], []
    for seed, epoch in ((1, 0), (1, 1), (20, 0)):
        loader = PackedLoader([tokens], [documents], 1, 8, seed=seed)
        assert loader.chunks == 3
        for chunk in range(3):
            drawn = data.permute(np.arange(8 * chunk, 8 * chunk + 8), 24, seed, epoch).tolist()
            rows = [start // 9 for ((_, start, _),) in loader._rows(epoch, chunk)]
            assert sorted(rows) == sorted(drawn)
            chosen.append(tuple(sorted(drawn)))
            places.append(tuple(drawn.index(row) for row in rows))
    assert len(set(chosen)) == len(set(places)) == 9


def test_a_chunk_of_nothing_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHUNK", 2)
    tokens, documents = corpus([1, 1, 1, 1, 1, 1, 1, 3])
    for seed in range(8):
        loader = PackedLoader([tokens], [documents], 1, 4, seed=seed)
        assert [loader.next_batch()[0].tolist() for _ in range(3)] == [[[7, 8, 0, 0]]] * 3 and loader.epoch == 2


def test_how_full_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last batch, and those of the chunk under way."""
    tokens, documents = corpus([5, 9])
    loader = PackedLoader([tokens], [documents], 2, 8)
    assert loader.next_batch()[0].shape == (2, 8) and loader.filled == 12
    assert loader.metrics() == {"token_efficiency": 0.75} and loader.efficiency() == 0.75
    monkeypatch.setattr(packing, "CHUNK", 1)
    loader, found = PackedLoader([tokens], [documents], 1, 8), []
    for _ in range(2):
        loader.next_batch()
        assert loader.efficiency() == loader.metrics()["token_efficiency"]
        found.append(loader.efficiency())
    assert sorted(found) == [0.5, 1.0]


# ---- models ----------------------------------------------------------------------------------------------------------

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("mistral", {"sliding_window": 3}),
    ("qwen3", {"mhc_streams": 2}),
    ("gpt2", {}),
]


def made(kind: str, options: dict[str, Any], sizes: dict[str, Any] = SMALL) -> Any:
    xt.manual_seed(4)
    if kind == "gpt2":
        off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = models.GPT2Config(
            vocab_size=sizes["vocab_size"],
            n_positions=sizes["max_position_embeddings"],
            n_embd=sizes["hidden_size"],
            n_layer=2,
            n_head=4,
            initializer_range=sizes["initializer_range"],
            tie_word_embeddings=False,
            **off,
        )
        return models.GPT2(config)
    return architecture(kind).model(architecture(kind).config(**{**sizes, **options}))


def table_of(model: Any) -> Any:
    parameters = dict(model.named_parameters())
    return parameters.get("transformer.wte.weight", parameters.get("model.embed_tokens.weight"))


@pytest.mark.on_cpu
@pytest.mark.parametrize("kind, options", MODELS, ids=lambda value: str(value))
def test_a_packed_row_is_its_documents(kind: str, options: dict[str, Any]) -> None:
    """Bit for bit with the naive product: logits, losses, and the gradient that reaches each token through all layers.
    No id occurs twice, so that a row of the table's gradient is that of one token.
    """
    model, lengths = made(kind, options).to("cpu"), [7, 1, 12, 4]
    table = table_of(model)
    ids = np.random.default_rng(2).permutation(61)[None, :24]
    targets = np.random.default_rng(3).integers(0, 61, (1, 24))

    def run(part: slice, documents: xt.Tensor | None) -> list[np.ndarray]:
        x, y = (xt.tensor(np.ascontiguousarray(a[:, part]), device="cpu") for a in (ids, targets))
        model.zero_grad()
        losses = model.loss(x, y, reduction="none", documents=documents)
        losses.sum().backward()
        results = [model(x, documents=documents)[0], losses, table.grad.index_select(0, x[0])]
        return [result.detach().numpy() for result in results]

    with xt.use_gemm_backend("naive"):
        whole = run(slice(0, 24), F.document_bounds([lengths], device="cpu"))
        for length, end in zip(lengths, np.cumsum(lengths)):
            part = slice(end - length, end)
            for name, got, want in zip(("logits", "losses", "gradients"), whole, run(part, None)):
                assert got[part].tobytes() == want.tobytes(), (name, length)


# Documents that are longer and shorter than a tile of attention on a GPU, and heads of 32 (Qwen3: 128) channels, as its fast kernels take.
LARGER = SMALL | dict(
    vocab_size=401, hidden_size=128, intermediate_size=192, max_position_embeddings=300, initializer_range=0.1
)
UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-9}


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("kind, options", MODELS, ids=lambda value: str(value))
def test_a_packed_row_errs_no_more_than_its_documents(kind: str, options: dict[str, Any], dtype: str) -> None:
    """On a GPU, too, whose kernels add in other orders in a longer row. The documents one by one in float64, on the CPU,
    are exact. Relative to its norm, each document of a packed row errs at most twice as much as all documents one by
    one do in its dtype, or as 8 roundings: logits, losses and the gradient that reaches each token; and the gradient of
    all other parameters, which is the sum over the documents.
    """
    window = {"sliding_window": 50} if "sliding_window" in options else {}
    low, lengths = made(kind, options | window, LARGER).to(getattr(xt, dtype)), [70, 1, 130, 56]
    exact = copy.deepcopy(low).to("cpu", xt.float64)
    ids = np.random.default_rng(2).permutation(401)[None, :257]
    targets = np.random.default_rng(3).integers(0, 401, (1, 257))

    def run(model: Any, part: slice, documents: xt.Tensor | None) -> list[np.ndarray]:
        table = table_of(model)
        x, y = (xt.tensor(np.ascontiguousarray(a[:, part]), device=table.device) for a in (ids, targets))
        model.zero_grad()
        losses = model.loss(x, y, reduction="none", documents=documents)
        losses.sum().backward()
        rest = [array(p.grad).reshape(-1) for p in model.parameters() if p is not table]
        tokens = table.grad.index_select(0, x[0])
        return [array(each) for each in (model(x, documents=documents)[0], losses, tokens)] + [np.concatenate(rest)]

    def one_by_one(model: Any) -> list[np.ndarray]:
        found = [run(model, slice(end - n, end), None) for n, end in zip(lengths, np.cumsum(lengths).tolist())]
        *rows, gradients = zip(*found)
        return [*map(np.concatenate, rows), np.sum(gradients, 0)]

    packed, alone = run(low, slice(0, 257), F.document_bounds([lengths])), one_by_one(low)
    device = xt.get_default_device()
    xt.set_default_device("cpu")
    try:
        want = one_by_one(exact)
    finally:
        xt.set_default_device(device)
    ends = np.cumsum(lengths)[:-1]
    for name, got, other, right in zip(("logits", "losses", "tokens", "gradients"), packed, alone, want, strict=True):
        naive = max(float(np.linalg.norm(other - right) / np.linalg.norm(right)), 8 * UNITS[dtype])
        cuts = ends if len(right) == len(ids[0]) else []
        for number, (ours, exactly) in enumerate(zip(np.split(got, cuts), np.split(right, cuts), strict=True)):
            error = float(np.linalg.norm(ours - exactly) / np.linalg.norm(exactly))
            assert error <= 2 * naive, f"{name} of document {number}: {error}, allowed {2 * naive}"


@pytest.mark.parametrize("kind, options", MODELS, ids=lambda value: str(value))
@pytest.mark.parametrize("policy", ["cheap", "block", "full"])
def test_documents_under_recomputation(kind: str, options: dict[str, Any], policy: str) -> None:
    model, found = made(kind, options), []
    x, y = (xt.tensor(np.random.default_rng(seed).integers(0, 61, (2, 12))) for seed in (1, 2))
    for model.recompute in ("none", policy):
        model.zero_grad()
        loss = model.loss(x, y, documents=F.document_bounds([[5, 7], [12]]))
        loss.backward()
        found.append([bits(loss), *(bits(p.grad) for p in model.parameters())])
    assert found[0] == found[1]


def test_what_models_refuse() -> None:
    model, ids = made("qwen3", {}), xt.zeros(1, 4, dtype=xt.int64)
    bounds = F.document_bounds([[1, 3]])
    with pytest.raises(ValueError, match="Qwen3: documents must be None with caches, got both"):
        model(ids, caches=model.make_caches(1, 4), documents=bounds)
    with pytest.raises(ValueError, match=r"Qwen3: documents must have shape \(1, 2, 4\), got \(1, 2, 6\)"):
        model.loss(ids, ids, documents=F.document_bounds([[6]]))


# ---- runs ------------------------------------------------------------------------------------------------------------


def chats(path: Path) -> Path:
    """A token file of short prompts and completions, and one that is longer than a row."""
    rows = [{"prompt": f"{i} + {i} = ", "completion": f"{2 * i}"} for i in range(60)]
    rows.append({"prompt": "say it again: ", "completion": "again " * 30})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data.prepare(path, path.with_suffix(".tokens"))
    return path.with_suffix(".tokens")


OPTIONS: dict[str, Any] = dict(
    model="tiny", pack=True, batch_size=4, seq_len=48, eval_tokens=200, sample={"tokens": 0}, quiet=True, plot=False,
)  # fmt: skip


MUON = {"optim": {"name": "muon", "warmup": 1}, "ema": 0.9, "precision": "bfloat16"}


@pytest.mark.parametrize("more", [{}, MUON], ids=["adamw", "muon and averages"])
def test_a_run_goes_on_with_the_same_bits(more: dict[str, Any], tmp_path: Path) -> None:
    """The bytes of weights, of the optimizer's state and of averages, of a run that begins again behind step 2 in a new
    folder.
    """
    tokens = chats(tmp_path / "chats.jsonl")
    whole = train(data=str(tokens), out=str(tmp_path / "whole"), steps=4, **OPTIONS, **more)
    train(data=str(tokens), out=str(tmp_path / "cut"), steps=4, save_every=2, **OPTIONS, **more)
    shutil.copytree(tmp_path / "cut" / "checkpoint-00000002", tmp_path / "again" / "checkpoint-00000002")
    again = train(resume=str(tmp_path / "again"), quiet=True)
    assert again.step == 4 and (again.loss, again.val_loss) == (whole.loss, whole.val_loss)
    folders = [tmp_path / name / "checkpoint-00000004" for name in ("whole", "cut", "again")]
    names = [{path.name for path in folder.glob("*.safetensors")} for folder in folders]
    kept = {"model.safetensors", "optimizer.safetensors", *(["ema.safetensors"] if more else [])}
    assert names == [kept] * 3
    assert weights(folders[0]) == weights(folders[1]) == weights(folders[2])
    assert weights(folders[0]) != weights(tmp_path / "cut" / "checkpoint-00000002")


def test_leaves_and_records_of_a_packed_run(tmp_path: Path) -> None:
    """In pieces and leaves the loss is the same; records say how full the rows are."""
    tokens = chats(tmp_path / "chats.jsonl")
    whole = train(data=str(tokens), out=str(tmp_path / "whole"), steps=4, **OPTIONS)
    leaves = train(data=str(tokens), out=str(tmp_path / "leaves"), steps=1, max_ranks=2, grad_accum=2, **OPTIONS)
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert leaves.loss == pytest.approx(records[0]["loss"], rel=1e-5)
    assert all(0.5 < record["token_efficiency"] <= 1 for record in records)
    assert whole.val_loss is not None and np.isfinite(whole.val_loss)


def test_what_a_packed_run_says_of_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, of the documents that are trained on and of the chunk under way; none without `pack`."""
    tokens, options = chats(tmp_path / "chats.jsonl"), {**OPTIONS, "quiet": False, "steps": 1}

    def lines(name: str, **more: Any) -> list[str]:
        train(data=str(tokens), out=str(tmp_path / name), **{**options, **more})
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("pack")]

    part = data.open_data(tokens).train_documents[0]
    edges = part.bounds(0, len(part))
    places = int(np.maximum(np.diff(edges) - 1, 0).sum())  # the last token of each is a target only
    rows = data.open_data(tokens).packed_loader(4, 48)
    share = places / (len(rows._rows(0, 0)) * 48)
    assert 0.5 < share < 0.999
    said = f"pack   {len(part)} documents, {share:.1%} of the places of a sequence hold a token of one"
    assert lines("packed") == [said] and lines("plain", pack=False) == []


def test_a_model_whose_loss_takes_no_options(tmp_path: Path) -> None:
    class Own(models.Qwen3):
        def loss(
            self, ids: xt.Tensor, targets: xt.Tensor, ignore_index: int = -100, reduction: str = "mean"
        ) -> xt.Tensor:
            return super().loss(ids, targets, ignore_index, reduction)

    own = Own(models.Qwen3Config(**(SMALL | {"vocab_size": 256})))
    options = {key: value for key, value in OPTIONS.items() if key != "model"}
    text = str(chats(tmp_path / "chats.jsonl"))
    with pytest.raises(ConfigError, match="pack must be off for Own, whose loss takes no documents"):
        train(own, text, out=str(tmp_path / "run"), **options)
    with pytest.raises(ConfigError, match="z_loss must be 0 for Own, whose loss takes none, got 0.5"):
        train(own, text, out=str(tmp_path / "run"), z_loss=0.5, **{**options, "pack": False})


def test_documents_of_the_validation_part() -> None:
    """A window sees each document alone, and no target lies in the next document."""
    tokens, documents = corpus([5, 9, 3, 20])
    found = data.Corpus("x", [tokens], [tokens], None, 37, None, val_documents=[documents])
    block, targets, bounds = found.val_documents_batch(6, 36)
    assert block[0].tolist() == list(range(7)) and targets[0].tolist() == [1, 2, 3, 4, -100, 6]
    assert bounds[0].tolist() == [[0, 0, 0, 0, 0, 5], [5, 5, 5, 5, 5, 6]]
    assert targets[2].tolist() == [13, -100, 15, 16, -100, 18]  # documents from tokens 14 and 17 on


def test_where_documents_of_a_folder_and_of_a_cut_file_lie(tmp_path: Path) -> None:
    """In both parts; names that are no Unicode are names; a folder whose files would all be held out keeps some."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        name = os.fsencode(f"{number}.txt") if number else b"\xff.txt"
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(b"x" * (number + 2))
    for fraction in (0.4, 1.0):  # by the hashes of names; all of them
        found = data.open_data(folder, val_fraction=fraction)
        assert found.train_tokens + found.val_tokens == sum(range(3, 15))
        for segment, documents in ((found.train[0], found.train_documents), (found.val[0], found.val_documents)):
            edges = documents[0].bounds(0, len(documents[0])).tolist()
            assert edges == [0, *(np.flatnonzero(segment == 0) + 1).tolist()] and len(edges) > 1
    assert found.val_tokens == 3, "the smallest"
    data.prepare(folder, tmp_path / "x.tokens")
    found = data.open_data(tmp_path / "x.tokens", val_fraction=0.3)
    edges = found.val_documents[0].bounds(0, len(found.val_documents[0])).tolist()
    assert edges == [0, *(np.flatnonzero(found.val[0][:] == 0) + 1).tolist()] and len(edges) > 2
