"""Convolutions beyond the op table: the two forms against each other, rows in pieces, the words of padding, the layer."""

from __future__ import annotations

import re

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C, nn
from xtrain.optable.table import FLOATS, array, bits, tensor
from xtrain.testing import assert_close


def normal(*shape: int, dtype: str = "float32", seed: int = 0, grad: bool = False) -> xt.Tensor:
    t = tensor(np.random.default_rng(seed).standard_normal(shape), dtype)
    return t.requires_grad_() if grad else t


def integers(*shape: int, seed: int = 0) -> xt.Tensor:
    """Small enough that every sum is exact."""
    return tensor(np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float64), "float32")


# ---- causal_conv1d ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("channels", "taps"), [(16, 4), (7, 3), (136, 8), (8, 1)])
def test_a_row_in_pieces_has_the_bits_of_the_whole_row(dtype: str, channels: int, taps: int) -> None:
    x, w, b = normal(2, 150, channels, dtype=dtype), normal(channels, taps, dtype=dtype), normal(channels, dtype=dtype)
    whole = F.causal_conv1d(x, w, b, "silu")
    for cuts in ([70], [1, 2, 3, 4], [64, 64, 66], [149]):
        state, parts, begin = xt.zeros(2, taps - 1, channels, dtype=dtype), [], 0
        for end in (*cuts, 150):
            y, state = F.causal_conv1d(x[:, begin:end], w, b, "silu", state=state)
            parts.append(y)
            begin = end
        assert bits(xt.cat(parts, 1)) == bits(whole), f"cut at {cuts}"
        assert bits(state) == bits(x[:, 150 - (taps - 1) :])


def causal_results(
    taps: int,
    leading: int,
    sizes: tuple[int, int, int],
    dtype: str,
    activation: str | None,
    given: str = "",
    device: str = "cpu",
) -> list[xt.Tensor]:
    """y, the state that follows, and the gradients of x, weight [channels, taps], bias and state, for x of `sizes`, with `leading` more taps of
    zero in front. Numbers are rounded to `given`, or to dtype, before.
    """
    batch, steps, channels = sizes

    def drawn(seed: int, dim: int | None, *shape: int) -> xt.Tensor:
        values = np.random.default_rng(seed).standard_normal(shape)
        if dim is not None:
            front = [(leading if i == dim else 0, 0) for i in range(len(shape))]
            values = np.pad(values, front)
        return tensor(values, given or dtype).to(getattr(xt, dtype)).to(device)

    x, b, gy = drawn(0, None, *sizes), drawn(1, None, channels), drawn(2, None, *sizes)
    w, state, after = (
        drawn(3, 1, channels, taps),
        drawn(4, 1, batch, taps - 1, channels),
        drawn(5, 1, batch, taps - 1, channels),
    )
    leaves = [t.detach().requires_grad_() for t in (x, w, b, state)]
    y, following = F.causal_conv1d(*leaves[:3], activation, state=leaves[3])
    ((y * gy).sum() + (following * after).sum()).backward()
    dx, dw, db, dstate = (t.grad for t in leaves)
    return [t.detach().cpu() for t in (y, following[:, leading:], dx, dw[:, leading:], db, dstate[:, leading:])]


@pytest.mark.on_cpu
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(2, 70, 34), (3, 131, 1058), (2, 2, 2050)])
def test_few_taps_have_the_bits_of_the_plain_form(
    sizes: tuple[int, int, int], dtype: str, activation: str | None
) -> None:
    """Five taps have the plain form alone, and taps of zero change no bit. More channels than one run of the fast form has,
    a rest of rows, and fewer rows than taps.
    """
    for taps in (2, 3, 4):
        fast = causal_results(taps, 0, sizes, dtype, activation)
        plain = causal_results(taps, 5 - taps, sizes, dtype, activation)
        assert [bits(t) for t in fast] == [bits(t) for t in plain], f"{taps} taps"


@pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)")
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("taps", [4, 6])
@pytest.mark.parametrize("sizes", [(200, 263, 16), (3, 61, 1544)])
def test_long_runs_on_a_gpu(sizes: tuple[int, int, int], taps: int, dtype: str, activation: str | None) -> None:
    """Enough blocks that a thread walks through 56 rows, which pass through all slots of shared memory, with a rest; and more
    channels than one block has, in slabs whose last one is narrower. No result errs more than twice as much against float64
    as the CPU's, and repeats have the same bits.
    """
    found, again, cpu = (
        causal_results(taps, 0, sizes, dtype, activation, device=device) for device in ("cuda", "cuda", "cpu")
    )
    assert [bits(t) for t in found] == [bits(t) for t in again]
    exact = causal_results(taps, 0, sizes, "float64", activation, given=dtype)
    for ours, theirs, want in zip(found, cpu, exact, strict=True):
        errors = [np.abs(array(one.to(xt.float64)) - array(want)).max() for one in (ours, theirs)]
        assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("channels", "taps"), [(16, 4), (5, 2), (24, 7)])
def test_it_is_the_depthwise_conv1d_with_zeros_in_front(dtype: str, channels: int, taps: int) -> None:
    x, w, b = (
        normal(2, 99, channels, dtype=dtype),
        normal(channels, 1, taps, dtype=dtype),
        normal(channels, dtype=dtype),
    )
    y = F.causal_conv1d(x, w, b)
    assert bits(y) == bits(F.conv1d(x.transpose(1, 2), w, b, padding="causal", groups=channels).transpose(1, 2))


def test_gradients_go_through_states() -> None:
    def run(cuts: list[int]) -> list[xt.Tensor]:
        inputs = [
            normal(*shape, dtype="float64", seed=i, grad=True) for i, shape in enumerate([(2, 9, 6), (6, 4), (6,)])
        ]
        x, w, b = inputs
        state = normal(2, 3, 6, dtype="float64", seed=7, grad=True)
        begin, after, loss = 0, state, xt.zeros(dtype="float64")
        for end in (*cuts, 9):
            y, after = F.causal_conv1d(x[:, begin:end], w, b, "silu", state=after)
            loss = loss + (y * y * xt.arange(begin, end, dtype="float64").reshape(1, -1, 1)).sum()
            begin = end
        (loss + (after**3).sum()).backward()
        return [t.grad for t in (*inputs, state) if t.grad is not None]

    whole = run([])
    assert len(whole) == 4
    for cuts in ([4], [1, 2, 8]):  # a piece shorter than the state, too
        for got, want in zip(run(cuts), whole, strict=True):
            assert_close(got, want, accumulations=64)


@pytest.mark.parametrize("dtype", ["float32", "float64"])  # the fast form of a CPU, and the plain one
def test_the_state_alone_has_a_gradient(dtype: str) -> None:
    x, state = normal(1, 2, 3, dtype=dtype, grad=True), normal(1, 3, 3, dtype=dtype, seed=1, grad=True)
    _, after = F.causal_conv1d(x, normal(3, 4, dtype=dtype), state=state)
    seeds = integers(1, 3, 3, seed=2)
    after.backward(seeds.to(getattr(xt, dtype)))
    assert x.grad is not None and state.grad is not None
    want = array(seeds)
    assert np.array_equal(array(x.grad), want[:, 1:])
    assert np.array_equal(array(state.grad), np.concatenate([0 * want[:, :2], want[:, :1]], 1))


def test_a_piece_without_rows_hands_the_state_on() -> None:
    x, state = normal(1, 0, 3, grad=True), normal(1, 3, 3, seed=1, grad=True)
    y, after = F.causal_conv1d(x, normal(3, 4), state=state)
    assert y.shape == (1, 0, 3) and bits(after) == bits(state.detach())
    after.backward(integers(1, 3, 3, seed=2))
    assert state.grad is not None and np.array_equal(array(state.grad), array(integers(1, 3, 3, seed=2)))


def test_the_new_state_is_a_copy() -> None:
    x, state = normal(1, 5, 8), xt.zeros(1, 3, 8)
    _, after = F.causal_conv1d(x, normal(8, 4), state=state)
    kept = bits(after)
    x.fill_(0)
    state.fill_(9)
    assert bits(after) == kept


