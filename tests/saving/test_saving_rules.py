"""Rules of saving that a file read back does not show: what is flushed when, what an error leaves, where bytes lie."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from runs import options, python, text_file

import xtrain as xt
from xtrain import _C, files, optim, saving
from xtrain.errors import CheckpointError
from xtrain.models import Qwen3, Qwen3Config
from xtrain.saving import directory as writing
from xtrain.saving import places
from xtrain.saving.reader import CheckedFile, DirectoryReader
from xtrain.saving.safetensors import SafetensorsFile, chunks
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu

SIZES = dict(
    vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8,
)  # fmt: skip


def read(directory: Path, name: str) -> bytes:
    return DirectoryReader(directory).read(name)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


# ---- files


def test_a_file_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch) -> None:
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append("dir" if os.path.isdir(f"/proc/self/fd/{fd}") else "file"), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda *a, **k: (events.append("name"), replace(*a, **k)))
    files.write_text(tmp_path / "x", "text")
    assert events == ["file", "name", "dir"]


def test_a_writer_that_fails_leaves_nothing(tmp_path) -> None:
    (tmp_path / "x").write_text("before")

    def fail(stream) -> None:
        stream.write(b"half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        files.write_file(tmp_path / "x", fail)
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_text() == "before"


def test_a_temporary_that_exists_is_not_written(tmp_path, monkeypatch) -> None:
    """Somebody's file of that name, made in the moment between: not truncated and not renamed."""
    monkeypatch.setattr(files, "temporary_name", lambda name, kind="tmp": f".{name}.{kind}-0")
    (tmp_path / ".x.tmp-0").write_text("somebody's")
    with pytest.raises(FileExistsError):
        files.write_text(tmp_path / "x", "text")
    assert (tmp_path / ".x.tmp-0").read_text() == "somebody's"


def test_signals_are_as_before_a_write(tmp_path) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]
    files.write_text(tmp_path / "x", "text")
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)] == before


def test_sigterm_in_a_write_leaves_nothing(tmp_path) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
        try:
            with pytest.raises(SystemExit) as ended:
                files.write_file(tmp_path / "x", lambda stream, number=number: signal.raise_signal(number))
        finally:
            signal.signal(number, before)
        assert ended.value.code == 128 + number and names(tmp_path) == []


# ---- directories


def test_short_writes_are_continued(tmp_path, monkeypatch) -> None:
    """A system may take fewer bytes than it was given: of 100, seven at a time."""

    class Slow:
        def __init__(self, file) -> None:
            self.file = file

        def write(self, part) -> int:
            return self.file.write(bytes(part)[:7])

        def fileno(self) -> int:
            return self.file.fileno()

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            self.file.close()

    monkeypatch.setattr(writing, "open", lambda *a, **k: Slow(open(*a, **k)), raising=False)  # noqa: SIM115
    with writing.DirectoryWriter(tmp_path / "m") as writer:
        writer.write("a", [bytes(range(100))])
        writer.publish()
    assert (tmp_path / "m" / "a").read_bytes() == bytes(range(100))


