"""Checkpoints: a model directory plus what a run needs to continue bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._C import Tensor
from .._types import Tokenizer
from ..errors import CheckpointError, shown
from ..nn.lora import lora_layers
from .adapter import install_adapter
from .directory import MANIFEST, DirectoryWriter, PathLike
from .model import AVERAGES, SHARD_BYTES, load_tensors, read_averages, read_tensors, write_model
from .places import find_checkpoints
from .reader import DirectoryReader
from .safetensors import SafetensorsFile, chunks

if TYPE_CHECKING:
    from ..models.language_model import LanguageModel
    from ..optim import EMA, Optimizer

STATE_FORMAT = 1  # of trainer_state.json


def save_checkpoint(
    directory: PathLike,
    model: LanguageModel,
    optimizer: Optimizer | None = None,
    state: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    ema: EMA | None = None,
) -> None:
    """Write model, optimizer, averages and `state` (JSON values) as one checkpoint directory, all or nothing.

    CheckpointError when writing fails, and where the directory is a link or holds other files than an earlier save.
    """
    with DirectoryWriter(directory, follow=False) as writer:
        write_model(writer, model, tokenizer, SHARD_BYTES)
        content = dict(state or {})
        if optimizer is not None:
            tensors, content["optimizer"] = _split_optimizer(model, optimizer)
            writer.write("optimizer.safetensors", chunks(tensors, {"format": "pt"}))
        if ema is not None:
            names = _names(model)
            averages = {names[id(parameter)]: average for parameter, average in ema.averages.items()}
            writer.write(AVERAGES, chunks(averages, {"format": "pt"}))
            content["ema"] = {"decay": ema.decay, "step": ema.step}
        writer.write_json("trainer_state.json", {"format": STATE_FORMAT, **content})
        writer.publish()


def verify_checkpoint(directory: PathLike) -> None:
    """Check every file of a checkpoint against its manifest; raises CheckpointError with the first difference."""
    reader = DirectoryReader(directory)
    if reader.records is None:
        raise CheckpointError(f"{Path(directory) / MANIFEST} cannot be read: there is none")
    for required in ("config.json", "trainer_state.json"):
        if required not in reader.records:
            raise CheckpointError(f"{Path(directory) / MANIFEST} does not list {required}")
    reader.verify()


def newest_valid(run: PathLike, warn: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint of a run that passes verification.

    Each damaged one on the way is reported through `warn`.
    """
    return first_valid(find_checkpoints(run), lambda error: warn(f"skipping a damaged checkpoint: {error}"))


def first_valid(paths: Iterable[Path], warn: Callable[[CheckpointError], object] = lambda _: None) -> Path | None:
    """Return the first of some checkpoints that passes verification; `warn` gets the error of each before it."""
    for path in paths:
        try:
            verify_checkpoint(path)
            return path
        except CheckpointError as error:
            warn(error)
    return None


def load_checkpoint(
    directory: PathLike, model: LanguageModel, optimizer: Optimizer | None = None, ema: EMA | None = None
) -> dict[str, Any]:
    """Load the tensors of a verified checkpoint into `model`, `optimizer` and `ema`; return its trainer_state.json.
    CheckpointError when it does not fit them.
    """
    directory = Path(directory)
    reader = DirectoryReader(directory)
    state = _trainer_state(reader)
    if lora_layers(model):
        install_adapter(model, reader)
    else:
        tensors = read_tensors(reader)
        load_tensors(model, tensors, directory, next(iter(model.parameters())).dtype)
    if optimizer is not None:
        with SafetensorsFile(reader.open("optimizer.safetensors")) as file:
            moments = {name: file.tensor(name) for name in file.entries}
        _join_optimizer(model, optimizer, moments, state.get("optimizer"), directory)
    if ema is not None:
        names = _names(model)
        try:
            averages = read_averages(reader)
            found = [averages[names[id(parameter)]] for parameter in ema.params]
            ema.load_state_dict({"step": state["ema"]["step"], "averages": found})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{directory}: the averages do not fit the model: {shown(error, 300)}") from None
    return state


def read_trainer_state(directory: PathLike) -> dict[str, Any]:
    """Return the trainer_state.json of a checkpoint. CheckpointError when it cannot be read or has another format."""
    return _trainer_state(DirectoryReader(directory))


def _trainer_state(reader: DirectoryReader) -> dict[str, Any]:
    state = reader.json("trainer_state.json")
    if state.get("format") != STATE_FORMAT:
        path = reader.directory / "trainer_state.json"
        raise CheckpointError(f"{path} must have format {STATE_FORMAT}, got {shown(state.get('format'))}")
    return state


def _names(model: LanguageModel) -> dict[int, str]:
    """{id of a parameter: its name}."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _parameter_names(model: LanguageModel, optimizer: Optimizer) -> list[str]:
    """The model's name of each optimizer parameter, in the order of the optimizer's state_dict."""
    names = _names(model)
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _split_optimizer(model: LanguageModel, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return ({"exp_avg.<parameter>": tensor}, the rest of the state as JSON values)."""
    names, stored = _parameter_names(model, optimizer), optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for index, values in stored["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{key}.{names[index]}"] = value
            else:
                plain.setdefault(names[index], {})[key] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in stored["param_groups"]]
    for group, source in zip(groups, stored["param_groups"], strict=True):
        group["params"] = [names[index] for index in source["params"]]
    return tensors, {"param_groups": groups, "state": plain}


def _join_optimizer(
    model: LanguageModel, optimizer: Optimizer, tensors: dict[str, Tensor], plain: Any, directory: Path
) -> None:
    names = _parameter_names(model, optimizer)
    index = {name: position for position, name in enumerate(names)}
    try:
        state: dict[int, dict[str, Any]] = {index[name]: dict(values) for name, values in plain["state"].items()}
        for full, tensor in tensors.items():
            key, _, name = full.partition(".")
            state.setdefault(index[name], {})[key] = tensor
        groups = [{**group, "params": [index[name] for name in group["params"]]} for group in plain["param_groups"]]
        for group in groups:
            lists = [key for key, value in group.items() if isinstance(value, list) and key != "params"]
            group.update((key, tuple(group[key])) for key in lists)  # JSON knows no tuples
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{directory}: the optimizer's state does not fit the model: {shown(error, 300)}"
        ) from None
