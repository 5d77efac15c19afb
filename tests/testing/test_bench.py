"""`xtrain bench`: what it measures is right, what it writes is whole, and every mistake is answered by one line."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from typing import BinaryIO

import numpy as np
import pytest
from clock import Clock
from runs import HANGS, python

import xtrain as xt
from xtrain import _C, cli, files
from xtrain.bench import frame, gemm, peers
from xtrain.bench import ops as bench_ops
from xtrain.optable import TABLE, sizes

pytestmark = [pytest.mark.on_cpu, pytest.mark.usefixtures("short_bursts")]


def run(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


# ---- the frame ------------------------------------------------------------------------------------------------------------------------


def test_contenders_take_turns(monkeypatch) -> None:
    monkeypatch.setattr(frame, "BURST", 0.0)
    seen = []
    times = frame.measure({name: lambda name=name: seen.append(name) for name in "abc"})
    assert "".join(seen) == "aabbcc" + "abc" + "cba" + "abc"  # two calls to warm up, then turns
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(x > 0 for t in times.values() for x in t)


def test_a_slow_contender_gets_fewer_turns(monkeypatch) -> None:
    monkeypatch.setattr(frame, "TURNS", 50)
    monkeypatch.setattr(frame, "ENOUGH", 0.05)
    clock = Clock()
    monkeypatch.setattr(frame, "time", clock)
    times = frame.measure({"slow": lambda: clock.sleep(0.02), "quick": lambda: clock.sleep(1e-6)})
    assert times["slow"] == pytest.approx([0.02] * frame.FEWEST, abs=1e-8)
    assert times["quick"] == pytest.approx([1e-6] * 50, abs=1e-8)


def test_summary_is_a_median() -> None:
    assert frame.summary([0.003, 0.001, 0.5]) == {"ms": 3.0, "ms_min": 1.0, "ms_max": 500.0, "turns": 3}


def test_files_are_whole_or_not_there(tmp_path) -> None:
    path = tmp_path / "x.json"
    path.write_text("before")

    def broken(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_file(path, broken)
    with pytest.raises(ValueError):
        frame.write_json(path, {"x": math.nan})
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
    frame.write_json(path, {"x": 1})
    assert json.loads(path.read_text()) == {"x": 1} and len(list(tmp_path.iterdir())) == 1


# ---- gemm -----------------------------------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    assert [(s.name, s.layout) for s in gemm.parse_sizes("64, 3x4x5,3x4x5:tn")] == [
        ("64x64x64", "nn"),
        ("3x4x5", "nn"),
        ("3x4x5", "tn"),
    ]
    names = [(s.name, s.layout) for s in gemm.parse_sizes("training")]
    assert names == [
        ("512x768x768", "nt"), ("512x768x768", "nn"), ("768x768x512", "tn"),
        ("512x3072x768", "nt"), ("512x768x3072", "nn"), ("3072x768x512", "tn"),
    ]  # fmt: skip
    assert len(gemm.parse_sizes("squares,training,head")) == 12


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", gemm.DTYPES)
def test_operands(layout: str, dtype: str) -> None:
    """Tensors and arrays hold the same values in the same layout."""
    ta, tb, a, b = gemm.operands(gemm.Shape(5, 7, 3, layout), dtype)
    for t, x, letter in ((ta, a, layout[0]), (tb, b, layout[1])):
        assert t.dtype.name == dtype and t.shape == x.shape
        assert np.array_equal(t.to(xt.float64).numpy(), x)
        assert t.is_contiguous() == x.flags.c_contiguous == (letter == "n")
    assert ta.shape == (5, 3) and tb.shape == (3, 7)


@pytest.mark.parametrize("dtype", gemm.DTYPES)
def test_worst_error(dtype: str) -> None:
    ta, tb, a, b = gemm.operands(gemm.Shape(40, 50, 60), dtype)
    out = gemm.host(_C.matmul(ta, tb))
    assert gemm.worst_error(out, a, b, dtype) <= 1
    for fault in (lambda x: x * 1.02, lambda x: x * np.nan, lambda x: np.roll(x, 1, 1)):
        assert not gemm.worst_error(fault(out), a, b, dtype) <= 1


def test_bench_gemm(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install matplotlib)")
    report, plot = tmp_path / "gemm.json", tmp_path / "gemm.png"
    assert (
        run(
            "gemm",
            "--sizes",
            "32,65x33x97:tn",
            "--dtypes",
            "float32,bfloat16",
            "--json",
            str(report),
            "--plot",
            str(plot),
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "BLAS kernels: xtrain " in text and "NumPy" in text and "WRONG" not in text
    assert plot.read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 2
    record = json.loads(report.read_text())
    found = {(r["shape"], r["layout"], r["dtype"], r["contender"]) for r in record["records"]}
    for shape, layout in (("32x32x32", "nn"), ("65x33x97", "tn")):
        assert found >= {
            (shape, layout, dtype, name) for dtype in ("float32", "bfloat16") for name in xt.gemm_backends()
        }
        assert (shape, layout, "float32", "NumPy") in found and (shape, layout, "bfloat16", "NumPy") not in found
    for r in record["records"]:
        assert r["right"] and r["ms"] > 0 and r["turns"] >= frame.FEWEST
        assert r["gflops"] == pytest.approx(2 * r["m"] * r["n"] * r["k"] / r["ms"] / 1e6)
        assert 0 < r["percent_of_best"] <= 100
        if r["dtype"] == "float32":
            peer = next(p for p in record["records"] if p["contender"] == "NumPy" and p["shape"] == r["shape"])
            assert r["x_numpy"] == pytest.approx(peer["ms"] / r["ms"])
    assert record["machine"]["threads"] == xt.get_num_threads()


def test_a_wrong_product_is_no_result(monkeypatch, capsys) -> None:
    right = _C.matmul
    monkeypatch.setattr(
        gemm._C, "matmul", lambda a, b, backend: right(a, b, backend=backend) * (1.5 if backend == "tiled" else 1.0)
    )
    assert run("gemm", "--sizes", "16", "--dtypes", "float32") == 1
    text = capsys.readouterr().out
    assert "wrong result: tiled, 16x16x16 nn, float32" in text and text.count("wrong result") == 1


def test_naive_is_left_out_of_big_products_unless_asked_for(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gemm, "SLOW", 1e3)
    assert run("gemm", "--sizes", "16", "--dtypes", "float32") == 0
    assert "left out" in capsys.readouterr().out
    assert run("gemm", "--sizes", "16", "--dtypes", "float32", "--backends", "naive") == 0
    text = capsys.readouterr().out
    assert "left out" not in text and "tiled" not in text and "naive" in text


@pytest.mark.parametrize(("variable", "side"), [("OPENBLAS_CORETYPE", "NumPy"), ("XTRAIN_BLAS_CORE", "xtrain")])
def test_cores_can_be_chosen_apart(variable: str, side: str) -> None:
    """NumPy's copy of OpenBLAS hears OPENBLAS_CORETYPE, xtrain's XTRAIN_BLAS_CORE, and neither the other's."""
    if peers.NumPyBlas()._library is None or not sys.platform.startswith("linux") or "avx2" not in _C.cpu_features():
        pytest.skip("needs two copies of OpenBLAS on x86-64")
    script = "import xtrain; from xtrain.bench import peers; print(peers.xtrain_core(xtrain._C.build_info()['blas']), peers.NumPyBlas().core)"
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "XTRAIN_BLAS_CORE")}

    def cores(**more: str) -> list[str]:
        return python("-c", script, env=environment | more, check=True).stdout.split()

    usual, chosen = cores(), cores(**{variable: "Nehalem"})
    mine = 0 if side == "xtrain" else 1
    assert chosen[mine] == "Nehalem" and chosen[1 - mine] == usual[1 - mine]


