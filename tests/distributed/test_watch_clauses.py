"""What the watchdog promises, clause by clause, in one process: the other ranks are this test, at the far ends of its sockets."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from xtrain.distributed import watch as watchdog
from xtrain.distributed.progress import Progress, Times
from xtrain.distributed.watch import Watch, _Link, _print, write_error_file
from xtrain.errors import ConfigError, PeerError

pytestmark = pytest.mark.on_cpu
HANGS = 60.0  # seconds
SOON = 5.0  # the same
SELDOM = Times(beat=1000.0)  # one heartbeat, at the start


class Other:
    """Another rank, as the watchdog has it before it."""

    def __init__(self, held: ExitStack) -> None:
        self.near_talk, self.talk = socket.socketpair()
        self.near_pulse, self.pulse = socket.socketpair()
        for one in (self.near_talk, self.talk, self.near_pulse, self.pulse):
            held.enter_context(one)
        self.talk.settimeout(HANGS)
        self._inbox = b""

    def says(self, *messages: dict[str, Any]) -> None:
        self.talk.sendall(b"".join(map(watchdog._framed, messages)))

    def hears(self, key: str) -> list[dict[str, Any]]:
        """What comes, until there is a message of this key; "ended": until the end."""
        found: list[dict[str, Any]] = []
        while not (found and key in found[-1]):
            size = watchdog.LENGTH.size
            if len(self._inbox) >= size and len(self._inbox) >= size + watchdog.LENGTH.unpack_from(self._inbox)[0]:
                size += watchdog.LENGTH.unpack_from(self._inbox)[0]
                found.append(json.loads(self._inbox[watchdog.LENGTH.size : size]))
                self._inbox = self._inbox[size:]
            elif data := self._more():
                self._inbox += data
            else:
                found.append({"ended": True})
                assert key == "ended", found
        return found

    def _more(self) -> bytes:
        try:
            return self.talk.recv(1 << 16)
        except ConnectionResetError:  # an end, of one who has not read everything
            return b""


class Process:
    """What the watchdog does to its process, written down. clock: seconds that its time is ahead."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.clock = 0.0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.done.append((name, *arguments))


@pytest.fixture
def process(monkeypatch) -> Process:
    found = Process()
    monkeypatch.setattr(watchdog, "_C", found)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + found.clock, sleep=time.sleep, time=time.time)
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    return found


Make = Callable[..., tuple[Watch, list[Other]]]


@pytest.fixture
def make(process) -> Iterator[Make]:
    """A watchdog of this rank, and the others that it is connected to: rank 0 with all, another with rank 0."""
    with ExitStack() as held:

        def made(rank: int, size: int, times: Times = SELDOM) -> tuple[Watch, list[Other]]:
            others = {other: Other(held) for other in (range(1, size) if rank == 0 else (0,))}
            talks = {number: other.near_talk for number, other in others.items()}
            pulses = {number: other.near_pulse for number, other in others.items()}
            found = Watch(rank, size, Progress(), talks, pulses, times, lambda text: process.abort(text))
            held.callback(lambda: suppress_all(found.stop))
            return found, list(others.values())

        yield made


def suppress_all(act: Callable[[], object]) -> None:
    with suppress(Exception):
        act()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANGS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def ended(one: socket.socket) -> bool:
    """Whether nothing comes from there any more."""
    return bool(select.select([one], [], [], 0)[0]) and one.recv(1) == b""


# ---- verdicts


def test_a_verdict_goes_to_all_others_and_counts_once(make, process, capfd) -> None:
    watch, (first, second) = make(0, 3, Times(beat=1000.0, exit=7.0))
    watch.start()
    first.hears("beat"), second.hears("beat")
    first.says({"left": "ValueError: no luck"})
    text = "rank 1 left: ValueError: no luck (nothing is known yet)"
    assert second.hears("verdict") == [{"verdict": ["left", [1], text]}]
    until(watch._convicted.is_set)
    second.says({"left": "KeyError: late"}, {"beat": {**watch.progress.beat(), "step": 8}})
    until(lambda: 2 in watch._judge._beats)
    assert watch.verdict is not None and watch.verdict.text == text
    assert process.done[1:] == [("end_after", 7.0, 75), ("abort", f"distributed: {text}")]
    assert capfd.readouterr().err == f"xtrain: error: distributed: {text}\n"
    error = watch.error()
    assert str(error) == f"distributed: {text}" and error is not None and error.told
    watch.stop()
    assert first.hears("ended") == [{"ended": True}], "it is not told what it has said"


