"""How the CUDA library is built, kept and removed: setup.py in a small project of its own, with a compiler that is a script.

The script takes nvcc's options, writes objects and dependencies, and puts them one behind the other for a library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from runs import HANGS

import setup_cuda
import xtrain as xt

FILES = ["setup.py", "setup_cuda.py", "pyproject.toml", "README.md", "LICENSE", "xtrain/_version.py", "csrc/xtrain.h"]
FILES += ["csrc/kernels.h", "csrc/contract/backend.h", "csrc/core/philox.h", *setup_cuda.SHARED_SOURCES]
KERNELS = {"copy.cu": "cuda.cuh", "random.cu": "core/philox.h"}  # and what each includes
NVCC = f"""#!{sys.executable} -SE
import os, re, sys
words = sys.argv[1:]
if words == ["--version"]:
    print("nvcc: NVIDIA (R) Cuda compiler driver\\nCuda compilation tools, release 13.0, V13.0.88\\nBuild of a test")
elif words == ["--list-gpu-arch"]:
    print("compute_80\\ncompute_120")
else:
    out = words[words.index("-o") + 1]
    if "-c" in words:
        todo, seen = [words[words.index("-c") + 1]], []
        for path in todo:
            folders = [os.path.dirname(path), "csrc", "cuda"]
            names = re.findall('#include "(.*)"', open(path).read())
            paths = [os.path.normpath(os.path.join(f, name)) for name in names for f in folders]
            todo += [path for path in paths if os.path.exists(path) and path not in todo]
        open(words[words.index("-MF") + 1], "w").write(f"{{out}}: {{' '.join(todo)}}")
        open(out, "w").write(" ".join(words))
    else:
        parts = [open(word, "rb").read() for word in words if word.endswith(".o")]
        open(out, "wb").write(b"".join(parts))
