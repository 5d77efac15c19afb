"""The training loop: gradient accumulation, bit-identical resume, signals, and the example of the README."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from places import ROOT
from runs import HANGS, arguments, metrics, options, python, start, text_file, wait_until, weights, xtrain

import xtrain as xt
from xtrain import _C, saving
from xtrain.errors import CheckpointError, ConfigError, DataError
from xtrain.train import Trainer, train


@pytest.fixture
def data(tmp_path) -> Path:
    return text_file(tmp_path / "text.txt")


def test_a_run_writes_what_it_says(tmp_path, data) -> None:
    out = tmp_path / "run"
    result = Trainer(options(data, out, save_every=4, eval_every=4, sample__tokens=8), quiet=True).run()
    assert (result.step, result.stopped, result.directory) == (8, None, out)
    assert math.isfinite(result.val_bpb)
    assert abs(result.val_bpb - result.val_loss / math.log(2)) < 1e-9
    assert isinstance(result.sample, str)
    records = metrics(out)
    assert [r["step"] for r in records] == list(range(1, 9))
    for key in ("loss", "lr", "grad_norm", "tokens", "tokens_per_second", "time"):
        assert all(math.isfinite(r[key]) for r in records), key
    assert [p.name for p in saving.find_checkpoints(out)] == ["checkpoint-00000008", "checkpoint-00000004"]
    assert (out / "config.toml").exists()
    assert records[-1]["loss"] < records[0]["loss"]


def test_the_same_run_has_the_same_bits(tmp_path, data) -> None:
    for name, threads in (("a", 1), ("b", 2), ("c", 4)):
        Trainer(options(data, tmp_path / name, threads=threads), quiet=True).run()
    want = weights(tmp_path / "a" / "checkpoint-00000008")
    assert weights(tmp_path / "b" / "checkpoint-00000008") == want
    assert weights(tmp_path / "c" / "checkpoint-00000008") == want


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resume_is_bit_identical(tmp_path, data, precision: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    Trainer(options(data, whole, steps=12, precision=precision), quiet=True).run()
    stopped = Trainer(options(data, parts, steps=12, precision=precision), quiet=True)
    for _ in range(5):
        stopped.train_step()
    stopped.directory.mkdir()
    stopped.save()
    xt.manual_seed(999)  # whatever the process did in between
    xt.randn(100)
    resumed = Trainer({"resume": str(parts)}, quiet=True)
    assert resumed.step == 5
    result = resumed.run()
    assert result.step == 12
    assert weights(parts / "checkpoint-00000012") == weights(whole / "checkpoint-00000012")
    a, b = (json.loads((d / "checkpoint-00000012" / "trainer_state.json").read_text()) for d in (whole, parts))
    assert (a["loader"], a["rng"], a["step"], a["tokens"]) == (b["loader"], b["rng"], b["step"], b["tokens"])


@pytest.mark.on_cpu
@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_any_split_of_the_batch_gives_the_same_gradient(tmp_path, data, pieces: int) -> None:
    """Also with token counts that differ between the pieces, where averaging means would be wrong."""
    found = []
    for accum in (1, pieces):
        settings = dict(grad_accum=accum, clip=0.0, optim__lr=0.0, precision="float32")
        trainer = Trainer(options(data, tmp_path / f"r{accum}", **settings), quiet=True)
        batch = trainer.loader.next_batch

        def uneven(batch=batch):
            ids, targets = batch()
            targets[0, :13] = -100
            targets[2] = -100
            return ids, targets

        trainer.loader.next_batch = uneven
        loss = trainer.train_step()["loss"]
        found.append((loss, [p.grad.detach().cpu().numpy().copy() for p in trainer.model.parameters()]))
    (loss_a, a), (loss_b, b) = found
    assert abs(loss_a - loss_b) <= 1e-6 * abs(loss_a)
    for x, y in zip(a, b):
        assert np.abs(x - y).max() <= 1e-6 * np.abs(x).max()


def test_a_fully_ignored_batch_costs_nothing(tmp_path, data) -> None:
    trainer = Trainer(options(data, tmp_path / "r"), quiet=True)
    ids, targets = trainer.loader.next_batch()
    trainer.loader.next_batch = lambda: (ids, np.full_like(targets, -100))
    found = trainer.train_step()
    assert (found["loss"], found["grad_norm"]) == (0.0, 0.0)


def test_resume_refuses_another_configuration(tmp_path, data) -> None:
    out = tmp_path / "run"
    Trainer(options(data, out), quiet=True).run()
    for change, text in [
        ({"batch_size": 8}, "batch_size was 4 in this run, got 8"),
        ({"optim.lr": 0.5}, "optim.lr was"),
        ({"model.hidden_size": 32}, "hidden_size"),
        ({"seed": 3}, "seed was 0"),
        ({"steps": 100}, "steps was 8 .*--extend"),
    ]:
        with pytest.raises(ConfigError, match=text):
            Trainer({"resume": str(out), **change}, quiet=True)
    other = text_file(tmp_path / "other.txt", seed=3)
    with pytest.raises(ConfigError, match="data was"):
        Trainer({"resume": str(out), "data": str(other)}, quiet=True)
    assert Trainer({"resume": str(out), "steps": 10, "extend": True}, quiet=True).run().step == 10


def test_resume_takes_the_newest_valid_checkpoint(tmp_path, data, capsys) -> None:
    out = tmp_path / "run"
    Trainer(options(data, out, save_every=2, keep=0), quiet=True).run()
    newest = out / "checkpoint-00000008"
    want = weights(newest)
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    (out / "checkpoint-00000006" / "manifest.json").unlink()
    trainer = Trainer({"resume": str(out)})
    assert trainer.step == 4
    said = capsys.readouterr().out
    assert "warning" in said
    assert "checkpoint-00000008" in said
    assert "damaged" in said
    trainer.report.quiet = True
    trainer.run()
    assert weights(newest) == want, "falling back further continues to the same bits"
    with pytest.raises(CheckpointError, match="holds no checkpoint|does not exist"):
        Trainer({"resume": str(tmp_path / "nothing")}, quiet=True)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "many"},
        {"step": None},
        {"elapsed": "x"},
        {"loader": {"epoch": -1, "index": 0}},
        {"rng": [1]},
        {"rng": 1},
    ],
)
def test_a_wrong_trainer_state_is_named(tmp_path, data, change, monkeypatch) -> None:
    """Files whose checksums are right, but whose content is not."""
    out = tmp_path / "run"
    trainer = Trainer(options(data, out), quiet=True)
    trainer.directory.mkdir()
    trainer.save()
    whole = saving.load_checkpoint
    monkeypatch.setattr(saving, "load_checkpoint", lambda *a: {**whole(*a), **change})
    with pytest.raises(CheckpointError, match=r"trainer_state\.json (is damaged|lacks)"):
        Trainer({"resume": str(out)}, quiet=True)


def test_a_run_is_not_overwritten(tmp_path, data) -> None:
    out = tmp_path / "run"
    Trainer(options(data, out), quiet=True).run()
    with pytest.raises(ConfigError, match="already holds a run"):
        Trainer(options(data, out), quiet=True)


def test_data_errors_come_before_anything_is_written(tmp_path) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes(b"abc")
    for source in (short, tmp_path / "none"):
        with pytest.raises(DataError):
            Trainer(options(source, tmp_path / "run"), quiet=True).run()
    assert not (tmp_path / "run").exists()


def test_train_function_takes_sections_as_dicts(tmp_path, data) -> None:
    result = train(
        data=str(data),
        out=str(tmp_path / "r"),
        steps=2,
        batch_size=2,
        seq_len=8,
        eval_tokens=16,
        plot=False,
        quiet=True,
        sample={"tokens": 0},
        model={"preset": "tiny", "num_hidden_layers": 1},
        optim={"lr": 1e-3},
    )
    assert result.step == 2
    with pytest.raises(ConfigError, match="did you mean"):
        train(step=3)


# ---- signals --------------------------------------------------------------------------------------------------------------------------


def wait_for(path: Path, lines: int, process: subprocess.Popen) -> None:
    wait_until(
        lambda: path.exists() and path.read_text().count("\n") >= lines, process, f"{lines} lines of {path.name}"
    )


# `xtrain train` that stays in its fourth step, at work, until the file named first is there.
HELD = """
import os, sys
import xtrain as xt
from xtrain import cli
from xtrain.data import Loader
next_batch, calls, x = Loader.next_batch, [], xt.ones(200, 200)
def held(self):
    calls.append(1)
    if len(calls) == 4:
        print("held", flush=True, file=sys.stderr)
        while not os.path.exists(sys.argv[1]):
            x @ x
    return next_batch(self)
