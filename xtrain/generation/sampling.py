"""Sampling from a language model, one token per step, with cached keys and values."""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from .. import _C
from .._C import Tensor
from .._types import is_real, is_whole
from ..autograd import no_grad
from ..nn.module import evaluating
from ..saving.generation_config import end_tokens
from .draws import Draws, Penalty
from .prompts import Prompts
from .steps import CAPTURES, Steps, can_capture, can_step

if TYPE_CHECKING:
    from ..models.language_model import LanguageModel

LONGEST_SAMPLE = 10_000_000  # tokens; hours at a thousand a second


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
    attention_mask: Any = None,
) -> Tensor:
    """Continues token ids (a tensor, array or list of integers): returns int64 [B, S + new], or [S + new] for 1-D ids.

    Rows may differ in length: a list of lists, or ids [B, S] with an attention_mask [B, S] of ones at the tokens of a
    row and zeros at its padding, on either side. What is returned has the padding on the left, so `out[:, S:]` is new;
    of lists it is `config.pad_token_id`, else an end, else 0. A row has the tokens that it has alone when logits are
    drawn greedily, but for logits that tie within a product's rounding: nothing of another row or of padding enters
    its computation (docs/how-to/generate.md).

    temperature: logits are divided by it; 0 takes the most likely token. top_k: sample among the k most likely tokens.
    top_p: among the fewest tokens whose probabilities reach top_p (Holtzman et al. 2020, nucleus sampling). eos: a
    token id or several that end a sequence, () none; None means those of the model's generation_config.json, and
    without such a file `config.eos_token_id`. Generation stops when all have ended, a finished one repeats its last
    token. seed: of this call's random numbers, in [0, 2^64), the same on every device (functional.sample); None draws
    one from the default generator, so `manual_seed` repeats it. repetition_penalty: logits of tokens that a row has had
    are divided by it where positive, else multiplied (Keskar et al. 2019, CTRL). stream: called after every step with
    the list of the B new tokens; `stream_tokens` is an iterator instead. The model runs in evaluation mode, and has its
    own mode again afterwards.

    capture: True makes the steps after the first without the host, on a GPU as a captured graph (xt.cuda.graph): one
    launch a token. Tokens are read 16 at a time, so `stream` is called late, and up to 31 steps past the end are
    computed and discarded. None: as generation.steps.CAPTURES says. A model with hooks or caches of its own goes on
    step by step in any case, and so does a context that would be dropped before the end. Logits differ in rounding.

    When the sequence reaches `config.max_position_embeddings`, the older half of the context is dropped and generation
    goes on, with a UserWarning: other libraries go on otherwise. ValueError or TypeError for arguments outside their
    ranges, FloatingPointError for logits that are not finite.
    """
    drawn = temperature, top_k, top_p, eos, seed, capture, repetition_penalty
    made = Generation(model, ids, max_new_tokens, *drawn, attention_mask)
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
        attention_mask: Any = None,
    ) -> None:
        self._ends = _end_tokens(end_tokens(model) if eos is None else eos)
        prompts = Prompts(ids, attention_mask, _pad(model.config, self._ends))
        max_new_tokens, top_k, seed = _whole(max_new_tokens), _whole(top_k), _whole(seed)
        _check(max_new_tokens, temperature, top_k, top_p, seed, repetition_penalty)
        batch, start = prompts.tokens.shape
        self._model, self._capture, self._prompts = model, capture, prompts
        self.inside = False  # whether all steps are asked for in evaluation mode, without recording
        self._out = np.empty((batch, start + max_new_tokens), np.int64)
        self._out[:, :start] = prompts.tokens
        self._finished = [False] * batch
        if seed is None:
            seed = int(_C.randint(0, 2**53, (1,), _C.int64).item()) if temperature > 0 else 0
        penalty = Penalty(repetition_penalty, prompts.without_pads())
        self._draw = Draws((temperature, top_k, top_p), seed, penalty)
        self._limit, self._warned = model.config.max_position_embeddings, False
        self._caches: Any = None  # of row b they hold the columns from _first[b] on; `_end` columns exist
        self._steps: Steps | None = None
        self._first, self._end = prompts.starts, start
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
        return _C.tensor(np.ascontiguousarray(out[0] if self._prompts.one else out), device=self._prompts.device)

    def _make(self) -> list[list[int]]:
        """Run one step, or with Steps up to their `at_once`; return the tokens [B] of each."""
        end, caches = self._end, self._caches
        length = int((end - self._first).max(initial=1))  # of the longest context
        if caches is None or length > self._limit:
            logits = self._fill()
        else:
            steps = self._steps = self._steps or self._make_steps()
            if steps is not None:
                left = self._out.shape[1] - end
                count = min(steps.at_once, left)
                return steps.run(count, min(steps.at_once, left - count)).tolist()
            feed = self._out[:, end - 1 : end]
            logits = _last_logits(self._model, feed, length - 1, caches)
        return [self._draw(logits, self._draw.random_on(logits.device)).tolist()]

    def _fill(self) -> Tensor:
        """Fill new caches with as much of the past as leaves room to go on: logits [B, V] of the next token."""
        out, end, limit = self._out, self._end, self._limit
        batch, total = out.shape
        lengths = end - self._first
        keep = np.where(lengths > limit, max(1, limit // 2), lengths)
        if (keep < lengths).any() and not self._warned:
            self._warned = True
            text = f"generate: {limit} tokens, max_position_embeddings, are full: the older half is dropped"
            warnings.warn(text, UserWarning, stacklevel=5)
        self._steps, self._first, width = None, end - keep, int(keep.max()) if batch else end
        caches = self._caches = self._model.make_caches(batch, min(limit, width + total - end))
        if self._prompts.ragged and not can_step(caches, held=False):
            kinds = ", ".join(sorted({type(cache).__name__ for cache in caches})) or "none"
            raise ValueError(f"generate: prompts of several lengths need caches of class KVCache, got {kinds}")
        self._draw.go_to(end - self._prompts.tokens.shape[1])
        if (keep == width).all():
            return _last_logits(self._model, out[:, end - width : end], 0, caches)
        # Behind a shorter row its last token: no query of the row sees it, and steps write over its keys and values.
        feed = np.repeat(out[:, end - 1 : end], width, 1)
        for row, past, count in zip(feed, out, keep, strict=True):
            row[:count] = past[end - count : end]
        return _last_logits(self._model, feed, 0, caches, keep)

    def _make_steps(self) -> Steps | None:
        """The object that makes the steps after the first of new caches; None where `_make` makes them one by one."""
        model, caches, end, first = self._model, self._caches, self._end, self._first
        graph = (self._out.shape[1] - first <= self._limit).all() and _captures(self._capture, model, caches)
        on_cpu = next(iter(model.parameters())).device.type == "cpu"
        alone = self._prompts.ragged or (on_cpu and self._capture is None)
        if not graph and not (alone and can_step(caches)):
            return None
        return Steps(model, caches, self._out[:, end - 1], end - 1 - first, self._draw, graph)


def _end_tokens(eos: Any) -> tuple[int, ...]:
    if eos is None:
        return ()
    ends: list[int] = []
    if isinstance(eos, (np.ndarray, Tensor)):
        eos = eos.tolist()
    for one in (eos,) if isinstance(eos, SupportsIndex) or not isinstance(eos, Iterable) else eos:
        if not isinstance(one, SupportsIndex):
            raise ValueError(f"generate: eos must be a token id or several, got {eos!r}")
        ends.append(int(one))
    return tuple(ends)


def _whole(value: Any) -> Any:
    """An integer of NumPy or a tensor as one of Python; anything else as it is, a bool too."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _check(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    repetition_penalty: float,
) -> None:
    if not is_whole(max_new_tokens) or not 0 <= max_new_tokens <= LONGEST_SAMPLE:
        raise ValueError(
            f"generate: max_new_tokens must be an integer in [0, {LONGEST_SAMPLE}], got {max_new_tokens!r}"
        )
    if not is_real(temperature) or not 0.0 <= temperature < float("inf"):
        raise ValueError(f"generate: temperature must be a number >= 0, got {temperature!r}")
    if top_k is not None and (not is_whole(top_k) or top_k < 1):
        raise ValueError(f"generate: top_k must be an integer >= 1 or None, got {top_k!r}")
    if top_p is not None and (not is_real(top_p) or not 0.0 < top_p <= 1.0):
        raise ValueError(f"generate: top_p must be in (0, 1] or None, got {top_p!r}")
    if not is_real(repetition_penalty) or not 0.0 < repetition_penalty <= sys.float_info.max:
        raise ValueError(f"generate: repetition_penalty must be a number > 0, got {repetition_penalty!r}")
    if seed is not None and (not is_whole(seed) or not 0 <= seed < 2**64):
        raise ValueError(f"generate: seed must be an integer in [0, 2^64) or None, got {seed!r}")


def _captures(capture: bool | None, model: LanguageModel, caches: Any) -> bool:
    """Whether to go on with Steps: where it is asked for, by default on a GPU, and the model allows it."""
    on_gpu = next(iter(model.parameters())).device.type == "cuda"
    return (CAPTURES and on_gpu if capture is None else capture) and can_capture(model, caches)


def _last_logits(
    model: LanguageModel, feed: np.ndarray, past: int, caches: list[Any], lengths: np.ndarray | None = None
) -> Tensor:
    """Logits [B, V] of the token after feed [B, S], whose first token stands at position `past`. lengths: [B], of the
    rows that begin a shorter row of feed; None: S.
    """
    batch, seq = feed.shape
    device = next(iter(model.parameters())).device
    positions = None
    if past:
        positions = (
            _C.arange(past, past + seq, 1, _C.int64, device).unsqueeze(0).expand((batch, seq)).reshape((batch * seq,))
        )
    ids = _C.tensor(feed, device=device)
    rows = None if lengths is None else _C.tensor(np.arange(batch) * seq + lengths - 1, device=device)
    last_logits = getattr(model, "last_logits", None)
    if last_logits is not None:
        return last_logits(ids, positions, caches, rows)
    logits = model(ids, positions, caches)
    if rows is None:
        return _C.select(logits, 1, seq - 1)
    return logits.view(batch * seq, logits.shape[-1]).index_select(0, rows)


def _pad(config: Any, ends: tuple[int, ...]) -> int:
    """The token before shorter rows."""
    pad = getattr(config, "pad_token_id", None)
    return pad if isinstance(pad, int) else (*ends, 0)[0]
