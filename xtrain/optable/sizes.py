"""What `xtrain bench ops` measures an entry on: activations of 8192 tokens x 768 channels, 24 MiB in float32.

Larger than a core's caches, so that memory is what elementwise ops wait for. An entry that is not named here and whose
inputs all have one shape (elementwise ops) gets that shape; the rest keep the largest case of the table.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .table import Case, Ids, N, Op, U, case

TOKENS, WIDTH, HIDDEN, VOCABULARY, HEADS, LENGTH = 8192, 768, 3072, 8192, 12, 512
ACTIVATION = (TOKENS, WIDTH)
BATCH = TOKENS // LENGTH

_QKV = (2, HEADS, LENGTH, WIDTH // HEADS)
_HYPER = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)

BENCH: dict[str, Case] = {
    "matmul": case(N(512, WIDTH), N(WIDTH, HIDDEN)),
    "linear": case(N(512, WIDTH), N(HIDDEN, WIDTH)),
    "linear:bias": case(N(512, WIDTH), N(HIDDEN, WIDTH), N(HIDDEN)),
    "embedding": case(Ids(0, VOCABULARY, BATCH, LENGTH), N(VOCABULARY, WIDTH)),
    "rms_norm": case(N(BATCH, LENGTH, WIDTH), N(WIDTH), eps=1e-6),
    "rms_norm:no weight": case(N(BATCH, LENGTH, WIDTH)),
    "rope": case(N(BATCH, LENGTH, HEADS, WIDTH // HEADS)),
    "rope:positions": case(N(BATCH, LENGTH, HEADS, WIDTH // HEADS), Ids(0, LENGTH, TOKENS)),
    "swiglu": case(N(TOKENS // 4, HIDDEN), N(TOKENS // 4, HIDDEN)),
    "swiglu:halves": case(N(TOKENS // 4, 2 * HIDDEN)),
    "softmax": case(N(TOKENS, WIDTH)),
    "cross_entropy:mean": case(N(TOKENS // 8, VOCABULARY), Ids(0, VOCABULARY, TOKENS // 8)),
    "scaled_dot_product_attention": case(N(*_QKV), N(*_QKV), N(*_QKV), is_causal=True),
    "adamw_": case(*[N(*ACTIVATION)] * 3, U(0.1, 1, *ACTIVATION), **_HYPER),
    "clip_grad_norm_": case(N(*ACTIVATION), N(WIDTH), max_norm=1.0),
    "sum": case(N(*ACTIVATION), dim=1),
    "mean": case(N(*ACTIVATION), dim=1),
    "amax": case(N(*ACTIVATION), dim=1),
    "amin": case(N(*ACTIVATION), dim=1),
    "argmax": case(N(*ACTIVATION), dim=1),
    "cat": case(N(TOKENS // 2, WIDTH), N(TOKENS // 2, WIDTH), dim=1),
    "split": case(N(*ACTIVATION), split_size=WIDTH // 2, dim=1),
    "copy_": case(N(*ACTIVATION), N(*ACTIVATION)),
}

# These only describe memory in another way: there is a time, but nothing moves.
VIEWS = {"reshape", "view", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach"}
VIEWS |= {"contiguous", "to_device", "split"}  # of a dense tensor on its own device


def bench_case(entry: Op) -> Case:
    """The case of an entry that is measured."""
    if entry.id in BENCH:
        return BENCH[entry.id]
    if not entry.cases[0].inputs:
        shaped = [c for c in entry.cases if "shape" in c.kwargs]
        return replace(shaped[0], kwargs={**shaped[0].kwargs, "shape": ACTIVATION}) if shaped else entry.cases[-1]
    same = [c for c in entry.cases if c.fd and len({s.shape for s in c.inputs}) == 1 and c.inputs[0].shape != ()]
    if same and entry.op not in VIEWS and not same[0].kwargs.keys() & {"dim", "shape", "dims"}:
        return replace(same[0], inputs=tuple(replace(s, shape=ACTIVATION) for s in same[0].inputs))
    return max(entry.cases, key=lambda c: sum(math.prod(s.shape) for s in c.inputs))
