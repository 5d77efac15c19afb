"""Muon against its published formula in NumPy, and what ChainedOptimizer does. `make test-gpu` runs all of it on a GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C, optim
from xtrain.optable import muon_reference
from xtrain.optable.table import array, check_close, exact
from xtrain.optim.muon import muon_numbers

SHAPES = [(6, 10), (10, 6), (6, 10), (5, 5), (6, 10)]  # three of one shape are one call
JORDAN = dict(a=3.4445, b=-4.7750, c=2.0315)


def matrices(dtype=xt.float64, shapes=SHAPES, seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    return [xt.nn.Parameter(xt.tensor(rng.standard_normal(shape)).to(dtype)) for shape in shapes]


def set_gradients(params, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    for p in params:
        p.grad = xt.tensor(rng.standard_normal(tuple(p.shape))).to(p.dtype).to(p.device)
    return [array(p.grad) for p in params]


def content(optimizer) -> list[bytes]:
    """The bits of every parameter and of its state."""
    found = [array(p).tobytes() for group in optimizer.param_groups for p in group["params"]]
    for state in optimizer.state_dict()["state"].values():
        found += [array(v).tobytes() if isinstance(v, xt.Tensor) else bytes([v]) for v in state.values()]
    return found


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_follow_the_published_formula(adjust, nesterov) -> None:
    params = matrices()
    values, buffers = [array(p).copy() for p in params], [np.zeros(shape) for shape in SHAPES]
    optimizer = optim.Muon(params, 0.05, 0.2, 0.9, nesterov, adjust_lr_fn=adjust)
    for step in range(4):
        gradients = set_gradients(params, step)
        optimizer.step()
        for i, (rows, cols) in enumerate(SHAPES):
            ratio = 0.2 * math.sqrt(max(rows, cols)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / cols))
            values[i], buffers[i] = muon_reference(
                values[i], gradients[i], buffers[i], lr=0.05, momentum=0.9, weight_decay=0.2, nesterov=nesterov,
                steps=5, eps=1e-7, ratio=ratio, **JORDAN,
            )  # fmt: skip
    for p, want, buffer in zip(params, values, buffers):
        tolerance = 4 * 40 * JORDAN["a"] ** 5 * 2.0**-53  # steps, roundings of an iteration, their growth
        check_close(array(p), want, tolerance, "parameter")
        check_close(array(optimizer.state[p]["momentum_buffer"]), buffer, 1e-14, "momentum_buffer")


def test_the_direction_is_nearly_orthogonal() -> None:
    """Singular values come out in the interval that the coefficients were made for."""
    (p,) = matrices(xt.float32, [(24, 64)])
    before = array(p)
    set_gradients([p], 3)
    optim.Muon([p], lr=1.0, weight_decay=0.0).step()
    values = np.linalg.svd(before - array(p), compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.25, values


def in_bfloat16(g: np.ndarray, steps: int = 5) -> np.ndarray:
    """What the formula gives when each result is rounded to bfloat16: the error that its users accept."""
    x = exact(g / np.linalg.norm(g), "bfloat16")
    for _ in range(steps):
        gram = exact(x @ x.T, "bfloat16")
        factor = exact(JORDAN["b"] * gram + JORDAN["c"] * gram @ gram, "bfloat16")
        x = exact(JORDAN["a"] * x + factor @ x, "bfloat16")
    return x


def test_bfloat16_is_as_exact_as_the_formula_rounded_to_it() -> None:
    params = matrices(xt.float32, [(32, 80)] * 4, 1)
    before = [array(p) for p in params]
    gradients = set_gradients(params, 5)
    optim.Muon(params, lr=1.0, weight_decay=0.0, momentum=0.0, ns_dtype="bfloat16").step()
    ours, naive = [], []
    for p, old, g in zip(params, before, gradients):
        settings = dict(lr=1.0, momentum=0.0, weight_decay=0.0, nesterov=True, steps=5, eps=1e-7, ratio=1.0)
        want = muon_reference(np.zeros_like(g), g, np.zeros_like(g), **settings, **JORDAN)[0]
        ours.append(np.abs(array(p) - old - want).max())
        naive.append(np.abs(-in_bfloat16(g) - want).max())
    assert 1e-4 < max(ours) <= 2 * max(naive)


@pytest.mark.parametrize("dtype", [xt.bfloat16, xt.float16])
def test_16_bits_keep_masters(dtype) -> None:
    """Steps far below the last place of the dtype add up in the float32 master."""
    p = xt.nn.Parameter(xt.ones(8, 8, dtype=dtype))
    optimizer = optim.Muon([p], lr=1e-4, weight_decay=0.0, momentum=0.0, ns_dtype="float32")
    for _ in range(100):
        p.grad = xt.tensor(np.eye(8)).to(dtype)
        optimizer.step()
    state = optimizer.state[p]
    assert {name: value.dtype for name, value in state.items()} == {"momentum_buffer": xt.float32, "master": xt.float32}
    moved = 1 - array(state["master"])
    assert moved.diagonal().min() > 0.006 and np.abs(moved - np.diag(moved.diagonal())).max() < 1e-6
    assert np.array_equal(array(p), array(state["master"].to(dtype)))


@pytest.mark.parametrize("dtype", [xt.float32, xt.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_its_guard_stops_changes_nothing(bad, dtype) -> None:
    runs = []
    for guards in ([1.0, bad, 1.0], [1.0, 1.0]):
        params = matrices(dtype)
        optimizer = optim.Muon(params, lr=0.1)
        for i, guard in enumerate(guards):
            set_gradients(params, 7 if i == len(guards) - 1 else i)
            optimizer.step(guard=xt.tensor(guard, dtype=xt.float32))
        runs.append(content(optimizer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("dtype", [xt.float64, xt.float32, xt.bfloat16])
def test_a_norm_that_is_nan_is_not_the_least_one(dtype) -> None:
    """Without a guard and without steps, which would spread NaN anyway: |u| is NaN, and so is u / max(|u|, eps)."""
    (p,) = matrices(dtype, [(6, 10)])
    set_gradients([p], 0)
    p.grad[2, 3] = math.nan
    optim.Muon([p], lr=0.1, ns_steps=0).step()
    assert np.isnan(array(p)).all()


@pytest.mark.parametrize(("lr", "decay"), [(0.9, 0.7), (0.1, 0.8), (0.8, 0.8)])
def test_the_factor_of_decay_is_rounded_twice(lr: float, decay: float) -> None:
    """As on the host: lr weight_decay, then 1 minus that. A fused form has other bits for these numbers."""
    p = xt.nn.Parameter(xt.ones(8, 8, dtype=xt.float64))
    p.grad = xt.zeros(8, 8, dtype=xt.float64)
    optim.Muon([p], lr=lr, weight_decay=decay).step()
    assert (array(p) == 1 - lr * decay).all()


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", [xt.float32, xt.bfloat16])
def test_a_matrix_has_the_same_bits_whatever_others_are_in_its_batch(dtype) -> None:
    """On a GPU cuBLASLt may choose other products for another batch."""
    shapes = [(40, 72)] * 3
    together, alone = matrices(dtype, shapes), matrices(dtype, shapes)
    one = optim.Muon(together, lr=0.1)
    others = [optim.Muon([p], lr=0.1) for p in alone]
    for step in range(2):
        set_gradients(together, step)
        set_gradients(alone, step)
        for optimizer in (one, *others):
            optimizer.step()
    assert [array(p).tobytes() for p in together] == [array(p).tobytes() for p in alone]


def test_ns_dtype_is_a_dtype_or_its_name_in_every_group() -> None:
    """A group keeps the name, which a checkpoint's JSON can hold."""
    first, second = matrices(xt.float32)[:2]
    optimizer = optim.Muon([{"params": [first], "ns_dtype": xt.bfloat16}, {"params": [second], "ns_dtype": "float16"}])
    optimizer.param_groups[1]["ns_dtype"] = xt.float32
    set_gradients([first, second], 0)
    optimizer.step()
    assert [group["ns_dtype"] for group in optimizer.state_dict()["param_groups"]] == ["bfloat16", "float32"]


