"""The feed-forward layer as one op: the bits of its five ops, its memory, and who uses it."""

from __future__ import annotations

import numpy as np
import pytest
from feed_forward import check_frozen, check_place_taken, output_and_ops, recomputed, results

import xtrain as xt
from xtrain import _C, nn
from xtrain.models import Qwen3, Qwen3Config
from xtrain.optable.references import sigmoid
from xtrain.optable.table import TINY, UNIT_ROUNDOFF, array, bits, check_close, tensor

C, F = 24, 40


def tensors(dtype: str = "float32", apart: bool = False, rows: tuple[int, ...] = (6,)) -> list:
    """x, gate, up and down, which want gradients."""
    xt.manual_seed(2)
    x, gate, up, down = (xt.randn(*shape).to(getattr(xt, dtype)) for shape in ((*rows, C), (F, C), (F, C), (C, F)))
    if not apart:
        gate, up = _C.pack([gate, up])
    return [t.detach().requires_grad_() for t in (x, gate, up, down)]


def separate(x, gate, up, down):
    return _C.linear(_C.swiglu(_C.linear_joined(x, [gate, up])), down)


@pytest.mark.parametrize(
    ("dtype", "apart", "rows"), [("float32", False, (6,)), ("bfloat16", False, (2, 3)), ("bfloat16", True, ()), ("float64", True, (5,))]
)  # fmt: skip
def test_the_bits_are_those_of_the_ops_one_after_the_other(dtype: str, apart: bool, rows: tuple[int, ...]) -> None:
    given = dict(dtype=dtype, apart=apart, rows=rows)
    for passes in (1, 2):
        want = results(separate, tensors(**given), passes)
        for again in (False, True):
            assert results(_C.swiglu_mlp, tensors(**given), passes, again) == want


@pytest.mark.parametrize("frozen", [(0,), (3,), (0, 1, 2), (1,)])
def test_what_needs_no_gradient_gets_none(frozen: tuple[int, ...]) -> None:
    check_frozen(_C.swiglu_mlp, separate, tensors, frozen)


def test_the_gradient_of_gate_and_up_takes_their_place() -> None:
    """Where the graph is freed. Beside them the backward has dh, and the gradients of x and of the weights."""
    block = 512 * F * 4
    held = 3 * block + 2 * 512 * C * 4  # gate, up, h; y, dy
    check_place_taken(_C.swiglu_mlp, lambda: tensors(rows=(512,)), held, 2 * block)


def test_h_is_computed_again() -> None:
    """In recompute mode; the same bits, one [rows, F] less."""
    one, again = (recomputed(_C.swiglu_mlp, tensors("bfloat16", rows=(64,)), mode) for mode in (False, True))
    assert one[1] == again[1]
    assert one[0] - again[0] == 64 * F * 2


def test_a_change_in_place_before_backward_is_seen() -> None:
    given = tensors()
    y = _C.swiglu_mlp(*given)
    with xt.no_grad():
        given[3].fill_(0.0)
    with pytest.raises(RuntimeError, match="swiglu_mlp.*changed in place"):
        y.backward(xt.ones(*y.shape))


# ---- products with SwiGLU inside -----------------------------------------------------------------------------------

LEAST_TILES = 2 * 132  # of 128 rows and 192 columns: cuda/gemm/hopper.cu
ROUNDING = 2 * 2.0**-24  # of a sum in float32; tensor cores may cut off instead of rounding


