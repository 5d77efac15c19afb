"""`xtrain tokenizer`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from ..data import read_documents, source_files, texts_of
from ..errors import ConfigError, DataError
from ..files import make_folders, reason, write_file
from ..tokenizers import END, load_tokenizer, train_tokenizer
from .parser import simple_options

USAGE = f"""\
usage: xtrain tokenizer train FILES... --vocab N [options]

Trains a byte-level BPE tokenizer on texts and writes its files, tokenizer.json and tokenizer_config.json, into a
folder, which `xtrain prepare --tokenizer` and `xtrain train --tokenizer` take. FILES are read as by `xtrain prepare`.
Needs the package tokenizers: pip install 'xtrain[hf]'

  --vocab N             tokens, the end of a document among them [tokens; at least 257]
  --out DIR             folder of the tokenizer [default tokenizer]
  --field NAME          key of JSON lines, and column of Parquet files, that holds the text [default: text, prompt and
                        completion, or messages]
  --eos TEXT            the token that ends a document [default {END}]
"""


def command(arguments: list[str]) -> int:
    if not arguments or arguments[0] != "train":
        got = f", got {arguments[0]!r}" if arguments else ""
        raise ConfigError(f"tokenizer needs to know what to do: xtrain tokenizer train{got}")
    known = {"vocab": 0, "out": "tokenizer", "field": None, "eos": END}
    sources, values = simple_options(arguments[1:], known, None, USAGE)
    out = Path(values["out"])
    if not values["vocab"]:
        raise ConfigError("--vocab needs a value: the number of tokens")
    if os.path.lexists(out / "tokenizer.json"):
        raise ConfigError(f"--out must be a folder without a tokenizer.json, got {out}")
    files = [file for source in sources for file in source_files(source)]
    field = values["field"]
    documents = (document for file in files for document in read_documents(file, field))
    texts = (text for document in documents for text in texts_of(document, field))
    made = train_tokenizer(texts, values["vocab"], values["eos"])
    _write(out, made)
    count = load_tokenizer(out).vocab_size
    fewer = "" if count == values["vocab"] else f"; the texts give no more, {values['vocab']:,} were asked for"
    print(f"{out}: {count:,} tokens{fewer}")
    return 0


def _write(out: Path, files: Mapping[str, bytes]) -> None:
    """Write the files {name: content} of a tokenizer into a folder, all of them or none: with a tokenizer.json alone
    the end of a document is unknown. DataError where it cannot be written; a folder that was not there is gone then.
    """
    new, written = not os.path.lexists(out), list[Path]()
    try:
        make_folders(out)
        for name, content in files.items():
            write_file(out / name, lambda stream, content=content: stream.write(content))
            written.append(out / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            for path in written:
                path.unlink()
            if new:
                out.rmdir()
        raise DataError(f"tokenizer train: {error.filename or out} cannot be written: {reason(error)}") from None
