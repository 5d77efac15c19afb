"""Functions of xtrain/tensors that are made of others: //, %, norms, triangles, repetition; and generators."""

from __future__ import annotations

import math

import numpy as np
import pytest

import xtrain as xt


def test_floor_division_and_remainder_are_pythons() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-20, 20, 200), rng.choice([-7, -2, -1, 1, 3, 8], 200)
    for kind in ("float64", "float32", "int64", "int32"):
        x, y = xt.tensor(a).to(kind), xt.tensor(b).to(kind)
        assert (x // y).tolist() == [int(p) // int(q) for p, q in zip(a, b)]
        assert (x % y).tolist() == [int(p) % int(q) for p, q in zip(a, b)]
        assert (x // y).dtype is (x % y).dtype is x.dtype
    assert (7 // xt.tensor([2, -2])).tolist() == [3, -4] and (-7 % xt.tensor([2.5])).tolist() == [0.5]
    assert (xt.tensor([7]) // 2.0).dtype is xt.float32
    x = xt.tensor([5])
    x //= 2
    assert x.item() == 2


def test_division_at_the_edges() -> None:
    low = np.iinfo(np.int64).min
    x = xt.tensor(np.array([low, 5, 0], np.int64))
    assert (x // -1).tolist() == [low, -5, 0] and (x % -1).tolist() == [0, 0, 0], "no trap where the quotient overflows"
    assert (x // 0).tolist() == [0, 0, 0] and (x % 0).tolist() == [0, 0, 0]
    small = xt.tensor(np.array([-(2**31)], np.int32))
    assert (small // -1).tolist() == [-(2**31)]
    y = xt.tensor([1.0, -1.0, 0.0, math.inf, 5.0, -0.0])
    by_zero = (y // 0.0).tolist()
    assert by_zero[:2] == [math.inf, -math.inf] and math.isnan(by_zero[2]) and math.isnan((y % 0.0)[0].item())
    assert math.isnan((y % 2.0)[3].item()) and (y % -math.inf).tolist()[4] == -math.inf
    assert math.copysign(1.0, (y // 3.0)[5].item()) == -1.0 and math.copysign(1.0, (y % -3.0)[2].item()) == -1.0
    assert (xt.tensor([0.5, 1.0]) // 0.1).tolist() == [
        np.float32(0.5) // np.float32(0.1),
        np.float32(1) // np.float32(0.1),
    ]
    with pytest.raises(TypeError, match="remainder: bool tensors cannot be combined so"):
        xt.tensor([True]) % True


def test_gradients_of_division() -> None:
    x, y = xt.tensor([5.5, -5.5], requires_grad=True), xt.tensor([2.0, 2.0], requires_grad=True)
    ((x % y) * xt.tensor([1.0, 10.0])).sum().backward()
    assert x.grad.tolist() == [1, 10] and y.grad.tolist() == [-2, 30]
    x.grad = y.grad = None
    (x // y).sum().backward()
    assert x.grad.tolist() == [0, 0] and y.grad.tolist() == [0, 0]
    (7.0 % y).sum().backward()
    assert y.grad.tolist() == [-3, -3]


def test_triangles() -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    for diagonal in (-3, -1, 0, 2, 5):
        np.testing.assert_array_equal(xt.tril(xt.tensor(x), diagonal).cpu().numpy(), np.tril(x, diagonal))
        np.testing.assert_array_equal(xt.tensor(x).triu(diagonal).cpu().numpy(), np.triu(x, diagonal))
    mask = xt.tril(xt.ones(2, 3, dtype=xt.bool))
    assert mask.dtype is xt.bool and mask.tolist() == [[True, False, False], [True, True, False]]
    assert xt.triu(xt.ones(2, 2, dtype=xt.int32)).dtype is xt.int32 and tuple(xt.tril(xt.zeros(0, 3)).shape) == (0, 3)
    poisoned = xt.tril(xt.full((2, 2), math.nan))
    assert poisoned[0, 1].item() == 0.0, "a NaN outside does not come through"
    with pytest.raises(ValueError, match=r"triu: input must have at least 2 dims, got shape \(3,\)"):
        xt.triu(xt.zeros(3))


def test_outer_and_unbind() -> None:
    a, b = xt.tensor([1.0, 2.0]), xt.tensor([3.0, 4.0, 5.0])
    assert xt.outer(a, b).tolist() == [[3, 4, 5], [6, 8, 10]]
    with pytest.raises(ValueError, match=r"outer: vec2 must have 1 dim, got shape \(1, 3\)"):
        a.outer(b.unsqueeze(0))
    x = xt.arange(6).reshape(2, 3)
    q, k, v = x.unbind(1)
    assert [q.tolist(), k.tolist(), v.tolist()] == [[0, 3], [1, 4], [2, 5]] and len(xt.unbind(x)) == 2
    q[0] = 9
    assert x[0, 0].item() == 9, "views"
    with pytest.raises(IndexError, match=r"unbind: dim must be in \[-2, 1\], got 2"):
        x.unbind(2)


@pytest.mark.parametrize("p", ["fro", 2, 1, 3.0, 0.5, 0, math.inf, -math.inf])
def test_norms(p: float | str) -> None:
    x = np.random.default_rng(4).standard_normal((3, 5, 2))
    order = 2 if p == "fro" else p
    for dim in (None, 1, -1):
        want = np.linalg.norm(x.reshape(-1) if dim is None else x, order, None if dim is None else dim)
        np.testing.assert_allclose(xt.norm(xt.tensor(x), p, dim).cpu().numpy(), want, rtol=1e-12)
    assert tuple(xt.tensor(x).norm(p, 1, True).shape) == (3, 1, 2)
    if p:
        assert xt.testing.grad_check(lambda t: xt.norm(t, p, 1).sum(), [xt.tensor(x, requires_grad=True)]).ok


@pytest.mark.parametrize("p", [0.5, 1, 2, 3, 7.5, -1, -2.5, math.inf, -math.inf])
def test_zeros_have_no_slope_in_a_norm(p: float) -> None:
    """PyTorch's gradient. A power's slope at 0, and a root's, would make it NaN."""
    for values, want in (([0.0, 0.0], [0, 0]), ([0.0, 4.0], [0, 1 if p > 0 else 0])):
        x = xt.tensor(values, requires_grad=True)
        norm = x.norm(p)
        norm.backward()
        assert norm.item() == pytest.approx(max(values) if p > 0 else 0)
        np.testing.assert_allclose(x.grad.cpu().numpy(), want, rtol=1e-6)
    for bad in (math.inf, math.nan):
        got, want = xt.tensor([bad, 2.0]).norm(p).item(), np.linalg.norm([bad, 2.0], p)
        assert got == pytest.approx(want, nan_ok=True)


def test_edges_of_norms() -> None:
    x = xt.zeros(3, requires_grad=True)
    x.norm().backward()
    assert x.grad.tolist() == [0, 0, 0]
    assert math.isnan(xt.tensor([1.0, math.nan]).norm().item())
    assert xt.full((4096,), 1.0).bfloat16().norm().item() == 64.0, "summed in float32"
    assert xt.full((2,), 300.0).half().norm().item() == 424.25, "whose squares float16 cannot hold"
    with pytest.raises(TypeError, match="norm: input must have a floating point dtype, got int64"):
        xt.arange(3).norm()
    with pytest.raises(ValueError, match="norm: p must be a number or 'fro', got 'nuc'"):
        xt.zeros(2, 2).norm("nuc")


def test_repetition() -> None:
    x = np.arange(6.0).reshape(2, 3)
    for repeats, dim in ((2, 0), (3, -1), (2, None), (0, 1)):
        np.testing.assert_array_equal(
            xt.repeat_interleave(xt.tensor(x), repeats, dim).cpu().numpy(), np.repeat(x, repeats, dim)
        )
    counts = np.array([2, 0, 1])
    y = xt.tensor(x, requires_grad=True)
    many = y.repeat_interleave(xt.tensor(counts), dim=1)
    np.testing.assert_array_equal(many.detach().cpu().numpy(), np.repeat(x, counts, 1))
    many.sum().backward()
    assert y.grad.tolist() == [[2, 0, 1]] * 2
    for sizes in ((2, 3), (1, 1), (2, 1, 2), (0, 2)):
        again = xt.tensor(x).repeat(*sizes)
        np.testing.assert_array_equal(again.cpu().numpy(), np.tile(x, sizes))
        np.testing.assert_array_equal(xt.tensor(x).repeat(sizes).cpu().numpy(), np.tile(x, sizes))
    same = xt.tensor(x)
    copy = same.repeat(1, 1)
    copy[0, 0] = 9
    assert same[0, 0].item() == 0, "a copy"
    for call, text in (
        (lambda: xt.tensor(x).repeat(2), r"repeat: sizes must be at least 2 integers of at least 0, got \(2,\)"),
        (lambda: xt.repeat_interleave(xt.tensor(x), -1), "repeat_interleave: repeats must be at least 0, got -1"),
        (
            lambda: xt.repeat_interleave(xt.tensor(x), xt.tensor([1, 2]), 1),
            r"repeats must have shape \(3,\), got \(2,\)",
        ),
        (lambda: xt.repeat_interleave(xt.tensor(x), xt.tensor([1, -2]), 0), "repeats must be at least 0, got -2"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


# ---- generators


def test_a_generator_has_the_numbers_of_its_seed() -> None:
    xt.manual_seed(7)
    want = [xt.rand(3, 2), xt.randn(5), xt.randint(0, 100, (4,))]
    before = xt.get_rng_state()
    own = xt.Generator().manual_seed(7)
    got = [xt.rand(3, 2, generator=own), xt.randn((5,), generator=own), xt.randint(0, 100, (4,), generator=own)]
    assert [g.tolist() for g in got] == [w.tolist() for w in want]
    assert xt.get_rng_state() == before, "the generator of manual_seed stays"
    assert own.get_state() == (7, 3) and own.initial_seed() == 7 and repr(own) == "Generator(seed=7, fill=3)"


def test_states_of_generators() -> None:
    own = xt.Generator("cpu").manual_seed(2**64 - 1)
    xt.rand(1, generator=own)
    state = own.get_state()
    first = xt.randn(4, generator=own).tolist()
    own.set_state(state)
    assert xt.randn(4, generator=own).tolist() == first
    xt.set_rng_state(state)
    assert xt.randn(4).tolist() == first
    assert 0 <= own.seed() == own.initial_seed() < 2**64 and own.device.type == "cpu"
    for bad in ((1,), (1, -1), (2**64, 0), "ab", (1.0, 2)):
        with pytest.raises(ValueError, match=r"Generator: seed and fill must be integers in \[0, 2\*\*64\), got "):
            own.set_state(bad)
    with pytest.raises(TypeError, match="generator must be a Generator or None, got int"):
        xt.randn(2, generator=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="uniform: key must be a seed and the number of a fill, got 3 numbers"):
        xt._C.uniform((2,), key=(1, 2, 3))


# ---- order


def test_the_largest_and_the_smallest() -> None:
    x = np.array([[3.0, 1.0, 3.0, -2.0], [0.0, np.nan, np.inf, 5.0]])
    values, indices = xt.tensor(x).topk(2)
    assert values.tolist()[0] == [3, 3] and indices.tolist() == [[0, 2], [1, 2]] and indices.dtype is xt.int64
    low = xt.topk(xt.tensor(x), 3, largest=False)
    assert low.indices.tolist() == [[3, 1, 0], [0, 3, 2]] and low.values.tolist() == [[-2, 1, 3], [0, 5, math.inf]]
    assert xt.topk(xt.tensor(x), 1, dim=0).indices.tolist() == [[0, 1, 1, 1]]
    assert tuple(xt.topk(xt.tensor(x), 0).values.shape) == (2, 0)
    above = xt.tensor([math.inf, math.nan, -math.inf, math.nan, math.inf])
    assert above.topk(3).indices.tolist() == [1, 3, 0] and above.argsort(descending=True).tolist() == [1, 3, 0, 4, 2]
    assert above.argsort().tolist() == [2, 0, 4, 1, 3]
    leaf = xt.tensor(x[:1], requires_grad=True)
    (leaf.topk(2).values * xt.tensor([10.0, 1.0])).sum().backward()
    assert leaf.grad.tolist() == [[10, 0, 1, 0]]
    for call, kind, text in (
        (lambda: xt.tensor(x).topk(5), ValueError, r"topk: k must be in \[0, 4\], got 5"),
        (lambda: xt.tensor(x).topk(1, 2), IndexError, r"topk: dim must be in \[-2, 1\], got 2"),
    ):
        with pytest.raises(kind, match=text):
            call()


@pytest.mark.parametrize("dim", [-1, 0])
def test_sorting_of_no_dims(dim: int) -> None:
    """As of one element, with results of no dims, as in PyTorch."""
    leaf = xt.tensor(3.0, requires_grad=True)
    for values, indices in (leaf.topk(1, dim), leaf.sort(dim), leaf.topk(1, dim, largest=False)):
        assert values.shape == indices.shape == () and (values.item(), indices.item()) == (3.0, 0)
        assert indices.dtype is xt.int64
    assert leaf.argsort(dim).shape == () and leaf.argsort(dim).item() == 0
    (leaf.topk(1).values * 5.0).backward()
    assert leaf.grad is not None and leaf.grad.item() == 5.0


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "float16", "int64", "uint8", "bool"])
def test_sorting(kind: str) -> None:
    x = xt.tensor(np.random.default_rng(5).integers(0, 4, (3, 7, 2))).to(kind)
    plain = x.double().cpu().numpy()
    for dim in (0, 1, -1):
        values, indices = x.sort(dim)
        np.testing.assert_array_equal(indices.cpu().numpy(), np.argsort(plain, dim, kind="stable"))
        np.testing.assert_array_equal(values.double().cpu().numpy(), np.sort(plain, dim))
        down = xt.argsort(x, dim, descending=True)
        np.testing.assert_array_equal(down.cpu().numpy(), np.argsort(-plain, dim, kind="stable"))
    low = np.array([np.iinfo(np.int64).min, 3, -1])
    assert xt.tensor(low).sort(0, True).indices.tolist() == [1, 2, 0], "no overflow"


def test_repeats_that_no_index_can_hold() -> None:
    """NumPy adds them up in 64 bits: sums that wrap would be written behind the index."""
    for counts in ([2**62] * 4, [2**62] * 4 + [1], [2**63 - 1] * 2, [2**40, 0]):
        with pytest.raises(
            ValueError, match=rf"^repeat_interleave: repeats must add up to less than 2\^40, got {sum(counts)}$"
        ):
            xt.repeat_interleave(xt.ones(len(counts), 2), xt.tensor(counts, dtype=xt.int64), 0)
