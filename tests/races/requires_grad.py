"""requires_grad switched on and off, .grad set for the first time and hooks added beside ops that record."""

from race import race

import xtrain as xt

fresh = [xt.ones(3)]
w = xt.ones(3)


def record() -> None:
    t = fresh[0]
    y = t * 2.0 + w
    if y.requires_grad:
        y.sum().backward()
    assert not (t > 0.0).requires_grad
    assert not t.to(xt.int64).requires_grad


def switch() -> None:
    t = fresh[0] = xt.ones(3)
    t.requires_grad_(True)
    w.requires_grad_(True)
    t.requires_grad_(False)
    w.requires_grad = False


def first_record() -> None:
    t = fresh[0]
    t.grad = xt.zeros(3)
    t.requires_grad_(True)
    try:
        t.register_hook(lambda g: None)
    except RuntimeError as error:
        assert "must require a gradient" in str(error)
    t.grad = None
    repr(t)


race(record, record, switch, first_record)
