"""Steps whose loss or norm is not finite, and losses that are read late, as on a GPU: what was queued behind changes nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from runs import metrics, options, text_file, weights

import xtrain as xt
from xtrain import saving
from xtrain.data import prepare
from xtrain.errors import NonFiniteError
from xtrain.train import Trainer


@pytest.fixture
def data(tmp_path) -> Path:
    return text_file(tmp_path / "text.txt")


def test_nan_stops_the_run_and_names_the_place(tmp_path, data) -> None:
    out = tmp_path / "run"
    trainer = Trainer(options(data, out, save_every=3), quiet=True)
    next_batch = trainer.loader.next_batch

    def poisoned():
        if trainer.step == 5:
            with xt.no_grad():
                dict(trainer.model.named_parameters())["model.layers.0.mlp.up_proj.weight"][1, 2] = math.nan
        return next_batch()

    trainer.loader.next_batch = poisoned
    with pytest.raises(
        NonFiniteError, match=r"step 6: .*nan.*parameter model\.layers\.0\.mlp\.up_proj\.weight.*checkpoint-00000003"
    ):
        trainer.run()
    assert saving.newest_valid(out, print).name == "checkpoint-00000003"
    assert len(metrics(out)) == 5
    xt.manual_seed(0)
    assert Trainer({"resume": str(out)}, quiet=True).run().step == 8


def test_reading_losses_late_changes_nothing(tmp_path, data) -> None:
    """On a GPU losses are read every few steps: the same metrics and the same weights as when every step is read."""
    found = []
    for name, every in (("each", 1), ("late", 3)):
        trainer = Trainer(options(data, tmp_path / name, save_every=4), quiet=True)
        trainer.stepper.read_every = every
        trainer.run()
        kept = [
            {k: v for k, v in line.items() if "time" not in k and "per_second" not in k and k != "memory"}
            for line in metrics(tmp_path / name)
        ]
        found.append((kept, [p.cpu().numpy().copy() for p in trainer.model.state_dict().values()]))
    assert found[0][0] == found[1][0]
    assert all(np.array_equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("every", [1, 4])
def test_a_loss_is_read_once(tmp_path, data, every: int) -> None:
    """Reading waits for the device. The reads are the concatenations of two numbers a step."""
    trainer = Trainer(options(data, tmp_path / "run"), quiet=True)
    trainer.stepper.read_every = every
    reads: list[int] = []
    before = xt._C.set_call_hook(
        lambda op, arguments, outputs: (
            reads.append(outputs[0].numel()) if op.__name__ == "cat" and outputs[0].dtype is xt.float32 else None
        )
    )
    try:
        trainer.run()
    finally:
        xt._C.set_call_hook(before)
    assert reads == [2 * every] * (8 // every)
    assert set(trainer.train_step()) == {"loss", "lr", "grad_norm"}


def test_reading_needs_no_memory(tmp_path, data, monkeypatch) -> None:
    """The steps are made, and a full device must not hide what they were."""
    found = []
    for name in ("room", "none"):
        trainer = Trainer(options(data, tmp_path / name), quiet=True)
        trainer.stepper.read_every = 3
        queued = [trainer.stepper.queue() for _ in range(3)]

        def full(*_: object) -> None:
            raise MemoryError("out of memory")

        with monkeypatch.context() as patch:
            if name == "none":
                patch.setattr(xt._C, "cat", full)
            found.append(trainer.stepper.read(queued))
    assert found[0] == found[1] and len({numbers["loss"] for numbers in found[0]}) == 3


def test_without_clipping_gradients_stay(tmp_path, data) -> None:
    """clip of 0; with a norm of 1e-3 they have that one."""
    for clip, want in ((0.0, 1.0), (1e-3, 1e-3)):
        trainer = Trainer(options(data, tmp_path / f"run{clip}", clip=clip), quiet=True)
        norm = trainer.train_step()["grad_norm"]
        left = math.sqrt(sum(p.grad.double().square().sum().item() for p in trainer.model.parameters()))
        assert norm > 1e-2 and abs(left - (norm if clip == 0 else want)) <= 1e-4 * left


def test_a_bad_step_that_nobody_read_is_not_counted(tmp_path, data) -> None:
    """An exception ends the loop while a bad step is queued: the run goes on from the step before it."""
    trainer = Trainer(options(data, tmp_path / "run"), quiet=True)
    trainer.stepper.read_every = 8
    next_batch, weight = trainer.loader.next_batch, dict(trainer.model.named_parameters())["model.norm.weight"]
    before: list = []

    def failing():
        if trainer.step == 3:
            before.append((trainer.loader.state_dict(), xt.get_rng_state()))
            with xt.no_grad():
                weight[0] = math.nan
        if trainer.step == 5:
            raise OSError("the data is gone")
        return next_batch()

    trainer.loader.next_batch = failing
    with pytest.raises(OSError, match="the data is gone"):
        trainer.run()
    assert trainer.step == 3
    assert (trainer.loader.state_dict(), xt.get_rng_state()) == before[0]
    assert {state["step"] for state in trainer.optimizer.state.values()} == {3}
    trainer.loader.next_batch = next_batch
    with xt.no_grad():
        weight[0] = 1.0
    assert trainer.run().step == 8
    assert {state["step"] for state in trainer.optimizer.state.values()} == {8}


def test_a_bad_step_that_is_found_late_has_changed_nothing(tmp_path, data) -> None:
    out = tmp_path / "run"
    trainer = Trainer(options(data, out, save_every=0), quiet=True)
    trainer.stepper.read_every = 5
    next_batch, kept = trainer.loader.next_batch, []

    def poisoned():
        name = "model.layers.0.mlp.up_proj.weight"
        weight = dict(trainer.model.named_parameters())[name]
        if trainer.step == 2:
            with xt.no_grad():
                weight[1, 2] = math.nan
        if trainer.step in (2, 4):
            kept.append(weight.detach().cpu().numpy().copy())
        return next_batch()

    trainer.loader.next_batch = poisoned
    with pytest.raises(NonFiniteError, match=r"step 3: .*nan.*parameter model\.layers\.0\.mlp\.up_proj\.weight"):
        trainer.run()
    assert np.array_equal(kept[0], kept[1], equal_nan=True)
    assert [line["step"] for line in metrics(out)] == [1, 2]
    trainer.loader.next_batch = next_batch  # repaired, it goes on
    weight = dict(trainer.model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    with xt.no_grad():
        weight[1, 2] = 0.0
    before = weight.detach().cpu().numpy().copy()
    trainer.train_step()
    after = weight.detach().cpu().numpy()
    assert np.isfinite(after).all() and not np.array_equal(after, before)


@pytest.mark.parametrize("every", [1, 3, 4])
def test_after_a_bad_step_a_repaired_run_goes_on_as_if_it_had_not_been(tmp_path, data, every: int) -> None:
    """Same bits in the end: nothing of the bad step, and of those queued behind it, is left; their batches come again."""
    whole = Trainer(options(data, tmp_path / "whole"), quiet=True)
    whole.run()
    xt.manual_seed(0)
    trainer = Trainer(options(data, tmp_path / "run"), quiet=True)
    trainer.stepper.read_every = every
    weight = dict(trainer.model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    next_batch, kept, states = trainer.loader.next_batch, [], []

    def poisoned():
        if trainer.step == 4 and not kept:
            states.append((trainer.loader.state_dict(), xt.get_rng_state()))
            kept.append(weight.detach()[1, 2].item())
            with xt.no_grad():
                weight[1, 2] = math.nan
        return next_batch()

    trainer.loader.next_batch = poisoned
    for _ in range(2):  # unrepaired it fails in the same place
        with pytest.raises(NonFiniteError, match="step 5: "):
            trainer.run()
        assert trainer.step == 4
        assert (trainer.loader.state_dict(), xt.get_rng_state()) == states[0]
        assert {s["step"] for s in trainer.optimizer.state_dict()["state"].values()} == {4}
    with xt.no_grad():
        weight[1, 2] = kept[0]
    assert trainer.run().step == 8
    assert [r["loss"] for r in metrics(tmp_path / "run")] == [r["loss"] for r in metrics(tmp_path / "whole")]
    assert weights(tmp_path / "run" / "checkpoint-00000008") == weights(tmp_path / "whole" / "checkpoint-00000008")


def test_a_loss_that_is_not_finite_stops_a_late_step_too(tmp_path, data) -> None:
    """Also where the gradients are finite: the guard sees both."""
    trainer = Trainer(options(data, tmp_path / "run", save_every=0), quiet=True)
    trainer.stepper.read_every = 5
    gradients = trainer.stepper.gradients
    finite = xt.ones((), device=trainer.device)
    trainer.stepper.gradients = lambda *given: (gradients(*given)[0] * math.inf, finite)
    before = [p.detach().cpu().numpy().copy() for p in trainer.model.parameters()]
    with pytest.raises(NonFiniteError, match="step 1: the loss is inf"):
        trainer.run()
    assert all(np.array_equal(p.detach().cpu(), b) for p, b in zip(trainer.model.parameters(), before, strict=True))


def test_one_bad_step_stops_the_good_ones_that_are_queued_behind_it(tmp_path, data) -> None:
    """The batch is bad once, and the parameters are sound: only the guard's memory holds the later steps back."""
    whole = Trainer(options(data, tmp_path / "whole"), quiet=True)
    whole.run()
    xt.manual_seed(0)
    trainer = Trainer(options(data, tmp_path / "run"), quiet=True)
    trainer.stepper.read_every = 6
    gradients, found = trainer.stepper.gradients, []

    def bad_once(*given):
        loss, norm = gradients(*given)
        if trainer.step == 2 and not found:
            found.append([p.detach().cpu().numpy().copy() for p in trainer.model.parameters()])
            loss = loss * math.inf
        return loss, norm

    trainer.stepper.gradients = bad_once
    with pytest.raises(NonFiniteError, match="step 3: the loss is inf"):
        trainer.run()
    assert trainer.step == 2
    assert {s["step"] for s in trainer.optimizer.state_dict()["state"].values()} == {2}
    parameters = trainer.model.parameters()
    assert all(np.array_equal(p.detach().cpu(), b) for p, b in zip(parameters, found[0], strict=True))
    assert trainer.run().step == 8
    assert weights(tmp_path / "run" / "checkpoint-00000008") == weights(tmp_path / "whole" / "checkpoint-00000008")


