"""Prints the lines and branches of csrc that tests have run, by room; `make coverage` calls it.

python tests/support/coverage_rooms.py               # of the counters in build/obj/sanitize-coverage
python tests/support/coverage_rooms.py --missing     # and the lines of each file that nothing has run
python tests/support/coverage_rooms.py --json FILE   # of a report that gcovr --json has written

The exit status is 0 when at least LEAST percent of the lines were run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from places import ROOT

LEAST = 92.0  # percent of the lines of csrc
COUNTERS = ROOT / "build" / "obj" / "sanitize-coverage"


def measured(gcovr: str) -> dict:
    """What gcovr says about each file of csrc. A file that includes itself for each dtype has one count a line."""
    command = [gcovr, "--root", str(ROOT), "--filter", "csrc/", "--json", "--merge-mode-functions=merge-use-line-min"]
    command += ["--gcov-ignore-errors=no_working_dir_found", "--gcov-ignore-parse-errors=all", str(COUNTERS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"coverage_rooms: gcovr failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def room_of(file: str) -> str:
    return "/".join(Path(file).parts[:3][:-1]) if len(Path(file).parts) < 4 else "/".join(Path(file).parts[:3])


def tally(report: dict) -> dict[str, dict[str, list[int]]]:
    """{file: {"lines": [run, all], "branches": [taken, all], "missing": line numbers}}"""
    out = {}
    for file in report["files"]:
        lines: dict[int, int] = defaultdict(int)
        branches: dict[tuple[int, int], int] = defaultdict(int)
        for line in file["lines"]:
            if line.get("gcovr/noncode") or line.get("gcovr/excluded"):
                continue
            lines[line["line_number"]] += line["count"]
            for number, branch in enumerate(line["branches"]):
                branches[line["line_number"], number] += branch["count"]
        out[file["file"]] = {
            "lines": [sum(count > 0 for count in lines.values()), len(lines)],
            "branches": [sum(count > 0 for count in branches.values()), len(branches)],
            "missing": sorted(number for number, count in lines.items() if count == 0),
        }
    return out


def percent(run: int, total: int) -> float:
    return 100.0 * run / total if total else 100.0


def spans(numbers: list[int]) -> str:
    """[1, 2, 3, 7] as 1-3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lines and branches of csrc that tests have run, by room.")
    parser.add_argument("--gcovr", default="gcovr")
    parser.add_argument("--json", help="a report of gcovr --json instead of the counters")
    parser.add_argument("--missing", action="store_true")
    options = parser.parse_args()
    files = tally(json.loads(Path(options.json).read_text()) if options.json else measured(options.gcovr))
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for file, found in sorted(files.items()):
        for room in (room_of(file), "all of csrc"):
            for i, value in enumerate([*found["lines"], *found["branches"]]):
                rooms[room][i] += value
        if options.missing and found["missing"]:
            print(f"{file}: {spans(found['missing'])}")
    print(f"{'room':<26} {'lines':>7} {'run':>7} {'%':>6}   {'branches':>8} {'taken':>7} {'%':>6}")
    for room, (run, lines, taken, branches) in sorted(
        rooms.items(), key=lambda item: (item[0] == "all of csrc", item[0])
    ):
        row = f"{room:<26} {lines:>7} {run:>7} {percent(run, lines):>6.1f}   {branches:>8} {taken:>7} {percent(taken, branches):>6.1f}"
        print(row)
    if not files or percent(*rooms["all of csrc"][:2]) < LEAST:
        sys.exit(f"coverage_rooms: at least {LEAST:g} % of the lines of csrc must be run")


if __name__ == "__main__":
    main()
