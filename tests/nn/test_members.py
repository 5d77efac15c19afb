"""Every member of a model counts: what replaces, wraps, hooks or edits one shows in forward, loss, generation and recomputation."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
from xtrain import nn
from xtrain.models import Qwen3, Qwen3Config
from xtrain.nn.module import Module, is_stock
from xtrain.optable.table import array, bits
from xtrain.testing import record, tolerance

JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # layers of one input
VOCAB = 61  # its rows of logits are padded in the fused loss; those of 64 are not
IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 8))


def make(streams: int = 0, tied: bool = False, vocab: int = VOCAB, **changes) -> Qwen3:
    xt.manual_seed(1)
    sizes = dict(
        vocab_size=vocab,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        mhc_streams=streams,
        mhc_contraction="learned" if streams else "mean",
    )
    model = Qwen3(Qwen3Config(**{**sizes, **changes}))
    for name, p in model.named_parameters():
        # Streams are alike at first, so that gradients of stream_head cancel to roundings. Unlike weights keep them apart.
        if "mhc" in name or "stream_head" in name:
            with xt.no_grad():
                p.copy_(xt.randn(*p.shape))
    return model


def loss_of(model):
    return model.loss(xt.tensor(IDS[:, :-1]), xt.tensor(IDS[:, 1:]))


def trained(model) -> list[bytes]:
    """Loss and gradients."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return [bits(loss), *(bits(p.grad) for p in model.parameters())]


def recomputed(model) -> list[bytes]:
    name, value = ("stream_checkpointing", 3) if model.config.mhc_streams else ("gradient_checkpointing", True)
    setattr(model, name, value)
    try:
        return trained(model)
    finally:
        setattr(model, name, 0)


def generated(model) -> list:
    return model.generate(IDS[:, :3], 4, temperature=0.0).tolist()


def forward(model) -> bytes:
    """Of products whose columns do not depend on how many there are, as those of a library may."""
    with xt.use_gemm_backend("naive"):
        return bits(model(xt.tensor(IDS)))


WAYS = {
    "forward": forward,
    "loss": trained,
    "recompute": recomputed,
    "generate": generated,
}
MODELS = {"untied": {}, "tied": dict(tied=True), "mhc": dict(streams=2)}


def members(model) -> list[str]:
    """Everything that a model calls: all but itself, its trunk, which is more than a function, and lists."""
    return [name for name, one in model.named_modules() if name not in ("", "model") and type(one) is not nn.ModuleList]


def replace(model, name: str, change) -> nn.Module:
    """Puts change(member) in the place of a member."""
    place, _, last = name.rpartition(".")
    for step in place.split(".") if place else ():
        model = getattr(model, step)
    new = change(getattr(model, last))
    setattr(model, last, new)
    return new


class Wrapped(nn.Module):
    """Passes everything on to what it wraps."""

    def __init__(self, inner) -> None:
        self.inner, self.calls = inner, 0

    def forward(self, *args, **options):
        self.calls += 1
        return self.inner(*args, **options)


def is_composed(name: str, way: str) -> bool:
    """Whether gradients round otherwise when this member is called: the head with its loss, products of one input, whose dx
    are one sum when they are joined, and on a GPU the weights of norms of q and k, whose shares have another order."""
    others = JOINED if xt._C.get_default_device().type == "cpu" else (*JOINED, "q_norm", "k_norm")
    return way in ("loss", "recompute") and (name in ("", "lm_head") or name.endswith(others))


def near(got: list[bytes], want: list[bytes], kind: str) -> bool:
    """Whether loss and gradients of composed ops are as exact as the fused ones'.

    A composed loss rounds its logits otherwise, and the gradients behind it pass that on, magnified where terms cancel. So both are compared
    with float64: the error of `got` is at most twice that of `want`, or twice what float32 loses in sums over the vocabulary."""
    rtol, _ = tolerance("float32", accumulations=VOCAB)
    exact = [np.frombuffer(e) for e in trained(make(**MODELS[kind]).to(xt.float64))]
    for g, w, e in zip(got, want, exact, strict=True):
        error = np.abs(np.frombuffer(w) - e).max()
        if not np.all(np.abs(np.frombuffer(g) - e) <= 2 * max(error, rtol * np.abs(e).max())):
            return False
    return True


