"""The configuration of a training run: one set of dataclasses.

Names, types, defaults, units and help texts are all here; the command line, TOML files, `--help`, the saved
configuration and the check on resume are generated from the fields (see options.py and cli/). Values are taken in this
order, later wins: defaults, TOML file, command line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from .._types import is_whole
from ..errors import ConfigError, nearest, shown
from ..generation.sampling import LONGEST_SAMPLE
from ..models.presets import PRESETS
from ..models.registry import RECOMPUTE
from ..saving.places import find_checkpoints

# What a new run on a GPU starts from when no model is named; options that are given win.
GPU_RUN: dict[str, Any] = {
    "model.preset": "gpu",
    "batch_size": 32,
    "seq_len": 512,
    "steps": 1500,
    "optim.lr": 1e-3,
    "optim.final_lr": 1e-4,
}


_RULES = ("choices", "minimum", "maximum", "above", "below", "alone")


def option(default: Any, help: str, unit: str = "", *, free: bool = False, **rules: Any) -> Any:
    """A field with its documentation and `rules`: choices, minimum, maximum, above and below (without the bound).

    `free`: a resumed run may change it, because the numbers trained do not depend on it. `alone`, one of the rules: the
    value where the command line gives none.
    """
    return field(default=default, metadata=dict(help=help, unit=unit, free=free) | dict.fromkeys(_RULES) | rules)


@dataclass
class ModelConfig:
    """Keys of a Hugging Face `config.json`. None means: from the preset, or from the model directory."""

    preset: str = option(
        "default",
        f"{', '.join(PRESETS)} (what a GPU starts from), or a Hugging Face model directory to continue from, "
        "or of which config.json and tokenizer are taken where it holds no weights (short form: --model)",
    )
    vocab_size: int | None = option(None, "size of the vocabulary; 256 for bytes", "tokens", minimum=2)
    hidden_size: int | None = option(None, "width of the residual stream", "channels", minimum=1)
    intermediate_size: int | None = option(None, "width of the SwiGLU feed-forward layer", "channels", minimum=1)
    num_hidden_layers: int | None = option(None, "transformer layers", "layers", minimum=1)
    num_attention_heads: int | None = option(None, "query heads", "heads", minimum=1)
    num_key_value_heads: int | None = option(None, "key/value heads; must divide the query heads", "heads", minimum=1)
    head_dim: int | None = option(None, "size of one head; even, because of RoPE", "channels", minimum=2)
    max_position_embeddings: int | None = option(
        None, "longest sequence the model is meant for (default: seq_len)", "tokens", minimum=1
    )
    rope_theta: float | None = option(None, "base of the RoPE frequencies", above=0.0)
    rms_norm_eps: float | None = option(None, "added to the mean square in RMSNorm", above=0.0)
    tie_word_embeddings: bool | None = option(None, "the output layer is the embedding matrix")
    initializer_range: float | None = option(None, "standard deviation of the initial weights", above=0.0)
    mhc_streams: int | None = option(
        None,
        "residual streams of hyper-connections, an extension that other readers of the model refuse; 0 for the plain "
        "residual",
        "streams",
        minimum=0,
        maximum=8,
    )
    mhc_contraction: str | None = option(
        None, "how the streams become one at the end", choices=("mean", "sum", "learned")
    )


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = option(
        "adamw",
        "adamw, or muon for the matrices of hidden layers, with AdamW for embeddings, head, norms and vectors",
        choices=("adamw", "muon"),
    )
    lr: float = option(3e-3, "peak learning rate", "per step", minimum=0.0)
    lr_factors: str = option(
        "",
        "learning rates of some parameters, as factors of the others': patterns of names with * and ?, with commas "
        "between, of which the first that matches counts (model.embed_tokens.*=0.3,*norm.weight=2)",
    )
    final_lr: float = option(
        3e-4, "learning rate that cosine, linear and wsd fall to at the end", "per step", minimum=0.0
    )
    schedule: str = option(
        "cosine",
        "course of the learning rate after warm-up; wsd: constant, then a fall in the last steps (decay)",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    decay: int | None = option(
        None, "steps of wsd's fall, at the end (default: a fifth of the steps)", "steps", minimum=0
    )
    decay_form: str = option(
        "linear",
        "how wsd falls: on a line, or as 1 - sqrt of the part that is over",
        choices=("linear", "1-sqrt"),
    )
    warmup: int | None = option(None, "linear warm-up from 0 (default: a twentieth of the steps)", "steps", minimum=0)
    beta1: float = option(0.9, "decay of the first moment", "per step", minimum=0.0, below=1.0)
    beta2: float = option(0.95, "decay of the second moment", "per step", minimum=0.0, below=1.0)
    eps: float = option(1e-8, "added to the root of the second moment", above=0.0)
    weight_decay: float = option(
        0.1, "decoupled weight decay of matrices (vectors are not decayed)", "per unit of lr", minimum=0.0
    )
    muon_momentum: float = option(
        0.95, "of muon: decay of the average of gradients", "per step", minimum=0.0, below=1.0
    )
    qk_clip: float = option(
        0.0,
        "a head of attention whose largest logit is above this is scaled to it after the step (100); 0 for no clipping",
        minimum=0.0,
    )
    qk_clip_every: int = option(
        10, "of qk_clip: the logits of every so many steps are measured, in a forward of their own", "steps", minimum=1
    )
    ns_steps: int = option(5, "of muon: iterations of Newton-Schulz", "iterations", minimum=1, maximum=99)
    ns_dtype: str | None = option(
        None,
        "of muon: what Newton-Schulz is computed in (default: bfloat16 on a GPU, float32 on a CPU)",
        choices=("float32", "bfloat16", "float16"),
    )
    adjust_lr_fn: str = option(
        "match_rms_adamw",
        "of muon: how the shape of a matrix scales its rate; match_rms_adamw: 0.2 sqrt(longer side), so lr and "
        "weight_decay serve both optimizers; original: sqrt(max(1, rows / columns))",
        choices=("match_rms_adamw", "original"),
    )


@dataclass
class LoraOptions:
    """LoRA: what is trained is a product of two narrow matrices beside the weights of a model directory."""

    r: int = option(0, "rank of the matrices; 0 trains the model itself", "channels", minimum=0)
    alpha: float = option(16.0, "the product is multiplied by alpha / r", above=0.0)
    dropout: float = option(0.0, "dropout of what the first matrix reads", minimum=0.0, maximum=0.99)
    targets: str = option(
        "all-linear",
        "layers by the ends of their names, with commas between (q_proj,v_proj); or every one but the head",
    )


@dataclass
class SampleConfig:
    """The text generated at evaluations and at the end."""

    prompt: str | None = option(
        None, "text to continue (default: 'def ' for Python source, else the start of the validation data)", free=True
    )
    tokens: int = option(200, "length of a sample; 0 for none", "tokens", minimum=0, maximum=LONGEST_SAMPLE, free=True)
    temperature: float = option(0.7, "divides the logits; 0 takes the likeliest token", minimum=0.0, free=True)
    top_k: int = option(40, "sample among the k likeliest tokens; 0 for all", "tokens", minimum=0, free=True)
    top_p: float = option(
        1.0, "sample among the likeliest tokens of this total probability", above=0.0, maximum=1.0, free=True
    )


@dataclass
class TrainConfig:
    """Everything that decides a run.

    `TrainConfig()` is the default run: a byte-level model on Python's own source files.
    """

    data: str = option(
        "python",
        "'python' (the standard library's source), a text file, a folder of texts, a token file, or a folder of those; "
        "what runs have written into a folder is left out; several with the shares of rows that come from each: "
        "a.tokens:0.7,b.tokens:0.3",
    )
    tokenizer: str = option(
        "",
        "a directory with a tokenizer.json, which text is encoded with (default: that of the model, else of the token "
        "file, else bytes); checkpoints hold it",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraOptions = field(default_factory=LoraOptions)
    sample: SampleConfig = field(default_factory=SampleConfig)
    device: str = option("auto", "cpu, cuda, cuda:0, ...; auto takes a usable GPU, else the CPU", free=True)
    precision: str | None = option(
        None,
        "dtype of parameters and activations; tf32: float32, and a GPU may round operands of matrix products to TF32; "
        "with bfloat16 the optimizer keeps float32 masters (default: bfloat16 on a GPU, float32 on a CPU)",
        choices=("float32", "tf32", "bfloat16"),
    )
    steps: int = option(1200, "length of the run", "optimizer steps", minimum=1)
    batch_size: int = option(8, "sequences in one optimizer step, all pieces together", "sequences", minimum=1)
    seq_len: int = option(256, "length of a training sequence", "tokens", minimum=1)
    pack: bool = option(
        False,
        "fill sequences with whole documents, best fit decreasing: a token sees its own document alone, and positions "
        "begin anew in each; documents longer than seq_len are cut",
    )
    grad_accum: int = option(
        1, "pieces a batch is split into to save memory; the gradient stays the same", "pieces", minimum=1, free=True
    )
    max_ranks: int = option(
        0,
        "pieces of a batch that are added in one fixed tree: the run has the same bits on 1, 2, 4 ... processes up to "
        "this number; 0 for the number of processes at its first start",
        "pieces",
        minimum=0,
        maximum=4096,
    )
    recompute: str = option(
        "none",
        "what the backward computes again instead of keeping it, with the same numbers; cheap: outputs of norms, RoPE "
        "and SwiGLU; block: each layer, from its input; full: groups of layers, and in them each layer",
        choices=RECOMPUTE,
        free=True,
    )
    graph: bool = option(
        True,
        "record the step on a GPU once, as a CUDA graph, and replay it: the same numbers, with one launch a step",
        free=True,
    )
    overlap: bool | None = option(
        None,
        "let GPUs of several processes send gradients while the backward makes others: the same numbers "
        "(default: where they lie on several hosts)",
        free=True,
    )
    freeze: str = option(
        "",
        "parameters that are not trained: patterns of their names with * and ?, with commas between "
        "(model.embed_tokens.*,*norm.weight)",
    )
    ema: float = option(
        0.0,
        "keep exponential averages of the parameters, with this decay (0.999), for sample --ema and export --ema; "
        "0 for none",
        "per step",
        minimum=0.0,
        below=1.0,
    )
    z_loss: float = option(
        0.0,
        "times the squared log sum exp of the logits is added to the loss of a token (1e-4); 0 for none",
        minimum=0.0,
    )
    clip: float = option(1.0, "largest global norm of the gradients; 0 for no clipping", minimum=0.0)
    seed: int = option(0, "of the initial weights, the order of the data and the samples", minimum=0, maximum=2**63 - 1)
    val_fraction: float = option(
        0.05, "part of the data kept for validation: whole files of a folder, else the end", above=0.0, maximum=0.5
    )
    eval_every: int = option(
        300, "evaluate and sample every so many steps; 0 only at the end", "steps", minimum=0, free=True
    )
    eval_tokens: int = option(65536, "size of the fixed validation subset", "tokens", minimum=1, free=True)
    save_every: int = option(
        300, "write a checkpoint every so many steps; 0 only at the end", "steps", minimum=0, free=True
    )
    keep: int = option(
        2, "newest checkpoints kept; 0 for all; emergency checkpoints do not count", "checkpoints", minimum=0, free=True
    )
    log_every: int = option(
        10, "print a line every so many steps when the output is not a terminal", "steps", minimum=1, free=True
    )
    writers: str = option(
        "",
        "where metrics go beside metrics.jsonl, with commas between: csv (metrics.csv), tensorboard, wandb (a package)",
        free=True,
    )
    plot: bool = option(True, "draw loss.png (needs matplotlib)", free=True)
    threads: int = option(
        0, "CPU threads; 0 for all; the result does not depend on it", "threads", minimum=0, maximum=256, free=True
    )
    comm_timeout: float | None = option(
        None,
        "with several processes: how long the others wait for one that does not come, before all end (default: "
        "XTRAIN_COMM_TIMEOUT, else 300)",
        "seconds",
        above=0.0,
        maximum=1e6,
        free=True,
    )
    name: str = option("", "name of the run, in runs/ (default: <model>-<number>)", free=True)
    out: str = option("", "directory of the run (default: runs/<name>)", free=True)
    resume: str = option(
        "",
        "continue a run, given its directory, its config.toml or a checkpoint; alone: that of --out or --name, else "
        "the newest; auto: the same, but start (over) when there is no checkpoint",
        free=True,
        alone="last",
    )
    extend: bool = option(
        False, "with --resume: allow another --steps, which stretches the rest of the schedule", free=True
    )


@dataclass(frozen=True)
class Key:
    """One option: dotted name, Python type (None allowed or not), default and metadata."""

    name: str
    kind: type[Any]
    optional: bool
    default: Any
    meta: typing.Mapping[str, Any]

    def check(self, value: Any, where: str = "") -> Any:
        """Return `value` as this option's type, or raise ConfigError with one sentence."""
        suffix = f" ({where})" if where else ""
        if value is None and self.optional:
            return None
        kind = self.kind
        if isinstance(value, int) and value.bit_length() > 1023:  # no float, and perhaps no text
            raise ConfigError(f"{self.name} must be less than 2**1023, got {value.bit_length()} bits{suffix}")
        if kind is float and is_whole(value):
            value = float(value)
        if kind is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ConfigError(f"{self.name} must be {_KIND_WORDS[kind]}, got {shown(value)}{suffix}")
        if isinstance(value, str) and "\0" in value and self.name != "sample.prompt":
            raise ConfigError(f"{self.name} must not hold a NUL character, got {shown(value)}{suffix}")
        meta = self.meta
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{self.name} must be finite, got {value}{suffix}")
        if meta["choices"] and value not in meta["choices"]:
            raise ConfigError(f"{self.name} must be one of {', '.join(meta['choices'])}, got {shown(value)}{suffix}")
        for bound, fails, words in (
            (meta["minimum"], lambda low: value < low, "at least"),
            (meta["above"], lambda low: value <= low, "greater than"),
            (meta["maximum"], lambda high: value > high, "at most"),
            (meta["below"], lambda high: value >= high, "less than"),
        ):
            if bound is not None and fails(bound):
                raise ConfigError(f"{self.name} must be {words} {bound}, got {value}{suffix}")
        return value

    def parse(self, text: str) -> Any:
        """Return the value written as `text` on the command line."""
        if self.optional and text.lower() == "none":
            return None
        try:
            if self.kind is bool:
                return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
            if self.kind is int:
                value = (
                    float(text) if "e" in text.lower() else int(text)
                )  # 1e6 is a convenient way to write a whole number
                if value != int(value):
                    raise ValueError
                return int(value)
            return self.kind(text)
        except (ValueError, KeyError, OverflowError):
            raise ConfigError(f"{self.name} must be {_KIND_WORDS[self.kind]}, got {shown(text)}") from None