@pytest.mark.parametrize("channels", [8, 3])
def test_sums_behind_the_last_row_have_no_slope(channels: int) -> None:
    """There the last row meets a weight that makes it infinite, and 0 times that slope would be NaN."""
    x, dy = xt.zeros(1, 40, channels), xt.ones(1, 40, channels)
    x[0, 39] = 1e38
    x.requires_grad_()
    w = xt.tensor([[4.0, 4.0, 4.0, 1.0]] * channels, requires_grad=True)
    F.causal_conv1d(x, w, None, "silu").backward(dy)
    slope = np.array([0.5] * 39 + [1.0])  # of silu at 0 and far out
    want = [sum(t * s for t, s in zip((1.0, 4.0, 4.0, 4.0), slope[i:])) for i in range(40)]
    assert np.allclose(array(x.grad)[0], np.array(want)[:, None], rtol=1e-6)
    assert np.allclose(array(w.grad), [[0.0, 0.0, 0.0, 1e38]] * channels, rtol=1e-6)


@pytest.mark.parametrize("channels", [8, 3])
def test_a_value_that_is_not_finite_reaches_its_taps_and_no_further(channels: int) -> None:
    x = normal(1, 80, channels)
    x[0, 63, 1] = float("inf")
    for call, reach in (
        (F.causal_conv1d(x, normal(channels, 3) + 5), 3),
        (F.causal_conv1d(x, normal(channels, 1) + 5), 1),
    ):
        wrong = ~np.isfinite(array(call))
        assert wrong.sum() == reach and wrong[0, 63 : 63 + reach, 1].all()


def test_a_bias_without_bound_leaves_other_channels_alone() -> None:
    x, b = normal(1, 5, 8, grad=True), xt.zeros(8)
    b[2] = float("-inf")
    F.causal_conv1d(x, normal(8, 4), b, "silu").sum().backward()
    assert x.grad is not None
    assert np.isnan(array(x.grad)).any((0, 1)).tolist() == [c == 2 for c in range(8)]


@pytest.mark.on_cpu  # a GPU leaves out the terms behind the end
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])  # two of the fast form, and the plain one
def test_a_tap_without_bound_meets_the_zeros_behind_the_end(dtype: str) -> None:
    """The slopes there are 0, and 0 times an infinite tap is NaN: in rows whose last taps they are, of that channel alone."""
    x, w = normal(1, 6, 4, dtype=dtype, grad=True), normal(4, 3, dtype=dtype)
    w[2, 0] = float("inf")
    F.causal_conv1d(x, w).sum().backward()
    assert x.grad is not None
    assert np.isnan(array(x.grad))[0].T.tolist() == [[c == 2 and t >= 4 for t in range(6)] for c in range(4)]


@pytest.mark.parametrize(("dtype", "taps"), [("float16", 4), ("bfloat16", 4), ("bfloat16", 5)])
def test_sums_of_gradients_are_rounded_once(dtype: str, taps: int) -> None:
    """2048 rows of 1, one of 1, 2048 of -1, in pieces of their own on a CPU: 2049 is no number of 16 bits."""
    slopes = np.zeros((1, 3 * 2048, 8))
    slopes[:, :2048], slopes[:, 2048], slopes[:, 4096:] = 1, 1, -1
    w, b = xt.ones(8, taps, dtype=dtype).requires_grad_(), xt.zeros(8, dtype=dtype).requires_grad_()
    F.causal_conv1d(xt.ones(1, 3 * 2048, 8, dtype=dtype), w, b).backward(tensor(slopes, dtype))
    assert w.grad is not None and b.grad is not None
    # the tap k before the last meets k zeros in front, of the rows of 1
    assert array(b.grad).tolist() == [1.0] * 8 and array(w.grad).tolist() == [[2.0 - taps + k for k in range(taps)]] * 8


def test_unused_gradients_are_not_computed() -> None:
    x, w = normal(1, 5, 8, grad=True), normal(8, 4)
    F.causal_conv1d(x, w, normal(8)).sum().backward()
    assert x.grad is not None and w.grad is None
    w.requires_grad_()
    F.causal_conv1d(x.detach(), w).sum().backward()
    assert w.grad is not None


# ---- conv1d ----------------------------------------------------------------------------------------------------------


