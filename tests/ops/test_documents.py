"""Rows of several documents: document_bounds, what is refused, and attention that is composed or runs by a kernel."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
from arrays import FIT, every_bounds
from runs import python, raced

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.table import array, bits, tensor
from xtrain.tensors.documents import check_rows

LENGTHS = [[3, 1, 5], [9]]


def inputs(keys: int = 9) -> list[xt.Tensor]:
    rng = np.random.default_rng(5)
    return [xt.tensor(rng.standard_normal((2, 4 if i == 0 else 2, 9 if i == 0 else keys, 8))) for i in range(3)]


def test_bounds_of_documents() -> None:
    bounds = F.document_bounds([(3, 1, 2), np.array([6])])
    assert bounds.dtype is xt.int32 and bounds.tolist() == [
        [[0, 0, 0, 3, 4, 4], [3, 3, 3, 4, 6, 6]],
        [[0] * 6, [6] * 6],
    ]
    for dtype in (np.uint8, np.uint64, np.int16):
        assert F.document_bounds([np.array([3, 1, 2], dtype)]).tolist() == bounds.tolist()[:1], dtype


@pytest.mark.parametrize(
    ("lengths", "kind", "sentence"),
    [
        (5, TypeError, "lengths must be a sequence of rows, got int"),
        ([[2], []], ValueError, "lengths of row 1 must hold at least one, got none"),
        ([[2**62, 2**62]], ValueError, r"lengths of row 0 must sum to at most 2\*\*31 - 1, got 9223372036854775808"),
        ([[2**31]], ValueError, r"lengths of row 0 must sum to at most 2\*\*31 - 1, got 2147483648"),
        ([[1.5]], TypeError, r"lengths of row 0 must be a sequence of integers, got \[1.5\]"),
        ([[3], [[1], [2, 3]]], TypeError, r"lengths of row 1 must be a sequence of integers, got \[\[1\], \[2, 3\]\]"),
        ([[[1], [2, 3]]], TypeError, r"lengths of row 0 must be a sequence of integers, got \[\[1\], \[2, 3\]\]"),
        ([[True, 5]], TypeError, r"lengths of row 0 must be a sequence of integers, got \[True, 5\]"),
        ([[5, np.True_]], TypeError, r"lengths of row 0 must be a sequence of integers, got \[5, (np\.)?True_?\]"),
    ],
)
def test_bounds_that_are_refused(lengths: object, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=f"^document_bounds: {sentence}$"):
        F.document_bounds(lengths)


@pytest.mark.parametrize("documents", [None, LENGTHS], ids=["row", "documents"])
@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 2)])
def test_composed_attention_sees_what_the_kernels_see(documents: list | None, causal: bool, window: int | None) -> None:
    """dropout_p of 1e-300 takes the composed way and drops nothing. Values of ones: the weights of what is seen sum to 1."""
    q, k, v = inputs()
    bounds = None if documents is None else F.document_bounds(documents)
    options = dict(is_causal=causal, enable_gqa=True, documents=bounds, window=window)
    want = F.scaled_dot_product_attention(q, k, v, **options)
    seen = F.scaled_dot_product_attention(q, k, xt.ones_like(v), dropout_p=1e-300, **options)
    got = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-300, **options)
    np.testing.assert_allclose(array(got), array(want), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(array(seen), 1, rtol=1e-12)


@pytest.mark.on_cpu
@pytest.mark.parametrize("backend", _C.attention_backends(_C.device("cpu")))
def test_no_number_of_another_document_enters(backend: str) -> None:
    """NaN in a document, forward and backward: the others have the bits that they have without it."""
    bounds = F.document_bounds([[4, 5], [1, 8]], device="cpu")
    found = []
    for poison in (0.0, float("nan")):
        q, k, v = (x.to("cpu") for x in inputs())
        for x in (q, k, v):
            x[0, :, :4] = x[0, :, :4] + poison
            x.requires_grad_()
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, documents=bounds, window=3, backend=backend
        )
        y.sum().backward()
        found.append([bits(x[0, :, 4:].contiguous()) + bits(x[1]) for x in (y, q.grad, k.grad, v.grad)])
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", [None, "reference"])
def test_more_queries_than_keys_in_a_window(backend: str | None) -> None:
    q, k, v = inputs(keys=5)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, window=2, backend=backend)
    assert not y[:, :, :4].any().item() and y[:, :, 4:].isfinite().all().item()
    np.testing.assert_allclose(array(y[:, :, 4]), np.repeat(array(v[:, :, 0]), 2, 1), rtol=1e-12)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_the_first_row_does_not_stand_for_rows_behind_the_last(dim: int) -> None:
    """Infinities far before every window: rows behind the end of the last tiles are zeros, not another row times a weight of 0."""
    rng = np.random.default_rng(dim)
    drawn = [rng.standard_normal((1, 2, 300, dim)).astype(np.float32) for _ in range(4)]
    backend = "flash" if "flash" in _C.attention_backends(_C.get_default_device()) else None
    found = []
    for first in (1.0, np.inf):
        for x in drawn:
            x[:, :, 0] = first
        q, k, v = (xt.tensor(x, requires_grad=True) for x in drawn[:3])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, window=8, backend=backend)
        y.backward(xt.tensor(drawn[3]))
        found.append([array(x)[:, :, 256:] for x in (y, q.grad, k.grad, v.grad)])
    for name, a, b in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        assert np.isfinite(a).all() and np.array_equal(a, b), name


@pytest.mark.on_cpu
@pytest.mark.parametrize("backend", [None, *_C.attention_backends(_C.device("cpu"))])
@pytest.mark.parametrize("dtype, window", [("float32", None), ("float64", 3), ("bfloat16", 70)])
def test_a_document_has_the_bits_that_it_has_alone(backend: str | None, dtype: str, window: int | None) -> None:
    """Documents of less and of more than a block of 64 rows, most of whose kv heads have a backward in shares."""
    same_bits_as_alone([[1, 5, 70, 130, 3], [209]], (20, 2), 16, dtype, window, backend)


@pytest.mark.on_cpu
def test_documents_whose_sums_have_no_room_together() -> None:
    """Shares of dK and dV of 40 MiB, of which the backward holds 32 at once."""
    same_bits_as_alone([[512] * 5], (16, 1), 128, "float32", 8, "materialized", first=4)


def same_bits_as_alone(
    lengths: list[list[int]],
    heads: tuple[int, int],
    dim: int,
    dtype: str,
    window: int | None,
    backend: str | None,
    first: int = 0,
) -> None:
    """Forward and backward of documents first ... of each row, in rows of heads as the model has them."""
    rng, options = np.random.default_rng(7), dict(is_causal=True, enable_gqa=True, window=window, backend=backend)
    shape = (len(lengths), sum(lengths[0]))
    packed = [tensor(rng.standard_normal((*shape, heads[i % 3 > 0], dim)), dtype, "cpu") for i in range(4)]

    def run(rows: slice, tokens: slice, documents: xt.Tensor | None) -> list[xt.Tensor]:
        inputs = [x[rows, tokens].transpose(1, 2).detach() for x in packed]
        q, k, v = (x.requires_grad_() for x in inputs[:3])
        y = F.scaled_dot_product_attention(q, k, v, documents=documents, **options)
        y.backward(inputs[3])
        return [y, q.grad, k.grad, v.grad]

    whole = run(slice(None), slice(None), F.document_bounds(lengths, device="cpu"))
    for row, of_row in enumerate(lengths):
        begin = sum(of_row[:first])
        for length in of_row[first:]:
            rows, tokens = slice(row, row + 1), slice(begin, begin + length)
            for name, got, want in zip(("y", "dq", "dk", "dv"), whole, run(rows, tokens, None)):
                assert bits(got[rows, :, tokens].contiguous()) == bits(want), (name, row, length)
            begin += length


def broken(*starts_and_ends: tuple[list[int], list[int]]) -> xt.Tensor:
    return xt.tensor(np.array(starts_and_ends, np.int32), device="cpu")


BROKEN = pytest.mark.parametrize(
    "documents, got",
    [
        (([0, 0, 1, 1], [2, 2, 4, 4]), "1 to 4 at token 2 of row 0"),  # the second begins in the first
        (([0, 0, 2, 2], [3, 3, 4, 4]), "2 to 4 at token 2 of row 0"),  # the first ends in the second
        (([0, 0, 3, 3], [2, 2, 4, 4]), "3 to 4 at token 2 of row 0"),  # a gap
        (([1, 1, 1, 1], [4, 4, 4, 4]), "1 to 4 at token 0 of row 0"),
        (([0, 0, 0, 0], [5, 5, 5, 5]), "0 to 5 at token 0 of row 0"),
        (([0, 0, 0, 0], [0, 4, 4, 4]), "0 to 0 at token 0 of row 0"),
    ],
)


@pytest.mark.on_cpu
@BROKEN
def test_documents_that_break_the_rule(documents: tuple[list[int], list[int]], got: str) -> None:
    q = xt.ones(1, 1, 4, 2, device="cpu")
    for backend in xt.attention_backends("cpu"):
        with pytest.raises(ValueError, match=FIT + got):
            F.scaled_dot_product_attention(q, q, q, is_causal=True, documents=broken(documents), backend=backend)


@pytest.mark.on_cpu
@BROKEN
def test_composed_attention_refuses_documents_that_break_the_rule(
    documents: tuple[list[int], list[int]], got: str
) -> None:
    """With dropout: in the function, and in GPT-2, before positions are looked up. A row that is right comes first."""
    from xtrain import models  # above this room

    right, second = ([0] * 4, [4] * 4), got.replace("row 0", "row 1")
    bounds = broken(right, documents)
    for dtype in (xt.float32, xt.float64, xt.bfloat16):
        q = xt.ones(2, 1, 4, 2, dtype=dtype)
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, documents=broken(right, right))
        for causal in (False, True):
            with pytest.raises(ValueError, match=FIT + second):
                F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=causal, documents=bounds)
    config = models.GPT2Config(vocab_size=7, n_positions=4, n_embd=8, n_layer=1, n_head=2, attn_pdrop=0.5)
    model, ids = models.GPT2(config), xt.zeros(2, 4, dtype=xt.int64)
    for training in (True, False):
        model.train(training)
        for call, given in ((model.forward, [ids]), (model.loss, [ids, ids]), (model.features, [ids])):
            call(*given, documents=broken(right, right))
            with pytest.raises(ValueError, match=FIT + second):
                call(*given, documents=bounds)


@pytest.mark.on_cpu
def test_nobody_sees_the_check_of_composed_attention() -> None:
    """A hook on calls is told of what computes, and stays: QK-clip counts calls of attention."""
    q, seen = xt.ones(1, 2, 9, 8), []
    before = _C.set_call_hook(lambda op, *_: seen.append(op.__name__))
    try:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, documents=F.document_bounds([[3, 6]]))
    finally:
        _C.set_call_hook(before)
    assert "scaled_dot_product_attention" not in seen and seen.count("softmax") == 1 and seen[-1] == "matmul"


@pytest.mark.on_cpu
def test_the_check_leaves_hooks_alone() -> None:
    """It is no call, and under threads a hook stays and is told of every call: it belongs to the process."""
    q, bounds, seen = xt.ones(1, 2, 9, 8), F.document_bounds([[3, 6]]), []

    def hook(op, *_) -> None:
        seen.append(op.__name__)

    def calls() -> None:
        for _ in range(100):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, documents=bounds)

    before = _C.set_call_hook(hook)
    try:
        check_rows(bounds)
        assert not seen
        threads = [threading.Thread(target=calls) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        after = _C.set_call_hook(before)
    assert after is hook and seen.count("softmax") == 400


@pytest.mark.on_cpu
def test_the_check_says_what_the_op_says() -> None:
    """Of all small bounds, of none; of what is not dense; and of what are no bounds."""

    def said(check, *given) -> str | None:
        try:
            check(*given)
        except ValueError as error:
            return str(error)
        return None

    def attend(documents) -> None:
        none = xt.empty(2, 0, documents.shape[2], 1)
        F.scaled_dot_product_attention(none, none, none, documents=documents)

    for bounds, right in every_bounds():
        good = F.document_bounds([[bounds.shape[1]]]).numpy()[0]
        wide = xt.tensor(np.repeat(np.stack([good, bounds]), 2, 2))
        for documents in (xt.tensor(np.stack([good, bounds])), wide[:, :, ::2]):
            found = said(check_rows, documents)
            assert (found is None) == right, bounds  # before attention reads them
            assert found is None or re.fullmatch(FIT + r"-?\d to -?\d at token \d of row 1", found), found
            assert said(attend, documents) == found, bounds
    check_rows(xt.zeros(2, 2, 0, dtype=xt.int32))
    check_rows(xt.zeros(0, 2, 3, dtype=xt.int32))
    assert _C.check_documents(xt.ones(2, 2, 3, dtype=xt.int32, device="meta")) is None
    for shape, dtype, kind, text in (
        ((2, 2, 3), xt.float32, TypeError, "dtype int32, got float32"),
        ((2, 2, 3), xt.int64, TypeError, "dtype int32, got int64"),
        ((2, 3, 3), xt.int32, ValueError, "shape (B, 2, S), got (2, 3, 3)"),
        ((2, 2), xt.int32, ValueError, "shape (B, 2, S), got (2, 2)"),
    ):
        with pytest.raises(kind, match=f"^check_documents: documents must have {re.escape(text)}$"):
            _C.check_documents(xt.zeros(shape, dtype=dtype))


@pytest.mark.on_cpu
def test_rows_that_are_one_row_in_memory_are_checked_once() -> None:
    """2^38 expanded rows, one by one, would take ten minutes, as would as many rows of no tokens: in a process of its own."""
    code = """
