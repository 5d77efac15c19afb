"""What ops and methods refuse: one sentence each, with the op or argument, the rule and the value."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C

pytestmark = pytest.mark.on_cpu


def x(*shape: int) -> xt.Tensor:
    return xt.zeros(*shape)


def leaf() -> xt.Tensor:
    return xt.ones(2, requires_grad=True)


REFUSED = [
    # sizes and dims
    (lambda: x(*(1,) * 9), ValueError, r"full: argument 'shape' must have at most 8 entries, got 9"),
    (lambda: x(2, -1), ValueError, r"shape must not hold negative sizes, got \(2, -1\)"),
    (lambda: x(2, 3).sum(2), (ValueError, IndexError), r"sum: dim must be in \[-2, 1\], got 2"),
    (lambda: x(2, 3).sum(-3), (ValueError, IndexError), r"sum: dim must be in \[-2, 1\], got -3"),
    (lambda: x(2, 3).sum((0, -2)), ValueError, r"sum: dim must not name dimension 0 twice"),
    (lambda: x(2, 3).softmax(2), (ValueError, IndexError), r"softmax: dim must be in \[-2, 1\], got 2"),
    (lambda: xt.sort(x()), IndexError, r"sort: input must have at least 1 dim, got shape \(\)"),
    (lambda: x().split(1), IndexError, r"split: input must have at least 1 dim, got shape \(\)"),
    (lambda: x(2, 3) + x(2, 4), ValueError, r"add: shapes must broadcast, got \(2, 3\) and \(2, 4\)"),
    (
        lambda: xt.cat([x(2, 3), x(2, 4)]),
        ValueError,
        r"cat: tensors\[1\] must match \(2, 3\) except in dimension 0, got \(2, 4\)",
    ),
    (
        lambda: x(2, 3).reshape(7),
        ValueError,
        r"reshape: shape must have 6 elements in all .* got \(7,\) for a tensor of shape \(2, 3\)",
    ),
    (lambda: x(2, 3).reshape(-1, -1), ValueError, r"reshape: "),
    (
        lambda: x(2, 3).T.view(6),
        ValueError,
        r"view: shape \(6,\) would need a copy of the strided tensor of shape \(3, 2\); use reshape\(\)",
    ),
    (lambda: x(2, 3).permute(0), ValueError, r"permute: dims must name each of the 2 dimensions once, got \(0,\)"),
    (lambda: x(2, 3).permute(0, 0), ValueError, r"permute: dims must name each dimension once, got \(0, 0\)"),
    (
        lambda: x(2, 3).expand(4, 3),
        ValueError,
        r"expand: shape must extend \(2, 3\) \(only sizes of 1 can grow\), got \(4, 3\)",
    ),
    (lambda: _C.select(x(2, 3), 1, 3), IndexError, r"select: index must be in \[-3, 3\) for dimension 1, got 3"),
    (
        lambda: x(2, 3) @ x(2, 3),
        ValueError,
        r"matmul: the last dim of input must equal the first dim of other|matmul: the last dim of input must equal the .* dim of other, got shapes \(2, 3\) and \(2, 3\)",
    ),
    (lambda: x(2, 3)[2], IndexError, r"index 2 is out of range for dimension 0 of size 2"),
    (lambda: x(2, 3)[..., ...], IndexError, r"an index can have only one ellipsis"),
    (lambda: x(2, 3)[0, 0, 0], IndexError, r"too many indices for a tensor of 2 dimensions"),
    (
        lambda: x(2)[(None,) * 8],
        (IndexError, ValueError),
        r"an index can add at most|unsqueeze: input must have fewer than 8 dimensions",
    ),
    (lambda: len(x()), TypeError, r"len\(\) of a tensor of shape \(\)"),
    (lambda: list(x()), TypeError, r"cannot iterate over a tensor of shape \(\)"),
    (lambda: x(2, 3).size(2), IndexError, r"size: dim must be in \[-2, 2\), got 2"),
    (lambda: xt.arange(0, 1e18, 1e-3), ValueError, r"arange: too many elements"),
    (lambda: _C.split(x(3), [1, 1], 0), ValueError, r"split"),
    # numbers, dtypes, devices, arguments
    (lambda: xt.set_num_threads(0), ValueError, r"set_num_threads: count must be in \[1, \d+\], got 0"),
    (lambda: xt.set_num_threads(10_000), ValueError, r"set_num_threads: count must be in \[1, \d+\], got 10000"),
    (lambda: x(2).to("tpu"), (ValueError, TypeError), r"must be 'cpu', 'cuda' or 'cuda:<index>', got 'tpu'|got 'tpu'"),
    (lambda: xt.device("cuda", 1000), ValueError, r"device: argument 'index' must be in \[0, \d+\], got 1000"),
    (
        lambda: _C.softmax(x(2), dimension=0),
        TypeError,
        r"softmax: unexpected keyword argument 'dimension', the signature is softmax\(",
    ),
    (lambda: _C.matmul(x(2, 2)), TypeError, r"matmul: missing argument 'other', the signature is matmul\("),
    (lambda: xt.tensor([[1, 2], [3]]), ValueError, r"lists at depth 1 must all have length 2, got 1"),
    (lambda: xt.tensor([300], dtype=xt.uint8), (ValueError, OverflowError), r"data must fit into uint8, got 300"),
    (
        lambda: _C.adamw_(
            [x(1)],
            [x(1)],
            [x(1)],
            [],
            [],
            [xt.zeros((), dtype=xt.int64)],
            [xt.zeros((), dtype=xt.float64)],
            xt.zeros((1, 5), dtype=xt.float64),
        ),
        ValueError,
        r"adamw_: exp_avg_sqs must hold one tensor per parameter \(1\), got 0",
    ),
    # gradients
    (
        lambda: setattr(leaf() * 2, "requires_grad", False),
        (RuntimeError, ValueError),
        r"requires_grad: can be turned off for leaf tensors only; use detach\(\) to cut 'mul' off the graph",
    ),
    (lambda: setattr(x(2), "requires_grad", 1), TypeError, r"requires_grad: must be a bool"),
    (
        lambda: setattr(leaf(), "grad", xt.ones(2, dtype=xt.float64)),
        RuntimeError,
        r"grad: must be float32 on cpu, got float64 on cpu",
    ),
    (
        lambda: _C.backward([leaf() * 2], [x(2), x(2)], False),
        ValueError,
        r"backward: argument 'gradients' must have 1 entries like tensors, got 2",
    ),
    (
        lambda: copy.deepcopy(leaf() * 2),
        (RuntimeError, TypeError, ValueError),
        r"only leaf tensors can be copied; use detach\(\) or clone\(\) on the result of 'mul'",
    ),
    # exchange
    (
        lambda: x(2).__array__("\ud800"),
        TypeError,
        r"__array__: dtype must be one of NumPy's, got '\\ud800'",
    ),
    (
        lambda: np.asarray(x(2)).__class__ and x(2).__array__(np.float64, copy=False),
        ValueError,
        r"__array__: another dtype needs a copy, which copy=False forbids",
    ),
    (
        lambda: x(2).__dlpack__(dl_device=(2, 0)),
        (BufferError, ValueError),
        r"__dlpack__: tensor on cpu cannot be given to DLPack device",
    ),
    (
        lambda: xt.from_dlpack(
            type("P", (), {"__dlpack__": lambda self, **k: 3, "__dlpack_device__": lambda self: (1, 0)})()
        ),
        BufferError,
        r"from_dlpack: __dlpack__ must return a capsule, got int",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused_in_one_sentence(number: int) -> None:
    call, error, words = REFUSED[number]
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert xt.is_grad_enabled()
