"""Sizes that other tests do not reach: attention at 65,536 keys, of scores and of sequences that have no room together, and
gradients of a batch against those of its sequences. The same tests run at small sizes on a CPU, where the large ones would take minutes.
"""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.models import Qwen3, Qwen3Config
from xtrain.optable.table import array

pytestmark = pytest.mark.on_cpu
GPU = xt.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
UNIT = 2.0**-8  # the distance of two bfloat16 numbers, relative to them, at most


# ---- attention -----------------------------------------------------------------------------------------------------


def rounded(x: xt.Tensor) -> xt.Tensor:
    return x.to(xt.bfloat16).to(xt.float64)


def probabilities(q: xt.Tensor, k: xt.Tensor, rows: xt.Tensor, columns: xt.Tensor, lse: xt.Tensor) -> xt.Tensor:
    """[rows, columns] of one head: exp(score - lse) where the query sees the key. q [rows, D], k [columns, D], lse
    [rows, 1]."""
    seen = (columns.reshape(1, -1) <= rows.reshape(-1, 1)).to(xt.float64)
    return ((q @ k.T) * q.shape[1] ** -0.5 - lse).exp() * seen


def forward(q: xt.Tensor, k: xt.Tensor, v: xt.Tensor) -> tuple[xt.Tensor, xt.Tensor, xt.Tensor]:
    """out [S, D], the same with probabilities and out rounded to bfloat16, and lse [S, 1] of one head; in blocks of
    rows."""
    places = xt.arange(q.shape[0], device=q.device)
    parts = []
    for first in range(0, q.shape[0], 1024):
        end = min(first + 1024, q.shape[0])
        rows, columns = places[first:end], places[:end]
        zero = xt.zeros((end - first, 1), dtype=xt.float64, device=q.device)
        p = probabilities(q[first:end], k[:end], rows, columns, zero)  # scores are far from where exp overflows
        total = p.sum(1, keepdim=True)
        p = p / total
        parts.append((p @ v[:end], rounded(rounded(p) @ v[:end]), total.log()))
    out, low, lse = (xt.cat(list(part)) for part in zip(*parts))
    return out, low, lse


