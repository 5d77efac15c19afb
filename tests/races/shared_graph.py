"""Threads walk one graph at once with retain_graph=True; one of them at the end without. No gradient is lost, none comes twice."""

import threading

from race import race

import xtrain as xt

w = xt.ones(6, 6, dtype=xt.float64).requires_grad_(True)
b = xt.ones(6, dtype=xt.float64).requires_grad_(True)
x = xt.ones(5, 6, dtype=xt.float64)
y = xt.functional.linear(x, w, b)
z = (y * y * 0.5 + y.relu()).sum()  # d/dy = y + 1 = 8
rows = xt.tensor([0, 1, 2, 3, 4])
head = xt.rand(6, 6, dtype=xt.float64).requires_grad_(True)
loss = xt.functional.linear_cross_entropy(y.detach(), head, rows)  # a rule that takes a buffer out of its node


def walk() -> None:
    z.backward(retain_graph=True)


def walk_head() -> None:
    loss.backward(retain_graph=True)


def last_wins() -> None:
    """Of two backwards that consume the graph one succeeds."""
    p = xt.ones(3).requires_grad_(True)
    q = (p * p * p).sum()
    failed = []

    def consume() -> None:
        try:
            q.backward()
        except RuntimeError as error:
            assert "freed by an earlier backward" in str(error)
            failed.append(error)

    threads = [threading.Thread(target=consume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) <= 1


loss.backward(retain_graph=True)
one = head.grad.clone()
head.grad = None
counts = race(walk, walk, walk, walk_head, walk_head, last_wins)
walks, heads = sum(counts[:3]), counts[3] + counts[4]
assert b.grad.tolist() == [walks * 40.0] * 6
assert w.grad.tolist() == [[walks * 40.0] * 6] * 6
off = float((head.grad - one * float(heads)).abs().amax())  # roundings, far less than what one walk adds
assert off < 0.1 * float(one.abs().amax()), (off, heads)
