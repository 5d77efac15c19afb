"""Arrays of the tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

import xtrain.functional as F

FIT = "scaled_dot_product_attention: documents must lie one behind the other and fill the row, got "


def every_bounds() -> Iterator[tuple[np.ndarray, bool]]:
    """All bounds int32 [2, S] of two tokens from -1 to 3 and of three from 0 to 3, and whether they cut the row."""
    for tokens, values, cuts in ((2, range(-1, 4), [[2], [1, 1]]), (3, range(4), [[3], [1, 2], [2, 1], [1, 1, 1]])):
        right = [F.document_bounds([cut], device="cpu").numpy()[0] for cut in cuts]
        for some in itertools.product(values, repeat=2 * tokens):
            bounds = np.array(some, np.int32).reshape(2, tokens)
            yield bounds, any(np.array_equal(bounds, one) for one in right)


def f64(*shape: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
