"""first_divergence with a PyTorch module as the reference: a healthy model passes, a planted fault is named by module."""

from __future__ import annotations

import pytest
import torch
from torch_qwen3 import pair

import xtrain as xt
import xtrain.functional as F
from xtrain.testing import first_divergence

pytestmark = pytest.mark.on_cpu


class WrongSwiglu(xt.Function):
    """silu(gate) * up, whose backward forgets a factor in the branch of the gate."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        s = xt.sigmoid(gate)
        return dy * s * (1 + gate * (1 - s)), dy * F.silu(gate)  # dgate lacks * up


def diverge(ours, theirs, ids, targets, **options):
    x, y = xt.tensor(ids), xt.tensor(targets)
    a, b = torch.from_numpy(ids), torch.from_numpy(targets)
    return first_divergence(lambda m: m.loss(x, y), ours, theirs, reference_run=lambda m: m.loss(a, b), **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_model(dtype, tied):
    ours, theirs, ids, targets = pair("2x4", tied)
    if dtype == "bfloat16":  # both hold the same bfloat16 values; PyTorch computes in float32
        ours = ours.to(xt.bfloat16)
        with torch.no_grad():
            for p in theirs.parameters():
                p.copy_(p.bfloat16())
    found = diverge(ours, theirs, ids, targets)
    assert found, str(found)
    isolated = {(c.phase, c.where) for c in found.comparisons if c.own >= 0}
    for layer in range(3):
        # Not .mlp.down_proj: the three layers of .mlp are one op.
        for part in ("", ".self_attn", ".mlp", ".input_layernorm", ".self_attn.o_proj"):
            place = f"model.layers.{layer}{part}"
            assert {("forward", place), ("backward", place)} <= isolated, place
    assert ("backward", "model.embed_tokens") in isolated and ("formula", "model.layers.2.mlp") in isolated
    assert all(p.grad is None for p in theirs.parameters()) and all(p.grad is None for p in ours.parameters())


def test_a_wrong_forward_is_named():
    ours, theirs, ids, targets = pair("2x4", False)
    mlp = ours.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(x))  # no silu
    found = diverge(ours, theirs, ids, targets)
    assert (found.first.phase, found.first.where, found.first.name) == ("forward", "model.layers.1.mlp", "MLP")
    after = [
        c for c in found.comparisons if c.phase == "forward" and c.where == "model.layers.2.mlp" and c.name == "MLP"
    ]
    assert after and all(c.ok and c.difference > 1e-3 for c in after)  # spoiled by layer 1, right by itself


def test_a_wrong_backward_is_named_by_module_and_by_branch():
    ours, theirs, ids, targets = pair("2x4", False)
    mlp = ours.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(WrongSwiglu.apply(mlp.gate_proj(x), mlp.up_proj(x)))
    found = diverge(ours, theirs, ids, targets)
    assert all(c.ok for c in found.comparisons if c.phase == "forward")
    wrong = [(c.phase, c.where, c.name, c.what) for c in found.comparisons if not c.ok]
    assert ("formula", "model.layers.1.mlp", "WrongSwiglu", "gradient of gate") in wrong
    assert ("backward", "model.layers.1.mlp", "MLP", "gradient of gate_proj.weight through output 0") in wrong or (
        "backward", "model.layers.1.mlp", "MLP", "gradient of gate_proj.weight") in wrong  # fmt: skip
    assert not any(what.startswith("gradient of up_proj") for _, _, _, what in wrong)
    assert found.first.phase == "backward"
    assert "WrongSwiglu in model.layers.1.mlp" in str(found)


def test_other_weights_are_named():
    ours, theirs, ids, targets = pair("2x4", False)
    with torch.no_grad():
        theirs.model.layers[2].mlp.up_proj.weight[3, 3] += 1
    found = diverge(ours, theirs, ids, targets)
    assert (found.first.phase, found.first.name) == ("parameter", "model.layers.2.mlp.up_proj.weight")


def test_reference_run_is_needed():
    with pytest.raises(ValueError, match="reference_run must be given for a PyTorch module, got None"):
        first_divergence(lambda m: None, xt.nn.Linear(2, 2), torch.nn.Linear(2, 2))
