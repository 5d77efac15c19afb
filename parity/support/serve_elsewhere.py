"""Compares the greedy tokens of a model directory here, in transformers and in llama.cpp.

    python parity/support/serve_elsewhere.py DIR --text FILE [--gguf FILE] [--prompts 20] [--tokens 64]

DIR is a checkpoint of `xtrain train` with a tokenizer, in float32; the prompts are pieces of FILE, of 1 to 40 tokens. With --gguf, the
file that `xtrain export` made of DIR is read by llama.cpp (package llama-cpp-python), which cuts the text into tokens itself and has a
cache of keys and values in float32, too. Exit status 1 when a prompt has other tokens anywhere.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

import xtrain as xt
from xtrain import models
from xtrain.tokenizers import load_tokenizer


def pieces(text: str, count: int) -> list[str]:
    """Pieces of the text that begin and end where characters do: `count` of them, spread over it."""
    lengths = [1 + 7 * i % 113 for i in range(count)]
    starts = np.linspace(0, len(text) - 120, count).astype(int)
    return [text[start : start + length] for start, length in zip(starts, lengths)]


def of_transformers(directory: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def of_xtrain(directory: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    model = models.load(directory)
    found = []
    for prompt in prompts:
        out = model.generate(xt.tensor([prompt]), tokens, temperature=0.0)
        found.append(out.numpy()[0, len(prompt) :].tolist())
    return found


def of_llama_cpp(file: Path, texts: list[str], tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """(The tokens of each text, what follows each)."""
    import llama_cpp

    kind = llama_cpp.GGML_TYPE_F32
    options = dict(n_ctx=512, n_gpu_layers=0, type_k=kind, type_v=kind, flash_attn=False, verbose=False)
    model = llama_cpp.Llama(str(file), **options)
    prompts, found = [], []
    for text in texts:
        prompt = model.tokenize(text.encode(), add_bos=False, special=False)
        prompts.append(prompt)
        following: list[int] = []
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
            following.append(token)
            if token == model.token_eos() or len(following) == tokens:
                break
        found.append(following)
    return prompts, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    texts = pieces(options.text.read_text(), options.prompts)
    tokenizer = load_tokenizer(options.directory)
    prompts = [tokenizer.encode(text.encode()).tolist() for text in texts]
    # Not AutoTokenizer: for Qwen2, transformers 5 cuts text as Qwen does, whatever tokenizer.json says.
    auto = transformers.PreTrainedTokenizerFast.from_pretrained(options.directory)
    ours = of_xtrain(options.directory, prompts, options.tokens)
    cut = [auto.encode(text, add_special_tokens=False) for text in texts]
    theirs = {"transformers": (cut, of_transformers(options.directory, prompts, options.tokens))}
    if options.gguf:
        theirs["llama.cpp"] = of_llama_cpp(options.gguf, texts, options.tokens)
    wrong = 0
    for name, (cut, found) in theirs.items():
        same_prompts = sum(a == b for a, b in zip(prompts, cut))
        same = sum(a == b for a, b in zip(ours, found))
        wrong += 2 * len(texts) - same - same_prompts
        total = sum(map(len, found))
        print(f"{name}: {same_prompts} of {len(texts)} prompts cut alike, {same} continued alike ({total} tokens)")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
