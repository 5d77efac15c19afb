"""Checks that a bad answer cannot pass: how `docs/reference/numerics.md` says we know that a kernel is right.

tolerance(...)            how far a result may be off, from the formats it went through
verify(out, ref)          compares two tensors on their device; a few numbers come back
assert_close(a, b)        the same as an assertion, for tensors, arrays and numbers
Convolution(...)          output shape, operations, bytes and additions of a convolution, from its parameters
reduce_max_abs(t)         the largest absolute value, on the device
grad_check(fn, inputs)    gradients against finite differences, for any callable
fill(t, kind, seed)       test data, made on the device, the same values on every device
first_divergence(...)     runs a model beside a reference and names the first op that is wrong by itself
"""

from .comparison import NotComparableError, Verification, assert_close, reduce_max_abs, verify
from .convolution import Convolution
from .divergence import Divergence, first_divergence
from .filling import fill
from .formats import FORMATS, Format, tolerance
from .gradients import GradCheck, GradMismatch, grad_check
from .recording import Recording, Step, record

__all__ = [
    "FORMATS", "Convolution", "Divergence", "Format", "GradCheck", "GradMismatch", "NotComparableError", "Recording",
    "Step", "Verification", "assert_close", "fill", "first_divergence", "grad_check", "record", "reduce_max_abs",
    "tolerance", "verify",
]  # fmt: skip
