"""Calls every op with every kind of wrong argument. Run by test_hostile.py in a process of its own: it must not crash, and every message
must name the op."""

import gc
import itertools
import math
import os
import resource
import sys

import numpy as np

import xtrain as xt
from xtrain import _C


class Bad:
    def __index__(self):
        raise ZeroDivisionError

    def __float__(self):
        raise ZeroDivisionError

    def __bool__(self):
        raise ZeroDivisionError

    def __len__(self):
        return -1

    def __iter__(self):
        raise ZeroDivisionError


def pool():
    return [
        None,
        "x",
        "float32",
        b"",
        object(),
        [],
        (),
        [[]],
        {},
        -1,
        0,
        1,
        2**31,
        2**63 - 1,
        -(2**63),
        2**70,
        math.nan,
        math.inf,
        -1.5,
        1e308,
        True,
        1j,
        Bad(),
        xt.zeros(0),
        xt.zeros(()),
        xt.zeros(3),
        xt.ones(2, 3),
        xt.zeros(2, 0, 3),
        xt.zeros(1, 2, 3, 4),
        xt.zeros(*(1,) * 8),
        xt.zeros(2, 3).T,
        xt.zeros(1).expand(3, 3),
        xt.zeros(2, 3, dtype=xt.float64),
        xt.zeros(2, dtype=xt.int64),
        xt.full((2,), -5),
        xt.zeros(2, 3, dtype=xt.bfloat16),
        xt.full((2,), True),
        xt.zeros(2, 2, 3, 4, dtype=xt.float16),
        [xt.zeros(2), xt.zeros(2)],
        [xt.zeros(2), None],
        [3],
        (2, 3),
        (-1, 2),
        (2**40, 2**40),
        (0,),
        (1,) * 9,
        ("a",),
        xt.float32,
        xt.int64,
        _C.device("cpu"),
        np.zeros(3),
        np.float32(2),
        type,
        print,
    ]


allowed = (
    TypeError,
    ValueError,
    IndexError,
    RuntimeError,
    OverflowError,
    NotImplementedError,
    ZeroDivisionError,
    MemoryError,
    BufferError,
    xt.OutOfMemoryError,
)
if not os.environ.get("XTRAIN_SANITIZE"):  # sizes that are possible but large fail fast
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
rng = np.random.default_rng(int(sys.argv[1]))
calls = errors = 0
unnamed = set()
for name, signature in sorted(_C.op_signatures().items()):
    f = getattr(_C, name)
    text = signature if isinstance(signature, str) else signature[0] if isinstance(signature, tuple) else str(signature)
    count = text.count(":")
    things = pool()
    trials = (
        [tuple(t) for n in range(3) for t in itertools.product(things, repeat=n)]
        if count <= 2
        else [(t,) * count for t in things]
    )
    if len(trials) > 700:
        trials = [trials[i] for i in rng.choice(len(trials), 700, replace=False)]
    trials += [tuple(things[i] for i in rng.integers(0, len(things), rng.integers(0, count + 2))) for _ in range(400)]
    for args in trials:
        calls += 1
        try:
            out = f(*args)
            if hasattr(out, "numel") and 0 < out.numel() < 1000:
                out.tolist()
                repr(out)
        except allowed as e:
            errors += 1
            if not isinstance(e, (ZeroDivisionError,)) and not str(e).strip():
                unnamed.add((name, repr(e)))
            known = name in str(e) or str(e).startswith(("float:", "int:", "index:", "bool:"))
            if isinstance(e, (ValueError, IndexError)) and not known:
                unnamed.add((name, str(e)))
    for args in ((), (1,) * 20):
        try:
            f(*args)
        except TypeError as e:
            if name not in str(e):
                unnamed.add((name, str(e)))
    try:
        f(nonsense=1)
    except TypeError as e:
        if name not in str(e) or "nonsense" not in str(e):
            unnamed.add((name, str(e)))
    gc.collect()
assert (xt.ones(2) + 1).tolist() == [2, 2]
for u in sorted(unnamed):
    print("unclear:", *u)
print("calls", calls, "errors", errors)
sys.exit(1 if unnamed else 0)
