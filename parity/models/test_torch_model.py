"""The whole model against PyTorch and against transformers' own Qwen3: loss, logits and the gradient of every parameter, B > 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch_qwen3 import SHAPES, TorchQwen3, pair

import xtrain as xt
from xtrain.models import Qwen3, Qwen3Config


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Largest error relative to the largest value; NaN is not small."""
    assert a.shape == b.shape
    assert np.isfinite(a).all() and np.isfinite(b).all()
    return float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max())


def compare(
    ours, theirs_loss, theirs_logits, theirs_grads, ids, targets, loss_limit=1e-6, logit_limit=1e-5, grad_limit=1e-4
) -> None:
    x, y = xt.tensor(ids), xt.tensor(targets)
    logits = ours(x).detach().cpu().numpy()
    assert relative(logits, theirs_logits) <= logit_limit
    assert np.abs(logits - theirs_logits).max() <= logit_limit * max(1.0, np.abs(theirs_logits).max())
    loss = ours.loss(x, y)
    assert abs(loss.item() - theirs_loss) <= loss_limit * abs(theirs_loss)
    loss.backward()
    grads = {name: p.grad for name, p in ours.named_parameters()}
    assert set(grads) == set(theirs_grads)
    worst = {name: relative(g.cpu().numpy(), theirs_grads[name]) for name, g in grads.items()}
    assert all(np.isfinite(v) and v <= grad_limit for v in worst.values()), max(worst.items(), key=lambda kv: kv[1])


