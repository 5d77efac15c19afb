"""Wrong arguments of composed functions: one sentence with the op, the argument, the rule and the value."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

X = xt.ones((3, 4), device="cpu")
ONE = xt.tensor(1.0, device="cpu")
Q = xt.ones((1, 2, 4, 8), device="cpu")
MASK = xt.zeros((4, 4), device="cpu")


def put(index: object) -> None:
    xt.zeros((3, 4), device="cpu")[index] = 1.0  # pyright: ignore[reportArgumentType]


def mhc_post(**changed: xt.Tensor) -> xt.Tensor:
    bfloat16 = {"x": xt.ones((3, 2, 4), dtype=xt.bfloat16), "y": xt.ones((3, 4), dtype=xt.bfloat16)}
    return _C.mhc_post(**{**bfloat16, "h_post": xt.ones(3, 2), "h_res": xt.ones(3, 2, 2), **changed})


REFUSED: list[tuple[Callable, type[Exception], str]] = [
    (lambda: X.tril("1"), TypeError, "tril: diagonal must be an int, got str"),
    (lambda: X.triu(1.5), TypeError, "triu: diagonal must be an int, got float"),
    (lambda: X.norm(2, "a"), TypeError, "norm: dim must be an int, got str"),
    (lambda: X.norm(2, (0, 1.5)), TypeError, "norm: dim must be an int, got float"),
    (lambda: X.norm(2, 0, "a"), TypeError, "norm: keepdim must be a bool, got str"),
    (lambda: X.unbind("a"), TypeError, "unbind: dim must be an int, got str"),
    (lambda: X.unbind(1.0), TypeError, "unbind: dim must be an int, got float"),
    (lambda: ONE.unbind(), IndexError, "unbind: input must have at least 1 dim, got shape ()"),
    (lambda: X.repeat(2.0), TypeError, "repeat: each of sizes must be an int, got float"),
    (lambda: X.repeat(None), TypeError, "repeat: each of sizes must be an int, got NoneType"),
    (lambda: X.repeat((2, "a")), TypeError, "repeat: each of sizes must be an int, got str"),
    (lambda: X.repeat_interleave("a"), TypeError, "repeat_interleave: repeats must be an int, got str"),
    (lambda: X.repeat_interleave(1.5), TypeError, "repeat_interleave: repeats must be an int, got float"),
    (lambda: X.repeat_interleave([1, 2, 3], 0), TypeError, "repeat_interleave: repeats must be an int, got list"),
    (lambda: X.repeat_interleave(2, "a"), TypeError, "repeat_interleave: dim must be an int, got str"),
    (lambda: X.topk("1"), TypeError, "topk: k must be an int, got str"),
    (lambda: X.topk(1.5), TypeError, "topk: k must be an int, got float"),
    (lambda: X.topk(1, "a"), TypeError, "topk: dim must be an int, got str"),
    (lambda: ONE.topk(0), ValueError, "topk: k must be 1 where input has no dims, got 0"),
    (lambda: ONE.topk(2), ValueError, "topk: k must be 1 where input has no dims, got 2"),
    (lambda: ONE.topk(1, -2), IndexError, "topk: dim must be in [-1, 0], got -2"),
    (lambda: ONE.sort(1), IndexError, "sort: dim must be in [-1, 0], got 1"),
    (lambda: ONE.argsort(3), IndexError, "argsort: dim must be in [-1, 0], got 3"),
    (lambda: X.argsort(None), TypeError, "argsort: dim must be an int, got NoneType"),
    (lambda: xt.ones(2, 3) @ xt.ones(2), ValueError, "matmul: the last dim of input must equal the only dim of other, got shapes (2, 3) and (2,)"),
    (
        lambda: xt.ones(2, 3) @ xt.ones(2, 4), ValueError,
        "matmul: the last dim of input must equal the second last dim of other, got shapes (2, 3) and (2, 4)",
    ),
    (
        lambda: F.linear(xt.ones(2, 5), xt.ones(7, 3)), ValueError,
        "linear: the last dim of input must be 3, as that of weight (7, 3) is, got shape (2, 5)",
    ),
    (lambda: ONE.select(0, 0), IndexError, "select: input must have at least one dimension, got a scalar"),
    (lambda: X.select(0, 3), IndexError, "select: index must be in [-3, 3) for dimension 0, got 3"),
    (lambda: xt.arange(0, 2, dtype=xt.bool), TypeError, "arange: dtype must be a number type, got bool"),
    (lambda: xt.arange(0.0, -0.5, 1.0), ValueError, "arange: step must lead from start to end, got start 0, end -0.5, step 1"),
    (lambda: _C.normal((2,), key=(1, 2, 3)), ValueError, "normal: key must be a seed and the number of a fill, got 3 numbers"),
    (lambda: _C.uniform((2,), key=(1,)), ValueError, "uniform: key must be a seed and the number of a fill, got 1 numbers"),
    (lambda: mhc_post(h_post=xt.ones((3, 2), dtype=xt.bfloat16)), TypeError, "mhc_post: h_post must have dtype float32, got bfloat16"),
    (lambda: mhc_post(h_res=xt.ones((3, 2, 2), device="meta")), ValueError, "mhc_post: h_res must be on the device of x, cpu, got meta:0"),
    (
        lambda: F.scaled_dot_product_attention(Q, Q.bfloat16(), Q, MASK), TypeError,
        "scaled_dot_product_attention: key must have the dtype of query, float32, got bfloat16",
    ),
    (
        lambda: F.scaled_dot_product_attention(Q, Q, Q.double(), dropout_p=0.5), TypeError,
        "scaled_dot_product_attention: value must have the dtype of query, float32, got float64",
    ),
    (
        lambda: F.scaled_dot_product_attention(Q.long(), Q.long(), Q.long(), MASK), TypeError,
        "scaled_dot_product_attention: query must have a floating point dtype, got int64",
    ),
    (
        lambda: F.scaled_dot_product_attention(Q, None, Q, MASK), TypeError,
        "scaled_dot_product_attention: key must be a Tensor, got NoneType",
    ),
    (lambda: put(np.array([2**64 - 1], np.uint64)), IndexError, "index: every index must be below 2^63, got 18446744073709551615"),
    (lambda: X[np.array([1, 2**63], np.uint64)], IndexError, "index: every index must be below 2^63, got 9223372036854775808"),
    (lambda: put([9]), IndexError, "index_put: index must be in [-3, 3), got 9 at position 0"),
    (lambda: X[[0, -4]], IndexError, "index: index must be in [-3, 3), got -4 at position 1"),
    (lambda: xt.cat(1.5), TypeError, "cat: tensors must be an iterable of Tensors, got float"),
    (lambda: xt.cat(ONE), TypeError, "cat: tensors must be an iterable of Tensors, got Tensor"),
    (lambda: xt.stack(None), TypeError, "stack: tensors must be an iterable of Tensors, got NoneType"),
    (lambda: xt.stack([1.5]), TypeError, "stack: each of tensors must be a Tensor, got float"),
    (lambda: xt.stack([X, "x"]), TypeError, "stack: each of tensors must be a Tensor, got str"),
    (lambda: X.split(1.5), TypeError, "split: split_size must be an int, got float"),
    (lambda: X.split([1, "x"]), TypeError, "split: each of split_size must be an int, got str"),
    (lambda: X.chunk("a"), TypeError, "chunk: chunks must be an int, got str"),
    (lambda: X.narrow(0, "a", 1), TypeError, "narrow: start must be an int, got str"),
    (lambda: X.narrow(0, 0, 1.5), TypeError, "narrow: length must be an int, got float"),
    (lambda: xt.full(1.5, 0), TypeError, "full: size must be an int, got float"),
    (lambda: xt.randint(0, 2, 1.5), TypeError, "randint: size must be an int, got float"),
    (lambda: F.rms_norm(X, (3, 4), "w"), TypeError, "rms_norm: weight must be a Tensor, got str"),
    (lambda: F.layer_norm(X, (3, 4), None, 1.5), TypeError, "layer_norm: bias must be a Tensor, got float"),
    (lambda: F.dropout(X, "a"), ValueError, "dropout: p must be in [0, 1], got 'a'"),
    (
        lambda: F.cross_entropy(X, xt.zeros(3, dtype=xt.int64), label_smoothing="a"), ValueError,
        "cross_entropy: label_smoothing must be in [0, 1], got 'a'",
    ),
]  # fmt: skip


@pytest.mark.on_cpu
@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: REFUSED[n][2].split(",")[0])
def test_it_is_refused_in_one_sentence(number: int) -> None:
    call, kind, text = REFUSED[number]
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call()


NEED_INPUT: dict[str, Callable] = {
    **{
        name: getattr(xt, name)
        for name in ("max", "min", "argmin", "flatten", "var", "std", "square", "isnan", "isinf", "isfinite")
    },
    **{
        name: getattr(xt, name)
        for name in ("any", "all", "empty_like", "zeros_like", "ones_like", "rand_like", "randn_like")
    },
    "split": lambda x: xt.split(x, 1),
    "chunk": lambda x: xt.chunk(x, 1),
    "narrow": lambda x: xt.Tensor.narrow(x, 0, 0, 1),
    "clamp": lambda x: xt.clamp(x, 0),
    "full_like": lambda x: xt.full_like(x, 1),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "add_rms_norm": lambda x: F.add_rms_norm(x, X),
    "log_softmax": F.log_softmax,
    "dropout": F.dropout,
}


@pytest.mark.parametrize("op", NEED_INPUT)
def test_an_input_that_is_no_tensor_is_refused_in_one_sentence(op: str) -> None:
    for bad in (1.5, "x", None, [1.0], np.ones(4)):
        with pytest.raises(TypeError, match=f"^{op}: input must be a Tensor, got {type(bad).__name__}$"):
            NEED_INPUT[op](bad)


@pytest.mark.parametrize("op", ["silu", "relu", "sigmoid", "tanh"])
def test_functions_of_one_tensor_refuse_others_as_the_core_does(op: str) -> None:
    with pytest.raises(TypeError, match=f"^{op}: argument 'input' must be a Tensor, got float$"):
        getattr(F, op)(1.5)


def test_integers_of_numpy_and_large_ones_are_taken() -> None:
    assert (
        X[np.array([1, 2], np.uint64)].shape == (2, 4) and X[np.array([], np.uint64)].shape == (0, 4) == X[[], :].shape
    )
    assert X[np.uint64(2)].shape == (4,)
    assert (
        xt.full(np.int64(2), 1).shape == (2,) == xt.full(xt.tensor(2), 1).shape == xt.randint(0, 3, np.int64(2)).shape
    )
    assert [part.shape for part in X.split(np.int64(2))] == [(2, 4), (1, 4)]
    assert [part.shape for part in X.split([np.int64(1), 2])] == [(1, 4), (2, 4)] and X.chunk(np.int64(3))[0].shape == (
        1,
        4,
    )
    x = xt.arange(6).reshape((2, 3))
    assert x.repeat(np.int64(2), 1).shape == (4, 3) and x.topk(np.int32(1)).values.tolist() == [[2], [5]]
    assert x.repeat_interleave(np.int64(2), np.int64(1)).shape == (2, 6)
    for k in (2**70, -(2**70)):
        none = [[0, 0, 0], [0, 0, 0]]
        assert x.tril(k).tolist() == (x.tolist() if k > 0 else none)
        assert x.triu(k).tolist() == (none if k > 0 else x.tolist())


def test_a_bool_of_numpy_is_a_bool() -> None:
    assert X.norm(2, 0, np.bool_(True)).tolist() == X.norm(2, 0, True).tolist()
