"""`xtrain prepare`."""

from __future__ import annotations

from ..data import prepare
from ..tokenizers import find_tokenizer
from .parser import simple_options

USAGE = """\
usage: xtrain prepare SOURCE OUT.tokens [--tokenizer DIR]

Writes the text of SOURCE (a file, a folder, or 'python' for the standard library's source) as a token file.

  --tokenizer DIR       a model directory with a tokenizer.json [default: bytes]
"""


def command(arguments: list[str]) -> int:
    (source, out), values = simple_options(arguments, {"tokenizer": None}, 2, USAGE)
    count = prepare(source, out, find_tokenizer(values["tokenizer"]) if values["tokenizer"] else None)
    print(f"{out}: {count:,} tokens")
    return 0
