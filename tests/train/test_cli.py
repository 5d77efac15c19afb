"""The `xtrain` command: what it prints, its exit status, and that every mistake is answered by one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import arguments, options, python, start, text_file, xtrain

import xtrain as xt
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One finished run that several tests look at."""
    place = tmp_path_factory.mktemp("cli")
    done = xtrain("train", *arguments(options(text_file(place / "text.txt"), place / "run", sample__tokens=12)))
    assert done.returncode == 0, done.stderr
    return place, done


def test_train_prints_and_writes(run) -> None:
    place, done = run
    assert str(place / "run") in done.stdout
    assert "bits per byte" in done.stdout
    assert "sample" in done.stdout
    assert "Traceback" not in done.stderr
    assert len((place / "run" / "metrics.jsonl").read_text().splitlines()) == 8
    assert json.loads((place / "run" / "checkpoint-00000008" / "config.json").read_text())["model_type"] == "qwen3"


def test_the_last_line_names_the_directory(run) -> None:
    place, done = run
    assert str(place / "run") in done.stdout.strip().splitlines()[-1]


def test_resume_and_extend(run, tmp_path) -> None:
    place, _ = run
    shutil.copytree(place / "run", tmp_path / "run")  # the others look at a run of 8 steps
    done = xtrain("train", "--resume", str(tmp_path / "run"), "--steps", "9", "--extend", "--sample.tokens", "0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoint-00000009").is_dir()


def test_sample_tells_of_a_damaged_checkpoint(run, tmp_path) -> None:
    """Else an older model would speak, without a word."""
    place, _ = run
    shutil.copytree(place / "run", tmp_path / "run")
    newest, older = (tmp_path / "run" / f"checkpoint-{step:08}" for step in (9, 8))
    shutil.copytree(older, newest)
    (newest / "model.safetensors").write_bytes(b"")
    done = xtrain("sample", str(tmp_path / "run"), "--max-tokens", "3")
    assert done.returncode == 0
    assert re.fullmatch(
        rf"xtrain: warning: skipping a damaged checkpoint: {re.escape(str(newest))}/.*\n", done.stderr
    ), done.stderr