Loader.next_batch = held
sys.exit(cli.main(sys.argv[2:]))
"""


def held_run(go: Path, *arguments: str) -> subprocess.Popen:
    """Such a run, in its fourth step."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, go, "train", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr.readline() == "held\n", process.stderr.read()
    return process


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_resumes_to_the_same_bits(tmp_path, data, number, status) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    long = dict(steps=120, batch_size=8, seq_len=64)
    process = held_run(tmp_path / "go", *arguments(options(data, out, **long)))
    try:
        process.send_signal(number)
        (tmp_path / "go").touch()
        _, stderr = process.communicate(timeout=HANGS)
    finally:
        process.kill()
    assert process.returncode == status, stderr
    assert "Traceback" not in stderr
    checkpoint = saving.newest_valid(out, print)
    assert saving.checkpoint_step(checkpoint) == len(metrics(out)) == 4
    assert Trainer({"resume": str(out)}, quiet=True).run().step == 120
    xt.manual_seed(0)
    Trainer(options(data, whole, **long), quiet=True).run()
    assert weights(out / "checkpoint-00000120") == weights(whole / "checkpoint-00000120")
    assert [r["loss"] for r in metrics(out)] == [r["loss"] for r in metrics(whole)]


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_second_ctrl_c_stops_at_once(tmp_path, data) -> None:
    """In a step that would never end. On the CPU every step before it has been read."""
    out = tmp_path / "run"
    process = held_run(tmp_path / "never", *arguments(options(data, out, device="cpu")))
    try:
        process.send_signal(signal.SIGINT)
        assert [process.stderr.readline() for _ in range(2)] == [
            "\n",
            "SIGINT: finishing this step, then saving; once more stops at once\n",
        ]
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANGS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert len(metrics(out)) == 3 and not saving.find_checkpoints(out)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path, data) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    process = start("train", *arguments(options(data, out, steps=100000)))
    wait_for(out / "metrics.jsonl", 3, process)
    process.kill()
    process.communicate()
    assert metrics(out)[2]["step"] == 3 and not saving.find_checkpoints(out)
    with pytest.raises(ConfigError, match="already holds a run"):
        Trainer(options(data, out), quiet=True)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Trainer({"resume": str(out)}, quiet=True)
    done = xtrain("train", *arguments(options(data, out)), "--resume", "auto")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if "starts over" in line]
    assert told == [f"warning: the run in {out} ended before its first checkpoint: it starts over"]
    xtrain("train", *arguments(options(data, whole)))
    assert [r["loss"] for r in metrics(out)] == [r["loss"] for r in metrics(whole)]
    assert weights(out / "checkpoint-00000008") == weights(whole / "checkpoint-00000008")
    again = xtrain("train", *arguments(options(data, out)), "--resume", "auto")
    assert again.returncode == 0 and "starts over" not in again.stdout
    # As a kill between the two renames leaves a checkpoint that was being replaced.
    for checkpoint in saving.find_checkpoints(out):
        checkpoint.rename(out / f".{checkpoint.name}.old-123")
    again = xtrain("train", *arguments(options(data, out)), "--resume", "auto")
    assert again.returncode == 0 and "starts over" not in again.stdout
    assert weights(out / "checkpoint-00000008") == weights(whole / "checkpoint-00000008")


