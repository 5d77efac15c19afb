"""Memory-bound ops on one GPU: GB/s forward and backward beside the device's measured copy, xtrain and PyTorch in turns.

    python parity/bench/gpu_ops.py [--dtypes float32,bfloat16] [--rounds 5] [--compile] [--only rms_norm,rope] [--json FILE]

Bytes are those that any implementation has to move: inputs and results once. A burst repeats a call until about 20 ms have passed, from an
idle device to an idle device; contenders take turns and medians are printed. Tensors are several times the L2 cache. `--compile` adds
torch.compile of the same composition.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as TF
from gpu_timing import copy_rate, measure

import xtrain as xt
import xtrain.functional as F
from xtrain import _C


def torch_rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def torch_add_rms_norm(x, residual, weight):
    total = x + residual
    return total, TF.rms_norm(total, (x.shape[-1],), weight, 1e-6)


def torch_qk_norm_rope(q, k, q_weight, k_weight, cos, sin):
    return tuple(
        torch_rope(TF.rms_norm(x, (x.shape[-1],), w, 1e-6), cos, sin) for x, w in ((q, q_weight), (k, k_weight))
    )


def torch_causal(x, w, b):
    """As models write it: a Conv1d padded on both sides, cut, between two transposes."""
    rows = TF.conv1d(x.transpose(1, 2), w.unsqueeze(1), b, padding=w.shape[1] - 1, groups=w.shape[0])
    return rows[..., : x.shape[1]].transpose(1, 2)


def rope_angles(dim, dtype, length=4096):
    angle = torch.outer(torch.arange(length).float(), 1e4 ** (-torch.arange(0, dim, 2) / dim))[None, :, None].cuda()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def entries(dtype):
    """name -> (shapes, our function, PyTorch's, tensors moved forward, backward) in units of the first input's bytes."""
    cos, sin = rope_angles(64, dtype)
    long, longest = rope_angles(128, dtype), rope_angles(128, dtype, 32768)
    ids = torch.randint(0, 50257, (16384,), device="cuda")
    ours_ids = xt.from_dlpack(ids)
    return {
        "rms_norm 16384x4096": (
            [(16384, 4096), (4096,)], lambda x, w: F.rms_norm(x, w, 1e-6), lambda x, w: TF.rms_norm(x, (4096,), w, 1e-6), 2, 3,
        ),
        "rms_norm 1048576x128": (
            [(1048576, 128), (128,)], lambda x, w: F.rms_norm(x, w, 1e-6), lambda x, w: TF.rms_norm(x, (128,), w, 1e-6), 2, 3,
        ),
        "rms_norm 262144x384": (
            [(262144, 384), (384,)], lambda x, w: F.rms_norm(x, w, 1e-6), lambda x, w: TF.rms_norm(x, (384,), w, 1e-6), 2, 3,
        ),
        "rms_norm 32768x1024": (
            [(32768, 1024), (1024,)], lambda x, w: F.rms_norm(x, w, 1e-6), lambda x, w: TF.rms_norm(x, (1024,), w, 1e-6), 2, 3,
        ),
        "layer_norm 65536x768": (
            [(65536, 768), (768,), (768,)],
            lambda x, w, b: F.layer_norm(x, 768, w, b),
            lambda x, w, b: TF.layer_norm(x, (768,), w, b),
            2, 3,
        ),
        "add_rms_norm 32768x1024": (
            [(32768, 1024), (32768, 1024), (1024,)], lambda x, r, w: F.add_rms_norm(x, r, w, 1e-6), torch_add_rms_norm, 4, 4,
        ),
        "add_rms_norm 16384x4096": (
            [(16384, 4096), (16384, 4096), (4096,)], lambda x, r, w: F.add_rms_norm(x, r, w, 1e-6), torch_add_rms_norm, 4, 4,
        ),
        "qk_norm_rope 8x4096x16+8x128": (
            [(8, 4096, 16, 128), (8, 4096, 8, 128), (128,), (128,)],
            lambda q, k, v, w: F.qk_norm_rope(q, k, v, w, 1e-6),
            lambda q, k, v, w: torch_qk_norm_rope(q, k, v, w, *long),
            3, 4.5,
        ),
        "qk_norm_rope 8x4096x12+12x64": (
            [(8, 4096, 12, 64), (8, 4096, 12, 64), (64,), (64,)],
            lambda q, k, v, w: F.qk_norm_rope(q, k, v, w, 1e-6),
            lambda q, k, v, w: torch_qk_norm_rope(q, k, v, w, cos, sin),
            4, 6,
        ),
        "norm, rope 8x4096x16+8x128": (
            [(8, 4096, 16, 128), (8, 4096, 8, 128), (128,), (128,)],
            lambda q, k, v, w: (F.rope(F.rms_norm(q, v, 1e-6)), F.rope(F.rms_norm(k, w, 1e-6))),
            lambda q, k, v, w: torch_qk_norm_rope(q, k, v, w, *long),
            3, 4.5,
        ),
        "rope 8x4096x8x128": ([(8, 4096, 8, 128)], lambda x: F.rope(x), lambda x: torch_rope(x, *long), 2, 2),
        "rope 1x32768x8x128": (
            [(1, 32768, 8, 128)], lambda x: F.rope(x), lambda x: torch_rope(x, *longest), 2, 2,
        ),
        "rope 8x4096x32x64": ([(8, 4096, 32, 64)], lambda x: F.rope(x), lambda x: torch_rope(x, cos, sin), 2, 2),
        "causal_conv1d 8x4096x2048, 4": (
            [(8, 4096, 2048), (2048, 4), (2048,)], lambda x, w, b: F.causal_conv1d(x, w, b), torch_causal, 2, 3,
        ),
        "causal_conv1d, silu": (
            [(8, 4096, 2048), (2048, 4), (2048,)],
            lambda x, w, b: F.causal_conv1d(x, w, b, "silu"),
            lambda x, w, b: TF.silu(torch_causal(x, w, b)),
            2, 3,
        ),
        "causal_conv1d, B C S in PyTorch": (  # the same memory, seen as its conv1d wants it
            [(8, 4096, 2048), (2048, 4), (2048,)],
            lambda x, w, b: F.causal_conv1d(x, w, b),
            lambda x, w, b: torch_causal(x.view(8, 2048, 4096).transpose(1, 2), w, b),
            2, 3,
        ),
        "causal_conv1d 8x4096x2048, 3": (
            [(8, 4096, 2048), (2048, 3), (2048,)], lambda x, w, b: F.causal_conv1d(x, w, b), torch_causal, 2, 3,
        ),
        "conv1d 8x512x3000, 512x3, stride 2": (  # bytes are not what bounds it
            [(8, 512, 3000), (512, 512, 3), (512,)],
            lambda x, w, b: F.conv1d(x, w, b, 2, 1),
            lambda x, w, b: TF.conv1d(x, w, b, 2, 1),
            1.5, 3,
        ),
        "swiglu 16384x8192": (
            [(16384, 8192), (16384, 8192)], lambda g, u: F.swiglu(g, u), lambda g, u: TF.silu(g) * u, 3, 5,
        ),
        "swiglu joined 32768x3072": (
            [(32768, 6144)], lambda x: F.swiglu(x), lambda x: TF.silu(x[:, :3072]) * x[:, 3072:], 1.5, 2.5,
        ),
        "softmax 16384x4096": ([(16384, 4096)], lambda x: F.softmax(x), lambda x: TF.softmax(x, -1), 2, 3),
        "cross_entropy 16384x50257": (
            [(16384, 50257)],
            lambda x: F.cross_entropy(x, ours_ids),
            lambda x: TF.cross_entropy(x, ids),
            1, 2,
        ),
        "gelu 16384x8192": ([(16384, 8192)], lambda x: F.gelu(x), lambda x: TF.gelu(x), 2, 3),
        "add 16384x8192": ([(16384, 8192), (16384, 8192)], lambda a, b: a + b, lambda a, b: a + b, 3, 2),
        "add row 16384x8192": ([(16384, 8192), (8192,)], lambda a, b: a + b, lambda a, b: a + b, 2, 2),
        "sum all 16384x8192": ([(16384, 8192)], lambda x: x.sum(), lambda x: x.sum(), 1, 1),
        "sum rows 16384x8192": ([(16384, 8192)], lambda x: x.sum(1), lambda x: x.sum(1), 1, 1),
        "sum columns 16384x8192": ([(16384, 8192)], lambda x: x.sum(0), lambda x: x.sum(0), 1, 1),
        "transpose 16384x8192": (
            [(16384, 8192)], lambda x: x.transpose(0, 1).contiguous(), lambda x: x.transpose(0, 1).contiguous(), 2, 2,
        ),
        "embedding 65536 of 50257x1024": None,
    }  # fmt: skip


def both_ways(shapes, ours, theirs, dtype, compiled):
    """{name: forward call}, {name: backward call} of xtrain and PyTorch on the same numbers."""
    tensors = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
    mine = [xt.from_dlpack(t).clone() for t in tensors]
    forward, backward = {}, {}

    def add(name, function, inputs, wait, run, no_grad):
        def plain():
            with no_grad():
                function(*inputs)

        leaves = [t.detach().requires_grad_() for t in inputs]
        outs = function(*leaves)
        outs = list(outs) if isinstance(outs, tuple) else [outs]
        dys = []
        for out in outs:
            dy = torch.randn(tuple(out.shape), device="cuda").to(dtype if tuple(out.shape) else torch.float32)
            dys.append(xt.from_dlpack(dy).to(out.dtype) if name == "xtrain" else dy.to(out.dtype))

        def back():
            for leaf in leaves:
                leaf.grad = None
            run(outs, dys)

        forward[name], backward[name] = (plain, wait), (back, wait)

    add("xtrain", ours, mine, xt.cuda.synchronize, lambda ys, dys: _C.backward(ys, dys, True), xt.no_grad)
    run = lambda ys, dys: torch.autograd.backward(ys, dys, retain_graph=True)  # noqa: E731
    add("PyTorch", theirs, tensors, torch.cuda.synchronize, run, torch.no_grad)
    if compiled:
        torch._dynamo.reset()
        add("compile", torch.compile(theirs), tensors, torch.cuda.synchronize, run, torch.no_grad)
    return forward, backward


def embedding_entry(dtype):
    weight = torch.randn(50257, 1024, device="cuda", dtype=dtype)
    ids = torch.randint(0, 50257, (65536,), device="cuda")
    ours_ids = xt.from_dlpack(ids)
    return [(50257, 1024)], lambda w: F.embedding(ours_ids, w), lambda w: TF.embedding(ids, w), weight


def adamw(dtype, rounds):
    """124 M parameters in 148 tensors: p and g in `dtype`, moments float32 (and masters for 16 bits)."""
    shapes = [(50257, 768), (1024, 768)] + [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12 + [(768,)] * 98
    params = [torch.randn(s, device="cuda", dtype=dtype) for s in shapes]
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    mine = [xt.nn.Parameter(xt.from_dlpack(p).clone()) for p in params]
    for p, t in zip(mine, theirs):
        t.grad = torch.randn_like(t)
        p.grad = xt.from_dlpack(t.grad).clone()
    ours = xt.optim.AdamW(mine, lr=1e-3)
    torch_adamw = torch.optim.AdamW(theirs, lr=1e-3, fused=True)
    count, size = sum(p.numel() for p in params), params[0].element_size()
    found = measure(
        {"xtrain": (ours.step, xt.cuda.synchronize), "PyTorch": (torch_adamw.step, torch.cuda.synchronize)}, rounds
    )
    moved = {"xtrain": count * (3 * size + 16 + (8 if size == 2 else 0)) - (count * size if size == 2 else 0)}
    moved["PyTorch"] = count * (3 * size + 4 * size)  # its moments have the dtype of the parameters
    clip = measure(
        {
            "xtrain": (lambda: xt.optim.clip_grad_norm_(mine, 1e9), xt.cuda.synchronize),
            "PyTorch": (
                lambda: torch.nn.utils.clip_grad_norm_(theirs, 1e9, foreach=True), torch.cuda.synchronize,
            ),
        },
        rounds,
    )  # fmt: skip
    return {name: (seconds, moved[name]) for name, seconds in found.items()}, {
        name: (seconds, count * size) for name, seconds in clip.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    rate, found = copy_rate(args.rounds)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; copy {rate:.0f} GB/s: {found}", flush=True)
    rows = []

    def say(name, kind, dtype, times):
        for who, (seconds, moved) in times.items():
            gb = moved / seconds / 1e9
            rows.append(
                dict(op=name, kind=kind, dtype=dtype, by=who, us=seconds * 1e6, gb_per_s=gb, of_copy=100 * gb / rate)
            )
        text = "   ".join(
            f"{who} {s * 1e6:8.1f} us {m / s / 1e9:6.0f} GB/s {100 * m / s / 1e9 / rate:4.0f} %"
            for who, (s, m) in times.items()
        )
        print(f"{name:32}{kind:9}{dtype:9}{text}", flush=True)

    for dtype in args.dtypes.split(","):
        kind = getattr(torch, dtype)
        for name, entry in entries(kind).items():
            if args.only and not any(name.startswith(word) for word in args.only.split(",")):
                continue
            if entry is None:
                shapes, ours, theirs, _ = embedding_entry(kind)
                item = torch.empty((), dtype=kind).element_size()
                forward_bytes, backward_bytes = 2 * 65536 * 1024 * item, (65536 + 50257) * 1024 * item
            else:
                shapes, ours, theirs, forward_units, backward_units = entry
                item = torch.empty((), dtype=kind).element_size() * torch.Size(shapes[0]).numel()
                forward_bytes, backward_bytes = forward_units * item, backward_units * item
            forward, backward = both_ways(shapes, ours, theirs, kind, args.compile)
            say(name, "forward", dtype, {w: (s, forward_bytes) for w, s in measure(forward, args.rounds).items()})
            say(name, "backward", dtype, {w: (s, backward_bytes) for w, s in measure(backward, args.rounds).items()})
            del forward, backward
            torch.cuda.empty_cache()
            xt.cuda.empty_cache()
        if not args.only or "adamw" in args.only:
            update, clip = adamw(kind, args.rounds)
            say("adamw 124 M", "update", dtype, update)
            say("clip_grad_norm_ 124 M", "update", dtype, clip)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
