"""The command line of every command: plain words and options, in any order.

word   --key value   --key=value   --flag   --no-flag
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from ..train.config import Key, option
from ..train.options import find_key


def parse(arguments: Sequence[str], keys: Mapping[str, Key]) -> tuple[list[str], dict[str, Any]]:
    """Return (plain words, {name of the key: checked value}). ConfigError names what is wrong."""
    words: list[str] = []
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if word.startswith("-"):
                raise ConfigError(f"unexpected argument {word!r}; options are written --name value")
            words.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        negated = _negated(name, keys)
        if negated is not None:
            if equals:
                raise ConfigError(f"--{name} takes no value, got {text!r}")
            values[negated.name] = False
            continue
        key = find_key(name, dashes=True, keys=keys)
        if not equals:
            text = _take_value(name, key, rest)
        values[key.name] = key.check(key.parse(text))
    return words, values


def _take_value(name: str, key: Key, rest: list[str]) -> str:
    """The value of an option that has none behind `=`; it is taken out of the words that follow. The value of a text of
    `simple_options` may begin with `--`.
    """
    if key.kind is bool:
        return rest.pop(0) if rest and rest[0].lower() in ("true", "false") else "true"
    alone = not rest or rest[0].startswith("--")
    if key.meta["alone"] is not None and (alone or rest[0].endswith(".toml")):
        return key.meta["alone"]
    if not rest or (alone and not key.meta.get("any_word")):
        raise ConfigError(f"--{name} needs a value" + (f": {key.meta['help']}" if key.meta["help"] else ""))
    return rest.pop(0)


def _negated(name: str, keys: Mapping[str, Key]) -> Key | None:
    plain = name.replace("-", "_")
    if plain.startswith("no_") and plain not in keys:
        key = keys.get(plain[3:])
        if key is not None and key.kind is bool:
            return key
    return None


def simple_options(
    arguments: Sequence[str], known: Mapping[str, Any], words: int | None, usage: str
) -> tuple[list[str], dict[str, Any]]:
    """Return (as many plain words, options by name); an option has the type of its default in `known`, None is text.
    words None: at least one.
    """
    rules, text = option(None, "").metadata, option(None, "", any_word=True).metadata
    keys = {
        name: Key(
            f"--{name.replace('_', '-')}",
            str if value is None else type(value),
            False,
            value,
            text if value is None else rules,
        )
        for name, value in known.items()
    }
    found, values = parse(arguments, keys)
    if words is None and not found:
        raise ConfigError(f"expected arguments, got none; {usage.splitlines()[0]}")
    if words is not None and len(found) != words:
        raise ConfigError(
            f"expected {words or 'no'} argument{'s' * (words != 1)}, got {len(found)}; {usage.splitlines()[0]}"
        )
    return found, {name: values.get(key.name, key.default) for name, key in keys.items()}
