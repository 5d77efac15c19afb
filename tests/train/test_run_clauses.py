"""What reports, records, run directories and samples promise, a test for each clause."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import options, text_file

from xtrain import cuda, saving
from xtrain.errors import CheckpointError, ConfigError, DataError
from xtrain.tokenizers import ByteTokenizer
from xtrain.train import Trainer, checkpoints, evaluate, loop, parts, plot, progress, resume, rundir, train
from xtrain.train.callbacks import Callback, CallbackList
from xtrain.train.checkpoints import Saver
from xtrain.train.config import GPU_RUN, TrainConfig
from xtrain.train.metrics import Metrics, read_metrics
from xtrain.train.report import Report

pytestmark = pytest.mark.on_cpu


# ---- what is shown


def test_an_evaluation_is_shown_in_bits_where_bytes_are_known(capsys) -> None:
    report = Report(False)
    report.evaluation(3, {"val_loss": 1.25, "val_bpb": 0.5})
    report.evaluation(4, {"val_loss": 1.25})
    assert (
        capsys.readouterr().out == "step 3: validation 0.5000 bits per byte\nstep 4: validation 1.2500 nats per token\n"
    )


def test_samples_are_indented_and_none_is_nothing(capsys) -> None:
    report = Report(False)
    report.sample("a\nb")
    report.sample(None)
    report.sample("")
    Report(True).sample("quiet")
    assert capsys.readouterr().out == "    | a\n    | b\n"


def test_other_ranks_say_their_warnings_alone(capsys) -> None:
    for quiet in (False, True):
        report = Report(quiet, rank=1)
        report.say("a line")
        report.warn("it is late")
        assert capsys.readouterr().out == ("" if quiet else "[rank 1] warning: it is late\n")


@pytest.mark.on_cpu
def test_what_is_trained_is_told(capsys, tmp_path) -> None:
    """What of it is frozen; and where a directory without weights makes the model, that it is drawn: in a new run."""
    text = text_file(tmp_path / "text.txt")
    lines = []
    for changes in ({}, {"freeze": "*embed*"}):
        trainer = Trainer(options(text, tmp_path / f"run{len(lines)}", **changes), quiet=True)
        Report(False).introduce(trainer)
        lines.append(capsys.readouterr().out.splitlines()[0])
    assert "trained" not in lines[0] and " M parameters, 0.00 M of them trained, float32, " in lines[1]
    (tmp_path / "empty").mkdir()
    trainer.config.model.preset = str(tmp_path / "empty")
    for step, drawn in ((0, True), (3, False)):
        trainer.step = step
        Report(False).introduce(trainer)
        out = capsys.readouterr().out
        assert (", drawn, as it holds no weights, " in out, "from step 3 to step" in out) == (drawn, not drawn)


def state(**changes) -> SimpleNamespace:
    settings = {
        "config": SimpleNamespace(plot=True),
        "directory": Path("runs/x"),
        "corpus": SimpleNamespace(bytes_per_token=1.0),
        "loader": None,
        "step": 5,
        "elapsed": 61.0,
    }
    return SimpleNamespace(**{**settings, **changes})


def test_how_a_run_ends_is_told(capsys, monkeypatch) -> None:
    """A picture that cannot be drawn for want of a package is a hint, for want of anything else a warning."""

    def missing(*_):
        raise ImportError("no matplotlib")

    def full(*_):
        raise OSError(28, "No space left on device", "loss.png")

    monkeypatch.setattr(plot, "plot_loss", missing)
    Report(False).finish(state(), None, None)
    assert capsys.readouterr().out == f"{plot.HINT}\n5 steps in 1:01; the run is in runs/x\n"
    asked: list = []
    monkeypatch.setattr(plot, "plot_loss", lambda *given: asked.append(given))
    Report(False).finish(state(corpus=SimpleNamespace(bytes_per_token=2.5)), None, None)
    assert asked == [(Path("runs/x"), 2.5)] and capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr(plot, "plot_loss", full)
    Report(False).finish(state(), "text", "SIGINT")
    assert capsys.readouterr().out == (
        "warning: loss.png could not be drawn: loss.png: No space left on device\nsample:\n    | text\n"
        "stopped by SIGINT after step 5; continue with: xtrain train --resume runs/x\n5 steps in 1:01; the run is in runs/x\n"
    )
    Report(False).finish(state(config=SimpleNamespace(plot=False)), None, None)
    assert capsys.readouterr().out == "5 steps in 1:01; the run is in runs/x\n"


def test_durations() -> None:
    for seconds, text in (
        (0, "0:00"),
        (0.5, "0:01"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (7261, "2:01:01"),
    ):
        assert progress.clock(seconds) == text


def test_lines_of_a_run_that_nobody_watches(capsys, monkeypatch) -> None:
    """The first step, every `every`-th, and the last; nothing when quiet. A step of this process takes 2 s."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for quiet in (False, True):
        shown = progress.Progress(12, 3, every=5, quiet=quiet)
        for step in range(4, 13):
            now[0] += 2.0
            shown.update(step, 1.5, 100.0)
        shown.message("a line")
        shown.close()
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[1] for line in lines[:-1]] == ([] if quiet else ["4/12", "5/12", "10/12", "12/12"])
        assert [line.split()[-1] for line in lines[:-1]] == ([] if quiet else ["0:16", "0:14", "0:04", "0:00"])
        assert lines[-1:] == ([] if quiet else ["a line"])


