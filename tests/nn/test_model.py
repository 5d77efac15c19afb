"""The transformer as a whole: a batch is its sequences, no sequence sees another, it learns, and it neither leaks nor depends on threads."""

from __future__ import annotations

import gc
import os
import resource
import sys

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.models import Qwen3, Qwen3Config
from xtrain.optable.table import array, bits, check_close


def config(**changes) -> Qwen3Config:
    sizes = dict(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return Qwen3Config(**{**sizes, **changes})


def make(seed: int = 1, **changes) -> Qwen3:
    xt.manual_seed(seed)
    model = Qwen3(config(initializer_range=0.2, **changes))
    rng = np.random.default_rng(seed)
    with xt.no_grad():  # norms away from one, so that their place in the formula matters
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(xt.tensor(rng.uniform(0.5, 1.5, p.shape).astype(np.float32)))
    return model


def batch(model: Qwen3, b: int, s: int, seed: int = 0):
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, (b, s + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def grads(model: Qwen3) -> dict[str, np.ndarray]:
    return {name: array(p.grad) for name, p in model.named_parameters()}


SHAPES = [(2, 4), (3, 37)]


@pytest.mark.on_cpu
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("b", "s"), SHAPES)
@pytest.mark.parametrize("attention", ["reference", "materialized"])
def test_batch_is_its_sequences_bitwise(b: int, s: int, tied: bool, attention: str) -> None:
    """With the naive GEMM, logits of a batch are bit for bit those of its sequences one by one, and so is every gradient.

    The gradient of a weight adds up over all rows of the batch, so it is compared sequence by sequence: the loss of sequence i inside the
    batch (the targets of the others ignored) against the loss of sequence i alone, which differ by terms of exactly zero.
    """
    model = make(tie_word_embeddings=tied)
    ids, targets = batch(model, b, s)
    with xt.use_gemm_backend("naive"), xt.use_attention_backend(attention):
        together = array(model(xt.tensor(ids)))
        for i in range(b):
            alone = array(model(xt.tensor(ids[i : i + 1])))
            assert alone.tobytes() == together[i : i + 1].tobytes(), f"logits of sequence {i}"
            model.zero_grad()
            model.loss(xt.tensor(ids[i : i + 1]), xt.tensor(targets[i : i + 1])).backward()
            want = grads(model)
            model.zero_grad()
            others = np.where(np.arange(b)[:, None] == i, targets, -100)
            model.loss(xt.tensor(ids), xt.tensor(others)).backward()
            for name, got in grads(model).items():
                assert (got + 0.0).tobytes() == (want[name] + 0.0).tobytes(), (
                    f"gradient of {name} from sequence {i}"
                )  # + 0.0: -0 is 0


@pytest.mark.on_cpu
def test_looped_sequences_add_up_to_the_batch_bitwise() -> None:
    """Sequence after sequence into .grad is the same chain of additions as the whole batch at once.

    Bitwise with the naive GEMM, an untied head (a tied one interleaves its two sums differently) and rows that fit into one
    piece of the norm's weight gradient (16384 elements); beyond that see the 1e-5 of the next test.
    """
    model = make(tie_word_embeddings=False)
    ids, targets = batch(model, 3, 17)
    with xt.use_gemm_backend("naive"):
        (model.loss(xt.tensor(ids), xt.tensor(targets), reduction="sum") * (1 / ids.size)).backward()
        together = grads(model)
        model.zero_grad()
        for one, target in zip(ids, targets, strict=True):
            (model.loss(xt.tensor(one[None]), xt.tensor(target[None]), reduction="sum") * (1 / ids.size)).backward()
    for name, got in grads(model).items():
        assert got.tobytes() == together[name].tobytes(), name


@pytest.mark.parametrize("gemm", xt.gemm_backends(xt.get_default_device()))
@pytest.mark.parametrize(("b", "s"), SHAPES)
def test_gradient_of_a_batch_is_the_sum_over_its_sequences(b: int, s: int, gemm: str) -> None:
    model = make()
    ids, targets = batch(model, b, s)
    with xt.use_gemm_backend(gemm):
        logits = array(model(xt.tensor(ids)))
        model.loss(xt.tensor(ids), xt.tensor(targets)).backward()
        together = grads(model)
        model.zero_grad()
        for i in range(b):
            one = array(model(xt.tensor(ids[i : i + 1])))
            check_close(one, logits[i : i + 1], 1e-5 * np.abs(logits).max(), f"logits of sequence {i}")
            (
                model.loss(xt.tensor(ids[i : i + 1]), xt.tensor(targets[i : i + 1]), reduction="sum") * (1 / (b * s))
            ).backward()
        for name, got in grads(model).items():
            check_close(got, together[name], 1e-5 * np.abs(together[name]).max(), f"gradient of {name}")


@pytest.mark.parametrize("gemm", xt.gemm_backends(xt.get_default_device()))
@pytest.mark.parametrize("attention", ["reference", "materialized"])
def test_a_sequence_never_sees_its_neighbour(gemm: str, attention: str) -> None:
    model = make()
    ids, targets = batch(model, 3, 33)
    changed = ids.copy()
    changed[1] = (changed[1] + 7) % 61
    with xt.use_gemm_backend(gemm), xt.use_attention_backend(attention):
        a, b = array(model(xt.tensor(ids))), array(model(xt.tensor(changed)))
        assert a[0].tobytes() == b[0].tobytes()
        assert a[2].tobytes() == b[2].tobytes()
        assert not np.array_equal(a[1], b[1])
        losses = [
            array(model.loss(xt.tensor(i), xt.tensor(targets), reduction="none")).reshape(3, 33) for i in (ids, changed)
        ]
        assert losses[0][[0, 2]].tobytes() == losses[1][[0, 2]].tobytes()


@pytest.mark.parametrize("attention", ["reference", "materialized"])
def test_a_token_never_sees_the_future(attention: str) -> None:
    model = make()
    ids, _ = batch(model, 2, 33)
    changed = ids.copy()
    changed[:, 20:] = (changed[:, 20:] + 3) % 61
    with xt.use_attention_backend(attention):
        a, b = array(model(xt.tensor(ids))), array(model(xt.tensor(changed)))
    assert a[:, :20].tobytes() == b[:, :20].tobytes()
    assert not np.array_equal(a[:, 20:], b[:, 20:])


def test_explicit_positions_are_the_default_ones() -> None:
    model = make()
    ids, _ = batch(model, 3, 9)
    positions = np.tile(np.arange(9), 3)
    assert bits(model(xt.tensor(ids))) == bits(model(xt.tensor(ids), xt.tensor(positions)))


def test_backends_agree() -> None:
    model = make()
    ids, targets = batch(model, 3, 37)
    results = {}
    for gemm in xt.gemm_backends(xt.get_default_device()):
        for attention in xt.attention_backends(xt.get_default_device()):
            model.zero_grad()
            with xt.use_gemm_backend(gemm), xt.use_attention_backend(attention):
                loss = model.loss(xt.tensor(ids), xt.tensor(targets))
                loss.backward()
            results[gemm, attention] = (loss.item(), grads(model))
    base = results["naive", "reference"]
    for key, (loss, found) in results.items():
        assert abs(loss - base[0]) <= 1e-6 * abs(base[0]), key
        for name, got in found.items():
            check_close(got, base[1][name], 2e-5 * np.abs(base[1][name]).max(), f"{key} {name}")


def test_overfits_every_token() -> None:
    model = Qwen3(config(initializer_range=0.05))
    ids, targets = batch(model, 4, 16, seed=5)
    optimizer = xt.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    x, y = xt.tensor(ids), xt.tensor(targets)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        xt.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with xt.no_grad():
        predicted = model(x).argmax(-1).cpu().numpy()
    assert np.isfinite(loss.item())
    # the first token of two sequences may be the same with different successors: those cannot be told apart
    seen: dict[tuple, set] = {}
    for row, goal in zip(ids, targets):
        for t in range(16):
            seen.setdefault(tuple(row[: t + 1]), set()).add(int(goal[t]))
    possible = np.array([[len(seen[tuple(row[: t + 1])]) == 1 for t in range(16)] for row in ids])
    assert possible.mean() > 0.9
    assert (predicted == targets)[possible].all(), f"{(predicted == targets).mean():.1%} of the tokens"


def rss() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_two_hundred_steps_leak_nothing() -> None:
    model = Qwen3(config())
    optimizer = xt.optim.AdamW(model.parameters(), lr=1e-3)
    ids, targets = (xt.tensor(a) for a in batch(model, 4, 32))
    watched = [model, optimizer, ids, targets, None, _C.float32, *model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        xt.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    def look():
        gc.collect()
        if sys.version_info < (3, 12):  # None is counted, and is the name of empty places in the interpreter's cache
            sys._clear_type_cache()
        stats = _C.memory_stats(_C.get_default_device())
        return (
            [stats[k] for k in ("live_tensors", "live_storages", "allocated")],
            [sys.getrefcount(o) for o in watched],
            rss(),
        )

    for _ in range(20):
        step()
    gc.disable()
    try:
        before = look()
        for _ in range(200):
            step()
        garbage = gc.collect()
    finally:
        gc.enable()
    after = look()
    assert after[0] == before[0], "live tensors, live storages, bytes"
    flat = [abs(a - b) <= 3 for a, b in zip(after[1], before[1])]
    assert all(flat), f"reference counts {before[1]} became {after[1]}"
    assert garbage < 200, f"{garbage} objects needed the cycle collector"
    if not os.environ.get("XTRAIN_SANITIZE"):  # which keeps freed memory back for a while, to see it used
        assert after[2] - before[2] < 8 << 20, f"resident memory grew by {(after[2] - before[2]) >> 10} KiB"


def train_bits(threads: int, steps: int = 3, **changes) -> list[bytes]:
    _C.set_num_threads(threads)
    xt.manual_seed(3)
    model = Qwen3(config(hidden_size=96, intermediate_size=256, vocab_size=256, **changes))
    optimizer = xt.optim.AdamW(model.parameters(), lr=1e-2)
    ids, targets = (xt.tensor(a) for a in batch(model, 4, 60))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        xt.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [bits(loss), *(bits(p) for p in model.parameters())]


@pytest.mark.parametrize("gemm", xt.gemm_backends(xt.get_default_device())[:-1])
def test_training_gives_the_same_bits_at_any_number_of_threads(gemm: str) -> None:
    with xt.use_gemm_backend(gemm):
        want = train_bits(1)
        assert train_bits(2) == want
        assert train_bits(4) == want
        assert train_bits(1) == want


def test_checkpointing_that_is_on_already_stays_as_it_is() -> None:
    model = make()
    for policy, on, then in (
        ("full", True, "full"),
        ("cheap", False, "cheap"),
        ("full", False, "none"),
        ("none", True, "block"),
    ):
        model.recompute = policy
        model.gradient_checkpointing = on
        assert model.recompute == then and model.gradient_checkpointing is on


def test_nothing_is_computed_again_outside_of_training() -> None:
    """What a graph holds in evaluation mode does not depend on the policy; in training mode it does."""

    def held(policy: str, training: bool) -> int:
        model = make().train(training)
        model.recompute = policy
        ids, targets = map(xt.tensor, batch(model, 3, 37))
        before = _C.memory_stats(ids.device)["allocated"]
        loss = model.loss(ids, targets)
        return _C.memory_stats(loss.device)["allocated"] - before

    for policy in ("cheap", "block", "full"):
        assert held(policy, False) == held("none", False) > held(policy, True)


def test_a_tied_model_takes_a_head_that_is_its_table() -> None:
    model = make(tie_word_embeddings=True)
    state = model.state_dict()
    table = state["model.embed_tokens.weight"]
    model.load_state_dict({**state, "lm_head.weight": table.clone()})
    rest = {name: tensor for name, tensor in state.items() if tensor is not table}
    for wrong in (
        {**state, "lm_head.weight": table * 2},
        {**state, "lm_head.weight": table[:3]},
        {**rest, "lm_head.weight": table},
    ):
        with pytest.raises(
            ValueError, match=r"lm_head.weight must equal model.embed_tokens.weight when tied, got another"
        ):
            model.load_state_dict(wrong)


@pytest.mark.parametrize("tied", [True, False])
def test_recomputation_gives_the_same_bits(tied: bool) -> None:
    results = []
    ids, targets = batch(make(), 3, 37)
    for on in (False, True):
        model = make(tie_word_embeddings=tied)
        model.gradient_checkpointing = on
        loss = model.loss(xt.tensor(ids), xt.tensor(targets))
        loss.backward()
        results.append([bits(loss), *(bits(p.grad) for p in model.parameters())])
    assert results[0] == results[1]


def test_whole_model_against_finite_differences() -> None:
    """Float64, a projection of every parameter: everything between the loss and a weight at once."""
    model = make(num_hidden_layers=1).to(xt.float64)
    ids, targets = (xt.tensor(a) for a in batch(model, 2, 5))
    model.loss(ids, targets).backward()
    rng = np.random.default_rng(0)
    for name, p in model.named_parameters():
        direction = rng.choice([-1.0, 1.0], p.shape)
        want = float((array(p.grad) * direction).sum())
        losses = []
        base = p.detach().clone()
        for sign in (1, -1):
            with xt.no_grad():
                p.copy_(base + xt.tensor(direction) * (sign * 1e-6))
                losses.append(model.loss(ids, targets).item())
        with xt.no_grad():
            p.copy_(base)
        got = (losses[0] - losses[1]) / 2e-6
        assert abs(got - want) <= 1e-6 * max(abs(got), abs(want)) + 2e-9, f"{name}: {want} against {got}"


def test_bfloat16_model_trains() -> None:
    xt.manual_seed(0)
    model = Qwen3(config(initializer_range=0.05)).to(xt.bfloat16)
    optimizer = xt.optim.AdamW(model.parameters(), lr=2e-3)
    ids, targets = (xt.tensor(a) for a in batch(model, 4, 16))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()))
    assert all(np.isfinite(losses))
    assert losses[-1] < 0.6 * losses[0]
    assert {p.dtype for p in model.parameters()} == {xt.bfloat16}


