"""generation_config.json: how a model is to be sampled, and the tokens that end a sequence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._types import is_whole
from ..errors import CheckpointError, shown
from .directory import DirectoryWriter
from .reader import DirectoryReader

if TYPE_CHECKING:
    from ..models.language_model import LanguageModel

NAME = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What earlier versions of xtrain wrote with every model without a tokenizer, whatever its config.json says of ends.
_EARLIER = {"do_sample": True, "temperature": 0.7, "top_k": 40}


def read_generation(model: LanguageModel, reader: DirectoryReader) -> None:
    """Give `model` the generation_config.json of a directory, where it has one. CheckpointError for one that is no JSON
    object, or whose eos_token_id is neither a token id, a list of them nor null.
    """
    values = reader.json(NAME) if reader.has(NAME) else None
    if values is None or place_of_ends(values) != NAME:
        return
    checked_ends(reader.directory / NAME, values.get("eos_token_id"), CheckpointError)
    model.generation_config, model.generation_file = values, reader.read(NAME)


def place_of_ends(values: Mapping[str, Any] | None) -> str:
    """The file whose eos_token_id says what ends a sequence. As in transformers, it is generation_config.json alone
    where there is one, else config.json. values: of generation_config.json, None where there is none. One that is what
    earlier versions of xtrain wrote counts as none.
    """
    return "config.json" if values is None or values == _EARLIER else NAME


def checked_ends(path: Path, ends: Any, error: type[Exception]) -> list[int]:
    """The eos_token_id of the file `path`, as a list. `error` where it is no token id, no list of them and not null."""
    for one in listed(ends):
        if not is_whole(one) or not 0 <= one < 2**32:
            raise error(f"{path}: eos_token_id must be null, a token id or a list of token ids, got {shown(ends)}")
    return listed(ends)


def end_tokens(model: LanguageModel) -> Any:
    """The ids of the tokens that end a sequence of `model`: None, an id or a list, from the file that place_of_ends
    names.
    """
    values = getattr(model, "generation_config", None)
    if values is None or place_of_ends(values) != NAME:
        return getattr(model.config, "eos_token_id", None)
    return values.get("eos_token_id")


def config_ends(config: Any, eos: int) -> Any:
    """The eos_token_id of a config.json beside a tokenizer whose documents end with `eos`: the config's and that one.
    An id that is only the default of the family's config is a token of another tokenizer, and is left out.
    """
    own = getattr(config, "eos_token_id", None)
    return _united(None if own == getattr(type(config), "eos_token_id", None) else own, eos)


def write_generation(
    writer: DirectoryWriter, model: LanguageModel, config: Mapping[str, Any], eos: int | None, new: Mapping[str, Any]
) -> None:
    """Write generation_config.json: the one that the model was loaded with, byte for byte where nothing has changed.
    Without one, `new` and the special tokens of `config`, and nothing about sampling: a reader goes on as without a
    file. eos: of the tokenizer, one of the ends.
    """
    values = getattr(model, "generation_config", None)
    if values is None:
        values = {**new, **{name: config[name] for name in _IDS if config.get(name) is not None}}
    elif eos is not None:
        values = {**values, "eos_token_id": _united(values.get("eos_token_id"), eos)}
    file = getattr(model, "generation_file", b"")
    if file and json.dumps(json.loads(file)) == json.dumps(values):
        writer.write(NAME, [file])
    else:
        writer.write_json(NAME, values)


def listed(ends: Any) -> list[Any]:
    """The result of end_tokens as a list."""
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]


def _united(ends: Any, eos: int) -> Any:
    """`ends` and `eos`, which comes first: a tokenizer takes the first for the end of a document."""
    known = listed(ends)
    if known[:1] == [eos]:
        return ends
    others = [one for one in known if one != eos]
    return [eos, *others] if others else eos
