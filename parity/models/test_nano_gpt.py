"""A GPT written for PyTorch (parity/support/nano_gpt.py) runs with xtrain under other imports, and computes the same."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import xtrain as xt

FILE = Path(__file__).parents[1] / "support" / "nano_gpt.py"
IMPORTS = "import torch\nimport torch.nn as nn\nfrom torch.nn import functional as F\n"
OURS = "import xtrain as torch\nimport xtrain.nn as nn\nfrom xtrain import functional as F\n"
STEPS, ROWS, LENGTH = 6, 3, 13


def loaded(name: str, imports: str) -> Any:
    text = FILE.read_text()
    assert text.count(IMPORTS) == 1
    module = ModuleType(name)
    sys.modules[name] = module  # where dataclasses look
    exec(compile(text.replace(IMPORTS, imports), str(FILE), "exec"), module.__dict__)
    return module


PEER, MINE = loaded("nano_gpt_of_torch", IMPORTS), loaded("nano_gpt_of_xtrain", OURS)


def pair(**options: Any) -> tuple[Any, Any]:
    """The model on both sides, with the same values."""
    theirs, ours = PEER.GPT(PEER.GPTConfig(**options)), MINE.GPT(MINE.GPTConfig(**options))
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state), "the same names in the same order"
    assert ours.get_num_params() == theirs.get_num_params()
    ours.load_state_dict({name: xt.tensor(value.cpu().numpy()) for name, value in state.items()})
    return ours, theirs


def batches(seed: int, vocab: int = 37) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(STEPS):
        tokens = rng.integers(0, vocab, (ROWS, LENGTH + 1))
        targets = tokens[:, 1:].copy()
        targets[0, -4:] = -1  # ignored
        found.append((tokens[:, :-1].copy(), targets))
    return found


def array(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def close(got: Any, want: Any, limit: float, what: str) -> None:
    got, want = array(got), array(want)
    assert got.shape == want.shape and np.isfinite(got).all(), what
    assert np.abs(got - want).max() <= limit * max(1e-3, np.abs(want).max()), what


@pytest.mark.parametrize("flash", [True, False], ids=["fused attention", "masked scores"])
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
def test_losses_and_gradients_are_pytorchs(flash: bool, bias: bool) -> None:
    ours, theirs = pair(flash=flash, bias=bias)
    settings = (0.1, 3e-3, (0.9, 0.95), "cpu")
    mine, peer = ours.configure_optimizers(*settings), theirs.configure_optimizers(*settings)
    for step, (tokens, targets) in enumerate(batches(1)):
        (got, loss), (want, reference) = (
            ours(xt.tensor(tokens), xt.tensor(targets)),
            theirs(torch.tensor(tokens), torch.tensor(targets)),
        )
        # From step 1 on the parameters differ: Adam divides by the size of a gradient, so that rounding of small ones shows.
        if step == 0:
            close(got, want, 2e-5, "logits")
        close(loss, reference, 2e-6, f"loss of step {step}")
        for optimizer, value in ((mine, loss), (peer, reference)):
            optimizer.zero_grad(set_to_none=True)
            value.backward()
        gradients = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters() if step == 0 else ():
            close(parameter.grad, gradients[name].grad, 1e-4, f"gradient of {name}")
        norm = xt.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        close(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0), 1e-5, f"norm of step {step}")
        mine.step()
        peer.step()


def test_it_trains_with_dropout() -> None:
    xt.manual_seed(5)
    model = MINE.GPT(MINE.GPTConfig(dropout=0.1))
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu")
    tokens = xt.tensor(np.tile(np.arange(14), (ROWS, 1)))
    losses = []
    for _ in range(40):
        _, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - np.log(37)) < 0.3 and losses[-1] < 0.5
    model.eval()
    best = model.generate(tokens[:2, :1], 12, top_k=1)
    assert best.tolist() == [list(range(13))] * 2, "it has learned to count"


def test_generation() -> None:
    ours, theirs = pair()
    prompt = np.random.default_rng(2).integers(0, 37, (2, 5))
    for model in (ours, theirs):
        model.eval()
    got = ours.generate(xt.tensor(prompt), 20, top_k=1)  # past block_size, which cuts the context
    want = theirs.generate(torch.tensor(prompt), 20, top_k=1)
    assert tuple(got.shape) == (2, 25) and got.tolist() == want.tolist()
    xt.manual_seed(1)
    drawn = [ours.generate(xt.tensor(prompt), 8, temperature=1.3, top_k=5).tolist() for _ in range(2)]
    xt.manual_seed(1)
    assert ours.generate(xt.tensor(prompt), 8, temperature=1.3, top_k=5).tolist() == drawn[0] != drawn[1]
    ours.crop_block_size(6)
    theirs.crop_block_size(6)
    assert (
        ours.generate(xt.tensor(prompt), 8, top_k=1).tolist()
        == theirs.generate(torch.tensor(prompt), 8, top_k=1).tolist()
    )


def test_a_checkpoint_of_it(tmp_path: Path) -> None:
    ours, _ = pair()
    xt.save(ours.state_dict(), tmp_path / "ckpt.safetensors")
    again = MINE.GPT(MINE.GPTConfig())
    again.load_state_dict(xt.load(tmp_path / "ckpt.safetensors"))
    tokens = xt.tensor(batches(3)[0][0])
    assert again(tokens)[0].tolist() == ours(tokens)[0].tolist()
