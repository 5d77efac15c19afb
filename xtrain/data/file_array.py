"""Arrays that stay in their file.

They are read and not memory-mapped: when another process truncates the file, a read fails with an error, and a mapping
ends the process with a bus error.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import OrderedDict
from typing import Any

import numpy as np

from ..errors import DataError

_MOST_OPEN = 64  # descriptors; a process may have some 1000, a folder more files


class _Descriptor:
    """Closed with its last reference, so that no thread reads from a number that was closed and given away."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


def open_regular(path: str) -> _Descriptor:
    """Open a regular file for reading. DataError when it is something else or cannot be read."""
    try:
        # O_NONBLOCK: a FIFO would wait for a writer.
        descriptor = _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        regular = stat.S_ISREG(os.fstat(descriptor.number).st_mode)
    except (OSError, ValueError) as error:  # ValueError: NUL in the name
        raise DataError(f"data: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not regular:
        raise DataError(f"data: {path} cannot be read: it is not a regular file")
    return descriptor


class DataFile:
    """A file that is read at any position. DataError when it is no regular file or cannot be read.

    stamp: size, times of change in nanoseconds and inode when it was opened: what tells that a file is as it was.
    """

    _open: OrderedDict[int, _Descriptor] = OrderedDict()  # of the files used last, by id of the DataFile

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        about = os.fstat(self._descriptor().number)
        self.size = about.st_size
        self.stamp = (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)

    def __del__(self) -> None:
        self._open.pop(id(self), None)

    def _descriptor(self) -> _Descriptor:
        descriptor = self._open.pop(id(self), None)
        if descriptor is None:
            descriptor = open_regular(self.path)
            if hasattr(self, "stamp") and os.fstat(descriptor.number).st_ino != self.stamp[3]:
                raise DataError(f"data: {self.path} was replaced by another file while it was in use")
        self._open[id(self)] = descriptor
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return descriptor

    def read_into(self, out: memoryview, offset: int) -> None:
        """Fill `out` with the bytes from `offset` on. DataError when the file has become shorter."""
        descriptor, done = self._descriptor(), 0
        while done < len(out):
            try:
                count = os.preadv(descriptor.number, [out[done:]], offset + done)
            except OSError as error:
                raise DataError(f"data: {self.path} cannot be read: {error.strerror or error}") from None
            if not count:
                left = os.fstat(descriptor.number).st_size
                raise DataError(
                    f"data: {self.path} was truncated while it was in use: it has {left} bytes, it had {self.size}"
                )
            done += count


class FileArray:
    """A 1-D array [length] in a file, from byte `offset` on. A slice reads its elements into a NumPy array."""

    def __init__(self, file: DataFile, dtype: Any, offset: int, length: int) -> None:
        self.file, self.dtype, self._offset, self._length = file, np.dtype(dtype), offset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, step = where.indices(self._length)
        if step != 1:
            raise IndexError(f"FileArray: the step of a slice must be 1, got {step}")
        out = np.empty(max(stop - start, 0), self.dtype)
        self.file.read_into(out.view(np.uint8).data, self._offset + start * self.dtype.itemsize)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("FileArray: its elements are in a file, an array of them must be a copy")
        return self[:].astype(dtype or self.dtype, copy=False)

    def part(self, start: int, stop: int) -> FileArray:
        """Elements [start, stop), unread."""
        return FileArray(self.file, self.dtype, self._offset + start * self.dtype.itemsize, stop - start)


Segment = np.ndarray | FileArray


def part(segment: Segment, start: int, stop: int) -> Segment:
    """Elements [start, stop) of a segment, not copied."""
    return segment.part(start, stop) if isinstance(segment, FileArray) else segment[start:stop]
