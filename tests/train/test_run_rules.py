"""Rules of a run that its last loss does not show: which steps, which rates, what is kept, who is told."""

from __future__ import annotations

import math
import os
import signal

import numpy as np
import pytest
from runs import metrics, options, text_file

import xtrain as xt
from xtrain import _C, optim, saving
from xtrain.errors import CheckpointError, ConfigError, NonFiniteError
from xtrain.train import Trainer, loop
from xtrain.train.report import Report
from xtrain.train.rundir import RunLock
from xtrain.train.stop import StopSignals

pytestmark = pytest.mark.on_cpu


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return text_file(tmp_path_factory.mktemp("data") / "text.txt")


def made(data, out, **changes) -> Trainer:
    return Trainer(options(data, out, device="cpu", **changes), quiet=True)


# ---- steps


def test_a_signal_just_before_the_first_step(tmp_path, data, monkeypatch) -> None:
    """Between the question whether a step is wanted and the step, which is made then."""
    asked = loop._Loop._wants_step

    def wants_step(self) -> bool:
        found = asked(self)
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(loop._Loop, "_wants_step", wants_step)
    result = made(data, tmp_path / "run").run()
    assert (result.stopped, result.step) == ("SIGINT", 1) and math.isfinite(result.loss)


def test_pieces_weigh_as_their_tokens(tmp_path, data) -> None:
    """Also where one piece has a single token that counts: loss and gradient are those of the whole batch."""
    found = []
    for pieces in (1, 4):
        trainer = made(data, tmp_path / f"run{pieces}", grad_accum=pieces, clip=0.0)
        real = trainer.loader.next_batch

        def batch(real=real):
            ids, targets = real()
            targets[1, 1:], targets[2] = -100, -100
            return ids, targets

        trainer.loader.next_batch = batch
        numbers = trainer.train_step()
        found.append((numbers["loss"], numbers["grad_norm"]))
    assert np.allclose(found[0], found[1], rtol=1e-5) and found[0][0] > 3


def test_rates_of_a_run_are_those_of_its_schedule(tmp_path, data) -> None:
    made(data, tmp_path / "run", optim__lr=0.01, optim__final_lr=0.001, optim__warmup=3).run()
    want = [optim.lr_schedule("cosine", s, 3, 8, 0.01, 0.001) for s in range(8)]
    assert np.allclose([m["lr"] for m in metrics(tmp_path / "run")], want, rtol=1e-12)


def test_vectors_are_not_decayed(tmp_path, data) -> None:
    trainer = made(data, tmp_path / "run", optim__weight_decay=0.25, optim__beta1=0.8, optim__beta2=0.97)
    groups = trainer.optimizer.param_groups
    assert [g["weight_decay"] for g in groups] == [0.25, 0.0] and all(g["betas"] == (0.8, 0.97) for g in groups)
    assert all(p.ndim >= 2 for p in groups[0]["params"]) and all(p.ndim == 1 for p in groups[1]["params"])


@pytest.mark.parametrize("bad", ["loss", "norm"])
def test_a_bad_step_changes_nothing(tmp_path, data, bad: str, monkeypatch) -> None:
    trainer = made(data, tmp_path / "run")
    trainer.train_step()
    before = [p.detach().tolist() for p in trainer.model.parameters()]
    real = type(trainer.stepper).gradients

    def gradients(self, pieces, total):
        loss, norm = real(self, pieces, total)
        return (loss * math.inf, norm) if bad == "loss" else (loss, norm * math.inf)

    monkeypatch.setattr(type(trainer.stepper), "gradients", gradients)
    with pytest.raises(
        NonFiniteError, match="the loss is inf" if bad == "loss" else "the norm of the gradients is inf"
    ):
        trainer.train_step()
    assert trainer.step == 1 and [p.detach().tolist() for p in trainer.model.parameters()] == before


def test_a_step_that_failed_gives_back_its_random_numbers(tmp_path, data, monkeypatch) -> None:
    """Of a model that draws some in its forward."""
    trainer = made(data, tmp_path / "run")
    position, state = trainer.loader.state_dict(), _C.get_rng_state()

    def loss(*args, **options):
        xt.rand(3)
        raise RuntimeError("no")

    monkeypatch.setattr(trainer.model, "loss", loss)
    with pytest.raises(RuntimeError, match="no"):
        trainer.train_step()
    assert trainer.loader.state_dict() == position and _C.get_rng_state() == state


# ---- when


def test_evaluations_and_saves_are_when_they_should_be(tmp_path, data) -> None:
    made(data, tmp_path / "run", eval_every=3, save_every=2, keep=0).run()
    assert [m["step"] for m in metrics(tmp_path / "run") if "val_loss" in m] == [3, 6, 8]
    assert [saving.checkpoint_step(p) for p in saving.find_checkpoints(tmp_path / "run")] == [8, 6, 4, 2]


