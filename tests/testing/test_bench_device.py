"""`xtrain bench` on a device that works while the host goes on: nothing is timed that has not been waited for."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from clock import Clock

from xtrain import _C, cli
from xtrain.bench import accelerator, frame, gemm, peers
from xtrain.bench import ops as bench_ops
from xtrain.optable import TABLE, sizes

pytestmark = [pytest.mark.on_cpu, pytest.mark.usefixtures("short_bursts")]


def run(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


# ---- a device that works while the host goes on ---------------------------------------------------------------------------------------


ASKING = 1e-5  # seconds that a call takes on the host


class Asynchronous:
    """A device whose calls return soon; what they asked for is done later, one thing after the other."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.ready = clock, 0.0

    def work(self, seconds: float) -> None:
        self.clock.sleep(ASKING)
        self.ready = max(self.ready, self.clock.now) + seconds

    def wait(self, *_) -> None:
        assert self.ready < self.clock.now + 2, "work for seconds has piled up: somebody does not wait"
        self.clock.now = max(self.clock.now, self.ready)


@pytest.fixture
def device(monkeypatch) -> Asynchronous:
    """One that goes by the clock of the benchmarks."""
    clock = Clock()
    monkeypatch.setattr(frame, "time", clock)
    return Asynchronous(clock)


def working(device: Asynchronous, seconds: float, function):
    """`function`, as a device would run it: right at once, done later."""

    def call(*arguments, **named):
        device.work(seconds)
        return function(*arguments, **named)

    return call


class FakeTorch:
    """As much of PyTorch as a benchmark of float32 products asks for, on NumPy arrays; its device is one of its own."""

    __version__ = "0.0"

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.device, self.modes = Asynchronous(clock), []
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
def fake(device, monkeypatch):
    """`--device cuda` is the CPU behind an asynchronous front; a benchmark of it has to wait as for a real one."""
    cpu, named = _C.device("cpu"), _C.device
    monkeypatch.setattr(frame, "BURST", 0.02)
    monkeypatch.setattr(frame, "TURNS_ON_DEVICE", 3)
    monkeypatch.setattr(frame, "choose_device", lambda text: "cuda:0" if text == "cuda" else text)
    monkeypatch.setattr(_C, "device", lambda text: cpu if str(text).startswith("cuda") else named(text))
    monkeypatch.setattr(_C, "synchronize", device.wait)
    facts = {"name": "Fake GPU", "capability": (9, 0), "runtime": 13000, "driver": 13010, "blas": "none"}
    monkeypatch.setattr(_C, "cuda_info", lambda device: facts)
    monkeypatch.setattr(peers, "find_torch", lambda threads: None)
    return device


def test_a_turn_waits_for_the_device(device, monkeypatch) -> None:
    """The time is that of the work, not of asking for it, and nobody pays for who came before."""
    monkeypatch.setattr(frame, "BURST", 0.01)
    calls = {"slow": lambda: device.work(0.02), "quick": lambda: device.work(0.001)}
    times = frame.measure(calls, device.wait)
    assert {len(t) for t in times.values()} == {frame.TURNS_ON_DEVICE}
    assert times["slow"] == pytest.approx([0.02 + ASKING] * len(times["slow"]), rel=1e-5)
    assert all(0.001 <= one < 0.001 + 2 * ASKING for one in times["quick"])
    device.work(0.05)
    assert frame.burst(calls["quick"], 1, device.wait) == pytest.approx(0.001 + ASKING, rel=1e-5)
    asked = frame.measure({"quick": calls["quick"]})["quick"]
    assert asked == pytest.approx([ASKING] * len(asked), rel=1e-3)  # the clock alone sees only the asking


def test_a_burst_on_a_device_is_filled(device, monkeypatch) -> None:
    """Waiting takes longer than a small call: one call would make a burst far too short."""
    monkeypatch.setattr(frame, "BURST", 0.02)

    def wait() -> None:
        device.wait()
        device.clock.sleep(0.001)

    count = frame.calls_of_a_turn(lambda: device.work(20e-6), wait)
    assert 0.003 < count * 20e-6 < 0.03  # from one call it would be 0.0004
    assert frame.calls_of_a_turn(lambda: device.work(0.05), wait) == 1
    monkeypatch.setattr(frame, "MOST_CALLS", 100)
    assert frame.calls_of_a_turn(lambda: None, lambda: None) == 100


def test_a_slow_contender_on_a_device(device, monkeypatch) -> None:
    monkeypatch.setattr(frame, "TURNS_ON_DEVICE", 50)
    monkeypatch.setattr(frame, "ENOUGH_ON_DEVICE", 0.05)
    assert len(frame.measure({"slow": lambda: device.work(0.03)}, device.wait)["slow"]) == frame.FEWEST


def test_bench_gemm_on_a_device(fake, monkeypatch, capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install matplotlib)")
    ms = {"cublas": 2.0, "tiled": 4.0, "naive": 9.0, "PyTorch": 3.0}
    right, modes, torch = _C.matmul, [], FakeTorch(3e-3, fake.clock)

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
        assert r["right"] and r["ms_min"] >= ms[r["contender"]] and r["ms_max"] < ms[r["contender"]] + 2e3 * ASKING, r
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
    assert copy["by"] == "xtrain" and 2.99e-3 < 2 * (1 << 16) / copy["gb_per_s"] / 1e9 < 3.1e-3
    assert {r["op"] for r in found["records"]} == {"silu", "abs", "argmax", "cross_entropy:mean", "arange:float32"}
    for r in found["records"]:
        assert 2.0 <= r["forward"]["ms_min"] <= r["forward"]["ms_max"] < 2.1, r
        assert "backward" not in r or 4.0 <= r["backward"]["ms_min"] <= r["backward"]["ms_max"] < 4.1, r
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


@pytest.mark.parametrize("table", ["gemm", "ops"])
def test_threads_are_of_the_cpu(fake, table: str, capsys) -> None:
    assert run(table, "--device", "cuda", "--threads", "2") == 2
    assert "--threads is for the CPU" in capsys.readouterr().err
