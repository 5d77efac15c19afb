"""What the core promises below the ops: sizes, messages, blocks of memory, the pool of threads, forks."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
from places import ROOT
from runs import HANGS, python

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

pytestmark = pytest.mark.on_cpu


def child(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANGS,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


# ---- sizes and messages


def test_the_largest_size() -> None:
    """Less than 2^62 bytes, of a tensor that repeats one element; nothing larger."""
    x = xt.zeros((1,), dtype=xt.uint8)
    assert x.expand((2**62 - 1,)).numel() == 2**62 - 1
    for shape in ((2**62,), (2**31, 2**31 + 1)):
        with pytest.raises(ValueError, match=r"more than 2\^62 bytes"):
            x.expand(shape)


def test_sizes_that_overflow_behind_a_zero() -> None:
    """A tensor without elements whose strides would overflow is refused, in any order of its sizes."""
    for shape in itertools.permutations((2**62, 0, 2**62)):
        with pytest.raises(ValueError, match=r"more than 2\^62 bytes"):
            _C.empty(shape)


def test_a_size_of_one_has_any_stride() -> None:
    x = xt.arange(12).reshape((3, 4))
    assert xt.zeros(2, 0, 3, 4).permute(3, 2, 1, 0).is_contiguous(), "of no elements any strides are"
    assert x[:, 1:2][:1].is_contiguous() and x[1:2].is_contiguous() and not x[:, 1:2].is_contiguous()
    assert x.T[:, 1:2].T.is_contiguous() and x[:, :1].T.reshape((3,)).tolist() == [0, 4, 8]


def test_shapes_in_messages() -> None:
    for shape, text in (((), "()"), ((3,), "(3,)"), ((2, 3), "(2, 3)")):
        with pytest.raises(ValueError, match=re.escape(f"shape {text}")):
            xt.zeros(shape).reshape((7,))


def test_a_kernels_message_gets_the_name_of_its_op() -> None:
    """The name goes before a message that lies in the buffer it is written to. (No address space holds 2^48 bytes.)"""
    done = child("""
import xtrain as xt
from xtrain import _C
x = xt.zeros((1,)).expand((2**46,))
for call in (lambda: x.contiguous(), lambda: x.exp(), lambda: x + 1):
    try:
        call()
    except xt.OutOfMemoryError as error:
        print(error)
""")
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    for name, line in zip(("contiguous", "exp", "add"), lines):
        assert line.startswith(f"{name}: out of memory on cpu: 268435456.00 MiB asked, ") and line.endswith(
            " MiB cached"
        ), line


def test_messages_name_their_op_once() -> None:
    for call in (
        lambda: F.rms_norm(xt.zeros((2, 4)), (4,), xt.zeros((5,))),
        lambda: F.embedding(xt.tensor([7]), xt.zeros((4, 3))),
        lambda: xt.zeros((2, 3)) @ xt.zeros((4, 5)),
    ):
        with pytest.raises((ValueError, IndexError)) as raised:
            call()
        name = str(raised.value).partition(":")[0]
        assert name in ("rms_norm", "embedding", "matmul") and str(raised.value).count(f"{name}:") == 1


# ---- memory


def test_blocks_of_all_sizes() -> None:
    """Around every class of sizes: each block is as large as was asked and nobody else's, also when it comes from the cache."""
    sizes = sorted({n + d for p in range(11, 17) for n in range(2**p, 2 ** (p + 1), 2 ** (p - 3)) for d in (-1, 0, 1)})
    for turn in (1, 2):
        held = [
            (n, xt.full((n,), n % 200 + turn, dtype=xt.uint8), xt.full((n,), n % 100, dtype=xt.uint8)) for n in sizes
        ]
        for n, a, b in held:
            assert (a.numpy() == n % 200 + turn).all() and (b.numpy() == n % 100).all()
        del held, a, b


@pytest.mark.usefixtures("steady_memory")
def test_at_most_an_eighth_is_wasted() -> None:
    for nbytes in (4097, 5000, 9001, 2**20 + 1, 3 * 2**20 + 1):
        before = _C.memory_stats("cpu")["allocated"]
        block = _C.empty((nbytes,), _C.uint8)
        assert block.nbytes <= _C.memory_stats("cpu")["allocated"] - before <= nbytes * 9 / 8 + 64
        del block


