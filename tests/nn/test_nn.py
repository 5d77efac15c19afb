"""Modules, the functional wrappers, creation functions, and the checks of xtrain.testing."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import nn, testing
from xtrain.optable.references import rms_norm


class Net(nn.Module):
    def __init__(self) -> None:
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6, bias=False), nn.RMSNorm(6)])
        self.shared = self.first
        self.register_buffer("steps", xt.zeros(1))
        self.register_buffer("scratch", xt.zeros(2), persistent=False)

    def forward(self, x):
        x = F.silu(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x


# ---- modules ------------------------------------------------------------------------------------------------------------


def test_names_and_parameters() -> None:
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    assert names == ["first.weight", "first.bias", "blocks.0.weight", "blocks.1.weight"]
    assert len(list(net.parameters())) == 4
    assert {"first.weight", "shared.weight", "steps"} >= {"first.weight", "steps"}
    assert "steps" in net.state_dict()
    assert "scratch" not in net.state_dict()
    assert all(p.requires_grad and p.is_leaf for p in net.parameters())
    assert [name for name, _ in net.named_children()] == ["first", "blocks"]
    assert "Linear(in_features=4" in repr(net)


def test_state_dict_round_trip() -> None:
    a, b = Net(), Net()
    b.load_state_dict(a.state_dict())
    x = xt.randn(3, 4)
    assert a(x).tolist() == b(x).tolist()
    state = a.state_dict()
    state["first.weight"].fill_(7.0)
    assert a.first.weight[0, 0].item() == 7.0, "state_dict shares memory"
    assert b.first.weight[0, 0].item() != 7.0


def test_load_state_dict_changes_nothing_when_anything_is_wrong() -> None:
    net = Net()
    before = {k: v.clone().tolist() for k, v in net.state_dict().items()}
    good = Net().state_dict()
    for change, kind, text in [
        (lambda s: s.pop("first.bias"), ValueError, "missing first.bias"),
        (lambda s: s.update(extra=xt.zeros(1)), ValueError, "unexpected extra"),
        (lambda s: s.update({"first.bias": xt.zeros(7)}), ValueError, r"first.bias must have shape \(6,\), got \(7,\)"),
        (lambda s: s.update({"first.bias": 3}), TypeError, "first.bias must be a Tensor, got int"),
    ]:
        state = dict(good)
        change(state)
        with pytest.raises(kind, match=text):
            net.load_state_dict(state)
        assert {k: v.tolist() for k, v in net.state_dict().items()} == before
    result = net.load_state_dict({"first.bias": xt.ones(6)}, strict=False)
    assert "first.weight" in result.missing_keys
    assert net.first.bias.tolist() == [1] * 6


def test_train_eval_zero_grad_freeze() -> None:
    net = Net()
    assert net.training
    net.eval()
    assert not any(m.training for m in net.modules())
    net.train()
    net(xt.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    net.requires_grad_(False)
    assert not net(xt.randn(2, 4)).requires_grad


def test_dtype_conversion_keeps_sharing() -> None:
    net = Net().to(xt.bfloat16)
    assert {p.dtype for p in net.parameters()} == {xt.bfloat16}
    assert net.steps.dtype is xt.bfloat16
    assert net.shared.weight is net.first.weight
    assert net(xt.randn(2, 4).to(xt.bfloat16)).dtype is xt.bfloat16
    with pytest.raises(TypeError, match="floating"):
        net.to(xt.int64)


def test_forward_hooks() -> None:
    net, seen = Net(), []
    handle = net.first.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape)))
    net(xt.randn(2, 4))
    handle.remove()
    net(xt.randn(2, 4))
    assert seen == [(2, 6)]


def test_assigning() -> None:
    net = Net()
    with pytest.raises(TypeError, match="must be replaced by a Parameter"):
        net.first.weight = xt.zeros(6, 4)
    net.first.weight = nn.Parameter(xt.zeros(6, 4))
    assert net.state_dict()["first.weight"].tolist() == [[0.0] * 4] * 6
    with pytest.raises(NotImplementedError):
        nn.Module()(1)


def test_deepcopy_is_independent() -> None:
    a = Net()
    b = copy.deepcopy(a)
    with xt.no_grad():
        b.first.weight.fill_(3.0)
    assert a.first.weight[0, 0].item() != 3.0
    assert b.shared.weight is b.first.weight


def test_parameters_share_memory_with_their_data() -> None:
    data = xt.zeros(3)
    p = nn.Parameter(data)
    data[0] = 5.0
    assert p.tolist() == [5, 0, 0]
    assert isinstance(p, xt.Tensor)
    assert type(p * 1) is xt.Tensor
    assert repr(p).startswith("Parameter")


def test_initial_values() -> None:
    xt.manual_seed(0)
    layer = nn.Linear(400, 300)
    w, b = layer.weight.detach().cpu().numpy(), layer.bias.detach().cpu().numpy()
    bound = 1 / math.sqrt(400)
    for a in (w, b):
        assert np.abs(a).max() <= bound
    assert abs(w.std() - bound / math.sqrt(3)) < 0.01 * bound
    table = nn.Embedding(300, 200).weight.detach().cpu().numpy()
    assert abs(table.std() - 1) < 0.02
    assert (nn.RMSNorm(5).weight.detach().cpu().numpy() == 1).all()


def test_layers_against_numpy() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4))
    layer = nn.Linear(4, 5, dtype=xt.float64)
    w, b = layer.weight.detach().cpu().numpy(), layer.bias.detach().cpu().numpy()
    assert np.allclose(layer(xt.tensor(x)).detach().cpu().numpy(), x @ w.T + b, rtol=1e-14)
    norm = nn.RMSNorm(4, eps=1e-3, dtype=xt.float64)
    assert np.allclose(norm(xt.tensor(x)).detach().cpu().numpy(), rms_norm(x, np.ones(4), 1e-3), rtol=1e-14)
    table = nn.Embedding(7, 3)
    ids = np.array([[0, 6], [3, 3]])
    assert np.array_equal(table(xt.tensor(ids)).detach().cpu().numpy(), table.weight.detach().cpu().numpy()[ids])
    both = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.GELU())
    assert both(xt.randn(2, 4)).shape == (2, 4)


def test_layer_errors() -> None:
    with pytest.raises(
        ValueError, match=r"linear: the last dim of input must be 4, as that of weight \(5, 4\) is, got shape \(2, 3\)"
    ):
        nn.Linear(4, 5)(xt.randn(2, 3))
    with pytest.raises(IndexError, match=r"embedding: id must be in \[0, 7\), got 9"):
        nn.Embedding(7, 3)(xt.tensor([9])).tolist()


def test_dropout() -> None:
    xt.manual_seed(1)
    x = xt.ones(100_000, requires_grad=True)
    y = nn.Dropout(0.25)(x)
    kept = y.detach().cpu().numpy() != 0
    assert abs(kept.mean() - 0.75) < 0.01
    assert np.allclose(y.detach().cpu().numpy()[kept], 1 / 0.75)
    y.sum().backward()
    assert np.array_equal(x.grad.cpu().numpy(), y.detach().cpu().numpy())
    assert nn.Dropout(0.25).eval()(x) is x
    for p in (-0.1, 1.5):
        with pytest.raises(ValueError, match="dropout: p must"):
            F.dropout(x, p)


def test_functional_refuses_what_it_cannot_do() -> None:
    q = xt.randn(1, 1, 2, 2)
    with pytest.raises(ValueError, match="attn_mask must be None with is_causal, got both"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=xt.zeros(2, 2), is_causal=True)
    with pytest.raises(NotImplementedError, match="weight"):
        F.cross_entropy(xt.randn(2, 3), xt.tensor([0, 1]), xt.ones(3))
    with pytest.raises(ValueError, match="normalized_shape"):
        F.rms_norm(xt.randn(2, 3), (4,))


def test_generation_options() -> None:
    from xtrain.models import Qwen3, Qwen3Config

    xt.manual_seed(0)
    sizes = dict(vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8)
    model = Qwen3(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16))
    ids = xt.tensor([[1, 2, 3]])
    assert model.generate(ids, 5, seed=3).tolist() == model.generate(ids, 5, seed=3).tolist()
    assert model.generate([1, 2, 3], 5).shape == (8,)
    assert model.generate(ids, 0).tolist() == [[1, 2, 3]]
    assert model.generate(ids, 4, top_k=1, seed=1).tolist() == model.generate(ids, 4, temperature=0.0).tolist()
    assert model.generate(ids, 40, seed=0).shape == (1, 43), "longer than max_position_embeddings"
    greedy = model.generate(ids, 5, temperature=0.0).tolist()[0]
    assert len(model.generate(ids, 20, temperature=0.0, eos=greedy[4]).tolist()[0]) <= 5
    for bad, text in [
        (dict(max_new_tokens=-1), "max_new_tokens"),
        (dict(max_new_tokens=10**18), r"max_new_tokens must be an integer in \[0, 10000000\], got 1000000000000000000"),
        (dict(max_new_tokens=3, temperature=-1.0), "temperature"),
        (dict(max_new_tokens=3, top_k=0), "top_k"),
        (dict(max_new_tokens=3, top_p=0.0), "top_p"),
    ]:
        with pytest.raises(ValueError, match=text):
            model.generate(ids, **bad)
    with pytest.raises(ValueError, match="ids"):
        model.generate(xt.zeros(0, dtype=xt.int64), 3)


# ---- xtrain.testing ------------------------------------------------------------------------------------------------------


def test_assert_close_lets_nothing_bad_pass() -> None:
    x = np.array([1.0, 2.0, 3.0])
    testing.assert_close(xt.tensor(x), x)
    testing.assert_close(xt.tensor([1, 2]), np.array([1, 2]))
    for bad in (x + 1e-3, [1.0, np.nan, 3.0], [1.0, np.inf, 3.0], x[:2], x[None]):
        with pytest.raises(AssertionError):
            testing.assert_close(np.asarray(bad), x)
        with pytest.raises(AssertionError):
            testing.assert_close(x, np.asarray(bad))
    with pytest.raises(AssertionError):
        testing.assert_close(np.array([np.nan]), np.array([np.nan]))
    testing.assert_close(np.array([np.inf]), np.array([np.inf]))
    with pytest.raises(AssertionError, match=r"worst at \(1,\): got .*5"):
        testing.assert_close(np.array([1.0, 5.0]), np.array([1.0, 2.0]), atol=0.1)


def test_grad_check_finds_wrong_gradients() -> None:
    class Wrong(xt.Function):
        factor = 1.0

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return dy * x * x * (3 * Wrong.factor)

    for dtype in (xt.float64, xt.float32):
        x = xt.tensor(np.array([0.5, -1.0, 2.0])).to(dtype).requires_grad_()
        for factor, fine in [(1.0, True), (1.05, False), (math.nan, False), (math.inf, False), (0.0, False)]:
            Wrong.factor = factor
            result = testing.grad_check(Wrong.apply, [x])
            assert result.ok is fine, (dtype, factor, result)
    assert testing.grad_check(
        lambda a, b: (a @ b).softmax(-1),
        [xt.tensor(np.ones((2, 3)), requires_grad=True), xt.tensor(np.eye(3), requires_grad=True)],
    )


def test_information() -> None:
    from xtrain import _C

    info = _C.build_info()
    assert info["version"] == xt.__version__
    assert all(isinstance(v, str) and v for k, v in info.items() if k != "flags")
    assert isinstance(_C.cpu_features(), list)