import xtrain as xt
from xtrain import _C
_C.check_documents(xt.tensor([[[0, 0, 2], [2, 2, 3]]], dtype=xt.int32).expand(2**38, 2, 3))
_C.check_documents(xt.zeros(2**38, 2, 0, dtype=xt.int32))
_C.check_documents(xt.zeros(0, 2, 1, dtype=xt.int32).expand(0, 2, 2**38))
try:
    _C.check_documents(xt.tensor([[[0, 0, 2], [2, 2, 4]]], dtype=xt.int32).expand(2**38, 2, 3))
except ValueError as error:
    print(error)
"""
    done = python("-c", code, timeout=60)
    assert done.stdout.endswith("got 2 to 4 at token 2 of row 0\n"), done.stdout + done.stderr


def test_what_is_refused() -> None:
    q, k, v = (x.float() for x in inputs())
    attend, bounds = F.scaled_dot_product_attention, F.document_bounds(LENGTHS)
    name, more = "scaled_dot_product_attention: ", dict(is_causal=True, enable_gqa=True, dropout_p=0.5)
    for call, kind, text in (
        (lambda: F.document_bounds([[3, 5], [7]]), ValueError, "lengths of row 1 must sum to 8, as those of row 0, got 7"),
        (lambda: F.document_bounds([[8], [8, 0]]), ValueError, "lengths of row 1 must be at least 1, got 0"),
        (lambda: F.document_bounds([]), ValueError, "document_bounds: lengths must have a row, got none"),
        (lambda: F.document_bounds([8]), TypeError, "lengths of row 0 must be a sequence of integers, got 8"),
        (lambda: F.document_bounds([[8.5]]), TypeError, "lengths of row 0 must be a sequence of integers, got "),
        (lambda: attend(q, k, v, **more, window=0), ValueError, name + "window must be at least 1, got 0"),
        (lambda: attend(q, q, q, dropout_p=0.5, window=2), ValueError, name + "window must be None without is_causal"),
        (lambda: attend(q, k, v, **more, documents=[3]), TypeError, name + "documents must be a Tensor, got list"),
        (lambda: attend(q, k, v, **more, documents=q), TypeError, name + "documents must have dtype int32, got float32"),
        (lambda: attend(q, k, v, **more, documents=bounds[:1]), ValueError, name + r"documents must have shape \(2, 2, 9\), got"),
        (lambda: attend(q, k[:, :, 1:], v[:, :, 1:], **more, documents=bounds), ValueError, name + "documents must be None where"),
        (lambda: attend(q, k, v, **more, documents=bounds.to("meta")), ValueError, name + "documents must be on the device of query, "),
        (lambda: attend(q, q, q, xt.ones(9, 9), documents=bounds), ValueError, name + "attn_mask must be None with documents"),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            call()


def test_models_refuse_documents_of_another_device() -> None:
    from xtrain import models  # above this room

    config = models.LlamaConfig(
        vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    ids, documents = xt.zeros(2, 9, dtype=xt.int64), F.document_bounds(LENGTHS, device="cpu").to("meta")
    with pytest.raises(ValueError, match="^Llama: documents must be on the device of ids, .*, got meta"):
        models.Llama(config)(ids, documents=documents)


def test_documents_that_another_thread_changes_lead_nowhere_else() -> None:
    """In a process of its own: a ValueError or any numbers, but no address outside the tensors. Both kinds of rows are right."""
    given = """rows = 20000
