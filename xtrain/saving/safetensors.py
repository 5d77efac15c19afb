"""Reading and writing safetensors files, strictly.

A file is: uint64 little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the raw bytes of the
tensors. Bytes move between file and tensor untouched, so bfloat16 needs no help from NumPy. The reader trusts nothing:
a header of more than 100,000,000 bytes, offsets that overlap, leave holes or run past the file, sizes that do not equal
the product of the shape, and duplicate names are refused. Tensors are read, not memory-mapped, so that a file truncated
by another process is an error and not a bus error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import _C
from .._C import Tensor
from ..errors import CheckpointError, shown
from .directory import PathLike
from .reader import CheckedFile, is_count

MAX_HEADER = 100_000_000
# The format's dtype names and their bits; those in _NAMES can become tensors, the others are only measured.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64"), 64),
}  # fmt: skip
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
_CODES = {name: code for code, name in _NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: `start` and `stop` are byte positions in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A validated safetensors file, open for reading; use it in a `with` block. A file of a manifest is checked by the
    end of the block: use its tensors only after it.

    Raises CheckpointError when the file cannot be read or breaks any rule of the format.
    """

    def __init__(self, file: PathLike | CheckedFile) -> None:
        self._file = file if isinstance(file, CheckedFile) else CheckedFile(file)
        self.path = self._file.path
        try:
            self.entries, self.metadata = _read_header(self._file)
        except BaseException:
            self._file.close(check=False)
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close(check=kind is None)

    def read(self, name: str) -> bytearray:
        """Return the raw little-endian bytes of tensor `name`."""
        entry = self.entries[name]
        return self._file.read(entry.start, entry.stop)

    def tensor(self, name: str) -> Tensor:
        """Return tensor `name` as a new CPU tensor of the file's dtype. CheckpointError: xtrain has no such dtype."""
        entry, where = self.entries[name], f"{self.path}: tensor {plain(name)}"
        if entry.dtype not in _NAMES:
            raise CheckpointError(f"{where} has dtype {entry.dtype}, which xtrain cannot hold")
        if len(entry.shape) > 8:
            raise CheckpointError(f"{where} must have at most 8 dimensions, got {len(entry.shape)}")
        try:
            return _C.from_bytes(self.read(name), getattr(_C, _NAMES[entry.dtype]), entry.shape)
        except ValueError as error:  # sizes such as (2**62, 2**62, 0)
            raise CheckpointError(f"{where}: {error}") from None


def _read_header(file: CheckedFile) -> tuple[dict[str, Entry], dict[str, str]]:
    path, size = file.path, file.size
    if size < 8:
        raise CheckpointError(f"{path} is not a safetensors file: it has {size} bytes, a header length alone takes 8")
    start = bytes(file.peek(0, 8))
    if start == b"version ":
        raise CheckpointError(
            f"{path} is not a safetensors file but a pointer of Git LFS: run `git lfs pull` beside it"
        )
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER:
        raise CheckpointError(f"{path}: header length must be at most {MAX_HEADER}, got {length}")
    if length > size - 8:
        raise CheckpointError(f"{path} is truncated: the header takes {length} bytes, the file has {size}")
    head = file.read(0, 8 + length)
    text = head[8:]
    if int.from_bytes(head[:8], "little") != length or not text.startswith(b"{"):
        raise CheckpointError(f"{path}: header must be a JSON object that starts with '{{', got {bytes(text[:8])!r}")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON: {error or 'nested too deeply'}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map text to text")
    entries = {name: _entry(path, name, item, 8 + length) for name, item in header.items()}
    _check_layout(path, entries, 8 + length, size)
    return entries, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def plain(name: str | None) -> str:
    """A name of a file as it is, or as text of one short line."""
    return name if name is not None and name.isprintable() and len(name) <= 100 else shown(name)


def _entry(path: str, name: str, item: Any, base: int) -> Entry:
    where = f"{path}: tensor {plain(name)}"
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{where} has unknown dtype {shown(dtype)}")
    if not isinstance(shape, list) or not all(map(is_count, shape)):
        raise CheckpointError(f"{where} must have a shape of whole numbers, got {shape!r:.100}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)) or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} must have data_offsets [begin, end], got {offsets!r:.100}")
    count = 1
    for extent in shape:
        count *= extent
        if count >= 2**63:  # also stops a product of millions of huge numbers
            break
    expected = count * _BITS[dtype] // 8
    if expected >= 2**63 or expected != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where} must take {expected} bytes for {dtype} {shape!r:.100}, got {offsets[1] - offsets[0]}"
        )
    return Entry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _check_layout(path: str, entries: Mapping[str, Entry], base: int, size: int) -> None:
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            word = "overlaps its neighbour" if entry.start < end else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: tensor {plain(name)} must start at data byte {end - base}, got {entry.start - base} ({word})"
            )
        end = entry.stop
    if end != size:
        problem = "is truncated" if end > size else "has bytes after its last tensor"
        raise CheckpointError(f"{path} {problem}: the header describes {end} bytes, the file has {size}")


def chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a safetensors file (bytes-like, no copies of CPU tensors) that holds `tensors` (any device
    and strides).

    Wider dtypes come first, so every tensor is aligned to its itemsize.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": _CODES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"a safetensors header must have at most {MAX_HEADER} bytes, got {len(text)}")
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield raw_bytes(tensors[name])


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order.

    A uint8 view when it is contiguous on the CPU, of a copy otherwise.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.to("cpu")
    return _C.to_bytes(tensor.contiguous().cpu())
