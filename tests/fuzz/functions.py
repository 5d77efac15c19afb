"""Steps of a random program that compute: arithmetic, reductions, products, layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import rules
from frame import Wrong
from values import (
    CPU,
    ENTRY,
    FLOATS,
    INTS,
    SIZES,
    TIES,
    Program,
    Value,
    broadcasts,
    is_tame,
    mirrored,
    promoted,
    taken,
)

from xtrain import _C
from xtrain.optable import references
from xtrain.optable.judge import forward_tolerance
from xtrain.optable.table import Case, exact


class Functions(Program):
    def unary(self) -> None:
        name = self.chance.choice(tuple(rules.UNARY))
        x = self.pick(FLOATS, tame=True)
        if name in ("log", "sqrt", "rsqrt", "reciprocal") and not (x.shadow >= 0.2).all():
            x = self.leaf(self.chance.choice(FLOATS), positive=True)
        kwargs = {"approximate": "tanh"} if name == "gelu" and self.chance.random() < 0.5 else {}
        entry = ENTRY["gelu:tanh" if kwargs else name]
        out = self.result(name, entry, getattr(_C, name)(x.tensor, **kwargs), [x], kwargs)
        self.record(name, [x], out, entry, **kwargs)

    def fitting(self, x: Value, dtype: str | None = None) -> Value:
        """Another operand that broadcasts with x."""
        same = [
            v for v in self.values if broadcasts(v.shadow.shape, x.shadow.shape) and (dtype is None or v.dtype == dtype)
        ]
        if same and self.chance.random() < 0.5:
            return self.chance.choice(same)
        shape = [n if self.chance.random() < 0.7 else 1 for n in x.shadow.shape[self.chance.choice((0, 0, 0, 1)) :]]
        if x.shadow.ndim == len(shape) < 4 and self.chance.random() < 0.1:
            shape.insert(0, self.chance.choice((1, 2, 3)))
        return self.leaf(dtype or (x.dtype if self.chance.random() < 0.8 else None), tuple(shape))

    def binary(self) -> None:
        name = self.chance.choice(tuple(rules.BINARY))
        a = self.pick(FLOATS, tame=True)
        b = self.fitting(a, None if self.chance.random() < 0.2 else a.dtype)
        if name == "pow" and not (a.shadow >= 0.2).all():
            a = self.leaf(a.dtype, a.shadow.shape, positive=True)
        if name == "div" and not (np.abs(b.shadow) >= 0.1).all():
            b = self.leaf(a.dtype, b.shadow.shape, positive=True)
        if b.dtype not in FLOATS or not is_tame(b.shadow):
            return
        if self.chance.random() < 0.3 and name not in ("pow", "div"):
            a, b = b, a
        out_dtype = promoted(a, b)
        arrays = [exact(v.shadow, out_dtype) for v in (a, b)]
        out = self.result(name, ENTRY[name], getattr(_C, name)(a.tensor, b.tensor), [a, b], {}, arrays)
        if out.dtype != out_dtype:
            raise Wrong(
                f"{name} of {a.dtype} {a.shadow.shape} and {b.dtype} {b.shadow.shape}: dtype must be {out_dtype}, got {out.dtype}"
            )
        self.record(name, [a, b], out, ENTRY[name])

    def integers(self) -> None:
        name = self.chance.choice(("add", "sub", "mul", "maximum", "minimum"))
        a = self.pick(INTS)
        b = self.fitting(a, self.chance.choice(INTS))
        dtype = promoted(a, b)
        want = ENTRY[name].reference(a.shadow.astype(dtype), b.shadow.astype(dtype))
        self.result(name, ENTRY[name + ":int"], getattr(_C, name)(a.tensor, b.tensor), [a, b], {}, want=want)

    def compare(self) -> None:
        name = self.chance.choice(("eq", "ne", "lt", "le", "gt", "ge"))
        a = self.pick()
        b = self.fitting(a, a.dtype)
        self.record(name, [a, b], self.result(name, ENTRY[name], getattr(_C, name)(a.tensor, b.tensor), [a, b], {}))

    def where(self) -> None:
        a = self.pick(FLOATS)
        b = self.fitting(a, a.dtype)
        c = self.fitting(b, "bool")
        if not broadcasts(c.shadow.shape, np.broadcast_shapes(a.shadow.shape, b.shadow.shape)):
            return
        out = self.result("where", ENTRY["where"], _C.where(c.tensor, a.tensor, b.tensor), [c, a, b], {})
        self.record("where", [c, a, b], out)

    def reduce(self) -> None:
        name = self.chance.choice(("sum", "mean", "amax", "amin"))
        x, kwargs = self.pick(FLOATS, tame=True), {}
        if x.shadow.ndim and self.chance.random() < 0.8:
            some = self.chance.sample(range(x.shadow.ndim), self.chance.randint(1, x.shadow.ndim))
            dims = tuple(d - x.shadow.ndim if self.chance.random() < 0.3 else d for d in some)
            kwargs = {
                "dim": dims if len(dims) > 1 or self.chance.random() < 0.3 else dims[0],
                "keepdim": self.chance.random() < 0.4,
            }
        if not x.shadow.size and name != "sum":
            return
        out = self.result(name, ENTRY[name], getattr(_C, name)(x.tensor, **kwargs), [x], kwargs)
        self.record(name, [x], out, ENTRY[name], **kwargs)

    def product(self) -> None:
        a = self.pick(FLOATS, tame=True, dims=1)
        inner, columns = a.shadow.shape[-1], self.chance.choice(SIZES)
        batch = (
            tuple(n if self.chance.random() < 0.6 else 1 for n in a.shadow.shape[:-2])
            if self.chance.random() < 0.6
            else ()
        )
        b = self.leaf(a.dtype, (inner,) if self.chance.random() < 0.1 else (*batch, inner, columns))
        if flushes(a, b):
            return
        out = self.result("matmul", ENTRY["matmul"], _C.matmul(a.tensor, b.tensor), [a, b], {})
        self.record("matmul", [a, b], out, ENTRY["matmul"])

    def dense(self) -> None:
        x = self.pick(FLOATS, tame=True, dims=1)
        inputs, inner = [x], x.shadow.shape[-1]
        inputs.append(self.leaf(x.dtype, (self.chance.choice(SIZES), inner)))
        if self.chance.random() < 0.4:
            inputs.append(self.leaf(x.dtype, inputs[1].shadow.shape[:1]))
        if flushes(*inputs[:2]):
            return
        entry, want = ENTRY["linear" if len(inputs) == 2 else "linear:bias"], None
        if len(inputs) == 3:  # the product is rounded before the bias is added, and may be infinite by then
            product = x.shadow @ inputs[1].shadow.T
            large = np.isinf(exact(product, x.dtype))
            want = np.where(large, np.copysign(np.inf, product), product) + inputs[2].shadow
        out = self.result("linear", entry, _C.linear(*(v.tensor for v in inputs)), inputs, {}, want=want)
        self.record("linear", inputs, out, entry)

    def layer(self) -> None:
        chance, x = self.chance, self.pick(FLOATS, tame=True, dims=1)
        name, width = chance.choice(("softmax", "rms_norm", "layer_norm", "swiglu", "swiglu")), x.shadow.shape[-1]
        inputs, kwargs, variant = [x], {}, ""
        if name == "softmax":
            kwargs = {"dim": chance.randrange(-x.shadow.ndim, x.shadow.ndim)}
            if not x.shadow.size:
                return
        elif name == "rms_norm":
            if not width:
                return
            inputs += [self.leaf(x.dtype, (width,))]
            kwargs = {"eps": chance.choice((1e-6, 1e-5, 0.5))}
        elif name == "layer_norm":
            if width < 2:
                return
            inputs += [self.leaf(x.dtype, (width,)), self.leaf(x.dtype, (width,))]
            kwargs = {"eps": chance.choice((1e-5, 0.5))}
        elif width % 2 or chance.random() < 0.5:
            inputs += [self.leaf(x.dtype, x.shadow.shape)]
        else:
            variant = ":halves"
        if name.endswith("_norm"):
            self.normed(name, inputs, kwargs)
            return
        entry = ENTRY[name + variant]
        out = self.result(name, entry, getattr(_C, name)(*(v.tensor for v in inputs), **kwargs), inputs, kwargs)
        self.record(name, inputs, out, entry, **kwargs)

    def normed(self, name: str, inputs: list[Value], kwargs: dict[str, Any]) -> None:
        call = getattr(_C, name)(*(v.tensor for v in inputs), **kwargs)
        undecided = open_sign(name, inputs, kwargs)
        out = self.result(name, ENTRY[name], call, inputs, kwargs, open_sign=undecided)
        self.record(name, inputs, out, ENTRY[name], **kwargs)

    def lookup(self) -> None:
        words = self.chance.choice((1, 3, 7))
        weight = self.leaf(self.chance.choice(FLOATS), (words, self.chance.choice(SIZES)))
        shape = self.shape(2)
        ids = np.abs(taken(TIES, self.chance.randrange(1000), shape)) % words
        tensor = self.place(ids, "int64")
        held = self.keep(tensor, mirrored(tensor, ids))
        self.trace.append(f"v{len(self.values) - 1} = ids {shape}")
        out = self.result("embedding", ENTRY["embedding"], _C.embedding(held.tensor, weight.tensor), [held, weight], {})
        self.record("embedding", [held, weight], out, ENTRY["embedding"])

    def indices(self, count: int, shape: tuple[int, ...], low: int = 0, once: int | None = None) -> Value:
        """Kept indices in [low, count); once: the dimension along which none comes twice."""
        if once is None:
            ids = low + np.abs(taken(TIES, self.chance.randrange(1000), shape) * 7919 + 3) % max(count - low, 1)
        else:
            order = np.array(self.chance.sample(range(count), shape[once]), np.int64)
            ids = np.broadcast_to(order.reshape([-1 if d == once else 1 for d in range(len(shape))]), shape)
        tensor = self.place(ids, "int64")
        held = self.keep(tensor, mirrored(tensor, np.array(ids, np.int64)))
        self.trace.append(lambda: f"v{self.values.index(held)} = indices {ids.tolist()}")
        return held

    def along(self) -> tuple[Value, int, tuple[int, ...]] | None:
        """A value, a dimension of it, and sizes of an index that fit."""
        chance, x = self.chance, self.pick(FLOATS, dims=1)
        shape = x.shadow.shape
        if not x.shadow.size:
            return None
        dim = chance.randrange(len(shape))
        sizes = [n if chance.random() < 0.6 else chance.randint(1, n) for n in shape]
        return x, dim, tuple(sizes)

    def gather(self) -> None:
        if (found := self.along()) is None:
            return
        x, dim, sizes = found
        index = self.indices(
            x.shadow.shape[dim], tuple(self.chance.choice(SIZES) if d == dim else n for d, n in enumerate(sizes))
        )
        turned = dim - x.shadow.ndim * (self.chance.random() < 0.5)
        entry, kwargs = ENTRY["gather"], {"dim": dim}
        out = self.result("gather", entry, _C.gather(x.tensor, turned, index.tensor), [x, index], kwargs)
        self.record("move", [x], out, places=entry.reference(numbered(x), index.shadow, dim))

    def put_along(self) -> None:
        """scatter, to places of their own, and scatter_add, to any."""
        if (found := self.along()) is None:
            return
        (x, dim, sizes), add = found, self.chance.random() < 0.5
        if add and not is_tame(x.shadow):
            return
        index = self.indices(x.shadow.shape[dim], sizes, once=None if add else dim)
        src = self.leaf(x.dtype, sizes, tame=True)
        name, arrays = "scatter_add" if add else "scatter", [x.shadow, index.shadow, src.shadow]
        call = getattr(_C, name)(x.tensor, dim, index.tensor, src.tensor)
        out = self.result(name, ENTRY[name], call, [x, index, src], {"dim": dim}, arrays)
        places = ENTRY["gather"].reference(numbered(x), index.shadow, dim)
        self.record("put", [x, src], out, ENTRY[name], places=places, add=add)

    def put(self) -> None:
        """index_put along the first one or two dimensions."""
        chance, x = self.chance, self.pick(FLOATS, tame=True, dims=1)
        shape, add = x.shadow.shape, chance.random() < 0.5
        if not x.shadow.size:
            return
        count = chance.randint(1, min(2, len(shape)))
        some = chance.choice((1, 2, 5)) if add else chance.randint(1, shape[0])
        # Places of their own, where they are not added: the first index names no row twice.
        index = [self.indices(shape[0], (some,), *(() if add else (0, 0)))]
        index += [self.indices(n, (some,), -n) for n in shape[1:count]]
        values = self.leaf(x.dtype, (some, *shape[count:]), tame=True)
        entry = ENTRY["index_put:accumulate" if add else "index_put"]
        call = _C.index_put(x.tensor, [i.tensor for i in index], values.tensor, add)
        out = self.result(f"index_put {add}", entry, call, [x, *index, values], {})
        places = numbered(x)[tuple(i.shadow for i in index)]
        self.record("put", [x, values], out, entry, places=places, add=add)

    def running(self) -> None:
        x = self.pick(FLOATS, tame=True)
        dim = self.chance.randrange(-x.shadow.ndim, x.shadow.ndim) if x.shadow.ndim else 0
        entry, kwargs = ENTRY["cumsum"], {"dim": dim}
        out = self.result("cumsum", entry, _C.cumsum(x.tensor, dim), [x], kwargs)
        self.record("cumsum", [x], out, entry, **kwargs)

    def convolve(self) -> None:
        chance, dtype = self.chance, self.chance.choice(FLOATS)
        groups, ins, outs = chance.choice((1, 1, 2, 3)), chance.choice((1, 1, 2, 3)), chance.choice((1, 2, 3))
        batch, length, taps = chance.choice((0, 1, 2)), chance.choice((1, 4, 9, 17)), chance.choice((1, 2, 3, 5))
        kwargs = {
            "stride": chance.choice((1, 1, 2, 3)),
            "padding": chance.choice((0, 1, 4)),
            "dilation": chance.choice((1, 1, 2)),
        }
        if length + 2 * kwargs["padding"] <= kwargs["dilation"] * (taps - 1):
            return
        inputs = [
            self.leaf(dtype, (batch, groups * ins, length), tame=True),
            self.leaf(dtype, (groups * outs, ins, taps), tame=True),
        ]
        inputs += [self.leaf(dtype, (groups * outs,), tame=True)] * (chance.random() < 0.5)
        kwargs["groups"] = groups
        entry = ENTRY["conv1d:direct" if len(inputs) == 3 else "conv1d:chosen"]
        call = {**kwargs, "padding_behind": kwargs["padding"]}
        if len(inputs) == 3 and chance.random() < 0.5:
            call["algorithm"] = chance.choice(("direct", "products"))
        out = self.result("conv1d", entry, _C.conv1d(*(v.tensor for v in inputs), **call), inputs, kwargs)
        self.record("conv1d", inputs, out, entry, **kwargs)

    def convolve_causally(self) -> None:
        chance, dtype = self.chance, self.chance.choice(FLOATS)
        batch, steps, width, taps = (
            chance.choice((0, 1, 2)),
            chance.choice(SIZES),
            chance.choice((1, 3, 8, 17)),
            chance.randint(1, 8),
        )
        inputs = [self.leaf(dtype, (batch, steps, width), tame=True), self.leaf(dtype, (width, taps), tame=True)]
        inputs += [self.leaf(dtype, (width,), tame=True)] * (chance.random() < 0.5)
        kwargs = {"activation": "silu"} if chance.random() < 0.5 else {}
        entry = ENTRY[
            "causal_conv1d:no_bias" if len(inputs) == 2 else "causal_conv1d:silu" if kwargs else "causal_conv1d"
        ]
        call = _C.causal_conv1d(*(v.tensor for v in inputs), **kwargs)
        out = self.result("causal_conv1d", entry, call, inputs, kwargs)
        self.record("causal_conv1d", inputs, out, entry, **kwargs)

    def rotate(self) -> None:
        chance, dtype = self.chance, self.chance.choice(FLOATS)
        lead = chance.choice(((5,), (1,), (0,), (2, 3), (1, 9)))
        x = self.leaf(dtype, (*lead, chance.choice((1, 2, 3)), 2 * chance.choice((1, 3, 4, 16))), tame=True)
        kwargs: dict[str, Any] = {"theta": chance.choice((10000.0, 1e6))}
        inputs, positions, count = [x], {}, math.prod(lead)
        if chance.random() < 0.5:
            inputs.append(self.indices(40, (count,)))
            positions = {"positions": inputs[1].tensor}
        elif len(lead) == 1:
            kwargs["period"] = chance.choice((1, 3))
        entry = ENTRY["rope"]
        given = {**kwargs, **({"positions": inputs[1].shadow} if positions else {})}
        want = np.asarray(references.rope(x.shadow, **given))
        out = self.result("rope", entry, _C.rope(x.tensor, **kwargs, **positions), [x], kwargs, want=want)
        self.record("rope", [x], out, entry, **given)

    def loss(self) -> None:
        rows, words = self.chance.choice((1, 2, 5)), self.chance.choice((1, 3, 8, 33))
        x = self.leaf(self.chance.choice(FLOATS), (rows, words), tame=True)
        targets = np.abs(taken(TIES, self.chance.randrange(1000), (rows,))) % words
        held = self.keep(_C.tensor(targets), targets)
        self.trace.append(f"v{len(self.values) - 1} = targets")
        reduction = self.chance.choice(("mean", "sum", "none"))
        entry = ENTRY["cross_entropy:" + reduction]
        call = _C.cross_entropy(x.tensor, held.tensor, reduction=reduction)
        out = self.result(f"cross_entropy {reduction}", entry, call, [x, held], {})
        self.record("cross_entropy", [x, held], out, entry, reduction=reduction)

    def attend(self) -> None:
        chance = self.chance
        batch, heads, rows, columns, width = (chance.choice((1, 1, 2, 3, 5)) for _ in range(5))
        dtype = chance.choice(FLOATS)
        q = self.leaf(dtype, (batch, heads, rows, width), tame=True)
        k, v = (self.leaf(dtype, (batch, heads, columns, width), tame=True) for _ in range(2))
        kwargs: dict[str, Any] = {"is_causal": chance.random() < 0.5 and rows <= columns}
        if chance.random() < 0.3:
            kwargs["scale"] = 0.5
        _C.use_attention_backend(chance.choice(_C.attention_backends(CPU)) if chance.random() < 0.3 else None)
        entry = ENTRY["scaled_dot_product_attention"]
        call = _C.scaled_dot_product_attention(q.tensor, k.tensor, v.tensor, **kwargs)
        self.record("attention", [q, k, v], self.result("attention", entry, call, [q, k, v], kwargs), entry, **kwargs)

    def number(self) -> None:
        """A tensor and a number."""
        name = self.chance.choice(("add", "sub", "mul", "maximum", "minimum"))
        x, value = self.pick(FLOATS, tame=True), self.chance.choice((0, 1, -2, 0.5, -0.25, True))
        turned = self.chance.random() < 0.5
        pair = (value, x.tensor) if turned else (x.tensor, value)
        arrays = [np.float64(value), x.shadow] if turned else [x.shadow, np.float64(value)]
        out = self.result(f"{name} of {value}", ENTRY[name], getattr(_C, name)(*pair), [x], {}, arrays)
        self.record(name, [x], out, ENTRY[name], number=value, turned=turned)


def numbered(x: Value) -> np.ndarray:
    """The elements of x as 0, 1, ..."""
    return np.arange(x.shadow.size).reshape(x.shadow.shape)


def flushes(a: Value, b: Value) -> bool:
    """Whether Inf or NaN may meet a subnormal number in a product of bfloat16: instructions that take it as zero make NaN
    of Inf times it, others Inf."""
    small = any(((v.shadow != 0) & (np.abs(v.shadow) < 2.0**-126)).any() for v in (a, b))
    return a.dtype == "bfloat16" and small and not all(np.isfinite(v.shadow).all() for v in (a, b))


def open_sign(name: str, inputs: list[Value], kwargs: dict[str, Any]) -> np.ndarray:
    """Where an infinite weight meets a normalised number that is zero within its own tolerance: the product is not finite,
    and rounding says which of inf, -inf and NaN it is. A constant row is such a case: its mean is rounded, too."""
    x, weight, *bias = (v.shadow for v in inputs)
    plain = [x, np.ones_like(weight), *(np.zeros_like(b) for b in bias)]
    normed, dtype = ENTRY[name].reference(*plain, **kwargs), inputs[0].dtype
    near = forward_tolerance(ENTRY[name], Case((), kwargs), plain, [normed], 0, dtype, dtype)
    return np.isinf(weight) & (np.abs(normed) <= near)
