"""What lies between `read` and `write` of a hyper-connection: a misuse is an error, or has the right gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
from arrays import f64
from quotients import difference_quotients

import xtrain as xt
import xtrain.functional as F
from xtrain import _C, nn
from xtrain.optable.table import bits, tensor
from xtrain.testing import record

TOKENS, N, C = 4, 3, 5
DY = f64(TOKENS, N, C, seed=1)


def make(n: int = N, c: int = C) -> nn.HyperConnection:
    layer = nn.HyperConnection(c, n, lambda h: h.tanh(), affine=True, dtype=xt.float64)
    with xt.no_grad():
        layer.phi.copy_(tensor(f64(*layer.phi.shape, scale=0.3)))
        layer.alpha.fill_(0.9)
    return layer


def streams(seed: int = 0):
    return tensor(f64(TOKENS, N, C, seed=seed))


def opened(layer, x):
    """[h_in, h_post, M, carry] of mhc_open."""
    return list(_C.mhc_open(x, layer.phi, layer.alpha, layer.bias, layer.gamma))


# ---- in C: carry, h_post and M must be of one mhc_open -------------------------------------------------------------------------------

CARRY = "carry must be output 3 of mhc_open when it requires a gradient, got"
H_POST = "h_post must be output 1 of the mhc_open that made carry, got"
M = "h_res must be output 2 of the mhc_open that made carry, got"


def leaf(t):
    return t.detach().requires_grad_()


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        (2, lambda parts, other: parts[2].detach(), f"{M} a tensor without a gradient"),
        (2, lambda parts, other: leaf(parts[2]), f"{M} a leaf"),
        (2, lambda parts, other: parts[2] * 1.0, f"{M} mul"),
        (2, lambda parts, other: parts[2].reshape(parts[2].shape), f"{M} reshape"),
        (2, lambda parts, other: parts[2].transpose(-1, -2), f"{M} transpose"),
        (2, lambda parts, other: other[2], f"{M} an output of another mhc_open"),
        (2, lambda parts, other: parts[1], f"{M} another output of it"),
        (1, lambda parts, other: parts[1].detach(), f"{H_POST} a tensor without a gradient"),
        (1, lambda parts, other: leaf(parts[1]), f"{H_POST} a leaf"),
        (1, lambda parts, other: parts[1] * 2.0, f"{H_POST} mul"),
        (1, lambda parts, other: other[1], f"{H_POST} an output of another mhc_open"),
        (1, lambda parts, other: parts[2], f"{H_POST} another output of it"),
        (3, lambda parts, other: leaf(parts[3]), f"{CARRY} a leaf"),
        (3, lambda parts, other: parts[3] * 1.0, f"{CARRY} mul"),
        (3, lambda parts, other: parts[0], f"{CARRY} mhc_open"),
        (3, lambda parts, other: other[3], f"{H_POST} an output of another mhc_open"),
    ],
)
def test_a_part_that_was_replaced_is_refused(part: int, change, match: str) -> None:
    layer, x = make(), streams().requires_grad_()
    parts, other = opened(layer, x), opened(layer, streams(1).requires_grad_())
    y = parts[0].tanh()
    parts[part] = change(parts, other)
    _, h_post, m, carry = parts
    with pytest.raises(RuntimeError, match=f"^mhc_close: {match}$"):
        _C.mhc_close(carry, y, h_post, m)
    with xt.no_grad():  # no gradient, so nothing to refuse but shapes
        if part != 3 and m.shape == (TOKENS, N, N) and h_post.shape == (TOKENS, N):
            assert not _C.mhc_close(carry, y, h_post, m).requires_grad


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_part_that_was_changed_in_place_is_refused(part: int, frozen: bool) -> None:
    """Whatever of x and the parameters requires a gradient."""
    layer, x = make().requires_grad_(not frozen), streams().requires_grad_(frozen)
    parts = opened(layer, x)
    parts[part].detach().mul_(2.0)
    out = _C.mhc_close(parts[3], parts[0].tanh(), *parts[1:3])
    with pytest.raises(RuntimeError, match="saved by 'mhc_open' was changed in place"):
        out.backward(tensor(DY))


def test_parts_without_a_gradient_are_any_tensors() -> None:
    """carry is then a constant, whose missing gradient is right."""
    layer, x = make(), streams()
    carry, h_post, m, y = (tensor(f64(*s)) for s in ((TOKENS, N, C), (TOKENS, N), (TOKENS, N, N), (TOKENS, C)))
    assert difference_quotients(lambda: [_C.mhc_close(carry, y, h_post, m)], [y, h_post, m], [DY]) <= 1e-7

    def of_a_constant_carry():
        h_in, h_post, m, _ = opened(layer, x)
        return [_C.mhc_close(carry, h_in.tanh(), h_post, m)]

    assert difference_quotients(of_a_constant_carry, [x, *layer.parameters()], [DY]) <= 1e-7


# ---- in Python: the state is one object ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_state_is_refused(change) -> None:
    _, state = make().read(streams().requires_grad_())
    with pytest.raises(TypeError, match="^HyperConnection: state must be what read returned, got a copy of it$"):
        change(state)


@pytest.mark.parametrize("wrong", ["parts", "none", "h_in"])
def test_what_is_no_state_is_refused(wrong: str) -> None:
    layer, x = make(), streams().requires_grad_()
    h_in, _ = layer.read(x)
    value = {"parts": tuple(opened(layer, x)), "none": None, "h_in": h_in}[wrong]
    with pytest.raises(TypeError, match="^HyperConnection: state must be what read returned second, got "):
        layer.write(value, h_in.tanh())


@pytest.mark.parametrize("recorded", [True, False])
def test_the_state_of_another_layer_is_refused(recorded: bool) -> None:
    """Also of one of the same sizes, and without gradients."""
    layer, other = make(), make()
    with xt.set_grad_enabled(recorded):
        h_in, _ = layer.read(streams())
        for one in (other, make(n=2)):
            _, state = one.read(tensor(f64(TOKENS, one.n, C)))
            with pytest.raises(
                ValueError, match="^HyperConnection: state must be what its own read returned, got that"
            ):
                layer.write(state, h_in)


def with_part(state, part: int, value):
    """A state that was forged: its parts, one of them replaced."""
    return type(state)((*state[:part], value, *state[part + 1 :]))


@pytest.mark.parametrize("part", [2, 3, 4])
def test_a_part_put_into_a_state_is_refused(part: int) -> None:
    layer, x = make(), streams().requires_grad_()
    h_in, state = layer.read(x)
    other = layer.read(x)[1][part]
    with pytest.raises(TypeError, match="does not support item assignment"):
        state[part] = other
    with pytest.raises(TypeError, match="state must be what read returned second, got tuple"):
        layer.write((*state[:part], other, *state[part + 1 :]), h_in.tanh())
    state = with_part(state, part, other)
    with pytest.raises(
        RuntimeError, match="^mhc_close: .* must be output . of the mhc_open that made carry, got an out"
    ):
        layer.write(state, h_in.tanh())


def test_parts_put_into_the_state_of_a_recording_have_the_right_gradients() -> None:
    """A recording runs the separate functions, whose gradients are those of their formulas."""
    layer, x, m = make(), streams(), tensor(f64(TOKENS, N, N))

    def run():
        with record(layer):
            h_in, state = layer.read(x)
        return [layer.write(with_part(state, 3, m), h_in.tanh())]

    assert difference_quotients(run, [x, m, *layer.parameters()], [DY]) <= 1e-7


def test_a_sublayer_of_another_shape_is_refused() -> None:
    layer, x = make(), streams().requires_grad_()
    _, state = layer.read(x)
    other, _ = layer.read(x[:2])
    with pytest.raises(ValueError, match=r"HyperConnection: sublayer must return .*\(4, 5\), got float64 \(2, 5\)"):
        layer.write(state, other)
    with pytest.raises(TypeError, match="sublayer must return what it gets, float64 .*, got float32"):
        layer.write(state, xt.zeros(TOKENS, C))


# ---- uses that are right -------------------------------------------------------------------------------------------------------------


def test_a_state_may_be_written_twice() -> None:
    layer, x = make(), streams()

    def run():
        h_in, state = layer.read(x)
        return [layer.write(state, h_in.tanh()), layer.write(state, h_in * h_in)]

    assert difference_quotients(run, [x, *layer.parameters()], [DY, f64(TOKENS, N, C, seed=2)]) <= 1e-7


def test_a_state_keeps_the_streams_it_was_read_from() -> None:
    """The state of another call with the sublayer's output of this one: the streams of the other call."""
    layer, x, other = make(), streams(), streams(1)

    def run():
        h_in, _ = layer.read(x)
        _, state = layer.read(other)
        return [layer.write(state, h_in.tanh())]

    assert difference_quotients(run, [x, other, *layer.parameters()], [DY]) <= 1e-7


