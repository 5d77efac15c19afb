"""Checks that a bad answer cannot pass: NaN and infinity first, then the error against a stated tolerance. Runs on the
host with NumPy.
"""

import math
from dataclasses import dataclass

import numpy as np

from . import _C

_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def tolerance(compute, out=None, acc=None, accumulations=1, magnitude=1.0):
    """(rtol, atol) for a result computed in dtype `compute` and stored in `out` (default compute).

    acc: dtype of sums (default float64 for float64, else float32). accumulations: terms per sum. magnitude: typical
    size of a term. n terms of random sign reach sqrt(n) magnitude, which is rounded once; the n additions before that
    leave an error of about n eps(acc) magnitude (Higham & Mary 2019), taken four times for safety.
    """
    compute_name = _name(compute)
    out_name = compute_name if out is None else _name(out)
    acc_name = ("float64" if compute_name == "float64" else "float32") if acc is None else _name(acc)
    relative = 2.0 * max(_EPSILON[compute_name], _EPSILON[out_name])
    rounding = 4.0 * _EPSILON[acc_name] * accumulations + _EPSILON[compute_name] * math.sqrt(accumulations)
    absolute = magnitude * rounding
    return relative, absolute


def _name(dtype):
    name = getattr(dtype, "name", dtype)
    if name not in _EPSILON:
        raise ValueError(f"tolerance: dtype must be one of {', '.join(_EPSILON)}, got {name}")
    return name


def _array(value):
    if isinstance(value, _C.Tensor):
        value = value.detach()
        return (value.to(_C.float64) if value.dtype.is_floating_point else value).numpy()
    return np.asarray(value)


def assert_close(actual, expected, *, rtol=None, atol=None, msg=None):
    """Raises AssertionError unless shapes agree and |actual - expected| <= atol + rtol |expected| everywhere.

    Both are tensors, arrays or numbers. NaN is close to nothing, infinity only to the same infinity. Defaults:
    `tolerance` of the coarser dtype of the two when they are tensors; 0 (equality) for integers and booleans; float64's
    for the rest.
    """
    dtypes = [x.dtype.name for x in (actual, expected) if isinstance(x, _C.Tensor)]
    a, e = _array(actual), _array(expected)
    if a.shape != e.shape:
        raise AssertionError(f"assert_close: actual must have shape {e.shape}, got {a.shape}" + _more(msg))
    floats = [name for name in dtypes if name in _EPSILON]
    if a.dtype.kind == "f" or e.dtype.kind == "f":
        default = tolerance(max(floats, key=_EPSILON.get) if floats else "float64")
    else:
        default = (0.0, 0.0)
    rtol, atol = default[0] if rtol is None else rtol, default[1] if atol is None else atol
    a, e = (a, e) if a.dtype.kind == e.dtype.kind == "i" else (a.astype(np.float64), e.astype(np.float64))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(a - e)
        good = (a == e) | (np.isfinite(a) & np.isfinite(e) & (error <= atol + rtol * np.abs(e)))
    if good.all():
        return
    count = int((~good).sum())
    ranked = np.where(good, -1.0, np.where(np.isnan(error), np.inf, error))
    worst = np.unravel_index(int(np.argmax(ranked)), a.shape)
    raise AssertionError(
        f"assert_close: {count} of {a.size} elements differ by more than atol {atol:.3g} + rtol {rtol:.3g} * "
        f"|expected|, worst at {tuple(map(int, worst))}: got {a[worst].item()!r}, expected {e[worst].item()!r}"
        + _more(msg)
    )


def _more(msg):
    return f" ({msg})" if msg else ""


@dataclass
class GradCheck:
    """What grad_check found. max_rel: largest |analytic - numeric| / (|numeric| + atol / rtol). worst: where, and both
    values.
    """

    ok: bool
    max_rel: float
    worst: str

    def __bool__(self):
        return self.ok


def grad_check(fn, inputs, *, eps=None, rtol=None, atol=None, seed=0):
    """Compares the gradients of fn(*inputs) with finite differences; returns a GradCheck, true when every element
    agrees.

    inputs: tensors on the host; those of float64 or float32 with requires_grad are checked, all of one dtype, dense. fn
    returns a tensor or a tuple; a fixed random weighting of its elements is differentiated, with the four-point central
    difference of step eps (default 2^-10 * max(1, |x|)). Agreement: |analytic - numeric| <= atol + rtol |numeric|;
    defaults 1e-6 and 1e-9 in float64, 2e-2 and 1e-3 (times the size of the weighted sum, if larger than 1) in float32.
    """
    inputs = list(inputs)
    checked = [i for i, x in enumerate(inputs) if isinstance(x, _C.Tensor) and x.requires_grad]
    if not checked:
        raise ValueError("grad_check: inputs must hold a tensor with requires_grad, got none")
    dtype = inputs[checked[0]].dtype
    for i in checked:
        if inputs[i].dtype != dtype or dtype not in (_C.float64, _C.float32):
            raise TypeError(f"grad_check: inputs must be all float64 or all float32, got {inputs[i].dtype.name}")
        if not inputs[i].is_leaf or not inputs[i].is_contiguous():
            raise ValueError(f"grad_check: input {i} must be a dense leaf, got shape {tuple(inputs[i].shape)}")
    double = dtype == _C.float64
    random = np.random.Generator(np.random.PCG64(seed))

    for i in checked:
        inputs[i].grad = None
    outputs = _outputs(fn, inputs)
    weights = [random.uniform(0.5, 1.5, tuple(y.shape)) * random.choice([-1.0, 1.0], tuple(y.shape)) for y in outputs]
    rooted = [(y, w) for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
    if not rooted:
        raise ValueError(
            "grad_check: fn must return a tensor that depends on the inputs, got none that requires a gradient"
        )
    _C.backward([y for y, _ in rooted], [_C.tensor(w, y.dtype) for y, w in rooted], False)

    def weighted():
        mode = _C.is_grad_enabled()
        _C.set_grad_enabled(False)
        try:
            return sum(float((_array(y) * w).sum()) for y, w in zip(_outputs(fn, inputs), weights, strict=True))
        finally:
            _C.set_grad_enabled(mode)

    size = max(1.0, abs(weighted()))
    rtol = (1e-6 if double else 2e-2) if rtol is None else rtol
    atol = size * (1e-9 if double else 1e-3) if atol is None else atol
    max_rel, worst = 0.0, "none"
    for i in checked:
        grad = inputs[i].grad
        analytic = np.zeros(tuple(inputs[i].shape)) if grad is None else _array(grad)
        values = inputs[i].detach().numpy().reshape(-1)  # shares memory with the input
        for j in range(values.size):
            x = values[j].item()
            h = (2.0**-10 if eps is None else eps) * max(1.0, abs(x))
            sums = []
            for step in (1, -1, 2, -2):
                values[j] = x + step * h
                sums.append(weighted())
            values[j] = x
            numeric = (8.0 * (sums[0] - sums[1]) - (sums[2] - sums[3])) / (12.0 * h)
            got = float(analytic.reshape(-1)[j])
            relative = abs(got - numeric) / (abs(numeric) + atol / rtol)
            if not relative <= max_rel:
                max_rel = relative if math.isfinite(relative) else math.inf
                place = tuple(map(int, np.unravel_index(j, analytic.shape)))
                worst = f"input {i} at {place}: gradient {got:.9g}, finite difference {numeric:.9g}"
    return GradCheck(bool(max_rel <= rtol), max_rel, worst)


def _outputs(fn, inputs):
    result = fn(*inputs)
    return list(result) if isinstance(result, (tuple, list)) else [result]
