"""Printing, the bar, samples, records and pictures are side effects of a run: what fails in one is said once, and ends
nothing.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from runs import HANGS, arguments, metrics, options, python, text_file

from xtrain import saving
from xtrain.train import Trainer, plot, progress
from xtrain.train.metrics import read_metrics
from xtrain.train.report import Report

pytestmark = pytest.mark.on_cpu


@pytest.fixture
def data(tmp_path) -> Path:
    return text_file(tmp_path / "text.txt")


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_told", [])


class Broken(io.StringIO):
    """A stream whose every use fails."""

    encoding = "ascii"

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error

    flush = isatty = write  # type: ignore[assignment]


# ---- standard output

RUN = """
import sys
import termios
from pathlib import Path
from xtrain.train import Trainer
from runs import options
text = Path(sys.argv[1])
Trainer(options(text, Path(sys.argv[2]), sample__tokens=30, sample__prompt="d\\u00e9f \\u4e00")).run()
"""


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_any_encoding_of_the_output(tmp_path, data, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = python("-c", RUN, str(data), str(tmp_path / "run"), env=environment, encoding=encoding)
    assert done.returncode == 0 and saving.find_checkpoints(tmp_path / "run"), done.stderr
    spelled = {"latin-1": "dé" + r"f \u4e00", "ascii": r"d\xe9f \u4e00", "utf-8": "déf 一"}
    assert f"    | {spelled[encoding]}" in done.stdout and not done.stderr


def test_the_posix_locale(tmp_path, data) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = python("-c", RUN, str(data), str(tmp_path / "run"), env=environment)
    assert done.returncode == 0 and saving.find_checkpoints(tmp_path / "run"), done.stderr


@pytest.mark.parametrize("how", [">&-", ">&- 2>&-", "> /dev/full", "> /dev/full 2> /dev/full"])
def test_an_output_that_takes_nothing(tmp_path, data, how: str) -> None:
    """The command ends as it would have: the run is done."""
    if "full" in how and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    words = " ".join(arguments(options(data, tmp_path / "run")))
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m xtrain train {words} {how}"], capture_output=True, text=True
    )
    assert saving.find_checkpoints(tmp_path / "run") and done.returncode == 0, (done.returncode, done.stderr)
    said = [line for line in done.stderr.splitlines() if line]
    assert said == (
        ["warning: standard output cannot be written: [Errno 28] No space left on device"]
        if how == "> /dev/full"
        else []
    )


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "Input/output error"), ValueError("I/O operation on closed file"), RuntimeError("no kernel")],
)
def test_a_stream_that_breaks_is_reported_once(tmp_path, data, monkeypatch, capsys, error: Exception) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(error))
    assert Trainer(options(data, tmp_path / "run", log_every=1)).run().step == 8
    assert capsys.readouterr().err == f"warning: standard output cannot be written: {error}\n"


@pytest.mark.parametrize("stream", [None, Broken(BrokenPipeError(errno.EPIPE, "Broken pipe"))])
def test_nobody_who_reads_is_no_matter(tmp_path, data, monkeypatch, capsys, stream) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    assert Trainer(options(data, tmp_path / "run")).run().step == 8
    assert not capsys.readouterr().err


def test_both_streams_may_break(tmp_path, data, monkeypatch) -> None:
    broken = Broken(OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(sys, "stdout", broken)
    monkeypatch.setattr(sys, "stderr", broken)
    assert Trainer(options(data, tmp_path / "run")).run().step == 8


# ---- the bar


class Terminal(io.StringIO):
    """A terminal that breaks after `left` writes. tqdm itself bears EIO, and no other error."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return os.open("/dev/null", os.O_RDONLY)

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENXIO, "No such device or address")
        return len(text)


@pytest.mark.parametrize("left", [0, 1, 5, 9])
def test_a_bar_that_breaks_is_dropped(tmp_path, data, monkeypatch, left: int) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal(left))
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((80, 24)))
    shown = Trainer(options(data, tmp_path / "run", eval_every=2))
    assert shown.run().step == 8


