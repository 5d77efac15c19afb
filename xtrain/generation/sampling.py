"""Sampling from a language model, one token per step, with cached keys and values."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from .. import _C
from .._C import Tensor
from ..autograd import no_grad
from ..nn.module import evaluating
from .draws import Draws, Penalty
from .steps import AT_ONCE, CAPTURES, Steps, can_capture

if TYPE_CHECKING:
    from ..models.language_model import LanguageModel

LONGEST_SAMPLE = 10_000_000  # tokens; hours at a thousand a second
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def generate(
    model: LanguageModel,
    ids: Any,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | Iterable[int] | None = None,
    seed: int | None = None,
    stream: Callable[[list[int]], object] | None = None,
    capture: bool | None = None,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Continues token ids (a tensor, array or list of integers): returns int64 [B, S + new], or [S + new] for 1-D ids.

    temperature: logits are divided by it; 0 takes the most likely token. top_k: sample among the k most likely tokens.
    top_p: among the fewest tokens whose probabilities reach top_p (Holtzman et al. 2020, nucleus sampling). eos: a
    token id or several that end a sequence, None those of `config.eos_token_id`, () none; generation stops when all
    have ended, a finished one repeats its last token. seed: of this call's random numbers, in [0, 2^64), the same on
    every device (functional.sample); None draws one from the default generator, so `manual_seed` repeats it.
    repetition_penalty: logits of tokens that a row has had are divided by it where positive, else multiplied (Keskar
    et al. 2019, CTRL). stream: called after every step with the list of the B new tokens; `stream_tokens` is an
    iterator instead. The model runs in evaluation mode, and has its own mode again afterwards.

    capture: True makes the steps after the first without the host, on a GPU as a captured graph (xt.cuda.graph): one
    launch a token. Tokens are read 16 at a time, so `stream` is called late, and up to 15 steps past the end are
    computed and discarded. None: as generation.steps.CAPTURES says. A model with hooks or caches of its own goes on
    step by step in any case, and so does a context that would be dropped before the end. Logits differ in rounding.

    When the sequence reaches `config.max_position_embeddings`, the older half of the context is dropped and generation
    goes on, with a UserWarning: other libraries go on otherwise. ValueError or TypeError for arguments outside their
    ranges, FloatingPointError for logits that are not finite.
    """
    made = Generation(model, ids, max_new_tokens, temperature, top_k, top_p, eos, seed, capture, repetition_penalty)
    with no_grad(), evaluating(model):
        made.inside = True
        for new in made:
            if stream is not None:
                stream(new)
    return made.result()


def stream_tokens(model: LanguageModel, ids: Any, max_new_tokens: int, **options: Any) -> Iterator[list[int]]:
    """An iterator over the steps of `generate`, which has the arguments but `stream`: the list of the B new tokens of
    each. A step runs when the iterator is asked for it; to stop early, drop the iterator. An error ends it. Between two
    steps the model has its own mode, and gradients are recorded as elsewhere.
    """
    return Generation(model, ids, max_new_tokens, **options)


