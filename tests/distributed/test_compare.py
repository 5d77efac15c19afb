"""Checksums of parameters: what changes them, what does not, and what it takes to compare them."""

from pathlib import Path

import numpy as np
import pytest
from fake_library import run

import xtrain as xt
from xtrain import _C
from xtrain.distributed.compare import checksums
from xtrain.optable.picking import checksum


def sums_of(*raw, dtype=xt.uint8):
    """Checksums of tensors of these bytes, on the device under test."""
    size = xt.empty(0, dtype=dtype).element_size()
    tensors = [_C.from_bytes(one, dtype, (len(one) // size,)).to(_C.get_default_device()) for one in raw]
    return _C.checksums(tensors).tolist()


@pytest.mark.parametrize("size", [3, 8, 21, 48])
def test_every_bit_counts(size):
    """In whole words, in pairs of them, and in what is left at the end. No two changes have one checksum."""
    raw = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    changed = [raw.tobytes()]
    for bit in range(8 * size):
        other = raw.copy()
        other[bit // 8] ^= 1 << bit % 8
        changed.append(other.tobytes())
    assert len(set(sums_of(*changed))) == 8 * size + 1


@pytest.mark.parametrize("dtype", [xt.float32, xt.float64], ids=lambda dtype: dtype.name)
def test_places_count(dtype):
    """Elements that have changed places, near and far: halves of words, and whole words, whose sum is the same."""
    values = np.arange(70000, dtype=dtype.name)
    swapped = []
    for a, b in ((0, 1), (0, 2), (5, 60000), (32767, 32768), (69998, 69999)):
        other = values.copy()
        other[[a, b]] = other[[b, a]]
        swapped.append(other.tobytes())
    found = sums_of(values.tobytes(), np.roll(values, 1).tobytes(), *swapped, dtype=dtype)
    assert len(set(found)) == len(found)


def test_zeros_behind_the_end_count():
    zeros = sums_of(*(bytes(n) for n in range(40)))
    assert len(set(zeros)) == len(zeros) and zeros[0] == 0


def test_values_that_compare_equal_are_told_apart():
    patterns = [
        0x00000000,
        0x80000000,
        0x7FC00000,
        0x7FC00001,
        0xFFC00000,
        0x00000001,
    ]  # 0, -0, three NaN, 0 if flushed
    found = sums_of(*(np.uint32([1, one]).tobytes() for one in patterns), dtype=xt.float32)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [xt.uint8, xt.bfloat16, xt.float32, xt.float64], ids=lambda dtype: dtype.name)
def test_any_alignment(dtype):
    """A part of a block that begins anywhere, as a view and as a tensor of its own, in the words of the contract."""
    size = xt.empty(0, dtype=dtype).element_size()
    raw = np.random.default_rng(3).integers(0, 256, 300_000).astype(np.uint8)
    block = _C.from_bytes(raw.tobytes()[: 300_000 // size * size], dtype, (300_000 // size,)).to(
        _C.get_default_device()
    )
    ranges = [(begin, begin + n) for begin in range(18) for n in (0, 1, 3, 8, 17, 40)]
    ranges += [(begin, len(raw) // size - begin) for begin in range(4)]
    views = [block[begin:end] for begin, end in ranges]
    wants = [checksum(raw[size * begin : size * end], "uint8") for begin, end in ranges]
    found = _C.checksums(views)
    assert found.dtype is xt.int64 and (found.cpu().numpy().view(np.uint64) == np.uint64(wants)).all()
    assert _C.checksums([view.clone() for view in views]).tolist() == found.tolist()


def test_a_list_of_all_dtypes():
    """In one call, with views of any strides, and tensors that need gradients."""
    x = np.random.default_rng(4).standard_normal((6, 5))
    tensors = [xt.tensor(x).to(dtype) for dtype in (xt.float64, xt.bfloat16, xt.int32, xt.bool)]
    strided = [xt.tensor(x, requires_grad=True).t(), xt.tensor(x)[:, ::2], xt.tensor(x[0]).expand(3, 5)]
    wants = [
        *(checksum(x if i < 2 else t.cpu().numpy(), t.dtype.name) for i, t in enumerate(tensors)),
        *(checksum(one, "float64") for one in (x.T, x[:, ::2], np.broadcast_to(x[0], (3, 5)))),
    ]
    wants[1] = checksum(tensors[1].float().cpu().numpy(), "bfloat16")
    found = _C.checksums([*tensors, *strided])
    assert not found.requires_grad and (found.cpu().numpy().view(np.uint64) == np.uint64(wants)).all()
    assert checksums([*tensors, *strided]) == np.uint64(wants).tobytes()


DEVICES = """
import xtrain as xt
from xtrain import _C
from xtrain.distributed.compare import checksums

tensors = [xt.randn(n, 7) for n in range(50)]
places = [t.to("cuda") if i % 3 else t for i, t in enumerate(tensors)]
before = xt.cuda.counters()
found = checksums(places)
after = xt.cuda.counters()
assert found == checksums(tensors) and len(found) == 400
cost = [after[name] - before[name] for name in ("launches", "to_host")]
assert cost == [1, 1], cost

x = xt.randn(9).to("cuda")
fast = xt.cuda.graph(lambda x: _C.checksums([x, x[1:]]))
for n in range(4):
    x = xt.randn(9).to("cuda")
    assert fast(x).tolist() == _C.checksums([x.cpu(), x.cpu()[1:]]).tolist(), n
assert fast.captured
read = xt.cuda.graph(lambda x: (checksums([x]), x + 1)[1])
try:
    [read(x) for _ in range(3)]
except RuntimeError as error:
    assert "must not read values, which waits for the device" in str(error), error
else:
    raise AssertionError("it was captured")
"""


def test_each_device_makes_its_own(package):
    """One launch and one copy to the host, whatever the number of tensors. A captured step may make checksums, not read them."""
    run(Path(package), DEVICES)
