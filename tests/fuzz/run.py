"""Runs the fuzzers; `make fuzz` calls it.

    run.py [FAMILY ...] [--seconds 60] [--jobs 2] [--seed 1]       a table at the end; the exit status is the verdict
    run.py [FAMILY ...] --cases 4000 --seed 1                      as many cases of each family, however long they take
    run.py FAMILY --seed 1 --case 4711                             one case again, in this process, with what it does

Workers are processes of their own: a crash, a hang or memory beyond its limit is a finding that names its case, and the
worker goes on behind it. Without a seed each run takes another; the table says which.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
sys.path.append(os.fspath(Path(__file__).resolve().parents[2]))  # a package that is not installed

from frame import Family, Progress, Wrong, chance_of

MEMORY = 512 << 20  # bytes that a worker's heap may grow by
STARTS = 120.0  # seconds that a worker may take before its first case
MOST = 20  # findings after which a worker stops: they are one defect
FAMILIES = ("programs", "doors", "files")


def family_class(name: str) -> type[Family]:
    if planted := os.environ.get("PLANTED"):  # by a test of this file
        spec = importlib.util.spec_from_file_location(name, planted)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.FAMILY
    return importlib.import_module(name).FAMILY


def one_case(family: Family, seed: int, number: int) -> str:
    """Runs a case; what is wrong, or ""."""
    try:
        family.run(chance_of(family.name, seed, number))
    except Wrong as wrong:
        return str(wrong)
    except Exception:
        return "an exception that is not documented: " + traceback.format_exc()
    return ""


# ---- a worker ----------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> int:
    faulthandler.enable()
    name, first, step = options.families[0], *options.range
    folder = Path(tempfile.mkdtemp(dir=options.slot.parent))
    family, progress = family_class(name)(folder), Progress(options.slot)
    if not os.environ.get("XTRAIN_SANITIZE"):
        for chance in range(3):  # so that what is loaded lazily does not count
            one_case(family, -1, chance)
        in_use = (
            int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            if sys.platform == "linux"
            else 0
        )
        if in_use:
            resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, resource.RLIM_INFINITY))
    family.counts.clear()
    number, done, findings = first, 0, 0

    def goes_on() -> bool:
        return number < options.cases if options.cases else bool(done % 16) or time.time() < options.until

    while findings < MOST and goes_on():
        progress.write(number, done, findings)
        if wrong := one_case(family, options.seed, number):
            findings += 1
            print(json.dumps({"case": number, "wrong": wrong, "what": family.describe()}), flush=True)
        done += 1
        number += step
    progress.write(number, done, findings)
    print(json.dumps({"counts": family.counts}), flush=True)
    return 0


# ---- the parent ----------------------------------------------------------------------------------------------------------


def used_by(pid: int) -> tuple[str, float]:
    """(state, R: it runs or waits for a processor, D: for a disk, S: for something else; seconds of a processor that it has had)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "S", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Worker:
    """A process, started anew behind the case that ended it."""

    def __init__(
        self, name: str, seed: int, first: int, step: int, until: float, cases: int | None, folder: Path
    ) -> None:
        self.name, self.seed, self.step, self.until, self.limit = name, seed, step, until, cases
        self.folder, self.cases, self.at, self.findings, self.counts = folder, 0, first, [], Counter()
        self.ends, self.ended = 0, False
        self._start()

    def _start(self) -> None:
        self.slot = self.folder / f"{self.name}-{self.at}"
        self.slot.unlink(missing_ok=True)
        self.progress, self.output = Progress(self.slot), open(f"{self.slot}.out", "w+")  # noqa: SIM115
        self.seen, self.moved = self.progress.read(), time.monotonic()
        self.begins = True  # a worker that has not begun its first case is not slow at it
        self.used = 0.0  # seconds of a processor until it moved last
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.name, "--seed", str(self.seed), "--slot", os.fspath(self.slot),
             "--until", str(self.until), "--range", str(self.at), str(self.step),
             *(() if self.limit is None else ("--cases", str(self.limit)))],
            stdout=self.output, stderr=subprocess.STDOUT,
            # Each thread would reserve 64 MiB of addresses for its mallocs: on many cores that is the worker's limit.
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        )  # fmt: skip

    def poll(self, slow: float) -> None:
        if self.ended:
            return
        status, now = self.process.poll(), self.progress.read()
        if now != self.seen:
            self.seen, self.moved, self.begins = now, time.monotonic(), False
            self.used = used_by(self.process.pid)[1]
        limit = STARTS + slow if self.begins else slow
        hung = status is None and time.monotonic() - self.moved > limit
        if hung:  # unless others have the processors, and it waits for its turn
            state, used = used_by(self.process.pid)
            hung = state not in "RD" or used - self.used > limit
        if hung:
            self.process.kill()
            self.process.wait()
        if status is None and not hung:
            return
        self.output.seek(0)
        rest = []
        for line in self.output:
            try:
                found = json.loads(line)
                self.findings += [found] if "case" in found else []
                self.counts.update(found.get("counts", {}))
            except ValueError:
                rest.append(line)
        self.output.close()
        case, done, _ = self.progress.read()
        case = max(case, self.at)  # one that ended before its first case
        self.cases += done
        self.ended = status == 0
        if self.ended:
            return
        self.ends += 1
        what = f"no end within {limit:.0f} s" if hung else f"the process ended with status {status}"
        self.findings.append({"case": case, "wrong": what, "what": "".join(rest)[-3000:]})
        self.at = case + self.step
        self.ended = self.ends >= 5 or (time.time() >= self.until if self.limit is None else self.at >= self.limit)
        if not self.ended:
            self._start()


