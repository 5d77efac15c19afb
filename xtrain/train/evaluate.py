"""The validation loss and the sample of a run."""

from __future__ import annotations

import math
import warnings

import numpy as np

from ..autograd import no_grad
from ..data import IGNORED, MixedLoader
from ..generation import generate_text
from ..nn.module import evaluating
from ..tokenizers import ByteTokenizer
from .state import State
from .step import loss_of, on_device


@no_grad()
def evaluate(state: State) -> dict[str, float]:
    """Return {"val_loss": nats per token, "val_bpb": bits per byte (when known)} on the fixed validation subset. Of a
    mixture also "val_loss/NAME" of each source; val_loss is their mean by the weights.
    """
    team, size = state.team, state.config.batch_size
    ends = np.cumsum(state.val_rows).tolist()
    sources = [slice(end - rows, end) for end, rows in zip(ends, state.val_rows, strict=True)]
    blocks = [
        (number, slice(start, min(start + size, rows.stop)))
        for number, rows in enumerate(sources)
        for start in range(rows.start, rows.stop, size)
    ]
    own = [_block_loss(state, rows) for _, rows in blocks[team.rank :: team.size]]
    parts = team.gather(own, "losses of an evaluation")
    losses = [0.0] * len(sources)
    for block, (number, _) in enumerate(blocks):  # in one order for every number of processes
        losses[number] += parts[block % team.size][block // team.size]
    learned = [max(int(np.count_nonzero(state.val_targets[rows] != IGNORED)), 1) for rows in sources]
    losses = [loss / count for loss, count in zip(losses, learned, strict=True)]
    loss = sum(share * one for share, one in zip(state.corpus.shares, losses, strict=True))
    metrics = {"val_loss": loss}
    if state.corpus.bytes_per_token:
        metrics["val_bpb"] = loss / math.log(2.0) / state.corpus.bytes_per_token
    if isinstance(state.loader, MixedLoader):
        metrics |= {f"val_loss/{name}": one for name, one in zip(state.loader.names, losses, strict=True)}
    return metrics


def _block_loss(state: State, rows: slice) -> float:
    """The sum of the losses of one batch of the validation subset."""
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
