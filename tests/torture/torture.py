"""Kills, failing system calls and failing power; `make torture` calls it.

    torture.py [power] [faults] [kills] [ranks] [--states 5000] [--kills 500] [--every 1] [--seed 1]

power   a run, its resume and a model that is replaced are recorded, call by call (disk_shim.c). Then power fails at every call: of what was not
        flushed any part may be on the disk (disk.py). The reader must find the last state that was promised, or a later one, with its bits.
faults  call n fails with EIO, ENOSPC or EINTR, for all n, and the disk is full from call n on. What was promised is there afterwards, and the
        run resumes to the bits of an undisturbed one.
kills   a process that trains is killed, stopped or told to end at random instants, and goes on from what it has left, to the same bits.
ranks   one of two processes that train together is killed, or both, while they save (killed_ranks.py). The other ends with status 75 in
        seconds, and both go on to the bits of one process.

The exit status is the verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import io
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
sys.path.append(os.fspath(Path(__file__).resolve().parents[1] / "support"))
sys.path.append(os.fspath(Path(__file__).resolve().parents[2]))  # a package that is not installed

from killed_ranks import killed_ranks
from oom import state_of
from power import STEPS, Expected, compile_shim, crashes, record, values
from runs import arguments, text_file, weights

from xtrain import _C, cli, saving
from xtrain.errors import CheckpointError, ConfigError, DataError
from xtrain.train import Trainer

FAULTS = ((errno.EIO, False), (errno.ENOSPC, False), (errno.EINTR, False), (errno.ENOSPC, True))
SHARED = Path("/dev/shm")


# ---- failing calls ---------------------------------------------------------------------------------------------------------


def faults(folder: Path, every: int, counts: Counter) -> list[str]:
    """In a process that has the shim."""
    shim, run = ctypes.CDLL(None), folder / "run"
    shim.shim_fail.restype, shim.shim_fail.argtypes = ctypes.c_int64, [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    text, wrong = text_file(folder / "text.txt", 3000), list[str]()
    expected = Expected(folder, text)
    shim.shim_start(os.fsencode(folder), None)
    save, promised = saving.save_checkpoint, [-1]

    def noted(path, *rest, **more) -> None:
        save(path, *rest, **more)
        promised[0] = max(promised[0], saving.checkpoint_step(path) or 0)

    saving.save_checkpoint = noted

    def trained() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            Trainer(values(text, run, save_every=2), quiet=True).run()

    shim.shim_fail(0, 0, 0)
    trained()
    total = shim.shim_fail(0, 0, 0)
    for code, for_good in FAULTS:
        for n in range(0, total, every):
            shutil.rmtree(run, ignore_errors=True)
            promised[0], what = -1, f"{errno.errorcode[code]}{' from' * for_good} call {n} of {total}"
            shim.shim_fail(n, 1 << 60 if for_good else n + 1, code)
            try:
                trained()
                counts["went on"] += 1
            except (CheckpointError, ConfigError, DataError, OSError) as error:
                counts["refused"] += 1
                if "\n" in str(error):
                    wrong.append(f"{what}: more than a line: {error}")
            except BaseException as error:
                wrong.append(f"{what}: {error!r:.300}")
            finally:
                shim.shim_fail(0, 0, 0)
            if promised[0] >= 0:
                found = ""
                try:
                    trainer = Trainer({"resume": os.fspath(run)}, quiet=True)
                    if trainer.step < promised[0]:
                        found = f"step {promised[0]} was promised, the resume goes on from {trainer.step}"
                    trainer.run()
                    if state_of(trainer) != expected.states[STEPS]:
                        found = "the resumed run ends with other bits"
                except Exception as error:
                    found = f"step {promised[0]} was promised: {error!r:.300}"
                if found:
                    wrong.append(f"{what}: {found}")
    counts["calls"] = total
    saving.save_checkpoint = save
    return wrong


# ---- kills -----------------------------------------------------------------------------------------------------------------

LONG = 240  # steps
SEEN = struct.Struct("<qq")  # the step that was promised, and the one the process began with


def child(text: Path, run: Path, slot: mmap.mmap) -> int:
    """`xtrain train`, which says what it has promised."""
    save, restore = saving.save_checkpoint, Trainer.run

    def noted(path, *rest, **more) -> None:
        save(path, *rest, **more)
        SEEN.pack_into(slot, 0, saving.checkpoint_step(path) or 0, SEEN.unpack_from(slot)[1])

    def begun(self, *rest, **more):
        SEEN.pack_into(slot, 0, SEEN.unpack_from(slot)[0], self.step)
        return restore(self, *rest, **more)

    saving.save_checkpoint, Trainer.run = noted, begun
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    return cli.main(["train", *arguments({**values(text, run, save_every=7), "steps": LONG, "resume": "auto"})])


def start(*what) -> int:
    number = os.fork()
    if number == 0:
        status = 70
        try:
            status = child(*what)
        except KeyboardInterrupt:  # before the command has begun, on a busy machine
            status = 130
        except SystemExit as end:  # a signal while a file was written outside the loop of steps
            status = end.code if isinstance(end.code, int) else 1
        finally:
            os._exit(status)
    return number


def kills(folder: Path, count: int, seed: int, counts: Counter) -> list[str]:
    _C.set_num_threads(1)
    text, run, chance, wrong = text_file(folder / "text.txt", 3000), folder / "killed", random.Random(seed), list[str]()
    (folder / "slot").write_bytes(bytes(SEEN.size))
    with open(folder / "slot", "r+b") as file:
        slot = mmap.mmap(file.fileno(), SEEN.size)
    SEEN.pack_into(slot, 0, -1, -1)
    begun = time.monotonic()
    _, status = os.waitpid(start(text, folder / "whole-run", slot), 0)
    whole = time.monotonic() - begun
    final = f"checkpoint-{LONG:08d}"
    if status:
        return [f"the undisturbed run ended with status {status}"]
    SEEN.pack_into(slot, 0, -1, -1)
    while counts["kills"] < count:
        number, promised = start(text, run, slot), SEEN.unpack_from(slot)[0]
        time.sleep(chance.uniform(0, 0.9 * whole))
        way = chance.choice([signal.SIGKILL] * 8 + [signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        os.kill(number, way)
        if way == signal.SIGSTOP:
            time.sleep(0.01)
            os.kill(number, chance.choice((signal.SIGKILL, signal.SIGCONT)))
        _, status = os.waitpid(number, 0)
        counts["kills" if os.WIFSIGNALED(status) else "ended by itself or a signal"] += 1
        now, from_step = SEEN.unpack_from(slot)
        if from_step >= 0 and promised > from_step:
            wrong.append(
                f"kill {counts['kills']}: step {promised} was promised, the next process began with {from_step}"
            )
        if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) not in (0, 129, 130, 143):
            wrong.append(f"kill {counts['kills']}: {way.name} gave status {os.WEXITSTATUS(status)}")
        SEEN.pack_into(slot, 0, now, -1)
        if (run / final / "manifest.json").exists():
            counts["runs to the end"] += 1
            if weights(run / final) != weights(folder / "whole-run" / final):
                wrong.append(f"kill {counts['kills']}: the run ends with other bits")
            shutil.rmtree(run)
            SEEN.pack_into(slot, 0, -1, -1)
    return wrong


# ---- the command -----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="of power, faults, kills, ranks; all by default")
    parser.add_argument("--states", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--every", type=int, default=1, help="only every n-th call of power and faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--shimmed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(*options.record)
        return 0
    if unknown := set(options.parts) - {"power", "faults", "kills", "ranks"}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    failed = 0
    with tempfile.TemporaryDirectory(dir=SHARED if os.access(SHARED, os.W_OK) else None) as name:
        for part in options.parts or ["power", "faults", "kills", "ranks"]:
            folder, counts, begun = Path(name) / part, Counter(), time.monotonic()
            folder.mkdir()
            if part == "faults" and not options.shimmed:
                environment = {**os.environ, "LD_PRELOAD": os.fspath(compile_shim(folder, "disk_shim"))}
                command = [sys.executable, __file__, "faults", "--shimmed", "--every", str(options.every)]
                failed += subprocess.run(command, env=environment).returncode != 0
                continue
            if part == "power":
                wrong = crashes(folder, options.states, options.seed, counts, options.every)
            elif part == "faults":
                wrong = faults(folder, options.every, counts)
            elif part == "ranks":
                wrong = killed_ranks(folder, options.kills, options.seed, counts)
            else:
                wrong = kills(folder, options.kills, options.seed, counts)
            for text in wrong[:20]:
                print(text)
            known = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            print(f"{part:7} {known}; {len(wrong)} wrong; {time.monotonic() - begun:.0f} s", flush=True)
            failed += bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
