"""Several threads take batches, each from a loader of its own over the same memory-mapped tokens, beside training in another thread."""

import tempfile
from pathlib import Path

import numpy as np
from race import race

import xtrain as xt
from xtrain.data import Loader

folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "tokens.npy")
np.save(path, np.arange(40_000, dtype=np.uint16) % 251)
tokens = np.load(path, mmap_mode="r")
want = [block.tobytes() for block in Loader([tokens], 4, 16, seed=3).next_batch()]
table = xt.ones(251, 8).requires_grad_(True)


def read() -> None:
    loader = Loader([tokens], 4, 16, seed=3)
    assert [t.numpy().tobytes() for t in next(iter(loader))] == want


def train() -> None:
    x, _ = next(iter(Loader([tokens], 4, 16, seed=5)))
    xt.functional.embedding(x, table).sum().backward()
    table.grad = None


race(read, read, read, train)
