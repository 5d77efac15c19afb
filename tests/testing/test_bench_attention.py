"""`xtrain bench attention`, and what `--explain` and `xtrain doctor` say about the choice among implementations."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from runs import python

import xtrain as xt
from xtrain import _C, cli
from xtrain.bench import attention, explain, frame
from xtrain.cli import doctor
from xtrain.errors import ConfigError

pytestmark = [pytest.mark.on_cpu, pytest.mark.usefixtures("short_bursts")]


def run(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


def test_sizes() -> None:
    shapes = attention.parse_sizes("2x12x4x512x64, 1x1x1x7x33:full")
    assert [(s.name, s.sizes, s.causal) for s in shapes] == [
        ("2x12x4x512x64", (2, 12, 4, 512, 64), True),
        ("1x1x1x7x33:full", (1, 1, 1, 7, 33), False),
    ]
    assert shapes[1].operations(False) == 4 * 7 * 7 * 33 and shapes[1].operations(True) == 10 * 7 * 7 * 33
    assert shapes[0].operations(False) == 2 * 2 * 12 * 512 * 512 * 64


def test_bench_attention(tmp_path, capsys) -> None:
    report = tmp_path / "attention.json"
    assert run("attention", "--sizes", "2x4x2x17x32,1x1x1x5x7:full", "--json", str(report)) == 0
    text = capsys.readouterr().out
    assert "WRONG" not in text and "left out" not in text
    records = json.loads(report.read_text())["records"]
    found = {(r["shape"], r["dtype"], r["pass"], r["contender"]) for r in records}
    for name in xt.attention_backends():
        for shape in ("2x4x2x17x32", "1x1x1x5x7:full"):
            for dtype in ("float32", "bfloat16"):
                assert {(shape, dtype, "forward", name), (shape, dtype, "backward", name)} <= found
    for r in records:
        assert r["right"] and r["ms"] > 0 and r["turns"] >= frame.FEWEST and 0 < r["percent_of_best"] <= 100


@pytest.mark.parametrize("dtype", attention.DTYPES)
@pytest.mark.parametrize("name", ["out", "dq"])
def test_a_wrong_result_is_seen(name: str, dtype: str) -> None:
    shape = attention.Shape(2, 4, 2, 33, 16)
    tensors = attention.draw(shape, dtype, "cpu")
    _, _, out, dq = attention.our_calls(shape, [tensors], "materialized")
    assert max(attention.worst_error(shape, dtype, tensors, out, dq)) <= 1
    for factor in (1.3, float("nan")):
        results = [x * factor if n == name else x for n, x in (("out", out), ("dq", dq))]
        errors = attention.worst_error(shape, dtype, tensors, *results)
        assert not errors[("out", "dq").index(name)] <= 1


def test_a_wrong_result_is_no_result(monkeypatch, capsys) -> None:
    right = attention.our_calls

    def wrong(shape, sets, backend):
        forward, backward, out, dq = right(shape, sets, backend)
        return forward, backward, out, dq * 2.0 if backend == "reference" else dq

    monkeypatch.setattr(attention, "our_calls", wrong)
    assert run("attention", "--sizes", "1x1x1x9x8", "--dtypes", "float32") == 1
    text = capsys.readouterr().out
    assert "wrong result: reference, 1x1x1x9x8 backward, float32" in text and text.count("wrong result") == 1


def test_the_reference_is_left_out_of_large_shapes_unless_asked_for(monkeypatch, capsys) -> None:
    monkeypatch.setattr(attention, "SLOW", 1e3)
    assert run("attention", "--sizes", "1x1x1x16x8", "--dtypes", "float32") == 0
    text = capsys.readouterr().out
    assert "left out: the reference" in text and "| reference" not in text
    assert run("attention", "--sizes", "1x1x1x16x8", "--dtypes", "float32", "--backends", "reference") == 0
    text = capsys.readouterr().out
    assert "left out" not in text and "| reference" in text and "materialized" not in text


# ---- the peer, inputs in turn, the host's share -----------------------------------------------------------------------------------------


def test_inputs_take_turns(monkeypatch) -> None:
    """Each call has the next set of inputs, forward and backward; results that are compared are of the first."""
    shape = attention.Shape(1, 2, 1, 5, 8)
    sets = [attention.draw(shape, "float32", "cpu") for _ in range(3)]
    forward, backward, out, dq = attention.our_calls(shape, sets, "materialized")
    assert max(attention.worst_error(shape, "float32", sets[0], out, dq)) <= 1
    outs = [forward().numpy() for _ in range(6)]
    for i in range(3):
        assert np.array_equal(outs[i], outs[i + 3]) and not np.array_equal(outs[i], outs[(i + 1) % 3])
    assert np.array_equal(outs[0], out.numpy())
    seen = []
    monkeypatch.setattr(_C, "backward", lambda roots, seeds, keep: seen.append(seeds[0]))
    for _ in range(4):
        backward()
    assert [x is y for x, y in zip(seen, (sets[i][3] for i in (1, 2, 0, 1)))] == [True] * 4  # the first has run


def test_as_many_sets_as_exceed_the_cache(monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(attention, "draw", lambda *of: drawn.append(of))
    for shape, dtype, device, count in (
        (attention.Shape(2, 2, 2, 64, 32), "bfloat16", "cpu", 1),
        (attention.Shape(32, 12, 12, 256, 32), "bfloat16", "cuda:0", 8),  # 24 MiB a set
        (attention.Shape(32, 12, 12, 256, 32), "tf32", "cuda:0", 4),
        (attention.Shape(1, 16, 16, 16384, 128), "bfloat16", "cuda:0", 1),
        (attention.Shape(1, 1, 1, 8, 8), "float32", "cuda:0", attention.MOST_SETS),
    ):
        assert len(attention.draw_sets(shape, dtype, device)) == count


def test_a_peer_that_refuses_is_left_out_with_its_reason(monkeypatch, capsys, tmp_path) -> None:
    def refuse(torch, shape, sets):
        warnings.warn("CuDNN attention kernel not used because:", stacklevel=1)
        warnings.warn("head_dim should be a multiple of 8 (Triggered internally at x.cpp:1.)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    torch = SimpleNamespace(__version__="2", nn=SimpleNamespace(attention=SimpleNamespace()))
    torch.nn.attention.SDPBackend = SimpleNamespace(CUDNN_ATTENTION="cuDNN's", FLASH_ATTENTION="flash's")
    asked = []

    @contextlib.contextmanager
    def only(backend):
        asked.append(backend)
        yield

    torch.nn.attention.sdpa_kernel = only
    monkeypatch.setattr(attention, "torch_calls", refuse)
    monkeypatch.setattr(attention.peers, "find_torch", lambda threads: torch)
    file = tmp_path / "x.json"
    words = ("--sizes", "1x1x1x9x7", "--dtypes", "float32", "--peer", "cudnn", "--json", str(file))
    assert run("attention", *words) == 0
    text = capsys.readouterr().out
    why = "head_dim should be a multiple of 8"
    assert f"PyTorch cudnn is left out of 1x1x1x9x7, float32, because PyTorch refuses: {why}\n" in text
    assert "| materialized" in text and "| PyTorch" not in text and asked == ["cuDNN's"]
    found = json.loads(file.read_text())
    assert found["machine"]["peer"] == "cudnn"
    assert {(r["refused"], r["x_pytorch"], r["host_ms"]) for r in found["records"]} == {(why, None, None)}
    assert (
        attention.reason("flash", RuntimeError("one.\ntwo"), ["CuDNN attention kernel not used because:", "x"]) == "one"
    )


def test_options_that_need_pytorch(monkeypatch, capsys) -> None:
    monkeypatch.setattr(attention.peers, "find_torch", lambda threads: None)
    assert run("attention", "--sizes", "1x1x1x9x8", "--peer", "cudnn") == 2
    assert "--peer cudnn needs PyTorch, which is missing here" in capsys.readouterr().err
    assert run("attention", "--sizes", "1x1x1x9x8", "--explain", "--peer", "cudnn") == 0


def test_kernels_that_overlap_count_once() -> None:
    assert attention.covered([]) == 0
    assert attention.covered([(5, 7), (0, 2), (1, 3), (1.5, 2), (10, 11)]) == 3 + 2 + 1


def test_kernel_times_are_those_of_the_device(monkeypatch) -> None:
    """Of a profiler that sees 2 us of kernels and 50 us of the host for each call."""
    device, queued = SimpleNamespace(CUDA="cuda", CPU="cpu"), []

    class Trace:
        def __init__(self, activities):
            assert activities == ["kernels"]

        def __enter__(self):
            queued.clear()
            return self

        def __exit__(self, *_):
            pass

        def events(self):
            for i in range(len(queued)):
                for kind, length in (("cuda", 2), ("cpu", 50)):
                    span = SimpleNamespace(start=100.0 * i, end=100.0 * i + length)
                    yield SimpleNamespace(device_type=kind, time_range=span)

    torch = SimpleNamespace(autograd=SimpleNamespace(DeviceType=device))
    torch.profiler = SimpleNamespace(profile=Trace, ProfilerActivity=SimpleNamespace(CUDA="kernels"))
    found = attention.kernel_times(torch, {"a": lambda: queued.append(1)}, lambda: None)
    assert list(found) == ["a"] and len(found["a"]) == frame.TURNS_ON_DEVICE
    assert found["a"] == pytest.approx([2e-6] * frame.TURNS_ON_DEVICE)
    with pytest.raises(ConfigError, match="no kernel of b"):
        attention.kernel_times(torch, {"b": lambda: None}, lambda: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["attention", "--sizes", "1x2x3"], ["--sizes", "BxHxKxSxD", "'1x2x3'"]),
        (["attention", "--sizes", "1x3x2x4x4"], ["--sizes", "multiple of K", "'1x3x2x4x4'"]),
        (["attention", "--sizes", ","], ["--sizes", "at least one"]),
        (["attention", "--backends", "flsh"], ["--backends", "materialized, reference", "'flsh'"]),
        (["attention", "--dtypes", "int32"], ["--dtypes", "float32, bfloat16", "'int32'"]),
        (["attention", "--plot", "x.png"], ["--plot"]),
        (["attention", "--peer", "flsh"], ["--peer", "default, cudnn, flash", "'flsh'", "did you mean flash"]),
        (["attention", "--kernels"], ["--kernels", "CUDA", "cpu"]),
        (["atention"], ["gemm or attention or ops", "'atention'", "attention"]),
        (["gemm", "--explain", "--sizes", "x"], ["--sizes", "'x'"]),
    ],
)
def test_mistakes(arguments, words, capsys) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error


# ---- explain ----------------------------------------------------------------------------------------------------------------------------


def test_explain_measures_nothing(monkeypatch, capsys) -> None:
    monkeypatch.setattr(frame, "measure", None)
    assert run("gemm", "--explain", "--sizes", "64,3x5x7:tn", "--dtypes", "float32") == 0
    assert capsys.readouterr().out.splitlines() == [
        "64x64x64:nn float32 on cpu: blas",
        "  few    no   A has more than 8 rows",
        "  amx    no   the dtype is not bfloat16",
        "  bf16   no   the dtype is not bfloat16",
        "  blas   yes",
        "3x5x7:tn float32 on cpu: blas",
        "  few    no   A is stored transposed, or B is not",
        "  amx    no   the dtype is not bfloat16",
        "  bf16   no   the dtype is not bfloat16",
        "  blas   yes",
    ]
    assert run("gemm", "--explain", "--sizes", "64", "--dtypes", "bfloat16", "--backends", "tiled") == 0
    assert capsys.readouterr().out.splitlines() == ["64x64x64:nn bfloat16 on cpu: tiled", "  tiled  yes"]
    assert run("attention", "--explain", "--sizes", "1x2x1x8x4", "--dtypes", "float64") == 0
    assert capsys.readouterr().out.splitlines() == [
        "1x2x1x8x4 float64 forward on cpu: materialized",
        "  amx           no   the dtype is not bfloat16",
        "  bf16          no   the dtype is not bfloat16",
        "  materialized  yes",
        "1x2x1x8x4 float64 backward on cpu: materialized",
        "  amx           no   the dtype is not bfloat16",
        "  bf16          no   the dtype is not bfloat16",
        "  materialized  yes",
    ]
    for command in (["gemm"], ["attention"]):  # the default sizes
        assert run(*command, "--explain") == 0
        assert capsys.readouterr().out.count(" on cpu: ") > 3


def test_explain_says_why_not(monkeypatch, capsys) -> None:
    """What is before the chosen one is shown with its reason; what comes after it is not."""
    large = _C.explain_gemm((4, 2**31, 4))
    assert explain.lines("4x2147483648x4", large) == [
        "4x2147483648x4: tiled",
        "  few    no   A is stored transposed, or B is not",
        "  amx    no   the dtype is not bfloat16",
        "  bf16   no   the dtype is not bfloat16",
        "  blas   no   N, K or a leading dimension is above 2^31 - 1",
        "  tiled  yes",
    ]
    rows = [("flash", "flash_half", "the dtype is not bfloat16 or float16"), ("flash", "flash", None), ("x", "x", None)]
    assert explain.lines("p", rows) == [
        "p: flash",
        "  flash_half  no   the dtype is not bfloat16 or float16",
        "  flash       yes",
    ]
    assert explain.summary(["a", "b", "c"], ["flash", "flash_half", "flash"]) == "flash for a, c; flash_half for b"


def test_doctor_shows_the_choice() -> None:
    text, _ = doctor.report()
    low = "{} for float32, float16, float64; bf16 for bfloat16"
    every = "{} for float32, bfloat16, float16, float64"
    choice = low if "avx512bf16" in _C.cpu_features() else every
    tiles = next(row[2] for row in _C.explain_gemm((9, 9, 9), "bfloat16") if row[0] == "amx") is None
    choice = low.replace("bf16 for", "amx for") if tiles else choice
    product = choice.format("blas")
    assert "cpu " in text and f"product 8192x3072x768:nt: {product}" in text
    for pass_ in ("forward", "backward"):
        assert f"attention 8x12x12x1024x64 {pass_}: {choice.format('materialized')}" in text


@pytest.mark.parametrize("variable, problem", [("XTRAIN_GEMM", "product"), ("XTRAIN_ATTENTION", "attention")])
def test_doctor_reports_also_when_a_variable_names_what_the_cpu_has_not(variable: str, problem: str) -> None:
    done = python("-m", "xtrain", "doctor", env={**os.environ, variable: "flash"})
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("cpu ")]
    assert len(rows) == 3
    for row in rows:
        assert row.endswith("on cpu, got 'flash'") is (f" {problem} " in row)
    assert "compiler" in done.stdout and "agree with NumPy" in done.stdout


@pytest.mark.parametrize(
    "words", [("gemm", "--json", "x.json"), ("gemm", "--plot", "x.png"), ("attention", "--json=x")]
)
def test_explain_has_no_numbers_to_write(words, capsys) -> None:
    assert run(*words, "--explain") == 2
    name = words[1].partition("=")[0]
    assert f"{name} must be left out with --explain, which measures nothing, got " in capsys.readouterr().err
