"""What grad modes, functions of users and checkpoints promise, a test for each clause."""

from __future__ import annotations

import gc
import weakref

import pytest

import xtrain as xt
from xtrain import _C

pytestmark = pytest.mark.on_cpu


def test_a_mode_may_be_entered_inside_itself() -> None:
    mode = xt.no_grad()
    with mode:
        with xt.enable_grad():
            assert xt.is_grad_enabled()
            with mode:
                assert not xt.is_grad_enabled()
            assert xt.is_grad_enabled()
        assert not xt.is_grad_enabled()
    assert xt.is_grad_enabled()


def test_a_mode_ends_with_its_block_also_after_an_error() -> None:
    for mode in (xt.no_grad, lambda: xt.set_grad_enabled(False)):
        with pytest.raises(KeyError), mode():
            raise KeyError
        assert xt.is_grad_enabled()


def test_what_decorators_make() -> None:
    """With brackets and without; the function's name and text; a generator is refused."""

    def inside(a, *, b=2):
        """Its text."""
        return xt.is_grad_enabled(), a, b

    for made in (xt.no_grad()(inside), xt.no_grad(inside)):
        assert made(1, b=3) == (False, 1, 3) and made.__name__ == "inside" and made.__doc__ == "Its text."
    with xt.no_grad():
        assert xt.enable_grad(inside)(1) == (True, 1, 2)

    def numbers():
        yield 1

    for mode in (xt.no_grad, xt.enable_grad):
        with pytest.raises(TypeError, match="cannot decorate the generator numbers, use `with` inside it"):
            mode()(numbers)


def test_set_grad_enabled_switches_at_once() -> None:
    xt.set_grad_enabled(False)
    assert not xt.is_grad_enabled()
    xt.set_grad_enabled(True)
    assert xt.is_grad_enabled()
    for mode in (False, True):
        with xt.set_grad_enabled(mode):
            assert xt.is_grad_enabled() is mode
        assert xt.is_grad_enabled()


class Parts(xt.Function):
    """Three results, of which the second is no float and the third is marked."""

    seen: list = []

    @staticmethod
    def forward(ctx, x, factor, other):
        Parts.seen.append(ctx.needs_input_grad)
        third = x * 5
        ctx.mark_non_differentiable(third)
        return x * factor, (x > 0).long(), third, x * 7

    @staticmethod
    def backward(ctx, *grads):
        Parts.seen.append([None if grad is None else grad.tolist() for grad in grads])
        return grads[0] * 10 + grads[3], None, None


def test_gradients_come_by_the_place_of_their_output() -> None:
    Parts.seen.clear()
    x = xt.tensor([1.0, -2.0], requires_grad=True)
    first, second, third, fourth = Parts.apply(x, 3.0, xt.ones(2))
    assert Parts.seen == [(True, False, False)]
    assert first.requires_grad and fourth.requires_grad and not third.requires_grad and not second.requires_grad
    assert second.tolist() == [1, 0] and third.tolist() == [5.0, -10.0]
    (first * xt.tensor([1.0, 2.0]) + fourth * xt.tensor([30.0, 40.0])).sum().backward()
    assert Parts.seen[1] == [[1.0, 2.0], None, None, [30.0, 40.0]] and x.grad.tolist() == [40.0, 60.0]


def test_only_tensors_are_saved() -> None:
    class Saves(xt.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, None)
            with pytest.raises(TypeError, match="save_for_backward: arguments must be tensors or None, got float"):
                ctx.save_for_backward(x, 1.0)
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            assert ctx.saved_tensors[1] is None
            return dy * ctx.saved_tensors[0]

    x = xt.tensor([3.0], requires_grad=True)
    Saves.apply(x).backward()
    assert x.grad.tolist() == [3.0]