"""


class Project:
    def __init__(self, folder: Path) -> None:
        self.folder, self.tools = folder, folder / "tools"
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "cuda").mkdir()
        (folder / "xtrain/__init__.py").touch()
        (folder / "cuda/cuda.cuh").write_text('#include "kernels.h"\n')
        for name, header in KERNELS.items():
            (folder / "cuda" / name).write_text(f'#include "{header}"\n')
        self.tools.mkdir()
        for name in ("cc", "gcc", "clang", "as", "ld"):  # a PATH that has no nvcc, whatever this machine has
            if found := shutil.which(name):  # which may be ccache, and looks for the compiler on the PATH
                self.tool(self.tools / name, f'#!/bin/sh\nPATH="{os.environ["PATH"]}" exec {found} "$@"\n')
        self.nvcc = self.tool(folder / "toolkit/bin/nvcc", NVCC)
        self.built = folder / "build/obj/cuda/libxtrain_cuda.so"
        self.placed = folder / "xtrain/_lib/libxtrain_cuda.so"

    def tool(self, path: Path, text: str) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def edit(self, name: str) -> None:
        with open(self.folder / name, "a") as file:
            file.write("/* edited */\n")

    def run(self, *options: str, **changes: str) -> subprocess.CompletedProcess:
        """One build: nothing but `changes` says what becomes of CUDA, and no nvcc is where one is looked for."""
        ours = ("XTRAIN_CUDA", "XTRAIN_CUDA_ARCHS", "NVCC", "NVCCFLAGS", "XTRAIN_SANITIZE", "XTRAIN_WERROR", "CFLAGS")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        environment |= {"PATH": str(self.tools), "CUDA_HOME": str(self.folder / "nowhere"), **changes}
        return subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext", *(options or ["--inplace"])],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANGS,
        )

    def build(self, **changes: str) -> list[str]:
        """What a build that works has said, sorted."""
        done = self.run(**changes)
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted((done.stdout + done.stderr).splitlines())

    def is_stale(self) -> bool:
        return contract(self.folder).encode() not in self.placed.read_bytes()


def contract(folder: Path) -> str:
    before = os.getcwd()
    os.chdir(folder)
    try:
        return setup_cuda.contract(xt.__version__)
    finally:
        os.chdir(before)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_an_edit_makes_anew_what_it_reaches_and_a_header_changes_the_contract(project: Project) -> None:
    made = project.build(XTRAIN_CUDA="1", NVCC=project.nvcc, XTRAIN_CUDA_ARCHS="")  # empty: the default
    kernels, library = [f"nvcc cuda/{name}" for name in KERNELS], "ld build/obj/cuda/libxtrain_cuda.so"
    assert {*kernels, library, "cc csrc/core/contract.c", "cc csrc/core/dtype.c"} <= {*made}
    assert not project.is_stale() and project.built.read_bytes() == project.placed.read_bytes()
    code = project.built.with_name("copy.o").read_text()
    assert "compute_80,code=sm_80" in code and "arch=compute_120,code=compute_120" in code

    choice = dict(XTRAIN_CUDA="1", NVCC=project.nvcc)
    assert project.build(**choice) == []
    project.edit("cuda/copy.cu")
    assert project.build(**choice) == [library, "nvcc cuda/copy.cu"]

    source = project.folder / "cuda/copy.cu"  # put back with its old time
    kept, then = source.read_text(), source.stat()
    project.edit("cuda/copy.cu")
    assert project.build(**choice) == [library, "nvcc cuda/copy.cu"]
    source.write_text(kept)
    os.utime(source, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert project.build(**choice) == [library, "nvcc cuda/copy.cu"]

    extension = next(path for path in (project.folder / "build/obj").glob("*/_C.so")).relative_to(project.folder)
    for header, reached in [
        ("csrc/kernels.h", ["nvcc cuda/copy.cu"]),
        ("csrc/core/philox.h", ["nvcc cuda/random.cu"]),
        ("csrc/core/view.c", ["cc csrc/core/view.c"]),
    ]:
        project.edit(header)
        assert project.is_stale(), header
        assert project.build(**choice) == sorted(["cc csrc/core/contract.c", *reached, f"ld {extension}", library])
        assert not project.is_stale(), header


def test_only_0_removes_a_library(project: Project) -> None:
    assert "ld build/obj/cuda/libxtrain_cuda.so" in project.build(XTRAIN_CUDA="1", NVCC=project.nvcc)
    before = project.placed.read_bytes()
    for choice in ({}, {"XTRAIN_CUDA": "auto"}, {"XTRAIN_CUDA": "", "NVCC": ""}):
        assert project.build(**choice) == []
        assert project.placed.read_bytes() == project.built.read_bytes() == before

    project.edit("csrc/kernels.h")
    said = [line for line in project.build() if not line.startswith(("cc ", "ld "))]
    assert len(said) == 1 and "libxtrain_cuda.so is kept, but it was built from other sources" in said[0]
    assert project.placed.read_bytes() == before

    project.built.unlink()  # as after an install from elsewhere: what lies in the package stays, too
    assert len(project.build()) == 1 and project.placed.read_bytes() == before

    assert project.build(XTRAIN_CUDA="0", NVCC="/no/such") == []
    assert not project.placed.exists() and not project.built.exists()
    assert project.build() == [] and not project.placed.exists()


def test_auto_builds_again_what_was_built_before(project: Project) -> None:
    project.build(XTRAIN_CUDA="1", NVCC=project.nvcc)
    project.edit("csrc/kernels.h")
    assert "nvcc cuda/copy.cu" in project.build(NVCC=project.nvcc) and not project.is_stale()


def test_what_is_wrong_with_the_environment_is_one_sentence(project: Project) -> None:
    fails = project.tool(project.folder / "fails", "#!/bin/sh\necho no licence\nexit 3\n")
    silent = project.tool(project.folder / "silent", "#!/bin/sh\n")
    strange = project.tool(project.folder / "strange", "\x7fELF no program")
    nothing = project.folder / "nothing"
    nothing.touch()
    version = f'if [ "$1" = --version ]; then exec {project.nvcc} --version; fi\n'
    list_nonsense = project.tool(project.folder / "nonsense", f"#!/bin/sh\n{version}echo compute_9x\n")
    writes_nothing = project.tool(project.folder / "lazy", f"#!/bin/sh\n{version}")
    for changes, said in [
        (dict(NVCC="/no/such"), "NVCC must name the CUDA toolkit's nvcc, got '/no/such', which is no program"),
        (
            dict(NVCC=str(project.folder)),
            f"NVCC must name the CUDA toolkit's nvcc, got '{project.folder}', which is no",
        ),
        (dict(NVCC=str(nothing)), f"NVCC must name the CUDA toolkit's nvcc, got '{nothing}', which is no program"),
        (
            dict(NVCC=fails),
            f"'{fails} --version' must answer as nvcc does, got exit status 3 and 'no licence': set NVCC",
        ),
        (dict(NVCC=silent), f"'{silent} --version' must answer as nvcc does, got exit status 0 and '': set NVCC"),
        (dict(NVCC=strange), f"'{strange} --version' must answer as nvcc does, got Exec format error: set NVCC"),
        (dict(), "XTRAIN_CUDA=1, but no nvcc was found: install the CUDA toolkit, or set NVCC or CUDA_HOME"),
        (dict(XTRAIN_CUDA="yes"), "XTRAIN_CUDA must be 0, 1 or auto, got 'yes'"),
        (
            dict(NVCC=project.nvcc, XTRAIN_CUDA_ARCHS="hopper"),
            "XTRAIN_CUDA_ARCHS must hold words like native, 90a, ptx",
        ),
        (
            dict(NVCC=list_nonsense, XTRAIN_CUDA_ARCHS="ptx"),
            f"'{list_nonsense} --list-gpu-arch' must answer as nvcc does, got exit status 0 and 'compute_9x': set",
        ),
        (
            dict(NVCC=writes_nothing, XTRAIN_CUDA_ARCHS="90"),
            f"{writes_nothing} must write build/obj/cuda/random.o, but it ended with exit status 0 and did not",
        ),
        *(
            (
                {"NVCC": project.nvcc, name: "-O2 'x"},
                f'{name} must be words as a shell reads them, got "-O2 \'x": No closing quotation',
            )
            for name in ("NVCCFLAGS", "CFLAGS", "LDFLAGS", "CC")
        ),
    ]:
        for choice in ("1", "auto") if "NVCC" in changes and len(changes) == 1 else ("1",):
            done = project.run(**{"XTRAIN_CUDA": choice, **changes})
            assert done.returncode == 1 and done.stderr.startswith(f"error: {said}"), done.stderr
            assert done.stderr.count("\n") == 1 and "Traceback" not in done.stdout


def test_a_compiler_that_writes_nothing_is_named_also_where_an_older_file_lies(project: Project) -> None:
    project.build()
    lazy = project.tool(project.folder / "lazy", "#!/bin/sh\n")
    done = project.run(CC=lazy)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"error: {lazy} must write build/obj/" in done.stderr and done.stderr.count("\n") == 1


def test_a_check_writes_nothing_and_waits_for_no_build(project: Project) -> None:
    (project.folder / "build").mkdir()
    with open(project.folder / "build/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = sorted(project.folder.rglob("*"))
        done = project.run("--check")
    assert done.returncode == 0, done.stderr
    assert [path for path in sorted(project.folder.rglob("*")) if "__pycache__" not in path.parts] == before


@pytest.mark.parametrize("file", ["/dev/nvidiactl", "/dev/dxg"])
def test_auto_builds_where_nvcc_and_a_gpu_are(project: Project, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """/dev/dxg is how a GPU looks in Windows' Linux."""
    monkeypatch.setenv("XTRAIN_CUDA", "")
    monkeypatch.setenv("NVCC", project.nvcc)
    there = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: str(path) == file or there(path))
    assert setup_cuda.plan(project.built) == "build"
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/dev/") and there(path))
    assert setup_cuda.plan(project.built) == "keep"