def test_a_state_read_without_gradients_is_constant() -> None:
    layer, x, y = make(), streams().requires_grad_(), tensor(f64(TOKENS, C))
    with xt.no_grad():
        _, state = layer.read(x)
    assert difference_quotients(lambda: [layer.write(state, y)], [y], [DY]) <= 1e-7
    h_in, state = layer.read(x)
    with xt.no_grad():
        assert not layer.write(state, h_in).requires_grad
    with pytest.raises(RuntimeError, match="changed in place"):
        x.detach().fill_(0.5)
        layer.write(state, h_in.tanh()).backward(tensor(DY))


def test_a_state_after_its_backward_is_refused() -> None:
    layer, x = make(), streams().requires_grad_()
    h_in, state = layer.read(x)
    layer.write(state, h_in.tanh()).backward(tensor(DY), retain_graph=True)
    first = bits(x.grad)
    x.grad = None
    layer.write(state, h_in.tanh()).backward(tensor(DY))
    assert bits(x.grad) == first
    with pytest.raises(RuntimeError, match="the graph of 'mhc_open' was freed by an earlier backward"):
        layer.write(state, tensor(f64(TOKENS, C))).backward(tensor(DY))


def test_checkpoints_around_a_connection_and_around_its_parts() -> None:
    layer, x, y = make(), streams(), tensor(f64(TOKENS, C))
    found = []
    for run in (layer, lambda x: xt.checkpoint(layer, x)):
        layer.zero_grad()
        x.grad = None
        out = run(x.requires_grad_())
        out.backward(tensor(DY))
        found.append([bits(out), bits(x.grad), *(bits(p.grad) for p in layer.parameters())])
    assert found[0] == found[1]
    with pytest.raises(TypeError, match="forward must return a tensor or a tuple of tensors"):
        xt.checkpoint(layer.read, x)
    h_in, state = layer.read(x)  # read outside, written inside: its second run walks through the read, and only once
    with pytest.raises(RuntimeError, match="the graph of 'mhc_open' was freed by an earlier backward"):
        xt.checkpoint(layer.write, state, h_in.tanh()).backward(tensor(DY))

    def of_another_y():
        _, state = layer.read(x)
        return [xt.checkpoint(layer.write, state, y)]

    assert difference_quotients(of_another_y, [x, y, *layer.parameters()], [DY]) <= 1e-7