def test_a_function_returns_tensors() -> None:
    class Bad(xt.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1, 3.0

    with pytest.raises(TypeError, match="Function: forward must return a tensor or a tuple of tensors, got float"):
        Bad.apply(xt.ones(1, requires_grad=True))
    with pytest.raises(NotImplementedError, match=r"a subclass must define forward\(ctx, \*args\)"):
        xt.Function.apply(xt.ones(1))


def test_nothing_is_recorded_without_a_need() -> None:
    x = xt.ones(2)
    assert not Parts.apply(x, 2.0, x)[0].requires_grad
    with xt.no_grad():
        assert not Parts.apply(xt.ones(2, requires_grad=True), 2.0, x)[0].requires_grad


def test_a_checkpoint_takes_any_arguments() -> None:
    """Tensors by name, tensors that need no gradient, and what is no tensor; several results, one of them unused."""

    def work(a, n, *, b, flag):
        assert flag is True and n == 2
        return a * b * n, (a > 0).long(), a * 100

    a, b = xt.tensor([2.0, 3.0], requires_grad=True), xt.tensor([5.0, 7.0])
    first, second, _ = xt.checkpoint(work, a, 2, b=b, flag=True)
    assert second.tolist() == [1, 1] and not second.requires_grad
    first.sum().backward()
    assert a.grad.tolist() == [10.0, 14.0] and b.grad is None
    with xt.no_grad():
        assert not xt.checkpoint(work, a, 2, b=b, flag=True)[0].requires_grad
    weight = xt.tensor([4.0, 4.0], requires_grad=True)  # only what the function reads needs a gradient
    xt.checkpoint(lambda t: t * weight, b).sum().backward()
    assert weight.grad.tolist() == [5.0, 7.0]
    xt.checkpoint(lambda: (weight * 2).sum(), use_reentrant=False).backward()
    assert weight.grad.tolist() == [7.0, 9.0]


CHANGED = (
    r"^checkpoint: a parameter of shape \(2,\) that the function reads must not be changed in place before backward, got "
    "version 1 instead of 0$"
)


@pytest.mark.parametrize("way", ["itself", "a view", "in a list", "inside a second checkpoint", "a custom function"])
def test_a_checkpoint_notices_a_parameter_that_changed(way: str) -> None:
    """However it is read; the second run does not begin, and nothing gets a gradient."""
    x, weight = xt.ones(2, requires_grad=True), xt.tensor([4.0, 4.0], requires_grad=True)
    calls = []

    def work(t: xt.Tensor) -> xt.Tensor:
        calls.append(1)
        if way == "a view":
            return t * weight.view(1, 2).view(2)
        if way == "in a list":
            return t * xt.cat([weight, t])[:2]
        if way == "inside a second checkpoint":
            with xt.enable_grad():
                return xt.checkpoint(lambda u: u * weight, t).detach()
        return Parts.apply(t, 2.0, weight)[0] * weight if way == "a custom function" else t * weight

    y = xt.checkpoint(work, x)
    with xt.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()
    assert calls == [1] and x.grad is None and weight.grad is None


def test_a_checkpoint_lets_others_change() -> None:
    """A parameter that this function does not read, statistics that it updates, what it changes itself, and parameters
    after the backward; a graph that is kept walks twice.
    """
    x, weight, other = (xt.ones(2, requires_grad=True) for _ in range(3))
    mean = xt.zeros(2)

    def work(t: xt.Tensor) -> xt.Tensor:
        with xt.no_grad():
            mean.mul_(0.5).add_(t.detach())
            weight.mul_(1.0)
        return t * weight.detach() * weight

    first = xt.checkpoint(work, x)
    xt.checkpoint(work, x)
    y = xt.checkpoint(lambda t: t * weight, x)
    with xt.no_grad():
        other.add_(1.0)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="got version 2 instead of 1$"):  # of the second call, and not of its own
        first.sum().backward()
    with xt.no_grad():
        weight.add_(1.0)
    third = xt.checkpoint(work, x)
    third.sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]