def test_ci_finds_nvcc_where_the_build_does(project: Project) -> None:
    def ask(**changes: str) -> subprocess.CompletedProcess:
        environment = {"PATH": str(project.tools), "CUDA_HOME": str(project.folder / "nowhere"), **changes}
        command = [sys.executable, "setup_cuda.py"]
        return subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True)

    assert ask().stdout == "\n"
    assert ask(CUDA_HOME=str(project.folder / "toolkit")).stdout == f"{project.nvcc}\n"
    assert ask(PATH=str(Path(project.nvcc).parent)).stdout == f"{project.nvcc}\n"
    assert ask(NVCC=project.nvcc).stdout == f"{project.nvcc}\n"
    wrong = ask(NVCC="/no/such")
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: NVCC must name") and wrong.stdout == ""
    script = (ROOT / ".ci/run").read_text()
    assert "setup_cuda.py" in script and "command -v nvcc" not in script


def test_the_contract_covers_every_header_that_the_kernels_include() -> None:
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        shared = setup_cuda.shared_files()
    finally:
        os.chdir(before)
    assert {"csrc/xtrain.h", "csrc/kernels.h", "csrc/core/philox.h", "csrc/core/dtype.c", "csrc/core/view.c"} <= {
        *shared
    }
    assert not [name for name in shared if name.startswith(("cuda", "csrc/cpu", "csrc/py", "csrc/ops"))]
