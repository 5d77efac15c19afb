"""`xtrain bench`."""

from __future__ import annotations

from ..errors import ConfigError, nearest
from .parser import simple_options

USAGE = """\
usage: xtrain bench gemm|attention|ops [options]

Measures this machine. Contenders take turns on the same random inputs, after a warm-up; a number is a median.

bench gemm: matrix products of every backend beside NumPy, and PyTorch when it is installed.
  --sizes LIST          of squares, training, head (the layers of a 124M model, forward and both gradients), N, MxNxK,
                        and MxNxK:nt (t: stored transposed) [default squares,training; on CUDA 256 to 8192,training]
  --dtypes LIST         of float32, tf32 (CUDA), bfloat16, float16, float64 [default float32,bfloat16; on CUDA tf32 too]
  --backends LIST       names that xt.gemm_backends(device) lists [default all]

bench attention: forward and backward of every implementation beside PyTorch, when it is installed.
  --sizes LIST          of BxHxKxSxD, causal, and BxHxKxSxD:full [default 1x4x4x256x64,2x12x12x512x64; larger on CUDA]
  --dtypes LIST         as for gemm
  --backends LIST       names that xt.attention_backends(device) lists [default all]
  --peer NAME           PyTorch's backend: default (its own choice), cudnn or flash [default default]
  --kernels             measure kernels alone, by CUPTI through PyTorch's profiler; on CUDA

gemm and attention:
  --explain             measure nothing; show which implementation computes each size, and why none before it does;
                        with --backends from that name on

bench ops: every op of the op table, forward and backward, in GB/s beside a measured copy.
  --op LIST             names of ops [default all]
  --dtypes LIST         of float32, bfloat16, float16, float64 [default float32]

all:
  --device NAME         where to measure [default cpu]
  --threads N           CPU threads; 0 for all; not with CUDA [threads; default 0]
  --json FILE           write every number to FILE
  --plot FILE           draw bars: .png, .svg or .pdf (needs the extra `plot`); not of attention
"""
_BENCHMARKS = ("gemm", "attention", "ops")


def command(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"bench needs to know what to measure: xtrain bench {' or '.join(_BENCHMARKS)}")
    name = arguments[0]
    if name not in _BENCHMARKS:
        raise ConfigError(f"bench measures {' or '.join(_BENCHMARKS)}, got {name!r}{nearest(name, _BENCHMARKS)}")
    if name == "gemm":
        from ..bench import gemm as benchmark
    elif name == "attention":
        from ..bench import attention as benchmark
    else:
        from ..bench import ops as benchmark
    _, values = simple_options(arguments[1:], benchmark.OPTIONS, 0, USAGE)
    return benchmark.command(values)
