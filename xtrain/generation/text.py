"""Text from a model and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _C
from .._types import Tokenizer
from ..autograd import no_grad
from ..nn.module import evaluating
from .sampling import Generation

if TYPE_CHECKING:
    from ..models.language_model import LanguageModel

_PART = "\ufffd"  # what a decoder writes for the bytes of a character that is not complete


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
    stop: str | Sequence[str] = (),
    repetition_penalty: float = 1.0,
) -> str:
    """Return the text of `ids` [S] continued by `tokens` sampled tokens; ends early at the end-of-document token
    or one of config.eos_token_id, and before the first of the texts `stop` that the continuation holds.

    The other arguments, and errors, are those of `generate`; top_k 0 takes all tokens.
    """
    options: dict[str, Any] = dict(temperature=temperature, seed=seed)
    options["repetition_penalty"] = repetition_penalty
    made = _Text(model, tokenizer, ids, tokens, stop, top_k=top_k, top_p=top_p, **options)
    with no_grad(), evaluating(model):
        made.steps.inside = True
        for _ in made if stop else made.without_pieces():
            pass
    text = tokenizer.decode([*made.start, *made.ids])
    if made.cut is None:
        return text
    new = tokenizer.decode(made.ids)
    start = text[: len(text) - len(new)] if text.endswith(new) else tokenizer.decode(made.start)
    return start + new[: made.cut]


def stream_text(
    model: LanguageModel, tokenizer: Tokenizer, ids: np.ndarray | Sequence[int], tokens: int, **options: Any
) -> Iterator[str]:
    """An iterator over the continuation, in pieces as they are made. Arguments and errors are those of `generate_text`.

    A piece is held back while it may be the beginning of a `stop` text or of a character of several bytes.
    """
    return iter(_Text(model, tokenizer, ids, tokens, options.pop("stop", ()), **options))


class _Text:
    """The continuation of a prompt as text. start: tokens of the prompt. ids: tokens of the continuation so far,
    without the one that ends it. cut: where in the text of `ids` a stop text begins; None before.
    """

    start: list[int]
    ids: list[int]
    cut: int | None

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        ids: np.ndarray | Sequence[int],
        tokens: int,
        stop: str | Sequence[str],
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        **options: Any,
    ) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        for text in self._stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"generate_text: stop must be texts that are not empty, got {text!r}")
        self.start, self.ids, self.cut = np.asarray(ids, np.int64).reshape(-1).tolist(), [], None
        prompt = _C.tensor(np.array([self.start], np.int64))
        device = next(iter(model.parameters())).device
        if device.type != "cpu":
            prompt = prompt.to(device)
        self._ends, self._tokenizer = _ends(model, tokenizer), tokenizer
        options.update(top_k=top_k or None, top_p=top_p, eos=self._ends)
        self.steps = Generation(model, prompt, tokens, **options)

    def without_pieces(self) -> Iterator[int]:
        """The same tokens, one after the other; without a text after each."""
        for (token,) in self.steps:
            if token in self._ends:
                return
            self.ids.append(token)
            yield token

    def __iter__(self) -> Iterator[str]:
        shown = ""
        for _ in self.without_pieces():
            text = self._tokenizer.decode(self.ids)
            places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
            if places:
                self.cut = min(places)
                break
            held = max(_incomplete(text), max((_begun(text, stop) for stop in self._stop), default=0))
            ready = text[: len(text) - held]
            if len(ready) > len(shown) and ready.startswith(shown):
                yield ready[len(shown) :]
                shown = ready
        text = self._tokenizer.decode(self.ids)[: self.cut]
        if len(text) > len(shown):
            yield text[len(shown) :]


def _incomplete(text: str) -> int:
    """How many characters at the end may belong to one that is not complete."""
    return min(3, len(text) - len(text.rstrip(_PART)))


def _begun(text: str, stop: str) -> int:
    """How many characters at the end may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _ends(model: LanguageModel, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text: the tokenizer's, and those of the model's config."""
    eos = getattr(model.config, "eos_token_id", None)
    ends = set() if eos is None else set(eos) if isinstance(eos, (list, tuple)) else {eos}
    return ends if tokenizer.eos is None else ends | {tokenizer.eos}
