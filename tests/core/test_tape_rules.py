"""Rules of the tape that a right gradient does not show: whose memory is written, what is freed, who is told, which thread waits."""

from __future__ import annotations

import _thread
import gc
import threading
import time
import weakref

import numpy as np
import pytest
from runs import HANGS, status_of_child

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

pytestmark = pytest.mark.on_cpu


def leaf(*shape: int):
    return xt.ones(shape).requires_grad_()


# ---- whose memory is written


def test_an_array_that_came_as_gradient_is_not_written() -> None:
    """Nobody else may hold the tensor over it: the array is somebody's. At a leaf where it is the first of two, and the only one."""
    for two in (False, True):
        array, x = np.ones(3, np.float32), leaf(3)
        other = (x * 2.0).sum()
        y = x + 0.0
        y.register_hook(lambda g, array=array: xt.from_numpy(array))
        (y.sum() + other if two else y.sum()).backward()
        x.grad.add_(5)
        assert array.tolist() == [1.0] * 3 and x.grad.tolist() == [8.0 if two else 6.0] * 3


def test_memory_that_another_tensor_shows_is_not_written() -> None:
    """A view that a hook has kept of the first gradient of a sum."""
    x, kept = leaf(4), []
    first = x * 2.0
    second = x + 0.0
    second.register_hook(lambda g: kept.append(g[1:]))
    (first.sum() + (second * 3.0).sum()).backward()
    assert kept[0].tolist() == [3.0] * 3 and x.grad.tolist() == [5.0] * 4


def test_a_gradient_has_memory_of_its_own() -> None:
    """Not that of the gradient that was given."""
    for f in (lambda x: x, lambda x: x + 0.0, lambda x: x.reshape((4, 1)).reshape((4,))):
        x, given = leaf(4), xt.ones((4,))
        f(x).backward(given)
        x.grad.add_(5)
        assert given.tolist() == [1.0] * 4


def test_a_gradient_that_is_a_view_of_grad_is_read_before_it_is_written() -> None:
    """Of so many elements that they do not pass through one block."""
    w = leaf(300, 300)
    start = np.arange(90000, dtype=np.float32).reshape(300, 300)
    w.grad = xt.tensor(start)
    w.T.backward(w.grad)
    assert np.array_equal(w.grad.numpy(), start + start.T)


def test_hooks_of_a_leaf_see_what_products_add() -> None:
    """Rules that could add to .grad themselves do not, where a hook wants to see the gradient."""
    w, seen = leaf(2, 3), []
    for _ in range(2):
        F.linear(xt.ones((4, 3)), w).sum().backward()
    w.register_hook(lambda g: seen.append(g.tolist()))
    F.linear(xt.ones((4, 3)), w).sum().backward()
    assert seen == [[[4.0] * 3] * 2] and w.grad.tolist() == [[12.0] * 3] * 2


def test_a_gradient_is_dense() -> None:
    """That of a sum repeats one number by stride 0; .grad is memory that can be changed in place."""
    x = leaf(3, 4)
    x.sum().backward()
    assert x.grad.is_contiguous() and x.grad.mul_(2).tolist() == [[2.0] * 4] * 3
    y = leaf(3, 4)
    y.T.backward(xt.ones((4, 3)))
    assert y.grad.is_contiguous()


def test_a_product_that_adds_to_a_gradient_is_a_change_in_place() -> None:
    w = leaf(3, 3)
    F.linear(xt.ones((2, 3)), w).sum().backward()
    place, version = w.grad.data_ptr(), w.grad._version
    F.linear(xt.ones((2, 3)), w).sum().backward()
    assert w.grad.data_ptr() == place and w.grad._version > version


# ---- what is freed


def test_a_backward_frees_what_it_has_used() -> None:
    """While the result is still held: what a node has saved goes with its rule."""
    gc.collect()
    x = leaf(1000)
    before = _C.memory_stats("cpu")["live_storages"]
    y = (x.exp().sin().exp()).sum()
    assert _C.memory_stats("cpu")["live_storages"] > before + 2
    y.backward()
    assert _C.memory_stats("cpu")["live_storages"] == before + 2  # y and x.grad


def test_an_error_in_a_backward_leaks_nothing() -> None:
    """Gradients that wait at nodes and leaves are dropped."""

    def fail(_) -> None:
        raise ValueError("no")

    def run() -> None:
        x = leaf(50)
        waits, fails = x.exp(), x.sin()
        fails.register_hook(fail)
        with pytest.raises(ValueError, match="no"):
            (waits + fails).sum().backward()

    run()
    gc.collect()
    before = _C.memory_stats("cpu")
    for _ in range(3):
        run()
    gc.collect()
    after = _C.memory_stats("cpu")
    assert (after["live_tensors"], after["live_storages"]) == (before["live_tensors"], before["live_storages"])