def test_a_terminal_that_closes_stops_the_run_in_order(tmp_path, data) -> None:
    """SIGHUP comes to the foreground, and every write is an error: the step is finished and saved."""

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    terminal, inner = pty.openpty()
    words = arguments(options(data, tmp_path / "run", steps=1_000_000, log_every=1))
    command = [sys.executable, "-m", "xtrain", "train", *words]
    child = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, preexec_fn=take_terminal)
    os.close(inner)
    seen, records = b"", tmp_path / "run" / "metrics.jsonl"
    while not records.exists() or not records.stat().st_size:  # the handlers are there by then
        seen += os.read(terminal, 1000)
    os.close(terminal)
    assert child.wait(timeout=HANGS) == 129, seen
    (checkpoint,) = saving.find_checkpoints(tmp_path / "run")
    assert saving.checkpoint_step(checkpoint) == len(metrics(tmp_path / "run"))


# ---- samples, evaluations, pictures


@pytest.mark.parametrize("error", [ValueError("bytes must be in\nrange(0, 256)"), MemoryError(), UnicodeError("x")])
def test_a_sample_that_fails_is_one_warning(tmp_path, data, monkeypatch, capsys, error: Exception) -> None:
    def fail(*_, **__):
        raise error

    trainer = Trainer(options(data, tmp_path / "run", eval_every=2, sample__tokens=5))
    monkeypatch.setattr("xtrain.train.evaluate.generate_text", fail)
    result = trainer.run()
    text = " ".join(str(error).split()) or "no message"
    said = [line for line in capsys.readouterr().out.splitlines() if "sample failed" in line]
    assert said == [f"warning: a sample failed, and training goes on: {type(error).__name__}: {text}"]
    assert (result.step, result.sample) == (8, None)
    assert sum("val_loss" in record for record in metrics(tmp_path / "run")) == 4


def test_a_sample_of_a_token_that_is_no_byte(tmp_path, data) -> None:
    """As a model directory with a larger vocabulary than its tokenizer gives."""
    trainer = Trainer(options(data, tmp_path / "run", model__vocab_size=5000, sample__tokens=200), quiet=True)
    assert trainer.run().step == 8


def test_methods_of_a_report_raise_nothing(capsys) -> None:
    report = Report(quiet=False)
    for _ in range(2):
        report.introduce(None)  # type: ignore[arg-type]
        report.evaluation(3, {})
        report.sample(5)  # type: ignore[arg-type]
        report.finish(None, None, None)  # type: ignore[arg-type]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and all(line.startswith("warning: the report (") for line in said), said


def test_later_failures_are_told_once(capsys) -> None:
    """At the end of a run; a run that goes on counts anew."""
    report = Report(quiet=False)
    for count in (3, 0, 1):
        for _ in range(count):
            report.failed("the display", ValueError("no luck"))
        report.later_failures()
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [f"warning: {count} of the display" for count in ("2 more failures", "1 more failure")], said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_valid_json(tmp_path, data, monkeypatch, value: float) -> None:
    def strict(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    run = tmp_path / "run"
    trainer = Trainer(options(data, run, eval_every=4), quiet=True)
    monkeypatch.setattr("xtrain.train.evaluate.evaluate", lambda _: {"val_loss": value, "val_bpb": value})
    result = trainer.run()
    assert result.val_loss is value
    lines = [json.loads(line, parse_constant=strict) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["val_loss"], r["val_bpb"]) for r in lines if "val_loss" in r] == [
        (4, None, None),
        (8, None, None),
    ]
    read = [record["val_loss"] for record in read_metrics(run / "metrics.jsonl") if "val_loss" in record]
    assert len(read) == 2 and all(map(math.isnan, read))
    assert Trainer({"resume": str(run), "steps": 9, "extend": True}, quiet=True).run().step == 9
    again = [json.loads(line, parse_constant=strict) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert again[:8] == lines


def test_a_picture_of_metrics_with_nan(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install matplotlib)")
    losses = [3.0, None, 2.5, float("nan"), 2.0]
    records = [{"step": i, "loss": loss, "val_loss": loss} for i, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert plot.plot_loss(tmp_path).read_bytes().startswith(b"\x89PNG")
    assert [math.isnan(v) for v in plot._smooth([3.0, math.nan, 2.0])] == [False, True, False]


def test_a_record_that_is_no_json_is_one_warning(tmp_path, data, monkeypatch, capsys) -> None:
    trainer = Trainer(options(data, tmp_path / "run", eval_every=2))
    monkeypatch.setattr("xtrain.train.evaluate.evaluate", lambda _: {"val_loss": 1.0, "mine": object()})
    assert trainer.run().step == 8
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written: Object of type object is not JSON") == 1
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 3, 5, 7]
