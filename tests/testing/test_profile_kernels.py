"""Kernels in profiles: what CUPTI records is on the clock of ops, in the trace and in a table, and a profile without it says why.

Programs run in processes of their own, on the device of fake_device.c with the CUPTI of fake_cupti.c, and some on a GPU with NVIDIA's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_library import make_cupti, make_device, make_package
from places import ROOT
from runs import HANGS, options, text_file

import setup_cuda
import xtrain as xt
from xtrain.profiling import Kernel, kernels, profile

pytestmark = pytest.mark.on_cpu


# ---- names, tables and traces ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("sum_kernel(float*, long)", "sum_kernel"),
        (
            "void sum_kernel<float, (Way)2, Pair<int, 4> >(float const*, long)",
            "sum_kernel<float, (Way)2, Pair<int, 4> >",
        ),
        ("void a::(anonymous namespace)::kernel<b::(anonymous namespace)::C>(int (*)(float))", "a::kernel<b::C>"),
        ("std::enable_if<true, void>::type kernel<int>(int)", "kernel<int>"),
        ("nvjet_tst_128x128_64x4_2x2_h_bz_coopA_NNT", "nvjet_tst_128x128_64x4_2x2_h_bz_coopA_NNT"),
        ("_Z6kernelIfEvPT_", "_Z6kernelIfEvPT_"),
        ("decltype ((f)(0)) kernel<int>()", "decltype ((f)(0)) kernel<int>()"),
        (f"void kernel<{'a' * 200}>(int)", f"kernel<{'a' * 110}..."),
    ],
)
def test_names_without_what_a_kernel_returns_and_takes(name: str, wanted: str) -> None:
    assert kernels.short(name) == wanted


def test_the_table_of_kernels() -> None:
    found = profile()
    assert found.kernel_table() == ""
    found.no_kernels = "no GPU"
    assert found.kernel_table() == "no kernels in the profile: no GPU"
    found.kernels = [
        Kernel("first", 1_000_000, 4_000_000, 0, 7),
        Kernel("second", 3_000_000, 4_000_000, 0, 7),
        Kernel("memset", 9_000_000, 10_000_000, 0, 7, 64),
        Kernel("first", 1_000_000, 4_000_000, 1, 7),
    ]
    assert found.kernel_table().splitlines() == [
        f"{'kernel':56}   calls          ms   share",
        f"{'first':56}       2       6.000   75.0%",
        f"{'second':56}       1       1.000   12.5%",
        f"{'memset':56}       1       1.000   12.5%",
        "GPU 0 computed or copied in 44.4% of the 9.000 ms from its first kernel on",
        "GPU 1 computed or copied in 100.0% of the 3.000 ms from its first kernel on",
    ]
    assert found.kernel_table(most=1).splitlines()[2] == f"{'2 more':56}               2.000   25.0%"


def test_a_gpu_is_a_process_of_the_trace_and_a_stream_a_thread() -> None:
    """None overlaps another on its thread: launches that overlap are on two."""
    found = profile()
    found.kernels = [
        Kernel("b", 2_000, 4_000, 0, 7),
        Kernel("a", 1_000, 3_000, 0, 7),
        Kernel("c", 3_000, 5_500, 0, 7),
        Kernel("d", 1_500, 9_000, 0, 13, 64),
        Kernel("e", 1_000, 2_000, 1, 7),
    ]
    rows = found.trace()["traceEvents"]
    named = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert sorted(processes.values()) == ["GPU 0", "GPU 1"] and min(processes) >= 1 << 22, (
        "no process has such a number"
    )
    ran = [
        (
            row["name"],
            row["cat"],
            processes[row["pid"]],
            named[row["pid"], row["tid"]],
            row["ts"],
            row["dur"],
            row["args"],
        )
        for row in rows
        if row["ph"] == "X"
    ]
    assert sorted(ran) == [
        ("a", "kernel", "GPU 0", "stream 7", 0.0, 2.0, {"stream": 7}),
        ("b", "kernel", "GPU 0", "stream 7, 2", 1.0, 2.0, {"stream": 7}),
        ("c", "kernel", "GPU 0", "stream 7", 2.0, 2.5, {"stream": 7}),
        ("d", "copy", "GPU 0", "stream 13", 0.5, 7.5, {"stream": 13, "bytes": 64}),
        ("e", "kernel", "GPU 1", "stream 7", 0.0, 1.0, {"stream": 7}),
    ]
    assert len(named) == 4 and len(set(named)) == 4


def test_the_time_in_which_something_ran() -> None:
    times = [(5, 9), (0, 4), (3, 6), (3, 4), (20, 21)]
    assert kernels.busy(Kernel("", begin, end, 0, 0) for begin, end in times) == 10


# ---- on a device -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake(tmp_path_factory) -> list[Path]:
    """Folders for sys.path: the package with that device, and its CUPTI."""
    folder = make_package(tmp_path_factory.mktemp("device"))
    make_device(folder)
    return [folder, make_cupti(tmp_path_factory.mktemp("cupti"))]


@pytest.fixture
def gpu() -> list[Path]:
    """The folder of this package, where there is a GPU."""
    if not xt.cuda.is_available():
        pytest.skip(f"needs a GPU: {xt.cuda.why_unavailable()}")
    return [Path(xt.__file__).parent.parent]


@pytest.fixture(params=["fake", "gpu"])
def package(request) -> list[Path]:
    return request.getfixturevalue(request.param)


def run(folder: Path, package: list[Path], program: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, package)), **more}
    code = f"import xtrain as xt\nfrom xtrain import functional as F\nfrom xtrain.profiling import span\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment, timeout=HANGS
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stdout}{done.stderr}"
    return done


EAGER = """
x = xt.ones(64, 64, device="cuda")
xt.cuda.synchronize()
with xt.profile("trace.json") as found:
    with span("here"):
        y = (x * 2).sum()
        value = y.item()
