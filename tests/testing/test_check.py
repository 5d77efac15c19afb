"""`xtrain check` finds what is wrong: every planted fault ends with status 1 and the name of its op."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from runs import xtrain

import xtrain as xt
from xtrain import _C, cli, optable
from xtrain.bench import check
from xtrain.optable import TABLE, judge
from xtrain.optable.table import T, array, op

pytestmark = pytest.mark.on_cpu


def run(*arguments: str) -> int:
    return cli.main(["check", *arguments])


def plant(monkeypatch, name: str, wrap) -> None:
    """Every entry of op `name` calls wrap(its call) from now on."""
    entries = [replace(entry, call=wrap(entry.call)) if entry.op == name else entry for entry in check.TABLE]
    monkeypatch.setattr(check, "TABLE", entries)


@pytest.fixture
def small_cases(monkeypatch) -> None:
    """Where one wrong result is as good as another; test_every_entry_is_run has the large cases, too."""
    entries = [replace(entry, cases=tuple(c for c in entry.cases if not c.big)) for entry in TABLE]
    monkeypatch.setattr(check, "TABLE", entries)


def test_a_few_ops_are_right(small_cases, capsys) -> None:
    assert run("--op", "rms_norm,matmul,sum") == 0
    text = capsys.readouterr().out
    for word in ("rms_norm", "matmul", "naive", "bfloat16", "all right"):
        assert word in text
    assert "WRONG" not in text


# Each takes the right call of an op and returns one with a fault.


def one_element(call):
    """One element of the result is off by one part in a hundred."""

    def wrong(*inputs, **options):
        out = call(*inputs, **options)
        if out.numel() < 2:
            return out
        factors = np.ones(out.numel())
        factors[out.numel() // 2] = 1.01
        return _C.mul(out, _C.cast(_C.tensor(factors.reshape(out.shape)), out.dtype))

    return wrong


def a_nan(call):
    def wrong(*inputs, **options):
        out = _C.clone(_C.detach(call(*inputs, **options)))
        return _C.add(out, float("nan")) if out.numel() else out

    return wrong


def transposed(call):
    def wrong(*inputs, **options):
        out = call(*inputs, **options)
        return out.transpose(-1, -2).contiguous() if out.ndim >= 2 else out

    return wrong


class _Scaled(xt.Function):
    """Right forward, gradient with a factor that should not be there."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 1.02


def wrong_gradient(call):
    return lambda *inputs, **options: _Scaled.apply(call(*inputs, **options))


def raising(call):
    def wrong(*inputs, **options):
        raise RuntimeError("the kernel is on fire")

    return wrong


