"""Difference quotients of every element, for gradients in float64."""

import numpy as np

import xtrain as xt
from xtrain import _C
from xtrain.optable.table import array, tensor


def difference_quotients(call, leaves: list, dys: list[np.ndarray]) -> float:
    """The largest error of any gradient element, over the largest element of its gradient; fourth-order central differences.
    Infinite where a gradient or a quotient is not finite, and where a gradient is zero that should not be."""

    def loss() -> float:
        with xt.no_grad():
            return sum(float((array(o) * dy).sum()) for o, dy in zip(call(), dys))

    for leaf in leaves:
        leaf.grad = None
        leaf.requires_grad_()
    outs = call()
    _C.backward(outs, [tensor(dy) for dy in dys], False)
    worst, h = 0.0, 1e-3
    for leaf in leaves:
        gradient, values = array(leaf.grad).ravel(), array(leaf).copy()
        quotients = np.empty(values.size)
        for i in range(values.size):
            at = []
            for step in (-2, -1, 1, 2):
                moved = values.copy()
                moved.ravel()[i] += step * h
                with xt.no_grad():
                    leaf.copy_(tensor(moved))
                at.append(loss())
            with xt.no_grad():
                leaf.copy_(tensor(values))
            quotients[i] = (8 * (at[2] - at[1]) - (at[3] - at[0])) / (12 * h)
        error, size = np.abs(quotients - gradient).max(), np.abs(gradient).max()
        if not (np.isfinite(gradient).all() and np.isfinite(quotients).all()):
            return float("inf")
        # A gradient of zeros is judged by its error itself: quotients of a constant are a few roundings of the loss.
        worst = max(worst, error / size if size else error)
    return worst
