"""Qwen2 and Qwen2.5 (Yang et al. 2024, Qwen2 Technical Report): the decoder with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .decoder import Decoder, decoder_architecture
from .windows import WindowedConfig


@dataclass
class Qwen2Config(WindowedConfig):
    """WindowedConfig with the defaults of Hugging Face's Qwen2Config."""

    family: ClassVar[str] = "Qwen2"
    kind: ClassVar[str] = "qwen2"
    biased: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    model_type: str = "qwen2"
    architectures: list[str] = field(default_factory=lambda: ["Qwen2ForCausalLM"])

    def _check_family(self) -> None:
        if self.attention_bias:
            raise self.refusal("attention_bias", "must be False, as queries, keys and values have a bias anyway")


class Qwen2(Decoder):
    """A Qwen2 language model; see Decoder. config: a Qwen2Config."""

    config: Qwen2Config
    config_class = Qwen2Config


ARCHITECTURE = decoder_architecture(Qwen2)
