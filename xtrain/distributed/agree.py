"""Agreement of ranks: JSON values that all exchange or compare, and errors that all raise.

`link` is the plane that moves bytes between the ranks (host.py); None in one process, which agrees with itself. Every
rank must call these functions, in the same order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .. import _C
from ..errors import ConfigError, PeerError, shown

if TYPE_CHECKING:
    from .host import HostPlane


def gather_json(link: HostPlane | None, value: Any, name: str = "json") -> list[Any]:
    """Return the list of every rank's `value`, in the order of ranks. TypeError for what JSON cannot hold. name: of the
    exchange; where ranks gather values of different kinds, different names show it.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"gather_json: value must be what JSON can hold, got {type(value).__name__}: {error}") from None
    if link is None:
        return [json.loads(text)]
    return [json.loads(bytes(part)) for part in link.all_gather(text.encode(), name)]


def check_same(link: HostPlane | None, values: Mapping[str, Any], what: str) -> None:
    """ConfigError on every rank when one of the JSON values differs between ranks. what: a text before its name."""
    everyone: list[dict[str, Any]] = gather_json(link, dict(values), "values to compare")
    for key in sorted({key for one in everyone for key in one}):
        first = everyone[0].get(key)
        others = [number for number, one in enumerate(everyone) if one.get(key) != first]
        if others:
            raise on_all_ranks(
                ConfigError(
                    f"distributed: {what}{key} must be the same on every rank, got {shown(first, 200)} on rank 0 and "
                    f"{shown(everyone[others[0]].get(key), 200)} on rank{'s' * (len(others) > 1)} "
                    f"{', '.join(map(str, others[:8]))}"
                )
            )


def together(link: HostPlane | None, make: Callable[[], Any]) -> Any:
    """Call `make` on rank 0 alone and return its result, JSON values, on every rank. An Exception of it is raised on
    every rank.
    """
    result: Any = None
    failure: Exception | None = None
    first = link is None or link.rank == 0
    if first:
        try:
            result = {"value": make()}
        except Exception as error:
            failure = error
            result = {"error": type(error).__name__, "text": str(error)}
    if link is not None:
        result = json.loads(bytes(link.broadcast(json.dumps(result).encode() if first else None, 0, "together")))
    if failure is not None:
        raise on_all_ranks(failure)
    if "error" in result:
        raise on_all_ranks(_same_kind(result["error"], result["text"], 0, ""))
    return result["value"]


def all_or_none(link: HostPlane | None, act: Callable[[], Any]) -> None:
    """Call `act` on every rank. If it fails on one, that rank raises its error, and all others raise one of the same
    type and text, with the errno of its cause. `act` must not exchange anything with other ranks. Where it does so on
    some while it fails on another with a ConfigError, all raise one with that text.
    """
    failure: Exception | None = None
    mine: list[Any] | None = None
    try:
        act()
    except Exception as error:
        failure, mine = error, [type(error).__name__, str(error), getattr(error.__cause__, "errno", None)]
    if link is not None and isinstance(failure, ConfigError):
        link.announce(str(failure))
    try:
        said = gather_json(link, mine, "errors")
    except (ConfigError, PeerError) as ended:
        if not isinstance(failure, ConfigError):
            raise
        failure.told = isinstance(ended, ConfigError)  # a verdict, of this error
        raise on_all_ranks(failure) from None
    if failure is not None:
        raise on_all_ranks(failure)
    for number, one in enumerate(said):
        if one is not None:
            cause = None if one[2] is None else OSError(one[2], os.strerror(one[2]))
            raise on_all_ranks(_same_kind(one[0], one[1], number, f"rank {number}: ")) from cause


def on_all_ranks(error: Exception) -> Exception:
    """Mark an error that all ranks raise, so that no rank reports it to the others."""
    vars(error)["on_all_ranks"] = True
    return error


def _same_kind(kind: str, text: str, rank: int, before: str) -> Exception:
    """The error of another rank: of the same type where it is one of xtrain's, else a PeerError."""
    from .. import errors

    known = _C.OutOfMemoryError if kind == "OutOfMemoryError" else getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        return known(before + text)
    return PeerError(f"distributed: rank {rank} failed: {kind}: {text}")
