"""The choice among implementations: a function of the problem and the device, shown by explain_gemm and explain_attention, obeyed by the
ops; and whatever an implementation claims to support it computes rightly, tails and strides included."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.optable.references import attention
from xtrain.optable.table import array, tensor

EXTENTS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 127, 129, 257)
DTYPES = ("float32", "float64", "bfloat16", "float16")
LAYOUTS = ("nn", "nt", "tn", "tt")
# (M, N, K), layout, batch: every extent in each place, next to others that are no multiples of anything
PRODUCTS = [
    (sizes, LAYOUTS[i % 4], (1, 1) if i % 3 else (2, 3))
    for i, n in enumerate(EXTENTS)
    for sizes in ((n, 33, 17), (5, n, 31), (34, 19, n), (n, n, n))
]
# B, H, K, S, T, D, causal
ATTENTIONS = [
    (1, 1, 1, 1, 1, 1, True), (2, 4, 2, 64, 64, 64, True), (1, 2, 2, 65, 65, 32, True), (2, 3, 1, 33, 129, 96, False),
    (1, 4, 2, 129, 33, 128, True), (2, 2, 1, 17, 257, 33, True), (1, 2, 1, 31, 31, 80, False), (3, 1, 1, 127, 128, 40, True),
    (1, 8, 1, 200, 200, 16, True), (1, 12, 2, 150, 90, 24, False),  # the CPU's backward cuts each kv head into parts
]  # fmt: skip


def chosen(rows: list[tuple[str, str, str | None]]) -> str:
    return next(kernel for _, kernel, reason in rows if reason is None)


def wrong_products(device: str, dtypes=DTYPES) -> list[str]:
    """What implementations of a device claim to support and get wrong. Sums of small integers: a right product is exact."""
    wrong = []
    random = np.random.default_rng(3)
    for dtype in dtypes:
        for (m, n, k), layout, batch in PRODUCTS:
            a, b = (random.integers(-1, 2, (*batch, *shape)).astype(np.float64) for shape in ((m, k), (k, n)))
            lay = [np.ascontiguousarray(x.swapaxes(-1, -2)) if c == "t" else x for x, c in zip((a, b), layout)]
            pair = [_C.tensor(x.astype(np.float32), dtype=getattr(_C, dtype)).to(device) for x in lay]
            pair = [_C.transpose(x, -1, -2) if c == "t" else x for x, c in zip(pair, layout)]
            for name in _C.gemm_backends(device):
                row = _C.explain_gemm((m, n, k), dtype, layout=layout, batch=batch, device=device, backend=name)[0]
                got = _C.matmul(*pair, backend=name).to("cpu").to(_C.float64).numpy()
                if row[2] is None and not np.array_equal(got, a @ b):
                    wrong.append(f"{row[1]}: {m} x {n} x {k} {layout} {batch} {dtype}")
    return wrong


def test_what_is_supported_is_right() -> None:
    assert wrong_products(str(xt.get_default_device())) == []


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("case", ATTENTIONS, ids=lambda case: "x".join(map(str, case[:6])))
def test_what_attention_supports_is_right(case, dtype: str) -> None:
    """Against float64, heads between the rows in memory, as the model has them; both passes of every implementation."""
    *sizes, causal = case
    b, h, kv, s, t, d = sizes
    device, random = str(xt.get_default_device()), np.random.default_rng(sum(sizes))
    strides = (s * h * d, d, h * d, t * kv * d, d, kv * d)
    unit = {"float32": 2.0**-22, "float64": 2.0**-50, "bfloat16": 2.0**-7}[dtype]
    shapes = [(b, s, h, d), (b, t, kv, d), (b, t, kv, d), (b, s, h, d)]
    rows = [tensor(random.standard_normal(shape), dtype).to(device) for shape in shapes]
    exact = [array(x).transpose(0, 2, 1, 3) for x in rows]
    with np.errstate(invalid="ignore"):  # rows that see no key
        want = np.nan_to_num(attention(*exact[:3], is_causal=causal))
    grads = {}
    for name in [*_C.attention_backends(device)[::-1]]:
        q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in rows[:3])
        out = _C.scaled_dot_product_attention(q, k, v, causal, None, True, name)
        error = np.abs(array(out) - want).max()
        assert error <= unit * (4 + np.sqrt(d + t)) * np.abs(exact[2]).max(), f"{name}: {error}"
        out.backward(rows[3].transpose(1, 2))
        grads[name] = [array(x.grad) for x in (q, k, v)]
        for got, base in zip(grads[name], grads["reference"]):
            assert np.abs(got - base).max() <= unit * (8 + np.sqrt(s + t)) * (np.abs(base).max() + 4), name
        for backward in (False, True):
            found = _C.explain_attention(sizes, dtype, backward, strides, device=device, backend=name)
            assert found[0][0] == name and found[-1] == ("reference", "reference", None)


# ---- the choice is a function ---------------------------------------------------------------------------------------------------------

NOT_BF16 = ("bf16", "bf16", "the dtype is not bfloat16")
NOT_AMX = ("amx", "amx", NOT_BF16[2])
NO_TILES = next(r[2] for r in _C.explain_gemm((4, 4, 4), "bfloat16") if r[0] == "amx")  # or None
NOT_FEW = ("few", "few", "A is stored transposed, or B is not")
QUESTIONS = [(sizes, dtype, layout) for sizes, layout, _ in PRODUCTS for dtype in DTYPES] + [
    ((4, 2**31, 4), "float32", "nn"),
    ((2**31, 4, 4), "bfloat16", "nn"),
    ((0, 4, 4), "float64", "nt"),
]


def answers() -> list:
    """Of all questions, on the default device."""
    device = _C.get_default_device()
    products = [_C.explain_gemm(sizes, dtype, layout=layout, device=device) for sizes, dtype, layout in QUESTIONS]
    attentions = [
        _C.explain_attention(case[:6], dtype, backward, device=device)
        for case in ATTENTIONS
        for dtype in DTYPES
        for backward in (False, True)
    ]
    return products + attentions


def test_the_choice_depends_on_nothing_else() -> None:
    """The same again, after other work, with other threads and seeds, in another process that is asked in another order."""
    before = answers()
    wrong_products(str(xt.get_default_device()), ("float32",))
    xt.manual_seed(7)
    xt.set_num_threads(3)
    assert answers() == before
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_selection as t; t.QUESTIONS.reverse(); print(t.answers())"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XTRAIN_")}
    done = subprocess.run(
        [sys.executable, "-c", f"from xtrain import _C; _C.set_default_device({str(_C.get_default_device())!r}); {code}",
         os.path.dirname(__file__)], env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    count = len(QUESTIONS)
    assert done.stdout == f"{before[:count][::-1] + before[count:]}\n"


@pytest.mark.on_cpu
def test_a_name_moves_the_start() -> None:
    every = [("blas", "blas", None), ("tiled", "tiled", None), ("naive", "naive", None)]
    assert _C.explain_gemm((5, 6, 7)) == [NOT_FEW, NOT_AMX, NOT_BF16, *every]
    assert _C.explain_gemm((5, 6, 7), backend="blas") == every
    assert _C.explain_gemm((5, 6, 7), backend="tiled") == every[1:]
    with xt.use_gemm_backend("naive"), xt.use_attention_backend("reference"):
        assert _C.explain_gemm((5, 6, 7)) == every[2:]
        assert _C.explain_gemm((5, 6, 7), backend="bf16") == [NOT_BF16, *every]
        assert _C.explain_attention((1, 1, 1, 4, 4, 4)) == [("reference", "reference", None)]


@pytest.mark.on_cpu
def test_reasons() -> None:
    large = _C.explain_gemm((4, 2**31, 4))
    assert large[:3] == [NOT_FEW, NOT_AMX, NOT_BF16]
    has = "avx512bf16" in _C.cpu_features()
    assert _C.explain_gemm((5, 6, 7), "bfloat16")[2][2] == (None if has else "this CPU has no AVX512-BF16 instructions")
    assert large[3] == ("blas", "blas", "N, K or a leading dimension is above 2^31 - 1") and chosen(large) == "tiled"
    assert chosen(_C.explain_gemm((4, 2**31 - 1, 4))) == "blas"
    assert chosen(_C.explain_gemm((2**31, 4, 4))) == "blas"  # rows are cut
    assert chosen(_C.explain_gemm((4, 4, 2**31), layout="tn")) == "tiled"  # no leading dimension is as long
    assert chosen(_C.explain_gemm((4, 5, 6), ld=(2**31, 5, 5))) == "tiled"
    reasons = {
        ((8, 6, 7), "float32", "nt"): None,
        ((9, 6, 7), "bfloat16", "nt"): "A has more than 8 rows",
        ((8, 6, 7), "float16", "nt"): "the dtype is neither float32 nor bfloat16",
        ((8, 6, 7), "float32", "tt"): NOT_FEW[2],
    }
    for (sizes, dtype, layout), reason in reasons.items():
        assert _C.explain_gemm(sizes, dtype, layout=layout)[0] == ("few", "few", reason)
    for backward in (False, True):
        close = _C.explain_attention((1, 2, 2, 8, 8, 4), backward=backward, strides=(64, 32, 4, 64, 32, 0))
        assert close[:2] == [NOT_AMX, NOT_BF16] and chosen(close) == "reference"
        assert close[2][2].startswith("rows of a tensor lie closer than the head dim")
        for skv, dim in ((0, 4), (8, 0)):
            empty = _C.explain_attention((1, 2, 1, 8, skv, dim), "bfloat16", backward=backward)
            assert [row[2] for row in empty] == ["there is nothing to multiply"] * 3 + [None]
        low = _C.explain_attention((1, 2, 1, 8, 9, 4), "bfloat16", backward=backward)
        assert low[0] == ("amx", "amx", "there are fewer than 16 queries, and another number of keys")
        assert low[1] == ("bf16", "bf16", None if has else "this CPU has no AVX512-BF16 instructions")


@pytest.mark.on_cpu
def test_what_one_does_not_support_the_next_computes() -> None:
    """Keys that are one row in memory: `materialized` computes with the loops of `reference`, in both passes."""
    random = np.random.default_rng(5)
    bits = {}
    for name in ("materialized", "reference", None):
        q, v = (xt.tensor(random.standard_normal((1, 2, 9, 4), dtype=np.float32)).requires_grad_() for _ in range(2))
        k = xt.tensor(random.standard_normal((1, 2, 1, 4), dtype=np.float32)).expand(1, 2, 9, 4)
        random = np.random.default_rng(5)
        out = _C.scaled_dot_product_attention(q, k, v, True, None, False, name)
        out.sum().backward()
        bits[name] = [x.detach().numpy().tobytes() for x in (out, q.grad, v.grad)]
    assert bits["materialized"] == bits["reference"] == bits[None]


# ---- dtypes -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (("float32", "bfloat16", "float32"), "gemm: dtype of B must be float32 like that of A, got bfloat16"),
        (
            ("bfloat16", "bfloat16", "float16"),
            "gemm: dtype of C must be bfloat16 like that of A, or float32, got float16",
        ),
        (("float64", "float64", "float32"), "gemm: dtype of C must be float64 like that of A, got float32"),
        (("float16", "float64", "float64"), "gemm: dtype of B must be float16 like that of A, got float64"),
        (("int32",), "gemm: dtype of A must be float32, float64, bfloat16 or float16, got int32"),
        (("bool", "float32"), "gemm: dtype of A must be float32, float64, bfloat16 or float16, got bool"),
    ],
)
def test_products_of_other_dtypes_are_refused_by_name(dtypes, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        _C.explain_gemm((4, 4, 4), *dtypes, device=_C.get_default_device())
    assert str(caught.value) == message


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_implementation_leaves_sums_in_float32(dtype: str) -> None:
    rows = _C.explain_gemm((4, 4, 8), dtype, dtype, "float32", "nt", device=_C.get_default_device())
    other = NOT_BF16[2] if dtype == "float16" else "this CPU has no AVX512-BF16 instructions"
    tiles = NOT_AMX[2] if dtype == "float16" else NO_TILES
    allowed = (
        ("few", "the dtype is neither float32 nor bfloat16"),
        ("amx", tiles),
        ("bf16", other),
        ("hopper", "it has no epilogue"),
    )
    assert all(reason is None or (name, reason) in allowed for name, _, reason in rows)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: _C.explain_gemm((4, 4)), "explain_gemm: argument 'sizes' must be 3 numbers in [0, 2^31]"),
        (lambda: _C.explain_gemm((4, -4, 4)), "explain_gemm: argument 'sizes' must be 3 numbers in [0, 2^31]"),
        (
            lambda: _C.explain_gemm((4, 4, 4), ld=(4,)),
            "explain_gemm: argument 'ld' must be () or 3 numbers in [0, 2^31]",
        ),
        (lambda: _C.explain_gemm((4, 4, 4), layout="x"), "explain_gemm: layout must be nn, nt, tn or tt, got 'x'"),
        (lambda: _C.explain_gemm((4, 4, 4), backend="magic"), "got 'magic'"),
        (lambda: _C.explain_attention((1, 3, 2, 4, 4, 4)), "explain_attention: heads must be a multiple of kv heads"),
        (lambda: _C.explain_attention((1, 1, 1)), "explain_attention: argument 'sizes' must be 6 numbers in [0, 2^31]"),
    ],
)
def test_questions_that_are_none(call, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)
