"""`xtrain check`."""

from __future__ import annotations

from .parser import simple_options

USAGE = """\
usage: xtrain check [options]

Runs every op of the op table, forward and backward, in every dtype and on every backend, and compares it with plain
NumPy in float64. Prints the worst error as a part of its computed tolerance. Exit status 1 when one is above 1, when an
op or a kernel has no entry in the table, or when a kernel is missing; 2 when an op of --op takes none of the dtypes.

  --op LIST             names of ops [default all]
  --dtype LIST          names of dtypes [default all]
  --device NAME         what to check [default cpu]
  --threads N           CPU threads; 0 for all [threads; default 0]
  --json FILE           write every number to FILE
"""


def command(arguments: list[str]) -> int:
    from ..bench import check

    _, values = simple_options(arguments, check.OPTIONS, 0, USAGE)
    return check.command(values)
