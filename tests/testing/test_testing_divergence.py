"""first_divergence: planted faults are found by op, place and branch; healthy models are left in peace."""

from __future__ import annotations

import copy

import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C, nn
from xtrain.models import Qwen3, Qwen3Config
from xtrain.testing import first_divergence, record

# ---- the seed's fault: three parallel branches share a factor, and the backward of one of them forgets it ----------------------------


class Mix(xt.Function):
    """h_k = (x / rms(x)) phi_k for three matrices, as the coefficients of hyper-connections are made: dx is a sum of three
    branches, and each of them has the factor 1 / rms."""

    faulty = None  # which branch of dx lacks it

    @staticmethod
    def forward(ctx, x, phi_pre, phi_post, phi_res):
        inv_rms = xt.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, phi_pre, phi_post, phi_res, inv_rms)
        return tuple((x * inv_rms) @ phi for phi in (phi_pre, phi_post, phi_res))

    @staticmethod
    def backward(ctx, *dh):
        x, *phis, inv_rms = ctx.saved_tensors
        dx, dphis = None, []
        for branch, (d, phi) in enumerate(zip(dh, phis, strict=True)):
            scaled = d if branch == Mix.faulty else d * inv_rms
            g = scaled @ phi.T  # gradient of x inside the product; the rest is 1 / rms seen as a function of x
            part = g - x * (inv_rms * inv_rms) * (g * x).mean(dim=-1, keepdim=True)
            dx = part if dx is None else dx + part
            dphis.append((x * inv_rms).T @ d)
        return dx, *dphis


class RightMix(Mix):
    """The same without a fault: the reference."""

    @staticmethod
    def backward(ctx, *dh):
        faulty, Mix.faulty = Mix.faulty, None
        try:
            return Mix.backward(ctx, *dh)
        finally:
            Mix.faulty = faulty


RightMix.__name__ = "Mix"


class Scratch(nn.Module):
    """A small model around the op: layers before and after, so that a wrong dx spoils every gradient that follows."""

    op = Mix

    def __init__(self):
        self.first = nn.Linear(6, 8)
        self.norm = nn.RMSNorm(8)
        self.pre, self.post, self.res = (nn.Parameter(xt.randn(8, n)) for n in (2, 2, 4))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        h = self.op.apply(self.norm(self.first(x)) * 3.0, self.pre, self.post, self.res)
        return self.last(xt.cat(list(h), 1).tanh())


class RightScratch(Scratch):
    op = RightMix


@pytest.fixture
def fault():
    yield lambda branch: setattr(Mix, "faulty", branch)
    Mix.faulty = None


def run(model):
    return (model(X) ** 2).mean()


X = xt.randn(5, 6)


@pytest.mark.parametrize("branch", [0, 1, 2])
@pytest.mark.parametrize("dtype", [xt.float32, xt.bfloat16], ids=lambda d: d.name)
def test_the_seeds_fault_against_a_right_implementation(fault, branch, dtype):
    model = Scratch().to(dtype)
    reference = RightScratch().double()
    reference.load_state_dict(model.state_dict())
    assert first_divergence(lambda m: (m(X.to(m.pre.dtype)) ** 2).mean(), model, reference, finite_differences=False)
    fault(branch)
    found = first_divergence(lambda m: (m(X.to(m.pre.dtype)) ** 2).mean(), model, reference, finite_differences=False)
    assert not found and found.first.name == "Mix" and found.first.phase == "backward"
    assert [c.what for c in found.wrong] == [f"gradient of x through output {branch}"]
    text = str(found)
    assert text.startswith(f"first divergence: backward of Mix: gradient of x through output {branch}\n  wrong: ")
    for other in {0, 1, 2} - {branch}:
        assert f"right: gradient of x through output {other}" in text
    assert "right: gradient of phi_res through output 2" in text
    # The layer below is right by itself although the gradients that reach it are far off.
    below = [c for c in found.comparisons if c.phase == "backward" and c.where == "norm"]
    assert below and all(c.ok for c in below)
    assert max(c.difference for c in below) > 0.05
    assert "WRONG backward of Mix" in found.table()


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_the_seeds_fault_without_a_right_implementation(fault, branch):
    """The float64 copy of the model has the same fault: finite differences of the op's own forward show it."""
    model = Scratch()
    assert first_divergence(run_in_own_dtype, model)
    fault(branch)
    found = first_divergence(run_in_own_dtype, model)
    assert (found.first.phase, found.first.name) == ("formula", "Mix")
    assert [c.what for c in found.wrong] == [f"gradient of x through output {branch}"]
    assert "finite differences of its forward" in str(found)


