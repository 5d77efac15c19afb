"""Verdicts, from heartbeats that are written here: no process, no clock."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace

import pytest

from xtrain.distributed import progress
from xtrain.distributed.compare import odd_ones
from xtrain.distributed.judge import Judge
from xtrain.distributed.progress import Progress, Times, times

pytestmark = pytest.mark.on_cpu
SIGNATURES = [[6, "barrier"], [7, "gradients"]]


def beat(queued: int = 7, waiting: float | None = None, phase: str = "computing", step: int = 3, busy: float = 0.0, **more) -> dict:  # fmt: skip
    same = {"host": "h", "pid": 9, "step": step, "phase": phase, "since": 1.0, "queued": queued, "done": queued - 1}
    return {**same, "waiting": waiting, "busy": busy, "signatures": SIGNATURES[: queued - 5], "stack": "f", **more}


def judge(*beats: dict, rank: int = 0, **changes: float) -> Judge:
    """Of as many ranks as heartbeats, which have all come at second 100. changes: of the times."""
    found = Judge(rank, len(beats), dataclasses.replace(Times(), **changes))
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
        ([WAITS, WAITS], 1799, None),
        (
            [WAITS, beat(6), beat(6), beat(6)],
            30.0,
            "warning: ranks 1, 2, 3 let others wait for 30 s with exchange 7, grad",
        ),
        ([beat(7, 9.0), beat(7, 25.0), beat(6)], 5, "warning: rank 2 lets others wait for 30 s"),  # the longest counts
        ([beat(7, 9.0), beat(6, 400.0)], 5, None),  # exchange 6 has ended for others, and this one has yet to hear it
        (
            [beat(7, 0.0, signatures=[]), beat(6)],
            30.0,
            "warning: rank 1 lets others wait for 30 s with exchange 7, ? (",
        ),
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


def test_a_rank_does_not_judge_itself():
    """But for rank 0, whom others judge where it cannot."""
    one = judge(WAITS, beat(6), rank=1)
    one.heard(0, 2e4)
    assert one.look(2e4) == (None, [])


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_config_error_is_why_exchanges_differ(bad):
    """Not one that was brought to an earlier exchange, where all have heard it."""
    for number, kind, text in ((7, "config", f"rank {bad}: no such thing (host h"), (6, "diverged", "ranks do not do")):
        beats = [beat(7, 0.0) for _ in range(3)]
        beats[bad] |= {"signatures": [[7, "errors"]], "failed": [number, "no such thing"]}
        verdict, _ = judge(*beats).look(101.0)
        assert verdict is not None and verdict.kind == kind and verdict.text.startswith(text), verdict
        assert verdict.ranks == ((bad,) if number == 7 else (0, bad or 1))
    assert judge(beat(), beat(failed=[0, ""])).mistaken(0, 100.0) is None


def test_of_config_errors_that_of_the_first_rank_is_the_verdict():
    """Whoever was heard first: all ranks, which judge for themselves, find the same."""
    one = judge(beat(7))
    for rank in (2, 1):
        one.saw(rank, 100.0, beat(7, failed=[7, f"no thing {rank}"]))
    found = one.mistaken(7, 100.0)
    assert found is not None and found.ranks == (1,) and found.text.startswith("rank 1: no thing 1 ")


def test_what_is_known_of_ranks():
    one = judge(beat(7, 2.0), beat(6), *[beat(6)] * 4)
    assert one.who([0], 104.5) == "(host h, pid 9, step 3, exchange 7, exchanging for 6.5 s)"
    assert one.who([1], 104.5) == "(host h, pid 9, step 3, exchange 6, computing for 5.5 s)"
    assert one.who([7], 104.5) == "(nothing is known yet)" and one.who([], 104.5) == ""
    said = one.who(range(1, 6), 100.0)
    assert [part.partition(":")[0] for part in said.strip("()").split("; ")] == ["rank 1", "rank 2", "rank 3", "rank 4"]


def test_what_was_reported_is_reported_again_for_another_exchange():
    """And not for the same one, whoever else is reported later. Of many ranks two say where they are."""
    one = judge(WAITS, beat(6), SAVES, timeout=1000.0)
    for now, ranks in ((130.0, [1]), (131.0, []), (400.0, [2]), (401.0, [])):
        one.heard(1, now), one.heard(2, now)
        verdict, warnings = one.look(now)
        assert verdict is None and [text.split()[1] for text in warnings] == [str(rank) for rank in ranks]
    for rank, sent in enumerate((beat(8, 0.0), beat(7), beat(7, stack="here"))):
        one.saw(rank, 402.0, sent)
        one.heard(rank, 425.0) if rank else None
    assert one.look(431.9) == (None, [])
    _, (text,) = one.look(432.0)
    assert text.startswith("ranks 1, 2 let") and text.endswith("; rank 1 is in f; rank 2 is in here")
    one = judge(WAITS, *[beat(6)] * 3)
    for rank in (1, 2, 3):
        one.heard(rank, 130.0)
    assert one.look(130.0)[1][0].count(" is in f") == 2


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


def speeds(one: Judge, windows: list[float], ranks: int, steps: int = 10, seconds: float = 10.1) -> list[str]:
    """Warnings where the last rank's steps take 0.2 s times a factor, in each window."""
    found, busy = [], 0.0
    for window, factor in enumerate([1.0, *windows]):
        now, busy = 100.0 + seconds * window, busy + steps * 0.2 * factor
        for rank in range(ranks):
            one.heard(rank, now) if rank != one.rank else None
            one.saw(rank, now, beat(step=steps * window, busy=busy if rank == ranks - 1 else steps * window * 0.2))
        verdict, warnings = one.look(now)
        assert verdict is None
        found += warnings
    return found