def test_it_is_told_before_the_main_thread_is_woken(make, process, capfd, monkeypatch, tmp_path) -> None:
    """Which may end the process."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    watch, (_, second) = make(0, 3)
    found: list[bool] = []

    def abort(text: str) -> None:
        found.append((tmp_path / "error.json").exists() and text in capfd.readouterr().err)
        found.append("verdict" in second.hears("verdict")[-1])

    watch.abort = abort
    watch.start()
    watch.accuse("lost", (1,), "no luck")
    assert found == [True, True] and watch.verdict is not None


def test_who_accuses_says_what_is_known_now(make) -> None:
    """And what it raises holds on all ranks."""
    watch, (other,) = make(0, 2)
    watch.start()
    other.hears("beat")
    until(lambda: 0 in watch._judge._beats)
    watch.progress.step, watch.progress.phase = 4711, "saving"
    watch.accuse("diverged", (0,), "something differs")
    assert watch.verdict is not None and watch.verdict.kind == "diverged"
    assert ", step 4711, exchange 0, saving for " in watch.verdict.text


def test_a_config_error_is_the_verdict_on_exchanges_that_differ(make, process, monkeypatch) -> None:
    """What the rank has announced is heard first, also where this thread has yet to read it; the status is 2."""
    watch, (other,) = make(0, 2)
    watch.start()
    other.hears("beat")
    wait = watch._wait
    monkeypatch.setattr(watch, "_wait", lambda selector, until: wait(selector, until) if not watch._orders else None)
    other_progress = Progress()
    other_progress.failed = 3, "a wrong start"

    def say() -> None:
        other.says({"beat": other_progress.beat()})

    watch._orders.append(say)  # after it has read, and before it obeys the next order
    watch.accuse("diverged", (0, 1), "they differ", 3)
    assert watch.verdict is not None and watch.verdict.kind == "config" and watch.verdict.ranks == (1,)
    assert watch.verdict.text.startswith("rank 1: a wrong start (host ")
    error = watch.error()
    assert type(error) is ConfigError and error.told and str(error) == f"distributed: {watch.verdict.text}"
    assert ("end_after", SELDOM.exit, 2) in process.done and watch.status() == 2
    assert other.hears("verdict")[-1]["verdict"][:2] == ["config", [1]]


def test_an_announcement_is_sent_at_once(make) -> None:
    watch, (other,) = make(1, 2)
    watch.start()
    other.hears("beat")
    watch.progress.failed = 3, "a wrong start"
    watch.beat_now()
    assert select.select([other.talk], [], [], 0)[0], "before this returns"
    assert other.hears("beat")[-1]["beat"]["failed"] == [3, "a wrong start"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exchange_that_fails_alone_is_lost(make, rank: int, monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "_EXPLAINED", 0.3)
    monkeypatch.setattr(watchdog, "_FLUSH", 0.3)
    watch, (other,) = make(rank, 2)
    watch.start()
    error = watch.explain(PeerError("distributed: exchange 3: it broke"))
    assert str(error) == "distributed: exchange 3: it broke" and error.told
    assert watch.verdict is not None and watch.verdict.kind == "lost"
    assert other.hears("verdict")[-1] == {"verdict": ["lost", [], "exchange 3: it broke"]}


def test_rank_0_knows_more(make) -> None:
    """Its verdict is that of a rank which accuses or explains, where it comes."""
    for act in ("accuse", "explain"):
        watch, (other,) = make(1, 2)
        watch.start()
        other.hears("beat")
        later = threading.Timer(0.2, other.says, [{"verdict": ["gone", [2], "rank 2 is gone"]}])
        later.start()
        if act == "accuse":
            watch.accuse("diverged", (0, 1), "they differ")
        else:
            assert str(watch.explain(PeerError("distributed: it broke"))) == "distributed: rank 2 is gone"
        assert watch.verdict == watchdog.Verdict("gone", (2,), "rank 2 is gone"), act
        later.join()
        watch.stop()
        assert other.hears("ended") == [{"ended": True}], "it is not told what it has said"


def test_ranks_that_differ_are_noticed_soon(make) -> None:
    """Not at the next silence: 2 s are promised, and a busy machine may be late."""
    watch, (other,) = make(0, 2, Times(beat=1.0))
    watch.progress.begin(5, "barrier")
    watch.start()
    other.hears("beat")
    begun = time.monotonic()
    other.says({"beat": {**watch.progress.beat(), "signatures": [[5, "gradients"]]}})
    until(lambda: watch.verdict is not None)
    assert watch.verdict.kind == "diverged" and time.monotonic() - begun < 2 + SOON


def test_another_timeout_counts_from_now_on(make) -> None:
    """Of an exchange that waits already, too."""
    watch, (other,) = make(0, 2, Times(beat=0.05))
    watch.progress.begin(7, "gradients")
    watch.start()
    other.says({"beat": {**Progress().beat(), "phase": "computing"}})
    until(lambda: 1 in watch._judge._beats)
    assert watch.verdict is None
    watch.set_timeout(0.001)
    until(lambda: watch.verdict is not None)
    assert watch.verdict.kind == "stuck" and watch.times.timeout == 0.001


# ---- leaving


@pytest.mark.parametrize(("why", "last"), [(None, {"finished": True}), ("KeyError: x", {"left": "KeyError: x"})])
def test_who_leaves_sends_its_last_heartbeat_first(make, why: str | None, last: dict) -> None:
    """So that nobody thinks that it owes an exchange."""
    watch, (other,) = make(0, 2)
    watch.start()
    other.hears("beat")
    watch.progress.begin(9, "the last")
    watch.leave(why)
    other.says({"finished": True})  # so that it is not waited for
    watch.stop()
    first, *rest = other.hears("ended")
    assert first["beat"]["queued"] == 9 and rest == [last, {"ended": True}]


def test_a_rank_with_an_error_waits_for_the_ends_of_others(make, monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "_FLUSH", 0.1)
    monkeypatch.setattr(watchdog, "_GRACE", 20.0)
    for word in ({"left": "it has heard"}, {"finished": True}, None):
        watch, (other,) = make(0, 2)
        watch.start()
        other.hears("beat")
        begun = time.monotonic()
        ends = threading.Timer(0.8, lambda o=other, w=word: o.says(w) if w else o.talk.close())
        ends.start()
        watch.leave("ValueError: no luck")
        watch.stop()
        assert 0.7 < time.monotonic() - begun < 15.0, word
        ends.join()


def test_a_rank_in_order_waits_for_nobody(make, monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "_GRACE", HANGS)
    for end in ("in order", "convicted"):
        watch, (other,) = make(0, 2)
        watch.start()
        other.hears("beat")
        if end == "convicted":
            other.says({"left": "SystemExit: 3"})
            until(watch._convicted.is_set)
        begun = time.monotonic()
        watch.leave("ValueError: no luck" if end == "convicted" else None)
        watch.stop()
        assert time.monotonic() - begun < HANGS / 2, end


def test_what_ends_with_it(make, process) -> None:
    """The pulse before its sockets, whose numbers others may get; and after a verdict the process is not ended."""
    watch, (other,) = make(0, 2)
    numbers = [link.pulse.fileno() for link in watch._links]
    process.pulse_stop = lambda: process.done.append(("pulse_stop", [link.pulse.fileno() for link in watch._links]))
    watch.start()
    assert process.done == [("pulse_start", numbers, SELDOM.beat)]
    with os.fdopen(os.dup(other.near_talk.fileno())), os.fdopen(os.dup(other.near_pulse.fileno())):
        watch.stop()
        assert ended(other.pulse), "though another process has a copy of the socket"
        assert other.hears("ended")
    assert process.done[1:] == [("call_off_end",), ("pulse_stop", numbers)]


def test_a_forked_child_closes_its_copies_in_silence(make) -> None:
    watch, (other,) = make(0, 2)
    parents = [os.dup(one.fileno()) for one in (other.near_talk, other.near_pulse)]
    watch.abandon()
    assert not ended(other.talk) and not ended(other.pulse), "the connections are the parent's"
    for one in parents:
        os.close(one)
    assert ended(other.talk) and ended(other.pulse), "and the child holds none"


# ---- the thread


def test_signals_are_for_the_main_thread(make) -> None:
    watch, _ = make(0, 2)
    watch.start()
    found: list[set[int]] = []
    watch._order(lambda: found.append({int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())}))
    until(lambda: found)
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD} <= found[0]


def test_a_watchdog_that_fails_says_so(make, capfd) -> None:
    """Once; and not where it has been stopped."""
    for stops in (False, True):
        watch, (other,) = make(0, 2)
        watch.start()
        other.hears("beat")
        watch._stopping = stops
        watch._order(lambda: 1 / 0)  # type: ignore[arg-type]
        watch._thread.join(HANGS)
        want = "xtrain: warning: distributed: the watchdog of rank 0 has failed: division by zero\n"
        assert capfd.readouterr().err == ("" if stops else want)


def test_what_it_has_not_heard_while_it_was_away_is_no_silence(make, process) -> None:
    """A process that was stopped, or whose threads had no GIL, together with the others."""
    watch, (other,) = make(0, 2, Times(beat=0.05, silent=100.0))
    other.pulse.send(b"x")
    watch.start()
    until(lambda: 1 in watch._judge._heard)
    looked: list[bool] = []

    def away() -> None:
        process.clock += 1000.0

    watch._order(away)
    for _ in range(3):  # three rounds of the thread
        begun = len(looked)
        watch._order(lambda: looked.append(True))
        until(lambda begun=begun: len(looked) > begun)
    assert watch.verdict is None


def test_who_sends_anything_is_alive(make, process) -> None:
    """A heartbeat or a pulse."""
    watch, (other,) = make(0, 2, Times(silent=100.0))
    (link,) = watch._links
    now = time.monotonic()
    for talks in (False, True, False):
        (lambda: other.says({"beat": Progress().beat()}) if talks else other.pulse.send(b"x"))()
        process.clock += 60.0
        assert watch._read(link, talks)
        assert watch._judge.look(now + process.clock + 90.0)[0] is None
    verdict = watch._judge.look(now + process.clock + 101.0 + HANGS)[0]
    assert verdict is not None and verdict.kind == "silent"
    other.pulse.close()
    assert not watch._read(link, False)


def test_rank_0_compares_and_is_not_compared(make) -> None:
    for rank, signatures in ((0, []), (1, [[5, "barrier"]])):
        watch, (other,) = make(rank, 2)
        watch.progress.begin(5, "barrier")
        watch._beat()
        assert other.hears("beat")[-1]["beat"]["signatures"] == signatures


# ---- a connection


def test_messages_are_taken_before_the_end(make) -> None:
    watch, (other,) = make(0, 2)
    (link,) = watch._links
    later = watchdog._framed({"beat": 1})
    other.says({"left": "x"})
    other.talk.sendall(later[:7])
    assert link.take() == [{"left": "x"}] and link.open and link.leaves
    assert link.take() == []
    other.talk.sendall(later[7:])
    other.says({"beat": 2})
    other.talk.close()
    assert link.take() == [{"beat": 1}, {"beat": 2}, {"ended": True}]
    assert not link.open


def test_a_message_of_any_size_is_not_waited_for(make) -> None:
    """Its connection counts as ended."""
    for size in (watchdog._LONGEST + 1, (1 << 32) - 1):
        watch, (other,) = make(0, 2)
        other.talk.sendall(watchdog.LENGTH.pack(size) + b"{")
        assert watch._links[0].take() == [{"ended": True}]


def test_heartbeats_are_left_out_where_nobody_reads(make) -> None:
    """And a verdict is not."""
    watch, (other,) = make(0, 2)
    (link,) = watch._links
    watch.progress._about["host"] = "h" * 1000
    for _ in range(5000):
        watch._beat()
    assert watchdog._MOST_WAITING <= len(link.outbox) < watchdog._MOST_WAITING + 4096
    watch._convict(watchdog.Verdict("gone", (1,), "x"))
    assert b"verdict" in link.outbox[-100:]
    while link.outbox:
        other.talk.recv(1 << 20)
        link.flush()


def test_what_cannot_be_sent_is_forgotten(make) -> None:
    """Nobody waits for its going out."""
    watch, (other,) = make(0, 2)
    (link,) = watch._links
    other.talk.close()
    for _ in range(3):
        link.put(b"x" * 100)
    assert not link.outbox


# ---- what it says


def test_a_line_that_would_wait_is_left_out() -> None:
    """Whoever reads standard error has stopped reading: the thread goes on."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    kept = os.dup(2)
    thread = threading.Thread(target=_print, args=["no luck"], daemon=True)
    try:
        os.dup2(writer, 2)
        thread.start()
        thread.join(HANGS / 4)
        waits = thread.is_alive()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.read(reader, 1 << 20)  # whoever waits goes on
        thread.join(HANGS)
        os.close(reader)
        os.close(writer)
    assert not waits


def test_a_long_line_is_one_line(capfdbinary) -> None:
    """And one write, which no other process divides."""
    _print("\N{GREEK SMALL LETTER ALPHA}" * 5000)
    _print("next")
    first, second, _ = capfdbinary.readouterr().err.split(b"\n")
    assert len(first) == select.PIPE_BUF - 1 and first.startswith("xtrain: \N{GREEK SMALL LETTER ALPHA}".encode())
    assert second == b"xtrain: next"


def test_the_first_reason_counts(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for text in ("first", "second"):
        write_error_file(text)
        assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "first"


def test_a_link_is_closed_in_both_directions(make) -> None:
    watch, (other,) = make(0, 2)
    assert isinstance(watch._links[0], _Link)
    watch._links[0].close()
    assert ended(other.talk) and ended(other.pulse)