def test_what_the_cache_holds_is_counted() -> None:
    _C.memory_trim("cpu")
    x = xt.zeros((1 << 20,))
    assert _C.memory_stats("cpu")["cached"] == 0 and x.numel()
    del x
    assert _C.memory_stats("cpu")["cached"] == 4 << 20
    x = xt.zeros((1 << 20,))
    assert _C.memory_stats("cpu")["cached"] == 0 and x.numel()


@pytest.mark.usefixtures("steady_memory")
def test_the_peak_is_of_all_blocks() -> None:
    before = _C.memory_stats("cpu")["allocated"]
    _C.memory_reset_peak("cpu")
    held = [xt.zeros((1 << 16,)) for _ in range(4)]
    del held
    assert _C.memory_stats("cpu")["peak"] >= before + 4 * (4 << 16)


def test_the_cache_has_a_limit() -> None:
    """2 GiB of blocks that nobody has touched: they cost no memory."""
    _C.memory_trim("cpu")
    held = [_C.empty((600 << 20,), _C.uint8) for _ in range(4)]
    held.clear()
    cached = _C.memory_stats("cpu")["cached"]
    _C.memory_trim("cpu")
    assert 0 < cached <= 2 << 30


@pytest.mark.skipif(bool(os.environ.get("XTRAIN_SANITIZE")), reason="limits the address space, which a sanitizer needs")
def test_the_cache_is_given_back_before_an_allocation_fails() -> None:
    done = child("""
import resource
import xtrain as xt
from xtrain import _C
x = _C.empty((400 << 20,), _C.uint8)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (200 << 20),) * 2)
del x
y = _C.empty((500 << 20,), _C.uint8)
print(_C.memory_stats("cpu")["cached"])
""")
    assert done.stdout == "0\n", done.stderr


def test_scratch_of_all_sizes() -> None:
    """Products of bfloat16 convert blocks in a buffer that grows: each with the bytes that it has asked for."""
    for n in (8, 40, 41, 100, 130, 200, 201, 350):
        x = xt.ones((n, n), dtype=xt.bfloat16)
        assert (xt.matmul(x, x, backend="blas").float().numpy() == rounded(n)).all()
    done = child("""
import xtrain as xt
for n in range(8, 400, 7):
    x = xt.ones((n, n), dtype=xt.bfloat16)
    xt.matmul(x, x)
print("alive")
""", MALLOC_CHECK_="3", MALLOC_PERTURB_="7", XTRAIN_NUM_THREADS="1")  # fmt: skip
    assert done.stdout == "alive\n", done.stderr


def rounded(n: int) -> float:
    return xt.tensor([float(n)]).bfloat16().item()


# ---- threads and forks


def test_fills_of_many_threads_have_streams_of_their_own() -> None:
    _C.manual_seed(1)
    draws: list[float] = []
    lists: list[list[float]] = [[] for _ in range(8)]

    def work(mine: list[float]) -> None:
        for _ in range(400):
            mine.append(_C.uniform((1,), 0.0, 1.0, _C.float64).item())

    threads = [threading.Thread(target=work, args=(mine,)) for mine in lists]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    draws = [value for mine in lists for value in mine]
    assert _C.get_rng_state() == (1, 3200) and len(set(draws)) > 3190