def fuzz(name: str, options: argparse.Namespace, seconds: float, folder: Path) -> tuple[str, list[dict]]:
    """A row of the table, and the findings."""
    begun = time.monotonic()
    slow = family_class(name).slow
    until = time.time() + seconds
    workers = [
        Worker(name, options.seed, job, options.jobs, until, options.cases, folder) for job in range(options.jobs)
    ]
    while not all(worker.ended for worker in workers):
        time.sleep(0.05)
        for worker in workers:
            worker.poll(slow)
    spent, cases = time.monotonic() - begun, sum(worker.cases for worker in workers)
    counts = sum((worker.counts for worker in workers), Counter())
    findings = [found for worker in workers for found in worker.findings]
    note = ", ".join(f"{key} {counts[key]}" for key in sorted(counts))
    row = f"{name:10} {cases:>10} cases {spent:7.0f} s {cases / spent:>9.0f} a second {len(findings):>4} findings   {note}"
    return row, findings


def again(options: argparse.Namespace) -> int:
    name = options.families[0]
    with tempfile.TemporaryDirectory() as folder:
        family = family_class(name)(Path(folder))
        wrong = one_case(family, options.seed, options.case)
        print(family.describe())
    print(wrong or "right")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="in all")
    parser.add_argument("--cases", type=int, help="of each family, in place of --seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--lacking", action="store_true", help="leave out what needs packages that are not installed")
    parser.add_argument("--case", type=int, help="run this case of one family again")
    parser.add_argument("--slot", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--range", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    if options.seed is None:
        options.seed = int(time.time())
    if options.slot:
        return work(options)
    names = options.families or list(FAMILIES)
    missing = sorted({package for name in names for package in family_class(name).lacks()})
    if missing and not options.lacking:
        sys.exit(f"fuzz: {', '.join(missing)} must be installed, or --lacking given, which leaves out what they read")
    if options.case is not None:
        return again(options)
    whole, rows, findings = sum(family_class(name).share for name in names), [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            seconds = options.seconds * family_class(name).share / whole
            row, found = fuzz(name, options, seconds, Path(folder))
            rows.append(row)
            print(row, flush=True)
            for one in found:
                findings.append((name, one))
                print(f"\n{name}, case {one['case']}: {one['wrong']}\n{one['what']}")
                print(
                    f"again: python tests/fuzz/run.py {name} --seed {options.seed} --case {one['case']}\n", flush=True
                )
    without = f", without {', '.join(missing)}" if missing else ""
    print(f"\nseed {options.seed}, {options.jobs} jobs{without}")
    print("\n".join(rows))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
