"""What ranks agree on, and which errors all of them raise: a link that is written here stands for the other rank."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

import xtrain as xt
from xtrain import distributed
from xtrain.distributed import agree, world
from xtrain.distributed.agree import on_all_ranks
from xtrain.errors import CheckpointError, ConfigError, DataError, NonFiniteError, PeerError

pytestmark = pytest.mark.on_cpu


class Link:
    """One of two ranks. other: what the other one says, JSON."""

    def __init__(self, rank: int, other: Any = None) -> None:
        self.rank, self.other, self.said = rank, json.dumps(other).encode(), b""
        self.announced: list[str] = []

    def announce(self, text: str) -> None:
        self.announced.append(text)

    def all_gather(self, data: bytes, name: str) -> list[bytes]:
        return [data, self.other] if self.rank == 0 else [self.other, data]

    def broadcast(self, data: bytes | None, source: int, name: str) -> bytes:
        self.said = self.other if data is None else data
        return self.said


def raised(kind: type[Exception], act: Any) -> str:
    """The text of an error that all ranks raise: none of them has to tell the others when it leaves."""
    with pytest.raises(kind) as caught:
        act()
    assert vars(caught.value)["on_all_ranks"] is True and type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize("kind", [ConfigError, DataError, xt.OutOfMemoryError, OSError])
def test_an_error_of_rank_0_is_one_of_all(kind: type[Exception]) -> None:
    """On others of the same kind where it is one of xtrain's, and else a PeerError that names it."""

    def make() -> None:
        raise kind("no")

    first = Link(0)
    assert raised(kind, lambda: agree.together(first, make)) == "no"
    second = Link(1, json.loads(first.said))
    if kind is OSError:
        assert raised(PeerError, lambda: agree.together(second, make)) == "distributed: rank 0 failed: OSError: no"
    else:
        assert raised(kind, lambda: agree.together(second, make)) == "no"


def test_an_error_of_any_rank_ends_all() -> None:
    def act() -> None:
        raise DataError("x is missing")

    assert raised(DataError, lambda: agree.all_or_none(Link(1, None), act)) == "x is missing"
    said = ["DataError", "x is missing", None]
    assert raised(DataError, lambda: agree.all_or_none(Link(0, said), lambda: None)) == "rank 1: x is missing"
    assert raised(DataError, lambda: agree.all_or_none(Link(1, said), lambda: None)) == "rank 0: x is missing"
    said = ["OSError", "no", None]
    assert raised(PeerError, lambda: agree.all_or_none(Link(0, said), lambda: None)) == (
        "distributed: rank 1 failed: OSError: no"
    )
    agree.all_or_none(Link(0, None), lambda: None)


@pytest.mark.parametrize(("verdict", "told"), [(ConfigError, True), (PeerError, False)])
def test_a_config_error_is_raised_whatever_ends_the_exchange(verdict: type[Exception], told: bool) -> None:
    """By its rank; told where the verdict is this error. Other errors leave the word to the verdict."""

    class Ended(Link):
        def all_gather(self, data: bytes, name: str) -> list[bytes]:
            raise verdict("it ended")

    def fails(error: Exception) -> None:
        raise error

    link = Ended(0)
    error = ConfigError("a wrong\nstart")
    assert raised(ConfigError, lambda: agree.all_or_none(link, lambda: fails(error))) == "a wrong\nstart"
    assert error.told is told and link.announced == ["a wrong\nstart"]
    for act in (lambda: fails(OSError("no")), lambda: None):
        with pytest.raises(verdict, match="it ended"):
            agree.all_or_none(link, act)
    assert len(link.announced) == 1


def test_what_others_are_told_of_an_error_that_ends_a_rank() -> None:
    """Nothing where all ranks have it."""
    told = ConfigError("of a verdict")
    told.told = True
    for error in (told, PeerError("lost"), NonFiniteError("NaN"), on_all_ranks(OSError("full"))):
        assert world._reason(error) is None, error
    assert world._reason(ConfigError("mine")) == "ConfigError: mine" and world._reason(OSError("no")) == "OSError: no"


def test_the_number_of_an_error_comes_with_it() -> None:
    """Whoever saves again after a full disk asks for it."""
    said = ["CheckpointError", "x cannot be written", errno.ENOSPC]
    with pytest.raises(CheckpointError, match="^rank 0: x cannot be written$") as caught:
        agree.all_or_none(Link(1, said), lambda: None)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC


def test_values_that_differ() -> None:
    agree.check_same(Link(0, {"a": 1}), {"a": 1}, "")
    text = "distributed: option b must be the same on every rank, got None on rank 0 and 2 on rank 1"
    assert raised(ConfigError, lambda: agree.check_same(Link(0, {"a": 1, "b": 2}), {"a": 1}, "option ")) == text


def test_a_reduction_has_the_dtype_of_its_tensor() -> None:
    for dtype in (xt.bfloat16, xt.float32, xt.float64, xt.int64):
        assert all(distributed.all_reduce(xt.ones(2, dtype=dtype), op).dtype is dtype for op in ("sum", "max", "min"))
        assert distributed.reduce_scatter(xt.ones(2, dtype=dtype)).dtype is dtype