def test_the_callable_of_a_hook_is_released() -> None:
    class Hook:
        def __call__(self, gradient):
            return None

    x = leaf(2)
    hooks = [Hook(), Hook()]
    gone = [weakref.ref(hook) for hook in hooks]
    handle = x.register_hook(hooks[0])
    y = x * 1.0
    y.register_hook(hooks[1])
    hooks.clear()
    assert gone[0]() is not None and gone[1]() is not None
    handle.remove()
    del y
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_retain_grad_of_a_tensor_that_is_gone() -> None:
    x = leaf(2)
    y = x * 2.0
    y.retain_grad()
    z = y.sum()
    del y
    gc.collect()
    z.backward()
    assert x.grad.tolist() == [2.0, 2.0]


# ---- who is told


def test_a_freed_graph_runs_no_hook() -> None:
    x, seen = leaf(2), []
    y = x * x
    y.register_hook(lambda g: seen.append(1))
    z = y.sum()
    z.backward()
    with pytest.raises(RuntimeError, match="was freed by an earlier backward"):
        y.sum().backward()
    assert seen == [1]


def test_hooks_are_called_in_order() -> None:
    x, seen = leaf(2), []
    y = x * 1.0
    for tensor in (x, y):
        for number in range(3):
            tensor.register_hook(lambda g, number=number: seen.append(number))
    y.sum().backward()
    assert seen == [0, 1, 2, 0, 1, 2]


def test_a_hook_that_another_one_removes_is_not_called() -> None:
    x, seen = leaf(2), []
    x.register_hook(lambda g: handle.remove())
    handle = x.register_hook(lambda g: seen.append(1))
    (x * 1.0).sum().backward()
    assert seen == []


def test_retained_gradients_of_all_outputs() -> None:
    x = leaf(6)
    parts = x.split(2)
    for part in parts:
        part.retain_grad()
    sum((part * float(i + 1)).sum() for i, part in enumerate(parts)).backward()
    assert [part.grad.tolist() for part in parts] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]