def test_without_steps_of_the_iteration_the_direction_is_the_normalised_one() -> None:
    param = matrices(xt.float32)[0]
    before, rows = array(param).copy(), param.shape[0] / param.shape[1]
    set_gradients([param], 0)
    optim.Muon([param], lr=0.5, momentum=0.0, weight_decay=0.0, ns_steps=0, ns_dtype=xt.float32).step()
    g = array(param.grad)
    np.testing.assert_allclose(array(param), before - 0.5 * max(1, rows) ** 0.5 * g / np.linalg.norm(g), rtol=1e-5)


def test_meta_stands_for_a_cpu_or_a_gpu() -> None:
    group = optim.Muon(matrices(xt.float32)).param_groups[0]
    dtypes = [muon_numbers(group, xt.zeros(2, 3, device=device))[3] for device in ("meta:0", "meta:1")]
    assert dtypes == [xt.float32, xt.bfloat16]


def test_a_parameter_without_a_gradient_stays() -> None:
    first, second = matrices(xt.float32)[:2]
    before = array(second).copy()
    set_gradients([first], 0)
    optimizer = optim.Muon([first, second])
    optimizer.step()
    assert np.array_equal(array(second), before) and second not in optimizer.state


def test_state_is_made_before_anything_changes(monkeypatch) -> None:
    """Memory that ends with the state of the second batch leaves the first as it was."""
    params = matrices(xt.float32, [(3, 4), (5, 6)])
    set_gradients(params, 0)
    before, state_of = [array(p).copy() for p in params], optim.Muon._state_of

    def ends(self, param):
        if param is params[1]:
            raise xt.OutOfMemoryError("state")
        return state_of(self, param)

    monkeypatch.setattr(optim.Muon, "_state_of", ends)
    optimizer = optim.Muon(params)
    with pytest.raises(xt.OutOfMemoryError):
        optimizer.step()
    assert all(np.array_equal(array(p), old) for p, old in zip(params, before)) and not optimizer.interrupted()