assert value == 2 * 64 * 64 and not found.no_kernels, found.no_kernels
print(found.kernel_table())
"""


def test_kernels_are_on_the_clock_of_ops(tmp_path, package: list[Path]) -> None:
    """Kernels begin behind the begin of the op that launches them, and have ended when the host has their result: to a millisecond."""
    run(
        tmp_path,
        package,
        EAGER
        + """
(here,) = found.roots
ops = {event.name: event for event in found.events() if event.kind == "forward"}
assert [kernel.device for kernel in found.kernels] == [0] * len(found.kernels)
for op in ("mul", "sum"):
    assert [kernel for kernel in found.kernels if kernel.begin >= ops[op].begin - 10**6], (op, found.kernels)
copies = [kernel for kernel in found.kernels if kernel.nbytes is not None]
assert "memcpy device to host" in {copy.name for copy in copies} and all(copy.nbytes > 0 for copy in copies)
computes = [kernel for kernel in found.kernels if kernel.nbytes is None]
assert len(computes) >= 2
for kernel in found.kernels:
    assert here.begin - 10**6 <= kernel.begin < kernel.end <= here.end + 10**6, (kernel, here)
""",
    )
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "GPU 0" in {row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in rows if row["ph"] == "X")


def test_names_are_those_of_the_source(tmp_path, fake: list[Path]) -> None:
    said = run(tmp_path, fake, EAGER).stdout
    assert re.search(r"^mul\w*_kernel<float, 4> +1 ", said, re.M) or re.search(r"^\w+_kernel<float, 4> +1 ", said, re.M)
    assert re.search(r"^memcpy device to host +1 ", said, re.M)


GRAPH = """
size = {size}
a = xt.randn(size, size, device="cuda")
step = xt.cuda.graph(lambda x: (x @ a) @ a)
def steps(count):
    for _ in range(count):
        out = step(a)
    xt.cuda.synchronize()
    return out
steps(4)
wanted = step(a).clone()
assert step.captured
"""


@pytest.mark.parametrize(("places", "memsets"), [(99, 0), (8192, 0), (8193, 1)])
def test_a_graph_clears_little_memory_by_a_kernel(tmp_path, gpu: list[Path], places: int, memsets: int) -> None:
    """A memset, here of `scatter`, costs the host far more in each launch of a graph. Up to 64 KiB a kernel does the same."""
    program = f"""
index = xt.arange(2 * {places}, device="cuda") % {places}
step = xt.cuda.graph(lambda x, source: x.scatter(0, index, source))
x = xt.zeros({places}, device="cuda")
for turn in range(6):
    source = xt.randn(2 * {places}, device="cuda")
    with xt.profile() as found:
        out = step(x, source)
        xt.cuda.synchronize()
    assert (out - source[{places}:]).abs().max().item() == 0, turn