class Generation:
    """The state of one `generate`, and an iterator over its steps: the list of the B new tokens of each."""

    def __init__(
        self,
        model: LanguageModel,
        ids: Any,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos: int | Iterable[int] | None = None,
        seed: int | None = None,
        capture: bool | None = None,
        repetition_penalty: float = 1.0,
    ) -> None:
        tokens = _token_ids(ids)
        _check(max_new_tokens, temperature, top_k, top_p, seed, repetition_penalty)
        rows = tokens.reshape(-1, tokens.shape[-1]) if tokens.ndim == 1 else tokens
        batch, start = rows.shape
        self._model, self._capture, self._one = model, capture, tokens.ndim == 1
        self.inside = False  # whether all steps are asked for in evaluation mode, without recording
        self._device = ids.device if isinstance(ids, _C.Tensor) else "cpu"
        self._out = np.empty((batch, start + max_new_tokens), np.int64)
        self._out[:, :start] = rows
        if eos is None:
            eos = getattr(model.config, "eos_token_id", None)
        self._ends, self._finished = _end_tokens(eos), [False] * batch
        if seed is None:
            seed = int(_C.randint(0, 2**53, (1,), _C.int64).item()) if temperature > 0 else 0
        self._draw = Draws((temperature, top_k, top_p), int(seed), Penalty(repetition_penalty, rows))
        self._limit, self._warned = model.config.max_position_embeddings, False
        self._caches: Any = None  # they hold positions _first..; `_end` tokens exist
        self._steps: Steps | None = None
        self._first, self._end = 0, start
        self._made: deque[list[int]] = deque()  # tokens of steps that were computed and not yet returned

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> list[int]:
        if self._end == self._out.shape[1] or (self._ends and all(self._finished)):
            raise StopIteration
        try:
            if not self._made:
                with contextlib.ExitStack() as modes:
                    if not self.inside:
                        modes.enter_context(no_grad())
                        modes.enter_context(evaluating(self._model))
                    self._made.extend(self._make())
            new = self._made.popleft()
            if min(new, default=0) < 0:
                raise FloatingPointError("generate: logits must be finite, got NaN or infinity")
        except BaseException:
            self._out = self._out[:, : self._end]  # caches may hold a part of a step: it ends, as a generator does
            raise
        if any(self._finished):
            last = self._out[:, self._end - 1].tolist()
            new = [old if done else token for done, old, token in zip(self._finished, last, new)]
        self._out[:, self._end] = new
        self._end += 1
        if self._ends:
            self._finished = [done or token in self._ends for done, token in zip(self._finished, new)]
        return new

    def result(self) -> Tensor:
        """All tokens so far, those of the prompt first: int64 [B, S + new], or [S + new] for 1-D ids."""
        out = self._out[:, : self._end]
        return _C.tensor(np.ascontiguousarray(out[0] if self._one else out), device=self._device)

    def _make(self) -> list[list[int]]:
        """Run one step, or with Steps up to AT_ONCE; return the tokens [B] of each."""
        out, first, end, limit = self._out, self._first, self._end, self._limit
        caches: Any = self._caches
        batch, total = out.shape
        if self._steps is None and caches is not None and total - first <= limit:  # nothing will be dropped
            captures = _captures(self._capture, self._model, caches)
            self._steps = Steps(self._model, caches, out[:, end - 1], end - 1 - first, self._draw) if captures else None
        if self._steps is not None:
            return self._steps.run(min(AT_ONCE, total - end)).tolist()
        if caches is None or end - first > limit:
            # (Re)fill: as much of the past as leaves room to go on.
            keep = end if caches is None and end <= limit else max(1, limit // 2)
            if keep < end and not self._warned:
                self._warned = True
                text = f"generate: {limit} tokens, max_position_embeddings, are full: the older half is dropped"
                warnings.warn(text, UserWarning, stacklevel=4)
            first = self._first = end - keep
            caches = self._caches = self._model.make_caches(batch, min(limit, keep + total - end))
            feed = out[:, first:end]
        else:
            feed = out[:, end - 1 : end]
        logits = _last_logits(self._model, feed, end - first - feed.shape[1], caches)
        return [self._draw(logits, self._draw.random_on(logits.device)).tolist()]


def _token_ids(ids: Any) -> np.ndarray:
    """ids, a tensor or what NumPy makes an array of, as an int64 array [S] or [B, S]."""
    ids = ids if isinstance(ids, _C.Tensor) else np.asarray(ids)
    if ids.ndim not in (1, 2) or ids.shape[-1] == 0:
        raise ValueError(f"generate: ids must have shape (S,) or (B, S) with S >= 1, got {tuple(ids.shape)}")
    if ids.dtype.name not in _INTEGERS:
        raise TypeError(f"generate: ids must have an integer dtype, got {ids.dtype.name}")
    return ids.to(_C.int64).cpu().numpy() if isinstance(ids, _C.Tensor) else ids.astype(np.int64)


def _end_tokens(eos: Any) -> tuple[int, ...]:
    if eos is None:
        return ()
    ends: list[int] = []
    for one in (eos,) if isinstance(eos, SupportsIndex) or not isinstance(eos, Iterable) else eos:
        if not isinstance(one, SupportsIndex):
            raise ValueError(f"generate: eos must be a token id or several, got {eos!r}")
        ends.append(int(one))
    return tuple(ends)


def _check(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    repetition_penalty: float,
) -> None:
    if not isinstance(max_new_tokens, int) or not 0 <= max_new_tokens <= LONGEST_SAMPLE:
        raise ValueError(
            f"generate: max_new_tokens must be an integer in [0, {LONGEST_SAMPLE}], got {max_new_tokens!r}"
        )
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"generate: temperature must be a number >= 0, got {temperature!r}")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"generate: top_k must be an integer >= 1 or None, got {top_k!r}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"generate: top_p must be in (0, 1] or None, got {top_p!r}")
    if not 0.0 < repetition_penalty < float("inf"):
        raise ValueError(f"generate: repetition_penalty must be a number > 0, got {repetition_penalty!r}")
    if seed is not None and (not isinstance(seed, SupportsIndex) or not 0 <= int(seed) < 2**64):
        raise ValueError(f"generate: seed must be an integer in [0, 2^64) or None, got {seed!r}")


def _captures(capture: bool | None, model: LanguageModel, caches: Any) -> bool:
    """Whether to go on with Steps: where it is asked for, by default on a GPU, and the model allows it."""
    on_gpu = next(iter(model.parameters())).device.type == "cuda"
    return (CAPTURES and on_gpu if capture is None else capture) and can_capture(model, caches)


def _last_logits(model: LanguageModel, feed: np.ndarray, past: int, caches: list[Any]) -> Tensor:
    """Logits [B, V] of the token after feed [B, S], whose first token stands at position `past`."""
    batch, seq = feed.shape
    device = next(iter(model.parameters())).device
    positions = None
    if past:
        positions = (
            _C.arange(past, past + seq, 1, _C.int64, device).unsqueeze(0).expand((batch, seq)).reshape((batch * seq,))
        )
    logits = model(_C.tensor(feed, device=device), positions, caches)
    return _C.select(logits, 1, seq - 1)
