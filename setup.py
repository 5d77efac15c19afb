"""Builds the extension xtrain._C from every csrc/**/*.c, with OpenBLAS, which it opens itself, and, where nvcc is,
libxtrain_cuda.so beside it.

The rest is in pyproject.toml.

An object is compiled again only when its source, a header it includes, the compiler or the flags changed, and objects
are compiled in parallel, so that editing one file costs seconds. Objects live in build/obj/, each with a depfile and
the command that made it.

Environment: CC; CFLAGS and LDFLAGS, added last; XTRAIN_WERROR=1: warnings are errors; XTRAIN_SANITIZE=1: ASan and
UBSan, XTRAIN_SANITIZE=thread: ThreadSanitizer, XTRAIN_SANITIZE=coverage: gcov's counters.
CUDA, from every cuda/**/*.cu: XTRAIN_CUDA=1 builds it, 0 removes it, auto (the default) builds it where nvcc and a GPU
are, and else keeps one that was built before; XTRAIN_CUDA_ARCHS, such as "native" or "80 90a ptx120": compute
capabilities to build for; NVCC; NVCCFLAGS. An empty variable counts as one that is not set. setup_cuda.py has the rest.
"""

import contextlib
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
sys.path.insert(0, os.getcwd())  # pip runs this file without its folder on the path
import setup_cuda  # noqa: E402

MACOS = sys.platform == "darwin"
VERSION = re.search(r'__version__ = "(.+)"', Path("xtrain/_version.py").read_text()).group(1)
SANITIZE = {"": "", "0": "", "thread": "thread", "coverage": "coverage"}.get(
    os.environ.get("XTRAIN_SANITIZE", ""), "address"
)
WERROR = os.environ.get("XTRAIN_WERROR", "0") not in ("", "0")