def test_the_end_of_a_run_is_saved(tmp_path, data) -> None:
    """Also where another checkpoint has been written before."""
    made(data, tmp_path / "run", save_every=5, keep=0).run()
    assert [saving.checkpoint_step(p) for p in saving.find_checkpoints(tmp_path / "run")] == [8, 5]


def test_as_many_checkpoints_as_keep_says(tmp_path, data) -> None:
    for keep in (1, 2, 3):
        out = tmp_path / f"run{keep}"
        made(data, out, save_every=1, keep=keep).run()
        assert [saving.checkpoint_step(p) for p in saving.find_checkpoints(out)] == [8, 7, 6][:keep]


def test_later_checkpoints_belong_to_somebody_else(tmp_path, data) -> None:
    trainer = made(data, tmp_path / "run", keep=1)
    trainer.train_step()
    later = tmp_path / "run" / "checkpoint-00000005"
    saving.save_checkpoint(later, trainer.model, trainer.optimizer)
    trainer.save()
    assert later.is_dir() and (tmp_path / "run" / "checkpoint-00000001").is_dir()


# ---- parts of a run


def resumed(out, **changes) -> Trainer:
    return Trainer({"resume": str(out), **{k.replace("__", "."): v for k, v in changes.items()}}, quiet=True)


def test_a_resumed_run_draws_the_next_random_numbers(tmp_path, data) -> None:
    trainer = made(data, tmp_path / "run", steps=4)
    xt.rand(3), xt.rand(3)
    state = _C.get_rng_state()
    trainer.run()
    _C.manual_seed(99)
    resumed(tmp_path / "run")
    assert _C.get_rng_state() == state and state[1] >= 2


def test_seconds_add_up_over_the_parts_of_a_run(tmp_path, data) -> None:
    made(data, tmp_path / "run").run()
    trainer = resumed(tmp_path / "run", steps=9, extend=True)
    trainer.elapsed = 1000.0
    assert trainer.run().seconds > 1000.0 and metrics(tmp_path / "run")[-1]["time"] > 1000.0


def test_fewer_steps_than_the_checkpoint_are_refused(tmp_path, data) -> None:
    made(data, tmp_path / "run").run()
    for steps in (7, 3):
        with pytest.raises(ConfigError, match=f"steps must be at least 8, where the checkpoint stands, got {steps}"):
            resumed(tmp_path / "run", steps=steps, extend=True)


def test_records_of_a_resumed_run_follow_each_other(tmp_path, data) -> None:
    """Those behind the checkpoint are written again, once."""
    made(data, tmp_path / "run", save_every=4, keep=0).run()
    resumed(tmp_path / "run" / "checkpoint-00000004").run()
    assert [m["step"] for m in metrics(tmp_path / "run")] == list(range(1, 9))


def test_a_run_removes_what_a_kill_has_left(tmp_path, data) -> None:
    made(data, tmp_path / "run").run()
    left = tmp_path / "run" / ".checkpoint-00000004.tmp-abcdefghij"
    left.mkdir()
    (tmp_path / "run" / ".metrics.jsonl.tmp-abcdefghij").write_text("x")
    resumed(tmp_path / "run", steps=9, extend=True).run()
    assert not [p for p in (tmp_path / "run").iterdir() if "tmp-" in p.name]


def test_a_run_is_locked(tmp_path) -> None:
    with (
        RunLock(tmp_path),
        pytest.raises(ConfigError, match="is in use by another training process"),
        RunLock(tmp_path),
    ):
        pass
    with RunLock(tmp_path):
        pass


def test_the_name_of_the_metrics_is_flushed(tmp_path, monkeypatch) -> None:
    from xtrain.train.metrics import Metrics

    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    opened = Metrics(tmp_path, print, keep_until=0)
    assert str(tmp_path) in flushed
    opened.close()


# ---- evaluation


def test_the_validation_loss_is_of_all_windows(tmp_path, data) -> None:
    """Ten windows in batches of four: the last two count, too."""
    trainer = made(data, tmp_path / "run", eval_tokens=160)
    assert trainer.val.shape == (10, 17)
    each = [trainer.model.loss(xt.tensor(w[None, :-1]), xt.tensor(w[None, 1:])).item() for w in trainer.val]
    assert abs(trainer.evaluate()["val_loss"] - np.mean(each)) < 1e-4


def test_bits_per_byte(tmp_path, data) -> None:
    trainer = made(data, tmp_path / "run")
    trainer.corpus.bytes_per_token = 4.0
    values = trainer.evaluate()
    assert abs(values["val_bpb"] - values["val_loss"] / math.log(2) / 4.0) < 1e-9


