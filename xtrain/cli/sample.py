"""`xtrain sample`."""

from __future__ import annotations

import sys
import warnings

from .. import _C, saving
from ..errors import ConfigError
from ..generation import LONGEST_SAMPLE, generate_text
from ..tokenizers import load_tokenizer
from ..train import rundir
from .parser import simple_options

USAGE = """\
usage: xtrain sample DIR [options]

Generates text from the newest checkpoint of a run directory, from one checkpoint, or from any Hugging Face model
directory.

  --prompt TEXT         text to continue [default: the end-of-document token, else a line break]
  --max-tokens N        tokens to generate [tokens; default 256]
  --temperature X       divides the logits; 0 takes the likeliest token [default 0.8]
  --top-k N             sample among the k likeliest tokens; 0 for all [tokens; default 0]
  --top-p X             sample among the likeliest tokens of this total probability [default 1.0]
  --seed N              of the random numbers [default 0]
  --threads N           CPU threads; 0 for all [threads; default 0]
"""


def command(arguments: list[str]) -> int:
    known = {"prompt": None, "max_tokens": 256, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 0, "threads": 0}
    (directory,), values = simple_options(arguments, known, 1, USAGE)
    limits = (
        ("max_tokens", 1, LONGEST_SAMPLE),
        ("temperature", 0, None),
        ("top_k", 0, None),
        ("top_p", 0, 1),
        ("seed", 0, 2**63 - 1),
        ("threads", 0, 256),
    )
    for name, low, high in limits:
        if not values[name] >= low or (high is not None and values[name] > high) or values[name] == float("inf"):
            rule = f"at least {low}" if high is None else f"in [{low}, {high}]"
            raise ConfigError(f"--{name.replace('_', '-')} must be {rule}, got {values[name]}")
    if values["top_p"] == 0:
        raise ConfigError("--top-p must be greater than 0, got 0.0")

    path = rundir.resolve_run_directory(directory)
    if values["threads"]:
        _C.set_num_threads(values["threads"])
    tokenizer = load_tokenizer(path)
    model = saving.load_model(path)
    prompt = values["prompt"]
    if prompt:
        ids = tokenizer.encode(prompt.encode("utf-8", "surrogateescape"))
    else:
        ids = tokenizer.encode(b"\n") if tokenizer.eos is None else [tokenizer.eos]
    chosen = {name: values[name] for name in ("temperature", "top_k", "top_p", "seed")}
    with warnings.catch_warnings(record=True) as told:
        text = generate_text(model, tokenizer, ids, values["max_tokens"], **chosen)
    for warning in told:
        print(f"xtrain: warning: {warning.message}", file=sys.stderr)
    print(text if prompt else text.lstrip("\0"))
    return 0