def gradients(q, k, v, dout, rows: xt.Tensor, columns: xt.Tensor) -> list[list[xt.Tensor]]:
    """[exact, plain] of out and dq of `rows`, dk and dv of `columns` of one head. The plain way rounds what goes into a
    product, and each result, to bfloat16, and does all else in float64."""
    places = xt.arange(q.shape[0], device=q.device)
    scale = q.shape[1] ** -0.5
    exact, low, lse = forward(q, k, v)
    found = []
    for out, cut in ((exact, lambda x: x), (low, rounded)):
        delta = (dout * out).sum(1, keepdim=True)
        p = probabilities(q[rows], k, rows, places, lse[rows])
        ds = cut(p * (dout[rows] @ v.T - delta[rows]))
        dq = cut(ds @ k * scale)
        p = probabilities(q, k[columns], places, columns, lse)
        ds = cut(p * (dout @ v[columns].T - delta))
        found.append([out[rows], dq, ds.T @ q * scale, cut(p).T @ dout])
    return found


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "length",
    [700, pytest.param(65536, marks=pytest.mark.skipif(not GPU, reason="needs a GPU: a CPU would take minutes"))],
)
def test_long_attention(length: int, dim: int) -> None:
    """Causal, two heads that share keys and values: sampled rows of out and dq, and of dk and dv, which sum over all
    queries, err at most twice as much as the plain way in bfloat16. A tile of 128 keys that is left out would be seen:
    it is 1/22 of a sum of 65,536 random terms, and the limit is below 1/100. The same bits each time.
    """
    rng = np.random.default_rng(dim)
    host = [rng.standard_normal((1, heads, length, dim)).astype(np.float32) for heads in (2, 1, 1, 2)]
    q, k, v, dout = (xt.tensor(x).to(xt.bfloat16).to(DEVICE) for x in host)
    runs = []
    for _ in range(3):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        out.backward(dout)
        runs.append([out.detach(), *(x.grad for x in leaves)])
    for again in runs[1:]:
        assert all(a.dtype is xt.bfloat16 and array(a).tobytes() == array(b).tobytes() for a, b in zip(again, runs[0]))
    far = min(1024, length // 4)  # rows and columns with that many terms: those of one or two have nothing to average
    edges = [far, length // 2 - 1, length // 2, *(length - back for back in (129, 128, 65, 64, 2, 1))]
    rows = np.unique([*edges, *rng.integers(far, length, 48)])
    columns = np.unique([0, 1, 63, 64, 127, 128, length // 2 - 1, length // 2, *rng.integers(0, length - far, 48)])
    at_rows, at_columns = (xt.tensor(x, device=DEVICE) for x in (rows, columns))
    with xt.no_grad():
        wide = [x.detach().to(xt.float64)[0] for x in (q, k, v, dout)]
        heads = [gradients(wide[0][h], wide[1][0], wide[2][0], wide[3][h], at_rows, at_columns) for h in range(2)]
        ours = [array(x.to(xt.float64))[0] for x in runs[0]]
        for h in range(2):
            for name, mine, i in (("out", ours[0], 0), ("dq", ours[1], 1)):
                check(f"{name} of head {h}", rows, mine[h][rows], *(array(one[i]) for one in heads[h]))
        for name, mine, i in (("dk", ours[2], 2), ("dv", ours[3], 3)):
            exact, plain = (heads[0][low][i] + heads[1][low][i] for low in range(2))
            check(name, columns, mine[0][columns], array(exact), array(rounded(plain)))


def check(name: str, places: np.ndarray, ours: np.ndarray, exact: np.ndarray, plain: np.ndarray) -> None:
    """Each row on its own: [places, D]."""
    assert ours.shape == exact.shape == plain.shape and np.isfinite(ours).all() and np.isfinite(exact).all(), name
    error, peer, size = (np.linalg.norm(x, axis=1) for x in (ours - exact, plain - exact, exact))
    allowed = 2 * np.maximum(peer, UNIT / 2 * size)
    worst = np.argmax(error / allowed)
    assert (error <= allowed).all(), (
        f"{name} at {places[worst]}: {error[worst]} of {size[worst]}, {allowed[worst]} allowed"
    )


def on_a_gpu(size: int):
    return pytest.param(size, marks=pytest.mark.skipif(not GPU, reason="needs a GPU: a CPU would take minutes"))


@pytest.mark.parametrize("length", [60, on_a_gpu(12000)])
def test_rows_of_scores_that_have_no_room_together(length: int) -> None:
    """Float64 in the way that keeps scores in memory, 2 GiB of them at once: the rows of two heads that share keys are cut, forward
    and backward. Keys are zeros, so that every weight is 1 / length and the sums over all rows have a closed form.
    """
    rng = np.random.default_rng(3)
    q, dout = (rng.integers(0, 3, (1, 2, length, 8)).astype(np.float64) for _ in range(2))
    v = rng.standard_normal((1, 1, length, 8))
    leaves = [xt.tensor(x, device=DEVICE, requires_grad=True) for x in (q, 0 * v, v)]
    out = _C.scaled_dot_product_attention(*leaves, False, 0.5, True, "materialized")
    out.backward(xt.tensor(dout, device=DEVICE))
    mean = v.mean(2, keepdims=True)
    outer = np.einsum("bhid,bhie->de", dout, q)  # [D of V, D of K]
    wanted = [mean + 0 * q, 0 * q, 0.5 / length * (v - mean) @ outer, dout.sum((1, 2), keepdims=True) / length + 0 * v]
    for name, mine, want in zip(("out", "dq", "dk", "dv"), (out, *(x.grad for x in leaves)), wanted):
        assert np.abs(array(mine) - want).max() <= 1e-9 * (1 + np.abs(want).max()), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("length", [60, on_a_gpu(8704)])
def test_weights_that_replace_scores_sum_to_1(length: int, dtype: str) -> None:
    """Weights of 16 bits lie where scores of 32 bits were. All scores are 64, so that one that a weight has replaced before it was read,
    and is then near 0, has no weight itself. That would be a race: many rows, ten times, and of them 500 a head that see so few of
    many keys that half the warps have no score to wait for and write at once.
    """
    heads = 64 if length > 1000 else 2
    q = xt.full((1, heads, length, 64), 8.0, dtype=getattr(xt, dtype), device=DEVICE)
    ones = xt.ones((1, 1, length, 64), dtype=getattr(xt, dtype), device=DEVICE)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    for _ in range(10):
        out = _C.scaled_dot_product_attention(q, ones, ones, True, None, True, "materialized")
        assert (out.float() - 1).abs().max().item() <= 4 * unit  # a weight and the sum are rounded once each


@pytest.mark.parametrize("batch", [20, on_a_gpu(2100)])
def test_sequences_whose_sums_have_no_room_together(batch: int) -> None:
    """Head dim 128, where a GPU has room for sums of dQ of 2^19 rows, padded to 64 a head: a backward of more takes turns. Results err
    at most twice as much as those of the way that keeps scores in memory.
    """
    rng = np.random.default_rng(4)
    shapes = [(batch, 4, 5, 128), (batch, 2, 7, 128), (batch, 2, 7, 128), (batch, 4, 5, 128)]
    low = [xt.tensor(rng.standard_normal(shape).astype(np.float32)).bfloat16().to(DEVICE) for shape in shapes]
    found = []
    for backend, tensors in (("reference", [x.to(xt.float64) for x in low]), ("materialized", low), (None, low)):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = _C.scaled_dot_product_attention(*leaves, True, None, True, backend)
        out.backward(tensors[3])
        found.append([array(x) for x in (out, *(x.grad for x in leaves))])
    for name, exact, plain, ours in zip(("out", "dq", "dk", "dv"), *found):
        error, peer, size = (np.linalg.norm(x) for x in (ours - exact, plain - exact, exact))
        assert np.isfinite(ours).all() and error <= 2 * max(peer, UNIT * size), (
            f"{name}: {error} of {size}, the plain way {peer}"
        )


# ---- a batch and its sequences -------------------------------------------------------------------------------------

SMALL = dict(
    vocab_size=211, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, head_dim=16
)
LARGE = dict(
    vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, head_dim=64
)


@pytest.mark.parametrize(
    ("sizes", "batch", "length"),
    [
        (SMALL, 4, 32),
        pytest.param(
            LARGE, 8, 256, marks=pytest.mark.skipif(not GPU, reason="needs a GPU: float64 takes minutes of a CPU")
        ),
        pytest.param(
            LARGE, 5, 193, marks=pytest.mark.skipif(not GPU, reason="needs a GPU: float64 takes minutes of a CPU")
        ),
    ],
)
def test_a_batch_has_the_gradients_of_its_sequences(sizes: dict, batch: int, length: int) -> None:
    """In bfloat16, by the joined products and fused kernels of the model. Products of another height may add in another
    order, so a value in between is rounded another way now and then: the batch's gradient has an error of its own, of
    the size of that of the sum of the sequences' gradients. Both errors are known, against float64 on the same weights.
    """
    xt.manual_seed(0)
    config = Qwen3Config(num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.1, **sizes)
    model = Qwen3(config).bfloat16().to(DEVICE)
    exact_model = Qwen3(config).to(xt.float64).to(DEVICE)
    exact_model.load_state_dict({name: p.to(xt.float64) for name, p in model.state_dict().items()})
    block = np.random.default_rng(1).integers(0, config.vocab_size, (batch, length + 1))
    ids, targets = (xt.tensor(np.ascontiguousarray(x), device=DEVICE) for x in (block[:, :-1], block[:, 1:]))

    def found(model: Qwen3, rows: slice) -> dict[str, np.ndarray]:
        model.zero_grad()
        (model.loss(ids[rows], targets[rows], reduction="sum") * (1 / (batch * length))).backward()
        return {name: array(p.grad.to(xt.float64)) for name, p in model.named_parameters()}

    exact, whole = found(exact_model, slice(None)), found(model, slice(None))
    alone = [found(model, slice(i, i + 1)) for i in range(batch)]
    for name, want in exact.items():
        looped = sum(one[name] for one in alone[1:]) + alone[0][name]
        assert np.isfinite(whole[name]).all() and np.isfinite(want).all(), name
        error, size = np.linalg.norm(looped - want), np.linalg.norm(want)
        limit = 2 * error + UNIT / 2 * size  # and the one rounding of the batch's gradient
        assert np.linalg.norm(whole[name] - looped) <= limit, (name, np.linalg.norm(whole[name] - looped), limit, size)
        assert np.linalg.norm(whole[name] - want) <= limit, (name, np.linalg.norm(whole[name] - want), limit, size)
        # a sequence that is left out would be seen
        assert min(np.linalg.norm(one[name]) for one in alone) > limit, (name, limit, size)
