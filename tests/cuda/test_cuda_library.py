"""The CUDA library as far as it can be checked without a GPU: every slot is there, it loads, and it says what is missing.

What the extension does with a library that opens is tried with one of tests/support/fakes/fake_cuda.c, in copies of the package made of links.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fake_library import make_fake, make_half, make_package, our_contract, run
from places import ROOT
from runs import HANGS

import setup_cuda
import xtrain as xt
from xtrain import _C

LIBRARY = Path(_C.__file__).parent / "_lib" / "libxtrain_cuda.so"
WITHOUT_GPU = not xt.cuda.is_available()


def slots() -> list[str]:
    block = re.search(r"#define XT_KERNELS\(X\)(.*?)\n\n", (ROOT / "csrc/kernels.h").read_text(), re.S)
    return re.findall(r"X\((\w+), \w+\)", block[1])


def test_every_slot_is_written_for_cuda() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "cuda").rglob("*.cu"))
    missing = [slot for slot in slots() if not re.search(rf"^XtStatus xt_cuda_{slot}\(const", sources, re.M)]
    assert not missing, f"slots of kernels.h without a function in cuda/: {missing}"


@pytest.mark.skipif(
    not LIBRARY.exists() and os.environ.get("XTRAIN_CUDA") != "1",
    reason="this build has no CUDA library (XTRAIN_CUDA=1)",
)
def test_the_library_exports_two_functions_and_needs_no_cuda_library_to_load() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    assert library.xt_open_cuda
    if shutil.which("nm") and shutil.which("readelf"):
        names = subprocess.run(
            ["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True
        ).stdout
        assert [line.split()[-1] for line in names.splitlines()] == ["xt_cuda_contract", "xt_open_cuda"]
        needed = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
        assert not re.search(r"NEEDED.*(libcuda|libcublas|libcudart|libpython)", needed)


@pytest.mark.skipif(not WITHOUT_GPU, reason="is about a machine without a GPU, and this one has one")
def test_without_a_gpu_the_cpu_works_and_the_error_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="CUDA is not available: .*(driver|GPU|CUDA library)"):
        xt.ones(2).to("cuda")
    assert not xt.cuda.is_available() and xt.cuda.device_count() == 0
    with pytest.raises(RuntimeError, match="CUDA is not available"):
        xt.cuda.synchronize()
    assert xt.cuda.memory_summary().startswith("CUDA is not available")
    assert "CUDA is not available" in xt.cuda.why_unavailable()
    assert (xt.cuda.memory_allocated(), xt.cuda.max_memory_allocated(), xt.cuda.memory_reserved()) == (0, 0, 0)
    assert (xt.ones(2) + 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "name",
    [
        "get_device_name",
        "get_device_capability",
        "get_device_properties",
        "synchronize",
        "counters",
        "current_stream",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "reset_peak_memory_stats",
        "empty_cache",
    ],
)
def test_the_cpu_is_no_cuda_device(name: str) -> None:
    for device in ("cpu", xt.device("cpu")):
        with pytest.raises(ValueError, match="cuda: device must be a CUDA device, got 'cpu'"):
            getattr(xt.cuda, name)(device)


def test_no_device_means_the_default_one(monkeypatch) -> None:
    """A rank that has made the second GPU its default waits for that one; without such a default, for the first."""
    waited: list[str] = []
    monkeypatch.setattr(xt._C, "synchronize", lambda device: waited.append(str(device)))
    for default in ("cuda:1", "cpu"):
        monkeypatch.setattr(xt._C, "get_default_device", lambda default=default: xt.device(default))
        xt.cuda.synchronize()
    assert waited == ["cuda:1", "cuda:0"]


def test_import_opens_no_cuda_library() -> None:
    code = "import xtrain; print(any('cuda' in line and '.so' in line for line in open('/proc/self/maps')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_paths_that_are_no_text_do_not_stop_the_import() -> None:
    """sys.path may hold what imports ignore, and bytes that are not UTF-8."""
    code = r"""
