"""Steps of generation whose rows have positions of their own, on the device. Without the host: on a GPU a captured
graph, one launch a token.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _C
from .._graph import Graph
from .cache import KVCache
from .draws import Draws

if TYPE_CHECKING:
    from ..models.language_model import LanguageModel

# Whether `generate` captures its steps on a GPU when `capture` is None. A captured step has other kernels than an eager
# one (cached_attention) and a region of memory of its own, which a sample of a training run must not take by itself.
CAPTURES = False
AT_ONCE = 16  # steps between two reads of the tokens by the host


def can_capture(model: LanguageModel, caches: Sequence[Any]) -> bool:
    """Whether the steps of a model may run without the host: `can_step`, and no module has hooks, which a replay would
    not call.
    """
    return can_step(caches) and not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def can_step(caches: Sequence[Any], held: bool = True) -> bool:
    """Whether rows may stand at positions of their own: every cache is a KVCache, which holds keys where `held`."""
    return bool(caches) and all(type(cache) is KVCache and (cache.key is not None or not held) for cache in caches)


class Steps:
    """What follows the first token of a batch, as long as the caches have room.

    tokens: the last token of each row. position: where it stands, one for all rows or [B]. A row that has ended is
    still computed; its tokens are discarded, and change no other row. ahead: run without the host, AT_ONCE steps
    between two looks at the tokens; else one.
    """

    def __init__(
        self,
        model: LanguageModel,
        caches: Sequence[KVCache],
        tokens: np.ndarray,
        position: int | np.ndarray,
        draw: Draws,
        ahead: bool = True,
    ) -> None:
        device, batch = next(iter(model.parameters())).device, len(tokens)
        self._model, self._caches, self._draw = model, list(caches), draw
        self._ids = _C.tensor(tokens.reshape(batch, 1), device=device)
        # All that a step changes: positions, seed and step of the draw, and the row of `_made` for the next tokens.
        state = np.concatenate([np.broadcast_to(np.int64(position), (batch,)), draw.take_random(), [0]])
        self._state = _C.tensor(state, device=device)
        self._positions, self._random = (_C.slice(self._state, 0, *ends) for ends in ((0, batch), (batch, batch + 2)))
        self.at_once = AT_ONCE if ahead else 1
        self._made = _C.full((self.at_once, batch), 0, _C.int64, device)  # a ring of rows
        self._read = 0  # steps that the host has read
        self._begun = 0  # steps that are queued behind those
        for cache in caches:
            cache.positions = self._positions
        # One eager run, as the prompt has been through all that a first run prepares, and no garbage collection: a step
        # needs little memory, and every call of `generate` would wait for both.
        captures = device.type == "cuda" and ahead
        self._graph = Graph(self._step, (), 1, device, collect=False) if captures else None

    @property
    def captured(self) -> bool:
        return self._graph is not None and self._graph.captured

    def run(self, count: int, more: int = 0) -> np.ndarray:
        """Makes `count` steps, at most `at_once`: their tokens, int64 [count, B]; -1 for logits that are not finite.
        The host waits once, at the end. more: the steps of the next call, or 0: a captured graph begins them before the
        host looks at the tokens of this one.
        """
        self._begin(count)
        made = self._made.cpu().numpy()[np.arange(self._read, self._read + count) % self.at_once]
        self._read, self._begun = self._read + count, self._begun - count
        if self.captured:
            self._begin(more)
        return made

    def _begin(self, count: int) -> None:
        """Queues what is left of `count` steps."""
        while self._begun < count:
            self._make()
            self._begun += 1

    def _make(self) -> None:
        if self._graph is None:
            return self._step()
        captures = self._graph.ready
        try:
            return self._graph()
        except RuntimeError as error:
            if not captures or self._graph.captured:
                raise
            self._graph = None  # nothing of the step has run
            warnings.warn(f"generate: steps run one by one, a step cannot be captured: {error}", stacklevel=5)
            return self._step()

    def _step(self) -> None:
        """One token a row, into the next row of `_made`. Everything that changes lies on the device and is changed in
        place.
        """
        logits = self._model(self._ids, self._positions, self._caches)
        tokens = self._draw(_C.select(logits, 1, 0), self._random)
        _C.advance_(self._ids, self._state, self._made, tokens)