def test_reads_are_the_leaves_that_require_a_gradient() -> None:
    """Each once, in order, of this call alone, also after one that raised. Results of ops in it are none."""
    many = [xt.ones(1, requires_grad=True) for _ in range(40)]

    def work(a: xt.Tensor, n: int) -> int:
        with xt.enable_grad():
            assert (a * many[0]).sum().requires_grad
        xt.cat([*many, *many, xt.ones(1)]).sum()
        return n

    plain = xt.ones(1)
    with xt.no_grad():
        result, leaves = _C.reads_of(work, (plain, 3))
        assert result == 3 and len(leaves) == 40
        assert [leaf.data_ptr() for leaf in leaves] == [one.data_ptr() for one in many]
        for bad in ((plain,), 3):
            with pytest.raises(TypeError):
                _C.reads_of(work, bad)
        xt.add(many[1], many[2])
        assert _C.reads_of(lambda: None, ()) == (None, ())
        inner = []
        _, outer = _C.reads_of(lambda: inner.append(_C.reads_of(lambda: many[3] * 1, ())) or many[4] * 1, [])
        assert [len(inner[0][1]), len(outer)] == [1, 2]


# ---- custom operations


def test_so_many_inputs_and_outputs() -> None:
    x, y = xt.ones(1), xt.ones(1)
    assert len(_C.function_apply("F", lambda *dy: None, [x], [y] * 4096)) == 4096
    with pytest.raises(
        ValueError, match="^function_apply: argument 'inputs' must hold at most 4096 entries, got 4097$"
    ):
        _C.function_apply("F", lambda *dy: None, [x] * 4097, [y])


def test_gradients_of_a_custom_operation_are_numbered_from_0() -> None:
    x = xt.ones(1).requires_grad_()
    (y,) = _C.function_apply("F", lambda dy: (dy, 3), [x, x], [xt.ones(1)])
    with pytest.raises(TypeError, match="^F: gradient 1 of backward must be a Tensor or None, got int$"):
        y.backward()


def test_an_instance_of_a_subclass_is_a_leaf_of_its_own() -> None:
    class Mine(xt.Tensor):
        pass

    x = xt.ones(2).requires_grad_()
    for source in (x, x * 2):
        mine = _C.make_subclass(Mine, source)
        assert type(mine) is Mine and mine.is_leaf and not mine.requires_grad
        assert _C.make_subclass(Mine, source, True).requires_grad


def test_a_rule_that_failed_can_run_again() -> None:
    """It is dropped when it has run."""
    tries = []

    def backward(dy):
        tries.append(1)
        return 3 if len(tries) == 1 else dy * 2

    x = xt.ones(1).requires_grad_()
    (y,) = _C.function_apply("F", backward, [x], [xt.ones(1)])
    with pytest.raises(TypeError, match="got int"):
        y.backward()
    y.backward()
    assert x.grad.tolist() == [2]


def test_a_backward_inside_another_keeps_its_graph_and_no_other() -> None:
    """What the rules hold is freed as the outer one goes."""

    class Held:
        def __call__(self, dy):
            return dy

    inner = (xt.ones(1).requires_grad_() * 2).sum()

    def nested(dy):
        inner.backward(retain_graph=True)
        return dy

    x, held = xt.ones(1).requires_grad_(), Held()
    freed = weakref.ref(held)
    (y,) = _C.function_apply("First", held, [x], [xt.ones(1)])
    (z,) = _C.function_apply("Second", nested, [y], [xt.ones(1)])
    del held
    z.backward()
    gc.collect()
    assert freed() is None and x.grad.tolist() == [1]
    inner.backward()


def test_an_output_that_is_a_leaf_comes_back_as_an_alias() -> None:
    x, leaf = xt.ones(1).requires_grad_(), xt.ones(1).requires_grad_()
    (y,) = _C.function_apply("F", lambda dy: dy * 3, [x], [leaf])
    assert y is not leaf and y.data_ptr() == leaf.data_ptr() and leaf.is_leaf and y.grad_fn == "F"
    y.backward()
    assert leaf.grad is None and x.grad.tolist() == [3]