def test_sample(run) -> None:
    place, _ = run
    args = (
        "sample",
        str(place / "run"),
        "--prompt",
        "def ",
        "--max-tokens",
        "20",
        "--temperature",
        "0.9",
        "--top-k",
        "5",
        "--top-p",
        "0.9",
    )
    a, b, c = xtrain(*args, "--seed", "1"), xtrain(*args, "--seed", "1"), xtrain(*args, "--seed", "2")
    assert a.returncode == 0, a.stderr
    assert a.stdout.startswith("def ")
    assert a.stdout == b.stdout
    assert a.stdout != c.stdout
    newest = sorted((place / "run").glob("checkpoint-*"))[-1]
    assert xtrain("sample", str(newest), "--max-tokens", "3").returncode == 0
    dashes = xtrain("sample", str(newest), "--prompt", "--- title", "--max-tokens", "3")
    assert dashes.returncode == 0 and dashes.stdout.startswith("--- title")


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        ((), 2, ""),
        (("trian",), 2, "did you mean train"),
        (("train", "--stepz", "3"), 2, "did you mean --steps"),
        (("train", "--steps", "x"), 2, "whole number"),
        (("train", "missing.toml"), 2, "cannot be read"),
        (("train", "--data", "/no/such/place"), 1, "does not exist"),
        (("train", "--model", "gigantic"), 2, "gigantic"),
        (("train", "--device", "tpu"), 2, "tpu"),
        (("train", "--device", "cuda:99", "--steps", "1"), 2, "cuda:99"),
        (("train", "--resume", "/no/such/run"), 1, "does not exist"),
        (("train", "--resume", "", "--dry-run"), 2, "--resume must name a run, or be last or auto, got ''"),
        (
            ("train", "--model.rope_theta", "1e-30", "--steps", "1"),
            2,
            "error: Qwen3Config: rope_theta must be at least 1e-09",
        ),
        (("sample",), 2, "expected 1 argument, got 0"),
        (("sample", "/no/such/run"), 1, "no such directory"),
        (("sample", "x", "--top-p", "7"), 2, "top-p"),
        (
            ("sample", "x", "--max-tokens", "1000000000000"),
            2,
            "--max-tokens must be in [1, 10000000], got 1000000000000",
        ),
        (("train", "--sample.tokens", "1000000000000"), 2, "sample.tokens must be at most 10000000, got 1000000000000"),
        (("sample", "x", "--temprature", "1"), 2, "--temperature"),
        (("doctor", "now"), 2, "expected no arguments, got 1; usage: xtrain doctor"),
        (("prepare", "one"), 2, "expected 2 arguments, got 1"),
    ],
)
def test_mistakes_are_one_line(args, status: int, text: str, tmp_path) -> None:
    done = xtrain(*args, cwd=tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    assert text in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    if args:
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.stderr.startswith("xtrain: error: ")
    assert not list(tmp_path.iterdir()), "a mistake leaves nothing behind"


def test_help_documents_every_option() -> None:
    from xtrain.train.config import KEYS

    text = xtrain("train", "--help").stdout
    for name in KEYS:
        assert f"--{'model' if name == 'model.preset' else name if '.' in name else name.replace('_', '-')}" in text
    for command in ("sample", "doctor", "prepare"):
        done = xtrain(command, "--help")
        assert done.returncode == 0
        assert command in done.stdout
    assert "train" in xtrain("--help").stdout


def test_doctor() -> None:
    done = xtrain("doctor")
    assert done.returncode == 0, done.stdout
    for word in ("xtrain", "Python", "numpy", "OpenBLAS", "CPU", "CUDA"):
        assert word.lower() in done.stdout.lower(), word
    assert f" in {Path(xt.__file__).parent}\n" in done.stdout


def test_version() -> None:
    import xtrain as package

    assert xtrain("--version").stdout.split() == ["xtrain", package.__version__]


def test_prepare_then_train(tmp_path) -> None:
    text = text_file(tmp_path / "text.txt")
    done = xtrain("prepare", str(text), str(tmp_path / "t.tokens"))
    assert done.returncode == 0, done.stderr
    done = xtrain("train", *arguments(options(tmp_path / "t.tokens", tmp_path / "run", steps=2)))
    assert done.returncode == 0, done.stderr


def test_help_into_a_closed_pipe() -> None:
    for words in (("--help",), ("train", "--help")):
        child = start(*words)
        child.stdout.close()
        assert "Traceback" not in child.stderr.read()
        child.stderr.close()
        child.wait()


@pytest.mark.parametrize(
    "locale",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["ascii", "posix"],
)
def test_text_the_locale_cannot_show(run, locale: dict[str, str]) -> None:
    place, _ = run
    done = xtrain(
        "sample",
        str(place / "run"),
        "--prompt",
        "é",
        "--max-tokens",
        "3",
        env={**os.environ, **locale},
    )
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are valid Unicode there")
def test_a_name_that_is_not_unicode_is_saved(tmp_path) -> None:
    data = text_file(tmp_path / os.fsdecode(b"bad\xff.txt"))
    done = xtrain("train", *arguments(options(data, tmp_path / "run")), errors="surrogateescape")
    assert done.returncode == 0, done.stderr
    again = xtrain("train", "--resume", str(tmp_path / "run"), "--steps", "9", "--extend", errors="surrogateescape")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    "option", ["--batch-size=100000000000000", "--batch-size=10000000000000000000", "--threads=100000"]
)
def test_sizes_nothing_can_hold(tmp_path, option) -> None:
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run")
    done = xtrain("train", *arguments(values), option, cpu=30)
    assert done.returncode in (1, 2)
    lines = [line for line in done.stderr.splitlines() if "AddressSanitizer failed to allocate" not in line]
    assert len(lines) == 1 and option[2:9] in lines[0].replace("_", "-")


ONE = "hidden_size 1 head_dim 2 num_attention_heads 1 num_key_value_heads 1 intermediate_size 1 num_hidden_layers"


