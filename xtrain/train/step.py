"""One training step: queued without waiting for the device, read later, and undone when its loss is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _C, cuda, optim, saving
from .._C import Tensor
from ..autograd import no_grad
from ..errors import CheckpointError, NonFiniteError
from ..models.causal_lm import CausalLM
from ..models.language_model import LanguageModel
from ..nn.module import evaluating
from ..profiling import span
from .config import decay_steps, warmup_steps
from .nonfinite import diagnose, first_bad_activation
from .parts import group_factors, make_qk_clip
from .state import State

Piece = tuple[Tensor, ...]  # ids and targets, int64 [B, S], and with `pack` the bounds of documents, int32 [B, 2, S]
Arrays = tuple[np.ndarray, ...]  # the same on the host


def on_device(array: np.ndarray, device: str) -> Tensor:
    """The array as a tensor on `device`."""
    tensor = _C.from_numpy(np.ascontiguousarray(array))
    return tensor if device == "cpu" else tensor.to(_C.device(device))


def check_not_torn(state: State) -> None:
    """Raise CheckpointError when an exception has interrupted the optimizer."""
    if state.torn:
        raise CheckpointError(
            f"{state.directory}: step {state.step + 1} was interrupted while it changed the parameters, which belong "
            "to no step now: make a new Trainer that resumes the run"
        )


@dataclass
class QueuedStep:
    """A step whose loss and norm may still be on the device.

    number: of the step, from 1. lr, lr_groups: the learning rate, and that of each group of the optimizer.
    total: tokens of the batch that count in the loss.
    pieces: the batch on the host. A bad step is computed again from it, and a graph overwrites its own inputs.
    loss, norm: scalars on the device.
    loader, rng: the states of the loader and of the random numbers before the step.
    data: the metrics of the loader after the batch.
    leaves: the loss of each leaf [max_ranks], where batches are cut into leaves.
    numbers: {"loss", "lr", "grad_norm"}, empty until they are read.
    """

    number: int
    lr: float
    total: int
    pieces: list[Arrays]
    loss: Tensor
    norm: Tensor
    loader: dict[str, Any]
    rng: tuple[int, int]
    lr_groups: list[float]
    data: dict[str, float]
    leaves: Tensor | None = None
    numbers: dict[str, float] = field(default_factory=dict)


def gradients(
    model: LanguageModel,
    optimizer: optim.Optimizer,
    pieces: Iterable[Piece],
    scale: float | Tensor,
    clip: float,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Loss and norm of the gradients of one step, as tensors on the device; the gradients are clipped. scale: 1 /
    tokens of the batch. clip: the largest norm; 0 for no clipping. z_loss: see functional.linear_cross_entropy.
    """
    optimizer.zero_grad()
    loss = backward(model, pieces, scale, z_loss)
    with span("clip"):
        return loss, optim.clip_grad_norm_(model.parameters(), clip or math.inf)


def loss_of(model: LanguageModel, piece: Piece, z_loss: float = 0.0) -> Tensor:
    """The sum of the token losses of a piece, a scalar."""
    ids, targets, *documents = piece
    options: dict[str, Any] = {"z_loss": z_loss} if z_loss else {}  # a model of the user's own may not take it
    if documents:
        options["documents"] = documents[0]
    return model.loss(ids, targets, reduction="sum", **options)


def backward(model: LanguageModel, pieces: Iterable[Piece], scale: float | Tensor, z_loss: float = 0.0) -> Tensor:
    """Run forward and backward of some pieces, which adds to the gradients. Return the sum of their losses, times
    `scale`.
    """
    losses: list[Tensor] = []
    for piece in pieces:
        with span("forward"):
            part = loss_of(model, piece, z_loss) * scale
        with span("backward"):
            part.backward()
        losses.append(part.detach())
    return sum(losses[1:], losses[0])