def test_what_the_encoding_of_the_output_lacks_is_spelled(monkeypatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(progress.sys, "stdout", stream)
    progress.say("loss \u2193 and \u00e9")
    assert stream.buffer.getvalue() == b"loss \\u2193 and \\xe9\n"


def test_the_bar_stands_where_the_run_does(monkeypatch) -> None:
    """Steps may come several at a time, and a resumed run begins behind its first."""
    import tqdm

    made: list[dict] = []
    moves: list[int] = []
    calls: list[str] = []

    class Bar:
        disable = False

        def __init__(self, **options) -> None:
            made.append(options)

        def __getattr__(self, name: str):
            calls.append(name)
            return lambda *values, **_: moves.extend(values) if name == "update" else None

    terminal = SimpleNamespace(isatty=lambda: True, fileno=lambda: 2)
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda number: (80, 24))
    monkeypatch.setattr(tqdm, "tqdm", Bar)
    shown = progress.Progress(12, 3)
    for step in (4, 9, 12):
        shown.update(step, 1.5, 100.0)
    calls.clear()
    shown.message("a line")
    shown.close()
    assert calls == ["clear", "refresh", "close"]
    broken = progress.Progress(5)
    bar = broken._bar
    monkeypatch.setattr(Bar, "update", lambda *_: math.inf // 0, raising=False)
    broken.update(1, 1.5, 100.0)
    assert broken._bar is None and bar.disable, "or it would draw once more where it is deleted"
    assert moves == [1, 5, 3] and (made[0]["total"], made[0]["initial"]) == (12, 3)


def test_tokens_a_second_are_of_the_last_steps_without_evaluations(tmp_path, monkeypatch) -> None:
    """The last evaluation shows no sample: the end of the run does."""
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))
    speed = loop._Speed(10)
    for step in range(40):
        speed.start()
        now[0] += 100.0 if step < 20 else 2.0
        rate = speed.stop(1)
    assert rate == 5.0
    shows: list[bool] = []

    def slowly(show_sample: bool) -> dict[str, float]:
        now[0] += 1000.0
        shows.append(show_sample)
        return {"val_loss": 1.0}

    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run", steps=3, eval_every=1), quiet=True)
    monkeypatch.setattr(trainer, "_evaluate", slowly)
    trainer.run()
    assert shows == [True, True, False]
    assert all(one["tokens_per_second"] > 1e9 for one in read_metrics(tmp_path / "run" / "metrics.jsonl"))


# ---- records


