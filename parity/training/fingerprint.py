"""Hashes of what xtrain computes, to tell whether a change of its code changed a bit.

    python parity/training/fingerprint.py [--device cpu|cuda] [--only ops/rms_norm] [--json FILE]
    python parity/training/fingerprint.py --compare BEFORE.json AFTER.json

Prints one line an item, `name sha256`: outputs and gradients of every case of the op table, of GEMM and attention by every
backend, of Qwen3 models, and 50 steps of training. --compare lists what differs between two files, and what only one has, and
exits with status 1 if there is any. Needs NumPy only, and public names and the op table of xtrain: PYTHONPATH chooses the tree.
Numbers depend on the machine's instruction set and on its BLAS; compare files of one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import platform
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.errors import NonFiniteError
from xtrain.models import Qwen3, Qwen3Config
from xtrain.optable import TABLE
from xtrain.train import Trainer

Found = Iterator[tuple[str, str]]


def digest(*values) -> str:
    """Of tensors: dtype, shape and bits, where bfloat16 and float16 are widened exactly. Of other values: their repr."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, xt.Tensor):
            found.update(f"{value.dtype.name}{tuple(value.shape)}".encode())
            value = value.detach().cpu()
            value = (value.to(xt.float64) if value.dtype.is_floating_point else value).numpy()
        found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return found.hexdigest()


def tensor(values: np.ndarray, dtype: str):
    """On the default device; float arrays become `dtype`."""
    made = xt.tensor(values, device="cpu")
    return (made.to(getattr(xt, dtype)) if values.dtype.kind == "f" else made).to(xt.get_default_device())


def normal(name: str, dtype: str, *shapes) -> list:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return [tensor(np.asarray(rng.standard_normal(tuple(shape))), dtype) for shape in shapes]


def both_directions(name: str, call: Callable, leaves: list, seed: str) -> Found:
    """Outputs of `call`, and what a random gradient of each gives its leaves."""
    outs = call()
    outs = list(outs) if isinstance(outs, (list, tuple)) else [outs]
    yield f"{name}/forward", digest(*outs)
    outs = [out for out in outs if getattr(out, "requires_grad", False)]
    if outs:
        dys = [normal(f"{seed} {i}", out.dtype.name, out.shape)[0].to(out.device) for i, out in enumerate(outs)]
        _C.backward(outs, dys, False)
        yield f"{name}/backward", digest(*(leaf.grad for leaf in leaves))


def choices(kind: str | None) -> list[tuple[str, Callable]]:
    """(suffix of the name, context) for every backend of GEMM or attention and, on a GPU, for TF32."""
    if kind is None:
        return [("", contextlib.nullcontext)]
    device, use = xt.get_default_device(), getattr(xt, f"use_{kind}_backend")
    names = ("auto", *getattr(xt, f"{kind}_backends")(device))
    found = [(f"/{name}", functools.partial(use, name)) for name in names]
    return found if device.type == "cpu" else [*found, ("/tf32", tf32)]


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    before = xt.get_float32_matmul_precision()
    xt.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        xt.set_float32_matmul_precision(before)


def ops(only: str = "") -> Found:
    """Every case of the op table, of entries that `only` leaves. A name has the shapes of the inputs and the number of the
    case among those of the same shapes."""
    for entry in TABLE:
        item = f"ops/{entry.id}/"
        wanted = item.startswith(only) or only.startswith(item)
        if entry.op == "empty" or not wanted:  # empty: whatever the memory holds
            continue
        seen: dict[str, int] = {}
        for case in entry.cases:
            shapes = "_".join("x".join(map(str, spec.shape)) or "0d" for spec in case.inputs) or "none"
            number = seen[shapes] = seen.get(shapes, -1) + 1
            name = f"ops/{entry.id}/{shapes}.{number}"
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            arrays = [np.asarray(spec.draw(rng)) for spec in case.inputs]
            for dtype, (suffix, context) in itertools.product(entry.dtypes, choices(entry.selects)):
                xt.manual_seed(0)
                tensors = [tensor(a, dtype) for a in arrays]
                leaves = [tensors[i].requires_grad_() for i in entry.differentiable(case)]
                with context():
                    call = functools.partial(entry.call, *tensors, **case.kwargs)
                    yield from both_directions(f"{name}/{dtype}{suffix}", call, leaves, name)


