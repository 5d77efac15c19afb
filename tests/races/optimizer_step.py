"""Backward beside optimizer.step(); zero_grad(). The user orders neither, so the values are anything; the process lives, and either
thread gets numbers or "changed in place".

step writes the weights that the other thread's rules read, so ThreadSanitizer leaves the loops over elements out (optimizer_step.supp).
"""

from race import race

import xtrain as xt

model = xt.nn.Linear(32, 32)
optimizer = xt.optim.AdamW(model.parameters(), lr=1e-4)
x = xt.ones(8, 32)


def walk() -> None:
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        assert "changed in place" in str(error)


def step() -> None:
    optimizer.step()
    optimizer.zero_grad()


race(walk, walk, step)
