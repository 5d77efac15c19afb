"""The parts of a new or resumed run: corpus, model and optimizer."""

from __future__ import annotations

import fnmatch
import hashlib
import inspect
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import _C, lora, nn, optim, saving
from .._C import Tensor
from ..data import Corpus, open_data
from ..errors import ConfigError, DataError
from ..models.language_model import LanguageModel
from ..models.presets import PRESETS
from ..models.registry import Architecture, architecture
from ..nn.lora import ALL_LINEAR, lora_layers
from ..tokenizers import find_tokenizer, load_tokenizer, same_tokenizer, with_template
from .config import OptimConfig, TrainConfig, resolve_model
from .memory import check_model_fits


def with_named_model(model: str | os.PathLike[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run, and what its model is. ConfigError when they name another."""
    name = os.fspath(model)
    if values.get("model.preset", name) != name:
        raise ConfigError(f"model must be given once, got {name!r} and the option {values['model.preset']!r}")
    return {**values, "model.preset": name}


def options_of_model(model: LanguageModel, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run that trains a given model. ConfigError for one that would build or change a model."""
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"model must be a model, a preset or a directory, got {type(model).__name__}")
    for name, value in values.items():
        if name.startswith("model.") or (name == "lora.r" and value):
            what = "see xtrain.lora.apply" if name == "lora.r" else "the model is given"
            raise ConfigError(f"{name} must be left out with a model, got {value!r}: {what}")
    if values.get("resume"):
        return dict(values)
    precision = {} if next(iter(model.parameters())).dtype != _C.bfloat16 else {"precision": "bfloat16"}
    return {"precision": "float32", **precision, **values, "model.preset": type(model).__name__.lower()}


def open_corpus(config: TrainConfig, checkpoint: Path | None, warn: Callable[[str], None], own: bool = False) -> Corpus:
    """Open the data with the tokenizer of the checkpoint or model directory that the run starts from, else that of the
    option `tokenizer`, else that of the data, else bytes. A directory with weights and no tokenizer knows bytes. Of
    data, option and model the first that has a chat template lends it to the corpus, so that a model with one keeps it.
    warn: takes each warning. own: the model is given as an object, and the option `model` names no directory.
    """
    source = checkpoint
    if source is None and not own and config.model.preset not in PRESETS:
        source = Path(config.model.preset)
        if not (source / "config.json").is_file():
            resolve_model(config, 0)  # raises, before any data is read
        if not _has_tokenizer(source) and not saving.has_weights(source):
            source = None  # a model that is yet to be: no token has a meaning
    tokenizer = load_tokenizer(source) if source is not None else None
    if config.tokenizer and checkpoint is None:
        given = find_tokenizer(config.tokenizer)
        if tokenizer is not None and not same_tokenizer(given, tokenizer):
            raise ConfigError(f"tokenizer must be that of the model {source}, got {config.tokenizer}")
        tokenizer = given if tokenizer is None else with_template(given, tokenizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        corpus = open_data(config.data, tokenizer, config.val_fraction)
    for warning in told:
        warn(str(warning.message))
    return corpus


def _has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    return (Path(directory) / "tokenizer.json").is_file()


def make_model(
    config: TrainConfig, checkpoint: Path | None, corpus: Corpus, device: str, own: LanguageModel | None = None
) -> LanguageModel:
    """Load the model of the checkpoint or model directory, or draw a new one, of a preset or of a directory without
    weights; it must know every token of the data. own: a model of the user's, which is used instead. A new model takes
    the ends of a sequence and the generation_config.json of its directory, except where the run has another tokenizer:
    then only the tokenizer's end.
    """
    dtype = _C.bfloat16 if config.precision == "bfloat16" else _C.float32
    keys = None if checkpoint or own is not None else resolve_model(config, corpus.vocab_size)
    if own is not None:
        model = own.to(dtype)
    elif keys is None and (checkpoint or saving.has_weights(config.model.preset)):
        model = saving.load_model(checkpoint or config.model.preset, dtype=dtype)
    else:
        kind, planned = plan_model(config, keys)
        check_vocabulary(planned, corpus)
        check_positions(planned, config)
        check_model_fits(kind, planned, device)
        other = None if keys is not None or _has_tokenizer(config.model.preset) else corpus.tokenizer
        if other is not None:
            planned.eos_token_id = other.eos  # the ends that the directory names are tokens of another tokenizer
        model = kind.model(planned).to(dtype)
        if keys is None and other is None:
            saving.read_generation(model, saving.DirectoryReader(config.model.preset))
    check_vocabulary(model.config, corpus)
    check_positions(model.config, config)
    if config.recompute != "none":
        if config.recompute not in architecture(model.config.model_type).recompute:
            raise ConfigError(f"recompute must be none for {type(model).__name__}, got {config.recompute}")
        model.recompute = config.recompute
    choose_trained(model, config, new=checkpoint is None and own is None)
    return model.to(device)


def plan_model(config: TrainConfig, keys: dict[str, Any] | None) -> tuple[Architecture, Any]:
    """Architecture and config of a new model. keys: of a preset; None means those of a model directory."""
    if keys is not None:
        kind = architecture(keys["model_type"])
        try:
            return kind, kind.config(**keys, dtype="float32")
        except ValueError as error:  # names the option, which has the key's name
            raise ConfigError(str(error)) from None
    if config.lora.r:
        raise ConfigError(f"lora.r must be left out with {config.model.preset}, which holds no weights")
    kind, planned = saving.read_config(saving.DirectoryReader(config.model.preset))
    planned.dtype = "float32"  # drawn in it, whatever the run's precision
    return kind, planned


def choose_trained(model: nn.Module, config: TrainConfig, new: bool = True) -> None:
    """Freeze what the options `freeze` and `lora` leave untrained. new: LoRA is not in the model yet."""
    if config.lora.r and new:
        targets = config.lora.targets
        lora.apply(
            model,
            r=config.lora.r,
            lora_alpha=config.lora.alpha,
            lora_dropout=config.lora.dropout,
            target_modules=targets if targets == ALL_LINEAR else [name.strip() for name in targets.split(",")],
            base_model_name_or_path=os.path.abspath(config.model.preset),
        )
    names = dict(model.named_parameters())
    for pattern in filter(None, (part.strip() for part in config.freeze.split(","))):
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(f"freeze must name parameters of the model, got {pattern!r}, which matches none")
        for name in found:
            names[name].requires_grad = False
    if not any(parameter.requires_grad for parameter in names.values()):
        raise ConfigError(f"freeze must leave a parameter to be trained, got {config.freeze!r}")


def _loss_takes(model: LanguageModel, name: str) -> bool:
    """Whether the loss of a model, which may be of the user's own class, has a place for an option."""
    parameters = inspect.signature(model.loss).parameters.values()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def check_z_loss(model: LanguageModel, z_loss: float) -> None:
    """ConfigError where the loss of a model takes no z_loss."""
    if z_loss and not _loss_takes(model, "z_loss"):
        raise ConfigError(f"z_loss must be 0 for {type(model).__name__}, whose loss takes none, got {z_loss}")


def base_identity(model: nn.Module) -> str | None:
    """SHA-256 of the model below LoRA, whose tensors no checkpoint holds; None for a model without LoRA."""
    if not lora_layers(model):
        return None
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            digest.update(name.encode())
            digest.update(_C.to_bytes(parameter.detach().contiguous().cpu()))
    return digest.hexdigest()


def check_vocabulary(keys: Any, corpus: Corpus) -> None:
    """DataError when the model of this config does not know every token of the data."""
    if keys.vocab_size < corpus.vocab_size:
        raise DataError(
            f"data: {corpus.name} needs a vocabulary of {corpus.vocab_size} tokens, the model has {keys.vocab_size}"
        )


def check_positions(keys: Any, config: TrainConfig) -> None:
    """ConfigError for sequences longer than a model of learned positions, GPT-2, can read."""
    limit = getattr(keys, "n_positions", None)
    if limit is not None and config.seq_len > limit:
        raise ConfigError(f"seq_len must be at most n_positions of the model ({limit}), got {config.seq_len}")


def check_takes_documents(model: LanguageModel) -> None:
    """ConfigError where the loss of a model takes no documents."""
    if not _loss_takes(model, "documents"):
        raise ConfigError(f"pack must be off for {type(model).__name__}, whose loss takes no documents")


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """The weights of layers that are matrices, but for embeddings and the head: what Muon is for."""
    head = getattr(model, "lm_head", None)
    found: list[Tensor] = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if module is head or isinstance(module, nn.Embedding) or not isinstance(weight, Tensor):
            continue
        if weight.ndim == 2:
            found.append(weight)
    return found


def make_optimizer(model: nn.Module, settings: OptimConfig) -> optim.AdamW | optim.ChainedOptimizer:
    """The optimizer of all parameters that are trained: AdamW, or Muon for hidden_matrices and AdamW for the rest.
    Vectors are not decayed. ConfigError for a pattern of lr_factors that matches nothing, or Muon without a matrix.
    """
    factors = _factors(model, settings)
    hidden = {id(weight) for weight in hidden_matrices(model)} if settings.name == "muon" else set()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def groups(chosen: list[Tensor], decay: float) -> list[dict[str, Any]]:
        """A group for each factor, in the order in which they come."""
        known = dict.fromkeys(factors[id(parameter)] for parameter in chosen)
        return [
            {
                "params": [parameter for parameter in chosen if factors[id(parameter)] == factor],
                "weight_decay": decay,
                "lr": settings.lr * factor,
            }
            for factor in known
        ]

    rest = [p for p in parameters if id(p) not in hidden]
    of_adamw = groups([p for p in rest if p.ndim >= 2], settings.weight_decay)
    of_adamw += groups([p for p in rest if p.ndim < 2], 0.0)
    betas = (settings.beta1, settings.beta2)
    if settings.name == "adamw":
        return optim.AdamW(of_adamw, lr=settings.lr, betas=betas, eps=settings.eps)
    of_muon = groups([p for p in parameters if id(p) in hidden], settings.weight_decay)
    if not of_muon:
        raise ConfigError("optim.name must be adamw where no matrix of a hidden layer is trained, got muon")
    muon = optim.Muon(
        of_muon,
        momentum=settings.muon_momentum,
        ns_steps=settings.ns_steps,
        adjust_lr_fn=settings.adjust_lr_fn,
        ns_dtype=settings.ns_dtype,
    )
    adamw = [optim.AdamW(of_adamw, lr=settings.lr, betas=betas, eps=settings.eps)] if of_adamw else []
    return optim.ChainedOptimizer([muon, *adamw])


def make_qk_clip(model: nn.Module, settings: OptimConfig, optimizer: Any) -> optim.QKClip | None:
    """The QKClip of a run, or None where the option is 0. ConfigError for a model that it does not support."""
    if not settings.qk_clip:
        return None
    try:
        return optim.QKClip(model, settings.qk_clip, optimizer)
    except ValueError as error:
        why = str(error).removeprefix("QKClip: ")
        raise ConfigError(f"optim.qk_clip must be 0 for {type(model).__name__}: {why}") from None


def _factors(model: nn.Module, settings: OptimConfig) -> dict[int, float]:
    """{id of a parameter: the factor of its learning rate}."""
    names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    factors: dict[int, float] = {}
    for part in filter(None, (part.strip() for part in settings.lr_factors.split(","))):
        pattern, _, text = part.rpartition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = math.nan
        if not pattern or not 0.0 <= factor < math.inf or not math.isfinite(factor * settings.lr):
            raise ConfigError(
                f"optim.lr_factors must be patterns with factors of at least 0 (*norm.weight=2), got {part!r}"
            )
        found = [parameter for name, parameter in names.items() if fnmatch.fnmatchcase(name, pattern.strip())]
        if not found:
            raise ConfigError(
                f"optim.lr_factors must name parameters that are trained, got {pattern!r}, which matches none"
            )
        for parameter in found:
            factors.setdefault(id(parameter), factor)
    return {id(parameter): factors.get(id(parameter), 1.0) for parameter in names.values()}


def group_factors(model: nn.Module, optimizer: optim.Optimizer, settings: OptimConfig) -> list[float]:
    """The factor of the learning rate of each group of an optimizer that make_optimizer has made."""
    factors = _factors(model, settings)
    return [factors[id(group["params"][0])] for group in optimizer.param_groups]
