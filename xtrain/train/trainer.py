"""Training a language model: the loop behind `xtrain train`, as a function, a class, or parts.

    from xtrain.train import train
    result = train(data="my_texts/", steps=500, optim={"lr": 1e-3})
    print(result.val_bpb, result.directory)

Options are those of `xtrain train --help`, sections as dicts.

Numbers: the loss is in nats per token; `val_bpb` is bits per byte = nats per token / ln 2 / bytes per token, on a fixed
validation subset. Given the same options, the same data and the same machine, a run has the same bits every time, at
any number of threads, and also when it was interrupted and resumed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import _C, _version, cuda, optim, saving
from ..autograd import no_grad
from ..data import Corpus, Loader, open_data
from ..errors import CheckpointError, ConfigError, DataError, NonFiniteError
from ..files import reason, write_text
from ..generation import generate_text
from ..models.registry import Architecture, architecture
from ..tokenizers import ByteTokenizer, load_tokenizer
from . import options, plot, rundir
from .config import PRESETS, TrainConfig, flatten, resolve_model, to_toml, warmup_steps
from .nonfinite import diagnose
from .progress import Progress, clock, say
from .stop import StopSignals

# Limits of a container (a control group of version 2 or 1), as it sees its own.
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def _host_memory() -> int:
    """Bytes that this process may have: the machine's, or a container's where that has fewer."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _MEMORY_LIMITS:
        try:
            limit = Path(path).read_bytes().strip()
        except OSError:
            continue
        if re.fullmatch(rb"[0-9]{1,20}", limit):  # "max" is none
            memory = min(memory, int(limit))
    return memory


@dataclass
class Result:
    """What a run ended with.

    `stopped`: "SIGINT" or "SIGTERM" when it was asked to stop early, else None. `seconds` counts all its parts.
    """

    directory: Path
    step: int
    loss: float
    val_loss: float | None
    val_bpb: float | None
    sample: str | None
    seconds: float
    stopped: str | None = None


def train(
    config: TrainConfig | None = None,
    /,
    *,
    file: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **given: Any,
) -> Result:
    """Train with the given options and return the Result.

    Options come from a TrainConfig or from `file` (TOML), then from keywords, whose names are those of the command line
    (`steps=100`, `model="tiny"`, `optim={"lr": 1e-3}`). Raises ConfigError, DataError, CheckpointError or
    NonFiniteError with one sentence.
    """
    values = rundir.given_options(config) if config is not None else {}
    keywords = options.from_tree(given)
    values.update(keywords if file is None else options.with_file(file, keywords))
    return Trainer(values, quiet=quiet).run()


@dataclass
class _Step:
    """A step that has been queued: loss and norm are on the device. loader and rng: the states before it. numbers: its
    metrics, once they have been read.
    """

    number: int
    lr: float
    total: int
    pieces: list[Any]
    loss: Any
    norm: Any
    loader: dict[str, int]
    rng: Any
    numbers: dict[str, float] | None = None


def _in_own_precision(method):
    """Float32 products inside may use TF32 if this run's precision says so; outside, what was chosen before holds."""

    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        before = _C.tf32()
        _C.allow_tf32(self.config.precision == "tf32")
        try:
            return method(self, *args, **kwargs)
        finally:
            _C.allow_tf32(before)

    return wrapped


