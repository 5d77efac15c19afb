"""Builds the extension xtrain._C from every csrc/**/*.c, with OpenBLAS and, where nvcc is, libxtrain_cuda.so beside it.

The rest is in pyproject.toml.

An object is compiled again only when its source, a header it includes, the compiler or the flags changed, and objects
are compiled in parallel, so that editing one file costs seconds. Objects live in build/obj/, each with a depfile and
the command that made it.

Environment: CC; CFLAGS and LDFLAGS, added last; XTRAIN_WERROR=1: warnings are errors; XTRAIN_SANITIZE=1: ASan, UBSan.
CUDA, from every cuda/*.cu: XTRAIN_CUDA=1 builds it, 0 leaves it out, auto (the default) builds it where nvcc and a GPU
are; XTRAIN_CUDA_ARCHS, such as "native" or "80 90a ptx120": compute capabilities to build for; NVCC; NVCCFLAGS.
"""

import fcntl
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError, PlatformError

os.chdir(Path(__file__).resolve().parent)  # every relative path below starts here
MACOS = sys.platform == "darwin"
VERSION = re.search(r'__version__ = "(.+)"', Path("xtrain/_version.py").read_text()).group(1)
SANITIZE = os.environ.get("XTRAIN_SANITIZE", "0") not in ("", "0")
WERROR = os.environ.get("XTRAIN_WERROR", "0") not in ("", "0")

# -fno-math-errno and -fno-trapping-math let loops over sqrt, rint and comparisons vectorise.
# Results stay IEEE: no -ffast-math.
CODE = ["-std=gnu11", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd", "-pthread"]
OPTIMIZE = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-DNDEBUG"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-DXT_SANITIZE", *SANITIZERS]
WARNINGS = ["-Wall", "-Wextra", "-Wno-pass-failed"]  # the last: clang's "loop not vectorized"


# The library must run on machines other than the one that builds it; newer GPUs than these compile the PTX.
CUDA_ARCHS = "native 80 86 89 90a ptx"
CUDA_CODE = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-Wall,-Wextra,-fvisibility=hidden", "-Icsrc", "-Icuda"]


def find_compiler() -> list[str]:
    """$CC, else the compiler that built Python (its options dropped), else the usual names."""
    tried = []
    for command in (os.environ.get("CC"), (sysconfig.get_config_var("CC") or "").split(" ")[0], "cc", "gcc", "clang"):
        words = shlex.split(command or "")
        if words and shutil.which(words[0]):
            return words
        tried += words[:1]
    raise PlatformError(f"no C compiler found (tried {', '.join(tried)}): install gcc >= 9 or clang, or set CC")


def compile_flags() -> list[str]:
    """Everything between the compiler and the file names.

    Paths inside the project are relative, so that build/ stays fresh in a copy of the project.
    """
    import numpy
    import scipy_openblas32

    python_include = sysconfig.get_path("include")
    if not Path(python_include, "Python.h").exists():
        raise PlatformError(f"no Python.h in {python_include}: install Python's headers (python3-dev on Debian)")
    code = [*CODE, *(SANITIZED if SANITIZE else OPTIMIZE)]
    own = shlex.split(os.environ.get("CFLAGS", ""))
    system = [python_include, numpy.get_include(), scipy_openblas32.get_include_dir()]
    defines = [f'-DXT_VERSION="{VERSION}"', f'-DXT_BUILD_FLAGS="{" ".join(code + own)}"']
    warnings = WARNINGS + (["-Werror"] if WERROR else [])
    return [*code, *warnings, *defines, "-Icsrc", *(word for path in system for word in ("-isystem", path)), *own]


def needs_making(path: Path, command: list[str]) -> bool:
    """True when `command` is not what made `path`, or a file named in its depfile is newer or gone."""
    try:
        if path.with_suffix(".cmd").read_text() != shlex.join(command):
            return True
        made = path.stat().st_mtime_ns
        names = path.with_suffix(".d").read_text().replace("\\\n", " ").split(":", 1)[1].split()
        return any(Path(name).stat().st_mtime_ns >= made for name in names)
    except (OSError, IndexError):
        return True


