"""Copies of the package, made of links, with another CUDA library: one of fake_cuda.c, say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from places import ROOT
from runs import HANGS

import setup_cuda
import xtrain as xt

LIBRARY = "libxtrain_cuda.so"


def make_package(folder: Path) -> Path:
    """Puts a package `xtrain` without a CUDA library into a folder; everything else is links to the package under test."""
    real, copy = Path(xt.__file__).parent, folder / "xtrain"
    (copy / "_lib").mkdir(parents=True)
    for path in [*real.iterdir(), *(real / "_lib").iterdir()]:
        if path.name not in ("_lib", "__pycache__", LIBRARY):
            (copy / path.relative_to(real)).symlink_to(path)
    return folder


def run(package: Path, code: str, **environment: str) -> str:
    """What `code` prints; it has to end well."""
    environment = {**os.environ, "PYTHONPATH": str(package), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=package, env=environment, timeout=HANGS
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def make_fake(package: Path, contract: str) -> None:
    _compile(package, "fake_cuda.c", contract, [])


def make_half(package: Path, contract: str) -> None:
    """A library that has our contract, and no function that opens it."""
    source = package / "half.c"
    source.write_text(f'const char *xt_cuda_contract(void) {{ return "{contract}"; }}\n')
    subprocess.run([_compiler(), "-shared", "-fPIC", source, "-o", package / f"xtrain/_lib/{LIBRARY}"], check=True)


def _compiler() -> str:
    return next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))))


def make_nccl(folder: Path) -> Path:
    """A folder for sys.path whose NCCL is that of fake_nccl.c."""
    library = folder / "site-packages/nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    source = ROOT / "tests/support/fakes/fake_nccl.c"
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", source, "-o", library, "-lpthread"]
    subprocess.run([_compiler(), *options], check=True)
    return folder / "site-packages"


def make_cupti(folder: Path) -> Path:
    """A folder for sys.path whose CUPTI, of the CUDA version that fake_device.c names, is that of fake_cupti.c."""
    library = folder / "site-packages/nvidia/cu99/lib/libcupti.so.99"
    library.parent.mkdir(parents=True)
    options = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    source = ROOT / "tests/support/fakes/fake_cupti.c"
    subprocess.run([_compiler(), *options, source, "-o", library], check=True)
    return folder / "site-packages"


def _compile(package: Path, source: str, contract: str, more: list[str]) -> None:
    library = package / f"xtrain/_lib/{LIBRARY}"
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/csrc", f'-DFAKE_CONTRACT="{contract}"']
    subprocess.run([_compiler(), *options, ROOT / "tests/support/fakes" / source, *more, "-o", library], check=True)


def make_device(package: Path) -> None:
    """A CUDA library whose device computes with the CPU's kernels: fake_device.c, linked with the objects of this build."""
    objects = ROOT / "build/obj" / str(sysconfig.get_config_var("SOABI"))
    core = [objects / f"core/{stem}.o" for stem in ("dtype", "library", "threads", "view")]
    if not objects.is_dir():
        pytest.skip("needs the object files of a build in this folder (make build)")
    found = [*core, *(objects / "cpu").rglob("*.o")]
    _compile(package, "fake_device.c", our_contract(), [*map(str, found), "-lpthread", "-lm"])


def our_contract() -> str:
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        return setup_cuda.contract(xt.__version__)
    finally:
        os.chdir(before)


def on_device(package, **more):
    """The variables of each rank, which all see one device."""
    return lambda rank: {"PYTHONPATH": package, "PYTHONSAFEPATH": "1", "XTRAIN_PLANE": "", **more}
