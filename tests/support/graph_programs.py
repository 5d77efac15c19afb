"""Programs that capture steps on "cuda" and check what they say of themselves: test_graph.py runs them, each in a process of its own, on a
GPU and on the device of fake_device.c.
"""

from __future__ import annotations

import gc
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np

import xtrain as xt
from xtrain import optim
from xtrain.models.registry import architecture

VOCAB, BATCH, LENGTH = 61, 4, 16
OFF_PLAN = (
    "RuntimeError: .*cuda.graph: the captured step must not need more memory than its planned run, which had .* MiB"
)


def said(action: Callable[[], object]) -> str:
    """The type and the text of the exception of an action."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it raised nothing")


def check_said(action: Callable[[], object], pattern: str) -> None:
    text = said(action)
    assert re.search(pattern, text) and "\n" not in text, text


def same(a: list, b: list) -> bool:
    """Bit for bit; lists of tensors or of numbers."""
    values = [
        [x.detach().float().cpu().numpy() if isinstance(x, xt.Tensor) else np.array(x) for x in side] for side in (a, b)
    ]
    return len(a) == len(b) and all(np.array_equal(x, y, equal_nan=True) for x, y in zip(*values, strict=True))


SMALL = dict(
    model_type="qwen3", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, tie_word_embeddings=False, max_position_embeddings=LENGTH,
)  # fmt: skip
SMALL_GPT2 = dict(model_type="gpt2", vocab_size=VOCAB, n_embd=32, n_inner=48, n_layer=2, n_head=4, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip
SMALL_GEMMA2 = SMALL | dict(model_type="gemma2", tie_word_embeddings=True, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)  # fmt: skip
# Where kernels of other sizes run; 5003 columns are cut into two products.
LARGE = SMALL | dict(vocab_size=5003, hidden_size=256, intermediate_size=704, num_hidden_layers=4, head_dim=64)


class Team:
    """A model with an optimizer, and its step."""

    def __init__(
        self,
        dtype: str = "float32",
        streams: int = 0,
        pieces: int = 1,
        guarded: bool = False,
        shape: dict | None = None,
    ) -> None:
        xt.manual_seed(1)
        found, shape = architecture((shape or SMALL)["model_type"]), shape or SMALL
        self.model = found.model(found.config(**shape, **({"mhc_streams": streams} if streams else {})))
        self.model.to("cuda")
        if dtype == "bfloat16":
            self.model.bfloat16()
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-2)
        self.pieces = pieces
        self.guard = xt.zeros((), device="cuda") if guarded else None
        self.calls = 0

    def step(self, ids, targets) -> dict:
        self.calls += 1
        self.optimizer.zero_grad()
        losses = []
        for piece in range(self.pieces):
            rows = slice(piece * BATCH // self.pieces, (piece + 1) * BATCH // self.pieces)
            loss = self.model.loss(ids[rows], targets[rows]) * (1 / self.pieces)
            loss.backward()
            losses.append(loss.detach())
        norm = optim.clip_grad_norm_(self.model.parameters(), 1.0)
        loss = sum(losses[1:], losses[0])
        if self.guard is not None:
            self.guard.mul_(loss).mul_(norm)
        self.optimizer.step(guard=self.guard)
        return {"loss": loss, "norm": norm}

    def graph(self, **options):
        return xt.cuda.graph(self.step, optimizers=[self.optimizer], **options)

    def run(
        self, step, count: int, first: int = 0, lr: Callable[[int], float] = lambda i: 1e-2 / (i // 3 + 1)
    ) -> list[float]:
        """`count` steps, whose learning rate changes now and then; their losses and norms."""
        numbers = []
        for i in range(first, first + count):
            for group in self.optimizer.param_groups:
                group["lr"] = lr(i)
            found = step(*batch(i))
            numbers += [found["loss"].item(), found["norm"].item()]
        return numbers

    def state(self) -> list:
        states = self.optimizer.state.values()
        return [*self.model.parameters(), *(x[k] for x in states for k in sorted(x))]


def batch(i: int):
    block = np.random.default_rng(i).integers(0, VOCAB, (BATCH, LENGTH + 1))
    return tuple(xt.from_numpy(np.ascontiguousarray(x)).to("cuda") for x in (block[:, :-1], block[:, 1:]))


# ---- bits ------------------------------------------------------------------------------------------------------------------------


def equal(dtype: str, streams: int, pieces: int, shape: dict | None = None) -> None:
    """20 steps by a graph are 20 eager ones, also with a loss of the model taken in between."""
    eager, captured = (Team(dtype, streams, pieces, shape=shape) for _ in range(2))
    graph = captured.graph()
    for first in (0, 7):
        count = 13 if first else 7
        assert eager.run(eager.step, count, first) == captured.run(graph, count, first)
        with xt.no_grad():
            assert eager.model.loss(*batch(99)).item() == captured.model.loss(*batch(99)).item()
    assert graph.captured and captured.calls == 3, captured.calls  # two eager runs and the capture
    assert same(eager.state(), captured.state())
    gradients = [[p.grad for p in team.model.parameters()] for team in (eager, captured)]
    assert same(*gradients)


def equal_large(dtype: str, streams: int, backend: str) -> None:
    """The same at sizes at which a GPU has other kernels, of 8 x 256 tokens."""
    ids, targets = (xt.randint(0, LARGE["vocab_size"], (8, 256), device="cuda") for _ in range(2))
    xt.use_attention_backend(backend)
    found = []
    for by_graph in (False, True):
        team = Team(dtype, streams, shape=LARGE)

        def step(ids, targets, team=team):
            team.optimizer.zero_grad()
            loss = team.model.loss(ids, targets)
            loss.backward()
            norm = optim.clip_grad_norm_(team.model.parameters(), 1.0)
            team.optimizer.step()
            return loss.detach(), norm

        call = xt.cuda.graph(step, optimizers=[team.optimizer]) if by_graph else step
        found.append([number.item() for _ in range(12) for number in call(ids, targets)] + team.state())
    assert call.captured and same(*found)


def epilogues(family: str) -> None:
    """An activation or its gradient inside products: the same numbers, less two kernels a layer (one where float32 sums are rounded)."""
    found, launches = [], []
    shape = dict(SwiGLU=SMALL, GELU=SMALL_GPT2)[family]
    for name, by_graph in (("tiled", False), (None, False), (None, True)):
        with xt.use_gemm_backend(name):
            team = Team("bfloat16", shape=shape)
            step = team.graph() if by_graph else team.step
            before = xt.cuda.counters()["launches"]
            found.append([team.run(step, 4), team.state()])
            launches.append(xt.cuda.counters()["launches"] - before)
    assert found[0][0] == found[1][0] == found[2][0]
    assert same(found[0][1], found[1][1]) and same(found[0][1], found[2][1])
    assert launches[0] - launches[1] == 4 * 2 * (2 if family == "SwiGLU" else 1), launches  # steps, layers, kernels


def chunks(dtype: str) -> None:
    """A loss that makes its gradients in the forward, chunk after chunk: replays have the eager bits."""
    found = []
    for by_graph in (False, True):
        random = np.random.default_rng(3)
        head = xt.tensor(random.standard_normal((VOCAB, 16)), dtype=dtype, device="cuda").requires_grad_()

        def step(x, targets, head=head):
            head.grad = None
            loss = xt.functional.linear_cross_entropy(x, head, targets, chunk_rows=24)
            (loss * 3.0).backward()
            return loss.detach(), head.grad

        call = xt.cuda.graph(step) if by_graph else step
        for _ in range(5):
            x = xt.tensor(random.standard_normal((64, 16)), dtype=dtype, device="cuda")
            results = call(x, xt.tensor(random.integers(0, VOCAB, 64), device="cuda"))
            found.append([number.float().cpu().numpy() for number in results])
    assert call.captured
    for eager, captured in zip(found[:5], found[5:], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(eager, captured, strict=True))


def counts() -> None:
    """A captured step is one launch and the copies of its inputs: no wait, no copy to the host, no allocation."""
    team = Team()
    graph = team.graph()
    inputs = batch(0)
    for _ in range(3):
        graph(*inputs)
    assert graph.launches > 50 and graph.memory > 0
    gc.collect()
    before = xt.cuda.counters()
    for _ in range(5):
        graph(*inputs)
    after = xt.cuda.counters()
    found = {name: after[name] - before[name] for name in after}
    assert found == dict.fromkeys(found, 0) | {"launches": 5 * 3}, found


def two_graphs() -> None:
    """Two graphs of one model and its optimizer, in turns."""
    eager, captured = Team(), Team()
    one, two = captured.graph(), captured.graph(warmup=1)
    numbers: list[float] = []
    for i in range(12):
        numbers += captured.run((one, two)[i % 2], 1, i)
    assert eager.run(eager.step, 12) == numbers
    assert one.captured and two.captured and same(eager.state(), captured.state())


def sync() -> None:
    """With XTRAIN_CUDA_SYNC=1 every call is eager."""
    eager, captured = Team(), Team()
    graph = captured.graph()
    assert eager.run(eager.step, 5) == captured.run(graph, 5)
    assert not graph.captured and captured.calls == 5
    check_said(
        lambda: graph.capture(*batch(0)), "RuntimeError: cuda.graph: nothing can be captured while XTRAIN_CUDA_SYNC=1"
    )


def nan() -> None:
    """A step that is not finite inside a captured run changes nothing, and neither do those behind it."""
    eager, captured = Team(guarded=True), Team(guarded=True)
    graph = captured.graph()
    assert eager.run(eager.step, 6) == captured.run(graph, 6)
    for team, step in ((eager, eager.step), (captured, graph)):
        weight = next(iter(team.model.parameters()))
        with xt.no_grad():
            good = weight.detach().clone()
            weight[0] = math.nan
        before = [x.clone() if isinstance(x, xt.Tensor) else x for x in team.state()]
        assert not all(map(math.isfinite, team.run(step, 3, 6)))
        assert same(before, team.state())
        with xt.no_grad():
            weight.copy_(good)
        assert not math.isfinite(team.guard.item())
        team.guard.fill_(0)
    assert eager.run(eager.step, 4, 9) == captured.run(graph, 4, 9)
    assert same(eager.state(), captured.state())


# ---- memory ------------------------------------------------------------------------------------------------------------------------


def beyond_the_plan() -> None:
    """More memory than planned is an error; the step goes on eagerly, and is captured once it needs no more."""
    eager, captured = Team(), Team()
    kept, more = [], [False]

    def step(ids, targets):
        found = captured.step(ids, targets)
        if more[0]:
            kept.append(xt.zeros((1 << 20,), device="cuda"))
        return found

    graph = xt.cuda.graph(step, optimizers=[captured.optimizer])
    numbers = captured.run(graph, 2)
    more[0] = True
    check_said(lambda: graph(*batch(2)), OFF_PLAN)
    assert not graph.captured and all(p.grad is None for p in captured.model.parameters())
    more[0] = False
    kept.clear()
    numbers += captured.run(captured.step, 1, 2) + captured.run(graph, 4, 3)
    assert graph.captured and numbers == eager.run(eager.step, 7) and same(eager.state(), captured.state())


def freed() -> None:
    """A graph that is dropped while eager code goes on gives its memory back, with the last tensor in it."""
    eager, captured = Team(), Team()
    expected = eager.run(eager.step, 8)
    del eager
    gc.collect()
    graph = captured.graph()
    numbers = captured.run(graph, 5)
    captured.optimizer.zero_grad()
    xt.cuda.synchronize()
    held = xt._C.cuda_counters("cuda")["pool_used"]
    memory, loss, dead = graph.memory, graph(*batch(5))["loss"], weakref.ref(graph)
    del graph
    captured.optimizer.zero_grad()
    assert dead() is None
    value = loss.item()
    rest = captured.run(captured.step, 2, 6)  # on top of what is left
    assert loss.item() == value and xt._C.cuda_counters("cuda")["pool_used"] >= held
    assert numbers == expected[:10] and value == expected[10] and rest == expected[12:]
    del loss
    captured.optimizer.zero_grad()
    assert xt._C.cuda_counters("cuda")["pool_used"] <= held - memory + (1 << 16)


def returned() -> None:
    """Nothing is left of many graphs."""
    xt.ones(3, device="cuda").sum().item()
    used = []
    for _ in range(4):
        team = Team()
        graph = team.graph()
        team.run(graph, 4)
        del team, graph
        gc.collect()
        xt.cuda.empty_cache()
        used.append((xt.cuda.memory_allocated(), xt._C.cuda_counters("cuda")["pool_used"]))
    assert used[1:] == used[:1] * 3 and used[0][0] == 0, used


def outside() -> None:
    """What a step reads from outside stays as long as the graph, even when nobody else has it and eager code asks for memory."""
    held = {"a": xt.full((4096,), 3.0, device="cuda")}
    graph = xt.cuda.graph(lambda x: x * held["a"] if "a" in held else x)
    x = xt.ones(4096, device="cuda")
    for _ in range(3):
        graph(x)
    before = xt.cuda.memory_allocated()
    held.clear()
    others = [xt.full((4096,), 7.0, device="cuda") for _ in range(8)]
    assert graph(x).tolist() == [3.0] * 4096 and others[0][0].item() == 7.0
    assert xt.cuda.memory_allocated() == before + 8 * 4096 * 4
    del graph


def outside_gradients() -> None:
    """Gradients from before, to which the step adds: the graph keeps their memory."""
    weight = xt.ones(64, device="cuda", requires_grad=True)
    (weight * 1.0).sum().backward()
    graph = xt.cuda.graph(lambda x: (weight * x).sum().backward())
    x = xt.full((64,), 2.0, device="cuda")
    for _ in range(5):
        graph(x)
    assert graph.captured and weight.grad.tolist() == [11.0] * 64
    weight.grad = None
    others = [xt.full((64,), 7.0, device="cuda") for _ in range(8)]
    graph(x)
    assert all(other.tolist() == [7.0] * 64 for other in others)


def out_of_memory() -> None:
    """No room for the memory of the graph: an error, and the step goes on eagerly."""
    eager, captured = Team(), Team()
    graph = captured.graph()
    numbers = captured.run(graph, 2)
    inputs, filling = batch(2), []
    if "FAKE_DEVICE_MOST" not in os.environ:
        size = 1 << 40
        while size >= 1 << 16:
            try:
                filling.append(xt.empty(size, dtype=xt.uint8, device="cuda"))
            except MemoryError:
                size //= 2
    else:
        os.environ["FAKE_DEVICE_MOST"] = str(graph.memory - 1)
    check_said(
        lambda: graph.capture(*inputs),
        "OutOfMemoryError: out of memory on cuda:0: .* MiB asked for the memory of a captured step",
    )
    filling.clear()
    os.environ.pop("FAKE_DEVICE_MOST", None)
    numbers += captured.run(captured.step, 2, 2) + captured.run(graph, 3, 4)
    assert graph.captured and numbers == eager.run(eager.step, 7)


# ---- rules -------------------------------------------------------------------------------------------------------------------------


def illegal() -> None:
    """Each thing that a captured step must not do is one sentence, and leaves everything usable."""
    x, on_host, on = xt.ones(64, device="cuda"), xt.ones(3), [False]
    reads = r"RuntimeError: .*a captured step must not read values, which waits for the device"
    cases: list[tuple[Callable, str]] = [
        (lambda y: y.sum().item(), reads),
        (lambda y: y.tolist(), reads),
        (lambda y: y.cpu(), reads),
        (lambda y: y.numpy(), "."),
        (lambda y: repr(y), reads),
        (lambda y: xt._C.stats(y), reads),
        (lambda y: bool(y[0]), reads),
        (
            lambda y: y + on_host.to("cuda").sum(),
            "RuntimeError: .*must not copy from the host: pass tensors that change as arguments",
        ),
        (lambda y: y.copy_(xt.zeros(64)), "RuntimeError: .*must not copy from the host"),
        (lambda y: xt.cuda.synchronize(), "RuntimeError: .*must not wait for the device"),
        (lambda y: xt.cuda.empty_cache(), "RuntimeError: .*must not give memory back"),
        (
            lambda y: xt.rand(64, device="cuda"),
            "RuntimeError: .*must not draw random numbers, which each replay would repeat",
        ),
        (
            lambda y: xt.cuda.graph(lambda z: z, warmup=1)(y),
            "RuntimeError: .*must not plan another one",
        ),
        (lambda y: [y * i for i in range(9000)], OFF_PLAN),
        (lambda y: 1 / 0, "ZeroDivisionError"),
    ]
    for number, (action, pattern) in enumerate(cases):

        def step(y, action=action):
            z = y * 2
            if on[0]:
                action(z)
            return z + 1

        graph = xt.cuda.graph(step, warmup=1)
        assert graph(x)[0].item() == 3.0
        on[0] = True
        rng = xt.get_rng_state()
        found = said(lambda graph=graph: graph(x))
        assert re.search(pattern, found) and "\n" not in found, (number, found)
        assert xt.get_rng_state() == rng, number
        on[0] = False
        assert step(x)[0].item() == 3.0 and not graph.captured
        assert graph(x)[1].item() == 3.0 and graph.captured, number
        assert graph(x * 2)[1].item() == 5.0


def inputs_and_outputs() -> None:
    x = xt.ones(4, device="cuda")
    graph = xt.cuda.graph(lambda a, b: {"sum": a + b, "pair": [a * b, None]})
    for i in range(4):
        found = graph(x, xt.full((4,), float(i)))  # one of them from the host
        assert (
            found["sum"].tolist() == [i + 1.0] * 4
            and found["pair"][0].tolist() == [float(i)] * 4
            and found["pair"][1] is None
        )
    assert graph(x, x)["sum"].data_ptr() == found["sum"].data_ptr()
    assert graph(graph(x, x)["sum"], graph(x, x)["pair"][0])["sum"].tolist() == [3.0] * 4  # of one graph, into itself
    check_said(lambda: graph(x), "ValueError: cuda.graph: the step must get 2 tensors as in its first call, got 1")
    check_said(
        lambda: graph(x, xt.ones(5, device="cuda")),
        r"ValueError: cuda.graph: argument 1 must have shape \(4,\) as in the first call, got \(5,\)",
    )
    check_said(
        lambda: graph(x, x > 0),
        "ValueError: cuda.graph: argument 1 must have dtype .*float32.* as in the first call, got .*bool",
    )
    check_said(lambda: graph(x, 2.0), "TypeError: cuda.graph: argument 1 must be a Tensor, got float")
    check_said(
        lambda: graph(x, xt.ones(4, device="cuda", requires_grad=True)),
        "ValueError: cuda.graph: argument 1 must not require a gradient",
    )
    check_said(
        lambda: xt.cuda.graph(lambda a: 1.0)(x), "TypeError: cuda.graph: the step must return tensors.* got float"
    )
    check_said(
        lambda: xt.cuda.graph(lambda a: xt.ones(3))(x),
        "ValueError: cuda.graph: the step must return tensors on cuda.*one on cpu",
    )
    check_said(lambda: xt.cuda.graph(3), "TypeError: cuda.graph: step must be callable, got int")
    check_said(
        lambda: xt.cuda.graph(str, warmup=0), "ValueError: cuda.graph: warmup must be an integer of at least 1, got 0"
    )
    check_said(
        lambda: xt.cuda.graph(str, optimizers=[3]), "TypeError: cuda.graph: optimizers must be optimizers, got int"
    )
    check_said(
        lambda: xt.cuda.graph(str).capture(x),
        "RuntimeError: cuda.graph: the step must have run 2 times before its capture, got 0",
    )
    weight = xt.ones(4, device="cuda", requires_grad=True)
    assert not xt.cuda.graph(lambda a: a * weight)(x).requires_grad


def optimizers() -> None:
    """Learning rates may change; nothing else may."""
    team = Team()
    unknown = xt.cuda.graph(team.step)
    team.run(unknown, 2)
    check_said(
        lambda: unknown(*batch(2)), "RuntimeError: cuda.graph: the step uses an optimizer that the graph does not know"
    )
    graph, group = team.graph(), team.optimizer.param_groups[0]
    team.run(graph, 4)
    for option, value in (("weight_decay", 0.5), ("eps", 1e-3), ("betas", (0.5, 0.5))):
        before, group[option] = group[option], value
        check_said(
            lambda: graph(*batch(2)), rf"ValueError: cuda.graph: {option} of AdamW must stay .* as captured, got "
        )
        group[option] = before
    group["lr"] = -1.0
    check_said(lambda: graph(*batch(2)), r"ValueError: AdamW: lr must be a number in \[0, inf\), got -1.0")
    group["lr"] = 1e-2
    graph(*batch(2))
    team.optimizer.load_state_dict(team.optimizer.state_dict())
    check_said(
        lambda: graph(*batch(2)),
        "RuntimeError: cuda.graph: the state and the groups of AdamW must stay those of the capture",
    )

    team = Team()

    def scheduled(ids, targets):
        found = team.step(ids, targets)
        team.optimizer.param_groups[0]["lr"] *= 0.5
        team.optimizer.step()
        return found

    graph = xt.cuda.graph(scheduled, optimizers=[team.optimizer])
    graph(*batch(0)), graph(*batch(1))
    check_said(
        lambda: graph(*batch(2)), "RuntimeError: cuda.graph: a captured step must not change the learning rate of AdamW"
    )

    team, late = Team(), [None]
    first = next(iter(team.model.parameters()))

    def freezing(ids, targets):
        first.requires_grad_(late[0] is not None)
        return team.step(ids, targets)

    graph = xt.cuda.graph(freezing, optimizers=[team.optimizer])
    graph(*batch(0)), graph(*batch(1))
    late[0] = True
    text = said(lambda: graph(*batch(2)))
    assert "must have the state of every parameter before the capture" in text or re.search(OFF_PLAN, text), text

    p = xt.ones(3, device="cuda", requires_grad=True)
    sgd = optim.SGD([p], lr=0.5)

    def plain(x):
        sgd.zero_grad()
        (p * x).sum().backward()
        sgd.step()

    graph = xt.cuda.graph(plain, optimizers=[sgd])
    for _ in range(4):
        graph(xt.ones(3))
    assert p.tolist() == [-1.0] * 3
    sgd.param_groups[0]["lr"] = 0.25
    check_said(lambda: graph(xt.ones(3)), "ValueError: cuda.graph: lr of SGD must stay 0.5 as captured, got 0.25")


def threads() -> None:
    """While one thread captures, another gets an error, and what it frees is freed. What it changes in place spoils the capture."""
    refused = (
        r"RuntimeError: \w+: cuda.graph: another thread is capturing a step on cuda:0; use the device when it has ended"
    )
    for spoils in (False, True):
        inside, done, found, calls = threading.Event(), threading.Event(), [], []
        mine = [xt.ones(1 << 16, device="cuda") for _ in range(3)]

        def other(spoils=spoils, inside=inside, done=done, found=found, mine=mine) -> None:
            inside.wait()
            actions = [lambda: mine[0].add_(1.0)] if spoils else [lambda: mine[0] + 1, lambda: xt.ones(4).to("cuda")]
            found += map(said, actions)
            mine.clear()
            done.set()

        def step(x, inside=inside, done=done, calls=calls):
            calls.append(0)
            if len(calls) == 3:
                inside.set()
                while not done.is_set():
                    time.sleep(0.001)
            return x + 1

        graph = xt.cuda.graph(step)
        helper = threading.Thread(target=other)
        helper.start()
        x = xt.ones(4, device="cuda")
        for _ in range(2):
            assert graph(x).tolist() == [2.0] * 4
        if spoils:
            check_said(
                lambda graph=graph, x=x: graph(x),
                "RuntimeError: cuda.graph: another thread has used cuda:0 during the capture",
            )
        for _ in range(2):
            assert graph(x).tolist() == [2.0] * 4
        helper.join()
        assert found and all(re.fullmatch(refused, text) for text in found), found
        assert graph.captured and graph.launches == 1


def broken() -> None:
    """The capture itself fails at its end."""
    x = xt.ones(4, device="cuda")
    graph = xt.cuda.graph(lambda x: x + 1)
    graph(x), graph(x)
    check_said(lambda: graph(x), "CudaError: cuda.graph: the capture is broken")
    assert (x + 1).tolist() == [2.0] * 4 and not graph.captured
    del os.environ["FAKE_DEVICE_BROKEN"]
