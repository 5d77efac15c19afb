"""xt.recompute: outputs of norms, RoPE and SwiGLU that backward computes again, and the policies of a model."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C, models
from xtrain.models.policies import run_layers
from xtrain.models.registry import RECOMPUTE
from xtrain.optable.table import array, bits

pytestmark = pytest.mark.usefixtures("steady_memory")
N, D = 6, 64  # rows and columns: storages of 1.5 KiB, which are not rounded


def leaf(*shape: int, seed: int = 0, dtype: str = "float32"):
    values = np.random.default_rng(seed).standard_normal(shape)
    return xt.tensor(values, dtype=getattr(xt, dtype)).requires_grad_()


def held() -> int:
    return _C.memory_stats(_C.get_default_device())["allocated"]


def swiglu_of_joined(x):
    return F.swiglu(xt.cat([x, x * 2.0], -1))


# op of x [N, D] -> [N, D], with all that it needs
OPS = {
    "rms_norm": lambda x: F.rms_norm(x, (D,), leaf(D, seed=1), 1e-6),
    "rms_norm without a weight": lambda x: F.rms_norm(x, (D,), None, 1e-6),
    "add_rms_norm": lambda x: _C.add_rms_norm(x, x * 0.5, leaf(D, seed=1), 1e-6)[1],
    "add_layer_norm": lambda x: _C.add_layer_norm(x, x * 0.5, leaf(D, seed=1), leaf(D, seed=2), 1e-5)[1],
    "layer_norm": lambda x: F.layer_norm(x, (D,), leaf(D, seed=1), leaf(D, seed=2)),
    "layer_norm without a weight": lambda x: F.layer_norm(x, (D,), None, leaf(D, seed=2)),
    "swiglu": lambda x: F.swiglu(x * 1.0, x * 2.0),
    "swiglu of one tensor": swiglu_of_joined,
    "rope": lambda x: _C.rope((x * 1.0).view(N, 4, D // 4)).view(N, D),
    "rope at positions": lambda x: _C.rope((x * 1.0).view(N, 4, D // 4), 1e4, xt.arange(N) * 3).view(N, D),
    "queries": lambda x: _C.qk_norm_rope(*(x.view(N, 4, D // 4),) * 2, *(leaf(D // 4, seed=s) for s in (1, 2)))[0].view(N, D),
    "keys": lambda x: _C.qk_norm_rope(*(x.view(N, 4, D // 4),) * 2, *(leaf(D // 4, seed=s) for s in (1, 2)))[1].view(N, D),
}  # fmt: skip


def gradients(op, mode: bool, dtype: str, passes: int = 1):
    """Of op(x) w^T, which reads the output again in its backward; and what was kept beside x and w."""
    x, w = leaf(N, D, dtype=dtype), leaf(D, D, seed=3, dtype=dtype)
    before = held()
    h = op(x) if not mode else xt.recompute()(op)(x)
    y = F.linear(h, w)
    del h
    kept = held() - before
    for i in range(passes):
        (y * y).sum().backward(retain_graph=i < passes - 1)
    return [bits(y), bits(x.grad), bits(w.grad)], kept


@pytest.mark.parametrize("name", OPS)
def test_the_output_is_computed_again_with_the_same_bits(name: str) -> None:
    for passes in (1, 2):
        (want, whole), (got, less) = (gradients(OPS[name], mode, "float32", passes) for mode in (False, True))
        assert got == want
        # rope alone keeps its input for that, which nobody else does here
        assert whole - less == (0 if name.startswith("rope") else N * D * 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_have_the_same_bits(dtype: str) -> None:
    for op in (lambda x: F.rms_norm(x, (D,), None, 1e-6), swiglu_of_joined):
        assert gradients(op, True, dtype)[0] == gradients(op, False, dtype)[0]


def test_views_of_the_output() -> None:
    """Rows that begin in the middle, transposed."""
    found = []
    for mode in (False, True):
        x, w = leaf(N, D), leaf(N - 2, 3, seed=1)
        before = held()
        h = (xt.recompute()(F.rms_norm) if mode else F.rms_norm)(x, (D,), None, 1e-6)
        y = h[2:].transpose(0, 1) @ w
        del h
        found.append(held() - before)
        (y * y).sum().backward()
        found.append([bits(y), bits(x.grad), bits(w.grad)])
        del x, w, y
    assert found[1] == found[3] and found[0] - found[2] == N * D * 4


def test_one_run_serves_all_who_ask() -> None:
    """Three products of one norm: memory is asked for its output and rstd once more than without."""
    asked = []
    for mode in (False, True):
        x, weights = leaf(N, D), [leaf(D, D, seed=s) for s in range(3)]
        h = (xt.recompute()(F.rms_norm) if mode else F.rms_norm)(x, (D,), None, 1e-6)
        y = sum(F.linear(h, w) for w in weights)
        del h
        _C.fail_storages(1 << 40, 1 << 41)
        y.sum().backward()
        asked.append(_C.fail_storages(0, -1))
    assert asked[1] - asked[0] == 2


def test_it_is_kept_until_its_own_rule_runs() -> None:
    """And no longer: a hook of the norm's input sees what is still there."""
    seen = []
    for mode in (False, True):
        x, w = leaf(N, D), leaf(D, D, seed=1)
        z = x * 1.0
        y = F.linear((xt.recompute()(F.rms_norm) if mode else F.rms_norm)(z, (D,), None, 1e-6), w)
        z.register_hook(lambda g: seen.append(held()) or None)
        y.sum().backward()
        del x, w, y, z
    assert seen[0] == seen[1]


