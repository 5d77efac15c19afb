"""Every entry of the op table against PyTorch, forward and backward, in float64, float32 and bfloat16.

The judge is PyTorch in float64 on exactly the numbers that the lower format holds. In float64 results must agree to rounding. In bfloat16 our
error may be at most twice PyTorch's own bfloat16 error plus one last place of the largest value: two roundings of an exact result. In float32,
where the order of a sum matters as much as the format, the allowance is that of a sum of n terms in any order, sqrt(n) roundings (Higham & Mary
2019).
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from judge import judge

from xtrain import _C
from xtrain.optable import TABLE
from xtrain.optable.table import (
    FLOATS,
    Case,
    Op,
    array,
    as_list,
    gradients,
    outputs_of,
    tensor,
    upstream,
)

DTYPES = ("float64", "float32", "bfloat16")


def over(differentiable: bool):
    """Parameters (entry, cases, dtype): a test has all cases of an entry, as in tests/ops/test_ops.py."""
    rows = [
        pytest.param(entry, cases, dtype, id=f"{entry.id}-{dtype}")
        for entry in TABLE
        if entry.torch is not None and not (differentiable and entry.nondiff)
        if (cases := [c for c in entry.cases if not differentiable or entry.differentiable(c)])
        for dtype in entry.dtypes
        if dtype in DTYPES or (dtype not in FLOATS and not differentiable)
    ]
    return pytest.mark.parametrize(("entry", "cases", "dtype"), rows)


@contextlib.contextmanager
def named(entry: Op, c: Case):
    """Both sides start from seed 0, and an error inside says whose it is."""
    torch.manual_seed(0)
    _C.manual_seed(0)
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{entry.id}, case {c.id}: {error}") from error


def to_torch(a: np.ndarray, dtype: str):
    t = torch.tensor(a)
    if a.dtype.kind == "f":
        return t.to(getattr(torch, dtype))
    return t if dtype in FLOATS else t.to(getattr(torch, dtype))


def to_numpy(t) -> np.ndarray:
    t = t.detach()
    return (t.double() if t.is_floating_point() else t).cpu().numpy()


def torch_run(entry: Op, c: Case, arrays, dtype: str, dys=None, device: str | None = None):
    """Outputs of PyTorch, and its gradients when upstream gradients are given; without device, on the default one."""
    with torch.device(device or torch.get_default_device()):
        tensors = [to_torch(a, dtype) for a in arrays]
        leaves = entry.differentiable(c) if dys is not None else []
        for i in leaves:
            tensors[i].requires_grad_()
        outs = as_list(entry.torch(torch, *tensors, **c.kwargs))
        if dys is None:
            return outs, []
        floats = [o for o in outs if o.is_floating_point()]
        torch.autograd.backward(floats, [torch.tensor(dy, device=o.device).to(o.dtype) for dy, o in zip(dys, floats)])
        return outs, [tensors[i].grad for i in leaves]


def names(entry: Op) -> list[str | None]:
    if entry.selects is None:
        return [None]
    return list(
        _C.gemm_backends(_C.get_default_device())
        if entry.selects == "gemm"
        else _C.attention_backends(_C.get_default_device())
    )


def use(entry: Op, name: str | None) -> None:
    if entry.selects == "gemm":
        _C.use_gemm_backend(name)
    elif entry.selects == "attention":
        _C.use_attention_backend(name)


def terms_of(entry: Op, c: Case, arrays) -> float:
    """Terms of the longest sum in the forward of a case."""
    return entry.accumulations(*arrays, **c.kwargs) if callable(entry.accumulations) else entry.accumulations


@over(differentiable=False)
def test_forward(entry: Op, cases: list[Case], dtype: str) -> None:
    for c in cases:
        with named(entry, c):
            forward(entry, c, dtype)


def forward(entry: Op, c: Case, dtype: str) -> None:
    arrays = entry.draw(c, dtype, "parity")
    if dtype not in FLOATS:
        arrays = [a.astype(dtype) for a in arrays]
    theirs, _ = torch_run(entry, c, arrays, dtype)
    if dtype == "float64" and entry.id == "scaled_dot_product_attention:sinks":
        # A sum over 9,000 keys rounds PyTorch's float64, too.
        exact = [entry.reference(*(a.astype(np.longdouble) for a in arrays), **c.kwargs)]
    else:
        right, _ = torch_run(entry, c, arrays, "float64" if dtype in FLOATS else dtype, device="cpu")
        exact = [to_numpy(e) for e in right]
    for name in names(entry):
        use(entry, name)
        ours = outputs_of(entry, c, [tensor(a, dtype if dtype in FLOATS else None) for a in arrays])
        assert len(ours) == len(theirs)
        for i, (o, t, e) in enumerate(zip(ours, theirs, exact)):
            what = f"{entry.id} output {i} in {dtype} {name or ''}"
            if not o.dtype.is_floating_point:
                assert o.dtype.name == str(t.dtype).removeprefix("torch."), what
                assert np.array_equal(o.cpu().numpy(), t.cpu().numpy()), what
            else:
                judge(array(o), to_numpy(t), e, dtype, terms_of(entry, c, arrays), what)


@over(differentiable=True)
def test_backward(entry: Op, cases: list[Case], dtype: str) -> None:
    for c in cases:
        with named(entry, c):
            backward(entry, c, dtype)


def backward(entry: Op, c: Case, dtype: str) -> None:
    arrays = entry.draw(c, dtype, "parity")
    outs = [o for o in outputs_of(entry, c, [tensor(a, dtype) for a in arrays]) if o.dtype.is_floating_point]
    dys = upstream(outs, dtype, entry.id + c.id)
    _, theirs = torch_run(entry, c, arrays, dtype, dys)
    _, exact = torch_run(entry, c, arrays, "float64", dys, "cpu")
    terms = max([terms_of(entry, c, arrays), *(a.size for a in arrays)])  # a gradient may add up over everything
    magnitude = max([0.0, *(np.abs(dy).max(initial=0.0) for dy in dys)])
    for name in names(entry):
        use(entry, name)
        _, ours = gradients(entry, c, arrays, dtype, dys)
        for i, t, e in zip(entry.differentiable(c), theirs, exact):
            what = f"{entry.id} gradient of input {i} in {dtype} {name or ''}"
            assert (ours[i] is None) == (t is None), what
            judge(array(ours[i]), to_numpy(t), to_numpy(e), dtype, terms, what, magnitude)


def test_every_float_op_has_a_counterpart() -> None:
    """Only creation ops, in-place optimizer ops, draws, views, checksums and decoder_step, which is compared with the
    layers of a model, may lack a PyTorch composition."""
    without = {entry.op for entry in TABLE if entry.torch is None} - {
        entry.op for entry in TABLE if entry.torch is not None
    }
    assert without <= {
        "empty",
        "full",
        "uniform",
        "normal",
        "randint",
        "sample",
        "advance_",
        "decoder_step",
        "adamw_",
        "clip_grad_norm_",
        "muon_",
        "ema_",
        "tree_sum_",
        "bank_sum_",
        "block_norm",
        "checksums",
    }, without
    batched = {
        entry.op for entry in TABLE for c in entry.cases if any(len(s.shape) >= 2 and s.shape[0] > 1 for s in c.inputs)
    }
    assert {
        "matmul",
        "linear",
        "embedding",
        "rms_norm",
        "rope",
        "swiglu",
        "softmax",
        "scaled_dot_product_attention",
        "cross_entropy",
        "linear_cross_entropy",
    } <= batched
