"""Kernels of a step of generation: products of few rows, launches that overlap, blocks that end last and join the others' parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import ROOT
from runs import HANGS

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"),
]
HALVES = ["bfloat16", "float16"]


def drawn(seed: int, *shape: int, dtype: str = "bfloat16") -> xt.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape)
    return xt.tensor(values.astype(np.float32)).to(getattr(xt, dtype)).to("cuda")


def same(a: xt.Tensor, b: xt.Tensor) -> bool:
    return a.cpu().float().numpy().tobytes() == b.cpu().float().numpy().tobytes()


# ---- products -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("n", "k"), [(1, 8), (7, 40), (33, 136), (264, 1032), (1030, 1024), (4096, 64), (130, 3080)])
def test_a_product_of_few_rows(n: int, k: int, dtype: str) -> None:
    """Sums of small integers, which are exact until they are rounded once."""
    random = np.random.default_rng(n + k)
    b = random.integers(-1, 2, (n, k)).astype(np.float32)
    weight = xt.tensor(b).to(getattr(xt, dtype)).to("cuda")
    for m in (1, 2, 7, 8, 9, 15, 16):
        a = random.integers(-1, 2, (m, k)).astype(np.float32)
        x = xt.tensor(a).to(getattr(xt, dtype)).to("cuda")
        rows = _C.explain_gemm((m, n, k), dtype, layout="nt", device="cuda")
        assert next(row for row in rows if row[2] is None) == ("few", "few", None)
        assert same(F.linear(x, weight), xt.tensor(a @ b.T).to(getattr(xt, dtype))), m


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    x, weight = drawn(1, 16, 2048), drawn(2, 1024, 2048)
    whole = F.linear(x, weight)
    for m in (1, 3, 8, 9):
        assert same(F.linear(x[:m], weight), whole[:m]), m


@pytest.mark.parametrize(
    ("sizes", "dtype", "options", "kernel"),
    [
        ((16, 4096, 1024), "bfloat16", {"layout": "nt"}, "few"),
        ((17, 4096, 1024), "bfloat16", {"layout": "nt"}, "cublas"),
        ((16, 4096, 1024), "bfloat16", {"layout": "nn"}, "cublas"),
        ((16, 4096, 1024), "float32", {"layout": "nt"}, "cublas"),
        ((16, 4096, 1028), "bfloat16", {"layout": "nt"}, "cublas"),
        ((16, 4096, 1024), "bfloat16", {"layout": "nt", "ld": (1032, 1024, 4096)}, "few"),
        ((16, 4096, 1024), "bfloat16", {"layout": "nt", "ld": (1025, 1024, 4096)}, "cublas"),
        ((16, 4096, 1024), "bfloat16", {"layout": "nt", "batch": (1, 2)}, "cublas"),
    ],
)
def test_which_products_have_few_rows(sizes, dtype: str, options, kernel: str) -> None:
    rows = _C.explain_gemm(sizes, dtype, device="cuda", **options)
    assert next(name for name, _, reason in rows if reason is None) == kernel


# ---- launches that overlap ----------------------------------------------------------------------------------------------------------


def chain(x: xt.Tensor, weights: list[xt.Tensor], ones: xt.Tensor, seed: xt.Tensor, settle) -> list[xt.Tensor]:
    """Products whose x, or whose weight, the launch before has only just made, in memory that was freed just before."""
    found = []
    for weight in weights:
        x = settle(F.linear(x, weight))
        x = settle(F.rms_norm(x, ones, 1e-6))
        gram = settle(F.linear(x, x))  # [16, 16]: x is the weight, too
        x = settle(F.linear(gram, weight[:, :16]))
        x = settle(F.rms_norm(x, ones, 1e-6))
        found.append(settle(_C.sample(x, seed, temperature=0.0)))
    return [x, *found]


def test_launches_that_overlap_have_the_bits_of_those_that_do_not() -> None:
    x, ones = drawn(3, 16, 1024), xt.ones(1024, dtype=xt.bfloat16, device="cuda")
    seed = xt.tensor([1, 2], device="cuda")
    weights = [drawn(4 + i, 1024, 1024) for i in range(8)]

    def wait(tensor: xt.Tensor) -> xt.Tensor:
        xt.cuda.synchronize()
        return tensor

    with xt.no_grad():
        want = chain(x, weights, ones, seed, wait)
        for _ in range(10):
            assert all(map(same, chain(x, weights, ones, seed, lambda tensor: tensor), want))
        graph = xt.cuda.graph(lambda: chain(x, weights, ones, seed, lambda tensor: tensor)[0])
        for _ in range(5):
            assert same(graph(), want[0])


# ---- parts that the last block joins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (6, 1, 64), (3, 3, 64)])
def test_cached_attention_at_any_position(heads: int, kv_heads: int, dim: int, dtype: str) -> None:
    """Rows of a batch at positions of their own; a launch begins with the counts that the one before left."""
    batch, length = 6, 330
    q, k, v = (drawn(i, batch, n, 1, dim, dtype=dtype) for i, n in enumerate((heads, kv_heads, kv_heads)))
    caches = [drawn(9 + i, batch, kv_heads, length, dim, dtype=dtype) for i in range(2)]
    unit = {"float32": 2.0**-20, "float16": 2.0**-9, "bfloat16": 2.0**-6}[dtype]
    for places in ((0, 63, 64, 128, 329, 1), (329, 328, 200, 127, 65, 0), (5, 330, -1, 70, 191, 192)):
        at = xt.tensor(places, device="cuda")
        outs, kept = [], []
        for plain in (False, True, False):
            mine = [c.clone() for c in caches]
            outs.append(_C.cached_attention(q, k, v, *mine, at, plain=plain).cpu().float().numpy())
            kept.append([c.cpu().float().numpy() for c in mine])
        assert outs[0].tobytes() == outs[2].tobytes()
        known = [0 <= place < length for place in places]
        assert np.isfinite(outs[0]).all((1, 2, 3)).tolist() == np.isfinite(outs[1]).all((1, 2, 3)).tolist() == known
        assert np.abs(outs[0] - outs[1])[known].max() <= unit * 4
        assert all(np.array_equal(a, b) for a, b in zip(kept[0], kept[1]))


@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
def test_the_top_of_a_row_over_many_blocks(dtype: str) -> None:
    """The tokens of the CPU: equal logits in many parts of a row, a part without a finite one, and rows that are not finite."""
    random = np.random.default_rng(5)
    for rows, vocab in ((1, 40007), (5, 40007), (16, 33333)):
        values = random.standard_normal((rows, vocab)) * 3
        values[0, vocab // 4 : vocab // 2] = -np.inf
        if rows > 1:
            values[1] = random.integers(-2, 3, vocab)
            values[2, 5], values[3, vocab // 2] = np.nan, np.inf
        x = xt.tensor(values).to(getattr(xt, dtype))
        for k, top_p in ((1, 1.0), (50, 0.9), (300, 1.0)):
            seed = xt.tensor([k, rows])
            want = _C.sample(x, seed, top_k=k, top_p=top_p, temperature=0.8).tolist()
            for _ in range(2):
                assert _C.sample(x.to("cuda"), seed.to("cuda"), top_k=k, top_p=top_p, temperature=0.8).tolist() == want


@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
@pytest.mark.parametrize("vocab", [1, 33, 2048, 8193, 65552])
def test_the_first_of_the_largest_logits(vocab: int, dtype: str) -> None:
    """The tokens of the CPU, among few different values, and for rows that are not finite."""
    random = np.random.default_rng(vocab)
    values = random.integers(-2, 3, (7, vocab)).astype(np.float64)
    values[1] = 0 * values[1] - np.where(random.random(vocab) < 0.5, 0.0, -0.0)
    values[2], values[3, -1], values[4, vocab // 2] = -np.inf, np.nan, np.inf
    values[5, :-1] = -np.inf
    values[6, -1] = 9
    x, seed = xt.tensor(values).to(getattr(xt, dtype)), xt.tensor([1, 2])
    want = _C.sample(x, seed, temperature=0.0).tolist()
    for _ in range(3):
        assert _C.sample(x.to("cuda"), seed.to("cuda"), temperature=0.0).tolist() == want


@pytest.mark.parametrize("dtype", ["float64", "float32", *HALVES])
def test_a_token_from_any_part_of_a_row(dtype: str) -> None:
    """Warps share out a row, whose first element may lie anywhere: the tokens of the CPU."""
    random = np.random.default_rng(9)
    for vocab in (1, 33, 1025, 20011):
        x = xt.tensor(random.standard_normal((5, vocab)) * 2).to(getattr(xt, dtype))
        there = x.to("cuda")
        for option in ({}, {"top_p": 0.9}, {"top_k": min(vocab, 1025), "temperature": 3.0}):
            for step in range(12):
                seed = xt.tensor([vocab, step])
                want = _C.sample(x, seed, **option).tolist()
                assert _C.sample(there, seed.to("cuda"), **option).tolist() == want, (vocab, option, step)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_rotated_heads_have_the_same_bits_in_few_rows(dtype: str) -> None:
    rows = 17
    q, k = drawn(1, rows, 1, 9, 128, dtype=dtype), drawn(2, rows, 1, 4, 128, dtype=dtype)
    weights = drawn(3, 128, dtype=dtype), drawn(4, 128, dtype=dtype)
    places = xt.tensor(np.random.default_rng(5).integers(0, 40000, rows), device="cuda")
    whole = _C.qk_norm_rope(q, k, *weights, 1e-6, 1e6, places)
    for first, end in ((0, 1), (1, 3), (1, 17), (0, 16)):
        part = _C.qk_norm_rope(q[first:end], k[first:end], *weights, 1e-6, 1e6, places[first:end])
        assert all(same(a, b[first:end]) for a, b in zip(part, whole)), (first, end)


# ---- all layers in one launch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(4))
def test_a_step_in_one_launch_has_the_bits_of_its_parts(case: int) -> None:
    """In a process of its own: blocks that wait for each other hang, and an error of a kernel spoils a process."""
    paths = os.pathsep.join(map(str, (Path(xt.__file__).parent.parent, ROOT / "tests/support")))
    done = subprocess.run(
        [sys.executable, "-c", f"from step_programs import *; check(*CASES[{case}])"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, f"status {done.returncode}: {done.stdout}{done.stderr}"
