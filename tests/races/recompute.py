"""Threads walk one graph whose norms and SwiGLU are computed again; others walk graphs that two backwards want to consume."""

import threading

from race import SECONDS, race

import xtrain as xt
import xtrain.functional as F

x, gates, down = (xt.rand(*shape, dtype=xt.float64).requires_grad_(True) for shape in ((5, 8), (16, 8), (8, 8)))


def loss(mode: bool):
    with xt.recompute() if mode else xt.enable_grad():
        return F.linear(F.swiglu(F.linear(F.rms_norm(x, (8,)), gates)), down).sum()


shared = loss(True)


def walk() -> None:
    shared.backward(retain_graph=True)


def consume() -> None:
    """Of two backwards that consume a graph one at least ends; SwiGLU's gradient takes the place of its input then."""
    mine, failed = loss(True), []

    def run() -> None:
        try:
            mine.backward()
        except RuntimeError as error:
            assert "freed by an earlier backward" in str(error)
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) <= 1
    done.append(2 - len(failed))


leaves = (x, gates, down)
loss(False).backward()
one = [leaf.grad.clone() for leaf in leaves]
for leaf in leaves:
    leaf.grad = None
done: list[int] = []
counts = race(walk, walk, walk, seconds=SECONDS / 2)
for leaf, part in zip(leaves, one, strict=True):
    off = float((leaf.grad - part * float(sum(counts))).abs().amax())
    assert off < 1e-9 * sum(counts) * float(part.abs().amax()), (off, sum(counts))
race(walk, consume, consume, seconds=SECONDS / 2)
assert done
