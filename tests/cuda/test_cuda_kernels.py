"""Shapes at which CUDA kernels change their plan, beyond those of the op table: lists of ids of every kind, tiles that begin inside a
row, tails, long sums."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.table import array

pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"),
]
rng = np.random.default_rng(5)


def ids_like(kind: str, rows: int, vocab: int) -> np.ndarray:
    if kind == "uniform":
        return rng.integers(0, vocab, rows)
    if kind == "one":
        return np.full(rows, vocab // 2)
    if kind == "half one":
        return np.where(rng.random(rows) < 0.5, vocab - 1, rng.integers(0, vocab, rows))
    return np.minimum(rng.zipf(1.3, rows) - 1, vocab - 1)


@pytest.mark.parametrize("kind", ["uniform", "one", "half one", "words"])
@pytest.mark.parametrize(
    "rows, cols, vocab",
    [
        (31, 3, 1), (33, 8, 2), (1024, 16, 31), (1025, 33, 32), (5000, 600, 60), (9000, 8, 70000), (300000, 4, 1000),
        (8193, 16, 5000), (65536, 8, 3000), (65537, 8, 3000), (40000, 4, 151936), (3000, 4, 2**20 - 1), (300, 4, 2**20),
    ],
)  # fmt: skip
def test_the_gradient_of_an_embedding(kind: str, rows: int, cols: int, vocab: int) -> None:
    """Whole numbers: every order of additions gives the same sums. The second backward adds to the first."""
    ids = ids_like(kind, rows, vocab)
    dy = rng.integers(-4, 5, (rows, cols)).astype(np.float32)
    weight = xt.zeros(vocab, cols).to("cuda").requires_grad_()
    expected = np.zeros((vocab, cols), np.float32)
    np.add.at(expected, ids, dy)
    for times in (1, 2):
        F.embedding(xt.tensor(ids, device="cuda"), weight).backward(xt.tensor(dy, device="cuda"))
        assert np.array_equal(array(weight.grad), times * expected), times


def placed(x: np.ndarray, dtype: str, offset: int) -> xt.Tensor:
    """x on the GPU, `offset` elements behind a multiple of 16 bytes."""
    flat = np.append(np.zeros(offset), x).astype(np.float32)
    return xt.tensor(flat, device="cuda").to(getattr(xt, dtype))[offset:].reshape(x.shape)


def gradient(ids: xt.Tensor, dy: xt.Tensor, start: xt.Tensor, accumulate: bool) -> bytes:
    """Of a table like `start`, as bytes; `accumulate` adds it to `start`."""
    weight = xt.zeros(*start.shape, dtype=start.dtype, device="cuda").requires_grad_()
    if accumulate:
        weight.grad = start.clone()
    F.embedding(ids, weight).backward(dy)
    return array(weight.grad.float()).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", ["uniform", "half one", "words"])
@pytest.mark.parametrize("rows, cols, vocab", [(1000, 8, 4000), (30000, 40, 20000), (65536, 264, 50257)])
def test_both_plans_of_an_embedding_have_the_same_bits(
    rows: int, cols: int, vocab: int, kind: str, accumulate: bool, dtype: str
) -> None:
    """Rows at multiples of 16 bytes take one launch for the sort, others three. A run repeats its bits. -0 + 0 is 0 in both."""
    ids = xt.tensor(ids_like(kind, rows, vocab), device="cuda")
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    x[::7] = -0.0
    start = placed(rng.standard_normal((vocab, cols)), dtype, 0)
    aligned, shifted = placed(x, dtype, 0), placed(x, dtype, 1)
    assert aligned.data_ptr() % 16 == 0 and shifted.data_ptr() % 16 == shifted.dtype.itemsize
    want = gradient(ids, shifted, start, accumulate)
    assert all(gradient(ids, aligned, start, accumulate) == want for _ in range(4))


def test_the_gradient_of_an_embedding_in_a_graph() -> None:
    """Its launches overlap; captured, the overlaps are edges of the graph. The ids change between replays."""
    ids, dy = xt.zeros(30000, dtype=xt.int64, device="cuda"), placed(rng.standard_normal((30000, 64)), "bfloat16", 0)
    weight = xt.zeros(20000, 64, dtype=xt.bfloat16, device="cuda").requires_grad_()

    def step() -> xt.Tensor:
        weight.grad = None
        F.embedding(ids, weight).backward(dy)
        return weight.grad.clone()

    graph = xt.cuda.graph(step)
    for kind in ("uniform", "words", "half one", "uniform"):
        with xt.no_grad():
            ids.copy_(xt.tensor(ids_like(kind, 30000, 20000), device="cuda"))
        got = array(graph().float())
        assert got.tobytes() == array(step().float()).tobytes(), kind


def test_unknown_ids_in_a_long_list() -> None:
    """The rows of all others are as without them."""
    ids, dy = ids_like("uniform", 20000, 9000), rng.integers(-4, 5, (20000, 8)).astype(np.float32)
    bad = np.where(np.arange(20000) % 50 == 7, np.where(np.arange(20000) % 100 == 7, -1, 9000), ids)
    expected = np.zeros((9000, 8), np.float32)
    np.add.at(expected, ids[bad == ids], dy[bad == ids])
    weight = xt.zeros(9000, 8, device="cuda").requires_grad_()
    F.embedding(xt.tensor(bad, device="cuda"), weight).backward(xt.tensor(dy, device="cuda"))
    with pytest.raises(IndexError, match=r"embedding: id must be in \[0, 9000\)"):
        xt.cuda.synchronize()
    assert np.array_equal(array(weight.grad), expected)


def test_gradients_of_several_dtypes_are_clipped_alike() -> None:
    """More pieces than blocks, in each dtype; one tensor begins behind a multiple of 16 bytes, one is empty."""
    sizes = {"float32": 9_000_001, "bfloat16": 9_000_003, "float16": 70_001, "float64": 8193}
    grads = [xt.full((size + 1,), 0.5, dtype=getattr(xt, dtype), device="cuda") for dtype, size in sizes.items()]
    grads = [grads[0][1:], xt.zeros(0, device="cuda"), *grads[1:]]
    count = sum(g.shape[0] for g in grads)
    for most, want in ((1e9, 0.5), (0.5 * count**0.5 / 2, 0.25)):
        norm = _C.clip_grad_norm_(grads, most).item()
        assert abs(norm / (0.5 * count**0.5) - 1) < 1e-5
        for g in (g for g in grads if g.shape[0]):
            low, high = g.amin().item(), g.amax().item()
            assert low == high and abs(low - want) <= 2**-8 * want, (g.dtype, low, high)


def test_what_an_index_out_of_range_names_is_absent() -> None:
    """Neither read nor written, although column 5 of row 1, of three columns, would be an element of row 2."""
    x = xt.tensor(np.arange(1.0, 13.0).reshape(4, 3)).to("cuda")
    hundreds = xt.full((4, 1), 100.0, dtype=xt.float64).to("cuda")
    index = xt.tensor(np.array([[0], [5], [1], [2]])).to("cuda")
    rows, cols = (xt.tensor(np.array(places)).to("cuda") for places in ([0, 1, 2], [0, 5, 2]))
    for run, want in (
        (lambda: xt.gather(x, 1, index), [[1], [0], [8], [12]]),
        (lambda: x[rows, cols], [1, 0, 9]),
        (lambda: xt.scatter(x, 1, index, hundreds), [[100, 2, 3], [4, 5, 6], [7, 100, 9], [10, 11, 100]]),
    ):
        out = run()
        with pytest.raises(IndexError, match=r"index must be in \[.*3\), got 5 at position 1$"):
            xt.cuda.synchronize()
        assert out.tolist() == want


@pytest.mark.parametrize("dtype, bound", [("float32", 2e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(
    "rows, heads, dim", [(1, 1, 2), (3, 300, 64), (257, 7, 24), (700, 1, 128), (65, 5, 1040), (40, 257, 6)]
)
def test_rope_of_tiles_that_begin_inside_a_row(rows: int, heads: int, dim: int, dtype: str, bound: float) -> None:
    x = xt.tensor(rng.standard_normal((1, rows, heads, dim)).astype(np.float32)).to(getattr(xt, dtype))
    there, here = F.rope(x.to("cuda")).to("cpu").float(), F.rope(x).float()
    assert np.abs(array(there) - array(here)).max() <= bound * np.abs(array(here)).max()


@pytest.mark.parametrize("op", ["relu", "silu", "gelu"])
@pytest.mark.parametrize("n", [1, 7, 8, 2049, 100003, 6 << 20])
def test_activations_of_any_length(op: str, n: int) -> None:
    x = xt.tensor(3 * rng.standard_normal(n).astype(np.float32)).to(xt.bfloat16)
    there, here = getattr(F, op)(x.to("cuda")).to("cpu").float(), getattr(F, op)(x).float()
    assert (np.abs(array(there) - array(here)) <= 2**-7 * np.abs(array(here)) + 1e-30).all()


def test_long_sums_do_not_depend_on_the_layout() -> None:
    n = (9 << 20) + 3
    x = rng.standard_normal(n).astype(np.float32)
    whole, shifted = xt.tensor(x, device="cuda"), xt.tensor(np.append(x[:1], x), device="cuda")[1:]
    assert whole.sum().item() == shifted.sum().item()
    assert abs(whole.sum().item() - x.sum(dtype=np.float64)) <= 1e-2
    columns = xt.tensor(x[: 20000 * 264].reshape(20000, 264), device="cuda")
    assert np.array_equal(array(columns.sum(0)), array(columns.transpose(0, 1).contiguous().sum(1)))
    # Twenty segments of float64, which shows every order of additions.
    exact = xt.tensor(rng.standard_normal((20000, 64)), device="cuda")
    assert np.array_equal(array(exact.sum(0)), array(exact.transpose(0, 1).contiguous().sum(1)))


# On Hopper they come in panels of 32 rows by 64 columns, a ring of three for each warp: rows that end within a group, within the panel
# of the first warp and of the last, and in whole segments; columns that end within a panel; more tiles than blocks at once.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows, cols", [(1025, 8), (1293, 72), (2048, 64), (3064, 200), (9000, 2312), (70001, 136)])
def test_sums_of_columns_of_16_bits_are_those_of_rows(rows: int, cols: int, dtype: str) -> None:
    """The same bits for columns, for columns of a wider matrix, and for rows; each within a rounding of the sum in float64."""
    x = xt.tensor(rng.standard_normal((rows, cols), dtype=np.float32) + 0.25, device="cuda").to(getattr(xt, dtype))
    wide = xt.cat([x[:, :8] * float("nan"), x, x[:, :8] * float("nan")], 1)[:, 8 : cols + 8]
    for op in ("sum", "mean"):
        want = array(getattr(x.transpose(0, 1).contiguous(), op)(1))
        assert np.array_equal(array(getattr(x, op)(0)), want) and np.array_equal(array(getattr(wide, op)(0)), want)
        exact = getattr(array(x.float()).astype(np.float64), op)(0)
        assert np.abs(want - exact).max() <= np.abs(exact).max() * (2.0**-8 if dtype == "bfloat16" else 2.0**-10)


# On Hopper, rows of more than 131,072 elements come segment by segment to a ring of three stages of 4 KiB for each warp where they are many,
# and few do not: the last segment shorter than a stage or a group of a lane; segments of one stage and of two; rows of a wider matrix.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows, cols", [(70, 140008), (61, 262144), (300, 131080), (9, 1048600)])
def test_sums_of_many_rows_are_those_of_few(rows: int, cols: int, dtype: str) -> None:
    """The same bits for all rows and for a ninth at a time, and within a rounding of the sum in float64."""
    wide = xt.randn(rows, cols + 16, device="cuda").to(getattr(xt, dtype)) + 0.01
    for x in (wide[:, :cols].contiguous(), wide[:, 8 : cols + 8]):
        for op in ("sum", "mean"):
            got, each = array(getattr(x, op)(1)), rows // 9
            parts = [array(getattr(x[i : i + each], op)(1)) for i in range(0, rows, each)]
            assert np.array_equal(got, np.concatenate(parts))
    exact = array(x.float()).astype(np.float64).sum(1)
    assert np.abs(array(x.sum(1)) - exact).max() <= np.abs(exact).max() * {
        "bfloat16": 2.0**-8,
        "float16": 2.0**-10,
    }.get(dtype, 1e-6)


def test_offsets_beyond_2_gib() -> None:
    """Of the second half of a loop that is cut in two, and of the last pieces of a copy."""
    x = xt.full((2**30 + 64,), 3.0, device="cuda")
    y = x + x
    assert y.amin().item() == y.amax().item() == 6.0 and x.amin().item() == x.amax().item() == 3.0
    _C.foreach_copy_([y], [x])
    assert y.amin().item() == y.amax().item() == 3.0


@pytest.mark.parametrize("cols", [3, 200, 3000, 20000, 100_000])
@pytest.mark.parametrize("far", [-1000.0, 1000.0])
def test_rows_far_from_zero(far: float, cols: int) -> None:
    """Shifted by their maximum, in each kernel of softmax: exp would overflow, or the sum be 0."""
    x = far + rng.uniform(-1, 1, (4, cols)).round(2)
    e = np.exp(x - x.max(-1, keepdims=True))
    got = array(F.softmax(xt.tensor(x).float().to("cuda"), -1))
    assert np.abs(got * e.sum(-1, keepdims=True) - e).max() < 1e-3  # float32 at 1000 has a last place of 6e-5


@pytest.mark.parametrize("cols", [9, 5000])
def test_the_loss_of_large_logits_keeps_its_digits(cols: int) -> None:
    """lse - x would lose what lse has rounded away: 30000 has a last place of 0.002 in float32."""
    x, target = 30000.0 + rng.integers(0, 64, (40, cols)) / 16.0, rng.integers(0, cols, 40)
    shifted = x - x.max(-1, keepdims=True)
    want = np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(40), target]
    loss = F.cross_entropy(xt.tensor(x).float().to("cuda"), xt.tensor(target, device="cuda"), reduction="none")
    assert np.abs(array(loss) - want).max() < 2e-5


# Rows at multiples of 16 bytes with a multiple of four heads take a plan of their own in 16 bits; others do not.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("rows, heads", [(1, 4), (37, 8), (613, 12), (70, 32), (3, 20)])
def test_both_plans_of_rope_have_the_same_bits(rows: int, heads: int, dim: int, dtype: str) -> None:
    """Forward and backward, of far positions, positions of a period, and heads among others."""
    x, dy = (rng.standard_normal((rows, heads, dim)) for _ in range(2))
    positions = xt.tensor(rng.integers(0, 2_000_000, rows), device="cuda")
    for more in ({}, {"positions": positions}):

        def both(offset: int, more: dict = more) -> list[bytes]:
            leaf = placed(x, dtype, offset).requires_grad_()
            out = F.rope(leaf, **more)
            out.backward(placed(dy, dtype, offset))
            return [array(t.detach().float()).tobytes() for t in (out, leaf.grad)]

        assert both(0) == both(1)
    wide = xt.cat([placed(x, dtype, 0)] * 2, 1)[:, heads:]
    assert array(F.rope(wide).float()).tobytes() == array(F.rope(placed(x, dtype, 1)).float()).tobytes()


@pytest.mark.parametrize("rows", [64, 4096])
def test_a_launch_that_begins_early_reads_what_was_written_before(rows: int) -> None:
    """Chains of launches that overlap, without a wait between calls, have the bits of calls that are waited for."""
    weight, bias = (placed(rng.standard_normal(128), "bfloat16", 0) for _ in range(2))
    inputs = [placed(rng.standard_normal((1, rows, 8, 128)), "bfloat16", 0) for _ in range(6)]
    buffer = xt.zeros_like(inputs[0])

    def chain() -> list[xt.Tensor]:
        x = F.rope(F.rope(buffer))
        q, k = _C.qk_norm_rope(x, x[:, :, :4], weight, bias)
        q, k = _C.qk_norm_rope(q, k, bias, weight)
        return [q, k, F.rope(q).sum(0), x.reshape(-1, 1024).sum(0), x.sum()]

    def taken(wait: bool) -> list[bytes]:
        found = []
        for value in inputs:
            if wait:
                xt.cuda.synchronize()
            buffer.copy_(value)
            if wait:
                xt.cuda.synchronize()
            found.append(chain())
        return [array(t.float()).tobytes() for outs in found for t in outs]

    want = taken(True)
    assert all(taken(False) == want for _ in range(5))
