"""Hyper-connections on one GPU: microseconds forward and backward, xtrain, eager PyTorch, torch.compile and Liger-Kernel in turns.

    python parity/bench/gpu_mhc.py [--tokens 4096,8192] [--channels 2560,4096,7168] [--streams 4] [--rounds 5] [--only layer] [--json FILE]

    pre       h_in and the coefficients of x            sinkhorn  20 iterations of form D
    open      pre and sinkhorn                          post      the streams mixed, the layer's output written to them
    layer     open and post around a layer that is the identity: what a hyper-connection adds to a layer

Bytes are those of the traffic model: of the streams alone, in elements a token (n streams of C channels; every token's coefficients are
a hundredth of them): x read once for the statistics and the products and once for h_in; backward the gradient of x is written once for
each op. "least" reads x once and never stores the gradient of x between post and pre. Percentages are of a copy of 1 GiB measured in
the same run: `of copy` is bytes of the model over time over the copy's rate, so that 100 is the model's floor.

Streams are bfloat16, parameters and coefficients float32, on all sides; there is no gamma, which Liger has not. Liger-Kernel is used
where it can be imported; it reads phi transposed. A burst repeats a call until about 20 ms have passed, from an idle device to an idle
device; contenders take turns and medians are printed. Results and gradients of everybody are compared with eager PyTorch's before anything
is timed. Whoever is further from it than 2^-5 of the largest element (float32 alone: 1e-4), or not finite, is named, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

import torch
from gpu_timing import copy_rate, measure

import xtrain as xt
from xtrain import _C

try:
    from liger_kernel.transformers import functional as liger
except Exception as error:  # not installed, or not for this PyTorch
    liger, reason = None, error

EPS = 1e-6
ITERS = 20


# ---- the plain forward -----------------------------------------------------------------------------------------------


def torch_pre(x, phi, alpha, bias):
    n = x.shape[-2]
    streams = x.float()
    v = streams.flatten(-2)
    q = torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS) * torch.nn.functional.linear(v, phi)
    pre, post, res = q.split((n, n, n * n), -1)
    h_pre = torch.sigmoid(alpha[0] * pre + bias[:n]) + EPS
    h_post = 2 * torch.sigmoid(alpha[1] * post + bias[n : 2 * n])
    h_res = (alpha[2] * res + bias[2 * n :]).unflatten(-1, (n, n))
    return (h_pre[..., None] * streams).sum(-2).to(x.dtype), h_post, h_res


def torch_sinkhorn(z):
    a = z.softmax(-1) + EPS
    for stage in range(2 * ITERS - 1):
        a = a / (a.sum(-1 if stage % 2 else -2, keepdim=True) + EPS)
    return a


def torch_post(x, y, h_post, h_res):
    return (h_res @ x.float() + h_post[..., None] * y[..., None, :].float()).to(x.dtype)


def torch_open(*inputs):
    h_in, h_post, h_res = torch_pre(*inputs)
    return h_in, h_post, torch_sinkhorn(h_res)


def torch_layer(x, *parameters):
    return torch_post(x, *torch_open(x, *parameters))


# ---- ours and Liger's ------------------------------------------------------------------------------------------------


def our_sinkhorn(z):
    return _C.sinkhorn(z, iters=ITERS, eps=EPS, form="D")


def our_open(x, phi, alpha, bias):
    h_in, h_post, h_res = _C.mhc_pre(x, phi, alpha, bias, None, norm_eps=EPS, hc_eps=EPS)
    return h_in, h_post, our_sinkhorn(h_res)


def our_layer(x, phi, alpha, bias):
    h_in, h_post, m, carry = _C.mhc_open(x, phi, alpha, bias, None, EPS, EPS, ITERS, EPS, "D", False)
    return _C.mhc_close(carry, h_in, h_post, m)


def liger_open(x, phi, alpha, bias):
    h_pre, h_post, m = liger.liger_mhc_coeffs(
        x, phi, bias, *alpha, tmax=ITERS, rms_eps=EPS, pre_eps=EPS, sinkhorn_eps=EPS
    )
    return liger.liger_mhc_pre(x, h_pre), h_post, m


def liger_layer(x, *parameters):
    return liger.liger_mhc_post_res(x, *liger_open(x, *parameters))


# ---- entries ---------------------------------------------------------------------------------------------------------


def entries(tokens: int, n: int, c: int):
    """name -> (inputs, ours, PyTorch's, Liger's or None, bytes of the model forward and backward, least bytes of both)."""
    rows, item = n * n + 2 * n, 2 * tokens * c

    def streams():
        return torch.randn(tokens, n, c, device="cuda").bfloat16()

    parameters = [
        torch.randn(rows, n * c, device="cuda") / math.sqrt(n * c),
        torch.tensor([1.1, 0.9, 1.05], device="cuda"),
        0.1 * torch.randn(rows, device="cuda"),
    ]
    logits, y = torch.randn(tokens, n, n, device="cuda"), torch.randn(tokens, c, device="cuda").bfloat16()
    h_post, m = torch.rand(tokens, n, device="cuda"), torch.rand(tokens, n, n, device="cuda") / n
    ours_pre = lambda *inputs: _C.mhc_pre(*inputs, None, norm_eps=EPS, hc_eps=EPS)  # noqa: E731
    pre, small = [(2 * n + 1) * item, (3 * n + 2) * item], 4 * tokens * n * n
    least = [(n + 1) * item, (2 * n + 1) * item]
    post = [(2 * n + 1) * item, (3 * n + 2) * item]
    layer = [(4 * n + 2) * item, (7 * n + 4) * item], [(3 * n + 2) * item, (6 * n + 4) * item]
    post_res = liger and liger.liger_mhc_post_res
    return {
        "pre": ([streams(), *parameters], ours_pre, torch_pre, None, pre, least),
        "sinkhorn": ([logits], our_sinkhorn, torch_sinkhorn, None, [2 * small, 3 * small], [2 * small, 3 * small]),
        "open": ([streams(), *parameters], our_open, torch_open, liger and liger_open, pre, least),
        "post": ([streams(), y, h_post, m], _C.mhc_post, torch_post, post_res, post, post),
        "layer": ([streams(), *parameters], our_layer, torch_layer, liger and liger_layer, *layer),
    }


def listed(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


class Contender:
    """A function with its leaves, ready to be called forward and backward."""

    def __init__(self, function, leaves, grads, wait, no_grad, run):
        self.function, self.leaves, self.grads = function, leaves, grads
        self.wait, self.no_grad, self.run = wait, no_grad, run
        self.out = listed(function(*leaves))
        self.turned = False

    def forward(self):
        with self.no_grad():
            self.function(*self.leaves)

    def backward(self):
        for leaf in self.leaves:
            leaf.grad = None
        self.run(self.out, self.grads)

    def results(self):
        self.backward()
        self.wait()
        found = [torch.from_dlpack(t.detach()).float() for t in [*self.out, *(leaf.grad for leaf in self.leaves)]]
        if self.turned:  # its phi lies the other way round
            found[len(self.out) + 1] = found[len(self.out) + 1].t()
        return found


def contenders(inputs, ours, theirs, ligers, compiled: bool) -> dict[str, Contender]:
    grads = [torch.randn_like(t) for t in listed(theirs(*inputs))]

    def torch_one(function, given):
        leaves = [t.detach().clone().requires_grad_() for t in given]
        run = lambda out, dy: torch.autograd.backward(out, dy, retain_graph=True)  # noqa: E731
        return Contender(function, leaves, grads, torch.cuda.synchronize, torch.no_grad, run)

    torch.cuda.synchronize()
    leaves = [xt.from_dlpack(t).clone().requires_grad_() for t in inputs]
    run = lambda out, dy: _C.backward(out, dy, True)  # noqa: E731
    of_ours = [xt.from_dlpack(g) for g in grads]
    found = {"xtrain": Contender(ours, leaves, of_ours, xt.cuda.synchronize, xt.no_grad, run)}
    found["eager"] = torch_one(theirs, inputs)
    if compiled:
        torch._dynamo.reset()
        found["compile"] = torch_one(torch.compile(theirs), inputs)
    if ligers:
        turned = len(inputs[0].shape) == 3 and inputs[1].ndim == 2 and len(inputs[1]) != len(inputs[0])
        given = [inputs[0], inputs[1].t().contiguous(), *inputs[2:]] if turned else inputs
        try:
            found["Liger"] = torch_one(ligers, given)
            found["Liger"].turned = turned
            found["Liger"].results()
            torch.cuda.synchronize()
        except Exception as error:
            found.pop("Liger", None)
            print(f"Liger left out: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    return found


def differences(found: dict[str, Contender]) -> dict[str, float]:
    """How far everybody is from eager PyTorch: of all results and gradients the largest difference, relative to the largest element;
    infinite where something is not finite."""
    right, apart = found["eager"].results(), {}
    for who, one in found.items():
        if who == "eager":
            continue
        errors = [
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
            for a, b in zip(one.results(), right, strict=True)
        ]
        apart[who] = max(errors) if all(map(math.isfinite, errors)) else math.inf
    return apart


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--channels", default="2560,4096,7168")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    rate = copy_rate(args.rounds)[0]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; copy {rate:.0f} GB/s", flush=True)
    if not liger:
        print(f"no Liger-Kernel: {type(reason).__name__}: {reason}", flush=True)
    rows, wrong = [], []
    for tokens in map(int, args.tokens.split(",")):
        for c in map(int, args.channels.split(",")):
            for name, (inputs, ours, theirs, ligers, model, least) in entries(tokens, args.streams, c).items():
                if args.only and name not in args.only.split(","):
                    continue
                found = contenders(inputs, ours, theirs, ligers, not args.no_compile)
                apart = differences(found)
                limit = 2.0**-5 if any(t.dtype == torch.bfloat16 for t in inputs) else 1e-4
                wrong += [
                    f"T {tokens} C {c} {name}: {who} is {e:.1e} from eager"
                    for who, e in apart.items()
                    if not e <= limit
                ]
                seconds = {
                    "forward": measure({who: (one.forward, one.wait) for who, one in found.items()}, args.rounds),
                    "backward": measure({who: (one.backward, one.wait) for who, one in found.items()}, args.rounds),
                }
                seconds["both"] = {who: seconds["forward"][who] + seconds["backward"][who] for who in found}
                text = ", ".join(f"{who} {error:.1e}" for who, error in apart.items())
                print(f"T {tokens} n {args.streams} C {c} {name}: largest difference to eager: {text}", flush=True)
                for i, (kind, times) in enumerate(seconds.items()):
                    moved = [sum(b) if kind == "both" else b[i] for b in (model, least)]
                    text = ""
                    for who, s in times.items():
                        percent = [100 * b / s / 1e9 / rate for b in moved]
                        text += f"   {who} {s * 1e6:8.1f} us {percent[0]:4.0f} %"
                        if who == "xtrain":
                            text += f" (least {percent[1]:3.0f} %)"
                        else:
                            text += f" {s / times['xtrain']:5.2f} x"
                        rows.append(
                            dict(op=name, tokens=tokens, channels=c, kind=kind, by=who, us=s * 1e6, of_copy=percent[0], of_least=percent[1])
                        )  # fmt: skip
                    print(f"    {kind:9}{text}", flush=True)
                del found, inputs
                torch.cuda.empty_cache()
                xt.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    for line in wrong:
        print(f"wrong: {line}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