def test_records_are_in_the_file_at_once(tmp_path) -> None:
    metrics = Metrics(tmp_path, lambda text: pytest.fail(text), 0)
    metrics.write({"step": 1, "loss": 0.5, "bad": math.nan})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5, "bad": null}\n'
    metrics.close()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["loss"] == 0.5 and math.isnan(record["bad"])


def test_lines_that_are_no_record(tmp_path) -> None:
    lines = [
        '{"step": true}',
        '{"step": 1.0}',
        '{"step": "1"}',
        "[1]",
        "3",
        '{"loss": 1}',
        '{"step": 2}',
        '{"step": 3',
        "",
        '{"step": 4}',
    ]
    (tmp_path / "m").write_text("\n".join(lines))
    assert read_metrics(tmp_path / "m") == [{"step": 2}, {"step": 4}]


# ---- directories


def test_names_of_runs(tmp_path, monkeypatch) -> None:
    """A name is no path; a run without one gets the number behind the largest."""
    monkeypatch.chdir(tmp_path)
    for name in ("a/b", "..", ".", "/x"):
        with pytest.raises(ConfigError, match="name must not hold a path, got"):
            rundir.plan({"name": name, "device": "cpu"}, pytest.fail)
    for number in (1, 4):
        os.makedirs(tmp_path / "runs" / f"tiny-{number}")
    os.makedirs(tmp_path / "runs" / "tiny-x")
    config, checkpoint, _ = rundir.plan({"model.preset": "tiny", "device": "cpu"}, pytest.fail)
    assert (config.out, config.name, checkpoint) == ("runs/tiny-5", "tiny-5", None)
    config, _, _ = rundir.plan({"name": "mine", "device": "cpu"}, pytest.fail)
    assert (config.out, config.name) == ("runs/mine", "mine")
    model = tmp_path / "a[b]*"  # a directory may have any name
    for path in (model, tmp_path / "runs" / "a[b]*-2", tmp_path / "runs" / "ab-7"):
        os.makedirs(path)
    config, _, _ = rundir.plan({"model.preset": os.fspath(model), "device": "cpu"}, pytest.fail)
    assert config.out == "runs/a[b]*-3"


def test_a_run_that_is_resumed_has_its_place(tmp_path) -> None:
    run = tmp_path / "run"
    os.makedirs(run / "checkpoint-00000001")
    for place in (run, run / "checkpoint-00000001"):
        with pytest.raises(ConfigError, match=r"out must be .*run or left out when that run is resumed, got elsewhere"):
            rundir.plan({"resume": os.fspath(place), "out": "elsewhere"}, lambda text: None)
        with pytest.raises(ConfigError, match="name must be run or left out when that run is resumed, got other"):
            rundir.plan({"resume": os.fspath(place), "name": "other"}, lambda text: None)
    for own in ({"out": os.fspath(run)}, {"name": "run"}):
        with pytest.raises(CheckpointError, match="manifest.json"):  # with its own place it is looked at
            rundir.plan({"resume": os.fspath(run / "checkpoint-00000001"), **own}, lambda text: None)


def test_devices_that_are_named(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert rundir.resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="device must be cpu, because no usable CUDA device was found, got 'cuda'"):
        rundir.resolve_device("cuda")
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or cuda:N, got 'tpu'"):
        rundir.resolve_device("tpu")
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    assert rundir.resolve_device("auto") == "cuda" and rundir.resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(ConfigError, match="device must be one of the 2 CUDA devices, counted from 0, got 'cuda:2'"):
        rundir.resolve_device("cuda:2")