# -fno-math-errno and -fno-trapping-math let loops over sqrt, rint and comparisons vectorise.
# Results stay IEEE: no -ffast-math.
CODE = ["-std=gnu11", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd", "-pthread"]
OPTIMIZE = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-DNDEBUG"]
SANITIZERS = {
    "": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
    "coverage": ["--coverage", "-fprofile-update=atomic"],
}
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-DXT_SANITIZE", *SANITIZERS[SANITIZE]]
CUDA_LIBRARY = Path("build/obj/cuda/libxtrain_cuda.so")
WARNINGS = ["-Wall", "-Wextra", "-Wno-pass-failed"]  # the last: clang's "loop not vectorized"


def find_compiler() -> list[str]:
    """$CC, else the compiler that built Python (its options dropped), else the usual names."""
    tried = []
    built_python = (sysconfig.get_config_var("CC") or "").split(" ")[:1]
    for words in (setup_cuda.words("CC"), built_python, ["cc"], ["gcc"], ["clang"]):
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
    own = setup_cuda.words("CFLAGS")
    system = [python_include, numpy.get_include(), scipy_openblas32.get_include_dir()]
    defines = [f'-DXT_VERSION="{VERSION}"', f'-DXT_BUILD_FLAGS="{" ".join(code + own)}"']
    warnings = WARNINGS + (["-Werror"] if WERROR else [])
    return [*code, *warnings, *defines, "-Icsrc", *(word for path in system for word in ("-isystem", path)), *own]


def own_flags(source: str) -> list[str]:
    """Flags of this file alone: a changed header makes it anew, and nothing else that does not include the header."""
    if source != "csrc/core/contract.c":
        return []
    return [f'-DXT_CONTRACT="{setup_cuda.contract(VERSION)}"']


def times(path: Path) -> list[int]:
    """Of the files that the depfile of `path` names; OSError or IndexError where one of them is not there."""
    names = path.with_suffix(".d").read_text().replace("\\\n", " ").split(":", 1)[1].split()
    return [Path(name).stat().st_mtime_ns for name in names]


def needs_making(path: Path, command: list[str]) -> bool:
    """True when `command` is not what made `path`, or a file named in its depfile was written since, is gone, or was
    put back with another time, be it older."""
    try:
        seen, made = times(path), path.stat().st_mtime_ns
        recorded = path.with_suffix(".cmd").read_text()
    except (OSError, IndexError):
        return True
    return recorded != f"{shlex.join(command)}\n{seen}" or any(time >= made for time in seen)


def run_compiler(command: list[str]) -> bool:
    """Runs it and shows what it says; False when it failed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.stdout:
        sys.stderr.write(done.stdout)
    return done.returncode == 0


def written(path: Path) -> tuple[int, int] | None:
    """What differs once a file has been written again; None where there is none."""
    try:
        return path.stat().st_ino, path.stat().st_mtime_ns
    except OSError:
        return None


def make(path: Path, command: list[str], record: list[str]) -> bool:
    """Runs the compiler to make `path`, and leaves beside it what needs_making() wants to see."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".cmd").unlink(missing_ok=True)  # until the file is whole, nothing vouches for it
    before = written(path)
    start = time.time_ns()
    if not run_compiler(command):
        return False
    if written(path) in (None, before):
        raise CompileError(f"{command[0]} must write {path}, but it ended with exit status 0 and did not")
    os.utime(path, ns=(start, start))  # what is edited from now on is newer
    with contextlib.suppress(OSError, IndexError):  # no depfile: made again by every build
        path.with_suffix(".cmd").write_text(f"{shlex.join(record)}\n{times(path)}")
    return True


def in_parallel(function, items) -> list:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(cpus or 1) as pool:
        return list(pool.map(function, items))


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


def place_blas(source: Path, target: Path) -> None:
    """Copies OpenBLAS's files to where the extension looks for them."""
    for path in source.rglob("*"):
        if path.is_file() and path.name != CUDA_LIBRARY.name:
            write_if_changed(target / path.relative_to(source), path.read_bytes())


class BuildExt(build_ext):
    user_options = [*build_ext.user_options, ("check", None, "only check every source, with warnings as errors")]
    boolean_options = [*build_ext.boolean_options, "check"]

    def initialize_options(self):
        super().initialize_options()
        self.check = False

    def run(self):
        Path("build").mkdir(exist_ok=True)
        with open("build/lock", "w") as lock:
            if not self.check:  # which writes nothing
                fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one tree take turns
            try:
                if self.check:
                    self.check_sources()
                else:  # what is wrong with variables is said before minutes of compiling
                    for name in ("CC", "CXX", "CFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED", "AR"):
                        setup_cuda.words(name)  # setuptools reads them, too, and says less
                    self.cuda_plan = "" if SANITIZE else setup_cuda.plan(CUDA_LIBRARY)  # a sanitized build has none
                    super().run()
            except setup_cuda.CudaBuildError as error:
                raise PlatformError(str(error)) from None

    def check_sources(self):
        command = [*find_compiler(), *compile_flags(), "-Werror", "-fsyntax-only"]
        sources = self.extensions[0].sources
        if not all(in_parallel(lambda source: run_compiler([*command, *own_flags(source), source]), sources)):
            raise CompileError("the compiler has objections, see above")

    def build_extension(self, ext):
        compiler = find_compiler()
        flags = compile_flags()
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout.split("\n")[0]
        variant = f"sanitize-{SANITIZE}" if SANITIZE else sysconfig.get_config_var("SOABI") or platform.machine()
        folder = Path("build/obj", variant)

        objects, todo = [], []
        for source in ext.sources:
            obj = folder / Path(source).with_suffix(".o").relative_to("csrc")
            depends = ["-MMD", "-MF", str(obj.with_suffix(".d"))]
            command = [*compiler, *flags, *own_flags(source), *depends, "-c", source, "-o", str(obj)]
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
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if MACOS else ["-shared"]
        own = setup_cuda.words("LDFLAGS")
        libraries = ["-pthread", "-lm"] if MACOS else ["-pthread", "-lm", "-ldl"]
        options = [*SANITIZERS[SANITIZE], *libraries, *own]
        command = [*compiler, *shared, *objects, *options, "-o", str(output)]
        output.with_suffix(".d").write_text(f"_C.so: {' '.join(objects)}")
        if needs_making(output, [version, *command]):
            print("ld", output, flush=True)
            if not make(output, command, [version, *command]):
                raise LinkError("the extension did not link, see above")
        if self.cuda_plan == "build":
            sources = map(Path, setup_cuda.SHARED_SOURCES)
            self.build_cuda([folder / source.with_suffix(".o").relative_to("csrc") for source in sources])
        elif self.cuda_plan == "remove":
            CUDA_LIBRARY.unlink(missing_ok=True)
        target = Path(self.get_ext_fullpath(ext.name))
        write_if_changed(target, output.read_bytes())
        place_blas(blas.parent, target.parent / "_lib")
        self.place_cuda(target.parent / "_lib")

    def place_cuda(self, folder):
        """Puts the CUDA library where the extension looks for it, or removes it from there, or leaves what is there."""
        placed = folder / CUDA_LIBRARY.name
        if self.cuda_plan == "remove":
            placed.unlink(missing_ok=True)
        elif self.cuda_plan and CUDA_LIBRARY.is_file():
            write_if_changed(placed, CUDA_LIBRARY.read_bytes())
        if self.cuda_plan == "keep" and placed.is_file() and setup_cuda.is_stale(placed, VERSION):
            self.cuda_plan = "keep, and that has been said"
            sys.stderr.write(f"{placed} is kept, but it was built from other sources: CUDA stays unavailable until it ")
            sys.stderr.write("is built again (XTRAIN_CUDA=1 says what that takes)\n")

    def build_cuda(self, shared: list[Path]) -> None:
        """Makes the CUDA library from cuda/**/*.cu and the objects it shares with the core.

        It knows no Python: one build serves all.
        """
        library, folder = CUDA_LIBRARY, CUDA_LIBRARY.parent
        nvcc = setup_cuda.find_nvcc()
        version = setup_cuda.nvcc_version(nvcc)
        flags = setup_cuda.flags(setup_cuda.archs(nvcc), WERROR)
        sources = sorted(Path("cuda").rglob("*.cu"), key=lambda path: -path.stat().st_size)  # the slow ones first
        objects, todo = [], []
        for source in sources:
            obj = folder / source.relative_to("cuda").with_suffix(".o")
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

    def copy_extensions_to_source(self):
        package = Path(self.get_finalized_command("build_py").get_package_dir("xtrain"))
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(ext.name)))
            write_if_changed(package / built.name, built.read_bytes())
            place_blas(built.parent / "_lib", package / "_lib")
            self.place_cuda(package / "_lib")


setup(
    ext_modules=[Extension("xtrain._C", sorted(map(str, Path("csrc").rglob("*.c"))))],
    cmdclass={"build_ext": BuildExt},
)
