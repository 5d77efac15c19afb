"""An error that ends a run saves the last finished step first, where it can be trusted, and is the one that is raised."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import HANGS, arguments, metrics, options, text_file, weights, xtrain

import xtrain as xt
from xtrain import _C, saving
from xtrain.errors import CheckpointError, DataError, NonFiniteError
from xtrain.saving.places import WRITTEN
from xtrain.train import Trainer
from xtrain.train.metrics import read_metrics
from xtrain.train.rundir import resolve_run_directory


@pytest.fixture
def data(tmp_path) -> Path:
    return text_file(tmp_path / "text.txt")


@pytest.fixture
def whole(tmp_path, data) -> Path:
    """The run of 8 steps that nothing disturbs, with a checkpoint of every step."""
    Trainer(options(data, tmp_path / "whole", save_every=1, keep=0), quiet=True).run()
    xt.manual_seed(0)
    return tmp_path / "whole"


def names(run: Path) -> list[str]:
    return [path.name for path in saving.find_checkpoints(run)]


def failing_at(trainer: Trainer, step: int, error: BaseException) -> None:
    """Makes the batch after `step` steps raise."""
    next_batch = trainer.loader.next_batch

    def fail():
        if trainer.step == step:
            raise error
        return next_batch()

    trainer.loader.next_batch = fail


def assert_goes_on(run: Path, whole: Path, step: int) -> None:
    """The newest checkpoint is that of `step`, and a resumed run ends as the undisturbed one did."""
    newest = saving.newest_valid(run, print)
    assert newest.name == f"emergency-checkpoint-{step:08d}"
    assert weights(newest) == weights(whole / saving.checkpoint_name(step))
    assert [record["step"] for record in metrics(run)] == list(range(1, step + 1))
    assert Trainer({"resume": str(run)}, quiet=True).run().step == 8
    assert weights(run / "checkpoint-00000008") == weights(whole / "checkpoint-00000008")
    assert [r["loss"] for r in metrics(run)] == [r["loss"] for r in metrics(whole)]


ERRORS = [MemoryError("none left"), DataError("data: gone"), RuntimeError("hook"), OSError(5, "EIO"), SystemExit(3)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("every", [1, 3])
def test_an_error_saves_the_last_finished_step(tmp_path, data, whole, capsys, every: int, error) -> None:
    run = tmp_path / "run"
    trainer = Trainer(options(data, run, save_every=4))
    trainer.stepper.read_every = every
    failing_at(trainer, 5, error)
    with pytest.raises(type(error)) as raised:
        trainer.run()
    assert raised.value is error
    path = run / "emergency-checkpoint-00000005"
    assert names(run) == [path.name, "checkpoint-00000004"]
    assert f"warning: an error ends the run; the state after step 5 is in {path}\n" in capsys.readouterr().out
    assert_goes_on(run, whole, 5)


def test_an_evaluation_that_fails(tmp_path, data, whole, monkeypatch) -> None:
    run = tmp_path / "run"
    trainer = Trainer(options(data, run, eval_every=3), quiet=True)

    def fail() -> None:
        raise xt.OutOfMemoryError("evaluate")

    trainer.evaluate = fail
    with pytest.raises(xt.OutOfMemoryError, match="evaluate"):
        trainer.run()
    assert_goes_on(run, whole, 3)


@pytest.mark.parametrize("at", [3, 8])
def test_a_resumed_run_makes_up_an_evaluation(tmp_path, data, at: int, capsys) -> None:
    """Of the step after which a signal or an error has ended the run: records are those of a run that nothing ended."""
    Trainer(options(data, tmp_path / "whole", eval_every=3, writers="csv"), quiet=True).run()
    wanted = [record.get("val_loss") for record in read_metrics(tmp_path / "whole" / "metrics.jsonl")]
    assert [number + 1 for number, value in enumerate(wanted) if value is not None] == [3, 6, 8]

    def signalled(state: Trainer) -> None:
        if state.step == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    for stopped in (True, False) if at == 3 else (False,):  # after the last step a signal stops nothing
        run = tmp_path / str(stopped)
        trainer = Trainer(options(data, run, eval_every=3, writers="csv"), quiet=True)
        evaluate = trainer.evaluate
        if stopped:
            trainer.callbacks.on_step_begin = signalled
            assert trainer.run().stopped == "SIGTERM"
        else:
            trainer.evaluate = lambda trainer=trainer, evaluate=evaluate: 1 / 0 if trainer.step == at else evaluate()
            with pytest.raises(ZeroDivisionError):
                trainer.run()
        assert "val_loss" not in read_metrics(run / "metrics.jsonl")[-1]
        calls: list[int] = []
        resumed = Trainer({"resume": str(run)})
        evaluate = resumed.evaluate
        resumed.evaluate = lambda resumed=resumed, evaluate=evaluate, calls=calls: (
            calls.append(resumed.step),
            evaluate(),
        )[1]
        capsys.readouterr()
        result = resumed.run()
        assert calls == [step for step in (3, 6, 8) if step >= at] and result.val_loss == wanted[-1]
        assert f"step {at}: validation " in capsys.readouterr().out
        found = read_metrics(run / "metrics.jsonl")
        assert [record.get("val_loss") for record in found] == wanted
        assert [record["step"] for record in found] == list(range(1, 9))
        lines = [line.split(",")[2] for line in (run / "metrics.csv").read_text().splitlines()[1:]]
        assert [float(text) if text else None for text in lines] == wanted
        calls.clear()
        assert Trainer({"resume": str(run), "steps": 9, "extend": True}, quiet=True).run().step == 9
        assert [record.get("val_loss") for record in read_metrics(run / "metrics.jsonl")][:8] == wanted


def test_what_is_no_evaluation_to_make_up(tmp_path, data) -> None:
    """A step that is none of an evaluation, one whose record is gone, and one that has its evaluation."""
    run = tmp_path / "run"
    Trainer(options(data, run, eval_every=3, save_every=1, keep=0, steps=4), quiet=True).run()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for step, kept in ((2, lines), (3, lines), (3, [*lines[:2], lines[3]])):
        (run / "metrics.jsonl").write_text("".join(kept))
        resumed = Trainer({"resume": str(run / f"checkpoint-{step:08d}")}, quiet=True)
        resumed.evaluate = lambda: 1 / 0
        assert resumed._missed() == {}, step


def test_the_last_step_is_saved_anew_by_a_resumed_run(tmp_path, data, whole) -> None:
    """Under its usual name, which others look for."""
    run = tmp_path / "run"
    trainer = Trainer(options(data, run), quiet=True)
    trainer.evaluate = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert names(run) == ["emergency-checkpoint-00000008"]
    assert Trainer({"resume": str(run)}, quiet=True).run().step == 8
    assert names(run) == ["checkpoint-00000008", "emergency-checkpoint-00000008"]
    assert weights(run / "checkpoint-00000008") == weights(whole / "checkpoint-00000008")


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_that_is_not_finite_saves_the_one_before_it(tmp_path, data, whole, every: int) -> None:
    run = tmp_path / "run"
    trainer = Trainer(options(data, run), quiet=True)
    trainer.stepper.read_every = every
    gradients = trainer.stepper.gradients
    trainer.stepper.gradients = lambda *given: (
        gradients(*given)[0] * (math.inf if trainer.step == 4 else 1.0), gradients(*given)[1]
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match="step 5: the loss is inf"):
        trainer.run()
    assert_goes_on(run, whole, 4)


@pytest.mark.parametrize("what", ["weight", "exp_avg", "exp_avg_sq"])
def test_nothing_is_saved_of_nan(tmp_path, data, capsys, what: str) -> None:
    run = tmp_path / "run"
    trainer = Trainer(options(data, run, save_every=3))
    weight = dict(trainer.model.named_parameters())["model.norm.weight"]
    next_batch = trainer.loader.next_batch

    def poisoned():
        if trainer.step == 5:
            with xt.no_grad():
                (weight if what == "weight" else trainer.optimizer.state[weight][what])[0] = math.nan
            if what != "weight":
                raise RuntimeError("hook")
        return next_batch()

    trainer.loader.next_batch = poisoned
    with pytest.raises((NonFiniteError, RuntimeError)):
        trainer.run()
    assert names(run) == ["checkpoint-00000003"]
    assert "the state after step 5 could not be saved: " in (said := capsys.readouterr().out)
    assert f"{'' if what == 'weight' else what + ' of '}parameter model.norm.weight" in said


def test_nothing_is_saved_between_two_steps(tmp_path, data, capsys) -> None:
    """An error inside the optimizer: some parameters may be of the next step."""
    run = tmp_path / "run"
    trainer = Trainer(options(data, run))
    step = trainer.optimizer.step

    def torn(*args, **kwargs) -> None:
        step(*args, **kwargs)
        if trainer.step == 4:
            raise TimeoutError("in the middle")  # as from a handler of SIGALRM

    trainer.optimizer.step = torn
    with pytest.raises(TimeoutError, match="in the middle"):
        trainer.run()
    text = f"{run}: step 5 was interrupted while it changed the parameters, which belong to no step now: make a new Trainer that resumes the run"
    assert (
        f"warning: an error ends the run, and the state after step 4 could not be saved: {text}\n"
        in capsys.readouterr().out
    )
    with pytest.raises(CheckpointError, match=f"^{text}$"):
        trainer.save()
    with pytest.raises(CheckpointError, match=f"^{text}$"):
        trainer.train_step()
    assert not names(run)


def test_memory_that_ends_before_the_first_moments_of_a_group(tmp_path, data, monkeypatch) -> None:
    """Of a group that has no state yet, while another has taken its first step."""
    trainer = Trainer(options(data, tmp_path / "run"), quiet=True)
    start = trainer.optimizer._start

    def full(parameter):
        if parameter.ndim < 2:
            raise xt.OutOfMemoryError("moments")
        return start(parameter)

    monkeypatch.setattr(trainer.optimizer, "_start", full)
    with pytest.raises(xt.OutOfMemoryError, match="moments"):
        trainer.train_step()
    assert not trainer.torn and trainer.step == 0


@pytest.mark.parametrize("step", [0, 4])
def test_memory_that_ends_between_launches_of_the_optimizer(tmp_path, data, monkeypatch, step: int) -> None:
    """One group is a step ahead of the other: parameters are torn, and nothing is saved."""
    run, adamw, calls = tmp_path / "run", _C.adamw_, []
    trainer = Trainer(options(data, run), quiet=True)

    def full(*args):
        calls.append(1)
        if len(calls) <= step:
            return adamw(*args)
        *lists, lrs, groups, guard = args
        some = int(groups.tolist()[0][0])
        adamw(*(tensors[:some] for tensors in lists), lrs[:1], groups[:1], guard)
        raise xt.OutOfMemoryError("launch")

    monkeypatch.setattr(_C, "adamw_", full)
    with pytest.raises(xt.OutOfMemoryError, match="launch"):
        trainer.run()
    assert trainer.torn and trainer.step == step and not names(run)


def test_memory_that_ends_in_the_averages(tmp_path, data, monkeypatch) -> None:
    """The parameters are a step ahead of their averages: the state is torn, and nothing is saved of it."""
    run = tmp_path / "run"
    trainer = Trainer(options(data, run, ema=0.9), quiet=True)
    update = trainer.ema.update

    def full(**given):
        if trainer.step == 4:
            raise xt.OutOfMemoryError("averages")
        return update(**given)

    monkeypatch.setattr(trainer.ema, "update", full)
    with pytest.raises(RuntimeError, match="^the averages of step 5 are lost: averages$"):
        trainer.run()
    assert trainer.torn and trainer.step == 4 and not names(run)
    with pytest.raises(CheckpointError, match="step 5 was interrupted while it changed the parameters"):
        trainer.train_step()


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("step", [0, 4])
def test_memory_that_ends_inside_the_optimizer(tmp_path, data, whole, monkeypatch, group: int, step: int) -> None:
    """All memory comes before the first launch: nothing has changed, and the run may go on."""
    run = tmp_path / "run"
    trainer = Trainer(options(data, run), quiet=True)
    if step == 0:
        assert not trainer.optimizer.state
    rate, failed = trainer.optimizer._rate, []

    def full(index: int, *rest):
        if (index, trainer.step) == (group, step) and not failed:
            failed.append(step)
            raise xt.OutOfMemoryError("rate")
        return rate(index, *rest)

    monkeypatch.setattr(trainer.optimizer, "_rate", full)
    with pytest.raises(xt.OutOfMemoryError, match="rate"):
        trainer.run()
    assert not trainer.torn and names(run) == ["emergency-checkpoint-00000004"] * (step == 4)
    assert trainer.run().step == 8
    assert weights(run / "checkpoint-00000008") == weights(whole / "checkpoint-00000008")


def test_nothing_is_saved_where_the_device_cannot_be_read(tmp_path, data) -> None:
    run = tmp_path / "run"
    trainer = Trainer(options(data, run), quiet=True)
    trainer.stepper.read_every = 3
    read = trainer.stepper.read

    def lost(steps):
        if trainer.step > 3:
            raise xt.CudaError("device lost")
        return read(steps)

    trainer.stepper.read = lost
    with pytest.raises(xt.CudaError, match="device lost"):
        trainer.run()
    assert trainer.step == 6 and not names(run)


@pytest.mark.parametrize("step", [0, 4])
def test_nothing_is_saved_twice(tmp_path, data, step: int) -> None:
    """At step 0 there is nothing to lose, and step 4 has its checkpoint."""
    trainer = Trainer(options(data, tmp_path / "run", save_every=4), quiet=True)
    failing_at(trainer, step, RuntimeError("hook"))
    with pytest.raises(RuntimeError, match="hook"):
        trainer.run()
    assert names(tmp_path / "run") == (["checkpoint-00000004"] if step else [])


@pytest.mark.parametrize("failure", [CheckpointError("no room"), MemoryError("none left"), ValueError("bug")])
def test_a_rescue_that_fails_is_a_warning_beside_the_error(tmp_path, data, monkeypatch, capsys, failure) -> None:
    def fail(*_, **__):
        raise failure

    trainer = Trainer(options(data, tmp_path / "run"))
    failing_at(trainer, 5, RuntimeError("hook"))
    monkeypatch.setattr(saving, "save_checkpoint", fail)
    with pytest.raises(RuntimeError, match="^hook$"):
        trainer.run()
    text = f"warning: an error ends the run, and the state after step 5 could not be saved: {failure}\n"
    assert text in capsys.readouterr().out


def test_a_last_save_that_fails_is_not_repeated(tmp_path, data, monkeypatch) -> None:
    tried = []

    def fail(path, *_, **__):
        tried.append(Path(path).name)
        raise CheckpointError("no room")

    monkeypatch.setattr(saving, "save_checkpoint", fail)
    with pytest.raises(CheckpointError, match="no room"):
        Trainer(options(data, tmp_path / "run"), quiet=True).run()
    assert tried == ["checkpoint-00000008"]


def test_the_command_shows_the_error_and_the_checkpoint(tmp_path) -> None:
    """Data that another process truncates in mid-run."""
    text, run = text_file(tmp_path / "text.txt", 200_000), tmp_path / "run"
    code = f"""