def test_a_guard_stops_all_optimizers_of_a_chain() -> None:
    whole, params = chain(xt.float32)
    set_gradients(params, 0)
    before = [array(p).copy() for p in params]
    whole.step(guard=xt.tensor(float("nan"), dtype=xt.float32))
    assert all(np.array_equal(array(p), old) for p, old in zip(params, before))


def chain(dtype):
    """Muon and AdamW of a small model."""
    params = matrices(dtype)
    rest = matrices(dtype, [(4,), (7, 3)], 9)
    muon = optim.Muon([{"params": params[:2], "lr": 0.03}, {"params": params[2:]}], lr=0.1, ns_dtype="float32")
    return optim.ChainedOptimizer([muon, optim.AdamW(rest, lr=0.01)]), [*params, *rest]


@pytest.mark.parametrize("dtype", [xt.float32, xt.bfloat16])
def test_a_chain_is_its_optimizers_and_resumes_bit_for_bit(dtype) -> None:
    whole, params = chain(dtype)
    apart, others = chain(dtype)
    for step in range(2):
        set_gradients(params, step)
        set_gradients(others, step)
        whole.step()
        for one in apart.optimizers:
            one.step()
    assert content(whole) == content(apart)
    saved = whole.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2, 3, 4], [5, 6]]
    resumed, fresh = chain(dtype)
    for p, q in zip(fresh, params):
        p.detach().copy_(q.detach())
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == 0.03
    for optimizer, own in ((whole, params), (resumed, fresh)):
        set_gradients(own, 5)
        optimizer.step(guard=xt.tensor(1.0, dtype=xt.float32))
    assert content(whole) == content(resumed)
    assert len(whole.state) == 7 and whole.state[params[0]]["momentum_buffer"].shape == (6, 10)
    whole.state.clear()
    assert not any(one.state for one in whole.optimizers)


def test_a_state_of_pytorch_gets_what_it_lacks() -> None:
    (p,) = matrices(xt.bfloat16, [(3, 4)])
    optimizer = optim.Muon([p])
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(
        {"state": {0: {"momentum_buffer": xt.ones(3, 4, dtype=xt.bfloat16)}}, "param_groups": groups}
    )
    state = optimizer.state[p]
    assert state["momentum_buffer"].dtype is xt.float32 and np.array_equal(array(state["master"]), array(p))
    with pytest.raises(ValueError, match="state of parameter 0 must have momentum_buffer, got nothing"):
        optimizer.load_state_dict({"state": {0: {}}, "param_groups": groups})