def run_compiler(command: list[str]) -> bool:
    """Runs it and shows what it says; False when it failed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.stdout:
        sys.stderr.write(done.stdout)
    return done.returncode == 0


def make(path: Path, command: list[str], record: list[str]) -> bool:
    """Runs the compiler to make `path`, and leaves beside it what needs_making() wants to see."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".cmd").unlink(missing_ok=True)  # until the file is whole, nothing vouches for it
    start = time.time_ns()
    if not run_compiler(command):
        return False
    os.utime(path, ns=(start, start))  # what is edited from now on is newer
    path.with_suffix(".cmd").write_text(shlex.join(record))
    return True


def in_parallel(function, items) -> list:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(cpus or 1) as pool:
        return list(pool.map(function, items))


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which(os.environ.get("NVCC") or "nvcc") or shutil.which(f"{home}/bin/nvcc")


def wants_cuda(library: Path) -> bool:
    """XTRAIN_CUDA decides; auto: where nvcc is, and a GPU or a library that was built before."""
    choice = os.environ.get("XTRAIN_CUDA", "auto")
    if choice not in ("0", "1", "auto"):
        raise PlatformError(f"XTRAIN_CUDA must be 0, 1 or auto, got '{choice}'")
    if choice == "0" or SANITIZE or (choice == "auto" and not find_nvcc()):
        return False
    if not find_nvcc():
        raise PlatformError("XTRAIN_CUDA=1, but no nvcc was found: install the CUDA toolkit, or set NVCC or CUDA_HOME")
    return choice == "1" or Path("/dev/nvidiactl").exists() or library.exists()


