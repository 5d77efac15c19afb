"""xt_merge_dims of csrc/core/view.c, on which every loop over strided views rests: the same elements, in the order it promises."""

import ctypes
import itertools
import os
import random
import shutil
import subprocess

import pytest
from places import ROOT

MAX_DIMS = 8
Sizes = ctypes.c_int64 * MAX_DIMS


class View(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("shape", Sizes),
        ("strides", Sizes),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))))
    path = tmp_path_factory.mktemp("core") / "view.so"
    sources = [ROOT / "csrc/core" / name for name in ("view.c", "dtype.c", "error.c")]
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", f"-I{ROOT}/csrc", *sources, "-o", path], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def merge(library):
    """(shape, strides of each view, sort, first, ndim) -> shape, strides of each view"""

    def call(shape, strides, sort=False, first=0, ndim=None):
        views = [View(ndim=len(shape), shape=Sizes(*shape), strides=Sizes(*s)) for s in strides]
        pointers = (ctypes.POINTER(View) * len(views))(*map(ctypes.pointer, views))
        numel, sizes, steps = ctypes.c_int64(-1), Sizes(), (Sizes * len(views))()
        ndim = len(shape) - first if ndim is None else ndim
        left = library.xt_merge_dims(len(views), pointers, first, ndim, sort, ctypes.byref(numel), sizes, steps)
        expected = 1
        for size in shape[first : first + ndim]:
            expected *= size
        assert numel.value == expected
        assert left == library.xt_merge_dims(len(views), pointers, first, ndim, sort, None, sizes, steps)
        return list(sizes[:left]), [list(row[:left]) for row in steps]

    return call


def offsets(shape, strides):
    """Of every element in row-major order, one tuple with an offset in each view."""
    return [
        tuple(sum(i * step for i, step in zip(at, row, strict=True)) for row in strides)
        for at in itertools.product(*map(range, shape))
    ]


CASES = [
    # shape, strides of each view, sort -> shape, strides
    ((2, 3, 4), [(12, 4, 1)], False, [24], [[1]]),
    ((2, 3, 4), [(12, 4, 1), (4, 8, 1)], False, [2, 3, 4], [[12, 4, 1], [4, 8, 1]]),  # the second view merges nothing
    ((2, 3, 4), [(24, 4, 1)], False, [2, 12], [[24, 1]]),
    ((2, 1, 4), [(4, 99, 1)], False, [8], [[1]]),  # the stride of a size 1 does not matter
    ((1, 1), [(7, 7)], False, [], [[]]),
    ((), [()], True, [], [[]]),
    ((3, 4), [(0, 0)], False, [12], [[0]]),  # one element many times
    ((3, 4), [(1, 3)], False, [3, 4], [[1, 3]]),
    ((3, 4), [(1, 3)], True, [12], [[1]]),
    ((3, 4), [(1, 3), (4, 1)], True, [4, 3], [[3, 1], [1, 4]]),
    ((3, 4), [(0, 0), (1, 3)], True, [12], [[0], [1]]),  # equal in the first view: the second decides
    ((3, 4), [(2, 2), (5, 5)], True, [3, 4], [[2, 2], [5, 5]]),  # equal in all: the order stays
    ((2, 0, 3), [(3, 3, 1)], False, [2, 0], [[3, 1]]),
]


@pytest.mark.parametrize(("shape", "strides", "sort", "sizes", "steps"), CASES)
def test_examples(merge, shape, strides, sort, sizes, steps):
    assert merge(shape, strides, sort) == (sizes, steps)


def test_a_range_of_dimensions(merge):
    shape, strides = (2, 3, 4, 5), [(60, 20, 5, 1)]
    assert merge(shape, strides, first=1, ndim=2) == ([12], [[5]])
    assert merge(shape, strides, first=3, ndim=0) == ([], [[]])


def test_random_views(merge):
    random.seed(20)
    for case in range(3000):
        ndim, count, sort = random.randint(0, 5), random.randint(1, 4), random.random() < 0.5
        shape = [random.choice((1, 1, 2, 3)) for _ in range(ndim)]
        strides = []
        for _ in range(count):
            order, step, row = list(range(ndim)), random.choice((1, 1, 2)), [0] * ndim
            if random.random() < 0.5:
                random.shuffle(order)
            for d in reversed(order):
                row[d] = step if random.random() < 0.9 else 0
                step *= shape[d] if random.random() < 0.9 else shape[d] + 1
            strides.append(row)
        sizes, steps = merge(shape, strides, sort)
        where = f"case {case} of seed 20: {shape} {strides} sort={sort} -> {sizes} {steps}"
        before, after = offsets(shape, strides), offsets(sizes, steps)
        assert (sorted(before) == sorted(after)) if sort else (before == after), where
        assert 1 not in sizes, where
        columns = list(zip(*steps, strict=True))
        for outer, inner, size in zip(columns, columns[1:], sizes[1:], strict=False):
            assert any(a != b * size for a, b in zip(outer, inner, strict=True)), where + ": two more would merge"
            assert not sort or outer >= inner, where + ": a larger stride is inside"