# ---- recomputed streams --------------------------------------------------------------------------------------------------------------


class Scaled(nn.HyperConnection):
    def forward(self, x, *args, **options):
        return super().forward(x, *args, **options) * 2.0


def results(run, layers, x):
    x.grad = None
    for layer in layers:
        layer.zero_grad()
    out = run(layers, x)
    (out * out).sum().backward()
    return [bits(out), bits(x.grad), *(bits(p.grad) for layer in layers for p in layer.parameters())]


def one_after_another(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def test_recomputed_streams_call_a_connection_that_is_not_stock() -> None:
    x = xt.randn(TOKENS, N, C).requires_grad_()
    layers = [nn.HyperConnection(C, N, nn.Linear(C, C)) for _ in range(3)]
    want = results(one_after_another, layers, x)
    assert results(nn.recompute_streams, layers, x) == want

    seen = []
    hook = layers[1].register_forward_hook(lambda module, args, out: seen.append(module))
    assert results(nn.recompute_streams, layers, x) == want
    assert seen == [layers[1]]
    hook.remove()
    assert results(nn.recompute_streams, layers, x) == want and len(seen) == 1

    layers[1] = Scaled(C, N, nn.Linear(C, C))
    assert results(nn.recompute_streams, layers, x) == results(one_after_another, layers, x)
    layers[1].forward = lambda x: Scaled.forward(layers[1], x) * 3.0
    assert results(nn.recompute_streams, layers, x) == results(one_after_another, layers, x)


def test_recomputed_pairs_call_a_connection_that_is_not_stock() -> None:
    x = xt.randn(TOKENS, N, C).requires_grad_()
    layers, sublayers = [nn.HyperConnection(C, N) for _ in range(2)], [nn.Linear(C, C), nn.SiLU()]

    def recomputed(layers, x):
        return nn.recompute_streams(zip(layers, sublayers), x)

    want = results(recomputed, layers, x)
    layers[0].register_forward_hook(lambda *_: None)
    assert results(recomputed, layers, x) == want


def test_a_call_may_bring_its_sublayer() -> None:
    layer, x = nn.HyperConnection(C, N, nn.SiLU()), xt.randn(TOKENS, N, C)
    h_in, state = layer.read(x)
    assert bits(layer(x, sublayer=xt.tanh)) == bits(layer.write(state, h_in.tanh()))
    assert bits(layer(x)) == bits(layer.write(state, F.silu(h_in)))
