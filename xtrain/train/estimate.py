"""What a training step needs under each policy of recomputation, told before anything of its size is made; and how long
the run may take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from .. import _C, cuda, lora, saving
from .._C import Tensor
from .._host import host_memory
from ..autograd import no_grad
from ..errors import ConfigError
from ..models.language_model import LanguageModel
from ..models.registry import Architecture
from ..nn.module import evaluating
from ..optim import EMA
from ..saving import DirectoryReader, read_config
from ..saving.adapter import CONFIG as ADAPTER
from ..saving.adapter import read_adapter_config
from . import rundir
from .config import TrainConfig, resolve_model
from .parts import check_positions, check_vocabulary, choose_trained, make_optimizer, open_corpus, plan_model
from .progress import clock
from .step import gradients

# FLOP of matrix products in the time in which a device moves one byte, roughly: an H200 by precision, a server's CPU.
_BALANCE = {"bfloat16": 150.0, "tf32": 75.0, "float32": 13.0}
_BALANCE_CPU = 20.0
_MOST_TOKENS = 1 << 36  # of a batch: the loss runs it in chunks, on meta too, so more would take long
_MOST_LAYERS = 4096  # each layer is run under each policy
_GEMM_SIZE, _GEMM_SECONDS, _MOST_PRODUCTS = 2048, 0.05, 4096  # largest rows and width, time and number in _gemm_rate
_GPU_WORKSPACE = 32 << 20  # bytes of cuBLASLt, for the life of the process


@dataclass(frozen=True)
class Estimate:
    """Memory of a training step in bytes under one policy of recomputation, and its work.

    parameters, optimizer: the model, and the optimizer's state with an EMA.
    activations: kept for the backward by the time the head begins. loss: kept by head and loss.
    other: everything else at the peak of a step: gradients, temporary tensors, what a captured step's region has
        beyond its tensors, and `working`, the memory of kernels.
    evaluation: what an evaluation needs beyond the step; the region of a captured step stays allocated meanwhile.
    gradients: all of them, at the end of a step.
    flops: of products and attention. moved: bytes that other kernels read and write.
    """

    recompute: str
    parameters: int
    optimizer: int
    activations: int
    loss: int
    other: int
    working: int
    evaluation: int
    gradients: int
    flops: int
    moved: int

    @property
    def step(self) -> int:
        """The most bytes at once in a step."""
        return self.parameters + self.optimizer + self.activations + self.loss + self.other

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return self.step + self.evaluation


def estimates(
    kind: Architecture, keys: Any, config: TrainConfig, device: str, adapter: lora.LoraConfig | None = None
) -> list[Estimate]:
    """What a step of `config` needs, for each policy of recomputation that the model has. keys: the model's config.
    adapter: that of the LoRA in the model directory.

    The step itself runs, twice, on a device whose tensors have no elements (`meta`).
    """
    rng, default = _C.get_rng_state(), _C.get_default_device()
    meta = _C.device("meta:0" if device == "cpu" else "meta:1")
    _C.set_default_device(meta)
    try:
        return [_estimate(kind, keys, config, meta, policy, adapter) for policy in kind.recompute]
    finally:
        _C.set_default_device(default)
        _C.set_rng_state(rng)


def _estimate(
    kind: Architecture, keys: Any, config: TrainConfig, meta: _C.device, policy: str, adapter: lora.LoraConfig | None
) -> Estimate:
    """Build the model on meta and run two steps there: the first makes the optimizer's state, the second is measured.
    meta: the device, of index 1 where a GPU is meant.
    """

    def held() -> int:
        return _C.memory_stats(meta)["allocated"] - before

    before = _C.memory_stats(meta)["allocated"]
    model = kind.model(keys).to(_C.bfloat16 if config.precision == "bfloat16" else _C.float32)
    model.recompute = policy
    if adapter is not None:
        lora.apply(model, adapter)
    choose_trained(model, config, new=adapter is None)
    optimizer = make_optimizer(model, config.optim)
    parameters = held()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ema = EMA(trained, config.ema, optimizer) if config.ema else None  # counted with the optimizer's state
    sizes = [
        config.batch_size // config.grad_accum + (i < config.batch_size % config.grad_accum)
        for i in range(config.grad_accum)
    ]
    pieces = [tuple(_C.empty((size, config.seq_len), _C.int64, meta) for _ in range(2)) for size in sizes]
    watch = _Watch(held)
    with watch:
        _step(model, optimizer, pieces, config, ema)  # makes the optimizer's state
    optimizer.zero_grad()
    state = held() - parameters
    _C.memory_reset_peak(meta)
    _C.meta_work(True)
    captured = bool(config.graph and meta.index)
    _C.meta_plan()
    with watch:
        _step(model, optimizer, pieces, config, ema)
    region = _C.meta_planned()  # bytes that a captured step would need
    work = _C.meta_work()
    grads = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    step = parameters + state + region if captured else _C.memory_stats(meta)["peak"] - before
    held_then = held()
    _C.memory_reset_peak(meta)
    _evaluate(model, config, meta)
    evaluation = _C.memory_stats(meta)["peak"] - before - held_then
    if not captured:
        evaluation = max(0, evaluation + held_then - step)
    activations = watch.kept - watch.loss - parameters - state
    working = _working_memory(keys, config, meta)
    other = step - watch.kept + working
    return Estimate(
        recompute=policy,
        parameters=parameters,
        optimizer=state,
        activations=activations,
        loss=watch.loss,
        other=other,
        working=working,
        evaluation=evaluation,
        gradients=grads,
        flops=work["flops"],
        moved=work["bytes"],
    )


class _Watch:
    """A `with` block around each of two steps of a model, which measures by a call hook: kept, the bytes held after the
    first loss of the second step has been computed, and loss, how many of them the loss op keeps.
    """

    def __init__(self, held: Callable[[], int]) -> None:
        self._held, self._step, self._after = held, 0, False
        self.kept = self.loss = 0

    def __enter__(self) -> None:
        self._step += 1
        self._before = _C.set_call_hook(self._see, thread=True)

    def __exit__(self, *_: object) -> None:
        _C.set_call_hook(self._before, thread=True)

    def _see(self, op: Any, arguments: Mapping[str, Any], _outputs: tuple[Tensor, ...]) -> None:
        """A call hook: after each op."""
        if self._step == 2 and self._after and not self.kept:
            self.kept = self._held()
        self._after = op.__name__ in ("linear_cross_entropy", "cross_entropy")
        if self._step == 1 and self._after and not self.loss:
            before = self._held()
            again = op(**arguments)
            self.loss = self._held() - before
            del again


def _step(model: LanguageModel, optimizer: Any, pieces: list[Any], config: TrainConfig, ema: EMA | None) -> None:
    loss, norm = gradients(model, optimizer, pieces, 1.0, config.clip, config.z_loss)
    guard = _C.full((), 0, _C.float32).mul_(loss).mul_(norm)
    optimizer.step(guard=guard)
    if ema is not None:
        ema.update(guard=guard)


@no_grad()
def _evaluate(model: LanguageModel, config: TrainConfig, meta: _C.device) -> None:
    windows = min(max(config.eval_tokens // config.seq_len, 1), config.batch_size)
    ids, targets = (_C.empty((windows, config.seq_len), _C.int64, meta) for _ in range(2))
    with evaluating(model):
        model.loss(ids, targets, reduction="sum")


def _working_memory(keys: Any, config: TrainConfig, meta: _C.device) -> int:
    """Bytes that kernels of a GPU need beside tensors: the workspace of products, and the float32 sums of dQ of
    attention for one piece of the batch. 0 on a CPU.
    """
    if meta.index == 0:
        return 0
    heads, dim = getattr(keys, "num_attention_heads", 0), getattr(keys, "head_dim", 0) or 0
    return _GPU_WORKSPACE + 4 * -(-config.batch_size // config.grad_accum) * config.seq_len * heads * dim


# ---- xtrain train --dry-run ------------------------------------------------------------------------------------------


def dry_run(values: Mapping[str, Any]) -> str:
    """Lines that say what a run with these options would need; nothing is written, and no model is made."""
    warnings: list[str] = []
    config, checkpoint, _ = rundir.plan(values, warnings.append)
    device = rundir.resolve_device(config.device)
    corpus = open_corpus(config, checkpoint, warnings.append)
    planned = None if checkpoint else resolve_model(config, corpus.vocab_size)
    if checkpoint or (planned is None and saving.has_weights(config.model.preset)):
        reader = DirectoryReader(checkpoint or config.model.preset)
        kind, keys = read_config(reader)
        adapter = read_adapter_config(reader) if reader.has(ADAPTER) else None
    else:
        (kind, keys), adapter = plan_model(config, planned), None
    check_vocabulary(keys, corpus)
    check_positions(keys, config)
    limit = host_memory() if device == "cpu" else cuda.get_device_properties(device)["memory_total"]
    if config.batch_size * config.seq_len > _MOST_TOKENS:
        raise ConfigError(
            f"--dry-run: batch_size x seq_len must be at most {_MOST_TOKENS} tokens, "
            f"got {config.batch_size} x {config.seq_len}"
        )
    if (layers := keys.num_hidden_layers) > _MOST_LAYERS:
        raise ConfigError(f"--dry-run: a model must have at most {_MOST_LAYERS} layers, got {layers}")
    count = kind.count_parameters(keys) / 1e6
    head = f"model  {config.model.preset}: {count:.2f} M parameters, {config.precision}, {device}"
    batch = f"batch  {config.batch_size} x {config.seq_len} tokens" + (
        f" in {config.grad_accum} pieces" if config.grad_accum > 1 else ""
    )
    lines = [f"warning: {text}" for text in warnings] + [head, *shapes(kind, keys), batch]
    found = estimates(kind, keys, config, device, adapter)
    if config.recompute not in [one.recompute for one in found]:
        name = getattr(kind.model, "__name__", keys.model_type)
        raise ConfigError(f"recompute must be none for {name}, got {config.recompute}")
    lines += table(found, config, limit, device)
    done = saving.checkpoint_step(checkpoint) or 0 if checkpoint else 0
    chosen = next(one for one in found if one.recompute == config.recompute)
    try:
        rate = _gemm_rate(keys, config, device)
    except MemoryError:
        rate = 0.0
    return "\n".join([*lines, *duration(chosen, config, device, config.steps - done, rate)])


def shapes(kind: Architecture, keys: Any) -> list[str]:
    """The tensors of a model as lines of text: those that differ in numbers alone are one line."""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, shape in kind.tensor_shapes(keys):
        one = re.sub(r"\.\d+\.", ".*.", name), tuple(shape)
        found[one] = found.get(one, 0) + 1
    width = max(len(name) for name, _ in found)
    lines = [f"{'parameters':{width}} {'shape':>16} {'tensors':>8} {'values':>16}"]
    for (name, shape), count in found.items():
        size = " x ".join(map(str, shape))
        lines.append(f"{name:{width}} {size:>16} {count:8} {count * math.prod(shape):16,}")
    return lines


def duration(one: Estimate, config: TrainConfig, device: str, steps: int, rate: float) -> list[str]:
    """The work of a step and the time of `steps`, as lines of text. rate: of products, in FLOP/s; 0 where
    memory for measuring them was lacking.
    """
    work = f"work   {one.flops / 1e9:,.2f} GFLOP of products and attention in a step, without evaluations"
    if not rate:
        return [work, f"ETA    unknown: the GEMM rate could not be measured, {device} has too little free memory"]
    seconds = steps * _work(one, config, device) / rate
    return [
        work,
        f"ETA    {clock(seconds)} for {steps} steps, roughly: estimated from this machine's measured GEMM rate, "
        f"{rate / 1e9:,.1f} GFLOP/s in {config.precision}",
    ]


def _work(one: Estimate, config: TrainConfig, device: str) -> float:
    """The work of a step in FLOP. Bytes that other kernels move count as the FLOP that products make in that time."""
    balance = _BALANCE_CPU if device == "cpu" else _BALANCE[config.precision or "float32"]
    return one.flops + balance * one.moved


def _gemm_rate(keys: Any, config: TrainConfig, device: str) -> float:
    """FLOP/s of [rows, C] x [C, 4 C] on the device, in the run's precision; rows, C: those of the run, at most 2048."""
    rows = min(max(config.batch_size // config.grad_accum, 1) * config.seq_len, _GEMM_SIZE)
    width = min(getattr(keys, "hidden_size", None) or getattr(keys, "n_embd", _GEMM_SIZE), _GEMM_SIZE)
    dtype = _C.bfloat16 if config.precision == "bfloat16" else _C.float32
    a, b = (_C.full(size, 0.7, dtype, _C.device(device)) for size in ((rows, width), (width, 4 * width)))

    def seconds(count: int) -> float:
        begun = perf_counter()
        for _ in range(count):
            _C.matmul(a, b)
        if device != "cpu":
            cuda.synchronize(device)
        return max(perf_counter() - begun, 1e-9)

    before = _C.tf32()
    _C.allow_tf32(config.precision == "tf32")
    try:
        seconds(1)
        count = 1
        while seconds(count) < _GEMM_SECONDS and count < _MOST_PRODUCTS:
            count *= 2
        return 8.0 * rows * width * width * count / min(seconds(count) for _ in range(3))
    finally:
        _C.allow_tf32(before)


def table(found: list[Estimate], config: TrainConfig, limit: int, device: str) -> list[str]:
    """The estimates as lines of text. limit: bytes of the machine."""
    times = [_work(one, config, device) for one in found]
    columns = ("parameters", "optimizer", "activations", "loss", "other", "evaluation", "peak", "FLOPs", "time")
    lines = [f"{'GiB of memory, at the most':26}" + "".join(f"{name:>12}" for name in columns)]
    for one, time in zip(found, times, strict=True):
        sizes = (one.parameters, one.optimizer, one.activations, one.loss, one.other, one.evaluation, one.peak)
        mark = " <- this run" if one.recompute == config.recompute else ""
        mark += "" if one.peak <= limit else f" (more than the {limit / 2**30:.1f} GiB of {device})"
        lines.append(
            f"{'--recompute ' + one.recompute:26}"
            + "".join(f"{size / 2**30:12.3f}" for size in sizes)
            + f"{one.flops / max(found[0].flops, 1):11.2f}x{time / max(times[0], 1):11.2f}x{mark}"
        )
    lines.append(
        f"other: gradients ({found[0].gradients / 2**30:.3f} GiB in the end), temporary tensors, working memory; "
        "time: of the kernels, roughly"
    )
    return lines
