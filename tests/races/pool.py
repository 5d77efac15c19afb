"""The thread pool from many threads: long and short loops, nested ones, another number of threads, and errors in a piece."""

import numpy as np
from race import race

import xtrain as xt

a = xt.tensor(np.arange(300 * 70, dtype=np.float32).reshape(300, 70) % 7)
b = xt.tensor(np.arange(70 * 90, dtype=np.float32).reshape(70, 90) % 5)
want = (a @ b).numpy().tobytes()
long = xt.ones(200_000)
bad = xt.tensor(np.full(50_000, 99))
table = xt.ones(10, 4)


def products() -> None:
    assert (a @ b).numpy().tobytes() == want


def loops() -> None:
    assert float((long * 2.0).sum()) == 400_000.0


def errors() -> None:
    try:
        xt.functional.embedding(bad, table)
    except IndexError as error:
        assert "99" in str(error)
    else:
        raise AssertionError("an index out of range was accepted")


def threads() -> None:
    for count in (1, 2, 3, 8):
        xt.set_num_threads(count)
        (long + 1.0).sum()


race(products, products, loops, errors, threads)