@pytest.mark.parametrize(
    "option",
    [
        "hidden_size 99999999",
        "num_hidden_layers 99999999",
        f"{ONE} 1000000000",
        f"{ONE} 100000000",
        "hidden_size 1e300",
        "num_hidden_layers 1e300",
    ],
)
def test_a_model_that_memory_cannot_hold_is_one_sentence(tmp_path, option: str) -> None:
    data = text_file(tmp_path / "text.txt")
    words = option.split()
    sizes = [word for name, size in zip(words[::2], words[1::2]) for word in (f"--model.{name}", size)]
    done = xtrain("train", "--data", str(data), "--out", str(tmp_path / "run"), *sizes, cpu=30)
    assert done.returncode == 1 and not (tmp_path / "run").exists()
    assert done.stderr.startswith("xtrain: error: model: out of memory on ") and done.stderr.count("\n") == 1, (
        done.stderr
    )
    assert f"{words[-2]} {int(float(words[-1]))}" in done.stderr


def test_the_coefficients_of_streams_count(tmp_path, monkeypatch) -> None:
    """phi alone has 2 * 80 * 8 * 192 values a layer: memory that holds the plain model does not hold this one."""
    given = options(text_file(tmp_path / "text.txt"), tmp_path / "run", model__hidden_size=192, device="cpu")
    count = Trainer(given | {"model.mhc_streams": 8}, quiet=True).model.num_parameters()
    sysconf = os.sysconf
    pages = (16 * count + 100_000) // sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else sysconf(name))
    Trainer(given, quiet=True)
    with pytest.raises(xt.OutOfMemoryError, match="model: out of memory on cpu, .* mhc_streams 8$"):
        Trainer(given | {"model.mhc_streams": 8}, quiet=True)


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch) -> None:
    given = options(text_file(tmp_path / "text.txt"), tmp_path / "run", device="cpu")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(sys.modules["xtrain._host"], "_LIMITS", (str(tmp_path / "none"), str(limit)))
    for text in (b"max\n", b"1000000000000000\n", b"", b"-1", b"\xff\xfe", b"9" * 5000, "\u0663".encode()):
        limit.write_bytes(text)
        Trainer(given, quiet=True)
    limit.write_text("100000\n")
    with pytest.raises(xt.OutOfMemoryError, match="model: out of memory on cpu, whose 0.0001 GB must hold 16 bytes"):
        Trainer(given, quiet=True)


# ---- Ctrl-C while the command is importing

# Stands in for NumPy, which is imported first and takes longest.
INTERRUPTED = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
"""
SCRIPT = """
import sys
from xtrain.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""


def interrupted(tmp_path, *command: str) -> subprocess.CompletedProcess:
    (tmp_path / "numpy.py").write_text(INTERRUPTED)
    root = os.path.dirname(os.path.dirname(xt.__file__))
    path = os.pathsep.join([str(tmp_path), root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return python(*command, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("command", [("-m", "xtrain", "doctor"), ("-mxtrain", "train"), ("SCRIPT", "--help")])
def test_ctrl_c_during_the_import_is_quiet(tmp_path, command) -> None:
    script = tmp_path / "bin" / "xtrain"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    done = interrupted(tmp_path, *(str(script) if word == "SCRIPT" else word for word in command))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "xtrain: error: stopped by Ctrl-C\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("name", ["xtrain", "other"])
def test_ctrl_c_during_the_import_is_an_exception_in_other_programs(tmp_path, name: str) -> None:
    script = tmp_path / "bin" / name
    script.parent.mkdir()
    script.write_text("try:\n    import xtrain\nexcept KeyboardInterrupt:\n    print('caught')\n")
    done = interrupted(tmp_path, str(script))
    assert (done.returncode, done.stdout, done.stderr) == (0, "caught\n", "")
    done = interrupted(tmp_path, "-c", "import xtrain", "-m", "xtrain")
    assert "KeyboardInterrupt" in done.stderr


def test_ctrl_c_is_answered_by_python_again_once_the_command_runs() -> None:
    code = """
import signal, sys
from xtrain import _early, cli
signal.signal(signal.SIGINT, _early._quiet)
assert cli.main(["--version"]) == 0
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
