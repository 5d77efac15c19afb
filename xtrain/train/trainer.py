"""One training run, put together from its parts."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from .. import _C, saving
from ..errors import CheckpointError, ConfigError, NonFiniteError
from ..files import make_folders, reason
from ..models.language_model import LanguageModel
from ..optim import EMA
from ..saving.places import METRICS
from . import evaluate, options, rundir
from .callbacks import Callback, CallbackList, StepFunction, make_writers
from .checkpoints import remove_old, rescue, write_checkpoint
from .config import KEYS, TrainConfig, build, check, flatten, warmup_steps
from .loop import Hooks, is_evaluated, loop
from .metrics import Metrics, read_metrics
from .parts import (
    base_identity,
    check_takes_documents,
    check_z_loss,
    make_model,
    make_optimizer,
    open_corpus,
    options_of_model,
    with_named_model,
)
from .ranks import Team
from .report import Report, run_html
from .resume import begun_from, position, restore
from .state import State
from .step import Stepper

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class Result:
    """What a run ended with.

    `stopped`: "SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1" or "callback" when it was asked to stop early, else None.
    `seconds` counts all its parts.
    """

    directory: Path
    step: int
    loss: float
    val_loss: float | None
    val_bpb: float | None
    sample: str | None
    seconds: float
    stopped: str | None = None

    @property
    def checkpoint(self) -> Path | None:
        """The directory of the newest checkpoint, which models.load reads; None where all have been removed."""
        return next(iter(saving.find_checkpoints(self.directory)), None)

    def _repr_html_(self) -> str:
        """For notebooks: a table and the curve."""
        values = {name: value for name, value in vars(self).items() if name not in ("directory", "sample")}
        numbers = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in values.items()}
        return run_html(self.directory, numbers, self.sample)


def train(
    config: TrainConfig | LanguageModel | None = None,
    data: str | os.PathLike[str] | Mapping[Any, float] | None = None,
    /,
    *,
    file: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    callbacks: Iterable[Callback | StepFunction] = (),
    **given: Any,
) -> Result:
    """Train with the given options and return the Result.

        train(model, "x.tokens", steps=100)           # a model that is there, which is changed
        train(model="tiny", data="texts/")            # a new one
        train(model, {"a.tokens": 7, "b.tokens": 3})  # 7 of 10 rows of a batch come from a.tokens

    Options come from a TrainConfig or from `file` (TOML), then from keywords, whose names are those of the command line
    (`steps=100`, `model="tiny"`, `optim={"lr": 1e-3}`). callbacks: Callbacks, or functions (trainer, record) that are
    called after each step; what returns True ends the run. Raises ConfigError, DataError, CheckpointError or
    NonFiniteError with one sentence.
    """
    model = config if isinstance(config, LanguageModel) else None
    values = rundir.given_options(config) if isinstance(config, TrainConfig) else {}
    if config is not None and not isinstance(config, (TrainConfig, LanguageModel)):
        raise ConfigError(f"train: the first argument must be a model or a TrainConfig, got {type(config).__name__}")
    if data is not None:
        given = {**given, "data": data}
    keywords = options.from_tree(given)
    values.update(keywords if file is None else options.with_file(file, keywords))
    return Trainer(values, quiet=quiet, callbacks=callbacks, model=model).run()


def _given(
    values: dict[str, Any] | TrainConfig | None, model: LanguageModel | str | os.PathLike[str] | None
) -> tuple[dict[str, Any], LanguageModel | None]:
    """The options {dotted name: value} that the arguments of a Trainer give, and the user's own model or None."""
    if values is not None and not isinstance(values, (Mapping, TrainConfig)):
        got = type(values).__name__
        raise ConfigError(f"Trainer: values must be a dict of options or a TrainConfig, got {got}")
    given = rundir.given_options(values) if isinstance(values, TrainConfig) else options.from_tree(values or {})
    if isinstance(model, (str, os.PathLike)):
        return with_named_model(model, given), None
    return (given if model is None else options_of_model(model, given)), model