def test_rows_are_shown_as_they_are_known(monkeypatch, capsys, tmp_path) -> None:
    """Ctrl-C in the middle leaves the header, the rows so far and no file; columns line up."""
    right = gemm.bench_shape

    def third_stops(shape, *rest):
        if shape.m == 18:
            raise KeyboardInterrupt
        return right(shape, *rest)

    monkeypatch.setattr(gemm, "bench_shape", third_stops)
    report = tmp_path / "x.json"
    assert run("gemm", "--sizes", "16,17x33x5:tn,18", "--dtypes", "float32", "--json", str(report)) == 130
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines[0].startswith("| shape") and lines[1].startswith("|--")
    assert sum("16x16x16" in line for line in lines) == sum("17x33x5" in line for line in lines) >= 4
    assert len({len(line) for line in lines}) == 1
    assert not list(tmp_path.iterdir())

    right_entry = bench_ops.bench_entry

    def second_stops(entry, *rest):
        if entry.op == "exp":
            raise KeyboardInterrupt
        return right_entry(entry, *rest)

    monkeypatch.setattr(sizes, "ACTIVATION", (64, 4100))
    monkeypatch.setattr(bench_ops, "bench_entry", second_stops)
    assert run("ops", "--op", "neg,exp", "--json", str(report)) == 130
    assert "| neg" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs POSIX signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_leaves_no_temporary_file(tmp_path, name: str) -> None:
    script = f"""
import os, signal
from xtrain import files
signal.signal(signal.{name}, signal.SIG_DFL)  # under nohup SIGHUP is ignored
def write(stream):
    stream.write(b"half")
    os.kill(os.getpid(), signal.{name})
    for _ in range(10**7): pass
files.write_file({str(tmp_path / "x.json")!r}, write)
"""
    done = python("-c", script)
    assert done.returncode == 128 + getattr(signal, name), done.stderr
    assert not list(tmp_path.iterdir()) and done.stderr == ""


