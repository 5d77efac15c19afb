"""What one training step is: queued without waiting for the device, read later, and undone when it is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from .. import _C, optim, saving
from .._C import Tensor
from ..autograd import no_grad
from ..errors import CheckpointError, NonFiniteError
from .config import warmup_steps
from .nonfinite import diagnose
from .state import State

Piece = tuple[Tensor, Tensor]  # ids and targets, int64 [B, S]


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
    """A step whose loss and norm are on the device. loader, rng: the states before it. numbers: its metrics, empty
    until they are read.
    """

    number: int
    lr: float
    total: int
    pieces: list[Piece]
    loss: Tensor
    norm: Tensor
    loader: dict[str, int]
    rng: tuple[int, int]
    numbers: dict[str, float] = field(default_factory=dict)


class Stepper:
    """Makes the steps of a run: changes its model, optimizer, loader, `step` and the random state, and nothing else.

    read_every: steps that may be queued before they are read: reading waits for the device. With 1 each step is read
    before the optimizer changes anything.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.read_every = 1 if state.device == "cpu" else state.config.log_every
        self._guard = _C.full((), 0, _C.float32, _C.device(state.device))  # 0, or NaN once a step was not finite

    def queue(self) -> QueuedStep:
        """Make a step as far as it goes without waiting for the device. What ends it early gives its batch back.
        CheckpointError when the parameters are torn.
        """
        check_not_torn(self._state)
        loader, rng = self._state.loader.state_dict(), _C.get_rng_state()
        try:
            return self._queue(loader, rng)
        except BaseException:
            self._give_back(loader, rng)
            raise

    def _counts_differ(self) -> bool:
        """Whether some parameters have taken more steps than others."""
        known = self._state.optimizer.state
        parameters = [p for p in self._state.model.parameters() if p.grad is not None]
        return len({known[p]["step"] if p in known else 0 for p in parameters}) > 1

    def _give_back(self, loader: dict[str, int], rng: tuple[int, int]) -> None:
        self._state.loader.load_state_dict(loader)
        _C.set_rng_state(rng)

    def _queue(self, loader: dict[str, int], rng: tuple[int, int]) -> QueuedStep:
        state, config, settings = self._state, self._state.config, self._state.config.optim
        ids, targets = state.loader.next_batch()
        total = max(int(np.count_nonzero(targets != -100)), 1)
        pieces = [
            (on_device(piece_ids, state.device), on_device(piece_targets, state.device))
            for piece_ids, piece_targets in zip(
                np.array_split(ids, config.grad_accum), np.array_split(targets, config.grad_accum), strict=True
            )
        ]
        lr = optim.lr_schedule(
            settings.schedule, state.step, warmup_steps(config), config.steps, settings.lr, settings.final_lr
        )
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        loss, norm = self.gradients(pieces, total)
        step = QueuedStep(state.step + 1, lr, total, pieces, loss, norm, loader, rng)
        guard = None
        if self.read_every == 1:
            self.check(step, self.read([step])[0])  # raises before anything is changed
        else:  # 0 times NaN or infinity is NaN, and stays in the guard: no later step changes anything either
            guard = self._guard.mul_(loss).mul_(norm)
        state.torn = True
        try:
            state.optimizer.step(guard=guard)
        except MemoryError:  # from before a launch; another group of parameters may have had its own
            state.torn = self._counts_differ()
            raise
        state.step += 1
        state.torn = False
        return step

    def gradients(self, pieces: list[Piece], total: int) -> tuple[Tensor, Tensor]:
        """Loss and norm of the gradients, as tensors on the device; the gradients are clipped."""
        state = self._state
        state.optimizer.zero_grad()
        losses: list[Tensor] = []
        for piece_ids, piece_targets in pieces:
            part = state.model.loss(piece_ids, piece_targets, reduction="sum") * (1.0 / total)
            part.backward()
            losses.append(part.detach())
        return sum(losses[1:], losses[0]), optim.clip_grad_norm_(
            state.model.parameters(), state.config.clip or math.inf
        )

    @no_grad()
    def read(self, steps: list[QueuedStep]) -> list[dict[str, float]]:
        """The metrics of queued steps; of those that have not been read yet, in one copy to the host."""
        unread = [step for step in steps if not step.numbers]
        if unread:
            values = _C.cat([value.reshape(1).float() for step in unread for value in (step.loss, step.norm)]).tolist()
            for step, loss, norm in zip(unread, values[::2], values[1::2], strict=True):
                step.numbers = {"loss": loss, "lr": step.lr, "grad_norm": norm}
        return [step.numbers for step in steps]

    def rewind(self, steps: list[QueuedStep]) -> list[QueuedStep]:
        """Put the state before the first of the queued `steps` that is not finite, if there is one: the optimizer took
        neither it nor those behind it. Return the steps before it. For steps that an exception has left unread.
        """
        for index, numbers in enumerate(self.read(steps)):
            if not all(map(math.isfinite, numbers.values())):
                self._guard.fill_(0)
                self._state.step = steps[index].number - 1
                self._give_back(steps[index].loader, steps[index].rng)
                return steps[:index]
        return steps

    def check(self, step: QueuedStep, numbers: dict[str, float]) -> dict[str, float]:
        """Return `numbers`, or raise NonFiniteError with everything as before that step. A step that is found bad late
        is repeated for the diagnosis: nothing has changed since.
        """
        loss, norm = numbers["loss"], numbers["grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            return numbers
        state = self._state
        self._guard.fill_(0)  # whoever repairs the model may go on
        try:
            if state.step >= step.number:
                state.step = step.number - 1
                _C.set_rng_state(step.rng)
                self.gradients(step.pieces, step.total)
            raise self._error(loss, norm, [piece_ids for piece_ids, _ in step.pieces])
        finally:
            self._give_back(step.loader, step.rng)

    def _error(self, loss: float, norm: float, pieces: list[Tensor]) -> NonFiniteError:
        state = self._state
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {norm}"
        found = saving.find_checkpoints(state.directory)
        last = f"the last checkpoint is {found[0]}" if found else "there is no checkpoint yet"
        return NonFiniteError(
            f"step {state.step + 1}: {what}; first bad value: {diagnose(state.model, pieces)}; {last}"
        )