# ---- wrapped, hooked, subclassed, patched --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_wrapped_member_is_called(kind: str, way: str) -> None:
    """In every way to run a model, and with the same bits: those of composed ops are the fused ones' but for their sums."""
    run = WAYS[way]
    want = run(make(**MODELS[kind]))
    for name in members(make(**MODELS[kind])):
        model = make(**MODELS[kind])
        wrapper = replace(model, name, Wrapped)
        if name == "model.embed_tokens" and kind == "tied":
            with pytest.raises(
                TypeError, match="^Qwen3: embed_tokens must have a weight while lm_head is None, got Wra"
            ):
                run(model)
            continue
        got = run(model)
        assert got == want or (is_composed(name, way) and near(got, want, kind)), name
        assert wrapper.calls, name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_hook_sees_every_member(kind: str, way: str) -> None:
    """One hook at a time, as each may change which path is taken, and all at once."""
    run, plain = WAYS[way], make(**MODELS[kind])
    want = run(plain)
    names = ["", *members(plain)]
    for some in [*([name] for name in names), names]:
        model, seen = make(**MODELS[kind]), set()
        handles = [
            module.register_forward_hook(lambda module, args, out, name=name, seen=seen: seen.add(name))
            for name, module in model.named_modules()
            if name in some
        ]
        got = run(model)
        assert seen == set(some)
        composed = any(is_composed(name, way) for name in seen)
        assert got == want or (composed and near(got, want, kind)), some
        for handle in handles:
            handle.remove()
        assert run(model) == want, some


def negated(module, args, out):
    return -out


class Negative(nn.Module):
    def forward(self, x):
        return -x


def hooked(module):
    module.register_forward_hook(lambda module, args, out: -out)
    return module


def subclassed(module):
    class Negated(type(module)):
        def forward(self, *args, **options):
            return -super().forward(*args, **options)

    module.__class__ = Negated
    return module


def patched(module):
    forward = module.forward
    module.forward = lambda *args, **options: -forward(*args, **options)
    return module


def in_sequence(module):
    return nn.Sequential(module, Negative())


@pytest.mark.parametrize("kind", MODELS)
def test_another_result_of_a_member_counts_in_every_way(kind: str) -> None:
    """Its sign turned around by a hook, by a subclass, by a patched forward or by a module behind it: the same bits."""
    plain = make(**MODELS[kind])
    want = [run(plain) for run in WAYS.values()]
    for name, member in plain.named_modules():
        if name not in members(plain):
            continue
        changes = [hooked, subclassed, patched]
        takes_one = isinstance(member, (nn.Linear, nn.Embedding, nn.RMSNorm, nn.StreamContraction))
        if takes_one and not (kind == "tied" and name == "model.embed_tokens"):
            changes.append(in_sequence)
        results = []
        for change in changes:
            model = make(**MODELS[kind])
            replace(model, name, change)
            results.append([run(model) for run in WAYS.values()])
        assert all(result == results[0] for result in results), name
        assert results[0][0] != want[0] and results[0][1][0] != want[1][0], name


def test_a_patched_class_counts(monkeypatch) -> None:
    model = make()
    want, seen = trained(model), []
    forward, call = nn.Linear.forward, Module.__call__
    with monkeypatch.context() as context:
        context.setattr(nn.Linear, "forward", lambda self, x: (seen.append(self), forward(self, x))[1])
        assert near(trained(model), want, "untied")
    assert model.lm_head in seen
    seen.clear()
    with monkeypatch.context() as context:
        context.setattr(
            Module, "__call__", lambda self, *args, **options: (seen.append(self), call(self, *args, **options))[1]
        )
        assert near(trained(model), want, "untied")
    assert {model.lm_head, model, model.model.layers[0].self_attn.q_norm} <= set(seen)
    assert trained(model) == want


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_additions_inside_norms_have_the_bits_of_additions(dtype) -> None:
    """add_rms_norm takes all additions but the last one. A hook brings back those around its member, one at a time or all."""

    def ops(model) -> tuple[int, int, int]:
        with record() as recording, xt.no_grad():
            loss_of(model)
        names = [step.name for step in recording.steps]
        return tuple(names.count(name) for name in ("add_rms_norm", "rms_norm", "add"))

    model = make(num_hidden_layers=3).to(xt._C.dtype(dtype))
    want = [run(model) for run in WAYS.values()]
    assert ops(model) == (5, 2, 1)
    layers = model.model.layers
    pairs = [
        (one, n)
        for layer in layers
        for one, n in ((layer, 2), (layer.input_layernorm, 1), (layer.post_attention_layernorm, 1))
    ]
    found = []
    for some in [*([pair] for pair in pairs), pairs]:
        handles = [one.register_forward_hook(lambda *_: None) for one, _ in some]
        found.append(ops(model)[2])
        assert [run(model) for run in WAYS.values()] == want
        for handle in handles:
            handle.remove()
    assert found == [2, 1, 2, 3, 2, 2, 2, 2, 2, 6]


