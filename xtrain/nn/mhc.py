"""Hyper-connections: layers that read from and write to n residual streams instead of one.

    x = nn.expand_streams(embedded, 4)                    # [.., C] -> [.., 4, C]
    for layer in layers:                                  # layer = nn.HyperConnection(C, 4, sublayer)
        x = layer(x)                                      # M x + h_post sublayer(h_pre . x)
    y = nn.StreamContraction(C, 4, "mean")(x)             # [.., 4, C] -> [.., C]

Zhu et al. 2024, Hyper-Connections (arXiv:2409.19606); Xie et al. 2025, mHC: Manifold-Constrained Hyper-Connections
(arXiv:2512.24880). All names are in xtrain.nn; docs/reference/mhc.md has formulas and conventions.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .. import _C, _creation, functional
from .._C import Tensor
from .._types import Device, is_real, is_whole
from ..autograd import Function, FunctionContext, enable_grad, no_grad
from . import init
from .module import Module, Parameter, is_stock

if TYPE_CHECKING:
    from typing_extensions import Self

_Sublayers = list[tuple["HyperConnection", Callable[..., Any]]]


class _Depth(threading.local):
    """A count that each thread has for itself, with += and -=; false at 0."""

    count: int = 0

    def __iadd__(self, steps: int) -> Self:
        self.count += steps
        return self

    def __isub__(self, steps: int) -> Self:
        self.count -= steps
        return self

    def __bool__(self) -> bool:
        return self.count > 0


# Recordings raise this. They isolate each op, whose gradient must be that of its own formula; the carry of mhc_open
# has another one (csrc/ops/mhc/mhc_layer.c). So a recording sees mhc_pre, sinkhorn and mhc_post, and never the two
# fused halves that train. Tests and identities show that both agree (docs/internals/mhc.md).
separate = _Depth()
_WIDE = {"float16": _C.float32, "bfloat16": _C.float32}


def _check_sizes(name: str, dim: object, n: object) -> None:
    for key, value, most in (("dim", dim, None), ("n", n, 8)):
        if not is_whole(value) or value < 1 or (most is not None and value > most):
            rule = "at least 1" if most is None else f"1 to {most}"
            raise ValueError(f"{name}: {key} must be an integer, {rule}, got {value!r}")


def _check_eps(name: str, **values: object) -> None:
    for key, value in values.items():
        if isinstance(value, bool) or not is_real(value):
            raise TypeError(f"{name}: {key} must be a number in [0, 1], got {value!r}")
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: {key} must be in [0, 1], got {value!r}")


def _check_flags(name: str, **values: object) -> None:
    for key, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {key} must be True or False, got {value!r}")


def _check_dtype(name: str, dtype: object) -> None:
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise TypeError(f"{name}: dtype must be a floating point dtype or None, got {getattr(dtype, 'name', dtype)!r}")


def _check_streams(name: str, x: Tensor, *ends: int) -> None:
    """x must be a tensor of floats and end in these dims."""
    if not isinstance(x, _C.Tensor):
        raise TypeError(f"{name}: x must be a Tensor, got {type(x).__name__}")
    shape = x.shape
    if len(shape) < len(ends) or tuple(shape[len(shape) - len(ends) :]) != ends:
        raise ValueError(f"{name}: x must end in shape {ends}, got shape {tuple(shape)}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name}: x must have a floating point dtype, got {x.dtype.name}")


class _Coefficients(Module):
    """Parameters of coefficients: float32 in models of 16-bit formats, also after `to`, as rounding them to bfloat16
    would undo most of an optimizer's steps."""

    n: int

    def _make(
        self, rows: int, dim: int, n: int, alphas: int, affine: bool, dtype: _C.dtype | None, device: Device
    ) -> None:
        dtype = _WIDE.get(dtype.name, dtype) if dtype is not None else _C.float32
        self.phi = Parameter(_C.empty((rows, n * dim), dtype, device))
        self.alpha = Parameter(_C.empty((alphas,), dtype, device))
        self.bias = Parameter(_C.empty((rows,), dtype, device))
        self.gamma = Parameter(_creation.ones((n, dim), dtype=dtype, device=device)) if affine else None

    def _wide(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """phi, alpha, bias and gamma as float32 (float64 for float64 streams x)."""
        want = _WIDE.get(x.dtype.name, x.dtype)

        def wide(p: Tensor) -> Tensor:
            return p if p.dtype is want else p.to(want)

        return wide(self.phi), wide(self.alpha), wide(self.bias), None if self.gamma is None else wide(self.gamma)

    def _dtype_for(self, dtype: _C.dtype | None) -> _C.dtype | None:
        return None if dtype is None else _WIDE.get(dtype.name, dtype)

    def reset_parameters(self) -> None:
        """alpha 0.01, phi normal with deviation 0.02, gamma one; the bias makes h_pre 1 / n."""
        init.normal_(self.phi, 0.0, 0.02)
        init.constant_(self.alpha, 0.01)
        init.zeros_(self.bias)
        with no_grad():  # sigmoid(-log(n - 1)) = 1 / n, and sigmoid(16) = 1 - 1e-7
            _C.slice(self.bias, 0, 0, self.n).fill_(-math.log(self.n - 1) if self.n > 1 else 16.0)
        if self.gamma is not None:
            init.ones_(self.gamma)


class _State(tuple["HyperConnection", Callable[..., Tensor], Tensor, Tensor, Tensor]):
    """What `HyperConnection.write` needs of one `read`: (connection, op that writes, h_post, M, carry).

    Nobody else may use the parts. The gradient of carry is right only beside the h_post and M of the same mhc_open;
    mhc_close refuses others.
    """

    __slots__ = ()

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("HyperConnection: state must be what read returned, got a copy of it")


class HyperConnection(_Coefficients):
    """A sublayer F between n residual streams: x [.., n, dim] -> M x + h_post F(h_in), h_in = sum_j h_pre_j x_j.

        layer = nn.HyperConnection(dim, 4, nn.Sequential(nn.RMSNorm(dim), mlp))
        x = layer(x)                                     # more arguments go to the sublayer
        x = layer(x, sublayer=other)                     # with another sublayer in this call

    h_pre and h_post [.., n] and M = sinkhorn(h_res) [.., n, n] are made for every token from the token itself (see
    functional.mhc_pre, sinkhorn, mhc_post, which this computes bit for bit; its backward moves less memory).

    dim: channels of a stream. n: streams, 1 to 8. sublayer: any callable of h_in [.., dim] that returns that shape; a
    Module becomes part of this one; None when each call brings its own, or for `read` and `write`. iters, form,
    transpose, eps: of the normalisation that makes M. norm_eps: in the RMS of a token. hc_eps: added to h_pre. affine:
    with a weight gamma [n, dim] of the norm (the paper has it inside phi). Parameters: phi [n^2 + 2n, n dim], alpha
    [3], bias [n^2 + 2n], gamma; float32 unless the streams are float64.

    At the start (alpha 0.01, bias chosen so that h_pre = 1 / n, h_post = 1, M = 1 / n) equal streams x become
    x + F(x) up to the small token-dependent part: the plain residual connection. With n = 1 it stays close to it: M is
    1 up to eps.

    ValueError for sizes, forms and numbers outside their ranges, and streams or a sublayer's output of another shape;
    TypeError for values of another kind, other dtypes, and a call without a sublayer.
    """

    def __init__(
        self,
        dim: int,
        n: int,
        sublayer: Callable[..., Any] | None = None,
        *,
        iters: int = 20,
        form: str = "P",
        transpose: bool = False,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        hc_eps: float = 1e-6,
        affine: bool = False,
        device: Device = None,
        dtype: _C.dtype | None = None,
    ) -> None:
        _check_sizes("HyperConnection", dim, n)
        if sublayer is not None and not callable(sublayer):
            raise TypeError(f"HyperConnection: sublayer must be callable or None, got {type(sublayer).__name__}")
        if not isinstance(form, str) or form not in ("P", "D"):
            raise ValueError(f"HyperConnection: form must be 'P' or 'D', got {form!r}")
        if not is_whole(iters) or not 1 <= iters <= 100000:
            raise ValueError(f"HyperConnection: iters must be an integer, 1 to 100000, got {iters!r}")
        _check_eps("HyperConnection", eps=eps, norm_eps=norm_eps, hc_eps=hc_eps)
        _check_flags("HyperConnection", transpose=transpose, affine=affine)
        _check_dtype("HyperConnection", dtype)
        self.dim, self.n = dim, n
        self.iters, self.form, self.transpose = iters, form, transpose
        self.eps, self.norm_eps, self.hc_eps = float(eps), float(norm_eps), float(hc_eps)
        self._make(n * n + 2 * n, dim, n, 3, affine, dtype, device)
        self.sublayer = sublayer
        self.reset_parameters()

    def read(self, x: Tensor) -> tuple[Tensor, _State]:
        """(h_in, state): the sublayer's input h_in [.., dim] of streams x [.., n, dim], and what `write` needs."""
        _check_streams("HyperConnection", x, self.n, self.dim)
        parameters = self._wide(x)
        if separate:
            h_in, h_post, h_res = functional.mhc_pre(x, *parameters, norm_eps=self.norm_eps, hc_eps=self.hc_eps)
            m = functional.sinkhorn(h_res, iters=self.iters, eps=self.eps, form=self.form, transpose=self.transpose)
            return h_in, _State((self, functional.mhc_post, h_post, m, x))
        options = (self.norm_eps, self.hc_eps, self.iters, self.eps, self.form, self.transpose)
        h_in, h_post, m, carry = _C.mhc_open(x, *parameters, *options)
        return h_in, _State((self, _C.mhc_close, h_post, m, carry))

    def write(self, state: _State, y: Tensor) -> Tensor:
        """The new streams [.., n, dim], of the state that `read` returned and the sublayer's output y [.., dim].

        state: of this HyperConnection, unchanged. Each write with it makes new streams of the x that was read.
        TypeError for another kind of state and for a y of another dtype; ValueError for the state of another
        HyperConnection and for a y of another shape.
        """
        if not isinstance(state, _State):
            raise TypeError(f"HyperConnection: state must be what read returned second, got {type(state).__name__}")
        connection, op, h_post, m, carry = state
        if connection is not self:
            raise ValueError("HyperConnection: state must be what its own read returned, got that of another")
        if not isinstance(y, _C.Tensor):
            raise TypeError(f"HyperConnection: sublayer must return a Tensor, got {type(y).__name__}")
        shape = (*carry.shape[:-2], self.dim)
        if tuple(y.shape) != shape or y.dtype is not carry.dtype:
            wants, is_ = (f"{dtype.name} {tuple(size)}" for dtype, size in ((carry.dtype, shape), (y.dtype, y.shape)))
            error = ValueError if y.dtype is carry.dtype else TypeError
            raise error(f"HyperConnection: sublayer must return what it gets, {wants}, got {is_}")
        return op(carry, y, h_post, m)

    def forward(self, x: Tensor, *args: Any, sublayer: Callable[..., Any] | None = None, **kwargs: Any) -> Tensor:
        sublayer = self.sublayer if sublayer is None else sublayer
        if sublayer is None:
            raise TypeError("HyperConnection: sublayer must be given to call the module, got None")
        h_in, state = self.read(x)
        return self.write(state, sublayer(h_in, *args, **kwargs))

    def extra_repr(self) -> str:
        return f"{self.dim}, n={self.n}, iters={self.iters}, form={self.form!r}, transpose={self.transpose}"


def expand_streams(x: Tensor, n: int) -> Tensor:
    """n copies of x: [.., C] -> [.., n, C]. The gradient is the sum over the copies.

    ValueError for n outside 1..8 and x without or with more than 7 dimensions; TypeError for what is no Tensor of a
    float dtype.
    """
    _check_sizes("expand_streams", 1, n)
    _check_streams("expand_streams", x)
    if not 1 <= x.ndim <= 7:
        raise ValueError(f"expand_streams: x must have 1 to 7 dimensions, got shape {tuple(x.shape)}")
    *tokens, dim = x.shape
    return x.unsqueeze(-2).expand((*tokens, n, dim)).contiguous()


class StreamContraction(_Coefficients):
    """n streams to one: x [.., n, dim] -> [.., dim].

    mode "mean" (the streams' mean), "sum", or "learned": sum_j (sigmoid(alpha r (phi v)_j + bias_j) + hc_eps) x_j with
    v the token as a vector and r its 1 / RMS, as in functional.mhc_pre; parameters phi [n, n dim], alpha [1], bias [n]
    and, with `affine`, gamma [n, dim]; it starts close to the mean. ValueError for sizes, modes and numbers outside
    their ranges and streams of another shape; TypeError for values of another kind and other dtypes.
    """

    def __init__(
        self,
        dim: int,
        n: int,
        mode: str = "mean",
        *,
        norm_eps: float = 1e-6,
        hc_eps: float = 1e-6,
        affine: bool = False,
        device: Device = None,
        dtype: _C.dtype | None = None,
    ) -> None:
        _check_sizes("StreamContraction", dim, n)
        if not isinstance(mode, str) or mode not in ("mean", "sum", "learned"):
            raise ValueError(f"StreamContraction: mode must be 'mean', 'sum' or 'learned', got {mode!r}")
        _check_eps("StreamContraction", norm_eps=norm_eps, hc_eps=hc_eps)
        _check_flags("StreamContraction", affine=affine)
        _check_dtype("StreamContraction", dtype)
        self.dim, self.n, self.mode = dim, n, mode
        self.norm_eps, self.hc_eps = float(norm_eps), float(hc_eps)
        if mode == "learned":
            self._make(n, dim, n, 1, affine, dtype, device)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """As HyperConnection; nothing to do for "mean" and "sum"."""
        if self.mode == "learned":
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        _check_streams("StreamContraction", x, self.n, self.dim)
        if self.mode != "learned":
            return x.mean(-2) if self.mode == "mean" else x.sum(-2)
        # The rows of h_post and h_res are zeros here, and what they make is not used.
        rest, acc = self.n * self.n + self.n, _WIDE.get(x.dtype.name, x.dtype)
        zeros = _creation.zeros((rest, self.n * self.dim), dtype=acc, device=x.device)
        line = _creation.zeros((rest,), dtype=acc, device=x.device)
        phi, alpha, bias, gamma = self._wide(x)
        return functional.mhc_pre(
            x,
            _C.cat([phi, zeros]),
            _C.cat([alpha, _C.slice(line, 0, 0, 2)]),
            _C.cat([bias, line]),
            gamma,
            norm_eps=self.norm_eps,
            hc_eps=self.hc_eps,
        )[0]

    def extra_repr(self) -> str:
        return f"{self.dim}, n={self.n}, mode={self.mode!r}"


# ---- recomputation ---------------------------------------------------------------------------------------------------


class _Sublayer(Function):
    """A sublayer that has run before, in the second run of its connection: y of h_in. The gradient goes through the
    record of the first run, which starts at the leaf h_in.
    """

    @staticmethod
    def forward(ctx: FunctionContext, _read: Tensor, first_run: tuple[Tensor, Tensor]) -> Tensor:
        ctx.first_run = first_run
        return first_run[1].detach()

    @staticmethod
    def backward(ctx: FunctionContext, dy: Tensor) -> tuple[Tensor | None, None]:
        h_in, y = ctx.first_run
        if y.requires_grad:
            _C.backward([y], [dy], False)
        return h_in.grad, None


class _Block(Function):
    """Several hyper-connections of which only the first streams and the sublayers' outputs are kept.

    The forward runs the connections without recording them; the sublayers record themselves, each from a leaf. The
    backward runs the connections again, with the outputs that the sublayers gave, and then walks back through one after
    another. Gradients of parameters go straight to their leaves; those of arguments, which all sublayers share, add up
    in leaves of this block.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext, parts: _Sublayers, names: tuple[str, ...], _anchor: Tensor | None, x: Tensor, *args: Any
    ) -> Tensor:
        ctx.save_for_backward(x, *(p for connection, _ in parts for p in _own_parameters(connection)))
        ctx.kept = []
        needs_x, *needs = ctx.needs_input_grad[3:]
        ctx.leaves = [arg.detach().requires_grad_() if need else arg for arg, need in zip(args, needs, strict=True)]
        plain = len(args) - len(names)
        named = dict(zip(names, ctx.leaves[plain:], strict=True))
        moving = needs_x  # whether the streams would require a gradient in a plain run
        for connection, sublayer in parts:
            moving = moving or any(p.requires_grad for p in _own_parameters(connection))
            h_in, state = connection.read(x)
            with enable_grad():
                h_in = h_in.detach().requires_grad_(moving)
                y = sublayer(h_in, *ctx.leaves[:plain], **named)
            x = connection.write(state, _detached(y))
            ctx.kept.append((connection, h_in, y, y._version))
            moving = moving or y.requires_grad
        if not moving:
            ctx.mark_non_differentiable(x)
        return x

    @staticmethod
    def backward(ctx: FunctionContext, dout: Tensor) -> tuple[Any, ...]:
        if ctx.kept is None:
            raise RuntimeError(
                "recompute_streams: backward must run once, and frees its graph also with retain_graph=True"
            )
        x, *_ = ctx.saved_tensors
        kept, again = ctx.kept, []
        ctx.kept = None
        for i, (connection, h_in, y, version) in enumerate(kept):
            if y._version != version:
                raise RuntimeError(
                    f"recompute_streams: what sublayer {i} returned, of shape {tuple(y.shape)}, must not be changed in "
                    f"place before backward, got version {y._version} instead of {version}"
                )
            x = x.detach().requires_grad_()
            with enable_grad():
                read, state = connection.read(x)
                out = connection.write(state, _Sublayer.apply(read, (h_in, y)))
            again.append((x, out))
            x = out
        del kept, connection, h_in, y, read, state, out  # each block's memory goes when the walk has passed it
        while again:
            x, out = again.pop()
            _C.backward([out], [dout], False)
            dout = x.grad
        shared, ctx.leaves = ctx.leaves, None
        needs = ctx.needs_input_grad[4:]
        return None, None, None, dout, *(leaf.grad if need else None for leaf, need in zip(shared, needs, strict=True))


def _own_parameters(connection: HyperConnection) -> Iterator[Parameter]:
    return (p for p in (connection.phi, connection.alpha, connection.bias, connection.gamma) if p is not None)


def _detached(y: Any) -> Any:
    return y.detach() if isinstance(y, _C.Tensor) else y  # `write` says what is wrong with it


def _pairs(parts: Iterable[Any]) -> _Sublayers:
    """(connection, sublayer) of each part, checked."""
    if not hasattr(parts, "__iter__"):
        raise TypeError(f"recompute_streams: parts must be a list or another iterable, got {type(parts).__name__}")
    found = []
    for i, part in enumerate(parts):
        pair = part if isinstance(part, tuple) else (part, getattr(part, "sublayer", None))
        if len(pair) != 2 or not isinstance(pair[0], HyperConnection):
            kind = type(part).__name__
            raise TypeError(
                f"recompute_streams: parts[{i}] must be a HyperConnection or a pair of one and a sublayer, got {kind}"
            )
        if not callable(pair[1]):
            kind = "None" if pair[1] is None else type(pair[1]).__name__
            raise TypeError(f"recompute_streams: parts[{i}] must have a callable sublayer, got {kind}")
        found.append(pair)
    return found


def recompute_streams(
    parts: Iterable[HyperConnection | tuple[HyperConnection, Callable[..., Any]]], x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Runs hyper-connections one after another, keeping of their streams only x: the others are computed again in
    backward, without running any sublayer a second time (Xie et al. 2025, equation 20). The same bits; gradients of
    arguments are added up over the block before they are added to what others give.

    parts: HyperConnections, or pairs (HyperConnection, sublayer). args, kwargs: given to every sublayer; a tensor that
    requires a gradient must be an argument itself, not part of one. Saves n C values a token for every part but the
    first; blocks of about sqrt(n L / (n + 2)) out of L parts need the least memory. No parts: x itself. It calls `read`
    and `write` of a HyperConnection, not the module. When one of them is of a subclass, has a hook, or has another
    `forward`, all are called as modules, and every stream is kept. Backward runs once, also with retain_graph=True
    (RuntimeError). TypeError for other parts and for what is no Tensor; else what the HyperConnections raise.
    """
    parts = _pairs(parts)
    if not isinstance(x, _C.Tensor):
        raise TypeError(f"recompute_streams: x must be a Tensor, got {type(x).__name__}")
    if not parts or not _C.is_grad_enabled() or not all(is_stock(part[0], HyperConnection) for part in parts):
        for connection, sublayer in parts:
            its_own = sublayer is connection.sublayer
            x = connection(x, *args, **kwargs) if its_own else connection(x, *args, sublayer=sublayer, **kwargs)
        return x
    # Parameters hidden in parts need a recorded node even when no argument requires a gradient.
    anchor = None if x.requires_grad else _C.empty((0,), _C.float32).requires_grad_()
    return _Block.apply(parts, tuple(kwargs), anchor, x, *args, *kwargs.values())
