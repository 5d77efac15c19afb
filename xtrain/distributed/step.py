"""A training step over several processes, with the same bits for every number of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeGuard, TypeVar

from .. import _C
from .._C import Tensor
from .._graph import capturing
from .._types import is_real, is_whole, need_tensors
from ..autograd import no_grad
from ..errors import shown
from ..nn.module import Module
from ..optim import EMA, AdamW, ChainedOptimizer, Muon, Optimizer
from ..optim.muon import muon_numbers
from . import world
from .agree import gather_json
from .bank import BLOCK, Bank, Counter, add, buckets, check_leaves
from .compare import check_alike, checksums, odd_ones
from .owned import Owned

_MOST_LEAVES = 1 << 20
_FILLS = 1 << 20  # numbers of random streams that a leaf has for itself: a forward draws from fewer
_K = TypeVar("_K")
_R = TypeVar("_R")


def _is_number(value: object) -> TypeGuard[float]:
    return is_real(value) and not isinstance(value, bool)


def _check_arguments(model: Any, parts: Sequence[Any], max_ranks: Any, mode: Any, ema: Any, overlap: Any) -> None:
    """TypeError or ValueError for arguments of DataParallel; parts: its optimizers."""
    if not isinstance(model, Module):
        raise TypeError(f"DataParallel: model must be a Module, got {type(model).__name__}")
    for part in parts:
        if type(part) not in (AdamW, Muon):
            raise TypeError(f"DataParallel: optimizer must be AdamW or Muon, got {type(part).__name__}")
    if mode != "exact":
        raise ValueError(f"DataParallel: mode must be exact, got {mode!r}")
    if max_ranks is not None and not (is_whole(max_ranks) and 1 <= max_ranks <= _MOST_LEAVES):
        raise ValueError(f"DataParallel: max_ranks must be a whole number in [1, 2**20], got {max_ranks!r}")
    if ema is not None and not isinstance(ema, EMA):
        raise TypeError(f"DataParallel: ema must be an EMA or None, got {type(ema).__name__}")
    if overlap is not None and not isinstance(overlap, bool):
        raise TypeError(f"DataParallel: overlap must be True, False or None, got {overlap!r}")


class DataParallel:
    """A model that all processes train together, with the optimizer's state spread over them (ZeRO-1).

        dp = xt.distributed.DataParallel(model, optimizer, max_ranks=4)
        for leaf in dp.leaves((ids, targets)):
            (model.loss(*leaf, reduction="sum") / targets.numel()).backward()
        norm = dp.step(clip=1.0)

    A batch is cut into `max_ranks` leaves (default: the number of processes), equal parts in the order of its rows, as
    the micro-batches of other libraries. The gradients of leaves are added in one fixed tree. So the parameters have
    the same bits on 1, 2 or 4 processes of max_ranks=4.

    All ranks begin with rank 0's values of the optimizer's parameters; model, options and all other parameters must be
    the same on every rank. A parameter that needs no gradient when the leaves of a step begin is left alone in that
    step; one that needs a gradient and gets none is stepped with zeros.

    optimizer: AdamW, Muon, or a ChainedOptimizer of them. Learning rates and other options may change between steps;
    call `step` of this class, not the optimizer's. Each matrix of Muon's lies whole on one rank, which makes it
    orthogonal.
    ema: averages of the optimizer's parameters. `step` updates them, each rank its piece.
    overlap: whether GPUs send the gradients that are complete while a backward still makes others, where `leaves` knows
    which backward is the last. The numbers are the same. None: only where ranks lie on several hosts; over NVLink,
    overlap costs 0.6 B parameters 2 % of a step, and gains smaller models nothing (docs/worklog/ranks.md).
    ConfigError for a number of processes that does not fit, TypeError or ValueError for other arguments.
    """

    @no_grad()
    def __init__(
        self, model: Module, optimizer: AdamW | Muon | ChainedOptimizer, max_ranks: int | None = None,
        mode: str = "exact", ema: EMA | None = None, overlap: bool | None = None,
    ) -> None:  # fmt: skip
        parts = optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
        _check_arguments(model, parts, max_ranks, mode, ema, overlap)
        self._plane = world.plane("DataParallel")
        self.rank, self.size = world.rank(), world.world_size()
        self.max_ranks = max_ranks or self.size
        check_leaves(self.max_ranks, self.size)
        self.model, self.optimizer, self.ema = model, optimizer, ema
        # {id of a parameter: number of its group}; and of each group the optimizer that has it, and its number there.
        self._group = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._place: list[tuple[Any, int]] = [(one, i) for one in parts for i in range(len(one.param_groups))]
        if not self._group:
            raise ValueError("DataParallel: optimizer must have at least one parameter, got none")
        self._banks = self._make_banks(parts)
        wanted = world.local_world_size() < self.size if overlap is None else overlap
        self._own = {"max_ranks": str(self.max_ranks), "overlap": str(wanted)}
        self.also: Callable[[], Mapping[str, str]] = dict  # what else must be the same, with its names in messages
        if self._plane is not None:
            from . import gpus

            check_alike(self._plane, self.model, self.optimizer, self.ema, self._own)
            gpus.join(self._plane, self._banks[0].device)
            for bank in self._banks:
                bank.write(self._plane.broadcast_tensor(bank.read(bank.dtype), 0, "parameters"))
        self._owned = [
            Owned(bank, self.rank, self.size, ("momentum_buffer",) if bank.whole else ("exp_avg", "exp_avg_sq"))
            for bank in self._banks
        ]
        if ema is not None and {id(param) for param in ema.params} != set(self._group):
            raise ValueError("DataParallel: ema must have the parameters of the optimizer, got others")
        gpus = None if self._plane is None else self._plane.gpus
        self._gpus = gpus if gpus is not None and gpus.device == self._banks[0].device else None
        self._overlap = wanted and self._gpus is not None
        # The order in which banks are sent, the same on every rank: the last parameters have their gradients first.
        self._order = sorted(range(len(self._banks)), key=lambda i: (self._banks[i].whole, -i))
        self._leaves = [parameter for bank in self._banks for parameter in bank.parameters]  # leaves of the graph
        self._bank_of = [i for i, bank in enumerate(self._banks) for _ in bank.parameters]
        # While a step's leaves run:
        self._counters: list[Counter] = []  # of each bank
        self._done = 0  # leaves of the batch that are done
        self._missing: list[int] = []  # for each bank, how many gradients of the present leaf are not complete yet
        self._taken = 0  # banks, in the order of `_order`, whose gradients of the present leaf have been taken
        self._sends = False  # whether a bank is sent as soon as it is taken
        self._sent: list[list[Tensor]] = []  # what the banks have received, in the order of `_order`
        self._frozen: set[int] = set()  # ids of parameters that needed no gradient when this step's leaves began
        # From `reduce` to `update`: the gradients of what this rank owns of each bank, flat or a tensor a segment; the
        # factor of clipping, and the guard, which is NaN after a norm that is not finite.
        self._sums: list[Tensor | list[Tensor]] = []
        self._scale = self._guard = _C.full((), 1, _C.float64, self._banks[0].device)
        self.steps = 0  # steps made so far
        self._begun = -1  # the value of `steps` at the last `begin`
        self._compared = self._tensors_to_compare()
        self.take_states()

    def _make_banks(self, parts: Sequence[Optimizer]) -> list[Bank]:
        """The optimizer's parameters in banks of one dtype, device and optimizer (AdamW or Muon); with several leaves,
        AdamW's in banks of about BUCKET elements.
        """
        of_muon = {
            id(p) for part in parts if isinstance(part, Muon) for group in part.param_groups for p in group["params"]
        }
        by_kind: dict[Any, list[Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in self._group:
                if not parameter.is_contiguous():
                    raise ValueError(f"DataParallel: parameter {name} must be contiguous, got strides of a view")
                kind = (parameter.dtype, parameter.device, id(parameter) in of_muon)
                by_kind.setdefault(kind, []).append(parameter)
        if sum(map(len, by_kind.values())) != len(self._group):
            raise ValueError("DataParallel: optimizer must have parameters of the model alone, got others")
        banks: list[Bank] = []
        for (_, _, whole), members in by_kind.items():
            lists = [members] if whole or self.max_ranks == 1 else buckets(members)
            banks += [Bank(each, self.max_ranks, whole) for each in lists]
        return banks

    def _tensors_to_compare(self) -> list[tuple[str, Tensor]]:
        """(What it is called in a message, parameter) for all parameters, trained or not; nothing in one process."""
        if self._plane is None:
            return []
        banks = {id(p): f"bank {bank.dtype.name}" for bank in self._banks for p in bank.parameters}
        return [(f"{banks.get(id(p), 'not trained')}, tensor {name}", p) for name, p in self.model.named_parameters()]

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can hold a step: in one process, or where GPUs exchange bytes by NCCL."""
        return self._plane is None or self._plane.gpus_of(self._scale) is not None

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def leaves(self, batch: Sequence[Any], backwards: int | None = None) -> Iterator[tuple[Any, ...]]:
        """Yield this rank's leaves of a batch. batch: tensors or arrays, the same on every rank, whose first dimension
        is a multiple of max_ranks; a leaf is a tuple of rows of each. After each leaf this takes the gradients of the
        parameters, and sets .grad to None.

        Random numbers drawn inside depend on the leaf, not on the rank that computes it.

        backwards: how often you call backward for each leaf, if you know it. Then gradients are taken inside the last
        backward of a leaf, as they become complete, and GPUs send those of the last leaf at once (see overlap).
        RuntimeError when backward is called more often.
        """
        parts = self.own(batch)
        if capturing() is None:
            self._begin()
        for leaf in self.rounds(backwards):
            yield parts[leaf]

    def own(self, batch: Sequence[Any]) -> list[tuple[Any, ...]]:
        """This rank's leaves of a batch, as `leaves` yields them."""
        several = isinstance(batch, Iterable) and getattr(batch, "ndim", 1) > 0
        parts = tuple(batch) if several else (batch,)
        for part in parts:
            if (
                getattr(part, "ndim", 1) < 1
                or isinstance(part, (str, bytes, Mapping))
                or not hasattr(part, "__getitem__")
            ):
                got = f"{type(batch).__name__} with {type(part).__name__}" if several else type(batch).__name__
                raise TypeError(f"leaves: batch must be several tensors or arrays of at least 1 dim, got {got}")
        rows = {len(part) for part in parts}
        if len(rows) != 1 or next(iter(rows)) % self.max_ranks:
            raise ValueError(
                f"leaves: every tensor of batch must have one number of rows, a multiple of max_ranks "
                f"({self.max_ranks}), got {', '.join(map(str, sorted(rows))) or 'no tensors'}"
            )
        each, mine = next(iter(rows)) // self.max_ranks, self.max_ranks // self.size
        first = self.rank * mine
        return [tuple(part[leaf * each : (leaf + 1) * each] for part in parts) for leaf in range(first, first + mine)]

    def begin(self, steps: int | None = None) -> None:
        """Begin a step: tell the watchdog its number, and compare parameters every 100 steps. `leaves` does so itself;
        call this before each step that uses `rounds`, and before each replay of a captured step. steps: the number of
        steps made so far, if you count them; without it, a replay is counted at the next call.
        """
        if steps is not None:
            self.steps = steps
        elif self._begun == self.steps:  # nothing was called since: the step was a replay
            self.steps += 1
        self._begun = self.steps
        self._begin()

    def _begin(self) -> None:
        world.at_step(self.steps + 1)
        if not self.steps % world.steps_between_comparisons():
            self.compare_parameters()

    def rounds(self, backwards: int | None = None) -> Iterator[int]:
        """Yield the number of each of this rank's leaves, from 0, and take its gradients: `leaves` without a batch."""
        if backwards is not None and not (is_whole(backwards) and 1 <= backwards < 2**31):
            raise ValueError(f"leaves: backwards must be a whole number in [1, 2**31), or None, got {backwards!r}")
        mine = self.max_ranks // self.size
        self._counters, self._done, self._sent = [Counter(bank, mine) for bank in self._banks], 0, []
        self.optimizer.zero_grad()
        self._frozen = {id(parameter) for parameter in self._leaves if not parameter.requires_grad}
        begun = seed, stream = _C.get_rng_state()
        for number in range(mine):
            _C.set_rng_state(self.random_state(begun, number))
            self._taken, self._sends = 0, self._overlap and number == mine - 1 and backwards is not None
            if backwards is not None:
                self._missing = [len(bank.parameters) for bank in self._banks]
                _C.on_ready(self._leaves, self._ready, backwards - 1)
            try:
                yield number
            finally:
                if backwards is not None:
                    _C.on_ready([], self._ready)
            self._take_rest()
            self._done += 1
        _C.set_rng_state((seed, (stream + self.max_ranks * _FILLS) % 2**64))

    def random_state(self, begun: tuple[int, int], number: int) -> tuple[int, int]:
        """The random state (seed, stream) of this rank's leaf `number`, from 0, in a step that began with `begun`."""
        leaf = self.rank * (self.max_ranks // self.size) + number
        return begun[0], (begun[1] + leaf * _FILLS) % 2**64

    def _ready(self, leaf: int) -> None:
        """Called inside the last backward when the gradient of `self._leaves[leaf]` is complete: take the banks that
        have all of theirs, in the order of `_order`.
        """
        self._missing[self._bank_of[leaf]] -= 1
        while self._taken < len(self._order) and not self._missing[self._order[self._taken]]:
            self._take()

    @no_grad()
    def _take(self) -> None:
        """Take the present leaf's gradients of the next bank in `_order`, and send the bank if `_sends`."""
        if self._sends:
            self._send()
        else:
            number = self._order[self._taken]
            self._counters[number].push(self._banks[number].take_gradients())
        self._taken += 1

    def _send(self) -> None:
        """Take the last gradients of the next bank, and start the exchange of its sum over this rank's leaves."""
        assert self._plane is not None
        number = self._order[len(self._sent)]
        self._counters[number].push(self._banks[number].take_gradients())
        self._sent.append(self._plane.start_all_to_all(self._counters[number].packed(), "gradients"))

    def _take_rest(self) -> None:
        """Take the banks that `_ready` has not completed: their parameters had no gradient, or `backwards` is None."""
        if any(p.grad is not None for i in self._order[: self._taken] for p in self._banks[i].parameters):
            raise RuntimeError(
                "leaves: backward must not be called more often for a leaf than `backwards` says: gradients came after "
                "they had been taken"
            )
        while self._taken < len(self._order):
            self._take()

    @no_grad()
    def reduce(self, clip: float | None = None) -> Tensor:
        """Add the gradients of all leaves of all ranks and return their norm, a float64 scalar on the device. Then call
        `update`, or begin a new step. clip: the largest norm that `update` may use; None or 0 for no clipping.
        """
        if clip is not None and not (_is_number(clip) and clip >= 0):
            raise ValueError(f"reduce: clip must be a number of at least 0, or None, got {clip!r}")
        if self._done != self.max_ranks // self.size:
            raise RuntimeError(f"step: leaves() must have come to its end, got {self._done} leaves")
        ends = list(accumulate(owned.count // BLOCK for owned in self._owned))
        squares = _C.empty((ends[-1],), _C.float64, self._banks[0].device)
        parts = [squares[begin:end] for begin, end in zip([0, *ends], ends)]
        if self._gpus is None or self._plane is None:
            each = zip(self._counters, self._owned, parts, strict=True)
            self._sums = [self._sum(counter, owned, blocks) for counter, owned, blocks in each]
        else:
            arrived: Iterable[tuple[int, list[Tensor]]] = zip(self._order, self._sent)
            if self._sent:
                self._gpus.finish()
            else:
                packed = ((number, self._counters[number].packed()) for number in self._order)
                arrived = self._under_way(packed, self._plane.start_all_to_all, "gradients")
            sums = {number: add(received, self._banks[number], parts[number]) for number, received in arrived}
            self._sums = [sums[number] for number in range(len(sums))]
        self._counters, self._done, self._sent = [], 0, []
        squares = (
            squares
            if self._plane is None
            else self._plane.all_gather_tensor(parts, f"squares, clip {clip or math.inf}")
        )
        # In the order of banks and blocks, whatever rank they come from.
        norm, self._scale, self._guard = _C.block_norm(squares, clip or math.inf)
        return norm

    def _sum(self, counter: Counter, owned: Owned, blocks: Tensor) -> Tensor | list[Tensor]:
        """The summed gradients of what this rank owns: [count] in the wide dtype, or, where nothing has to be added, a
        tensor for each segment. blocks: gets the sum of squares of each block.
        """
        if self._plane is not None:
            return add(self._plane.all_to_all_tensor(counter.packed(), "gradients"), owned.bank, blocks)
        if self.max_ranks > 1 or owned.of_muon:
            return counter.finish(blocks)
        gradients = counter.alone()  # they stay where the backward has made them
        owned.bank.sum([gradients], None, blocks)
        found = dict(zip(owned.bank.order, gradients, strict=True))
        return [found[segment.parameter] for segment in owned.segments]

    @no_grad()
    def update(self, guard: Tensor | None = None) -> None:
        """Let the optimizer step with the gradients that `reduce` has added, each rank for its piece, and give every
        rank the new parameters. guard: a float32 scalar, the same on every rank; when it or the norm is NaN or
        infinite, nothing changes.
        """
        if not self._sums:
            raise RuntimeError("update: reduce() must come before, got no gradients")
        if guard is not None:
            need_tensors("update", guard=guard)
            if guard.ndim:
                raise ValueError(f"update: guard must have shape (), got {tuple(guard.shape)}")
        sums, self._sums = self._sums, []
        bad = self._guard if guard is None else self._guard + guard
        pieces = self._updated(sums, bad)
        if self._gpus is None or self._plane is None:
            arrived = ((key, self._all(piece, "parameters")) for key, piece in pieces)
        else:
            arrived = self._under_way(pieces, self._plane.start_all_gather, "parameters")
        for (bank, moves), flat in arrived:
            bank.write(flat, moves)
        self.steps += 1

    def _updated(
        self, sums: list[Tensor | list[Tensor]], bad: Tensor
    ) -> Iterator[tuple[tuple[Bank, list[bool]], Tensor]]:
        """Let the optimizer change what this rank owns, bank after bank. Yield ((bank, which parameters change), the
        new values of this rank's piece), except where the optimizer has changed the parameters themselves.
        """
        for owned, gradients in zip(self._owned, sums, strict=True):
            moves = [id(parameter) not in self._frozen for parameter in owned.bank.parameters]
            owned.read()
            if not isinstance(gradients, list):
                if owned.of_muon:  # AdamW does so itself
                    gradients.mul_(self._scale.to(owned.bank.wide))
                gradients = owned.cut(gradients)
            if owned.of_muon:
                self._muon(owned, gradients, moves, bad)
            else:
                self._adamw(owned, gradients, moves, bad)
            owned.steps = [count + move for count, move in zip(owned.steps, moves, strict=True)]
            if self.ema is not None and owned.average is not None:
                # Cut into segments, so that an element takes the vectors' path or the tail's at every W alike.
                averages, now = owned.cut(owned.average), owned.now()
                if not now:  # nothing of a parameter lies here; the update is counted
                    averages, now = [owned.average], [owned.truth]
                _C.ema_(averages, now, owned.updates, self.ema.decay, bad)
            if not owned.direct:
                piece = owned.truth.to(owned.bank.dtype) if owned.rounded is None else owned.rounded
                yield (owned.bank, moves), piece

    def _under_way(
        self, given: Iterable[tuple[_K, Tensor]], start: Callable[[Tensor, str], _R], name: str
    ) -> Iterator[tuple[_K, _R]]:
        """Yield (key, result of the exchange `start`) for each (key, tensor). The exchange of one tensor runs beside
        the kernels that make the next tensor, and those that the caller queues for the result before it.
        """
        assert self._gpus is not None
        late: tuple[_K, _R] | None = None
        for key, tensor in given:
            if late is not None:
                self._gpus.finish()
            begun = key, start(tensor, name)
            if late is not None:
                yield late
            late = begun
        if late is not None:
            self._gpus.finish()
            yield late

    @no_grad()
    def scale(self, factors: Mapping[Tensor, Tensor]) -> None:
        """Multiply parameters, and their masters, by tensors that broadcast over them. Every rank must call it with the
        same factors, between two steps.
        """
        if not isinstance(factors, Mapping):
            raise TypeError(f"scale: factors must be a dict of tensors by parameter, got {type(factors).__name__}")
        need_tensors("scale", **{f"factor {number}": factor for number, factor in enumerate(factors.values())})
        for owned in self._owned:
            bank = owned.bank
            scaled = [parameter in factors for parameter in bank.parameters]
            stepped = [owned.has_masters and count > 0 for count in owned.steps]
            by_master = [one and master for one, master in zip(scaled, stepped, strict=True)]
            for parameter, one, master in zip(bank.parameters, scaled, by_master, strict=True):
                if one and not master:  # its value is read from it in the next step
                    parameter.mul_(factors[parameter])
            if not any(by_master):
                continue
            for segment in owned.segments:
                if by_master[segment.parameter]:
                    parameter = bank.parameters[segment.parameter]
                    own = owned.part(segment, factors[parameter].expand(*parameter.shape))
                    owned.truth[segment.begin : segment.end].mul_(own)
            bank.write(self._all(owned.truth.to(bank.dtype), "scaled parameters"), by_master)

    def compare_parameters(self) -> None:
        """PeerError on every rank where one has other parameters, trained or not, than the others; ConfigError for
        other options, and for other values of `also`. Every rank must call it; `leaves` does so every 100 steps, and
        `whole_optimizer`.
        """
        if self._plane is not None:
            check_alike(self._plane, self.model, self.optimizer, self.ema, {**self._own, **self.also()})
            tensors = [tensor for _, tensor in self._compared]
            found = [bytes(one) for one in self._plane.all_gather(checksums(tensors), "checksums of parameters")]
            odd = odd_ones(found, [name for name, _ in self._compared], f"after step {self.steps}")
            if odd is not None:
                raise world.diverged(*odd)

    def step(self, clip: float | None = None) -> Tensor:
        """Add the gradients of all leaves and update the parameters of every rank; return the norm before clipping, a
        float64 scalar on their device. A norm that is NaN or infinite changes nothing, on all ranks.
        """
        if clip is not None and not (_is_number(clip) and clip > 0):
            raise ValueError(f"step: clip must be a number greater than 0, or None, got {clip!r}")
        norm = self.reduce(clip)
        self.update()
        return norm

    def _rate(self, number: int, device: _C.device) -> Tensor:
        """The learning rate of a group, on the device."""
        part, index = self._place[number]
        return part._rate(index, device, float(part.param_groups[index]["lr"]))

    def _adamw(self, owned: Owned, gradients: list[Tensor], moves: list[bool], guard: Tensor) -> None:
        """AdamW on the segments whose parameters move, in one call for all groups: `table` has a row for each group
        [number of its segments, beta1, beta2, eps, weight decay].
        """
        bank = owned.bank
        numbers = [self._group[id(bank.parameters[segment.parameter])] for segment in owned.segments]
        moving = (i for i, segment in enumerate(owned.segments) if moves[segment.parameter])
        order = sorted(moving, key=numbers.__getitem__)
        if not order:
            return
        rates: list[Tensor] = []
        rows: list[list[float]] = []
        before = -1
        for i in order:
            if numbers[i] != before:
                before = numbers[i]
                group = self.optimizer.param_groups[before]
                rows.append([0, *group["betas"], group["eps"], group["weight_decay"]])
                rates.append(self._rate(before, bank.device))
            rows[-1][0] += 1
        lists = (owned.targets, gradients, *owned.states, owned.masters, owned.counts)
        values, sums, firsts, seconds, masters, counts = ([each[i] for i in order] if each else [] for each in lists)
        table = _C.tensor(rows, _C.float64, _C.device("cpu"))
        _C.adamw_(values, sums, firsts, seconds, masters, counts, rates, table, guard, self._scale)

    def _muon(self, owned: Owned, gradients: list[Tensor], moves: list[bool], guard: Tensor) -> None:
        """Muon on the segments whose parameters move. A batched product takes the matrices of one shape and group
        within one of `max_ranks` equal pieces of the bank: the bits of a library's product may depend on the number
        of matrices, and this number does not depend on the number of ranks.
        """
        bank, batches = owned.bank, dict[Any, list[int]]()
        for i, segment in enumerate(owned.segments):
            if not moves[segment.parameter]:
                continue
            parameter = bank.parameters[segment.parameter]
            piece = (owned.begin + segment.begin) // (bank.length // self.max_ranks)
            key = (piece, self._group[id(parameter)], tuple(parameter.shape))
            batches.setdefault(key, []).append(i)
        for (_, number, _), members in batches.items():
            group = self.optimizer.param_groups[number]
            values, own, buffers = ([each[i] for i in members] for each in (owned.targets, gradients, *owned.states))
            rate = self._rate(number, bank.device)
            _C.muon_(values, own, buffers, [], rate, *muon_numbers(group, values[0]), guard)

    # ---- numbers, and bytes of tensors -------------------------------------------------------------------------------

    def of_leaves(self, values: Sequence[Tensor]) -> Tensor:
        """One float32 scalar for each leaf, this rank's given: [max_ranks] on every rank."""
        if not isinstance(values, Sequence) or not values:
            raise TypeError(f"of_leaves: values must be a list of tensors, got {shown(values, 80)}")
        need_tensors("of_leaves", **{f"value {number}": value for number, value in enumerate(values)})
        return self._all(_C.cat([value.detach().reshape(1).float() for value in values]), "losses")

    def tree_of(self, flat: Tensor) -> Tensor:
        """The sum, by the tree, of what `of_leaves` returns: the loss of the batch."""
        return world.tree_sum([flat.select(0, i) for i in range(flat.numel())])

    def _all(self, piece: Tensor, what: str) -> Tensor:
        """The pieces of all ranks, one after the other. what: the name of the exchange."""
        return piece if self._plane is None else self._plane.all_gather_tensor([piece], what)

    # ---- the optimizer's state ---------------------------------------------------------------------------------------

    @no_grad()
    def take_states(self) -> None:
        """Take this rank's piece of what optimizer.state and ema hold, for example after load_state_dict; both are
        empty afterwards. They must be the same on every rank.
        """
        for owned in self._owned:
            owned.load_states(self.optimizer.state)
        self.optimizer.state.clear()
        if self.ema is None or not self.ema.averages:
            return
        for owned in self._owned:
            owned.load_averages(self.ema.averages, self.ema.step)
        self.ema.averages.clear()

    @contextlib.contextmanager
    def whole_optimizer(self, compare: bool = True) -> Iterator[None]:
        """A `with` block in which optimizer.state, and the averages of ema, are whole on rank 0, as one process has
        them: for saving. Every rank must enter it. compare: whether parameters that differ between ranks are an error
        (see compare_parameters).
        """
        with world.phase("saving"):
            yield from self._whole_optimizer(compare)

    def _whole_optimizer(self, compare: bool) -> Iterator[None]:
        if compare:
            self.compare_parameters()
        try:
            self._gather_states()
            yield
        finally:
            self.optimizer.state.clear()
            if self.ema is not None:
                self.ema.averages.clear()

    @no_grad()
    def _gather_states(self) -> None:
        """Make optimizer.state and the averages of ema whole on rank 0."""
        first = self.rank == 0
        for owned in self._owned:
            self._read_counts(owned)
            owned.gather_states(self._all, self.optimizer.state if first else None)
        if self.ema is not None:
            for owned in self._owned:
                owned.gather_averages(self._all, self.ema.averages if first else None)
            self.ema.set_step(int(self._owned[0].updates.item()))

    def _read_counts(self, owned: Owned) -> None:
        """Set `owned.steps` on every rank to the steps that AdamW has taken. Only the device knows which steps it left
        out because their gradients were not finite.
        """
        if owned.of_muon or not any(owned.steps):
            return
        numbers = [segment.parameter for segment in owned.segments]
        mine = dict(
            zip(numbers, _C.cat([count.reshape(1) for count in owned.counts]).tolist() if numbers else [], strict=True)
        )
        for found in [mine] if self._plane is None else gather_json(self._plane, mine, "counts of steps"):
            for number, count in found.items():
                owned.steps[int(number)] = count