assert step.captured
names = [kernel.name for kernel in found.kernels]
assert sum("memset" in name for name in names) == {memsets}, names  # the driver has a kernel memset32
assert sum("graph_fill_kernel" in name for name in names) == {1 - memsets}, names
"""
    run(tmp_path, gpu, program)


@pytest.mark.parametrize("again", [1, 3])
def test_a_replayed_graph_shows_its_kernels(tmp_path, package: list[Path], again: int) -> None:
    """In each profile of a process, and the graph still computes; on a GPU, they take nearly all of the time of the replays."""
    on_gpu = len(package) == 1
    alone = on_gpu and "PYTEST_XDIST_WORKER" not in os.environ  # other tests take time of the GPU
    program = (
        GRAPH.format(size=4096 if on_gpu else 64)
        + f"""
from xtrain.profiling import kernels
counts = set()
for _ in range({again}):
    with xt.profile() as found:
        with span("replays"):
            steps(10)
    assert not found.no_kernels and not found.lost, (found.no_kernels, found.lost)
    (span_,) = found.roots
    names = [event.name for event in found.events() if event.kind == "forward"]
    assert "matmul" not in names, names
    computes = [kernel for kernel in found.kernels if kernel.nbytes is None]
    assert all(span_.begin - 10**6 <= kernel.begin <= kernel.end <= span_.end + 10**6 for kernel in computes)
    took, ran = span_.end - span_.begin, kernels.busy(computes)
    assert {0.9 if alone else 0} * took < ran <= took + 10**6, (took, ran, found.kernel_table())
    counts.add(len(computes))
    print(found.kernel_table())
assert len(counts) == 1 and min(counts) >= 20, counts
assert (step(a) - wanted).abs().max().item() == 0
"""
    )
    done = run(tmp_path, package, program)
    if not on_gpu:
        assert done.stderr == "".join(f"detached {number}\n" for number in range(1, again + 1))


def test_a_captured_run_has_both_tables(tmp_path, package: list[Path]) -> None:
    config = options(text_file(tmp_path / "text.txt"), tmp_path / "run", steps=10, device="cuda", graph=True)
    program = f"""
from xtrain.cli.train import command
from runs import arguments
assert command([*arguments({config!r}), "--profile", "trace.json"]) == 0
"""
    said = run(tmp_path, [*package, ROOT / "tests/support", ROOT], program).stdout
    tables = said[said.index("profile trace.json") :]
    assert re.search(r"^name +kind +calls +ms +share$", tables, re.M), tables
    assert re.search(r"^kernel +calls +ms +share$", tables, re.M), tables
    assert re.search(r"^GPU 0 computed or copied in \d+\.\d% of the [\d,.]+ ms", tables, re.M), tables
    rows = [row for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if row["ph"] == "X"]
    assert len([row for row in rows if row["name"] == "graph"]) == 5
    updates = [row for row in rows if "adamw" in row["name"] and row["cat"] == "kernel"]
    assert len(updates) >= 5 and len(updates) % 5 == 0, "of each of the five steps"


REFUSED = {
    "Subscribe 39": "CUPTI refuses cuptiSubscribe with MULTIPLE_SUBSCRIBERS: another profiler is attached to this process",
    "Subscribe 35": "CUPTI refuses cuptiSubscribe with NO_PRIVILEGE: the driver lets administrators alone profile, or this container",
    "ActivityRegisterCallbacks 1": "CUPTI refuses cuptiActivityRegisterCallbacks with SOMETHING",
    "ActivityEnable 27": "CUPTI refuses cuptiActivityEnable with SOMETHING",
    "GetTimestamp 999": "CUPTI refuses cuptiGetTimestamp with SOMETHING",
}


@pytest.mark.parametrize("failure", REFUSED)
def test_a_cupti_that_refuses_is_a_sentence(tmp_path, fake: list[Path], failure: str) -> None:
    """The profile goes on, and so does the process: a later one works."""
    program = """
import os
x = xt.ones(3, device="cuda")
with xt.profile("trace.json") as found:
    x.exp()
assert [event.name for event in found.roots] == ["exp"] and found.kernels == []
print(found.kernel_table())
del os.environ["FAKE_CUPTI_FAILS"]
with xt.profile() as found:
    x.exp()