def test_nothing_is_recorded_in_a_backward() -> None:
    """In hooks and rules, whose arithmetic would keep the graph alive."""
    seen = []

    class Double(xt.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2.0

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            seen.append((xt.is_grad_enabled(), (x * 2.0).requires_grad))
            return dy * 2.0

    x = leaf(2)
    y = Double.apply(x)
    y.register_hook(lambda g: seen.append((xt.is_grad_enabled(), (x * 2.0).requires_grad)))
    y.sum().backward()
    assert seen == [(False, False)] * 2 and xt.is_grad_enabled()


def test_an_op_that_returns_its_input() -> None:
    """contiguous() of what is contiguous is recorded on an alias: a hook of the result is not one of the input."""
    x, seen = leaf(2), []
    y = x.contiguous()
    y.register_hook(lambda g: seen.append(g.tolist()))
    (y * 2.0 + x).sum().backward()
    assert seen == [[2.0, 2.0]] and x.grad.tolist() == [3.0, 3.0] and x.is_leaf and not y.is_leaf


def test_text_arguments_outlive_the_call() -> None:
    """A backward reads reduction='sum' long after the str of the call has gone."""
    x = leaf(3, 4)
    loss = F.cross_entropy(x, xt.tensor([0, 1, 2]), reduction="".join(["n", "one"]))
    gelu = F.gelu(leaf(2), approximate="".join(["ta", "nh"]))
    junk = ["".join(["xx", str(i)]) for i in range(1000)]
    loss.sum().backward()
    gelu.sum().backward()
    assert len(junk) == 1000 and np.abs(x.grad.sum().item()) < 1e-6


def test_what_is_no_float_has_no_history() -> None:
    """As a leaf, and as an output beside one that has."""
    for dtype in ("int32", "int64", "uint8", "bool"):
        with pytest.raises(RuntimeError, match=f"only floating point tensors can require gradients, got {dtype}"):
            xt.zeros((2,), dtype=getattr(xt, dtype)).requires_grad_()

    class Both(xt.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2.0, x.long()

        @staticmethod
        def backward(ctx, dy, _):
            return dy * 2.0

    y, whole = Both.apply(leaf(2))
    assert y.requires_grad and not whole.requires_grad and whole.is_leaf


def test_a_rule_may_walk_a_graph_of_its_own() -> None:
    """And the walk that has called it goes on, through rules of the core."""
    x = leaf(3)
    y = xt.checkpoint(lambda t: t.exp().sin(), x.exp() * 0.5)
    (y * y).sum().backward()
    v = np.exp(np.ones(3)) * 0.5
    want = 2 * np.sin(np.exp(v)) * np.cos(np.exp(v)) * np.exp(v) * v
    assert np.abs(x.grad.numpy() - want).max() < 1e-5


def test_a_rule_returns_the_dtype_of_its_input() -> None:
    class Wide(xt.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2.0

        @staticmethod
        def backward(ctx, dy):
            return dy.double()

    with pytest.raises(
        TypeError, match=r"Wide: gradient 0 of backward must be float32 \(2,\) on cpu, got float64 \(2,\) on cpu"
    ):
        Wide.apply(leaf(2)).sum().backward()


def test_a_backward_drops_what_a_context_has_saved() -> None:
    """At once, while the result is still held; with retain_graph it stays."""

    class Held:
        pass

    class Keep(xt.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = Held()
            held.append(weakref.ref(ctx.held))
            return x * 2.0

        @staticmethod
        def backward(ctx, dy):
            return dy * 2.0

    held: list = []
    y = Keep.apply(leaf(2))
    z = y.sum()
    z.backward(retain_graph=True)
    assert held[0]() is not None
    z.backward()
    assert held[0]() is None and y.requires_grad


# ---- which thread waits


def test_threads_add_to_one_gradient_in_turn() -> None:
    """Products that add to .grad themselves, and sums at the end of a walk, from four threads: nothing is lost, nobody waits for ever."""
    w, rounds = leaf(8, 8), 30
    F.linear(xt.ones((1, 8)), w).sum().backward()

    def work() -> None:
        for _ in range(rounds):
            F.linear(xt.ones((1, 8)), w).sum().backward()
            w.sum().backward()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in threads)
    assert w.grad.tolist() == [[1.0 + 4 * rounds * 2] * 8] * 8


def test_a_child_waits_for_no_thread_of_its_parent() -> None:
    """A fork while another thread adds to a .grad: in the child that thread does not exist, and what it was adding to is free."""
    w, stop = xt.ones((256, 256)).requires_grad_(), threading.Event()
    x = xt.ones((256, 256))
    F.linear(x, w).sum().backward()

    def work() -> None:
        while not stop.is_set():
            F.linear(x, w).sum().backward()

    def backward() -> bool:
        w.sum().backward()
        return True

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(12):
            assert status_of_child(backward) == 0
    finally:
        stop.set()
        thread.join()


def test_ctrl_c_ends_a_long_backward() -> None:
    """Between two nodes, each of them short: leaves get nothing of a walk that has not come to its end. Signals are asked for every 50 ms.
    A walk that ends before the signal comes is made again with twice the nodes."""
    x = y = leaf(4)
    for attempt in range(5):
        for _ in range(100000 << attempt):
            y = y + 1.0
        end, x.grad = y.sum(), None
        timer = threading.Timer(0.05, _thread.interrupt_main)
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                end.backward(retain_graph=True)
                timer.join()  # too late for the walk
                time.sleep(HANGS)
        finally:
            timer.join()
        if x.grad is None:
            return
    pytest.fail("no walk was ended")


def test_gradients_of_one_column_group_have_memory_of_their_own() -> None:
    """Two attentions read the same v, columns of a product: what the first leaves in a block for the product's gradient is not where the
    second writes."""
    x, y = xt.randn(6, 32), [xt.randn(2, 3, 2, 8) for _ in range(4)]
    x.requires_grad = True
    grads = []
    for dense in (False, True):
        v = (x * 1.0).split((16, 16), 1)[1].view(2, 3, 2, 8)
        v = (v.contiguous() if dense else v).transpose(1, 2)
        q = [t.transpose(1, 2) for t in y]
        a, b = (_C.scaled_dot_product_attention(q[i], q[i + 1], v, True) for i in (0, 1))
        x.grad = None
        ((a * q[2]).sum() + (b * q[3]).sum()).backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]


def test_a_gradient_that_grows_in_place_has_changed() -> None:
    x, w = (xt.ones(2, requires_grad=True) for _ in range(2))
    x.sum().backward()
    y = (w * x.grad).sum()
    x.sum().backward()
    with pytest.raises(RuntimeError, match="saved by 'mul' was changed in place"):
        y.backward()
