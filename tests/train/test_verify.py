"""`xtrain verify`: a line for each directory, and the exit status."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runs import options, text_file, xtrain

from xtrain import saving
from xtrain.cli import main
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run with checkpoints after 4 and 8 steps, and a model directory."""
    place = tmp_path_factory.mktemp("verify")
    trainer = Trainer(options(text_file(place / "text.txt"), place / "run", save_every=4), quiet=True)
    trainer.run()
    saving.save_model(trainer.model, place / "model")
    return place


@pytest.fixture
def place(tmp_path, made) -> Path:
    shutil.copytree(made, tmp_path / "place")
    return tmp_path / "place"


def verify(path: Path, capsys) -> tuple[int, list[str], list[str]]:
    """(exit status, lines of standard output, lines of standard error)"""
    status = main(["verify", str(path)])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err.splitlines()


def test_whole_directories(place, capsys) -> None:
    status, said, errors = verify(place / "run", capsys)
    assert (status, errors) == (0, [])
    assert [line.partition(": ")[0] for line in said] == [
        f"{place}/run/checkpoint-00000008", f"{place}/run/checkpoint-00000004",
    ]  # fmt: skip
    for path, count in ((place / "run" / "checkpoint-00000004", 7), (place / "model", 3)):
        size = sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
        assert verify(path, capsys) == (0, [f"{path}: {count} files, {size:,} bytes, as they were saved"], [])


def test_every_damage_is_one_sentence(place, capsys) -> None:
    run = place / "run"
    for path in (place / "model", run / "checkpoint-00000008"):
        for file in sorted(path.iterdir()):
            content = file.read_bytes()
            middle = len(content) // 2
            for bad in (content[:-1], content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :], None):
                file.unlink() if bad is None else file.write_bytes(bad)
                for where in {path, run} if path.parent == run else {path}:
                    status, said, errors = verify(where, capsys)
                    if path == place / "model" and file.name == "manifest.json" and bad is None:
                        note = f"{path}: nothing to check, because there is no manifest.json"
                        assert (status, said, errors) == (0, [note], [])
                        continue
                    assert status == 1 and len(errors) == 1, (file, errors)
                    assert errors[0].startswith(f"xtrain: error: {path}/")
                    assert len(said) == (where == run), "the other checkpoint is whole"
            file.write_bytes(content)
    assert verify(run, capsys)[0] == 0


def test_the_first_damage_of_each(place, capsys) -> None:
    for path in saving.find_checkpoints(place / "run"):
        for name in ("config.json", "model.safetensors"):
            (path / name).write_bytes(b"damaged")
    status, said, errors = verify(place / "run", capsys)
    assert (status, said) == (1, []) and len(errors) == 2
    assert "checkpoint-00000008/config.json" in errors[0] and "checkpoint-00000004/config.json" in errors[1]


def test_emergency_checkpoints_are_checked(place, capsys) -> None:
    newest = place / "run" / "checkpoint-00000008"
    newest.rename(place / "run" / "emergency-checkpoint-00000008")
    assert verify(place / "run", capsys)[0] == 0
    (place / "run" / "emergency-checkpoint-00000008" / "manifest.json").unlink()
    status, said, errors = verify(place / "run", capsys)
    assert status == 1 and len(said) == 1 and "emergency-checkpoint-00000008/manifest.json" in errors[0]


def test_files_that_were_added_are_named(place, capsys) -> None:
    (place / "model" / "notes\n.txt").write_text("mine")
    status, (line,), _ = verify(place / "model", capsys)
    assert status == 0 and line.endswith(r"as they were saved; not in its manifest.json: 'notes\n.txt'")


def test_a_directory_of_another_program(place, capsys) -> None:
    """Others name theirs checkpoint-500, and have no manifest."""
    (place / "model" / "manifest.json").unlink()
    path = (place / "model").rename(place / "checkpoint-500")
    note = f"{path}: nothing to check, because there is no manifest.json"
    assert verify(path, capsys) == (0, [note], [])


def test_what_is_no_directory_of_ours(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    for name, text in (("none", "there is no such directory"), ("empty", "holds no manifest.json, no config.json and")):
        done = xtrain("verify", name, cwd=tmp_path)
        assert done.returncode == 1 and not done.stdout
        assert (
            done.stderr.startswith(f"xtrain: error: {name} ") and text in done.stderr and done.stderr.count("\n") == 1
        )
    assert xtrain("verify").returncode == 2
    assert "verify" in xtrain("--help").stdout and "manifest.json" in xtrain("verify", "--help").stdout


def test_a_directory_that_a_killed_save_has_moved(place, capsys) -> None:
    left = (place / "model").rename(place / f".model.old-{'a' * 10}")
    status, _, errors = verify(place / "model", capsys)
    assert status == 1 and errors[0].endswith(f"has left the earlier one as {left}: rename it back")
