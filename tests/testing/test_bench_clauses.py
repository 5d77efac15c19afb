"""`xtrain bench`, sentence by sentence: what a clock sees, what counts as right, what an option takes, what a table shows."""

from __future__ import annotations

import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from clock import Clock

import xtrain as xt
from xtrain import _C, cli
from xtrain.bench import accelerator, attention, explain, frame, gemm, peers
from xtrain.errors import ConfigError

pytestmark = [pytest.mark.on_cpu, pytest.mark.usefixtures("short_bursts")]


def run(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


def at_once(calls, wait=None):
    """In the place of frame.measure: each contender takes a millisecond."""
    return {name: [1e-3] * 3 for name in calls}


# ---- time -------------------------------------------------------------------------------------------------------------------------------


def test_a_quick_call_runs_once_before_the_clock(monkeypatch) -> None:
    """Its first call of a turn is slow here; the median would be, too, if it were timed."""
    clock = Clock()
    monkeypatch.setattr(frame, "time", clock)
    monkeypatch.setattr(frame, "PAUSE", 1.0)
    last = [-1.0]

    def call() -> None:
        clock.now += 2e-6 if clock.now - last[0] < 0.5 else 1e-3
        last[0] = clock.now

    times = frame.measure({"quick": call})["quick"]
    assert times == pytest.approx([2e-6] * frame.TURNS, rel=1e-2)


def test_a_contender_has_turns_until_it_was_measured_long_enough(monkeypatch) -> None:
    """All its calls count: a quick one has as many seconds a turn as a slow one."""
    clock = Clock()
    monkeypatch.setattr(frame, "time", clock)
    for name, value in {"TURNS": 50, "BURST": 0.02, "ENOUGH": 0.1}.items():
        monkeypatch.setattr(frame, name, value)
    times = frame.measure({name: lambda s=s: clock.sleep(s) for name, s in (("quick", 1e-4), ("slow", 0.02))})
    assert 5 <= len(times["quick"]) <= 7 and 5 <= len(times["slow"]) <= 7


def test_a_backward_that_repeats_adds_nothing_up() -> None:
    x = xt.ones(3).requires_grad_()
    seed = xt.tensor([1.0, 2.0, 3.0])
    backward = frame.repeated([([x * 2], [seed], [x])], lambda roots, seeds: _C.backward(roots, seeds, True))
    for _ in range(3):
        backward()
        assert x.grad.tolist() == [2, 4, 6]


# ---- options ----------------------------------------------------------------------------------------------------------------------------


def test_names_of_an_option() -> None:
    assert frame.choose("dtypes", " b ,a,b,", ["a", "b"], ["a"]) == ["b", "a"]
    assert frame.choose("dtypes", None, ["a", "b"], ["b"]) == ["b"]


def test_threads_of_an_option() -> None:
    before = _C.get_num_threads()
    try:
        frame.check_threads(256)
        assert _C.get_num_threads() == 256
        frame.check_threads(0, "cuda:0")
        frame.check_threads(0)
        assert _C.get_num_threads() == 256
        with pytest.raises(ConfigError, match=r"^--threads must be in \[0, 256\], got 257$"):
            frame.check_threads(257)
        with pytest.raises(ConfigError, match="^--threads is for the CPU; a benchmark of cuda:0 does not depend on it"):
            frame.check_threads(2, "cuda:0")
    finally:
        _C.set_num_threads(before)


def test_files_of_an_option(tmp_path, monkeypatch) -> None:
    """Its ending in any case, its name in bytes, and nothing that is no regular file."""
    monkeypatch.chdir(tmp_path)
    frame.check_output("plot", "X.PNG", (".png", ".svg"))
    with pytest.raises(ConfigError, match=r"^--plot must end in \.png or \.svg, got 'png'$"):
        frame.check_output("plot", "png", (".png", ".svg"))
    for letter, size in (("x", 1), ("\N{LATIN SMALL LETTER E WITH ACUTE}", 2)):
        frame.check_output("json", letter * (frame.NAME_MAX // size))
        with pytest.raises(ConfigError, match=f"must have a name of at most {frame.NAME_MAX} bytes"):
            frame.check_output("json", letter * (frame.NAME_MAX // size + 1))
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match="^--json must be a regular file, got 'pipe'$"):
        frame.check_output("json", "pipe")


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (gemm.parse_sizes, ("1048576x1x1", "1x1048576x1024", "32768x16384x32768"), ("1048577x1x1", "1x1048577x1", "32768x32768x16385")),
        (
            attention.parse_sizes,
            ("1048576x1x1x1x1", "1x1x1x1x1048576", "1024x1x1x1024x2048"),
            ("1048577x1x1x1x1", "1x1x1x1x1048577", "1x1x1x1048577x1", "1024x2x1x1024x1025"),
        ),
    ],
)  # fmt: skip
def test_the_largest_sizes(parse, good, bad) -> None:
    for text in good:
        assert parse(text)[0].name == text
    for text in bad:
        with pytest.raises(ConfigError, match=r"must be in \[1, 1048576\] with at most 2\^31 elements .*, got "):
            parse(text)


# ---- what is right ----------------------------------------------------------------------------------------------------------------------


def test_the_shapes_of_a_model_of_124m() -> None:
    assert [(s.name, s.layout, s.label) for s in gemm.parse_sizes("head")] == [
        ("512x50257x768", "nt", "head forward"),
        ("512x768x50257", "nn", "head dX"),
        ("50257x768x512", "tn", "head dW"),
    ]


@pytest.mark.parametrize("dtype", gemm.DTYPES)
def test_one_rounding_to_the_format_is_right_and_no_more(dtype: str) -> None:
    """Of one product a result is off by at most half a unit in the last place; float64's accumulator has its own roundings."""
    unit = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    a, b = np.full((9, 1), 1.0), np.full((1, 9), 1.0)
    sums = 3 * (2.0**-53 if dtype == "float64" else 2.0**-24)
    assert gemm.sample_error(a @ b * (1 + 0.9 * (unit + sums)), a, b, dtype) <= 1
    assert 1 < gemm.sample_error(a @ b * (1 + 1.5 * (unit + sums)), a, b, dtype) < 2
    assert gemm.sample_error(a @ b * (1 + 2.0**-9), a, b, "tf32") <= 1


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
def test_the_first_and_the_last_element_of_a_product_are_judged(place) -> None:
    _, _, a, b = gemm.operands(gemm.Shape(700, 900, 3), "float32")
    out = (a @ b).astype(np.float64)
    assert gemm.worst_error(out, a, b, "float32") <= 1
    out[place] *= 1.1
    assert not gemm.worst_error(out, a, b, "float32") <= 1


def test_a_product_is_right_up_to_its_tolerance(monkeypatch) -> None:
    for error, right in ((1.0, True), (1.0001, False), (math.inf, False)):
        monkeypatch.setattr(gemm, "worst_error", lambda *_, error=error: error)
        (record,) = (
            r
            for r in gemm.bench_shape(gemm.Shape(8, 8, 8), "float32", ["tiled"], True, "cpu", None)
            if r["contender"] == "tiled"
        )
        assert record["right"] is right and record["error_over_tolerance"] == (None if error == math.inf else error)
        assert gemm.row(record)[4] == ("tiled" if right else "tiled WRONG")


def attention_of(dtype: str):
    """A shape of several batch entries, heads and more rows than are sampled, with what is right."""
    _C.manual_seed(3)
    shape = attention.Shape(2, 4, 2, 40, 16)
    tensors = attention.draw(shape, dtype, "cpu")
    _, _, out, dq = attention.our_calls(shape, [tensors], "materialized")
    return shape, tensors, out, dq


@pytest.mark.parametrize("which", [0, 1])
def test_the_last_rows_of_the_last_head_are_judged(which: int) -> None:
    shape, tensors, *results = attention_of("float32")
    wrong = results[which].clone()
    wrong[-1, -1, -1] += 1.0
    results[which] = wrong
    errors = attention.worst_error(shape, "float32", tensors, *results)
    assert not errors[which] <= 1 and errors[1 - which] <= 1


@pytest.mark.parametrize(("dtype", "off"), [("bfloat16", 0.06), ("float16", 0.02), ("float64", 1e-9)])
@pytest.mark.parametrize("which", [0, 1])
def test_attention_is_held_to_the_roundings_of_its_format(dtype: str, off: float, which: int) -> None:
    shape, tensors, *results = attention_of(dtype)
    results = [x.to(xt.float64) for x in results]
    assert max(attention.worst_error(shape, dtype, tensors, *results)) <= 1
    results[which] = results[which] * (1 + off)
    assert not attention.worst_error(shape, dtype, tensors, *results)[which] <= 1


def test_a_float64_product_has_an_accumulator_of_its_own() -> None:
    a, b = np.full((9, 40), 1.0), np.full((40, 9), 1.0)
    assert not gemm.sample_error(a @ b * (1 + 1e-12), a, b, "float64") <= 1


# ---- what is shown ----------------------------------------------------------------------------------------------------------------------


def test_numbers_are_to_the_right(capsys) -> None:
    frame.Table(("name", "ms"), (6, 5), right=(1,)).add(("a", 1.5))
    assert capsys.readouterr().out == "| name   |    ms |\n|--------|------:|\n| a      |   1.5 |\n"


def test_the_record_names_the_command(monkeypatch, tmp_path) -> None:
    report = tmp_path / "x.json"
    monkeypatch.setattr(frame, "measure", at_once)
    monkeypatch.setattr(peers, "find_torch", lambda threads: None)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/python", "bench", "gemm", "--sizes", "8"])
    assert run("gemm", "--sizes", "8", "--dtypes", "float32", "--backends", "tiled", "--json", str(report)) == 0
    assert json.loads(report.read_text())["machine"]["command"] == "xtrain bench gemm --sizes 8"


def test_versions_of_cuda() -> None:
    gpu = {"name": "Fake GPU", "runtime": 12080, "driver": 13110}
    line = frame.headline({"gpu": gpu, "device": "cuda:1", "xtrain": "1", "python": "3"})
    assert line == "Fake GPU (cuda:1), CUDA 12.8 (driver 13.11), xtrain 1, Python 3"


def test_what_is_left_out_above_how_much(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gemm, "SLOW", 2e9)
    values = {"json": None, "plot": None}
    assert gemm.report([{"left_out": True}], {}, False, values) == 0
    assert capsys.readouterr().out == "left out: the naive backend above 2 GFLOP; --backends naive,... runs it\n"


def test_blas_of_numpy_gets_as_many_threads(monkeypatch) -> None:
    given = []
    monkeypatch.setattr(peers, "NumPyBlas", lambda: SimpleNamespace(set_threads=given.append, core="x"))
    gemm.describe_machine("cpu", None)
    assert given == [_C.get_num_threads()]


@pytest.mark.parametrize("command", [("gemm", "--sizes", "8"), ("attention", "--sizes", "1x1x1x4x4")])
def test_the_generator_is_left_as_it_was(command, monkeypatch) -> None:
    monkeypatch.setattr(frame, "measure", at_once)
    monkeypatch.setattr(peers, "find_torch", lambda threads: None)
    _C.manual_seed(5)
    xt.rand(3)
    before = _C.get_rng_state()
    assert run(*command, "--dtypes", "float32") == 0
    assert _C.get_rng_state() == before


def peer(monkeypatch, seconds: dict[str, float]) -> None:
    """Contenders that take so long, by a clock of their own; those of PyTorch are xtrain's."""
    monkeypatch.setattr(frame, "measure", lambda calls, wait=None: {name: [seconds[name]] * 3 for name in calls})


def test_ratios_are_of_speed(monkeypatch) -> None:
    """Above 1 is faster. A backward of attention counts 2.5 times the operations of its forward."""
    peer(monkeypatch, {"tiled": 0.004, "NumPy": 0.002, "PyTorch": 0.001, "materialized": 0.004})
    torch = SimpleNamespace()
    monkeypatch.setattr(peers, "torch_product", lambda torch, dtype, a, b: lambda: a @ b)
    records = gemm.bench_shape(gemm.Shape(8, 8, 8), "float32", ["tiled"], True, "cpu", torch)
    ours = next(r for r in records if r["contender"] == "tiled")
    assert (ours["x_pytorch"], ours["x_numpy"], ours["percent_of_best"]) == (0.25, 0.5, 25.0)
    monkeypatch.setattr(
        attention, "torch_calls", lambda torch, shape, sets: attention.our_calls(shape, sets, "reference")
    )
    shape = attention.Shape(1, 2, 1, 8, 4)
    for r in attention.bench_shape(shape, "float32", ["materialized"], "cpu", torch):
        speed = {"materialized": 0.25, "PyTorch": 1.0}[r["contender"]]
        assert (r["x_pytorch"], r["percent_of_best"]) == (speed, 100 * speed)
        work = 4 * 2 * 8 * 8 * 4 * 0.5 * (2.5 if r["pass"] == "backward" else 1)
        assert r["gflops"] == pytest.approx(work / (0.001 / speed) / 1e9)


def test_a_wrong_attention_is_marked() -> None:
    record = {
        "contender": "x",
        "shape": "s",
        "dtype": "float32",
        "pass": "forward",
        "ms": 1.0,
        "gflops": 2.0,
        "x_pytorch": None,
    }
    for right, name in ((True, "x"), (False, "x WRONG")):
        assert attention.row({**record, "percent_of_best": 100.0, "right": right}, False)[3] == name


def test_where_the_host_may_be_the_limit() -> None:
    record = {"contender": "x", "shape": "s", "dtype": "float32", "pass": "forward", "ms": 1.0, "refused": None}
    for host, named in ((0.79, False), (0.81, True), (None, False)):
        lines = attention.notes([{**record, "host_ms": host}], [], False, True, "default")
        assert [line.startswith("the host may be the limit: x, s forward, float32: queued in ") for line in lines] == [
            True
        ] * named


def test_what_pytorch_is_asked_for() -> None:
    """Grouped heads where there are any, a causal mask where the shape has one."""
    asked = []

    def attend(q, k, v, *, is_causal, enable_gqa):
        asked.append((is_causal, enable_gqa))
        return _C.scaled_dot_product_attention(q, k, v, is_causal, None, True)

    torch = SimpleNamespace(
        from_dlpack=lambda x: x,
        autograd=SimpleNamespace(grad=lambda out, leaves, dout, retain_graph: [x.detach() for x in leaves]),
    )
    torch.nn = SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=attend))
    for shape in (attention.Shape(1, 2, 1, 5, 4), attention.Shape(1, 2, 2, 5, 4, False)):
        attention.torch_calls(torch, shape, [attention.draw(shape, "float32", "cpu")])
    assert asked == [(True, True), (False, False)]


