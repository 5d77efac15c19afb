"""Hyper-connections against PyTorch's autograd: each op and the whole layer, at the shapes and scales where implementations have failed.

The judge is PyTorch in float64 on exactly the numbers that the lower format holds; our error may be twice PyTorch's own in that format
plus a few roundings (see test_torch_ops.py).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from judge import judge
from places import ROOT

import xtrain as xt
import xtrain.functional as F
from xtrain import _C, nn
from xtrain.models import Qwen3, Qwen3Config
from xtrain.optable.mhc import torch_post, torch_pre, torch_sinkhorn
from xtrain.optable.table import array, exact, tensor

DTYPES = ("float64", "float32", "bfloat16")
# tokens, streams, channels, RMS of the streams, deviation of the logits, sinkhorn's options
LAYERS = [
    ((2, 64), 4, 128, 1.0, 1.0, {}),
    ((2, 64), 4, 128, 0.1, 0.1, {"form": "D"}),
    ((2, 64), 4, 128, 4.0, 3.0, {"form": "D", "transpose": True}),
    ((33,), 4, 1280, 0.1, 1.0, {}),
    ((17,), 2, 1920, 4.0, 0.3, {"transpose": True}),
    ((7,), 8, 2560, 1.0, 1.0, {"form": "D"}),
    ((5,), 4, 7168, 4.0, 5.0, {}),
    ((3,), 8, 7168, 0.1, 1.0, {"form": "D"}),
    ((1,), 2, 7168, 1.0, 5.0, {"form": "D", "iters": 5}),
    ((129,), 5, 37, 0.1, 5.0, {"iters": 3}),
    ((2, 3, 5), 7, 65, 4.0, 0.1, {}),
    ((31,), 1, 100, 0.1, 1.0, {}),
]


def drawn(tokens, n, c, rms, deviation, dtype):
    """x, phi, alpha, bias, gamma, the weight of the sublayer, and the upstream gradient: what the formats hold."""
    rng = np.random.default_rng([n, c, *tokens])
    k, m, wide = n * c, n * n + 2 * n, "float64" if dtype == "float64" else "float32"
    return [
        exact(rng.standard_normal((*tokens, n, c)) * rms, dtype),
        exact(rng.standard_normal((m, k)) * deviation / np.sqrt(k), wide),
        exact(np.array([1.1, 0.9, 1.05]), wide),
        exact(rng.standard_normal(m) * 0.1, wide),
        exact(rng.standard_normal((n, c)) * 0.5 + 1, wide),
        exact(rng.standard_normal(c), dtype),
        exact(rng.standard_normal((*tokens, n, c)), dtype),
    ]


def to_torch(a: np.ndarray, name: str):
    return torch.tensor(a).to(getattr(torch, name)).requires_grad_()


def torch_layer(arrays, dtype: str, kwargs):
    wide = "float64" if dtype == "float64" else "float32"
    x, phi, alpha, bias, gamma, weight = leaves = [
        to_torch(a, dtype if i in (0, 5) else wide) for i, a in enumerate(arrays[:6])
    ]
    h_in, h_post, h_res = torch_pre(torch, x, phi, alpha, bias, gamma)
    out = torch_post(torch, x, torch.tanh(h_in * weight), h_post, torch_sinkhorn(torch, h_res, **kwargs))
    out.backward(torch.tensor(arrays[6]).to(out.dtype))
    return [t.detach().double().cpu().numpy() for t in (h_in, h_post, h_res, out)], [
        t.grad.double().cpu().numpy() for t in leaves
    ]


def our_layer(arrays, dtype: str, kwargs):
    wide = "float64" if dtype == "float64" else "float32"
    leaves = [tensor(a, dtype if i in (0, 5) else wide).requires_grad_() for i, a in enumerate(arrays[:6])]
    x, *parameters, weight = leaves
    h_in, h_post, h_res = F.mhc_pre(x, *parameters)
    out = F.mhc_post(x, (h_in * weight).tanh(), h_post, F.sinkhorn(h_res, **kwargs))
    # The same through the two halves, whose backward is another one.
    again, *parameters, weight = twins = [leaf.detach().requires_grad_() for leaf in leaves]
    options = {"iters": 20, "form": "P", "transpose": False, **kwargs}
    half, post, m, carry = _C.mhc_open(again, *parameters, **options)
    whole = _C.mhc_close(carry, (half * weight).tanh(), post, m)
    for result in (out, whole):
        result.backward(tensor(arrays[6], dtype))
    assert np.array_equal(array(whole), array(out))
    return (
        [array(t) for t in (h_in, h_post, h_res, out)],
        [array(t.grad) for t in leaves],
        [array(t.grad) for t in twins],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "n", "c", "rms", "deviation", "kwargs"), LAYERS, ids=["-".join(map(str, case[:5])) for case in LAYERS]
)
def test_a_layer(tokens, n, c, rms, deviation, kwargs, dtype) -> None:
    arrays = drawn(tokens, n, c, rms, deviation, dtype)
    exact_outs, exact_grads = torch_layer(arrays, "float64", kwargs)
    their_outs, their_grads = torch_layer(arrays, dtype, kwargs)
    our_outs, our_grads, halves = our_layer(arrays, dtype, kwargs)
    terms = float(n * c + np.prod(tokens) + 40)
    for name, ours, theirs, want in zip(("h_in", "h_post", "h_res", "out"), our_outs, their_outs, exact_outs):
        judge(ours, theirs, want, dtype if name in ("h_in", "out") else wide(dtype), terms, name)
    for i, name in enumerate(("x", "phi", "alpha", "bias", "gamma", "weight")):
        for ours in (our_grads[i], halves[i]):
            # What a sum over tokens is made of can be far larger than the sum; and in float64 the judge rounds as we do.
            size = np.abs(exact_grads[i]).max() + (name != "x")
            size *= 16 if dtype == "float64" else 1
            judge(ours, their_grads[i], exact_grads[i], dtype, terms, f"gradient of {name}", size)


def wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


@pytest.mark.parametrize("dtype", ("float64", "float32"))
@pytest.mark.parametrize("deviation", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("form", ["P", "D"])
def test_sinkhorn(form: str, n: int, deviation: float, dtype: str) -> None:
    rng = np.random.default_rng(n)
    z, d = (exact(rng.standard_normal((257, n, n)) * s, dtype) for s in (deviation, 1.0))
    found = []
    for name in ("float64", dtype):
        leaf = to_torch(z, name)
        out = torch_sinkhorn(torch, leaf, form=form)
        out.backward(torch.tensor(d).to(out.dtype))
        found.append((out.detach().double().cpu().numpy(), leaf.grad.double().cpu().numpy()))
    leaf = tensor(z, dtype).requires_grad_()
    out = F.sinkhorn(leaf, form=form)
    out.backward(tensor(d, dtype))
    for ours, theirs, want in zip((array(out), array(leaf.grad)), found[1], found[0]):
        judge(ours, theirs, want, dtype, 40.0 * n, f"sinkhorn {form}", 1.0)


WIDE_LAYERS = [
    (c, n, (0.1, 1.0, 4.0)[(i + i // 3) % 3])
    for i, (c, n) in enumerate(itertools.product((1280, 1920, 2560, 7168), (2, 4, 8)))
]
NAMES = ("x", "phi", "alpha", "bias", "gamma")


def gradients(arrays, d, through: str) -> tuple[list[np.ndarray], list[np.ndarray], list]:
    """Of x, phi, alpha, bias, gamma, in float64 by PyTorch and ours, for given gradients of what comes out: no activation in between is
    rounded to the format of the streams, so that float32 arithmetic is all that sets the two apart. Then the size of each: its largest
    element; of every element of alpha and bias, whose terms cancel, the sum of the absolute values of what the tokens give."""
    exact_leaves = [to_torch(a, "float64") for a in arrays]
    ours = [tensor(a, "float32" if i else "bfloat16").requires_grad_() for i, a in enumerate(arrays)]
    dh_in, dh_post, dh_res, y, dout = d
    theirs = h_in, h_post, h_res = torch_pre(torch, *exact_leaves)
    if through == "mhc_pre":
        outs, dys = F.mhc_pre(*ours), (dh_in, dh_post, dh_res)
    else:
        mixed = torch_post(torch, exact_leaves[0], torch.tensor(y), h_post, torch_sinkhorn(torch, h_res))
        half, post, m, carry = _C.mhc_open(*ours)
        theirs, outs, dys = (h_in, mixed), (half, _C.mhc_close(carry, tensor(y, "bfloat16"), post, m)), (dh_in, dout)
    per_token = {i: torch.zeros_like(exact_leaves[i]) for i in (2, 3)}
    for t in range(len(dh_in)):  # what alpha's and bias' gradients are sums of
        only = [torch.tensor(np.where(np.arange(len(a)).reshape(-1, *[1] * (a.ndim - 1)) == t, a, 0)) for a in dys]
        found = torch.autograd.grad(theirs, [exact_leaves[i] for i in per_token], only, retain_graph=True)
        for i, term in zip(per_token, found):
            per_token[i] += term.abs()
    torch.autograd.backward(theirs, [torch.tensor(a) for a in dys])
    _C.backward(list(outs), [tensor(a, o.dtype.name) for a, o in zip(dys, outs)], False)
    sizes = [
        per_token[i].cpu().numpy() if i in per_token else leaf.grad.abs().max().item()
        for i, leaf in enumerate(exact_leaves)
    ]
    return [t.grad.cpu().numpy() for t in exact_leaves], [array(t.grad) for t in ours], sizes


def gradients_given(tokens: int, n: int, c: int) -> list[np.ndarray]:
    """Of h_in, h_post and h_res; then y and the gradient of the new streams."""
    rng = np.random.default_rng(n * c)
    given = ((tokens, c), "bfloat16"), ((tokens, n), "float32"), ((tokens, n, n), "float32"), ((tokens, c), "bfloat16")
    return [exact(rng.standard_normal(s), t) for s, t in (*given, ((tokens, n, c), "bfloat16"))]


@pytest.mark.parametrize("through", ["mhc_pre", "mhc_open"])
@pytest.mark.parametrize(("c", "n", "rms"), WIDE_LAYERS)
def test_gradients_of_bfloat16_streams_are_those_of_float32(c: int, n: int, rms: float, through: str) -> None:
    """Those of the parameters within 1e-6 of their size. dx is rounded once: at most one unit in the last place from the exact one,
    element by element, wherever it is not tiny."""
    arrays = drawn((33,), n, c, rms, 1.0, "bfloat16")[:5]
    want, ours, sizes = gradients(arrays, gradients_given(33, n, c), through)
    for name, right, found, size in zip(NAMES, want, ours, sizes):
        error = np.abs(found - right)
        if name == "x":
            assert (error <= 2.0**-8 * np.abs(right) * 1.02 + 1e-6 * size).all()
        else:
            worst = (error / size).max()
            assert worst <= 1e-6, f"gradient of {name}: {worst:.1e} of its size"


def test_the_benchmark_sees_who_is_wrong(monkeypatch) -> None:
    """Every contender, every result, NaN wherever it stands; a phi that lies the other way round is turned back."""
    monkeypatch.syspath_prepend(ROOT / "parity/bench")
    import gpu_mhc

    given = [torch.rand(5, 2, 3) + 1, torch.rand(8, 6) + 1]

    def one(function, turned=False, factor=1.0):
        leaves = [t.clone().requires_grad_() for t in (given[0], given[1].t() if turned else given[1])]
        run = lambda out, dy: torch.autograd.backward(out, [d * factor for d in dy], retain_graph=True)  # noqa: E731
        found = gpu_mhc.Contender(function, leaves, [torch.ones(5, 2)] * 2, lambda: None, torch.no_grad, run)
        found.turned = turned
        return found

    def right(x, phi):
        return x.sum(-1), (x.flatten(1) @ phi.t())[:, :2]

    found = gpu_mhc.differences({
        "eager": one(right),
        "same": one(right),
        "turned": one(lambda x, phi: right(x, phi.t()), True),
        "gradients": one(right, factor=1.25),
        "nan last": one(lambda x, phi: (right(x, phi)[0], right(x, phi)[1] * np.nan)),
    })  # fmt: skip
    assert found["same"] == 0 and found["turned"] <= 1e-6 and "eager" not in found
    assert 0.2 <= found["gradients"] <= 0.3 and found["nan last"] == np.inf


def test_other_readers_refuse_the_extension_by_name(tmp_path) -> None:
    """Hugging Face's Qwen3 has no hyper-connections: it must not load such a model without them."""
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")
    config = Qwen3Config(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, mhc_streams=4,
    )  # fmt: skip
    Qwen3(config).save_pretrained(tmp_path / "m")
    for auto in (transformers.AutoConfig, transformers.AutoModelForCausalLM):
        with pytest.raises(ValueError, match="xtrain_qwen3_mhc"):
            auto.from_pretrained(tmp_path / "m")


def test_streams_of_a_new_model_change_little() -> None:
    """With alpha = 0 a model with streams computes what the plain one does with the same weights."""
    sizes = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8)  # fmt: skip
    plain, streams = Qwen3(Qwen3Config(**sizes)), Qwen3(Qwen3Config(**sizes, mhc_streams=4))
    streams.load_state_dict(plain.state_dict(), strict=False)
    for name, p in streams.named_parameters():
        if name.endswith("alpha"):
            nn.init.zeros_(p)
    ids = xt.tensor(np.random.default_rng(0).integers(0, 61, (2, 7)))
    assert np.abs(array(plain(ids)) - array(streams(ids))).max() <= 1e-4