import pathlib, sys
sys.path[:0] = [pathlib.Path("site-packages"), b"site-packages", "/\udcff/site-packages"]
import xtrain
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANGS)


# ---- a library that is damaged, or of another build ---------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return make_package(tmp_path)


WHY = "import xtrain as xt; print(xt.cuda.why_unavailable()); assert (xt.ones(2) + 1).tolist() == [2.0, 2.0]"


def some_library() -> bytes:
    """A whole ELF library, if not a CUDA one."""
    return next((Path(xt.__file__).parent / "_lib").glob("libxtrain_blas*")).read_bytes()


def edited(at: int, form: str, *values: int, most: int | None = None) -> bytes:
    """That library, or the beginning of it, with other numbers in its header."""
    data = bytearray(some_library()[:most])
    struct.pack_into(form, data, at, *values)
    return bytes(data)


def program_header(kind: int) -> int:
    """Where the first one of that kind begins."""
    data = some_library()
    (at,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    return next(at + i * size for i in range(count) if struct.unpack_from("<I", data, at + i * size) == (kind,))


def end_of_segments(data: bytes) -> int:
    """Where the last byte lies that a loader of 64-bit little-endian ELF maps."""
    (at,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQ", data, at + i * size) for i in range(count)]
    return max(offset + length for kind, _, offset, _, _, length in headers if kind == 1)


def truncated(path: Path, size: int) -> None:
    data = some_library()
    path.write_bytes(data[: size if size > 0 else end_of_segments(data) + size])


def corrupted(path: Path, offset: int, value: int) -> None:
    data = bytearray(some_library())
    struct.pack_into("<Q", data, offset, value)
    path.write_bytes(data)


DAMAGES = {
    "missing": (lambda path: None, "this build of xtrain has no CUDA library"),
    "empty": (lambda path: path.touch(), "is empty; build it again"),
    "text": (lambda path: path.write_text("Not Found\n"), "is not an ELF library; build it again"),
    "4 bytes": (lambda path: truncated(path, 4), "is truncated: it has 4 bytes and needs 64; build"),
    "63 bytes": (lambda path: truncated(path, 63), "is truncated: it has 63 bytes and needs 64; build"),
    "header": (lambda path: truncated(path, 64), "is truncated: it has 64 bytes and needs 120; build"),
    "page": (lambda path: truncated(path, 4096), "is truncated: it has 4096 bytes and needs [0-9]+; build"),
    "half": (lambda path: truncated(path, 1 << 20), "is truncated: it has 1048576 bytes and needs [0-9]+; build"),
    "last byte": (lambda path: truncated(path, -1), "is truncated: it has [0-9]+ bytes and needs [0-9]+; build"),
    "headers beyond": (lambda path: corrupted(path, 32, 2**63 + 8), "is truncated"),
    "headers wrap": (lambda path: corrupted(path, 32, 2**64 - 56), "is truncated"),
    "directory": (lambda path: path.mkdir(), "is a directory"),
    "pipe": (lambda path: os.mkfifo(path), "is not a file"),
    "dangling": (
        lambda path: path.symlink_to("gone.so"),
        "is a symbolic link to gone.so: No such file or directory; build",
    ),
    "circle": (lambda path: path.symlink_to(path.name), "is a symbolic link to libxtrain_cuda.so: "),
    # what dlopen refuses by itself, cut off as it may be
    "32 bits": (lambda path: path.write_bytes(edited(4, "B", 1, most=4096)), ".*: wrong ELF class: ELFCLASS32"),
    "another byte order": (
        lambda path: path.write_bytes(edited(5, "B", 2, most=4096)),
        ".*: ELF file data encoding not little-endian",
    ),
    "program headers of another size": (
        lambda path: path.write_bytes(edited(54, "<H", 32, most=4096)),
        ".*: ELF file's phentsize not the expected size",
    ),
    "a segment whose end wraps around": (
        lambda path: path.write_bytes(edited(program_header(1) + 8, "<Q", 2**64 - 4096)),
        r"libxtrain_cuda.so is truncated: it has \d+ bytes and needs \d+; build it again",
    ),
    "a note that is not loaded": (
        lambda path: path.write_bytes(edited(program_header(0x6474E551) + 8, "<Q", 2**62)),  # the flags of the stack
        r"was built from other sources \(an older one\) than this",
    ),
    "another": (
        lambda path: path.write_bytes(some_library()),
        r"was built from other sources \(an older one\) than this",
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the library as ELF, the format of Linux")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_a_sentence(package: Path, damage: str) -> None:
    make, message = DAMAGES[damage]
    make(package / "xtrain/_lib/libxtrain_cuda.so")
    said = run(package, WHY)
    assert re.fullmatch(f"CUDA is not available: [^\n]*{message}[^\n]*\n", said)
    sizes = re.search(r"it has (\d+) bytes and needs (\d+)", said)
    assert not sizes or int(sizes[1]) < int(sizes[2])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the library as ELF, the format of Linux")
def test_a_library_that_may_not_be_read_is_a_sentence() -> None:
    as_nobody = "import os, xtrain; os.geteuid() or os.seteuid(65534)\n"  # nothing is forbidden to root
    with tempfile.TemporaryDirectory() as folder:  # unlike pytest's own folders, it may be entered by nobody
        Path(folder).chmod(0o755)
        library = make_package(Path(folder)) / "xtrain/_lib/libxtrain_cuda.so"
        library.write_bytes(some_library())
        library.chmod(0)
        said = run(Path(folder), as_nobody + WHY)
    assert re.fullmatch(r"CUDA is not available: .*libxtrain_cuda.so cannot be read: Permission denied\n", said)


def test_a_library_of_other_headers_is_refused_and_one_of_ours_is_opened(package: Path) -> None:
    stale = f"{xt.__version__}-0123456789abcdef"
    make_fake(package, stale)
    ours = our_contract()
    assert re.fullmatch(
        rf"CUDA is not available: .*/libxtrain_cuda.so was built from other sources \({stale}\) than this extension "
        rf"\({ours}\); build it again \(XTRAIN_CUDA=1 make build\)\n",
        run(package, WHY),
    )
    make_fake(package, ours)
    assert run(package, WHY + "; print(xt.tensor([1.0, 2.0]).to('cuda').cpu().tolist())") == "None\n[1.0, 2.0]\n"


def test_a_library_without_its_function_is_refused(package: Path) -> None:
    make_half(package, our_contract())
    assert re.fullmatch(r"CUDA is not available: .* was built from other sources .*\n", run(package, WHY))


# ---- a library that opens ------------------------------------------------------------------------------------------------------


def test_giving_memory_back_says_what_failed(package: Path) -> None:
    make_fake(package, our_contract())
    code = """
import xtrain as xt
xt.cuda.empty_cache()  # nothing was opened, nothing is kept
x = xt.ones(3).to("cuda")
try:
    xt.cuda.empty_cache()
except xt.CudaError as error:
    print(error)
"""
    assert run(package, code) == ""
    assert run(package, code, FAKE_CUDA_BROKEN="1") == "an earlier kernel failed\n"


FORKED = "CUDA is not available: this process was forked after CUDA's first use; start workers with multiprocessing's 'spawn' method"
CHILD = """
def child():
    for touch in (lambda: xt.ones(3).to("cuda"), xt.cuda.synchronize, lambda: xt.set_default_device("cuda")):
        try:
            touch()
            return "CUDA was touched"
        except RuntimeError as error:
            if FORKED not in str(error):
                return str(error)
    if xt.cuda.is_available() or not xt.cuda.why_unavailable().startswith(FORKED):
        return "is_available"
    a = xt.rand(300, 300, device="cpu")
    if not ((a @ a) - a.matmul(a, backend="naive")).abs().max().item() < 1e-2:
        return "wrong on the CPU"
    return ""

def check(pid):
    if pid == 0:
        found = child()
        print(found, flush=True) if found else None
        os._exit(3 if found else 0)
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork (POSIX)")
def test_a_forked_child_gets_a_sentence_and_the_cpu(package: Path) -> None:
    make_fake(package, our_contract())
    start = f"import os, warnings\nwarnings.simplefilter('ignore')\nimport xtrain as xt\nFORKED = {FORKED!r}\n{CHILD}\n"
    used = 'x = xt.ones(3).to("cuda")\ncheck(os.fork())\nprint(x.cpu().tolist())'
    assert run(package, start + used) == "[1.0, 1.0, 1.0]\n"
    # The fork falls into the opening, in a thread that the child does not have; synchronize() opens without the GIL.
    opening = """
import threading, time
thread = threading.Thread(target=xt.cuda.synchronize, daemon=True)
thread.start()
while not os.path.exists("opening"):
    time.sleep(0.001)
check(os.fork())
open("go", "w").close()
thread.join()
print(xt.cuda.is_available())
"""
    assert run(package, start + opening, FAKE_CUDA_WAITS="1") == "True\n"
    # Before the first use there is nothing to be refused.
    fresh = "check_status = os.waitpid(pid, 0)[1] if (pid := os.fork()) else os._exit(not xt.cuda.is_available())"
    assert run(package, start + fresh + "\nprint(check_status)") == "0\n"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory) -> list[Path]:
    """The objects of cuda/runtime that need no cuBLAS."""
    options = ["-std=c++17", f"-I{ROOT}/csrc", f"-I{ROOT}/cuda", "-Xcompiler", "-fPIC", '-DXT_CUDA_ARCHS="90"']
    objects = [tmp_path_factory.mktemp("runtime") / name for name in ("device.o", "graph.o", "memory.o")]
    for made in objects:
        source = ROOT / "cuda/runtime" / f"{made.stem}.cu"
        subprocess.run([setup_cuda.find_nvcc(), *options, "-c", source, "-o", made], check=True)
    return objects


def run_with(source: str, objects: list[Path], folder: Path) -> list[str]:
    """What the program of tests/support prints, which is a CUDA runtime too."""
    fake, program = folder / "fake.o", folder / "program"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        ["gcc", *warnings, f"-I{ROOT}/csrc", "-c", ROOT / "tests/support/fakes" / source, "-o", fake], check=True
    )
    loose = ["-no-pie", "-Wl,--unresolved-symbols=ignore-all", "-ldl", "-lpthread"]  # no kernel is ever called
    subprocess.run(["g++", *objects, fake, *loose, "-o", program], check=True, stderr=subprocess.DEVNULL)
    return subprocess.run([program], check=True, capture_output=True, text=True, timeout=HANGS).stdout.splitlines()


@pytest.mark.skipif(bool(os.environ.get("XTRAIN_SANITIZE")), reason="links object files of a build without sanitizers")
@pytest.mark.skipif(not setup_cuda.find_nvcc(), reason="needs nvcc")
def test_the_library_gives_back_what_it_made_and_says_what_came_first(tmp_path: Path, runtime: list[Path]) -> None:
    """cuda/runtime/device.cu and memory.cu with tests/support/fakes/fake_cudart.c for the CUDA runtime."""
    said = run_with("fake_cudart.c", runtime, tmp_path)
    assert said[:-5] == ["fails: opening the device: out of memory (OutOfMemory), 0 left"] * 10
    assert said[-5:-2] == [
        "opened, 4 made",
        "trim: 0, 1 trims",
        "trim: 4, giving memory back: out of memory (OutOfMemory)",
    ]
    assert said[-2].startswith(
        "trim: 7, cuda:0: an earlier kernel failed: launch failure; queued last (newest first): "
    )
    assert re.fullmatch(
        "child: 5, CUDA cannot be used in a process forked after its first use: .*'spawn' method", said[-1]
    )


@pytest.mark.skipif(bool(os.environ.get("XTRAIN_SANITIZE")), reason="links object files of a build without sanitizers")
@pytest.mark.skipif(not setup_cuda.find_nvcc(), reason="needs nvcc")
def test_a_capture_makes_no_call_that_cannot_be_captured(tmp_path: Path, runtime: list[Path]) -> None:
    """cuda/runtime with tests/support/fakes/fake_capture.c for the CUDA runtime: whose blocks are whose, and when they go. Memsets
    of up to 64 KiB become kernels that do the same, where a toolkit has what that needs; others stay.
    """
    toolkit = re.search(r"cuda_(\d+)", setup_cuda.nvcc_version(setup_cuda.find_nvcc()))
    fills = [
        line
        for node, threads, count, value in (
            (1, 256, 4, 0),
            (2, 256, 100, 0xFF),
            (3, 256, 7, 0x1234),
            (4, 16384, 16384, 7),
        )
        for line in (
            f"a kernel behind node {node - 1}: {threads} threads, {count} elements of {value}, data 1",
            f"and before node {node + 1}: 1",
            f"node {node} goes",
        )
        if toolkit and int(toolkit[1]) >= 13
    ]
    must_not = "5, cuda.graph: a captured step must not"
    assert run_with("fake_capture.c", runtime, tmp_path) == [
        "no plan: 4, cuda.graph: no host memory for the plan of a step's memory",
        "planned: 0",
        f"{20 * 2048 + 1} units",
        "capture: 0",
        "mode 1, 3 blocks of the driver",  # thread-local; a small one, a large one, the region
        "owned: 1 1, not: 0 0",
        "handed out again: 0",
        "allocate: 5, cuda.graph: the captured step must not need more memory than its planned run, which had 20.00 MiB at "
        "once; 21.00 MiB more were asked",
        f"wait: {must_not} wait for the device",
        f"to the host: {must_not} read values, which waits for the device (item, tolist, numpy, stats, repr, to the CPU)",
        f"from the host: {must_not} copy from the host: pass tensors that change as arguments, and make the others before",
        f"trim: {must_not} give memory back",
        f"another capture: {must_not} capture another one",
        f"a plan: {must_not} plan another one",
        f"a replay: {must_not} replay another one",
        "another thread: 5, cuda.graph: another thread is capturing a step on cuda:0; use the device when it has ended",
        *fills,
        "end: 0",
        "8 calls, 0 illegal, 2 blocks of the driver",
        "handed out again: 1",
        "replay: 0",
        "1 launched",
        "dropped: 0 graphs, 0 executables, 2 blocks of the driver",
        "its last block: 1 blocks of the driver",
        "capture: 0",
        "end: 7, cuda.graph: capture invalidated (StreamCaptureInvalidated)",
        "replay: 5, cuda.graph: this graph's capture has not succeeded",
        "capture: 4, out of memory on cuda:0: 20.00 MiB asked for the memory of a captured step",
        "capture: 0",
        "0 capturing, 0 graphs, 0 executables, 0 blocks of the driver",
        "capture: 0",
        "beside a small region: 2 blocks of the driver",
        "end of nothing: 0",
        "replay: 0",
    ]


@pytest.mark.parametrize("what", ["a hook", "a rule"])
def test_the_end_does_not_wait_for_what_a_backward_calls(fake: Path, what: str) -> None:
    """Python code inside a backward of a daemon thread stays where it enters the core, and with it the backward, which would be waited for
    for 5 s."""
    code = f"""
import threading, time
import xtrain as xt
from xtrain import _C
x, begun = xt.ones(3, device="cuda").requires_grad_(), threading.Event()
def computes(gradient):
    begun.set()
    while True:
        xt.ones(2) + 1
class Rule(xt.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        computes(gradient)
def work():
    if {what!r} == "a hook":
        x.register_hook(computes)
    y = Rule.apply(x) if {what!r} == "a rule" else x * 2
    y.sum().backward()
threading.Thread(target=work, daemon=True).start()
assert begun.wait(60)
before = time.monotonic()
_C.end_threads()
print(time.monotonic() - before < 4.5)
"""
    assert run(fake, code) == "True\n"
