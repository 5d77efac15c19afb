"""Options from the fields of config.py.

TOML files, the command line, help text, and errors that name the nearest known key.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, nearest
from ..saving.places import CONFIG, LOCK
from . import config as _config
from .config import KEYS, SECTIONS, Key, TrainConfig

_ALIASES = {"model": "model.preset"}  # `--model tiny` and `model = "tiny"`


def find_key(name: str, where: str = "", dashes: bool = False) -> Key:
    """Return the option called `name`; dashes and underscores are the same.

    Raises ConfigError, which names the nearest known option.
    """
    plain = name.replace("-", "_")
    plain = _ALIASES.get(plain, plain)
    if plain in KEYS:
        return KEYS[plain]
    known = [key for key in [*KEYS, *_ALIASES] if key not in _ALIASES.values()]
    exact_tail = [key for key in known if key.rpartition(".")[2] == plain]
    before = "--" if dashes else ""
    spell = (lambda key: key if "." in key else key.replace("_", "-")) if dashes else (lambda key: key)
    if len(exact_tail) == 1:
        hint = f"; did you mean {before}{spell(exact_tail[0])}?"
    else:
        hint = nearest(plain, [spell(key) for key in known], before)
    raise ConfigError(f"unknown option {before}{name}{f' in {where}' if where else ''}{hint}")


def _flatten_tree(tree: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if not isinstance(name, str):
            raise ConfigError(f"option names must be text, got {name!r}")
        if isinstance(value, Mapping):
            if prefix or name not in SECTIONS:
                find_key(prefix + name, where)  # raises for an unknown name
                raise ConfigError(f"{prefix + name} must be a value, not a table{f' (in {where})' if where else ''}")
            flat.update(_flatten_tree(value, where, name + "."))
        else:
            key = find_key(prefix + name, where)
            flat[key.name] = key.check(value, where)
    return flat


def from_tree(tree: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return {dotted name: checked value} of nested mappings such as a parsed TOML file or keyword arguments."""
    return _flatten_tree(tree, where)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return {dotted name: checked value} of a TOML file."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    path = os.fspath(path)
    try:
        with open(path, "rb") as stream:
            tree = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not valid TOML: {error}") from None
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


def parse_arguments(arguments: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """Return (TOML file or None, {dotted name: checked value}) of a command line.

    Its form: `[CONFIG.toml] [--key value | --key=value | --flag | --no-flag ...]`. ConfigError names what is wrong.
    """
    file: str | None = None
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if file is not None or word.startswith("-"):
                raise ConfigError(f"unexpected argument {word!r}; options are written --name value")
            file = word
            continue
        name, equals, text = word[2:].partition("=")
        negated = _negated(name)
        if negated is not None:
            if equals:
                raise ConfigError(f"--{name} takes no value, got {text!r}")
            values[negated.name] = False
            continue
        key = find_key(name, dashes=True)
        if not equals:
            if key.kind is bool:
                text = rest.pop(0) if rest and rest[0].lower() in ("true", "false") else "true"
            elif key.name == "resume" and (not rest or rest[0].startswith("--") or rest[0].endswith(".toml")):
                text = "last"  # the run of --out or --name, else the newest
            elif not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value: {key.meta['help']}")
            else:
                text = rest.pop(0)
        values[key.name] = key.check(key.parse(text))
    return file, values


def _negated(name: str) -> Key | None:
    plain = name.replace("-", "_")
    if plain.startswith("no_") and plain not in KEYS:
        key = KEYS.get(plain[3:])
        if key is not None and key.kind is bool:
            return key
    return None


def make_config(
    file: str | os.PathLike[str] | None = None,
    values: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Return the configuration: defaults, then `base` (a saved run), then the TOML file, then `values` (dotted names).

    Later wins. ConfigError names an unknown option or a bad value.
    """
    merged = dict(base or {})
    if file is not None:
        merged.update(read_toml(file))
    merged.update(values or {})
    return _config.build(merged)


def help_text(width: int | None = None) -> str:
    """Return the documentation of every option: name, meaning, unit, default."""
    width = width or min(shutil.get_terminal_size((100, 24)).columns, 120)
    titles = {"": "Run", "model": "Model (Hugging Face names)", "optim": "Optimizer", "sample": "Samples"}
    groups: dict[str, list[Key]] = {title: [] for title in titles}
    for key in KEYS.values():
        groups[key.name.rpartition(".")[0]].append(key)
    lines = []
    for group, title in titles.items():
        lines += ["", f"{title}:"]
        for key in groups[group]:
            lines += _describe(key, width)
    return "\n".join(lines[1:])


def _describe(key: Key, width: int) -> list[str]:
    name = "model" if key.name == "model.preset" else key.name
    spelled = f"--{name if '.' in name else name.replace('_', '-')}"
    if key.meta["choices"]:
        spelled += f" {{{','.join(key.meta['choices'])}}}"
    elif key.kind is not bool:
        spelled += {int: " N", float: " X", str: " TEXT"}[key.kind]
    notes = [key.meta["unit"]] if key.meta["unit"] else []
    if key.default not in (None, ""):
        notes.append(f"default {str(key.default).lower() if key.kind is bool else key.default}")
    elif key.default is None and "(default:" not in key.meta["help"] and key.name.startswith("model."):
        notes.append("default from the preset")
    text = key.meta["help"] + (f" [{'; '.join(notes)}]" if notes else "")
    indent = 36
    body = textwrap.wrap(text, max(width - indent, 30))
    head = f"  {spelled}"
    if len(head) < indent - 1:
        return [head.ljust(indent) + body[0]] + [" " * indent + line for line in body[1:]]
    return [head] + [" " * indent + line for line in body]
