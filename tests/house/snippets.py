"""Runs the fenced blocks of a page: `python snippets.py PAGE`, in the current folder, which becomes the page's.

```python blocks run in order in one namespace. ```sh blocks run line by line: `xtrain ...` in this process, other lines by sh.
A comment directly above a block says what a reader's machine has and this one lacks:

    <!-- snippet
    skip: the reason                  the block does not run
    skip 'xtrain chat': the reason    of a sh block, the lines that begin so do not run
    needs MODULE                      the block does not run where this package is missing
    change 'A' => 'B'                 the text A, which the block has once, is B in what runs
    python                            what follows runs before the block
    -->

Every block has a language: python, sh, or text, which is not run. The last line that this prints is JSON: what was run, changed
and skipped.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

RUN, SHOWN = ("python", "sh"), ("text", "{eval-rst}", "{toctree}", "{include}")
BLOCK = re.compile(
    r"(?:<!-- snippet\n(?P<rules>(?:(?!-->).)*?)-->\n)?^```(?P<kind>[^\n`]*)\n(?P<code>.*?)^```$", re.M | re.S
)
RULE = re.compile(
    r"""skip: (?P<why>.+)|skip '(?P<line>[^']+)': (?P<reason>.+)|needs (?P<needs>\w+)|change '(?P<old>[^']+)' => '(?P<new>[^']*)'"""
)
FEWEST_WORDS = 3  # of a reason


@dataclass
class Block:
    """A block of a page. skipped: reasons, of the block or of lines."""

    kind: str
    code: str
    line: int
    before: str = ""
    why: str = ""
    lines: dict[str, str] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    changes: int = 0

    def commands(self) -> list[str]:
        """Of a sh block: its lines, with those that end in a backslash joined."""
        return [line for line in self.code.replace("\\\n", " ").splitlines() if line.strip()]

    def reason_of(self, command: str) -> str | None:
        return next((why for start, why in self.lines.items() if command.startswith(start)), None)


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page that are for running. ValueError for what nobody has decided about."""
    fences = len(re.findall(r"^```", text, re.M))
    found, seen = [], 0
    for match in BLOCK.finditer(text):
        line = text[: match.start("kind")].count("\n") + 1
        kind = match["kind"].split(maxsplit=1)[0] if match["kind"].strip() else ""
        seen += 2
        if kind not in RUN + SHOWN:
            raise ValueError(f"line {line}: a block must be one of {', '.join(RUN + SHOWN)}, got {kind!r}")
        if kind in RUN:
            found.append(_decided(Block(kind, match["code"], line), match["rules"] or ""))
        elif match["rules"] is not None:
            raise ValueError(f"line {line}: a comment of rules stands above a block that is not run")
    if seen != fences or text.count("<!-- snippet") != sum(m["rules"] is not None for m in BLOCK.finditer(text)):
        raise ValueError("a block is not closed, or a comment of rules does not stand directly above one")
    return found


def _decided(block: Block, rules: str) -> Block:
    """The block with what its comment says done."""
    head, _, block.before = rules.partition("python\n") if re.search(r"^python$", rules, re.M) else (rules, "", "")
    for rule in filter(None, map(str.strip, head.splitlines())):
        match = RULE.fullmatch(rule)
        if not match:
            raise ValueError(f"line {block.line}: no such rule: {rule}")
        reason = match["why"] or match["reason"]
        if reason and len(reason.split()) < FEWEST_WORDS:
            raise ValueError(f"line {block.line}: a reason has {FEWEST_WORDS} words or more, got {reason!r}")
        if match["why"]:
            block.why = reason
        elif match["line"]:
            if block.kind != "sh" or not any(line.startswith(match["line"]) for line in block.commands()):
                raise ValueError(f"line {block.line}: no line begins with {match['line']!r}")
            block.lines[match["line"]] = reason
        elif match["needs"]:
            block.needs.append(match["needs"])
        else:
            if block.code.count(match["old"]) != 1:
                raise ValueError(f"line {block.line}: {match['old']!r} must be there once")
            block.code = block.code.replace(match["old"], match["new"])
            block.changes += 1
    return block


def run(page: Path) -> dict[str, object]:
    """Run the blocks of a page; what was done, or an exception that names the line."""
    space: dict[str, object] = {"__name__": "__main__"}
    report: dict[str, object] = {}
    done = changed = 0
    skipped: list[str] = []
    for block in blocks_of(page.read_text()):
        place = f"{page.name}:{block.line}"
        missing = [name for name in block.needs if importlib.util.find_spec(name) is None]
        if block.why or missing:
            skipped.append(f"{place}: {block.why or f'{missing[0]} is not installed'}")
            continue
        changed += block.changes
        exec(compile(block.before, f"{place} (before)", "exec"), space)
        if block.kind == "python":
            exec(compile("\n" * block.line + block.code, str(page), "exec"), space)
            done += 1
            continue
        for command in block.commands():
            if reason := block.reason_of(command):
                skipped.append(f"{place}: {command.split('  ')[0]}: {reason}")
            else:
                _sh(command, place)
                done += 1
    report.update(run=done, changed=changed, skipped=skipped)
    return report


def _sh(command: str, place: str) -> None:
    words = shlex.split(command, comments=True)
    if words and words[0] == "xtrain":
        from xtrain.cli import main

        status = main(words[1:])
    else:
        status = subprocess.run(command, shell=True).returncode
    if status:
        raise RuntimeError(f"{place}: status {status} of {command}")


if __name__ == "__main__":
    try:
        report = run(Path(sys.argv[1]).resolve())
        print(f"\n{json.dumps(report)}", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
