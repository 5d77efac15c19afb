"""A disk that loses power: what a recorded process has done to files, and what of it a crash may leave.

A file system may keep a write, a cut or a change of a folder's names in memory until the file, or the folder, is flushed (fsync). Until then
each of them may be on the disk or not, in any order; a write may be there in part, by sectors of 512 bytes, or as zeros. A rename, and an
exchange, is there or not: file systems keep a journal of names. A name whose file was not flushed leads to what there is of the file.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECTOR = 512
RECORD = struct.Struct("<c3xIIIQQQ")


@dataclass
class Event:
    kind: str
    name: str
    data: bytes
    a: int
    b: int
    c: int


def events(log: Path) -> Iterator[Event]:
    """What disk_shim.c has recorded."""
    text, at = log.read_bytes(), 0
    while at < len(text):
        kind, name, data, _, a, b, c = RECORD.unpack_from(text, at)
        at += RECORD.size
        yield Event(kind.decode(), text[at : at + name].decode(), text[at + name : at + name + data], a, b, c)
        at += name + data


@dataclass
class File:
    safe: bytes = b""
    waiting: list[tuple[int, bytes | None]] = field(default_factory=list)  # (offset, data), or (length, None): a cut

    def sync(self) -> None:
        self.safe, self.waiting = self.after(self.waiting), []

    def after(self, changes: list[tuple[int, bytes | None]]) -> bytes:
        out = bytearray(self.safe)
        for at, data in changes:
            if data is None:
                del out[at:]
                out.extend(bytes(at - len(out)))
            else:
                out.extend(bytes(max(0, at - len(out))))
                out[at : at + len(data)] = data
        return bytes(out)

    def crashed(self, chance: random.Random, mode: str) -> bytes:
        if mode == "nothing":
            return self.safe
        if mode == "everything":
            return self.after(self.waiting)
        kept: list[tuple[int, bytes | None]] = []
        for at, data in self.waiting:
            way = chance.random()
            if way < 0.35:
                continue
            if data is not None and way < 0.5:
                data = bytes(len(data))  # the length came to the disk, the data did not
            elif data is not None and way < 0.75:
                parts = bytearray(data)
                for start in range(-(at % SECTOR), len(data), SECTOR):
                    if chance.random() < 0.4:
                        low, high = max(start, 0), min(start + SECTOR, len(data))
                        parts[low:high] = bytes(high - low)
                data = bytes(parts)
            kept.append((at, data))
        return self.after(kept)


@dataclass
class Folder:
    safe: dict[str, Any] = field(default_factory=dict)
    now: dict[str, Any] = field(default_factory=dict)
    waiting: list[dict[str, Any]] = field(
        default_factory=list
    )  # name -> what it leads to, or None; each is all or nothing

    def change(self, names: dict[str, Any]) -> None:
        self.waiting.append(names)
        _apply(self.now, names)

    def sync(self) -> None:
        self.safe, self.waiting = dict(self.now), []

    def crashed(self, chance: random.Random, mode: str) -> dict[str, Any]:
        out = dict(self.safe)
        for names in self.waiting:
            if mode == "everything" or (mode == "some" and chance.random() < 0.6):
                _apply(out, names)
        return out


def _apply(entries: dict[str, Any], names: dict[str, Any]) -> None:
    for name, what in names.items():
        if what is None:
            entries.pop(name, None)
        else:
            entries[name] = what


class Disk:
    """Follows a recording; `root` is the inode number of its folder, which was empty and flushed."""

    def __init__(self, root: int) -> None:
        self.root = Folder()
        self._by_number: dict[int, Any] = {root: self.root}

    def follow(self, event: Event) -> None:
        found = self._by_number.get
        if event.kind in "CM":
            made = self._by_number[event.b] = File() if event.kind == "C" else Folder()
            found(event.a).change({event.name: made})
        elif event.kind == "D":
            found(event.a).change({event.name: None})
        elif event.kind in "RX":
            folder, other = found(event.a), event.data.decode()
            if event.a != event.b:
                raise ValueError("a rename between two folders is not simulated")
            what = folder.now[event.name]
            folder.change({event.name: folder.now[other] if event.kind == "X" else None, other: what})
        elif event.kind == "W":
            found(event.a).waiting.append((event.c, event.data))
        elif event.kind == "T":
            found(event.a).waiting.append((event.c, None))
        elif event.kind == "S":
            found(event.a).sync()

    def crashed(self, chance: random.Random, mode: str) -> dict[str, Any]:
        """What is on the disk after a crash here: {name: bytes, or the same of a folder}. mode: of what waits, "nothing", "some" or
        "everything" has come to the disk.
        """

        def content(what: Any) -> Any:
            found = what.crashed(chance, mode)
            return (
                found if isinstance(found, bytes) else {name: content(inner) for name, inner in sorted(found.items())}
            )

        return content(self.root)


def digest(tree: Any) -> bytes:
    """Equal for equal states."""
    if isinstance(tree, bytes):
        return hashlib.sha256(tree).digest()
    return hashlib.sha256(b"".join(name.encode() + b"\0" + digest(what) for name, what in tree.items())).digest()


def put(tree: dict[str, Any], folder: Path) -> None:
    """Writes a state into a folder."""
    folder.mkdir()
    for name, what in tree.items():
        if isinstance(what, bytes):
            (folder / name).write_bytes(what)
        else:
            put(what, folder / name)