def test_what_add_rms_norm_does_not_take_is_added() -> None:
    """A sublayer of another dtype, one row for all tokens, a norm without a weight or with the eps of its dtype."""

    class Cast(nn.Module):
        def __init__(self, change) -> None:
            self.change = change

        def forward(self, x, *_):
            return self.change(x)

    model = make()
    x, layer = xt.randn(16, 24), model.model.layers[0]
    for change in (lambda h: h.bfloat16(), lambda h: h[:1] * 2.0):
        layer.self_attn = Cast(change)
        between = x + change(layer.input_layernorm(x))
        layer.mlp = Cast(lambda h: h * 0.5)
        assert bits(layer(x, 2, 8)) == bits(between + layer.post_attention_layernorm(between) * 0.5)
        layer.post_attention_layernorm = nn.RMSNorm(24, 1e-6, elementwise_affine=False)
    want = trained(model)
    layer.post_attention_layernorm.eps = None
    assert trained(model) != want


# ---- values ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "norm", ["self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"]
)
def test_the_eps_of_a_norm_is_its_own(norm: str, way: str) -> None:
    run, name = WAYS[way], f"model.layers.1.{norm}"
    plain, edited, replaced = make(), make(), make()
    replace(edited, name, lambda one: (setattr(one, "eps", 30.0), one)[1])

    def other(one):
        new = nn.RMSNorm(one.normalized_shape, 30.0)
        new.weight = one.weight
        return new

    replace(replaced, name, other)
    assert run(edited) == run(replaced) != run(plain)
    replace(edited, name, lambda one: (setattr(one, "eps", None), one)[1])
    run(edited)  # the machine epsilon, as everywhere


@pytest.mark.parametrize("streams", [0, 3])
def test_all_parameters_are_drawn_anew(streams: int) -> None:
    model = make(streams)
    model.model.layers[0].self_attn.q_proj.bias = nn.Parameter(xt.ones(32))
    with xt.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.reset_parameters()
    values = {name: array(parameter) for name, parameter in model.named_parameters()}
    assert [name for name, value in values.items() if not np.isfinite(value).all()] == []
    assert (values["model.layers.0.self_attn.q_proj.bias"] == 0).all() and (values["model.norm.weight"] == 1).all()


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_a_norm_without_weight(norm: str) -> None:
    model = make()
    for layer in model.model.layers:
        setattr(layer.self_attn, norm, nn.RMSNorm(8, 1e-6, elementwise_affine=False))
    for name, run in WAYS.items():
        assert run(model) == run(make()) or name != "forward"  # weights are one at the start; one gradient less
    assert f"model.layers.0.self_attn.{norm}.weight" not in model.state_dict()


@pytest.mark.parametrize("way", WAYS)
def test_the_theta_of_an_attention_is_its_own(way: str) -> None:
    model = make()
    model.model.layers[1].self_attn.theta = 3.0
    other = make(rope_theta=3.0)
    other.model.layers[0].self_attn.theta = 10000.0
    assert WAYS[way](model) == WAYS[way](other) != WAYS[way](make())


def test_an_attention_of_other_heads_has_caches_of_its_own() -> None:
    """The cache is of what the attention appends: other heads, another dtype."""
    model, other = make(), make(num_key_value_heads=4, num_attention_heads=8, dtype="bfloat16")
    model.model.layers[1].self_attn = other.model.layers[1].self_attn.to(xt.float32)
    out = np.array(generated(model))
    current = IDS[:, :3]
    for _ in range(4):
        with xt.no_grad():
            logits = array(model(xt.tensor(current)))[:, -1]
        current = np.concatenate([current, logits.argmax(-1)[:, None]], 1)
    assert np.array_equal(out, current)


