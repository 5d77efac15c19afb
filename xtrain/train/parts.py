"""The parts of a new or resumed run: corpus, model and optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import _C, nn, optim, saving
from ..data import Corpus, open_data
from ..errors import ConfigError, DataError
from ..models.language_model import LanguageModel
from ..models.presets import PRESETS
from ..models.registry import architecture
from ..tokenizers import find_tokenizer, load_tokenizer, same_tokenizer
from .config import OptimConfig, TrainConfig, resolve_model
from .memory import check_model_fits


def open_corpus(config: TrainConfig, checkpoint: Path | None) -> Corpus:
    """Open the data with the tokenizer of the checkpoint or model directory that the run starts from, else that of the
    option `tokenizer`, else that of the data, else bytes.
    """
    source = checkpoint
    if source is None and config.model.preset not in PRESETS:
        source = Path(config.model.preset)
        if not (source / "config.json").is_file():
            resolve_model(config, 0)  # raises, before any data is read
    tokenizer = load_tokenizer(source) if source is not None else None
    if config.tokenizer and checkpoint is None:
        given = find_tokenizer(config.tokenizer)
        if tokenizer is not None and not same_tokenizer(given, tokenizer):
            raise ConfigError(f"tokenizer must be that of the model {source}, got {config.tokenizer}")
        tokenizer = given
    return open_data(config.data, tokenizer, config.val_fraction)


def make_model(config: TrainConfig, checkpoint: Path | None, corpus: Corpus, device: str) -> LanguageModel:
    """Load the model of the checkpoint or model directory, or draw a new one; it must know every token of the data."""
    dtype = _C.bfloat16 if config.precision == "bfloat16" else _C.float32
    keys = None if checkpoint else resolve_model(config, corpus.vocab_size)
    if keys is None:
        model = saving.load_model(checkpoint or config.model.preset, dtype=dtype)
    else:
        kind = architecture(keys["model_type"])
        planned = kind.config(**keys, dtype="float32")
        check_model_fits(kind, planned, device)
        model = kind.model(planned).to(dtype)
    check_vocabulary(model.config, corpus)
    if config.recompute != "none":
        if not hasattr(model, "recompute"):
            raise ConfigError(f"recompute must be none for {type(model).__name__}, got {config.recompute}")
        model.recompute = config.recompute
    return model.to(device)


def check_vocabulary(keys: Any, corpus: Corpus) -> None:
    """DataError when the model of this config does not know every token of the data."""
    if keys.vocab_size < corpus.vocab_size:
        raise DataError(
            f"data: {corpus.name} needs a vocabulary of {corpus.vocab_size} tokens, the model has {keys.vocab_size}"
        )


def make_optimizer(model: nn.Module, settings: OptimConfig) -> optim.AdamW:
    """AdamW of all parameters; vectors are not decayed."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return optim.AdamW([group for group in groups if group["params"]], lr=settings.lr, betas=betas, eps=settings.eps)
