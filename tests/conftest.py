"""Shared by the unit suite: a fixed seed before and the same settings after every test."""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest
from places import ROOT

# For setup_cuda; last, so that the package under test stays the installed one.
sys.path.append(str(ROOT))

from xtrain import _C

# A shell without job control starts `pytest ... &` with SIGINT ignored, and `nohup pytest` has SIGHUP ignored. Children would inherit
# that, and Ctrl-C or a terminal that closes would not reach them. Under nohup this process ignores SIGHUP by a handler, which none inherits.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# `make test-gpu` runs the suites with tensors made on the GPU: "cuda".
_C.set_default_device(os.environ.get("XTRAIN_TEST_DEVICE", "cpu"))


# With `pytest -n 2`. The first time that a test file is read, pytest rewrites its asserts, which takes longer than to run it, and keeps
# the byte code. Every second process reads the files in the opposite order: each rewrites one half, and finds the other half kept.
def process_number(config: pytest.Config) -> int | None:
    """Of this process of `pytest -n`; None where it is the only one."""
    worker = getattr(config, "workerinput", None)
    return int(worker["workerid"].removeprefix("gw")) if worker else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if isinstance(collector, pytest.Directory) and (process_number(collector.config) or 0) % 2:
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)  # before plugins that draw an order
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All processes must have one order. What takes long comes first, or one would end with it while the others wait."""
    if process_number(config) is not None:
        items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path.parts))


def pytest_collection_finish() -> None:
    """The objects of pytest and of imported packages live to the end. A full collection, of which tests make hundreds, need not walk
    through them, which takes 0.3 s with PyTorch imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_state(request):
    """Every test starts from seed 0 and with the same settings. One that leaves gradient mode or TF32 changed fails."""
    threads, device = _C.get_num_threads(), _C.get_default_device()
    if request.node.get_closest_marker("on_cpu"):
        _C.set_default_device("cpu")
    _C.manual_seed(0)
    yield
    grad, tf32 = _C.is_grad_enabled(), _C.tf32()
    _C.set_default_device(device)
    _C.set_num_threads(threads)
    _C.use_gemm_backend(None)
    _C.use_attention_backend(None)
    _C.set_grad_enabled(True)  # whatever this test did, the next one starts right
    _C.allow_tf32(False)
    assert grad, "the test left gradient mode off"
    assert not tf32, "the test left TF32 on"


@pytest.fixture
def no_leaks():
    """Fails the test when it leaves tensors or storages behind."""
    gc.collect()
    before = _C.memory_stats(_C.get_default_device())
    yield
    gc.collect()
    after = _C.memory_stats(_C.get_default_device())
    for key in ("live_tensors", "live_storages"):
        assert after[key] == before[key], f"{after[key] - before[key]} {key} leaked"


@pytest.fixture
def steady_memory():
    """For tests that count the bytes of tensors: what earlier tests have left in circles is freed now, and nothing while they count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def short_bursts(monkeypatch):
    """Benchmarks whose turns end at once: for tests of their numbers and tables, not of their speed."""
    from xtrain.bench import frame

    monkeypatch.setattr(frame, "BURST", 1e-5)
    monkeypatch.setattr(frame, "TURNS", 3)
    monkeypatch.setattr(frame, "PAUSE", 0.0)