# ---- signals and reports


def test_handlers_are_as_before_a_run() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(n) for n in numbers]
    with StopSignals(quiet=True) as stop:
        assert [signal.getsignal(n) for n in numbers] == [stop._handle] * 4
    assert [signal.getsignal(n) for n in numbers] == before


def test_a_second_signal_saves_nothing(tmp_path, data) -> None:
    """The first asks for an orderly end; SIGTERM as the second ends with its own status."""
    for second, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        trainer = made(data, tmp_path / second.name)
        real = trainer.stepper._queue

        def queue(*args, trainer=trainer, real=real, second=second):
            if trainer.step == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(second)
            return real(*args)

        trainer.stepper._queue = queue
        with pytest.raises(error) as ended:
            trainer.run()
        assert saving.find_checkpoints(tmp_path / second.name) == []
        assert error is KeyboardInterrupt or ended.value.code == 143


def test_hangups_never_stop_at_once(tmp_path, data) -> None:
    with StopSignals(quiet=True) as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == "SIGHUP" and not stop.at_once
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_program_keeps_its_own_sigusr1() -> None:
    for mine in (signal.SIG_IGN, lambda number, frame: None):
        before = signal.signal(signal.SIGUSR1, mine)
        try:
            with StopSignals(quiet=True) as stop:
                assert signal.getsignal(signal.SIGUSR1) == mine
                signal.raise_signal(signal.SIGUSR1)
            assert stop.received is None
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_signals_of_several_processes_are_agreed_upon(monkeypatch) -> None:
    """Those within a second or of another kind are what an engine passes on of one; nobody stops before all know why."""
    now = [100.0]
    monkeypatch.setattr("xtrain.train.stop.time.monotonic", lambda: now[0])
    for asks in (False, True):
        with StopSignals(quiet=True, agree=lambda why: why) as stop:
            if asks:
                stop.ask("a callback")
            else:
                for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                    signal.raise_signal(number)
            assert stop.received is None and not stop.at_once
            stop.join()
            assert stop.received == ("a callback" if asks else "SIGTERM")
            now[0] += 1.1
            if not asks:
                with pytest.raises(SystemExit):
                    signal.raise_signal(signal.SIGTERM)


def test_signals_of_different_kinds_are_one_where_others_must_agree(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("xtrain.train.stop.time.monotonic", lambda: now[0])
    with StopSignals(quiet=True, agree=lambda why: why) as stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.raise_signal(number)
            now[0] += 60.0
        assert not stop.at_once
        stop.join()
        assert stop.received == "SIGTERM"


def test_what_a_signal_says(capfd, monkeypatch) -> None:
    """Unless it is quiet; where nobody can read it any more, nothing happens."""
    said = "\nSIGINT: finishing this step, then saving; once more stops at once\n"
    for quiet, text in ((False, said), (True, "")):
        with StopSignals(quiet=quiet) as stop:
            signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == text and stop.received == "SIGINT"

    def gone(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with StopSignals() as stop, monkeypatch.context() as patch:
        patch.setattr("xtrain.train.stop.os.write", gone)
        signal.raise_signal(signal.SIGINT)
    assert stop.received == "SIGINT"


def test_what_fails_is_told_once(capsys) -> None:
    report = Report(quiet=False)
    for _ in range(3):
        report.failed("a sample", ValueError("two\nlines"))
    report.failed("another", ValueError(""))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "warning: a sample failed, and training goes on: ValueError: two lines",
        "warning: another failed, and training goes on: ValueError: no message",
    ]


def test_an_interrupted_optimizer_leaves_nothing_to_save(tmp_path, data) -> None:
    """Ctrl-C between two groups: the parameters belong to no step."""
    trainer = made(data, tmp_path / "run")
    trainer.train_step()

    def step(guard=None) -> None:
        raise KeyboardInterrupt

    trainer.optimizer.step = step
    with pytest.raises(KeyboardInterrupt):
        trainer.train_step()
    for call in (trainer.save, trainer.train_step):
        with pytest.raises(CheckpointError, match="step 2 was interrupted while it changed the parameters"):
            call()


def test_records_that_cannot_be_written_are_told_once(tmp_path, monkeypatch) -> None:
    """A full disk costs records, not the run."""
    from xtrain.train.metrics import Metrics

    told = []
    opened = Metrics(tmp_path, told.append, keep_until=0)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for _ in range(3):
        opened.write({"step": 1})
        opened.sync()
    opened.close()
    assert told == [f"{tmp_path / 'metrics.jsonl'} cannot be written: No space left on device; training goes on"]
