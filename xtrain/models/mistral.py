"""Mistral (Jiang et al. 2023): the decoder. A sliding window that shortens attention is refused: no op has one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .decoder import Decoder, decoder_architecture
from .decoder_config import DecoderConfig


@dataclass
class MistralConfig(DecoderConfig):
    """DecoderConfig with the defaults of Hugging Face's MistralConfig, but for sliding_window, which is None here.

    sliding_window: tokens that a token attends to; None, or at least max_position_embeddings, where it changes nothing.
    """

    family: ClassVar[str] = "Mistral"
    kind: ClassVar[str] = "mistral"

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 4096 * 32
    sliding_window: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    model_type: str = "mistral"
    architectures: list[str] = field(default_factory=lambda: ["MistralForCausalLM"])

    def _check_family(self) -> None:
        if self.attention_bias:
            raise self.refusal("attention_bias", "must be False")
        window = self.sliding_window
        if window is not None and (
            isinstance(window, bool) or not isinstance(window, int) or window < self.max_position_embeddings
        ):
            rule = f"must be None or at least max_position_embeddings {self.max_position_embeddings}"
            raise self.refusal("sliding_window", rule + ", as windows are not supported")


class Mistral(Decoder):
    """A Mistral language model; see Decoder. config: a MistralConfig."""

    config: MistralConfig
    config_class = MistralConfig


ARCHITECTURE = decoder_architecture(Mistral)
