"""A second architecture, as somebody would add it: this file and one line in models/registry.py."""

import dataclasses
import math
from dataclasses import dataclass

from xtrain import functional as F
from xtrain import nn
from xtrain.models.language_model import LanguageModel
from xtrain.models.registry import Architecture


@dataclass
class BigramConfig:
    vocab_size: int = 256
    hidden_size: int = 16
    num_hidden_layers: int = 1
    max_position_embeddings: int = 64
    dtype: str = "float32"
    model_type: str = "bigram"

    @classmethod
    def from_dict(cls, values):
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})

    def to_dict(self):
        return dataclasses.asdict(self)


class Bigram(LanguageModel):
    """The next token from this one alone."""

    def __init__(self, config):
        self.config = config
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, False)

    def forward(self, ids, positions=None, caches=None):
        return self.head(self.table(ids))

    def loss(self, ids, targets, reduction="mean"):
        return F.linear_cross_entropy(
            self.table(ids.reshape(-1)), self.head.weight, targets.reshape(-1), reduction=reduction
        )

    def make_caches(self, batch, length):
        return []


def tensor_shapes(config):
    for name in ("table", "head"):
        yield f"{name}.weight", (config.vocab_size, config.hidden_size)


ARCHITECTURE = Architecture(
    config=BigramConfig,
    model=Bigram,
    tensor_shapes=tensor_shapes,
    count_parameters=lambda config: sum(math.prod(shape) for _, shape in tensor_shapes(config)),
    sizes=("hidden_size", "vocab_size"),
    generation={"do_sample": False},
)