def test_large_batches_are_cut(monkeypatch) -> None:
    """Scratch is as large as the matrices of one call."""
    from xtrain.optim import muon

    monkeypatch.setattr(muon, "_MOST_ELEMENTS", 130)
    params = matrices()
    set_gradients(params, 0)
    calls: list[int] = []
    before = _C.set_call_hook(
        lambda op, arguments, _: calls.append(len(arguments["params"])) if op.__name__ == "muon_" else None
    )
    try:
        optim.Muon(params).step()
    finally:
        _C.set_call_hook(before)
    assert calls == [2, 1, 1, 1]


def test_an_error_between_two_batches_is_known(monkeypatch) -> None:
    optimizer, params = chain(xt.float32)
    set_gradients(params, 0)
    optimizer.step()
    assert not optimizer.interrupted()
    real, calls = _C.muon_, []

    def fail(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise MemoryError("no room")
        real(*arguments)

    monkeypatch.setattr(_C, "muon_", fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.interrupted()
    with pytest.raises(MemoryError):  # at the first batch: nothing has changed
        optimizer.step()
    assert not optimizer.interrupted()
    monkeypatch.setattr(_C, "muon_", real)
    monkeypatch.setattr(optim.AdamW, "step", fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.interrupted()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: optim.Muon([xt.nn.Parameter(xt.ones(64))]), r"Muon: params must be matrices, got shape \(64,\): AdamW is for vectors and the rest"),
        (lambda: optim.Muon(matrices(shapes=[(2, 3, 4)])), r"Muon: params must be matrices, got shape \(2, 3, 4\)"),
        (lambda: optim.Muon(matrices(), lr=-1.0), r"Muon: lr must be a number in \[0, inf\), got -1.0"),
        (lambda: optim.Muon(matrices(), momentum=1.0), r"Muon: momentum must be a number in \[0, 1.0\), got 1.0"),
        (lambda: optim.Muon(matrices(), ns_steps=100), r"Muon: ns_steps must be an integer in \[0, 99\], got 100"),
        (lambda: optim.Muon(matrices(), ns_coefficients=(1.0, 2.0)), r"Muon: ns_coefficients must be three finite numbers, got \(1.0, 2.0\)"),  # pyright: ignore[reportArgumentType]  (refused)
        (lambda: optim.Muon(matrices(), ns_coefficients=xt.tensor(1.0)), r"^Muon: ns_coefficients must be three finite numbers, got tensor\(1\."),  # pyright: ignore[reportArgumentType]  (refused)
        (lambda: optim.Muon(matrices(), adjust_lr_fn="rms"), r"Muon: adjust_lr_fn must be original, match_rms_adamw or None, got 'rms'"),
        (lambda: optim.Muon(matrices(), ns_dtype="bfloat16"), r"Muon: ns_dtype must be float64 or None for float64 parameters, got 'bfloat16'"),
        (lambda: optim.Muon(matrices(xt.float32), ns_dtype=xt.float64), r"Muon: ns_dtype must be float32, bfloat16, float16 or None for float32 parameters, got 'float64'"),
        (lambda: optim.ChainedOptimizer([]), r"ChainedOptimizer: optimizers must hold at least one optimizer, got none"),
        (lambda: (lambda p: optim.ChainedOptimizer([optim.Muon(p), optim.AdamW(p)]))(matrices()), r"ChainedOptimizer: params must be distinct, got one in two optimizers"),
        (lambda: optim.ChainedOptimizer([3]), r"ChainedOptimizer: optimizers must be plain optimizers, got int"),  # pyright: ignore[reportArgumentType]  (refused)
        (lambda: optim.ChainedOptimizer([chain(xt.float32)[0]]), r"ChainedOptimizer: optimizers must be plain optimizers, got ChainedOptimizer"),
        (lambda: chain(xt.float32)[0].add_param_group({"params": []}), r"ChainedOptimizer: a group must be added to one of its optimizers"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(make, sentence) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        make()