def test_samples_whose_columns_do_not_fit_together() -> None:
    x, w, b = integers(3, 32, 9000), integers(4, 16, 32, seed=1), integers(4, seed=2)  # 37 MB a sample
    results = []
    for algorithm in ("direct", "products"):
        inputs = [t.detach().requires_grad_() for t in (x, w, b)]
        y = _C.conv1d(*inputs, padding=3, groups=2, algorithm=algorithm)
        y.backward(integers(*y.shape, seed=3))
        results.append([bits(t) for t in (y, *(t.grad for t in inputs if t.grad is not None))])
    assert len(results[0]) == 4 and results[0] == results[1]


def test_the_last_samples_that_fit_together_are_fewer() -> None:
    """Columns of two samples at once, and of the third alone: the work is that of three."""
    x, w = (xt.zeros(shape, device="meta").requires_grad_() for shape in ((3, 32, 7000), (4, 16, 32)))  # 29 MB a sample
    product = 2 * 3 * 4 * (7000 - 31) * 16 * 32
    for wanted in (0, 1):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((x, w))]
        _C.meta_work(True)
        y = _C.conv1d(*leaves, groups=2, algorithm="products")
        assert _C.meta_work(True)["flops"] == product
        y.backward(y.detach())
        assert _C.meta_work(True)["flops"] == product


def test_the_form_is_chosen_by_the_shape() -> None:
    """Direct, of which nothing but x, weight and y is moved, for at most 3 outputs a group and 16 terms a sum."""

    def is_direct(groups: int, outputs: int, channels: int, taps: int) -> bool:
        shapes = (2, groups * channels, 40), (groups * outputs, channels, taps)
        x, w = (xt.zeros(shape, device="meta") for shape in shapes)
        _C.meta_work(True)
        y = _C.conv1d(x, w, groups=groups)
        return _C.meta_work(True)["bytes"] == 4 * (x.numel() + w.numel() + y.numel())

    for groups in (1, 5):
        assert [is_direct(groups, *sizes) for sizes in ((3, 4, 4), (3, 1, 16), (3, 1, 17), (4, 4, 4))] == [
            True, True, False, False,
        ]  # fmt: skip


def both_forms(x: xt.Tensor, w: xt.Tensor, b: xt.Tensor | None = None, **options: int) -> list[list[bytes]]:
    """y and the gradients of x, weight and bias, direct and by products."""
    found = []
    for algorithm in ("direct", "products"):
        leaves = [t.detach().requires_grad_() for t in (x, w, *(() if b is None else (b,)))]
        y = _C.conv1d(*leaves, algorithm=algorithm, **options)
        y.backward(integers(*y.shape, seed=3))
        found.append([bits(y.detach()), *(bits(t.grad) for t in leaves if t.grad is not None)])
        assert len(found[-1]) == 1 + len(leaves)
    return found


def test_one_tap_moves_with_padding_or_a_stride() -> None:
    """Its columns are x only where every place sees the row's element of that number."""
    x, w, b = integers(2, 3, 3), integers(4, 3, 1, seed=1), integers(4, seed=2)
    for options in (dict(padding=1, padding_behind=1), dict(padding=2), dict(stride=2, padding=1, padding_behind=1)):
        direct, products = both_forms(x, w, b, **options)
        assert direct == products, options
    y = _C.conv1d(x, w, b, stride=2, padding=1, padding_behind=1, algorithm="products")  # as long as x
    assert np.array_equal(array(y)[..., 1], array(_C.conv1d(x, w, b, algorithm="products"))[..., 1])
    assert np.array_equal(array(y)[..., 0], np.broadcast_to(array(b), (2, 4)))


def test_taps_that_see_padding_alone() -> None:
    """Eleven of them around one element: behind the last place and before the first there is nothing to read."""
    x, w, b = integers(2, 4, 1), integers(4, 4, 11, seed=1), integers(4, seed=2)
    for options in (dict(padding=5, padding_behind=5), dict(padding=10), dict(padding=9, padding_behind=3, stride=2)):
        direct, products = both_forms(x, w, b, **options)
        assert direct == products, options