def run_in_own_dtype(model):
    return (model(X.to(model.pre.dtype)) ** 2).mean()


# ---- other faults -------------------------------------------------------------------------------------------------------------------------


class Gate(xt.Function):
    """A forward that is wrong in low precision only: it sums in its own dtype."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        total = x[:, 0]
        for i in range(1, x.shape[1]):
            total = total + x[:, i]
        return total

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy.unsqueeze(1).expand(x.shape)


def test_a_wrong_forward_is_named_where_it_happens():
    class Layer(nn.Module):
        scale = 1.0

        def __init__(self):
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return F.softmax(self.linear(x) * self.scale, -1)

    class Model(nn.Module):
        def __init__(self):
            self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) + x
            return x

    model = Model()
    reference = copy.deepcopy(model)
    reference.layers[1].scale = 1.5
    found = first_divergence(lambda m: (m(X) ** 2).sum(), model, reference)
    assert (found.first.phase, found.first.name, found.first.where) == ("forward", "mul", "layers.1")
    forward = [c for c in found.comparisons if c.phase == "forward"]
    assert [c.difference for c in forward if c.where == "layers.0"] == [0, 0]
    after = forward[forward.index(found.first) + 1 :]
    assert len(after) >= 6 and all(c.ok and c.difference > 1e-3 for c in after)  # spoiled, and right by themselves


def test_parameters_are_compared_first():
    model = Scratch()
    reference = copy.deepcopy(model)
    with xt.no_grad():
        reference.norm.weight[3] = 5.0
    found = first_divergence(run, model, reference)
    assert (found.first.phase, found.first.name) == ("parameter", "norm.weight")


def test_sums_in_low_precision_are_not_hidden(fault):
    """A chain of 400 bfloat16 additions is far outside one op's tolerance... as an xt.Function it counts as 400 ops."""
    x = xt.rand(3, 400).to(xt.bfloat16)
    with record() as recording:
        Gate.apply(x)
    (step,) = recording.steps
    assert step.kind == "function" and step.inside >= 399 and step.labels == ["x"]


# ---- healthy models ---------------------------------------------------------------------------------------------------------------------

CONFIG = Qwen3Config(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40)  # fmt: skip


@pytest.mark.parametrize("dtype", [xt.float32, xt.bfloat16, xt.float16], ids=lambda d: d.name)
def test_qwen3_against_its_float64_copy(dtype, no_leaks):
    model = Qwen3(CONFIG, dtype=dtype)
    ids, targets = xt.randint(0, 50, (2, 7)), xt.randint(0, 50, (2, 7))
    found = first_divergence(lambda m: m.loss(ids, targets), model)
    assert found, str(found)
    assert found.unmatched == 0
    names = {c.name for c in found.comparisons if c.phase == "backward" and c.own >= 0}
    assert {
        "embedding",
        "rms_norm",
        "linear",
        "qk_norm_rope",
        "scaled_dot_product_attention",
        "swiglu_mlp",
        "linear_cross_entropy",
        "add_rms_norm",
        "add",
    } <= names
    assert names <= {c.name for c in found.comparisons if c.phase == "formula"} | {"reshape", "view", "transpose"}
    assert all(p.grad is None for p in model.parameters())
    assert "results are within tolerance in isolation" in str(found)


def test_a_recording_has_every_layer():
    model, ids = Qwen3(CONFIG), xt.randint(0, 50, (2, 7))
    with record(model) as recording:
        model.loss(ids, ids)
    places = [s.where for s in recording.steps if s.kind == "module"]
    assert [place for place in places if place.startswith("model.layers.") and place.count(".") == 2] == [
        "model.layers.0",
        "model.layers.1",
    ]


def test_recomputed_layers_are_one_step(no_leaks):
    """A checkpointed layer is an xt.Function; its parameters keep their .grad."""
    model = Qwen3(CONFIG)
    model.gradient_checkpointing = True
    ids = xt.randint(0, 50, (2, 7))
    before = xt.ones(24)
    model.model.norm.weight.grad = before
    found = first_divergence(lambda m: m.loss(ids, ids), model)
    assert found, str(found)
    assert "_Checkpoint" in {c.name for c in found.comparisons if c.phase == "backward" and c.own >= 0}
    assert model.model.norm.weight.grad.tolist() == before.tolist()
    assert model.model.layers[0].mlp.up_proj.weight.grad is None