def test_a_link_is_followed(tmp_path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "x.json"
    link.symlink_to(tmp_path / "there" / "y.json")
    frame.write_json(link, {"x": 1})
    assert link.is_symlink() and json.loads((tmp_path / "there" / "y.json").read_text()) == {"x": 1}
    assert len(list((tmp_path / "there").iterdir())) == 1


@pytest.mark.parametrize("table", ["gemm", "ops"])
@pytest.mark.parametrize("other", ["x.png", "./x.png", "link.png"])
def test_one_file_for_two_outputs(table: str, other: str, capsys, tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install matplotlib)")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.png").symlink_to("x.png")
    assert run(table, "--json", "x.png", "--plot", other) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("xtrain: error: --plot must be another file than --json, got")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_standard_output_is_no_report(tmp_path) -> None:
    """`--json /dev/stdout > file` would put the report where the table goes, and a file where /dev/stdout was. The link is
    one of our own: a failure must not cost the machine its /dev/stdout."""
    link = tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")
    for path in (str(link), str(tmp_path / "out.txt")):
        with open(tmp_path / "out.txt", "w") as out:
            done = subprocess.run(
                [sys.executable, "-m", "xtrain", "bench", "gemm", "--sizes", "4", "--json", path],
                stdout=out, stderr=subprocess.PIPE, text=True, timeout=HANGS,
            )  # fmt: skip
        assert done.returncode == 2 and "--json must not be the file that standard output goes to" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.txt", "stdout"] and link.is_symlink()


# ---- ops ------------------------------------------------------------------------------------------------------------------------------


def test_every_op_has_a_size() -> None:
    """An entry for each op and dtype; names in sizes.py are names of entries; elementwise ops get a whole activation."""
    ids = {entry.id for entry in TABLE}
    assert set(sizes.BENCH) <= ids
    every = list(dict.fromkeys(entry.op for entry in TABLE))
    chosen = bench_ops.entries_of(every, "float32")
    assert {entry.op for entry in chosen} == {entry.op for entry in TABLE if "float32" in entry.dtypes}
    small = [
        e.id
        for e in chosen
        if e.op not in sizes.VIEWS and sum(math.prod(s.shape) for s in sizes.bench_case(e).inputs) < 2**20
    ]
    assert set(small) <= {"arange:float32", "empty", "full:float32", "uniform:float32", "normal:float32"}


