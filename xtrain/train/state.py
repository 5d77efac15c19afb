"""What the parts of a Trainer share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data import Corpus, Loader, MixedLoader, PackedLoader
from ..models.language_model import LanguageModel
from ..optim import EMA, AdamW, ChainedOptimizer
from ..tokenizers import Tokenizer
from .config import TrainConfig
from .ranks import Team

if TYPE_CHECKING:
    from ..distributed import DataParallel


class State:
    """What a run is made of and where it stands. The Trainer is one; its parts read and change it.

    device: where the model is. step: steps done. elapsed: seconds of training so far, over all parts of the run.
    saved_at: the step of the last checkpoint that was written or read, -1 before; emergency checkpoints do not count.
    torn: the optimizer was interrupted, and the parameters may be between two steps. val: the validation subset, int64
    [windows, S + 1]; val_targets: its targets, int64 [windows, S], -100 where a token is not learned; val_documents:
    None, or with `pack` the bounds of its documents, int32 [windows, 2, S]; val_rows: how many of its windows are of
    each source, one behind the other. identity: of the corpus, see data.identity.
    base: SHA-256 of what LoRA leaves as it is; None without LoRA. parallel: takes the steps of a run whose batches are
    cut into leaves, on one process or several; None for others. ema: the averages of what is trained; None without the
    option. team: the processes.
    """

    config: TrainConfig
    directory: Path
    device: str
    corpus: Corpus
    tokenizer: Tokenizer | None
    model: LanguageModel
    optimizer: AdamW | ChainedOptimizer
    loader: Loader | PackedLoader | MixedLoader
    val: np.ndarray
    val_targets: np.ndarray
    val_rows: list[int]
    val_documents: np.ndarray | None = None
    identity: dict[str, Any]
    base: str | None = None
    parallel: DataParallel | None = None
    ema: EMA | None = None
    team: Team = Team()
    step: int = 0
    elapsed: float = 0.0
    saved_at: int = -1
    torn: bool = False

    def failed(self, what: str, error: Exception, step: int | None = None) -> None:
        """Called when a side effect (a plot, a sample, a callback) fails at a step. Here it raises the error; a Trainer
        warns once, and the run goes on.
        """
        raise error