def test_a_child_saves_while_another_thread_of_its_parent_renames(tmp_path) -> None:
    """That thread is not in the child, and would never give the lock back."""
    code = """
import os, signal, threading, warnings
warnings.simplefilter("ignore")
from xtrain import saving
held, done = threading.Event(), threading.Event()
def hold():
    with saving.directory._renames:
        held.set()
        done.wait(240)
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    with saving.DirectoryWriter("m") as writer:
        writer.publish()
    os._exit(0)
status = os.waitpid(child, 0)[1]
done.set()
assert status == 0, status
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0 and names(tmp_path) == ["m"], done.stderr


def test_a_longer_file_is_damaged(tmp_path) -> None:
    """Bytes behind what was saved: no piece covers them."""
    with writing.DirectoryWriter(tmp_path / "m") as writer:
        writer.write("a", [b"text"])
        writer.publish()
    with open(tmp_path / "m" / "a", "ab") as file:
        file.write(b"!")
    with pytest.raises(
        CheckpointError,
        match=r"is damaged: it has 5 bytes, the manifest says 4; if you edited it, delete manifest\.json$",
    ):
        read(tmp_path / "m", "a")


def test_damage_in_a_long_piece_is_seen(tmp_path) -> None:
    """Of a piece that another thread hashes."""
    with writing.DirectoryWriter(tmp_path / "m") as writer:
        writer.write("a", [bytes(1 << 20)])
        writer.publish()
    data = bytearray((tmp_path / "m" / "a").read_bytes())
    data[-1] = 1
    (tmp_path / "m" / "a").write_bytes(data)
    with pytest.raises(CheckpointError, match="have another SHA-256"):
        read(tmp_path / "m", "a")
    assert not [thread for thread in threading.enumerate() if "ThreadPoolExecutor" in thread.name], "they end with it"


def test_the_checkpoint_of_a_resumed_run_stays(tmp_path) -> None:
    """Only what comes after it is set aside."""
    run = tmp_path / "run"
    Trainer(options(text_file(tmp_path / "text.txt"), run, save_every=2, keep=0), quiet=True).run()
    Trainer({"resume": str(run / "checkpoint-00000004")}, quiet=True).run()
    kept = [name for name in names(run) if "checkpoint" in name]
    assert kept == [f"checkpoint-0000000{n}" for n in (2, 4, 6, 8)] + [
        f"set-aside-1-checkpoint-0000000{n}" for n in (6, 8)
    ]


def test_an_index_names_files_beside_it(tmp_path) -> None:
    """Not one of another folder, which is there."""
    model = Qwen3(Qwen3Config(**SIZES))
    saving.save_model(model, tmp_path / "m", shard_bytes=3000)
    saving.save_model(model, tmp_path / "other", shard_bytes=3000)
    (tmp_path / "m" / "manifest.json").unlink()
    path = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    index["weight_map"] = {k: f"../other/{v}" if v == first else v for k, v in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="must name .safetensors files beside it, got '../other/"):
        saving.load_model(tmp_path / "m")
    long = "x" * 2000 + ".safetensors"  # which no file system has: the message does not repeat it
    path.write_text(json.dumps({"weight_map": dict.fromkeys(index["weight_map"], long)}))
    with pytest.raises(CheckpointError, match=r"must name .safetensors files beside it, got 'x+\.\.\.$"):
        saving.load_model(tmp_path / "m")


def test_a_checkpoint_that_is_being_removed_is_none(tmp_path, monkeypatch) -> None:
    """Killed in the middle of the removal, it has no longer the name of a checkpoint."""
    path = tmp_path / "checkpoint-00000004"
    path.mkdir()
    (path / "a").write_text("x")
    seen = []
    monkeypatch.setattr(saving.places.shutil, "rmtree", lambda *a, **k: seen.append(names(tmp_path)))
    saving.remove_checkpoint(path)
    assert len(seen) == 1 and saving.find_checkpoints(tmp_path) == [] and path.name not in seen[0]


# ---- models


def test_every_tensor_is_aligned(tmp_path) -> None:
    """To its itemsize, in the file: readers map it."""
    tensors = {
        "a": xt.zeros((3,), dtype=xt.uint8), "bb": xt.zeros((5,), dtype=xt.float64), "c": xt.zeros((1,), dtype=xt.bfloat16),
        "dddd": xt.zeros((7,), dtype=xt.int32),
    }  # fmt: skip
    for extra in ("", "x", "xxxxx"):
        path = tmp_path / f"{extra}.safetensors"
        path.write_bytes(b"".join(bytes(part) for part in chunks({**tensors, f"e{extra}": xt.zeros((2,))})))
        with SafetensorsFile(path) as file:
            sizes = {"F64": 8, "F32": 4, "I32": 4, "BF16": 2, "U8": 1}
            assert all(entry.start % sizes[entry.dtype] == 0 for entry in file.entries.values())


@pytest.mark.parametrize("shard_bytes", [1 << 30, 5000])
def test_files_of_a_model_say_their_format(tmp_path, shard_bytes: int) -> None:
    """Readers of Hugging Face refuse a file that does not."""
    saving.save_model(Qwen3(Qwen3Config(**SIZES)), tmp_path / "m", shard_bytes=shard_bytes)
    files = list((tmp_path / "m").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 5000)
    for path in files:
        with SafetensorsFile(path) as file:
            assert file.metadata == {"format": "pt"}


def test_shards_have_at_most_their_bytes(tmp_path) -> None:
    """Unless a tensor alone has more; the index adds up all of them."""
    model = Qwen3(Qwen3Config(**SIZES))
    saving.save_model(model, tmp_path / "m", shard_bytes=3000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    tensors = saving.model.model_tensors(model)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values()) and set(
        index["weight_map"]
    ) == set(tensors)
    for file in set(index["weight_map"].values()):
        held = [tensors[name].nbytes for name, where in index["weight_map"].items() if where == file]
        assert sum(held) <= 3000 or len(held) == 1


def test_a_load_costs_no_random_numbers(tmp_path) -> None:
    saving.save_model(Qwen3(Qwen3Config(**SIZES)), tmp_path / "m")
    _C.manual_seed(5)
    saving.load_model(tmp_path / "m")
    assert _C.get_rng_state() == (5, 0)


def test_a_tied_head_is_written_once(tmp_path) -> None:
    model = Qwen3(Qwen3Config(**SIZES, tie_word_embeddings=True))
    saving.save_model(model, tmp_path / "m")
    with SafetensorsFile(tmp_path / "m" / "model.safetensors") as file:
        assert "lm_head.weight" not in file.entries and "model.embed_tokens.weight" in file.entries
    ids = xt.zeros((1, 4), dtype=xt.int64)
    assert np.array_equal(saving.load_model(tmp_path / "m")(ids).detach().numpy(), model(ids).detach().numpy())


def test_another_format_of_the_state_is_refused(tmp_path) -> None:
    run = tmp_path / "run"
    Trainer(options(text_file(tmp_path / "text.txt"), run), quiet=True).run()
    path = saving.find_checkpoints(run)[0]
    (path / "manifest.json").unlink()
    state = json.loads((path / "trainer_state.json").read_text())
    (path / "trainer_state.json").write_text(json.dumps({**state, "format": 2}))
    with pytest.raises(CheckpointError, match="must have format 1, got 2"):
        saving.read_trainer_state(path)


def test_options_of_a_loaded_optimizer_are_as_they_were(tmp_path) -> None:
    """A tuple of betas, which JSON has made a list."""
    model = Qwen3(Qwen3Config(**SIZES))
    optimizer = optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.95))
    model.loss(xt.zeros((1, 4), dtype=xt.int64), xt.zeros((1, 4), dtype=xt.int64)).backward()
    optimizer.step()
    state = {"step": 1}
    saving.save_checkpoint(tmp_path / "c", model, optimizer, state)
    assert state == {"step": 1}, "the caller's"
    other = optim.AdamW(model.parameters())
    saving.load_checkpoint(tmp_path / "c", model, other)
    assert [{k: v for k, v in g.items() if k != "params"} for g in other.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]


def test_averages_that_do_not_fit(tmp_path) -> None:
    """Of a parameter that is not there, or of another shape; those that fit are taken."""
    model = Qwen3(Qwen3Config(**SIZES))
    saving.save_model(model, tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no averages \(ema\.safetensors\): they come from training with"):
        saving.load_model(tmp_path / "m", ema=True)
    norm = "model.norm.weight"
    for averages, words in (
        ({norm: xt.full((16,), 3.0)}, None),
        ({norm: xt.ones(16), "other": xt.ones(1)}, "holds unknown tensor other"),
        ({norm: xt.ones(1)}, rf"{norm} must have shape \(16,\), got \(1,\)"),
        ({norm: xt.ones(16, dtype=xt.int64)}, f"{norm} must be of float64, "),
    ):
        xt.save(averages, tmp_path / "m" / "ema.safetensors")
        if words is None:
            assert saving.load_model(tmp_path / "m", ema=True).model.norm.weight.tolist() == [3.0] * 16
        else:
            with pytest.raises(CheckpointError, match=words):
                saving.load_model(tmp_path / "m", ema=True)


def test_files_that_were_opened_are_closed(tmp_path) -> None:
    """Of saves that end well, and of files that are refused."""
    (tmp_path / "bad").write_bytes(bytes(20))
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for _ in range(4):
        with writing.DirectoryWriter(tmp_path / "m") as writer:
            writer.write("a", [b"text"])
            writer.publish()
        kept.append(writer)
        with pytest.raises(CheckpointError) as error:
            SafetensorsFile(tmp_path / "bad")
        kept.append(error)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_ends_early_says_where(tmp_path) -> None:
    (tmp_path / "x").write_bytes(bytes(10))
    with CheckedFile(tmp_path / "x") as file, pytest.raises(CheckpointError, match="it ends at byte 10, not 99$"):
        file.peek(4, 99)


def test_what_is_no_checkpoint_of_a_run(tmp_path) -> None:
    """A file of that name; and one that another process has just removed has no time."""
    (tmp_path / "checkpoint-00000009").write_text("")
    (tmp_path / "checkpoint-00000008").mkdir()
    assert places.find_checkpoints(tmp_path) == [tmp_path / "checkpoint-00000008"]
    assert places.modified(tmp_path / "gone") == 0.0 < places.modified(tmp_path)


def test_of_a_step_the_emergency_checkpoint_comes_behind(tmp_path) -> None:
    names = [
        "checkpoint-00000005",
        "emergency-checkpoint-00000005",
        "emergency-checkpoint-00000007",
        "checkpoint-00000003",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    found = [path.name for path in saving.find_checkpoints(tmp_path)]
    assert found == [names[2], names[0], names[1], names[3]]


def test_the_newest_of_what_killed_saves_left_is_named(tmp_path) -> None:
    for when, name in ((300, "b"), (100, "c"), (200, "a")):
        path = tmp_path / f".model.old-{name * 10}"
        path.mkdir()
        os.utime(path, (when, when))
    (tmp_path / ".model.old-other").mkdir()
    hint = places.displaced_hint(tmp_path / "model")
    assert hint.endswith(f"left the earlier one as {tmp_path / ('.model.old-' + 'b' * 10)}: rename it back")


def test_what_is_put_aside_twice_has_two_names(tmp_path) -> None:
    for _ in range(2):
        (tmp_path / "checkpoint-00000009").mkdir()
        (tmp_path / "checkpoint-00000009" / "mine").touch()
        assert len(saving.set_aside_after(tmp_path, 5)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"set-aside-{n}-checkpoint-00000009" for n in (1, 2)]
