"""A checkpoint of `xtrain train` serves elsewhere: the same tokenizer and greedy tokens in transformers, and in llama.cpp where it is.

parity/support/serve_elsewhere.py is the same comparison for any checkpoint and number of prompts.
"""

from pathlib import Path

import pytest
import serve_elsewhere
import transformers

import xtrain as xt
from xtrain import models
from xtrain.cli import main
from xtrain.tokenizers import load_tokenizer, train_tokenizer

pytestmark = pytest.mark.on_cpu
FAMILIES = ["Llama", "Qwen3"]
TEXT = Path(serve_elsewhere.__file__)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 12 steps, with a tokenizer that was trained on the same text."""
    place = tmp_path_factory.mktemp("serving")
    (place / "tokenizer").mkdir()
    for name, content in train_tokenizer([TEXT.read_bytes()], 320).items():
        (place / "tokenizer" / name).write_bytes(content)
    xt.manual_seed(5)
    shape = dict(vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = getattr(models, f"{request.param}Config")(
        **shape, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=0
    )
    model = getattr(models, request.param)(config)
    model.save_pretrained(place / "start", tokenizer=load_tokenizer(place / "tokenizer"))
    words = ["--steps", "12", "--batch-size", "4", "--seq-len", "32", "--device", "cpu", "--no-plot"]
    words += ["--eval-every", "0", "--sample.tokens", "0", "--eval-tokens", "64"]
    run = place / "run"
    assert main(["train", "--data", str(TEXT), "--model", str(place / "start"), *words, "--out", str(run)]) == 0
    return run / "checkpoint-00000012"


def test_transformers_has_the_same_tokens(checkpoint: Path) -> None:
    texts = serve_elsewhere.pieces(TEXT.read_text(), 4)
    tokenizer = load_tokenizer(checkpoint)
    prompts = [tokenizer.encode(text.encode()).tolist() for text in texts]
    auto = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert [auto.encode(text, add_special_tokens=False) for text in texts] == prompts
    assert auto.eos_token_id == 0
    ours = serve_elsewhere.of_xtrain(checkpoint, prompts, 16)
    assert serve_elsewhere.of_transformers(checkpoint, prompts, 16) == ours
    assert all(0 < len(found) <= 16 for found in ours)


def test_llama_cpp_has_the_same_tokens(checkpoint: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is compiled for minutes: docs/how-to/models.md")
    pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    file = checkpoint.parent / "model.gguf"
    assert main(["export", str(checkpoint), "--gguf", str(file)]) == 0
    texts = serve_elsewhere.pieces(TEXT.read_text(), 4)
    tokenizer = load_tokenizer(checkpoint)
    prompts, found = serve_elsewhere.of_llama_cpp(file, texts, 16)
    assert prompts == [tokenizer.encode(text.encode()).tolist() for text in texts]
    assert found == serve_elsewhere.of_xtrain(checkpoint, prompts, 16)