def test_what_a_run_on_a_gpu_starts_from(monkeypatch, tmp_path) -> None:
    """Only where no model is named, and what is given wins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    config, _, _ = rundir.plan({"steps": 7}, pytest.fail)
    assert (config.model.preset, config.batch_size, config.steps) == ("gpu", GPU_RUN["batch_size"], 7)
    config, _, _ = rundir.plan({"model.preset": "tiny"}, pytest.fail)
    assert (config.model.preset, config.batch_size) == ("tiny", TrainConfig().batch_size)
    config, _, _ = rundir.plan({"optim.schedule": "constant"}, pytest.fail)  # whose final_lr nobody has given
    rundir.plan(rundir.given_options(config), pytest.fail)  # nor is its config.toml refused
    config, _, _ = rundir.plan({"device": "cpu"}, pytest.fail)
    assert config.model.preset == "default"
    for device, given, precision in (
        ("cuda", None, "bfloat16"),
        ("cpu", None, "float32"),
        ("cuda", "float32", "float32"),
    ):
        options = {"device": device} | ({} if given is None else {"precision": given})
        assert rundir.plan(options, pytest.fail)[0].precision == precision


# ---- checkpoints


def test_a_reason_is_told_once_until_a_save_works(monkeypatch) -> None:
    clock, told, errors = (
        [0.0],
        [],
        [CheckpointError("full"), CheckpointError("full"), None, CheckpointError("full"), CheckpointError("other")],
    )
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: clock[0])

    def save() -> None:
        clock[0] += 1
        if error := errors.pop(0):
            raise error

    saver = Saver(save, told.append)
    for _ in range(5):
        clock[0] += 10
        saver.try_to_save()
    assert told == ["full", "full", "other"] and not errors


# ---- samples of a run


def sampled(monkeypatch, tokenizer=None, name: str = "text", **changes):
    """What generate_text gets for these settings."""
    seen: list = []
    monkeypatch.setattr(
        evaluate,
        "generate_text",
        lambda model, tok, ids, count, **options: seen.append((bytes(map(int, ids)), count, options)) or "made",
    )
    settings = SimpleNamespace(
        **{"prompt": None, "tokens": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.25, **changes}
    )
    found = evaluate.sample(
        SimpleNamespace(
            config=SimpleNamespace(sample=settings, seed=17),
            tokenizer=tokenizer,
            model=None,
            corpus=SimpleNamespace(name=name),
            val=np.arange(40).reshape(1, 40),
        )
    )
    return found, seen


def test_what_a_sample_starts_from(monkeypatch) -> None:
    """The prompt; `def ` for Python; else the first 16 validation tokens. Its options are those of the run, and so is its seed."""
    tokenizer = ByteTokenizer()
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 17}
    assert sampled(monkeypatch, tokenizer) == ("made", [(bytes(range(16)), 9, options)])
    assert sampled(monkeypatch, tokenizer, "python")[1][0][0] == b"def "
    assert sampled(monkeypatch, tokenizer, "python", prompt="x\udcff")[1][0][0] == b"x\xff"
    for nothing in (sampled(monkeypatch, None), sampled(monkeypatch, tokenizer, tokens=0)):
        assert nothing == (None, [])


def test_a_config_of_a_run_is_read_back(tmp_path) -> None:
    """given_options are what differs from the defaults."""
    config = TrainConfig()
    config.steps, config.optim.lr = 3, 0.5
    assert rundir.given_options(config) == {"steps": 3, "optim.lr": 0.5}
    rundir.write_config(tmp_path, config)
    assert "steps = 3" in (tmp_path / "config.toml").read_text()
    assert json.loads(json.dumps(rundir.given_options(TrainConfig()))) == {}


def test_an_infinite_second_moment_is_none_to_refuse() -> None:
    """The square of a large gradient; NaN is."""
    import xtrain as xt

    layer = xt.nn.Linear(2, 1, bias=False)
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "master"):
        for value, bad in ((math.inf, None), (math.nan, f"{key} of parameter weight has NaN")):
            kept = SimpleNamespace(state={layer.weight: {key: xt.full((1, 2), value)}})
            assert checkpoints._bad_moment(SimpleNamespace(model=layer, optimizer=kept)) == bad


def test_pieces_of_a_batch_that_is_cut_into_leaves_stay() -> None:
    """The tree adds leaves: other pieces are other sums. Without leaves they are free, as for one leaf."""
    for ranks, free in ((None, True), (0, True), (1, True), (2, False)):
        saved = {"max_ranks": ranks, "grad_accum": 1}
        if free:
            rundir._refuse_differences(saved, {"grad_accum": 2})
        else:
            with pytest.raises(ConfigError, match="^resume: grad_accum was 1 in this run, got 2; leave it out"):
                rundir._refuse_differences(saved, {"grad_accum": 2})


def test_a_resumed_run_takes_the_tokenizer_of_its_checkpoint(tmp_path) -> None:
    """The directory of the option may have gone since."""
    (tmp_path / "checkpoint-00000001").mkdir()
    config = TrainConfig(data=str(text_file(tmp_path / "text.txt")), tokenizer=str(tmp_path / "gone"))
    assert isinstance(parts.open_corpus(config, tmp_path / "checkpoint-00000001", print).tokenizer, ByteTokenizer)
    with pytest.raises(DataError, match=r"gone must be a directory with a tokenizer\.json"):
        parts.open_corpus(config, None, print)


def test_a_lock_that_is_refused_leaves_no_descriptor(tmp_path) -> None:
    with rundir.RunLock(tmp_path):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match="is in use by another training process"):
            rundir.RunLock(tmp_path).__enter__()
        assert len(os.listdir("/proc/self/fd")) == before


def test_what_a_checkpoint_says_of_its_run(tmp_path) -> None:
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run"), quiet=True)
    trainer.step, trainer.elapsed = 3, 12.5
    found = resume.trainer_state(trainer)
    assert (found["step"], found["elapsed"], found["tokens"]) == (3, 12.5, 3 * 4 * 16)
    assert (found["config"]["resume"], found["config"]["extend"]) == ("", False)


def test_several_callbacks_are_as_one(tmp_path) -> None:
    calls: list[tuple[int, str]] = []

    class Notes(Callback):
        def __init__(self, number: int) -> None:
            for name in ("on_start", "on_step_begin", "on_step", "on_checkpoint", "on_end"):
                setattr(self, name, lambda *_, name=name: calls.append((number, name)))

    every = CallbackList([Notes(1), Notes(2)])
    run: Any = None
    every.on_start(run)
    every.on_step_begin(run)
    every.on_step(run, {})
    every.on_checkpoint(run, tmp_path)
    every.on_end(run, None)
    names = ("on_start", "on_step_begin", "on_step", "on_checkpoint", "on_end")
    assert calls == [(number, name) for name in names for number in (1, 2)]


def test_the_checkpoint_of_a_result_is_the_newest(tmp_path) -> None:
    result = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run", save_every=3), quiet=True).run()
    assert result.checkpoint == tmp_path / "run" / "checkpoint-00000008"
    for path in saving.find_checkpoints(tmp_path / "run"):
        saving.remove_checkpoint(path)
    assert result.checkpoint is None


def test_keywords_win_over_a_file(tmp_path) -> None:
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run", save_every=0)
    first = Trainer(values, quiet=True)
    first.run()
    out = tmp_path / "again"
    result = train(file=tmp_path / "run" / "config.toml", out=str(out), steps=2, optim={"lr": 0.125}, quiet=True)
    assert result.step == 2 and result.directory == out
    config = Trainer({"resume": str(out)}, quiet=True).config
    assert config.optim.lr == 0.125 and config.seq_len == first.config.seq_len and config.optim.warmup == 2


def test_a_run_may_begin_with_steps_and_a_save_by_hand(tmp_path) -> None:
    """What it has written itself is nobody else's."""
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run", save_every=0), quiet=True)
    for _ in range(2):
        trainer.train_step()
        trainer.save()
    assert trainer.run().step == 8
    trainer.save()
    assert trainer.run().step == 8
    names = [path.name for path in saving.find_checkpoints(tmp_path / "run")]
    assert names == [f"checkpoint-{step:08}" for step in (8, 2)]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path) -> None:
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "runs" / "run"), quiet=True)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(CheckpointError, match=f"^{tmp_path / 'runs' / 'run'} cannot be made: .*[Nn]ot a directory"):
        trainer.run()


