"""`xtrain chat`."""

from __future__ import annotations

import contextlib
import io
import sys

from .. import _C, saving
from ..errors import DataError
from ..generation import stream_text
from ..tokenizers import ChatTemplate, load_tokenizer
from ..train import rundir
from .guard import warn
from .parser import simple_options
from .sample import DRAWING, check_drawing, drawing, tell_vocabulary

USAGE = """\
usage: xtrain chat DIR [options]

A conversation with the newest checkpoint of a run directory, with one checkpoint, or with any Hugging Face model
directory. Each line of the input is a message, and the answer is printed as it is made. Messages take the form of the
tokenizer's chat template (needs jinja2: pip install 'xtrain[chat]'). /new begins anew, the end of the input (Ctrl-D)
ends it.

  --system TEXT         what the model is told before the first message
  --max-tokens N        most tokens of an answer [tokens; default 512]
  --temperature X       divides the logits; 0 takes the likeliest token [default 0.8]
  --top-k N             sample among the k likeliest tokens; 0 for all [tokens; default 0]
  --top-p X             sample among the likeliest tokens of this total probability [default 1.0]
  --stop TEXT           ends an answer before this text, which is not printed
  --repetition-penalty X  above 1, makes tokens that were there before less likely [default 1.0]
  --seed N              of the random numbers of the first answer; each further answer adds 1 [default 0]
  --threads N           CPU threads; 0 for all [threads; default 0]
"""


def command(arguments: list[str]) -> int:
    (directory,), values = simple_options(arguments, {"system": None, "max_tokens": 512, **DRAWING}, 1, USAGE)
    check_drawing(values)
    path = rundir.resolve_run_directory(directory, warn)
    if values["threads"]:
        _C.set_num_threads(values["threads"])
    tokenizer = load_tokenizer(path)
    template = ChatTemplate(tokenizer.files(), path)
    model = saving.load_model(path)
    tell_vocabulary(tokenizer, model)
    room = model.config.max_position_embeddings
    start = [{"role": "system", "content": values["system"]}] if values["system"] else []
    messages, options, answers = list(start), drawing(values), 0
    source = sys.stdin or io.StringIO()  # a closed one is at its end
    if isinstance(source, io.TextIOWrapper):
        with contextlib.suppress(io.UnsupportedOperation):  # of a process that has read from it before
            source.reconfigure(errors="surrogateescape")  # a message may be any bytes
    shows = source.isatty()
    while True:
        if shows:
            print("> ", end="", flush=True)
        line = source.readline()
        if not line:
            if shows:
                print()
            return 0
        if not line.strip():
            continue
        if line.strip() == "/new":
            messages = list(start)
            continue
        asked = [*messages, {"role": "user", "content": line.rstrip("\n")}]
        text = template.render(asked, add_generation_prompt=True)
        ids = tokenizer.encode(text.encode("utf-8", "surrogateescape"))
        if len(ids) == 0:
            raise DataError(f"data: the chat template of {template.name} writes nothing for these messages")
        if len(ids) >= room:
            print(
                f"xtrain: the conversation has {len(ids)} tokens, the model takes {room}: /new begins anew",
                file=sys.stderr,
            )
            continue
        answer = ""
        options["seed"] = (values["seed"] + answers) % 2**63
        for piece in stream_text(model, tokenizer, ids, min(values["max_tokens"], room - len(ids)), **options):
            print(piece, end="", flush=True)
            answer += piece
        print()
        answers += 1
        messages = [*asked, {"role": "assistant", "content": answer}]
