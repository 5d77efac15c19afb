"""Arrays of the tests."""

import numpy as np


def f64(*shape: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