def test_exploding_activations_are_named(tmp_path, data) -> None:
    trainer = Trainer(options(data, tmp_path / "run"), quiet=True)
    with xt.no_grad():
        dict(trainer.model.named_parameters())["model.layers.0.mlp.up_proj.weight"].fill_(3e38)
    with pytest.raises(NonFiniteError, match=r"step 1: .*model\.layers\.0\.mlp"):
        trainer.train_step()


def test_the_diagnosis_sees_the_documents_of_the_step(tmp_path, monkeypatch) -> None:
    """Without them a row's documents would see each other, and the first bad value might be elsewhere."""
    (tmp_path / "a.jsonl").write_text("\n".join(['{"text": "some words"}', '{"text": "more"}'] * 40))
    prepare(tmp_path / "a.jsonl", tmp_path / "a.tokens")
    trainer = Trainer(options(tmp_path / "a.tokens", tmp_path / "run", pack=True, grad_accum=2), quiet=True)
    batch: list[np.ndarray] = []
    next_batch, forward, seen = trainer.loader.next_batch, type(trainer.model).forward, []
    trainer.loader.next_batch = lambda: batch.extend(next_batch()) or tuple(batch)

    def watched(model, *args, documents=None, **more):
        if not xt.is_grad_enabled():
            seen.append(documents)
        return forward(model, *args, documents=documents, **more)

    monkeypatch.setattr(type(trainer.model), "forward", watched)
    monkeypatch.setattr(
        type(trainer.model), "loss", lambda self, *a, real=type(trainer.model).loss, **k: real(self, *a, **k) * math.nan
    )
    with pytest.raises(NonFiniteError, match="gradient of model.norm"):
        trainer.train_step()
    assert np.array_equal(np.concatenate([part.cpu().numpy() for part in seen]), batch[2])