# ---- explain, devices -------------------------------------------------------------------------------------------------------------------


def test_the_problem_that_is_explained(monkeypatch) -> None:
    """Heads lie between the rows, as a projection leaves them; tf32 is float32 that may use TF32 units."""
    seen = []
    monkeypatch.setattr(_C, "explain_gemm", lambda *words, **options: seen.append((words, options)))
    monkeypatch.setattr(_C, "explain_attention", lambda *words, **options: seen.append((words, options)))
    for dtype in ("tf32", "float16"):
        explain.of_product((2, 3, 4), dtype, "nt", "cuda:0", "x")
        explain.of_attention((2, 6, 3, 5, 8), dtype, True, "cpu", None)
    tf32, half = dict(tf32=True), dict(tf32=False)
    strides = (240, 8, 48, 120, 8, 24)
    products = [(((2, 3, 4), kind), {**units, "layout": "nt", "device": "cuda:0", "backend": "x"}) for kind, units in (("float32", tf32), ("float16", half))]  # fmt: skip
    attentions = [(((2, 6, 3, 5, 5, 8), kind, True, strides), {**units, "device": "cpu", "backend": None}) for kind, units in (("float32", tf32), ("float16", half))]  # fmt: skip
    assert seen == [products[0], attentions[0], products[1], attentions[1]]


def test_the_last_slice_is_among_those_of_a_sample() -> None:
    for n in (1, 2, 7, 8, 9, 100):
        rows = accelerator.spread(xt.arange(n), 0, 8).tolist()
        assert rows[-1] == n - 1 and min(8, n) <= len(rows) < 16
