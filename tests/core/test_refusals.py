"""What ops and methods refuse: one sentence each, with the op or argument, the rule and the value."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from places import ROOT

import xtrain as xt
from xtrain import _C
from xtrain.generation import generate_texts
from xtrain.models import Llama, LlamaConfig
from xtrain.tokenizers import ByteTokenizer

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
    (lambda: setattr(x(2), "requires_grad", 1), TypeError, r"requires_grad: must be a bool, got int$"),
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


# ---- arguments that look alike: what is taken, and what is refused


@pytest.fixture(scope="module")
def model() -> Llama:
    xt.manual_seed(0)
    sizes = dict(vocab_size=256, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    return Llama(LlamaConfig(**sizes, num_key_value_heads=2))


def test_repeat_takes_all_kinds_of_sizes() -> None:
    x = xt.arange(3)
    want = x.repeat(1, 2).tolist()
    for sizes in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], np.int32)):
        assert x.repeat(sizes).tolist() == want
    assert x.repeat(np.int64(2)).tolist() == x.repeat(np.array(2)).tolist() == [0, 1, 2] * 2
    with pytest.raises(TypeError, match="repeat: each of sizes must be an int, got float"):
        x.repeat(np.array([1.0]))


def test_generate_takes_numpy_integers(model) -> None:
    want = model.generate([1, 2], 4, top_k=3, seed=1).tolist()
    assert model.generate([1, 2], np.int64(4), top_k=np.int32(3), seed=1).tolist() == want
    assert model.generate([1, 2], np.uint8(4), top_k=xt.tensor(3), seed=xt.tensor(1)).tolist() == want
    for bad in (4.0, np.float32(4), "4", None, True, np.True_, xt.tensor(True), xt.tensor(4.0), xt.tensor([4, 4])):
        with pytest.raises(ValueError, match="generate: max_new_tokens must be an integer"):
            model.generate([1, 2], bad)
    for name in ("top_k", "seed"):
        for bad in (True, np.True_, xt.tensor(True), xt.tensor(4.0)):
            text = f"^generate: {name} must be an integer .* or None, got {re.escape(repr(bad))}$"
            with pytest.raises(ValueError, match=text):
                model.generate([1, 2], 3, **{name: bad})
    with pytest.raises(ValueError, match="generate: top_k must be an integer >= 1 or None, got 2.0"):
        model.generate([1, 2], 3, top_k=2.0)


def test_prompts_are_lists_of_ids(model) -> None:
    assert len(generate_texts(model, ByteTokenizer(), [[97, 98], np.array([[99]])], 2)) == 2
    with pytest.raises(ValueError, match=r"ids must be one list of token ids, got shape \(2, 2\) in prompt 1"):
        generate_texts(model, ByteTokenizer(), [[97], [[97, 98], [99, 100]]], 2)


def test_the_variance_of_a_scalar() -> None:
    x = xt.tensor(3.0)
    for dim in (None, 0, -1):
        assert np.isnan(x.var(dim).item()) and x.var(dim, unbiased=False).item() == 0.0
        assert np.isnan(x.std(dim).item())
    with pytest.raises(IndexError, match=r"dim must be in \[-1, 0\], got 1"):
        x.var(1)


def test_errors_of_rows_have_the_name_of_the_call() -> None:
    x = xt.zeros(3, 2)
    with pytest.raises(IndexError, match=r"^index_select: index must be in \[-3, 3\), got 3 at position 1$"):
        x.index_select(0, xt.tensor([0, 3]))
    with pytest.raises(TypeError, match=r"^index_select: indices must be int64 or int32, got float32$"):
        x.index_select(0, xt.zeros(2))
    with pytest.raises(IndexError, match=r"^index_add: index must be in \[-3, 3\), got 5 at position 0$"):
        x.index_add(0, xt.tensor([5]), xt.ones(1, 2))
    with pytest.raises(ValueError, match=r"^index_add: values must have"):
        x.index_add(0, xt.tensor([1]), xt.ones(1, 5))


def test_what_is_repeated_by_a_stride_is_read_once() -> None:
    wide = xt.tensor([[1.0], [float("nan")], [-3.0], [float("inf")]]).expand(4, 10**12)
    begun = time.process_time()
    text = repr(wide)
    assert time.process_time() - begun < 60  # an element at a time takes an hour
    assert "min=-3, max=1, mean=-1, nan=1000000000000, inf=1000000000000" in text
    assert _C.stats(wide) == (-3.0, 1.0, -1.0, 10**12, 10**12)
    dense = xt.tensor([[2.0, 5.0]]).expand(900, 2)
    assert _C.stats(dense) == _C.stats(dense.contiguous())


def test_a_tool_without_a_python_says_so(tmp_path) -> None:
    tool = str(ROOT / "tools/try_package.py")
    for words, said in (
        (["x.whl", "--python", "no-such-python"], "no-such-python cannot be run: No such file or directory"),
        (["x.whl"], "no Python among python3.10"),
    ):
        done = subprocess.run(
            [sys.executable, tool, *words], capture_output=True, text=True, env={"PATH": str(tmp_path)}
        )
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