import os, sys
from xtrain import cli
from xtrain.data import Loader
next_batch, calls = Loader.next_batch, []
def truncating(self):
    calls.append(1)
    if len(calls) == 4:
        os.truncate({str(text)!r}, 100)
    return next_batch(self)
Loader.next_batch = truncating
sys.exit(cli.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "train", *arguments(options(text, run, steps=50, device="cpu"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 1
    assert done.stderr.startswith(f"xtrain: error: data: {text} was truncated") and done.stderr.count("\n") == 1
    assert f"is in {run}/emergency-checkpoint-0000000" in done.stdout


# ---- its name


def test_emergency_checkpoints_are_outside_keep(tmp_path, data) -> None:
    run = tmp_path / "run"
    trainer = Trainer(options(data, run, save_every=1, keep=2), quiet=True)
    for step in (1, 3):
        (run / saving.checkpoint_name(step, emergency=True)).mkdir(parents=True)
    trainer.train_step()
    for _ in range(4):
        trainer.train_step()
        trainer.save()
    assert names(run) == [
        "checkpoint-00000005", "checkpoint-00000004", "emergency-checkpoint-00000003", "emergency-checkpoint-00000001",
    ]  # fmt: skip


def test_a_damaged_one_is_passed_over(tmp_path, data) -> None:
    run = tmp_path / "run"
    trainer = Trainer(options(data, run, save_every=4), quiet=True)
    failing_at(trainer, 6, RuntimeError("hook"))
    with pytest.raises(RuntimeError):
        trainer.run()
    emergency = run / "emergency-checkpoint-00000006"
    told: list[str] = []
    assert resolve_run_directory(run, told.append) == emergency and not told
    (emergency / "model.safetensors").write_bytes(b"damaged")
    assert resolve_run_directory(run, told.append) == run / "checkpoint-00000004"
    assert len(told) == 1 and told[0].startswith(f"skipping a damaged checkpoint: {emergency}/model.safetensors ")
    assert Trainer({"resume": str(run)}, quiet=True).step == 4
    with pytest.raises(CheckpointError, match="emergency-checkpoint-00000006"):
        Trainer({"resume": str(emergency)}, quiet=True)


def test_a_resume_names_one_or_goes_back_behind_it(tmp_path, data, whole) -> None:
    run = tmp_path / "run"
    trainer = Trainer(options(data, run, save_every=4), quiet=True)
    failing_at(trainer, 6, RuntimeError("hook"))
    with pytest.raises(RuntimeError):
        trainer.run()
    assert Trainer({"resume": str(run / "emergency-checkpoint-00000006")}, quiet=True).step == 6
    earlier = Trainer({"resume": str(run / "checkpoint-00000004")}, quiet=True)
    assert earlier.run().step == 8
    assert weights(run / "checkpoint-00000008") == weights(whole / "checkpoint-00000008")
    left = sorted(path.name for path in run.iterdir() if "emergency" in path.name)
    assert left == ["set-aside-1-emergency-checkpoint-00000006"] and WRITTEN.fullmatch(left[0])


def test_of_two_of_one_step_the_usual_one_is_the_newest(tmp_path) -> None:
    for name in ("emergency-checkpoint-00000004", "checkpoint-00000004", "checkpoint-00000003"):
        (tmp_path / name).mkdir()
    assert names(tmp_path) == ["checkpoint-00000004", "emergency-checkpoint-00000004", "checkpoint-00000003"]


def test_what_a_kill_leaves_of_one_is_cleaned(tmp_path) -> None:
    (tmp_path / ".emergency-checkpoint-00000004.old-abcdefghij").mkdir()
    (tmp_path / ".emergency-checkpoint-00000005.tmp-abcdefghij").mkdir()
    (tmp_path / ".emergency-thesis.tmp-abcdefghij").mkdir()
    saving.clean_temporary(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".emergency-thesis.tmp-abcdefghij", "emergency-checkpoint-00000004"]


def test_a_run_may_go_on_after_its_rescue(tmp_path, data, whole) -> None:
    run = tmp_path / "run"
    trainer = Trainer(options(data, run), quiet=True)
    next_batch = trainer.loader.next_batch
    failing_at(trainer, 5, RuntimeError("hook"))
    with pytest.raises(RuntimeError):
        trainer.run()
    trainer.loader.next_batch = next_batch
    assert trainer.run().step == 8
    assert weights(run / "checkpoint-00000008") == weights(whole / "checkpoint-00000008")


def test_a_run_with_one_is_not_overwritten(tmp_path, data) -> None:
    (tmp_path / "run" / "emergency-checkpoint-00000005").mkdir(parents=True)
    done = xtrain("train", *arguments(options(data, tmp_path / "run")))
    assert done.returncode == 2 and "already holds a run" in done.stderr


# ---- signals

# `xtrain train` that sends itself the signals of its first word at its fourth step, each by its number.
SIGNALLED = """
import os, sys
from xtrain import cli
from xtrain.data import Loader
next_batch, calls = Loader.next_batch, []
def signalled(self):
    calls.append(1)
    if len(calls) == 4:
        for number in sys.argv[1].split(","):
            os.kill(os.getpid(), int(number))
    return next_batch(self)
Loader.next_batch = signalled
sys.exit(cli.main(sys.argv[2:]))
"""
HUP, INT, USR1, TERM = (int(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM))


@pytest.mark.parametrize(
    ("numbers", "status", "saved"),
    [
        ([HUP], 129, 4),
        ([HUP, HUP], 129, 4),
        ([USR1, USR1], 138, 4),
        ([TERM, HUP], 143, 4),
        ([HUP, TERM], 129, 4),
        ([HUP, INT, INT], 130, None),
        ([TERM, TERM], 143, None),
        ([INT, TERM], 143, None),
    ],
)
def test_signals(tmp_path, data, numbers, status: int, saved: int | None) -> None:
    """The first finishes the step and saves; a second Ctrl-C or SIGTERM saves nothing, also not in an emergency."""
    words = arguments(options(data, tmp_path / "run", steps=20, device="cpu"))
    command = [sys.executable, "-c", SIGNALLED, ",".join(map(str, numbers)), "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    assert names(tmp_path / "run") == ([saving.checkpoint_name(saved)] if saved else [])


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path, data) -> None:
    words = arguments(options(data, tmp_path / "run", device="cpu"))
    command = ["nohup", sys.executable, "-c", SIGNALLED, str(HUP), "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and names(tmp_path / "run") == ["checkpoint-00000008"], done.stderr


def test_values_of_a_rescued_model_are_those_of_memory(tmp_path, data) -> None:
    trainer = Trainer(options(data, tmp_path / "run"), quiet=True)
    failing_at(trainer, 3, RuntimeError("hook"))
    with pytest.raises(RuntimeError):
        trainer.run()
    loaded = saving.load_model(tmp_path / "run" / "emergency-checkpoint-00000003").state_dict()
    for name, value in trainer.model.state_dict().items():
        assert np.array_equal(loaded[name].cpu().numpy(), value.cpu().numpy())
