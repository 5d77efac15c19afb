"""The ops of optimizers, clause by clause: what each refuses and by which name, what it changes, and what it rounds.

`make test-gpu` runs all of it on a GPU. meta is the other device.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.optable import adamw_group, adamw_reference
from xtrain.optable.table import array, check_close, tensor

DOUBLE, SINGLE = xt.float64, xt.float32
AWAY = "meta"


def random(*shape: int, seed: int = 0) -> xt.Tensor:
    return tensor(np.random.default_rng(seed).standard_normal(shape), "float32")


def adamw(count: int = 2, **other) -> dict:
    """Arguments of adamw_ for parameters of shape (2,), all of them right but for `other`."""
    given = {name: [xt.ones(2) for _ in range(count)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    given |= dict(masters=[], steps=[xt.tensor(0) for _ in range(count)], lrs=[xt.tensor(0.1, dtype=DOUBLE)])
    return given | dict(groups=adamw_group(count, 0.9, 0.95, 1e-8, 0.1)) | other


def muon(count: int = 2, **other) -> dict:
    """As adamw(), for muon_ and matrices of shape (2, 3)."""
    given = {name: [xt.ones(2, 3) for _ in range(count)] for name in ("params", "grads", "buffers")}
    given |= dict(masters=[], lr=xt.tensor(0.1, dtype=DOUBLE), numbers=numbers(), nesterov=True, ns_steps=2)
    return given | dict(ns_dtype=SINGLE) | other


def numbers(**other: float) -> xt.Tensor:
    values = dict(momentum=0.9, weight_decay=0.1, a=3.4, b=-4.8, c=2.0, eps=1e-7, ratio=1.0) | other
    return xt.tensor([*values.values()], dtype=DOUBLE, device="cpu")


def ema(**other) -> dict:
    given = dict(averages=[xt.ones(2), xt.ones(3)], tensors=[xt.zeros(2), xt.zeros(3)], step=xt.tensor(0), decay=0.5)
    return given | other


def bank(**other) -> dict:
    """Two banks of two tensors."""
    places = xt.tensor([0, 128], device="cpu")
    squares = xt.empty(1, dtype=DOUBLE)
    return dict(out=xt.empty(300), parts=[xt.ones(2), xt.ones(3)] * 2, offsets=places, squares=squares) | other


# ---- what is refused -------------------------------------------------------------------------------------------------


def far(*shape: int, dtype=SINGLE) -> xt.Tensor:
    return xt.zeros(shape, dtype=dtype, device=AWAY)


def strided(*shape: int, dtype=SINGLE) -> xt.Tensor:
    return xt.ones((*shape, 2), dtype=dtype)[..., 0]


DEVICES = {
    "adamw: parameters": (lambda: _C.adamw_(**adamw(params=[xt.ones(2), far(2)])), "adamw_: every parameter must be on the device of params[0]"),
    "adamw: gradients": (lambda: _C.adamw_(**adamw(grads=[xt.ones(2), far(2)])), "adamw_: its gradient must be on the device of the parameter"),
    "adamw: moments": (lambda: _C.adamw_(**adamw(exp_avgs=[xt.ones(2), far(2)])), "adamw_: exp_avgs[1] must be float32 (2,) on "),
    "adamw: squares": (lambda: _C.adamw_(**adamw(exp_avg_sqs=[xt.ones(2), far(2)])), "adamw_: exp_avg_sqs[1] must be float32 (2,) on "),
    "adamw: masters": (lambda: _C.adamw_(**adamw(masters=[xt.ones(2), far(2)])), "adamw_: masters[1] must be float32 (2,) on "),
    "adamw: steps": (lambda: _C.adamw_(**adamw(steps=[xt.tensor(0), far(dtype=xt.int64)])), "adamw_: every step must be on the device of params[0]"),
    "adamw: rates": (lambda: _C.adamw_(**adamw(lrs=[far(dtype=DOUBLE)])), "adamw_: lr must be on the device of params[0]"),
    "adamw: guard": (lambda: _C.adamw_(**adamw(guard=far())), "adamw_: guard must be on the device of params[0]"),
    "adamw: scale": (lambda: _C.adamw_(**adamw(scale=far(dtype=DOUBLE))), "adamw_: scale must be on the device of params[0]"),
    "adamw: groups": (lambda: _C.adamw_(**adamw(groups=far(1, 5, dtype=DOUBLE))), "adamw_: groups must have 5 columns, on the CPU, got shape (1, 5) on meta:0"),
    "muon: parameters": (lambda: _C.muon_(**muon(params=[xt.ones(2, 3), far(2, 3)])), "muon_: every parameter must be on the device of params[0]"),
    "muon: gradients": (lambda: _C.muon_(**muon(grads=[xt.ones(2, 3), far(2, 3)])), "muon_: its gradient must be on the device of the parameter"),
    "muon: buffers": (lambda: _C.muon_(**muon(buffers=[xt.ones(2, 3), far(2, 3)])), "muon_: buffers[1] must be float32 (2, 3) on "),
    "muon: numbers": (lambda: _C.muon_(**muon(numbers=far(7, dtype=DOUBLE))), "muon_: numbers must be on the CPU, got meta:0"),
    "muon: rate": (lambda: _C.muon_(**muon(lr=far(dtype=DOUBLE))), "muon_: lr must be on the device of params[0]"),
    "ema: tensors": (lambda: _C.ema_(**ema(tensors=[xt.zeros(2), far(3)])), "ema_: every tensor must be on the device of tensors[0]"),
    "ema: averages": (lambda: _C.ema_(**ema(averages=[xt.zeros(2), far(3)])), "ema_: averages[1] must be float32 (3,) on "),
    "ema: step": (lambda: _C.ema_(**ema(step=far(dtype=xt.int64))), "ema_: step must be on the device of tensors[0]"),
    "ema: guard": (lambda: _C.ema_(**ema(guard=far())), "ema_: guard must be on the device of params[0]"),
    "clip": (lambda: _C.clip_grad_norm_([xt.ones(2), far(2)], 1.0), "clip_grad_norm_: every gradient must be on the device of grads[0]"),
    "copies: tensors": (lambda: _C.foreach_copy_([xt.ones(2), far(2)], [xt.ones(2), far(2)]), "foreach_copy_: every tensor must be on the device of tensors[0]"),
    "copies: sources": (lambda: _C.foreach_copy_([xt.ones(2)] * 2, [xt.ones(2), far(2)]), "foreach_copy_: every source must be on the device of tensors[0]"),
    "tree_sum: parts": (lambda: _C.tree_sum_(xt.empty(2), [xt.ones(2), far(2)]), "tree_sum_: every part must be on the device of out"),
    "tree_sum: squares": (lambda: _C.tree_sum_(xt.empty(2), [xt.ones(2)], far(1, dtype=DOUBLE)), "tree_sum_: squares must be on the device of out"),
    "bank_sum: parts": (lambda: _C.bank_sum_(**bank(parts=[xt.ones(2), far(3)] * 2)), "bank_sum_: every part must be on the device of parts[0]"),
    "bank_sum: out": (lambda: _C.bank_sum_(**bank(out=far(300))), "bank_sum_: out must be on the device of parts[0]"),
    "bank_sum: squares": (lambda: _C.bank_sum_(**bank(squares=far(1, dtype=DOUBLE))), "bank_sum_: squares must be on the device of parts[0]"),
    "bank_sum: offsets": (lambda: _C.bank_sum_(**bank(offsets=far(2, dtype=xt.int64))), "bank_sum_: offsets must be on the CPU, got meta:0"),
}  # fmt: skip


@pytest.mark.parametrize("case", DEVICES)
def test_a_tensor_of_another_device_is_refused_by_name(case: str) -> None:
    """Its memory would be read where it is not."""
    call, sentence = DEVICES[case]
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        call()


def test_the_wide_gradient_of_another_device_is_refused() -> None:
    halves = dict(params=[xt.ones(2, dtype=xt.bfloat16)] * 2, masters=[xt.ones(2)] * 2)
    with pytest.raises(ValueError, match="adamw_: its gradient must be on the device of the parameter"):
        _C.adamw_(**adamw(**halves, grads=[xt.ones(2), far(2)]))


OTHERS = {
    "adamw: a strided moment": (lambda: _C.adamw_(**adamw(exp_avg_sqs=[xt.ones(2), strided(2)])), "adamw_: exp_avg_sqs[1] must be contiguous, got strides of a view"),
    "adamw: a strided parameter": (lambda: _C.adamw_(**adamw(params=[xt.ones(2), strided(2)])), "adamw_: params[1] must be contiguous, got strides of a view"),
    "adamw: an option that is no number": (lambda: _C.adamw_(**adamw(groups=adamw_group(2, 0.9, math.nan, 1e-8, 0.1))), "adamw_: beta2 must be in [0, 1), got nan"),
    "adamw: eps without bound": (lambda: _C.adamw_(**adamw(groups=adamw_group(2, 0.9, 0.9, math.inf, 0.1))), "adamw_: eps must be in [0, inf), got inf"),
    "adamw: a scale of a row": (lambda: _C.adamw_(**adamw(scale=xt.ones(1, dtype=DOUBLE))), "adamw_: scale must have 0 dimensions, got shape (1,)"),
    "adamw: the second group": (lambda: _C.adamw_(**adamw(lrs=[xt.tensor(0.1, dtype=DOUBLE)] * 2, groups=xt.cat([adamw_group(1, 0.9, 0.9, 0.0, 0.0), adamw_group(2, 0.9, 0.9, 0.0, 0.0)]))), "adamw_: count of groups[1] must be an integer of at most 1, got 2"),
    "muon: an infinite coefficient": (lambda: _C.muon_(**muon(numbers=numbers(b=-math.inf))), "muon_: b must be in [-inf, inf), got -inf"),
    "muon: eps below 0": (lambda: _C.muon_(**muon(numbers=numbers(eps=-1e-7))), "muon_: eps must be in [0, inf), got -1e-07"),
    "muon: a gradient of another dtype": (lambda: _C.muon_(**muon(grads=[xt.ones(2, 3), xt.ones(2, 3, dtype=DOUBLE)])), "muon_: its gradient must have the dtype of the parameter, float32, got float64"),
    "muon: a parameter of another dtype": (lambda: _C.muon_(**muon(params=[xt.ones(2, 3), xt.ones(2, 3, dtype=DOUBLE)])), "muon_: every parameter must have the dtype of params[0], float32, got float64"),
    "ema: a decay that is no number": (lambda: _C.ema_(**ema(decay=math.nan)), "ema_: decay must be in [0, 1), got nan"),
    "clip: a strided gradient": (lambda: _C.clip_grad_norm_([xt.ones(2), strided(2)], 1.0), "clip_grad_norm_: grads[1] must be contiguous, got strides of a view"),
    "copies: the second source": (lambda: _C.foreach_copy_([xt.ones(2)] * 2, [xt.ones(2), xt.ones(3)]), "foreach_copy_: sources[1] must have 2 elements of float32, got 3 of float32"),
    "tree_sum: strided squares": (lambda: _C.tree_sum_(xt.empty(9000), [xt.ones(9000)], strided(2, dtype=DOUBLE)), "tree_sum_: squares must be contiguous, got strides of a view"),
    "bank_sum: strided squares": (lambda: _C.bank_sum_(**bank(out=xt.empty(9000), squares=strided(2, dtype=DOUBLE))), "bank_sum_: squares must be contiguous, got strides of a view"),
    "bank_sum: two banks into 16 bits": (lambda: _C.bank_sum_(**bank(out=xt.empty(300, dtype=xt.bfloat16), parts=[xt.ones(2, dtype=xt.bfloat16)] * 4)), "bank_sum_: out must have dtype float32, in which parts of bfloat16 are added, got bfloat16"),
    "block_norm: a bound that is no number": (lambda: _C.block_norm(xt.ones(1, dtype=DOUBLE), math.nan), "block_norm: most must be greater than 0, got nan"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_refused_is_named(case: str) -> None:
    call, sentence = OTHERS[case]
    with pytest.raises((ValueError, TypeError), match="^" + re.escape(sentence)):
        call()


def test_sums_refuse_memory_that_they_would_read_and_write() -> None:
    """A part that begins in another place than the sum would be read after it had changed. Nothing has changed by then."""
    row, cells = xt.arange(600.0), xt.arange(10.0, dtype=DOUBLE)
    places = xt.tensor([0], device="cpu")
    for call, sentence in (
        (lambda: _C.tree_sum_(row[1:], [xt.ones(599), row[:-1]]), "tree_sum_: parts[1] must be out or not overlap it, got common memory"),
        (lambda: _C.tree_sum_(row[:-1], [row[1:]]), "tree_sum_: parts[0] must be out or not overlap it, got common memory"),
        (lambda: _C.tree_sum_(cells[:9], [xt.ones(9, dtype=DOUBLE)], cells[8:9]), "tree_sum_: squares must not overlap out or a part, got common memory"),
        (lambda: _C.tree_sum_(xt.empty(9, dtype=DOUBLE), [cells[:9]], cells[8:9]), "tree_sum_: squares must not overlap out or a part, got common memory"),
        (lambda: _C.bank_sum_(row[1:], [row[:-1]], places), "bank_sum_: parts[0] must not overlap out or squares, got common memory"),
        (lambda: _C.bank_sum_(None, [cells], places, cells[9:]), "bank_sum_: parts[0] must not overlap out or squares, got common memory"),
        (lambda: _C.bank_sum_(cells, [xt.ones(9, dtype=DOUBLE)], places, cells[9:]), "bank_sum_: squares must not overlap out, got common memory"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="^" + re.escape(sentence)):
            call()
    assert row.tolist() == list(range(600)) and cells.tolist() == list(range(10))
    _C.tree_sum_(row[:300], [row[300:], row[:300]])  # beside it, and itself
    assert row[:300].tolist() == [300.0 + 2 * i for i in range(300)]
    _C.bank_sum_(row[:300], [row[5:5], row[300:]], xt.tensor([0, 0], device="cpu"))  # no elements, no common memory
    assert row[:300].tolist() == row[300:].tolist()


def test_neighbours_in_memory_do_not_overlap() -> None:
    row = xt.arange(8.0)
    _C.foreach_copy_([row[:4]], [row[4:]])
    _C.foreach_copy_([row[6:]], [row[4:6]])
    assert row.tolist() == [4.0, 5.0, 6.0, 7.0, 4.0, 5.0, 4.0, 5.0]


def test_a_norm_of_0_is_allowed() -> None:
    """At least 0: gradients become zeros."""
    grad = xt.tensor([3.0, 4.0])
    assert _C.clip_grad_norm_([grad], 0.0).item() == 5.0 and grad.tolist() == [0.0, 0.0]


# ---- what is changed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["muon_", "ema_", "bank_sum_"])
def test_what_is_changed_has_another_version(op: str) -> None:
    """Everything that is written, and nothing else: a backward that needs it finds out."""
    if op == "muon_":
        halves = {name: [xt.ones(2, 3, dtype=xt.float16)] for name in ("params", "grads")}
        given, changed = muon(1, **halves, masters=[xt.ones(2, 3)]), ("params", "buffers", "masters")
    elif op == "ema_":
        given, changed = ema(averages=[xt.ones(2)], tensors=[xt.zeros(2)]), ("averages", "step")
    else:
        given, changed = bank(), ("out", "squares")
    seen = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    seen = {name: [t for t in ts if isinstance(t, xt.Tensor)] for name, ts in seen.items()}
    before = {name: [t._version for t in ts] for name, ts in seen.items()}
    getattr(_C, op)(**given)
    for name, ts in seen.items():
        for t, version in zip(ts, before[name], strict=True):
            assert (t._version > version) == (name in changed), name


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_a_gradient_of_16_bits_or_of_its_moments_dtype(masters: bool, wide: bool) -> None:
    """By itself and with a master, more elements than a vector has, with a scale: the formula of what was given."""
    p, g = random(77).to(xt.bfloat16), random(77, seed=1)
    g = g if wide else g.to(xt.bfloat16)
    m, v, master = random(77, seed=2), random(77, seed=3).abs(), p.float()
    want = adamw_reference(array(p), 0.5 * array(g), array(m), array(v), 0.1, 0.9, 0.95, 1e-8, 0.1, 4)
    _C.adamw_(
        [p], [g], [m], [v], [master] if masters else [], [xt.tensor(3)], [xt.tensor(0.1, dtype=DOUBLE)],
        adamw_group(1, 0.9, 0.95, 1e-8, 0.1), scale=xt.tensor(0.5, dtype=DOUBLE),
    )  # fmt: skip
    for got, exact, name in ((m, want[1], "exp_avg"), (v, want[2], "exp_avg_sq")):
        check_close(array(got), exact, 2.0**-21 * (1 + np.abs(exact)), name)
    if masters:
        check_close(array(master), want[0], 2.0**-19 * (1 + np.abs(want[0])), "master")
        assert np.array_equal(array(p), array(master.to(xt.bfloat16)))
    check_close(array(p), want[0], 2.0**-8 * (1 + np.abs(want[0])), "parameter")


# ---- views -----------------------------------------------------------------------------------------------------------


def test_what_is_only_read_may_have_strides() -> None:
    """The same bits as of dense tensors: gradients, what is averaged, tables of numbers."""
    made = []
    for dense in (False, True):

        def view(t: xt.Tensor, dense: bool = dense) -> xt.Tensor:
            """The elements of a tensor, in memory that has gaps and another order."""
            return t if dense else xt.stack([t.T, 7 * t.T], -1)[..., 0].T

        p, q = random(4, 6), random(4, 6, seed=1)
        m, v, b, average = xt.zeros(4, 6), xt.zeros(4, 6), xt.zeros(4, 6), xt.zeros(4, 6)
        table = view(xt.cat([adamw_group(0, 0.5, 0.5, 1.0, 1.0), adamw_group(1, 0.9, 0.95, 1e-8, 0.1)]))
        lr = xt.tensor(0.1, dtype=DOUBLE)
        assert table.is_contiguous() == dense
        _C.adamw_([p], [view(random(4, 6, seed=2))], [m], [v], [], [xt.tensor(0)], [lr, lr], table)
        values = view(xt.cat([numbers().reshape(1, 7)] * 2))[1]
        _C.muon_([q], [view(random(4, 6, seed=3))], [b], [], lr, values, True, 2, SINGLE)
        _C.ema_([average], [view(random(4, 6, seed=4))], xt.tensor(0), 0.5)
        squares = view(random(9, 2, seed=5).abs().double())[:, 0]
        norm = _C.block_norm(squares, 1.0)[0]
        places = xt.tensor([0, 0, 128, 0], device="cpu")[::2]
        out = xt.empty(200)
        _C.bank_sum_(out, [random(5, seed=6), random(6, seed=7)], places if not dense else places.contiguous())
        made.append([array(t).tobytes() for t in (p, m, v, q, b, average, norm, out)])
    assert made[0] == made[1]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def step_of_muon(p: xt.Tensor, g: xt.Tensor, dtype, steps: int, **other: float) -> xt.Tensor:
    """What a step with a rate of 1 subtracts from zeros."""
    given = numbers(**(dict(momentum=0.0, weight_decay=0.0) | other))
    _C.muon_([p], [g], [xt.zeros(p.shape)], [], xt.tensor(1.0, dtype=DOUBLE), given, True, steps, dtype)
    return -p


def test_a_norm_beyond_float32_and_one_that_is_nan() -> None:
    """Squares are added in float64; NaN stays NaN in every element, and is not taken for eps."""
    x = array(step_of_muon(xt.zeros(1, 2), xt.tensor([[3e25, 4e25]]), SINGLE, 0))
    check_close(x, np.array([[0.6, 0.8]]), 1e-6, "direction")
    x = array(step_of_muon(xt.zeros(1, 2), xt.tensor([[math.nan, 1.0]]), SINGLE, 0, eps=1.0))
    assert np.isnan(x).all()


def test_a_polynomial_is_rounded_once() -> None:
    """b + a of a matrix of one element: 1 + 2^-9 is no number of bfloat16, and the sum with -1 is."""
    x = step_of_muon(xt.zeros(1, 1), xt.ones(1, 1), xt.bfloat16, 1, a=-1.0, b=1 + 2.0**-9, c=0.0)
    assert x.item() == 2.0**-9


def test_squares_are_added_in_float64() -> None:
    """Those of 3000 ones beside one of 2^13: its square is 2^26, to which float32 adds no 1."""
    norm = _C.clip_grad_norm_([xt.tensor([8192.0]), *[xt.ones(1)] * 3000], math.inf).item()
    assert norm == np.float32(math.sqrt(2.0**26 + 3000))


def test_the_factor_of_an_average_is_made_in_float64() -> None:
    """1 - decay of a decay near 1 has few digits in float32."""
    decay, average = 1 - 2.0**-30, xt.zeros(1, dtype=DOUBLE)
    _C.ema_([average], [xt.ones(1, dtype=DOUBLE)], xt.tensor(1), decay)  # the second of two
    check_close(array(average), np.array([1 / (1 + decay)]), 1e-7, "average")


def test_squares_alone_are_of_whole_blocks() -> None:
    """Without out a bank has as many elements as its blocks: tensors may end at the last."""
    squares = xt.full((2,), math.nan, dtype=DOUBLE)
    _C.bank_sum_(None, [xt.full((128,), 2.0)], xt.tensor([2 * 8192 - 128], device="cpu"), squares)
    assert squares.tolist() == [0.0, 512.0]
