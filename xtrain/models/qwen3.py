"""Qwen3 (Yang et al. 2025, Qwen3 Technical Report): a decoder that normalises every head of queries and keys before
RoPE; here also with hyper-connections.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .._types import is_whole
from .decoder import Decoder, decoder_architecture
from .windows import WindowedConfig

_MHC_TYPE, _MHC_ARCHITECTURE = "xtrain_qwen3_mhc", "XtrainQwen3MhcForCausalLM"


@dataclass
class Qwen3Config(WindowedConfig):
    """WindowedConfig with the defaults of Hugging Face's Qwen3Config. head_dim does not depend on hidden_size.

    Extension: with mhc_streams = n, 1 to 8, every attention and feed-forward layer is wrapped in hyper-connections over
    n residual streams (nn.HyperConnection; Xie et al. 2025). mhc_contraction ("mean", "sum", "learned") makes one
    stream of them before the last norm; mhc_iters and mhc_form are those of functional.sinkhorn. Hugging Face's Qwen3
    has nothing of this and would silently leave it out, so such files have model_type xtrain_qwen3_mhc, which other
    readers refuse by name. 0 streams: the plain residual connection, the other three at their defaults, and no trace of
    the extension in the file.
    """

    family: ClassVar[str] = "Qwen3"
    kind: ClassVar[str] = "qwen3"
    qk_norm: ClassVar[bool] = True

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    mhc_streams: int = 0
    mhc_contraction: str = "mean"
    mhc_iters: int = 20
    mhc_form: str = "P"
    model_type: str = "qwen3"
    architectures: list[str] = field(default_factory=lambda: ["Qwen3ForCausalLM"])

    def _only(self) -> dict[str, Any]:
        return super()._only() | {"model_type": _MHC_TYPE if self.mhc_streams else "qwen3"}

    def _check_family(self) -> None:
        """The rules of the extension. model_type and architectures follow mhc_streams."""
        for name, least, most in (("mhc_streams", 0, 8), ("mhc_iters", 1, 1000)):
            value = getattr(self, name)
            if not is_whole(value) or not least <= value <= most:
                raise self.refusal(name, f"must be an integer in [{least}, {most}]")
        for name, words in (("mhc_contraction", ("mean", "sum", "learned")), ("mhc_form", ("P", "D"))):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in words:
                raise self.refusal(name, f"must be one of {', '.join(words)}")
        for f in dataclasses.fields(self):
            if not self.mhc_streams and f.name.startswith("mhc_") and getattr(self, f.name) != f.default:
                raise self.refusal(f.name, f"must be {f.default!r} without mhc_streams")
        kinds = {"qwen3": "Qwen3ForCausalLM", _MHC_TYPE: _MHC_ARCHITECTURE}
        wanted = _MHC_TYPE if self.mhc_streams else "qwen3"  # a file says so itself, see _read
        if isinstance(self.model_type, str) and self.model_type in kinds and self.model_type != wanted:
            self.model_type, self.architectures = wanted, [kinds[wanted]]

    @classmethod
    def _read(cls, values: dict[str, Any]) -> None:
        kind, streams = values.get("model_type", "qwen3"), values.get("mhc_streams", 0)
        if kind not in ("qwen3", _MHC_TYPE):
            raise ValueError(f"Qwen3Config: model_type must be 'qwen3' or {_MHC_TYPE!r}, got {kind!r}")
        if "model_type" in values and (kind == _MHC_TYPE) != bool(streams):
            raise ValueError(
                f"Qwen3Config: mhc_streams must be there, and above 0, exactly when model_type is {_MHC_TYPE!r}, "
                f"got {values.get('mhc_streams')!r} with {kind!r}"
            )
        if "model_type" in values:
            values["model_type"] = "qwen3"  # check() puts the other one back
        super()._read(values)
        known = {f.name for f in dataclasses.fields(cls)}
        for key in values:  # of a later version of the extension, perhaps: what it would change is not known
            if key.startswith("mhc_") and key not in known and streams:
                raise ValueError(f"Qwen3Config: {key} is not supported, got {values[key]!r}")

    def _writes(self, name: str) -> bool:
        return bool(self.mhc_streams) or not name.startswith("mhc_")


class Qwen3(Decoder):
    """A Qwen3 language model; see Decoder. config: a Qwen3Config."""

    config: Qwen3Config
    config_class = Qwen3Config


ARCHITECTURE = decoder_architecture(
    Qwen3,
    sizes=("mhc_streams",),
    streams=True,
    stays_wide=lambda name: "_mhc." in name or "stream_head" in name,  # hyper-connections
)
