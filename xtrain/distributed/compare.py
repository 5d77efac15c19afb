"""Whether all ranks have the same parameters: a CRC of each tensor, compared over ranks."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .. import _C
from .._C import Tensor
from .store import ranks_text

_MOST = 8  # threads


def _checksum(tensor: Tensor) -> bytes:
    return struct.pack("<I", zlib.crc32(_C.to_bytes(tensor.detach().cpu().contiguous())))


def checksums(tensors: Sequence[Tensor]) -> bytes:
    """Four bytes for each tensor's bytes, by as many threads as kernels have on the CPU, up to 8."""
    with ThreadPoolExecutor(min(_C.get_num_threads(), _MOST)) as pool:
        return b"".join(pool.map(_checksum, tensors))


def odd_ones(found: Sequence[bytes], names: Sequence[str], what: str) -> tuple[tuple[int, ...], str] | None:
    """The ranks whose checksums are not those of more than half of them, or all where there is no such half, and a
    sentence; None where all are the same. names: of the tensors.
    """
    if len(set(found)) == 1:
        return None
    most, count = Counter(found).most_common(1)[0]
    ranks = tuple(rank for rank, one in enumerate(found) if count <= len(found) // 2 or one != most)
    other = found[ranks[0]] if count > len(found) // 2 else next(one for one in found if one != most)
    wrong = [name for i, name in enumerate(names) if other[4 * i : 4 * i + 4] != most[4 * i : 4 * i + 4]]
    tensors = wrong[0] + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else "")
    if len(ranks) == len(found):
        return ranks, f"{ranks_text(list(ranks))} have different parameters {what}: {tensors}"
    have = "have" if len(ranks) > 1 else "has"
    return ranks, f"{ranks_text(list(ranks))} {have} other parameters than the others {what}: {tensors}"
