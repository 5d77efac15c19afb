"""How the next tokens are drawn: options, random numbers, and the repetition penalty."""

from __future__ import annotations

import numpy as np

from .. import _C
from .._C import Tensor


class Penalty:
    """Repetition penalty: makes tokens that a row already holds less likely (Keskar et al. 2019, CTRL). rows: the
    tokens [B, S] of the prompt.
    """

    def __init__(self, factor: float, rows: np.ndarray) -> None:
        self._factor, self._rows = float(factor), rows
        self._seen: Tensor | None = None  # bool [B, V]
        self._columns: Tensor | None = None  # [V]

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [B, V]: those of seen tokens over the factor where they are positive, else times it, in float32."""
        if self._factor == 1.0:
            return logits
        if self._seen is None:
            seen = np.zeros(logits.shape, bool)
            np.put_along_axis(seen, self._rows, True, 1)
            self._seen = _C.tensor(seen, device=logits.device)
            self._columns = _C.arange(0, logits.shape[1], 1, _C.int64, logits.device)
        if logits.dtype != _C.float64:
            logits = logits.to(_C.float32)
        changed = _C.where(_C.lt(logits, 0), _C.mul(logits, self._factor), _C.div(logits, self._factor))
        return _C.where(self._seen, changed, logits)

    def see(self, tokens: Tensor) -> None:
        """Note that row b now holds tokens[b] ([B]); in place, so that it can be captured."""
        if self._seen is not None and self._columns is not None:
            here = _C.eq(self._columns, _C.unsqueeze(tokens, 1))
            self._seen.copy_(_C.where(here, True, self._seen))


class Draws:
    """Draws a token a row. options: temperature, top_k, top_p."""

    def __init__(self, options: tuple[float, int | None, float | None], seed: int, penalty: Penalty) -> None:
        self.options, self.penalty = options, penalty
        self._random = np.array([seed, 0], np.uint64)

    def go_to(self, step: int) -> None:
        """The next random numbers are those of token `step` of the call, from 0."""
        self._random[1] = step

    def take_random(self) -> np.ndarray:
        """Seed and step, int64 [2]; the step goes up by one."""
        random = self._random.view(np.int64).copy()
        self._random[1] += 1
        return random

    def random_on(self, device: _C.device) -> Tensor:
        """The same as a tensor."""
        return _C.tensor(self.take_random(), device=device)

    def __call__(self, logits: Tensor, random: Tensor) -> Tensor:
        """One token per row of logits [B, V]: int64 [B]; -1 for logits that are not finite."""
        tokens = _C.sample(self.penalty(logits), random, *self.options)
        self.penalty.see(tokens)
        return tokens