def _sentence(error: Exception) -> str:
    """The text of an exception on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _pieces(batch: Arrays, count: int) -> list[Arrays]:
    """The batch cut along its rows into `count` pieces, each with its rows of every array."""
    return list(zip(*(np.array_split(array, count) for array in batch), strict=True))


def _run_layers(model: LanguageModel, piece: Piece) -> Tensor:
    """Run the layers of the model, without the head where that can be left out."""
    return model.features(piece[0], *piece[2:]) if isinstance(model, CausalLM) else loss_of(model, piece)


def _largest(found: list[list[list[float]]]) -> list[list[float]]:
    """found: [pieces or ranks][layers][heads]. The largest value of each head [layers][heads]; a value that is not
    finite counts as 0, so that nothing is scaled by it.
    """
    return [
        [max(value if math.isfinite(value) else 0.0 for value in heads) for heads in zip(*layers, strict=True)]
        for layers in zip(*found, strict=True)
    ]


class Stepper:
    """Makes the steps of a run: changes its model, optimizer, loader, `step` and the random state, and nothing else.

    read_every: how many steps may be queued before they are read, since reading waits for the device. With 1 each eager
    step is read before the optimizer changes anything.

    Unless the option `graph` is off, steps on a GPU are replays of a CUDA graph, after two eager ones. say: is called
    with one line that says why, where they are not.
    """

    def __init__(self, state: State, say: Callable[[str], None] = lambda text: None) -> None:
        self._state, self._say = state, say
        self.read_every = 1 if state.device == "cpu" else state.config.log_every
        self._guard = _C.full((), 0, _C.float32, _C.device(state.device))  # 0, or NaN once a step was not finite
        self._graph: cuda.Graph[Tensor] | None = None
        self._qk_clip = make_qk_clip(state.model, state.config.optim, state.optimizer)
        self._factors = group_factors(state.model, state.optimizer, state.config.optim)
        self._scale, self._scale_of = self._guard.clone(), 0  # 1 / total on the device, and that total
        self._leaves: Tensor | None = None  # the losses of the last step's leaves
        if state.config.graph:
            self._want_graph()

    def _want_graph(self) -> None:
        device = self._state.device
        if device == "cpu":
            return
        if _C.cuda_waits(_C.device(device)):
            self._say("graph: steps run eagerly: XTRAIN_CUDA_SYNC=1 waits after every kernel")
        elif self._state.parallel is not None and not self._state.parallel.can_be_captured:
            self._say("graph: steps run eagerly: ranks exchange through the memory of hosts")
        else:
            self._graph = cuda.graph(self._whole_step, optimizers=[self._state.optimizer], device=device)

    def queue(self) -> QueuedStep:
        """Make the next step without waiting for the device. An exception inside gives the batch back to the loader.
        CheckpointError when the parameters are torn (see State).
        """
        check_not_torn(self._state)
        loader, rng = self._state.loader.state_dict(), _C.get_rng_state()
        try:
            with span("step", number=self._state.step + 1):
                return self._queue(loader, rng)
        except BaseException:
            self._give_back(loader, rng)
            raise

    def _give_back(self, loader: dict[str, Any], rng: tuple[int, int]) -> None:
        """Put the loader and the random state back to where they were before a step."""
        self._state.loader.load_state_dict(loader)
        _C.set_rng_state(rng)

    def _queue(self, loader: dict[str, Any], rng: tuple[int, int]) -> QueuedStep:
        state, config, settings = self._state, self._state.config, self._state.config.optim
        with span("data"):
            batch = state.loader.next_batch()
        data = state.loader.metrics()
        total = max(int(np.count_nonzero(batch[1] != -100)), 1)
        pieces = self._pieces(batch)
        lr = optim.lr_schedule(
            settings.schedule, state.step, warmup_steps(config), config.steps, settings.lr, settings.final_lr,
            decay_steps(config), settings.decay_form,
        )  # fmt: skip
        for group, factor in zip(state.optimizer.param_groups, self._factors, strict=True):
            group["lr"] = lr * factor
        rates = [float(group["lr"]) for group in state.optimizer.param_groups]
        if state.parallel is not None:
            state.parallel.begin(state.step)
        maxima = self._measure(self._on_device(pieces)) if self._clips() else []
        if self._graph is not None and (numbers := self._by_graph(self._graph, pieces, total)) is not None:
            state.step += 1
            self._clip(maxima, data)
            state.torn = False
            loss, norm, leaves = numbers.select(0, 0), numbers.select(0, 1), numbers[2:]
            return QueuedStep(state.step, lr, total, pieces, loss, norm, loader, rng, rates, data, leaves)
        loss, norm = self.gradients(self._on_device(pieces), 1.0 / total)
        step = QueuedStep(state.step + 1, lr, total, pieces, loss, norm, loader, rng, rates, data, self._leaves)
        guard = None
        if self.read_every == 1:
            self.check(step, self.read([step])[0])  # raises before anything is changed
        else:  # 0 times NaN or infinity is NaN, and stays in the guard: no later step changes anything either
            guard = self._guard.mul_(loss).mul_(norm.float())
        state.torn = True
        try:
            with span("optimizer"):
                self._update(guard)
        except MemoryError:  # from before the first launch, unless a device has memory for its group alone
            state.torn = state.parallel is not None or state.optimizer.interrupted()
            raise
        state.step += 1
        self._clip(maxima, data)
        state.torn = False
        return step

    # ---- QK-clip -----------------------------------------------------------------------------------------------------

    def _clips(self) -> bool:
        """Whether the next step measures the logits of attention."""
        return self._qk_clip is not None and (self._state.step + 1) % self._state.config.optim.qk_clip_every == 0

    @no_grad()
    def _measure(self, pieces: list[Piece]) -> list[list[float]]:
        """The largest attention logit of each head over the batch of all ranks, [layers][heads], before the step."""
        clip, model = self._qk_clip, self._state.model
        assert clip is not None
        with span("qk_clip"), evaluating(model):
            found = [clip.measure(lambda piece=piece: _run_layers(model, piece)) for piece in pieces]
        return _largest(self._state.team.gather(_largest(found), "largest logits"))

    def _clip(self, maxima: list[list[float]], data: dict[str, float]) -> None:
        """Scale the heads whose logit was too large in the step that has just been made, unless that step was not
        finite and has changed nothing. data: gets the metrics.
        """
        clip, parallel = self._qk_clip, self._state.parallel
        if clip is None or not maxima:
            return
        data |= {"max_logit": max(map(max, maxima)), "qk_clipped": clip.count(maxima)}
        if data["qk_clipped"] and math.isfinite(self._guard.item()):
            self._state.torn = True
            if parallel is None:
                clip.step(maxima)
            else:
                parallel.scale(clip.factors(maxima))

    def _pieces(self, batch: Arrays) -> list[Arrays]:
        """The pieces of the batch that this process computes: `grad_accum` of its first leaf, then of the next."""
        leaves = [batch] if self._state.parallel is None else self._state.parallel.own(batch)
        return [piece for leaf in leaves for piece in _pieces(leaf, self._state.config.grad_accum)]

    def _update(self, guard: Tensor | None) -> None:
        """Let the optimizer step, and update the averages."""
        if self._state.parallel is not None:
            self._state.parallel.update(guard)
            return
        self._state.optimizer.step(guard=guard)
        self._average(guard)

    def _average(self, guard: Tensor | None) -> None:
        """Take the new parameters into their averages. An error here leaves the state torn."""
        if self._state.ema is not None:
            try:
                self._state.ema.update(guard=guard)
            except MemoryError as error:
                raise RuntimeError(f"the averages of step {self._state.step + 1} are lost: {error}") from error

    def _on_device(self, pieces: list[Arrays]) -> list[Piece]:
        device = self._state.device
        return [tuple(on_device(array, device) for array in piece) for piece in pieces]

    # ---- by a graph ------------------------------------------------------------------------------------------------

    def _whole_step(self, *tensors: Tensor) -> Tensor:
        """The step that a graph captures: [loss, norm, losses of leaves]. tensors: of the first piece, and so on."""
        state, width = self._state, 2 if self._state.val_documents is None else 3
        pieces = [tensors[at : at + width] for at in range(0, len(tensors), width)]
        loss, norm = self.gradients(pieces, self._scale)
        guard = self._guard.mul_(loss).mul_(norm.float())
        found = [loss.detach().reshape(1).to(norm.dtype), norm.reshape(1)]
        if self._leaves is not None:
            found.append(self._leaves.to(norm.dtype))
        numbers = _C.cat(found)  # before the optimizer: it may fail
        state.torn = True
        try:
            self._update(guard)
        except MemoryError:
            state.torn = state.parallel is not None or state.optimizer.interrupted()
            raise
        return numbers

    def _by_graph(self, graph: cuda.Graph[Tensor], pieces: list[Arrays], total: int) -> Tensor | None:
        """Make the step by the graph, but for `state.step`, and return [loss, norm, losses of leaves]; None when the
        step has to be made eagerly. total: tokens of the batch.
        """
        state = self._state
        inputs = [_C.from_numpy(np.ascontiguousarray(array)) for piece in pieces for array in piece]
        if self._scale_of != total:
            self._scale_of = 0
            self._scale.fill_(1.0 / total)
            self._scale_of = total
        if graph.ready:
            state.optimizer.zero_grad()  # the gradients of the graph lie in its own memory
            why = ""
            try:
                graph.capture(*inputs)
            except Exception as error:
                why = _sentence(error)
            finally:
                state.torn = False  # nothing has run
            # Ranks capture together: exchanges of a graph are not those of an eager step.
            why = next((one for one in state.team.gather(why, "failed captures") if one), "")
            if why:
                return self._eagerly_from_now(why)
        wide, leaves = (_C.float32, 0) if state.parallel is None else (_C.float64, state.parallel.max_ranks)
        numbers = _C.empty((2 + leaves,), wide, _C.device(state.device))  # here: after a replay nothing may fail
        state.torn = graph.captured
        try:
            with span("graph"):
                return numbers.copy_(graph(*inputs))
        except _C.CudaError:
            raise
        except (ValueError, RuntimeError) as error:
            if not graph.captured:
                raise
            state.torn = False  # refused before the replay
            return self._eagerly_from_now(_sentence(error))

    def _eagerly_from_now(self, why: str) -> None:
        self._graph = None
        self._say(f"graph: steps run eagerly: {why}")

    # ---- a step ------------------------------------------------------------------------------------------------------

    def gradients(self, pieces: list[Piece], scale: float | Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the norm of the gradients of a step; see the function of this name. Where batches are cut into
        leaves, the gradients of all ranks are added here, and clipped by `DataParallel.update`.
        """
        state, config = self._state, self._state.config
        if state.parallel is None:
            return gradients(state.model, state.optimizer, pieces, scale, config.clip, config.z_loss)
        losses: list[Tensor] = []
        for leaf in state.parallel.rounds(config.grad_accum):
            own = pieces[leaf * config.grad_accum : (leaf + 1) * config.grad_accum]
            losses.append(backward(state.model, own, scale, config.z_loss))
        with span("reduce"):
            self._leaves = state.parallel.of_leaves(losses)
            return state.parallel.tree_of(self._leaves), state.parallel.reduce(config.clip)

    @no_grad()
    def read(self, steps: list[QueuedStep]) -> list[dict[str, float]]:
        """The metrics of queued steps. Those that have not been read yet come in one copy to the host; where the device
        has no memory for that, one by one, since the steps are made and their metrics must not be lost.
        """
        unread = [step for step in steps if not step.numbers]
        if unread:
            found = [value for step in unread for value in (step.loss, step.norm)]
            try:
                wide = _C.float64 if any(value.dtype is _C.float64 for value in found) else _C.float32
                values = _C.cat([value.reshape(1).to(wide) for value in found]).tolist()
            except MemoryError:
                values = [value.item() for value in found]
            for step, loss, norm in zip(unread, values[::2], values[1::2], strict=True):
                step.numbers = {"loss": loss, "lr": step.lr, "grad_norm": norm}
        return [step.numbers for step in steps]

    def rewind(self, steps: list[QueuedStep]) -> list[QueuedStep]:
        """For steps that an exception has left unread: if one of them is not finite, go back to the state before the
        first such step. The optimizer has taken neither it nor those after it. Return the steps before it.
        """
        for index, numbers in enumerate(self.read(steps)):
            if not all(map(math.isfinite, numbers.values())):
                self._guard.fill_(0)
                self._state.step = steps[index].number - 1
                self._give_back(steps[index].loader, steps[index].rng)
                return steps[:index]
        return steps

    def check(self, step: QueuedStep, numbers: dict[str, float]) -> dict[str, float]:
        """Return `numbers`, the metrics of a step, if they are finite. Else raise NonFiniteError, with the state as it
        was before the step. The backward is repeated to find the first bad value; the parameters have not changed.
        """
        loss, norm = numbers["loss"], numbers["grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            return numbers
        state = self._state
        self._guard.fill_(0)  # the user may repair the model and go on
        try:
            if state.step >= step.number:
                state.step = step.number - 1
            # Clipping by a norm of NaN has spoilt all gradients, later steps replaced them, or ranks taken them away.
            state.optimizer.zero_grad()
            backward(state.model, self._again(step), 1.0 / step.total, state.config.z_loss)
            raise self._error(step, loss, norm)
        finally:
            self._give_back(step.loader, step.rng)

    def _again(self, step: QueuedStep) -> Iterator[Piece]:
        """The pieces of a step, each with the random numbers that it drew: a forward drops the same values again."""
        parallel, each = self._state.parallel, self._state.config.grad_accum
        for index, piece in enumerate(step.pieces):
            if index % each == 0:
                leaf = index // each
                _C.set_rng_state(step.rng if parallel is None else parallel.random_state(step.rng, leaf))
            yield tuple(on_device(array, self._state.device) for array in piece)

    def _error(self, step: QueuedStep, loss: float, norm: float) -> NonFiniteError:
        """The error of a step that is not finite: the first bad value, and the rank that has it."""
        state, leaves = self._state, step.leaves
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {norm}"
        found = saving.find_checkpoints(state.directory)
        last = f"; the last checkpoint is {found[0]}" if found else ""
        where = diagnose(state.model, ((piece[0], *piece[2:]) for piece in self._again(step)))
        if state.team.size > 1:
            said = state.team.gather(where + self._bad_leaf(step), "first bad values")
            own = state.config.max_ranks // state.team.size
            bad = [] if leaves is None else [i for i, one in enumerate(leaves.tolist()) if not math.isfinite(one)]
            # A rank whose own leaves are sound says that it is the loss itself.
            rank = next((rank for rank, one in enumerate(said) if not one.startswith("the loss")), 0)
            if bad:  # bad parameters may have come to all ranks since, or been replaced by an owner's
                rank = bad[0] // own
                if said[rank].startswith("the loss"):
                    said[rank] = f"the loss of leaf {bad[0]}, whose parameters have changed since,"
            where = f"{said[rank]} on rank {rank}"
        return NonFiniteError(f"step {state.step + 1}: {what}; first bad value: {where}{last}")

    def _bad_leaf(self, step: QueuedStep) -> str:
        """ " in leaf 5" of the first that has a bad value before the loss, or nothing."""
        state = self._state
        own = state.config.max_ranks // state.team.size
        for index, piece in enumerate(self._again(step)):
            if first_bad_activation(state.model, piece[0], *piece[2:]) is not None:
                return f" in leaf {state.team.rank * own + index // state.config.grad_accum}"
        return ""
