"""The directory of a run: who may clean it, write into it, and continue what is there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from runs import options, python, text_file, weights, xtrain

from xtrain import saving
from xtrain.errors import CheckpointError, ConfigError
from xtrain.train import Trainer, plot, rundir, train
from xtrain.train.options import with_file

pytestmark = pytest.mark.on_cpu


@pytest.fixture
def data(tmp_path) -> Path:
    return text_file(tmp_path / "text.txt")


@pytest.fixture
def out(tmp_path, data) -> Path:
    """A run of 8 steps, with checkpoints after 4 and 8."""
    Trainer(options(data, tmp_path / "run", save_every=4), quiet=True).run()
    return tmp_path / "run"


@pytest.fixture
def two_renames(monkeypatch) -> None:
    """As on a system that cannot exchange two directories in one step."""
    monkeypatch.setattr(saving.directory._C, "exchange", lambda *_: False)


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


# ---- what is cleaned


def test_only_names_that_a_run_writes_are_cleaned(tmp_path) -> None:
    mine = [".venv.old-2024", ".backup.tmp-20240101", ".checkpoint-5.tmp-1", ".checkpoint-00000005.tmp-x", ".m.old-3"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text("mine")
    (tmp_path / ".keys.tmp-1").write_text("mine")
    (tmp_path / ".config.toml.tmp-7").mkdir()
    before = names(tmp_path)
    for name in (".checkpoint-00000005.tmp-1", ".checkpoint-123456789.tmp-2", ".checkpoint-00000006.old-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-00000006").mkdir()
    for name in (".config.toml.tmp-5", ".metrics.jsonl.tmp-5", ".loss.png.tmp-5"):
        (tmp_path / name).write_text("half")
    saving.clean_temporary(tmp_path)
    assert names(tmp_path) == sorted([*before, "checkpoint-00000006"])


def test_of_displaced_checkpoints_the_newest_gets_the_name(tmp_path) -> None:
    for newest in (1, 2, 3):
        run = tmp_path / str(newest)
        for number in (1, 2, 3):
            path = run / f".checkpoint-00000005.old-{number}"
            path.mkdir(parents=True)
            (path / str(number)).write_text("")
            os.utime(path, (number == newest, number == newest))
        saving.clean_temporary(run)
        assert names(run) == ["checkpoint-00000005"] and names(run / "checkpoint-00000005") == [str(newest)]


@pytest.mark.parametrize("resume", ["auto", "last", "run"])
def test_a_resume_touches_nothing_of_a_live_run(tmp_path, data, out, resume: str) -> None:
    for name in (".checkpoint-00000012.tmp-1", ".checkpoint-00000008.old-2"):
        (out / name).mkdir()
    before = names(out)
    given = {"resume": str(out)} if resume == "run" else {**options(data, out, save_every=4), "resume": resume}
    with rundir.RunLock(out):
        trainer = Trainer(given, quiet=True)
        assert names(out) == before
        with pytest.raises(ConfigError, match=f"^{out} is in use by another training process$"):
            trainer.run()
        assert names(out) == before
        (out / "checkpoint-00000008").rename(out / ".checkpoint-00000008.old-3")  # between two renames
        before = names(out)
        with pytest.raises(ConfigError, match=f"^{out} is in use by another training process$"):
            Trainer(given, quiet=True)
        assert names(out) == before


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("resume", ["auto", "last", "run", "checkpoint"])
def test_a_displaced_checkpoint_is_continued(data, out, resume: str, alone: bool) -> None:
    """alone: it was the only one."""
    checkpoint = out / "checkpoint-00000008"
    want = weights(checkpoint)
    checkpoint.rename(out / ".checkpoint-00000008.old-3")
    if alone:
        shutil.rmtree(out / "checkpoint-00000004")
    places = {"run": {"resume": str(out)}, "checkpoint": {"resume": str(checkpoint)}}
    trainer = Trainer(places.get(resume) or {**options(data, out, save_every=4), "resume": resume}, quiet=True)
    assert trainer.step == 8 and weights(checkpoint) == want and not list(out.glob(".checkpoint*"))


def test_a_resumed_run_can_be_resumed_from_anywhere(tmp_path, data, out, monkeypatch) -> None:
    monkeypatch.chdir(data.parent)
    Trainer(
        {**options(data, out, save_every=4, steps=12), "data": data.name, "resume": str(out), "extend": True},
        quiet=True,
    ).run()
    monkeypatch.chdir("/")
    trainer = Trainer({"resume": str(out), "extend": True, "steps": 16}, quiet=True)
    assert trainer.step == 12 and trainer.config.data == str(data)


def test_a_folder_that_is_no_run_is_left_as_it_is(tmp_path) -> None:
    (tmp_path / "x" / ".checkpoint-00000012.tmp-1").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Trainer({"resume": str(tmp_path / "x")}, quiet=True)
    assert names(tmp_path / "x") == [".checkpoint-00000012.tmp-1"]


# ---- two runs for one directory


def test_a_new_run_is_not_mixed_into_one_that_came_before_it(tmp_path, data) -> None:
    out = tmp_path / "run"
    first = Trainer(options(data, out), quiet=True)
    second = Trainer(options(data, out, steps=4, seed=7), quiet=True)
    first.run()
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=f"^{out} already holds a run; continue it with --resume"):
        second.run()
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    assert first.run().step == 8  # what it has written is its own


def test_a_run_that_starts_over_does_not_go_into_another(tmp_path, data) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    first, second = (Trainer({**options(data, out), "resume": "auto"}, quiet=True) for _ in range(2))
    assert first.run().step == 8
    with pytest.raises(ConfigError, match="already holds a run"):
        second.run()


def test_a_new_run_is_not_mixed_into_one_whose_checkpoint_is_displaced(tmp_path, data) -> None:
    (tmp_path / "run" / ".checkpoint-00000008.old-3").mkdir(parents=True)
    trainer = Trainer(options(data, tmp_path / "run"), quiet=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer.run()
    assert names(tmp_path / "run") == [".lock", "checkpoint-00000008"]


def test_a_run_that_left_only_metrics_is_not_mixed_either(tmp_path, data) -> None:
    out = tmp_path / "run"
    trainer = Trainer(options(data, out), quiet=True)
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer.run()


def test_a_resumed_run_does_not_set_aside_what_another_wrote_since(out) -> None:
    again = {"resume": str(out), "steps": 12, "extend": True}
    first, second = Trainer(again, quiet=True), Trainer(again, quiet=True)
    first.run()
    before = names(out)
    text = f"^{out} already holds a run that has gone on to checkpoint-00000012; continue it with --resume$"
    with pytest.raises(ConfigError, match=text):
        second.run()
    assert names(out) == before
    assert first.run().step == 12
    earlier = Trainer({"resume": str(out / "checkpoint-00000008"), "steps": 12, "extend": True}, quiet=True)
    assert earlier.run().step == 12 and [name for name in names(out) if "set-aside" in name]


def test_a_checkpoint_that_was_written_anew_since_is_another(out) -> None:
    first, second = (Trainer({"resume": str(out / "checkpoint-00000004")}, quiet=True) for _ in range(2))
    first.run()
    with pytest.raises(ConfigError, match="gone on to checkpoint-00000008"):
        second.run()


def test_a_save_keeps_what_it_has_just_written(tmp_path, data) -> None:
    trainer = Trainer(options(data, tmp_path / "run", keep=2), quiet=True)
    for step in (7, 8, 9):
        (tmp_path / "run" / saving.checkpoint_name(step)).mkdir(parents=True)
    for _ in range(3):
        trainer.train_step()
        trainer.save()
    kept = [saving.checkpoint_step(path) for path in saving.find_checkpoints(trainer.directory)]
    assert kept == [9, 8, 7, 3, 2]  # what is later belongs to somebody else; run() sets it aside


def test_a_handler_that_saves_while_another_save_renames_waits_for_nobody(tmp_path, two_renames, monkeypatch) -> None:
    def save(text: str) -> None:
        with saving.DirectoryWriter(tmp_path / "m") as writer:
            writer.write_json("a.json", text)
            writer.publish()

    save("first")
    real, inside = os.rename, []

    def rename(old, new):
        real(old, new)
        if not inside:  # as a signal's handler that runs between the two renames
            inside.append(True)
            save("inner")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match="m cannot be written"):
        save("outer")
    assert json.loads((tmp_path / "m" / "a.json").read_text()) == "inner"


def test_ctrl_c_after_the_renames_leaves_nothing_behind(tmp_path, two_renames, monkeypatch) -> None:
    real = os.rename

    def rename(old, new):
        real(old, new)
        if ".tmp-" in os.fspath(old):
            raise KeyboardInterrupt

    for stop in (False, True):
        with saving.DirectoryWriter(tmp_path / "m") as writer:
            writer.write_json("a.json", stop)
            if stop:
                monkeypatch.setattr(os, "rename", rename)
                with pytest.raises(KeyboardInterrupt):
                    writer.publish()
            else:
                writer.publish()
    assert names(tmp_path) == ["m"] and json.loads((tmp_path / "m" / "a.json").read_text()) is True


def test_a_config_toml_of_a_project_is_no_run(tmp_path, data, monkeypatch) -> None:
    """The folder holds metrics of another program; the file names its own place, or none."""
    monkeypatch.chdir(tmp_path)
    Path("metrics.jsonl").write_text('{"step": 1, "mine": true}\n')
    for text in ('out = "runs/foo"\n', ""):
        Path("config.toml").write_text(text)
        given = {name: value for name, value in options(data, Path()).items() if name != "out"}
        Trainer(with_file("config.toml", {**given, "resume": "auto"}), quiet=True).run()
    assert names(tmp_path) == ["config.toml", "metrics.jsonl", "runs", "text.txt"]
    assert Path("config.toml").read_text() == "" and "mine" in Path("metrics.jsonl").read_text()


def test_the_config_toml_of_a_run_without_a_checkpoint_continues_no_other(tmp_path, data, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Trainer(options(data, Path("runs") / name), quiet=True).run()
    for left in (*saving.find_checkpoints("runs/a"), Path("runs/a/metrics.jsonl")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    with pytest.raises(CheckpointError, match="runs/a holds no checkpoint"):
        train(file="runs/a/config.toml", resume="last", quiet=True)


@pytest.mark.parametrize("place", ["texts/runs/a", "texts/more", "texts"])
def test_a_run_inside_its_data_is_resumed_and_no_data(tmp_path, monkeypatch, place: str) -> None:
    """Also where texts have been before it."""
    (tmp_path / "texts" / "more").mkdir(parents=True)
    for i, folder in enumerate((".", "more", "more")):
        text_file(tmp_path / "texts" / folder / f"{i}.txt", 2000, seed=i)
    monkeypatch.chdir(tmp_path / "texts")
    given = options(Path("."), tmp_path / place, save_every=4)
    first = Trainer(given, quiet=True)
    first.run()
    monkeypatch.chdir(tmp_path)
    again = Trainer({"resume": place, "steps": 9, "extend": True}, quiet=True)
    assert again.run().step == 9
    other = Trainer({**given, "data": "texts", "out": "texts/other"}, quiet=True)
    counts = {(trainer.corpus.train_tokens, trainer.corpus.val_tokens) for trainer in (first, again, other)}
    assert len(counts) == 1


# ---- metrics


def test_lines_that_are_no_record_are_left_out(out) -> None:
    good = (out / "metrics.jsonl").read_bytes()
    bad = [b"\xff\xfe", b'{"step": null, "loss": 1}', b'{"step": "3"}', b'{"loss": 1}', b"[1]", b"[" * 100000, b""]
    (out / "metrics.jsonl").write_bytes(b"\n".join(bad) + b"\n" + good + b'{"step": 8')
    assert [r["step"] for r in plot.read_metrics(out / "metrics.jsonl")] == list(range(1, 9))
    assert Trainer({"resume": str(out), "steps": 10, "extend": True}, quiet=True).run().step == 10
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs os.mkfifo (POSIX)")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "it is not a regular file"),
        (lambda path: path.symlink_to("/dev/null"), "it is a symbolic link"),
    ],
)
def test_metrics_that_are_no_regular_file_are_refused(out, make, reason: str) -> None:
    path = out / "metrics.jsonl"
    path.unlink()
    make(path)
    signal.alarm(60)  # a pipe would be waited for
    try:
        with pytest.raises(CheckpointError, match=f"^{path} cannot be written: {reason}$"):
            Trainer({"resume": str(out)}, quiet=True).run()
    finally:
        signal.alarm(0)


# ---- the config.toml of a run


@pytest.mark.parametrize(
    "form",
    [
        "--resume RUN/config.toml",
        "--resume=RUN/config.toml",
        "RUN/config.toml --resume",
        "RUN/config.toml --resume auto",
    ],
)
def test_the_config_of_a_run_means_that_run(tmp_path, data, form: str) -> None:
    for name in ("a", "b"):  # b is the newest
        Trainer(options(data, tmp_path / "runs" / name), quiet=True).run()
    done = xtrain("train", *form.replace("RUN", "runs/a").split(), cwd=tmp_path)
    assert done.returncode == 0 and "the run is in runs/a" in done.stdout, done.stdout + done.stderr
    done = xtrain("train", *form.replace("RUN/", "").split(), cwd=tmp_path / "runs" / "a")
    assert done.returncode == 0 and "8 steps in" in done.stdout, done.stdout + done.stderr


def test_a_file_is_no_run(tmp_path, data) -> None:
    with pytest.raises(CheckpointError, match=f"^resume: {data} is no directory$"):
        Trainer({"resume": str(data)}, quiet=True)


def test_another_config_does_not_mean_a_run(tmp_path, data, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Trainer(options(data, Path("runs", name)), quiet=True).run()
    for place in (Path("other.toml"), Path("runs/a/other.toml"), Path("config.toml")):
        place.write_bytes(Path("runs/a/config.toml").read_bytes())
        assert train(file=place, resume="last", quiet=True).directory == Path("runs/b")
    assert train(file="runs/a/config.toml", resume="last", quiet=True).directory == Path("runs/a")
    assert train(file="runs/a/config.toml", resume="last", out="runs/b", quiet=True).directory == Path("runs/b")
    assert train(file="runs/a/config.toml", resume="auto", out="runs/c", quiet=True).directory == Path("runs/c")


# ---- directories that are replaced


def test_threads_that_write_one_directory_leave_one_of_theirs(tmp_path) -> None:
    """In a process of its own: any error of a thread fails."""
    code = """