def test_generation_with_caches_is_generation_without() -> None:
    model = make()
    ids, _ = batch(model, 2, 7)
    out = model.generate(xt.tensor(ids), 12, temperature=0.0).cpu().numpy()
    current = ids
    for _ in range(12):
        with xt.no_grad():
            logits = array(model(xt.tensor(current)))[:, -1]
        current = np.concatenate([current, logits.argmax(-1)[:, None]], 1)
    assert np.array_equal(out, current)


def test_generation_takes_any_integers_and_nothing_else() -> None:
    model = make()
    want = model.generate([3, 1, 4], 3, temperature=0.0).tolist()
    for dtype in (np.uint8, np.uint16, np.int32, np.int64):
        assert model.generate(np.array([3, 1, 4], dtype), 3, temperature=0.0).tolist() == want
    assert model.generate(xt.tensor([3, 1, 4], dtype=xt.int32), 3, temperature=0.0).tolist() == want
    for bad in ([1.5], np.ones(2), [True, False], xt.ones(2), xt.ones(2, dtype=xt.bfloat16), ["a"]):
        with pytest.raises(TypeError, match="generate: ids must have an integer dtype, got"):
            model.generate(bad, 3)
    for bad in ([], [[]], 3, [[[1]]]):
        with pytest.raises(ValueError, match="generate: ids must have shape"):
            model.generate(bad, 3)