class Trainer:
    """One run. `values`: {dotted option name: value}, as parsed from the command line, or a TrainConfig.

    After construction: `config`, `directory`, `corpus`, `tokenizer`, `model`, `optimizer`, `loader`, `step` (steps
    done).
    """

    def __init__(self, values: dict[str, Any] | TrainConfig | None = None, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._say: Callable[[str], None] = lambda text: None if quiet else say(text)
        if isinstance(values, TrainConfig):
            values = rundir.given_options(values)
        self.config, self._checkpoint, self._known = rundir.plan(values or {}, self._warn)
        config = self.config
        self.directory = Path(config.out)
        self.device = rundir.resolve_device(config.device)
        self._read_every = 1 if self.device == "cpu" else config.log_every  # reading a loss waits for the device
        self._guard: Any = None
        if config.threads:
            _C.set_num_threads(config.threads)
        self.step, self.elapsed = 0, 0.0
        self._saved_at = -1  # the step of the last checkpoint that was written or read
        self.corpus = self._open_corpus()
        self.tokenizer = self.corpus.tokenizer
        _C.manual_seed(config.seed)
        self.model = self._make_model()
        self.optimizer = self._make_optimizer()
        vocab = self.model.config.vocab_size
        self.loader = Loader(self.corpus.train, config.batch_size, config.seq_len, config.seed, vocab, self.corpus.name)
        self._val = self.corpus.val_windows(config.seq_len, config.eval_tokens, vocab)
        self._fingerprint = self.corpus.fingerprint()
        config.optim.warmup = warmup_steps(config)  # fixed now, so that a stretched run keeps it
        if self._checkpoint is not None:
            self._restore(self._checkpoint)

    def _warn(self, text: str) -> None:
        self._say(f"warning: {text}")

    # ---- parts

    def _open_corpus(self) -> Corpus:
        config = self.config
        source = self._checkpoint or (config.model.preset if config.model.preset not in PRESETS else None)
        if source is config.model.preset and not Path(source, "config.json").is_file():
            resolve_model(config, 0)  # raises, before any data is read
        tokenizer = load_tokenizer(source) if source is not None else ByteTokenizer()
        return open_data(config.data, tokenizer, config.val_fraction)

    def _make_model(self) -> Any:
        config, dtype = self.config, _C.bfloat16 if self.config.precision == "bfloat16" else _C.float32
        if self._checkpoint is not None:
            model = saving.load_model(self._checkpoint, dtype=dtype)
        else:
            keys = resolve_model(config, self.corpus.vocab_size)
            if keys is None:
                model = saving.load_model(config.model.preset, dtype=dtype)
            else:
                kind = architecture(keys["model_type"])
                planned = kind.config(**keys, dtype="float32")
                self._refuse_what_no_memory_holds(kind, planned)
                model = kind.model(planned).to(dtype)
        if model.config.vocab_size < self.corpus.vocab_size:
            raise DataError(
                f"data: {self.corpus.name} needs a vocabulary of {self.corpus.vocab_size} tokens, "
                f"the model has {model.config.vocab_size}"
            )
        return model.to(self.device)

    def _refuse_what_no_memory_holds(self, kind: Architecture, planned: Any) -> None:
        """OutOfMemoryError for a model beyond all memory there is, which the system may promise page by page until it
        kills the process. Weights are drawn on the host in float32; training takes 16 bytes a parameter in both
        precisions: weight, gradient and moments, and in bfloat16 the float32 weight. Modules, tensors and their graph
        are on the host in any case: 98 kB a layer of one channel.
        """
        count = kind.count_parameters(planned)
        limits = [("cpu", _host_memory(), 16 if self.device == "cpu" else 4, 100_000)]
        if self.device != "cpu":
            limits.append((self.device, cuda.get_device_properties(self.device)["memory_total"], 16, 0))
        for device, memory, each, layer in limits:
            if each * count + layer * planned.num_hidden_layers > memory:
                names = [name for name in kind.sizes if getattr(planned, name)]
                raise _C.OutOfMemoryError(
                    f"model: out of memory on {device}, whose {memory / 1e9:.3g} GB must hold {each} bytes a parameter "
                    f"and {layer // 1000} kB a layer: {', '.join(f'{name} {getattr(planned, name)}' for name in names)}"
                )

    def _make_optimizer(self) -> Any:
        settings = self.config.optim
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (settings.beta1, settings.beta2)
        return optim.AdamW(
            [group for group in groups if group["params"]], lr=settings.lr, betas=betas, eps=settings.eps
        )

    def _restore(self, checkpoint: Path) -> None:
        state = saving.load_checkpoint(checkpoint, self.model, self.optimizer)
        try:
            if state["data"] != self._fingerprint:
                raise ConfigError(
                    f"resume: data was {state['config']['data']!r} in this run, "
                    f"and {self.config.data!r} now holds something else"
                )
            self.step, self.elapsed = int(state["step"]), float(state["elapsed"])
            self._saved_at = self.step
            self.loader.load_state_dict(state["loader"])
            _C.set_rng_state(tuple(state["rng"]))
        except ConfigError:
            raise
        except KeyError as error:
            raise CheckpointError(f"{checkpoint / 'trainer_state.json'} lacks {error}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{checkpoint / 'trainer_state.json'} is damaged: {error}") from None
        if self.step > self.config.steps:
            raise ConfigError(
                f"steps must be at least {self.step}, where the checkpoint stands, got {self.config.steps}"
            )

    # ---- one step, evaluation, sample, checkpoint

    @_in_own_precision
    def train_step(self) -> dict[str, float]:
        """Train on the next batch and return its metrics {"loss", "lr", "grad_norm"}.

        The batch is processed in `grad_accum` pieces; each adds the *sum* of its token losses divided by the tokens of
        the whole batch, so the gradient does not depend on how the batch is split. Raises NonFiniteError, and then
        the trainer stands where the last good step left it: `step`, parameters, moments, the loader's position and the
        random state. Who repairs the cause may call train_step or run again, which begins with the batch that failed
        (`trainer.loader.next_batch()` leaves it out), or save; nothing repaired, the same step fails again.
        """
        step = self._queue_step()
        return self._sound(step, self._read([step])[0])

    def _queue_step(self) -> _Step:
        """A step as far as it goes without waiting for the device. What ends it early gives its batch back."""
        loader, rng = self.loader.state_dict(), _C.get_rng_state()
        try:
            return self._queue(loader, rng)
        except BaseException:
            self._give_back(loader, rng)
            raise

    def _give_back(self, loader: dict[str, int], rng: Any) -> None:
        self.loader.load_state_dict(loader)
        _C.set_rng_state(rng)

    def _queue(self, loader: dict[str, int], rng: Any) -> _Step:
        config, settings = self.config, self.config.optim
        ids, targets = self.loader.next_batch()
        total = max(int(np.count_nonzero(targets != -100)), 1)
        pieces = [
            (self._tensor(piece_ids), self._tensor(piece_targets))
            for piece_ids, piece_targets in zip(
                np.array_split(ids, config.grad_accum), np.array_split(targets, config.grad_accum), strict=True
            )
        ]
        lr = optim.lr_schedule(
            settings.schedule, self.step, settings.warmup, config.steps, settings.lr, settings.final_lr
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss, norm = self._gradients(pieces, total)
        step = _Step(self.step + 1, lr, total, pieces, loss, norm, loader, rng)
        if self._read_every == 1:
            self._sound(step, self._read([step])[0])  # raises before anything is changed
            self.optimizer.step()
        else:  # NaN and infinity stay in the guard: no later step changes anything either
            guard = norm + loss * 0.0
            self._guard = guard if self._guard is None else guard + self._guard * 0.0
            self.optimizer.step(guard=self._guard)
        self.step += 1
        return step

    def _gradients(self, pieces: list[Any], total: int) -> tuple[Any, Any]:
        """Loss and norm of the gradients, as tensors on the device; the gradients are clipped."""
        self.optimizer.zero_grad()
        loss = None
        for piece_ids, piece_targets in pieces:
            part = self.model.loss(piece_ids, piece_targets, reduction="sum") * (1.0 / total)
            part.backward()
            loss = part.detach() if loss is None else loss + part.detach()
        return loss, optim.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)

    @no_grad()
    def _read(self, steps: list[_Step]) -> list[dict[str, float]]:
        """The metrics of queued steps; of those that have not been read yet, in one copy to the host."""
        unread = [step for step in steps if step.numbers is None]
        if unread:
            values = _C.cat([value.reshape(1).float() for step in unread for value in (step.loss, step.norm)]).tolist()
            for step, loss, norm in zip(unread, values[::2], values[1::2], strict=True):
                step.numbers = {"loss": loss, "lr": step.lr, "grad_norm": norm}
        return [step.numbers for step in steps]

    def _sound(self, step: _Step, numbers: dict[str, float]) -> dict[str, float]:
        """`numbers`, or NonFiniteError, and then everything is as before that step. One that is found bad late is
        repeated for the diagnosis: nothing has changed since.
        """
        loss, norm = numbers["loss"], numbers["grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            return numbers
        self._guard = None  # whoever repairs the model may go on
        self.optimizer.settle()
        try:
            if self.step >= step.number:
                self.step = step.number - 1
                _C.set_rng_state(step.rng)
                self._gradients(step.pieces, step.total)
            raise self._nonfinite(loss, norm, [piece_ids for piece_ids, _ in step.pieces])
        finally:
            self._give_back(step.loader, step.rng)

    def _nonfinite(self, loss: float, norm: float, pieces: list[Any]) -> NonFiniteError:
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {norm}"
        found = saving.find_checkpoints(self.directory)
        last = f"the last checkpoint is {found[0]}" if found else "there is no checkpoint yet"
        return NonFiniteError(f"step {self.step + 1}: {what}; first bad value: {diagnose(self.model, pieces)}; {last}")

    def _tensor(self, array: np.ndarray) -> Any:
        tensor = _C.from_numpy(np.ascontiguousarray(array))
        return tensor if self.device == "cpu" else tensor.to(_C.device(self.device))

    @no_grad()
    @_in_own_precision
    def evaluate(self) -> dict[str, float]:
        """Return {"val_loss": nats per token, "val_bpb": bits per byte (when known)} on the fixed validation subset."""
        total, size = 0.0, self.config.batch_size
        for start in range(0, len(self._val), size):
            block = self._val[start : start + size]
            total += self.model.loss(self._tensor(block[:, :-1]), self._tensor(block[:, 1:]), reduction="sum").item()
        loss = total / (self._val.shape[0] * (self._val.shape[1] - 1))
        metrics = {"val_loss": loss}
        if self.corpus.bytes_per_token:
            metrics["val_bpb"] = loss / math.log(2.0) / self.corpus.bytes_per_token
        return metrics

    @_in_own_precision
    def sample(self) -> str | None:
        """Return a generated text (prompt included), or None when samples are off or the tokens have no tokenizer."""
        settings = self.config.sample
        if not settings.tokens or self.tokenizer is None:
            return None
        if settings.prompt is None:
            python = self.corpus.name == "python" and isinstance(self.tokenizer, ByteTokenizer)
            ids = self.tokenizer.encode(b"def ") if python else self._val[0, :16]
        else:
            ids = self.tokenizer.encode(settings.prompt.encode("utf-8", "surrogateescape"))
        return generate_text(
            self.model,
            self.tokenizer,
            ids,
            settings.tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=self.config.seed,
        )

    def save(self) -> Path:
        """Write the checkpoint of the current step, keep `keep` in all up to this step, and return its directory."""
        path = self.directory / saving.checkpoint_name(self.step)
        state = {
            "xtrain": _version.__version__,
            "step": self.step,
            "tokens": self.step * self.config.batch_size * self.config.seq_len,
            "elapsed": self.elapsed,
            "loader": self.loader.state_dict(),
            "rng": list(_C.get_rng_state()),
            "data": self._fingerprint,
            "config": flatten(dataclasses.replace(self.config, resume="", extend=False)),
        }
        saving.save_checkpoint(path, self.model, self.optimizer, state, self.tokenizer)
        self._saved_at = self.step
        self._known |= {entry for entry in rundir.contents(self.directory) if entry[0] == path.name}
        before = [
            old for old in saving.find_checkpoints(self.directory) if (saving.checkpoint_step(old) or 0) < self.step
        ]
        for old in before[self.config.keep - 1 :] if self.config.keep else []:
            saving.remove_checkpoint(old)
        return path

    # ---- the run

    @_in_own_precision
    def run(self) -> Result:
        """Train to the end or to a signal; metrics, evaluations, checkpoints and the plot go to the run's directory.

        After a NonFiniteError (see train_step) it may be called again, and goes on after the last good step.
        ConfigError when something else has written checkpoints or metrics into the directory since this was made.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be made: {error.strerror or error}") from None
        with rundir.RunLock(self.directory):
            saving.clean_temporary(self.directory)
            self._refuse_what_is_new()
            try:
                return self._run()
            finally:
                self._known |= rundir.contents(self.directory)

    def _run(self) -> Result:
        if self._checkpoint is not None:
            for path in saving.set_aside_after(self.directory, self.step):
                self._warn(f"a checkpoint after step {self.step} was set aside as {path.name}")
        self._write_config()
        metrics = rundir.Metrics(self.directory, self._warn, keep_until=self.step)
        try:
            return self._loop(metrics)
        finally:
            metrics.close()

    def _refuse_what_is_new(self) -> None:
        """Refuse a directory that another run has written to since this one was planned, or has last held the lock."""
        new = {name for name, _ in rundir.contents(self.directory) - self._known}
        if self._checkpoint is None and new:
            raise rundir.holds_a_run(self.directory)
        newest = max(new, key=lambda name: saving.checkpoint_step(name) or 0, default="")
        if (saving.checkpoint_step(newest) or 0) > self.step:
            raise ConfigError(
                f"{self.directory} already holds a run that has gone on to {newest}; continue it with --resume"
            )

    def _write_config(self) -> None:
        try:
            write_text(self.directory / rundir.CONFIG, to_toml(self.config))
        except OSError as error:
            raise CheckpointError(f"{error.filename} cannot be written: {reason(error)}") from None

    def _introduce(self) -> None:
        config, count = self.config, sum(parameter.numel() for parameter in self.model.parameters())
        threads = f", {_C.get_num_threads()} threads" if self.device == "cpu" else ""
        self._say(
            f"model  {config.model.preset}: {count / 1e6:.2f} M parameters, {config.precision}, {self.device}{threads}"
        )
        corpus = self.corpus
        self._say(f"data   {corpus.name}: {corpus.train_tokens:,} training, {corpus.val_tokens:,} validation tokens")
        start = f"from step {self.step} " if self.step else ""
        each = f"{config.batch_size} x {config.seq_len} tokens each"
        self._say(f"run    {self.directory}: {start}to step {config.steps}, {each}")

    def _loop(self, metrics: rundir.Metrics) -> Result:
        config = self.config
        self._introduce()
        progress = Progress(config.steps, self.step, every=config.log_every, quiet=self._quiet)
        outer, self._say = self._say, progress.message
        record: dict[str, Any] = {}
        speed = _Speed(config.batch_size * config.seq_len)
        queued: list[_Step] = []
        try:
            with StopSignals(quiet=self._quiet) as stop:
                begun = time.monotonic() - self.elapsed
                while queued or (self.step < config.steps and not stop.received):
                    if self.step < config.steps and not stop.received:
                        if not queued:
                            speed.start()
                        queued.append(self._queue_step())
                    final = self.step == config.steps
                    evaluate = final or (config.eval_every and self.step % config.eval_every == 0)
                    save = config.save_every and self.step % config.save_every == 0
                    if len(queued) < self._read_every and not (evaluate or save or stop.received):
                        continue
                    read = self._read(queued)
                    rate = speed.stop(len(queued))
                    for step, numbers in zip(queued, read, strict=True):
                        record = {"step": step.number, **self._sound(step, numbers)}
                        record.update(tokens=step.number * speed.tokens, tokens_per_second=round(rate, 1))
                        if step is queued[-1] and evaluate and (final or not stop.received):
                            record.update(self._report_evaluation(sample=not final))
                        self.elapsed = time.monotonic() - begun
                        metrics.write({**record, "time": round(self.elapsed, 3)})
                    queued = []
                    progress.update(self.step, record["loss"], rate)
                    if save and not final:
                        self._try_save()
                if self._saved_at != self.step:
                    self.save()
        finally:
            progress.close()
            self._say = outer
        return self._finish(record, stop.received)

    def _try_save(self) -> None:
        """Save; when that fails, warn and go on: the next save may work, and the last one of the run must."""
        try:
            self.save()
        except CheckpointError as error:
            self._warn(str(error))

    def _report_evaluation(self, sample: bool) -> dict[str, float]:
        values = self.evaluate()
        shown = (
            f"{values['val_bpb']:.4f} bits per byte"
            if "val_bpb" in values
            else f"{values['val_loss']:.4f} nats per token"
        )
        self._say(f"step {self.step}: validation {shown}")
        if sample and (text := self.sample()):
            self._say(_indent(text))
        return values

    def _finish(self, record: dict[str, Any], stopped: str | None) -> Result:
        if self.step == self.config.steps and "val_loss" not in record:  # resumed a finished run
            record = {**record, **self._report_evaluation(sample=False)}
        text = None if stopped else self.sample()
        if self.config.plot:
            self._draw()
        if text:
            self._say(f"sample:\n{_indent(text)}")
        if stopped:
            self._say(
                f"stopped by {stopped} after step {self.step}; continue with: xtrain train --resume {self.directory}"
            )
        self._say(f"{self.step} steps in {clock(self.elapsed)}; the run is in {self.directory}")
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

    def _draw(self) -> None:
        try:
            plot.plot_loss(self.directory, self.corpus.bytes_per_token)
        except ImportError:
            self._say(plot.HINT)
        except Exception as error:  # a picture is never worth a run
            what = f"{error.filename}: {reason(error)}" if isinstance(error, OSError) else str(error)
            self._warn(f"loss.png could not be drawn: {what}")


class _Speed:
    """Tokens per second: the average over the last steps, without the time of evaluations and saves."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._recent: list[tuple[float, int]] = []  # (seconds, steps)
        self._begun = 0.0

    def start(self) -> None:
        self._begun = time.monotonic()

    def stop(self, steps: int) -> float:
        self._recent = [*self._recent[-19:], (time.monotonic() - self._begun, steps)]
        return self.tokens * sum(n for _, n in self._recent) / max(sum(t for t, _ in self._recent), 1e-9)


def _indent(text: str) -> str:
    return "\n".join(f"    | {line}" for line in text.splitlines())
