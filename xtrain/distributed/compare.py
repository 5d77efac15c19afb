"""Whether all ranks have the same parameters: a checksum of each tensor, compared over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .. import _C
from .._C import Tensor
from .store import ranks_text

_BYTES = 8  # of a checksum


def checksums(tensors: Sequence[Tensor]) -> bytes:
    """Eight bytes for each tensor, of `_C.checksums`: each device makes those of its tensors and is read once."""
    places: dict[_C.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(i)
    found = [b""] * len(tensors)
    for numbers in places.values():
        sums = bytes(_C.to_bytes(_C.checksums([tensors[i] for i in numbers]).cpu()))
        for at, i in enumerate(numbers):
            found[i] = sums[_BYTES * at : _BYTES * (at + 1)]
    return b"".join(found)


def odd_ones(found: Sequence[bytes], names: Sequence[str], what: str) -> tuple[tuple[int, ...], str] | None:
    """The ranks whose checksums are not those of more than half of them, or all where there is no such half, and a
    sentence; None where all are the same. names: of the tensors.
    """
    if len(set(found)) == 1:
        return None
    most, count = Counter(found).most_common(1)[0]
    ranks = tuple(rank for rank, one in enumerate(found) if count <= len(found) // 2 or one != most)
    other = found[ranks[0]] if count > len(found) // 2 else next(one for one in found if one != most)
    parts = [slice(_BYTES * i, _BYTES * (i + 1)) for i in range(len(names))]
    wrong = [name for name, part in zip(names, parts, strict=True) if other[part] != most[part]]
    tensors = wrong[0] + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else "")
    if len(ranks) == len(found):
        return ranks, f"{ranks_text(list(ranks))} have different parameters {what}: {tensors}"
    have = "have" if len(ranks) > 1 else "has"
    return ranks, f"{ranks_text(list(ranks))} {have} other parameters than the others {what}: {tensors}"