# ---- the head -------------------------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """A head of another kind, with more words."""

    def __init__(self, words: int) -> None:
        self.table = nn.Parameter(xt.randn(words, 24))

    def forward(self, x):
        return (x * 0.5) @ self.table.transpose(0, 1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_may_be_any_module(tied: bool) -> None:
    model = make(tied=tied)
    model.lm_head = Scale(70)
    ids, targets = xt.tensor(IDS[:, :-1]), xt.tensor(IDS[:, 1:])
    logits = model(ids)
    assert logits.shape == (2, 7, 70)
    for reduction in ("mean", "sum", "none"):
        loss = model.loss(ids, targets, ignore_index=3, reduction=reduction)
        want = xt.functional.cross_entropy(
            logits.view(14, 70), targets.reshape(-1), ignore_index=3, reduction=reduction
        )
        assert bits(loss) == bits(want)
    trained(model)
    assert model.lm_head.table.grad is not None
    last = model.generate(IDS[:, :3], 1, temperature=0.0).tolist()
    with xt.no_grad():
        assert [row[-1] for row in last] == model(xt.tensor(IDS[:, :3]))[:, -1].argmax(-1).tolist()


def test_the_bias_of_a_head_counts() -> None:
    model = make()
    head = nn.Linear(24, VOCAB)
    head.weight = model.lm_head.weight
    with xt.no_grad():
        head.bias.copy_(xt.randn(VOCAB))
    plain = loss_of(model).item()
    model.lm_head = head
    ids, targets = xt.tensor(IDS[:, :-1]), xt.tensor(IDS[:, 1:])
    want = xt.functional.cross_entropy(model(ids).view(14, VOCAB), targets.reshape(-1))
    loss = loss_of(model)
    assert bits(loss) == bits(want) and abs(loss.item() - plain) > 1e-3
    loss.backward()
    assert head.bias.grad is not None


@pytest.mark.on_cpu
def test_the_fused_loss_is_the_composed_one_bit_for_bit() -> None:
    """With rows of logits that need no padding, both do the same sums in the same order."""
    model = make(vocab=64)
    want = trained(model)
    model.lm_head.register_forward_hook(lambda *_: None)
    assert trained(model) == want


def test_a_model_with_its_own_forward_has_the_loss_of_it() -> None:
    class Capped(Qwen3):
        def forward(self, *args):
            return super().forward(*args).tanh() * 2.0

    class Named(Qwen3):
        name = "of no consequence"

    def ops(model):
        with record(model) as recording:
            loss_of(model).backward()
        return {step.name for step in recording.steps}

    model = make()
    assert "linear_cross_entropy" in ops(model)
    want = trained(model)
    model.__class__ = Named
    assert trained(model) == want and "linear_cross_entropy" in ops(model)
    model.__class__ = Capped
    ids, targets = xt.tensor(IDS[:, :-1]), xt.tensor(IDS[:, 1:])
    assert bits(loss_of(model)) == bits(xt.functional.cross_entropy(model(ids).view(14, VOCAB), targets.reshape(-1)))
    assert "linear_cross_entropy" not in ops(model)


# ---- which path is taken --------------------------------------------------------------------------------------------------------------


def test_a_recording_sees_the_path_that_trains() -> None:
    """Its own wrappers change nothing; a hook does, and so does a forward that was replaced before."""

    def names(model):
        with record(model) as recording:
            loss_of(model).backward()
        return {step.name for step in recording.steps}

    model = make(streams=2)
    model.stream_checkpointing = 4
    assert {"linear_cross_entropy", "_Block"} <= names(model)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert "_Block" not in names(model)
    handle.remove()
    model.lm_head.forward = model.lm_head.forward
    assert "linear_cross_entropy" not in names(model) and "_Block" in names(model)


def test_stock() -> None:
    class Mine(nn.Linear):
        pass

    layer = nn.Linear(3, 3)
    assert is_stock(layer, nn.Linear) and not is_stock(layer, nn.RMSNorm) and not is_stock(None, nn.Linear)
    assert is_stock(Mine(3, 3), Mine) and not is_stock(Mine(3, 3), nn.Linear)
    assert not is_stock(nn.Sequential(layer), nn.Linear)
    handle = layer.register_forward_hook(lambda *_: None)
    assert not is_stock(layer, nn.Linear)
    handle.remove()
    assert is_stock(layer, nn.Linear)
    layer.forward = lambda x: x
    assert not is_stock(layer, nn.Linear)
    del layer.forward
    assert is_stock(layer.eval().requires_grad_(False).to(xt.bfloat16), nn.Linear)
    Mine.forward = lambda self, x: x
    assert not is_stock(Mine(3, 3), Mine)
    with record(layer):
        assert is_stock(layer, nn.Linear)


def test_layers_take_no_op_for_an_argument() -> None:
    for layer, x in ((nn.Linear(3, 3), xt.zeros(2, 3)), (nn.Embedding(4, 3), xt.tensor([1]))):
        with pytest.raises(TypeError, match="positional argument"):
            layer(x, xt.tanh)


def test_a_forward_that_was_replaced_before_a_subclass_was_made_is_called(monkeypatch) -> None:
    forward, calls = Qwen3.forward, []
    monkeypatch.setattr(Qwen3, "forward", lambda self, ids: calls.append(ids) or forward(self, ids))

    class Later(Qwen3):
        pass

    model = Later(make().config)
    model.loss(xt.tensor(IDS), xt.tensor(IDS))
    assert calls
