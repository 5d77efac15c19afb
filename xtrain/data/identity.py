"""Whether a resumed run sees the data that it was trained on."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .. import _C
from .file_array import FileArray, Segment

_PIECE = 1 << 23  # elements that one thread hashes at once


def identity(segments: Sequence[Segment], known: Any = None) -> dict[str, Any]:
    """{"sha256": of all tokens, "files": {path: [size, times of change, inode]}} as JSON values.

    known: an identity of before. When all segments lie in files, and these have the sizes, times and inodes that it
    lists, its hash is returned and nothing is read.
    """
    inside = [segment.file for segment in segments if isinstance(segment, FileArray)]
    files = {os.path.abspath(file.path): list(file.stamp) for file in inside}
    if len(inside) == len(segments) and isinstance(known, dict) and known.get("files") == files:
        return known
    return {"sha256": _hash(segments), "files": files}


def same_data(stored: Any, segments: Sequence[Segment], now: dict[str, Any]) -> bool:
    """Whether `stored`, the identity in a checkpoint, is that of these segments, whose identity is `now`."""
    if isinstance(stored, str):  # of version 0.1
        return stored == _sampled(segments)
    return isinstance(stored, dict) and stored.get("sha256") == now["sha256"]


def _hash(segments: Sequence[Segment]) -> str:
    def pieces() -> Iterator[tuple[Segment, int]]:
        for segment in segments:
            digest.update(struct.pack("<QQ", len(segment), segment.dtype.itemsize))
            yield from ((segment, start) for start in range(0, len(segment), _PIECE))

    digest = hashlib.sha256()
    with ThreadPoolExecutor(min(_C.get_num_threads(), 8)) as pool:
        hashes = list(pool.map(_hash_piece, pieces()))
    for piece in hashes:
        digest.update(piece)
    return digest.hexdigest()


def _hash_piece(piece: tuple[Segment, int]) -> bytes:
    segment, start = piece
    return hashlib.sha256(np.ascontiguousarray(segment[start : start + _PIECE]).data).digest()


def _sampled(segments: Sequence[Segment]) -> str:
    """The fingerprint of version 0.1: sizes, and 64 evenly spread pieces."""
    digest = hashlib.sha256()
    for segment in segments:
        digest.update(struct.pack("<Q", len(segment)))
        for start in np.linspace(0, max(len(segment) - 1024, 0), 64, dtype=np.int64):
            digest.update(np.asarray(segment[start : start + 1024], dtype="<i8").tobytes())
    return digest.hexdigest()
