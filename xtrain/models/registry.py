"""Which module holds the model of a `model_type`, the key of a config.json that names an architecture.

A new model is one file in this folder, which ends in `ARCHITECTURE = Architecture(...)`, and one line in MODULES.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .language_model import LanguageModel

# model_type -> module of its ARCHITECTURE: one of this folder, or another by its full name.
MODULES = {
    "gemma2": ".gemma2",
    "gpt2": ".gpt2",
    "llama": ".llama",
    "mistral": ".mistral",
    "qwen2": ".qwen2",
    "qwen3": ".qwen3",
}
RECOMPUTE = ("none", "cheap", "block", "full")  # policies of recomputation, from the most memory to the least
_WITH_STREAMS = re.compile(r"xtrain_(.+)_mhc")  # the model_type of an architecture with hyper-connections


@dataclass(frozen=True)
class Architecture:
    """What training, saving and sampling ask about a model.

    config: class whose keywords are keys of a config.json, with `from_dict`, `to_dict` and the attributes model_type,
    vocab_size, num_hidden_layers and max_position_embeddings. model: class, built from a config. tensor_shapes: config
    -> (name, shape) of what a model directory must hold. count_parameters: config -> number of trained values. sizes:
    attributes of the config that say how large a model is, for messages. tied: {tensor: the tensor that it equals} when
    `tie_word_embeddings` is true; a directory may leave the first out. stored: the name here of a tensor of a
    file, or None for one that is no parameter (masks of older files). stays_wide: whether the tensor of this name is
    float32 in 16-bit models. generation: what the generation_config.json of a new model suggests. streams: whether it
    may have hyper-connections; its files then have a model_type of their own. recompute: the policies that the model
    has.
    """

    config: type[Any]
    model: Callable[[Any], LanguageModel]
    tensor_shapes: Callable[[Any], Iterable[tuple[str, tuple[int, ...]]]]
    count_parameters: Callable[[Any], int]
    sizes: tuple[str, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    stored: Callable[[str], str | None] = lambda name: name
    stays_wide: Callable[[str], bool] = lambda name: False
    generation: Mapping[str, Any] = field(default_factory=dict)
    streams: bool = False
    recompute: tuple[str, ...] = RECOMPUTE[:1]


def architecture(model_type: Any) -> Architecture:
    """The architecture of a `model_type`. ValueError, which names the known ones, for another."""
    name = model_type if isinstance(model_type, str) else ""
    if extended := _WITH_STREAMS.fullmatch(name):
        name = extended[1]
    if name in MODULES:
        # importlib, so that no arrow leads from here to a model: saving asks for a model only when it needs it, and
        # models import saving.
        found: Architecture = import_module(MODULES[name], __package__).ARCHITECTURE
        if found.streams or not extended:
            return found
    *others, last = MODULES
    raise ValueError(f"model_type must be {', '.join(others)} or {last}, got {model_type!r}")
