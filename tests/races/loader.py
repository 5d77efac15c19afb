"""Several threads take batches, each from a loader of its own over the same token files, beside training in another thread. One file may
be open at a time, so that each read closes the descriptor of the other file, from which another thread may be reading.
"""

import tempfile
from pathlib import Path

import numpy as np
from race import race

import xtrain as xt
from xtrain.data import Loader, file_array
from xtrain.data.token_files import open_tokens

file_array._MOST_OPEN = 1
folder = tempfile.TemporaryDirectory()
tokens = []
for name in ("a.npy", "b.npy"):
    np.save(Path(folder.name, name), np.arange(20_000, dtype=np.uint16) % 251)
    tokens.append(open_tokens(Path(folder.name, name))[0])
want = [block.tobytes() for block in Loader(tokens, 4, 16, seed=3).next_batch()]
table = xt.ones(251, 8).requires_grad_(True)


def read() -> None:
    loader = Loader(tokens, 4, 16, seed=3)
    assert [t.numpy().tobytes() for t in next(iter(loader))] == want


def train() -> None:
    x, _ = next(iter(Loader(tokens, 4, 16, seed=5)))
    xt.functional.embedding(x, table).sum().backward()
    table.grad = None


race(read, read, read, train)