def test_the_last_piece_ends_with_the_count() -> None:
    """Elements behind the last one stay, whichever thread does the last piece. In a process of its own: what writes over the memory of
    others may end or stop whatever runs there."""
    code = """
import xtrain as xt
xt.set_num_threads(4)
n = 8 * 16384 + 1
room, source = xt.zeros((n + 40000,)), xt.ones((n + 40000,))
room[:n] = source[:n]
assert not room[n:].numpy().any() and (room[:n].numpy() == 1.0).all()
"""
    done = python("-c", code, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_choice_is_of_its_thread() -> None:
    """Inside a `with` of one thread, another one has its own."""
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def work() -> None:
        with xt.use_gemm_backend("tiled"), xt.use_attention_backend("reference"):
            inside.set()
            leave.wait(HANGS)
            seen.append((_C.use_gemm_backend(None), _C.use_attention_backend(None)))

    with xt.use_gemm_backend("naive"), xt.use_attention_backend("materialized"):
        thread = threading.Thread(target=work)
        thread.start()
        inside.wait(HANGS)
        mine = (_C.use_gemm_backend("naive"), _C.use_attention_backend("materialized"))
        leave.set()
        thread.join()
    assert mine == ("naive", "materialized") and seen == [("tiled", "reference")]


def test_a_deliberate_auto_is_a_choice() -> None:
    """XTRAIN_GEMM and XTRAIN_ATTENTION are where a thread starts, not where it comes back to."""
    code = """
from xtrain import _C
for use in (_C.use_gemm_backend, _C.use_attention_backend):
    print(use("auto"), use(None), use(None))
"""
    done = child(code, XTRAIN_GEMM="tiled", XTRAIN_ATTENTION="reference")
    assert done.stdout == "tiled None None\nreference None None\n", done.stderr


def test_a_default_device_is_of_its_thread_and_tf32_of_the_process() -> None:
    seen = []

    def work() -> None:
        seen.append(str(_C.get_default_device()))  # the CPU, where each thread starts
        _C.set_default_device("meta")
        _C.allow_tf32(True)
        seen.append(str(xt.ones(2).device))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    allowed = _C.tf32()
    _C.allow_tf32(False)
    assert seen == ["cpu", "meta:0"] and str(xt.ones(2).device) == "cpu" and allowed


def test_a_default_device_that_cannot_be_used_changes_nothing() -> None:
    with pytest.raises((RuntimeError, ValueError)):
        xt.set_default_device("cuda:99")
    assert str(xt.ones(2).device) == "cpu"


def test_no_job_begins_inside_another() -> None:
    """mhc kernels and products call loops from pieces: with more threads than pieces nobody waits for itself."""
    done = child("""
import signal
import xtrain as xt
import xtrain.functional as F
signal.alarm(60)
xt.set_num_threads(4)
x = xt.ones((8, 4, 64, 16))
for _ in range(20):
    F.scaled_dot_product_attention(x, x, x, is_causal=True)
    (xt.ones((64, 300, 30)) @ xt.ones((64, 30, 40))).exp().sum()
print("done")
""")
    assert done.stdout == "done\n", done.stderr


def test_a_job_ends_with_its_last_piece() -> None:
    """Results are whole when a call returns, from several callers at once. Memory that comes again holds other numbers.
    Pieces of a product are long enough for a worker to be inside one when its caller has none left."""
    _C.set_num_threads(4)
    bad: list[int] = []

    def work(seed: int) -> None:
        x = xt.full((200000,), float(seed))
        a, b = xt.full((256, 1024), 1.0), xt.full((1024, 256), 1.0)
        for i in range(20):
            if (x + float(i)).numpy().min() != seed + i:
                bad.append(seed)
            b.fill_(float(i))
            if xt.matmul(a, b, backend="naive").numpy().min() != 1024.0 * i:
                bad.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad


def test_the_pool_works_on_after_an_error() -> None:
    """A loop that Ctrl-C has ended gives the pool back: the next one has several threads again."""
    done = child("""
import os, signal, threading, time
import xtrain as xt
xt.set_num_threads(4)
x, large = xt.rand(350, 350), xt.rand(3500, 3500)
timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
timer.start()
try:
    xt.matmul(large, large, backend="naive")  # of many seconds: the signal comes inside it, and the loop of the pool ends
    print("no interrupt")
except KeyboardInterrupt:
    pass
def ticks():
    return {t: open(f"/proc/self/task/{t}/stat").read().split()[13] for t in os.listdir("/proc/self/task")}
before, several = ticks(), 0
for _ in range(200):  # on a busy machine the threads get their turn late; the first times may be those of the loop before
    xt.matmul(x, x, backend="naive")
    after = ticks()
    if sum(after[t] != before.get(t) for t in after) > 1:
        before, several = after, several + 1
    if several == 8:
        break
print(several == 8)
""")
    assert done.stdout == "True\n", done.stderr


def test_a_child_has_workers_of_its_own() -> None:
    """It starts threads, although its parent had some."""
    done = child("""
import os, sys
import xtrain as xt
xt.set_num_threads(3)
x = xt.ones((2000, 400))
x.exp().sum()
pid = os.fork()
if pid == 0:
    for _ in range(20):
        x.exp().sum()
    os._exit(0 if len(os.listdir("/proc/self/task")) == 3 else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
    assert done.returncode == 0, done.stderr


def test_threads_of_the_environment() -> None:
    show = "import xtrain as xt; print(xt.get_num_threads())"
    assert child(show, XTRAIN_NUM_THREADS="3", OMP_NUM_THREADS="5").stdout == "3\n"
    environment = {name: value for name, value in os.environ.items() if name != "XTRAIN_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", show],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "5"},
    )
    assert done.stdout == "5\n" and int(child(show, XTRAIN_NUM_THREADS="none").stdout) >= 1
    assert child(show, XTRAIN_NUM_THREADS="100000").stdout == "256\n", "as many as set_num_threads takes"


def test_names_of_implementations_are_whole() -> None:
    x = xt.ones((2, 2))
    for name in ("", "b", "bla", "blasx", "naiv"):
        with pytest.raises(ValueError, match=rf"matmul: backend must be one of auto, .* on cpu, got '{name}'"):
            xt.matmul(x, x, backend=name)
    assert xt.matmul(x, x, backend="auto").tolist() == [[2.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("shape", "want"),
    [((0,), (1,)), ((2, 0, 3), (3, 3, 1)), ((0, 4, 5), (20, 5, 1)), ((3, 4, 0), (4, 1, 1)), ((0, 0, 2), (2, 2, 1))],
)
def test_strides_of_what_is_empty(shape: tuple[int, ...], want: tuple[int, ...]) -> None:
    """A size of 0 counts as 1, as in PyTorch."""
    assert xt.zeros(*shape).stride() == want


def test_memory_is_aligned_to_64_bytes() -> None:
    """Of any size, beside each other, and again from the cache."""
    sizes = [1, 63, 65, 1000, 4095, 4097, 5000, 65537, 300001]
    for _ in range(2):
        kept = [xt.empty(size, dtype=xt.uint8, device="cpu") for size in sizes for _ in range(3)]
        assert {one.data_ptr() % 64 for one in kept} == {0}


# ---- files of the core alone: who runs what, and which memory is refused, is up to the test

POOL = """
#include "core/threads.c"
#include <stdio.h>
static int begun, failed, ran, of_worker; /* atomic: the error, its end; pieces in all; whether the error is a worker's */
static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); }
static XtStatus piece(void *context, int64_t begin, int64_t end) {
    (void)context, (void)end;
    __atomic_add_fetch(&ran, 1, __ATOMIC_RELAXED);
    if ((own_job == NULL) == of_worker && !__atomic_exchange_n(&begun, 1, __ATOMIC_RELAXED)) {
        XtStatus status = xt_error(XT_VALUE_ERROR, "piece %d of thread %d", (int)begin, of_worker);
        __atomic_store_n(&failed, 1, __ATOMIC_RELEASE);
        return status;
    }
    while (!__atomic_load_n(&failed, __ATOMIC_ACQUIRE)) nap();
    nap();
    return XT_OK;
}
/* A loop whose first piece on the caller, or on a worker, is an error: pieces that were done, or -1 without that error. */
int fail_a_loop(int on_worker, int pieces, char *text) {
    xt_set_num_threads(2);
    xt_error(XT_VALUE_ERROR, "an older message");
    begun = failed = ran = 0, of_worker = on_worker;
    XtStatus status = xt_parallel(pieces, 1, piece, NULL);
    snprintf(text, 200, "%s", xt_error_message());
    return status == XT_VALUE_ERROR ? ran : -1;
}
static Job *given; /* atomic: by the caller's piece */
static int joined, awake; /* atomic: threads inside; workers that have not seen their caller asleep */
static clockid_t of_caller;
/* One piece a thread. Those of workers end when their caller sleeps, or has used 50 ms of processor time without. */
static XtStatus piece_until_asleep(void *context, int64_t begin, int64_t end) {
    (void)context, (void)begin, (void)end;
    if (own_job) {
        pthread_getcpuclockid(pthread_self(), &of_caller);
        __atomic_store_n(&given, own_job, __ATOMIC_RELEASE);
    }
    __atomic_add_fetch(&joined, 1, __ATOMIC_RELAXED);
    while (!__atomic_load_n(&given, __ATOMIC_ACQUIRE) || __atomic_load_n(&joined, __ATOMIC_RELAXED) < 3) nap();
    if (own_job) return XT_OK;
    struct timespec begun, used;
    clock_gettime(of_caller, &begun);
    do {
        if (__atomic_load_n(&given->running, __ATOMIC_RELAXED) & ASLEEP) return XT_OK;
        nap();
        clock_gettime(of_caller, &used);
    } while ((used.tv_sec - begun.tv_sec) * 1000000000L + used.tv_nsec - begun.tv_nsec < 50000000L);
    __atomic_add_fetch(&awake, 1, __ATOMIC_RELAXED);
    return XT_OK;
}
/* Workers of so many loops that did not see their caller asleep; -1 where a loop failed. */
int sleep_in_loops(int loops) {
    xt_set_num_threads(3);
    awake = 0;
    for (int i = 0; i < loops; i++) {
        given = NULL, joined = 0;
        if (xt_parallel(3, 1, piece_until_asleep, NULL) != XT_OK) return -1;
    }
    return awake;
}
"""
RANDOM = """
#include "core/random.c"
#include <sys/wait.h>
#include <unistd.h>
/* The status of a child that was forked while a thread held the generator's lock, and draws. */
int draw_in_child(void) {
    pthread_mutex_lock(&lock);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        XtPhilox drawn = xt_random_next();
        _exit(drawn.stream == 0 && xt_random_next().stream == 1 ? 0 : 3);
    }
    pthread_mutex_unlock(&lock);
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}
"""
SPANS = """
#include <stdlib.h>
static int refused;
#define realloc(old, size) (refused ? NULL : realloc(old, size))
#include "core/span.c"
/* Counts of two profiles of `many` spans: recorded and lost ones; those of the first have memory for the first 1,024. */
void lose_spans(int many, long found[4]) {
    for (int round = 0; round < 2; round++) {
        XtSpan *list;
        int64_t count, lost;
        xt_spans_start();
        for (int i = 0; i < many; i++) {
            refused = round == 0 && i > 0;
            xt_span_end(xt_span_begin(), "op", false, NULL, 0);
        }
        xt_spans_stop(&list, &count, &lost);
        free(list);
        found[2 * round] = (long)count, found[2 * round + 1] = (long)lost;
    }
}
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))))
    folder = tmp_path_factory.mktemp("core")
    sources = [ROOT / "csrc/core/error.c"]
    for name, text in (("pool", POOL), ("random", RANDOM), ("spans", SPANS)):
        sources.append(folder / f"{name}.c")
        sources[-1].write_text(text)
    options = ["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/csrc", "-pthread"]
    subprocess.run([compiler, *options, *sources, "-o", folder / "core.so"], check=True)
    return ctypes.CDLL(str(folder / "core.so"))


