"""Whether a result is as near to the exact one as PyTorch's own in the same format."""

from __future__ import annotations

import numpy as np

from xtrain.optable.table import TINY, UNIT_ROUNDOFF


def judge(ours, theirs, exact, dtype: str, terms: float, what: str, magnitude: float = 0.0) -> None:
    """Our error against the float64 answer, compared with PyTorch's own error in the same format. `terms`: longest sum; `magnitude`: what the
    result was computed from, if that is larger than the result."""
    assert ours.shape == exact.shape, f"{what}: shape {ours.shape}, PyTorch has {exact.shape}"
    special = ~np.isfinite(exact)
    assert np.array_equal(ours[special], exact[special], equal_nan=True), f"{what}: differs where PyTorch is not finite"
    assert np.isfinite(ours[~special]).all(), f"{what}: not finite where PyTorch is"
    if special.all():
        return
    ours, theirs, exact = ours[~special], theirs[~special], exact[~special]
    error, peer, scale = np.abs(ours - exact).max(), np.abs(theirs - exact).max(), max(np.abs(exact).max(), magnitude)
    roundings = 2 if dtype == "bfloat16" else 4 + np.sqrt(terms)
    limit = 2 * peer + roundings * UNIT_ROUNDOFF[dtype] * scale + TINY[dtype]
    assert error <= limit, f"{what}: error {error:.3e}, PyTorch's {peer:.3e}, limit {limit:.3e}"
