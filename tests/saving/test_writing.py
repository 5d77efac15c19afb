"""Writing files and directories where others may write, too: links, foreign temporaries, killed and living writers."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import metrics, options, python, text_file

from xtrain import _C, files, saving
from xtrain.cli.export import whole
from xtrain.errors import CheckpointError
from xtrain.train import Trainer, checkpoints

pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX file handles and links"),
]


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def write(path: Path, text: bytes) -> None:
    with saving.DirectoryWriter(path) as writer:
        writer.write("a", [text])
        writer.publish()


# ---- links


@pytest.mark.parametrize(
    ("name", "there"),
    [(".lock", True), (".lock", False), ("config.toml", True), ("config.toml", False), ("metrics.jsonl", False)],
)
def test_a_link_in_a_run_is_refused(tmp_path, name: str, there: bool) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    run.mkdir()
    if there:
        victim.write_text('{"step": 1}\n')
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), run), quiet=True)
    (run / name).symlink_to(victim)
    with pytest.raises(CheckpointError, match=f"^{run / name} cannot be written: it is a symbolic link$"):
        trainer.run()
    assert victim.read_text() == '{"step": 1}\n' if there else not victim.exists()
    assert (run / name).is_symlink()


def test_a_link_in_a_resumed_run_is_refused(tmp_path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    Trainer(options(text_file(tmp_path / "text.txt"), run), quiet=True).run()
    (run / "metrics.jsonl").rename(victim)
    before = victim.read_bytes()
    (run / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written: it is a symbolic link$"):
        Trainer({"resume": str(run), "steps": 9, "extend": True}, quiet=True).run()
    assert victim.read_bytes() == before


@pytest.mark.parametrize("content", ["thesis.txt", "manifest.json"])
def test_a_checkpoint_that_is_a_link_is_refused(tmp_path, content: str) -> None:
    """Made in mid-run: what it points at would be replaced, and removed."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), run), quiet=True)
    victim.mkdir()
    (victim / content).write_text("years of work")
    evaluate = trainer.evaluate

    def plant() -> dict[str, float]:
        (run / "checkpoint-00000008").symlink_to(victim)
        return evaluate()

    trainer.evaluate = plant
    with pytest.raises(
        CheckpointError, match=r"checkpoint-00000008 (cannot be written: it is a symbolic link|must be)"
    ):
        trainer.run()
    assert (victim / content).read_text() == "years of work" and names(victim) == [content]
    assert (run / "checkpoint-00000008").is_symlink()


def test_a_directory_of_other_files_is_not_replaced_by_a_checkpoint(tmp_path) -> None:
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run"), quiet=True)
    (tmp_path / "run" / "checkpoint-00000000").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-00000000" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="must be new, empty or an earlier save, but it holds other files"):
        trainer.save()
    assert names(tmp_path / "run" / "checkpoint-00000000") == ["thesis.txt"]


def test_a_picture_that_is_a_link_is_a_warning(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install matplotlib)")
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("mine")
    (run / "loss.png").symlink_to(victim)
    assert Trainer(options(text_file(tmp_path / "text.txt"), run, plot=True)).run().step == 8
    assert victim.read_text() == "mine"
    assert "loss.png could not be drawn" in (said := capsys.readouterr().out) and "it is a symbolic link" in said