assert len(found.kernels) == 1 and not found.no_kernels, found.no_kernels
"""
    done = run(tmp_path, fake, program, FAKE_CUPTI_FAILS=failure)
    assert done.stdout == f"no kernels in the profile: {REFUSED[failure]}\n"
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["otherData"]["no_kernels"] == REFUSED[failure]
    assert "exp" in {row["name"] for row in content["traceEvents"]}


ONE_OP = """
x = xt.ones(3, device="cuda")
with xt.profile() as found:
    x.exp()
print(found.no_kernels or len(found.kernels), found.lost)
"""


def test_without_cupti_a_profile_says_where_it_was_looked_for(tmp_path, fake: list[Path]) -> None:
    said = run(tmp_path, fake[:1], ONE_OP).stdout
    assert re.fullmatch(
        r"libcupti\.so\.99 opens neither among the Python packages \(nvidia/cu99/lib, nvidia/cuda_cupti/lib\), nor .* "
        r"/usr/local/cuda or \$CUDA_HOME; pip install 'nvidia-cuda-cupti==99\.\*' 0\n",
        said,
    )


@pytest.mark.parametrize("below", ["nvidia/cuda_cupti/lib", "lib64", "extras/CUPTI/lib64"])
def test_where_cupti_is_looked_for(tmp_path, fake: list[Path], below: str) -> None:
    folder = tmp_path / "site-packages" / below
    folder.mkdir(parents=True)
    (folder / "libcupti.so.99").symlink_to(fake[1] / "nvidia/cu99/lib/libcupti.so.99")
    more = {} if below.startswith("nvidia") else {"CUDA_HOME": str(tmp_path / "site-packages")}
    paths = [fake[0], tmp_path / "site-packages"] if below.startswith("nvidia") else fake[:1]
    assert run(tmp_path, paths, ONE_OP, **more).stdout == "1 0\n"
    assert run(tmp_path, fake[:1], ONE_OP, LD_LIBRARY_PATH=str(folder)).stdout == "1 0\n"


def test_versions_of_cupti(tmp_path, fake: list[Path]) -> None:
    said = run(tmp_path, fake, ONE_OP, FAKE_CUPTI_VERSION="18").stdout
    assert re.fullmatch(
        r"\S+/libcupti.so.99 has version 18 of CUPTI's API, and 19, of CUDA 12.0, is the oldest .* 0\n", said
    )
    for version, detached in (("19", ""), ("23", ""), ("24", "detached 1\n"), ("140000", "detached 1\n")):
        done = run(tmp_path, fake, ONE_OP, FAKE_CUPTI_VERSION=version)
        assert (done.stdout, done.stderr) == ("1 0\n", detached), "before 12.6 a process with graphs must not detach it"


def test_records_without_times_are_counted_as_lost(tmp_path, fake: list[Path]) -> None:
    program = ONE_OP.replace("x.exp()", "[x.exp() for _ in range(9)]")
    assert run(tmp_path, fake, program, FAKE_CUPTI_SPOILS="3", FAKE_CUPTI_DROPS="2").stdout == "6 5\n"


def test_begin_and_end_wait_for_the_gpu(tmp_path, fake: list[Path]) -> None:
    """So that a profile has what was launched in it, all of it and nothing else."""
    done = run(tmp_path, fake, ONE_OP, FAKE_DEVICE_BUSY="3")
    assert (done.stdout, done.stderr) == ("1 0\n", "idle\nidle\ndetached 1\n")


def test_more_records_than_a_buffer_holds(tmp_path, fake: list[Path]) -> None:
    program = ONE_OP.replace("x.exp()", "[x.exp() for _ in range(40_000)]")
    assert run(tmp_path, fake, program).stdout == "40000 0\n"


def test_a_gpu_that_is_not_in_use(tmp_path, fake: list[Path]) -> None:
    """Nothing is opened for a profile of the CPU, and one that begins too early says so."""
    program = """
assert xt.cuda.is_available()
with xt.profile() as found:
    xt.ones(3).exp()
assert found.kernel_table() == "" and "cupti" not in open("/proc/self/maps").read()
with xt.profile() as found:
    xt.ones(3, device="cuda").exp()
print(found.kernel_table())
"""
    assert (
        run(tmp_path, fake, program).stdout == "no kernels in the profile: no GPU was in use when the profile began\n"
    )


def test_an_index_out_of_range_is_left_to_who_waits_for_results(tmp_path, package: list[Path]) -> None:
    program = """
table, ids = xt.ones(4, 2, device="cuda"), xt.tensor([1, 9], device="cuda")
with xt.profile() as found:
    y = F.embedding(ids, table)
