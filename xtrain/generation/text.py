"""Text from a model and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import _C
from .._types import Tokenizer
from .sampling import generate

if TYPE_CHECKING:
    from ..models.language_model import LanguageModel


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    ids: np.ndarray | Sequence[int],
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> str:
    """Return the text of `ids` [S] continued by `tokens` sampled tokens; ends early at the end-of-document token
    or one of config.eos_token_id.

    The other arguments, and errors, are those of `generate`; top_k 0 takes all tokens.
    """
    prompt = _C.tensor(np.asarray(ids, np.int64).reshape(1, -1))
    device = next(iter(model.parameters())).device
    if device.type != "cpu":
        prompt = prompt.to(device)
    out = generate(model, prompt, tokens, temperature, top_k or None, top_p, eos=_ends(model, tokenizer), seed=seed)
    result, start, ends = out.tolist()[0], prompt.shape[1], _ends(model, tokenizer)
    stop = next((i for i in range(start, len(result)) if result[i] in ends), len(result))
    return tokenizer.decode(result[:stop])


def _ends(model: LanguageModel, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text: the tokenizer's, and those of the model's config."""
    eos = getattr(model.config, "eos_token_id", None)
    ends = set() if eos is None else set(eos) if isinstance(eos, (list, tuple)) else {eos}
    return ends if tokenizer.eos is None else ends | {tokenizer.eos}
