"""Verdicts, from heartbeats that are written here: no process, no clock."""

from __future__ import annotations

import pytest

from xtrain.distributed.compare import odd_ones
from xtrain.distributed.judge import Judge
from xtrain.distributed.progress import Times

pytestmark = pytest.mark.on_cpu
SIGNATURES = [[6, "barrier"], [7, "gradients"]]


def beat(queued: int = 7, waiting: float | None = None, phase: str = "computing", step: int = 3, busy: float = 0.0, **more) -> dict:  # fmt: skip
    same = {"host": "h", "pid": 9, "step": step, "phase": phase, "since": 1.0, "queued": queued, "done": queued - 1}
    return {**same, "waiting": waiting, "busy": busy, "signatures": SIGNATURES[: queued - 5], "stack": "f", **more}


def judge(*beats: dict, rank: int = 0) -> Judge:
    """Of as many ranks as heartbeats, which have all come at second 100."""
    found = Judge(rank, len(beats), Times())
    for number, one in enumerate(beats):
        found.saw(number, 100.0, one)
        if number != rank:
            found.heard(number, 100.0)
    return found


def test_a_rank_that_has_finished_may_be_silent() -> None:
    found = judge(beat(7), beat(7))
    found.finished(1)
    assert found.look(200.0)[0] is None


WAITS, SAVES = beat(7, 0.0), beat(6, None, "saving")


@pytest.mark.parametrize(
    ("beats", "seconds", "said"),
    [
        ([WAITS, beat(6)], 9.9, None),
        ([WAITS, beat(6)], 10.0, "silent: rank 1 is silent for 10 s (host h, pid 9, step 3, exchange 6, computing for"),
        ([WAITS, beat(6), beat(6)], 10.0, "silent: ranks 1, 2 are silent for 10 s (rank 1: host h"),
        # From here on all are heard.
        ([beat(7), beat(6)], 2000, None),  # nobody waits
        ([WAITS, beat(6)], 29.9, None),
        ([WAITS, beat(6)], 30.0, "warning: rank 1 lets others wait for 30 s with exchange 7, gradients (host h"),
        ([beat(6), WAITS, WAITS], 30.0, "warning: rank 0 lets others wait for 30 s"),
        ([WAITS, beat(6), beat(6)], 300, "stuck: ranks 1, 2 are stuck: others have waited 300 s for exchange 7, grad"),
        ([WAITS, SAVES], 299, None),
        ([WAITS, SAVES], 300, "warning: rank 1 lets others wait"),
        ([WAITS, SAVES], 1799, "warning: rank 1 lets others wait"),
        ([WAITS, SAVES], 1800, "stuck: rank 1 is stuck: others have waited 1800 s"),
        ([WAITS, SAVES, beat(6)], 300, "stuck: rank 2 is stuck"),
        ([WAITS, WAITS], 1800, "stuck: exchange 7, gradients, has not ended on any rank for 1800 s"),
        ([beat(7, 25.0), beat(6)], 5, "warning: rank 1 lets others wait for 30 s"),
    ],
)
def test_who_is_late(beats, seconds, said):
    one = judge(*beats)
    if seconds > 10:
        for rank in range(1, len(beats)):
            one.heard(rank, 99.0 + seconds)
    verdict, warnings = one.look(100.0 + seconds)
    found = [f"{verdict.kind}: {verdict.text}"] if verdict else [f"warning: {text}" for text in warnings]
    assert len(found) == (said is not None) and all(text.startswith(said) for text in found), found
    if found and "warning" in found[0]:
        assert one.look(100.5 + seconds) == (None, []), "it is said once"


def test_others_judge_rank_0_later_than_it_does_itself():
    for seconds, kind in ((330, None), (335.1, "stuck")):
        one = judge(beat(6), WAITS, rank=1)
        one.heard(0, 99.0 + seconds)
        verdict, warnings = one.look(100.0 + seconds)
        assert (verdict and verdict.kind, warnings) == (kind, [])


def test_who_has_ended():
    one = judge(WAITS, beat(6), beat(7, 0.0))
    gone = one.ended(2, 101.0)
    assert gone and gone.text.startswith("rank 2 is gone: its connection has ended (host h, pid 9, step 3, exchange 7,")
    one.finished(2)
    assert one.ended(2, 101.0) is None and one.look(101.0) == (None, [])  # it owes nothing
    one.finished(1)
    verdict, _ = one.look(101.0)
    assert verdict and (verdict.kind, verdict.ranks) == ("left", (1,)) and "rank 1 left: it has ended" in verdict.text
    one = judge(WAITS, WAITS)
    one.heard(1, 0.0)
    one.forgive(101.0)  # this process was stopped, and has heard nobody
    assert one.look(102.0) == (None, [])
    assert Judge(1, 2, Times()).look(1e6) == (None, [])  # rank 0 has not begun


def test_exchanges_that_differ():
    same = judge(WAITS, beat(6))
    assert same.look(101.0) == (None, [])
    verdict, _ = judge(WAITS, WAITS, beat(7, 0.0, signatures=[[5, "old"], [7, "other"]])).look(101.0)
    assert verdict and (verdict.kind, verdict.ranks) == ("diverged", (0, 2))
    assert "exchange 7 of rank 0 is 'gradients', exchange 7 of rank 2 is 'other' (rank 0: host h" in verdict.text


@pytest.mark.parametrize(("slower", "windows", "warned"), [(1.2, 3, True), (1.2, 2, False), (1.1, 9, False)])
def test_a_rank_that_is_always_slower(slower, windows, warned):
    """20 % are, after three windows in a row, and once."""
    one = Judge(0, 3, Times())
    found = []
    for window in range(windows + 1):
        now = 100.0 + 10.1 * window
        for rank in range(3):
            one.heard(rank, now) if rank else None
            one.saw(rank, now, beat(step=10 * window, busy=10 * window * 0.2 * (slower if rank == 2 else 1.0)))
        verdict, warnings = one.look(now)
        assert verdict is None
        found += warnings
    text = "rank 2 is slow: a step takes it 0.24 s, and the others 0.2 s (median) (host h"
    assert len(found) == warned and all(one.startswith(text) for one in found), found


def test_whose_parameters_differ():
    a, b, c = ("".join(8 * letter for letter in letters).encode() for letters in ("pqrs", "pxrs", "pxry"))
    names = list("pqrs")
    assert odd_ones([a, a], names, "now") is None
    assert odd_ones([a, b], names, "now") == ((0, 1), "ranks 0, 1 have different parameters now: q")
    assert odd_ones([a, c, a], names, "now") == ((1,), "rank 1 has other parameters than the others now: q and 1 more")
    assert odd_ones([a, b, b, a], names, "now") == ((0, 1, 2, 3), "ranks 0, 1, 2, 3 have different parameters now: q")
    assert odd_ones([b, a, a, a, c], names, "now") == (
        (0, 4),
        "ranks 0, 4 have other parameters than the others now: q",
    )
