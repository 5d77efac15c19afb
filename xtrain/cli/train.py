"""`xtrain train`."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..train.config import KEYS, Key
from ..train.options import with_file
from .parser import parse

_INTRODUCTION = """\
usage: xtrain train [CONFIG.toml] [--key value | --key=value | --flag | --no-flag] ... [--dry-run] [--profile FILE]

Trains a language model and writes runs/<name>/: metrics.jsonl, loss.png, config.toml and checkpoints, each of which is
a Hugging Face model directory. Options come from the defaults below, then the TOML file, then the command line. Ctrl-C,
SIGTERM, SIGHUP or SIGUSR1 finish the step, save and exit with status 130, 143, 129 or 138; a second Ctrl-C stops at
once. An error saves the last finished step first. A resumed run continues bit for bit. --dry-run only says how much
memory and work a step needs, for each choice of --recompute, and how long the run may take. --profile FILE writes a
trace of a few steps, which ui.perfetto.dev shows.
"""


def command(arguments: list[str]) -> int:
    dry = "--dry-run" in arguments
    trace, arguments = _take_trace([word for word in arguments if word != "--dry-run"])
    file, values = parse_arguments(arguments)
    if file is not None:
        values = with_file(file, values)
    if dry:
        from ..distributed.env import detect
        from ..train.estimate import dry_run

        if detect().rank == 0:
            print(dry_run(values))
        return 0
    from ..train import Trainer
    from ..train.callbacks import ProfileWriter

    profiles = [] if trace is None else [ProfileWriter(trace)]
    result = Trainer(values, callbacks=profiles).run()
    for one in profiles:
        if one.table is not None:
            where = f" {trace}, which ui.perfetto.dev shows" if one.written else ", of which there is no trace"
            print(f"profile{where}\n{one.table}")
    return {None: 0, "SIGHUP": 129, "SIGINT": 130, "SIGUSR1": 138, "SIGTERM": 143}[result.stopped]


def _take_trace(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The file of --profile, and the other arguments."""
    for i, word in enumerate(arguments):
        if word == "--profile" or word.startswith("--profile="):
            name, after = (word[10:], i + 1) if "=" in word else ("".join(arguments[i + 1 : i + 2]), i + 2)
            if not name or ("=" not in word and name.startswith("--")):
                raise ConfigError("--profile must be followed by the name of a file")
            return name, arguments[:i] + arguments[after:]
    return None, arguments


def parse_arguments(arguments: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """Return (TOML file or None, {dotted name: checked value}) of a command line."""
    words, values = parse(arguments, KEYS)
    if len(words) > 1:
        raise ConfigError(f"unexpected argument {words[1]!r}; options are written --name value")
    if values.get("resume") == "":  # in a shell, an empty variable; it must not begin another run
        raise ConfigError("--resume must name a run, or be last or auto, got ''")
    return (words[0] if words else None), values


def help_text(width: int | None = None) -> str:
    """Return the documentation of every option: name, meaning, unit, default."""
    width = width or min(shutil.get_terminal_size((100, 24)).columns, 120)
    titles = {
        "": "Run",
        "model": "Model (Hugging Face names)",
        "optim": "Optimizer",
        "lora": "LoRA",
        "sample": "Samples",
    }
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


USAGE = f"{_INTRODUCTION}\n{help_text()}\n"
