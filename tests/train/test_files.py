"""Whatever cannot be written is named in one line, and leaves neither half a file nor a lost one behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
from runs import arguments, options, python, text_file, xtrain

from xtrain import data, files, saving
from xtrain.errors import CheckpointError, DataError
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu

# A limit on the size of files stands in for a full disk. Pipes, and so the captured output, have none.
LIMITED = """
import resource, signal, sys
import xtrain.train
from xtrain import cli
from xtrain.bench import frame
frame.BURST, frame.TURNS, frame.PAUSE = 1e-5, 3, 0.0  # these tests are not about speed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # Python takes a file of byte code that the limit has cut for a whole one, then and later
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(cli.main(sys.argv[2:]))
"""
needs_limits = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_FSIZE")


def limited(size: int, *words: str, cwd: Path, **kwargs) -> subprocess.CompletedProcess:
    """`xtrain words` where no file may be larger than `size` bytes."""
    return python("-c", LIMITED, str(size), *words, cwd=cwd, **kwargs)


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def assert_one_line(done: subprocess.CompletedProcess, text: str) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("xtrain: error: ") and len(done.stderr.splitlines()) == 1, done.stderr
    assert text in done.stderr


def test_write_file_names_the_file_and_leaves_what_was_there(tmp_path) -> None:
    path = tmp_path / "x.json"
    path.write_text("before")

    def full(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError) as error:
        files.write_file(path, full)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_text() == "before" and names(tmp_path) == ["x.json"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        files.write_text(tmp_path / "folder", "x")
    assert error.value.filename == str(tmp_path / "folder")
    with pytest.raises(FileNotFoundError) as error:
        files.write_text(tmp_path / "nowhere" / "x", "x")
    assert error.value.filename == str(tmp_path / "nowhere" / "x")
    assert names(tmp_path) == ["folder", "x.json"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs os.mkfifo (POSIX)")
def test_what_is_no_regular_file_is_never_replaced(tmp_path) -> None:
    """A rename onto a device would put a file in its place."""
    pipe, text = tmp_path / "pipe", text_file(tmp_path / "text.txt")
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        files.write_text(pipe, "x")
    with pytest.raises(DataError, match=f"^data: {pipe} cannot be written: it is not a regular file"):
        data.prepare(text, pipe)
    with (
        pytest.raises(CheckpointError, match=f"^{pipe} cannot be written: Not a directory"),
        saving.DirectoryWriter(pipe) as writer,
    ):
        writer.publish()
    assert pipe.is_fifo() and names(tmp_path) == ["pipe", "text.txt"]


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs os.seteuid (POSIX)")
def test_a_read_only_folder() -> None:
    code = """
import os, sys
from xtrain import files
if os.geteuid() == 0:  # who may write everywhere
    os.seteuid(65534)
try:
    files.write_text(sys.argv[1], "x")
except PermissionError as error:
    print(error.filename)
