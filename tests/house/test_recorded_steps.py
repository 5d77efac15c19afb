"""The tables of training steps on a GPU are what parity/bench/report.py makes of the recorded results."""

from __future__ import annotations

import importlib.util
import json

import pytest
from places import ROOT

SPEC = importlib.util.spec_from_file_location("report", ROOT / "parity/bench/report.py")
assert SPEC and SPEC.loader
report = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(report)


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_the_table_is_that_of_the_recorded_results(page) -> None:
    text = page.read_text()
    assert report.written(text, report.table(report.read(report.RECORDED))) == text, "run parity/bench/report.py"


def test_of_a_config_the_last_run_counts(tmp_path) -> None:
    row = '{"config": "5M", "precision": "bfloat16", "contender": "%s", "ms": %s, "tokens_per_second": 9, "peak_GiB": 1, %s}\n'
    rest = '"commit": "c%d", "device": "D", "torch": "T"'
    file = tmp_path / "results.jsonl"
    runs = [(1, "captured", 4), (1, "graphs", 8), (1, "compile", 9), (2, "captured", 2), (2, "graphs", 5)]
    file.write_text("".join(row % (who, ms, rest % at) for at, who, ms in runs))
    found = report.table(report.read(file)).splitlines()
    assert (
        found[2] == "| 5 M, 8 x 256 | 2.00 ms | 9 | torch.compile, CUDA graphs, 5.00 ms | 2.500 | 2.5 | 1, - | - | c2 |"
    )
    assert len(found) == 7 and found[3] == "" and found[4].startswith("D, PyTorch T.")


def test_recompute_cheap_has_rows_of_its_own(tmp_path) -> None:
    """Its speed and memory are of one run, which does not take the place of the run without it."""
    file = tmp_path / "results.jsonl"
    rows = []
    for ours, ms, peak in (("captured", 8, 50.0), ("captured-cheap", 8.5, 30.0)):
        for who, its_ms, its_peak in ((ours, ms, peak), ("compile", 9.6, 60.0)):
            same = dict(config="0.6B-4k", precision="bfloat16", tokens_per_second=9, commit="c", device="D", torch="T")
            rows.append(same | dict(contender=who, ms=its_ms, peak_GiB=its_peak, command=ours))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = report.read(file)
    assert sorted(runs) == [("0.6B-4k", "bfloat16", False), ("0.6B-4k", "bfloat16", True)]
    assert report.table(runs).splitlines()[2:4] == [
        "| Qwen3-0.6B shape, 8 x 4096 | 8.00 ms | 9 | torch.compile, 9.60 ms | 1.200 | 1.2 | 50.0, 60.0 | 0.833 | c |",
        "| Qwen3-0.6B shape, 8 x 4096, recompute cheap | 8.50 ms | 9 | torch.compile, 9.60 ms | 1.129 | 1.2 | 30.0, 60.0 | 0.500 | c |",
    ]


def test_beside_cuda_graphs_memory_is_what_both_take_from_the_driver(tmp_path) -> None:
    file = tmp_path / "results.jsonl"
    rows = []
    for who, ms, peak, reserved in (("captured", 1, 0.2, 0.3), ("graphs", 2.5, None, 0.6)):
        same = dict(config="5M", precision="bfloat16", tokens_per_second=9, commit="c", device="D", torch="T")
        rows.append(same | dict(contender=who, ms=ms, peak_GiB=peak, reserved_GiB=reserved))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "| 2.500 | 2.5 | 0.3, 0.6 | 0.500 | c |" in report.table(report.read(file))


def test_a_page_without_a_place_for_it_is_an_error() -> None:
    with pytest.raises(ValueError, match="no comments <!-- gpu-steps"):
        report.written("a page\n", "a table\n")