def test_model_errors() -> None:
    model = make()
    ids, _ = batch(model, 2, 5)
    for call, kind, text in [
        (lambda: model(xt.tensor(ids[0])), ValueError, r"ids must have shape \(B, S\), got \(5,\)"),
        (lambda: model(ids), TypeError, "ids must be a Tensor"),
        (
            lambda: model(xt.tensor(ids)[:, :0]),
            ValueError,
            r"^Qwen3: ids must have at least one token per sequence, got shape \(2, 0\)$",
        ),
        (lambda: model.loss(*2 * [xt.tensor(ids)[:, :0]]), ValueError, "^Qwen3: ids must have at least one token"),
        (
            lambda: model.loss(xt.tensor(ids), xt.tensor(ids[:, :3])),
            ValueError,
            r"targets must have shape \(2, 5\), got \(2, 3\)",
        ),
        (lambda: model(xt.tensor(ids + 100)), IndexError, r"\d+"),
        (lambda: model.loss(xt.tensor(ids), xt.tensor(ids + 100)), IndexError, r"\d+"),
        (lambda: model(xt.tensor(ids.astype(np.float32))), TypeError, "int"),
        (lambda: model(xt.tensor(ids), None, model.make_caches(2, 5)), RuntimeError, "would lose it; use no_grad"),
        (lambda: config(head_dim=7), ValueError, "head_dim must be even, got 7"),
        (lambda: config(num_key_value_heads=4), ValueError, "num_key_value_heads must divide"),
        (lambda: config(hidden_size=0), ValueError, "hidden_size"),
    ]:
        with pytest.raises(kind, match=text):
            call()
            _C.synchronize(_C.get_default_device())
    assert np.isfinite(array(model(xt.tensor(ids)))).all()
