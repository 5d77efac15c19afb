"""Whether all ranks have the same parameters: a checksum of each tensor, compared over ranks. And whether they were
given the same model and options.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import _C
from .._C import Tensor
from ..errors import shown
from ..nn.module import Module
from ..optim import EMA, AdamW, ChainedOptimizer, Muon
from . import agree
from .store import ranks_text

if TYPE_CHECKING:
    from .host import HostPlane

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
    """Compare the checksums of all ranks. None where they are equal; else the ranks that differ from more than half of
    them, or all ranks where no half agrees, and a message. found: of each rank, as `checksums` returns them. names: of
    the tensors. what: goes into the message, such as "after step 100".
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


def check_alike(
    link: HostPlane, model: Module, optimizer: AdamW | Muon | ChainedOptimizer, ema: EMA | None, own: dict[str, str]
) -> None:
    """ConfigError on every rank where one has parameters of other names, shapes or order, or other options. Comparing
    parameters would not show this: each rank updates its piece by its own options and sends it to all, so parameters
    stay equal. own: options of DataParallel itself.
    """
    described = _parameters(model, optimizer), {**_options(optimizer, ema), **own}
    digest = hashlib.sha256(json.dumps(described).encode()).digest()
    if len(set(map(bytes, link.all_gather(digest, "options")))) > 1:
        for values in described:
            agree.check_same(link, values, "DataParallel: ")


def _parameters(model: Module, optimizer: AdamW | Muon | ChainedOptimizer) -> dict[str, str]:
    parts = optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
    groups = [(type(part).__name__, group["params"]) for part in parts for group in part.param_groups]
    where = {id(p): f"group {i} of {kind}" for i, (kind, params) in enumerate(groups) for p in params}
    found: dict[str, str] = {}
    for place, (name, p) in enumerate(model.named_parameters()):
        group = where.get(id(p), "no group") + ", frozen" * (id(p) in where and not p.requires_grad)
        found[f"parameter {name}"] = f"{p.dtype.name} {tuple(p.shape)}, place {place}, {group}"
    return found


def _options(optimizer: AdamW | Muon | ChainedOptimizer, ema: EMA | None) -> dict[str, str]:
    found = {"decay of ema": "none" if ema is None else shown(ema.decay)}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                scalar = isinstance(value, Tensor) and not value.ndim
                found[f"{name} of group {number}"] = shown(value.item() if scalar else value)
    return found
