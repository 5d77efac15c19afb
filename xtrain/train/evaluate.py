"""The validation loss and the sample of a run."""

from __future__ import annotations

import math
import warnings

import numpy as np

from ..autograd import no_grad
from ..data import IGNORED
from ..generation import generate_text
from ..nn.module import evaluating
from ..tokenizers import ByteTokenizer
from .state import State
from .step import loss_of, on_device


@no_grad()
def evaluate(state: State) -> dict[str, float]:
    """Return {"val_loss": nats per token, "val_bpb": bits per byte (when known)} on the fixed validation subset."""
    total, team = 0.0, state.team
    blocks = math.ceil(len(state.val) / state.config.batch_size)
    mine = [_block_loss(state, block) for block in range(team.rank, blocks, team.size)]
    parts = team.gather(mine)
    for block in range(blocks):  # in one order for every number of processes
        total += parts[block % team.size][block // team.size]
    loss = total / max(int(np.count_nonzero(state.val_targets != IGNORED)), 1)
    metrics = {"val_loss": loss}
    if state.corpus.bytes_per_token:
        metrics["val_bpb"] = loss / math.log(2.0) / state.corpus.bytes_per_token
    return metrics


def _block_loss(state: State, block: int) -> float:
    """The sum of the losses of one batch of the validation subset."""
    size = state.config.batch_size
    rows = slice(block * size, (block + 1) * size)
    parts = [state.val[rows, :-1], state.val_targets[rows]]
    if state.val_documents is not None:
        parts.append(state.val_documents[rows])
    with evaluating(state.model):
        return loss_of(state.model, tuple(on_device(part, state.device) for part in parts)).item()


def sample(state: State) -> str | None:
    """Return a generated text (prompt included), or None when samples are off or the tokens have no tokenizer."""
    settings = state.config.sample
    if not settings.tokens or state.tokenizer is None:
        return None
    if settings.prompt is None:
        python = state.corpus.name == "python" and isinstance(state.tokenizer, ByteTokenizer)
        ids = state.tokenizer.encode(b"def ") if python else state.val[0, :16]
    else:
        ids = state.tokenizer.encode(settings.prompt.encode("utf-8", "surrogateescape"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a context shorter than the sample: this is a look at the run
        return generate_text(
            state.model,
            state.tokenizer,
            ids,
            settings.tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=state.config.seed,
        )