def test_a_run_whose_directory_is_a_link(tmp_path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run"), quiet=True).run()
    assert (tmp_path / "run").is_symlink() and len(metrics(tmp_path / "disk")) == 8


def test_a_link_made_before_its_temporary_file_is_not_followed(tmp_path, monkeypatch) -> None:
    """Also where somebody has foreseen the name."""
    (tmp_path / "victim").write_text("mine")
    monkeypatch.setattr(files, "temporary_name", lambda name: f".{name}.tmp-foreseeing")
    (tmp_path / ".x.tmp-foreseeing").symlink_to("victim")
    with pytest.raises(FileExistsError):
        files.write_text(tmp_path / "x", "text")
    assert (tmp_path / "victim").read_text() == "mine"


def test_the_names_of_temporaries_cannot_be_foreseen() -> None:
    made = {files.temporary_name("x") for _ in range(100)}
    assert len(made) == 100 and all(files.is_temporary(name, "x") for name in made)


def test_a_link_inside_a_temporary_directory_is_not_followed(tmp_path) -> None:
    (tmp_path / "victim").write_text("mine")
    with pytest.raises(CheckpointError, match="File exists"), saving.DirectoryWriter(tmp_path / "m") as writer:
        (writer.temporary / "a").symlink_to(tmp_path / "victim")
        writer.write("a", [b"text"])
    assert (tmp_path / "victim").read_text() == "mine" and names(tmp_path) == ["victim"]


def test_a_temporary_directory_that_is_replaced_by_a_link_gets_nothing(tmp_path) -> None:
    (tmp_path / "victim").mkdir()
    with saving.DirectoryWriter(tmp_path / "m") as writer:
        writer.temporary.rename(tmp_path / "moved")
        writer.temporary.symlink_to("victim")
        writer.write("a", [b"text"])
    assert not names(tmp_path / "victim") and (tmp_path / "moved" / "a").read_bytes() == b"text"


def test_a_linked_checkpoint_is_removed_as_a_link(tmp_path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "file").write_text("kept")
    (tmp_path / "checkpoint-00000001").symlink_to("disk")
    saving.remove_checkpoint(tmp_path / "checkpoint-00000001")
    assert names(tmp_path) == ["disk"] and names(tmp_path / "disk") == ["file"]


# ---- one step


def test_a_directory_is_replaced_in_one_step(tmp_path, monkeypatch) -> None:
    """No moment without one: the rename that publishes the first is the only one."""
    if not _C.exchange(tmp_path, tmp_path):
        pytest.skip("this file system cannot exchange two directories")
    write(tmp_path / "m", b"1")
    monkeypatch.setattr(os, "rename", lambda *_: pytest.fail("renamed"))
    write(tmp_path / "m", b"2")
    assert (tmp_path / "m" / "a").read_bytes() == b"2" and names(tmp_path) == ["m"]


def test_exchange(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    done = _C.exchange(tmp_path / "a", os.fsencode(tmp_path / "b"))
    assert names(tmp_path / "a") == (["b"] if done else ["a"])
    assert not _C.exchange(tmp_path / "a", tmp_path / "c") and names(tmp_path) == ["a", "b"]
    with pytest.raises(ValueError, match="null"):
        _C.exchange("a\0", "b")
    with pytest.raises(TypeError):
        _C.exchange("a", 1)


# ---- flushed to the disk


def test_what_is_made_is_flushed_with_its_folder(tmp_path, monkeypatch) -> None:
    """Names, too: a folder that is not flushed may lose them with the power."""
    flushed, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not show descriptors")
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "a" / "b" / "run", save_every=4), quiet=True)
    monkeypatch.setattr(os, "fsync", fsync)
    trainer.run()
    run = tmp_path / "a" / "b" / "run"
    assert {str(tmp_path), str(run.parent.parent), str(run.parent), str(run)} <= set(flushed)
    assert flushed.count(str(run / "metrics.jsonl")) >= 3  # at both saves and at the end
    first = next(i for i, path in enumerate(flushed) if "checkpoint-00000004" in path)
    assert str(run / "metrics.jsonl") in flushed[:first]
    flushed.clear()
    files.write_text(tmp_path / "x", "text")
    assert flushed[-1] == str(tmp_path) and len(flushed) == 2


@pytest.mark.parametrize("there", [False, True])
def test_a_directory_is_flushed_before_and_its_name_after_it_is_published(tmp_path, monkeypatch, there: bool) -> None:
    """Before: its files, then their names. After: its own name, in the folder above."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not show descriptors")
    if there:
        write(tmp_path / "m", b"before")
    seen, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        published = (tmp_path / "m" / "a").exists() and (tmp_path / "m" / "a").read_bytes() == b"after"
        seen.append(("." if path == str(tmp_path) else Path(path).name.partition("-")[0], published))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write(tmp_path / "m", b"after")
    assert seen == [("a", False), ("manifest.json", False), (".m.tmp", False), (".", True)]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_flushes_no_folders(tmp_path, monkeypatch, number: int) -> None:
    """Network file systems say EINVAL. An error of the disk is another matter."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    calls = [
        lambda: files.write_text(tmp_path / "x", "text"),
        lambda: files.make_folders(tmp_path / "a" / "b"),
        lambda: write(tmp_path / "m", b"text"),
    ]
    for call in calls:
        if number == errno.EIO:
            with pytest.raises((OSError, CheckpointError), match="Input/output error"):
                call()
        else:
            call()