def tiles(rows: int, columns: int) -> int:
    return -(-rows // 128) * -(-columns // 192)


def whole_numbers(sizes: tuple[int, ...]) -> list[np.ndarray]:
    """x, gate, up, down and dy: multiples of a power of two, so that the products with gate, up and down are exact in
    float32, whatever the order of their terms, and often not in bfloat16: each has one right result, to the bit.
    """
    m, c, f, k = sizes
    rng = np.random.default_rng(7)
    made = (((m, c), 1), ((f, c), 256), ((f, c), 256), ((k, f), 64), ((m, k), 8))
    return [rng.integers(-8, 9, shape) / scale for shape, scale in made]


def in_float64(values: list[np.ndarray], dtype: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """y and the gradients of x, gate, up and down, each with its tolerance: what roundings of gate, up, h, dh, dgate
    and dup to the dtype, of the result, and of the additions in float32 may amount to. The slope of silu changes by at
    most 0.5 times what its argument does.
    """
    x, g, u, d, dy = values
    unit, tiny = UNIT_ROUNDOFF[dtype], TINY[dtype]
    gate, up, dh = x @ g.T, x @ u.T, dy @ d
    s = sigmoid(gate)
    silu, slope = gate * s, s * (1 + gate * (1 - s))
    h, dgate, dup = silu * up, dh * up * slope, dh * silu
    off_h = unit * (abs(gate * slope * up) + 2 * abs(h)) + tiny
    off_dgate = unit * (3 * abs(dgate) + 0.5 * abs(dh * up * gate)) + tiny
    off_dup = unit * (abs(dh * gate * slope) + 2 * abs(dup)) + tiny

    def product(a: np.ndarray, off_a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """[a b, its tolerance before it is rounded]; b is exact."""
        return np.stack([a @ b, (1.1 * off_a + ROUNDING * a.shape[1] * abs(a)) @ abs(b)])

    found = [
        product(h, off_h, d.T),
        product(np.hstack([dgate, dup]), np.hstack([off_dgate, off_dup]), np.vstack([g, u])),
        product(dgate.T, off_dgate.T, x),
        product(dup.T, off_dup.T, x),
        product(h.T, off_h.T, dy),
    ]
    found[-1] = found[-1].transpose(0, 2, 1)
    return [(want, tolerance + 1.1 * unit * abs(want) + tiny) for want, tolerance in found]


def both_passes(values: list, backend: str | None, again: bool = False) -> tuple[list, list[int]]:
    """y and the gradients, and how many kernels were launched forward and backward. gate and up lie one after the
    other. Memory that is taken for products with them, and for h, had NaN: an element that no kernel writes is seen,
    also where an earlier call had it right. again: in recompute mode.
    """
    x, gate, up, down, dy = (t.clone() for t in values)
    gate, up = _C.pack([gate, up])
    leaves = [t.detach().requires_grad_() for t in (x, gate, up, down)]
    rows, columns = x.shape[0], gate.shape[0]

    def spoil(*widths: int) -> int:
        """Leaves NaN in the memory of matrices with so many columns. The launches so far."""
        with xt.no_grad():
            left = [xt.full((rows, n), float("nan"), dtype=x.dtype, device=x.device) for n in widths]
        del left
        return xt.cuda.counters()["launches"]

    launches = []
    with xt.use_gemm_backend(backend), xt.recompute() if again else xt.enable_grad():
        begun = spoil(2 * columns, columns)
        y = _C.swiglu_mlp(*leaves)
        launches.append(xt.cuda.counters()["launches"] - begun)
        begun = spoil(columns)
        y.backward(dy)
        launches.append(xt.cuda.counters()["launches"] - begun)
    return [y.detach(), *(t.grad for t in leaves)], launches


@pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)")
@pytest.mark.parametrize(
    ("sizes", "inside", "dtype"),
    [
        ((8200, 264, 968, 264), (1, 1), "bfloat16"),  # rests of rows, columns and terms; five steps of 64 terms
        ((40000, 64, 200, 72), (1, 1), "bfloat16"),  # more tiles for each block
        ((16769, 72, 200, 40), (1, 1), "bfloat16"),  # the fewest tiles backward; one row in the last
        ((16769, 72, 192, 40), (1, 0), "bfloat16"),  # the fewest tiles forward, no rest of columns
        ((16768, 72, 192, 40), (0, 0), "bfloat16"),
        ((16769, 72, 200, 40), (0, 0), "float16"),
    ],
)
def test_products_with_swiglu_inside(sizes: tuple[int, ...], inside: tuple[int, int], dtype: str) -> None:
    """The bits of the parts, and float64's numbers within roundings, each time that it is called. On a Hopper GPU
    SwiGLU and its gradient are no launches of their own where there are enough tiles for both warpgroups of all blocks,
    and only there.
    """
    m, _, f, _ = sizes
    enough = tiles(m, 2 * f) >= LEAST_TILES, tiles(m, f) >= LEAST_TILES
    assert dtype != "bfloat16" or inside == enough, "a case that does not lie where it is meant to"
    numbers = whole_numbers(sizes)
    values = [tensor(a, dtype, "cuda") for a in numbers]
    found = [both_passes(values, backend) for backend in (None, None, None, "cublas")]
    facts = xt.cuda.get_device_properties()
    hopper = facts["capability"] == (9, 0) and "90a" in facts["built_for"].split()
    *ours, parts = (launches for _, launches in found)
    for launches in ours:
        saved = [a - b for a, b in zip(parts, launches, strict=True)]
        assert saved == [n * hopper for n in inside], "SwiGLU must be inside these products, and no others"
    names = ("y", "dx", "dgate", "dup", "ddown")
    for name, t, (want, tolerance) in zip(names, found[0][0], in_float64(numbers, dtype), strict=True):
        check_close(array(t), want, tolerance, name)
    for name, *same in zip(names, *(outs for outs, _ in found), strict=True):
        first = bits(same[0])
        assert [bits(t) == first for t in same[1:]] == [True] * 3, f"{name}: the second and third call, the parts"


@pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)")
@pytest.mark.parametrize(
    "sizes", [(8200, 264, 968, 264), (40000, 64, 200, 72), (16769, 72, 200, 40), (300, 72, 200, 40)]
)
def test_h_comes_with_the_gradients_of_gate_and_up(sizes: tuple[int, ...]) -> None:
    """In recompute mode: the bits of an h that was kept, without a launch of its own where the product has an epilogue."""
    values = [tensor(a, "bfloat16", "cuda") for a in whole_numbers(sizes)]
    kept, again, parts = (both_passes(values, *how) for how in ((None, False), (None, True), ("cublas", True)))
    assert [bits(t) for t in again[0]] == [bits(t) for t in kept[0]] == [bits(t) for t in parts[0]]
    facts = xt.cuda.get_device_properties()
    inside = (
        facts["capability"] == (9, 0)
        and "90a" in facts["built_for"].split()
        and tiles(sizes[0], sizes[2]) >= LEAST_TILES
    )
    assert again[1][1] - kept[1][1] == (0 if inside else 1)


def model() -> Qwen3:
    xt.manual_seed(1)
    return Qwen3(
        Qwen3Config(
            vocab_size=61, hidden_size=C, intermediate_size=F, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
        )
    )  # fmt: skip


@pytest.mark.parametrize("change", ["", "bias", "hooked", "subclass", "replaced"])
def test_the_model_calls_a_down_proj_that_is_not_stock(change: str) -> None:
    one, ids, called = model(), xt.tensor([[1, 5, 2]]), []
    want = array(one(ids)).tolist()
    mlp = one.model.layers[0].mlp
    if change == "bias":
        mlp.down_proj.bias = nn.Parameter(xt.zeros(C))
    elif change == "hooked":
        mlp.down_proj.register_forward_hook(lambda module, args, out: called.append(1))
    elif change == "subclass":
        mlp.down_proj.__class__ = type("Other", (nn.Linear,), {})
    elif change == "replaced":
        mlp.down_proj.forward = lambda x: _C.linear(x, mlp.down_proj.weight)
    got, names = output_and_ops(one, ids)
    assert got == want and ("swiglu_mlp" in names) == (change == "")
    assert called == [1] * (change == "hooked")
