"""What is asked of the process: seeds, threads, memory, hooks, and why a kernel is chosen."""

from __future__ import annotations

import pytest
from runs import python

import xtrain as xt
from xtrain import _C

pytestmark = pytest.mark.on_cpu


def test_seeds_of_64_bits() -> None:
    """Any integer of 64 bits, signed or not, and nothing else."""
    for seed in (0, 2**63, 2**64 - 1, -1, -(2**63)):
        xt.manual_seed(seed)
        assert _C.get_rng_state() == (seed % 2**64, 0)
    _C.set_rng_state((2**64 - 1, 5))
    assert _C.get_rng_state() == (2**64 - 1, 5)
    for seed in (2**64, -(2**63) - 1, 10**30):
        with pytest.raises(ValueError, match="manual_seed: argument 'seed' must fit in 64 bits, got a larger integer"):
            xt.manual_seed(seed)
    for seed in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="manual_seed: argument 'seed' must be an int, got"):
            xt.manual_seed(seed)  # pyright: ignore[reportArgumentType]


def test_numbers_of_threads() -> None:
    before = xt.get_num_threads()
    for count in (2**32 + 1, 2**31, 0, -(2**32) + 1):
        with pytest.raises(ValueError, match="set_num_threads"):
            xt.set_num_threads(count)
        assert xt.get_num_threads() == before


@pytest.mark.usefixtures("steady_memory")
def test_memory_that_was_held() -> None:
    device = _C.device("cpu")
    kept = xt.ones(1000)
    _C.memory_reset_peak(device)
    start = _C.memory_stats(device)
    assert start["peak"] == start["allocated"] >= 4000
    x = xt.ones(100000)
    views = [x[1:], x[2:]]
    held = _C.memory_stats(device)
    assert held["live_storages"] == start["live_storages"] + 1 and held["live_tensors"] == start["live_tensors"] + 3
    del x, views
    after = _C.memory_stats(device)
    assert after["allocated"] == start["allocated"] and after["peak"] >= start["allocated"] + 400000
    _C.memory_reset_peak(device)
    assert _C.memory_stats(device)["peak"] == start["allocated"] and kept.sum().item() == 1000


def test_what_explains_a_selection_is_checked() -> None:
    """Rows of a^T are M apart, which the library for products takes below 2^31 only; those of a are K apart."""
    for layout, fits in (("nn", True), ("nt", True), ("tn", False), ("tt", False)):
        reasons = {name: why for name, _, why in _C.explain_gemm((2**31, 3, 5), layout=layout)}
        assert (reasons["blas"] is None) == fits and reasons["naive"] is None, layout
    with pytest.raises(ValueError, match="explain_gemm: layout must be nn, nt, tn or tt, got 'nx'"):
        _C.explain_gemm((5, 3, 40), layout="nx")
    with pytest.raises(ValueError, match="explain_attention: heads must be a multiple of kv heads, got 6 and 4"):
        _C.explain_attention((1, 6, 4, 8, 8, 16))
    with pytest.raises(TypeError, match="explain_chunk: dtype must be a floating dtype, got int64"):
        _C.explain_chunk((8, 16, 32), "int64")


def test_layouts_and_heads_of_an_explanation() -> None:
    for layout in ("n", "nnn", ""):
        with pytest.raises(ValueError, match=f"^explain_gemm: layout must be nn, nt, tn or tt, got '{layout}'$"):
            _C.explain_gemm((5, 3, 40), layout=layout)
    with pytest.raises(ValueError, match="^explain_attention: heads must be a multiple of kv heads, got 6 and 0$"):
        _C.explain_attention((1, 6, 0, 8, 8, 16))
    assert _C.explain_attention((1, 0, 0, 8, 8, 16))


def test_states_of_the_generator_are_pairs() -> None:
    before = _C.get_rng_state()
    for bad in ((1,), (1, 2, 3), 5, "12"):
        with pytest.raises(TypeError, match=r"^set_rng_state: argument 'state' must be a pair \(seed, stream\), got "):
            _C.set_rng_state(bad)
    assert _C.get_rng_state() == before


def test_no_default_device_is_the_cpu() -> None:
    _C.set_default_device("meta")
    try:
        assert xt.ones(2).device == xt.device("meta")
    finally:
        _C.set_default_device(None)
    assert _C.get_default_device() == xt.device("cpu") == xt.ones(2).device


def test_times_and_statuses_at_their_limits() -> None:
    _C.pulse_start([], 0.001)
    _C.pulse_stop()
    _C.pulse_start([], 3600.0)
    _C.pulse_stop()
    for seconds in (0.0009, 3601.0, float("nan")):
        with pytest.raises(ValueError, match=rf"^pulse_start: seconds must be in \[0\.001, 3600\], got {seconds:g}$"):
            _C.pulse_start([], seconds)
    for seconds, status, words in (
        (-1.0, 0, r"seconds must be in \[0, 1e6\], got -1"),
        (1e7, 0, r"seconds must be in \[0, 1e6\], got 1e\+07"),
        (1000.0, 256, r"status must be in \[0, 255\], got 256"),
        (1000.0, -1, r"status must be in \[0, 255\], got -1"),
    ):
        try:
            with pytest.raises(ValueError, match=f"^end_after: {words}$"):
                _C.end_after(seconds, status)
        finally:
            _C.call_off_end()
    _C.end_after(1000.0, 255)
    _C.call_off_end()


def test_what_compare_refuses() -> None:
    x = xt.ones(3)
    for other, rtol, atol, error, words in (
        (xt.ones(4), 0.0, 0.0, ValueError, r"other must have shape \(3,\), got \(4,\)"),
        (xt.ones(3, dtype=xt.int64), 0.0, 0.0, TypeError, "other must be floating point like input, got int64"),
        (x, -1e-9, 0.0, ValueError, "rtol and atol must be finite and not negative, got -1e-09 and 0"),
        (x, 0.0, -1e-9, ValueError, "rtol and atol must be finite and not negative, got 0 and -1e-09"),
        (x, float("nan"), 0.0, ValueError, "rtol and atol must be finite and not negative, got nan and 0"),
    ):
        with pytest.raises(error, match=f"^compare: {words}$"):
            _C.compare(x, other, rtol, atol)
    assert _C.compare(x, x, 0.0, 0.0)["errors"] == 0


def test_a_hook_is_given_back() -> None:
    seen: list[str] = []

    def hook(op, arguments, outputs) -> None:
        seen.append(op.__name__)

    assert _C.set_call_hook(hook) is None
    try:
        _C.exp(xt.ones(2))
        assert _C.set_call_hook(None) is hook and seen[-1] == "exp"
        with pytest.raises(TypeError, match="set_call_hook: argument 'hook' must be a callable or None, got int"):
            _C.set_call_hook(3)  # pyright: ignore[reportArgumentType]
    finally:
        _C.set_call_hook(None)


def test_a_second_core_is_refused() -> None:
    """Its state is the process's: tensors of one would be freed by the other."""
    code = """
import importlib.util
import xtrain
from xtrain import _C
spec = importlib.util.spec_from_file_location("xtrain._C", _C.__file__)
try:
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    print("loaded", second is _C)
except ImportError as error:
    print(error)
"""
    done = python("-c", code)
    assert done.stdout == "xtrain._C cannot be loaded twice in one process\n", done.stdout + done.stderr