def _in_own_precision(method: Callable[Concatenate[Trainer, _P], _R]) -> Callable[Concatenate[Trainer, _P], _R]:
    """Float32 products inside may use TF32 if this run's precision says so; outside, what was chosen before holds."""

    @functools.wraps(method)
    def wrapped(self: Trainer, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = _C.tf32()
        _C.allow_tf32(self.config.precision == "tf32")
        try:
            return method(self, *args, **kwargs)
        finally:
            _C.allow_tf32(before)

    return wrapped


class Trainer(State):
    """One run. `values`: {dotted option name: value}, as parsed from the command line, or a TrainConfig. callbacks: see
    train. model: the one to be trained, which is changed, in place of what the option names; it moves to the run's
    device, and keeps its dtype where `precision` is not given. A text or path means the option `model`.

    After construction: `config`, `directory`, `corpus`, `tokenizer`, `model`, `optimizer`, `loader`, `step` (steps
    done), `elapsed` (seconds).
    """

    def __init__(
        self,
        values: dict[str, Any] | TrainConfig | None = None,
        *,
        quiet: bool = False,
        callbacks: Iterable[Callback | StepFunction] = (),
        model: LanguageModel | str | os.PathLike[str] | None = None,
    ) -> None:
        self.team = Team.join()
        try:
            with self.team.phase("loading"):
                self._prepare(values, quiet, callbacks, model)
        except BaseException as error:
            self.team.leave(error)
            raise

    def _prepare(
        self,
        values: dict[str, Any] | TrainConfig | None,
        quiet: bool,
        callbacks: Iterable[Callback | StepFunction],
        model: LanguageModel | str | os.PathLike[str] | None,
    ) -> None:
        """What __init__ does, once the ranks have met. The parts are made in this order because each needs those before
        it; every rank makes the same ones. An error that all ranks have is raised by all: no rank may take it for the
        loss of another, whose status asks for a new start.
        """
        self.report = Report(quiet, self.team.rank)
        given: list[tuple[dict[str, Any], LanguageModel | None]] = []
        self.team.on_all(lambda: given.append(_given(values, model)))
        ((asked, own),) = given
        self.config, self._checkpoint, self._known = self._plan(asked)
        config = self.config
        self.team.wait_at_most(config.comm_timeout)
        self.directory = Path(config.out)
        self.device = self.team.device(lambda: rundir.resolve_device(config.device))
        if config.threads:
            _C.set_num_threads(config.threads)
        else:
            self.team.share_processors()
        self.team.on_all(lambda: self._make_parts(callbacks, own))
        if config.max_ranks > 1 or self.team.size > 1:
            self._join_ranks()
        self.team.on_all(self._make_stepper)

    def _make_parts(self, callbacks: Iterable[Callback | StepFunction], model: LanguageModel | None) -> None:
        """Make what a rank makes without the others. model: the user's own."""
        config = self.config
        self.callbacks = CallbackList(callbacks, make_writers(config.writers if self.team.first else ""))
        warn = self.report.warn if self.team.first else lambda text: None
        self.corpus = open_corpus(config, self._checkpoint, warn, own=model is not None)
        self.tokenizer = self.corpus.tokenizer
        _C.manual_seed(config.seed)
        self.model = make_model(config, self._checkpoint, self.corpus, self.device, model)
        self.base = base_identity(self.model)
        self.optimizer = make_optimizer(self.model, config.optim)
        if config.ema:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.ema = EMA(trained, config.ema, self.optimizer)
        check_z_loss(self.model, config.z_loss)
        self._open_loader()
        config.optim.warmup = warmup_steps(config)  # fixed now, so that a stretched run keeps it
        if self._checkpoint is not None:
            restore(self, self._checkpoint)
        else:
            self.identity = self.corpus.identity()

    def _make_stepper(self) -> None:
        """Make what takes the steps, with or without the other ranks."""
        self.stepper = Stepper(self, self.report.say)

    def _open_loader(self) -> None:
        """The loader of training batches, and the validation set."""
        config, corpus, vocab = self.config, self.corpus, self.model.config.vocab_size
        sizes = config.batch_size, config.seq_len, config.seed
        if config.pack:
            check_takes_documents(self.model)
        self.loader = corpus.packed_loader(*sizes, vocab) if config.pack else corpus.loader(*sizes, vocab)
        found = corpus.val_set(config.seq_len, config.eval_tokens, vocab, config.pack)
        self.val, self.val_targets, self.val_documents, self.val_rows = found

    def _join_ranks(self) -> None:
        """Check that all ranks have the same data, model and checkpoint, and let DataParallel take the steps."""
        from ..distributed import DataParallel

        config = self.config
        same = {
            "data": self.identity,
            "model": [[name, list(tensor.shape)] for name, tensor in self.model.named_parameters()],
            "base": self.base,
            "checkpoint": begun_from(self._checkpoint),
        }
        self.team.check_same(same, "")
        self.parallel = DataParallel(
            self.model, self.optimizer, config.max_ranks or 1, ema=self.ema, overlap=config.overlap
        )
        self.parallel.also = lambda: position(self)

    def _plan(self, values: dict[str, Any]) -> tuple[TrainConfig, Path | None, set[rundir.Entry]]:
        """(Configuration, checkpoint to continue from or None, contents of the run's directory), as rank 0 finds them;
        the other ranks get them from it.
        """
        team = self.team

        def plan() -> tuple[TrainConfig, Path | None, set[rundir.Entry]]:
            config, checkpoint, known = rundir.plan(values, self.report.warn)
            if checkpoint is None and team.size > 1:
                config.max_ranks = config.max_ranks or team.size
            if config.max_ranks > 1 or team.size > 1:
                from ..distributed.bank import check_leaves

                check_leaves(config.max_ranks or 1, team.size)
                check(config)
            return config, checkpoint, known

        def as_json() -> dict[str, Any]:
            config, checkpoint, known = plan()
            place = None if checkpoint is None else os.fspath(checkpoint)
            return {"config": flatten(config), "checkpoint": place, "known": sorted(known)}

        if team.size == 1:
            return plan()
        team.check_same({name: value for name, value in values.items() if not KEYS[name].meta["free"]}, "")
        team.check_same({"resume": values.get("resume", "")}, "")
        found = team.from_first(as_json)
        config, known = build(found["config"]), {(name, inode) for name, inode in found["known"]}
        checkpoint = None if found["checkpoint"] is None else Path(found["checkpoint"])
        return config, checkpoint, known

    def _repr_html_(self) -> str:
        """For notebooks: where the run stands, and its curve so far."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        values = {
            "model": f"{self.config.model.preset}, {count:,} parameters",
            "data": self.corpus.name,
            "device": f"{self.device}, {self.config.precision}",
            "step": f"{self.step} of {self.config.steps}",
        }
        return run_html(self.directory, values)

    @_in_own_precision
    def train_step(self) -> dict[str, float]:
        """Train on the next batch and return its metrics {"loss", "lr", "grad_norm"}.

        The batch is processed in `grad_accum` pieces; each adds the *sum* of its token losses divided by the tokens of
        the whole batch, so the gradient does not depend on how the batch is split. Raises NonFiniteError, and then
        the trainer stands where the last good step left it: `step`, parameters, moments, the loader's position and the
        random state. Who repairs the cause may call train_step or run again, which begins with the batch that failed
        (`trainer.loader.next_batch()` leaves it out), or save; nothing repaired, the same step fails again.
        """
        step = self.stepper.queue()
        try:
            return self.stepper.check(step, self.stepper.read([step])[0])
        except BaseException:
            with contextlib.suppress(Exception):  # the device may be lost
                self.stepper.rewind([step])
            raise

    @_in_own_precision
    def evaluate(self) -> dict[str, float]:
        """Return {"val_loss": nats per token, "val_bpb": bits per byte (when known)} on the fixed validation subset."""
        with self.team.phase("evaluating"):
            return evaluate.evaluate(self)

    @_in_own_precision
    def sample(self) -> str | None:
        """Return a generated text (prompt included), or None when samples are off or the tokens have no tokenizer."""
        with self.team.phase("evaluating"):
            return evaluate.sample(self) if self.team.first else None

    def save(self) -> Path:
        """Write the checkpoint of the current step, keep `keep` in all up to this step, and return its directory.
        CheckpointError when that fails, or when an exception has interrupted the optimizer.
        """

        def write() -> None:
            path = write_checkpoint(self, self.report)
            self._known |= {entry for entry in rundir.contents(self.directory) if entry[0] == path.name}

        path = self.directory / saving.checkpoint_name(self.step)
        with self.team.phase("saving"):
            with self._whole_optimizer():
                self.team.on_first(write)
            if self.team.first:
                remove_old(self)
        self.saved_at = self.step
        self.callbacks.on_checkpoint(self, path)
        return path

    def _whole_optimizer(self, compare: bool = True) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.parallel is None else self.parallel.whole_optimizer(compare)

    def failed(self, what: str, error: Exception, step: int | None = None) -> None:
        """Tell the user that a side effect has failed, the first time; the run goes on."""
        self.report.failed(what, error, step)

    @_in_own_precision
    def run(self) -> Result:
        """Train to the end or to a signal; metrics, evaluations, checkpoints and the plot go to the run's directory.

        An error that ends the steps saves the last finished one first, as an emergency checkpoint. After a
        NonFiniteError (see train_step) it may be called again, and goes on after the last good step.
        ConfigError when something else has written checkpoints or metrics into the directory since this was made.
        """
        with contextlib.ExitStack() as held:
            try:
                self.team.on_first(lambda: self._take_directory(held))
                return self._run()
            except BaseException as error:
                if not isinstance(error, NonFiniteError):  # all ranks raise that one, so nobody has to be told
                    self.team.leave(error)
                raise

    def _take_directory(self, held: contextlib.ExitStack) -> None:
        """Make and lock the run's directory, until `held` ends, and see that nobody else has written there."""
        try:
            make_folders(self.directory)
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be made: {reason(error)}") from None
        held.enter_context(rundir.RunLock(self.directory))
        saving.clean_temporary(self.directory)
        rundir.check_unchanged(self.directory, self._known, None if self._checkpoint is None else self.step)
        held.callback(lambda: self._known.update(rundir.contents(self.directory)))

    def _missed(self) -> dict[str, float]:
        """The evaluation of this step where it was time for one, and the step's record has none: a signal or an error
        came between the two. Else nothing.
        """
        if not self.step or not is_evaluated(self.config, self.step):
            return {}

        def lacks() -> bool:
            with contextlib.suppress(OSError):
                records = read_metrics(self.directory / METRICS)
                return any(record["step"] == self.step and "val_loss" not in record for record in records)
            return False

        return self.evaluate() if self.team.from_first(lacks) else {}

    def _open_directory(self, missed: Mapping[str, float]) -> Metrics:
        """Write what a run begins with, and open its metrics. missed: as of `_missed`."""
        if self._checkpoint is not None:
            for path in saving.set_aside_after(self.directory, self.step):
                self.report.warn(f"a checkpoint after step {self.step} was set aside as {path.name}")
        rundir.write_config(self.directory, self.config)
        return Metrics(self.directory, self.report.warn, keep_until=self.step, more=missed)

    def _run(self) -> Result:
        """Train, and tell callbacks and the user of the beginning and the end. The directory is locked."""
        missed = self._missed()
        metrics: list[Metrics] = []  # one file on rank 0, none on the others
        self.team.on_first(lambda: metrics.append(self._open_directory(missed)))
        ended: Result | None = None
        try:
            self.team.on_all(lambda: self.callbacks.on_start(self))
            self.report.introduce(self)
            if missed:
                self.report.evaluation(self.step, missed)
            record, stopped = loop(self, self.stepper, self.report, self._hooks(metrics))
            ended = result = self._finish(record or missed, stopped)
        finally:
            for file in metrics:
                file.close()
            try:
                self.callbacks.on_end(self, ended)
            finally:
                self.report.later_failures()
        return result

    def _hooks(self, metrics: list[Metrics]) -> Hooks:
        """What the loop calls. metrics: the open files."""

        def write(record: Mapping[str, Any]) -> None:
            for file in metrics:
                file.write(record)

        def sync() -> None:
            for file in metrics:
                file.sync()

        def save() -> None:
            sync()  # a checkpoint that is found has its records
            self.save()

        def save_in_emergency() -> None:
            sync()
            if self.team.size > 1 and not isinstance(sys.exc_info()[1], NonFiniteError):
                return  # the other ranks do not have this error: they would not come to gather the state
            try:
                # The parameters of one rank may have NaN, so differences between ranks are no error here.
                with self.team.phase("saving"), self._whole_optimizer(compare=False):
                    if self.team.first:
                        rescue(self, self.report)
            except Exception as error:
                self.report.warn(f"the state after step {self.step} could not be saved: {error}")

        return Hooks(
            on_step_begin=lambda: self.callbacks.on_step_begin(self),
            write=write,
            on_step=lambda record: self.callbacks.on_step(self, record),
            evaluate=self._evaluate,
            save=save,
            rescue=save_in_emergency,
        )

    def _finish(self, record: Mapping[str, Any], stopped: str | None) -> Result:
        """The result of a run, after a last sample. record: the metrics of the last step; empty where a finished run
        was resumed, which is evaluated here.
        """
        if self.step == self.config.steps and "val_loss" not in record:
            record = {**record, **self._evaluate(False)}
        text = None if stopped else self._sample()
        if "tokens_per_second" in record:
            self.report.speed(self, record["tokens_per_second"])
        self.report.finish(self, text, stopped)
        return Result(
            directory=self.directory,
            step=self.step,
            loss=record.get("loss", float("nan")),
            val_loss=record.get("val_loss"),
            val_bpb=record.get("val_bpb"),
            sample=text,
            seconds=self.elapsed,
            stopped=stopped,
        )

    def _evaluate(self, show_sample: bool) -> dict[str, float]:
        values = self.evaluate()
        self.report.evaluation(self.step, values)
        if show_sample:
            self.report.sample(self._sample())
        return values

    def _sample(self) -> str | None:
        """A sample, or None: one that fails, in decoding or for lack of memory, is a warning."""
        try:
            return self.sample()
        except Exception as error:
            self.report.failed("a sample", error)
            return None