def native_archs() -> list[str]:
    """Compute capabilities of this machine's GPUs, as nvcc names them; 9.0 by its own instruction set, "90a"."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.replace(".", "").split()
    return ["90a" if arch == "90" else arch for arch in found if arch.isdigit()]


def cuda_archs(nvcc: str) -> list[str]:
    """The words of XTRAIN_CUDA_ARCHS, "native" resolved and "ptx" numbered, each once: ["80", "90a", "ptx120"]."""
    archs = []
    for word in os.environ.get("XTRAIN_CUDA_ARCHS", CUDA_ARCHS).replace(",", " ").split():
        if word == "ptx":
            known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout
            archs.append(f"ptx{max(map(int, re.findall(r'compute_([0-9]+)$', known, re.MULTILINE)))}")
        elif word == "native":
            archs += native_archs()
        elif re.fullmatch(r"(ptx)?\d{2,3}[af]?", word):
            archs.append(word)
        else:
            raise PlatformError(f"XTRAIN_CUDA_ARCHS must hold words like native, 90a, ptx or ptx90, got '{word}'")
    if not archs:
        raise PlatformError("XTRAIN_CUDA_ARCHS names no compute capability, and no GPU was found for native")
    return sorted(set(archs), key=lambda arch: (arch.startswith("ptx"), arch))


def cuda_flags(archs: list[str]) -> list[str]:
    codes = []
    for arch in archs:
        number = arch.removeprefix("ptx")
        code = "compute" if arch.startswith("ptx") else "sm"
        codes.append(f"-gencode=arch=compute_{number},code={code}_{number}")
    strict = ["-Werror", "all-warnings"] if WERROR else []
    own = shlex.split(os.environ.get("NVCCFLAGS", ""))
    return [*CUDA_CODE, *codes, *strict, f'-DXT_CUDA_ARCHS="{" ".join(archs)}"', f'-DXT_VERSION="{VERSION}"', *own]


def rename_elf_library(data: bytearray, name: bytes) -> None:
    """Overwrites the DT_SONAME of a 64-bit little-endian ELF library with a shorter or equal `name`.

    The loader takes a library that is already loaded under a wanted SONAME for the wanted one. Another package that
    ships the same OpenBLAS build would then share ours, and our thread setting, or we its older version.
    """
    assert data[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    (program_headers,) = struct.unpack_from("<Q", data, 32)
    entry_size, entry_count = struct.unpack_from("<HH", data, 54)
    segments = []  # (type, file offset, address, size)
    for i in range(entry_count):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, program_headers + i * entry_size)
        segments.append((kind, offset, address, size))
    start, size = next((offset, size) for kind, offset, _, size in segments if kind == 2)  # PT_DYNAMIC
    dynamic = dict(reversed([struct.unpack_from("<QQ", data, i) for i in range(start, start + size, 16)]))
    strings = dynamic[5]  # DT_STRTAB, an address
    for kind, offset, address, size in segments:
        if kind == 1 and 0 <= strings - address < size:  # the PT_LOAD that holds it
            at = offset + strings - address + dynamic[14]  # DT_SONAME
    room = data.index(0, at) - at
    assert len(name) <= room, f"no room for {name!r} in {bytes(data[at : at + room])!r}"
    data[at : at + room] = name.ljust(room, b"\0")


def write_if_changed(path: Path, data: bytes) -> None:
    """Replaces the file in one step: a running process keeps the old one mapped."""
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def vendor_openblas(folder: Path) -> Path:
    """Fills `folder` with OpenBLAS under a name of our own, its companions and its licence; returns its path."""
    import scipy_openblas32

    package = Path(scipy_openblas32.get_lib_dir()).parent
    ending = ".dylib" if MACOS else ".so"
    libraries = [path for path in sorted(package.rglob("lib*")) if ending in path.name and path.is_file()]
    blas = next(path for path in libraries if path.name.startswith("libscipy_openblas"))
    companions = [path for path in libraries if path != blas]  # run-time libraries, on platforms that need them
    target = folder / f"libxtrain_blas{ending}"
    data = bytearray(blas.read_bytes())
    if not MACOS:
        rename_elf_library(data, target.name.encode())
        write_if_changed(target, bytes(data))
    elif not target.exists():
        write_if_changed(target, bytes(data))
        needed = subprocess.run(["otool", "-L", str(blas)], check=True, capture_output=True, text=True).stdout.split()
        subprocess.run(["install_name_tool", "-id", f"@rpath/{target.name}", str(target)], check=True)
        for path in companions:
            for old in (name for name in needed if name.endswith(path.name)):
                subprocess.run(
                    ["install_name_tool", "-change", old, f"@loader_path/{path.name}", str(target)], check=True
                )
        subprocess.run(["codesign", "--force", "--sign", "-", str(target)], check=True)
    for path in companions:
        write_if_changed(folder / path.name, path.read_bytes())
    licence = next(package.parent.glob("scipy_openblas32-*.dist-info/**/LICENSE*"))
    write_if_changed(folder / "LICENSE.openblas.txt", licence.read_bytes())
    return target


def place_libraries(source: Path, cuda: Path | None, target: Path) -> None:
    """Copies OpenBLAS's files and the CUDA library to where the extension looks for them."""
    for path in [*source.rglob("*"), *([cuda] if cuda else [])]:
        if path.is_file():
            write_if_changed(target / (path.name if path == cuda else path.relative_to(source)), path.read_bytes())
    if not cuda:
        (target / "libxtrain_cuda.so").unlink(missing_ok=True)


