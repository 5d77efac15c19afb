"""decoder_step in one launch against the kernels of its parts, on a GPU: test_generation_kernels.py runs each case in a process of its
own.
"""

from __future__ import annotations

import numpy as np

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

# Layers, batch, C, H, K, D, F, L; whether queries and keys have norms. Chunks of attention in whole groups and spread over all blocks,
# heads that fill no tile, a last tile of few rows, more slots than the ring has, the largest model.
CASES = [
    ((2, 16, 1024, 16, 8, 128, 3072, 700), True),
    ((3, 5, 576, 9, 3, 64, 1536, 300), False),
    ((1, 9, 96, 5, 1, 128, 64, 130), True),
    ((28, 1, 1024, 16, 8, 128, 3072, 300), True),
]


def drawn(seed: int, *shape: int, dtype: str) -> xt.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return xt.tensor(values).to(getattr(xt, dtype)).to("cuda")


def layers_of(
    count: int,
    batch: int,
    c: int,
    heads: int,
    kv_heads: int,
    dim: int,
    inner: int,
    length: int,
    norms: bool,
    dtype: str,
) -> tuple[list[xt.Tensor], list[xt.Tensor]]:
    """Weights, the same ones in every second layer, and caches of a decoder, as decoder_step takes them."""
    shapes: list[tuple[int, ...]] = [(c,), (heads * dim, c), (kv_heads * dim, c), (kv_heads * dim, c)]
    shapes += [*[(dim,)] * (2 * norms), (c, heads * dim), (c,), (inner, c), (inner, c), (c, inner)]
    two = [
        [
            drawn(100 * layer + i, *shape, dtype=dtype) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
            + (len(shape) == 1)
            for i, shape in enumerate(shapes)
        ]
        for layer in range(2)
    ]
    weights = [weight for layer in range(count) for weight in two[layer % 2]]
    return weights, [drawn(7000 + i, batch, kv_heads, length, dim, dtype=dtype) for i in range(2 * count)]


def check(sizes: tuple[int, ...], norms: bool) -> None:
    """The same bits in every run, in every batch, and captured; one launch, which begins with the counts that the one before left."""
    _, batch, c, *_, length = sizes
    places = np.random.default_rng(batch).integers(0, length, batch)
    places[: min(batch, 4)] = (length - 1, -1, 63, length)[: min(batch, 4)]
    at, every = xt.tensor(places, device="cuda"), slice(0, batch)
    for dtype in ("bfloat16", "float16"):
        weights, kept = layers_of(*sizes, norms, dtype)  # type: ignore[call-arg]
        x, norm, head = drawn(1, batch, c, dtype=dtype), drawn(2, c, dtype=dtype), drawn(3, 2003, c, dtype=dtype)

        def step(rows: slice, plain: bool, x=x, weights=weights, kept=kept, **last: xt.Tensor) -> list[xt.Tensor]:
            caches = [one[rows].clone() for one in kept]
            for columns in (c, 2003):  # what is not written shall not be what another run left there
                xt.full((rows.stop - rows.start, columns), np.nan, dtype=x.dtype, device="cuda")
            return [_C.decoder_step(x[rows], at[rows], weights, caches, 1e-6, 1e6, plain=plain, **last), *caches]

        def alike(found: list[xt.Tensor], want: list[xt.Tensor], rows: slice) -> bool:
            pairs = [(a.cpu().float().numpy(), b[rows].cpu().float().numpy()) for a, b in zip(found, want, strict=True)]
            return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)

        with xt.no_grad():
            want = step(every, True)
            known = [0 <= place < length for place in places]
            assert np.isfinite(want[0].cpu().float().numpy()).all(1).tolist() == known, dtype
            caches = [one.clone() for one in kept]
            before = xt.cuda.counters()["launches"]
            _C.decoder_step(x, at, weights, caches, 1e-6, 1e6, plain=False)
            assert xt.cuda.counters()["launches"] - before == 1
            for _ in range(5):
                assert alike(step(every, False), want, every), dtype
            for rows in (slice(0, 1), slice(batch // 2, batch)):
                assert alike(step(rows, False), want, rows), (dtype, rows)
            logits = F.linear(F.rms_norm(want[0], norm, 1e-6), head)
            for plain in (True, False, False):
                assert alike(step(every, plain, last_norm=norm, head=head), [logits, *want[1:]], every), (dtype, plain)
            graph = xt.cuda.graph(lambda: step(every, False)[0])
            assert all(alike([graph()], want[:1], every) for _ in range(5)), dtype
