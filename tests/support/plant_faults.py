"""Plants faults one at a time in copies of this tree, and runs the tests that must catch them; `make faults` calls it.

python tests/support/plant_faults.py                         # the whole table, one job
python tests/support/plant_faults.py --jobs 16               # sixteen copies of the tree, a fault each at a time
python tests/support/plant_faults.py --only 'rope|adamw'     # faults whose name, file or promise matches
python tests/support/plant_faults.py --list                  # the table
python tests/support/plant_faults.py --sample 40             # every 40th fault
python tests/support/plant_faults.py --record FILE           # goes on where an earlier call with this FILE was stopped
python tests/support/plant_faults.py --gpu                   # those of cuda/ alone, which take a GPU and nvcc, one job

A copy of the tree is built once, with the objects that the tree has. Then the tests are run without a fault, where none may fail, and
each job plants its faults in a copy of that copy: one C file is compiled again and the extension linked, Python is not built. After a
fault the sources, objects and extension are put back. What is needed: a C compiler, what the build needs, NumPy and pytest.

A fault is caught when a test fails or the process crashes. Tests that take longer than LIMIT are HUNG, as a busy machine may be the reason:
when the others are done, such a fault is planted again alone, with the limit ALONE. What hangs again stays HUNG. The exit status is 0 when all are caught. After Ctrl-C, SIGTERM or SIGHUP the tests that run are killed,
their faults are not recorded, and the copies are removed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from faults.table import Fault, table
from places import ROOT

GPU = "XTRAIN_PLANTING_ON_GPU"  # of the environment
LIMIT = 120  # seconds for the tests of a fault; those that take longer are killed
ALONE = 600  # for those that were killed, planted again while no other job runs
UNHURRIED = 900  # for the same tests without a fault, on a machine that may be busy
LEFT_OUT = (
    ".git", ".venv", ".ci", "sanitize", "tsan", "coverage", "lib.*", "temp.*", "__pycache__", "dist", "runs", "cuda", "docs", "parity",
    ".pytest_cache", ".ruff_cache", "lock", "*.egg-info",
)  # fmt: skip
KEPT = ("cuda", "docs", "parity")  # of those, what a tree needs: left out of build/ only
# A build with warnings as errors has objects with those flags: what a fault leaves unused or empty may not stop it.
NO_WARNINGS = (
    "".join(
        f'#pragma GCC diagnostic ignored "-W{name}"\n'
        for name in (
            "unused-variable",
            "unused-but-set-variable",
            "unused-const-variable",
            "unused-parameter",
            "unused-function",
            "unused-value",
            "empty-body",
            "sizeof-pointer-memaccess",
            "switch",
        )
    )
    + '#ifndef __clang__\n#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"\n#endif\n'
)
_ending = threading.Event()  # no further process is started
_running: set[int] = set()  # groups of processes; under _lock
_lock = threading.Lock()
CAUGHT, SURVIVED, HUNG, UNBUILT, UNRUN = "caught", "SURVIVED", "HUNG", "DID NOT BUILD", "TESTS DID NOT RUN"


@dataclass(frozen=True)
class Verdict:
    fault: Fault
    outcome: str
    seconds: float
    said: str  # by the compiler or by pytest


def planted(root: Path, fault: Fault) -> str:
    """The text of the file with the fault in it. ValueError unless its place is there exactly once."""
    text = (root / fault.file).read_text(encoding="utf-8")
    if text.count(fault.there) != 1:
        raise ValueError(
            f"plant_faults: {fault.name}: {fault.file} must have its place once, got {text.count(fault.there)} times: {fault.there}"
        )
    return text.replace(fault.there, fault.instead)


def chosen(faults: list[Fault], only: str, sample: int, gpu: bool = False) -> list[Fault]:
    """Faults that match `only`; every `sample`-th of them, from the first on. gpu: those that take one, else the others."""
    found = [
        fault for fault in faults if fault.gpu == gpu and re.search(only, f"{fault.name} {fault.file} {fault.promise}")
    ]
    return found[:: max(sample, 1)]


def recorded(path: Path) -> set[str]:
    """Names of the faults that a record calls caught."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {name for name, _, outcome in (line.partition("\t") for line in lines) if outcome == CAUGHT}


