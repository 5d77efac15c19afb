"""The processes of a run. Rank 0 alone chooses the run's directory and writes to it; it tells the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ... import _C
from ...distributed.env import ALONE, Launch, detect


class Team:
    """This process among those of its run. rank, size: 0 and 1 for one alone, which calls no other.

    Methods of a team of several are exchanges: every rank must call them, in the same order.
    """

    def __init__(self, launch: Launch = ALONE) -> None:
        self.launch = launch
        self.rank, self.size = launch.rank, launch.world_size

    @classmethod
    def join(cls) -> Team:
        """The team that the launcher (torchrun, mpirun, ...) has started, once all processes are there."""
        launch = detect()
        team = cls(launch)
        if launch.world_size > 1:
            team._world.init()
        return team

    @property
    def _world(self) -> Any:
        from ...distributed import world

        return world

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def leave(self, error: BaseException) -> None:
        """Tell the others which error ends this process."""
        if self.size > 1:
            self._world.leave(error)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A `with` block in which this process is loading, evaluating or saving: the others wait for it longer."""
        return nullcontext() if self.size == 1 else self._world.phase(name)

    def wait_at_most(self, seconds: float | None) -> None:
        """Set the seconds that the others wait for one that computes; None leaves them as they are."""
        if self.size > 1 and seconds is not None:
            self._world.set_timeout(seconds)

    def check_same(self, values: Mapping[str, Any], what: str) -> None:
        """ConfigError on every rank when one of the JSON values differs."""
        if self.size > 1:
            self._world.check_same(values, what)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Call `make` on rank 0 alone and return its result, JSON values, on every rank. Its error is raised on all."""
        return make() if self.size == 1 else self._world.together(make)

    def on_first(self, act: Callable[[], Any]) -> None:
        """Call `act` on rank 0 alone. Its error is raised on all."""
        if self.size == 1:
            act()
        else:
            self._world.all_or_none(act if self.first else lambda: None)

    def on_all(self, act: Callable[[], Any]) -> None:
        """Call `act` on every rank. An error of one is raised on all, so `act` must make no exchange of its own."""
        if self.size == 1:
            act()
        else:
            self._world.all_or_none(act)

    def agree(self, stop: str | None) -> str | None:
        """The reason to stop of the lowest rank that has one, or None. stop: this rank's."""
        return next((one for one in self._world.gather_json(stop, "reasons to stop") if one), None)

    def gather(self, value: Any, what: str) -> list[Any]:
        """The JSON value of every rank, in their order. what: names the exchange, the same on every rank."""
        return [value] if self.size == 1 else self._world.gather_json(value, what)

    def device(self, resolve: Callable[[], str]) -> str:
        """The device that `resolve` names; of several ranks that compute on "cuda", each has a GPU of its own."""
        return resolve() if self.size == 1 else self._world.choose_gpu(resolve)

    def share_processors(self) -> None:
        """Give every rank of this host the same number of threads. Launchers set one thread for each rank, or let each
        use all processors.
        """
        if self.size > 1:
            allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            _C.set_num_threads(max(1, allowed // self.launch.local_world_size))
