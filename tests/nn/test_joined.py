"""Layers of one input as one product: parameters that lie together, what keeps them there, and what takes them apart."""

from __future__ import annotations

import copy
import gc
import itertools

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C, nn, optim
from xtrain.models import Qwen2, Qwen2Config, Qwen3, Qwen3Config
from xtrain.nn.layers import joined_weights
from xtrain.nn.module import pack
from xtrain.optable.table import array, bits

SIZES = (5, 3, 4)  # rows of the weights
C = 7


def trio(dtype=None) -> nn.ModuleList:
    """Three layers of one input whose weights lie together."""
    xt.manual_seed(3)
    layers = nn.ModuleList(nn.Linear(C, n, False, dtype=dtype) for n in SIZES)
    pack(*layers)
    return layers


def weights_of(layers) -> list:
    return [layer.weight for layer in layers]


def together(tensors) -> bool:
    return all(a.adjoins(b) for a, b in itertools.pairwise(tensors))


def count_ops(run) -> list[str]:
    names: list[str] = []
    before = _C.set_call_hook(lambda op, arguments, outputs: names.append(op.__name__))
    try:
        run()
    finally:
        _C.set_call_hook(before)
    return names


# ---- parameters that lie together --------------------------------------------------------------------------------------------------


def test_pack_moves_values_and_nothing_else() -> None:
    layers = nn.ModuleList(nn.Linear(C, n, False) for n in SIZES)
    layers[1].weight.requires_grad = False
    before = weights_of(layers)
    assert not together(before)
    pack(*layers)
    after = weights_of(layers)
    assert together(after)
    assert [bits(w) for w in after] == [bits(w) for w in before]
    assert [w.requires_grad for w in after] == [True, False, True]
    assert [type(w) for w in after] == [nn.Parameter] * 3
    assert [name for name, _ in layers.named_parameters()] == ["0.weight", "1.weight", "2.weight"]


def test_each_has_its_own_version_and_life() -> None:
    first, second, third = (w.detach() for w in weights_of(trio()))
    version = second._version
    first.fill_(2.0)
    assert second._version == version and first._version == version + 1
    values = bits(third)
    del first, second
    gc.collect()
    assert bits(third) == values


def test_adjoins() -> None:
    a, b, c = _C.pack([xt.ones(2, 3), xt.ones(4), xt.ones(1, 3)])
    assert a.adjoins(b) and b.adjoins(c)
    assert not a.adjoins(c) and not b.adjoins(a) and not a.adjoins(a)
    whole = xt.ones(4, 3)
    assert whole[:1].adjoins(whole[1:]) and not whole[:1].adjoins(whole[2:])
    assert not whole[:, :2].adjoins(whole[1:])
    assert not xt.ones(2, 3).adjoins(xt.ones(2, 3))
    empty, full = _C.pack([xt.ones(0, 3), xt.ones(2, 3)])
    assert not empty.adjoins(full)


@pytest.mark.parametrize("convert", [lambda m: m.to(xt.bfloat16), lambda m: m.to(xt.float64).to(xt.float32)])
def test_to_keeps_them_together(convert) -> None:
    layers = trio()
    want = [array(w.to(xt.bfloat16)) for w in weights_of(layers)]
    layers = convert(layers)
    assert together(weights_of(layers))
    assert all(np.array_equal(array(w.to(xt.bfloat16)), v) for w, v in zip(weights_of(layers), want, strict=True))


def test_to_what_they_are_changes_nothing() -> None:
    layers = trio()
    before = weights_of(layers)
    assert all(a is b for a, b in zip(weights_of(layers.to(xt.float32)), before, strict=True))


