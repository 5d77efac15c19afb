"""DecoderConfig: the keys of a Hugging Face config.json that Llama, Mistral, Qwen2, Qwen3 and Gemma 2 share, and what
this library cannot do.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .._types import is_whole
from .model_config import ModelConfig, is_positive

_LEAST = 1e-9  # of rope_theta and the factor, as functional.rope has it
_SCALINGS: dict[str, tuple[str, ...]] = {  # the keys of a rope_type
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass
class DecoderConfig(ModelConfig):
    """Shape and constants of a decoder; names are Hugging Face's, defaults those of the family's config there.

    vocab_size, hidden_size, intermediate_size: widths in tokens and channels. head_dim: channels of one head, even;
    None is hidden_size / num_attention_heads. num_key_value_heads divides num_attention_heads. max_position_embeddings:
    longest sequence in tokens. rope_scaling: None, {"rope_type": "linear", "factor": f} or {"rope_type": "llama3", ...}
    with the four keys of Llama 3.1 (functional.rope). attention_bias: of the q, k, v and o projections. ValueError
    names the key, the rule and the value.
    """

    family: ClassVar[str] = "Decoder"
    qk_norm: ClassVar[bool] = False  # an RMSNorm of every head of queries and keys
    biased: ClassVar[tuple[str, ...]] = ()  # projections that always have a bias
    windowed: ClassVar[bool] = False  # layers of their own kind (WindowedConfig)
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")  # of a layer
    mhc_streams: ClassVar[int] = 0  # hyper-connections (Qwen3Config)
    mhc_contraction: ClassVar[str] = "mean"
    mhc_iters: ClassVar[int] = 20
    mhc_form: ClassVar[str] = "P"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None  # None: num_attention_heads
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True
    model_type: str = ""
    architectures: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises ValueError for values that no model has. A model and a file call it, too: attributes may have been
        set since.
        """
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings",
        )  # fmt: skip
        for name in sizes if self.head_dim is None else (*sizes, "head_dim"):
            value = getattr(self, name)
            least = 0 if name == "num_hidden_layers" else 1
            if not is_whole(value) or value < least:
                raise self.refusal(name, f"must be an integer >= {least}")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                rule = f"must be given where num_attention_heads {self.num_attention_heads} does not divide hidden_size"
                raise self.refusal("head_dim", f"{rule} {self.hidden_size}")
            self.head_dim = self.hidden_size // self.num_attention_heads
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            if not is_positive(getattr(self, name)):
                raise self.refusal(name, "must be a positive number")
        if self.head_dim % 2:
            raise self.refusal("head_dim", "must be even")
        if self.num_attention_heads % self.kv_heads:
            rule = f"must divide num_attention_heads {self.num_attention_heads}"
            raise self.refusal("num_key_value_heads", rule)
        if self.rope_theta < _LEAST:
            raise self.refusal("rope_theta", f"must be at least {_LEAST:g}")
        self._check_scaling()
        self._check_windows()
        self._check_family()
        for name, only in self._only().items():
            value = getattr(self, name)
            if np.ndim(value) or value != only:
                raise self.refusal(name, f"must be {only!r}")
        for name in ("tie_word_embeddings", "attention_bias"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise self.refusal(name, "must be True or False")
        self._check_ends()
        self._check_dtype()

    def _check_family(self) -> None:
        """Further rules of a family."""

    def _check_windows(self) -> None:
        """Rules of the windows of a family."""

    def window(self, layer: int) -> int | None:
        """The tokens that a token sees in a layer, itself included; None: all before it."""
        return None

    def _only(self) -> dict[str, Any]:
        """Attributes that have one value."""
        return {"model_type": self.kind, "hidden_act": "silu", "attention_dropout": 0}

    def _check_scaling(self) -> None:
        scaling = self.rope_scaling
        if scaling is None:
            return
        kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise self.refusal("rope_scaling", f"must be None or have a rope_type of {' or '.join(_SCALINGS)}")
        for key in _SCALINGS[kind]:
            if not is_positive(scaling.get(key)):
                raise self.refusal("rope_scaling", f"must have a positive {key}")
        if scaling["factor"] < _LEAST:
            raise self.refusal("rope_scaling", f"must have a factor of at least {_LEAST:g}")
        if unknown := sorted(set(scaling) - {"rope_type", "type", *_SCALINGS[kind]}, key=str):
            raise self.refusal("rope_scaling", f"must not have {unknown[0]}")
        if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
            raise self.refusal("rope_scaling", "must have low_freq_factor below high_freq_factor")

    @property
    def kv_heads(self) -> int:
        """num_key_value_heads; num_attention_heads where that is None."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def per_head(self) -> int:
        """head_dim; hidden_size / num_attention_heads where that is None."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def scaling(self) -> dict[str, float]:
        """rope_scaling as keywords of functional.rope."""
        if self.rope_scaling is None:
            return {}
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_length")
        keys = _SCALINGS[self.rope_scaling["rope_type"]]
        return {name: float(self.rope_scaling[key]) for name, key in zip(names, keys)}

    @property
    def score_options(self) -> dict[str, Any]:
        """What attention makes of its scores, as keywords of functional.scaled_dot_product_attention."""
        return {}

    def has_bias(self, projection: str) -> bool:
        """Whether `q_proj`, ... `down_proj` has a bias."""
        return projection in self.biased or (
            self.attention_bias and projection in ("q_proj", "k_proj", "v_proj", "o_proj")
        )

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """RoPE as newer files write it: {"rope_type": "default", "rope_theta": theta}, and the keys of a scaling."""
        return {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}

    @classmethod
    def _read(cls, values: dict[str, Any]) -> None:
        super()._read(values)
        cls._refuse_unsupported(values)
        cls._merge_rope(values)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        if "layer_types" in values:
            values["layer_types"] = ["full_attention"] * self.num_hidden_layers
        values["rope_parameters"] = self.rope_parameters
        return values

    @classmethod
    def _merge_rope(cls, values: dict[str, Any]) -> None:
        """RoPE moved from rope_theta and rope_scaling to rope_parameters; readers of one form alone would silently use
        10000, or frequencies that are not scaled.
        """
        scalings: list[dict[str, Any] | None] = []
        for key in ("rope_scaling", "rope_parameters"):
            rope = values.pop(key, None)
            if rope is None:
                continue
            if not isinstance(rope, dict):
                raise ValueError(f"{cls.__name__}: {key} must be an object, got {rope!r}")
            rope = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
            theta = rope.pop("rope_theta", None)
            if theta is not None and values.setdefault("rope_theta", theta) != theta:
                raise ValueError(
                    f"{cls.__name__}: rope_theta must agree with {key} {theta!r}, got {values['rope_theta']!r}"
                )
            kind = rope.pop("type", None)
            rope.setdefault("rope_type", "default" if kind is None else kind)
            scalings.append(None if rope["rope_type"] == "default" else rope)
        if scalings and scalings[0] != scalings[-1]:
            raise ValueError(f"{cls.__name__}: rope_scaling must agree with rope_parameters, got {scalings[0]!r}")
        values["rope_scaling"] = scalings[0] if scalings else None

    @classmethod
    def _refuse_unsupported(cls, values: dict[str, Any]) -> None:
        def refuse(key: str) -> None:
            raise ValueError(f"{cls.__name__}: {key} is not supported, got {values[key]!r}")

        for key in ("rope_scaling", "rope_parameters"):
            rope = values.get(key)
            kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
            if isinstance(rope, dict) and (
                kind not in ("default", *_SCALINGS)
                or rope.get("partial_rotary_factor", 1.0) != 1.0
                or any(isinstance(value, dict) for value in rope.values())  # RoPE by the type of layer
            ):
                refuse(key)
        layer_types = None if cls.windowed else values.get("layer_types")
        if values.get("use_sliding_window") and not cls.windowed:
            refuse("use_sliding_window")
        if layer_types is not None and not isinstance(layer_types, (list, tuple)):
            raise ValueError(f"{cls.__name__}: layer_types must be a list, got {layer_types!r}")
        if layer_types is not None and any(kind != "full_attention" for kind in layer_types):
            refuse("layer_types")
        if layer_types is not None and len(layer_types) != values.get("num_hidden_layers", len(layer_types)):
            raise ValueError(
                f"{cls.__name__}: layer_types must have num_hidden_layers {values['num_hidden_layers']} entries, "
                f"got {len(layer_types)}"
            )
        fields = {f.name for f in dataclasses.fields(cls)}
        for key in ("quantization_config", "mlp_bias", "num_experts"):
            if values.get(key) and key not in fields:
                refuse(key)
        if values.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            refuse("partial_rotary_factor")
