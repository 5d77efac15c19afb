"""parity/support/sanitize_gpu.py, with cases on the CPU and a compute-sanitizer that is a script: what is run, and what counts as a report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sanitize_gpu
from places import ROOT
from runs import HANGS

from xtrain import _C

SCRIPT = ROOT / "parity/support/sanitize_gpu.py"
pytestmark = pytest.mark.on_cpu


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "XTRAIN_TEST_DEVICE": "cuda", **environment}
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS)


# ---- what is run -----------------------------------------------------------------------------------------------------------------


def test_the_cases_run_on_the_cpu_and_are_counted() -> None:
    done = script("--cases", "1", "--part", "2/3", XTRAIN_TEST_DEVICE="cpu")
    assert done.returncode == 0, done.stderr
    count = len(sanitize_gpu.units(1, False, "")[1::3])
    assert count > 80
    assert re.search(rf"^ran {count} cases of .*\brms_norm_bwd\b.*\n\Z", done.stdout, re.MULTILINE)


def test_every_kernel_is_run_and_every_part_of_the_work_belongs_to_one_share() -> None:
    every = sanitize_gpu.units(2, False, "")
    assert {slot for unit in every for slot in unit.kernels} >= {*_C.kernels("cpu")}
    names = [unit.name for unit in every]
    for word in (" tiled", " naive", " materialized", " bfloat16", " float32", " int64", "training step, 4 streams"):
        assert any(word in name for name in names), word
    assert not any(name.endswith(" blas") for name in names)
    parts = [sanitize_gpu.share(f"{i}/3") for i in (1, 2, 3)]
    assert sorted(name for first, step in parts for name in names[first::step]) == sorted(names)


def test_few_cases_are_spread_from_the_largest_to_the_smallest() -> None:
    cases = next(entry for entry in sanitize_gpu.TABLE if entry.id == "rope").cases
    sizes = [sanitize_gpu.numel(c) for c in cases]
    assert [sanitize_gpu.numel(c) for c in sanitize_gpu.some(cases, 1)] == [max(sizes)]
    three = [sanitize_gpu.numel(c) for c in sanitize_gpu.some(cases, 3)]
    assert (
        three[0] == max(sizes)
        and three[2] == min(size for size in sizes if size)
        and three == sorted(three, reverse=True)
    )
    assert len(sanitize_gpu.some(cases, 10**6)) == len(cases)


def test_every_wider_size_fits_a_case_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    every = sanitize_gpu.WIDER
    for one in every:
        monkeypatch.setattr(sanitize_gpu, "WIDER", [one])
        assert any(sanitize_gpu.wider(entry) for entry in sanitize_gpu.TABLE), one
    monkeypatch.setattr(sanitize_gpu, "WIDER", every)
    wide = sanitize_gpu.wider(next(entry for entry in sanitize_gpu.TABLE if entry.id == "mhc_pre"))
    assert [c.inputs[0].shape for c in wide] == [(67, 2, 1288), (67, 4, 1288), (131, 2, 1288), (131, 4, 1288)]


def test_what_fails_has_a_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sanitize_gpu, "DEVICE", "cpu")
    monkeypatch.setitem(sanitize_gpu.OTHER_KERNELS, "stats", ("", lambda device: f"wrong on {device}"))
    with pytest.raises(AssertionError, match="wrong on cpu"):
        sanitize_gpu.main(["--only", "kernel stats"])
    assert capsys.readouterr().err == "in kernel stats:\n"


# ---- what is said -------------------------------------------------------------------------------------------------------------------

NO_ERRORS, NO_HAZARDS = "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
FAKE = f"""#!/bin/sh
while [ "$1" != "{sys.executable}" ]; do shift; done
[ -n "$FAKE_DIES" ] || XTRAIN_TEST_DEVICE=cpu "$@"
echo "========= $FAKE_SUMMARY"
exit $FAKE_STATUS
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for the PATH where there is a GPU, if one believes nvidia-smi, and a compute-sanitizer."""
    for name, text in [("nvidia-smi", "#!/bin/sh\n"), ("compute-sanitizer", FAKE)]:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def race(*kernels: str) -> str:
    return "".join(
        f"========= Error: Race reported between Read access at {name}+0xb30\n"
        f"=========     and Write access at {name}+0x2fb0 [320 hazards]\n"
        for name in kernels
    )


def test_races_inside_cublas_are_not_ours() -> None:
    """Seen in its products of parts along K. One with a kernel of ours counts."""
    ran = "ran 2 cases of copy swiglu_fwd\n"
    summary = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    for kernels, reports in (("nvjet_a", "nvjet_b"), 0), (("nvjet_a", "void flash_kernel<int>(int)"), 1):
        outcome = sanitize_gpu.read_log(race(*kernels) + ran + summary, 9)
        assert (outcome.reports, outcome.problem) == (reports, "")


def test_what_cublas_reads_of_its_own_is_not_ours() -> None:
    """Seen in its sums of parts along K. A read by a kernel of ours counts, and so does what was not printed."""
    reads = "".join(
        f"========= Uninitialized __global__ memory read of size 4 bytes\n=========     at {name}+0x20\n"
        "=========     by thread (0,3,0) in block (3,0,0)\n"
        for name in ("void cublasLt::splitKreduce_kernel<(int)32>", "swiglu_fwd_kernel", "nvjet_a")
    )
    for printed, errors, reports in ((reads, 3, 1), (reads, 5, 3), ("", 3, 3)):
        said = f"{printed}ran 2 cases of copy swiglu_fwd\n========= ERROR SUMMARY: {errors} errors\n"
        assert sanitize_gpu.read_log(said, 9).reports == reports


def test_initcheck_prints_all_that_it_finds(tools: Path) -> None:
    (tools / "compute-sanitizer").write_text(f'#!/bin/sh\necho "$@" >> {tools}/asked\n' + FAKE.partition("\n")[2])
    fake = dict(PATH=f"{tools}:{os.environ['PATH']}", FAKE_SUMMARY=NO_ERRORS, FAKE_STATUS="0", FAKE_DIES="1")
    script("--tools", "initcheck,memcheck", "--logs", str(tools / "logs"), **fake)
    init, mem = (tools / "asked").read_text().splitlines()
    assert "--print-limit 4000000 --show-backtrace no" in init
    assert "--print-limit 50" in mem and "--show-backtrace" not in mem


@pytest.mark.parametrize(
    ("summary", "status", "reports", "problem"),
    [
        (NO_ERRORS, 0, 0, ""),
        (NO_HAZARDS, 0, 0, ""),
        ("ERROR SUMMARY: 1 error", 9, 1, ""),
        ("RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)", 0, 2, ""),
        (NO_ERRORS, 3, 0, "ended with status 3"),
        ("Error: no license", 0, 0, "has no summary of compute-sanitizer"),
    ],
)
def test_what_counts_as_a_report(summary: str, status: int, reports: int, problem: str) -> None:
    outcome = sanitize_gpu.read_log(f"ran 2 cases of copy swiglu_fwd\n========= {summary}\n", status)
    assert (outcome.cases, outcome.reports, outcome.problem) == (2, reports, problem)


@pytest.mark.parametrize(
    ("summary", "status", "dies", "said"),
    [
        (NO_ERRORS, 0, "", ""),
        ("RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)", 0, "", "2 reports : "),
        (NO_ERRORS, 0, "1", r"0 reports did not reach its end \(status 0\): "),
    ],
)
def test_the_verdict_is_the_status(tools: Path, summary: str, status: int, dies: str, said: str) -> None:
    fake = dict(PATH=f"{tools}:{os.environ['PATH']}", FAKE_SUMMARY=summary, FAKE_STATUS=str(status), FAKE_DIES=dies)
    options = ["--tools", "memcheck,racecheck", "--only", "kernel ", "--jobs", "2", "--logs", str(tools / "logs")]
    done = script(*options, **fake)
    last = done.stdout.splitlines()[-1]
    if not said:
        assert done.returncode == 0, done.stdout + done.stderr
        assert last == f"sanitize-gpu: memcheck, racecheck: {2 * len(sanitize_gpu.OTHER_KERNELS)} cases, no reports"
        assert len(done.stdout.splitlines()) == 3
    else:
        assert done.returncode == 1
        assert re.search(rf"^sanitize-gpu: racecheck 2/2: {said}", done.stdout, re.MULTILINE), done.stdout
        assert re.fullmatch(r"sanitize-gpu: memcheck, racecheck: \d+ cases, 4 processes FAILED", last)
    assert len(list((tools / "logs").iterdir())) == 4


def test_one_thread_prints(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and end of line are two writes where Python does not buffer its output (PYTHONUNBUFFERED): two threads' lines would mix."""
    fake = dict(PATH=f"{tools}:{os.environ['PATH']}", FAKE_SUMMARY=NO_ERRORS, FAKE_STATUS="0", FAKE_DIES="1")
    monkeypatch.setattr(sanitize_gpu, "DEVICE", "cuda")
    monkeypatch.setattr(sanitize_gpu, "UNRECYCLED", os.environ | fake)
    monkeypatch.setenv("PATH", fake["PATH"])
    printed = []
    monkeypatch.setattr("builtins.print", lambda text, **_: printed.append((threading.current_thread(), text)))
    assert sanitize_gpu.main(["--tools", "memcheck", "--jobs", "3", "--logs", str(tools / "logs")]) == 1
    assert {thread for thread, _ in printed} == {threading.main_thread()}
    of = [re.match(r"sanitize-gpu: memcheck (\d)/3: ", text) for _, text in printed]
    assert [match[1] for match in of if match] == ["1", "2", "3"]


def test_what_is_missing_is_a_line(tools: Path) -> None:
    alone = dict(PATH=str(tools), CUDA_HOME="/nowhere")
    (tools / "compute-sanitizer").unlink()
    missing = script(**alone)
    assert missing.returncode == 1
    assert re.fullmatch(r"sanitize-gpu: compute-sanitizer must be on the PATH or in /nowhere/bin.*\n", missing.stderr)
    (tools / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    for _ in range(2):  # one that finds no GPU, and none
        without = script(**alone)
        assert (without.returncode, without.stderr) == (0, "")
        assert without.stdout == "sanitize-gpu: no NVIDIA GPU on this machine, nothing was run\n"
        (tools / "nvidia-smi").unlink(missing_ok=True)
    wrong = script("--tools", "memchek", **alone)
    assert wrong.returncode == 2 and "--tools must be of memcheck, initcheck" in wrong.stderr
