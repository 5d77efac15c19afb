"""Qwen3Config: the keys of a Hugging Face config.json of model type qwen3, their defaults, and what this library cannot
do.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self

_FLOATS = ("float32", "float64", "bfloat16", "float16")
_MHC_TYPE, _MHC_ARCHITECTURE = "xtrain_qwen3_mhc", "XtrainQwen3MhcForCausalLM"


@dataclass
class Qwen3Config:
    """Shape and constants of a Qwen3 model; names and defaults are those of Hugging Face's Qwen3Config.

    vocab_size, hidden_size, intermediate_size: widths in tokens and channels. head_dim: channels of one head, even,
    independent of hidden_size / num_attention_heads. num_key_value_heads divides num_attention_heads.
    max_position_embeddings: longest sequence in tokens. dtype: of the parameters. `extra` keeps keys of a file that
    have no meaning here, so that they are written back. ValueError names the key, the rule and the value.

    Extension: with mhc_streams = n, 1 to 8, every attention and feed-forward layer is wrapped in hyper-connections over
    n residual streams (nn.HyperConnection; Xie et al. 2025). mhc_contraction ("mean", "sum", "learned") makes one
    stream of them before the last norm; mhc_iters and mhc_form are those of functional.sinkhorn. Hugging Face's Qwen3
    has nothing of this and would silently leave it out, so such files have model_type xtrain_qwen3_mhc, which other
    readers refuse by name. 0 streams: the plain residual connection, the other three at their defaults, and no trace of
    the extension in the file.
    """

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32  # None: num_attention_heads
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True
    dtype: str = "float32"
    mhc_streams: int = 0
    mhc_contraction: str = "mean"
    mhc_iters: int = 20
    mhc_form: str = "P"
    model_type: str = "qwen3"
    architectures: list[str] = field(default_factory=lambda: ["Qwen3ForCausalLM"])
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError for values that no model has. A model and a file call it, too: attributes may have been
        set since. model_type and architectures follow mhc_streams.
        """
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings",
        )  # fmt: skip
        for name in sizes:
            value = getattr(self, name)
            least = 0 if name == "num_hidden_layers" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Qwen3Config: {name} must be an integer >= {least}, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"Qwen3Config: {name} must be a positive number, got {value!r}")
        if self.head_dim % 2:
            raise ValueError(f"Qwen3Config: head_dim must be even, got {self.head_dim}")
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"Qwen3Config: num_key_value_heads must divide num_attention_heads {self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )
        self._check_mhc()
        for name, only in (
            ("model_type", _MHC_TYPE if self.mhc_streams else "qwen3"),
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("attention_dropout", 0),
        ):
            value = getattr(self, name)
            if np.ndim(value) or value != only:
                raise ValueError(f"Qwen3Config: {name} must be {only!r}, got {value!r}")
        if not isinstance(self.tie_word_embeddings, (bool, np.bool_)):
            raise ValueError(
                f"Qwen3Config: tie_word_embeddings must be True or False, got {self.tie_word_embeddings!r}"
            )
        if not isinstance(self.dtype, str) or self.dtype not in _FLOATS:
            raise ValueError(f"Qwen3Config: dtype must be one of {', '.join(_FLOATS)}, got {self.dtype!r}")

    def _check_mhc(self) -> None:
        for name, least, most in (("mhc_streams", 0, 8), ("mhc_iters", 1, 1000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"Qwen3Config: {name} must be an integer in [{least}, {most}], got {value!r}")
        for name, words in (("mhc_contraction", ("mean", "sum", "learned")), ("mhc_form", ("P", "D"))):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in words:
                raise ValueError(f"Qwen3Config: {name} must be one of {', '.join(words)}, got {value!r}")
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not self.mhc_streams and f.name.startswith("mhc_") and value != f.default:
                raise ValueError(f"Qwen3Config: {f.name} must be {f.default!r} without mhc_streams, got {value!r}")
        kinds = {"qwen3": "Qwen3ForCausalLM", _MHC_TYPE: _MHC_ARCHITECTURE}
        wanted = _MHC_TYPE if self.mhc_streams else "qwen3"  # a file says so itself, see from_dict
        if isinstance(self.model_type, str) and self.model_type in kinds and self.model_type != wanted:
            self.model_type, self.architectures = wanted, [kinds[wanted]]

    @property
    def kv_heads(self) -> int:
        """num_key_value_heads; num_attention_heads where that is None."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """RoPE as newer files write it: {"rope_type": "default", "rope_theta": theta}."""
        return {"rope_type": "default", "rope_theta": self.rope_theta}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From the content of a config.json. ValueError names a key that would change the result and is not supported,
        or a value that no model has.
        """
        if not isinstance(values, dict):
            raise ValueError(f"Qwen3Config: config must be a JSON object, got {type(values).__name__}")
        values = dict(values)
        kind = values.get("model_type", "qwen3")
        if kind not in ("qwen3", _MHC_TYPE):
            raise ValueError(f"Qwen3Config: model_type must be 'qwen3' or {_MHC_TYPE!r}, got {kind!r}")
        if "model_type" in values and (kind == _MHC_TYPE) != bool(values.get("mhc_streams", 0)):
            raise ValueError(
                f"Qwen3Config: mhc_streams must be there, and above 0, exactly when model_type is {_MHC_TYPE!r}, "
                f"got {values.get('mhc_streams')!r} with {kind!r}"
            )
        _refuse_unsupported(values)
        _one_of_two(values, "torch_dtype", "dtype")
        if isinstance(values.get("dtype"), str):
            values["dtype"] = values["dtype"].removeprefix("torch.")
        elif "dtype" in values and values["dtype"] is None:
            del values["dtype"]
        _merge_rope(values)
        known = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        for key in values:  # of a later version of the extension, perhaps: what it would change is not known
            if key.startswith("mhc_") and key not in known and values.get("mhc_streams"):
                raise ValueError(f"Qwen3Config: {key} is not supported, got {values[key]!r}")
        return cls(
            **{key: value for key, value in values.items() if key in known},
            extra={key: value for key, value in values.items() if key not in known},
        )

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """From a config.json, or from the directory that holds one. ValueError when it is no JSON, OSError when it
        cannot be read.
        """
        path = os.fspath(path)
        if os.path.isdir(path):
            path = os.path.join(path, "config.json")
        with open(path, encoding="utf-8") as file:
            try:
                values = json.load(file)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"Qwen3Config: {path} must be JSON, got {error}") from error
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json, with RoPE and dtype under their older and their newer names."""
        self.check()
        values = dict(self.extra)
        for f in dataclasses.fields(self):
            if f.name != "extra" and (self.mhc_streams or not f.name.startswith("mhc_")):
                values[f.name] = getattr(self, f.name)
        values["torch_dtype"] = self.dtype
        values["rope_parameters"] = self.rope_parameters
        return values

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes to_dict() to a file."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2, sort_keys=True)
            file.write("\n")


def _one_of_two(values: dict[str, Any], old: str, new: str) -> None:
    """Moves the older key to the newer one; both may be there when they agree."""
    if old in values:
        value = values.pop(old)
        if value is not None and values.setdefault(new, value) != value:
            raise ValueError(f"Qwen3Config: {old} must agree with {new} {values[new]!r}, got {value!r}")


def _merge_rope(values: dict[str, Any]) -> None:
    """RoPE moved from rope_theta and rope_scaling to rope_parameters; readers of one form alone would silently use
    10000.
    """
    parameters = values.pop("rope_parameters", None)
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise ValueError(f"Qwen3Config: rope_parameters must be an object, got {parameters!r}")
    theta = parameters.get("rope_theta")
    if theta is not None and values.setdefault("rope_theta", theta) != theta:
        raise ValueError(
            f"Qwen3Config: rope_theta must agree with rope_parameters {theta!r}, got {values['rope_theta']!r}"
        )


def _refuse_unsupported(values: dict[str, Any]) -> None:
    def refuse(key: str) -> None:
        raise ValueError(f"Qwen3Config: {key} is not supported, got {values[key]!r}")

    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key)
        if isinstance(rope, dict) and (
            rope.get("rope_type", rope.get("type", "default")) != "default"
            or rope.get("partial_rotary_factor", 1.0) != 1.0
        ):
            refuse(key)
    values.pop("rope_scaling", None)
    if values.get("use_sliding_window"):
        refuse("use_sliding_window")
    layer_types = values.get("layer_types")
    if layer_types is not None and any(kind != "full_attention" for kind in layer_types):
        refuse("layer_types")
    if layer_types is not None and len(layer_types) != values.get("num_hidden_layers", len(layer_types)):
        raise ValueError(
            f"Qwen3Config: layer_types must have num_hidden_layers {values['num_hidden_layers']} entries, "
            f"got {len(layer_types)}"
        )
    values.pop("layer_types", None)  # derived: full attention everywhere
    for key in ("quantization_config", "mlp_bias", "num_experts"):
        if values.get(key):
            refuse(key)
    if values.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        refuse("partial_rotary_factor")
