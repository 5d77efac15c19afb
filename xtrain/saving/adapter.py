"""LoRA in files of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

from .. import _C
from .._C import Tensor
from ..autograd import no_grad
from ..errors import CheckpointError, ConfigError, shown
from ..files import path_text
from ..nn.lora import ADAPTED, LoraConfig, lora_layers, place_layers
from ..nn.module import Module
from .directory import DirectoryWriter, PathLike
from .reader import DirectoryReader
from .safetensors import SafetensorsFile, chunks, plain

_M = TypeVar("_M", bound=Module)
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(re.escape(_PREFIX) + r"(.+)\.(lora_[AB])\.weight")
# Keys that change nothing once an adapter is made: about its start, or where it came from.
_IDLE = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Start values that leave the weights of the model below as they were.
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


def write_adapter(writer: DirectoryWriter, model: Module) -> None:
    """Write the two files of a model with LoRA."""
    layers = lora_layers(model)
    config: LoraConfig = model.lora_config  # pyright: ignore[reportAttributeAccessIssue]  (models with LoRA have it)
    ends = sorted({name.rpartition(".")[2] for name in layers})
    linear = [name for name, module in model.named_modules() if type(module) in ADAPTED or name in layers]
    exact = all(name in layers for name in linear if name.rpartition(".")[2] in ends)
    ranks = {name: layer.lora_A.out_features for name, layer in layers.items()}
    writer.write_json(
        CONFIG,
        {
            "base_model_name_or_path": config.base_model_name_or_path,
            "bias": "none",
            "fan_in_fan_out": any(layer.transposed for layer in layers.values()),
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": config.lora_alpha,
            "lora_dropout": config.lora_dropout,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": config.r,
            "rank_pattern": {name: r for name, r in ranks.items() if r != config.r},
            "target_modules": ends if exact else list(layers),
            "task_type": "CAUSAL_LM",
            "use_rslora": config.use_rslora,
        },
    )
    writer.write(TENSORS, chunks(adapter_tensors(model), {"format": "pt"}))


def adapter_tensors(model: Module) -> dict[str, Tensor]:
    """The tensors of the adapter's file: {PEFT's name: A [r, in] or B [out, r]}."""
    found: dict[str, Tensor] = {}
    for name, layer in lora_layers(model).items():
        found[f"{_PREFIX}{name}.lora_A.weight"] = layer.lora_A.weight.detach()
        found[f"{_PREFIX}{name}.lora_B.weight"] = layer.lora_B.weight.detach()
    return found


def save_adapter(model: Module, directory: PathLike) -> None:
    """Write LoRA as a directory of PEFT: adapter_config.json and adapter_model.safetensors, all or nothing.

    ConfigError for a model without LoRA, CheckpointError when writing fails or the directory holds other files.
    """
    if not lora_layers(model):
        raise ConfigError("lora.save: the model must have LoRA, got one without; see lora.apply")
    with DirectoryWriter(path_text("lora.save: directory", directory)) as writer:
        write_adapter(writer, model)
        writer.publish()


def read_adapter_config(reader: DirectoryReader) -> LoraConfig:
    """The config of an adapter. CheckpointError for a value out of its range, or a key that is not supported and
    changes what is computed.
    """
    path, values = reader.directory / CONFIG, reader.json(CONFIG)
    if values.get("peft_type", "LORA") != "LORA":
        raise CheckpointError(f"{path}: peft_type must be LORA, got {shown(values['peft_type'])}")
    if values.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias must be none, got {shown(values['bias'])}")
    start = values.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{path}: init_lora_weights must leave the model as it was, got {shown(start)}; "
            "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...) converts it"
        )
    for key, value in values.items():
        if key not in _IDLE and key != "bias" and value not in (None, False, [], {}, ""):
            raise CheckpointError(f"{path}: {plain(key)} must be left out, got {shown(value)}: it is not supported")
    names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "base_model_name_or_path", "target_modules")
    config = LoraConfig(**{name: values[name] for name in names if values.get(name) is not None})
    try:
        config.check()
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    base = config.base_model_name_or_path
    if base is not None and (not isinstance(base, str) or "\0" in base):
        raise CheckpointError(f"{path}: base_model_name_or_path must be text, got {shown(base)}")
    return config


def load_adapter(model: _M, directory: PathLike) -> _M:
    """Put the LoRA of a directory of PEFT into `model`, the model below it, and return the model, which is changed. Its
    other parameters are frozen. A model that has LoRA of the same layers, ranks and scale gets the values.

    CheckpointError when files are missing or damaged, do not fit the model, or ask for what is not supported.
    """
    install_adapter(model, DirectoryReader(path_text("lora.load: directory", directory)))
    return model


def _pairs(path: Path, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of an adapter's file by layer: {layer: {"lora_A": A, "lora_B": B}}; one of the two may be missing."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise CheckpointError(
                f"{path} holds tensor {plain(name)}, which is not supported: LoRA of linear layers is"
            )
        found.setdefault(parts[1], {})[parts[2]] = tensor
    return found


def _check_pair(path: Path, name: str, pair: dict[str, Tensor], layer: Any) -> None:
    """CheckpointError unless A [r, in] and B [out, r] are there and fit the layer."""
    kind = ADAPTED.get(type(layer), type(layer))
    shape = tuple(layer.weight.shape)[:: -1 if kind.transposed else 1]  # [out, in]
    a, b = (pair.get(part) for part in ("lora_A", "lora_B"))
    if a is None or b is None:
        raise CheckpointError(f"{path} holds lora_{'A' if b is None else 'B'} of {plain(name)} alone")
    sizes = f"{tuple(a.shape)} and {tuple(b.shape)}"
    if a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != shape or not 0 < a.shape[0] == b.shape[1]:
        rule = f"(r, {shape[1]}) and ({shape[0]}, r)"
        raise CheckpointError(f"{path}: lora_A and lora_B of {plain(name)} must have shapes {rule}, got {sizes}")
    if not (a.dtype.is_floating_point and b.dtype.is_floating_point):
        kinds = f"{a.dtype.name} and {b.dtype.name}"
        raise CheckpointError(f"{path}: lora_A and lora_B of {plain(name)} must be floating point, got {kinds}")


def _check_same_lora(reader: DirectoryReader, model: Module, ranks: dict[str, int], config: LoraConfig) -> None:
    """CheckpointError unless the LoRA that the model has is of the adapter's layers, ranks and scale."""
    have = {name: layer.lora_A.out_features for name, layer in lora_layers(model).items()}
    if have != ranks:
        raise CheckpointError(f"{reader.directory / TENSORS} must hold LoRA of the layers and ranks that the model has")
    own: LoraConfig = model.lora_config  # pyright: ignore[reportAttributeAccessIssue]  (models with LoRA have it)
    if (own.lora_alpha, own.use_rslora) != (config.lora_alpha, config.use_rslora):
        raise CheckpointError(
            f"{reader.directory / CONFIG}: lora_alpha and use_rslora must be {own.lora_alpha} and "
            f"{own.use_rslora}, as in the model's LoRA, got {config.lora_alpha} and {config.use_rslora}"
        )


