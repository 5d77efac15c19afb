"""Which rank is to blame: judged from heartbeats, without a socket, a thread or a clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..errors import shown
from .progress import Times
from .store import ranks_text

_SLOW = 1.15  # times the others' median
_STREAK = 3  # windows in a row
_LEAST_STEPS = 5  # of a window


@dataclass(frozen=True)
class Verdict:
    """Why the run ends. kind: gone, silent, stuck, diverged, config, left or lost (docs/internals/distributed.md has a
    table). ranks: those that are to blame. text: the sentence for the user.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str


class Judge:
    """Rank 0 judges all others, and itself where others wait for it; the others judge rank 0 alone.

    now: seconds of one monotonic clock. beat: as Progress.beat returns it.
    """

    def __init__(self, rank: int, size: int, times: Times) -> None:
        self.rank, self.size, self.times = rank, size, times
        self._heard: dict[int, float] = {}  # nothing before the first byte: rank 0 begins when all are there
        self._beats: dict[int, tuple[float, dict[str, Any]]] = {}
        self._finished: set[int] = set()
        self._reported = (0, frozenset[int]())  # an exchange, and the ranks that were reported as late for it
        self._window: dict[int, dict[str, Any]] = {}
        self._window_at = 0.0
        self._streak: dict[int, int] = {}
        self._slow: set[int] = set()

    # ---- what is known -----------------------------------------------------------------------------------------------

    def heard(self, rank: int, now: float) -> None:
        """Something came from that rank, so its process runs."""
        self._heard[rank] = now

    def saw(self, rank: int, now: float, beat: dict[str, Any]) -> None:
        """A heartbeat came, or is this rank's own."""
        self._beats[rank] = now, beat

    def forgive(self, now: float) -> None:
        """This process itself was stopped for a while, so what it has not heard does not count as silence."""
        for rank in self._heard:
            self._heard[rank] = now

    def finished(self, rank: int) -> None:
        """That rank has left without an error. The others may go on, but an exchange with it is an error."""
        self._finished.add(rank)

    def who(self, ranks: Iterable[int], now: float) -> str:
        """What is known of these ranks, at most four, in parentheses for a message."""
        listed = list(ranks)[:4]
        if len(listed) == 1:
            return f"({self._about(listed[0], now)})"
        return f"({'; '.join(f'rank {rank}: {self._about(rank, now)}' for rank in listed)})" if listed else ""

    def _about(self, rank: int, now: float) -> str:
        if rank not in self._beats:
            return "nothing is known yet"
        at, beat = self._beats[rank]
        waits = beat["waiting"] is not None
        phase, since = ("exchanging", beat["waiting"]) if waits else (beat["phase"], beat["since"])
        return (
            f"host {beat['host']}, pid {beat['pid']}, step {beat['step']}, exchange {beat['queued']}, {phase} for "
            f"{since + now - at:.1f} s"
        )

    # ---- verdicts ----------------------------------------------------------------------------------------------------

    def ended(self, rank: int, now: float) -> Verdict | None:
        """The connection of that rank has ended: a verdict, unless it had left in order."""
        if rank in self._finished:
            return None
        return Verdict("gone", (rank,), f"rank {rank} is gone: its connection has ended {self.who([rank], now)}")

    def left(self, rank: int, why: str, now: float) -> Verdict:
        """The verdict on a rank that says that an error ends it."""
        return Verdict("left", (rank,), f"rank {rank} left: {why} {self.who([rank], now)}")

    def mistaken(self, exchange: int, now: float) -> Verdict | None:
        """The verdict on a rank that brings a ConfigError to this exchange, while others make another one."""
        for rank, (_, beat) in sorted(self._beats.items()):
            number, text = beat.get("failed", (0, ""))
            if number == exchange > 0:
                return Verdict("config", (rank,), f"rank {rank}: {text} {self.who([rank], now)}")
        return None

    def look(self, now: float) -> tuple[Verdict | None, list[str]]:
        """A verdict, if it is time for one, and warnings."""
        verdict = self._silent(now) or self._diverged(now)
        if verdict is not None:
            return verdict, []
        verdict, warnings = self._late(now)
        if verdict is None and self.rank == 0:
            warnings += self._compare_speeds(now)
        return verdict, warnings

    def _silent(self, now: float) -> Verdict | None:
        silent = [
            rank for rank, at in self._heard.items() if rank not in self._finished and now - at >= self.times.silent
        ]
        if not silent:
            return None
        text = f"{ranks_text(silent)} {_be(silent)} silent for {self.times.silent:g} s {self.who(silent, now)}"
        return Verdict("silent", tuple(silent), text)

    def _diverged(self, now: float) -> Verdict | None:
        """The verdict on two ranks whose exchanges of the same number have different signatures."""
        if self.rank not in self._beats:
            return None
        mine: dict[int, str] = dict(self._beats[self.rank][1]["signatures"])
        for rank, (_, beat) in sorted(self._beats.items()):
            for number, other in beat.get("signatures", ()):
                if mine.get(number, other) != other:
                    text = differ(number, self.rank, mine[number], rank, other)
                    ranks = tuple(sorted((self.rank, rank)))
                    told = f"{text} {self.who(ranks, now)}"
                    return self.mistaken(number, now) or Verdict("diverged", ranks, told)
        return None

    def _late(self, now: float) -> tuple[Verdict | None, list[str]]:
        """Ranks that have not begun the exchange in which others wait: a verdict, or warnings."""
        if not self._beats:
            return None, []
        last = max(beat["queued"] for _, beat in self._beats.values())
        waits = [
            beat["waiting"] + now - at
            for at, beat in self._beats.values()
            if beat["queued"] == last and beat["waiting"] is not None
        ]
        if not waits:
            return None, []
        waited = max(waits)
        late = sorted(rank for rank, (_, beat) in self._beats.items() if beat["queued"] < last)
        left = [rank for rank in late if rank in self._finished]
        if left:
            return self.left(left[0], "it has ended", now), []
        if self.rank:  # rank 0 judges everybody; this is for the case that it cannot
            late, waited = [rank for rank in late if rank == 0], (waited - self.times.exit) / 1.1
            if not late:
                return None, []
        what = f"exchange {last}, {self._signature(last)}"
        phases = {rank: self._beats[rank][1]["phase"] for rank in late}
        stuck = [rank for rank in late if waited >= self.times.limit(phases[rank])]
        if stuck:
            text = f"{ranks_text(stuck)} {_be(stuck)} stuck: others have waited {waited:.0f} s for {what}"
            return Verdict("stuck", tuple(stuck), f"{text} {self.who(stuck, now)}{self._stacks(stuck)}"), []
        if not late and waited >= self.times.patience:
            return Verdict("stuck", (), f"{what}, has not ended on any rank for {waited:.0f} s"), []
        number, before = self._reported if self._reported[0] == last else (last, frozenset[int]())
        new = [rank for rank in late if rank not in before and waited >= self.times.reported(phases[rank])]
        self._reported = number, before | set(new)
        if not new or self.rank:
            return None, []
        text = f"{ranks_text(new)} {'lets' if len(new) == 1 else 'let'} others wait for {waited:.0f} s with {what}"
        return None, [f"{text} {self.who(new, now)}{self._stacks(new)}"]

    def _signature(self, number: int) -> str:
        for _, beat in self._beats.values():
            for one, signature in beat.get("signatures", ()):
                if one == number:
                    return signature
        return "?"

    def _stacks(self, ranks: list[int]) -> str:
        return "".join(f"; rank {rank} is in {self._beats[rank][1]['stack']}" for rank in ranks[:2])

    # ---- speed -------------------------------------------------------------------------------------------------------

    def _compare_speeds(self, now: float) -> list[str]:
        """Warn, once, of a rank whose steps take longer than those of the others, three windows in a row."""
        latest = {rank: beat for rank, (_, beat) in self._beats.items()}
        if len(latest) < self.size or now - self._window_at < self.times.window:
            return []
        before, self._window, self._window_at = self._window, latest, now
        seconds: dict[int, float] = {}
        for rank, beat in latest.items():
            steps = beat["step"] - before[rank]["step"] if rank in before else 0
            if steps < _LEAST_STEPS:
                return []
            seconds[rank] = (beat["busy"] - before[rank]["busy"]) / steps
        found: list[str] = []
        for rank, mine in seconds.items():
            others = median(value for other, value in seconds.items() if other != rank)
            self._streak[rank] = self._streak.get(rank, 0) + 1 if mine > _SLOW * others else 0
            if self._streak[rank] == _STREAK and rank not in self._slow:
                self._slow.add(rank)
                found.append(
                    f"rank {rank} is slow: a step takes it {mine:.4g} s, and the others {others:.4g} s (median) "
                    f"{self.who([rank], now)}"
                )
        return found


def differ(number: int, rank: int, mine: str, other: int, theirs: str) -> str:
    """The message about two ranks whose exchanges of one number are different."""
    return (
        f"ranks do not do the same: exchange {number} of rank {rank} is {shown(mine, 300)}, exchange {number} of rank "
        f"{other} is {shown(theirs, 300)}"
    )


def _be(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