def test_nan_is_found_where_it_begins():
    class Net(nn.Module):
        def __init__(self):
            self.linear, self.low = nn.Linear(6, 4), -1.0

        def forward(self, x):
            y = self.linear(x)
            return xt.log(xt.exp(y * self.low) * 1.0).tanh() + 1.0

    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    model.low = -1000.0
    found = first_divergence(lambda m: m(X).sum(), model, reference)
    assert (found.first.phase, found.first.name) == ("forward", "mul")
    model.low, reference.low = 1e6, 1e6  # both overflow: nobody is to blame
    assert not any(
        c.own > 1 for c in first_divergence(lambda m: m(X).sum(), model, reference).comparisons if c.phase == "forward"
    )


def test_the_same_model_on_another_backend():
    model = Qwen3(CONFIG)
    ids = xt.randint(0, 50, (1, 6))
    found = first_divergence(
        lambda m: m(ids).sum(), model, model, reference_context=lambda: xt.use_gemm_backend("naive")
    )
    assert found, str(found)
    assert found.comparisons[0].phase == "forward"


def test_modules_are_compared_where_their_insides_differ():
    """A fused op against its composition: what pairs is the module of the same name."""

    class Fused(nn.Module):
        wrong = 1.0

        def forward(self, gate, up):
            return F.swiglu(gate, up) * self.wrong

    class Composed(nn.Module):
        def forward(self, gate, up):
            return gate * xt.sigmoid(gate) * up

    class Net(nn.Module):
        def __init__(self, act):
            self.gate, self.up, self.act = nn.Linear(6, 4), nn.Linear(6, 4), act

        def forward(self, x):
            return self.act(self.gate(x), self.up(x))

    model, reference = Net(Fused()), Net(Composed())
    reference.load_state_dict(model.state_dict())
    found = first_divergence(lambda m: m(X).sum(), model, reference)
    assert found and found.unmatched > 0
    assert {c.where for c in found.comparisons if c.own >= 0} >= {"gate", "up", "act"}
    model.act.wrong = 1.1
    found = first_divergence(lambda m: m(X).sum(), model, reference)
    assert (found.first.phase, found.first.where) == ("forward", "act")


def test_random_ops_draw_the_same_numbers():
    class Net(nn.Module):
        def __init__(self):
            self.linear, self.drop = nn.Linear(6, 4), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.linear(x.to(self.linear.weight.dtype)))

    assert first_divergence(lambda m: m(X).sum(), Net())


# ---- the recording ------------------------------------------------------------------------------------------------------------------------


def test_recording_sees_operators_indexing_and_methods():
    x = xt.randn(3, 4).requires_grad_()
    with record() as recording:
        y = (2 * x - 1)[1:, ::2].T.to(xt.float64).reshape(-1) @ xt.ones(4, dtype=xt.float64)
        y.backward()
    names = [s.name for s in recording.steps]
    assert names == ["mul", "sub", "slice", "slice", "transpose", "cast", "reshape", "full", "matmul"]
    for step in recording.steps:
        again = step.run(step.inputs)
        assert [a.tolist() for a in again] == [o.tolist() for o in step.outputs], step.name
        if step.name != "full":
            assert step.gradients[0].shape == step.outputs[0].shape
    assert x.grad.tolist() == [[0, 0, 0, 0], [2, 0, 2, 0], [2, 0, 2, 0]]
    product = recording.steps[-1].differentiate(recording.steps[-1].inputs, 0, xt.tensor(1.0, dtype=xt.float64))
    assert [label for label, _ in product] == ["input", "other"]


def test_recording_ends_where_the_backward_begins():
    model = Scratch()
    with record(model) as recording:
        loss = run(model)
        count = len(recording.steps)
        loss.backward()
    assert [s.name for s in recording.steps if s.kind == "op"] == [
        "linear",
        "rms_norm",
        "mul",
        "cat",
        "tanh",
        "linear",
        "pow",
        "mean",
    ]
    assert [s.where for s in recording.steps if s.kind == "module"] == ["first", "norm", "last", ""]
    assert len(recording.steps) == count
    assert all(g is not None for s in recording.steps for g in s.gradients)