@no_grad()
def install_adapter(model: Module, reader: DirectoryReader) -> None:
    """Read the adapter of a directory into `model`; see load_adapter."""
    config = read_adapter_config(reader)
    path = reader.directory / TENSORS
    with SafetensorsFile(reader.open(TENSORS)) as file:
        tensors = {name: file.tensor(name) for name in file.entries}
    found = _pairs(path, tensors)
    modules = dict(model.named_modules())
    there = lora_layers(model)
    for name, pair in found.items():
        layer: Any = modules.get(name)
        if type(layer) not in ADAPTED and name not in there:
            what = "does not have" if layer is None else f"has as a {type(layer).__name__}"
            raise CheckpointError(f"{path} holds LoRA of {plain(name)}, which the model {what}")
        _check_pair(path, name, pair, layer)
    if not found:
        raise CheckpointError(f"{path} holds no LoRA")
    ranks = {name: int(pair["lora_A"].shape[0]) for name, pair in found.items()}
    if there:
        _check_same_lora(reader, model, ranks, config)
    else:
        random = _C.get_rng_state()
        place_layers(model, ranks, config)
        _C.set_rng_state(random)  # the start values are overwritten: they cost no random numbers
    for name, layer in lora_layers(model).items():
        merged = layer.merged
        layer.unmerge()
        layer.lora_A.weight.copy_(found[name]["lora_A"])
        layer.lora_B.weight.copy_(found[name]["lora_B"])
        if merged:
            layer.merge()