def add_line(path: Path, line: str) -> None:
    """One write, which threads do not mix. Begins a line of its own behind one that was cut off."""
    with path.open("ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            line = f"\n{line}"
        file.write(f"{line}\n".encode())


# ---- trees -----------------------------------------------------------------------------------------------------------------


def copy_tree(source: Path, target: Path) -> None:
    """Sources, objects and extension, with their times: what is built stays fresh."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        out = set(shutil.ignore_patterns(*LEFT_OUT)(folder, names))
        built = (source / "build") in (Path(folder), *Path(folder).parents)
        return out - ({"cuda"} if GPU in os.environ else set()) if built else out - set(KEPT)

    shutil.copytree(source, target, ignore=ignored, symlinks=True)


def run(tree: Path, *arguments: str, limit: float | None = None) -> tuple[int | None, str]:
    """Status and text of a Python process in `tree`; None for one that had to be killed."""
    room = tree.parent / f"{tree.name}.tmp"
    room.mkdir(exist_ok=True)
    environment = {**os.environ, "XTRAIN_CUDA": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    # What the caller added to the path, as a BLAS package, lies at one place for all trees: their objects stay fresh.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.fspath(tree), os.environ.get("PYTHONPATH"))))
    environment["XTRAIN_TEST_DEVICE"] = "cpu"  # whatever the suite runs on that plants a sample
    if GPU in environment:  # a fault of cuda/ is built, and seen on the device
        environment |= {"XTRAIN_CUDA": "1", "XTRAIN_TEST_DEVICE": "cuda"}
    environment |= {"TMPDIR": os.fspath(room), "XTRAIN_PLANTING": "1"}
    with _lock:
        if _ending.is_set():
            raise KeyboardInterrupt
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        _running.add(process.pid)
    try:
        said = process.communicate(timeout=limit)[0]
        if _ending.is_set():
            raise KeyboardInterrupt  # killed by end_all: no verdict
        return process.returncode, said
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, 9)  # what its tests have started goes with it
        process.wait()
        with _lock:
            _running.discard(process.pid)


def end_all() -> None:
    """Kill what runs, and start nothing more."""
    with _lock:
        _ending.set()
        for group in _running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, 9)


def end_in_order() -> None:
    """From here on signals that end this process raise SystemExit, so that nothing that it has started or written stays."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, _: object) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)  # until all is removed
        raise SystemExit(128 + number)

    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)


def build(tree: Path) -> tuple[int | None, str]:
    return run(tree, "setup.py", "--quiet", "build_ext", "--inplace")


def run_tests(tree: Path, tests: str, limit: float = LIMIT) -> tuple[int | None, str]:
    return run(
        tree, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", *shlex.split(tests), limit=limit
    )


def put_back(tree: Path, base: Path) -> None:
    """Makes built files of `tree` those of `base` again."""
    for place in ("build", "xtrain"):
        for path in (tree / place).rglob("*"):
            if path.suffix not in (".o", ".d", ".cmd", ".so") or not path.is_file():
                continue
            same = base / path.relative_to(tree)
            with contextlib.suppress(FileNotFoundError):
                there, here = same.stat(), path.stat()
                if (there.st_mtime_ns, there.st_size) != (here.st_mtime_ns, here.st_size):
                    path.unlink()
                    shutil.copy2(same, path)


@contextlib.contextmanager
def with_fault(tree: Path, base: Path, fault: Fault) -> Iterator[str]:
    """The fault is in the tree inside the block; the value is what the compiler said when it refused."""
    path = tree / fault.file
    native = fault.file.startswith(("csrc/", "cuda/"))
    path.write_text((NO_WARNINGS if native and not fault.gpu else "") + planted(base, fault), encoding="utf-8")
    try:
        status, said = build(tree) if native else (0, "")
        yield said or "no word" if status else ""
    finally:
        shutil.copy2(base / fault.file, path)
        put_back(tree, base)


@contextlib.contextmanager
def killing() -> Iterator[None]:
    """After an error or a signal the tests that run are killed, or the end of the pool would wait for them."""
    try:
        yield
    except BaseException:
        end_all()
        raise


