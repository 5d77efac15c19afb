"""Checkpoint directories: a Hugging Face model directory plus what a run needs to continue bit for bit.

    config.json generation_config.json      what every Hugging Face reader expects
    model.safetensors tokenizer*.json
    optimizer.safetensors                   moments and float32 masters
    trainer_state.json                      step, positions, random state, configuration
    manifest.json                           size and SHA-256 of every file above, written last

A directory appears under its name only when it is complete: it is written beside as `.NAME.tmp-N`, every file and the
directory are flushed to the disk, and one rename publishes it. Whatever fails on the way (a full disk, a kill), older
checkpoints are untouched; one that is being replaced is called `.NAME.old-N` for the moment between two renames.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .files import reason
from .safetensors_io import SafetensorsFile, chunks

FORMAT = 1
SHARD_BYTES = 5_000_000_000
MANIFEST = "manifest.json"
_STEP_NAME = re.compile(r"checkpoint-(\d+)")
# What saves in a run write, and nothing else that a folder may hold.
_TEMPORARY_DIRECTORY = re.compile(r"\.(checkpoint-\d{8,})\.(tmp|old)-\d+")
_TEMPORARY_FILE = re.compile(r"\.(config\.toml|metrics\.jsonl|loss\.png)\.tmp-\d+")
_PathLike = str | os.PathLike[str]


# ---- one directory, all or nothing


class DirectoryWriter:
    """Collects files in a temporary directory and publishes them with one rename.

    Leaving the `with` block early removes them.
    """

    def __init__(self, final: _PathLike) -> None:
        self._name = os.path.abspath(final)  # as the caller knows it
        self.final = Path(os.path.realpath(final))  # a link's target is replaced, not the link
        self.temporary = _free(self.final, "tmp")
        self._manifest: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> DirectoryWriter:
        with self._clear_errors():
            self.final.parent.mkdir(parents=True, exist_ok=True)
            self.temporary.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._name} cannot be written: {error.strerror or error}; nothing that was saved before is lost"
            ) from error

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """Write file `name` from bytes-like pieces and flush it to the disk."""
        digest, size = hashlib.sha256(), 0
        with self._clear_errors(), open(self.temporary / name, "wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                digest.update(view)
                size += len(view)
                while view:
                    view = view[file.write(view[: 1 << 30]) :]
            os.fsync(file.fileno())
        self._manifest[name] = {"size": size, "sha256": digest.hexdigest()}

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` as indented JSON, in ASCII: a path that is not valid Unicode has no UTF-8."""
        self.write(name, [(json.dumps(value, indent=2) + "\n").encode("ascii")])

    def publish(self) -> None:
        """Write the manifest and give the directory its name, replacing a directory of that name."""
        manifest = {"format": FORMAT, "files": self._manifest}
        self.write(MANIFEST, [json.dumps(manifest, indent=2).encode()])  # ends with its brace: any cut is seen
        with self._clear_errors():
            _sync_directory(self.temporary)
            with _renames:
                old = self._replace()
            _sync_directory(self.final.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _replace(self) -> Path | None:
        """Give the directory its name; what has had that name is returned under its new one."""
        if not os.path.lexists(self.final):
            os.rename(self.temporary, self.final)
            return None
        if not self.final.is_dir():  # a file, or a device: it must not be moved away
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        old = _free(self.final, "old")
        try:
            os.rename(self.final, old)
            os.rename(self.temporary, self.final)
        except BaseException:  # Ctrl-C between the two is one of them
            if old.exists() and not self.final.exists():
                os.rename(old, self.final)
            elif not self.temporary.exists():  # it came after the two
                shutil.rmtree(old, ignore_errors=True)
            raise
        return old


_renames = threading.RLock()  # two threads that replace one directory take turns; a signal's handler may save, too


def _forked() -> None:
    global _renames
    _renames = threading.RLock()  # the thread that held it is not in the child


os.register_at_fork(after_in_child=_forked)


def _free(final: Path, kind: str) -> Path:
    """A name `.NAME.kind-N` that nothing has; N begins at the thread's own number: no two of a machine share one."""
    names = (final.with_name(f".{final.name}.{kind}-{n}") for n in itertools.count(threading.get_native_id()))
    return next(path for path in names if not os.path.lexists(path))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean_temporary(run: _PathLike) -> None:
    """Remove what interrupted saves left in a run; a checkpoint that was being replaced gets its name back.

    Only for the holder of the run's lock: another process may be saving. Names of other forms are left alone.
    """
    for path in find_displaced(run):
        final = path.with_name(path.name[1:].partition(".")[0])
        if not final.exists():  # of several the newest
            _rename(path, final)
    for path in Path(run).glob(".*"):
        if _TEMPORARY_DIRECTORY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _TEMPORARY_FILE.fullmatch(path.name) and path.is_file():  # of files.write_file
            with contextlib.suppress(OSError):
                path.unlink()


def _rename(old: Path, new: Path) -> None:
    try:
        os.rename(old, new)
    except OSError as error:
        raise CheckpointError(f"{old} cannot be renamed to {new.name}: {reason(error)}") from None


# ---- models


def _model_tensors(model: Any) -> dict[str, Any]:
    tensors = dict(model.state_dict())
    if getattr(model.config, "tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    return tensors


def _write_model(writer: DirectoryWriter, model: Any, tokenizer: Any, shard_bytes: int) -> None:
    config = model.config.to_dict()
    config["dtype"] = config["torch_dtype"] = next(iter(model.parameters())).dtype.name
    eos = getattr(tokenizer, "eos", None)
    generation: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 40}
    if eos is not None:
        config["eos_token_id"] = generation["eos_token_id"] = eos
    writer.write_json("config.json", config)
    writer.write_json("generation_config.json", generation)
    for name, data in (tokenizer.files() if tokenizer is not None else {}).items():
        writer.write(name, [data])
    tensors, metadata = _model_tensors(model), {"format": "pt"}
    shards: list[dict[str, Any]] = [{}]
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


def save_model(model: Any, directory: _PathLike, *, tokenizer: Any = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model` as a Hugging Face model directory; files of more than `shard_bytes` are split.

    An earlier model in `directory` is replaced in one step. Raises CheckpointError when the directory holds other files
    or when writing fails; then the earlier model is untouched.
    """
    directory = Path(directory)
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).is_file():
        raise CheckpointError(f"{directory} must be new, empty or an earlier save, but it holds other files")
    with DirectoryWriter(directory) as writer:
        _write_model(writer, model, tokenizer, shard_bytes)
        writer.publish()


def read_json(path: _PathLike) -> dict[str, Any]:
    """Return the JSON object in a file, or raise CheckpointError."""
    try:
        with open(path, encoding="utf-8") as stream:
            value = json.load(stream)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_tensors(directory: _PathLike) -> dict[str, Any]:
    """Return {name: CPU tensor} of a model directory, in one file or in shards."""
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file() or not index.is_file():
        with SafetensorsFile(directory / "model.safetensors") as file:
            return {name: file.tensor(name) for name in file.entries}
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index} must map tensor names to files in weight_map")
    tensors: dict[str, Any] = {}
    for name in sorted(set(where.values())):
        if os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} must name .safetensors files beside it, got {name!r}")
        with SafetensorsFile(directory / name) as file:
            for tensor in file.entries:
                if where.get(tensor) != name:
                    raise CheckpointError(
                        f"{directory / name} holds tensor {tensor}, which the index places in {where.get(tensor)}"
                    )
                tensors[tensor] = file.tensor(tensor)
    missing = sorted(set(where) - set(tensors))
    if missing:
        raise CheckpointError(f"{index} places tensor {missing[0]} in {where[missing[0]]}, which does not hold it")
    return tensors


def load_model(directory: _PathLike, dtype: Any = None, device: Any = None) -> Any:
    """Return the model of a Hugging Face directory, with parameters of `dtype` (default: the dtype of the file) on
    `device`.

    Raises CheckpointError when files are missing or damaged, when a tensor is missing, unknown or of the wrong shape,
    and when a tied model comes with an output layer that differs from its embedding.
    """
    from . import _C, models
    from .models.qwen3 import tensor_shapes

    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} must be a model directory, but there is none{displaced_hint(directory)}")
    values = read_json(directory / "config.json")
    kind = values.get("model_type")
    if kind not in ("qwen3", "xtrain_qwen3_mhc"):
        raise CheckpointError(f"{directory / 'config.json'}: model_type must be qwen3, got {kind!r}")
    try:
        config = models.Qwen3Config.from_dict(values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None
    tensors = read_tensors(directory)
    for name, shape in tensor_shapes(config):  # before anything of a size is built that the file has not
        _check_tensor(name, shape, tensors, directory)
    random = _C.get_rng_state()
    try:
        model = models.Qwen3(config)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None
    finally:
        _C.set_rng_state(random)  # the initial weights are overwritten: they cost no random numbers
    _load_tensors(model, tensors, directory, dtype)
    return model if device is None else model.to(device)


def displaced_hint(directory: _PathLike) -> str:
    """Return "; ..." that names what a killed save left of the missing `directory`, or ""."""
    final = Path(os.path.realpath(directory))
    pattern = re.compile(re.escape(f".{final.name}.old-") + r"\d+")
    found = [path for path in final.parent.glob(".*") if pattern.fullmatch(path.name) and path.is_dir()]
    if not found:
        return ""
    return f"; a save that was killed has left the earlier one as {max(found, key=modified)}: rename it back"


def _check_tensor(name: str, shape: Iterable[int], tensors: Mapping[str, Any], directory: Path) -> None:
    """Refuse a file without tensor `name`, or with one of another shape."""
    if name not in tensors:
        raise CheckpointError(f"{directory} lacks tensor {name}, which does not fit its config.json")
    if tuple(tensors[name].shape) != tuple(shape):
        raise CheckpointError(f"{directory}: {name} must have shape {tuple(shape)}, got {tuple(tensors[name].shape)}")


def _load_tensors(model: Any, tensors: dict[str, Any], directory: Path, dtype: Any = None) -> None:
    from . import _C

    expected = _model_tensors(model)
    head = tensors.get("lm_head.weight")
    if head is not None and "lm_head.weight" not in expected:  # tied: accepted when it is the same matrix
        embedding = tensors.get("model.embed_tokens.weight")
        if embedding is None or not _same_bytes(head, embedding):
            raise CheckpointError(
                f"{directory}: lm_head.weight must equal model.embed_tokens.weight, because tie_word_embeddings is true"
            )
        del tensors["lm_head.weight"]
    missing, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or unknown:
        problem = f"lacks tensor {missing[0]}" if missing else f"holds unknown tensor {unknown[0]}"
        raise CheckpointError(f"{directory} {problem}, which does not fit its config.json")
    for name in tensors:
        _check_tensor(name, expected[name].shape, tensors, directory)
    if dtype is None:
        narrow = [tensor.dtype for name, tensor in tensors.items() if "_mhc." not in name and "stream_head" not in name]
        dtype = narrow[0] if len({dtype.name for dtype in narrow}) == 1 else _C.float32  # hyper-connections stay wide
    model.to(dtype)
    model.load_state_dict(tensors, strict=False)  # not strict: a tied lm_head.weight is left out


def _same_bytes(a: Any, b: Any) -> bool:
    from .safetensors_io import raw_bytes

    return a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape) and bytes(raw_bytes(a)) == bytes(raw_bytes(b))


# ---- checkpoints


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of `step`."""
    return f"checkpoint-{step:08d}"


def checkpoint_step(path: _PathLike) -> int | None:
    """Return the step in a checkpoint's directory name, or None."""
    match = _STEP_NAME.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def find_checkpoints(run: _PathLike) -> list[Path]:
    """Return the checkpoint directories of a run, newest (highest step) first; they may be damaged."""
    run = Path(run)
    if not run.is_dir():
        return []
    found = [path for path in run.iterdir() if checkpoint_step(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: checkpoint_step(path) or 0, reverse=True)


def find_displaced(run: _PathLike) -> list[Path]:
    """Return checkpoints that a killed save has renamed and not replaced, newest first; clean_temporary names them as
    they were.
    """
    found = []
    for path in Path(run).glob(".checkpoint-*.old-*"):
        match = _TEMPORARY_DIRECTORY.fullmatch(path.name)
        if match and path.is_dir() and not path.with_name(match[1]).exists():
            found.append(path)
    return sorted(found, key=modified, reverse=True)


def modified(path: Path) -> float:
    """When `path` was last changed, in seconds; 0 when it has gone: a run that is alive removes checkpoints."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def save_checkpoint(
    directory: _PathLike,
    model: Any,
    optimizer: Any = None,
    state: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> None:
    """Write model, optimizer and `state` (JSON values) as one checkpoint directory, all or nothing."""
    with DirectoryWriter(directory) as writer:
        _write_model(writer, model, tokenizer, SHARD_BYTES)
        content = dict(state or {})
        if optimizer is not None:
            tensors, content["optimizer"] = _split_optimizer(model, optimizer)
            writer.write("optimizer.safetensors", chunks(tensors, {"format": "pt"}))
        writer.write_json("trainer_state.json", {"format": FORMAT, **content})
        writer.publish()


def remove_checkpoint(path: _PathLike) -> None:
    """Delete a checkpoint; renamed first, so that a half-deleted one is never taken for a damaged one."""
    path = Path(path)
    temporary = _free(path, "tmp")
    try:
        os.rename(path, temporary)
    except OSError:
        return
    shutil.rmtree(temporary, ignore_errors=True)


def set_aside_after(run: _PathLike, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, which a resumed run is about to write anew, and return their new paths."""
    renamed = []
    for path in find_checkpoints(run):
        if (checkpoint_step(path) or 0) > step:
            for number in range(1, 1000):
                target = path.with_name(f"set-aside-{number}-{path.name}")
                if not target.exists():
                    _rename(path, target)
                    renamed.append(target)
                    break
    return renamed


def verify_checkpoint(directory: _PathLike) -> None:
    """Check every file of a checkpoint against its manifest; raises CheckpointError with the first difference."""
    directory = Path(directory)
    manifest = read_json(directory / MANIFEST)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict):
        raise CheckpointError(f"{directory / MANIFEST} must have format {FORMAT}, got {manifest.get('format')!r}")
    for required in ("config.json", "trainer_state.json"):
        if required not in files:
            raise CheckpointError(f"{directory / MANIFEST} does not list {required}")
    for name, expected in files.items():
        if os.path.basename(name) != name or not isinstance(expected, dict):
            raise CheckpointError(f"{directory / MANIFEST} must list plain file names, got {name!r}")
        path = directory / name
        try:
            size = path.stat().st_size
            if size != expected.get("size"):
                raise CheckpointError(
                    f"{path} is damaged: it has {size} bytes, the manifest says {expected.get('size')}"
                )
            with open(path, "rb") as file:
                digest = _hash_file(file)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        if digest != expected.get("sha256"):
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in the manifest")


def _hash_file(file: Any) -> str:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def newest_valid(run: _PathLike, warn: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint of a run that passes verification.

    Each damaged one on the way is reported through `warn`.
    """
    for path in find_checkpoints(run):
        try:
            verify_checkpoint(path)
            return path
        except CheckpointError as error:
            warn(f"skipping a damaged checkpoint: {error}")
    return None


def load_checkpoint(directory: _PathLike, model: Any, optimizer: Any = None) -> dict[str, Any]:
    """Load the tensors of a verified checkpoint into `model` and `optimizer` and return its trainer_state.json."""
    directory = Path(directory)
    state = read_trainer_state(directory)
    tensors = read_tensors(directory)
    _load_tensors(model, tensors, directory, next(iter(model.parameters())).dtype)
    if optimizer is not None:
        with SafetensorsFile(directory / "optimizer.safetensors") as file:
            moments = {name: file.tensor(name) for name in file.entries}
        _join_optimizer(model, optimizer, moments, state.get("optimizer"), directory)
    return state


def read_trainer_state(directory: _PathLike) -> dict[str, Any]:
    """Return the trainer_state.json of a checkpoint."""
    path = Path(directory) / "trainer_state.json"
    state = read_json(path)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path} must have format {FORMAT}, got {state.get('format')!r}")
    return state


def _parameter_names(model: Any, optimizer: Any) -> list[str]:
    """The model's name of each optimizer parameter, in the order of the optimizer's state_dict."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _split_optimizer(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ({"exp_avg.<parameter>": tensor}, the rest of the state as JSON values)."""
    from . import Tensor

    names, stored = _parameter_names(model, optimizer), optimizer.state_dict()
    tensors: dict[str, Any] = {}
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


def _join_optimizer(model: Any, optimizer: Any, tensors: dict[str, Any], plain: Any, directory: Path) -> None:
    names = _parameter_names(model, optimizer)
    index = {name: position for position, name in enumerate(names)}
    try:
        state: dict[int, dict[str, Any]] = {index[name]: dict(values) for name, values in plain["state"].items()}
        for full, tensor in tensors.items():
            key, _, name = full.partition(".")
            state.setdefault(index[name], {})[key] = tensor
        groups = [{**group, "params": [index[name] for name in group["params"]]} for group in plain["param_groups"]]
        for group in groups:
            group.update({key: tuple(value) for key, value in group.items() if key == "betas"})
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory}: the optimizer's state does not fit the model: {error}") from None