few = np.tile(F.document_bounds([[4, 4]]).numpy(), (rows, 1, 1))
many = np.tile(F.document_bounds([[1] * 8]).numpy(), (rows, 1, 1))
memory = few.copy()
q, bounds = xt.randn(rows, 1, 8, 4), xt.from_numpy(memory)"""
    raced(given, "memory[:] = many\nmemory[:] = few", "F.scaled_dot_product_attention(q, q, q, documents=bounds)", 3)


def test_a_model_takes_positions_beside_documents_and_no_caches(monkeypatch) -> None:
    from xtrain import models  # above this room
    from xtrain.train import nonfinite

    config = models.LlamaConfig(
        vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model, ids, bounds = models.Llama(config), xt.tensor([[1, 2, 3, 4]]), F.document_bounds([[1, 3]])
    given = model(ids, xt.tensor([0, 0, 2, 4]), documents=bounds)
    assert not np.array_equal(given.detach().cpu().numpy(), model(ids, documents=bounds).detach().cpu().numpy())
    with pytest.raises(ValueError, match="documents must be None with caches, got both"):
        model(ids, None, model.make_caches(1, 4), bounds)
    seen: list[object] = []
    forward = models.Llama.forward
    monkeypatch.setattr(
        models.Llama, "forward", lambda *args, **more: (seen.append(more.get("documents")), forward(*args, **more))[1]
    )
    nonfinite.first_bad_activation(model, ids, bounds)  # the rerun of a bad step sees what the step saw
    assert len(seen) == 1 and seen[0] is bounds
