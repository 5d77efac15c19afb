"""The tape: accumulation, graphs of every shape, hooks, in-place protection, custom functions, recomputation, and no leaks."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import xtrain as xt

pytestmark = pytest.mark.usefixtures("no_leaks")


def leaf(*values: float):
    return xt.tensor(np.array(values, np.float64), requires_grad=True)


def test_accumulation_and_zero() -> None:
    x = leaf(1, 2, 3)
    (x * x).sum().backward()
    assert x.grad.tolist() == [2, 4, 6]
    (x * 3).sum().backward()
    assert x.grad.tolist() == [5, 7, 9]
    x.grad = None
    assert x.grad is None
    x.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


def test_grad_of_a_second_backward_does_not_change_an_array_taken_from_the_first() -> None:
    """`collect` may add in place only when nobody else looks."""
    x = leaf(1, 2)
    x.sum().backward()
    kept = x.grad.detach().clone()
    first = x.grad
    (x * 2).sum().backward()
    assert kept.tolist() == [1, 1]
    assert x.grad.tolist() == [3, 3]
    assert first.tolist() in ([1, 1], [3, 3])


def test_upstream_gradient_is_not_written_to() -> None:
    x, g = leaf(1, 2), xt.tensor(np.array([5.0, 7.0]))
    (x + x).backward(g)
    assert g.tolist() == [5, 7]
    x.clone().backward(g)
    (x * 1).backward(g)
    assert g.tolist() == [5, 7]
    assert x.grad.tolist() == [20, 28]


def test_expanded_upstream_gradient() -> None:
    x = leaf(1, 2, 3)
    y = x * 1
    y.backward(xt.tensor(np.array([2.0])).expand(3))
    y = x * 1
    y.backward(xt.tensor(np.array([2.0])).expand(3))
    assert x.grad.tolist() == [4, 4, 4]


def test_diamond_and_leaf_used_twice() -> None:
    x = leaf(2)
    a = x * x
    b = a + x
    c = a * b  # x^4 + x^3
    (c + c).backward()
    assert x.grad.tolist() == [2 * (4 * 8 + 3 * 4)]


def test_wide_graph() -> None:
    x = leaf(1)
    total = x * 0
    for i in range(2000):
        total = total + x * float(i % 7)
    total.backward()
    assert x.grad.item() == sum(i % 7 for i in range(2000))


def test_exponential_diamond_is_linear_work() -> None:
    x = leaf(1)
    y = x
    for _ in range(60):
        y = y + y
    y.backward()
    assert x.grad.item() == 2.0**60


def test_deep_graph() -> None:
    """100 000 nodes in a row: neither the walk nor the release may recurse."""
    x = leaf(1)
    y = x
    for _ in range(100_000):
        y = y + 1.0
    y.backward()
    assert x.grad.item() == 1
    y = x
    for _ in range(100_000):
        y = y * 1.0
    del y  # released without a backward
    gc.collect()


def test_deep_graph_in_a_thread_with_a_small_stack() -> None:
    result = []

    def work() -> None:
        x = leaf(1)
        y = x
        for _ in range(50_000):
            y = -y
        y.backward()
        result.append(x.grad.item())

    threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(0)
    assert result == [1.0]


def test_retain_graph_and_freed_graph() -> None:
    x = leaf(3)
    y = x * x
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.item() == 12
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.backward()
    assert x.grad.item() == 12
    z = x * 2  # the leaf goes on working
    z.backward()
    assert x.grad.item() == 14


def test_backward_errors() -> None:
    x = leaf(1, 2)
    with pytest.raises(RuntimeError, match=r"backward: .*\(2,\)"):
        (x * 2).backward()
    with pytest.raises(RuntimeError, match="does not require a gradient"):
        xt.tensor(np.zeros(1)).backward()
    with pytest.raises(RuntimeError, match=r"gradient must be float64 \(2,\).*\(3,\)"):
        (x * 2).backward(xt.tensor(np.zeros(3)))
    with pytest.raises(RuntimeError, match="float64.*float32"):
        (x * 2).backward(xt.tensor(np.zeros(2, np.float32)))
    with pytest.raises(TypeError):
        (x * 2).backward("no")
    with pytest.raises(RuntimeError, match="int64"):
        xt.tensor(np.zeros(2, np.int64), requires_grad=True)
    assert x.grad is None


def test_one_element_of_any_rank_needs_no_gradient_argument() -> None:
    x = xt.tensor(np.ones((1, 1, 1)), requires_grad=True)
    (x * 3).backward()
    assert x.grad.tolist() == [[[3.0]]]


def test_no_grad_and_enable_grad() -> None:
    x = leaf(1, 2)
    with xt.no_grad():
        y = x * 2
        assert not y.requires_grad
        assert y.is_leaf
        with xt.enable_grad():
            assert (x * 2).requires_grad
        assert not xt.is_grad_enabled()
    assert xt.is_grad_enabled()

    @xt.no_grad()
    def f():
        return (x * 2).requires_grad

    assert not f()
    with pytest.raises(ZeroDivisionError), xt.no_grad():
        raise ZeroDivisionError
    assert xt.is_grad_enabled()


def test_grad_mode_belongs_to_the_thread() -> None:
    seen = []
    with xt.no_grad():
        thread = threading.Thread(target=lambda: seen.append(xt.is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_detach_shares_memory_and_cuts_the_graph() -> None:
    x = leaf(1, 2)
    y = x.detach()
    assert not y.requires_grad
    y[0] = 9.0
    assert x.tolist() == [9, 2]
    z = (x * 2).detach() * x
    z.sum().backward()
    assert x.grad.tolist() == [18, 4]


def test_requires_grad_rules() -> None:
    x = leaf(1)
    y = x * 2
    assert (x.is_leaf, y.is_leaf, x.grad_fn, y.grad_fn) == (True, False, None, "mul")
    with pytest.raises(RuntimeError, match="detach"):
        y.requires_grad = False
    x.requires_grad = False
    assert not (x * 2).requires_grad
    assert x.requires_grad_() is x
    assert y.grad is None


def test_unused_input_has_no_gradient() -> None:
    x, y = leaf(1), leaf(2)
    (x * 2).backward()
    assert y.grad is None


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, w = xt.tensor(np.ones((2, 3))), xt.tensor(np.ones((4, 3)), requires_grad=True)
    xt.functional.linear(x, w).sum().backward()
    assert x.grad is None
    assert w.grad.tolist() == [[2.0] * 3] * 4


def test_setting_grad() -> None:
    x = leaf(1, 2)
    x.grad = xt.tensor(np.array([5.0, 6.0]))
    x.sum().backward()
    assert x.grad.tolist() == [6, 7]
    with pytest.raises(RuntimeError, match=r"grad: must have shape \(2,\), got \(3,\)"):
        x.grad = xt.tensor(np.zeros(3))
    with pytest.raises(RuntimeError, match="float64.*float32"):
        x.grad = xt.tensor(np.zeros(2, np.float32))
    with pytest.raises(TypeError):
        x.grad = 3


# ---- views, cat, split ------------------------------------------------------------------------------------------------------------


def test_views_send_gradients_to_the_right_elements() -> None:
    x = xt.tensor(np.arange(24.0).reshape(2, 3, 4), requires_grad=True)
    (x[1, :, ::2].transpose(0, 1).reshape(-1) * xt.tensor(np.arange(6.0))).sum().backward()
    want = np.zeros((2, 3, 4))
    want[1, :, ::2] = np.arange(6.0).reshape(2, 3).T
    assert np.array_equal(x.grad.cpu().numpy(), want)


def test_overlapping_slices_add() -> None:
    x = leaf(*range(5))
    (x[0:3].sum() + x[1:4].sum() * 10 + x[2]).backward()
    assert x.grad.tolist() == [1, 11, 12, 10, 0]


def test_expand_sums() -> None:
    x = leaf(1, 2)
    x.unsqueeze(1).expand(2, 5).sum().backward()
    assert x.grad.tolist() == [5, 5]


def test_split_with_unused_pieces() -> None:
    x = leaf(*range(6))
    _, b, _ = xt.split(x, (1, 2, 3))
    (b * 2).sum().backward()
    assert x.grad.tolist() == [0, 2, 2, 0, 0, 0]


def test_cat_of_the_same_tensor() -> None:
    x = leaf(1, 2)
    (xt.cat([x, x, x * 2]) * xt.tensor(np.arange(6.0))).sum().backward()
    assert x.grad.tolist() == [0 + 2 + 8, 1 + 3 + 10]


def test_iteration_unpacks_with_gradients() -> None:
    x = leaf(1, 2, 3)
    a, b, c = x
    (a * b * c).backward()
    assert x.grad.tolist() == [6, 3, 2]


# ---- hooks -------------------------------------------------------------------------------------------------------------------------


def test_hooks_see_and_replace_gradients() -> None:
    x, seen = leaf(1, 2), []
    y = x * 3
    y.register_hook(lambda g: seen.append(g.tolist()))
    handle = y.register_hook(lambda g: g * 10)
    x.register_hook(lambda g: seen.append(g.tolist()))
    (y + y).sum().backward(retain_graph=True)
    assert seen == [[2, 2], [60, 60]]  # once each, complete
    assert x.grad.tolist() == [60, 60]
    handle.remove()
    handle.remove()
    x.grad = None
    (y + y).sum().backward()
    assert x.grad.tolist() == [6, 6]


def test_leaf_hook_sees_each_backward_once() -> None:
    x, seen = leaf(1), []
    x.register_hook(lambda g: seen.append(g.item()))
    (x * 2 + x * 3).backward()
    (x * 7).backward()
    assert seen == [5, 7]


def test_hook_errors_reach_the_caller() -> None:
    x = leaf(1)
    y = x * 2
    handle = y.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.backward(retain_graph=True)
    assert x.grad is None
    handle.remove()
    y.register_hook(lambda g: "no")
    with pytest.raises(TypeError):
        (y * 1).backward()
    with pytest.raises(RuntimeError, match="register_hook"):
        xt.tensor(np.zeros(1)).register_hook(print)
    with pytest.raises(TypeError):
        x.register_hook(5)
    (x * 2).backward()
    assert x.grad.item() == 2


def test_hook_of_the_wrong_shape_is_refused() -> None:
    x = leaf(1, 2)
    y = x * 2
    y.register_hook(lambda g: xt.tensor(np.zeros(7)))
    with pytest.raises((RuntimeError, ValueError), match=r"\(2,\).*\(7,\)"):
        y.sum().backward()


def test_retain_grad() -> None:
    x = leaf(1, 2)
    y = x * 2
    y.retain_grad()
    (y * 5).sum().backward()
    assert y.grad.tolist() == [5, 5]
    z = x * 2
    z.retain_grad()
    out = (z * 1).sum()
    del z  # the node must not keep a pointer to a tensor that is gone
    out.backward()


# ---- in place ------------------------------------------------------------------------------------------------------------------------


def test_in_place_is_refused_while_recording() -> None:
    x = leaf(1, 2)
    for change in (
        lambda t: t.add_(1),
        lambda t: t.copy_(xt.tensor(np.zeros(2))),
        lambda t: t.fill_(0),
        lambda t: t.__setitem__(0, 5.0),
        lambda t: t.mul_(2),
    ):
        with pytest.raises(RuntimeError, match="in place"):
            change(x)
        with pytest.raises(RuntimeError, match="in place"):
            change(x * 1)
    with xt.no_grad():
        x.add_(1)
    assert x.tolist() == [2, 3]
    x.data.mul_(2)
    assert x.tolist() == [4, 6]


def test_in_place_with_a_recorded_operand_is_refused() -> None:
    """`plain += recorded` may not silently lose the gradient."""
    x, plain = leaf(1, 2), xt.tensor(np.zeros(2))
    for change in (lambda: plain.add_(x * 3), lambda: plain.copy_(x), lambda: plain.__setitem__(0, x[0])):
        with pytest.raises(RuntimeError, match="lose|cannot be recorded in place"):
            change()
    with xt.no_grad():
        plain.add_(x * 3)
    assert plain.tolist() == [3, 6]


def test_changed_saved_tensor_is_refused() -> None:
    x = leaf(1, 2)
    for f in (lambda t: t * t, lambda t: t.exp(), lambda t: (t * t).sum(), lambda t: xt.functional.silu(t)):
        y = f(x)
        with xt.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match=r"changed in place"):
            y.sum().backward()
    assert x.grad is None


def test_change_through_a_view_or_numpy_of_a_view_is_seen() -> None:
    w, x = xt.tensor(np.ones(4)), leaf(1, 2, 3, 4)
    y = x * w
    w[1:2].fill_(5.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_change_of_what_was_not_saved_is_allowed() -> None:
    x, y = leaf(1, 2), xt.tensor(np.ones(2))
    z = x + y  # neither operand is needed
    y.add_(5)
    z.sum().backward()
    assert x.grad.tolist() == [1, 1]


def test_versions() -> None:
    x = xt.tensor(np.zeros(3))
    v = x._version
    x.add_(1)
    x[0] = 2.0
    x.view(3, 1).mul_(2)
    assert x._version == v + 3
    assert x.detach()._version == v + 3
    assert (x * 1)._version == 0


# ---- threads and failures ------------------------------------------------------------------------------------------------


def test_backward_from_several_threads() -> None:
    x = leaf(*([1.0] * 100))

    def work() -> None:
        for _ in range(50):
            (x * 2.0).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert x.grad.tolist() == [400.0] * 100


def test_a_backward_that_fails_sets_no_gradients() -> None:
    """When a node fails, leaves that had no .grad still have none, neither a part nor all of it; the next graph is not
    disturbed. (Of a .grad that exists nothing is promised: the rules of weights add to it as they go.)
    """
    x, z, w = leaf(1, 2), leaf(3, 4), xt.tensor(np.ones(2))
    a = x * w
    b = a + x
    y = (b + z).sum()
    reached = []
    b.register_hook(lambda g: reached.append(g.tolist()))
    w.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()
    assert reached == [[1, 1]], "all of z's gradient and a part of x's had been gathered"
    assert x.grad is None
    assert z.grad is None
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_a_gradient_that_is_grad_itself() -> None:
    """y.backward(w.grad): rules that add to .grad in place must not read what they have written."""
    start, x = np.arange(1, 10, dtype=np.float64).reshape(3, 3), np.arange(9, dtype=np.float64).reshape(3, 3) - 2
    ids = np.array([1, 2, 0])
    cases = {
        "linear": (lambda w: xt.functional.linear(xt.tensor(x), w), start.T @ x),
        "matmul": (lambda w: xt.tensor(x) @ w, x.T @ start),
        "embedding": (lambda w: xt.functional.embedding(xt.tensor(ids), w), start[np.argsort(ids)]),
        "transpose": (lambda w: w.transpose(0, 1), start.T),
    }
    for name, (function, added) in cases.items():
        for through_hook in (False, True):
            w = xt.tensor(np.ones((3, 3)), requires_grad=True)
            w.grad = xt.tensor(start)
            y = function(w)
            if through_hook:
                y.register_hook(lambda dy, w=w: w.grad)
                y.backward(xt.tensor(np.zeros((3, 3))))
            else:
                y.backward(w.grad)
            assert np.array_equal(w.grad.cpu().numpy(), start + added), name


def test_checkpoint_passes_gradients_through_keyword_arguments() -> None:
    a, b = leaf(2), leaf(3)
    q = a * 2
    other = q.sum()  # older than the recomputation, walked after it
    y = xt.checkpoint(lambda p, q: p * q, b, q=q)
    (y.sum() + other).backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([8], [4])


def test_gradients_are_plain_values() -> None:
    """A recorded tensor from a hook leaves its values in .grad, not its history."""
    x = leaf(1, 2, 3)
    x.register_hook(lambda g: xt.tensor(np.full(3, 5.0), requires_grad=True))
    (x * 2).sum().backward()
    assert x.grad.tolist() == [5, 5, 5]
    assert not x.grad.requires_grad


def test_wide_and_deep_graphs() -> None:
    """Sums of random earlier results, with hundreds of nodes reached and not yet run at once, against counting by hand."""
    rng = np.random.default_rng(0)
    leaves = [leaf(1.0) for _ in range(50)]
    values, uses = list(leaves), []
    for step in range(1500):
        i, j = rng.integers(max(0, len(values) - 700), len(values), 2)
        factor = 0.5 if step % 3 else 1.0  # halves keep the numbers small, and float64 exact
        values.append((values[i] + values[j]) * factor)
        uses.append((i, j, factor))
    roots = values[-400:]
    sums = [0.0] * len(values)
    for k in range(len(values) - 400, len(values)):
        sums[k] = 1.0
    for k in range(len(values) - 1, 49, -1):
        i, j, factor = uses[k - 50]
        sums[i] += sums[k] * factor
        sums[j] += sums[k] * factor
    xt._C.backward([r.sum() for r in roots])
    for x, want in zip(leaves, sums, strict=False):
        assert (0.0 if x.grad is None else x.grad.item()) == pytest.approx(want, rel=1e-12)


def test_a_rule_that_fails_can_be_tried_again() -> None:
    """What its node saved is there again; of two outputs of a failed walk none is left behind."""
    fails = [True]

    class Once(xt.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t * 2.0

        @staticmethod
        def backward(ctx, g):
            if fails:
                raise ZeroDivisionError(fails.pop())
            return g * 2.0

    x = leaf(1, 2)
    y = Once.apply(x)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward(retain_graph=True)
    assert x.grad is None
    with pytest.raises(ZeroDivisionError):
        fails.append(True)
        y.backward(xt.tensor(np.ones(2)))
    y.backward(xt.tensor(np.ones(2)))
    assert x.grad.tolist() == [2, 2]
    w = xt.tensor(np.ones(2))
    z = x * w
    w.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.backward(xt.tensor(np.ones(2)))
    with pytest.raises(RuntimeError, match="changed in place"):
        z.backward(xt.tensor(np.ones(2)))