assert found.kernels, found.no_kernels
try:
    y.sum().item()
except IndexError as error:
    print(error)
"""
    assert "embedding: id must be in [0, 4), got 9 at position 1" in run(tmp_path, package, program).stdout


def test_a_profile_that_begins_in_a_capture_has_no_kernels(tmp_path, package: list[Path]) -> None:
    program = """
found = xt.profile()
calls = []
def body(x):
    calls.append(0)
    if len(calls) == 3:
        found.start()
    y = x * 2
    found.stop()
    return y
step = xt.cuda.graph(body)
x = xt.ones(3, device="cuda")
for _ in range(4):
    y = step(x)
assert step.captured and y.tolist() == [2, 2, 2]
print(found.kernel_table())
"""
    said = run(tmp_path, package, program).stdout
    assert said == "no kernels in the profile: cuda.graph: a captured step must not ask whether the device is done\n"


def test_a_forked_child_leaves_cupti_alone(tmp_path, fake: list[Path]) -> None:
    program = """
import os, warnings
warnings.simplefilter("ignore")
x = xt.ones(3, device="cuda")
with xt.profile() as found:
    [x.exp() for _ in range(40_000)]  # more than a buffer holds: the parent has taken some
    if (child := os.fork()) == 0:
        found.stop()
        os._exit(len(found.kernels))
    assert os.waitpid(child, 0)[1] == 0
print(len(found.kernels))
"""
    done = run(tmp_path, fake, program)
    assert (done.stdout, done.stderr) == ("40000\n", "detached 1\n")


def test_a_gpu_whose_memory_is_free_again_is_in_use(tmp_path, package: list[Path]) -> None:
    """At the begin, and at the end, which else would leave CUPTI attached."""
    program = """
def free():
    global x
    x = None
    xt.cuda.reset_peak_memory_stats()
x = xt.ones(3, device="cuda").exp()
for begin, end in ((0, 1), (1, 0), (1, 1), (0, 0)):
    if begin:
        free()
    with xt.profile() as found:
        x = xt.ones(3, device="cuda").exp()
        if end:
            free()
    names = [kernel.name.lower() for kernel in found.kernels]
    assert any("exp" in name or "unary" in name for name in names), (begin, end, names)
"""
    run(tmp_path, package, program)


def test_ctrl_c_in_a_begin_leaves_no_profile(tmp_path, fake: list[Path]) -> None:
    """Nor does it wait for a GPU that another thread keeps busy; the next profile records."""
    program = """
import os, signal, threading
x = xt.ones(3, device="cuda")
for act in ("start", "stop"):
    found = xt.profile()
    if act == "stop":
        found.start()
    os.environ["FAKE_DEVICE_BUSY"] = "40000"  # it says "idle" after at least 2 s
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        getattr(found, act)()
        raise AssertionError("no KeyboardInterrupt")
    except KeyboardInterrupt:
        del os.environ["FAKE_DEVICE_BUSY"]
    with xt.profile() as found:
        x.exp()
    print(found.no_kernels or len(found.kernels), len(found.roots))
"""
    done = run(tmp_path, fake, program)
    assert done.stdout == "1 1\n1 1\n" and "idle" not in done.stderr, "it has waited to the end"


def test_a_signal_behind_a_begin_leaves_no_profile(tmp_path, fake: list[Path]) -> None:
    """One that arrives when CUPTI records, and before Python knows."""
    program = """
from xtrain import _C
from xtrain.profiling import recorder
x = xt.ones(3, device="cuda")
class Interrupted:
    def __getattr__(self, name):
        return getattr(_C, name)
    def kernels_start(self):
        _C.kernels_start()
        raise KeyboardInterrupt
recorder._C = Interrupted()
try:
    xt.profile().start()
except KeyboardInterrupt:
    recorder._C = _C
with xt.profile() as found:
    x.exp()
print(found.no_kernels or len(found.kernels))
"""
    assert run(tmp_path, fake, program).stdout == "1\n"


def test_a_profile_that_still_begins_is_not_ended(tmp_path, fake: list[Path]) -> None:
    program = """
