"""Runs the scripts of tests/races with a package that was built with ThreadSanitizer; `make tsan` calls it.

First a planted race, which must be reported: it shows that reports come through. Then every script, `--seconds` each. A script is right
when it ends with status 0, which it does not after a report. A script whose text says "NO TSAN" is left out; a file beside it with the
ending .supp has its suppressions. The exit status is the verdict.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

RACES = Path(__file__).resolve().parent.parent / "races"
REPORTED = 66  # exit status after a report
LIMIT = 60  # seconds a script may take above what it was given


def environment(package: Path, suppressions: Path | None) -> dict[str, str]:
    compiler = os.environ.get("CC") or "gcc"
    library = subprocess.run(
        [*compiler.split(), "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    options = f"exitcode={REPORTED}:history_size=4:second_deadlock_stack=1"
    if suppressions:
        options += f":suppressions={suppressions}"
    return {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": os.fspath(package), "TSAN_OPTIONS": options}


def run(prefix: list[str], package: Path, *args: str, seconds: float = 0, suppressions: Path | None = None):
    """Status and text of a Python process; None where it had to be killed."""
    command = [*prefix, sys.executable, *args]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment(package, suppressions),
            cwd=RACES,  # not the checkout, whose own build `python -c` would find first
            timeout=seconds + LIMIT,
        )
    except subprocess.TimeoutExpired as late:
        return None, (late.stderr or b"").decode(errors="replace")
    return done.returncode, done.stdout + done.stderr


def planted(package: Path) -> list[str]:
    """The command prefix with which ThreadSanitizer works here; ends the process where the planted race is not reported."""
    code = "from xtrain import _C; _C.planted_race()"
    for prefix in ([], ["setarch", "-R"]):  # older run-time libraries need addresses that are not randomised
        if prefix and not shutil.which(prefix[0]):
            continue
        status, text = run(prefix, package, "-c", code)
        if status == REPORTED and "data race" in text and "run_planted_race" in text:
            return prefix
    sys.exit(f"tsan: the planted race was not reported (status {status}):\n{text[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=Path("build/tsan/lib"), help="folder of the built package")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("names", nargs="*", help="scripts; all by default")
    options = parser.parse_args()
    package = options.package.resolve()
    prefix = planted(package)
    print("planted race: reported", flush=True)
    paths = [path for path in sorted(RACES.glob("*.py")) if path.stem != "race"]
    if unknown := set(options.names) - {path.stem for path in paths}:
        sys.exit(f"tsan: no such script: {', '.join(sorted(unknown))}")
    failed = ran = 0
    for path in paths:
        if options.names and path.stem not in options.names:
            continue
        if "NO TSAN" in path.read_text():
            print(f"{path.stem:16} left out", flush=True)
            continue
        suppressions, begun = path.with_suffix(".supp"), time.monotonic()
        status, text = run(
            prefix,
            package,
            os.fspath(path),
            str(options.seconds),
            seconds=options.seconds,
            suppressions=suppressions if suppressions.exists() else None,
        )
        reports = text.count("WARNING: ThreadSanitizer")
        verdict = "hangs" if status is None else "right" if status == 0 else f"status {status}, {reports} reports"
        print(f"{path.stem:16} {verdict} ({time.monotonic() - begun:.0f} s)", flush=True)
        ran += 1
        if status != 0:
            failed += 1
            print(text[:20_000], flush=True)
    print(f"{ran} scripts, {failed} failed")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
