"""The tables of training steps on a GPU are what parity/bench/report.py makes of the recorded results."""

from __future__ import annotations

import importlib.util

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
    assert found[2] == "| 5 M, 8 x 256 | 2.00 ms | 9 | torch.compile, CUDA graphs, 5.00 ms | 2.50 | 2.5 | 1, 1 | c2 |"
    assert len(found) == 5 and found[4].startswith("D, PyTorch T.")


def test_a_page_without_a_place_for_it_is_an_error() -> None:
    with pytest.raises(ValueError, match="no comments <!-- gpu-steps"):
        report.written("a page\n", "a table\n")