@pytest.mark.parametrize("max_ranks", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_the_diagnosis_draws_what_the_step_has_drawn(tmp_path, data, monkeypatch, every: int, max_ranks: int) -> None:
    """With other numbers dropout would drop other values, and the first bad one might not come again."""
    given = {"max_ranks": max_ranks} if max_ranks else {}
    trainer = Trainer(options(data, tmp_path / "run", grad_accum=2, **given), quiet=True)
    trainer.stepper.read_every = every
    drawn: list[float] = []
    trainer.model.model.norm.register_forward_hook(lambda *_: drawn.append(xt.rand(1).item()))
    loss = type(trainer.model).loss
    monkeypatch.setattr(type(trainer.model), "loss", lambda self, *a, **k: loss(self, *a, **k) * math.nan)
    state = xt.get_rng_state()
    with pytest.raises(NonFiniteError, match="step 1: "):
        trainer.run()
    each = 2 * max(max_ranks, 1)  # draws of a step
    steps, again = drawn[: each * every], drawn[each * every :]
    assert len(set(steps)) == len(steps) and again and len(again) % each == 0
    assert all(again[at : at + each] == steps[:each] for at in range(0, len(again), each))
    assert xt.get_rng_state() == state


def test_float64_losses_that_are_read_late_keep_their_digits(tmp_path, data) -> None:
    """As ranks have them, whose tree adds in float64; beside losses of float32, too."""
    trainer = Trainer(options(data, tmp_path / "run"), quiet=True)
    trainer.stepper.read_every = 3
    queued = [trainer.stepper.queue() for _ in range(3)]
    exact = [1.0 + 2.0**-40, 2.0 + 2.0**-40]
    for step, value in zip(queued, exact):
        step.loss = xt.tensor(value, dtype=xt.float64, device=trainer.device)
    queued[1].norm = xt.tensor(exact[0], dtype=xt.float64, device=trainer.device)
    numbers = trainer.stepper.read(queued)
    assert [one["loss"] for one in numbers] == [*exact, queued[2].loss.item()]
    assert numbers[1]["grad_norm"] == exact[0]


@pytest.mark.parametrize("every", [1, 3])
def test_the_first_bad_gradient_is_named_though_clipping_has_spoilt_all(tmp_path, data, every: int) -> None:
    """A norm of NaN makes every gradient NaN: those that backward made are looked at."""

    class Spoils(xt.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * math.nan

    trainer = Trainer(options(data, tmp_path / "run", clip=1.0), quiet=True)
    trainer.stepper.read_every = every
    trainer.model.model.embed_tokens.register_forward_hook(lambda module, args, out: Spoils.apply(out))
    with pytest.raises(
        NonFiniteError, match=r"step 1: the norm of the gradients is nan; .*: gradient of model\.embed_to"
    ):
        trainer.run()
