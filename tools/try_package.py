"""Installs packages into empty environments, and tries there what a user would.

    python tools/try_package.py FILE [FILE ...] [--python PYTHON ...]

FILE is a wheel, tried with the Python of its tag, or a source distribution, tried with the first Python; --python names
interpreters as for tools/wheels.py. Each is installed with what it depends on, then `xtrain doctor`, `xtrain check`
(CPU) and 20 steps of `xtrain train` run in an empty folder. Exit status 1 when one of them fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.pythons import PYTHONS, on_the_path

WHERE = "import xtrain, sys; print(xtrain.__file__); sys.exit(xtrain.__file__.startswith(sys.prefix) is False)"
HIDDEN = ("PYTHONPATH", "PYTHONHOME", "XTRAIN_CUDA", "VIRTUAL_ENV")


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; RuntimeError with all of it when it fails."""
    variables = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    pieces = list(map(str, command))
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(pieces, cwd=cwd, env={**variables, "XTRAIN_CUDA": "0"}, **merged)
    except OSError as error:
        raise RuntimeError(f"{pieces[0]} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(pieces)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def tag_of(python: str) -> str:
    return run(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])", cwd=Path("/")).strip()


def interpreter(file: Path, pythons: dict[str, str]) -> str:
    if not file.is_file():
        raise RuntimeError("there is no such file")
    if file.suffix != ".whl":
        return next(iter(pythons.values()))
    parts = file.stem.split("-")  # name, version, perhaps a build number, then Python, ABI and platform
    tag = parts[-3] if len(parts) >= 5 else "no tag"
    if tag not in pythons:
        raise RuntimeError(
            f"{file.name} needs a Python of {tag}, and there is none among {', '.join(pythons) or 'none'}"
        )
    return pythons[tag]


def try_package(file: Path, python: str) -> str:
    """One line: what was installed, and how the loss went."""
    with tempfile.TemporaryDirectory() as parent:
        folder, empty = Path(parent, "env"), Path(parent, "empty")
        empty.mkdir()
        run(python, "-m", "venv", folder, cwd=empty)
        run(folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", file, cwd=empty)
        place = Path(run(folder / "bin/python", "-c", WHERE, cwd=empty).strip()).parent
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file() and path.suffix != ".pyc")
        xtrain = folder / "bin/xtrain"
        run(xtrain, "doctor", cwd=empty)
        run(xtrain, "check", cwd=empty)
        run(xtrain, "train", "--device", "cpu", "--steps", "20", "--out", "run", "--no-plot", cwd=empty)
        lines = map(json.loads, (empty / "run/metrics.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
        if not losses or not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
            raise RuntimeError(f"{file.name}: 20 steps must lower the loss, got {losses}")
    return f"{file.name}: {size / 1e6:.1f} MB installed, check passed, loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--python", nargs="+", default=on_the_path())
    options = parser.parse_args()
    if not options.python:
        sys.exit(f"no Python among {', '.join(PYTHONS)}: name one with --python")
    try:
        pythons = {tag_of(python): python for python in options.python}
    except RuntimeError as error:
        sys.exit(str(error))
    failed = 0
    for file in options.files:
        try:
            print(try_package(file.resolve(), interpreter(file, pythons)), flush=True)
        except RuntimeError as error:
            failed += 1
            print(f"{file.name}: {error}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
