"""Attention of bfloat16 in AMX tiles and in AVX512-BF16 instructions (csrc/cpu/attention/amx.c and bf16.c), within the roundings of P and
dS: emulated on any CPU (emulate.h), and on CPUs that have the instructions."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from emulated import GUARD, at_the_end_of_memory, bits_of, compiled, wide

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.references import attention_weights
from xtrain.optable.table import array

pytestmark = pytest.mark.on_cpu
SIZES = (1, 2, 2, 64, 64, 64)
REASONS = {name: _C.explain_attention(SIZES, "bfloat16", backend=name)[0][2] for name in ("amx", "bf16")}
Three = ctypes.c_int64 * 3
NUMBERS = ("batch", "heads", "kv_heads", "sq", "skv", "dim", "window")


def structure(pointers: str, strides: str) -> type[ctypes.Structure]:
    """XtAttentionFwd or XtAttentionBwd."""
    fields = [(name, ctypes.c_void_p) for name in [*pointers.split(), "documents"]] + [("dtype", ctypes.c_int)]
    fields += [(name, ctypes.c_int64) for name in NUMBERS] + [(f"{name}_stride", Three) for name in strides.split()]
    fields += [(name, ctypes.c_double) for name in ("scale", "softcap")]
    fields += [(name, ctypes.c_bool) for name in ("causal", "tf32")]
    return type("Attention", (ctypes.Structure,), {"_fields_": fields})


Forward = structure("out lse q k v", "out q k v")
Backward = structure("dq dk dv dout q k v out lse", "dq dk dv dout q k v out")


def apart(x: np.ndarray) -> np.ndarray:
    """A copy of x whose rows have 3 guards behind them."""
    rows = np.full((*x.shape[:-1], x.shape[-1] + 3), GUARD, x.dtype)
    rows[..., :-3] = x
    return rows[..., :-3]


def bounds_of(lengths) -> np.ndarray:
    """int32 [B, 2, S], of documents of these lengths."""
    ends = [np.cumsum(row) for row in lengths]
    return np.array([[np.repeat(e - row, row), np.repeat(e, row)] for e, row in zip(ends, lengths)], np.int32)


class Emulated:
    """backend=name, of `amx` and `bf16`. rows: q, k, v and dout, float32 [B, S, heads, D]. out, dq, dk and dv are float32 [B, heads, S, D]."""

    def __init__(self, library, name: str) -> None:
        self.library, self.name = library, name

    def takes(self, name: str, which: str, p) -> bool:
        """Whether `name` computes p where there are all instructions: it asks for them last."""
        supports = getattr(self.library, f"xt_attention_{name}_supports_{which}")
        supports.restype = self.library.xt_amx_refusal.restype = ctypes.c_char_p
        missing = (self.library.xt_amx_refusal(), b"this CPU has no AVX512-BF16 instructions")
        reason = supports(ctypes.byref(p), None)
        return reason is None or reason in missing

    def run(self, which: str, p) -> None:
        name = next(name for name in ("amx", "bf16") if name >= self.name and self.takes(name, which, p))
        status = getattr(self.library, f"xt_attention_{name}_{which}")(ctypes.byref(p))
        assert status == 0, self.library.xt_error_message()

    def __call__(self, rows, causal, window=None, softcap=None, lengths=None, threads=1, scale=None, place=apart):
        spread = [x.strides[1] == 0 for x in rows]
        found = {
            n: place(np.full(x.shape, GUARD, np.uint16)) for n, x in zip(("out", "dq", "dk", "dv"), (rows[0], *rows))
        }
        laid = [place(bits_of(x[:, :1] if s else x)) for x, s in zip(rows, spread)]
        rows = q, k, *_ = [np.broadcast_to(x, like.shape) for x, like in zip(laid, rows)]
        b, sq, heads, dim = q.shape
        lse = np.full((b, heads, sq), np.inf, np.float32)
        documents = None if lengths is None else bounds_of(lengths)
        given = dict(zip(("q", "k", "v", "dout"), rows)) | found
        common = dict(zip(NUMBERS, (b, heads, k.shape[2], sq, k.shape[1], dim, window or 0)))
        common |= {
            "dtype": 2,
            "causal": causal,
            "softcap": softcap or 0,
            "scale": dim**-0.5 if scale is None else scale,
        }
        common |= {"lse": lse.ctypes.data, "documents": (documents is not None and documents.ctypes.data) or None}
        assert self.library.xt_set_num_threads(threads) == 0
        for which, kind in (("fwd", Forward), ("bwd", Backward)):
            p = kind(**common)
            for name, x in given.items():
                if hasattr(p, name):
                    setattr(p, name, x.ctypes.data)
                    setattr(p, f"{name}_stride", Three(*(x.strides[i] // 2 for i in (0, 2, 1))))
            self.run(which, p)
        if place is apart:
            for name, x in found.items():
                whole = np.lib.stride_tricks.as_strided(x, (*x.shape[:-1], dim + 3))
                assert (whole[..., dim:] == GUARD).all(), f"written beside {name}"
        self.lse = lse
        return [wide(x).transpose(0, 2, 1, 3) for x in found.values()]


class Device:
    def __init__(self, name: str) -> None:
        self.name, self.lse = name, None

    def __call__(self, rows, causal, window=None, softcap=None, lengths=None, threads=1, scale=None):
        documents = None if lengths is None else F.document_bounds(lengths, device="cpu")
        options = {"window": window, "softcap": softcap, "documents": documents, "scale": scale}
        tensors = []
        for x in rows:
            one = xt.tensor(np.ascontiguousarray(x[:, :1] if x.strides[1] == 0 else x)).to(xt.bfloat16)
            tensors.append(one.expand(*x.shape) if x.strides[1] == 0 else one)
        q, k, v, dout = (x.transpose(1, 2).detach() for x in tensors)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        before = xt.get_num_threads()
        try:
            xt.set_num_threads(threads)
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=True, backend=self.name, **options
            )
            out.backward(dout)
        finally:
            xt.set_num_threads(before)
        return [array(x).astype(np.float32) for x in (out.detach(), q.grad, k.grad, v.grad)]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    files = ("attention/amx.c", "attention/bf16.c", "attention/bf16_shares.c", "attention/documents.c")
    return compiled(tmp_path_factory.mktemp("attention"), *files)


@pytest.fixture(params=["emulated amx", "emulated bf16", "amx", "bf16"])
def attend(request):
    name = request.param.split()[-1]
    if request.param != name:
        return Emulated(request.getfixturevalue("library"), name)
    reason = REASONS[name]
    if reason is not None:
        pytest.skip(reason)
    return Device(name)


def random_rows(sizes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    b, h, kv, s, t, d = sizes
    random = np.random.default_rng([seed, *sizes])
    shapes = ((s, h), (t, kv), (t, kv), (s, h))
    return [wide(bits_of(random.standard_normal((b, *shape, d)).astype(np.float32))) for shape in shapes]


# B, H, K, Sq, Skv, D; causal, window, softcap, lengths of documents, scale: strips of 64 and 256 keys, blocks of 32, 96 and 128 rows, shares
# of a kv head, heads that end inside a vector, a pair, a panel or a tile
CASES = [
    ((1, 2, 1, 650, 650, 32), True, None, None, None, None),
    ((1, 3, 3, 70, 530, 33), False, None, None, None, None),
    ((1, 2, 2, 303, 303, 136), True, 100, None, None, None),
    ((2, 2, 1, 300, 300, 16), True, None, 2.0, [[40, 260], [1, 299]], None),
    ((1, 1, 1, 330, 270, 7), True, 258, None, None, None),
    ((2, 1, 1, 16, 40, 1), True, 1, None, None, -0.7),
    ((1, 4, 4, 33, 31, 64), True, None, 1.5, None, None),
    ((1, 8, 1, 129, 129, 80), True, 33, None, [[31, 33, 65]], None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case[0])))
def test_attention_within_the_roundings_of_p_and_ds(attend, case) -> None:
    """u = 2^-8 is a rounding to bfloat16: of P, dS, the results, and of out where delta reads it. Float32 sums add a sixteenth of it."""
    sizes, causal, window, softcap, lengths, scale = case
    rows, u = random_rows(sizes), 2.0**-8
    got = attend(rows, causal, window, softcap, lengths, scale=scale)
    q, k, v, dout = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in rows)
    group, scale = sizes[1] // sizes[2], sizes[5] ** -0.5 if scale is None else scale
    k, v = (np.repeat(x, group, 1) for x in (k, v))
    with np.errstate(invalid="ignore", divide="ignore"):  # rows that see no key
        scores, p = attention_weights(q, k, causal, scale, lengths, window, None, softcap)
        sees = np.isfinite(scores).any(-1)
        lse = np.log(np.exp(scores).sum(-1))
    p = np.nan_to_num(p)
    slope = np.where(p > 0, 1 - (scores / softcap) ** 2 if softcap else 1, 0)
    flip = [x.swapaxes(-1, -2) for x in (v, p)]
    out = p @ v
    wrong_out = u * (p @ np.abs(v) + np.abs(out))
    ds = p * slope * (dout @ flip[0] - (dout * out).sum(-1, keepdims=True))
    wrong_ds = u * np.abs(ds) + p * slope * (np.abs(dout) * wrong_out).sum(-1, keepdims=True)
    heads = lambda x: x.reshape(*x.shape[:1], -1, group, *x.shape[2:]).sum(2)  # noqa: E731
    want = [out, scale * ds @ k, heads(scale * ds.swapaxes(-1, -2) @ q), heads(flip[1] @ dout)]
    size = abs(scale)
    wrong = [wrong_out, size * wrong_ds @ np.abs(k), heads(size * wrong_ds.swapaxes(-1, -2) @ np.abs(q))]
    wrong += [heads(u * flip[1] @ np.abs(dout))]
    for name, x, exact, bound in zip(("out", "dq", "dk", "dv"), got, want, wrong):
        assert np.isfinite(x).all(), name
        over = np.abs(x - exact) - (1 + 1 / 16) * (bound + u * np.abs(exact)) - 1e-6
        assert over.max() <= 0, (name, over.max())
    if attend.lse is not None:
        assert np.array_equal(np.isfinite(attend.lse), sees) and (attend.lse[~sees] == -np.inf).all()
        assert np.abs(attend.lse[sees] - lse[sees]).max() < 1e-5


def test_attention_has_the_same_bits_alone_and_with_any_threads(attend) -> None:
    """One kv head, whose rows are cut into shares, batched and one by one."""
    rows, found = random_rows((8, 12, 1, 98, 98, 8)), set()
    for threads in (1, 2, 5):
        whole = attend(rows, True, threads=threads)
        alone = [attend([x[i : i + 1] for x in rows], True, threads=threads) for i in range(8)]
        found.add(b"".join(x.tobytes() for x in whole))
        found.add(b"".join(np.concatenate(parts).tobytes() for parts in zip(*alone)))
    assert len(found) == 1


@pytest.mark.parametrize(
    "heads, dim, causal, window, softcap",
    [((4, 2), 16, True, None, None), ((3, 1), 33, True, 7, None), ((2, 2), 40, False, None, 1.5)],
)
def test_documents_of_1_to_40_tokens_have_the_bits_that_they_have_alone(
    attend, heads, dim, causal, window, softcap
) -> None:
    """Packed in two rows, alone and in a batch of copies."""
    shuffled = np.random.default_rng(dim).permutation
    lengths = [shuffled([*range(1, 40, 2), 20]), shuffled(range(2, 41, 2))]
    rows = random_rows((2, *heads, 420, 420, dim))
    whole = attend(rows, causal, window, softcap, lengths)
    for b, row in enumerate(lengths):
        for length, end in zip(row, np.cumsum(row)):
            part = slice(end - length, end)
            for times in (1, 3):
                alone = attend([x[[b] * times, part] for x in rows], causal, window, softcap)
                for name, x, y in zip(("out", "dq", "dk", "dv"), whole, alone):
                    assert (bits_of(y) == bits_of(x[b, :, part])).all(), (name, length, times)


def test_attention_of_infinite_scores(attend) -> None:
    """Scores of -Inf in the first strip of keys count for nothing; scores of -Inf alone give NaN; NaN stays in its row."""
    q, k, v, dout = random_rows((1, 1, 1, 300, 300, 8), 1)
    q, k = np.abs(q) + 1, np.abs(k)
    last = attend([q, k[:, 290:], v[:, 290:], dout], False)[0]
    k[:, :290] = -np.inf
    assert np.array_equal(attend([q, k, v, dout], False)[0], last)
    q[:, 7] = np.nan
    nan = np.isnan(attend([q, k, v, dout], False)[0][0, 0])
    assert nan[7].all() and not np.delete(nan, 7, 0).any()
    k[:, 290:] = -np.inf
    assert np.isnan(attend([q, k, v, dout], False)[0]).all()


@pytest.mark.parametrize("which", [0, 1])
def test_attention_of_huge_scores(attend, which: int) -> None:
    """A score is exactly its own maximum, however large: the weights are those of float64, and gradients are finite."""
    rows = random_rows((1, 1, 1, 130, 130, 32), 1)
    rows[which][0, 65, 0, 3] = wide(bits_of(np.full(1, 1e20)))[0]
    found = attend(rows, True)
    q, k, v, _ = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in rows)
    want = attention_weights(q, k, True)[1] @ v
    assert all(np.isfinite(x).all() for x in found)
    assert np.abs(found[0] - want).max() <= 2.0**-7 * np.abs(want).max()


def test_keys_that_are_one_row_in_memory(attend) -> None:
    """A stride of 0: rows are read where they lie."""
    q, k, v, dout = random_rows((1, 2, 1, 70, 1, 16))
    k, v = (np.broadcast_to(x, (1, 70, 1, 16)) for x in (k, v))
    found = attend([q, k, v, dout], True)
    assert all(map(np.array_equal, found, attend([q, k.copy(), v.copy(), dout], True)))


def test_a_row_that_sees_nothing_is_zero_beside_infinite_values(attend) -> None:
    """Of 40 queries of 20 keys the first 20 see none."""
    q, k, v, dout = random_rows((1, 1, 1, 40, 20, 8), 2)
    v[0, 0] = np.inf
    found = attend([q, k, v, dout], True)
    assert (found[0][0, 0, :20] == 0).all() and (found[1][0, 0, :20] == 0).all()


def test_what_ran_before_changes_no_bit(attend) -> None:
    """Scratch is not cleared: zeros fill what rows, keys and D lack of a block."""
    rows, found = random_rows((1, 2, 1, 45, 37, 9)), []
    for value in (1.0, np.nan):
        attend([np.full((1, 128, heads, 64), value, np.float32) for heads in (2, 1, 1, 2)], False)
        found.append(attend(rows, True))
    assert all(map(np.array_equal, *found)) and np.isfinite(found[1][0]).all()


# ---- the instructions emulated ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["amx", "bf16"])
def test_emulated_attention_touches_nothing_behind_an_operand(library, name: str) -> None:
    """The process would end."""
    for sizes in ((1, 2, 1, 45, 37, 31), (1, 1, 1, 16, 64, 64)):
        Emulated(library, name)(random_rows(sizes), True, place=at_the_end_of_memory)


def test_emulated_attention_releases_the_tiles(library) -> None:
    Emulated(library, "amx")(random_rows((2, 2, 1, 70, 70, 8)), True, threads=3)
    assert ctypes.c_int.in_dll(library, "tiles_in_use").value == 0


def test_emulated_attention_takes_subnormals_as_zero(library) -> None:
    q, k, v, dout = random_rows((1, 1, 1, 20, 20, 4))
    v[...] = wide(np.full(1, 8, np.uint16))
    assert (Emulated(library, "amx")([q, k, v, dout], True)[0] == 0).all()


# ---- which one runs -------------------------------------------------------------------------------------------------------------------


def test_fewer_queries_than_a_tile_has_rows_run_the_next_one_unless_they_are_a_whole_document() -> None:
    for backward in (False, True):
        for queries, keys in ((15, 64), (15, 14), (1, 2)):
            few = _C.explain_attention((1, 2, 1, queries, keys, 8), "bfloat16", backward)[0]
            assert few == ("amx", "amx", "there are fewer than 16 queries, and another number of keys")
        for queries, keys in ((16, 64), (15, 15), (1, 1)):
            taken = _C.explain_attention((1, 2, 1, queries, keys, 8), "bfloat16", backward)[0]
            assert taken == ("amx", "amx", REASONS["amx"])


def chosen(**environment: str) -> str:
    code = "from xtrain import _C; rows = _C.explain_attention((1, 2, 1, 64, 64, 8), 'bfloat16'); print(rows[0][2], "
    code += "next(r[0] for r in rows if r[2] is None), sep=': ')"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XTRAIN_")}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_environment_turns_tiles_off() -> None:
    low = "bf16" if REASONS["bf16"] is None else "materialized"
    assert chosen() == (f"{REASONS['amx']}: {low}" if REASONS["amx"] else "None: amx")
    if REASONS["amx"] != "amx is not built for this CPU":
        assert chosen(XTRAIN_AMX="0") == f"XTRAIN_AMX is 0: {low}"
    assert chosen(XTRAIN_ATTENTION="bf16").endswith(low)
