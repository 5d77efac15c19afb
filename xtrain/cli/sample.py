"""`xtrain sample`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from .. import _C, saving
from .._types import Tokenizer
from ..errors import ConfigError
from ..generation import LONGEST_SAMPLE, generate_text
from ..tokenizers import load_tokenizer
from ..train import rundir
from .guard import warn
from .parser import simple_options

if TYPE_CHECKING:
    from ..models.language_model import LanguageModel

USAGE = """\
usage: xtrain sample DIR [options]

Generates text from the newest checkpoint of a run directory, from one checkpoint, or from any Hugging Face model
directory.

  --prompt TEXT         text to continue [default: the end-of-document token, else a line break]
  --max-tokens N        tokens to generate [tokens; default 256]
  --temperature X       divides the logits; 0 takes the likeliest token [default 0.8]
  --top-k N             sample among the k likeliest tokens; 0 for all [tokens; default 0]
  --top-p X             sample among the likeliest tokens of this total probability [default 1.0]
  --stop TEXT           ends before this text, which is not printed
  --repetition-penalty X  above 1, makes tokens that were there before less likely [default 1.0]
  --ema                 takes the averages of parameters that training with --ema has kept
  --seed N              of the random numbers [default 0]
  --threads N           CPU threads; 0 for all [threads; default 0]
"""

# Options of commands that draw tokens, with their defaults.
DRAWING: dict[str, Any] = {
    "temperature": 0.8, "top_k": 0, "top_p": 1.0, "stop": None, "repetition_penalty": 1.0, "seed": 0, "threads": 0,
}  # fmt: skip


def command(arguments: list[str]) -> int:
    known = {"prompt": None, "max_tokens": 256, "ema": False, **DRAWING}
    (directory,), values = simple_options(arguments, known, 1, USAGE)
    check_drawing(values)

    path = rundir.resolve_run_directory(directory, warn)
    if values["threads"]:
        _C.set_num_threads(values["threads"])
    tokenizer = load_tokenizer(path)
    model = saving.load_model(path, ema=values["ema"])
    tell_vocabulary(tokenizer, model)
    prompt = values["prompt"]
    if prompt:
        ids = tokenizer.encode(prompt.encode("utf-8", "surrogateescape"))
    else:
        ids = tokenizer.encode(b"\n") if tokenizer.eos is None else [tokenizer.eos]
    with warnings.catch_warnings(record=True) as told:
        text = generate_text(model, tokenizer, ids, values["max_tokens"], **drawing(values))
    for warning in told:
        warn(str(warning.message))
    print(text if prompt else text.lstrip("\0"))
    return 0


def tell_vocabulary(tokenizer: Tokenizer, model: LanguageModel) -> None:
    """A warning where the tokenizer may give tokens that the model lacks: a text with one of them is refused."""
    ids, words = tokenizer.vocab_size, getattr(model.config, "vocab_size", None)
    if words is not None and ids > words:
        rule = f"the model's vocab_size is {words}: the model cannot take ids from {words} on"
        warn(f"the tokenizer has {ids} ids, {rule}")


def drawing(values: dict[str, Any]) -> dict[str, Any]:
    """The options of `generate_text` among those of a command line."""
    chosen = {name: values[name] for name in ("temperature", "top_k", "top_p", "seed", "repetition_penalty")}
    return chosen | {"stop": values["stop"] or ()}


def check_drawing(values: dict[str, Any]) -> None:
    """ConfigError for an option out of its range."""
    limits = (
        ("max_tokens", 1, LONGEST_SAMPLE),
        ("temperature", 0, None),
        ("top_k", 0, None),
        ("top_p", 0, 1),
        ("seed", 0, 2**63 - 1),
        ("threads", 0, 256),
        ("repetition_penalty", 0, None),
    )
    for name, low, high in limits:
        if values[name] < low or (high is not None and values[name] > high):  # all are finite
            rule = f"at least {low}" if high is None else f"in [{low}, {high}]"
            raise ConfigError(f"--{name.replace('_', '-')} must be {rule}, got {values[name]}")
    if values["top_p"] == 0:
        raise ConfigError("--top-p must be greater than 0, got 0.0")
    if values["repetition_penalty"] == 0:
        raise ConfigError("--repetition-penalty must be greater than 0, got 0.0")
