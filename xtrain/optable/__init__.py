"""THE op table: every op, its kernel slots, its inputs, its NumPy reference, its PyTorch counterpart, its error inputs.

One entry serves the generated tests (tests/ops), PyTorch parity (parity/ops), `xtrain check` and
`xtrain bench ops`. Adding an op means adding an entry (see docs/add_an_op.md); the tests and `xtrain check` fail when
an op or a kernel slot has none. The frame is in table.py; the simple families are in elementwise.py and movement.py;
matrix products and layers are in layers.py, attention in attention.py, norms in norms.py, several of them in one pass
in fused.py, the optimizer in optimizer.py, indices and checksums in picking.py, hyper-connections in mhc.py, sampling
in drawing.py, a step of generation in decoding.py, convolutions in conv.py. judge.py says what counts as right. Needs
NumPy only.
"""

from . import elementwise, movement  # isort: skip  (the order of the entries)
from . import layers, attention, norms, rope, optimizer  # isort: skip
from . import picking  # isort: skip
from . import fused, mhc, drawing, decoding  # isort: skip
from . import conv  # isort: skip
from .optimizer import adamw_group, adamw_reference, clip_reference, muon_reference
from .others import OTHER_KERNELS
from .table import TABLE

__all__ = [
    "OTHER_KERNELS",
    "TABLE",
    "attention",
    "adamw_group",
    "adamw_reference",
    "clip_reference",
    "decoding",
    "muon_reference",
    "conv",
    "drawing",
    "elementwise",
    "fused",
    "layers",
    "rope",
    "mhc",
    "movement",
    "norms",
    "optimizer",
    "picking",
]