@pytest.mark.parametrize("on_worker", [0, 1])
def test_an_error_ends_a_loop_with_its_text(alone: ctypes.CDLL, on_worker: int) -> None:
    """Of the caller or of a worker, whose text lies in a buffer of its own thread. Pieces that nobody has begun stay: 4,000 of them
    would take 2 s at least, and a thread sees the error of another one when it looks for its next piece."""
    text = ctypes.create_string_buffer(200)
    for _ in range(5):
        done = alone.fail_a_loop(on_worker, 4000, text)
        assert 0 < done < 4000
        assert re.fullmatch(rf"piece \d+ of thread {on_worker}", text.value.decode())


def test_a_caller_sleeps_until_its_workers_have_left(alone: ctypes.CDLL) -> None:
    """After a moment of its own processor time, and the last of them wakes it."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(alone.sleep_in_loops(20)), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "the caller hangs"
    assert found == [0], f"{found[0]} of 40 workers did not see their caller asleep"


def test_a_child_draws_though_its_parent_was_drawing(alone: ctypes.CDLL) -> None:
    assert alone.draw_in_child() == 0


def test_spans_without_memory_are_counted(alone: ctypes.CDLL) -> None:
    """And those of the next profile have it again."""
    found = (ctypes.c_long * 4)()
    alone.lose_spans(1500, found)
    assert list(found) == [1024, 476, 1500, 0]
