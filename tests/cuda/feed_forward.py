"""What swiglu_mlp and gelu_mlp promise alike, for test_swiglu_mlp.py and test_gelu_mlp.py: `op` takes the tensors that `make` returns."""

from __future__ import annotations

import gc
from collections.abc import Callable

import xtrain as xt
from xtrain import _C
from xtrain.optable.table import array, bits


def results(op: Callable, given: list, passes: int = 1, again: bool = False) -> list[bytes]:
    """Of the output and of all gradients; b"" for none. again: in recompute mode."""
    with xt.recompute() if again else xt.enable_grad():
        y = op(*given)
    for i in range(passes):
        y.backward(xt.ones(*y.shape).to(y.dtype) * 0.5, retain_graph=i < passes - 1)
    return [bits(y), *(b"" if t.grad is None else bits(t.grad) for t in given)]


def check_frozen(op: Callable, separate: Callable, make: Callable, frozen: tuple[int, ...]) -> None:
    """In recompute mode, too, and where a second backward follows."""
    for again in (False, True):
        for passes in (1, 2):
            both = make(), make()
            for given in both:
                for i in frozen:
                    given[i].requires_grad = False
            assert results(op, both[0], passes, again) == results(separate, both[1], passes)
            assert all((t.grad is None) == (i in frozen) for i, t in enumerate(both[0]))


def check_place_taken(op: Callable, make: Callable, held: int, taken: int) -> None:
    """The forward keeps `held` bytes with y and dy; a backward that frees the graph needs `taken` bytes less than one that does not."""
    peaks, kept = [], []
    device = _C.get_default_device()
    for retain in (False, True):
        given = make()
        before = _C.memory_stats(device)["allocated"]
        y = op(*given)
        dy = xt.ones(*y.shape)
        kept.append(_C.memory_stats(device)["allocated"] - before)
        gc.collect()
        _C.memory_reset_peak(device)
        y.backward(dy, retain_graph=retain)
        peaks.append(_C.memory_stats(device)["peak"] - before - kept[-1])
        del given, y, dy
    assert kept[0] == held
    assert peaks[1] - peaks[0] >= taken


def recomputed(op: Callable, given: list, mode: bool) -> tuple[int, list[bytes]]:
    """Bytes that the forward keeps, in recompute mode or not, and the gradients."""
    device = _C.get_default_device()
    before = _C.memory_stats(device)["allocated"]
    with xt.recompute() if mode else xt.enable_grad():
        y = op(*given)
    kept = _C.memory_stats(device)["allocated"] - before
    y.backward(xt.ones(*y.shape).to(y.dtype))
    return kept, [bits(t.grad) for t in given]


def output_and_ops(model: xt.nn.Module, ids: xt.Tensor) -> tuple[list, list[str]]:
    """model(ids), and the names of the ops that it calls."""
    names: list[str] = []
    before = _C.set_call_hook(lambda op, arguments, outputs: names.append(op.__name__))
    try:
        return array(model(ids)).tolist(), names
    finally:
        _C.set_call_hook(before)