import sys, threading
from pathlib import Path
from xtrain import saving
sys.setswitchinterval(1e-5)
failed = []
def work(text):
    try:
        for _ in range(150):
            with saving.DirectoryWriter("m") as writer:
                for name in "ab":
                    writer.write(name, [text])
                writer.publish()
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(bytes([65 + n]),)) for n in range(3)]
[t.start() for t in threads]; [t.join() for t in threads]
found = {Path("m", name).read_bytes() for name in "ab"}
assert not failed and len(found) == 1, (failed, found)
"""
    run_alone(code, tmp_path)


def test_a_forked_child_can_save_while_the_parent_renames(tmp_path) -> None:
    code = """
import os, signal
from xtrain import saving
with saving.directory._renames:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        with saving.DirectoryWriter("m") as writer:
            writer.publish()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    run_alone(code, tmp_path)


def run_alone(code: str, place: Path) -> None:
    done = python("-c", code, cwd=place)
    assert done.returncode == 0, done.stderr
    assert names(place) == ["m"]


def write(path: Path, text: bytes) -> None:
    with saving.DirectoryWriter(path) as writer:
        writer.write("a", [text])
        writer.publish()


@pytest.mark.parametrize("kind", ["tmp", "old"])
@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_debris_blocks_no_save(tmp_path, kind: str, make) -> None:
    write(tmp_path / "m", b"1")
    number = threading.get_native_id()
    for n in (number, number + 1):
        debris = tmp_path / f".m.{kind}-{n}"
        make(debris)
        if debris.is_dir():
            (debris / "file").touch()
    write(tmp_path / "m", b"2")
    assert (tmp_path / "m" / "a").read_bytes() == b"2"
    assert names(tmp_path) == [f".m.{kind}-{number}", f".m.{kind}-{number + 1}", "m"]


