"""Training a language model: what is behind `xtrain train`, as a function, a class, or parts.

    from xtrain.train import train
    result = train(data="my_texts/", steps=500, optim={"lr": 1e-3})
    print(result.val_bpb, result.directory)

Options are those of `xtrain train --help`, sections as dicts.

Numbers: the loss is in nats per token; `val_bpb` is bits per byte = nats per token / ln 2 / bytes per token, on a fixed
validation subset. Given the same options, the same data and the same machine, a run has the same bits every time, at
any number of threads, and also when it was interrupted and resumed.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

# Lazy: help and mistakes in options need config and options only.
if TYPE_CHECKING:
    from ..generation import generate_text
    from .callbacks import Callback, CSVWriter, ProfileWriter, TensorBoardWriter, WandbWriter
    from .config import TrainConfig
    from .trainer import Result, Trainer, train
else:
    _HOMES = {
        "CSVWriter": ".callbacks:CSVWriter",
        "Callback": ".callbacks:Callback",
        "ProfileWriter": ".callbacks:ProfileWriter",
        "Result": ".trainer:Result",
        "TensorBoardWriter": ".callbacks:TensorBoardWriter",
        "TrainConfig": ".config:TrainConfig",
        "Trainer": ".trainer:Trainer",
        "WandbWriter": ".callbacks:WandbWriter",
        "generate_text": "..generation:generate_text",
        "train": ".trainer:train",
    }
    __getattr__, __dir__ = lazy(__name__, _HOMES)

__all__ = [
    "CSVWriter", "Callback", "ProfileWriter", "Result", "TensorBoardWriter", "TrainConfig", "Trainer", "WandbWriter",
    "generate_text", "train",
]  # fmt: skip