@pytest.mark.parametrize(
    ("windows", "warned"),
    [([1.2] * 3, 1), ([1.2] * 2, 0), ([1.1] * 9, 0), ([1.2] * 9, 1), ([1.2, 1.2, 1.0, 1.2, 1.2, 1.0], 0),
     ([1.2] * 3 + [1.0] + [1.2] * 3, 1)],
)  # fmt: skip
def test_a_rank_that_is_always_slower(windows, warned):
    """20 % are, after three windows in a row, and once."""
    text = "rank 2 is slow: a step takes it 0.24 s, and the others 0.2 s (median) (host h"
    found = speeds(Judge(0, 3, Times()), windows, 3)
    assert len(found) == warned and all(one.startswith(text) for one in found), found
    text = "rank 1 is slow: a step takes it 0.24 s, and the others 0.2 s (median) (host h"
    found = speeds(Judge(0, 2, Times()), windows, 2)
    assert len(found) == warned and all(one.startswith(text) for one in found), found


def test_speeds_that_are_not_compared():
    """By other ranks than 0, before all are heard of, in windows of fewer than 5 steps, and before a window is over."""
    slow = [1.2] * 3
    assert len(speeds(Judge(0, 2, Times()), slow, 2, steps=5)) == 1
    assert speeds(Judge(1, 2, Times()), slow, 2) == []
    assert speeds(Judge(0, 3, Times()), slow, 2) == []
    assert speeds(Judge(0, 2, Times()), slow, 2, steps=4) == []
    assert speeds(Judge(0, 2, Times()), slow, 2, seconds=5.0) == []


def test_whose_parameters_differ():
    a, b, c = ("".join(8 * letter for letter in letters).encode() for letters in ("pqrs", "pxrs", "pxry"))
    names = list("pqrs")
    assert odd_ones([a, a], names, "now") is None
    assert odd_ones([a, a, a[:-1] + b"5"], names, "now") == (
        (2,),
        "rank 2 has other parameters than the others now: s",
    )
    assert odd_ones([a, b], names, "now") == ((0, 1), "ranks 0, 1 have different parameters now: q")
    assert odd_ones([a, c, a], names, "now") == ((1,), "rank 1 has other parameters than the others now: q and 1 more")
    assert odd_ones([a, b, b, a], names, "now") == ((0, 1, 2, 3), "ranks 0, 1, 2, 3 have different parameters now: q")
    assert odd_ones([b, a, a, a, c], names, "now") == (
        (0, 4),
        "ranks 0, 4 have other parameters than the others now: q",
    )


# ---- what a rank says of itself


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    found = SimpleNamespace(now=50.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_what_counts_as_computing(clock):
    """The time between exchanges, but not in them, and not in another phase."""
    one = Progress()

    def said(*names: str) -> list:
        beat = one.beat()
        return [beat[name] for name in names]

    clock.now += 3.0
    assert said("phase", "since", "busy", "waiting") == ["starting", 3.0, 0.0, None]
    with one.during("loading"):
        pass
    assert one.phase == "starting"
    assert one.enter("computing") == "starting"
    clock.now += 2.0
    one.begin(1, "x" * 301)
    clock.now += 4.0
    assert said("phase", "since", "busy", "waiting", "queued", "done") == ["computing", 6.0, 2.0, 4.0, 1, 0]
    assert said("signatures") == [[[1, "x" * 300]]], "as much as a heartbeat has room for"
    one.end()
    clock.now += 1.0
    assert said("since", "busy", "waiting", "queued", "done") == [1.0, 2.0, None, 1, 1]
    with one.during("saving"):
        assert said("phase", "since", "busy") == ["saving", 0.0, 3.0]
        clock.now += 5.0
        one.begin(2, "y")
        clock.now += 1.0
        one.end()
    assert said("phase", "since", "busy", "done") == ["computing", 0.0, 3.0, 2]
    clock.now += 2.0
    one.begin(3, "z")
    clock.now += 7.0
    one.enter("evaluating")  # inside an exchange, which is not computing
    one.end()
    one.enter("computing")
    clock.now += 1.0
    one.begin(4, "")
    assert said("busy") == [6.0]


def test_the_last_exchanges_are_told():
    one = Progress()
    for number in range(70):
        one.begin(number, "same")
    assert [number for number, _ in one.beat()["signatures"]] == list(range(6, 70))


def test_the_stack_is_that_of_the_thread_that_works():
    one, found = Progress(), []
    thread = threading.Thread(target=lambda: found.append(one.beat()["stack"]))
    thread.start()
    thread.join()
    assert f"{test_the_stack_is_that_of_the_thread_that_works.__name__}," in found[0] and "lambda" not in found[0]
    assert len(found[0].split(", ")) == 6 and found[0].startswith("threading.py:")


def test_times_of_the_environment(monkeypatch):
    monkeypatch.setenv("XTRAIN_COMM_TIMEOUT", "7")
    assert times().timeout == 7.0 and times({}).timeout == 300.0
    assert times({"XTRAIN_COMM_TIMEOUT": "1e6"}).timeout == 1e6
    assert (Times().reported("computing"), Times().reported("saving")) == (30.0, 300.0)
    assert Times(report=400.0).reported("saving") == 400.0