def test_debris_does_not_keep_a_checkpoint(tmp_path) -> None:
    (tmp_path / f".checkpoint-00000001.tmp-{threading.get_native_id()}").touch()
    (tmp_path / "checkpoint-00000001").mkdir()
    saving.remove_checkpoint(tmp_path / "checkpoint-00000001")
    assert not saving.find_checkpoints(tmp_path)


def test_what_interrupts_the_renames_loses_nothing(tmp_path, two_renames, monkeypatch) -> None:
    write(tmp_path / "m", b"1")
    real = os.rename

    def interrupted(a, b):
        real(a, b)
        if ".old-" in os.fspath(b):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "m", b"2")
    assert (tmp_path / "m" / "a").read_bytes() == b"1" and names(tmp_path) == ["m"]


def test_a_missing_directory_whose_save_was_killed_is_named(tmp_path) -> None:
    (tmp_path / ".m.old-123").mkdir()
    for load in (saving.load_model, rundir.resolve_run_directory):
        with pytest.raises(
            CheckpointError, match=rf"there is no.*; .* left the earlier one as {tmp_path}/\.m\.old-123"
        ):
            load(tmp_path / "m")


def test_a_link_stays_and_its_target_is_replaced(tmp_path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "m").symlink_to("disk/target")
    for text in (b"1", b"2"):
        write(tmp_path / "m", text)
        assert (tmp_path / "m").is_symlink() and (tmp_path / "disk" / "target" / "a").read_bytes() == text
    assert names(tmp_path) == ["disk", "m"] and names(tmp_path / "disk") == ["target"]


def test_a_config_of_somebody_else_is_kept(tmp_path) -> None:
    """What a run has written is known by its lock; a folder may well have a config.toml for another purpose."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.toml").write_text("mine = 1\n")
    with pytest.raises(
        ConfigError, match="out must be a folder without a config.toml that no run has written, got .*run"
    ):
        Trainer(options(text_file(tmp_path / "text.txt"), out), quiet=True)
    assert (out / "config.toml").read_text() == "mine = 1\n" and [p.name for p in out.iterdir()] == ["config.toml"]
