"""xtrain: train transformers from Python on a small C core.

    import xtrain as xt
    import xtrain.functional as F

Names, argument order, defaults and semantics are PyTorch's wherever PyTorch has the thing. Submodules (`functional`,
`nn`, `optim`, `models`, `data`, `train`, ...) load on first use, so `import xtrain` stays cheap.
"""

from . import _early  # noqa: F401  # isort: skip  (before what takes time)
from ._load import _C  # isort: skip  (the others import _C)
from typing import TYPE_CHECKING

from ._backends import (
    attention_backends,
    gemm_backends,
    get_float32_matmul_precision,
    set_float32_matmul_precision,
    use_attention_backend,
    use_gemm_backend,
)
from ._C import (
    CudaError,
    OutOfMemoryError,
    Tensor,
    abs,
    add,
    amax,
    amin,
    argmax,
    clone,
    cos,
    cumsum,
    device,
    div,
    dtype,
    eq,
    erf,
    exp,
    floor_divide,
    from_dlpack,
    from_numpy,
    gather,
    ge,
    get_default_device,
    get_num_threads,
    get_rng_state,
    gt,
    is_grad_enabled,
    le,
    log,
    lt,
    manual_seed,
    matmul,
    maximum,
    mean,
    minimum,
    mul,
    ne,
    neg,
    permute,
    pow,
    reciprocal,
    relu,
    remainder,
    reshape,
    rsqrt,
    set_default_device,
    set_num_threads,
    set_rng_state,
    sigmoid,
    sin,
    softmax,
    sqrt,
    squeeze,
    sub,
    sum,
    tanh,
    tensor,
    transpose,
    unsqueeze,
    where,
)
from ._creation import (
    arange,
    empty,
    empty_like,
    full,
    full_like,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randn,
    randn_like,
    zeros,
    zeros_like,
)
from ._draw import multinomial
from ._lazy import lazy as _lazy
from ._tensor import (
    all,
    any,
    argmin,
    cat,
    chunk,
    clamp,
    flatten,
    isfinite,
    isinf,
    isnan,
    max,
    min,
    split,
    square,
    stack,
    std,
    var,
)
from ._version import __version__
from .autograd import Function, checkpoint, enable_grad, inference_mode, no_grad, recompute, set_grad_enabled
from .tensors.arithmetic import norm, outer, repeat_interleave, tril, triu, unbind
from .tensors.indexing import index_add, index_select, masked_select, nonzero, scatter, scatter_add
from .tensors.random import Generator
from .tensors.sorting import argsort, sort, topk

float32 = _C.float32
float64 = _C.float64
bfloat16 = _C.bfloat16
float16 = _C.float16
int32 = _C.int32
int64 = _C.int64
uint8 = _C.uint8
bool = _C.bool
float, double, half, int, long = float32, float64, float16, int32, int64

if TYPE_CHECKING:
    from . import autograd as autograd
    from . import cli as cli
    from . import cuda as cuda
    from . import data as data
    from . import distributed as distributed
    from . import functional as functional
    from . import generation as generation
    from . import lora as lora
    from . import models as models
    from . import nn as nn
    from . import optim as optim
    from . import profiling as profiling
    from . import saving as saving
    from . import testing as testing
    from . import tokenizers as tokenizers
    from . import train as train
    from .cli import doctor as doctor
    from .profiling import profile as profile
    from .saving.named import load as load
    from .saving.named import save as save
    from .train import config as config
    from .train import plot as plot
    from .train import progress as progress
else:
    _HOMES = {
        name: f".{name}"
        for name in (
            "autograd",
            "cli",
            "cuda",
            "data",
            "distributed",
            "functional",
            "generation",
            "lora",
            "models",
            "nn",
            "optim",
            "profiling",
            "saving",
        )
        + ("testing", "tokenizers", "train")
    } | {"config": ".train.config", "doctor": ".cli.doctor", "plot": ".train.plot", "progress": ".train.progress"}
    _HOMES |= {name: f".saving.named:{name}" for name in ("load", "save")} | {"profile": ".profiling:profile"}
    __getattr__, __dir__ = _lazy(__name__, _HOMES)


__all__ = [
    "CudaError", "Function", "Generator", "OutOfMemoryError", "Tensor", "__version__", "abs", "add", "all", "amax",
    "amin", "any", "arange", "argmax", "argmin", "argsort", "attention_backends", "bfloat16", "bool", "cat",
    "checkpoint", "chunk", "clamp", "clone", "cos", "cumsum", "device", "div", "double", "dtype", "empty",
    "empty_like", "enable_grad", "eq", "erf", "exp", "flatten", "float", "float16", "float32", "float64",
    "floor_divide", "from_dlpack", "from_numpy", "full", "full_like", "gather", "ge", "gemm_backends",
    "get_default_device", "get_float32_matmul_precision", "get_num_threads", "get_rng_state", "gt", "half",
    "index_add", "index_select", "inference_mode", "int", "int32", "int64", "is_grad_enabled", "isfinite", "isinf",
    "isnan", "le", "log", "long", "lt", "manual_seed", "masked_select", "matmul", "max", "maximum", "mean", "min",
    "minimum", "mul", "multinomial", "ne", "neg", "no_grad", "nonzero", "norm", "ones", "ones_like", "outer",
    "permute", "pow", "rand", "rand_like", "randint", "randn", "randn_like", "reciprocal", "recompute", "relu",
    "remainder", "repeat_interleave", "reshape", "rsqrt", "scatter", "scatter_add", "set_default_device",
    "set_float32_matmul_precision", "set_grad_enabled", "set_num_threads", "set_rng_state", "sigmoid", "sin",
    "softmax", "sort", "split", "sqrt", "square", "squeeze", "stack", "std", "sub", "sum", "tanh", "tensor", "topk",
    "transpose", "tril", "triu", "uint8", "unbind", "unsqueeze", "use_attention_backend", "use_gemm_backend", "var",
    "where", "zeros", "zeros_like",
]  # fmt: skip
