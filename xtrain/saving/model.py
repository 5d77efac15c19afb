"""Model directories as Hugging Face's readers and writers know them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _C
from .._C import Tensor
from .._types import Device, Tokenizer
from ..autograd import no_grad
from ..errors import CheckpointError, shown
from ..files import path_text
from ..models.registry import Architecture, architecture
from ..nn.lora import lora_layers
from .adapter import CONFIG as ADAPTER
from .adapter import install_adapter, read_adapter_config, write_adapter
from .directory import DirectoryWriter, PathLike
from .generation_config import config_ends, read_generation, write_generation
from .places import displaced_hint
from .reader import DirectoryReader
from .safetensors import SafetensorsFile, chunks, plain, raw_bytes

if TYPE_CHECKING:
    from ..models.language_model import LanguageModel

AVERAGES = "ema.safetensors"  # of the trained parameters, by their names in the model
SHARD_BYTES = 5_000_000_000
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_LONGEST_NAME = 255  # of a file, in most file systems


_UNITS = {"": 1, **{f"{p}B": 1000**i for i, p in enumerate(("", "K", "M", "G", "T"))}}
_UNITS.update({f"{p}IB": 1024**i for i, p in enumerate(("K", "M", "G", "T"), 1)})


def parse_size(size: int | str) -> int:
    """Bytes of a size as save_pretrained takes it: an integer, or a text such as "500MB" (1000s) or "2GiB" (1024s).
    ValueError for another, and for none at all.
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?I?B|)", str(size).strip().upper(), re.ASCII)
    if not isinstance(size, bool) and isinstance(size, (int, str)) and found and found[2] in _UNITS:
        bytes_ = int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]
        if bytes_ >= 1:
            return bytes_
    raise ValueError(
        f"save_pretrained: max_shard_size must be a positive number of bytes or a text such as '5GB', got {shown(size)}"
    )


def _architecture(model: LanguageModel) -> Architecture | None:
    """What the registry says about the model; None for a model of the user's own, which only its user can build."""
    try:
        return architecture(getattr(model.config, "model_type", None))
    except ValueError:
        return None


def _tied(model: LanguageModel) -> Mapping[str, str]:
    """Tensors that equal another one, and which."""
    kind = _architecture(model)
    return kind.tied if kind is not None and getattr(model.config, "tie_word_embeddings", False) else {}


def model_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The tensors that a model directory holds: the state_dict without tied tensors."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in _tied(model)}