@pytest.mark.parametrize("fault", [one_element, a_nan, transposed, wrong_gradient, raising])
@pytest.mark.parametrize("name", ["rms_norm", "matmul", "silu"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_planted_fault_is_named(small_cases, monkeypatch, capsys, name: str, fault, dtype: str) -> None:
    plant(monkeypatch, name, fault)
    assert run("--op", f"add,{name}", "--dtype", dtype) == 1
    text = capsys.readouterr().out
    wrong = [line for line in text.splitlines() if line.startswith("wrong: ")]
    assert wrong and all(line.startswith(f"wrong: {name} {dtype}") for line in wrong), text
    assert f"{name} WRONG" in text and "add WRONG" not in text
    if fault is wrong_gradient:
        assert all("backward" in line for line in wrong)
    if fault is raising:
        assert "on fire" in wrong[0]


def test_a_wrong_backend_is_told_from_the_right_ones(monkeypatch, capsys) -> None:
    def only_tiled(call):
        def wrong(*inputs, **options):
            current = _C.use_gemm_backend(None)
            _C.use_gemm_backend(current)
            out = call(*inputs, **options)
            return _C.mul(out, 1.5) if current == "tiled" else out

        return wrong

    plant(monkeypatch, "matmul", only_tiled)
    assert run("--op", "matmul", "--dtype", "float32") == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong: ")]
    assert len(wrong) == 1 and wrong[0].startswith("wrong: matmul float32 tiled")


def test_gradient_of_low_precision_is_not_its_own_judge(monkeypatch, capsys) -> None:
    """A gradient that is wrong in every format, float64 included, is found when only bfloat16 is asked for."""
    plant(monkeypatch, "silu", wrong_gradient)
    assert run("--op", "silu", "--dtype", "bfloat16") == 1
    assert "float64 gradient" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [1 + 1e-6, 1 - 1e-6])
def test_float64_gradients_are_held_to_seven_digits(monkeypatch, factor: float) -> None:
    """The bound of a difference quotient is computed; it must stay far below what a wrong formula does."""

    class Off(xt.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * factor

    for name in (
        "matmul",
        "rms_norm",
        "softmax",
        "scaled_dot_product_attention",
        "cross_entropy",
        "gelu",
        "swiglu",
        "linear",
    ):
        plant(monkeypatch, name, lambda call: lambda *a, **k: Off.apply(call(*a, **k)))
        small = [
            replace(entry, cases=tuple(c for c in entry.cases if not c.big)) for entry in check.TABLE
        ]  # are enough
        monkeypatch.setattr(check, "TABLE", small)
        assert run("--op", name, "--dtype", "float64") == 1, name


class _Small(xt.Function):
    """The identity, whose float32 gradient is off by 1e-3 in one element of about a thousandth of the largest."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        g = dy.to(xt.float64).numpy().copy()
        if dy.dtype == xt.float32 and g.size >= 100:
            size = np.abs(g).reshape(-1)
            g.reshape(-1)[np.argmin(np.abs(size - 1e-3 * size.max()))] *= 1 + 1e-3
        return _C.cast(_C.tensor(g), dy.dtype)


@pytest.mark.parametrize(
    "name", ["exp", "silu", "gelu", "tanh", "erf", "mul", "div", "where", "swiglu", "transpose", "mean", "clone"]
)
def test_one_small_element_of_an_elementwise_gradient(monkeypatch, capsys, name: str) -> None:
    """Each element of such a gradient has its own tolerance, so that small ones are judged like large ones."""

    def spoiled(call):
        return lambda *inputs, **options: call(*(_Small.apply(x) if x.requires_grad else x for x in inputs), **options)

    monkeypatch.setattr(check, "TABLE", [replace(e, call=spoiled(e.call)) if e.op == name else e for e in TABLE])
    if name in (
        "transpose",
        "mean",
        "clone",
    ):  # the table's cases of these are small, or have gradients that are all alike
        case = optable.table.case(
            optable.table.N(40, 30), **{"transpose": dict(dim0=0, dim1=1), "mean": dict(dim=1)}.get(name, {})
        )
        wide = [replace(e, cases=(case,), call=spoiled(e.call)) for e in TABLE if e.op == name][:1]
        monkeypatch.setattr(check, "TABLE", wide)
    assert run("--op", name, "--dtype", "float32") == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong: ")]
    assert len(wrong) == 1 and wrong[0].startswith(f"wrong: {name} float32: backward"), wrong


def test_gradient_tolerances() -> None:
    """One for each element where a gradient is a product of its own, with the terms of a broadcast added up; one for
    all where it may be a sum over everything."""

    def tolerance(op: str, case: str, i: int, dtype: str = "float32"):
        entry = next(e for e in TABLE if e.op == op and not e.variant)
        c = next(c for c in entry.cases if c.id == case)
        arrays = entry.draw(c, dtype)
        outs, grads = optable.table.gradients(entry, c, arrays, dtype)
        dys = optable.table.upstream(outs, dtype, entry.id + c.id)
        want = array(grads[i])
        return arrays, dys, want, judge.gradient_tolerance(entry, c, arrays, dys, want, dtype, i)

    u = 2.0**-24
    _, _, want, limit = tolerance("exp", "257", 0)
    assert limit.shape == (257,) and np.allclose(limit / np.abs(want), (4 + 8 + 1 + 16) * u, rtol=1e-6)
    (a, _), (dy,), _, limit = tolerance("mul", "3x33_33", 1)
    assert limit.shape == (33,) and np.allclose(limit, (4 + 3 + 16) * u * np.abs(dy * a).sum(0), rtol=1e-6)
    _, (dy,), _, limit = tolerance("silu", "257", 0)
    assert (limit <= 1.3 * 29 * u * np.abs(dy)).all()  # near the minimum of silu its parts cancel, and count
    assert np.ndim(tolerance("rms_norm", "3x33_33[eps=1e-06]", 0)[3]) == 0


def test_rows_are_shown_as_they_are_known(monkeypatch, capsys, tmp_path) -> None:
    """Ctrl-C in the middle leaves what has been found so far, and no file."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    plant(monkeypatch, "silu", lambda call: stop)
    assert run("--op", "exp,silu", "--json", str(tmp_path / "x.json")) == 130
    text = capsys.readouterr().out
    assert text.count("| exp ") == 4 and "silu" not in text and text.index("| op ") < text.index("| exp ")
    assert not list(tmp_path.iterdir())


def test_missing_entries_fail(monkeypatch, capsys) -> None:
    kept = [entry for entry in TABLE if entry.op not in ("rms_norm", "add_rms_norm")]
    monkeypatch.setattr(check, "TABLE", kept)
    problems = check.uncovered("cpu")
    assert "op rms_norm has no entry in the op table" in problems
    assert {
        "kernel rms_norm_fwd has no entry in the op table",
        "kernel rms_norm_bwd has no entry in the op table",
    } <= set(problems)
    assert run("--op", "rms_norm") == 1
    assert "rms_norm has no entry" in capsys.readouterr().out
    monkeypatch.setattr(check, "TABLE", TABLE)
    assert check.uncovered("cpu") == []


def test_no_case_at_all_fails(monkeypatch, capsys) -> None:
    monkeypatch.setattr(check.Checker, "rows", lambda self, dtypes: iter(()))
    assert run("--op", "exp") == 1
    text = capsys.readouterr().out
    assert "wrong: no case was checked" in text and "all right" not in text


def test_missing_kernels_fail(monkeypatch) -> None:
    monkeypatch.setattr(check._C, "kernels", lambda device: {"rope": False, "flux": True})
    assert check.uncovered("cpu") == ["kernel rope is missing on cpu", "kernel flux has no entry in the op table"]


def test_wrong_statistics_fail(monkeypatch, capsys) -> None:
    monkeypatch.setitem(optable.OTHER_KERNELS, "stats", ("test_stats", lambda device: "counted 3 NaN"))
    rows = check.check_others("cpu")
    assert rows[0].problems == ["forward, stats: counted 3 NaN"] and not rows[1].problems


def test_kernels_lists_the_header() -> None:
    slots = _C.kernels()
    assert all(slots.values()) and {"copy", "rms_norm_fwd", "rms_norm_bwd", "adamw", "stats"} <= set(slots)


@pytest.mark.slow
def test_every_entry_is_run(tmp_path) -> None:
    """The whole table, as a user runs it: all right, one record for each op, dtype and backend."""
    # Processor time. Threads that wait for a GPU or a busy machine use it, too: with twice as many threads as cores 600 s
    # were not enough. The sanitizers' builds take minutes more.
    limit = None if os.environ.get("XTRAIN_SANITIZE") else 1800
    # NumPy's products, of the references, are small: two threads wait for each other longer than they compute.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = xtrain("check", "--threads", "2", "--json", str(tmp_path / "check.json"), cpu=limit, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    record = json.loads((tmp_path / "check.json").read_text())
    assert record["problems"] == [] and record["seconds"] > 0
    found = {(row["op"], row["dtype"]) for row in record["rows"]}
    assert found >= {(entry.op, dtype) for entry in TABLE for dtype in entry.dtypes}
    assert {row["backend"] for row in record["rows"] if row["op"] == "matmul"} == set(xt.gemm_backends())
    assert all(row["forward"] <= 1 and (row["backward"] or 0) <= 1 for row in record["rows"])
    differentiable = {entry.op for entry in TABLE if not entry.nondiff}
    assert differentiable <= {row["op"] for row in record["rows"] if row["backward"] is not None}
    assert [path.name for path in tmp_path.iterdir()] == ["check.json"]


def test_check_changes_no_state() -> None:
    _C.manual_seed(5)
    before = _C.get_rng_state()
    assert run("--op", "uniform,matmul", "--dtype", "float32") == 0
    assert _C.get_rng_state() == before
    assert _C.use_gemm_backend(None) is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--op", "rmsnorm"), "rms_norm"),
        (("--op", ","), "at least one"),
        (("--dtype", "float8"), "float8"),
        (
            ("--op", "sinkhorn", "--dtype", "float16"),
            "--dtype must hold one that sinkhorn takes (float64, float32), got float16",
        ),
        (("--op", "exp,argmax,sinkhorn", "--dtype", "float16,bool"), "one that sinkhorn takes"),
        (("--device", "cuda:99"), "--device cuda:99: "),
        (("--device", "tpu"), "tpu"),
        (("--json", "/no/such/place/x.json"), "/no/such/place"),
        (("--json", "/"), "directory"),
        (("--opp", "add"), "--op"),
        (("now",), "expected no arguments"),
        (("--threads", "-1"), "--threads must be in [0, 256], got -1"),
        (("--threads", "1000"), "--threads must be in [0, 256], got 1000"),
    ],
)
def test_mistakes_are_one_line(arguments, text: str, capsys) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and text in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_a_new_entry_is_checked_without_further_work(monkeypatch, capsys) -> None:
    """What op() adds is what check runs."""
    count = len(TABLE)
    try:
        op(
            "silu",
            "unary",
            [optable.table.case(optable.table.N(3, 4))],
            lambda x: _C.relu(x),
            lambda x: x / (1 + np.exp(-x)),
            variant="scratch",
        )
        assert run("--op", "silu") == 1
        assert "scratch 3x4" in capsys.readouterr().out
    finally:
        del TABLE[count:]
    assert array(_C.full((1,), 2.0, _C.float32))[0] == 2.0 and T is TypeError