class BuildExt(build_ext):
    user_options = [*build_ext.user_options, ("check", None, "only check every source, with warnings as errors")]
    boolean_options = [*build_ext.boolean_options, "check"]

    def initialize_options(self):
        super().initialize_options()
        self.check = False

    def run(self):
        Path("build").mkdir(exist_ok=True)
        with open("build/lock", "w") as lock:  # two builds of one tree take turns
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.check:
                self.check_sources()
            else:
                super().run()

    def check_sources(self):
        command = [*find_compiler(), *compile_flags(), "-Werror", "-fsyntax-only"]
        if not all(in_parallel(lambda source: run_compiler([*command, source]), self.extensions[0].sources)):
            raise CompileError("the compiler has objections, see above")

    def build_extension(self, ext):
        compiler = find_compiler()
        flags = compile_flags()
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout.split("\n")[0]
        variant = "sanitize" if SANITIZE else sysconfig.get_config_var("SOABI") or platform.machine()
        folder = Path("build/obj", variant)

        objects, todo = [], []
        for source in ext.sources:
            obj = folder / Path(source).with_suffix(".o").relative_to("csrc")
            command = [*compiler, *flags, "-MMD", "-MF", str(obj.with_suffix(".d")), "-c", source, "-o", str(obj)]
            objects.append(str(obj))
            if self.force or needs_making(obj, [version, *command]):
                todo.append((obj, command))

        def compile_one(item):
            obj, command = item
            sys.stdout.write(f"cc {command[-3]}\n")  # one write: threads do not mix
            return make(obj, command, [version, *command])

        results = in_parallel(compile_one, todo)
        if not all(results):
            raise CompileError(f"{results.count(False)} of {len(ext.sources)} C files did not compile, see above")
        self.link(ext, compiler, version, folder, objects)

    def link(self, ext, compiler, version, folder, objects):
        """Links into build/obj/, and copies from there to where setuptools wants it."""
        blas = vendor_openblas(folder / "_lib")
        output = folder / "_C.so"
        origin = "@loader_path" if MACOS else "$ORIGIN"
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if MACOS else ["-shared"]
        own = shlex.split(os.environ.get("LDFLAGS", ""))
        options = [*(SANITIZERS if SANITIZE else []), f"-Wl,-rpath,{origin}/_lib", "-pthread", "-lm", *own]
        command = [*compiler, *shared, *objects, str(blas), *options, "-o", str(output)]
        output.with_suffix(".d").write_text(f"_C.so: {' '.join(map(str, [*objects, blas]))}")
        if needs_making(output, [version, *command]):
            print("ld", output, flush=True)
            if not make(output, command, [version, *command]):
                raise LinkError("the extension did not link, see above")
        cuda = self.build_cuda([folder / "core/dtype.o", folder / "core/view.o"])
        target = Path(self.get_ext_fullpath(ext.name))
        write_if_changed(target, output.read_bytes())
        place_libraries(blas.parent, cuda, target.parent / "_lib")

    def build_cuda(self, shared: list[Path]) -> Path | None:
        """Makes the CUDA library from cuda/*.cu and the objects it shares with the core; None where it is not wanted.

        It knows no Python: one build serves all.
        """
        folder = Path("build/obj/cuda")
        library = folder / "libxtrain_cuda.so"
        if not wants_cuda(library):
            if not SANITIZE:  # a build of its own, beside the one that stays
                library.unlink(missing_ok=True)
            return None
        nvcc = find_nvcc()
        version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout.split("\n")[-2]
        flags = cuda_flags(cuda_archs(nvcc))
        sources = sorted(Path("cuda").glob("*.cu"), key=lambda path: -path.stat().st_size)  # the slow ones first
        objects, todo = [], []
        for source in sources:
            obj = folder / f"{source.stem}.o"
            command = [nvcc, *flags, "-MMD", "-MF", str(obj.with_suffix(".d")), "-c", str(source), "-o", str(obj)]
            objects.append(str(obj))
            if self.force or needs_making(obj, [version, *command]):
                todo.append((obj, command))

        def compile_one(item):
            obj, command = item
            sys.stdout.write(f"nvcc {command[-3]}\n")
            return make(obj, command, [version, *command])

        results = in_parallel(compile_one, todo)
        if not all(results):
            raise CompileError(f"{results.count(False)} of {len(sources)} CUDA files did not compile, see above")
        objects += map(str, shared)
        options = [
            "-shared",
            "-cudart",
            "static",
            "-Xlinker",
            "-zdefs",
            "-lpthread",
            "-ldl",
        ]  # defs: no slot is missing
        command = [nvcc, *objects, *options, "-o", str(library)]
        library.with_suffix(".d").write_text(f"{library.name}: {' '.join(objects)}")
        if needs_making(library, [version, *command]):
            print("ld", library, flush=True)
            if not make(library, command, [version, *command]):
                raise LinkError("the CUDA library did not link, see above")
        return library

    def copy_extensions_to_source(self):
        package = Path(self.get_finalized_command("build_py").get_package_dir("xtrain"))
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(ext.name)))
            write_if_changed(package / built.name, built.read_bytes())
            cuda = built.parent / "_lib/libxtrain_cuda.so"
            place_libraries(built.parent / "_lib", cuda if cuda.exists() else None, package / "_lib")


setup(
    ext_modules=[Extension("xtrain._C", sorted(map(str, Path("csrc").rglob("*.c"))))],
    cmdclass={"build_ext": BuildExt},
)
