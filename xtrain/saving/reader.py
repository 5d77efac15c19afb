"""Reading a saved directory: what its manifest lists is checked as it is read, in the bytes that are used.

    {"format": 2, "files": {NAME: {"size": bytes, "pieces": [[bytes, SHA-256], ...]}}}

The pieces of a file follow each other. A tensor begins and ends with a piece, so that it can be checked alone, and no
piece is longer than PIECE, so that several threads can hash one tensor. In format 1 a file has one "sha256" instead of
pieces and is checked as a whole when it is opened. Pieces of those bytes are hashed in the same pass, and what is read
later is compared with them: to keep the bytes would take the memory of the whole file, which may be many times that of
the tensor that is asked for. A directory without a manifest, such as a download, is read as it is.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from .. import _C
from .._host import host_memory
from .._types import is_whole
from ..errors import CheckpointError, shown
from ..files import reason
from .directory import FORMAT, MANIFEST, PIECE, PathLike

_INLINE = 1 << 16  # shorter pieces are hashed before a thread would have begun
_GRID = 1 << 18  # bytes of a piece of format 1: a tensor reads up to one more at each of its ends
_QUEUE = 32  # pieces that wait for their hash while a whole file is checked


@dataclass(frozen=True)
class Record:
    """What a manifest says about a file. ends: where each piece ends, in bytes from the beginning of the file. hashes:
    of the pieces, SHA-256 in hexadecimal. whole: format 1, one piece of any size, or those that were hashed at the
    opening.
    """

    size: int
    ends: list[int]
    hashes: list[str]
    whole: bool


class DirectoryReader:
    """A directory whose files are read. CheckpointError when its manifest is damaged.

    records: by name, what the manifest says about each file; None when there is no manifest. Where there is one,
    reading a file that it does not list, or that has other bytes than the saved ones, raises CheckpointError.
    """

    def __init__(self, directory: PathLike) -> None:
        self.directory = Path(directory)
        manifest = self.directory / MANIFEST
        self.records = _read_manifest(manifest) if os.path.lexists(manifest) else None

    def has(self, name: str) -> bool:
        """Whether the file is there, or should be there."""
        return name in (self.records or ()) or (self.directory / name).is_file()

    def open(self, name: str) -> CheckedFile:
        """Open a file; use it in a `with` block."""
        path = self.directory / name
        if self.records is not None and name not in self.records:
            raise CheckpointError(
                f"{path} is not what was saved: {MANIFEST} does not list it; if you added it, delete {MANIFEST}"
            )
        return CheckedFile(path, self.records[name] if self.records is not None else None)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        with self.open(name) as file:
            data = file.read(0, file.size)
        return bytes(data)

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file."""
        return parse_object(self.directory / name, self.read(name))

    def verify(self) -> None:
        """Check every file that the manifest lists; raises CheckpointError with the first difference."""
        for name in self.records or ():
            with self.open(name) as file:
                file.verify()


