"""Convolution against loops over every place, tap and element."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from xtrain import functional as F
from xtrain.optable.table import tensor
from xtrain.testing import Convolution, assert_close, tolerance

DRAWS = 40


def drawn(seed: int) -> Convolution:
    """Parameters of 1 to 3 dimensions that fit."""
    rng = np.random.default_rng(seed)
    dims = 1 + seed % 3
    groups = int(rng.integers(1, 4))
    while True:
        size, kernel, stride, padding, dilation = (
            tuple(int(n) for n in rng.integers(low, high, dims))
            for low, high in ((1, 7), (1, 5), (1, 4), (0, 4), (1, 4))
        )
        if all(d * (k - 1) + 1 <= n + 2 * p for n, k, p, d in zip(size, kernel, padding, dilation, strict=True)):
            counts = int(rng.integers(0, 3)), groups * int(rng.integers(1, 3)), groups * int(rng.integers(1, 3))
            return Convolution(*counts, size, kernel, stride, padding, dilation, groups)


def places(n: int, k: int, s: int, p: int, d: int) -> int:
    """How often the window fits, moved by s from the left end of the padded row."""
    count = 0
    while count * s + d * (k - 1) < n + 2 * p:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(DRAWS))
def test_counts_equal_those_of_loops(seed: int) -> None:
    c = drawn(seed)
    rows = list(zip(c.size, c.kernel, c.stride, c.padding, c.dilation, strict=True))
    output = tuple(places(*row) for row in rows)
    assert c.output == output
    of_output, of_input, of_weight = np.zeros(output, int), np.zeros(c.size, int), np.zeros(c.kernel, int)
    for t in np.ndindex(*output):
        for k in np.ndindex(*c.kernel):
            at = tuple(i * s + j * d - p for i, j, (_, _, s, p, d) in zip(t, k, rows, strict=True))
            if all(0 <= i < n for i, n in zip(at, c.size, strict=True)):
                of_output[t] += 1
                of_input[at] += 1
                of_weight[k] += 1
    width, rows_of_group = c.in_channels // c.groups, c.out_channels // c.groups
    assert c.accumulations("output") == width * of_output.max()
    assert c.accumulations("input") == rows_of_group * of_input.max()
    assert c.accumulations("weight") == c.batch * of_weight.max()
    assert c.accumulations("bias") == c.batch * math.prod(output)
    assert c.multiplications == c.batch * c.out_channels * width * of_output.sum()
    assert c.terms == width * math.prod(c.kernel)
    assert c.flops == 2 * c.batch * c.out_channels * math.prod(output) * c.terms >= 2 * c.multiplications
    elements = [np.zeros(c.shapes[name]).size for name in ("input", "weight", "output", "bias")]
    assert c.bytes("bfloat16") == 2 * sum(elements[:3])
    assert c.bytes("float64", bias=True) == 8 * sum(elements)


@pytest.mark.parametrize("seed", range(0, DRAWS, 3))
def test_the_shapes_are_those_of_conv1d(seed: int) -> None:
    c = drawn(seed)
    shapes = c.shapes
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal(shapes[name]) for name in ("input", "weight"))
    options = dict(stride=c.stride, padding=c.padding, dilation=c.dilation, groups=c.groups)
    y = F.conv1d(tensor(x, "float32"), tensor(w, "float32"), **options)
    assert tuple(y.shape) == shapes["output"]
    if y.numel():
        exact = F.conv1d(tensor(x, "float32").double(), tensor(w, "float32").double(), **options)
        largest = float(F.conv1d(tensor(np.abs(x), "float64"), tensor(np.abs(w), "float64"), **options).max().item())
        rtol, atol = c.tolerance("float32", magnitude=largest)
        assert_close(y.double(), exact, rtol=rtol, atol=atol)


def test_one_number_stands_for_all_dimensions() -> None:
    a = Convolution(2, 4, 6, (9, 8), (3, 3), stride=2, padding=1, groups=2)
    b = Convolution(2, 4, 6, (9, 8), 3, (2, 2), (1, 1), (1, 1), 2)
    assert a == b and a.output == (5, 4)
    assert Convolution(1, 1, 1, 9, 3).kernel == (3,)


def test_the_tolerance_has_the_terms_of_the_sum() -> None:
    c = Convolution(8, 64, 32, 100, 5, padding=2)
    assert c.tolerance("float32", magnitude=3.0) == tolerance("float32", accumulations=320, magnitude=3.0)
    assert c.tolerance("bfloat16", of="weight") == tolerance("bfloat16", accumulations=800)
    assert Convolution(0, 1, 1, 3, 1).tolerance("float32", of="weight") == tolerance("float32")


def test_formats_of_less_than_a_byte() -> None:
    c = Convolution(1, 1, 1, 3, 2)  # 3 + 2 + 2 elements
    sizes = {"float4_e2m1": 4, "float8_e4m3": 7, "bool": 7, "tf32": 28, "int16": 14}
    assert {name: c.bytes(name) for name in sizes} == sizes


def test_wrong_parameters() -> None:
    for arguments, error, message in (
        (dict(batch=-1), ValueError, "Convolution: batch must be at least 0, got -1"),
        (dict(size=(3, 3, 3, 3)), ValueError, "Convolution: size must have 1 to 3 dimensions, got 4"),
        (dict(kernel=(2, 2)), ValueError, "Convolution: kernel must have 1 numbers, as size has, got 2"),
        (dict(stride=0), ValueError, "Convolution: stride must be at least 1, got 0"),
        (dict(dilation=1.5), TypeError, "Convolution: dilation must be an int, got float"),
        (dict(groups=2), ValueError, "Convolution: groups must divide in_channels, 3, got 2"),
        (dict(kernel=4, dilation=3, padding=1), ValueError, "Convolution: kernel must fit into the padded size 9, got 4 with dilation 3"),
    ):  # fmt: skip
        given = dict(batch=1, in_channels=3, out_channels=4, size=7, kernel=2) | arguments
        with pytest.raises(error, match=re.escape(message)):
            Convolution(**given)
    with pytest.raises(ValueError, match="of must be 'output', 'input', 'weight' or 'bias', got 'x'"):
        Convolution(1, 1, 1, 3, 2).accumulations("x")
