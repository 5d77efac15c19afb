"""Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024): the decoder, with scaled frequencies from 3.1 on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .decoder import Decoder, decoder_architecture
from .decoder_config import DecoderConfig


@dataclass
class LlamaConfig(DecoderConfig):
    """DecoderConfig with the defaults of Hugging Face's LlamaConfig. mlp_bias: of the gate, up and down projections."""

    family: ClassVar[str] = "Llama"
    kind: ClassVar[str] = "llama"

    mlp_bias: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    model_type: str = "llama"
    architectures: list[str] = field(default_factory=lambda: ["LlamaForCausalLM"])

    def _check_family(self) -> None:
        if not isinstance(self.mlp_bias, bool):
            raise self.refusal("mlp_bias", "must be True or False")

    def has_bias(self, projection: str) -> bool:
        return super().has_bias(projection) or (self.mlp_bias and projection in ("gate_proj", "up_proj", "down_proj"))

    @classmethod
    def _refuse_unsupported(cls, values: dict[str, Any]) -> None:
        super()._refuse_unsupported(values)
        if values.get("pretraining_tp") not in (None, 1):  # other sums than those of whole matrices
            raise ValueError(f"{cls.__name__}: pretraining_tp is not supported, got {values['pretraining_tp']!r}")


class Llama(Decoder):
    """A Llama language model; see Decoder. config: a LlamaConfig."""

    config: LlamaConfig
    config_class = LlamaConfig


ARCHITECTURE = decoder_architecture(Llama)
