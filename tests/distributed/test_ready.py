"""on_ready: when a walk tells that the gradient of a leaf is complete."""

import gc
import threading
import time
import weakref

import pytest

import xtrain as xt
from xtrain import _C
from xtrain.autograd import checkpoint


def graph(layers):
    """A loss that uses the leaves one after the other, and the second one once more at the end."""
    h = xt.arange(6).float().reshape(2, 3) / 8
    for weight in [*layers, layers[1]]:
        h = (h @ weight).tanh()
    return h.square().sum()


def leaves(count=4):
    xt.manual_seed(count)
    return [xt.randn(3, 3).requires_grad_() for _ in range(count)]


def grads(layers):
    return [None if one.grad is None else one.grad.tolist() for one in layers]


def test_gradients_are_complete():
    """When the oldest use has been walked over, in that order; the other gradients come later. A leaf that the graph does
    not use is told of at once.
    """
    plain, layers = leaves(), [*leaves(), xt.ones(2).requires_grad_()]
    graph(plain).backward()
    told = []
    _C.on_ready(layers, lambda i: told.append((i, grads(layers))))
    graph(layers[:4]).backward()
    assert [i for i, _ in told] == [4, 3, 2, 1, 0]
    for place, (_, seen) in enumerate(told):
        done = {i for i, _ in told[: place + 1]} - {4}
        assert seen == [grads(plain)[i] if i in done else None for i in range(4)] + [None]


def test_gradients_are_added_to_those_that_are_there():
    layers, told = leaves(), []
    graph(layers).backward()
    before = grads(layers)
    _C.on_ready(layers[:1], lambda i: told.append(grads(layers)[0]))
    graph(layers).backward()
    assert told == [[[2 * x for x in row] for row in before[0]]]


def test_the_backward_that_was_meant():
    layers, told = leaves(), []
    _C.on_ready(layers, told.append, 2)
    for count in (0, 0, 4, 4):
        graph(layers).backward()
        assert len(told) == count
    _C.on_ready(layers, told.append)
    _C.on_ready([], told.append)  # takes it back
    graph(layers).backward()
    assert len(told) == 4


def test_what_a_recomputation_adds_comes_first():
    """A leaf inside of it is in no graph when the walk begins."""
    layers, seen = leaves(2), []
    _C.on_ready(layers, lambda i: seen.append((i, layers[i].grad is not None)))
    checkpoint(lambda h: (h @ layers[1]).tanh(), xt.ones(2, 3) @ layers[0]).sum().backward()
    assert seen == [(1, True), (0, True)]


def test_an_error_ends_the_walk_and_nothing_is_kept():
    class Call:
        def __call__(self, i):
            raise ValueError(f"leaf {i}")

    layers, call = leaves(), Call()
    kept = weakref.ref(call)
    _C.on_ready(layers, call)
    del call
    with pytest.raises(ValueError, match="^leaf 3$"):
        graph(layers).backward()
    gc.collect()
    assert kept() is None
    graph(layers).backward()


def gone(kept):
    """Whether the object is let go within 10 s: a thread's end comes after join()."""
    end = time.monotonic() + 10
    while kept() is not None and time.monotonic() < end:
        time.sleep(0.005)
    return kept() is None


@pytest.mark.parametrize("how", ["the thread ends", "another takes its place", "it is taken back", "it is refused"])
def test_what_no_backward_comes_for_is_let_go(how):
    class Call:
        def __call__(self, i):
            raise AssertionError(f"leaf {i}")

    layers, call = leaves(), Call()
    kept = weakref.ref(call)
    if how == "the thread ends":
        thread = threading.Thread(target=_C.on_ready, args=(layers, call))
        thread.start()
        thread.join()
        del thread
    elif how == "it is refused":
        with pytest.raises(ValueError, match="distinct"):
            _C.on_ready([*layers, layers[0]], call)
    else:
        _C.on_ready(layers, call)
        _C.on_ready(layers[:1] if how == "another takes its place" else [], print)
        _C.on_ready([], print)
    del call
    assert gone(kept)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _C.on_ready(leaves(), 3), TypeError, "argument 'call' must be a callable, got int"),
        (
            lambda: _C.on_ready([*(one := leaves()), one[1]], print),
            ValueError,
            "leaves must be distinct, got one at 1 and at 4",
        ),
        (
            lambda: _C.on_ready([*(one := leaves()), one[1] @ one[2]], print),
            ValueError,
            "leaves must be leaf tensors, got the result of matmul at 4",
        ),
        (lambda: _C.on_ready(leaves(), print, -1), ValueError, "after must be at least 0, got -1"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=f"^on_ready: {message}$"):
        call()
