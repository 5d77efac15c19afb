"""Runs every entry of the op table with inputs of every dtype, forward and backward. Run by test_hostile.py in a process of its own:
nothing may crash, only documented exceptions may come out, and their text must name the op.

Each input in turn, and then all of them, come from a leaf that requires a gradient through a cast, so that the graph reaches the op
with every dtype. The backward then starts from every output, cast back to float32 where the output is no float.
"""

import sys

import numpy as np

from xtrain import _C
from xtrain.optable import TABLE

DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "bool")
DOCUMENTED = (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError)

NAMES = {*_C.op_signatures(), "gemm"}  # an entry may call another op first, as mhc_close does mhc_open

pairs = refusals = 0
wrong = []


def inputs_of(entry, c, dtype, which):
    """The case's inputs: those in `which` have `dtype`, cast from a leaf; the others have the entry's own dtype."""
    tensors = []
    for i, a in enumerate(entry.draw(c, "float32")):
        kind = a.dtype.kind
        t = _C.tensor(np.asarray(a, np.float32 if kind == "f" else a.dtype, order="C"))
        if i in which:
            t = t if kind == "f" else _C.cast(t, _C.float32)
            t = t.requires_grad_(True).to(getattr(_C, dtype))
            if t.requires_grad and not t.dtype.is_floating_point:
                wrong.append(f"cast to {dtype}: requires a gradient")
        tensors.append(t)
    return tensors


def try_pair(entry, c, dtype, which):
    global pairs, refusals
    pairs += 1
    what = f"{entry.id} {c.id} {dtype} {which}"
    print(what, file=trace, flush=True)
    try:
        outputs = entry.call(*inputs_of(entry, c, dtype, which), **c.kwargs)
    except DOCUMENTED as error:
        refusals += 1
        if str(error).split(":")[0] not in NAMES:
            wrong.append(f"{what}: does not name the op: {error}")
        return
    for out in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        if not hasattr(out, "requires_grad"):
            continue
        if out.requires_grad and not out.dtype.is_floating_point:
            wrong.append(f"{what}: a result of {out.dtype} requires a gradient")
        y = out if out.dtype.is_floating_point else out.to(_C.float32)
        try:
            y.sum().backward(retain_graph=True)
        except RuntimeError as error:
            if y.requires_grad or "does not require a gradient" not in str(error):
                wrong.append(f"{what}: forward was accepted, backward was not: {error}")


trace = open(sys.argv[1], "w")  # noqa: SIM115 (to the end of the process): its last line names the pair that a crash ended
for entry in TABLE:
    for c in [c for c in entry.cases if not c.big][:2]:
        everyone = tuple(range(len(c.inputs)))
        for dtype in DTYPES:
            for which in {everyone, *((i,) for i in everyone)}:
                try_pair(entry, c, dtype, which)
for line in sorted(set(wrong)):
    print(line)
print("pairs", pairs, "refusals", refusals)
sys.exit(1 if wrong else 0)
