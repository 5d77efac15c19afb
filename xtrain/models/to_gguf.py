"""A model as one GGUF file, the format of llama.cpp (needs the package `gguf`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import float32
from .._C import Tensor
from ..errors import DataError
from .decoder_config import DecoderConfig

# model_type -> (name of the architecture there, whether rotary pairs are neighbours there). Mistral is read as Llama.
ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def package(what: object) -> Any:
    """The package `gguf`. DataError, which names what needs it, when it is missing."""
    try:
        import gguf
    except ImportError:
        raise DataError(f"{what} needs the package gguf: pip install 'xtrain[gguf]'") from None
    return gguf


def check_config(config: Any) -> None:
    """DataError for a model that the format has no place for."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        *others, last = ARCHITECTURES
        raise DataError(f"export: model_type must be {', '.join(others)} or {last}, got {kind!r}")
    for window in map(config.window, range(config.num_hidden_layers)):
        if window is not None and window < config.max_position_embeddings:
            raise DataError(
                f"export: sliding_window must be None or at least max_position_embeddings "
                f"{config.max_position_embeddings}, got {window}: llama.cpp gives {kind} no window"
            )
    scaling = config.rope_scaling
    if scaling is not None and scaling["rope_type"] == "llama3" and not ARCHITECTURES[kind][1]:
        raise DataError(f"export: rope_scaling must be None or of type linear for {kind}, got 'llama3'")


def neighbours(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection to queries or keys, [heads * head_dim, ...], in the order of llama.cpp's Llama.

    Here the rotary pair i of a head are the channels i and i + head_dim / 2, there 2 i and 2 i + 1.
    """
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def frequency_divisors(config: DecoderConfig) -> np.ndarray:
    """What llama.cpp divides the frequency of each rotary pair by for the scaling llama3, float32 [head_dim / 2].

    1 where the wave is shorter than original_max_position_embeddings / high_freq_factor, `factor` where it is longer
    than that / low_freq_factor, and between them 1 / ((1 - s) / factor + s) with s from 0 to 1 (Llama 3.1).
    """
    scaling = config.scaling
    frequency = config.rope_theta ** (-np.arange(0, config.per_head, 2) / config.per_head)
    turns = scaling["original_length"] * frequency / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / scaling["factor"] + share)).astype(np.float32)


def write_config(writer: Any, config: DecoderConfig, name: str) -> None:
    """The shape and constants of the model."""
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.per_head)
    writer.add_value_length(config.per_head)
    writer.add_rope_dimension_count(config.per_head)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.rope_scaling is not None and config.rope_scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(package("export").RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(config.rope_scaling["factor"]))


def write_tensors(writer: Any, config: DecoderConfig, tensors: dict[str, Tensor], dtype: str | None) -> int:
    """Adds every parameter under llama.cpp's name, and returns the number of tensors.

    dtype: of matrices, float32, float16 or bfloat16; None keeps that of each. Vectors are float32, as llama.cpp wants.
    DataError for a parameter that has no name there. A tied head is no parameter: llama.cpp takes the embedding, too.
    """
    library = package("export")
    architecture, paired = ARCHITECTURES[config.model_type]
    kinds = {text: kind for kind, text in library.MODEL_ARCH_NAMES.items()}
    names = library.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.kv_heads}
    count = 0
    for name, tensor in tensors.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise DataError(f"export: {architecture} of llama.cpp has no place for the parameter {name!r}")
        values = tensor.detach().to("cpu").to(float32).numpy()
        projection = name.split(".")[-2]
        if paired and projection in heads:
            values = neighbours(values, heads[projection])
        stored = "F32" if values.ndim < 2 else _DTYPES[dtype or tensor.dtype.name]
        kind = library.GGMLQuantizationType[stored]
        writer.add_tensor(theirs, library.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        count += 1
    if config.rope_scaling is not None and config.rope_scaling["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", frequency_divisors(config))
        count += 1
    return count