@pytest.mark.parametrize("option", ["out", "name", "resume", "model.preset"])
def test_a_link_to_itself_and_no_characters_are_one_sentence(option: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / ("runs/loop" if option == "name" else "loop")).symlink_to("loop")
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run")
    del values["out"]
    for path, reason in (
        ("loop", "Too many levels of symbolic links"),
        ("\ud800", "it holds characters that no path has"),
    ):
        with pytest.raises(ConfigError, match=rf"^{option} must be a path that can be used, got .*: {reason}$"):
            Trainer({**values, option: path}, quiet=True)


@pytest.mark.parametrize("option", ["out", "name", "resume", "model.preset"])
def test_a_path_that_is_too_long_is_one_sentence(option: str, tmp_path, monkeypatch) -> None:
    """Also one that has no room for the names of a run's files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run")
    del values["out"]
    for path in ("x" * 300, "x/" * 2100, "x/" * 2010) if option != "name" else ("x" * 300,):
        with pytest.raises(
            ConfigError, match=f"^{option} must be a path that can be used, got 'x.*x/?[.][.][.]: File name too long$"
        ):
            Trainer({**values, option: path}, quiet=True)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "text.txt"} and not list(
        (tmp_path / "runs").iterdir()
    )


def test_what_a_finished_run_says_when_it_is_resumed(tmp_path) -> None:
    """The validation loss of its end, though no step is made."""
    first = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run"), quiet=True).run()
    again = Trainer({"resume": str(tmp_path / "run")}, quiet=True).run()
    assert again.step == 8 and again.val_loss == first.val_loss is not None


def test_a_run_that_is_stopped_has_no_sample(tmp_path) -> None:
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run", sample__tokens=4)
    for name, callbacks in (("whole", []), ("stopped", [lambda trainer, record: True])):
        result = Trainer({**values, "out": str(tmp_path / name)}, quiet=True, callbacks=callbacks).run()
        assert (result.sample is None, result.stopped) == ((True, "callback") if callbacks else (False, None))


def test_an_emergency_checkpoint_that_is_found_has_its_records(tmp_path, monkeypatch) -> None:
    order: list[str] = []
    sync, save = Metrics.sync, saving.save_checkpoint
    monkeypatch.setattr(Metrics, "sync", lambda self: (order.append("records"), sync(self))[1])
    monkeypatch.setattr(saving, "save_checkpoint", lambda *args: (order.append("checkpoint"), save(*args))[1])
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run"), quiet=True, callbacks=[_fails])
    with pytest.raises(SystemExit):
        trainer.run()
    assert order[:2] == ["records", "checkpoint"]


def _fails(trainer: Any, record: Any) -> None:
    if record["step"] == 3:
        raise SystemExit


def test_a_stretched_run_keeps_its_warm_up(tmp_path) -> None:
    """A twentieth of the steps, of those that it began with."""
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run", steps=60)
    del values["optim.warmup"]
    Trainer(values, quiet=True, callbacks=[lambda trainer, record: True]).run()
    longer = Trainer({"resume": str(tmp_path / "run"), "steps": 600, "extend": True}, quiet=True)
    assert longer.config.optim.warmup == 3 and longer.config.steps == 600


def test_averages_are_of_what_is_trained(tmp_path) -> None:
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run")
    model = Trainer(values, quiet=True).model
    frozen = next(model.parameters()).requires_grad_(False)
    of_model = {name: value for name, value in values.items() if not name.startswith("model.")}
    trainer = Trainer({**of_model, "out": str(tmp_path / "other"), "ema": 0.9}, model=model, quiet=True)
    trained = {id(parameter) for parameter in model.parameters()} - {id(frozen)}
    assert trainer.ema is not None and {id(parameter) for parameter in trainer.ema.averages} == trained
