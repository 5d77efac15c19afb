"""`xtrain prepare`, which is `xtrain tokenize`, too."""

from __future__ import annotations

import sys
import warnings

from ..data import prepare
from ..data.encoding import MOST
from ..errors import ConfigError
from ..tokenizers import find_tokenizer
from .guard import warn
from .parser import simple_options

USAGE = """\
usage: xtrain prepare SOURCE OUT.tokens [options]          (or xtrain tokenize)

Writes the text of SOURCE (a file, a folder, or 'python' for the standard library's source) as a token file. A text file
is one document, and so is a line of .jsonl, a row of .parquet (needs pyarrow: pip install 'xtrain[data]'), and the text
in a .txt.gz; .jsonl.gz is read too. Of a line with `prompt` and `completion` a run learns the completion; of a line
with `messages` (role and content each) it learns what the assistant says, in the form of the tokenizer's chat template
(needs jinja2: pip install 'xtrain[chat]').

  --tokenizer DIR       a model directory with a tokenizer.json [default: bytes]
  --field NAME          key of JSON lines, and column of Parquet files, that holds the text, or messages [default: what
                        there is of text, prompt and completion, and messages]
  --processes N         that encode; the file is the same [default 1, whose threads use all processors by --tokenizer]
  --resume              keep what is encoded in OUT.tokens.part until all is done; the same command goes on from there
  --token-bytes N       SOURCE is a .bin file of nanoGPT, whose tokens have 1, 2 or 4 bytes; --tokenizer made them
"""


def command(arguments: list[str]) -> int:
    known = {"tokenizer": None, "field": None, "token_bytes": 0, "processes": 1, "resume": False}
    (source, out), values = simple_options(arguments, known, 2, USAGE)
    if values["token_bytes"] not in (0, 1, 2, 4):
        raise ConfigError(f"--token-bytes must be 1, 2 or 4, got {values['token_bytes']}")
    if not 1 <= values["processes"] <= MOST:
        raise ConfigError(f"--processes must be in [1, {MOST}], got {values['processes']}")
    tokenizer = find_tokenizer(values["tokenizer"]) if values["tokenizer"] else None
    live = sys.stderr is not None and sys.stderr.isatty()

    def show(tokens: int) -> None:
        if live:
            print(f"\r{tokens:,} tokens", end="", file=sys.stderr, flush=True)

    options = {name: values[name] for name in ("field", "token_bytes", "processes", "resume")}
    options["progress"] = show
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: warn(str(message))  # at once: the work may take hours
        count = prepare(source, out, tokenizer, **options)
    print(f"{out}: {count:,} tokens")
    return 0