# ---- what killed writers leave

KILLED = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from xtrain import data, files, saving
def stop(*_):
    print("begun", flush=True)
    os.kill(os.getpid(), int(sys.argv[2]))
if sys.argv[1] == "file":
    files.write_file("x", stop)
elif sys.argv[1] == "export":
    from xtrain.cli.export import whole
    with whole(Path("x")) as temporary, open(temporary, "wb") as stream:
        stop()
else:
    with saving.DirectoryWriter("x"):
        stop()
"""


def write_again(path: Path, kind: str) -> None:
    if kind == "export":
        with whole(path) as temporary:
            temporary.write_bytes(b"whole")
    else:
        files.write_text(path, "whole") if kind == "file" else write(path, b"whole")


@pytest.mark.parametrize("kind", ["file", "directory", "export"])
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path, kind: str) -> None:
    mine = ["..tmp-abcdefghij", ".x.tmp-20240101", ".x.tmp-backup", ".y.tmp-abcdefghij"]
    for name in mine:
        (tmp_path / name).touch()
    for _ in range(2):
        assert python("-c", KILLED, kind, "9", cwd=tmp_path).returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == len(mine) + 1, "the second has removed what the first left"
    write_again(tmp_path / "x", kind)
    assert names(tmp_path) == sorted([*mine, "x"])


@pytest.mark.parametrize("kind", ["file", "directory", "export"])
def test_a_living_writer_keeps_its_temporary(tmp_path, kind: str) -> None:
    command = [sys.executable, "-c", KILLED, kind, str(int(signal.SIGSTOP))]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "begun\n", child.stderr.read()
        (temporary,) = names(tmp_path)
        write_again(tmp_path / "x", kind)
        assert names(tmp_path) == [temporary, "x"]
    finally:
        child.kill()
        child.communicate()


def test_a_writer_whose_file_was_taken_for_a_dead_one_makes_another(tmp_path, monkeypatch) -> None:
    """The moment between making a temporary file and locking it."""
    real, taken = files.lock, []

    def late(descriptor: int) -> None:
        if not taken:
            taken.extend(tmp_path.glob(".x.tmp-*"))
            taken[0].unlink() if taken[0].is_file() else taken[0].rmdir()
        real(descriptor)

    monkeypatch.setattr(files, "lock", late)
    files.write_text(tmp_path / "x", "whole")
    assert (tmp_path / "x").read_text() == "whole" and names(tmp_path) == ["x"] and taken
    taken.clear()
    monkeypatch.setattr(saving.directory, "lock", late)
    (tmp_path / "x").unlink()
    write(tmp_path / "x", b"whole")
    assert names(tmp_path) == ["x"] and names(tmp_path / "x") == ["a", "manifest.json"] and taken


# ---- a full disk


class Disk:
    """Has room for `room` checkpoints: one more makes every fsync of a new one fail."""

    def __init__(self, run: Path, room: int, monkeypatch, number: int = errno.ENOSPC) -> None:
        self.attempts = 0
        real = saving.save_checkpoint

        def save(path, *args, **kwargs) -> None:
            self.attempts += 1
            if len([p for p in saving.find_checkpoints(run) if p != Path(path)]) >= room:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(os, "fsync", self._full)
                    real(path, *args, **kwargs)
            real(path, *args, **kwargs)

        self._number = number
        monkeypatch.setattr(saving, "save_checkpoint", save)

    def _full(self, _: int) -> None:
        raise OSError(self._number, os.strerror(self._number))


@pytest.fixture
def trainer(tmp_path) -> Trainer:
    """With checkpoints of steps 1, 2 and 3."""
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run", keep=3, steps=40))
    trainer.directory.mkdir()
    for _ in range(3):
        trainer.train_step()
        trainer.save()
    trainer.train_step()
    return trainer


def kept(trainer: Trainer) -> list[int | None]:
    return [saving.checkpoint_step(path) for path in saving.find_checkpoints(trainer.directory)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_the_oldest_checkpoint_makes_room(trainer, monkeypatch, number: int, capsys) -> None:
    disk = Disk(trainer.directory, 3, monkeypatch, number)
    trainer.save()
    assert kept(trainer) == [4, 3, 2] and disk.attempts == 2
    assert "checkpoint-00000001 is removed to make room" in capsys.readouterr().out


def test_a_full_disk_never_costs_the_last_whole_checkpoint(trainer, monkeypatch) -> None:
    Disk(trainer.directory, 0, monkeypatch)
    for left in ([3, 2], [3], [3], [3]):
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
            trainer.save()
        assert kept(trainer) == left


def test_damaged_checkpoints_do_not_count_as_whole(trainer, monkeypatch) -> None:
    for step in (2, 3):
        (trainer.directory / saving.checkpoint_name(step) / "config.json").write_text("damaged")
    Disk(trainer.directory, 3, monkeypatch)
    with pytest.raises(CheckpointError, match="No space left on device"):
        trainer.save()
    assert kept(trainer) == [3, 2, 1]


def test_emergency_and_later_checkpoints_make_no_room(trainer, monkeypatch) -> None:
    """The first are the user's to remove; the others belong to another run, and are not this one's last whole one."""
    run = trainer.directory
    (run / "checkpoint-00000001").rename(run / "emergency-checkpoint-00000001")
    (run / "checkpoint-00000002").rename(run / "checkpoint-00000009")
    Disk(run, 0, monkeypatch)
    with pytest.raises(CheckpointError, match="No space left on device"):
        trainer.save()
    assert kept(trainer) == [9, 3, 1]


@pytest.mark.parametrize(("keep", "number"), [(0, errno.ENOSPC), (3, errno.EIO)])
def test_nothing_else_costs_a_checkpoint(trainer, monkeypatch, keep: int, number: int) -> None:
    trainer.config.keep = keep
    disk = Disk(trainer.directory, 3, monkeypatch, number)
    with pytest.raises(CheckpointError, match=os.strerror(number)):
        trainer.save()
    assert kept(trainer) == [3, 2, 1] and disk.attempts == 1


def test_a_failed_save_is_tried_again_after_as_much_time_as_it_took(monkeypatch) -> None:
    now, tried, warned = [0.0], [], []
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def save() -> None:
        tried.append(now[0])
        now[0] += 10.0
        if now[0] < 70:
            raise CheckpointError("full") from OSError(errno.ENOSPC if now[0] < 40 else errno.EIO, "x")

    saver = checkpoints.Saver(save, warned.append)
    while now[0] < 100:
        saver.try_to_save()
        now[0] += 3.0
    assert tried == [0.0, 22.0, 44.0, 66.0, 79.0, 92.0], "ten seconds and the rest of a step between failures"
    assert warned == ["full", "full"], "once a reason"


def test_a_run_on_a_full_disk_does_not_try_at_every_step(tmp_path, monkeypatch, capsys) -> None:
    """A step takes a second, and a failed save four."""
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run", save_every=1, steps=30))
    attempts, real = [], saving.save_checkpoint
    clock = SimpleNamespace(monotonic=lambda: trainer.step + 4.0 * len(attempts))
    monkeypatch.setattr(checkpoints, "time", clock)

    def save(*args, **kwargs) -> None:
        attempts.append(trainer.step)
        if trainer.step < 30:
            raise CheckpointError("no room") from OSError(errno.ENOSPC, "no room")
        real(*args, **kwargs)

    monkeypatch.setattr(saving, "save_checkpoint", save)
    assert trainer.run().step == 30
    assert attempts == [1, 5, 9, 13, 17, 21, 25, 29, 30]
    assert capsys.readouterr().out.count("warning: no room") == 1
