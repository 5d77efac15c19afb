"""Event files as TensorBoard reads them, written without its package.

A file is a sequence of records: uint64 length, masked CRC-32C of the length, data, masked CRC-32C of the data, all
little-endian (TensorFlow's `record_writer`). Data are messages `Event` in the encoding of protocol buffers: wall_time =
1 (double), step = 2 (int64), file_version = 3 (string), summary = 5 (message: value = 1, repeated: tag = 1,
simple_value = 2), session_log = 7 (message: status = 1).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from ..state import State
from .base import Callback


class TensorBoardWriter(Callback):
    """Events in `tensorboard/` of the run's directory: `tensorboard --logdir RUNS` shows them. A resumed run begins a
    file of its own, which takes back the events behind its first step.
    """

    _file: BinaryIO | None = None

    def on_start(self, state: State) -> None:
        folder = state.directory / "tensorboard"
        folder.mkdir(exist_ok=True)
        stamp = time.time_ns()
        name = f"events.out.tfevents.{stamp // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{stamp % 10**9}"
        self._file = open(folder / name, "xb")  # noqa: SIM115 (closed by on_end)
        self._write(_event(0, _text(3, b"brain.Event:2")))
        if state.step:
            self._write(_event(state.step + 1, _text(7, b"\x08\x01")))  # a session starts here
        self._file.flush()

    def _write(self, data: bytes) -> None:
        if self._file is not None:
            length = struct.pack("<Q", len(data))
            self._file.write(length + masked_crc(length) + data + masked_crc(data))

    def on_step(self, state: State, record: Mapping[str, Any]) -> None:
        values = b"".join(
            _text(1, _text(1, name.encode()) + b"\x15" + struct.pack("<f", value))
            for name, value in scalars(record).items()
            if name not in ("step", "wall_time")
        )
        self._write(_event(record["step"], _text(5, values), record.get("wall_time")))
        if self._file is not None:
            self._file.flush()

    def on_end(self, state: State, result: Any) -> None:
        if self._file is not None:
            self._file.close()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name; those of a list are name/0, name/1 and so on."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            found.update({f"{name}/{i}": float(one) for i, one in enumerate(value)})
        elif isinstance(value, (int, float)):
            found[name] = value
    return found


def _event(step: int, content: bytes, wall_time: float | None = None) -> bytes:
    now = time.time() if wall_time is None else wall_time
    return b"\x09" + struct.pack("<d", now) + b"\x10" + _number(step) + content


def _text(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _number(len(data)) + data


def _number(value: int) -> bytes:
    """A varint: seven bits a byte, the lowest first."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _table() -> list[int]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        found.append(value)
    return found


_TABLE = _table()


def masked_crc(data: bytes) -> bytes:
    """CRC-32C (Castagnoli) of data, rotated and shifted as record files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