def test_runs_start_from_the_seed_and_leave_the_generator_alone():
    drawn = []

    def noisy(model):
        drawn.append(xt.rand(1).item())
        return model(X.to(model.weight.dtype))

    for seed in (0, 0, 5):
        xt.manual_seed(len(drawn) + 77)
        state = _C.get_rng_state()
        first_divergence(noisy, nn.Linear(6, 2), seed=seed)
        assert _C.get_rng_state()[0] == state[0]
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3] != drawn[4] == drawn[5]


def test_recording_leaves_nothing_behind(no_leaks):
    model = Scratch()
    before = [dict(m.__dict__) for m in model.modules()]
    with pytest.raises(RuntimeError, match="stop"), record(model):
        run(model)
        raise RuntimeError("stop")
    assert [dict(m.__dict__) for m in model.modules()] == before
    assert "apply" in xt.Function.__dict__ and _C.set_call_hook(None) is None
    seen = []
    assert _C.set_call_hook(lambda op, arguments, outputs: seen.append((op.__name__, sorted(arguments)))) is None
    xt.ones(2) + 1
    assert callable(_C.set_call_hook(None))
    xt.ones(2) + 1
    assert seen == [("full", ["device", "dtype", "shape", "value"]), ("add", ["input", "other"])]
    _C.set_call_hook(lambda op, arguments, outputs: seen.append(outputs[0] * 2))  # its own calls are not shown to it
    xt.ones(2)
    _C.set_call_hook(None)
    assert [t.tolist() for t in seen[2:]] == [[2, 2]]
    with pytest.raises(TypeError, match="set_call_hook: argument 'hook' must be a callable or None, got int"):
        _C.set_call_hook(3)


def test_a_hook_may_raise(no_leaks):
    def hook(op, arguments, outputs):
        raise KeyError("from the hook")

    x = xt.ones(3)
    _C.set_call_hook(hook)
    try:
        for call in (lambda: x + 1, lambda: xt.exp(x), lambda: x[0], lambda: x.split(1)):
            with pytest.raises(KeyError, match="from the hook"):
                call()
    finally:
        _C.set_call_hook(None)
    assert (x + 1).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: first_divergence(run, "model"), ValueError, "reference must be given unless model is an nn.Module"),
        (lambda: first_divergence(lambda f: f(X), xt.exp, xt.sin), ValueError, "must have calls in common"),
        (
            lambda: first_divergence(lambda m: m(X), nn.Linear(6, 2), "x"),
            TypeError,
            "^first_divergence: reference must be an nn.Module, a torch.nn.Module or a function, got str$",
        ),
    ],
)
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_op_is_blamed_for_numbers_that_are_not_finite_in_its_input(bad):
    """NaN and infinity in the data reach every op of both runs; none of them is wrong by itself."""
    model = nn.Linear(4, 3)
    x = xt.ones(2, 4) * bad
    assert first_divergence(lambda m: xt.log(m(x.to(m.weight.dtype))).sum(), model).ok


# ---- NaN and wrong runs ---------------------------------------------------------------------------------------------------------------


class Logarithm(nn.Module):
    """The logarithm of a layer's output, which is NaN where that is negative."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return F.silu(self.layer(x).log())


def test_where_nan_first_appears():
    model = Logarithm()
    with xt.no_grad():
        model.layer.weight.fill_(1.0)
    assert first_divergence(lambda m: m(xt.ones(2, 3, dtype=m.layer.weight.dtype)), model).nan == []
    with xt.no_grad():
        model.layer.weight.fill_(-1.0)
    found = first_divergence(lambda m: m(xt.ones(2, 3, dtype=m.layer.weight.dtype)), model)
    assert found.nan == ["NaN first appears, in both runs, in the output of log"]
    assert str(found).endswith(found.nan[0])
    with xt.no_grad():
        model.layer.weight[0, 0] = float("nan")
    found = first_divergence(lambda m: m(xt.ones(2, 3, dtype=m.layer.weight.dtype)), model)
    assert found.nan == ["NaN first appears, in both runs, in parameter layer.weight"]


class _Silent(xt.Function):
    """Forward as it should be, and NaN as a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * float("nan")


