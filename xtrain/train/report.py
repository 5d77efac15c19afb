"""What a run tells its user: lines, the bar, samples and loss.png. All of them are side effects: what fails in one is
reported once, and ends no run.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from .. import _C, cuda, saving
from ..data import Loader, MixedLoader
from ..files import reason
from ..notebook import curve, html
from ..saving.places import METRICS
from . import plot
from .metrics import read_metrics
from .progress import Progress, clock, say
from .state import State

_P = ParamSpec("_P")


def _isolated(method: Callable[Concatenate[Report, _P], None]) -> Callable[Concatenate[Report, _P], None]:
    """The method, where an error is a warning, once a run."""

    @functools.wraps(method)
    def wrapped(self: Report, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failed(f"the report ({method.__name__})", error)

    return wrapped


class Report:
    """Lines on standard output, above the bar while there is one; nothing when quiet. Its methods raise nothing. Other
    ranks than 0 say their warnings alone.
    """

    def __init__(self, quiet: bool, rank: int = 0) -> None:
        self.quiet = quiet or rank > 0
        self._first, self._rank = rank == 0, 0 if quiet else rank
        self._progress: Progress | None = None
        self._failed: dict[str, int] = {}  # times after the first, of what has failed

    def say(self, text: str) -> None:
        """Print lines."""
        if self._progress is not None:
            self._progress.message(text)
        elif not self.quiet:
            say(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        if self._rank:
            say(f"[rank {self._rank}] warning: {text}")
        else:
            self.say(f"warning: {text}")

    def failed(self, what: str, error: Exception, step: int | None = None) -> None:
        """Print a warning that a side effect has failed, at a step, the first time; count it after that."""
        if what in self._failed:
            self._failed[what] += 1
            return
        self._failed[what] = 0
        try:
            text = " ".join(str(error).split())
        except Exception:  # of a class of the user's
            text = ""
        when = "" if step is None else f" at step {step}"
        self.warn(f"{what} failed{when}, and training goes on: {type(error).__name__}: {text or 'no message'}")

    def later_failures(self) -> None:
        """Print how often each side effect has failed after its warning."""
        for what, count in self._failed.items():
            if count:
                self.warn(f"{count} more failure{'' if count == 1 else 's'} of {what}")
                self._failed[what] = 0

    @contextlib.contextmanager
    def progress(self, state: State) -> Iterator[Progress]:
        """Show the progress of the run's steps inside the `with` block."""
        every, speed = state.config.log_every, _speed_of(state)
        self._progress = Progress(state.config.steps, state.step, every=every, quiet=self.quiet, speed=speed)
        try:
            yield self._progress
        finally:
            self._progress.close()
            self._progress = None

    @_isolated
    def introduce(self, state: State) -> None:
        """Say what will be trained, on what, and where."""
        config, corpus = state.config, state.corpus
        count = sum(parameter.numel() for parameter in state.model.parameters())
        trained = sum(parameter.numel() for parameter in state.model.parameters() if parameter.requires_grad)
        part = "" if trained == count else f", {trained / 1e6:.2f} M of them trained"
        threads = f", {_C.get_num_threads()} threads" if state.device == "cpu" else ""
        new = os.path.isdir(config.model.preset) and not state.step and not saving.has_weights(config.model.preset)
        size = f"{count / 1e6:.2f} M parameters{part}{', drawn, as it holds no weights' if new else ''}"
        self.say(f"model  {config.model.preset}: {size}, {config.precision}, {state.device}{threads}")
        self.say(f"data   {corpus.name}: {corpus.train_tokens:,} training, {corpus.val_tokens:,} validation tokens")
        start = f"from step {state.step} " if state.step else ""
        each = f"{config.batch_size} x {config.seq_len} tokens each"
        self.say(f"run    {state.directory}: {start}to step {config.steps}, {each}")
        filled = 1.0
        if config.pack and not isinstance(state.loader, Loader):
            filled, count = state.loader.efficiency(), state.loader.documents
            self.say(f"pack   {count:,} documents, {filled:.1%} of the places of a sequence hold a token of one")
        if isinstance(state.loader, MixedLoader):
            for name, share, part in zip(state.loader.names, corpus.shares, corpus.parts, strict=True):
                epochs = config.steps * config.batch_size * config.seq_len * filled * share / part.train_tokens
                size = f"{part.train_tokens:,} training tokens, about {epochs:,.2f} epochs"
                self.say(f"mix    {name}: {share:.1%} of the rows, {size} in {config.steps} steps")
        if state.team.size > 1:
            team = state.team
            name = team.launch.launcher.removeprefix("by ")
            self.say(f"ranks  {team.size}, started by {name}; a batch in {config.max_ranks} leaves")

    @_isolated
    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Say the result of an evaluation."""
        unit, name = ("bits per byte", "val_bpb") if "val_bpb" in values else ("nats per token", "val_loss")
        if self._progress is not None:
            self._progress.evaluated(step, values["val_loss"])
        each = [f"{key.partition('/')[2]} {loss:.4f}" for key, loss in values.items() if key.startswith("val_loss/")]
        sources = f" (nats per token: {', '.join(each)})" if each else ""
        self.say(f"step {step}: validation {values[name]:.4f} {unit}{sources}")

    @_isolated
    def sample(self, text: str | None) -> None:
        """Show a sample of an evaluation."""
        if text:
            self.say(_indent(text))

    @_isolated
    def speed(self, state: State, rate: float) -> None:
        """Say how fast a GPU was at the end, and how much of its memory was in use at once. rate: tokens a second."""
        if state.device != "cpu":
            peak = cuda.max_memory_allocated(state.device) / 2**30
            self.say(f"speed  {_speed_of(state)(rate)}, {peak:.2f} GiB of memory at the most")

    @_isolated
    def finish(self, state: State, text: str | None, stopped: str | None) -> None:
        """Draw loss.png, show the last sample, and say how the run ended and where it is."""
        if state.config.plot and self._first:
            self._draw(state)
        if text:
            self.say(f"sample:\n{_indent(text)}")
        if stopped:
            self.say(
                f"stopped by {stopped} after step {state.step}; continue with: xtrain train --resume {state.directory}"
            )
        if isinstance(state.loader, MixedLoader):
            found = state.loader.metrics()
            for name in state.loader.names:
                tokens, epochs = int(found[f"tokens/{name}"]), found[f"epochs/{name}"]
                self.say(f"mix    {name}: {tokens:,} tokens, {epochs:,.2f} epochs so far")
        self.say(f"{state.step} steps in {clock(state.elapsed)}; the run is in {state.directory}")

    def _draw(self, state: State) -> None:
        try:
            plot.plot_loss(state.directory, state.corpus.bytes_per_token)
        except ImportError:
            self.say(plot.HINT)
        except Exception as error:  # a picture is never worth a run
            what = f"{error.filename}: {reason(error)}" if isinstance(error, OSError) else str(error)
            self.warn(f"loss.png could not be drawn: {what}")


def run_html(directory: Path, values: Mapping[str, object], sample: str | None = None) -> str:
    """A run for a notebook: the values, and the curve of what its metrics.jsonl holds."""
    losses, evaluated = curve.Series(), curve.Series()
    with contextlib.suppress(OSError):
        for record in read_metrics(directory / METRICS):
            for name, series in (("loss", losses), ("val_loss", evaluated)):
                if isinstance(record.get(name), (int, float)):
                    series.add(record["step"], record[name])
    picture = curve.svg(losses.points(), evaluated.points(), "loss, nats per token")
    return html.run({"directory": directory, **values}, picture, sample)


def _share_of(state: State) -> float:
    """The model's FLOP of a token by the FLOP/s that the GPU can reach; times tokens a second it is the MFU (Chowdhery
    et al. 2022). 0 where one of them is not known, as on a CPU.
    """
    try:
        if state.device != "cpu":
            peak = cuda.peak_flops(state.config.precision or "float32", state.device)
            return state.model.flops_per_token(state.config.seq_len) / peak if peak else 0.0  # pyright: ignore[reportAttributeAccessIssue]  (not every model has it)
    except Exception:
        pass  # a model of the user's own: tokens a second are all that is known
    return 0.0


def machine_metrics(state: State) -> Callable[[float], dict[str, Any]]:
    """What a record says of the machine, from tokens a second: memory, the most bytes of tensors on the device at once
    so far, and mfu, where it is known.
    """
    share, device = _share_of(state), _C.device(state.device)

    def metrics(rate: float) -> dict[str, Any]:
        found: dict[str, Any] = {"memory": _C.memory_stats(device)["peak"]}
        if share:
            found["mfu"] = round(share * rate, 4)
        return found

    return metrics


def _speed_of(state: State) -> Callable[[float], str]:
    """Tokens a second as text; on a GPU with the MFU, where it is known."""
    share = 100 * _share_of(state)
    return lambda rate: f"{rate:,.0f} tokens/s" + (f", MFU {share * rate:.1f} %" if share else "")


def _indent(text: str) -> str:
    return "\n".join(f"    | {line}" for line in text.splitlines())