def test_deepcopy_keeps_them_together() -> None:
    layers = trio()
    layers[2].weight.requires_grad = False
    layers.first = layers[0]
    copied = copy.deepcopy(layers)
    assert together(weights_of(copied)) and copied.first is copied[0]
    assert [bits(w) for w in weights_of(copied)] == [bits(w) for w in weights_of(layers)]
    assert [w.requires_grad for w in weights_of(copied)] == [True, True, False]
    with xt.no_grad():
        copied[0].weight.fill_(0.0)
    assert bits(copied[0].weight) != bits(layers[0].weight)
    assert not copy.deepcopy(layers[1]).weight.adjoins(layers[2].weight)


def test_deepcopy_of_a_module_with_slots_and_state() -> None:
    class Slotted(nn.Module):
        __slots__ = ("kept",)

        def __init__(self) -> None:
            self.weight, self.kept = nn.Parameter(xt.ones(2)), [1]

    class Stateful(nn.Module):
        def __init__(self) -> None:
            self.weight = nn.Parameter(xt.ones(2))

        def __getstate__(self):
            return {"weight": self.weight, "came": "from a state"}

        def __setstate__(self, state) -> None:
            self.__dict__.update(state)

    slotted = Slotted()
    copied = copy.deepcopy(slotted)
    assert copied.kept == [1] and copied.kept is not slotted.kept and copied.weight is not slotted.weight
    assert copy.deepcopy(Stateful()).came == "from a state"


# ---- gradients -------------------------------------------------------------------------------------------------------------------------


def run(weights, x, times: int = 1):
    for _ in range(times):
        y = _C.linear_joined(x, list(weights))
        y.backward(xt.ones(*y.shape))


def test_gradients_lie_together_and_add_up_in_one_product() -> None:
    weights, x = weights_of(trio()), xt.randn(6, C)
    run(weights, x)
    grads = [w.grad for w in weights]
    assert together(grads)
    once, places = [array(g) for g in grads], [g.data_ptr() for g in grads]
    del grads
    run(weights, x)
    assert [w.grad.data_ptr() for w in weights] == places
    assert all(np.allclose(array(w.grad), 2 * g, rtol=1e-6) for w, g in zip(weights, once, strict=True))


def test_a_gradient_that_somebody_sees_is_not_written_by_the_product() -> None:
    """The product may read it: here dy is a view of a .grad."""
    weights, x = weights_of(trio()), xt.ones(1, C)
    run(weights, x)
    seen = weights[0].grad
    y = _C.linear_joined(x, weights)
    dy = xt.zeros(1, sum(SIZES))
    with xt.no_grad():
        dy[:, : SIZES[0]].copy_(seen[:, 0].reshape(1, -1))
    y.backward(dy)
    assert together(w.grad for w in weights)
    assert array(weights[0].grad).tolist() == (2 * np.ones((SIZES[0], C))).tolist()
    assert array(weights[1].grad).tolist() == np.ones((SIZES[1], C)).tolist()


@pytest.mark.parametrize("gone", range(3))
def test_gradients_that_are_there_in_part(gone: int) -> None:
    """After one was dropped, the others add up and that one starts anew."""
    weights, x = weights_of(trio()), xt.ones(2, C)
    run(weights, x)
    weights[gone].grad = None
    run(weights, x)
    assert [array(w.grad)[0, 0] for w in weights] == [2.0 if i == gone else 4.0 for i in range(3)]
    run(weights, x)
    assert [array(w.grad)[0, 0] for w in weights] == [4.0 if i == gone else 6.0 for i in range(3)]


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_frozen_parameters(frozen) -> None:
    weights, x = weights_of(trio()), xt.ones(2, C)
    x.requires_grad = True
    for i in frozen:
        weights[i].requires_grad = False
    run(weights, x, 2)
    assert [None if w.grad is None else array(w.grad)[0, 0] for w in weights] == [
        None if i in frozen else 4.0 for i in range(3)
    ]
    want = 2 * sum(array(w).sum(0) for w in weights)
    assert np.allclose(array(x.grad), want, rtol=1e-5)


def test_a_weight_that_is_there_twice() -> None:
    weight = trio()[0].weight
    run([weight, weight], xt.ones(2, C), 2)
    assert array(weight.grad).tolist() == np.full((SIZES[0], C), 8.0).tolist()