def backends() -> Found:
    """GEMM and attention by every backend, at sizes for which the implementations cut their work."""
    products = [(257, 129, 65), (37, 4099, 41), (512, 256, 384)]
    heads = [(2, 4, 2, 131, 64), (1, 2, 1, 257, 128), (2, 3, 3, 65, 24), (1, 4, 4, 128, 32)]
    inputs = [("gemm", xt.matmul, ((m, k), (k, n))) for m, k, n in products]
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    inputs += [("attention", attend, ((n, h, s, d), (n, kv, s, d), (n, kv, s, d))) for n, h, kv, s, d in heads]
    for (kind, call, shapes), dtype in itertools.product(inputs, ("float32", "bfloat16", "float16")):
        name = f"{kind}/{'_'.join('x'.join(map(str, shape)) for shape in shapes)}/{dtype}"
        for suffix, context in choices(kind):
            leaves = [leaf.requires_grad_() for leaf in normal(name, dtype, *shapes)]
            with context():
                yield from both_directions(name + suffix, functools.partial(call, *leaves), leaves, name)


# ---- models ------------------------------------------------------------------------------------------------------------------------------

SMALL = dict(vocab_size=113, hidden_size=48, intermediate_size=120, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, head_dim=24, max_position_embeddings=256, rope_theta=1e4)  # fmt: skip
WIDE = dict(vocab_size=1009, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=256, rope_theta=1e6)  # fmt: skip
MODELS = {  # name -> (configuration, batch, length)
    "small": (SMALL, 3, 37),
    "small-tied": (SMALL | dict(tie_word_embeddings=True, num_key_value_heads=6), 3, 37),
    "small-bytes": (SMALL | dict(tie_word_embeddings=True, vocab_size=256, num_key_value_heads=1), 1, 131),
    "small-mhc3": (SMALL | dict(mhc_streams=3, mhc_contraction="learned"), 3, 37),
    "small-mhc4": (SMALL | dict(mhc_streams=4, mhc_contraction="sum", tie_word_embeddings=True), 3, 37),
    "wide": (WIDE, 2, 128),
    "wide-tied": (WIDE | dict(tie_word_embeddings=True, num_key_value_heads=4), 2, 128),
    "wide-mhc4": (WIDE | dict(mhc_streams=4, mhc_contraction="mean"), 2, 128),
}
# suffix of the name -> (gradient_checkpointing, stream_checkpointing)
RECOMPUTED = {"": (False, 0), "/layers": (True, 0), "/streams1": (False, 1), "/streams2": (False, 2)}


def precisions() -> list[tuple[str, str, Callable]]:
    """(name, dtype, context)"""
    found = [("float32", "float32", contextlib.nullcontext), ("bfloat16", "bfloat16", contextlib.nullcontext)]
    return found if xt.get_default_device().type == "cpu" else [*found, ("tf32", "float32", tf32)]


def models() -> Found:
    """Loss, logits and every gradient, plain and with parts computed again in backward; tokens drawn from its caches."""
    for (name, (keys, batch, length)), (precision, dtype, context) in itertools.product(MODELS.items(), precisions()):
        xt.manual_seed(0)
        model = Qwen3(Qwen3Config(**keys)).to(xt.get_default_device())
        yield f"model/{name}/{precision}/drawn", digest(*model.parameters())
        with xt.no_grad():  # away from ones and zeros, which hide what they are multiplied with
            for number, parameter in enumerate(model.parameters()):
                parameter.add_(normal(str(number), "float32", parameter.shape)[0] * 0.05)
        model = model.to(getattr(xt, dtype))
        tokens = np.random.default_rng(0).integers(0, keys["vocab_size"], (2, batch, length))
        tokens[1, :, 3] = -100
        ids, targets = tensor(tokens[0], "int64"), tensor(tokens[1], "int64")
        with context():
            with xt.no_grad():
                yield f"model/{name}/{precision}/logits", digest(model(ids))
                generated = model.generate(ids[:, :5], 8, temperature=0.8, top_k=20, top_p=0.9, seed=1)
                yield f"model/{name}/{precision}/generated", digest(generated)
            for recomputed, (layers, streams) in RECOMPUTED.items():
                if streams and not keys.get("mhc_streams"):
                    continue
                model.gradient_checkpointing, model.stream_checkpointing = layers, streams
                loss = model.loss(ids, targets)
                loss.backward()
                where = f"model/{name}/{precision}{recomputed}"
                yield f"{where}/loss", digest(loss)
                for parameter_name, parameter in model.named_parameters():
                    yield f"{where}/gradient {parameter_name}", digest(parameter.grad)
                    parameter.grad = None


# ---- training ----------------------------------------------------------------------------------------------------------------------------


