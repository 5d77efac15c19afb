"""What setup.py and .ci/run ask about CUDA: where nvcc is, what to do about the library, and for which GPUs.

    python setup_cuda.py      prints the path of nvcc, or nothing where there is none; a wrong NVCC is an error

Needs the standard library only. An empty variable counts as one that is not set. Paths are relative to this folder.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

# The library must run on machines other than the one that builds it; newer GPUs than these compile the PTX.
ARCHS = "native 80 86 89 90a ptx"
# -O3 is for the host's compiler alone, and stands where NVCCFLAGS can follow it: nvcc always optimizes kernels in full.
CODE = ["-std=c++17", "-Xcompiler", "-O3,-fPIC,-Wall,-Wextra,-fvisibility=hidden", "-Icsrc", "-Icuda"]
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")  # Linux, and Linux inside Windows
# Compiled once and linked into the extension and the CUDA library alike.
SHARED_SOURCES = ("csrc/core/contract.c", "csrc/core/dtype.c", "csrc/core/view.c")


class CudaBuildError(Exception):
    """What stands in the way of a build, in one sentence."""


def words(variable: str) -> list[str]:
    """What an environment variable holds, split as a shell does."""
    value = os.environ.get(variable, "")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise CudaBuildError(f"{variable} must be words as a shell reads them, got {value!r}: {error}") from None


def ask_nvcc(nvcc: str, option: str, answer: str) -> list[str]:
    """The lines that nvcc prints; CudaBuildError where none of them is like the pattern `answer`."""
    try:
        done = subprocess.run([nvcc, option], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
        lines = done.stdout.strip().split("\n")
        if done.returncode == 0 and re.search(answer, done.stdout):
            return lines
        problem = f"exit status {done.returncode} and '{lines[0]}'"
    except OSError as error:
        problem = error.strerror
    raise CudaBuildError(
        f"'{nvcc} {option}' must answer as nvcc does, got {problem}: set NVCC to the CUDA toolkit's nvcc"
    )


def find_nvcc() -> str | None:
    """$NVCC, which must be one; else the nvcc on the PATH; else that of $CUDA_HOME or /usr/local/cuda; else None."""
    if chosen := os.environ.get("NVCC"):
        found = shutil.which(chosen)
        if not found:
            raise CudaBuildError(f"NVCC must name the CUDA toolkit's nvcc, got '{chosen}', which is no program")
        nvcc_version(found)
        return found
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def nvcc_version(nvcc: str) -> str:
    return ask_nvcc(nvcc, "--version", r"release \d")[-1]


def plan(library: Path) -> str:
    """What becomes of the CUDA library, by XTRAIN_CUDA: 1 is "build", 0 is "remove".

    auto is "build" where nvcc is, and a GPU or a `library` that was built before; else "keep": a build without nvcc
    throws nothing away that it could not make again.
    """
    choice = os.environ.get("XTRAIN_CUDA") or "auto"
    if choice not in ("0", "1", "auto"):
        raise CudaBuildError(f"XTRAIN_CUDA must be 0, 1 or auto, got '{choice}'")
    if choice == "0":
        return "remove"
    nvcc = find_nvcc()
    if choice == "1" and not nvcc:
        raise CudaBuildError("XTRAIN_CUDA=1, but no nvcc was found: install the CUDA toolkit, or set NVCC or CUDA_HOME")
    wanted = choice == "1" or any(map(os.path.exists, GPU_FILES)) or library.exists()
    return "build" if nvcc and wanted else "keep"


def native_archs() -> list[str]:
    """Compute capabilities of this machine's GPUs, as nvcc names them; 9.0 by its own instruction set, "90a"."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.replace(".", "").split()
    return ["90a" if arch == "90" else arch for arch in found if arch.isdigit()]


def archs(nvcc: str) -> list[str]:
    """The words of XTRAIN_CUDA_ARCHS, "native" resolved and "ptx" numbered, each once: ["80", "90a", "ptx120"]."""
    found = []
    for word in (os.environ.get("XTRAIN_CUDA_ARCHS") or ARCHS).replace(",", " ").split():
        if word == "ptx":
            known = ask_nvcc(nvcc, "--list-gpu-arch", r"(?m)^compute_\d+$")
            newest = max(int(line.removeprefix("compute_")) for line in known if re.fullmatch(r"compute_\d+", line))
            found.append(f"ptx{newest}")
        elif word == "native":
            found += native_archs()
        elif re.fullmatch(r"(ptx)?\d{2,3}[af]?", word):
            found.append(word)
        else:
            raise CudaBuildError(f"XTRAIN_CUDA_ARCHS must hold words like native, 90a, ptx or ptx90, got '{word}'")
    if not found:
        raise CudaBuildError("XTRAIN_CUDA_ARCHS names no compute capability, and no GPU was found for native")
    return sorted(set(found), key=lambda arch: (arch.startswith("ptx"), arch))


def flags(names: list[str], werror: bool) -> list[str]:
    """Everything between nvcc and the file names, for the compute capabilities that archs() returned."""
    codes = []
    for arch in names:
        number = arch.removeprefix("ptx")
        code = "compute" if arch.startswith("ptx") else "sm"
        codes.append(f"-gencode=arch=compute_{number},code={code}_{number}")
    strict = ["-Werror", "all-warnings"] if werror else []
    return [*CODE, *codes, *strict, f'-DXT_CUDA_ARCHS="{" ".join(names)}"', *words("NVCCFLAGS")]


def shared_files() -> list[str]:
    """What both the extension and the CUDA library are made from: headers of csrc/ that reach cuda/, shared sources."""
    starts = [*Path("csrc/contract").glob("*.h"), *Path("cuda").rglob("*.cu*")]
    todo = ["csrc/xtrain.h", "csrc/kernels.h", *SHARED_SOURCES, *map(str, starts)]
    found = set()
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', Path(path).read_text(), re.MULTILINE):
            candidates = [os.path.normpath(Path(folder, name)) for folder in (Path(path).parent, "csrc", "cuda")]
            todo += [candidate for candidate in candidates if os.path.isfile(candidate)][:1]
    return sorted(path for path in found if Path(path).parts[0] == "csrc")


def contract(version: str) -> str:
    """The version and a hash of shared_files(): an extension opens the libraries that were built with its own."""
    digest = hashlib.sha256()
    for path in shared_files():
        data = Path(path).read_bytes()
        digest.update(f"{path} {len(data)}\n".encode() + data)
    return f"{version}-{digest.hexdigest()[:16]}"


def is_stale(library: Path, version: str) -> bool:
    """Whether `library` was built with another contract; the text lies in it as it is."""
    return contract(version).encode() + b"\0" not in library.read_bytes()


if __name__ == "__main__":
    try:
        print(find_nvcc() or "")
    except CudaBuildError as error:
        sys.exit(f"error: {error}")