"""
    with tempfile.TemporaryDirectory() as name:  # others may not enter tmp_path at all
        place = Path(name)
        place.chmod(0o555)
        done = python("-c", code, str(place / "x"))
        assert done.stdout == f"{place / 'x'}\n", done.stderr
        assert not names(place)


@needs_limits
@pytest.mark.parametrize(
    "words", [("check", "--op", "neg", "--json", "x.json"), ("bench", "gemm", "--sizes", "8", "--json", "x.json")]
)
def test_a_report_on_a_full_disk(tmp_path, words) -> None:
    assert_one_line(limited(100, *words, cwd=tmp_path), "x.json: File too large")
    assert not names(tmp_path)


@needs_limits
def test_the_limit_cuts_no_byte_code(tmp_path) -> None:
    cache = tmp_path / "cache"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    words = ("bench", "gemm", "--sizes", "8", "--json", "x.json")
    assert_one_line(
        limited(100, *words, cwd=tmp_path, env=environment | {"PYTHONPYCACHEPREFIX": str(cache)}), "File too"
    )
    sizes = [path.stat().st_size for path in cache.rglob("*.pyc")]
    assert sizes and min(sizes) > 100


@needs_limits
def test_a_plot_on_a_full_disk(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install matplotlib)")
    place, cache = tmp_path / "place", tmp_path / "cache"
    place.mkdir()
    cache.mkdir()
    # Matplotlib says on stderr that it makes its cache of fonts, which may take seconds, or that it cannot: it is made before, and in
    # a folder of our own, where no other process holds the lock.
    environment = os.environ | {"MPLCONFIGDIR": str(cache)}
    made = python("-c", "import matplotlib.font_manager", env=environment)
    assert made.returncode == 0 and names(cache), made.stderr
    done = limited(1000, "bench", "gemm", "--sizes", "8", "--plot", "x.png", cwd=place, env=environment)
    assert_one_line(done, "x.png: File too large")
    assert not names(place)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", [("--help",), ("doctor",), ("check", "--op", "neg")])
def test_standard_output_on_a_full_disk(words) -> None:
    with open("/dev/full", "w") as full:
        done = xtrain(*words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    done.stdout = ""
    assert_one_line(done, "standard output: No space left on device")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_verify_blames_no_directory_for_a_full_disk_of_its_output(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with open("/dev/full", "w") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # a line is written when it is printed
        done = xtrain(
            "verify", str(tmp_path), capture_output=False, stdout=full, stderr=subprocess.PIPE, env=environment
        )
    done.stdout = ""
    assert_one_line(done, "standard output: No space left on device")


@needs_limits
def test_a_token_file_on_a_full_disk(tmp_path) -> None:
    text_file(tmp_path / "text.txt")
    done = limited(1000, "prepare", "text.txt", "x.tokens", cwd=tmp_path)
    assert_one_line(done, "data: x.tokens cannot be written: File too large")
    assert_one_line(xtrain("prepare", "text.txt", ".", cwd=tmp_path), "data: . cannot be written: Is a directory")
    assert names(tmp_path) == ["text.txt"]


@needs_limits
def test_a_run_on_a_full_disk(tmp_path) -> None:
    values = arguments(options(text_file(tmp_path / "text.txt"), Path("run")))
    assert_one_line(limited(300, "train", *values, cwd=tmp_path), "run/config.toml cannot be written: File too large")
    assert names(tmp_path / "run") == [".lock"]
    done = limited(3000, "train", *values, cwd=tmp_path)
    assert_one_line(done, "run/checkpoint-00000008 cannot be written: File too large")
    assert names(tmp_path / "run") == [".lock", "config.toml", "metrics.jsonl"]


@needs_limits
def test_resuming_on_a_full_disk_keeps_what_is_there(tmp_path) -> None:
    assert xtrain("train", *arguments(options(text_file(tmp_path / "text.txt"), tmp_path / "run"))).returncode == 0
    kept = {name: (tmp_path / "run" / name).read_bytes() for name in ("config.toml", "metrics.jsonl")}
    checkpoint = tmp_path / "run" / "checkpoint-00000008"
    done = limited(300, "train", "--resume", "run", "--steps", "9", "--extend", cwd=tmp_path)
    assert_one_line(done, "run/config.toml cannot be written: File too large")
    room = len(kept["config.toml"]) + 40  # which has the path of the data
    (tmp_path / "run" / "metrics.jsonl").write_bytes(kept["metrics.jsonl"] * (1 + room // len(kept["metrics.jsonl"])))
    kept["metrics.jsonl"] = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    done = limited(room, "train", "--resume", "run", cwd=tmp_path)
    assert_one_line(done, "run/metrics.jsonl cannot be written: File too large")
    for name, content in kept.items():
        assert (tmp_path / "run" / name).read_bytes() == content
    assert names(tmp_path / "run") == [".lock", checkpoint.name, "config.toml", "metrics.jsonl"]


@pytest.mark.parametrize("name", [".lock", "config.toml", "metrics.jsonl", "checkpoint-00000008"])
def test_a_name_of_the_run_that_is_taken(tmp_path, name: str) -> None:
    values, taken = options(text_file(tmp_path / "text.txt"), tmp_path / "run"), tmp_path / "run" / name
    trainer = Trainer(values, quiet=True)
    taken.parent.mkdir()
    if name.startswith("checkpoint"):  # a folder of that name is an earlier checkpoint
        taken.write_text("mine")
    else:
        taken.mkdir()
    reason = "Not a directory" if taken.is_file() else "Is a directory"
    with pytest.raises(CheckpointError, match=f"^{taken} cannot be written: {reason}"):
        trainer.run()
    assert taken.is_dir() or taken.read_text() == "mine"
    assert not [p for p in names(tmp_path / "run") if "tmp" in p or "old" in p]


def test_a_plot_that_cannot_be_written_is_a_warning(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install matplotlib)")
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run", plot=True))
    (tmp_path / "run" / "loss.png").mkdir(parents=True)
    assert trainer.run().step == 8
    assert f"warning: loss.png could not be drawn: {tmp_path}/run/loss.png: Is a directory" in capsys.readouterr().out
    assert "loss.png" in names(tmp_path / "run") and not [p for p in names(tmp_path / "run") if "tmp" in p]


def test_threads_that_write_one_file_leave_one_of_theirs(tmp_path) -> None:
    texts = [str(i) * 1_000_000 for i in range(4)]
    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda text: files.write_text(tmp_path / "f", text), texts))
        assert (tmp_path / "f").read_text() in texts and names(tmp_path) == ["f"]


def test_what_a_kill_left_of_a_file_is_removed(tmp_path) -> None:
    (tmp_path / ".config.toml.tmp-12345").write_text("half")
    mine = [".checkpoint-00000001.tmp-12345.mine", ".config.toml.tmp-12345.mine", ".hidden"]
    (tmp_path / ".checkpoint-00000001.tmp-12345").mkdir()
    (tmp_path / mine[0]).mkdir()
    for name in mine[1:]:
        (tmp_path / name).write_text("mine")
    saving.clean_temporary(tmp_path)
    assert names(tmp_path) == mine, "names of other forms are left alone"


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path, monkeypatch) -> None:
    path = tmp_path / "secret.toml"
    path.write_text("old")
    path.chmod(0o600)
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.append(os.fstat(file).st_mode & 0o777), fsync(file)))
    files.write_text(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == flushed[0] == 0o600


def test_a_file_is_locked_until_it_has_its_name(tmp_path, monkeypatch) -> None:
    """Else another writer might take it for what a killed one has left."""
    import fcntl

    replace, found = os.replace, []

    def looks(source: str, *rest, **more) -> None:
        with open(tmp_path / source) as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append("free")
            except BlockingIOError:
                found.append("locked")
        replace(source, *rest, **more)

    monkeypatch.setattr(os, "replace", looks)
    files.write_text(tmp_path / "x", "new")
    assert found == ["locked"]


def test_what_killed_writers_of_other_files_have_left_stays(tmp_path) -> None:
    """And what no writer has named; a name is no expression."""
    name, word = "a.b[+", "tmp-abcdefghij"
    others = [f".a.b[.{word}", f".axb[+.{word}", f".{name}.{word}k", f".{name}.{word}.txt", f".{name}.tmp-ABCDEFGHIJ"]
    for left in (*others, f".{name}.{word}"):
        (tmp_path / left).write_text("")
    files.write_text(tmp_path / name, "x")
    assert names(tmp_path) == sorted([*others, name])


def test_a_pipe_with_the_name_of_a_temporary_file_is_not_waited_for(tmp_path) -> None:
    """It is no file that a killed writer has left."""
    pipe = tmp_path / ".x.tmp-abcdefghij"
    os.mkfifo(pipe)
    writes = threading.Thread(target=files.write_text, args=[tmp_path / "x", "new"], daemon=True)
    writes.start()
    writes.join(20)
    waits = writes.is_alive()
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # whoever waits goes on
    writes.join(20)
    assert not waits and names(tmp_path) == [pipe.name, "x"]


def test_a_folder_that_may_not_be_read_is_written(tmp_path, monkeypatch) -> None:
    """What is left there cannot be seen, and its names cannot be flushed."""
    (tmp_path / ".x.tmp-abcdefghij").touch()
    opened = os.open

    def refuses(path, flags: int, *rest, **more) -> int:
        if path == ".":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuses)
    files.write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new" and names(tmp_path) == [".x.tmp-abcdefghij", "x"]


def test_a_new_file_has_the_mode_of_the_process(tmp_path) -> None:
    """As open() gives it: others may read what is saved, where the umask lets them."""
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_signals_while_a_file_is_written(tmp_path) -> None:
    """They end the process in order where nobody handles them; a handler that is there stays, and all is as before afterwards."""
    numbers, inside = (signal.SIGTERM, signal.SIGHUP), []
    before = [signal.getsignal(number) for number in numbers]

    def mine(*_: object) -> None:
        raise AssertionError("no signal is sent")

    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, mine)
        files.write_file(tmp_path / "f", lambda stream: inside.extend(map(signal.getsignal, numbers)))
        assert inside[0] not in (signal.SIG_DFL, mine) and inside[1] is mine
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_DFL, mine]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs os.mkfifo (POSIX)")
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_no_pipe_is_waited_for(tmp_path, flags: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    signal.alarm(60)  # it would be
    try:
        with pytest.raises(OSError, match="it is not a regular file"):
            files.open_in_place(tmp_path / "pipe", flags)
    finally:
        signal.alarm(0)
