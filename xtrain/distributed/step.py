"""A training step over several processes, with the same bits for every number of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from .. import _C
from .._C import Tensor
from ..autograd import no_grad
from ..errors import ConfigError
from ..nn.module import Module
from ..optim import AdamW
from . import world
from .bank import Bank, Counter, Segment, add
from .compare import checksums, odd_ones

_FILLS = 1 << 20  # random streams of a leaf: more draws than a forward makes


def legal_sizes(leaves: int) -> list[int]:
    """Numbers of processes that `leaves` can be cut for: 1, and those that leave each a power of two."""
    return [size for size in range(1, leaves + 1) if not leaves % size and (size == 1 or _is_power(leaves // size))]


def _is_power(count: int) -> bool:
    return count & (count - 1) == 0


def check_leaves(leaves: int, size: int) -> None:
    """ConfigError where `leaves` cannot be cut for `size` processes."""
    if size not in legal_sizes(leaves):
        *most, last = map(str, legal_sizes(leaves))
        known = f"{', '.join(most)} or {last}" if most else last
        raise ConfigError(f"max_ranks {leaves} must run on {known} processes, got {size}")


class _Owned:
    """The piece of a bank that this rank owns, with its share of the optimizer's state.

    values: of a 16-bit dtype the float32 masters, which are the truth; else a copy of the parameters, read each step.
    """

    def __init__(self, bank: Bank, rank: int, size: int) -> None:
        self.bank = bank
        self.count = bank.length // size
        self.begin = rank * self.count
        self.segments: list[Segment] = bank.segments(self.begin, self.begin + self.count)
        self.has_masters = bank.dtype in (_C.bfloat16, _C.float16)
        self.values = self.mine(bank.read(bank.wide)).clone()
        self.exp_avg, self.exp_avg_sq = (bank.empty(bank.wide, self.count) for _ in range(2))
        self.steps = [0] * len(bank.parameters)
        self.counts = [_C.full((), 0, _C.int64, bank.device) for _ in self.segments]

    def mine(self, flat: Tensor) -> Tensor:
        return flat[self.begin : self.begin + self.count]

    def kept(self) -> dict[str, Tensor]:
        """The tensors of the state."""
        kept = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {**kept, "master": self.values} if self.has_masters else kept


class DataParallel:
    """A model that all processes train together, with the optimizer's state spread over them (ZeRO-1).

        dp = xt.distributed.DataParallel(model, optimizer, max_ranks=4)
        for leaf in dp.leaves((ids, targets)):
            (model.loss(*leaf, reduction="sum") / targets.numel()).backward()
        norm = dp.step(clip=1.0)

    A batch is cut into `max_ranks` leaves (default: the number of processes), whose gradients are added in one fixed
    tree. So the parameters have the same bits on 1, 2 or 4 processes of max_ranks=4. All ranks begin with rank 0's
    parameters. optimizer: AdamW; its learning rates and other options may change between steps, and `step` is this
    class's. ConfigError for a number of processes that does not fit, TypeError or ValueError for other arguments.
    """

    @no_grad()
    def __init__(self, model: Module, optimizer: AdamW, max_ranks: int | None = None, mode: str = "exact") -> None:
        if not isinstance(model, Module):
            raise TypeError(f"DataParallel: model must be a Module, got {type(model).__name__}")
        if type(optimizer) is not AdamW:
            raise TypeError(f"DataParallel: optimizer must be AdamW, got {type(optimizer).__name__}")
        if mode != "exact":
            raise ValueError(f"DataParallel: mode must be exact, got {mode!r}")
        if max_ranks is not None and (isinstance(max_ranks, bool) or not isinstance(max_ranks, int) or max_ranks < 1):
            raise ValueError(f"DataParallel: max_ranks must be a whole number of at least 1, got {max_ranks!r}")
        self._plane = world.plane("DataParallel")
        self.rank, self.size = world.rank(), world.world_size()
        self.max_ranks = max_ranks or self.size
        check_leaves(self.max_ranks, self.size)
        self.model, self.optimizer = model, optimizer
        self._group = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        by_kind: dict[Any, list[Tensor]] = {}
        for parameter in model.parameters():
            if id(parameter) in self._group:
                by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        if sum(map(len, by_kind.values())) != len(self._group):
            raise ValueError("DataParallel: optimizer must have parameters of the model alone, got others")
        self._banks = [Bank(parameters, self.max_ranks) for parameters in by_kind.values()]
        for bank in self._banks:
            if self._plane is not None:
                flat = bank.read(bank.dtype)
                bank.write(self._from_bytes(self._plane.broadcast(self._bytes(flat), 0, "parameters"), flat))
        self._owned = [_Owned(bank, self.rank, self.size) for bank in self._banks]
        self._counters: list[Counter] = []
        self._done = 0  # leaves of this step
        self._sums: list[Tensor] = []
        self.steps = 0  # that this run has made
        self._compared: list[tuple[str, Tensor]] = []
        if self._plane is not None:
            places = {id(p): f"bank {bank.dtype.name}" for bank in self._banks for p in bank.parameters}
            self._compared = [
                (f"{places.get(id(p), 'not trained')}, tensor {name}", p) for name, p in model.named_parameters()
            ]
        self.take_states()

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def leaves(self, batch: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield this rank's leaves of a batch: rows of tensors or arrays whose first dimension is a multiple of
        max_ranks, the same on every rank. Between two leaves, the gradients of the parameters are taken away.

        Random numbers drawn inside depend on the leaf, not on the rank that computes it.
        """
        parts = tuple(batch)
        rows = {len(part) for part in parts}
        if len(rows) != 1 or next(iter(rows)) % self.max_ranks:
            raise ValueError(
                f"leaves: every tensor of batch must have one number of rows, a multiple of max_ranks "
                f"({self.max_ranks}), got {', '.join(map(str, sorted(rows))) or 'no tensors'}"
            )
        each, mine = next(iter(rows)) // self.max_ranks, self.max_ranks // self.size
        world.at_step(self.steps + 1)
        if not self.steps % world.steps_between_comparisons():
            self.compare_parameters()
        self._counters, self._done = [Counter(bank) for bank in self._banks], 0
        self.optimizer.zero_grad()
        seed, stream = _C.get_rng_state()
        for leaf in range(self.rank * mine, (self.rank + 1) * mine):
            _C.set_rng_state((seed, (stream + leaf * _FILLS) % 2**64))
            yield tuple(part[leaf * each : (leaf + 1) * each] for part in parts)
            with no_grad():
                for counter, bank in zip(self._counters, self._banks, strict=True):
                    counter.push(bank.take_gradients())
            self._done += 1
        _C.set_rng_state((seed, (stream + self.max_ranks * _FILLS) % 2**64))

    @no_grad()
    def reduce(self) -> float:
        """Add the leaves' gradients of all ranks and return their norm; then call `update`, or begin a new step."""
        if self._done != self.max_ranks // self.size:
            raise RuntimeError(f"step: leaves() must have come to its end, got {self._done} leaves")
        squares: list[float] = []
        self._sums = []
        for counter, owned in zip(self._counters, self._owned, strict=True):
            bank, flat = owned.bank, counter.finish()
            if self._plane is None:
                parts = [flat]
            else:
                pieces = [self._bytes(flat[i * owned.count : (i + 1) * owned.count]) for i in range(self.size)]
                parts = [
                    self._from_bytes(data, flat, owned.count)
                    for data in self._plane.all_to_all(pieces, f"gradients {flat.dtype.name} {flat.numel()}")
                ]
            blocks = bank.empty(_C.float64, owned.count // 8192)
            self._sums.append(add(parts, bank, blocks))
            squares += self._all(blocks, "squares").tolist()
        self._counters, self._done = [], 0
        total = 0.0
        for value in squares:  # in the order of blocks, whatever rank they come from
            total += value
        return math.sqrt(total)

    @no_grad()
    def update(self, norm: float, clip: float | None = None) -> None:
        """Let the optimizer take the step of the gradients that `reduce` has added, and give every rank the parameters.
        clip: the largest norm; None for no clipping.
        """
        if not self._sums:
            raise RuntimeError("update: reduce() must come before, got no gradients")
        coefficient = 1.0 if not clip else min(1.0, clip / (norm + 1e-6))
        sums, self._sums = self._sums, []
        for owned, gradient in zip(self._owned, sums, strict=True):
            if coefficient != 1.0:
                gradient.mul_(coefficient)
            if not owned.has_masters:
                owned.values.copy_(owned.mine(owned.bank.read(owned.bank.wide)))
            self._adamw(owned, gradient)
            owned.steps = [count + 1 for count in owned.steps]
            owned.bank.write(self._all(owned.values.to(owned.bank.dtype), "parameters"))
        self.steps += 1

    def compare_parameters(self) -> None:
        """PeerError on every rank where one has other parameters, trained or not, than the others. Every rank must
        call it; `leaves` does so every 100 steps, and `whole_optimizer`.
        """
        if self._plane is not None:
            tensors = [tensor for _, tensor in self._compared]
            found = [bytes(one) for one in self._plane.all_gather(checksums(tensors), "checksums of parameters")]
            odd = odd_ones(found, [name for name, _ in self._compared], f"after step {self.steps}")
            if odd is not None:
                raise world.diverged(*odd)

    def step(self, clip: float | None = None) -> float:
        """Add the gradients of all leaves and update the parameters of every rank; return the norm before clipping.
        A norm that is NaN or infinite changes nothing, on all ranks.
        """
        if clip is not None and not clip > 0:
            raise ValueError(f"step: clip must be a number greater than 0, or None, got {clip!r}")
        norm = self.reduce()
        if math.isfinite(norm):
            self.update(norm, clip)
        else:
            self._sums = []
        return norm

    def _adamw(self, owned: _Owned, gradient: Tensor) -> None:
        bank = owned.bank
        order = sorted(
            range(len(owned.segments)), key=lambda i: self._group[id(bank.parameters[owned.segments[i].parameter])]
        )
        lists: list[list[Tensor]] = [[], [], [], []]
        counts: list[Tensor] = []
        rates: list[Tensor] = []
        rows: list[list[float]] = []
        before = -1
        for i in order:
            segment = owned.segments[i]
            number = self._group[id(bank.parameters[segment.parameter])]
            if number != before:
                group = self.optimizer.param_groups[number]
                rows.append([0, *group["betas"], group["eps"], group["weight_decay"]])
                rates.append(_C.full((), float(group["lr"]), _C.float64, bank.device))
                before = number
            rows[-1][0] += 1
            for to, flat in zip(lists, (owned.values, gradient, owned.exp_avg, owned.exp_avg_sq), strict=True):
                to.append(flat[segment.begin : segment.end])
            counts.append(owned.counts[i])
        if order:
            values, gradients, firsts, seconds = lists
            table = _C.tensor(rows, _C.float64, _C.device("cpu"))
            _C.adamw_(values, gradients, firsts, seconds, [], counts, rates, table)

    # ---- numbers, and bytes of tensors -------------------------------------------------------------------------------

    def tree_of(self, values: Sequence[Tensor]) -> Tensor:
        """T of one float32 scalar for each leaf, this rank's given; on every rank."""
        mine = _C.cat([value.detach().reshape(1).float() for value in values])
        flat = self._all(mine, "losses")
        return world.tree_sum([flat.select(0, i) for i in range(flat.numel())])

    def _all(self, piece: Tensor, what: str) -> Tensor:
        """The pieces of all ranks, one after the other."""
        if self._plane is None:
            return piece
        parts = self._plane.all_gather(self._bytes(piece), f"{what} {piece.dtype.name} {piece.numel()}")
        return self._from_bytes(b"".join(parts), piece, piece.numel() * self.size)

    @staticmethod
    def _bytes(flat: Tensor) -> Any:
        return _C.to_bytes(flat.cpu().contiguous())

    @staticmethod
    def _from_bytes(data: Any, like: Tensor, count: int | None = None) -> Tensor:
        return _C.from_bytes(data, like.dtype, (like.numel() if count is None else count,)).to(like.device)

    # ---- the optimizer's state ---------------------------------------------------------------------------------------

    @no_grad()
    def take_states(self) -> None:
        """Take what optimizer.state holds, the same on every rank, as after load_state_dict; it is empty then."""
        states = self.optimizer.state
        for owned in self._owned:
            bank = owned.bank
            owned.values.copy_(owned.mine(bank.read(bank.wide)))
            flats = {name: bank.empty(bank.wide) for name in owned.kept()}
            if owned.has_masters:
                flats["master"] = bank.read(bank.wide)
            for number, parameter in enumerate(bank.parameters):
                state = states.get(parameter)
                if state is None:
                    continue
                owned.steps[number] = int(state["step"])
                at = bank.offsets[number]
                for name, flat in flats.items():
                    flat[at : at + parameter.numel()].copy_(state[name].reshape(-1))
            if any(owned.steps):
                for name, kept in owned.kept().items():
                    kept.copy_(owned.mine(flats[name]))
            for segment, count in zip(owned.segments, owned.counts, strict=True):
                count.fill_(owned.steps[segment.parameter])
        states.clear()

    @contextlib.contextmanager
    def whole_optimizer(self, compare: bool = True) -> Iterator[None]:
        """A `with` block in which optimizer.state of rank 0 is whole, as one process has it: for saving. Every rank
        must come. compare: whether parameters that differ between ranks are an error (see compare_parameters).
        """
        with world.phase("saving"):
            yield from self._whole_optimizer(compare)

    def _whole_optimizer(self, compare: bool) -> Iterator[None]:
        if compare:
            self.compare_parameters()
        with no_grad():
            for owned in self._owned:
                flats = {name: self._all(kept, name) for name, kept in owned.kept().items()}
                if self.rank:
                    continue
                for number, parameter in enumerate(owned.bank.parameters):
                    if owned.steps[number]:
                        at, end = owned.bank.offsets[number], owned.bank.offsets[number] + parameter.numel()
                        kept = {name: flat[at:end].reshape(parameter.shape) for name, flat in flats.items()}
                        self.optimizer.state[parameter] = {"step": owned.steps[number], **kept}
        try:
            yield
        finally:
            self.optimizer.state.clear()
