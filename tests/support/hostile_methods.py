"""Calls every method of Tensor and every other function of the core with wrong arguments. Run by test_hostile.py in a process of its
own: only ordinary exceptions may come out."""

import math

import xtrain as xt
from xtrain import _C

things = [
    None,
    "x",
    b"",
    object(),
    [],
    (),
    -1,
    0,
    1,
    2**63 - 1,
    2**70,
    math.nan,
    True,
    xt.zeros(0),
    xt.zeros(3),
    xt.zeros(2, dtype=xt.int64),
    (2, 3),
    (1,) * 9,
    ("a",),
    xt.float32,
    type,
    lambda *a: None,
]
allowed = (
    TypeError,
    ValueError,
    IndexError,
    RuntimeError,
    OverflowError,
    NotImplementedError,
    AttributeError,
    MemoryError,
    BufferError,
    xt.OutOfMemoryError,
    xt.CudaError,
)
make = [
    lambda: xt.zeros(2, 3),
    lambda: xt.zeros(()),
    lambda: xt.zeros(0),
    lambda: xt.zeros(2, 3, requires_grad=True) * 2,
    lambda: xt.full((2,), 3),
    lambda: xt.zeros(2, 2, dtype=xt.bfloat16).T,
]
names = [
    n
    for n in dir(xt.Tensor)
    if n
    not in (
        "__class__",
        "__init_subclass__",
        "__subclasshook__",
        "__new__",
        "__init__",
        "__setattr__",
        "__delattr__",
        "__getattribute__",
        "__reduce__",
        "__reduce_ex__",
        "__dir__",
        "__sizeof__",
    )
]
for n in names:
    for m in make:
        t = m()
        try:
            f = getattr(t, n)
        except allowed:
            continue
        if not callable(f):
            for v in things:
                try:
                    setattr(m(), n, v)
                except allowed:
                    pass
            continue
        for args in [()] + [(a,) for a in things] + [(a, b) for a in things[::2] for b in things[::3]]:
            try:
                f(*args)
            except allowed:
                pass
for n in (
    "from_numpy",
    "tensor",
    "from_dlpack",
    "dtype",
    "device",
    "manual_seed",
    "set_rng_state",
    "set_grad_enabled",
    "set_recompute",
    "set_num_threads",
    "gemm_backends",
    "use_gemm_backend",
    "attention_backends",
    "use_attention_backend",
    "explain_gemm",
    "explain_attention",
    "memory_stats",
    "memory_reset_peak",
    "memory_trim",
    "stats",
    "backward",
    "function_apply",
    "Tensor",
):
    f = getattr(_C, n)
    for args in (
        [()]
        + [(a,) for a in things]
        + [(a, b) for a in things for b in things[::3]]
        + [(a, b, c) for a in things[::3] for b in things[::4] for c in things[::5]]
        + [(a,) * 4 for a in things]
    ):
        try:
            f(*args)
        except allowed:
            pass
_C.set_grad_enabled(True)
_C.set_recompute(False)
assert (xt.ones(2) + 1).tolist() == [2, 2]
print("alive")
