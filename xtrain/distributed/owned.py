"""What one rank owns of a bank: its piece of the parameters and of the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _C
from .._C import Tensor
from .bank import Bank, Segment


class Owned:
    """The piece of a bank that this rank owns, with its share of the optimizer's state.

    values: of a 16-bit dtype the float32 masters, which are the truth; else a copy of the parameters, read each step,
    or None where the optimizer changes the parameters themselves: AdamW of one process.
    names: of the optimizer's tensors. For each segment, `targets` has what the optimizer changes, `masters` its
    master if it has any, `states` its piece of each of the optimizer's tensors.
    """

    def __init__(self, bank: Bank, rank: int, size: int, names: Sequence[str]) -> None:
        self.bank = bank
        self.count = bank.length // size
        self.begin = rank * self.count
        self.segments: list[Segment] = bank.segments(self.begin, self.begin + self.count)
        self.has_masters = bank.dtype in (_C.bfloat16, _C.float16)
        self.of_muon = "momentum_buffer" in names
        self.direct = size == 1 and not self.of_muon
        needed = self.has_masters or not self.direct
        self.values = self.mine(bank.read(bank.wide)).clone() if needed else None
        self.moments = {name: bank.empty(bank.wide, self.count) for name in names}
        self.average: Tensor | None = None  # with an EMA
        self.updates = _C.full((), 0, _C.int64, bank.device)  # of it
        self.steps = [0] * len(bank.parameters)
        self.counts = [_C.full((), 0, _C.int64, bank.device) for _ in self.segments]
        self.states = [self.cut(flat) for flat in self.moments.values()]
        self.targets: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.rounded: Tensor | None = None  # the piece of 16-bit parameters, on several processes
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
        assert self.values is not None
        return self.values

    def mine(self, flat: Tensor) -> Tensor:
        return flat[self.begin : self.begin + self.count]

    def cut(self, flat: Tensor) -> list[Tensor]:
        """What of a flat tensor belongs to each segment; of one that is a parameter or matrix, in its shape."""
        found = [flat[segment.begin : segment.end] for segment in self.segments]
        if self.direct or self.of_muon:
            shapes = (self.bank.parameters[segment.parameter].shape for segment in self.segments)
            found = [piece.reshape(shape) for piece, shape in zip(found, shapes, strict=True)]
        return found

    def part(self, segment: Segment, whole: Tensor) -> Tensor:
        """What of a parameter's tensor lies in a segment of it, flat."""
        begin = self.begin + segment.begin - self.bank.offsets[segment.parameter]
        return whole.reshape(-1)[begin : begin + segment.end - segment.begin]

    def read(self) -> None:
        """Take the values that parameters have now. Of a parameter with a master only before its first step, which
        makes the master, as the optimizer's own step does.
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
        """The true values of each segment."""
        return self.masters or self.targets

    def kept(self) -> dict[str, Tensor]:
        """The tensors of the state."""
        return {**self.moments, "master": self.truth} if self.has_masters else self.moments
