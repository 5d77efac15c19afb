"""`xtrain export`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from .. import saving
from ..errors import ConfigError, DataError
from ..files import reason, whole_file
from ..models import to_gguf
from ..models.gguf_vocabulary import MORE_ENDS, find_begin, write_vocabulary
from ..saving.generation_config import end_tokens, listed
from ..tokenizers import load_tokenizer
from ..train import rundir
from .guard import warn
from .parser import simple_options

USAGE = f"""\
usage: xtrain export DIR --gguf FILE [options]

Writes a model as one GGUF file, which llama.cpp reads. DIR is a run, a checkpoint or a Hugging Face model directory
with a model_type among {", ".join(to_gguf.ARCHITECTURES)} and a byte-level BPE tokenizer (tokenizer.json). Needs the
package gguf: pip install 'xtrain[gguf]'. Other readers need no export: a checkpoint is a Hugging Face model directory.

  --gguf FILE           the file to write; it must not exist
  --dtype NAME          of matrices: float32, float16 or bfloat16 [default: as they are]
  --ema                 takes the averages of parameters that training with --ema has kept
"""


def command(arguments: list[str]) -> int:
    (directory,), values = simple_options(arguments, {"gguf": None, "dtype": None, "ema": False}, 1, USAGE)
    if not values["gguf"]:
        raise ConfigError("--gguf needs a value: the file to write")
    out, dtype = Path(values["gguf"]), values["dtype"]
    if os.path.lexists(out):
        raise ConfigError(f"--gguf must be a file that does not exist, got {out}")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise ConfigError(f"--dtype must be float32, float16 or bfloat16, got {dtype!r}")
    library = to_gguf.package("export")
    path = rundir.resolve_run_directory(directory, warn)
    model = saving.load_model(path, ema=values["ema"])
    to_gguf.check_config(model.config)
    tokenizer = load_tokenizer(path)
    text = tokenizer.files().get("tokenizer.json")
    if text is None:
        raise DataError(f"{path}: export needs a tokenizer.json, and there is none")
    begin = find_begin(tokenizer.files(), getattr(model.config, "bos_token_id", model.config.extra.get("bos_token_id")))
    known = dict.fromkeys(listed(end_tokens(model)))
    ends = [end for end in known if end < model.config.vocab_size and end != tokenizer.eos]
    # A tokenizer has no end where no file names one. The model may have the default of its family, as in transformers.
    eos = tokenizer.eos if tokenizer.eos is not None or not ends else ends.pop(0)
    if len(ends) > MORE_ENDS:
        left = ", ".join(map(str, ends[MORE_ENDS:]))
        room = f"a GGUF file has room for {1 + MORE_ENDS} ends of a sequence"
        warn(f"{room}: {left} left out")
    with whole(out) as temporary:
        writer = library.GGUFWriter(temporary, to_gguf.ARCHITECTURES[model.config.model_type][0])
        to_gguf.write_config(writer, model.config, Path(directory).resolve().name)
        write_vocabulary(writer, f"{path}/tokenizer.json", text, model.config.vocab_size, eos, begin, ends)
        count = to_gguf.write_tensors(writer, model.config, model.state_dict(), dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    print(f"{out}: {count} tensors, {out.stat().st_size:,} bytes")
    return 0


@contextlib.contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A temporary file beside `out`, which becomes `out` when the block ends well: what is written is there whole, or
    not at all. DataError where it cannot be written. What a killed export to `out` has left is removed.
    """
    try:
        with whole_file(out, follow=False) as (temporary, _):
            yield temporary
    except OSError as error:
        raise DataError(f"export: {out} cannot be written: {reason(error)}") from None
