"""Mistral (Jiang et al. 2023): the decoder with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .decoder import Decoder, decoder_architecture
from .decoder_config import DecoderConfig
from .windows import check_window


@dataclass
class MistralConfig(DecoderConfig):
    """DecoderConfig with the defaults of Hugging Face's MistralConfig.

    sliding_window: the tokens that a token sees, itself included; None: all before it.
    """

    family: ClassVar[str] = "Mistral"
    kind: ClassVar[str] = "mistral"

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 4096 * 32
    sliding_window: int | None = 4096
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    model_type: str = "mistral"
    architectures: list[str] = field(default_factory=lambda: ["MistralForCausalLM"])

    def _check_family(self) -> None:
        if self.attention_bias:
            raise self.refusal("attention_bias", "must be False")

    def _check_windows(self) -> None:
        check_window(self)

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Mistral(Decoder):
    """A Mistral language model; see Decoder. config: a MistralConfig."""

    config: MistralConfig
    config_class = MistralConfig


ARCHITECTURE = decoder_architecture(Mistral)
