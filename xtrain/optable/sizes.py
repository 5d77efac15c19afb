"""What `xtrain bench ops` measures an entry on: activations of 8192 tokens x 768 channels, 24 MiB in float32, on the
CPU; 65536 x 1024, 256 MiB in float32, on a CUDA device.

Larger than a core's caches, and several times a GPU's L2 (50 MiB on an H200), so that memory is what elementwise ops
wait for. An entry that is not named here and whose inputs all have one shape (elementwise ops) gets that shape; the
rest keep the largest case of the table.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from .mhc import inputs, post_inputs
from .table import Away, Case, Ids, N, Op, U, case


@dataclass(frozen=True)
class Dimensions:
    tokens: int
    width: int
    hidden: int
    words: int  # of the vocabulary
    heads: int
    length: int  # of a sequence
    sequences: int  # in attention

    @property
    def activation(self) -> tuple[int, int]:
        return self.tokens, self.width


CPU = Dimensions(tokens=8192, width=768, hidden=3072, words=8192, heads=12, length=512, sequences=2)
CUDA = Dimensions(tokens=65536, width=1024, hidden=4096, words=50257, heads=16, length=1024, sequences=4)
TOKENS, WIDTH = ACTIVATION = CPU.activation
COPIED_ON_CUDA = 1 << 30  # bytes of the copy that gives a CUDA device's ceiling
COLD = 1 << 28  # bytes of inputs on a CUDA device: smaller cases get several sets, so that no cache has the next one
MOST_SETS = 64

_ADAMW: dict[str, Any] = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)


@functools.lru_cache
def cases_of(d: Dimensions) -> dict[str, Case]:
    """id of an entry -> the case it is measured on."""
    batch, per_head, rows = d.tokens // d.length, d.width // d.heads, d.tokens // 16
    heads = (batch, d.length, d.heads, per_head)
    qkv = (d.sequences, d.heads, d.length, per_head)
    streams = (d.tokens // 4, 4, d.width)
    return {
        "matmul": case(N(rows, d.width), N(d.width, d.hidden)),
        "linear": case(N(rows, d.width), N(d.hidden, d.width)),
        "linear:bias": case(N(rows, d.width), N(d.hidden, d.width), N(d.hidden)),
        "linear_joined": case(N(rows, d.width), N(d.hidden, d.width), N(d.hidden, d.width)),
        "linear_joined:apart": case(N(rows, d.width), N(d.hidden, d.width), N(d.hidden, d.width)),
        **dict.fromkeys(
            ("linear_joined:bias", "linear_joined:bias_apart", "linear_joined:bias_all_apart"),
            case(N(rows, d.width), N(d.hidden, d.width), N(d.hidden, d.width), N(d.hidden), N(d.hidden)),
        ),
        **dict.fromkeys(
            ("swiglu_mlp", "swiglu_mlp:apart"),
            case(N(rows, d.width), N(d.hidden, d.width), N(d.hidden, d.width), N(d.width, d.hidden)),
        ),
        **{
            f"gelu_mlp{variant}": case(
                N(rows, d.width), N(d.hidden, d.width), N(d.hidden), N(d.width, d.hidden), N(d.width), approximate=form
            )
            for variant, form in (("", "none"), (":tanh", "tanh"))
        },
        "embedding": case(Ids(0, d.words, batch, d.length), N(d.words, d.width)),
        "rms_norm": case(N(batch, d.length, d.width), N(d.width), eps=1e-6),
        "rms_norm:no weight": case(N(batch, d.length, d.width)),
        "layer_norm": case(N(batch, d.length, d.width), N(d.width), N(d.width), eps=1e-5),
        "add_layer_norm": case(
            N(batch, d.length, d.width), N(batch, d.length, d.width), N(d.width), N(d.width), eps=1e-5
        ),
        "add_layer_norm:no weight": case(N(batch, d.length, d.width), N(batch, d.length, d.width)),
        "layer_norm:no weight": case(N(batch, d.length, d.width)),
        "layer_norm:weight alone": case(N(batch, d.length, d.width), N(d.width)),
        "layer_norm:bias alone": case(N(batch, d.length, d.width), N(d.width)),
        "rope": case(N(*heads)),
        "rope:positions": case(N(*heads), Ids(0, d.length, d.tokens)),
        "qk_norm_rope": case(N(*heads), N(batch, d.length, d.heads // 2, per_head), N(per_head), N(per_head)),
        "swiglu": case(N(d.tokens // 4, d.hidden), N(d.tokens // 4, d.hidden)),
        "swiglu:halves": case(N(d.tokens // 4, 2 * d.hidden)),
        "bias_gelu": case(N(d.tokens // 4, d.hidden), N(d.hidden), approximate="none"),
        "bias_gelu:tanh": case(N(d.tokens // 4, d.hidden), N(d.hidden), approximate="tanh"),
        **dict.fromkeys(
            ("conv1d:direct", "conv1d:products"),
            case(N(4, d.width, d.length), N(d.width, d.width // 4, 3), N(d.width), padding=1, groups=4),
        ),
        "conv1d:chosen": case(N(4, d.width, d.length), N(d.width, d.width // 4, 3), padding=1, groups=4),
        "causal_conv1d": case(N(batch, d.length, d.width), N(d.width, 4), N(d.width)),
        "causal_conv1d:silu": case(N(batch, d.length, d.width), N(d.width, 4), N(d.width), activation="silu"),
        "causal_conv1d:no_bias": case(N(batch, d.length, d.width), N(d.width, 4), activation="silu"),
        "causal_conv1d_step": case(
            N(batch, d.length, d.width), N(d.width, 4), N(batch, 3, d.width), N(d.width), activation="silu"
        ),
        "dropout": case(N(d.tokens, d.width), p=0.1, key=(1, 2)),
        "dropout:random": case(N(d.tokens, d.width), Ids(0, 1 << 40, 2), p=0.1, offset=3),
        "softmax": case(N(d.tokens, d.width)),
        "cross_entropy:mean": case(N(1024, d.words), Ids(0, d.words, 1024)),
        "linear_cross_entropy:mean": case(
            N(rows, d.width), U(-0.1, 0.1, d.words, d.width), Ids(0, d.words, rows), reduction="mean"
        ),
        "linear_cross_entropy:chunks": case(
            N(rows, d.width), U(-0.1, 0.1, d.words, d.width), Ids(0, d.words, rows), chunk_rows=rows // 2
        ),
        "scaled_dot_product_attention": case(N(*qkv), N(*qkv), N(*qkv), is_causal=True),
        "mhc_pre": case(*inputs(streams, 1.0, 1.0)),
        "mhc_pre:no gamma": case(*inputs(streams, 1.0, 1.0, gamma=False)),
        "sinkhorn:P": case(N(16 * d.tokens, 4, 4), form="P"),
        "sinkhorn:D": case(N(16 * d.tokens, 4, 4), form="D"),
        "mhc_post": case(*post_inputs(streams, 1.0)),
        "mhc_open": case(N(d.tokens // 4, d.width), *inputs(streams, 1.0, 1.0)),
        "mhc_close": case(*inputs(streams, 1.0, 1.0)),
        "adamw_": case(*[N(*d.activation)] * 3, U(0.1, 1, *d.activation), **_ADAMW),
        "clip_grad_norm_": case(N(*d.activation), N(d.width), max_norm=1.0),
        "floor_divide": case(N(*d.activation), Away(*d.activation)),
        "remainder": case(N(*d.activation), Away(*d.activation)),
        "gather": case(N(*d.activation), Ids(0, d.width, *d.activation), dim=1),
        "scatter": case(N(*d.activation), Ids(0, d.width, *d.activation), N(*d.activation), dim=1),
        "scatter:once": case(N(*d.activation), Ids(0, d.width, d.tokens, 1), N(d.tokens, 1), dim=1),
        "scatter_add": case(N(*d.activation), Ids(0, d.width, *d.activation), N(*d.activation), dim=1),
        "index": case(N(d.words, d.width), Ids(-d.words, d.words, batch, d.length)),
        "index_put": case(N(d.words, d.width), Ids(0, d.words, rows), N(rows, d.width)),
        "index_put:accumulate": case(N(d.words, d.width), Ids(0, d.words, rows), N(rows, d.width)),
        "cumsum": case(N(*d.activation), dim=1),
        "sample": case(N(256, d.words), Ids(0, 1 << 40, 2), top_k=40, top_p=0.9),
        "sum": case(N(*d.activation), dim=1),
        "mean": case(N(*d.activation), dim=1),
        "amax": case(N(*d.activation), dim=1),
        "amin": case(N(*d.activation), dim=1),
        "argmax": case(N(*d.activation), dim=1),
        "pack": case(N(d.tokens // 2, d.width), N(d.tokens // 2, d.width)),
        "cat": case(N(d.tokens // 2, d.width), N(d.tokens // 2, d.width), dim=1),
        "split": case(N(*d.activation), split_size=d.width // 2, dim=1),
        "copy_": case(N(*d.activation), N(*d.activation)),
    }


BENCH = cases_of(CPU)

# These only describe memory in another way: there is a time, but nothing moves.
VIEWS = {"reshape", "view", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach"}
VIEWS |= {"contiguous", "to_device", "split"}  # of a dense tensor on its own device


def bench_case(entry: Op, device: str = "cpu") -> Case:
    """The case of an entry that is measured."""
    cases, activation = (BENCH, ACTIVATION) if device == "cpu" else (cases_of(CUDA), CUDA.activation)
    if entry.id in cases:
        return cases[entry.id]
    if not entry.cases[0].inputs:
        shaped = [c for c in entry.cases if "shape" in c.kwargs]
        return replace(shaped[0], kwargs={**shaped[0].kwargs, "shape": activation}) if shaped else entry.cases[-1]
    same = [c for c in entry.cases if c.fd and len({s.shape for s in c.inputs}) == 1 and c.inputs[0].shape != ()]
    if same and entry.op not in VIEWS and not same[0].kwargs.keys() & {"dim", "shape", "dims"}:
        return replace(same[0], inputs=tuple(replace(s, shape=activation) for s in same[0].inputs))
    return max(entry.cases, key=lambda c: sum(math.prod(s.shape) for s in c.inputs))


def sets_of(entry: Op, c: Case, itemsize: int) -> int:
    """How many sets of a case's inputs it takes until a GPU's cache cannot have the next one; 1 where nothing moves."""
    size = sum((itemsize if s.is_float else 1 if s.kind == "bool" else 8) * math.prod(s.shape) for s in c.inputs)
    return 1 if entry.op in VIEWS or size < 1 << 20 else min(MOST_SETS, -(-COLD // size))