# ---- what a row says --------------------------------------------------------------------------------------------------------------------


def entry_of(name: str, *shapes: tuple[int, ...], **changed):
    """The table's entry of an op with one case a shape, changed."""
    entry = next(e for e in TABLE if e.op == name and not e.variant)
    return replace(entry, cases=tuple(optable.table.case(optable.table.N(*shape)) for shape in shapes), **changed)


def test_the_worst_case_is_that_of_the_largest_error(monkeypatch) -> None:
    """Of the forward and of the backward, over all cases and variants; a case that is right never replaces it."""
    row = check.Row("exp", "float32", None)
    for kind, where, ratio in (
        ("forward", "a", 2.0),
        ("backward", "b", 5.0),
        ("forward", "c", 3.0),
        ("backward", "d", 0.5),
    ):
        row.add(kind, where, ratio, "")
    assert (row.forward, row.backward, row.worst_case) == (3.0, 5.0, "b")
    rows = [
        check.Row("exp", "float32", None, 2, 0.5, 0.25, "small", 1.0, ["x"]),
        check.Row("exp", "float32", None, 3, 0.75, 0.125, "large", 2.0, ["y"]),
        check.Row("exp", "float32", None, 4, 0.25, None, "none", 4.0),
        check.Row("exp", "float16", None, 5, 9.0, None, "other", 8.0),
    ]
    one, other = check.merge(rows)
    assert (one.cases, one.forward, one.backward, one.worst_case) == (9, 0.75, 0.25, "large")
    assert (one.milliseconds, one.problems, other.cases, other.worst_case) == (7.0, ["x", "y"], 5, "other")