def training() -> Found:
    """Runs of the Trainer, and one whose weight is NaN at step 27 and mended: on a GPU the guard stops that step and those queued
    behind it. Its end has to be that of the plain run."""
    runs = {"plain": {}, "mhc4": {"model.mhc_streams": 4, "grad_accum": 2}}
    for (name, changes), (precision, _, _), bad in itertools.product(runs.items(), precisions(), (False, True)):
        with tempfile.TemporaryDirectory() as folder:
            data, out = Path(folder, "text.txt"), Path(folder, "run")
            data.write_bytes(np.random.default_rng(0).choice(np.frombuffer(b"(x) = 1;\n", np.uint8), 20_000).tobytes())
            values = {
                "data": str(data), "out": str(out), "model.preset": "tiny", "device": str(xt.get_default_device()), "steps": 50,
                "precision": precision, "batch_size": 4, "seq_len": 64, "eval_every": 0, "save_every": 0, "eval_tokens": 512,
                "sample.tokens": 0, "plot": False, **changes,
            }  # fmt: skip
            yield from run(f"training/{name}{'-bad-step' if bad else ''}/{precision}", values, out, bad)


def sgd() -> Found:
    """Ten steps of SGD, which the Trainer does not use."""
    for dtype in ("float32", "float64"):
        weight = xt.nn.Parameter(normal("weight", dtype, (33, 7))[0])
        optimizer = xt.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
        for step in range(10):
            (weight.grad,) = normal(f"step {step}", dtype, (33, 7))
            optimizer.step()
        yield f"sgd/{dtype}", digest(weight)


def run(name: str, values: dict, out: Path, bad: bool) -> Found:
    trainer = Trainer(values, quiet=True)
    # Five steps one by one; `run` queues the others.
    lines = [{"step": step, **trainer.train_step()} for step in range(1, 6)]
    if bad:
        weight = dict(trainer.model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
        next_batch, kept = trainer.loader.next_batch, []

        def poisoned():
            if trainer.step == 26 and not kept:
                with xt.no_grad():
                    kept.append(weight.detach()[1, 2].item())
                    weight[1, 2] = math.nan
            return next_batch()

        trainer.loader.next_batch = poisoned
        with contextlib.suppress(NonFiniteError):
            trainer.run()
        yield f"{name}/stopped at", digest(trainer.step)
        with xt.no_grad():
            weight[1, 2] = kept[0]
    result = trainer.run()
    lines += [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        yield f"{name}/step {line['step']:02}", digest(line["loss"], line["grad_norm"])
    yield f"{name}/validation", digest(result.val_loss)
    yield f"{name}/model", digest(*trainer.model.state_dict().values())
    states = trainer.optimizer.state_dict()["state"]
    for part in ("exp_avg", "exp_avg_sq", "master"):
        yield f"{name}/{part}", digest(*(states[key][part] for key in sorted(states) if part in states[key]))
    yield f"{name}/counted", digest([int(states[key]["step"]) for key in sorted(states)])


# ---- the command -------------------------------------------------------------------------------------------------------------------------


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for every item that is not the same in both."""
    found = [f"only before: {name}" for name in before if name not in after]
    found += [f"only after: {name}" for name in after if name not in before]
    return found + [f"differs: {name}" for name in before if name in after and before[name] != after[name]]


def compare(before: Path, after: Path) -> int:
    files = [json.loads(path.read_text()) for path in (before, after)]
    if files[0]["machine"] != files[1]["machine"]:
        print(f"other machines: {files[0]['machine']} and {files[1]['machine']}")
    lines = differences(*(file["items"] for file in files))
    print("\n".join([*lines, f"{len(lines)} of {len(files[0]['items'] | files[1]['items'])} items differ"]))
    return int(bool(lines) or not files[0]["items"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Hashes of what xtrain computes.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--only", default="", help="items whose names begin with this")
    parser.add_argument("--json", type=Path, help="write the hashes to this file")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="two such files")
    args = parser.parse_args()
    if args.compare:
        return compare(*args.compare)

    xt.set_default_device(args.device)
    begun, items = time.monotonic(), {}
    table = functools.partial(ops, args.only)
    parts = {"ops/": table, "gemm/ attention/": backends, "model/": models, "training/": training, "sgd/": sgd}
    for names, part in parts.items():
        wanted = any(args.only.startswith(name) or name.startswith(args.only) for name in names.split())
        for name, value in part() if wanted else ():
            assert name not in items, f"two items are called {name}"
            if name.startswith(args.only):
                items[name] = value
                print(name, value)
    print(f"{len(items)} items in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    if args.json:
        machine = [args.device, platform.machine(), *sorted(map(str, _C.cpu_features()))]
        args.json.write_text(json.dumps({"machine": machine, "items": items}, indent=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
