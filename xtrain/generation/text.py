"""Text from a model and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._types import Tokenizer
from ..autograd import no_grad
from ..nn.module import evaluating
from ..saving.generation_config import end_tokens, listed
from .prompts import token_ids
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
    or one of the model's (see generate), and before the first of the texts `stop` that the continuation holds.

    The other arguments, and errors, are those of `generate`; top_k 0 takes all tokens.
    """
    options: dict[str, Any] = dict(temperature=temperature, seed=seed, top_k=top_k, top_p=top_p)
    options["repetition_penalty"] = repetition_penalty
    return _Texts(model, tokenizer, [ids], tokens, stop, **options).whole()[0]


def generate_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Iterable[np.ndarray | Sequence[int]],
    tokens: int,
    **options: Any,
) -> list[str]:
    """`generate_text` of several prompts [S] at once, whatever their lengths: a text each. Each ends on its own."""
    return _Texts(model, tokenizer, prompts, tokens, options.pop("stop", ()), **options).whole()


def stream_text(
    model: LanguageModel, tokenizer: Tokenizer, ids: np.ndarray | Sequence[int], tokens: int, **options: Any
) -> Iterator[str]:
    """An iterator over the continuation, in pieces as they are made. Arguments and errors are those of `generate_text`.

    A piece is held back while it may be the beginning of a `stop` text or of a character of several bytes.
    """
    made = _Texts(model, tokenizer, [ids], tokens, options.pop("stop", ()), **options)
    return (piece for _, piece in made.pieces())


def stream_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Iterable[np.ndarray | Sequence[int]],
    tokens: int,
    **options: Any,
) -> Iterator[tuple[int, str]]:
    """`stream_text` of several prompts at once: the number of a prompt, from 0, and a piece of its continuation."""
    return _Texts(model, tokenizer, prompts, tokens, options.pop("stop", ()), **options).pieces()


class _Row:
    """The continuation of a prompt as text. start: tokens of the prompt. ids: tokens of the continuation so far,
    without the one that ends it. cut: where in the text of `ids` a stop text begins; None before. done: whether it has
    ended.
    """

    def __init__(self, tokenizer: Tokenizer, start: list[int], stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop, self._shown = tokenizer, stop, ""
        self.start, self.ids, self.done = start, list[int](), False
        self.cut: int | None = None

    def piece(self) -> str:
        """The text that can be shown now and was not shown before."""
        text, shown = self._tokenizer.decode(self.ids), self._shown
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.cut, self.done = min(places), True
            return ""
        held = max(_incomplete(text), max((_begun(text, stop) for stop in self._stop), default=0))
        ready = text[: len(text) - held]
        if len(ready) <= len(shown) or not ready.startswith(shown):
            return ""
        self._shown = ready
        return ready[len(shown) :]

    def rest(self) -> str:
        """At the end: what was held back."""
        return self._tokenizer.decode(self.ids)[: self.cut][len(self._shown) :]

    def whole(self) -> str:
        """The prompt and the continuation."""
        text = self._tokenizer.decode([*self.start, *self.ids])
        if self.cut is None:
            return text
        new = self._tokenizer.decode(self.ids)
        start = text[: len(text) - len(new)] if text.endswith(new) else self._tokenizer.decode(self.start)
        return start + new[: self.cut]


class _Texts:
    """The continuations of prompts."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        prompts: Iterable[np.ndarray | Sequence[int]],
        tokens: int,
        stop: str | Sequence[str],
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        **options: Any,
    ) -> None:
        stops = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
        for text in stops:
            if not isinstance(text, str) or not text:
                raise ValueError(f"generate_text: stop must be texts that are not empty, got {text!r}")
        if isinstance(prompts, str):
            raise TypeError("generate_texts: prompts must be lists of token ids, got str")
        starts = [_prompt(number, ids, model, tokenizer) for number, ids in enumerate(prompts)]
        if not starts:
            raise ValueError("generate_texts: prompts must be one or more, got none")
        self._rows = [_Row(tokenizer, start, stops) for start in starts]
        self._model, self._stop, self._ends = model, stops, _ends(model, tokenizer)
        options.update(top_k=top_k or None, top_p=top_p, eos=self._ends)
        self._steps = Generation(model, starts, tokens, **options)

    def _made(self) -> Iterator[tuple[int, _Row]]:
        """The rows that have a new token, or have ended with it."""
        for tokens in self._steps:
            for number, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
                if not row.done:
                    if token in self._ends:
                        row.done = True
                    else:
                        row.ids.append(token)
                    yield number, row
            if all(row.done for row in self._rows):
                return

    def whole(self) -> list[str]:
        with no_grad(), evaluating(self._model):
            self._steps.inside = True
            for _, row in self._made():
                if self._stop and not row.done:
                    row.piece()
        return [row.whole() for row in self._rows]

    def pieces(self) -> Iterator[tuple[int, str]]:
        for number, row in self._made():
            piece = "" if row.done else row.piece()
            if row.done:
                piece = row.rest()
            if piece:
                yield number, piece
        for number, row in enumerate(self._rows):
            if not row.done and (piece := row.rest()):
                yield number, piece


def _prompt(number: int, ids: Any, model: LanguageModel, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a prompt, which the model has."""
    if not isinstance(ids, (str, bytes)) and np.size(ids) == 0:
        raise ValueError(f"generate_text: ids must have at least one token, got none in prompt {number}")
    found = token_ids(ids)
    if found.ndim > 1 and found.shape[0] != 1:
        raise ValueError(
            f"generate_text: ids must be one list of token ids, got shape {found.shape} in prompt {number}"
        )
    start = found.reshape(-1).tolist()
    words = getattr(model.config, "vocab_size", None)
    if words is not None and not 0 <= min(start) <= max(start) < words:
        worst = next(token for token in start if not 0 <= token < words)
        raise ValueError(
            f"generate_text: ids must be in [0, {words}), the model's vocab_size, got {worst}: "
            f"the tokenizer has {tokenizer.vocab_size} tokens"
        )
    return start


def _incomplete(text: str) -> int:
    """How many characters at the end may belong to one that is not complete."""
    return min(3, len(text) - len(text.rstrip(_PART)))


def _begun(text: str, stop: str) -> int:
    """How many characters at the end may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _ends(model: LanguageModel, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text: the tokenizer's, and the model's."""
    ends = set(listed(end_tokens(model)))
    return ends if tokenizer.eos is None else ends | {tokenizer.eos}
