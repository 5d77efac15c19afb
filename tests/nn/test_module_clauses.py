"""What the docstrings of modules, layers, containers and starting values promise, a test for each clause."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import nn
from xtrain.nn.module import pack

pytestmark = pytest.mark.on_cpu


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3, bias=False), nn.SiLU()))


# ---- modules


def test_a_copy_of_a_parameter_is_frozen_where_it_was() -> None:
    for wanted in (True, False):
        assert copy.deepcopy(nn.Parameter(xt.ones(2), wanted)).requires_grad is wanted
        layer = nn.Linear(2, 2)
        layer.requires_grad_(wanted)
        assert [p.requires_grad for p in copy.deepcopy(layer).parameters()] == [wanted] * 2
        assert [p.requires_grad for p in layer.double().parameters()] == [wanted] * 2


def test_copies_of_two_modules_share_what_they_shared() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    x, y = copy.deepcopy([a, b])
    assert x.weight is y.weight and x.weight is not a.weight


def test_modules_come_parents_first_each_once() -> None:
    net = small()
    net.add_module("again", net[0])
    assert [name for name, _ in net.named_modules()] == ["", "0", "1", "1.0", "1.1"]
    assert list(net.modules()) == [module for _, module in net.named_modules()]
    assert [name for name, _ in net.named_children()] == ["0", "1"] and list(net.children()) == [net[0], net[1]]
    assert [name for name, _ in net.named_modules(prefix="model")][:2] == ["model", "model.0"]


def test_parameters_of_a_module_alone() -> None:
    net = small()
    net.own = nn.Parameter(xt.ones(1))
    assert [name for name, _ in net.named_parameters(recurse=False)] == ["own"]
    assert [name for name, _ in net.named_parameters("model", recurse=False)] == ["model.own"]
    assert [name for name, _ in net.named_parameters("model")][:2] == ["model.own", "model.0.weight"]
    assert len(list(net.parameters(recurse=False))) == 1 and len(list(net.parameters())) == 4


def test_states_with_a_prefix() -> None:
    """As PyTorch writes it, with its dot."""
    assert set(nn.Linear(1, 1).state_dict(prefix="head.")) == {"head.weight", "head.bias"}


def test_tensors_of_a_state_are_values() -> None:
    """They share memory, need no gradient and are not the parameters."""
    layer = nn.Linear(2, 2)
    state = layer.state_dict()
    assert not any(tensor.requires_grad for tensor in state.values())
    state["weight"].fill_(3.0)
    assert layer.weight.tolist() == [[3.0, 3.0]] * 2


def test_names_of_buffers() -> None:
    layer = nn.Linear(1, 1)
    for name in ("", "a.b", "weight", "forward", 3):
        with pytest.raises(ValueError, match="register_buffer: name must be a new name without a dot, got"):
            layer.register_buffer(name, xt.ones(1))
    with pytest.raises(TypeError, match="register_buffer: tensor must be a Tensor or None, got list"):
        layer.register_buffer("mean", [1.0])
    layer.register_buffer("mean", None)
    assert layer.mean is None and "mean" not in layer.state_dict()
    layer.register_buffer("mean", xt.ones(2))  # a buffer may be registered again
    assert [name for name, _ in layer.named_buffers()] == ["mean"] and "mean" in layer.state_dict()


def test_what_is_registered_has_its_type() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="register_parameter: parameter must be a Parameter or None, got Tensor"):
        layer.register_parameter("scale", xt.ones(1))
    with pytest.raises(TypeError, match="add_module: module must be a Module or None, got Tensor"):
        layer.add_module("child", xt.ones(1))
    layer.register_parameter("scale", nn.Parameter(xt.ones(1)))
    layer.add_module("child", nn.SiLU())
    assert "scale" in layer.state_dict() and [name for name, _ in layer.named_children()] == ["child"]


def test_hooks_get_what_the_forward_got() -> None:
    """All of its arguments, and the result of the hook before."""

    class Sum(nn.Module):
        def forward(self, a, b):
            return a + b

    module, seen = Sum(), []
    one, two = xt.ones(1), xt.full((1,), 2.0)
    module.register_forward_hook(lambda m, args, result: seen.append((m, args, result.item())) or result * 10)
    module.register_forward_hook(lambda m, args, result: seen.append((m, args, result.item())))
    assert module(one, two).item() == 30.0
    assert seen == [(module, (one, two), 3.0), (module, (one, two), 30.0)]


def test_a_hook_may_remove_itself() -> None:
    """The others of that call are called all the same, and a second remove does nothing."""
    layer, seen = nn.SiLU(), []
    first = layer.register_forward_hook(lambda *_: (seen.append(1), first.remove())[0])
    layer.register_forward_hook(lambda *_: seen.append(2))
    layer(xt.ones(1))
    layer(xt.ones(1))
    first.remove()
    assert seen == [1, 2, 2]


def test_hooks_of_a_copy_are_its_own() -> None:
    layer, seen = nn.SiLU(), []
    layer.register_forward_hook(lambda *_: seen.append("both"))
    other = copy.copy(layer)
    other.register_forward_hook(lambda *_: seen.append("other"))
    layer(xt.ones(1))
    assert seen == ["both"]


def test_gradients_are_dropped_or_filled() -> None:
    layer = nn.Linear(2, 1)
    layer(xt.ones(1, 2)).sum().backward()
    before = layer.weight.grad
    layer.zero_grad(set_to_none=False)
    assert layer.weight.grad.tolist() == [[0.0, 0.0]] and before.tolist() == [[0.0, 0.0]]
    layer.zero_grad()
    assert layer.weight.grad is None


def test_methods_return_their_module() -> None:
    net = small()
    assert net.train() is net and net.eval() is net and net.requires_grad_(False) is net and net.to(xt.float64) is net
    assert net.apply(lambda m: None) is net and net.train(1).training is True


def test_conversions_of_a_module() -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("count", xt.tensor([3]))
    layer.register_buffer("mean", xt.ones(2))
    for convert, dtype in (
        ("double", xt.float64),
        ("half", xt.float16),
        ("bfloat16", xt.bfloat16),
        ("float", xt.float32),
    ):
        getattr(layer, convert)()
        assert layer.weight.dtype is dtype and layer.mean.dtype is dtype and layer.count.dtype is xt.int64
    for given, options in (
        ((xt.float64,), {}),
        (("cpu", xt.float64), {}),
        ((xt.device("cpu"),), {"dtype": xt.float64}),
    ):
        assert nn.Linear(1, 1).to(*given, **options).weight.dtype is xt.float64
    for junk in (3, None, "cuda:x"):
        with pytest.raises((TypeError, ValueError)):
            layer.to(junk)
    with pytest.raises(TypeError, match="to: arguments must be a dtype or a device, got int"):
        layer.to(3)


def test_a_conversion_to_what_it_is_keeps_parameters_and_gradients() -> None:
    layer = nn.Linear(2, 1)
    layer(xt.ones(1, 2)).sum().backward()
    weight = layer.weight
    assert layer.float().weight is weight and weight.grad is not None
    assert layer.double().weight is not weight and layer.weight.grad is None


def test_equal_neighbours_take_one_line() -> None:
    blocks = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
    assert "(0-2): 3 x Linear(" in repr(blocks)
    net = nn.Module()
    net.a, net.b = nn.SiLU(), nn.SiLU()
    assert repr(net) == "Module(\n  (a): SiLU()\n  (b): SiLU()\n)"


def test_pack_takes_a_name() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    values = a.bias.tolist() + b.bias.tolist()
    pack(a, b, name="bias")
    assert a.bias.adjoins(b.bias) and a.bias.tolist() + b.bias.tolist() == values and not a.weight.adjoins(b.weight)


def test_a_long_list_of_names_is_cut() -> None:
    with pytest.raises(ValueError, match=r"missing .*, .*, .*, .*, .* and 2 more and unexpected none"):
        nn.Sequential(*[nn.RMSNorm(1) for _ in range(7)]).load_state_dict({})


def test_what_load_state_dict_returns() -> None:
    result = nn.Linear(1, 1).load_state_dict({"weight": xt.ones(1, 1), "more": xt.ones(1)}, strict=False)
    assert result.missing_keys == ["bias"] and result.unexpected_keys == ["more"]


def test_values_that_are_loaded_are_cast() -> None:
    layer = nn.Linear(1, 1, bias=False, dtype=xt.bfloat16)
    layer.load_state_dict({"weight": xt.full((1, 1), 1 + 2.0**-6, dtype=xt.float64)})
    assert layer.weight.dtype is xt.bfloat16 and layer.weight.item() == 1 + 2.0**-6


# ---- containers


def test_lists_of_modules() -> None:
    parts = [nn.Linear(1, 1), nn.SiLU(), nn.GELU()]
    modules = nn.ModuleList(parts[:1])
    assert modules.append(parts[1]) is modules and modules.extend(parts[2:]) is modules
    assert list(modules) == parts and len(modules) == 3 and modules[-1] is parts[2]
    assert [name for name, _ in modules.named_children()] == ["0", "1", "2"]
    head = modules[:2]
    assert type(head) is nn.ModuleList and list(head) == parts[:2] and list(modules[::2]) == parts[::2]
    modules[-1] = parts[0]
    assert list(modules)[2] is parts[0] and len(modules) == 3
    with pytest.raises(IndexError):
        modules[3] = parts[0]


def test_a_part_of_a_sequence_can_be_called() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.SiLU(), nn.Linear(3, 1))
    x = xt.rand(4, 2)
    assert type(net[:2]) is nn.Sequential and net[:2](x).tolist() == net[1](net[0](x)).tolist()
    assert net(x).tolist() == net[2](net[:2](x)).tolist()


# ---- layers


def test_layers_have_the_dtype_that_was_asked_for() -> None:
    for layer in (
        nn.Linear(2, 2, dtype=xt.float64),
        nn.Embedding(2, 2, dtype=xt.float64),
        nn.RMSNorm(2, dtype=xt.float64),
        nn.LayerNorm(2, dtype=xt.float64),
    ):
        assert {p.dtype for p in layer.parameters()} == {xt.float64}


def test_a_layer_without_inputs() -> None:
    assert nn.Linear(0, 3).weight.shape == (3, 0) and nn.Linear(0, 3)(xt.zeros(2, 0)).shape == (2, 3)


def test_a_layer_can_start_again() -> None:
    layer, norm, layer_norm = nn.Linear(3, 3), nn.RMSNorm(3), nn.LayerNorm(3)
    with xt.no_grad():
        layer.weight.fill_(9.0)
        layer.bias.fill_(9.0)
        norm.weight.fill_(9.0)
        layer_norm.weight.fill_(9.0)
        layer_norm.bias.fill_(9.0)
    layer.reset_parameters()
    norm.reset_parameters()
    bound = 1 / math.sqrt(3)
    assert np.abs(layer.weight.detach().numpy()).max() <= bound and np.abs(layer.bias.detach().numpy()).max() <= bound
    assert norm.weight.tolist() == [1.0] * 3
    layer_norm.reset_parameters()
    assert layer_norm.weight.tolist() == [1.0] * 3 and layer_norm.bias.tolist() == [0.0] * 3


def rms(x: np.ndarray, eps: float, dims: int = 1) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=tuple(range(-dims, 0)), keepdims=True) + eps)


def test_norms_of_several_dims() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    weight = np.random.default_rng(1).standard_normal((3, 4))
    norm = nn.RMSNorm((3, 4), eps=1e-3, dtype=xt.float64)
    with xt.no_grad():
        norm.weight.copy_(xt.tensor(weight))
    assert np.allclose(norm(xt.tensor(x)).detach().numpy(), rms(x, 1e-3, 2) * weight, rtol=1e-13)
    assert norm.weight.shape == (3, 4) and nn.RMSNorm(4, elementwise_affine=False).weight is None
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \(3, 4\), got \(4, 3\)"):
        F.rms_norm(xt.tensor(x), (3, 4), xt.tensor(weight.T.copy()))
    for shape in ((4, 3), (2, 4), (), (5, 2, 3, 4)):
        with pytest.raises(ValueError, match="rms_norm: input must end in normalized_shape"):
            F.rms_norm(xt.tensor(x), shape)
    for shape in (3, (3,)):
        with pytest.raises(ValueError, match=r"rms_norm: input must end in normalized_shape \(3,\)"):
            F.rms_norm(xt.tensor(x), shape)


def test_layer_norm_of_several_dims() -> None:
    random = np.random.default_rng(0)
    x, weight, bias = random.standard_normal((2, 3, 4)), random.standard_normal((3, 4)), random.standard_normal((3, 4))
    norm = nn.LayerNorm((3, 4), eps=1e-3, dtype=xt.float64)
    assert norm.weight.tolist() == [[1.0] * 4] * 3 and norm.bias.tolist() == [[0.0] * 4] * 3
    with xt.no_grad():
        norm.weight.copy_(xt.tensor(weight))
        norm.bias.copy_(xt.tensor(bias))
    inner = x - x.mean((1, 2), keepdims=True)
    want = inner / np.sqrt(np.square(inner).mean((1, 2), keepdims=True) + 1e-3) * weight + bias
    assert np.allclose(norm(xt.tensor(x)).detach().numpy(), want, rtol=1e-12, atol=1e-14)
    assert [nn.LayerNorm(4, bias=False).bias, nn.LayerNorm(4, elementwise_affine=False).weight] == [None, None]
    assert nn.LayerNorm(4, elementwise_affine=False).bias is None and nn.LayerNorm(4, bias=False).weight is not None
    assert repr(nn.LayerNorm(4, bias=False)) == "LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=False)"
    for name, vectors in (("weight", (weight.T, None)), ("bias", (None, bias.T))):
        with pytest.raises(ValueError, match=rf"layer_norm: {name} must have shape \(3, 4\), got \(4, 3\)"):
            F.layer_norm(xt.tensor(x), (3, 4), *(None if v is None else xt.tensor(v.copy()) for v in vectors))
    for shape in ((4, 3), (2, 4), (), (5, 2, 3, 4), 3, (3,)):
        with pytest.raises(ValueError, match=r"layer_norm: input must end in normalized_shape \("):
            F.layer_norm(xt.tensor(x), shape)
    with pytest.raises(TypeError, match=r"layer_norm: weight must .*float64.*float32"):
        nn.LayerNorm(4)(xt.tensor(x))


@pytest.mark.parametrize(
    "name,epsilon", [("float64", 2.0**-52), ("float32", 2.0**-23), ("bfloat16", 2.0**-7), ("float16", 2.0**-10)]
)
def test_the_default_eps_is_the_epsilon_of_the_dtype(name: str, epsilon: float) -> None:
    """x of the size of its root: half of the result is eps."""
    dtype = getattr(xt, name)
    x = xt.full((1, 4), 2.0 ** (round(math.log2(epsilon)) // 2), dtype=dtype)
    value = x[0, 0].item()
    want = value / math.sqrt(value * value + epsilon)
    summed, normed = F.add_rms_norm(x, xt.zeros(1, 4, dtype=dtype))
    for got in (F.rms_norm(x, 4), F.rms_norm(x, (1, 4)), nn.RMSNorm(4, dtype=dtype)(x), normed):
        assert abs(got[0, 0].item() - want) < 0.01 * want
    assert summed.tolist() == x.tolist()


def test_the_short_form_of_a_norm() -> None:
    """rms_norm(x, weight, eps)."""
    x, weight = xt.full((1, 2), 0.5), xt.full((2,), 3.0)
    assert abs(F.rms_norm(x, weight, 0.75)[0, 0].item() - 1.5) < 1e-6
    assert F.rms_norm(x, weight, 0.75).tolist() == F.rms_norm(x, (2,), weight, 0.75).tolist()
    assert abs(F.rms_norm(x, weight)[0, 0].item() - 3.0) < 1e-5


def test_activations_as_modules() -> None:
    x = xt.tensor([-1.0, 0.5, 2.0])
    assert nn.SiLU()(x).tolist() == F.silu(x).tolist() != F.gelu(x).tolist()
    assert nn.GELU("tanh")(x).tolist() == F.gelu(x, "tanh").tolist() != F.gelu(x).tolist()
    assert nn.GELU()(x).tolist() == F.gelu(x).tolist()
    with pytest.raises(ValueError, match="gelu"):
        nn.GELU("tan")(x)


# ---- functions that are made of others


def test_log_softmax() -> None:
    """Shifted by the maximum of its own row, along any dim, and for 16 bits rounded once."""
    x = np.array([[1e4, 0.0, 1e4], [3.0, 1.0, 2.0]])
    want = x - x.max(1, keepdims=True)
    want = want - np.log(np.exp(want).sum(1, keepdims=True))
    assert np.allclose(F.log_softmax(xt.tensor(x)).numpy(), want, rtol=1e-14)
    assert np.allclose(F.log_softmax(xt.tensor(x.T.copy()), 0).numpy(), want.T, rtol=1e-14)
    row = np.linspace(0, 8, 50, dtype=np.float32)
    for dtype in (xt.bfloat16, xt.float16):
        t = xt.tensor(row).to(dtype)
        got, exact = F.log_softmax(t), F.log_softmax(t.double())
        assert got.dtype is dtype and got.float().tolist() == exact.to(dtype).float().tolist()


def test_what_attention_and_losses_refuse() -> None:
    q = xt.rand(1, 1, 2, 2)
    with pytest.raises(ValueError, match=r"dropout: p must be in \[0, 1\], got 1\.1"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=1.1)


def test_dropout_at_its_ends() -> None:
    x = xt.ones(4, requires_grad=True)
    assert F.dropout(x, 0.0) is x and F.dropout(x, 1.0, training=False) is x
    y = F.dropout(x, 1.0)
    assert y.tolist() == nn.Dropout(1.0)(x).tolist() == [0.0] * 4
    y.sum().backward()
    assert x.grad.tolist() == [0.0] * 4
    with pytest.raises(ValueError, match=r"Dropout: p must be in \[0, 1\], got 1\.5"):
        nn.Dropout(1.5)


def test_the_mask_of_dropout() -> None:
    """0 with probability p exactly: where the uniform number of the element is less than p; the same for every dtype."""
    masks = []
    for name in ("float32", "float64", "bfloat16", "float16"):
        xt.manual_seed(5)
        masks.append(F.dropout(xt.ones(1000, dtype=getattr(xt, name)), 0.5).float().tolist())
    assert all(mask == masks[0] for mask in masks) and set(masks[0]) == {0.0, 2.0}
    xt.manual_seed(5)
    u = xt.rand(1000).numpy()
    p = float(u[17])  # a number that is drawn: it is not less than itself
    xt.manual_seed(5)
    assert np.array_equal(F.dropout(xt.ones(1000), p).numpy() != 0, u >= np.float32(p)) and u[17] == np.float32(p)


# ---- starting values


def test_starting_values_return_their_tensor() -> None:
    for fill in (
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.zeros_,
        nn.init.ones_,
        nn.init.kaiming_uniform_,
        lambda t: nn.init.constant_(t, 2.0),
    ):
        tensor = xt.zeros(2, 2)
        assert fill(tensor) is tensor


def test_starting_values_have_their_mean_and_deviation() -> None:
    values = nn.init.normal_(xt.empty(100, 100), 3.0, 0.5).numpy()
    assert abs(values.mean() - 3.0) < 0.02 and abs(values.std() - 0.5) < 0.02
    values = nn.init.uniform_(xt.empty(100, 100), 2.0, 4.0).numpy()
    assert values.min() >= 2.0 and values.max() < 4.0 and abs(values.mean() - 3.0) < 0.05


def test_kaiming_counts_all_inputs_of_an_output() -> None:
    values = np.abs(nn.init.kaiming_uniform_(xt.empty(4, 8, 100)).numpy())
    assert 0.95 < values.max() / math.sqrt(6 / 800) <= 1
    with pytest.raises(ValueError, match="kaiming_uniform_: tensor must have at least 2 dims, got 1"):
        nn.init.kaiming_uniform_(xt.zeros(3))
    with pytest.raises(TypeError):
        nn.init.normal_(xt.zeros(3, dtype=xt.int64))


@pytest.mark.parametrize("value", [None, 8.0])
def test_normalized_shape_is_a_size_or_several(value: object) -> None:
    x = xt.ones((2, 8))
    calls = {
        "rms_norm": lambda shape: F.rms_norm(x, shape),
        "layer_norm": lambda shape: F.layer_norm(x, shape),
        "RMSNorm": lambda shape: nn.RMSNorm(shape)(x),
        "LayerNorm": lambda shape: nn.LayerNorm(shape)(x),
    }
    for name, call in calls.items():
        assert call(np.int64(8)).tolist() == call((8,)).tolist()
        kind = type(value).__name__
        with pytest.raises(
            TypeError, match=f"^{name}: normalized_shape must be an int or a tuple of ints, got {kind}$"
        ):
            call(value)