def test_ops_that_follow_each_other() -> None:
    """RoPE of a norm needs the norm first. However long the chain, the recursion has an end."""
    for length in (2, 3, 40):
        found = []
        for mode in (False, True):
            x, w = leaf(N, D), leaf(D, D, seed=1)
            h = x
            with xt.recompute() if mode else xt.enable_grad():
                for i in range(length):
                    h = F.rms_norm(h, (D,), None, 1e-6) if i % 2 == 0 else _C.rope(h.view(N, 4, D // 4)).view(N, D)
            y = F.linear(h, w)
            (y * y).sum().backward()
            found.append([bits(y), bits(x.grad), bits(w.grad)])
        assert found[0] == found[1]


def test_an_input_changed_in_place_is_an_error() -> None:
    x, w = leaf(N, D), leaf(D, D, seed=1)
    z = x * 1.0
    with xt.recompute():
        y = F.linear(F.rms_norm(z, (D,), None, 1e-6), w)
    with xt.no_grad():
        z.mul_(2)
    with pytest.raises(RuntimeError, match=r"saved by 'rms_norm' was changed in place \(version 0, now 1\)"):
        y.sum().backward()


def test_an_output_that_was_changed_in_place_is_kept() -> None:
    x, w = leaf(N, D), leaf(D, D, seed=1)
    with xt.recompute():
        h = F.rms_norm(x, (D,), None, 1e-6)
    with xt.no_grad():
        h.mul_(2)
    want = xt.ones(N, D).T @ h.detach()
    F.linear(h, w).sum().backward()
    assert np.allclose(array(w.grad), array(want), rtol=1e-5)


def test_a_detached_output_is_kept() -> None:
    """The graph of the norm may be freed before."""
    x, w = leaf(N, D), leaf(D, D, seed=1)
    with xt.recompute():
        h = F.rms_norm(x, (D,), None, 1e-6)
    y = F.linear(h.detach(), w)
    h.sum().backward()
    y.sum().backward()
    assert np.allclose(array(w.grad), array(xt.ones(N, D).T @ h.detach()), rtol=1e-5)


def test_a_freed_graph_says_so() -> None:
    x, w = leaf(N, D), leaf(D, D, seed=1)
    with xt.recompute():
        h = F.rms_norm(x, (D,), None, 1e-6)
    y = F.linear(h, w)
    h.sum().backward()
    with pytest.raises(RuntimeError, match="the graph of 'rms_norm' was freed by an earlier backward"):
        y.sum().backward()


def test_without_memory_the_backward_can_be_tried_again() -> None:
    want = gradients(OPS["rms_norm"], False, "float32")[0]
    x, w = leaf(N, D), leaf(D, D, seed=3)
    with xt.recompute():
        y = F.linear(OPS["rms_norm"](x), w)
    z = (y * y).sum()
    failed = 0
    for first in range(40):
        x.grad = w.grad = None
        _C.fail_storages(first, first)
        try:
            z.backward(retain_graph=True)
        except xt.OutOfMemoryError:
            failed += 1
        else:
            break
        finally:
            _C.fail_storages(0, -1)
    assert failed > 5 and [bits(y), bits(x.grad), bits(w.grad)] == want


def test_without_memory_a_backward_of_its_own_can_be_tried_again() -> None:
    """One that frees its graph: what it has used until the error is there again."""
    w = leaf(D, D, seed=3)
    with xt.recompute():
        y = F.linear(OPS["rms_norm"](leaf(N, D)), w)
    _C.fail_storages(1, 1)  # behind the gradient of y
    with pytest.raises(xt.OutOfMemoryError):
        y.backward(xt.ones_like(y))
    assert _C.fail_storages(0, -1) == 2
    w.grad = None
    y.backward(xt.ones_like(y))
    want = F.linear(OPS["rms_norm"](leaf(N, D)), v := leaf(D, D, seed=3))
    want.backward(xt.ones_like(y))
    assert bits(w.grad) == bits(v.grad)


def test_a_long_chain_in_a_thread_with_a_small_stack() -> None:
    x, w = leaf(N, D), leaf(D, D, seed=1)
    h = x
    with xt.recompute():
        for _ in range(4000):
            h = F.rms_norm(h, (D,), None, 1e-6)
        y = F.linear(h, w).sum()
    before = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert x.grad is not None and w.grad is not None


def test_the_mode_belongs_to_the_thread_and_ends_with_the_block() -> None:
    seen = []
    with xt.recompute():
        thread = threading.Thread(target=lambda: seen.append(_C.set_recompute(False)))
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="stop"), xt.recompute():
            raise ValueError("stop")
        seen.append(_C.set_recompute(True))
    seen.append(_C.set_recompute(False))
    assert seen == [False, True, False]


def test_threads_walk_one_graph() -> None:
    x, w = leaf(N, D), leaf(D, D, seed=1)
    with xt.recompute():
        y = F.linear(F.rms_norm(x, (D,), None, 1e-6), w).sum()
    y.backward(retain_graph=True)
    want, rounds = array(x.grad).copy(), 50
    x.grad = None
    threads = [
        threading.Thread(target=lambda: [y.backward(retain_graph=True) for _ in range(rounds)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.allclose(array(x.grad), 3 * rounds * want, rtol=1e-4, atol=1e-4)


# ---- the policies of a model


def model(policy: str, dtype: str = "float32", layers: int = 5, streams: int = 0):
    xt.manual_seed(0)
    config = models.Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True, mhc_streams=streams,
    )  # fmt: skip
    made = models.Qwen3(config, dtype=getattr(xt, dtype))
    made.recompute = policy
    return made


def step(policy: str, **options):
    made, rng = model(policy, **options), np.random.default_rng(0)
    ids, targets = (xt.tensor(rng.integers(0, 256, (2, 64))) for _ in range(2))
    before = held()
    for _ in range(2):  # the second adds to gradients
        loss = made.loss(ids, targets)
        kept = held() - before
        loss.backward()
    return [bits(loss), *(bits(p.grad) for p in made.parameters())], kept


@pytest.mark.parametrize("streams", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policies_have_the_same_bits(dtype: str, streams: int) -> None:
    found = {policy: step(policy, dtype=dtype, streams=streams) for policy in RECOMPUTE}
    assert all(result == found["none"][0] for result, _ in found.values())
    kept = [kept for _, kept in found.values()]
    assert kept == sorted(set(kept), reverse=True)


@pytest.mark.parametrize("layers", [0, 1, 2, 9])
def test_any_number_of_layers(layers: int) -> None:
    want = step("none", layers=layers)[0]
    assert step("cheap", layers=layers)[0] == step("full", layers=layers)[0] == want


def test_what_cheap_does_not_keep() -> None:
    """Outputs of norms, queries and keys after RoPE, h = SwiGLU; in bytes."""
    tokens, layers, norms, rotated, h = 2 * 64, 5, 2 * 64, 4 * 32 + 2 * 32, 192
    less = step("none")[1] - step("cheap")[1]
    assert less == tokens * 4 * (layers * (norms + rotated + h) + 64)


def test_layers_that_are_called_have_the_same_bits() -> None:
    """A hook: the products are not joined and norms not fused."""
    found = []
    for policy in ("none", "cheap", "full"):
        made, rng = model(policy, layers=2), np.random.default_rng(0)
        for name, part in made.named_modules():
            if name.endswith(("q_norm", "q_proj", "gate_proj", "post_attention_layernorm")):
                part.register_forward_hook(lambda *_: None)
        ids, targets = (xt.tensor(rng.integers(0, 256, (2, 64))) for _ in range(2))
        made.loss(ids, targets).backward()
        found.append([bits(p.grad) for p in made.parameters()])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral"])
def test_families_without_norms_of_heads(family: str) -> None:
    """RoPE reads columns of one product, which v keeps anyway; Qwen2's has biases."""
    found = {}
    for policy in RECOMPUTE:
        xt.manual_seed(0)
        config = getattr(models, f"{family}Config")(
            vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        made, rng = getattr(models, family)(config), np.random.default_rng(0)
        made.recompute = policy
        ids, targets = (xt.tensor(rng.integers(0, 256, (2, 64))) for _ in range(2))
        before = held()
        loss = made.loss(ids, targets)
        kept = held() - before
        loss.backward()
        found[policy] = [bits(loss), *(bits(p.grad) for p in made.parameters())], kept
        del loss, made
    assert all(result == found["none"][0] for result, _ in found.values())
    norms, rotated, h = 2 * 64, 4 * 16 + 2 * 16, 192
    less = found["none"][1] - found["cheap"][1]
    assert less == 2 * 64 * 4 * (3 * (norms + rotated + h) + 64)


def test_evaluation_recomputes_nothing() -> None:
    made = model("cheap", layers=1)
    made.eval()
    h = made.model(xt.zeros((1, 4), dtype=xt.int64))
    w = leaf(8, 64)
    before = held()
    y = F.linear(h, w)
    del h
    assert held() - before == 4 * 8 * 4 and y.requires_grad  # h is kept


def test_wrong_policies() -> None:
    made = model("none", layers=1, streams=2)
    with pytest.raises(ValueError, match="Qwen3: recompute must be one of none, cheap, block, full, got 'some'"):
        made.recompute = "some"
    made.stream_checkpointing = 1
    with pytest.raises(
        ValueError, match="Qwen3: recompute must be none or cheap while stream_checkpointing is 1, got 'full'"
    ):
        made.recompute = "full"
    made.recompute = "cheap"
    made.stream_checkpointing = 0
    made.recompute = "full"
    assert made.gradient_checkpointing and made.recompute == "full"
    made.gradient_checkpointing = True
    assert made.recompute == "full"
    made.gradient_checkpointing = False
    assert made.recompute == "none"


def test_streams_and_cheap() -> None:
    want = step("none", streams=2)[0]
    made, rng = model("cheap", streams=2), np.random.default_rng(0)
    made.stream_checkpointing = 3
    ids, targets = (xt.tensor(rng.integers(0, 256, (2, 64))) for _ in range(2))
    for _ in range(2):
        loss = made.loss(ids, targets)
        loss.backward()
    assert [bits(loss), *(bits(p.grad) for p in made.parameters())] == want


@pytest.mark.parametrize(("count", "inputs", "calls"), [(3, 3, 2), (9, 3, 3), (16, 4, 3)])
def test_groups_of_layers(count: int, inputs: int, calls: int) -> None:
    """Under "full": of many layers the inputs of about the root are kept, and each runs twice more; of few all inputs, once more."""
    called = [0] * count

    def layer(number: int):
        def run(x: xt.Tensor) -> xt.Tensor:
            called[number] += 1
            return x.sin()

        return run

    x = xt.ones(1 << 12, requires_grad=True)
    layers = [layer(number) for number in range(count)]
    before = held()
    y = run_layers(layers, "full", x)
    assert held() - before == inputs * x.nbytes, "x itself was there, and y is new"
    y.sum().backward()
    assert called == [calls] * count
    z = x.detach().requires_grad_()
    run_layers(layers, "none", z).sum().backward()
    assert (x.grad == z.grad).all()