def test_a_row_shows_so_much_of_a_long_case() -> None:
    for length in (check.WORST - 1, check.WORST, check.WORST + 1, 3 * check.WORST):
        text = check.cells(check.Row("exp", "float32", None, worst_case="x" * length))[6]
        assert len(text) == min(length, check.WORST) and text.endswith("...") is (length > check.WORST)


def test_a_problem_says_how_many_more() -> None:
    rows = [
        check.Row("exp", "float32", "b", problems=["one", "two", "three"]),
        check.Row("add", "bool", None, problems=["x"]),
    ]
    assert check.problems_of([*rows, check.Row("mul", "bool", None)]) == [
        "exp float32 b: one (and 2 more)",
        "add bool: x",
    ]


def test_the_record_and_the_last_line_count_what_was_found(monkeypatch, capsys, tmp_path) -> None:
    """An error that cannot be measured is "inf" there, and no missing number, which would be right."""
    monkeypatch.setattr(check, "TABLE", [entry_of("exp", (3,), (4,), call=raising(None))])
    assert run("--op", "exp", "--dtype", "float32,float64", "--json", str(tmp_path / "x.json")) == 1
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["forward"], row["cases"]) for row in rows] == [("inf", 2), ("inf", 2)]
    assert "1 ops and kernels, 4 cases on cpu in " in capsys.readouterr().out