def test_hooks_of_parameters_see_whole_gradients() -> None:
    weights, x, seen = weights_of(trio()), xt.ones(2, C), []
    for i, weight in enumerate(weights):
        weight.register_hook(lambda g, i=i: (seen.append((i, array(g)[0, 0])), g * 2)[1])
    run(weights, x, 2)
    assert sorted(seen) == [(0, 2.0), (0, 2.0), (1, 2.0), (1, 2.0), (2, 2.0), (2, 2.0)]
    assert [array(w.grad)[0, 0] for w in weights] == [8.0, 8.0, 8.0]


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_clip_and_adamw(to_none: bool) -> None:
    """They see separate tensors, with the bits that parameters of their own memory get."""
    results = []
    for packed in (True, False):
        layers = trio()
        if not packed:
            for layer in layers:
                layer.weight = nn.Parameter(layer.weight.detach().clone())
        optimizer = optim.AdamW(layers.parameters(), lr=0.1)
        for step in range(3):
            layers.zero_grad(set_to_none=to_none) if step else None
            if packed and to_none:
                assert step == 0 or all(w.grad is None for w in weights_of(layers))
            run(weights_of(layers), xt.ones(2, C) * (step + 1.0))
            norm = optim.clip_grad_norm_(layers.parameters(), 0.5)
            optimizer.step()
        results.append([bits(norm), *(bits(w) for w in weights_of(layers))])
    assert results[0] == results[1]


def test_a_change_in_place_before_backward_is_seen() -> None:
    weights, x = weights_of(trio()), xt.ones(2, C)
    y = _C.linear_joined(x, weights)
    with xt.no_grad():
        weights[1].fill_(0.0)
    with pytest.raises(RuntimeError, match="linear_joined.*changed in place"):
        y.backward(xt.ones(*y.shape))


# ---- SwiGLU in the memory of the joined product -----------------------------------------------------------------------------------------


def test_swiglu_writes_its_gradient_over_what_nobody_reads() -> None:
    """With the bits of the gradient that has memory of its own; never over what somebody holds, or may read again."""
    size = 64 * 512 * 4

    def gradient(keep: str = "", retain: bool = False) -> tuple[bytes, bool]:
        xt.manual_seed(5)
        x = xt.randn(64, 512)
        x.requires_grad = True
        joined = x * 1.0
        y, value = _C.swiglu(joined), bits(joined)
        kept = joined if keep == "tensor" else joined.detach() if keep == "alias" else None
        del joined
        dy = xt.ones(*y.shape)
        gc.collect()
        device = _C.get_default_device()
        _C.memory_reset_peak(device)
        before = _C.memory_stats(device)["allocated"]
        y.backward(dy, retain_graph=retain)
        spared = _C.memory_stats(device)["peak"] - before < 2 * size  # the gradients of x * 1.0 and of x
        first = bits(x.grad)
        if kept is not None:
            assert bits(kept) == value
        if retain:
            x.grad = None
            y.backward(dy)
            assert bits(x.grad) == first
        return first, spared

    want = gradient()
    assert want[1]
    assert gradient("tensor") == gradient("alias") == gradient(retain=True) == (want[0], False)


# ---- layers of a model ------------------------------------------------------------------------------------------------------------------


