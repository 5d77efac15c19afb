"""Ways to damage a file: bytes, values of JSON and TOML, headers, and what else may lie in a file's place."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUGE = (
    b"9" * 400, b"9" * 5000, b"1e999", b"-1", b"0x" + b"f" * 300, b"NaN", b"Infinity", b"1.5", b"null", b"true", b'""', b"[]", b"{}",
    b'"\\ud800"', b'"\\u0000"', b"\0", b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b'"' + b"a" * 3000 + b'"',
    b"18446744073709551615", b"9223372036854775808", b"1e-400", b"-0", b"1979-05-27", b"\r\n", b"#", b"=", b"[[a]]",
)  # fmt: skip
WIDE = (
    0,
    1,
    7,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    100_000_000,
    100_000_001,
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 0.5, -1.5, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "a\0b", "../x",
    "a" * 2000, "F32", "BF16", "I64", "U4", [], [0], [0, 0], [2**62, 2**62, 0], [1, 2, 3], [[1], [2]], [None], {}, {"a": 1}, [-1, 4], [4, 0],
)  # fmt: skip


def damaged_bytes(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        way, size = chance.randrange(10), len(out)
        at = chance.randrange(size + 1)
        if chance.random() < 0.5:
            at = min(at, chance.randrange(1, 400))  # heads decide more than bodies
            at = min(at, size)
        if way <= 1 and at < size:
            out[at] ^= 1 << chance.randrange(8)
        elif way == 2 and at < size:
            out[at] = chance.choice((0, 0x20, 0x22, 0x2C, 0x5B, 0x7B, 0x7D, 0x80, 0xFF, 0x39))
        elif way == 3:
            del out[at:]
        elif way == 4:
            del out[at : at + chance.choice((1, 2, 8, 100))]
        elif way == 5:
            out[at:at] = bytes(chance.randrange(256) for _ in range(chance.choice((1, 2, 8, 64))))
        elif way == 6:
            out[at:at] = chance.choice(HUGE)
        elif way == 7:
            other = chance.randrange(size + 1)
            out[at : at + 16], out[other : other + 16] = out[other : other + 16], out[at : at + 16]
        elif way == 8:
            out[at:at] = out[at : at + chance.choice((1, 8, 64, 512))]
        else:
            out[at : at + 8] = chance.choice(WIDE).to_bytes(8, "little")
    return bytes(out)


def damaged_value(chance: random.Random, value: Any) -> Any:
    """JSON with a value somewhere in it changed, removed, added or renamed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key, out = chance.choice(list(value)), dict(value)
        way = chance.random()
        if way < 0.6:
            out[key] = damaged_value(chance, value[key])
        elif way < 0.7:
            del out[key]
        elif way < 0.8:
            out[chance.choice(("", "x", "a\0", "\ud800", "__metadata__", "format", "../x", "a" * 2000))] = out[key]
        elif way < 0.9:
            out[chance.choice(list(out))] = value[key]
        else:
            out[key + "x"] = out.pop(key)
        return out
    if isinstance(value, list) and value and chance.random() < 0.8:
        at, out = chance.randrange(len(value)), list(value)
        if chance.random() < 0.7:
            out[at] = damaged_value(chance, out[at])
        elif chance.random() < 0.5:
            del out[at]
        else:
            out.insert(at, out[at])
        return out
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return value + chance.choice((-1, 1, 8, -8, 2**32, 2**63, -(2**63)))
    return chance.choice(VALUES)


def damaged_json(chance: random.Random, data: bytes) -> bytes:
    try:
        value = damaged_value(chance, json.loads(data))
    except ValueError:
        return damaged_bytes(chance, data)
    text = json.dumps(value, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")
    if chance.random() < 0.1 and text.startswith(b"{") and len(text) > 2:  # a key twice
        first = text[1:].split(b",")[0].rstrip(b"}")
        text = b"{" + first + b"," + text[1:]
    return damaged_bytes(chance, text) if chance.random() < 0.1 else text


def damaged_safetensors(chance: random.Random, data: bytes) -> bytes:
    """A header that is JSON still, with a length that fits it, more often than not."""
    length = int.from_bytes(data[:8], "little")
    if chance.random() < 0.4 or length > len(data):
        return damaged_bytes(chance, data)
    head = damaged_json(chance, data[8 : 8 + length].rstrip())
    size = len(head) + (chance.choice((-1, 1, 8, 2**40)) if chance.random() < 0.1 else 0)
    return max(size, 0).to_bytes(8, "little") + head + data[8 + length :]


def damaged_gzip(chance: random.Random, data: bytes) -> bytes:
    """Packed bytes, or packed again after what they hold was damaged."""
    if chance.random() < 0.4:
        return damaged_bytes(chance, data)
    return gzip.compress(damaged_lines(chance, gzip.decompress(data)), 1, mtime=0)


def damaged_lines(chance: random.Random, data: bytes) -> bytes:
    """Text of lines: a line changed, twice, elsewhere, or with another value."""
    if chance.random() < 0.4:
        return damaged_bytes(chance, data)
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    way = chance.randrange(5)
    if way == 0:
        lines.insert(chance.randrange(len(lines)), lines[at])
    elif way == 1:
        del lines[at]
    elif way == 2 and lines[at].startswith(b"{"):
        lines[at] = damaged_json(chance, lines[at])
    elif way == 3 and b"=" in lines[at]:
        lines[at] = lines[at].split(b"=")[0] + b"= " + chance.choice(HUGE)
    else:
        lines[at] += chance.choice(HUGE)
    return b"\n".join(lines)


def put_something_else(chance: random.Random, path: Path) -> str:
    """Puts something that is no file of its own in the place of a file, and says what. 1 TiB of zeros behind a gzip file is padding, and in a .bin
    file tokens: to read them takes hours, and is no finding.
    """
    way = chance.choice(("fifo", "directory", "dangling link", "loop", "device", "empty", "sparse", "nothing", "link"))
    way = "empty" if way == "sparse" and path.suffix in (".gz", ".bin") else way
    data = path.read_bytes()
    path.unlink()
    if way == "fifo":
        os.mkfifo(path)
    elif way == "directory":
        path.mkdir()
    elif way == "dangling link":
        path.symlink_to(path.with_name("nowhere"))
    elif way == "loop":
        path.symlink_to(path)
    elif way == "device":
        path.symlink_to("/dev/zero")
    elif way == "empty":
        path.write_bytes(b"")
    elif way == "sparse":
        path.write_bytes(data)
        os.truncate(path, 1 << 40)
    elif way == "link":  # to a file with the same bytes
        other = path.with_name("." + path.name)
        other.write_bytes(data)
        path.symlink_to(other.name)
    return way


Damage = Callable[[random.Random, bytes], bytes]