import os, threading, time
x = xt.ones(3, device="cuda")
os.environ["FAKE_DEVICE_BUSY"] = "4000"
found = xt.profile()
thread = threading.Thread(target=found.start)
thread.start()
time.sleep(0.1)
found.stop()
thread.join()
del os.environ["FAKE_DEVICE_BUSY"]
x.exp()
found.stop()
print(found.no_kernels or len(found.kernels))
"""
    assert run(tmp_path, fake, program).stdout == "1\n"


def test_profiles_share_the_names_of_kernels(tmp_path, fake: list[Path]) -> None:
    """Also where CUPTI has new strings for them each time: memory does not grow from profile to profile."""
    program = """
import ctypes
class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena blocks small maps mapped top fast used free keep".split()]
heap = ctypes.CDLL(None).mallinfo2
heap.restype = Heap
x = xt.ones(3, device="cuda")
def profiles(count):
    for _ in range(count):
        with xt.profile() as found:
            x.exp(), x.exp()
    assert len({id(kernel.name) for kernel in found.kernels}) == 1 and len(found.kernels) == 2
    return heap().used
before = profiles(100)
grown = profiles(1000) - before
assert grown < 50_000, grown
"""
    run(tmp_path, fake, program)


@pytest.mark.parametrize("function", ["Finalize", "GetTimestamp"])
def test_a_cupti_without_a_function(tmp_path, fake: list[Path], function: str) -> None:
    source = (
        (ROOT / "tests/support/fakes/fake_cupti.c")
        .read_text()
        .replace(f"int cupti{function}(", f"int other{function}(")
    )
    library = tmp_path / "libcupti.so.99"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", library], input=source, text=True, check=True)
    said = run(tmp_path, fake[:1], ONE_OP + ONE_OP, LD_LIBRARY_PATH=str(tmp_path)).stdout
    assert said == 2 * f"{library} has no function cupti{function} 0\n"


def test_records_are_read_as_nvidia_declares_them(tmp_path) -> None:
    """Of all versions of the records that the installed header knows."""
    nvcc = setup_cuda.find_nvcc()
    homes = [Path("/usr/local/cuda"), *([Path(nvcc).parent.parent, Path(nvcc).resolve().parent.parent] if nvcc else [])]
    folders = [home / below for home in homes for below in ("include", "extras/CUPTI/include")]
    include = next((folder for folder in folders if (folder / "cupti.h").exists()), None)
    if include is None:
        pytest.skip("needs the header of CUPTI")
    header = "".join((include / name).read_text() for name in ("cupti_activity.h", "cupti_activity_deprecated.h"))
    fields = {
        "Kernel": ("KernelRecord", {"name": "name", "start": "begin", "end": "end", "deviceId": "device", "streamId": "stream"}),
        "Memcpy": ("CopyRecord", {"copyKind": "direction", "bytes": "nbytes", "start": "begin", "end": "end", "deviceId": "device", "streamId": "stream"}),
        "Memset": ("CopyRecord", {"bytes": "nbytes", "start": "begin", "end": "end", "deviceId": "device", "streamId": "stream"}),
    }  # fmt: skip
    checks = [
        "(int)CUPTI_ACTIVITY_KIND_MEMCPY == COPY && (int)CUPTI_ACTIVITY_KIND_MEMSET == FILL",
        "(int)CUPTI_ACTIVITY_KIND_KERNEL == KERNEL && (int)CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL == CONCURRENT_KERNEL",
        "(int)CUPTI_ERROR_INSUFFICIENT_PRIVILEGES == NO_PRIVILEGE && (int)CUPTI_ACTIVITY_FLAG_FLUSH_FORCED == FORCED",
        "(int)CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED == SECOND_SUBSCRIBER",
    ]
    for stem, (ours, names) in fields.items():
        known = sorted(
            set(re.findall(rf"}} (CUpti_Activity{stem}\d*);", header)),
            key=lambda name: int(name[len(stem) + 14 :] or 1),
        )
        checks += [
            f"offsetof({theirs}, {their}) == offsetof({ours}, {our}) && sizeof((({theirs} *)0)->{their}) == sizeof((({ours} *)0)->{our})"
            for theirs in known
            if stem != "Kernel" or int(theirs[len("CUpti_ActivityKernel") :] or 1) >= 3
            for their, our in names.items()
        ]
    assert len(checks) > 60
    source = tmp_path / "layout.c"
    asserts = "\n".join(f'_Static_assert({check}, "{check}");' for check in checks)
    source.write_text(f'#include "backend/cupti.c"\n#include <cupti.h>\n{asserts}\n')
    subprocess.run(["gcc", "-fsyntax-only", f"-I{ROOT}/csrc", "-isystem", include, source], check=True)