@pytest.mark.parametrize("algorithm", ["direct", "products"])
def test_no_channels_and_no_samples(algorithm: str) -> None:
    """Sums of nothing: the bias alone, and gradients of zeros."""
    b = integers(4).requires_grad_()
    x, w = xt.zeros(2, 0, 5), xt.zeros(4, 0, 3).requires_grad_()
    y = _C.conv1d(x, w, b, algorithm=algorithm)
    y.sum().backward()
    assert np.array_equal(array(y.detach()), np.broadcast_to(array(b.detach())[:, None], (2, 4, 3)))
    assert b.grad is not None and array(b.grad).tolist() == [6.0] * 4 and w.grad is not None and w.grad.shape == w.shape
    del y
    junk = xt.full((4, 3, 3), float("nan"))
    del junk  # the next block of this size
    assert not array(_C.conv1d(x, w.detach(), algorithm=algorithm)).any()
    w = integers(4, 3, 3).requires_grad_()
    y = _C.conv1d(xt.zeros(0, 3, 5), w, algorithm=algorithm)
    junk = xt.full((4, 3, 3), float("nan"))
    del junk
    y.sum().backward()
    assert w.grad is not None and not array(w.grad).any()


@pytest.mark.parametrize("algorithm", ["direct", "products"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_samples_are_added_before_they_are_rounded(algorithm: str, dtype: str) -> None:
    """2048, 1 and -2048: 2049 is no number of 16 bits."""
    slopes = np.zeros((3, 1, 2048))
    slopes[0], slopes[1, 0, 0], slopes[2] = 1, 1, -1
    w = xt.ones(1, 1, 1, dtype=dtype).requires_grad_()
    _C.conv1d(xt.ones(3, 1, 2048, dtype=dtype), w, algorithm=algorithm).backward(tensor(slopes, dtype))
    assert w.grad is not None and w.grad.item() == 1.0


@pytest.mark.parametrize("algorithm", ["direct", "products"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_taps_are_added_before_they_are_rounded(algorithm: str, dtype: str) -> None:
    x = xt.zeros(1, 1, 5, dtype=dtype).requires_grad_()
    slopes = tensor(np.array([[[-2048.0, 1.0, 2048.0]]]), dtype)
    _C.conv1d(x, xt.ones(1, 1, 3, dtype=dtype), algorithm=algorithm).backward(slopes)
    assert x.grad is not None and x.grad[0, 0, 2].item() == 1.0


def test_the_order_of_a_sum() -> None:
    """Of the direct form the bias, then channels and in them taps, ascending; of a folded row its taps, ascending: float32 tells."""
    large = 2.0**24  # to which a 1 adds nothing
    columns = [large, -large]
    bias = xt.ones(1)
    by_channel = _C.conv1d(xt.tensor([[[v] for v in columns]]), xt.ones(1, 2, 1), bias, algorithm="direct")
    by_tap = _C.conv1d(xt.tensor([[columns]]), xt.ones(1, 1, 2), bias, algorithm="direct")
    crossed = xt.tensor([[[large, 1.0], [-large, 0.0]]])  # channel 0, both taps, then channel 1
    both = _C.conv1d(crossed, xt.ones(1, 2, 2), algorithm="direct")
    assert [t.item() for t in (by_channel, by_tap, both)] == [0.0, 0.0, 0.0]
    x = xt.zeros(1, 1, 5).requires_grad_()
    _C.conv1d(x, xt.ones(1, 1, 3), algorithm="products").backward(xt.tensor([[[-large, large, 1.0]]]))
    assert x.grad is not None and x.grad.tolist() == [[[-large, 0.0, 0.0, large, 1.0]]]


@pytest.mark.parametrize("algorithm", ["direct", "products"])
def test_operands_of_any_strides(algorithm: str) -> None:
    x, w, b = integers(5, 8, 3).permute(2, 1, 0), integers(2, 4, 6, seed=1).permute(2, 1, 0), integers(6, 2)[:, 1]
    dense = [t.contiguous() for t in (x, w, b)]
    assert bits(_C.conv1d(x, w, b, groups=2, algorithm=algorithm)) == bits(
        _C.conv1d(*dense, groups=2, algorithm=algorithm)
    )


def test_the_words_of_padding() -> None:
    x, w = integers(2, 3, 11), integers(4, 3, 4, seed=1)
    assert bits(F.conv1d(x, w, padding="valid", stride=2)) == bits(F.conv1d(x, w, stride=(2,)))
    wide = xt.cat([xt.zeros(2, 3, 4), x, xt.zeros(2, 3, 5)], 2)
    assert bits(F.conv1d(x, w, padding="same", dilation=3)) == bits(F.conv1d(wide, w, dilation=3))
    wide = xt.cat([xt.zeros(2, 3, 9), x], 2)
    assert bits(F.conv1d(x, w, padding="causal", dilation=3, stride=2)) == bits(F.conv1d(wide, w, dilation=3, stride=2))
    assert bits(F.conv1d(x[0], w, padding=[2])) == bits(F.conv1d(x, w, padding=2)[0])


def test_wrong_arguments() -> None:
    x, w = xt.zeros(1, 3, 5), xt.zeros(4, 3, 2)
    for call, error, message in (
        (lambda: F.conv1d(x, w, padding="full"), ValueError, "conv1d: padding must be an int, 'valid', 'same' or 'causal', got 'full'"),
        (lambda: F.conv1d(x, w, stride=2, padding="same"), ValueError, "conv1d: padding 'same' must come with a stride of 1, got 2"),
        (lambda: F.conv1d(x, w, stride=(1, 2)), ValueError, "conv1d: stride must be an int or a tuple of one, got (1, 2)"),
        (lambda: F.conv1d(x, w, dilation=1.5), TypeError, "conv1d: dilation must be an int, got float"),
        (lambda: F.conv1d(xt.zeros(5), w), ValueError, "conv1d: input must have 2 or 3 dimensions, got shape (5,)"),
        (lambda: F.conv1d(xt.zeros(1, 1, 3, 5), w), ValueError, "conv1d: input must have 2 or 3 dimensions, got shape (1, 1, 3, 5)"),
        (lambda: nn.Conv1d(4, 4, 3, padding_mode="reflect"), NotImplementedError, "Conv1d: padding_mode must be 'zeros', got 'reflect'"),
        (lambda: nn.Conv1d(4, 6, 3, groups=4), ValueError, "Conv1d: groups must divide out_channels, 6, got 4"),
        (lambda: nn.Conv1d(4, 6, 0), ValueError, "Conv1d: kernel_size must be at least 1, got 0"),
        (lambda: nn.Conv1d(4, 6, 3, padding="some"), ValueError, "Conv1d: padding must be an int, 'valid', 'same' or 'causal', got 'some'"),
    ):  # fmt: skip
        with pytest.raises(error, match=re.escape(message)):
            call()


def test_the_layer() -> None:
    layer = nn.Conv1d(6, 9, 5, stride=2, padding=3, groups=3)
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == {"weight": (9, 2, 5), "bias": (9,)}
    xt.manual_seed(0)
    for values in nn.Conv1d(60, 900, 5, groups=30).state_dict().values():
        size = np.abs(array(values)).max()
        assert 0.9 / np.sqrt(10) < size <= 1 / np.sqrt(10)  # the fan-in is 2 x 5
    assert "kernel_size=5, stride=2, padding=3, dilation=1, groups=3, bias=True" in repr(layer)
    x = normal(2, 6, 11)
    assert bits(layer(x)) == bits(F.conv1d(x, layer.weight, layer.bias, 2, 3, 1, 3))
    assert layer(x[0]).shape == (9, 7)
    assert nn.Conv1d(6, 6, 4, padding="causal", groups=6, bias=False)(x).shape == (2, 6, 11)


def test_shapes_and_work_on_meta() -> None:
    x, w = xt.zeros(2, 4, 10, device="meta"), xt.zeros(6, 4, 3, device="meta").requires_grad_()
    y = F.conv1d(x, w, padding=1)
    y.sum().backward()
    assert tuple(y.shape) == (2, 6, 10) and w.grad is not None
    assert F.causal_conv1d(x, xt.zeros(10, 4, device="meta"), activation="silu").shape == (2, 4, 10)
