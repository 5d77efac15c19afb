"""Trouble beside a captured step, and bits of captured runs: test_graph.py runs these programs as it does those of
graph_programs.py.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from graph_programs import LENGTH, VOCAB, Team, batch, check_said, same
from graph_training import Run
from runs import text_file, weights

import xtrain as xt
from xtrain import saving
from xtrain.train import Trainer


def is_fake() -> bool:
    return "fake" in xt.cuda.get_device_name()


@contextlib.contextmanager
def full_device(room: int) -> Iterator[None]:
    """Inside, no more than about `room` bytes of the device can be had."""
    if is_fake():
        os.environ["FAKE_DEVICE_MOST"] = str(max(room, 256))  # a block, not all together
        try:
            yield
        finally:
            del os.environ["FAKE_DEVICE_MOST"]
        return
    spare = xt.empty(room, dtype=xt.uint8, device="cuda")
    filling, size = [], 1 << 40
    while size >= max(room // 16, 512):
        try:
            filling.append(xt.empty(size, dtype=xt.uint8, device="cuda"))
        except MemoryError:
            size //= 2
    del spare
    try:
        yield
    finally:
        filling.clear()


# ---- ids out of range ----------------------------------------------------------------------------------------------


def bad_ids(place: int, value: int) -> None:
    """An id (place 0) or a target (1) out of range in an eager run, in the step that is captured, and in a replay: one
    sentence, once, when a value is read. The step goes on without that element, with the same bits eagerly and by a
    graph. Where a guard undoes it, the steps behind it are those of a run without it.
    """
    op = ("embedding: id", r"(linear_)?cross_entropy: targets?")[place]
    pattern = rf"^IndexError: {op} must be in \[0, {VOCAB}\).*, got {value} at position {LENGTH + 3}$"
    for undone in (False, True):
        calm, eager, captured = Team(), Team(guarded=undone), Team(guarded=undone)
        graph = captured.graph()
        found: list[list[float]] = [[], []]
        for i in range(9):
            bad = i in (0, 2, 6)
            if undone and not bad:
                found[0] += calm.run(calm.step, 1, i)
            for team, step in ((eager, eager.step), (captured, graph)):
                numbers = [] if undone and team is eager else found[team is captured]
                if not bad:
                    numbers += team.run(step, 1, i)
                    continue
                inputs = batch(i)
                inputs[place][1, 3] = value
                if team.guard is not None:
                    team.guard.fill_(math.nan)
                results = step(*inputs)
                check_said(results["loss"].item, pattern)
                values = [results[name].item() for name in ("loss", "norm")]
                assert all(map(math.isfinite, values)), values
                if team.guard is not None:
                    team.guard.fill_(0)
                else:
                    numbers += values
            assert graph.captured == (i >= 2)
        assert captured.calls == 3 and found[0] == found[1]
        for other in (eager, calm) if undone else (eager,):
            assert same(other.state(), captured.state())


def checkpoints(run: Run) -> list[str]:
    return [path.name for path in saving.find_checkpoints(run.out)]


def train_bad_ids(folder: str) -> None:
    """Ids that come from behind the loader's check, in an eager step, in the captured one and in a replay. A captured
    run ends when they are read, as an eager one does: with a sentence and with its checkpoint. It may go on, or be
    resumed.
    """
    for at, place, value in ((0, 0, 256), (2, 1, 300), (7, 0, -1), (7, 1, -5)):
        runs = [Run(folder, f"{name}{at}{value}", name == "captured") for name in ("eager", "captured")]
        for run in runs:
            trainer, next_batch, given = run.trainer, run.trainer.loader.next_batch, []

            def spoilt(trainer=trainer, next_batch=next_batch, given=given, at=at, place=place, value=value):
                arrays = tuple(array.copy() for array in next_batch())
                if trainer.step == at and not given:
                    given.append(0)
                    arrays[place][1, 3] = value
                return arrays

            trainer.loader.next_batch = spoilt
            check_said(trainer.run, rf"^IndexError: .* must be in \[0, 256\).*, got {value} at position 19$")
            assert trainer.step == 10 and not trainer.torn and checkpoints(run) == ["emergency-checkpoint-00000010"]
            assert [line["step"] for line in run.records()] == [*range(1, 11)]
        assert runs[1].graph.captured and not runs[1].lines, runs[1].lines
        assert runs[0].records() == runs[1].records() and same(runs[0].state(), runs[1].state())
        runs[0].trainer.run()
        if at == 7:
            runs[1].trainer = Trainer({"resume": str(runs[1].out), "graph": True}, quiet=True)
        runs[1].trainer.run()
        assert runs[1].graph.captured and runs[1].trainer.step == 20
        assert runs[0].records() == runs[1].records() and same(runs[0].state(), runs[1].state())


def train_bad_file(folder: str, value: int) -> None:
    """A token file that gets an id out of range while a captured run reads it: the loader says so before the device has
    seen it, and the run stops with a checkpoint of all steps before. It goes on to the end of a calm run.
    """
    path = Path(folder) / "tokens.npy"
    tokens = np.random.default_rng(0).integers(0, 61, 4000)
    np.save(path, tokens)
    calm, run = Run(folder, "calm", False, path, log_every=5), Run(folder, "run", True, path, log_every=5)
    calm.trainer.run()
    next_batch = run.trainer.loader.next_batch

    def spoilt():
        if run.trainer.step == 7:
            with path.open("r+b") as file:
                file.seek(-tokens.nbytes, os.SEEK_END)
                file.write(np.full_like(tokens, value).tobytes())
        return next_batch()

    run.trainer.loader.next_batch = spoilt
    check_said(run.trainer.run, rf"^DataError: data: token ids of .* must be in \[0, 256\), got {value} at position ")
    assert run.trainer.step == 7 and checkpoints(run) == ["emergency-checkpoint-00000007"] and run.graph.captured
    np.save(path, tokens)
    run.trainer.loader.next_batch = next_batch
    run.trainer.run()
    assert run.graph.captured and not run.lines, run.lines
    assert run.records() == calm.records() and same(run.state(), calm.state())


# ---- memory that ends after a capture ------------------------------------------------------------------------------


NO_ROOM = r"^OutOfMemoryError: (\w+: )?out of memory on cuda:0: \d+\.\d+ MiB (of working memory )?asked"


def no_room_beside() -> None:
    """Eager work beside a captured step that does not fit is an error; replays need no memory, and go on."""
    eager, captured = Team(), Team()
    graph = captured.graph()
    numbers = captured.run(graph, 5)
    assert graph.captured
    ids, targets = (xt.zeros((4096, LENGTH), dtype=xt.int64, device="cuda") for _ in range(2))
    for i in (5, 6):
        with full_device(1 << 20):
            with xt.no_grad():
                check_said(lambda: captured.model.loss(ids, targets).item(), NO_ROOM)
            numbers += captured.run(graph, 1, i)
    with xt.no_grad():
        assert math.isfinite(captured.model.loss(ids, targets).item())
    numbers += captured.run(graph, 2, 7)
    assert numbers == eager.run(eager.step, 9) and same(eager.state(), captured.state())


def large_steps(folder: str, **given) -> dict:
    """Options whose steps take MiBs of a GPU; small ones for the fake device."""
    text_file(Path(folder) / "text.txt", 400_000)
    return {**given, **({} if is_fake() else dict(batch_size=64, seq_len=256, eval_tokens=16384))}


def train_no_room_to_evaluate(folder: str, **changes) -> None:
    """An evaluation that does not fit beside a captured run ends it, with a checkpoint; the run can go on."""
    given = large_steps(folder, steps=15, eval_every=5, **changes)
    calm, run = (Run(folder, name, True, **given) for name in ("calm", "run"))
    calm.trainer.run()
    trainer, evaluate, tried = run.trainer, run.trainer.evaluate, []
    # The checkpoint looks for NaN; a driver loads a kernel at its first use, which takes memory outside ours.
    xt._C.stats(next(iter(trainer.model.parameters())).detach())
    with contextlib.ExitStack() as crowd:

        def crowded() -> dict[str, float]:
            if trainer.step == 10 and not tried:
                tried.append(0)
                crowd.enter_context(full_device(1024 if is_fake() else 1 << 20))
            return evaluate()

        vars(trainer)["evaluate"] = crowded
        check_said(trainer.run, NO_ROOM)
        assert checkpoints(run) == ["emergency-checkpoint-00000010"] and trainer.step == 10 and not trainer.torn
    trainer.run()
    assert run.graph.captured and not run.lines and checkpoints(run)[0] == "checkpoint-00000015", run.lines
    assert [line["loss"] for line in run.records()] == [line["loss"] for line in calm.records()]
    assert same(run.state(), calm.state())


def train_no_room_to_sample(folder: str) -> None:
    """A sample that does not fit beside a captured run is one warning, and training goes on."""
    given = large_steps(folder, steps=15, eval_every=5, sample__tokens=8)
    calm, run = (Run(folder, name, True, **given) for name in ("calm", "run"))
    calm.trainer.run()
    trainer, sample, said = run.trainer, run.trainer.sample, []
    vars(trainer.report)["warn"] = said.append

    def crowded() -> str | None:
        with full_device(0) if trainer.step == 10 else contextlib.nullcontext():
            return sample()

    vars(trainer)["sample"] = crowded
    trainer.run()
    assert len(said) == 1 and said[0].startswith("a sample failed, and training goes on: OutOfMemoryError: "), said
    assert run.graph.captured and not run.lines, run.lines
    assert run.records() == calm.records() and same(run.state(), calm.state())


# ---- bits of runs --------------------------------------------------------------------------------------------------


def train_bits(folder: str) -> None:
    """100 captured steps in bfloat16, twice, and stopped and resumed: the same bytes of the checkpoint."""
    sizes = {} if is_fake() else dict(
        model__hidden_size=256, model__intermediate_size=704, model__num_hidden_layers=2, model__num_attention_heads=4,
        model__num_key_value_heads=2, model__head_dim=64, batch_size=8, seq_len=256,
    )  # fmt: skip
    given = dict(precision="bfloat16", steps=100, eval_every=30, **sizes)
    one, two, parts = (Run(folder, name, True, **given) for name in ("one", "two", "parts"))
    one.trainer.run(), two.trainer.run()
    for _ in range(37):
        parts.trainer.train_step()
    parts.trainer.save()
    assert all(run.graph.captured and not run.lines for run in (one, two, parts))
    xt.manual_seed(5)
    resumed = Trainer({"resume": str(parts.out), "graph": True}, quiet=True)
    assert resumed.step == 37
    resumed.run()
    assert resumed.stepper._graph is not None and resumed.stepper._graph.captured
    found = [weights(run.out / "checkpoint-00000100") for run in (one, two, parts)]
    assert found[0] and found[0] == found[1] and found[0] == found[2]
    assert weights(parts.out / "checkpoint-00000037") != found[0]
