"""xt.save and xt.load: a dict of tensors, whole or not at all, nothing pickled."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import xtrain as xt
from xtrain import nn
from xtrain.errors import CheckpointError


def test_a_dict_comes_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        kind: xt.tensor(rng.integers(0, 2, (3, 2))).to(kind)
        for kind in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
    }
    tensors |= {"scalar": xt.tensor(1.5), "empty": xt.zeros(0, 3), "turned": xt.tensor(rng.standard_normal((4, 3))).T}
    xt.save(tensors, tmp_path / "some.safetensors", metadata={"step": "7"})
    again = xt.load(str(tmp_path / "some.safetensors"))
    assert set(again) == set(tensors)
    for name, tensor in tensors.items():
        assert again[name].dtype is tensor.dtype and again[name].tolist() == tensor.tolist(), name
    assert xt.load(tmp_path / "some.safetensors", "cpu")["scalar"].device.type == "cpu"
    with xt.saving.SafetensorsFile(tmp_path / "some.safetensors") as file:
        assert file.metadata == {"step": "7"}


def test_a_module_comes_back(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    xt.save(first.state_dict(), tmp_path / "m")
    second.load_state_dict(xt.load(tmp_path / "m"))
    assert second.weight.tolist() == first.weight.tolist() and second.bias.tolist() == first.bias.tolist()


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m"
    xt.save({"a": xt.ones(2)}, path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        xt.save({"a": xt.zeros(2)}, path)
    monkeypatch.undo()
    assert xt.load(path)["a"].tolist() == [1, 1] and os.listdir(tmp_path) == ["m"]


@pytest.mark.on_cpu
def test_what_save_refuses(tmp_path: Path) -> None:
    for tensors, kind, text in (
        ([xt.ones(1)], TypeError, "save: tensors must be a dict of tensors, got list"),
        ({1: xt.ones(1)}, TypeError, "save: names must be text, got 1"),
        ({"step": 3}, TypeError, "save: step must be a Tensor, got int; save numbers as tensors, and a dict inside"),
        ({"model": {"a": xt.ones(1)}}, TypeError, "save: model must be a Tensor, got dict; save numbers"),
        ({"a": np.ones(1)}, TypeError, "save: a must be a Tensor, got ndarray$"),
        ({"__metadata__": xt.ones(1)}, ValueError, "save: a tensor must not have the format's own name"),
    ):
        with pytest.raises(kind, match=text):
            xt.save(tensors, tmp_path / "no")
    with pytest.raises(TypeError, match="save: metadata must map text to text, got 'step': 3"):
        xt.save({}, tmp_path / "no", metadata={"step": 3})
    with pytest.raises(TypeError, match="save: metadata must map text to text, got 3: 'step'"):
        xt.save({}, tmp_path / "no", metadata={3: "step"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="save: metadata must be a dict of texts, got list"):
        xt.save({}, tmp_path / "no", metadata=["step"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^save: names must be Unicode, got '\\ud800'"):
        xt.save({"\ud800": xt.ones(1)}, tmp_path / "no")
    with pytest.raises(ValueError, match=r"^save: metadata must be Unicode, got 'a': '\\ud800'"):
        xt.save({}, tmp_path / "no", metadata={"a": "\ud800"})
    with pytest.raises(FileNotFoundError):
        xt.save({}, tmp_path / "no" / "where")
    assert not os.listdir(tmp_path)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("sprung",)


@pytest.mark.on_cpu
def test_what_load_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 4, 5):
        Path("m.pt").write_bytes(pickle.dumps(Trap(), protocol))
        with pytest.raises(CheckpointError, match="m.pt must be a safetensors file, got a pickle, which can run code"):
            xt.load("m.pt")
    Path("m.bin").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(CheckpointError, match="m.bin must be a safetensors file, got a pickle"):
        xt.load("m.bin")
    assert not Path("sprung").exists()
    xt.save({"a": xt.ones(100)}, "m")
    Path("cut").write_bytes(Path("m").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut is truncated"):
        xt.load("cut")
    os.mkfifo("pipe")
    with pytest.raises(CheckpointError, match="pipe cannot be read: it is not a regular file"):
        xt.load("pipe")  # and does not wait for a writer
    for missing in ("nothing", "."):
        with pytest.raises((CheckpointError, OSError)):
            xt.load(missing)
