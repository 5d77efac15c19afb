"""xt.save and xt.load: a dict of tensors as one safetensors file."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .._C import Tensor
from .._types import Device
from ..errors import CheckpointError
from ..files import path_text, write_file
from .directory import PathLike
from .safetensors import SafetensorsFile, chunks

# How files of torch.save begin: a zip file, or a pickle of protocol 2 to 5.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def save(tensors: Mapping[str, Tensor], path: PathLike, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes {name: tensor} (a state_dict, say) to a safetensors file that any reader of the format opens: whole, or
    not at all, whatever fails. Tensors of any dtype, device and strides; nothing else, as nothing is pickled.

    metadata: texts by name, kept in the file. TypeError for other values, ValueError for the name __metadata__ and for
    text that is no Unicode, OSError when the file cannot be written.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"save: tensors must be a dict of tensors, got {type(tensors).__name__}")
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"save: names must be text, got {name!r}")
        if not _is_text(name):
            raise ValueError(f"save: names must be Unicode, got {name!r}")
        if name == "__metadata__":
            raise ValueError("save: a tensor must not have the format's own name, got '__metadata__'")
        if not isinstance(value, Tensor):
            hint = (
                "; save numbers as tensors, and a dict inside by names of its own"
                if not hasattr(value, "shape")
                else ""
            )
            raise TypeError(f"save: {name} must be a Tensor, got {type(value).__name__}{hint}")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"save: metadata must be a dict of texts, got {type(metadata).__name__}")
    for name, text in (metadata or {}).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"save: metadata must map text to text, got {name!r}: {text!r}")
        if not _is_text(name) or not _is_text(text):
            raise ValueError(f"save: metadata must be Unicode, got {name!r}: {text!r}")
    write_file(path_text("save: path", path), lambda stream: stream.writelines(chunks(tensors, metadata)))


def _is_text(text: str) -> bool:
    """Whether UTF-8 can spell it: no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open_at_once(path: str, flags: int) -> int:
    """A pipe that nobody writes to is opened, too, in place of waiting for who does."""
    return os.open(path, flags | os.O_NONBLOCK)


def load(path: PathLike, map_location: Device = None) -> dict[str, Tensor]:
    """{name: tensor} of a safetensors file: new tensors of the file's dtypes, on the CPU or on the device map_location.

    The file is checked as a whole and never executed. CheckpointError when it cannot be read, breaks a rule of the
    format, or is a pickle (torch.save's .pt and .bin), which could run code.
    """
    path = path_text("load: path", path)
    try:
        with open(path, "rb", opener=_open_at_once) as stream:
            start = stream.read(4) or b""
    except OSError:
        start = b""  # SafetensorsFile says what is wrong
    if start.startswith(_PICKLES):
        raise CheckpointError(
            f"{path} must be a safetensors file, got a pickle, which can run code: where it is trusted, "
            "load it with PyTorch and write it with safetensors.torch.save_file"
        )
    with SafetensorsFile(path) as file:
        tensors = {name: file.tensor(name) for name in file.entries}
    return tensors if map_location is None else {name: tensor.to(map_location) for name, tensor in tensors.items()}