@pytest.mark.parametrize("resume", ["last", "auto"])
def test_a_run_without_a_name_is_found_by_a_displaced_checkpoint(tmp_path, data, monkeypatch, resume: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("small-1", "small-2"):
        Trainer(options(data, Path("runs") / name), quiet=True).run()
        live = Path("runs") / name / ".checkpoint-00000099.tmp-123"  # another run may be saving just now
        live.mkdir()
    checkpoint = Path("runs/small-2/checkpoint-00000008")
    for other in saving.find_checkpoints("runs/small-2")[1:]:
        shutil.rmtree(other)
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old-123"))
    assert Trainer({"resume": resume}, quiet=True).directory.name == "small-2"
    assert checkpoint.is_dir() and Path("runs/small-1/.checkpoint-00000099.tmp-123").is_dir()


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_kill_9_at_any_moment_loses_no_checkpoint(tmp_path, data) -> None:
    """The run saves after every step; whenever it is killed, the newest whole checkpoint is found and continues."""
    out = tmp_path / "run"
    values = options(data, out, steps=100000, save_every=1, keep=3)
    process = start("train", *arguments(values))
    wait_for(out / "metrics.jsonl", 3, process)
    for delay in (0.011, 0.037, 0.083, 0.15):
        time.sleep(delay)
        process.kill()
        process.communicate()
        warnings: list[str] = []
        newest = saving.newest_valid(out, warnings.append)
        assert newest is not None
        assert not warnings, "a directory with a checkpoint's name is always whole"
        lines = (out / "metrics.jsonl").read_text().count("\n")
        process = start("train", "--resume", str(out))
        wait_for(out / "metrics.jsonl", lines + 2, process)
    process.kill()
    process.communicate()
    assert saving.newest_valid(out, print) is not None


def test_a_reader_who_leaves_does_not_end_the_run(tmp_path, data) -> None:
    out = tmp_path / "run"
    process = start("train", *arguments(options(data, out, steps=30)))
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=HANGS) == 0
    assert saving.find_checkpoints(out)[0].name.endswith("30")