def model(kind: str = "qwen3", **changes) -> Qwen3 | Qwen2:
    """qwen3 has no biases, qwen2 those of q, k and v."""
    xt.manual_seed(1)
    sizes = dict(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    family, config = (Qwen3, Qwen3Config) if kind == "qwen3" else (Qwen2, Qwen2Config)
    one = family(config(**{**sizes, **changes}))
    for name, p in one.named_parameters():
        if "mhc" in name or "bias" in name:  # streams are alike at first: their gradients would cancel to roundings
            with xt.no_grad():
                p.copy_(xt.randn(*p.shape))
    return one


GROUPS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def groups(one: Qwen3):
    for layer in one.model.layers:
        for place, names in GROUPS:
            yield [getattr(getattr(layer, place), name) for name in names]


def separate(one: Qwen3) -> Qwen3:
    """With parameters that have memory of their own."""
    for layers in groups(one):
        for layer in layers:
            layer.weight = nn.Parameter(layer.weight.detach().clone(), layer.weight.requires_grad)
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
    return one


IDS = np.random.default_rng(0).integers(0, 61, (2, 9))


def plain_logits(one: Qwen3 | Qwen2) -> bytes:
    """Of products whose columns do not depend on how many there are, as those of a library may."""
    with xt.use_gemm_backend("naive"):
        return bits(one(xt.tensor(IDS)))


def step(one: Qwen3) -> list[bytes]:
    one.zero_grad()
    loss = one.loss(xt.tensor(IDS[:, :-1]), xt.tensor(IDS[:, 1:]))
    loss.backward()
    return [bits(loss), *(bits(p.grad) for p in one.parameters())]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_a_model_has_one_product_for_layers_of_one_input(kind: str) -> None:
    one = model(kind)
    assert all(joined_weights(*layers) for layers in groups(one))
    names = count_ops(lambda: step(one))
    assert names.count("linear_joined") == names.count("swiglu_mlp") == 2  # one a layer
    alone = count_ops(lambda: step(separate(one)))
    assert "linear_joined" not in alone and "swiglu_mlp" not in alone
    assert alone.count("linear") > names.count("linear")


KINDS = [("qwen3", 0), ("qwen3", 2), ("qwen2", 0)]  # and streams


@pytest.mark.parametrize(("kind", "streams"), KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_joined_and_separate_products_are_as_exact(dtype: str, kind: str, streams: int) -> None:
    """Against float64 gradients of the same parameters: the geometric mean over them of the error of joined products, relative
    to that of separate ones. (One ratio alone is chance: where terms cancel, as in gradients of gates, errors are a few
    roundings.)"""
    one = model(kind, **({"mhc_streams": streams} if streams else {})).to(getattr(xt, dtype))
    assert all(joined_weights(*layers) for layers in groups(one))
    step(one)
    joined = [array(p.grad) for p in one.parameters()]
    step(separate(one))
    apart = [array(p.grad) for p in one.parameters()]
    step(one.to(xt.float64))
    want = [array(p.grad) for p in one.parameters()]
    ratios = [np.linalg.norm(g - w) / np.linalg.norm(a - w) for g, a, w in zip(joined, apart, want, strict=True)]
    assert np.exp(np.mean(np.log(ratios))) < 1.25
    assert all(np.linalg.norm(a - w) < 0.5 * np.linalg.norm(w) for a, w in zip(apart, want, strict=True))


@pytest.mark.parametrize(("kind", "streams"), KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_layers_have_the_same_bits(dtype: str, kind: str, streams: int) -> None:
    one = model(kind, **({"mhc_streams": streams} if streams else {})).to(getattr(xt, dtype))
    want = step(one)
    one.gradient_checkpointing = True
    assert step(one) == want
    one.gradient_checkpointing = False
    if streams:
        one.stream_checkpointing = 3
        assert step(one) == want


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_generation_is_that_of_separate_products(kind: str) -> None:
    one = model(kind)
    want = one.generate(IDS[:, :3], 6, temperature=0.0).tolist()
    assert separate(one).generate(IDS[:, :3], 6, temperature=0.0).tolist() == want


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_files_keep_the_names_and_the_parameters_their_place(tmp_path, kind: str) -> None:
    one = model(kind)
    want = step(one)
    one.save_pretrained(tmp_path / "joined")
    separate(one).save_pretrained(tmp_path / "separate")
    written = [(tmp_path / kind / "model.safetensors").read_bytes() for kind in ("joined", "separate")]
    assert written[0] == written[1]
    loaded = type(one).from_pretrained(tmp_path / "separate")
    assert all(joined_weights(*layers) for layers in groups(loaded))
    assert step(loaded) == want
    values = {name: tensor * 0.5 for name, tensor in loaded.state_dict().items()}
    places = [p.data_ptr() for p in loaded.parameters()]
    loaded.load_state_dict(values)
    assert [p.data_ptr() for p in loaded.parameters()] == places
    assert all(bits(tensor) == bits(values[name]) for name, tensor in loaded.state_dict().items())


def test_biases_are_joined_forward_and_backward() -> None:
    """One addition for three biases, and one sum for their gradients, which are parts of it."""
    one, ids = model("qwen2", num_hidden_layers=1), xt.tensor(IDS)
    biases = [layer.bias for layer in next(groups(one))]
    assert together(biases)
    moved = copy.deepcopy(one).to(xt.float64)
    assert together([layer.bias for layer in next(groups(moved))])
    step(one)
    joined = [array(bias.grad) for bias in biases]
    assert together([bias.grad for bias in biases]) and all(bias.grad._version == 0 for bias in biases)
    want = plain_logits(one)
    step(moved)
    for got, layer in zip(joined, next(groups(moved)), strict=True):
        wide = array(layer.bias.grad)
        assert np.abs(got - wide).max() < 1e-5 * np.abs(wide).max()
    one.loss(ids[:, :-1], ids[:, 1:]).backward()
    for once, bias in zip(joined, biases, strict=True):
        assert array(bias.grad).tolist() == (2 * once).tolist()
    assert plain_logits(separate(one)) == want


def test_biases_that_not_all_have_stay_where_they_are() -> None:
    """A family whose queries alone have a bias: weights lie together, and each layer is called."""

    class Config(Qwen2Config):
        biased = ("q_proj",)

    def built() -> Qwen2:
        xt.manual_seed(1)
        one = Qwen2(Config(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=1, head_dim=8,
                           num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32))  # fmt: skip
        with xt.no_grad():
            one.model.layers[0].self_attn.q_proj.bias.fill_(0.5)
        return one

    one = built()
    layers = next(groups(one))
    assert [layer.bias is None for layer in layers] == [False, True, True] and together(weights_of(layers))
    assert joined_weights(*layers) is None
    assert plain_logits(one) == plain_logits(separate(built()))


def test_frozen_biases() -> None:
    one = model("qwen2", num_hidden_layers=1)
    step(one)
    layers = next(groups(one))
    want = [bits(layer.bias.grad) for layer in layers]
    layers[1].bias.requires_grad = False
    layers[1].bias.grad = None
    one.zero_grad()
    one.loss(xt.tensor(IDS[:, :-1]), xt.tensor(IDS[:, 1:])).backward()
    assert layers[1].bias.grad is None
    assert [bits(layers[i].bias.grad) for i in (0, 2)] == [want[0], want[2]]


def test_a_parameter_of_another_dtype_is_an_error_of_its_layer() -> None:
    one = model()
    one.model.layers[0].mlp.gate_proj.to(xt.bfloat16)
    with pytest.raises(TypeError, match="^linear: weight must have the dtype of input, float32, got bfloat16"):
        step(one)


@pytest.mark.parametrize("change", ["bias", "replaced", "hooked", "subclass"])
def test_what_calls_the_layers_one_by_one(change: str) -> None:
    one = model()
    for layers in groups(one):
        layer = layers[0]
        if change == "bias":
            layer.bias = nn.Parameter(xt.zeros(layer.out_features))
        elif change == "replaced":
            layer.weight = nn.Parameter(layer.weight.detach().clone())
        elif change == "hooked":
            layer.register_forward_hook(lambda module, args, out: out * 1.0)
        else:
            layer.__class__ = type("Other", (nn.Linear,), {})
    names = count_ops(lambda: step(one))
    assert "linear_joined" not in names and "swiglu_mlp" not in names
    assert plain_logits(one) == plain_logits(model())
