"""Independent graphs of several threads over the same weights, whose rules add to .grad in place, with and without hooks."""

from race import race

import xtrain as xt

w = xt.ones(8, 8).requires_grad_(True)
v = xt.ones(8).requires_grad_(True)
table = xt.ones(10, 8).requires_grad_(True)
table.register_hook(lambda g: None)
ids = xt.tensor([1, 1, 3])
x = xt.ones(3, 8)


def walk() -> None:
    h = xt.functional.linear(x, w)  # 8
    (h * v + xt.functional.embedding(ids, table)).sum().backward()


counts = race(walk, walk, walk, walk)
n = sum(counts)
if n < 500_000:
    assert v.grad.tolist() == [24.0 * n] * 8
    assert w.grad.tolist() == [[3.0 * n] * 8] * 8
    assert table.grad.tolist() == [[float(n * {1: 2, 3: 1}.get(i, 0))] * 8 for i in range(10)]