# ---- documents --------------------------------------------------------------------------------------------------------------------------


def test_the_example_of_the_readme_runs(tmp_path) -> None:
    readme = ROOT / "README.md"
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", readme.read_text(), re.S) if "import xtrain" in block
    )
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 15, f"the example has {len(lines)} lines"
    short = re.sub(r"range\(\d+\)", "range(3)", code)
    assert short != code
    done = python("-c", short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")
    assert list(tmp_path.glob("*/model.safetensors"))


def test_plot_of_a_run(tmp_path, data) -> None:
    out = tmp_path / "run"
    Trainer(options(data, out, plot=True), quiet=True).run()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_two_processes_may_not_train_in_one_directory(tmp_path, data) -> None:
    out = tmp_path / "run"
    process = start("train", *arguments(options(data, out, steps=100000)))
    try:
        wait_for(out / "metrics.jsonl", 2, process)
        done = (
            xtrain("train", "--resume", str(out))
            if saving.find_checkpoints(out)
            else xtrain("train", *arguments(options(data, out)))
        )
        assert done.returncode == 2
        assert "use by another" in done.stderr or "already holds a run" in done.stderr
    finally:
        process.kill()
        process.communicate()


def test_the_precision_of_a_run_ends_with_it(tmp_path, data) -> None:
    """It holds inside the trainer's own steps and not for what the process computes afterwards."""
    for precision, inside, before in (("tf32", "high", "highest"), ("float32", "highest", "high")):
        trainer = Trainer(options(data, tmp_path / "run", precision=precision, sample__tokens=2), quiet=True)
        seen: list[str] = []
        trainer.model.model.embed_tokens.register_forward_hook(
            lambda *_, seen=seen: seen.append(xt.get_float32_matmul_precision())
        )
        xt.set_float32_matmul_precision(before)
        try:
            for method in (trainer.train_step, trainer.evaluate, trainer.sample):
                count = len(seen)
                method()
                assert len(seen) > count and xt.get_float32_matmul_precision() == before
        finally:
            xt.set_float32_matmul_precision("highest")
        assert set(seen) == {inside}


def test_a_resumed_run_saves_its_end_also_when_steps_were_taken_by_hand(tmp_path, data) -> None:
    out = tmp_path / "run"
    Trainer(options(data, out, steps=4), quiet=True).run()
    trainer = Trainer({"resume": str(out), "steps": 8, "extend": True}, quiet=True)
    for _ in range(4):
        trainer.train_step()
    assert trainer.run().step == 8
    assert saving.find_checkpoints(out)[0].name == "checkpoint-00000008"


def test_a_step_that_an_exception_ends_gives_its_batch_back(tmp_path, data, monkeypatch) -> None:
    trainer = Trainer(options(data, tmp_path / "run"), quiet=True)
    before, rng = trainer.loader.state_dict(), _C.get_rng_state()

    def fail(*args, **kwargs):
        xt.randn(3)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(trainer.model, "loss", fail)
        with pytest.raises(MemoryError):
            trainer.train_step()
    assert trainer.loader.state_dict() == before and _C.get_rng_state() == rng and trainer.step == 0
    trainer.train_step()
    assert trainer.loader.state_dict() != before
