"""The tests that every entry of the op table gets: values, gradients, strides, sizes, repeats, threads, errors, coverage."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re

import numpy as np
import pytest
from places import ROOT

from xtrain import _C
from xtrain.optable import OTHER_KERNELS, TABLE, adamw_group
from xtrain.optable.identities import mhc_identities
from xtrain.optable.judge import backends, directions, forward_tolerance, gradient_tolerance, result_dtype, use
from xtrain.optable.table import (
    FLOATS,
    UNIT_ROUNDOFF,
    Case,
    Op,
    accumulator,
    array,
    bits,
    check_close,
    exact,
    gradients,
    outputs_of,
    references_of,
    tensor,
    upstream,
)


def over(*, dtypes=None, chosen=lambda entry, c: True):
    """Parameters (entry, cases, dtype) for a test that runs the table. It has all cases of an entry, in every backend, beside each other:
    as tests of their own, thousands of small ones would take longer to start than to run."""
    rows = [
        pytest.param(entry, cases, dtype, id=f"{entry.id}-{dtype}")
        for entry in TABLE
        if (cases := [c for c in entry.cases if chosen(entry, c)])
        for dtype in entry.dtypes
        if dtypes is None or dtype in dtypes
    ]
    return pytest.mark.parametrize(("entry", "cases", "dtype"), rows)


@contextlib.contextmanager
def named(entry: Op, c: Case, backend: str | None):
    """The backend is in force, the seed is 0, and an error says where it was."""
    use(entry, backend)
    _C.manual_seed(0)
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{entry.id}, case {c.id}, backend {backend}: {error}") from error


# ---- values -------------------------------------------------------------------------------------------------------------------


@over()
def test_forward(entry: Op, cases: list[Case], dtype: str) -> None:
    for c in cases:
        drawn = entry.draw(c, dtype)
        arrays = drawn if dtype in FLOATS else [a.astype(dtype) for a in drawn]
        inputs = [tensor(a, dtype if a.dtype.kind == "f" else None) for a in arrays]
        refs, limits = references_of(entry, c, arrays), {}
        for backend in backends(entry):
            with named(entry, c, backend):
                outs = outputs_of(entry, c, inputs)
                assert len(outs) == len(refs)
                for i, (out, ref) in enumerate(zip(outs, refs)):
                    name = result_dtype(entry, out, dtype)
                    assert out.dtype.name == name
                    got = array(out)
                    if not out.dtype.is_floating_point:
                        assert got.shape == ref.shape
                        assert np.array_equal(got, ref.astype(got.dtype)), f"output {i}: {got} != {ref}"
                        continue
                    if (i, name) not in limits:
                        limits[i, name] = forward_tolerance(entry, c, drawn, refs, i, dtype, name)
                    check_close(got, ref, limits[i, name], f"output {i} in {dtype}")


def test_stats() -> None:
    """The `stats` kernel: minimum, maximum, mean of the finite elements, counts of NaN and Inf, any strides and dtype."""
    x = np.random.default_rng(5).standard_normal((33, 257))
    x[3, 5], x[4, 6], x[7, 7] = np.nan, np.inf, -np.inf
    for dtype in FLOATS:
        t = tensor(np.where(np.isfinite(x), exact(x, dtype), x), dtype)
        for view, values in [
            (t, array(t)),
            (_C.transpose(t, 0, 1), array(t).T),
            (_C.slice(t, 1, 1, 257, 3), array(t)[:, 1::3]),
        ]:
            finite = values[np.isfinite(values)]
            low, high, mean, nans, infs = _C.stats(view)
            assert (nans, infs) == (np.isnan(values).sum(), np.isinf(values).sum())
            assert (low, high) == (finite.min(), finite.max())
            assert abs(mean - finite.mean()) <= 1e-12 * np.abs(finite).mean() * len(finite)
    low, high, mean, nans, infs = _C.stats(_C.tensor(np.array([3, -1, 7])))
    assert (low, high, mean, nans, infs) == (-1, 7, 3, 0, 0)


def test_documents() -> None:
    """The `attention_documents` kernel by what `xtrain check` does; more in test_documents.py and test_attention_spans.py."""
    assert OTHER_KERNELS["attention_documents"][1](str(_C.get_default_device())) == ""


def test_compare() -> None:
    """The `compare` kernel against NumPy: every pair of dtypes, any strides, values that are not finite, several segments."""
    rng = np.random.default_rng(7)
    ref = rng.standard_normal((77, 513))
    out = ref + rng.standard_normal(ref.shape) * 1e-2
    out[3, 5], out[4, 6], out[7, 7], ref[7, 7] = np.nan, np.inf, -np.inf, -np.inf
    ref[9, 9], ref[10, 10], out[70, 500] = np.nan, np.inf, 60000
    for a_dtype, b_dtype in itertools.product(FLOATS, FLOATS):
        t, u = (tensor(np.where(np.isfinite(x), exact(x, d), x), d) for x, d in ((out, a_dtype), (ref, b_dtype)))
        for cut in (
            lambda x: x,
            lambda x: _C.transpose(x, 0, 1),
            lambda x: _C.slice(x, 1, 1, 513, 3),
            lambda x: _C.slice(x, 0, 3, 4),
        ):
            a, b = array(cut(t)), array(cut(u))
            finite = np.isfinite(a) & np.isfinite(b)
            with np.errstate(invalid="ignore"):
                d, limit = np.abs(a - b), 1e-3 + 1e-2 * np.abs(b)
                wrong = np.where(finite, d > limit, a != b)
                ratio = np.where(finite, d / limit, np.where(wrong, np.inf, 0))
            got = _C.compare(cut(t), cut(u), 1e-2, 1e-3)
            assert got["errors"] == wrong.sum()
            assert got["worst"] == ratio.argmax()
            assert got["worst_ratio"] == pytest.approx(ratio.max(), rel=1e-12)
            assert (got["out_nan"], got["out_inf"]) == (np.isnan(a).sum(), np.isinf(a).sum())
            assert (got["ref_nan"], got["ref_inf"]) == (np.isnan(b).sum(), np.isinf(b).sum())
            assert got["max_abs"] == d[finite].max()
            assert got["max_rel"] == (d[finite] / np.abs(b[finite])).max()
            assert got["max_ref"] == np.abs(b[np.isfinite(b)]).max()
    big = 2**62
    got = _C.compare(_C.tensor(np.array([big, 3, -5])), _C.tensor(np.array([big + 1, 3, -7])), 0.0, 0.0)
    assert (got["errors"], got["worst"], got["max_abs"]) == (2, 2, 2.0)  # 2^62 and 2^62 + 1 are the same float64
    assert _C.compare(_C.empty((0, 3)), _C.empty((0, 3)), 0.0, 0.0)["worst"] == -1
    for threads in (1, 2, 4):
        _C.set_num_threads(threads)
        assert (
            _C.compare(tensor(out, "float32"), tensor(np.zeros_like(out), "float32"), 0.0, 1.0)["worst"] == 3 * 513 + 5
        )
    for other, rtol, error in (((2, 3), 0.0, ValueError), ((3, 2), np.nan, ValueError), ((3, 2), -1.0, ValueError)):
        with pytest.raises(error, match="compare: "):
            _C.compare(_C.full((3, 2), 1.0), _C.full(other, 1.0), rtol, 0.0)
    with pytest.raises(TypeError, match="compare: other must be floating point like input, got int64"):
        _C.compare(_C.full((2,), 1.0), _C.full((2,), 1, "int64"), 0.0, 0.0)


@pytest.mark.parametrize("deviation", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("rms", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("shape", [(33, 4, 40), (17, 2, 129), (9, 8, 31), (5, 1, 7), (3, 4, 1280)], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_mhc_identities(dtype: str, shape: tuple[int, int, int], rms: float, deviation: float) -> None:
    """What the gradients of hyper-connections have to do with each other, at every scale."""
    for name, (residual, limit) in mhc_identities(dtype, shape, rms, deviation).items():
        assert residual <= limit, f"{name}: residual {residual:.2e}, limit {limit:.2e}"


# ---- gradients ------------------------------------------------------------------------------------------------------------------


def loss(entry: Op, c: Case, arrays: list[np.ndarray], dys: list[np.ndarray]) -> float:
    """sum(out * dy) in float64."""
    _C.set_grad_enabled(False)
    try:
        outs = outputs_of(entry, c, [tensor(a, "float64") for a in arrays])
    finally:
        _C.set_grad_enabled(True)
    return sum(float((array(o) * dy).sum()) for o, dy in zip([o for o in outs if o.dtype.is_floating_point], dys))


def finite_difference(entry: Op, c: Case, eps: float = 1e-5) -> None:
    arrays = entry.draw(c, "float64", "fd")
    outs, grads = gradients(entry, c, arrays, "float64")
    dys = upstream(outs, "float64", entry.id + c.id)
    rng = np.random.default_rng(len(entry.id + c.id))
    for i in entry.differentiable(c):
        assert grads[i] is not None, f"input {i} got no gradient"
        analytic = array(grads[i])
        assert analytic.shape == arrays[i].shape
        assert np.isfinite(analytic).all(), f"gradient of input {i} is not finite"
        scale = float(np.abs(analytic).max(initial=0.0))
        for d in directions(arrays[i], rng):
            plus, minus = arrays[i] + eps * d, arrays[i] - eps * d
            up = loss(entry, c, [*arrays[:i], plus, *arrays[i + 1 :]], dys)
            down = loss(entry, c, [*arrays[:i], minus, *arrays[i + 1 :]], dys)
            want = float((analytic * (plus - minus)).sum()) / (2 * eps)  # the step that was really taken
            got = (up - down) / (2 * eps)
            assert np.isfinite(got) and np.isfinite(want)
            limit = 1e-6 * max(abs(want), abs(got), 0.1 * scale) + 1e-10
            assert abs(got - want) <= limit, (
                f"{entry.id}-{c.id} input {i}: gradient {want:.9e}, finite difference {got:.9e}, limit {limit:.2e}"
            )


@over(dtypes=("float64",), chosen=lambda entry, c: c.fd and not c.big and entry.differentiable(c))
def test_gradient_float64(entry: Op, cases: list[Case], dtype: str) -> None:
    """Relative error <= 1e-6; the denominator is the larger of the two numbers, but at least a tenth of the largest gradient."""
    for c, backend in itertools.product(cases, backends(entry)):
        with named(entry, c, backend):
            finite_difference(entry, c)


@over(dtypes=("float32", "bfloat16", "float16"), chosen=lambda entry, c: bool(entry.differentiable(c)))
def test_gradient_against_float64(entry: Op, cases: list[Case], dtype: str) -> None:
    """The backward of the lower formats against the float64 backward (which finite differences prove) on the same numbers."""
    for c, backend in itertools.product(cases, backends(entry)):
        with named(entry, c, backend):
            against_float64(entry, c, dtype)


def against_float64(entry: Op, c: Case, dtype: str) -> None:
    arrays = entry.draw(c, dtype)
    outs, grads = gradients(entry, c, arrays, dtype)
    dys = upstream(outs, dtype, entry.id + c.id)
    _, wants = gradients(entry, c, arrays, "float64", dys)
    for i in entry.differentiable(c):
        assert grads[i].dtype.name == dtype
        want = array(wants[i])
        check_close(
            array(grads[i]),
            want,
            gradient_tolerance(entry, c, arrays, dys, want, dtype),
            f"{entry.id} gradient of input {i} in {dtype}",
        )


# ---- strides --------------------------------------------------------------------------------------------------------------------


def transposed(a: np.ndarray, dtype: str | None):
    """The same values, stored in reversed order of dimensions."""
    order = tuple(range(a.ndim))[::-1]
    return _C.permute(tensor(a.transpose(order), dtype), order)


def stepped(a: np.ndarray, dtype: str | None):
    """The same values, every second element of something larger, at an offset."""
    if a.ndim == 0:
        return _C.select(tensor(np.stack([np.zeros_like(a), a]), dtype), 0, 1)
    big = np.full([2 * n + 1 for n in a.shape], 77, a.dtype)
    big[tuple(slice(1, None, 2) for _ in a.shape)] = a
    t = tensor(big, dtype)
    for d, n in enumerate(a.shape):
        t = _C.slice(t, d, 1, 2 * n + 1, 2)
    return t


def repeated(a: np.ndarray, dtype: str | None):
    """Stride 0 in the first dimension (the values of its first index); the caller compares with the same values made dense."""
    if a.ndim == 0 or 0 in a.shape:
        return tensor(a, dtype)
    return _C.expand(tensor(a[:1], dtype), a.shape)


def run(entry: Op, c: Case, tensors: list, dtype: str, upstream_as=transposed) -> list:
    """Outputs, then gradients where there are any; upstream gradients arrive transposed too, or as `upstream_as` makes them."""
    leaves = entry.differentiable(c) if dtype in FLOATS else []
    for i in leaves:
        tensors[i].requires_grad_()
    outs = outputs_of(entry, c, tensors)
    if not leaves:
        return outs
    floats = [o for o in outs if o.dtype.is_floating_point]
    seeds = [
        _C.to_device(upstream_as(dy, o.dtype.name), o.device) for dy, o in zip(upstream(floats, dtype, c.id), floats)
    ]
    _C.backward(floats, seeds, False)
    return outs + [tensors[i].grad for i in leaves]


@over(
    dtypes=("float32", "bfloat16", "int64"),
    chosen=lambda entry, c: entry.strided != "no" and not c.big and bool(c.inputs),
)
def test_strides(entry: Op, cases: list[Case], dtype: str) -> None:
    for c, backend in itertools.product(cases, backends(entry)):
        with named(entry, c, backend):
            strides(entry, c, dtype)


def strides(entry: Op, c: Case, dtype: str) -> None:
    arrays = entry.draw(c, dtype) if dtype in FLOATS else [a.astype(dtype) for a in entry.draw(c, dtype)]
    kinds = [dtype if a.dtype.kind == "f" else None for a in arrays]
    wants: list = []
    for layout in (transposed, stepped, repeated):
        views = [_C.detach(layout(a, k)) for a, k in zip(arrays, kinds)]
        if layout is repeated:
            arrays = [array(v) if v.dtype.is_floating_point else v.cpu().numpy() for v in views]
        dense = [tensor(a, k) for a, k in zip(arrays, kinds)]
        for v, d in zip(views, dense):
            assert bits(v) == bits(d)
        if layout is not stepped:  # which has the same numbers as `transposed`
            wants = run(entry, c, dense, dtype, tensor)
        for i, (got, want) in enumerate(zip(run(entry, c, views, dtype), wants, strict=True)):
            if entry.strided == "bits" or not got.dtype.is_floating_point:
                assert bits(got) == bits(want), f"result {i} depends on the strides of the inputs: {layout.__name__}"
            else:
                want_array = array(want)
                scale = np.abs(want_array).max(initial=1.0)
                check_close(
                    array(got),
                    want_array,
                    (4 * UNIT_ROUNDOFF[dtype] + 300 * UNIT_ROUNDOFF["float32"]) * scale,
                    f"result {i}, {layout.__name__}",
                )


# ---- the same bits, every time --------------------------------------------------------------------------------------------------------


def everything(entry: Op, c: Case, dtype: str, arrays: list[np.ndarray]) -> list[bytes]:
    tensors = [tensor(a, dtype) if dtype in FLOATS else tensor(a.astype(dtype)) for a in arrays]
    return [bits(t) for t in run(entry, c, tensors, dtype)]


@over(dtypes=("float32", "bfloat16", "int64"), chosen=lambda entry, c: c.big or c is entry.cases[0])
def test_same_bits(entry: Op, cases: list[Case], dtype: str) -> None:
    """Repeats, and 1, 2 and 4 threads."""
    for c in cases:
        arrays = entry.draw(c, dtype)
        for backend in backends(entry):
            with named(entry, c, backend):
                want = everything(entry, c, dtype, arrays)
                for threads in (1, 2, 4):
                    _C.set_num_threads(threads)
                    for _ in range(1 if c.big else 3):
                        got = everything(entry, c, dtype, arrays)
                        assert got == want, f"{dtype} gives other bits with {threads} threads"


# ---- nothing left behind, nothing touched beside ------------------------------------------------------------------------


def live() -> tuple[int, int]:
    stats = _C.memory_stats(_C.get_default_device())
    return stats["live_tensors"], stats["live_storages"]


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.id)
def test_leaks_nothing(entry: Op) -> None:
    """Results, gradients and failed calls of an op are gone once nobody holds them."""
    dtype = entry.dtypes[0]
    arrays = [entry.draw(c, dtype) for c in entry.cases[:4]]
    everything(entry, entry.cases[0], dtype, arrays[0])
    gc.collect()
    before = live()
    for c, drawn in zip(entry.cases, arrays):
        everything(entry, c, dtype, drawn)
    for error in entry.errors:
        with pytest.raises(error.type):
            error.call()
            _C.synchronize(_C.get_default_device())
    gc.collect()
    assert live() == before


@pytest.mark.parametrize("count", [1, 3, 31, 33, 257, 70001])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_in_place_ops_write_only_their_own_elements(dtype: str, count: int) -> None:
    """The tensor is a part of a larger block whose other elements are guards."""
    block = _C.full((count + 64,), 7.5, getattr(_C, dtype))
    inside = _C.slice(block, 0, 32, 32 + count)
    other = _C.full((count,), 2.0, getattr(_C, dtype))
    state = [_C.full((count,), 0.0, getattr(_C, accumulator(dtype))) for _ in range(2)]
    step, lr = _C.full((), 0, _C.int64), _C.full((), 0.1, _C.float64)
    group = adamw_group(1, 0.9, 0.9, 1e-8, 0.1)
    for change in (
        lambda: _C.fill_(inside, 3.0),
        lambda: _C.copy_(inside, other),
        lambda: _C.add_(inside, other),
        lambda: _C.mul_(inside, 0.5),
        lambda: _C.adamw_([inside], [other], state[:1], state[1:], [], [step], [lr], group),
        lambda: _C.clip_grad_norm_([inside], 0.01),
    ):
        inside.fill_(1.25)
        change()
        found = array(block)
        assert (found[:32] == 7.5).all() and (found[32 + count :] == 7.5).all()
        assert (found[32 : 32 + count] != 1.25).all()


# ---- errors ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [pytest.param(e, id=f"{entry.id}-{i}") for entry in TABLE for i, e in enumerate(entry.errors)]
)
def test_error(error) -> None:
    with pytest.raises(error.type) as caught:
        error.call()
        _C.synchronize(_C.get_default_device())  # an index out of range shows when the kernel has run
    message = re.sub(r"argument '(\w+)'", r"\1", str(caught.value))
    assert re.search(error.match, message), f"message {message!r} does not match {error.match!r}"
    assert "\n" not in message.strip()
    assert len(message) < 400
    assert _C.add(_C.full((2,), 1.0, _C.float32), 1.0).tolist() == [2.0, 2.0]


# ---- coverage --------------------------------------------------------------------------------------------------------------------------


def test_every_op_has_an_entry() -> None:
    missing = set(_C.op_signatures()) - {entry.op for entry in TABLE}
    assert not missing, f"ops without an entry in xtrain/optable: {sorted(missing)}"
    stale = {entry.op for entry in TABLE} - set(_C.op_signatures())
    assert not stale, f"entries in xtrain/optable without an op: {sorted(stale)}"


def kernel_slots() -> list[str]:
    header = ROOT / "csrc" / "kernels.h"
    block = re.search(r"#define XT_KERNELS\(X\)(.*?)\n\n", header.read_text(), re.S)
    assert block, "csrc/kernels.h has no XT_KERNELS list"
    return re.findall(r"X\((\w+), \w+\)", block[1])


def test_every_kernel_slot_has_an_entry() -> None:
    slots = kernel_slots()
    assert len(slots) >= 24
    covered = set(OTHER_KERNELS) | set(itertools.chain.from_iterable(entry.kernels for entry in TABLE))
    assert not set(slots) - covered, f"kernel slots without an entry in xtrain/optable: {sorted(set(slots) - covered)}"
    assert not covered - set(slots), f"entries name slots that do not exist: {sorted(covered - set(slots))}"
    assert all(test in globals() for test, _ in OTHER_KERNELS.values())


def test_every_unary_and_binary_kind_has_an_entry() -> None:
    header = ROOT / "csrc" / "contract" / "elementwise.h"
    text = header.read_text()
    ids = {entry.id for entry in TABLE}
    for macro in ("XT_UNARY_OPS", "XT_BINARY_OPS"):
        kinds = re.search(rf"#define {macro}\(X\)((?:.*\\\n)*.*)", text)[1]
        for kind in re.findall(r"X\((\w+)\)", kinds):
            assert kind.lower().replace("_", ":") in ids or kind.lower() in ids, f"{macro}: {kind} has no entry"


def test_every_backend_is_run() -> None:
    assert {"naive", "blas"} <= set(_C.gemm_backends("cpu"))
    assert {"reference", "materialized"} <= set(_C.attention_backends("cpu"))
    assert {entry.selects for entry in TABLE} >= {"gemm", "attention"}
    for entry in TABLE:
        if entry.selects:
            assert len(backends(entry)) >= 2


def test_every_differentiable_case_is_not_silently_skipped() -> None:
    """An entry may drop finite differences only for single cases, never for all of its cases."""
    for entry in TABLE:
        cases = [
            c
            for c in entry.cases
            if entry.differentiable(c) and entry.variant not in ("ties", "empty", "big") and entry.op != "cast"
        ]
        assert not cases or (any(c.fd and not c.big for c in cases) and "float64" in entry.dtypes), entry.id
