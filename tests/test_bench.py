"""`xtrain bench`: what it measures is right, what it writes is whole, and every mistake is answered by one line."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C, cli
from xtrain.bench import accelerator, frame, gemm, peers
from xtrain.bench import ops as bench_ops
from xtrain.optable import TABLE, sizes

pytestmark = pytest.mark.on_cpu


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Turns that end at once: these tests are about numbers, not about speed."""
    monkeypatch.setattr(frame, "BURST", 1e-5)
    monkeypatch.setattr(frame, "TURNS", 3)
    monkeypatch.setattr(frame, "PAUSE", 0.0)


def run(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


# ---- the frame ------------------------------------------------------------------------------------------------------------------------


def test_contenders_take_turns(monkeypatch) -> None:
    monkeypatch.setattr(frame, "BURST", 0.0)
    seen = []
    times = frame.measure({name: lambda name=name: seen.append(name) for name in "abc"})
    assert "".join(seen) == "aabbcc" + "abc" + "cba" + "abc"  # two calls to warm up, then turns
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(x > 0 for t in times.values() for x in t)


def test_a_slow_contender_gets_fewer_turns(monkeypatch) -> None:
    monkeypatch.setattr(frame, "TURNS", 50)
    monkeypatch.setattr(frame, "ENOUGH", 0.05)

    times = frame.measure({"slow": lambda: time.sleep(0.02), "quick": lambda: None})
    assert frame.FEWEST <= len(times["slow"]) <= 6
    assert len(times["quick"]) == 50
    assert times["slow"][0] >= 0.02


def test_summary_is_a_median() -> None:
    assert frame.summary([0.003, 0.001, 0.5]) == {"ms": 3.0, "ms_min": 1.0, "ms_max": 500.0, "turns": 3}


def test_files_are_whole_or_not_there(tmp_path) -> None:
    path = tmp_path / "x.json"
    path.write_text("before")

    def broken(temporary: str) -> None:
        with open(temporary, "w") as stream:
            stream.write("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        frame.write_file(path, broken)
    with pytest.raises(ValueError):
        frame.write_json(path, {"x": math.nan})
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
    frame.write_json(path, {"x": 1})
    assert json.loads(path.read_text()) == {"x": 1} and len(list(tmp_path.iterdir())) == 1


# ---- gemm -----------------------------------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    assert [(s.name, s.layout) for s in gemm.parse_sizes("64, 3x4x5,3x4x5:tn")] == [
        ("64x64x64", "nn"),
        ("3x4x5", "nn"),
        ("3x4x5", "tn"),
    ]
    names = [(s.name, s.layout) for s in gemm.parse_sizes("training")]
    assert names == [
        ("512x768x768", "nt"), ("512x768x768", "nn"), ("768x768x512", "tn"),
        ("512x3072x768", "nt"), ("512x768x3072", "nn"), ("3072x768x512", "tn"),
    ]  # fmt: skip
    assert len(gemm.parse_sizes("squares,training,head")) == 12


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", gemm.DTYPES)
def test_operands(layout: str, dtype: str) -> None:
    """Tensors and arrays hold the same values in the same layout."""
    ta, tb, a, b = gemm.operands(gemm.Shape(5, 7, 3, layout), dtype)
    for t, x, letter in ((ta, a, layout[0]), (tb, b, layout[1])):
        assert t.dtype.name == dtype and t.shape == x.shape
        assert np.array_equal(t.to(xt.float64).numpy(), x)
        assert t.is_contiguous() == x.flags.c_contiguous == (letter == "n")
    assert ta.shape == (5, 3) and tb.shape == (3, 7)


@pytest.mark.parametrize("dtype", gemm.DTYPES)
def test_worst_error(dtype: str) -> None:
    ta, tb, a, b = gemm.operands(gemm.Shape(40, 50, 60), dtype)
    out = gemm.host(_C.matmul(ta, tb))
    assert gemm.worst_error(out, a, b, dtype) <= 1
    for fault in (lambda x: x * 1.02, lambda x: x * np.nan, lambda x: np.roll(x, 1, 1)):
        assert not gemm.worst_error(fault(out), a, b, dtype) <= 1


def test_bench_gemm(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    report, plot = tmp_path / "gemm.json", tmp_path / "gemm.png"
    assert (
        run(
            "gemm",
            "--sizes",
            "32,65x33x97:tn",
            "--dtypes",
            "float32,bfloat16",
            "--json",
            str(report),
            "--plot",
            str(plot),
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "BLAS kernels: xtrain " in text and "NumPy" in text and "WRONG" not in text
    assert plot.read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 2
    record = json.loads(report.read_text())
    found = {(r["shape"], r["layout"], r["dtype"], r["contender"]) for r in record["records"]}
    for shape, layout in (("32x32x32", "nn"), ("65x33x97", "tn")):
        assert found >= {
            (shape, layout, dtype, name) for dtype in ("float32", "bfloat16") for name in xt.gemm_backends()
        }
        assert (shape, layout, "float32", "NumPy") in found and (shape, layout, "bfloat16", "NumPy") not in found
    for r in record["records"]:
        assert r["right"] and r["ms"] > 0 and r["turns"] >= frame.FEWEST
        assert r["gflops"] == pytest.approx(2 * r["m"] * r["n"] * r["k"] / r["ms"] / 1e6)
        assert 0 < r["percent_of_best"] <= 100
        if r["dtype"] == "float32":
            peer = next(p for p in record["records"] if p["contender"] == "NumPy" and p["shape"] == r["shape"])
            assert r["x_numpy"] == pytest.approx(peer["ms"] / r["ms"])
    assert record["machine"]["threads"] == xt.get_num_threads()


def test_a_wrong_product_is_no_result(monkeypatch, capsys) -> None:
    right = _C.matmul
    monkeypatch.setattr(
        gemm._C, "matmul", lambda a, b, backend: right(a, b, backend=backend) * (1.5 if backend == "tiled" else 1.0)
    )
    assert run("gemm", "--sizes", "16", "--dtypes", "float32") == 1
    text = capsys.readouterr().out
    assert "wrong result: tiled, 16x16x16 nn, float32" in text and text.count("wrong result") == 1


def test_naive_is_left_out_of_big_products_unless_asked_for(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gemm, "SLOW", 1e3)
    assert run("gemm", "--sizes", "16", "--dtypes", "float32") == 0
    assert "left out" in capsys.readouterr().out
    assert run("gemm", "--sizes", "16", "--dtypes", "float32", "--backends", "naive") == 0
    text = capsys.readouterr().out
    assert "left out" not in text and "tiled" not in text and "naive" in text


@pytest.mark.parametrize(("variable", "side"), [("OPENBLAS_CORETYPE", "NumPy"), ("XTRAIN_BLAS_CORE", "xtrain")])
def test_cores_can_be_chosen_apart(variable: str, side: str) -> None:
    """NumPy's copy of OpenBLAS hears OPENBLAS_CORETYPE, xtrain's XTRAIN_BLAS_CORE, and neither the other's."""
    if peers.NumPyBlas()._library is None or not sys.platform.startswith("linux") or "avx2" not in _C.cpu_features():
        pytest.skip("needs two copies of OpenBLAS on x86-64")
    script = "import xtrain; from xtrain.bench import peers; print(peers.xtrain_core(xtrain._C.build_info()['blas']), peers.NumPyBlas().core)"
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "XTRAIN_BLAS_CORE")}

    def cores(**more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment | more, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    usual, chosen = cores(), cores(**{variable: "Nehalem"})
    mine = 0 if side == "xtrain" else 1
    assert chosen[mine] == "Nehalem" and chosen[1 - mine] == usual[1 - mine]


def test_rows_are_shown_as_they_are_known(monkeypatch, capsys, tmp_path) -> None:
    """Ctrl-C in the middle leaves the header, the rows so far and no file; columns line up."""
    right = gemm.bench_shape

    def third_stops(shape, *rest):
        if shape.m == 18:
            raise KeyboardInterrupt
        return right(shape, *rest)

    monkeypatch.setattr(gemm, "bench_shape", third_stops)
    report = tmp_path / "x.json"
    assert run("gemm", "--sizes", "16,17x33x5:tn,18", "--dtypes", "float32", "--json", str(report)) == 130
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines[0].startswith("| shape") and lines[1].startswith("|--")
    assert sum("16x16x16" in line for line in lines) == sum("17x33x5" in line for line in lines) >= 4
    assert len({len(line) for line in lines}) == 1
    assert not list(tmp_path.iterdir())

    right_entry = bench_ops.bench_entry

    def second_stops(entry, *rest):
        if entry.op == "exp":
            raise KeyboardInterrupt
        return right_entry(entry, *rest)

    monkeypatch.setattr(sizes, "ACTIVATION", (64, 4100))
    monkeypatch.setattr(bench_ops, "bench_entry", second_stops)
    assert run("ops", "--op", "neg,exp", "--json", str(report)) == 130
    assert "| neg" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs POSIX signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_leaves_no_temporary_file(tmp_path, name: str) -> None:
    script = f"""
import os, signal
from xtrain.bench import frame
def write(temporary):
    open(temporary, "w").write("half")
    os.kill(os.getpid(), signal.{name})
    for _ in range(10**7): pass
frame.write_file({str(tmp_path / "x.json")!r}, write)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + getattr(signal, name), done.stderr
    assert not list(tmp_path.iterdir()) and done.stderr == ""


def test_a_link_is_followed(tmp_path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "x.json"
    link.symlink_to(tmp_path / "there" / "y.json")
    frame.write_json(link, {"x": 1})
    assert link.is_symlink() and json.loads((tmp_path / "there" / "y.json").read_text()) == {"x": 1}
    assert len(list((tmp_path / "there").iterdir())) == 1


@pytest.mark.parametrize("benchmark", ["gemm", "ops"])
@pytest.mark.parametrize("other", ["x.png", "./x.png", "link.png"])
def test_one_file_for_two_outputs(benchmark: str, other: str, capsys, tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.png").symlink_to("x.png")
    assert run(benchmark, "--json", "x.png", "--plot", other) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("xtrain: error: --plot must be another file than --json, got")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_standard_output_is_no_report(tmp_path) -> None:
    """`--json /dev/stdout > file` would put the report where the table goes, and a file where /dev/stdout was. The link is
    one of our own: a failure must not cost the machine its /dev/stdout."""
    link = tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")
    for path in (str(link), str(tmp_path / "out.txt")):
        with open(tmp_path / "out.txt", "w") as out:
            done = subprocess.run(
                [sys.executable, "-m", "xtrain", "bench", "gemm", "--sizes", "4", "--json", path],
                stdout=out, stderr=subprocess.PIPE, text=True, timeout=60,
            )  # fmt: skip
        assert done.returncode == 2 and "--json must not be the file that standard output goes to" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.txt", "stdout"] and link.is_symlink()


# ---- ops ------------------------------------------------------------------------------------------------------------------------------


def test_every_op_has_a_size() -> None:
    """An entry for each op and dtype; names in sizes.py are names of entries; elementwise ops get a whole activation."""
    ids = {entry.id for entry in TABLE}
    assert set(sizes.BENCH) <= ids
    every = list(dict.fromkeys(entry.op for entry in TABLE))
    chosen = bench_ops.entries_of(every, "float32")
    assert {entry.op for entry in chosen} == {entry.op for entry in TABLE if "float32" in entry.dtypes}
    small = [
        e.id
        for e in chosen
        if e.op not in sizes.VIEWS and sum(math.prod(s.shape) for s in sizes.bench_case(e).inputs) < 2**20
    ]
    assert set(small) <= {"arange:float32", "empty", "full:float32", "uniform:float32", "normal:float32"}


def test_bench_ops(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sizes, "ACTIVATION", (64, 4100))
    report, plot = tmp_path / "ops.json", tmp_path / "ops.svg"
    assert (
        run(
            "ops",
            "--op",
            "silu,argmax,transpose,matmul,add_,cat",
            "--dtypes",
            "float32,bfloat16",
            "--json",
            str(report),
            "--plot",
            str(plot),
        )
        == 0
    )
    assert "a copy moves" in capsys.readouterr().out
    assert "<svg" in plot.read_text() and len(list(tmp_path.iterdir())) == 2
    record = json.loads(report.read_text())
    rows = {(r["op"], r["dtype"], r["backend"]): r for r in record["records"]}
    silu = rows["silu", "float32", None]
    assert silu["forward"]["bytes"] == silu["backward"]["bytes"] == 2 * 4 * 64 * 4100
    assert silu["forward"]["gb_per_s"] == pytest.approx(silu["forward"]["bytes"] / silu["forward"]["ms"] / 1e6)
    copy = record["machine"]["copy"]["gb_per_s"]
    assert silu["forward"]["percent_of_copy"] == pytest.approx(100 * silu["forward"]["gb_per_s"] / copy)
    assert rows["silu", "bfloat16", None]["forward"]["bytes"] == 2 * 2 * 64 * 4100
    assert "backward" not in rows["argmax", "float32", None]
    assert rows["transpose", "float32", None]["forward"]["gb_per_s"] is None
    assert {b for op, _, b in rows if op == "matmul"} == set(xt.gemm_backends()) - {"naive"}


# ---- a device that works while the host goes on ---------------------------------------------------------------------------------------


class Asynchronous:
    """A device whose calls return at once; what they asked for is done later, one thing after the other."""

    def __init__(self) -> None:
        self.ready = 0.0

    def work(self, seconds: float) -> None:
        self.ready = max(self.ready, time.perf_counter()) + seconds

    def wait(self, *_) -> None:
        if self.ready > time.perf_counter() + 2:
            self.ready = 0.0
            raise AssertionError("work for seconds has piled up: somebody does not wait")
        while time.perf_counter() < self.ready:
            time.sleep(1e-4)


def working(device: Asynchronous, seconds: float, function):
    """`function`, as a device would run it: right at once, done later."""

    def call(*arguments, **named):
        device.work(seconds)
        return function(*arguments, **named)

    return call


class FakeTorch:
    """As much of PyTorch as a benchmark of float32 products asks for, on NumPy arrays; its device is one of its own."""

    __version__ = "0.0"

    def __init__(self, seconds: float) -> None:
        self.device, self.modes = Asynchronous(), []
        self.from_dlpack, self.no_grad = np.from_dlpack, contextlib.nullcontext
        self.cuda = SimpleNamespace(
            is_available=lambda: True, synchronize=self.device.wait, empty_cache=lambda: self.device.wait()
        )
        self.settings = SimpleNamespace(
            allow_tf32="kept", allow_bf16_reduced_precision_reduction=True, allow_fp16_reduced_precision_reduction=True
        )
        self.backends = SimpleNamespace(cuda=SimpleNamespace(matmul=self.settings))
        self.multiply = working(self.device, seconds, np.matmul)

    def matmul(self, a, b):
        self.modes.append((self.settings.allow_tf32, self.settings.allow_bf16_reduced_precision_reduction))
        return self.multiply(a, b)


@pytest.fixture
def fake(monkeypatch):
    """`--device cuda` is the CPU behind an asynchronous front; a benchmark of it has to wait as for a real one."""
    device, cpu, named = Asynchronous(), _C.device("cpu"), _C.device
    monkeypatch.setattr(frame, "BURST", 0.02)
    monkeypatch.setattr(frame, "TURNS_ON_DEVICE", 3)
    monkeypatch.setattr(frame, "choose_device", lambda text: "cuda:0" if text == "cuda" else text)
    monkeypatch.setattr(_C, "device", lambda text: cpu if str(text).startswith("cuda") else named(text))
    monkeypatch.setattr(_C, "synchronize", device.wait)
    facts = {"name": "Fake GPU", "capability": (9, 0), "runtime": 13000, "driver": 13010, "blas": "none"}
    monkeypatch.setattr(_C, "cuda_info", lambda device: facts)
    monkeypatch.setattr(peers, "find_torch", lambda threads: None)
    return device


def test_a_turn_waits_for_the_device(monkeypatch) -> None:
    """The time is that of the work, not of asking for it, and nobody pays for who came before."""
    monkeypatch.setattr(frame, "BURST", 0.01)
    device = Asynchronous()
    calls = {"slow": lambda: device.work(0.02), "quick": lambda: device.work(0.001)}
    times = frame.measure(calls, device.wait)
    assert {len(t) for t in times.values()} == {frame.TURNS_ON_DEVICE}
    assert min(times["slow"]) >= 0.0199 and min(times["quick"]) >= 0.000999
    assert min(times["slow"]) < 0.03 and min(times["quick"]) < 0.002
    device.work(0.05)
    assert frame.burst(calls["quick"], 1, device.wait) < 0.02
    asked = frame.measure({"quick": calls["quick"]})["quick"]
    assert min(asked) < 0.0005  # the clock alone sees only the asking


def test_a_burst_on_a_device_is_filled(monkeypatch) -> None:
    """Waiting takes longer than a small call: one call would make a burst far too short. The clock is the test's own."""
    now, queued = [0.0], [0.0]
    monkeypatch.setattr(frame, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(frame, "BURST", 0.02)

    def work(seconds: float) -> None:
        queued[0] += seconds

    def wait() -> None:
        now[0] += queued[0] + 0.001
        queued[0] = 0.0

    count = frame.calls_of_a_turn(lambda: work(20e-6), wait)
    assert 0.003 < count * 20e-6 < 0.03  # from one call it would be 0.0004
    assert frame.calls_of_a_turn(lambda: work(0.05), wait) == 1
    monkeypatch.setattr(frame, "MOST_CALLS", 100)
    assert frame.calls_of_a_turn(lambda: None, lambda: None) == 100


def test_a_slow_contender_on_a_device(monkeypatch) -> None:
    monkeypatch.setattr(frame, "TURNS_ON_DEVICE", 50)
    monkeypatch.setattr(frame, "ENOUGH_ON_DEVICE", 0.05)
    device = Asynchronous()
    assert len(frame.measure({"slow": lambda: device.work(0.03)}, device.wait)["slow"]) == frame.FEWEST


def test_bench_gemm_on_a_device(fake, monkeypatch, capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    ms = {"cublas": 2.0, "tiled": 4.0, "naive": 9.0, "PyTorch": 3.0}
    right, modes, torch = _C.matmul, [], FakeTorch(3e-3)

    def matmul(a, b, backend):
        modes.append(_C.tf32())
        return working(fake, ms[backend] / 1e3, right)(a, b)

    monkeypatch.setattr(_C, "gemm_backends", lambda device: ["cublas", "tiled", "naive"])
    monkeypatch.setattr(_C, "matmul", matmul)
    monkeypatch.setattr(peers, "find_torch", lambda threads: torch)
    report, plot, state = tmp_path / "x.json", tmp_path / "x.svg", _C.get_rng_state()
    words = ["--device", "cuda", "--sizes", "64,65x33x97:tn", "--dtypes", "float32,tf32"]
    assert run("gemm", *words, "--json", str(report), "--plot", str(plot)) == 0
    text = capsys.readouterr().out
    assert text.startswith("Fake GPU (cuda:0), CUDA 13.0 (driver 13.1), xtrain ") and "NumPy" not in text
    assert "TFLOP/s" in text and "% of cublas" in text and "TFLOP/s" in plot.read_text()
    records = json.loads(report.read_text())["records"]
    assert len(records) == 2 * 2 * 4
    for r in records:
        assert r["right"] and r["ms_min"] >= ms[r["contender"]] * 0.999 and r["ms_min"] < ms[r["contender"]] * 1.6, r
        same = [p for p in records if (p["shape"], p["dtype"]) == (r["shape"], r["dtype"])]
        cublas = next(p for p in same if p["contender"] == "cublas")
        assert r["percent_of_cublas"] == pytest.approx(100 * cublas["ms"] / r["ms"])
    assert set(torch.modes) == {(False, False), (True, False)} and torch.modes == sorted(torch.modes)
    assert set(modes) == {False, True} and modes == sorted(modes)
    assert torch.settings.allow_tf32 == "kept" and torch.settings.allow_bf16_reduced_precision_reduction is True
    assert not _C.tf32() and _C.get_rng_state() == state


def test_a_wrong_product_on_a_device(fake, monkeypatch, capsys) -> None:
    right = _C.matmul
    monkeypatch.setattr(
        _C, "matmul", lambda a, b, backend: right(a, b, backend=backend) * (1.01 if backend == "tiled" else 1.0)
    )
    monkeypatch.setattr(frame, "BURST", 1e-5)
    words = ["--sizes", "40x600x9:nt,600x7x9:tn", "--dtypes", "float32,tf32,bfloat16", "--device", "cuda"]
    assert run("gemm", *words, "--backends", "blas,tiled") == 1
    assert capsys.readouterr().out.count("wrong result: tiled, ") == 6


def test_a_backend_that_is_missing(fake, monkeypatch, capsys) -> None:
    right = _C.matmul

    def matmul(a, b, backend):
        if backend == "blas":
            raise RuntimeError("gemm: no library")
        return right(a, b, backend=backend)

    monkeypatch.setattr(_C, "matmul", matmul)
    monkeypatch.setattr(frame, "BURST", 1e-5)
    assert run("gemm", "--device", "cuda", "--sizes", "16", "--dtypes", "tf32") == 0
    text = capsys.readouterr().out
    assert "blas left out: gemm: no library" in text and "| tiled" in text
    assert run("gemm", "--device", "cuda", "--sizes", "16", "--backends", "blas") == 2
    assert "--backends blas: gemm: no library" in capsys.readouterr().err


def test_the_last_elements_are_judged() -> None:
    for n in (*range(1, 40), 511, 512, 513, 1024, 50257):
        for count in (8, 512):
            t = accelerator.spread(_C.arange(0, n, 1, _C.float64), 0, count)
            assert min(n, count) <= t.shape[0] < 2 * count and t.numpy()[-1] == n - 1


def test_bench_ops_on_a_device(fake, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(sizes, "CUDA", sizes.Dimensions(64, 512, 96, 500, 4, 16, 2))
    monkeypatch.setattr(sizes, "COPIED_ON_CUDA", 1 << 16)
    monkeypatch.setattr(bench_ops, "outputs_of", working(fake, 2e-3, bench_ops.outputs_of))
    monkeypatch.setattr(_C, "backward", working(fake, 4e-3, _C.backward))
    monkeypatch.setattr(_C, "copy_", working(fake, 3e-3, _C.copy_))
    report, state = tmp_path / "x.json", _C.get_rng_state()
    assert run("ops", "--device", "cuda", "--op", "silu,abs,argmax,cross_entropy,arange", "--json", str(report)) == 0
    assert "Fake GPU" in capsys.readouterr().out
    found = json.loads(report.read_text())
    copy = found["machine"]["copy"]
    assert copy["by"] == "xtrain" and 2.99e-3 < 2 * (1 << 16) / copy["gb_per_s"] / 1e9 < 6e-3
    assert {r["op"] for r in found["records"]} == {"silu", "abs", "argmax", "cross_entropy:mean", "arange:float32"}
    for r in found["records"]:
        assert 1.99 <= r["forward"]["ms_min"] < 3.2, r
        assert "backward" not in r or 3.99 <= r["backward"]["ms_min"] < 6.4, r
        assert ("backward" in r) == (r["op"] in ("silu", "abs", "cross_entropy:mean"))
    assert _C.get_rng_state() == state and _C.get_default_device() == _C.device("cpu") and not _C.tf32()


def test_inputs_take_turns(fake, monkeypatch) -> None:
    """Small inputs come in several sets, forward and backward, so that a cache has not seen the next one."""
    monkeypatch.setattr(sizes, "CUDA", sizes.Dimensions(1024, 512, 96, 500, 4, 16, 2))
    monkeypatch.setattr(sizes, "COLD", 5 << 20)
    monkeypatch.setattr(frame, "BURST", 1e-5)
    entry = next(e for e in TABLE if e.id == "silu")
    c, seen = sizes.bench_case(entry, "cuda:0"), []
    inputs = bench_ops.CudaInputs(entry, c, "float32", "cuda:0")
    assert len(inputs.ours) == 3 and len({x[0].numpy().tobytes() for x in inputs.ours}) == 3
    right = bench_ops.outputs_of
    monkeypatch.setattr(bench_ops, "outputs_of", lambda e, c, t: seen.append(t[0].data_ptr()) or right(e, c, t))
    forward, backward, moved, back = bench_ops.our_calls(entry, c, inputs)
    del seen[:]
    for _ in range(6):
        forward()
        backward()
    assert seen == [t[0].data_ptr() for t in inputs.ours] * 2
    assert moved == back == 2 * 4 * 1024 * 512


def test_sizes_on_a_device() -> None:
    """Every case is several times an L2 of 50 MiB, or comes in so many sets; the kinds of input can be drawn there."""
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        for entry in bench_ops.entries_of(list(dict.fromkeys(e.op for e in TABLE)), dtype):
            c = sizes.bench_case(entry, "cuda:0")
            for s in c.inputs:
                small = accelerator.draw(replace(s, shape=(7, 9)), dtype, "cpu")
                assert small.shape == (7, 9) and (small.dtype.name == dtype) == s.is_float
            elements = sum(math.prod(s.shape) for s in c.inputs)
            if c.inputs and entry.op not in sizes.VIEWS:
                assert elements * item >= 1 << 20, entry.id
                assert elements * item * sizes.sets_of(entry, c, item) >= 120 * 2**20, entry.id
    assert gemm.parse_sizes(gemm.CUDA_DEFAULTS["sizes"])[5].operations < gemm.SLOW_ON_CUDA


@pytest.mark.parametrize("benchmark", ["gemm", "ops"])
def test_threads_are_of_the_cpu(fake, benchmark: str, capsys) -> None:
    assert run(benchmark, "--device", "cuda", "--threads", "2") == 2
    assert "--threads is for the CPU" in capsys.readouterr().err


# ---- mistakes -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "gemm or"),
        (("--json", "x"), "gemm or"),
        (("gem",), "did you mean gemm"),
        (("gemm", "ops"), "expected 0"),
        (("gemm", "--sizes", "3x4"), "3x4"),
        (("gemm", "--sizes", ""), "at least one"),
        (("gemm", "--sizes", "0"), "got '0'"),
        (("gemm", "--sizes", "99999999"), "99999999"),
        (("gemm", "--sizes", "4:nx"), "4:nx"),
        (("gemm", "--dtypes", "int8"), "int8"),
        (("gemm", "--dtypes", "tf32"), "tf32"),
        (("gemm", "--backends", "magic"), "blas, tiled, naive"),
        (("gemm", "--device", "cuda:99"), "--device cuda:99: "),
        (("gemm", "--device", "tpu"), "tpu"),
        (("gemm", "--threads", "-1"), "-1"),
        (("gemm", "--threads", "x"), "whole number"),
        (("gemm", "--json", "/no/such/place/x"), "/no/such/place"),
        (("gemm", "--plot", "x.doc"), ".png"),
        (("gemm", "--json", "x" * 250), "at most 243 bytes"),
        (("ops", "--json", ""), "directory"),
        (("gemm", "--size", "3"), "--sizes"),
        (("gemm", "--json"), "needs a value"),
        (("ops", "--op", "rmsnorm"), "rms_norm"),
        (("ops", "--dtypes", "int64"), "int64"),
        (("ops", "--sizes", "3"), "--sizes"),
    ],
)
def test_mistakes_are_one_line(arguments, text: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and text in captured.err, captured.err
    assert captured.err.startswith("xtrain: error: ") and len(captured.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_no_plot_without_matplotlib(monkeypatch, capsys, tmp_path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert run("gemm", "--plot", str(tmp_path / "x.png")) == 2
    assert "pip install 'xtrain[plot]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help(capsys) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for name in {*gemm.OPTIONS, *bench_ops.OPTIONS}:
        assert f"--{name}" in text
