"""ModelConfig: a config.json and its dataclass, for every family."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self

_FLOATS = ("float32", "float64", "bfloat16", "float16")

# Keys of other architectures that change the mathematics, and values that do not: files that have them are refused.
_FOREIGN: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (),
    "alibi": (),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_routed_experts": (),
    "no_rope_layer_interval": (),
    "num_local_experts": (),
    "parallel_attn": (),
    "qk_layernorm": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "use_bidirectional_attention": (),
    "use_parallel_residual": (),
    "use_qk_norm": (),
}


@dataclass
class ModelConfig:
    """What the configs of all families do: a family is a dataclass of the keys of its config.json. dtype: of the
    parameters. extra: keys of a file that have no meaning here, so that they are written back.
    """

    family: ClassVar[str] = ""  # the model's name
    kind: ClassVar[str] = ""  # its model_type

    dtype: str = "float32"
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError for values that no model has."""

    def refusal(self, name: str, rule: str, value: Any = ...) -> ValueError:
        """The error for an attribute that breaks a rule: "must be ..."."""
        value = getattr(self, name) if value is ... else value
        return ValueError(f"{type(self).__name__}: {name} {rule}, got {value!r}")

    def _check_ends(self) -> None:
        ends = getattr(self, "eos_token_id", None)
        if ends is not None and not all(is_token(one) for one in (ends if isinstance(ends, (list, tuple)) else [ends])):
            raise self.refusal("eos_token_id", "must be None, a token id or a list of token ids")

    def _check_dtype(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in _FLOATS:
            raise self.refusal("dtype", f"must be one of {', '.join(_FLOATS)}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From the content of a config.json. ValueError names a key that would change the result and is not supported,
        or a value that no model has.
        """
        if not isinstance(values, dict):
            raise ValueError(f"{cls.__name__}: config must be a JSON object, got {type(values).__name__}")
        values = dict(values)
        cls._read(values)
        known = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        return cls(
            **{key: value for key, value in values.items() if key in known},
            extra={key: value for key, value in values.items() if key not in known},
        )

    @classmethod
    def _read(cls, values: dict[str, Any]) -> None:
        """Puts the content of a config.json in order, or refuses it."""
        if values.get("model_type", cls.kind) != cls.kind:
            raise ValueError(f"{cls.__name__}: model_type must be {cls.kind!r}, got {values['model_type']!r}")
        own = {f.name for f in dataclasses.fields(cls)}
        for key, neutral in _FOREIGN.items():
            value = values.get(key)
            if value and value not in neutral and key not in own:
                raise ValueError(
                    f"{cls.__name__}: {key} is not supported, got {value!r}: it changes what most models compute; "
                    "where this one has no use for it, remove it from config.json"
                )
        cls._one_of_two(values, "torch_dtype", "dtype")
        if isinstance(values.get("dtype"), str):
            values["dtype"] = values["dtype"].removeprefix("torch.")
        elif "dtype" in values and values["dtype"] is None:
            del values["dtype"]

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
                raise ValueError(f"{cls.__name__}: {path} must be JSON, got {error}") from error
        return cls.from_dict(values)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """The same as from_json."""
        return cls.from_json(path)

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json, with the dtype under its older and its newer name."""
        self.check()
        values: dict[str, Any] = dict(self.extra)
        for f in dataclasses.fields(self):
            if f.name != "extra" and self._writes(f.name):
                values[f.name] = getattr(self, f.name)
        values["torch_dtype"] = self.dtype
        return values

    def _writes(self, name: str) -> bool:
        """Whether a file has this attribute."""
        return True

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes to_dict() to a file."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2, sort_keys=True)
            file.write("\n")

    @classmethod
    def _one_of_two(cls, values: dict[str, Any], old: str, new: str) -> None:
        """Moves the older key to the newer one; both may be there when they agree."""
        if old in values:
            value = values.pop(old)
            if value is not None and values.setdefault(new, value) != value:
                raise ValueError(f"{cls.__name__}: {old} must agree with {new} {values[new]!r}, got {value!r}")


def is_positive(value: Any) -> bool:
    """Whether value is a number above 0 that a float64 holds: an integer of JSON may be any."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value <= sys.float_info.max


def is_token(value: Any) -> bool:
    """Whether value can be the id of a token."""
    return not isinstance(value, bool) and isinstance(value, (int, np.integer)) and int(value) >= 0