def test_nan_of_one_run_or_of_a_backward():
    class Square(nn.Module):
        def __init__(self, spoil):
            super().__init__()
            self.weight = nn.Parameter(xt.ones(3))
            self.spoil = spoil

        def forward(self, x):
            y = x * self.weight
            y = _Silent.apply(y) if self.spoil == "backward" else y
            return y / (y - y) * 0 if self.spoil == "forward" else y * y

    x = xt.ones(3)
    found = first_divergence(lambda m: m(x), Square("forward"), Square(None))
    assert found.nan == ["NaN first appears in the model's run in the output of mul"]
    found = first_divergence(lambda m: m(x), Square("backward"), Square(None))
    assert found.nan == ["NaN first appears in the model's run in the gradient that arrives at the output of mul"]
    assert not found


def test_wrong_runs_are_one_sentence():
    model = nn.Linear(3, 2)
    for run, text in (
        (None, "first_divergence: run must be callable, got NoneType"),
        (3.0, "first_divergence: run must be callable, got float"),
        (lambda m: 1.0, "first_divergence: run must return a Tensor or None, got float"),
        (lambda m: m(xt.ones(1, 3)).numpy, "first_divergence: run must return a Tensor or None, got "),
        (
            lambda m: (m(xt.ones(1, 3, dtype=m.weight.dtype)),),
            "first_divergence: run must return a Tensor or None, got tuple",
        ),
    ):
        with pytest.raises(TypeError, match="^" + text):
            first_divergence(run, model)
    with pytest.raises(TypeError, match="reference_run must be callable, got int"):
        first_divergence(lambda m: None, model, model, reference_run=1)
    with pytest.raises(TypeError, match="reference_run must return a Tensor or None, got str"):
        first_divergence(lambda m: m(xt.ones(1, 3)).sum(), model, model, reference_run=lambda m: "x")
    with pytest.raises(TypeError, match="reference_context must be a context manager, got int"):
        first_divergence(lambda m: None, model, model, reference_context=3)
    assert model.weight.grad is None


def test_nothing_to_compare_is_an_error() -> None:
    x = xt.randn(2, 4)
    with pytest.raises(ValueError, match="first_divergence: reference must have results that can be compared"):
        first_divergence(lambda model: model(x).sum(), nn.Linear(4, 4), nn.Linear(4, 5))


@pytest.mark.parametrize("finite_differences", [True, False])
def test_inputs_without_an_element_are_an_error(finite_differences) -> None:
    class Net(nn.Module):
        def __init__(self):
            self.linear, self.norm = nn.Linear(4, 3), nn.RMSNorm(3, eps=1e-6)

        def forward(self, x):
            return self.norm(self.linear(x.to(self.linear.weight.dtype)))

    x, ids = xt.randn(2, 4), xt.randint(0, 50, (2, 5))
    net, language = Net(), Qwen3(CONFIG)
    runs = [
        (lambda m: m(x[:0]), net),
        (lambda m: m(x[:0]).sum() * 3.0, net),  # one element, made of none
        (lambda m: m(x[:0]).mean(), net),
        (lambda m: m.loss(ids[:0], ids[:0], reduction="sum"), language),
    ]
    for run, model in runs:
        with pytest.raises(ValueError, match="^first_divergence: run must compute with at least one element"):
            first_divergence(run, model, finite_differences=finite_differences)
    assert first_divergence(lambda m: m(xt.cat([x[:0], x])), net, finite_differences=finite_differences)
    assert net.linear.weight.grad is None


def test_a_reference_of_another_dtype_says_what_to_convert() -> None:
    x, model = xt.ones(2, 3), nn.Linear(3, 2)
    for arguments in ((model,), (model, nn.Linear(3, 2).to(xt.float64))):
        with pytest.raises(
            TypeError, match="^first_divergence: run must give the reference inputs of its own"
        ) as error:
            first_divergence(lambda m: m(x).sum(), *arguments)
        assert "float64, and not the model's float32: convert them inside run" in str(error.value)
        assert "weight must have the dtype of input" in str(error.value), "the op's own sentence"
    assert first_divergence(lambda m: m(x.to(next(m.parameters()).dtype)).sum(), model), "the advice works"
    with pytest.raises(TypeError, match="^linear: weight must have the dtype of input"):  # not about the reference
        first_divergence(lambda m: m(x.to(xt.float64)).sum(), model, model)