def judge(tree: Path, base: Path, fault: Fault, alone: bool = False) -> Verdict:
    """alone: no other job runs, and the limit is longer."""
    begun = time.monotonic()
    with with_fault(tree, base, fault) as refused:
        if refused:
            return Verdict(fault, UNBUILT, time.monotonic() - begun, refused)
        status, said = run_tests(tree, fault.tests, ALONE if alone else LIMIT)
    if status is None:
        return Verdict(fault, HUNG, time.monotonic() - begun, said)
    # Status 2, an import that fails and with it the collection, is a catch.
    ran = status not in (3, 4, 5) and (status != 0 or re.search(r"\d+ passed", said))  # not where all are skipped
    outcome = UNRUN if not ran else SURVIVED if status == 0 else CAUGHT
    return Verdict(fault, outcome, time.monotonic() - begun, said)


# ---- the whole -------------------------------------------------------------------------------------------------------------


def plant(
    faults: list[Fault], jobs: int, scratch: Path, check_first: bool = True, show=print, record: Path | None = None
) -> list[Verdict]:
    """The verdicts on `faults`, in their order. Faults whose tests fail without one are not planted. SystemExit when the
    tree does not build. Those that hang are planted again, one after the other, behind the last; `show` sees both verdicts.
    Each that stands adds a line, name and outcome, to `record` at once."""
    _ending.clear()
    base = scratch / "base"
    copy_tree(ROOT, base)
    status, said = build(base)
    if status:
        sys.exit(f"plant_faults: the tree does not build:\n{said}")
    with ThreadPoolExecutor(jobs) as pool, killing():
        wrong: dict[str, str] = {}
        if check_first:
            tests = list(dict.fromkeys(fault.tests for fault in faults))
            found = zip(tests, pool.map(lambda text: run_tests(base, text, UNHURRIED), tests))
            wrong = {text: said for text, (status, said) in found if status != 0}
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(min(jobs, len(faults))):
            copy_tree(base, scratch / f"job{job}")
            trees.put(scratch / f"job{job}")

        def one(fault: Fault, alone: bool = False) -> Verdict:
            if fault.tests in wrong:
                return Verdict(
                    fault, UNRUN, 0.0, f"{wrong[fault.tests]}\nwithout a fault these must pass: {fault.tests}"
                )
            tree = trees.get()
            try:
                verdict = judge(tree, base, fault, alone)
            finally:
                trees.put(tree)
            if record is not None and (alone or verdict.outcome != HUNG):
                add_line(record, f"{fault.name}\t{verdict.outcome}")
            return verdict

        def seen(verdict: Verdict) -> Verdict:
            show(f"{verdict.outcome:<9} {verdict.seconds:5.1f} s  {verdict.fault.name}: {verdict.fault.promise}")
            if verdict.outcome in (UNBUILT, UNRUN):
                show("\n".join(verdict.said.splitlines()[-8:]))
            return verdict

        verdicts = list(map(seen, pool.map(one, faults)))
        return [seen(one(verdict.fault, alone=True)) if verdict.outcome == HUNG else verdict for verdict in verdicts]


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults, and see that the tests catch them.")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression for names, files and promises")
    parser.add_argument("--sample", type=int, default=1, help="take every Nth fault")
    parser.add_argument("--gpu", action="store_true", help="the faults of cuda/, which take a GPU and nvcc")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--record", type=Path, help="a file of verdicts: those caught in it are not planted again")
    options = parser.parse_args()
    faults = chosen(table(), options.only, options.sample, options.gpu)
    caught = recorded(options.record) if options.record else set()
    if options.gpu:
        os.environ[GPU] = "1"
    if options.list:
        for fault in faults:
            print(f"{fault.name:<44} {fault.file:<42} {fault.promise}")
        sys.exit()
    if not faults:
        sys.exit(f"plant_faults: --only must match a fault, got {options.only!r}")
    for fault in faults:
        planted(ROOT, fault)
    faults = [fault for fault in faults if fault.name not in caught]
    begun = time.monotonic()
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        verdicts = plant(
            faults,
            options.jobs,
            Path(folder),
            not options.no_check,
            lambda text: print(text, flush=True),
            options.record,
        )
    missed = [verdict.fault.name for verdict in verdicts if verdict.outcome != CAUGHT]
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} caught in {time.monotonic() - begun:.0f} s")
    if missed:
        sys.exit("not caught: " + ", ".join(missed))


if __name__ == "__main__":
    main()
