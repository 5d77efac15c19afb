"""Options by name, from mappings and TOML files; errors name the nearest known key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..data import sources_text
from ..errors import ConfigError, DataError, nearest, shown
from ..files import check_regular
from ..saving.places import CONFIG, LOCK
from .config import KEYS, SECTIONS, Key

_LARGEST = 1 << 24  # bytes of a file of options
_ALIASES = {"model": "model.preset"}  # `--model tiny` and `model = "tiny"`
_ELSEWHERE = {  # what other trainers call an option
    "learning_rate": "optim.lr", "lrate": "optim.lr", "momentum": "optim.beta1", "max_steps": "steps",
    "max_iters": "steps", "epochs": "steps", "block_size": "seq_len", "max_length": "seq_len", "bf16": "precision",
    "fp16": "precision", "dtype": "precision", "output_dir": "out", "out_dir": "out", "dataset": "data",
    "compile": "graph", "gradient_checkpointing": "recompute",
}  # fmt: skip


def find_key(name: str, where: str = "", dashes: bool = False, keys: Mapping[str, Key] = KEYS) -> Key:
    """Return the option called `name`; dashes and underscores are the same.

    Raises ConfigError, which names the nearest known option.
    """
    plain = name.replace("-", "_")
    aliases = {alias: key for alias, key in _ALIASES.items() if key in keys}
    plain = aliases.get(plain, plain)
    if plain in keys:
        return keys[plain]
    known = [key for key in [*keys, *aliases] if key not in aliases.values()]
    exact_tail = [key for key in known if key.rpartition(".")[2] == plain]
    before = "--" if dashes else ""
    spell = (lambda key: key if "." in key else key.replace("_", "-")) if dashes else (lambda key: key)
    if (here := _ELSEWHERE.get(plain.lower().rpartition(".")[2])) in keys:
        hint = f"; did you mean {before}{spell(here)}?"
    elif len(exact_tail) == 1:
        hint = f"; did you mean {before}{spell(exact_tail[0])}?"
    else:
        hint = nearest(plain, [spell(key) for key in known], before)
    raise ConfigError(f"unknown option {before}{name:.100}{f' in {where}' if where else ''}{hint}")


def from_tree(tree: Mapping[str, Any], where: str = "", prefix: str = "") -> dict[str, Any]:
    """Return {dotted name: checked value} of nested mappings such as a parsed TOML file or keyword arguments."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if not isinstance(name, str):
            raise ConfigError(f"option names must be text, got {name!r}")
        if name == "data" and not prefix and isinstance(value, Mapping):
            try:
                flat[name] = sources_text(value)
            except DataError as error:
                raise ConfigError(f"{error}{f' (in {where})' if where else ''}") from None
        elif isinstance(value, Mapping):
            if prefix or name not in SECTIONS:
                find_key(prefix + name, where)  # raises for an unknown name
                raise ConfigError(f"{prefix + name} must be a value, not a table{f' (in {where})' if where else ''}")
            flat.update(from_tree(value, where, name + "."))
        else:
            key = find_key(prefix + name, where)
            flat[key.name] = key.check(value, where)
    return flat


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return {dotted name: checked value} of a TOML file. ConfigError for what is no regular file, or a large one."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # pyright: ignore[reportMissingImports]  (only Python 3.10 has it installed)
    path = os.fspath(path)
    try:
        # O_NONBLOCK: a FIFO would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
            check_regular(os.fstat(stream.fileno()))
            data = stream.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise ConfigError(f"config: {path} must have at most {_LARGEST} bytes")
        tree = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise ConfigError(f"config: {path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, and a NUL in the path, too
        raise ConfigError(f"config: {shown(path)[1:-1]} is not valid TOML: {shown(error, 300)}") from None
    return from_tree(tree, path)


def with_file(file: str | os.PathLike[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a TOML file, and `values` over them.

    With `resume` of last or auto, and no `out` or `name`, a config.toml that a run has written means that run.
    """
    merged = {**read_toml(file), **values}
    folder, name = os.path.split(file)
    of_a_run = name == CONFIG and os.path.exists(os.path.join(folder, LOCK))  # every run has one before its config.toml
    if merged.get("resume") in ("last", "auto") and of_a_run and not (merged.get("out") or merged.get("name")):
        merged["out"] = folder or "."
    return merged
