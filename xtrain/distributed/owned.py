"""The part of a bank that one rank owns: its piece of the parameters and of the optimizer's state (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from .. import _C
from .._C import Tensor
from ..optim.optimizer import HAVE_MASTERS
from .bank import Bank, Segment


class Owned:
    """The piece of a bank that this rank owns, with its part of the optimizer's state. All tensors are flat, [count].

    names: of the optimizer's tensors for a parameter, such as ("exp_avg", "exp_avg_sq").

    begin, count: the piece is elements [begin, begin + count) of the bank.
    segments: the parameters, or parts of parameters, that lie in it.
    values: the piece in the wide dtype. For 16-bit parameters these are the float32 masters, which keep the exact
        values; for others a copy of the parameters, read before each step. None where the optimizer changes the
        parameters themselves (`direct`: AdamW in one process, without masters).
    moments: {name: the piece of that tensor of the optimizer}.
    average, updates: with an EMA, the piece of its average and how many updates it has had (int64, on the device).
    steps, counts: AdamW's steps of each parameter of the bank, on the host, and of each segment, on the device.
    targets, masters, states: for each segment, the tensor that the optimizer changes, the master if there is one, and
        its part of each of `moments`: lists as `_C.adamw_` takes them.
    rounded: the piece of 16-bit parameters, on several processes.
    """

    def __init__(self, bank: Bank, rank: int, size: int, names: Sequence[str]) -> None:
        self.bank = bank
        self.count = bank.length // size
        self.begin = rank * self.count
        self.segments: list[Segment] = bank.segments(self.begin, self.begin + self.count)
        self.has_masters = bank.dtype in HAVE_MASTERS
        self.of_muon = "momentum_buffer" in names
        self.direct = size == 1 and not self.of_muon
        needed = self.has_masters or not self.direct
        self.values = self.mine(bank.read(bank.wide)).clone() if needed else None
        self.moments = {name: bank.empty(bank.wide, self.count) for name in names}
        self.average: Tensor | None = None
        self.updates = _C.full((), 0, _C.int64, bank.device)
        self.steps = [0] * len(bank.parameters)
        self.counts = [_C.full((), 0, _C.int64, bank.device) for _ in self.segments]
        self.states = [self.cut(flat) for flat in self.moments.values()]
        self.targets: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.rounded: Tensor | None = None
        if self.of_muon:
            self.targets = self.cut(self.truth)
        elif self.direct:
            self.targets = [bank.parameters[segment.parameter] for segment in self.segments]
        elif self.has_masters:
            self.rounded = bank.empty(bank.dtype, self.count)
            self.targets = self.cut(self.rounded)
        else:
            self.targets = self.cut(self.truth)
        if self.has_masters and not self.of_muon:
            self.masters = self.cut(self.truth)

    @property
    def truth(self) -> Tensor:
        """`values`, where they exist."""
        assert self.values is not None
        return self.values

    def mine(self, flat: Tensor) -> Tensor:
        """This rank's piece of a flat tensor of the bank's length, as a view."""
        return flat[self.begin : self.begin + self.count]

    def cut(self, flat: Tensor) -> list[Tensor]:
        """A view of each segment of the flat piece [count]; in the parameter's shape where segments are whole
        parameters (one process, or Muon).
        """
        found = [flat[segment.begin : segment.end] for segment in self.segments]
        if self.direct or self.of_muon:
            shapes = (self.bank.parameters[segment.parameter].shape for segment in self.segments)
            found = [piece.reshape(shape) for piece, shape in zip(found, shapes, strict=True)]
        return found

    def part(self, segment: Segment, whole: Tensor) -> Tensor:
        """The elements of `whole`, a tensor of the parameter's shape, that lie in a segment, flat."""
        begin = self.begin + segment.begin - self.bank.offsets[segment.parameter]
        return whole.reshape(-1)[begin : begin + segment.end - segment.begin]

    def read(self) -> None:
        """Copy the present values of the parameters to `values`. A parameter with a master is read only before its
        first step, as the optimizer makes masters in the first step.
        """
        if self.values is None:
            return
        if not self.has_masters or not any(self.steps):
            self.values.copy_(self.mine(self.bank.read(self.bank.wide)))
            return
        for segment in self.segments:
            if not self.steps[segment.parameter]:
                own = self.part(segment, self.bank.parameters[segment.parameter].detach())
                self.values[segment.begin : segment.end].copy_(own)

    def now(self) -> list[Tensor]:
        """The values of each segment in the wide dtype."""
        return self.masters or self.targets

    def kept(self) -> dict[str, Tensor]:
        """The pieces of the state that a checkpoint keeps, by name."""
        return {**self.moments, "master": self.truth} if self.has_masters else self.moments

    # ---- whole states: from and to optimizer.state -------------------------------------------------------------------

    def load_states(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take this rank's piece of the states of whole parameters; a parameter without a state starts from zeros."""
        bank = self.bank
        flats = {name: bank.empty(bank.wide) for name in self.kept()}
        if self.has_masters:
            flats["master"] = bank.read(bank.wide)
        for number, parameter in enumerate(bank.parameters):
            state = states.get(parameter)
            self.steps[number] = 0 if state is None else int(state.get("step", 1))  # Muon counts no steps
            if state is None:
                continue
            at = bank.offsets[number]
            for name, flat in flats.items():
                flat[at : at + parameter.numel()].copy_(state[name].reshape(-1))
        for name, kept in self.kept().items():
            kept.copy_(self.mine(flats[name]))
        for segment, count in zip(self.segments, self.counts, strict=True):
            count.fill_(self.steps[segment.parameter])

    def load_averages(self, averages: Mapping[Tensor, Tensor], updates: int) -> None:
        """Take this rank's piece of the averages of whole parameters, which have had so many updates."""
        flat = self.bank.empty(self.bank.wide)
        for place, parameter in zip(self.bank.places(flat), self.bank.parameters, strict=True):
            place.copy_(averages[parameter].reshape(-1))
        self.average = self.mine(flat).clone()
        self.updates.fill_(updates)

    def gather_states(
        self, gather: Callable[[Tensor, str], Tensor], states: MutableMapping[Tensor, dict[str, Any]] | None
    ) -> None:
        """Put the whole states of the parameters that have had a step into `states`; None on ranks that only send.
        gather: the exchange (piece, its name) -> the pieces of all ranks, [length]. Every rank must call this.
        """
        flats = {name: gather(kept, name) for name, kept in self.kept().items()}
        if states is None:
            return
        for number, parameter in enumerate(self.bank.parameters):
            if self.steps[number]:
                at, end = self.bank.offsets[number], self.bank.offsets[number] + parameter.numel()
                kept = {name: flat[at:end].reshape(parameter.shape) for name, flat in flats.items()}
                counted = {} if "momentum_buffer" in kept else {"step": self.steps[number]}
                states[parameter] = {**counted, **kept}

    def gather_averages(
        self, gather: Callable[[Tensor, str], Tensor], averages: MutableMapping[Tensor, Tensor] | None
    ) -> None:
        """Put the whole averages of the parameters into `averages`; see gather_states."""
        assert self.average is not None
        flat = gather(self.average, "averages")
        if averages is not None:
            for place, parameter in zip(self.bank.places(flat), self.bank.parameters, strict=True):
                averages[parameter] = place.reshape(parameter.shape)
