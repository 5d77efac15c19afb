"""Attention within documents of a row and within windows by the kernels of a GPU: tiles that are skipped, edges inside a tile, order of sums."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import FIT, every_bounds
from runs import python

import xtrain as xt
import xtrain.functional as F
from xtrain import _C, models
from xtrain.optable.table import array

pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"),
]


def attend(backend: str, tensors: list[xt.Tensor], causal: bool, lengths: list | None, window: int | None) -> list:
    """[out, dq, dk, dv] of q, k, v, dout."""
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    documents = None if lengths is None else F.document_bounds(lengths, device="cuda")
    out = _C.scaled_dot_product_attention(q, k, v, causal, None, True, backend, documents, window)
    out.backward(tensors[3])
    return [array(t) for t in (out, q.grad, k.grad, v.grad)]


# (queries, keys, causal, lengths of the two rows, window): documents shorter and longer than a tile, of one token, that end at an edge of
# tiles and inside; windows of one key, of less and more than a tile; queries that see nothing, keys that nobody sees; tiles whose upper
# and lower rows see other tiles.
SPANS = [
    (257, 257, True, [[257], [1, 64, 63, 128, 1]], None),
    (300, 300, True, [[5, 200, 95], [100, 100, 100]], 70),
    (300, 300, False, [[130, 170], [1, 299]], None),
    (513, 513, True, None, 129),
    (200, 460, True, None, 65),
    (460, 200, True, None, 1),
    (720, 720, True, [[330, 390], [64, 500, 156]], None),
    (520, 520, False, [[330, 190], [64, 456]], None),
    # No spans; causal rows of head dim 64 take their kernel: rows and blocks that see nothing, a tail, where it begins.
    (1300, 1100, True, None, None),
    (400, 1500, True, None, None),
    (1023, 1023, True, None, None),
    (1024, 1024, True, None, None),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_flash_of_documents_and_windows_errs_at_most_twice_as_much_as_materialized(dtype: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    for sq, skv, causal, lengths, window in SPANS:
        shapes = [(2, sq, 4, dim), (2, skv, 2, dim), (2, skv, 2, dim), (2, sq, 4, dim)]
        host = [xt.tensor(rng.standard_normal(shape)).to(getattr(xt, dtype)) for shape in shapes]
        low = [t.to("cuda").transpose(1, 2) for t in host]
        wide = [t.to(xt.float64).to("cuda").transpose(1, 2) for t in host]
        exact, naive, ours, again = (
            attend(backend, tensors, causal, lengths, window)
            for backend, tensors in [("reference", wide), ("materialized", low), ("flash", low), ("flash", low)]
        )
        assert all(np.array_equal(a, b) for a, b in zip(ours, again))
        for name, a, b, c in zip(["out", "dq", "dk", "dv"], ours, naive, exact):
            error, allowed = np.linalg.norm(a - c), 2 * max(np.linalg.norm(b - c), unit * np.linalg.norm(c))
            assert error <= allowed, f"{name} {sq, skv, causal, lengths, window}: {error}, allowed {allowed}"


def test_a_document_has_the_bits_that_it_has_alone() -> None:
    """Where documents begin and end at edges of tiles, each is computed as a row of its own. (Head dim 128 has another backward.)"""
    dim = 64
    rng = np.random.default_rng(1)
    rows = [xt.tensor(rng.standard_normal((4, 384, 2, dim)).astype(np.float32)).to("cuda").bfloat16() for _ in range(4)]
    alone = attend("flash", [x.transpose(1, 2) for x in rows], True, None, None)
    one = [x.reshape(1, 4 * 384, 2, dim).transpose(1, 2) for x in rows]
    packed = attend("flash", one, True, [[384] * 4], None)
    for i, (a, b) in enumerate(zip(alone, packed)):
        b = b.transpose(0, 2, 1, 3).reshape(4, 384, 2, dim).transpose(0, 2, 1, 3)
        assert np.array_equal(a, b), i


@pytest.mark.parametrize("causal", [True, False])
def test_documents_that_break_the_rule_end(causal: bool) -> None:
    """Any numbers, but nobody waits for ever, and nothing outside the tensors is touched; the next wait tells of it, once."""
    rng = np.random.default_rng(2)
    x = xt.tensor(rng.standard_normal((2, 4, 700, 128)).astype(np.float32)).to("cuda").bfloat16()
    wild = xt.tensor(rng.integers(-2000, 3000, (2, 2, 700)).astype(np.int32), device="cuda")
    q = x.detach().requires_grad_()
    _C.scaled_dot_product_attention(q, q, q, causal, None, False, "flash", wild).backward(x)
    with pytest.raises(ValueError, match=FIT):
        xt.cuda.synchronize()
    xt.cuda.synchronize()
    assert q.grad is not None and q.grad.shape == x.shape


def broken(values: np.ndarray | list) -> xt.Tensor:
    """Bounds [rows, 2, tokens] that `document_bounds` would not make."""
    return xt.tensor(np.array(values, np.int32), device="cuda")


def test_the_check_tells_right_bounds_from_wrong_ones() -> None:
    """Of all small bounds, in a second row, dense and not; alone, and by a forward."""
    q = {tokens: xt.zeros(2, 0, tokens, 8, device="cuda") for tokens in (2, 3)}
    backends = _C.attention_backends(_C.device("cuda"))
    for count, (bounds, right) in enumerate(every_bounds()):
        tokens = bounds.shape[1]
        good = F.document_bounds([[tokens]], device="cpu").numpy()[0]
        wide = broken(np.repeat(np.stack([good, bounds]), 2, 2))[:, :, ::2]
        heads, backend = q[tokens], backends[count % len(backends)]
        for documents in (broken([good, bounds]), wide):
            for look in (
                lambda documents=documents: _C.check_documents(documents),
                lambda documents=documents, heads=heads, backend=backend: F.scaled_dot_product_attention(
                    heads, heads, heads, documents=documents, backend=backend
                ),
            ):
                look()
                if right:
                    xt.cuda.synchronize()
                    continue
                with pytest.raises(ValueError, match=FIT + r"-?\d to -?\d at token \d of row 1$"):
                    xt.cuda.synchronize()


@pytest.mark.parametrize(
    "kernel, dtype, dim",
    [
        ("flash_hopper", "bfloat16", 128),
        ("flash_half", "bfloat16", 32),
        ("flash", "float32", 64),
        ("materialized", "float32", 40),
        ("reference", "float32", 40),
    ],
)
def test_each_kernel_checks_its_documents(kernel: str, dtype: str, dim: int) -> None:
    sizes, name = (2, 2, 1, 70, 70, dim), kernel.partition("_")[0]
    found = _C.explain_attention(sizes, dtype, device="cuda", backend=name, documents=True)
    runs = next(row[1] for row in found if row[2] is None)
    if kernel == "flash_hopper" and runs != kernel:
        pytest.skip("needs a GPU of compute capability 9.0")
    assert runs == kernel
    q, k = (xt.zeros(2, heads, 70, dim, device="cuda", dtype=getattr(xt, dtype)) for heads in (2, 1))
    right = F.document_bounds([[70], [30, 40]], device="cpu").numpy()
    wrong = right.copy()
    wrong[1, 1, 69] = 69
    F.scaled_dot_product_attention(q, k, k, enable_gqa=True, documents=broken(right), backend=name)
    xt.cuda.synchronize()
    F.scaled_dot_product_attention(q, k, k, enable_gqa=True, documents=broken(wrong), backend=name)
    with pytest.raises(ValueError, match=FIT + "30 to 69 at token 69 of row 1$"):
        xt.cuda.synchronize()


@pytest.mark.parametrize(
    "documents, got",
    [
        (([0, 0, 3, 3], [2, 2, 4, 4]), "3 to 4 at token 2 of row 1"),  # a gap
        (([0, 0, 1, 1], [2, 2, 4, 4]), "1 to 4 at token 2 of row 1"),  # the second begins in the first
        (([0, 0, 2, 2], [2, 2, 5, 5]), "2 to 5 at token 2 of row 1"),  # beyond the row
        (([0, 0, 2, 1], [2, 2, 4, 4]), "1 to 4 at token 3 of row 1"),
    ],
)
def test_a_wrong_token_is_named(documents: tuple[list[int], list[int]], got: str) -> None:
    """By attention, also in a replay, by attention that is composed, and by models, before they read positions."""
    right = F.document_bounds([[4], [1, 3]], device="cuda")
    bounds = broken([[[0] * 4, [4] * 4], documents])
    config = models.GPT2Config(vocab_size=7, n_positions=4, n_embd=8, n_layer=1, n_head=2, attn_pdrop=0.5)
    model, ids = models.GPT2(config).to("cuda"), xt.zeros(2, 4, dtype=xt.int64, device="cuda")
    q = xt.ones(2, 1, 4, 8, device="cuda")
    calls = (
        lambda given: F.scaled_dot_product_attention(q, q, q, is_causal=True, documents=given),
        lambda given: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, documents=given),
        lambda given: model.eval()(ids, documents=given),
        lambda given: model.train()(ids, documents=given),
    )
    for call in calls:
        call(right)
        xt.cuda.synchronize()
        call(bounds)
        with pytest.raises(ValueError, match=FIT + got + "$"):
            xt.cuda.synchronize()
    step = xt.cuda.graph(calls[0])
    for _ in range(4):
        step(right)
    xt.cuda.synchronize()
    assert step.captured
    step(bounds)
    with pytest.raises(ValueError, match=FIT + got + "$"):
        xt.cuda.synchronize()
    step(right)
    xt.cuda.synchronize()


def test_warpgroups_that_see_other_tiles_go_on_together() -> None:
    """In a process of its own: a warpgroup that neither releases a tile nor takes its turn leaves the others waiting for ever."""
    code = """
import xtrain as xt
import xtrain.functional as F
for dim in (64, 128):
    q = xt.randn(2, 2400, 4, dim, device="cuda").to(xt.bfloat16).transpose(1, 2)
    bounds = F.document_bounds([[256, 464, 1680], [448, 272, 1680]], device="cuda")  # they begin inside blocks, tiles further
    for _ in range(3):
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True, backend="flash", documents=bounds)
print(bool(out.isfinite().all()))
"""
    done = python("-c", code, timeout=60)  # it takes some seconds
    assert done.stdout == "True\n", done.stdout + done.stderr