_KIND_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _collect(cls: type, prefix: str = "") -> dict[str, Key]:
    hints: dict[str, Any] = typing.get_type_hints(cls)
    keys: dict[str, Key] = {}
    for item in dataclasses.fields(cls):
        kind = hints[item.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            keys.update(_collect(kind, f"{prefix}{item.name}."))
            continue
        optional = isinstance(kind, types.UnionType)
        if optional:
            kind = next(arg for arg in typing.get_args(kind) if arg is not type(None))
        keys[prefix + item.name] = Key(prefix + item.name, kind, optional, item.default, item.metadata)
    return keys


KEYS: dict[str, Key] = _collect(TrainConfig)  # dotted name -> Key, in the order of the fields
SECTIONS = ("model", "optim", "lora", "sample")


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return {dotted name: value} of a config dataclass."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            flat.update(flatten(value, f"{prefix}{item.name}."))
        else:
            flat[prefix + item.name] = value
    return flat


def build(values: typing.Mapping[str, Any], where: str = "") -> TrainConfig:
    """Return the TrainConfig with the dotted names of `values` set.

    Every value is checked, then the rules between values.
    """
    config = TrainConfig()
    for name, value in values.items():
        target: Any = config
        *path, last = name.split(".")
        for part in path:
            target = getattr(target, part)
        setattr(target, last, KEYS[name].check(value, where))
    check(config)
    return config


def check(config: TrainConfig) -> None:
    """Check every value and the rules between values; raises ConfigError."""
    for name, value in flatten(config).items():
        KEYS[name].check(value)
    if config.optim.warmup is not None and config.optim.warmup > config.steps:
        raise ConfigError(f"optim.warmup must be at most steps ({config.steps}), got {config.optim.warmup}")
    if config.optim.decay is not None and config.optim.decay > config.steps:
        raise ConfigError(f"optim.decay must be at most steps ({config.steps}), got {config.optim.decay}")
    if config.grad_accum > config.batch_size:
        raise ConfigError(f"grad_accum must be at most batch_size ({config.batch_size}), got {config.grad_accum}")
    pieces = config.max_ranks * config.grad_accum
    if config.max_ranks > 1 and config.batch_size % pieces:
        raise ConfigError(
            f"batch_size must be a multiple of max_ranks x grad_accum ({config.max_ranks} x {config.grad_accum}), got "
            f"{config.batch_size}"
        )
    if config.sample.prompt == "":
        raise ConfigError("sample.prompt must not be empty")
    if config.lora.r and config.freeze:
        raise ConfigError(f"freeze must be left out with lora.r, which trains nothing else, got {config.freeze!r}")
    if config.lora.r and config.model.preset in PRESETS:
        raise ConfigError(f"model must be a model directory with lora.r {config.lora.r}, got {config.model.preset}")
    model = config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise ConfigError(f"model.num_key_value_heads must divide model.num_attention_heads ({heads}), got {kv_heads}")
    if model.mhc_streams == 0 and model.mhc_contraction not in (None, "mean"):
        raise ConfigError(
            f"model.mhc_contraction must be mean, or left out, without model.mhc_streams, got {model.mhc_contraction!r}"
        )
    if model.head_dim is not None and model.head_dim % 2:
        raise ConfigError(f"model.head_dim must be even, got {model.head_dim}")


# Options that count only beside another one: their names, that one in words, and whether it is set.
_ONLY_WITH: tuple[tuple[tuple[str, ...], str, typing.Callable[[TrainConfig], bool]], ...] = (
    (("lora.alpha", "lora.dropout", "lora.targets"), "lora.r", lambda config: config.lora.r > 0),
    (
        ("optim.muon_momentum", "optim.ns_steps", "optim.ns_dtype", "optim.adjust_lr_fn"),
        "optim.name muon",
        lambda config: config.optim.name == "muon",
    ),
    (("optim.decay", "optim.decay_form"), "optim.schedule wsd", lambda config: config.optim.schedule == "wsd"),
    (
        ("optim.final_lr",),
        "optim.schedule cosine, linear or wsd",
        lambda config: config.optim.schedule != "constant",
    ),
    (("optim.qk_clip_every",), "optim.qk_clip", lambda config: config.optim.qk_clip > 0),
)


def check_used(config: TrainConfig) -> None:
    """ConfigError for an option of a new run that would do nothing, such as lora.alpha without LoRA. Defaults are
    allowed, also those of GPU_RUN: every config.toml names them.
    """
    flat = flatten(config)
    for names, what, is_set in _ONLY_WITH:
        for name in names:
            if flat[name] not in (KEYS[name].default, GPU_RUN.get(name)) and not is_set(config):
                raise ConfigError(f"{name} must be left out without {what}, got {shown(flat[name])}")
    for name, what in (("freeze", "parameters of the model"), ("optim.lr_factors", "parameters that are trained")):
        if flat[name] and not flat[name].replace(",", " ").strip():
            raise ConfigError(f"{name} must name {what}, got {flat[name]!r}")


def warmup_steps(config: TrainConfig) -> int:
    """Steps of warm-up, with the default filled in."""
    return config.steps // 20 if config.optim.warmup is None else config.optim.warmup


def decay_steps(config: TrainConfig) -> int:
    """Steps of the fall of the schedule wsd, with the default filled in."""
    return config.steps // 5 if config.optim.decay is None else config.optim.decay


def resolve_model(config: TrainConfig, data_vocab: int) -> dict[str, Any] | None:
    """Fill the None values of config.model from its preset and return the `config.json` keys of a new model.

    Returns None when `model.preset` is a model directory: its own config.json decides, and options that contradict it
    are refused. `data_vocab` is the smallest vocabulary that holds the data's tokens.
    """
    model = config.model
    names = [item.name for item in dataclasses.fields(model) if item.name != "preset"]
    if model.preset not in PRESETS:
        stored = _read_model_directory(model.preset)
        for name in names:
            given, there = getattr(model, name), stored.get(name)
            if given is not None and there is not None and given != there:
                raise ConfigError(f"model.{name} must be {there}, as in {model.preset}/config.json, got {given}")
            if given is not None and there is None:
                raise ConfigError(f"model.{name} must be left out, as {model.preset}/config.json has none, got {given}")
            if there is not None:
                setattr(model, name, there)
        check(config)
        return None
    keys = {**PRESETS[model.preset], "max_position_embeddings": config.seq_len, "vocab_size": max(256, data_vocab)}
    for name in names:
        if getattr(model, name) is None:
            setattr(model, name, keys.get(name))
        elif name not in keys:
            raise ConfigError(f"model.{name} must be left out for model {model.preset}, got {getattr(model, name)}")
    check(config)
    return {name: getattr(model, name, value) for name, value in keys.items()}


def _read_model_directory(path: str) -> dict[str, Any]:
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        known = list(PRESETS)
        found = find_checkpoints(path) if os.path.isdir(path) else []
        hint = f", a run: name its checkpoint, {found[0]}" if found else nearest(path, known)
        raise ConfigError(
            f"model must be one of {', '.join(known)}, or a directory with a config.json, got {path!r}{hint}"
        )
    try:
        with open(file, encoding="utf-8") as stream:
            stored = json.load(stream)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {file} cannot be read as JSON: {error}") from None
    if not isinstance(stored, dict):
        raise ConfigError(f"model: {file} must hold a JSON object, got {type(stored).__name__}")
    stored.setdefault("mhc_streams", 0)
    stored.setdefault("mhc_contraction", "mean")
    if isinstance(stored.get("rope_parameters"), dict):
        stored.setdefault("rope_theta", stored["rope_parameters"].get("rope_theta"))
    return stored


def to_toml(config: TrainConfig) -> str:
    """Return the configuration as a TOML file that reproduces it; options that are None are left as comments."""
    lines, section = ["# The resolved configuration of this run: `xtrain train <this file>` repeats it."], None
    flat = flatten(config)
    for name in sorted(
        flat, key=lambda name: SECTIONS.index(name.split(".")[0]) + 1 if "." in name else 0
    ):  # TOML wants tables last
        head, _, last = name.rpartition(".")
        if head != section and head:
            lines += ["", f"[{head}]"]
            section = head
        value = flat[name]
        if name in ("resume", "extend", "out", "name"):  # about one start of the program, not about what it computes
            continue
        lines.append(f"# {last} = (default)" if value is None else f"{last} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if any(c in repr(value) for c in ".en") else f"{value!r}.0"
    return _toml_text(value) if isinstance(value, str) else str(value)


def _toml_text(text: str) -> str:
    """`text` as a string of TOML. Characters are written as they are, because JSON spells some by two escapes, which
    TOML refuses. A lone surrogate, which stands for a byte that is no UTF-8, keeps its escape: readers refuse that.
    """
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub("[\x7f\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", quoted)
