"""Two hundred real steps on real text: bfloat16 stays as near to float32 as PyTorch's own bfloat16 does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_qwen3 import TorchQwen3

import xtrain as xt
from xtrain.data import open_data
from xtrain.models import Qwen3, Qwen3Config

STEPS, WARMUP = 200, 10
ADAMW = dict(betas=(0.9, 0.95), weight_decay=0.1)
# (batch, length, sizes)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
ON_CPU = (4, 32, dict(hidden_size=64, intermediate_size=160, num_hidden_layers=2, head_dim=16, **HEADS))
ON_GPU = (16, 256, dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, head_dim=64, **HEADS))


def rate(step: int) -> float:
    """Small at the end, as in a real run: updates below a digit of bfloat16 need the masters."""
    return xt.optim.lr_schedule("cosine", step, warmup=WARMUP, total=STEPS, base=2e-3, final=5e-5)


def ours(theirs: TorchQwen3, config: Qwen3Config, batches: list, dtype: xt.dtype) -> np.ndarray:
    """Losses of the steps; on a GPU as `xtrain train` makes them, by a graph."""
    model = Qwen3(config)
    model.load_state_dict(
        {name: xt.from_numpy(p.detach().cpu().numpy().copy()) for name, p in theirs.named_parameters()}
    )
    model.to(dtype)
    optimizer = xt.optim.AdamW(model.parameters(), lr=rate(0), **ADAMW)

    def step(ids: xt.Tensor, targets: xt.Tensor) -> xt.Tensor:
        optimizer.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        xt.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    graph = xt.cuda.graph(step, optimizers=[optimizer]) if xt.get_default_device().type == "cuda" else None
    losses = []
    for number, (ids, targets) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate(number)
        losses.append((graph or step)(xt.tensor(ids), xt.tensor(targets)).item())
    assert graph is None or graph.captured
    return np.array(losses)


def peers(theirs: TorchQwen3, batches: list, dtype: torch.dtype) -> np.ndarray:
    """Losses of PyTorch's eager steps. Parameters of 16 bits have masters of float32, as ours have."""
    masters = [p.detach().float().clone().requires_grad_() for p in theirs.parameters()]
    model = theirs.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=rate(0), **ADAMW)
    losses = []
    for number, (ids, targets) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate(number)
        logits = model(torch.tensor(ids)).float()  # a loss of bfloat16 would have two digits
        loss = F.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # gradients of 16 bits, as ours are
        for p, master in zip(model.parameters(), masters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        losses.append(loss.item())
    return np.array(losses)


@pytest.mark.slow
def test_200_steps_in_bfloat16_are_as_near_to_float32_as_pytorchs() -> None:
    """From the same parameters on the same batches of Python's standard library: the distance of our bfloat16 losses
    from our float32 losses is at most twice PyTorch's bfloat16 distance from them. There is no other constant: float32
    of both stays 1,000 times as near. Distances are root mean squares over all steps of all seeds, as a rounding that
    goes another way early moves all losses behind it: on a CPU the quotient was 1.5, 1.1, 2.3, 1.2 and 1.8 for the five
    seeds, and 1.5 for them together. Without masters it is 12.
    """
    gpu = xt.get_default_device().type == "cuda"
    batch, length, sizes = ON_GPU if gpu else ON_CPU
    fixed = dict(vocab_size=256, tie_word_embeddings=True, initializer_range=0.05, rope_theta=1e4)
    config = Qwen3Config(max_position_embeddings=length, **fixed, **sizes)
    corpus = open_data("python")
    mine, theirs = [], []
    for seed in range(5):
        loader = corpus.loader(batch, length, seed)
        batches = [loader.next_batch() for _ in range(STEPS)]
        torch.manual_seed(seed)
        start = TorchQwen3(config, length)
        wide = ours(start, config, batches, xt.float32)
        low = ours(start, config, batches, xt.bfloat16)
        peer = peers(start, batches, torch.bfloat16)  # last: it changes `start`
        assert all(np.isfinite(losses).all() and len(losses) == STEPS for losses in (wide, low, peer))
        assert wide[-20:].mean() < 0.6 * wide[0], "it must have learned, for the curves to mean something"
        assert abs(low[0] - wide[0]) <= 2 * abs(peer[0] - wide[0]) + 2.0**-8 * wide[0]  # before any step
        mine.append(low - wide)
        theirs.append(peer - wide)
    distance, limit = (math.sqrt(np.mean(np.square(found))) for found in (mine, theirs))
    each = [(math.sqrt(np.mean(a**2)), math.sqrt(np.mean(b**2))) for a, b in zip(mine, theirs)]
    assert 0 < distance <= 2 * limit, f"ours {distance:.5f}, PyTorch's {limit:.5f}; by seed {each}"
