"""What the fuzzers share: how a case gets its numbers, what a worker reports, and where it says which case it is at.

A family is a class with a `name`. `Family(folder)` prepares it, `run(chance)` is one case: it raises Wrong, or anything
else that is not documented, when something is wrong. `counts` is a Counter that the table shows. A case is told by
family, seed and number alone, so every finding can be run again.
"""

from __future__ import annotations

import mmap
import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

SLOT = struct.Struct("<QQQ")  # the case that a worker is at, cases it has finished, findings


class Wrong(AssertionError):
    """A finding: the text says what was expected and what came."""


class Family:
    """Base of the families."""

    name = ""
    share = 1.0  # of the time, beside the others'
    slow = 60.0  # seconds after which a case counts as hung

    def __init__(self, folder: Path) -> None:
        self.folder, self.counts = folder, Counter()

    @classmethod
    def lacks(cls) -> list[str]:
        """Packages that are not installed, without which the family would leave something out."""
        return []

    def run(self, chance: random.Random) -> None:
        raise NotImplementedError

    def describe(self) -> str:
        """What the last case did, for a finding."""
        return ""


class Chance(random.Random):
    """A source whose choices cost less, for ranges far below 2^53."""

    def choice(self, seq: Any) -> Any:
        return seq[int(self.random() * len(seq))]

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        if stop is None:
            return int(self.random() * start)
        return start + step * int(self.random() * -((start - stop) // step))

    def randint(self, a: int, b: int) -> int:
        return a + int(self.random() * (b - a + 1))


def chance_of(family: str, seed: int, number: int) -> Chance:
    """The source of every choice of one case."""
    return Chance(f"{family}/{seed}/{number}")


class Progress:
    """A worker's slot, in a file that the parent reads also after the worker has died."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(SLOT.size))
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SLOT.size)

    def write(self, case: int, done: int, findings: int) -> None:
        SLOT.pack_into(self._memory, 0, case, done, findings)

    def read(self) -> tuple[int, int, int]:
        return SLOT.unpack_from(self._memory)