@pytest.mark.parametrize("attention", ["materialized", "reference"])
@pytest.mark.parametrize("gemm", xt.gemm_backends(xt.get_default_device()))
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_pytorch(shape: str, tied: bool, gemm: str, attention: str) -> None:
    ours, theirs, ids, targets = pair(shape, tied)
    logits = theirs(torch.tensor(ids))
    loss = theirs.loss(torch.tensor(ids), torch.tensor(targets))
    loss.backward()
    with xt.use_gemm_backend(gemm), xt.use_attention_backend(attention):
        compare(
            ours,
            loss.item(),
            logits.detach().cpu().numpy(),
            {n: p.grad.cpu().numpy() for n, p in theirs.named_parameters()},
            ids,
            targets,
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_against_pytorch_in_float64(shape: str) -> None:
    ours, theirs, ids, targets = pair(shape, True, torch.float64)
    theirs.cos, theirs.sin = rope_tables(theirs, ours.config, ids.shape[1])
    logits = theirs(torch.tensor(ids))
    loss = theirs.loss(torch.tensor(ids), torch.tensor(targets))
    loss.backward()
    compare(
        ours,
        loss.item(),
        logits.detach().cpu().numpy(),
        {n: p.grad.cpu().numpy() for n, p in theirs.named_parameters()},
        ids,
        targets,
        1e-13,
        1e-12,
        1e-11,
    )


def rope_tables(model, config, length: int):
    half = config.head_dim // 2
    angle = torch.outer(torch.arange(length).double(), config.rope_theta ** (-torch.arange(half).double() / half))
    return angle.cos(), angle.sin()


def test_bfloat16_model_is_as_exact_as_pytorch() -> None:
    """Error of loss and logits against float64 at most twice PyTorch's own bfloat16 error."""
    _, theirs, ids, targets = pair("3x37", True)
    x, y = torch.tensor(ids), torch.tensor(targets)
    low = theirs.to(torch.bfloat16)
    ours = Qwen3(pair("3x37", True)[0].config).to(xt.bfloat16)
    ours.load_state_dict({n: xt.from_numpy(p.detach().float().cpu().numpy().copy()) for n, p in low.named_parameters()})
    found = low(x)
    low.loss(x, y).backward()
    peer = {n: p.grad.double().cpu().numpy() for n, p in low.named_parameters()}
    exact_model = TorchQwen3(ours.config, ids.shape[1]).double()
    exact_model.load_state_dict({n: p.detach().double() for n, p in low.state_dict().items()})
    exact_model.cos, exact_model.sin = rope_tables(exact_model, ours.config, ids.shape[1])
    exact = exact_model(x)
    exact_model.loss(x, y).backward()

    ours.loss(xt.tensor(ids), xt.tensor(targets)).backward()
    logits = ours(xt.tensor(ids)).detach().to(xt.float64).cpu().numpy()
    e = exact.detach().cpu().numpy()
    assert np.isfinite(logits).all()
    limit = 2 * np.sqrt(np.mean((found.detach().double().cpu().numpy() - e) ** 2)) + 2.0**-9 * np.sqrt(np.mean(e**2))
    assert np.sqrt(np.mean((logits - e) ** 2)) <= limit
    for name, p in exact_model.named_parameters():
        want, mine = (
            p.grad.cpu().numpy(),
            {n: q.grad for n, q in ours.named_parameters()}[name].to(xt.float64).cpu().numpy(),
        )
        assert np.isfinite(mine).all(), name
        limit = 2 * np.sqrt(np.mean((peer[name] - want) ** 2)) + 2.0**-9 * np.sqrt(np.mean(want**2))
        assert np.sqrt(np.mean((mine - want) ** 2)) <= limit, name


def test_training_follows_pytorch() -> None:
    """Twenty steps of AdamW with clipping: the losses of both stay together."""
    ours, theirs, ids, targets = pair("2x4", True)
    mine = xt.optim.AdamW(ours.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    peer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(20):
        mine.zero_grad()
        peer.zero_grad()
        a, b = ours.loss(xt.tensor(ids), xt.tensor(targets)), theirs.loss(torch.tensor(ids), torch.tensor(targets))
        a.backward()
        b.backward()
        xt.optim.clip_grad_norm_(ours.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        mine.step()
        peer.step()
        assert abs(a.item() - b.item()) <= 1e-5 * abs(b.item())


# ---- transformers -------------------------------------------------------------------------------------------------------------------


def hugging_face(tied: bool):
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=120,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    ids = np.random.default_rng(4).integers(0, 97, (3, 30))
    return transformers, model, ids[:, :-1].copy(), ids[:, 1:].copy()


def run_hugging_face(model, ids, targets):
    logits = model(input_ids=torch.tensor(ids)).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.tensor(targets).reshape(-1))
    loss.backward()
    return loss.item(), logits.detach().cpu().numpy(), {n: p.grad.cpu().numpy() for n, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_we_load_what_transformers_saves(tmp_path, tied: bool) -> None:
    _, theirs, ids, targets = hugging_face(tied)
    theirs.save_pretrained(tmp_path / "hf")
    ours = Qwen3.from_pretrained(tmp_path / "hf")
    compare(ours, *run_hugging_face(theirs, ids, targets), ids, targets)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_we_save(tmp_path, tied: bool, theta: float) -> None:
    transformers, _, ids, targets = hugging_face(tied)
    ours = Qwen3(
        Qwen3Config(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=120,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            rope_theta=theta,
            tie_word_embeddings=tied,
            initializer_range=0.1,
            max_position_embeddings=64,
        )
    )
    ours.save_pretrained(tmp_path / "ours")
    theirs, info = transformers.Qwen3ForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    compare(ours, *run_hugging_face(theirs.float(), ids, targets), ids, targets)


def test_transformers_generates_the_same_tokens(tmp_path) -> None:
    """Greedy decoding of a checkpoint directory: 24 tokens for each of two prompts."""
    transformers, theirs, ids, _ = hugging_face(True)
    theirs.save_pretrained(tmp_path / "hf")
    ours = Qwen3.from_pretrained(tmp_path / "hf")
    prompt = ids[:2, :5]
    want = (
        theirs.generate(
            torch.tensor(prompt),
            attention_mask=torch.ones(2, 5, dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        .cpu()
        .numpy()
    )
    assert np.array_equal(ours.generate(xt.tensor(prompt), 24, temperature=0.0).cpu().numpy(), want)


def test_byte_tokenizer_in_transformers(tmp_path) -> None:
    """The tokenizer files of a byte-level checkpoint encode like our tokenizer: token id = byte. So the letter whose shape
    stands for byte 0 there is no end of a document; generation_config.json has that one.
    """
    from xtrain import saving
    from xtrain.tokenizers import ByteTokenizer

    saving.save_model(
        Qwen3(
            Qwen3Config(
                vocab_size=256,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
            )
        ),
        tmp_path / "m",
        tokenizer=ByteTokenizer(),
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in ("def f(x):\n    return x\n", "naïve 漢字 \U0001f600", "  spaces\t\ttabs  ", "\u0100nd"):
        assert theirs(text, add_special_tokens=False)["input_ids"] == list(text.encode())
        assert theirs.decode(list(text.encode()), clean_up_tokenization_spaces=False) == text
    assert theirs.eos_token is None
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id == ByteTokenizer.eos == 0
