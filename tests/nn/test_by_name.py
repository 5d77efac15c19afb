"""ModuleDict, Identity, losses, pre-hooks and nn.utils: what models of other libraries are written with."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import nn


class Doubler(nn.Module):
    def forward(self, x: xt.Tensor, scale: float = 2.0) -> xt.Tensor:
        return x * scale


def test_module_dict() -> None:
    table, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    blocks = nn.ModuleDict(dict(table=table, head=head))
    assert blocks["table"] is blocks.table is table and list(blocks) == ["table", "head"] and len(blocks) == 2
    assert "head" in blocks and "training" not in blocks and "keys" not in blocks
    assert list(blocks.state_dict()) == ["table.weight", "head.weight"]
    blocks.head.weight = blocks["table"].weight
    assert [name for name, _ in blocks.named_parameters()] == ["table.weight"]
    blocks.update([("act", nn.GELU()), ("table", nn.Identity())])
    assert list(blocks.keys()) == ["table", "head", "act"] and isinstance(blocks["table"], nn.Identity)
    assert [module for _, module in blocks.items()] == list(blocks.values())
    assert blocks.pop("act").approximate == "none" and "act" not in blocks
    del blocks["table"]
    assert list(blocks) == ["head"]
    blocks.clear()
    assert not len(blocks) and repr(blocks) == "ModuleDict()"


def test_what_a_module_dict_refuses() -> None:
    blocks = nn.ModuleDict()
    for name in ("", "a.b", "keys", "training", 3):
        with pytest.raises(ValueError, match=f"ModuleDict: a name must be .*, got {name!r}"):
            blocks[name] = nn.Identity()
    with pytest.raises(TypeError, match="ModuleDict: weight must be a Module, got Parameter"):
        blocks["weight"] = nn.Parameter(xt.zeros(1))
    for call in (lambda: blocks["no"], lambda: blocks.pop("no"), lambda: blocks.__delitem__("no")):
        with pytest.raises(KeyError, match="no"):
            call()
    assert not len(blocks)


def test_identity_forgets_its_arguments() -> None:
    x = xt.randn(2, 3)
    layer = nn.Identity(54, unused=True)
    assert layer(x) is x and not list(layer.parameters()) and repr(layer) == "Identity()"
    assert nn.ReLU()(xt.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_pre_hooks_come_before_the_forward() -> None:
    net, seen = Doubler(), []
    first = net.register_forward_pre_hook(lambda module, args: seen.append((module, len(args))))
    second = net.register_forward_pre_hook(lambda module, args: args[0] + 1)  # one argument, not in a tuple
    third = net.register_forward_pre_hook(lambda module, args: (args[0] * 10, 3.0))
    assert net(xt.tensor([1.0])).tolist() == [60.0]
    assert seen == [(net, 1)]
    third.remove()
    third.remove()
    assert net(xt.tensor([1.0]), scale=5.0).tolist() == [10.0]
    first.remove()
    second.remove()
    assert net(xt.tensor([1.0])).tolist() == [2.0] and len(seen) == 2


def test_a_pre_hook_of_a_member_is_called_by_a_model_with_fused_paths() -> None:
    model = xt.models.Qwen3(xt.models.Qwen3Config(vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                                                  num_attention_heads=2, num_key_value_heads=1, head_dim=4))  # fmt: skip
    called = []
    member = model.model.layers[0].self_attn.q_proj
    handle = member.register_forward_pre_hook(lambda module, args: called.append(module))
    model.loss(xt.randint(0, 11, (2, 5)), xt.randint(0, 11, (2, 5)))
    handle.remove()
    model.loss(xt.randint(0, 11, (2, 5)), xt.randint(0, 11, (2, 5)))
    assert called == [member]


def test_parameters_as_a_vector() -> None:
    layer = nn.Linear(3, 2)
    vector = nn.utils.parameters_to_vector(layer.parameters())
    assert tuple(vector.shape) == (8,) and vector.requires_grad
    (vector * xt.arange(8).float()).sum().backward()
    assert layer.weight.grad.tolist() == [[0, 1, 2], [3, 4, 5]] and layer.bias.grad.tolist() == [6, 7]
    nn.utils.vector_to_parameters(xt.arange(8).float(), layer.parameters())
    assert layer.weight.tolist() == [[0, 1, 2], [3, 4, 5]] and layer.bias.tolist() == [6, 7] and layer.bias.is_leaf
    with pytest.raises(ValueError, match=r"vector_to_parameters: vec must have shape \(8,\), got \(9,\)"):
        nn.utils.vector_to_parameters(xt.zeros(9), layer.parameters())
    with pytest.raises(ValueError, match="parameters_to_vector: parameters must hold at least one tensor, got none"):
        nn.utils.parameters_to_vector([])
    assert layer.bias.tolist() == [6, 7]


def test_values_of_gradients_are_clipped() -> None:
    p, q = nn.Parameter(xt.zeros(3)), nn.Parameter(xt.zeros(2))
    p.grad = xt.tensor([-3.0, 0.25, 3.0])
    nn.utils.clip_grad_value_([p, q], 0.5)
    assert p.grad.tolist() == [-0.5, 0.25, 0.5] and q.grad is None
    nn.utils.clip_grad_value_(p, 0.25)
    assert p.grad.tolist() == [-0.25, 0.25, 0.25]
    for bad in (-1, float("nan")):
        with pytest.raises(ValueError, match=f"clip_grad_value_: clip_value must be a number of at least 0, got {bad}"):
            nn.utils.clip_grad_value_(p, bad)
    assert nn.utils.clip_grad_norm_ is xt.optim.clip_grad_norm_


def test_inference_mode() -> None:
    x = xt.ones(2, requires_grad=True)

    @xt.inference_mode()
    def called(y: xt.Tensor) -> xt.Tensor:
        return y * 2

    @xt.inference_mode
    def bare(y: xt.Tensor) -> xt.Tensor:
        return y * 2

    with xt.inference_mode():
        assert not (x * 2).requires_grad
        with xt.inference_mode(False):
            assert (x * 2).requires_grad
    assert not called(x).requires_grad and not bare(x).requires_grad and xt.is_grad_enabled()


# ---- the loss


def rows_loss(x: np.ndarray, target: np.ndarray, ignore: int, smoothing: float) -> np.ndarray:
    """PyTorch's definition: the target's distribution is (1 - s) onehot + s / V."""
    shifted = x - x.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    kept = target != ignore
    picked = logs[np.arange(len(x)), np.where(kept, target, 0)]
    return np.where(kept, -(1 - smoothing) * picked - smoothing * logs.mean(-1), 0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore", [-100, 2])
def test_label_smoothing(smoothing: float, ignore: int) -> None:
    rng = np.random.default_rng(3)
    x, target = rng.standard_normal((7, 5)) * 3, np.array([0, 4, 2, 2, 1, 3, 2])
    want = rows_loss(x, target, ignore, smoothing)
    for reduction, expected in (("none", want), ("sum", want.sum()), ("mean", want.sum() / (target != ignore).sum())):
        loss = nn.CrossEntropyLoss(ignore_index=ignore, reduction=reduction, label_smoothing=smoothing)
        got = loss(xt.tensor(x), xt.tensor(target))
        np.testing.assert_allclose(got.cpu().numpy(), expected, rtol=1e-12, atol=1e-12)
    check = xt.testing.grad_check(
        lambda t: F.cross_entropy(t, xt.tensor(target), None, ignore, label_smoothing=smoothing),
        [xt.tensor(x, requires_grad=True)],
    )
    assert check.ok
    short = xt.tensor(x).bfloat16()  # smoothed in float32: as of float64 of the same values
    got = [
        F.cross_entropy(t, xt.tensor(target), None, ignore, label_smoothing=smoothing) for t in (short, short.double())
    ]
    assert got[0].dtype is xt.float32 and abs(got[0].item() - got[1].item()) < 1e-6 * got[1].item()


def test_what_the_loss_refuses() -> None:
    x, target = xt.zeros(2, 3), xt.zeros(2, dtype=xt.int64)
    for smoothing in (1.5, -0.5):
        with pytest.raises(ValueError, match=rf"cross_entropy: label_smoothing must be in \[0, 1\], got {smoothing}"):
            F.cross_entropy(x, target, label_smoothing=smoothing)
    with pytest.raises(ValueError, match="cross_entropy: reduction must be .*, got 'all'"):
        F.cross_entropy(x, target, reduction="all", label_smoothing=0.5)
    with pytest.raises(NotImplementedError, match="CrossEntropyLoss: weight must be None, got Tensor"):
        nn.CrossEntropyLoss(xt.ones(3))
    assert repr(nn.CrossEntropyLoss(label_smoothing=0.1)) == (
        "CrossEntropyLoss(ignore_index=-100, reduction='mean', label_smoothing=0.1)"
    )
    ignored = F.cross_entropy(x, target - 100, label_smoothing=0.5)
    assert np.isnan(ignored.item()), "a mean over no row, as without smoothing"