def test_the_kernels_that_are_no_op_are_checked_too(monkeypatch, capsys) -> None:
    def missing(device):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(check, "TABLE", [entry_of("exp", (3,))])
    monkeypatch.setattr(check, "uncovered", lambda device, ops: [])
    monkeypatch.setattr(
        check, "OTHER_KERNELS", {"stats": ("test_stats", missing), "fill": ("test_fill", lambda device: "")}
    )
    assert run("--dtype", "float32") == 1
    text = capsys.readouterr().out
    assert (
        "wrong: (stats) all: forward, stats: raised NotImplementedError: no such kernel\n" in text
        and "| (fill) " in text
    )


def test_what_a_backward_may_not_do(monkeypatch, capsys) -> None:
    """Raise, in every format or in one; give no gradient, or one of another dtype, or one that is not finite."""

    def through(backward):
        class Through(xt.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, dy):
                return backward(dy)

        return lambda call: lambda x: Through.apply(call(x))

    def raises(dtype):
        def backward(dy):
            if dtype in (None, dy.dtype.name):
                raise RuntimeError("the kernel is on fire")
            return dy

        return backward

    for backward, dtype, words in (
        (raises(None), "float64", "backward, 3: raised RuntimeError: the kernel is on fire"),
        (raises(None), "bfloat16", "backward, 3: raised RuntimeError: the kernel is on fire"),
        (raises("bfloat16"), "bfloat16", "backward, 3: raised RuntimeError: the kernel is on fire"),
        (lambda dy: None, "float64", "gradient of input 0: missing, of another shape, or not finite"),
        (lambda dy: dy * float("inf"), "float64", "gradient of input 0: missing, of another shape, or not finite"),
        (
            lambda dy: None if dy.dtype is xt.float16 else dy,
            "float16",
            "backward, 3: input 0 got no gradient in float16",
        ),
    ):
        entry = entry_of("exp", (3,))
        monkeypatch.setattr(check, "TABLE", [replace(entry, call=through(backward)(entry.call))])
        assert run("--op", "exp", "--dtype", dtype) == 1
        assert f"wrong: exp {dtype}: " in (text := capsys.readouterr().out) and words in text


def test_a_gradient_of_another_dtype_is_wrong(monkeypatch, capsys) -> None:
    right = check.gradients

    def wide(entry, c, arrays, dtype, dys, device):
        outs, grads = right(entry, c, arrays, dtype, dys, device)
        return outs, [g.to(xt.float64) for g in grads]

    monkeypatch.setattr(check, "TABLE", [entry_of("exp", (3,))])
    monkeypatch.setattr(check, "gradients", wide)
    assert run("--op", "exp", "--dtype", "float32") == 1
    assert "input 0 got no gradient in float32" in capsys.readouterr().out


def test_what_a_result_may_not_be(monkeypatch, capsys) -> None:
    """Of another dtype, one of more than there should be, or another whole number."""
    for name, dtype, wrong, words in (
        ("exp", "float32", lambda x: _C.exp(x.to(xt.float64)), "result 0 has dtype float64, expected float32"),
        ("exp", "float32", lambda x: [_C.exp(x), x], "2 results, expected 1"),
        ("neg", "int32", lambda x: _C.neg(x) + 1, "result 0 is not equal"),
        ("neg", "int32", lambda x: _C.neg(x).reshape(1, 3), "result 0 is not equal"),
    ):
        monkeypatch.setattr(
            check, "TABLE", [entry_of(name, (3,), call=wrong, dtypes=(dtype,), nondiff=dtype == "int32")]
        )
        assert run("--op", name, "--dtype", dtype) == 1
        assert words in capsys.readouterr().out


def test_gradients_are_compared_with_those_of_the_plainest_backend(monkeypatch) -> None:
    """One that only the others get wrong is not what they are compared with."""
    seen, right = [], _C.matmul

    def spy(a, b, **options):
        seen.append((a.dtype.name, _C.use_gemm_backend(None)))
        _C.use_gemm_backend(seen[-1][1])
        return right(a, b, **options)

    entry = next(e for e in TABLE if e.op == "matmul" and not e.variant)
    entry = replace(entry, cases=entry.cases[:1], call=spy)
    monkeypatch.setattr(check, "TABLE", [entry])
    assert run("--op", "matmul", "--dtype", "float32") == 0
    assert {backend for dtype, backend in seen if dtype == "float64"} == {"naive"}
    assert {backend for dtype, backend in seen if dtype == "float32"} == set(xt.gemm_backends())