class CheckedFile:
    """A regular file, open for reading; size: its bytes. Other threads hash what is read. The end of the `with` block
    waits for them and raises CheckpointError when a piece is not what was saved: use what was read only after it.
    """

    def __init__(self, path: PathLike, record: Record | None = None) -> None:
        self.path = os.fspath(path)
        self._record = None if record is None or record.whole else record
        self._checks: list[tuple[int, str | Future[str]]] = []
        self._pool: ThreadPoolExecutor | None = None
        try:
            # O_NONBLOCK: a FIFO would wait for a writer.
            self._file = FileIO(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
        except (OSError, ValueError) as error:  # ValueError: NUL or a lone surrogate in the name
            text = reason(error) if isinstance(error, OSError) else str(error)
            raise CheckpointError(f"{self.path} cannot be read: {text}") from None
        try:
            about = os.fstat(self._file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise CheckpointError(f"{self.path} cannot be read: it is not a regular file")
            self.size = about.st_size
            if record is not None and self.size != record.size:
                raise self._damaged(f"it has {self.size} bytes, the manifest says {record.size}")
            if record is not None and record.whole:
                self._verify_whole(record.hashes[0])
        except BaseException:
            self.close(check=False)
            raise

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(check=kind is None)

    def close(self, check: bool = True) -> None:
        """Close the file after checking what was read."""
        try:
            if check:
                self._wait()
        finally:
            self._file.close()
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)

    def read(self, start: int, stop: int) -> bytearray:
        """Return bytes [start, stop): whole pieces, when the file has a record of format 2. Of a file of format 1 it
        may be any bytes, and up to 512 KiB more are read and hashed: the rest of the pieces at its ends.
        """
        data = self.peek(start, stop)
        record = self._record
        if record is not None and start < stop:
            first = bisect.bisect_right(record.ends, start)
            begin = record.ends[first - 1] if first else 0
            for piece in range(first, bisect.bisect_left(record.ends, stop) + 1):
                end = record.ends[piece]
                part = memoryview(data)[max(begin - start, 0) : end - start]
                if begin < start or end > stop:
                    if not record.whole:
                        raise self._damaged(f"no pieces in the manifest are bytes {start} to {stop - 1}")
                    digest = hashlib.sha256(self.peek(begin, max(begin, start)))
                    digest.update(part)
                    digest.update(self.peek(min(stop, end), end))
                    self._checks.append((piece, digest.hexdigest()))
                else:
                    self._checks.append((piece, self._hash(part)))
                begin = end
        return data

    def peek(self, start: int, stop: int) -> bytearray:
        """Return bytes [start, stop) unchecked: only to learn what to read."""
        try:
            if stop - start > host_memory():  # the system may grant them, and kill the process that uses them
                raise MemoryError
            data = bytearray(stop - start)
        except (MemoryError, OverflowError):
            raise CheckpointError(f"{self.path}: {stop - start} bytes do not fit into memory") from None
        view, done = memoryview(data), 0
        try:
            self._file.seek(start)
            while done < len(data):
                count = self._file.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{self.path} is truncated: it ends at byte {start + done}, not {stop}")
                done += count
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {reason(error)}") from None
        return data

    def verify(self) -> None:
        """Check the whole file; raises CheckpointError."""
        if self._record is None or self._record.whole:  # no manifest, or the file was checked when it was opened
            return
        for start, stop in itertools.pairwise([0, *self._record.ends]):
            self.read(start, stop)
            if len(self._checks) >= _QUEUE:
                self._wait()
        self._wait()

    def _verify_whole(self, expected: str) -> None:
        digest, ends, hashes = hashlib.sha256(), list[int](), list[str]()
        for start in range(0, self.size, PIECE):
            data = memoryview(self.peek(start, min(start + PIECE, self.size)))
            parts = [self._hash(data[at : at + _GRID]) for at in range(0, len(data), _GRID)]
            digest.update(data)
            ends += [min(at + _GRID, start + len(data)) for at in range(start, start + len(data), _GRID)]
            hashes += [part if isinstance(part, str) else part.result() for part in parts]
        if digest.hexdigest() != expected:
            raise self._damaged("its SHA-256 is not the one in the manifest")
        self._record = Record(self.size, ends, hashes, whole=True)

    def _hash(self, data: memoryview) -> str | Future[str]:
        if len(data) <= _INLINE:
            return _sha256(data)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(_C.get_num_threads(), 8))
        return self._pool.submit(_sha256, data)

    def _wait(self) -> None:
        checks, self._checks = self._checks, []
        record = self._record
        for piece, digest in checks:
            if record is None:
                continue
            if (digest if isinstance(digest, str) else digest.result()) != record.hashes[piece]:
                first, end = [0, *record.ends][piece : piece + 2]
                what = "changed after it was opened" if record.whole else "have another SHA-256 than the manifest says"
                raise self._damaged(f"bytes {first} to {end - 1} {what}")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {what}; if you edited it, delete {MANIFEST}")


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def parse_object(path: PathLike, data: bytes) -> dict[str, Any]:
    """Return the JSON object in the bytes of a file, or raise CheckpointError."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_manifest(path: Path) -> dict[str, Record]:
    with CheckedFile(path) as file:
        values = parse_object(path, bytes(file.read(0, file.size)))
    number, files = values.get("format"), values.get("files")
    if number not in (1, FORMAT) or not isinstance(files, dict):
        raise CheckpointError(f"{path} must have format 1 or {FORMAT}, got {shown(number)}")
    return {name: _record(path, name, entry, number) for name, entry in files.items()}


def _record(path: Path, name: str, entry: Any, number: int) -> Record:
    plain = os.path.basename(name) == name and name not in ("", ".", "..") and "\0" not in name
    if not (plain and name.isprintable() and isinstance(entry, dict)):
        raise CheckpointError(f"{path} must list plain file names, got {shown(name)}")
    size: Any = entry.get("size")
    pieces: Any = [[size, entry.get("sha256")]] if number == 1 else entry.get("pieces")
    whole = isinstance(pieces, list) and all(
        isinstance(piece, list) and len(piece) == 2 and is_count(piece[0]) and isinstance(piece[1], str)
        for piece in pieces
    )
    if not whole or not is_count(size) or sum(piece[0] for piece in pieces) != size:
        raise CheckpointError(
            f"{path} must list the pieces of {shown(name)[1:-1]}, and their sizes must add up to its size"
        )
    pieces = [piece for piece in pieces if piece[0] or number == 1]
    return Record(size, list(itertools.accumulate(p[0] for p in pieces)), [p[1] for p in pieces], number == 1)


def is_count(value: Any) -> bool:
    """Whether a JSON value is a number of bytes or elements: whole, and in [0, 2**63)."""
    return is_whole(value) and 0 <= value < 2**63
