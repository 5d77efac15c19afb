"""Two processes that train together, of which one or both are killed while they save: the part `ranks` of torture.py."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from power import values
from runs import arguments, text_file, weights

from xtrain import _C, cli, saving
from xtrain.train import Trainer

STEPS, EVERY = 40, 2
SEEN = struct.Struct("<qqqq")  # promised step, step that rank 0 began with, saves that it has begun, and ended
SOON = 20.0  # seconds in which the other one must end: it takes less than one, but on a busy machine
LEASH = 600.0  # seconds after which a process counts as hung


def options(text: Path, run: Path) -> list[str]:
    return arguments({**values(text, run, save_every=EVERY), "steps": STEPS, "resume": "auto", "max_ranks": 2})


def child(rank: int, folder: Path, text: Path, run: Path, slot: mmap.mmap) -> int:
    """`xtrain train` as a rank, which says what it has promised, and when it saves."""
    here = {"XTRAIN_RANK": str(rank), "XTRAIN_WORLD_SIZE": "2", "XTRAIN_STORE": f"file:{folder / 'meeting'}"}
    os.environ.update(here)
    write, run_it, save = saving.save_checkpoint, Trainer.run, Trainer.save

    def put(place: int, value: int) -> None:
        if rank == 0:
            struct.pack_into("<q", slot, 8 * place, value)

    def written(path, *rest, **more) -> None:
        write(path, *rest, **more)
        put(0, saving.checkpoint_step(path) or 0)

    def begun(self, *rest, **more):
        put(1, self.step)
        return run_it(self, *rest, **more)

    def saved(self):
        put(2, SEEN.unpack_from(slot)[2] + 1)
        path = save(self)
        put(3, SEEN.unpack_from(slot)[2])
        return path

    saving.save_checkpoint, Trainer.run, Trainer.save = written, begun, saved
    quiet = os.open(folder / f"said-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    return cli.main(["train", *options(text, run)])


def start(*what) -> int:
    number = os.fork()
    if number == 0:
        status = 70
        try:
            status = child(*what)
        finally:
            os._exit(status)
    return number


def ended(number: int, seconds: float) -> int | None:
    """The exit status of a process, negative for a signal; None, and it is killed, where it has not ended by then."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    return None


@contextmanager
def shared(folder: Path) -> Iterator[mmap.mmap]:
    (folder / "slot").write_bytes(bytes(SEEN.size))
    with open(folder / "slot", "r+b") as file, mmap.mmap(file.fileno(), SEEN.size) as slot:
        SEEN.pack_into(slot, 0, -1, -1, 0, 0)
        yield slot


def killed_ranks(folder: Path, count: int, seed: int, counts: Counter) -> list[str]:
    _C.set_num_threads(1)
    text, run, chance, wrong = text_file(folder / "text.txt", 3000), folder / "run", random.Random(seed), list[str]()
    whole, final = folder / "whole", f"checkpoint-{STEPS:08d}"
    number = os.fork()
    if number == 0:
        status = 70
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            status = cli.main(["train", *options(text, whole)])
        finally:
            os._exit(status)
    if ended(number, LEASH) != 0:
        return ["the undisturbed run of one process has failed"]
    longest = 0.001  # seconds of a save
    with shared(folder) as slot:
        while counts["kills"] < count and len(wrong) < 20:
            promised = SEEN.unpack_from(slot)[0]
            SEEN.pack_into(slot, 0, promised, -1, 0, 0)
            numbers = [start(rank, folder, text, run, slot) for rank in (0, 1)]
            saves, deadline = chance.choice((1, 1, 2, 3)), time.monotonic() + LEASH
            while SEEN.unpack_from(slot)[2] < saves and time.monotonic() < deadline:
                if any(os.waitid(os.P_PID, one, os.WEXITED | os.WNOHANG | os.WNOWAIT) for one in numbers):
                    break  # the run has come to its end
                time.sleep(0.0002)
            until = time.monotonic() + chance.uniform(0, 1.2 * longest)
            while time.monotonic() < until:
                pass
            during = SEEN.unpack_from(slot)[2] > SEEN.unpack_from(slot)[3]
            victims = chance.choice(([0], [0], [1], [1], [0, 1]))
            for victim in victims:
                os.kill(numbers[victim], signal.SIGKILL)
            killed_at, statuses = time.monotonic(), [ended(one, LEASH) for one in numbers]
            what = f"kill {counts['kills']} of {victims} at save {saves} after step {SEEN.unpack_from(slot)[1]}"
            done = (run / final / "manifest.json").exists()
            for rank, status in enumerate(statuses):
                # The second of two victims may have noticed the end of the first before its own.
                killed = (-signal.SIGKILL, 0, 75) if rank in victims[1:] else (-signal.SIGKILL, 0)
                if status not in (killed if rank in victims else (75, 0) if done else (75,)):
                    wrong.append(f"{what}: rank {rank} ended with status {status}")
            if time.monotonic() - killed_at > SOON:
                wrong.append(f"{what}: the other one took {time.monotonic() - killed_at:.1f} s to end")
            counts["kills"] += -signal.SIGKILL in statuses
            counts["during a save"] += -signal.SIGKILL in statuses and during
            now, from_step, _, _ = SEEN.unpack_from(slot)
            if 0 <= from_step < promised:
                wrong.append(f"{what}: step {promised} was promised, the next start began with {from_step}")
            if not during and not done:
                longest *= 0.9
            elif during:
                longest = min(longest * 1.1, 1.0)
            if done:
                counts["runs to the end"] += 1
                if weights(run / final) != weights(whole / final):
                    wrong.append(f"{what}: the run ends with other bits")
                shutil.rmtree(run)
                SEEN.pack_into(slot, 0, -1, -1, 0, 0)
            else:
                SEEN.pack_into(slot, 0, now, -1, 0, 0)
    return wrong
