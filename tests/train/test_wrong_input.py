"""What a newcomer does first and wrong: binary data, options and names of other libraries, their tensors."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys

import numpy as np
import pytest
from places import ROOT
from runs import HANGS

import xtrain as xt
from xtrain import errors, nn
from xtrain.data import open_data
from xtrain.errors import ConfigError, DataError
from xtrain.models import Qwen3, Qwen3Config, load
from xtrain.train import Trainer
from xtrain.train.options import find_key


@pytest.mark.parametrize(
    "name,content",
    [
        ("d.txt.gz", gzip.compress(b"some text, packed " * 400, mtime=0x01020304)),
        ("d.parquet", b"PAR1" + b"columns of text " * 500 + b"PAR1"),
        ("train.bin", np.arange(5000, dtype=np.uint16).tobytes()),
        ("model.safetensors", (48).to_bytes(8, "little") + b'{"__metadata__":{"format":"pt"}}' + b" " * 16 + b"x" * 99),
        ("w.pkl", b"\x80\x04\x95" + b"list" * 600),
    ],
)
def test_a_binary_file_is_no_data(tmp_path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name} must be text, a token file or .npy, but it is binary.*xtrain prepare"):
        open_data(path)


def test_any_text_is_data(tmp_path) -> None:
    for content in ("na\u00efve ".encode("latin-1") * 99, "\u6f22\u5b57 ".encode() * 99, b"BZ and PK and PAR " * 99):
        (tmp_path / "d.txt").write_bytes(content)
        assert open_data(tmp_path / "d.txt").train_tokens > 0


@pytest.mark.parametrize(
    "name,hint",
    [
        ("learning-rate", "--optim.lr"),
        ("compile", "--graph"),
        ("block_size", "--seq-len"),
        ("optim.momentum", "--optim.beta1"),
        ("stepz", "--steps"),
        ("optim.lrr", "--optim.lr"),
    ],
)
def test_an_option_of_another_trainer(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^unknown option --{name}; did you mean {hint}\?$"):
        find_key(name, dashes=True)


@pytest.mark.parametrize("name", ["xyzzy", "fp8", "wandb"])
def test_no_hint_is_better_than_a_wrong_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^unknown option --{name}$"):
        find_key(name, dashes=True)


def test_a_trainer_takes_the_options_of_the_command_line(tmp_path) -> None:
    given = {"model": "tiny", "steps": 1, "data": str(ROOT / "README.md"), "out": str(tmp_path / "run"), "seq-len": 16}
    trainer = Trainer(given, quiet=True)
    assert trainer.config.model.preset == "tiny" and trainer.config.seq_len == 16
    with pytest.raises(ConfigError, match="unknown option stepz; did you mean steps"):
        Trainer({"stepz": 1}, quiet=True)
    with pytest.raises(ConfigError, match="steps must be"):
        Trainer({"steps": "many"}, quiet=True)


class Foreign:
    """A tensor of another library, whose class has the name of ours."""

    def __dlpack__(self, **_: object) -> None: ...

    def __index__(self) -> int:
        raise TypeError("only integer tensors of a single element can be converted to an index")


Foreign.__name__, Foreign.__module__ = "Tensor", "elsewhere"


@pytest.mark.parametrize("call", [lambda t: xt.ones(3) + t, lambda t: t * xt.ones(3), lambda t: xt.ones(3, 3) @ t])
def test_an_operator_names_the_other_library(call) -> None:
    with pytest.raises(TypeError, match=r"got elsewhere\.Tensor \(use xt\.from_dlpack\)$"):
        call(Foreign())


def test_an_argument_names_the_other_library() -> None:
    with pytest.raises(TypeError, match=r"^linear: argument 'input' must be a Tensor, got elsewhere\.Tensor \(use xt"):
        nn.Linear(8, 3)(Foreign())
    with pytest.raises(TypeError, match=r"^rope: argument 'theta' must be a float, got elsewhere\.Tensor$"):
        xt.functional.rope(xt.ones(3, 1, 4), theta=Foreign())
    with pytest.raises(TypeError, match=r"got numpy\.ndarray \(use xt\.from_numpy\)$"):
        xt.ones(3) + np.ones(3)


def test_a_layer_blames_its_input() -> None:
    with pytest.raises(
        ValueError,
        match=r"^linear: the last dim of input must be 7, as that of weight \(3, 7\) is, got shape \(4, 8\)$",
    ):
        nn.Linear(7, 3)(xt.ones(4, 8))


def test_a_name_of_another_library_has_its_substitute() -> None:
    with pytest.raises(AttributeError, match=r"^module 'xtrain' has no attribute 'compile': ops are fused already"):
        xt.compile  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"^module 'xtrain' has no attribute 'nonsense'$") as caught:
        xt.nonsense  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    assert caught.value.name == "nonsense" and caught.value.obj is xt  # Python adds the nearest name of obj
    with pytest.raises(AttributeError, match=r"^module 'xtrain\.nn' has no attribute 'functional': xt\.functional has"):
        nn.functional  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"^module 'xtrain\.functional' has no attribute 'mse_loss': \(x - y\)"):
        xt.functional.mse_loss  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_a_model_is_loaded_with_a_dtype(tmp_path) -> None:
    config = Qwen3Config(
        vocab_size=8, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    Qwen3(config).save_pretrained(tmp_path / "model")
    assert next(load(tmp_path / "model", xt.bfloat16).parameters()).dtype is xt.bfloat16
    for wrong in ("bf16", xt.int32, "cpu"):
        with pytest.raises(TypeError, match=r"^load: dtype must be a floating point dtype or None, got "):
            load(tmp_path / "model", wrong)  # pyright: ignore[reportArgumentType]  (refused)


@pytest.mark.parametrize("value,traceback", [("0", False), ("", False), ("1", True)])
def test_a_debug_variable_of_zero_is_off(value: str, traceback: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "xtrain", "train", "--stepz", "1"],
        env={**os.environ, "XTRAIN_DEBUG": value},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert ("Traceback" in done.stderr) == traceback, done.stderr


def test_values_in_messages() -> None:
    """One line of printable characters, and no more than asked for."""
    assert errors.shown("a\nb\x1b[31m") == r"'a\nb\x1b[31m'" and errors.shown(ValueError("a\n  b\x1b")) == r"a b\x1b"
    assert errors.shown("x" * 300, 10) == "'xxxxxxxxx..." and errors.shown([1, 2]) == "[1, 2]"
    assert errors.shown(10**6000) == "a long int"
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert errors.shown(deep) == "a long list"
