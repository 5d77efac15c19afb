"""Training runs by a graph: test_graph.py runs them as it does graph_programs.py."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path

from graph_programs import check_said, same
from runs import TINY, metrics, options, text_file

import xtrain as xt
from xtrain.errors import NonFiniteError
from xtrain.models import GPT2Config
from xtrain.models.registry import RECOMPUTE, architecture
from xtrain.train import Trainer
from xtrain.train.estimate import estimates


class Run:
    """A Trainer on the GPU, its lines and records."""

    def __init__(self, folder: str, name: str, graph: bool, data: Path | None = None, **changes) -> None:
        data = data or Path(folder) / "text.txt"
        if not data.exists():
            text_file(data)
        self.out, self.lines = Path(folder) / name, []
        xt.manual_seed(0)
        self.trainer = Trainer(
            options(data, self.out, device="cuda", graph=graph, **{"steps": 20, **changes}), quiet=True
        )
        self.trainer.stepper._say = self.lines.append

    @property
    def graph(self):
        return self.trainer.stepper._graph

    def records(self) -> list[dict]:
        left_out = ("time", "wall_time", "tokens_per_second", "memory", "mfu")  # they differ from run to run
        return [{k: v for k, v in line.items() if k not in left_out} for line in metrics(self.out)]

    def state(self) -> list:
        states = self.trainer.optimizer.state.values()
        averages = [] if self.trainer.ema is None else self.trainer.ema.averages.values()
        return [*self.trainer.model.parameters(), *(x[k] for x in states for k in sorted(x)), *averages]


def train_equal(folder: str, **changes) -> None:
    eager, captured = Run(folder, "eager", False, **changes), Run(folder, "captured", True, **changes)
    eager.trainer.run(), captured.trainer.run()
    assert captured.graph.captured and not captured.lines, captured.lines
    assert eager.records() == captured.records() and same(eager.state(), captured.state())


def train_defaults(folder: str) -> None:
    """What a GPU does when no option says otherwise: bfloat16, captured; it says how fast, and how much memory."""
    out = Path(folder) / "defaults"
    given = options(text_file(Path(folder) / "text.txt"), out, device="cuda", steps=12)
    del given["precision"], given["graph"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer = Trainer(given)
        trainer.run()
    assert trainer.config.precision == "bfloat16" and trainer.config.graph
    assert trainer.stepper._graph is not None and trainer.stepper._graph.captured
    assert next(trainer.model.parameters()).dtype == xt.bfloat16
    states = [trainer.optimizer.state[p] for p in trainer.model.parameters()]
    assert all(state["master"].dtype == state["exp_avg"].dtype == xt.float32 for state in states)
    lines = printed.getvalue().splitlines()
    assert not [line for line in lines if line.startswith("graph")], lines
    (speed,) = [line for line in lines if line.startswith("speed")]
    assert re.fullmatch(r"speed  [\d,]+ tokens/s(, MFU \d+\.\d %)?, \d+\.\d\d GiB of memory at the most", speed), speed
    known = xt.cuda.peak_flops("bfloat16") is not None
    assert all(("MFU" in line) == known for line in lines if "tokens/s" in line), lines


def region_estimated(folder: str) -> None:
    """A graph's region is what the dry run says, by policy: to the byte, but for working memory of a GPU's kernels."""
    for policy in RECOMPUTE:
        run = Run(folder, policy, True, recompute=policy, model__num_hidden_layers=7, precision="bfloat16", steps=4)
        run.trainer.run()
        found = estimates(architecture("qwen3"), run.trainer.model.config, run.trainer.config, "cuda")
        (one,) = [estimate for estimate in found if estimate.recompute == policy]
        region = one.step - one.parameters - one.optimizer - one.working
        more = run.graph.memory - region
        assert more == 0 or (0 < more < 64 << 20 and "fake" not in xt.cuda.get_device_name()), (policy, more, region)


def train_resumed(folder: str) -> None:
    """Stopped in the middle and resumed: the same end."""
    whole, first = Run(folder, "whole", False), Run(folder, "parts", True, save_every=9)
    whole.trainer.run()
    for _ in range(9):
        first.trainer.train_step()
    first.trainer.save()
    xt.manual_seed(5)
    second = Trainer({"resume": str(first.out), "graph": True}, quiet=True)
    second.run()
    assert second.stepper._graph.captured
    assert same(
        whole.state(), [*second.model.parameters(), *(x[k] for x in second.optimizer.state.values() for k in sorted(x))]
    )


def train_nan(folder: str, log_every: int) -> None:
    """A bad step of a captured run, found late: named, undone, and the run goes on as an eager one does."""
    runs = [Run(folder, name, name == "captured", log_every=log_every) for name in ("eager", "captured")]
    texts = []
    for run in runs:
        trainer, next_batch = run.trainer, run.trainer.loader.next_batch
        weight = dict(trainer.model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
        good = []

        def poisoned(trainer=trainer, next_batch=next_batch, weight=weight, good=good):
            if trainer.step == 11 and not good:
                with xt.no_grad():
                    good.append(weight.detach().clone())
                    weight[1, 2] = math.nan
            return next_batch()

        trainer.loader.next_batch = poisoned
        try:
            trainer.run()
        except NonFiniteError as error:
            texts.append(str(error).replace(str(run.out), "RUN"))
        assert trainer.step == 11
        assert {state["step"] for state in trainer.optimizer.state.values()} == {11}
        with xt.no_grad():
            weight.copy_(good[0])
        trainer.run()
    assert len(texts) == 2 and texts[0] == texts[1] and "step 12: " in texts[0] and "up_proj" in texts[0], texts
    assert runs[1].graph.captured and same(runs[0].state(), runs[1].state())
    assert [line["loss"] for line in runs[0].records()] == [line["loss"] for line in runs[1].records()]


def train_refused(folder: str) -> None:
    """A step that cannot be captured, and one that can no longer be replayed, run eagerly, and a line says why."""
    eager, captured = Run(folder, "eager", False), Run(folder, "captured", True)
    loss, drawn = captured.trainer.model.loss, [0]

    def drawing(*args, **kwargs):
        drawn[0] += 1
        if drawn[0] == 3:
            xt.rand(4, device="cuda")
        return loss(*args, **kwargs)

    vars(captured.trainer.model)["loss"] = drawing
    eager.trainer.run(), captured.trainer.run()
    assert captured.graph is None and len(captured.lines) == 1, captured.lines
    assert (
        captured.lines[0].startswith("graph: steps run eagerly: ")
        and "must not draw random numbers" in captured.lines[0]
    )
    assert same(eager.state(), captured.state()) and eager.records() == captured.records()

    eager, captured = Run(folder, "eager2", False), Run(folder, "captured2", True)
    for run in (eager, captured):
        for _ in range(6):
            run.trainer.train_step()
        run.trainer.optimizer.param_groups[0]["weight_decay"] = 0.3
        run.trainer.run()
    assert captured.graph is None and "weight_decay of AdamW must stay" in captured.lines[0], captured.lines
    assert same(eager.state(), captured.state())


def train_dropout(folder: str, **changes) -> None:
    """GPT-2 with dropout everywhere: the steps of a graph draw the numbers of eager ones, also in recomputation and after a resume."""
    keys = dict(vocab_size=256, n_embd=16, n_layer=3, n_head=2, n_positions=16)
    rates = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.2)
    (Path(folder) / "gpt2").mkdir()
    (Path(folder) / "gpt2" / "config.json").write_text(json.dumps({**GPT2Config(**keys, **rates).to_dict()}))
    sizes = dict.fromkeys(name.replace(".", "__") for name in TINY if name.startswith("model."))
    given = {**sizes, "model__preset": f"{folder}/gpt2", "eval_every": 6, "save_every": 9, "steps": 12, **changes}
    runs = []
    for name in ("eager", "captured"):
        runs.append(Run(folder, name, name == "captured", **given))  # sets the seed
        runs[-1].trainer.run()
    eager, captured = runs
    assert captured.graph.captured and not captured.lines, captured.lines
    assert eager.records() == captured.records() and same(eager.state(), captured.state())
    losses = [line["loss"] for line in captured.records()]
    assert len(set(losses)) == len(losses)
    state = xt.get_rng_state()
    xt.manual_seed(5)
    resumed = Trainer({"resume": str(captured.out / "checkpoint-00000009"), "graph": True}, quiet=True)
    resumed.run()
    assert resumed.stepper._graph.captured and xt.get_rng_state() == state
    assert same(list(eager.trainer.model.parameters()), list(resumed.model.parameters()))


def dropout() -> None:
    """Replays draw what eager calls draw, forward and backward, and whatever seed is set between them."""
    x = xt.ones(300, device="cuda")

    def step(y) -> list:
        y = y.detach().requires_grad_()
        a = xt.functional.dropout(y, 0.3)
        b = xt.checkpoint(lambda z: xt.functional.dropout(z * z, 0.5), a)
        b.sum().backward()
        return [a, b, y.grad]

    graph = xt.cuda.graph(step)
    seen = []
    for i in range(6):
        for seed in (0, (1 << 63) + 5) if i == 4 else (0,):
            if seed:
                xt.manual_seed(seed)
            before = xt.get_rng_state()
            want = [tensor.tolist() for tensor in step(x)]
            after = xt.get_rng_state()
            xt.set_rng_state(before)
            assert [tensor.tolist() for tensor in graph(x)] == want and xt.get_rng_state() == after, i
            seen.append(str(want))
    assert graph.captured and len(set(seen)) == len(seen)
    other = xt.cuda.graph(step, warmup=1)
    other(x)
    state = xt.get_rng_state()
    other.capture(x)
    assert xt.get_rng_state() == state, "a capture draws nothing"
    direct = xt.cuda.graph(lambda y: xt._C.dropout(y, 0.5), warmup=1)
    direct(x)
    check_said(lambda: direct(x), "RuntimeError: .*must not draw random numbers of the host")

    def seeding(y):
        xt.manual_seed(3)
        return xt.functional.dropout(y, 0.5)

    reset = xt.cuda.graph(seeding, warmup=1)
    reset(x)
    check_said(lambda: reset(x), "RuntimeError: .*must not set the seed")
    assert xt._draw.captured_generator() is None


def train_interrupted(folder: str) -> None:
    """A step that could not be captured or replayed, and then fails as it runs eagerly, has changed nothing."""
    for name, steps in (("capture", 2), ("replay", 5)):
        run = Run(folder, name, True)
        trainer, calls = run.trainer, []
        loss, step = trainer.model.loss, trainer.optimizer.step
        for _ in range(steps):
            trainer.train_step()

        def failing(*args, calls=calls, loss=loss, eager=2 if name == "capture" else 1, **kwargs):
            calls.append(0)
            if len(calls) == eager:
                raise OSError("the eager step fails")
            return loss(*args, **kwargs)

        def waiting(*args, step=step, **kwargs):
            step(*args, **kwargs)
            xt.cuda.synchronize()  # refused in a capture

        vars(trainer.model)["loss"] = failing
        if name == "capture":
            vars(trainer.optimizer)["step"] = waiting
        else:
            trainer.optimizer.param_groups[0]["weight_decay"] = 0.3
        before = [x.clone() if isinstance(x, xt.Tensor) else x for x in run.state()]
        try:
            trainer.train_step()
        except OSError:
            pass
        else:
            raise AssertionError("it raised nothing")
        assert run.graph is None and len(run.lines) == 1, run.lines
        assert not trainer.torn and trainer.step == steps and same(before, run.state())
        assert trainer.run().step == 20


def train_sync(folder: str) -> None:
    run = Run(folder, "run", True, steps=4)
    assert run.graph is None
    run.trainer.run()


def second_device() -> None:
    """Without `device`, a graph is on that of its optimizers' parameters."""
    weight = xt.ones(4, device="cuda:1").requires_grad_(True)
    optimizer = xt.optim.AdamW([weight], lr=1e-2)

    def step(x):
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return x * 2

    graph = xt.cuda.graph(step, optimizers=[optimizer])
    for _ in range(4):
        found = graph(xt.ones(4))
    assert graph.captured and found.device == weight.device and found.tolist() == [2.0] * 4
