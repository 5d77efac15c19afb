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
    """Return the text of `ids` [S] continued by `tokens` sampled tokens; ends early at the end-of-document token.

    The other arguments, and errors, are those of `generate`; top_k 0 takes all tokens.
    """
    prompt = _C.tensor(np.asarray(ids, np.int64).reshape(1, -1))
    device = next(iter(model.parameters())).device
    if device.type != "cpu":
        prompt = prompt.to(device)
    out = generate(model, prompt, tokens, temperature, top_k or None, top_p, eos=tokenizer.eos, seed=seed)
    result = out.tolist()[0]
    if tokenizer.eos is not None and tokenizer.eos in result[prompt.shape[1] :]:
        result = result[: result.index(tokenizer.eos, prompt.shape[1])]
    return tokenizer.decode(result)