def write_model(writer: DirectoryWriter, model: LanguageModel, tokenizer: Tokenizer | None, shard_bytes: int) -> None:
    """Write the files of a Hugging Face model directory; a file of tensors has about `shard_bytes` bytes at most. Of a
    model with LoRA, that is written in place of the tensors, in files of PEFT.
    """
    config = model.config.to_dict()
    config["dtype"] = config["torch_dtype"] = next(iter(model.parameters())).dtype.name
    eos = getattr(tokenizer, "eos", None)
    kind = _architecture(model)
    if eos is not None:
        config["eos_token_id"] = config_ends(model.config, eos)
    writer.write_json("config.json", config)
    write_generation(writer, model, config, eos, {} if kind is None else kind.generation)
    for name, data in (tokenizer.files() if tokenizer is not None else {}).items():
        writer.write(name, [data])
    if lora_layers(model):
        write_adapter(writer, model)
        return
    tensors, metadata = model_tensors(model), {"format": "pt"}
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        writer.write("model.safetensors", chunks(tensors, metadata))
        return
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        writer.write(file, chunks(shard, metadata))
        where.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    writer.write_json("model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def save_model(
    model: LanguageModel, directory: PathLike, *, tokenizer: Tokenizer | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `model` as a Hugging Face model directory; files of more than `shard_bytes` are split.

    An earlier model in `directory` is replaced in one step. Raises CheckpointError when the directory holds other files
    or when writing fails; then the earlier model is untouched. Of a model whose members were replaced, the tensors that
    it has are written; load_model reads models as their config describes them.
    """
    with DirectoryWriter(path_text("save: directory", directory)) as writer:
        write_model(writer, model, tokenizer, shard_bytes)
        writer.publish()


def read_tensors(reader: DirectoryReader) -> dict[str, Tensor]:
    """Return {name: CPU tensor} of a model directory, in one file or in shards. CheckpointError when one is damaged."""
    directory, index = reader.directory, "model.safetensors.index.json"
    if not reader.has("model.safetensors") and not reader.has(index):
        _refuse_other_forms(directory)
    if reader.has("model.safetensors") or not reader.has(index):
        with SafetensorsFile(reader.open("model.safetensors")) as file:
            return {name: file.tensor(name) for name in file.entries}
    where = reader.json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{directory / index} must map tensor names to files in weight_map")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(where.values())):
        if os.path.basename(name) != name or not name.endswith(".safetensors") or len(name) > _LONGEST_NAME:
            raise CheckpointError(f"{directory / index} must name .safetensors files beside it, got {shown(name)}")
        with SafetensorsFile(reader.open(name)) as file:
            for tensor in file.entries:
                if where.get(tensor) != name:
                    place = plain(where.get(tensor))
                    raise CheckpointError(
                        f"{directory / name} holds tensor {plain(tensor)}, which the index places in {place}"
                    )
                tensors[tensor] = file.tensor(tensor)
    missing = sorted(set(where) - set(tensors))
    if missing:
        problem = f"places tensor {plain(missing[0])} in {plain(where[missing[0]])}, which does not hold it"
        raise CheckpointError(f"{directory / index} {problem}")
    return tensors


def has_weights(directory: PathLike) -> bool:
    """Whether a model directory holds weights, whole or damaged, or LoRA. False: all it says is what a new model is.
    CheckpointError for weights in files of another kind.
    """
    reader = DirectoryReader(directory)
    if reader.has("model.safetensors") or reader.has(ADAPTER):
        return True
    if any(".safetensors" in name for name in {*os.listdir(directory), *(reader.records or {})}):
        return True  # a shard without its index is a damaged model
    _refuse_other_forms(reader.directory)
    return False


def _refuse_other_forms(directory: Path) -> None:
    """CheckpointError for weights in files of another kind, with what to do."""
    for name in sorted(os.listdir(directory)):
        if name.startswith(("training_args", "optimizer", "scheduler", "rng_state")):
            continue  # a trainer's, beside weights or not
        if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".bin.index.json")):
            raise CheckpointError(
                f"{directory} must hold model.safetensors, got {shown(name)}, of pickles, which can run code: where it "
                "is trusted, load it with transformers and write it with save_pretrained(DIR)"
            )
        if name.endswith((".gguf", ".h5", ".msgpack", ".onnx")):
            raise CheckpointError(
                f"{directory} must hold model.safetensors, got {shown(name)}, a form that is not read: convert it"
            )


def read_config(reader: DirectoryReader) -> tuple[Architecture, Any]:
    """Return the architecture that config.json names, and its config. CheckpointError when a model cannot have it."""
    values = reader.json("config.json")
    try:
        kind = architecture(values.get("model_type"))
        return kind, kind.config.from_dict(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{reader.directory / 'config.json'}: {shown(error, 300)}") from None


def load_model(
    directory: PathLike, dtype: _C.dtype | None = None, device: Device = None, *, ema: bool = False
) -> LanguageModel:
    """Return the model of a Hugging Face directory, with parameters of `dtype` (default: the dtype of the file) on
    `device`. A directory of LoRA means the model below it, whose directory it names, and LoRA in that. ema: with the
    averages that training has kept (`--ema`) in the place of the parameters that it trained.

    Raises CheckpointError when files are missing or damaged, when a tensor is missing, unknown or of the wrong shape,
    and when a tied model comes with an output layer that differs from its embedding; TypeError for another `dtype`.
    """
    if dtype is not None and not (isinstance(dtype, _C.dtype) and dtype.is_floating_point):
        raise TypeError(f"load: dtype must be a floating point dtype or None, got {shown(dtype)}")
    directory = Path(path_text("load: directory", directory))
    if not os.path.isdir(directory):
        found = "it is a file" if os.path.exists(directory) else f"there is none{displaced_hint(directory)}"
        raise CheckpointError(f"{directory} must be a model directory, but {found}")
    reader = DirectoryReader(directory)
    if reader.has(ADAPTER) and not reader.has("model.safetensors"):
        model = _load_with_adapter(reader, dtype, device)
        if ema:
            load_averages(model, reader)
        return model
    kind, config = read_config(reader)
    found = read_tensors(reader)
    tensors: dict[str, Tensor] = {}
    for key, tensor in found.items():
        if (name := kind.stored(key)) in tensors:
            raise CheckpointError(f"{directory} holds tensor {plain(name)} twice, by two names")
        if name is not None:
            tensors[name] = tensor
    for name, shape in kind.tensor_shapes(config):  # before anything of a size is built that the file has not
        _check_tensor(name, shape, tensors, directory)
    random = _C.get_rng_state()
    try:
        model = kind.model(config)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{directory / 'config.json'}: {shown(error, 300)}") from None
    finally:
        _C.set_rng_state(random)  # the initial weights are overwritten: they cost no random numbers
    load_tensors(model, tensors, directory, dtype)
    read_generation(model, reader)
    if ema:
        load_averages(model, reader)
    return model if device is None else model.to(device)


@no_grad()
def load_averages(model: LanguageModel, reader: DirectoryReader) -> None:
    """Set the trained parameters to their averages. CheckpointError when a directory holds none that fit."""
    if not reader.has(AVERAGES):
        raise CheckpointError(f"{reader.directory} holds no averages ({AVERAGES}): they come from training with --ema")
    known = dict(model.named_parameters())
    for name, average in read_averages(reader).items():
        if name not in known:
            raise CheckpointError(f"{reader.directory / AVERAGES} holds unknown tensor {plain(name)}")
        _check_tensor(name, known[name].shape, {name: average}, reader.directory)
        known[name].copy_(average)


def read_averages(reader: DirectoryReader) -> dict[str, Tensor]:
    """The averages of parameters by their names."""
    with SafetensorsFile(reader.open(AVERAGES)) as file:
        return {name: file.tensor(name) for name in file.entries}


def _load_with_adapter(reader: DirectoryReader, dtype: _C.dtype | None, device: Device) -> LanguageModel:
    base, path = read_adapter_config(reader).base_model_name_or_path, reader.directory / ADAPTER
    if not base or not os.path.isdir(base):
        raise CheckpointError(
            f"{path}: base_model_name_or_path must be a directory that is here, got {shown(base)}; "
            "xtrain.lora.load(model, DIR) takes a model from elsewhere"
        )
    if os.path.lexists(os.path.join(base, ADAPTER)):
        raise CheckpointError(f"{path}: base_model_name_or_path must be a model without LoRA, got {shown(base)}")
    model = load_model(base, dtype)
    install_adapter(model, reader)
    read_generation(model, reader)
    return model if device is None else model.to(device)


def _check_tensor(name: str, shape: Iterable[int], tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Refuse a file without tensor `name`, or with one of another shape."""
    if name not in tensors:
        raise CheckpointError(f"{directory} lacks tensor {name}, which does not fit its config.json")
    if tuple(tensors[name].shape) != tuple(shape):
        raise CheckpointError(f"{directory}: {name} must have shape {tuple(shape)}, got {tuple(tensors[name].shape)}")
    if tensors[name].dtype.name not in _FLOATS:
        raise CheckpointError(f"{directory}: {name} must be of {', '.join(_FLOATS)}, got {tensors[name].dtype.name}")


def load_tensors(
    model: LanguageModel, tensors: dict[str, Tensor], directory: Path, dtype: _C.dtype | None = None
) -> None:
    """Move the tensors of a directory into `model`, which becomes of `dtype` (default: the dtype of the file)."""
    expected = model_tensors(model)
    for name, other in _tied(model).items():
        if name in tensors and (other not in tensors or not _same_bytes(tensors[name], tensors[other])):
            raise CheckpointError(f"{directory}: {name} must equal {other}, because tie_word_embeddings is true")
        tensors.pop(name, None)
    missing, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or unknown:
        problem = f"lacks tensor {plain(missing[0])}" if missing else f"holds unknown tensor {plain(unknown[0])}"
        raise CheckpointError(f"{directory} {problem}, which does not fit its config.json")
    for name in tensors:
        _check_tensor(name, expected[name].shape, tensors, directory)
    if dtype is None:
        kind = _architecture(model)
        narrow = [tensor.dtype for name, tensor in tensors.items() if kind is None or not kind.stays_wide(name)]
        dtype = narrow[0] if len({dtype.name for dtype in narrow}) == 1 else _C.float32
    model.to(dtype)
    model.load_state_dict(tensors, strict=False)  # not strict: tied tensors are left out


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape) and bytes(raw_bytes(a)) == bytes(raw_bytes(b))
