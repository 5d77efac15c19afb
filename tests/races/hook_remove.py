"""register_hook(f).remove() beside backward, on a leaf and on a result; and a hook that removes itself and its neighbours."""

from race import race

import xtrain as xt

w = xt.ones(16).requires_grad_(True)
y = w * 2.0
seen = []


def walk() -> None:
    (y * 1.0).sum().backward(retain_graph=True)


def churn_leaf() -> None:
    w.register_hook(lambda g: None).remove()


def churn_result() -> None:
    handles = [y.register_hook(lambda g: g * 1.0) for _ in range(3)]
    for handle in handles:
        handle.remove()


def removes_itself() -> None:
    x = xt.ones(2).requires_grad_(True)
    handles = []
    handles.append(x.register_hook(lambda g: [h.remove() for h in handles] and None))
    handles.append(x.register_hook(lambda g: g * 7.0))
    handles.append(x.register_hook(lambda g: g * 5.0))
    (x * 3.0).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0], "a removed hook is not run any more"


counts = race(walk, walk, churn_leaf, churn_result, removes_itself)
assert w.grad.tolist() == [2.0 * (counts[0] + counts[1])] * 16