def test_bench_ops(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install matplotlib)")
    monkeypatch.setattr(sizes, "ACTIVATION", (64, 4100))
    small = sizes.Dimensions(tokens=64, width=512, hidden=96, words=500, heads=4, length=16, sequences=2)
    monkeypatch.setattr(sizes, "BENCH", sizes.cases_of(small))
    report, plot = tmp_path / "ops.json", tmp_path / "ops.svg"
    assert (
        run(
            "ops",
            "--op",
            "silu,argmax,transpose,matmul,add_,cat",
            "--dtypes",
            "float32,bfloat16",
            "--json",
            str(report),
            "--plot",
            str(plot),
        )
        == 0
    )
    assert "a copy moves" in capsys.readouterr().out
    assert "<svg" in plot.read_text() and len(list(tmp_path.iterdir())) == 2
    record = json.loads(report.read_text())
    rows = {(r["op"], r["dtype"], r["backend"]): r for r in record["records"]}
    silu = rows["silu", "float32", None]
    assert silu["forward"]["bytes"] == silu["backward"]["bytes"] == 2 * 4 * 64 * 4100
    assert silu["forward"]["gb_per_s"] == pytest.approx(silu["forward"]["bytes"] / silu["forward"]["ms"] / 1e6)
    copy = record["machine"]["copy"]["gb_per_s"]
    assert silu["forward"]["percent_of_copy"] == pytest.approx(100 * silu["forward"]["gb_per_s"] / copy)
    assert rows["silu", "bfloat16", None]["forward"]["bytes"] == 2 * 2 * 64 * 4100
    assert "backward" not in rows["argmax", "float32", None]
    assert rows["transpose", "float32", None]["forward"]["gb_per_s"] is None
    assert {b for op, _, b in rows if op == "matmul"} == set(xt.gemm_backends()) - {"naive"}


# ---- mistakes -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "gemm or"),
        (("--json", "x"), "gemm or"),
        (("gem",), "did you mean gemm"),
        (("gemm", "ops"), "expected no arguments"),
        (("gemm", "--sizes", "3x4"), "3x4"),
        (("gemm", "--sizes", ""), "at least one"),
        (("gemm", "--sizes", "0"), "got '0'"),
        (("gemm", "--sizes", "99999999"), "in [1, 1048576] with at most 2^31 elements in all, got '99999999'"),
        (("gemm", "--sizes", "1x2x99999999"), "in [1, 1048576]"),
        (("gemm", "--sizes", "4:nx"), "4:nx"),
        (("gemm", "--dtypes", "int8"), "int8"),
        (("gemm", "--dtypes", "tf32"), "tf32"),
        (("gemm", "--backends", "magic"), "few, amx, bf16, blas, tiled, naive"),
        (("gemm", "--device", "cuda:99"), "--device cuda:99: "),
        (("gemm", "--device", "tpu"), "tpu"),
        (("gemm", "--device", "meta"), "--device meta: it computes nothing; must be cpu, cuda or cuda:N"),
        (("gemm", "--threads", "-1"), "-1"),
        (("gemm", "--threads", "x"), "whole number"),
        (("gemm", "--json", "/no/such/place/x"), "/no/such/place"),
        (("gemm", "--plot", "x.doc"), ".png"),
        (("gemm", "--json", "x" * 250), "at most 239 bytes"),
        (("ops", "--json", ""), "directory"),
        (("gemm", "--size", "3"), "--sizes"),
        (("gemm", "--json"), "needs a value"),
        (("ops", "--op", "rmsnorm"), "rms_norm"),
        (("ops", "--dtypes", "int64"), "int64"),
        (("ops", "--sizes", "3"), "--sizes"),
        (
            ("ops", "--op", "mhc_post,sinkhorn,mhc_open", "--dtypes", "bfloat16"),
            "--dtypes must hold one that sinkhorn takes (float64, float32), got bfloat16",
        ),
        (
            ("ops", "--op", "randint"),
            "--op must be one that takes float64, float32, bfloat16 or float16, got randint",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, text: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and text in captured.err, captured.err
    assert captured.err.startswith("xtrain: error: ") and len(captured.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_no_plot_without_matplotlib(monkeypatch, capsys, tmp_path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert run("gemm", "--plot", str(tmp_path / "x.png")) == 2
    assert "pip install 'xtrain[plot]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help(capsys) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for name in {*gemm.OPTIONS, *bench_ops.OPTIONS}:
        assert f"--{name}" in text
