"""Checkpoints and safetensors: bit-exact round trips, and every way a file can be damaged, hostile or impossible to write."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from runs import options, python, text_file, weights
from safetensors.numpy import load_file

import xtrain as xt
from xtrain import saving
from xtrain.errors import CheckpointError
from xtrain.models import Qwen3, Qwen3Config
from xtrain.models.decoder import count_parameters, tensor_shapes
from xtrain.optable.table import bits, tensor
from xtrain.saving.safetensors import MAX_HEADER, SafetensorsFile, chunks
from xtrain.train import Trainer

CONFIG = dict(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)


def model(**changes) -> Qwen3:
    return Qwen3(Qwen3Config(**{**CONFIG, **changes}))


# ---- safetensors ---------------------------------------------------------------------------------------------------------------------


def test_round_trip_of_every_dtype(tmp_path) -> None:
    rng = np.random.default_rng(0)
    tensors = {d: tensor(rng.standard_normal((3, 5)), d) for d in ("float32", "float64", "bfloat16", "float16")}
    tensors |= {d: xt.tensor(rng.integers(0, 2, (2, 7)).astype(d)) for d in ("int32", "int64", "uint8", "bool")}
    tensors |= {
        "empty": xt.zeros(0, 4),
        "scalar": xt.tensor(2.5),
        "strided": tensors["float32"].T,
        "nan": xt.tensor([float("nan"), -0.0]),
    }
    file = tmp_path / "t.safetensors"
    file.write_bytes(b"".join(bytes(memoryview(c)) for c in chunks(tensors, {"format": "pt"})))
    with SafetensorsFile(file) as f:
        assert f.metadata == {"format": "pt"}
        assert set(f.entries) == set(tensors)
        for name, want in tensors.items():
            got = f.tensor(name)
            assert (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape))
            assert bits(got) == bits(want)
    tensors.pop("bfloat16")
    file.write_bytes(b"".join(bytes(memoryview(c)) for c in chunks(tensors)))
    for name, a in load_file(file).items():
        assert a.tobytes() == np.ascontiguousarray(tensors[name].cpu().numpy()).tobytes()


def raw(header, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def item(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "empty file": (b"", "header length"),
    "seven bytes": (b"\0" * 7, "header length"),
    "huge header": (raw({}, length=2**63), f"at most {MAX_HEADER}"),
    "negative header": (raw({}, length=2**64 - 1), f"at most {MAX_HEADER}"),
    "header past the end": (raw({"a": item()}, b"\0" * 8, length=5000), "truncated"),
    "not JSON": (raw(b"{nope"), "not valid JSON"),
    "not an object": (raw(b"[1]"), "must be a JSON object"),
    "not UTF-8": (raw(b"{\xff}"), "not valid JSON"),
    "deep JSON": (raw(b"{" + b'"a":[' * 100000), "not valid JSON"),
    "data cut off": (raw({"a": item()}, b"\0" * 7), "truncated"),
    "data too long": (raw({"a": item()}, b"\0" * 9), "bytes after"),
    "hole": (raw({"a": item(offsets=(4, 12))}, b"\0" * 12), "hole"),
    "overlap": (raw({"a": item(), "b": item(offsets=(4, 12))}, b"\0" * 12), "overlaps"),
    "wrong size": (raw({"a": item(shape=(3,))}, b"\0" * 8), "must take 12 bytes"),
    "size that overflows": (raw({"a": item(shape=(2**62, 2**62, 4))}, b"\0" * 8), "must take"),
    "product that wraps to the right size": (raw({"a": item(shape=(2**63 + 2,))}, b"\0" * 8), "whole numbers"),
    "negative shape": (raw({"a": item(shape=(-2,))}, b"\0" * 8), "whole numbers"),
    "fractional shape": (raw({"a": item(shape=(2.5,))}, b"\0" * 8), "whole numbers"),
    "boolean shape": (raw({"a": item(shape=(True, 2))}, b"\0" * 8), "whole numbers"),
    "reversed offsets": (raw({"a": item(offsets=(8, 0))}, b"\0" * 8), "data_offsets"),
    "negative offsets": (raw({"a": item(offsets=(-8, 0))}, b"\0" * 8), "data_offsets"),
    "unknown dtype": (raw({"a": item(dtype="F31")}, b"\0" * 8), "unknown dtype"),
    "missing key": (raw({"a": {"dtype": "F32"}}), "exactly dtype, shape and data_offsets"),
    "not a dict": (raw({"a": 3}), "exactly"),
    "same name twice": (
        raw(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            b"\0" * 8,
        ),
        "twice",
    ),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "text to text"),
    "nine dimensions": (raw({"a": item(shape=(1,) * 8 + (2,))}, b"\0" * 8), "at most 8 dimensions"),
    "dtype that cannot be held": (raw({"a": item(dtype="F8_E4M3", shape=(8,))}, b"\0" * 8), "cannot hold"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path, name: str) -> None:
    content, text = HOSTILE[name]
    file = tmp_path / "h.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=text) as error, SafetensorsFile(file) as f:
        for key in f.entries:
            f.tensor(key)
    message = str(error.value)
    assert "h.safetensors" in message
    assert "\n" not in message
    assert len(message) < 500


def test_random_damage_is_an_error_or_harmless(tmp_path) -> None:
    file = tmp_path / "f.safetensors"
    good = b"".join(bytes(memoryview(c)) for c in chunks({"a": xt.ones(3, 4), "b": xt.zeros(5, dtype=xt.int64)}))
    rng = np.random.default_rng(0)
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            bad[rng.integers(0, len(bad))] = rng.integers(0, 256)
        file.write_bytes(bytes(bad[: rng.integers(0, len(bad) + 1)] if rng.integers(2) else bad))
        try:
            with SafetensorsFile(file) as f:
                for key in f.entries:
                    f.tensor(key).numel()
        except CheckpointError:
            pass


# ---- model directories -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", [10**9, 3000])
def test_model_round_trip_is_bitwise(tmp_path, tied: bool, dtype: str, shard: int) -> None:
    m = model(tie_word_embeddings=tied).to(getattr(xt, dtype))
    saving.save_model(m, tmp_path / "m", shard_bytes=shard)
    assert (tmp_path / "m" / "model.safetensors").exists() == (shard > 3000)
    back = Qwen3.from_pretrained(tmp_path / "m")
    assert {k: bits(v) for k, v in back.state_dict().items()} == {k: bits(v) for k, v in m.state_dict().items()}
    assert back.config.to_dict() == {**m.config.to_dict(), "dtype": dtype, "torch_dtype": dtype} | {
        k: back.config.to_dict()[k] for k in back.config.extra
    }
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] == 8
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]


class Own(xt.nn.Module):
    """A model that no architecture of the registry describes: it is saved, and read by whoever knows it."""

    def __init__(self, **keys) -> None:
        self.config = SimpleNamespace(to_dict=lambda: {"width": 3, **keys}, **keys)
        self.lines = xt.nn.Linear(3, 2)


@pytest.mark.parametrize("keys", [{}, {"model_type": None}, {"model_type": "own"}])
def test_a_model_of_the_users_own_is_saved(tmp_path, keys) -> None:
    own, other = Own(**keys), Own(**keys)
    optimizers = [xt.optim.AdamW(each.parameters()) for each in (own, other)]
    saving.save_model(own, tmp_path / "m")
    state = own.state_dict()
    assert {k: bits(v) for k, v in saving.read_tensors(saving.DirectoryReader(tmp_path / "m")).items()} == {
        k: bits(v) for k, v in state.items()
    }
    assert json.loads((tmp_path / "m" / "config.json").read_text())["width"] == 3
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text()) == {}
    saving.save_checkpoint(tmp_path / "checkpoint-00000001", own, optimizers[0], {"step": 1}, None)
    assert saving.load_checkpoint(tmp_path / "checkpoint-00000001", other, optimizers[1])["step"] == 1
    assert {k: bits(v) for k, v in other.state_dict().items()} == {k: bits(v) for k, v in state.items()}


def test_model_errors(tmp_path) -> None:
    directory = tmp_path / "m"
    model().save_pretrained(directory)
    (directory / "manifest.json").unlink()  # as from elsewhere: what is wrong with a file itself
    good = {p.name: p.read_bytes() for p in directory.iterdir()}

    def restore() -> None:
        for name, content in good.items():
            (directory / name).write_bytes(content)

    def config(**changes):
        values = json.loads(good["config.json"]) | changes
        (directory / "config.json").write_text(json.dumps(values))

    cases = [
        (lambda: (directory / "config.json").unlink(), "config.json cannot be read"),
        (lambda: (directory / "config.json").write_text("{"), "not valid JSON"),
        (lambda: (directory / "config.json").write_text("[]"), "JSON object"),
        (
            lambda: config(model_type="gemma"),
            "model_type must be gemma2, gpt2, llama, mistral, qwen2 or qwen3, got 'gemma'",
        ),
        (lambda: config(hidden_size=17), "hidden_size|shape"),
        (lambda: config(hidden_size=-1), "hidden_size"),
        (lambda: config(hidden_size="16"), "hidden_size"),
        (lambda: config(num_hidden_layers=3), "lacks tensor model.layers.2"),
        (lambda: config(num_hidden_layers=1), "unknown tensor model.layers.1"),
        (lambda: config(rope_scaling={"rope_type": "yarn", "factor": 2}), "rope_scaling is not supported"),
        (lambda: config(rope_theta=5.0), "agree"),
        (lambda: config(use_sliding_window=True, sliding_window=0), "sliding"),
        (lambda: config(head_dim=10**9, hidden_size=10**9, vocab_size=10**9), ""),
        (lambda: (directory / "model.safetensors").unlink(), "model.safetensors cannot be read"),
        (lambda: (directory / "model.safetensors").write_bytes(good["model.safetensors"][:-1]), "truncated"),
    ]
    for damage, text in cases:
        restore()
        damage()
        with pytest.raises((CheckpointError, xt.OutOfMemoryError), match=text or None):
            saving.load_model(directory)
    restore()
    assert saving.load_model(directory)
    with pytest.raises(CheckpointError, match="there is none"):
        saving.load_model(tmp_path / "nowhere")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="holds other files"):
        model().save_pretrained(foreign)
    assert (foreign / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("changes", [{}, {"mhc_streams": 3}, {"mhc_streams": 2, "mhc_contraction": "learned"}])
@pytest.mark.parametrize("tied", [True, False])
def test_shapes_of_a_config_are_those_of_its_model(tied: bool, changes: dict) -> None:
    m = model(tie_word_embeddings=tied, num_key_value_heads=2, num_attention_heads=4, **changes)
    want = [(name, tuple(t.shape)) for name, t in saving.model.model_tensors(m).items()]
    assert list(tensor_shapes(m.config)) == want
    assert count_parameters(m.config) == m.num_parameters()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("vocab_size", "model.embed_tokens.weight must have shape"),
        ("hidden_size", "model.embed_tokens.weight must have shape"),
        ("intermediate_size", "model.layers.0.mlp.gate_proj.weight must have shape"),
        ("num_attention_heads", "model.layers.0.self_attn.q_proj.weight must have shape"),
        ("head_dim", "model.layers.0.self_attn.q_proj.weight must have shape"),
        ("num_hidden_layers", "lacks tensor model.layers.2.self_attn.q_proj.weight"),
    ],
)
@pytest.mark.parametrize("size", [300_000, 2**40, 10**30])
def test_an_edited_config_is_compared_before_anything_is_built(tmp_path, monkeypatch, key, text, size) -> None:
    model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: size}))
    (tmp_path / "manifest.json").unlink()
    monkeypatch.setattr(Qwen3, "__init__", lambda *_: pytest.fail("built"))
    for load in (saving.load_model, Qwen3.from_pretrained):
        with pytest.raises(CheckpointError, match=re.escape(text)) as error:
            load(tmp_path)
        assert "\n" not in str(error.value) and str(error.value).count(str(tmp_path)) == 1


def test_a_stray_tensor_does_not_stand_for_all_layers(tmp_path, monkeypatch) -> None:
    model().save_pretrained(tmp_path)
    tensors = dict(saving.read_tensors(saving.DirectoryReader(tmp_path))) | {
        f"model.layers.{2**40 - 1}.input_layernorm.weight": xt.ones(16)
    }
    (tmp_path / "model.safetensors").write_bytes(b"".join(bytes(memoryview(c)) for c in chunks(tensors)))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2**40}))
    (tmp_path / "manifest.json").unlink()
    monkeypatch.setattr(Qwen3, "__init__", lambda *_: pytest.fail("built"))
    with pytest.raises(CheckpointError, match="lacks tensor model.layers.2.self_attn.q_proj.weight"):
        saving.load_model(tmp_path)


def test_index_may_not_leave_the_directory(tmp_path) -> None:
    saving.save_model(model(), tmp_path / "m", shard_bytes=3000)
    index = tmp_path / "m" / "model.safetensors.index.json"
    (tmp_path / "m" / "manifest.json").unlink()
    values = json.loads(index.read_text())
    for evil in ("../../etc/passwd", "/etc/passwd", "config.json", "none.safetensors"):
        changed = {**values, "weight_map": {**values["weight_map"], "model.norm.weight": evil}}
        index.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError):
            saving.load_model(tmp_path / "m")


def test_tied_head_in_the_file(tmp_path) -> None:
    m = model(tie_word_embeddings=True)
    m.save_pretrained(tmp_path / "m")
    tensors = dict(saving.read_tensors(saving.DirectoryReader(tmp_path / "m")))
    table = tensors["model.embed_tokens.weight"]
    (tmp_path / "m" / "manifest.json").unlink()
    for head, fine in [(table.clone(), True), (table * 2, False)]:
        (tmp_path / "m" / "model.safetensors").write_bytes(
            b"".join(bytes(memoryview(c)) for c in chunks({**tensors, "lm_head.weight": head}))
        )
        if fine:
            saving.load_model(tmp_path / "m")
        else:
            with pytest.raises(CheckpointError, match="lm_head.weight must equal"):
                saving.load_model(tmp_path / "m")


# ---- checkpoints -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(tmp_path) -> Trainer:
    t = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run"), quiet=True)
    t.directory.mkdir()
    t.train_step()
    t.save()
    return t


def test_checkpoint_round_trip_is_bitwise(trainer) -> None:
    first = trainer.directory / "checkpoint-00000001"
    other = Trainer({"resume": str(trainer.directory)}, quiet=True)
    assert {k: bits(v) for k, v in other.model.state_dict().items()} == {
        k: bits(v) for k, v in trainer.model.state_dict().items()
    }
    before = weights(first)
    trainer.train_step()
    other.train_step()
    assert {k: bits(v) for k, v in other.model.state_dict().items()} == {
        k: bits(v) for k, v in trainer.model.state_dict().items()
    }
    assert weights(first) == before


def test_every_damage_to_a_checkpoint_is_seen(trainer) -> None:
    path = trainer.directory / "checkpoint-00000001"
    saving.verify_checkpoint(path)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        damages = [content[:-1], content[:0], content + b"x"]
        if content:
            flipped = bytearray(content)
            flipped[len(flipped) // 2] ^= 0x10
            damages.append(bytes(flipped))
        for damage in damages:
            file.write_bytes(damage)
            try:
                saving.verify_checkpoint(path)
            except CheckpointError as error:
                assert "\n" not in str(error)
            else:
                assert file.name == "manifest.json" and damage == content + b"x" and json.loads(content), (
                    f"{file.name}: damage was not seen"
                )
        file.unlink()
        with pytest.raises(CheckpointError):
            saving.verify_checkpoint(path)
        file.write_bytes(content)
    saving.verify_checkpoint(path)


def test_manifest_may_not_leave_the_directory(trainer) -> None:
    manifest = trainer.directory / "checkpoint-00000001" / "manifest.json"
    values = json.loads(manifest.read_text())
    values["files"]["../../../etc/passwd"] = {"size": 1, "sha256": "0"}
    manifest.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="plain file names"):
        saving.verify_checkpoint(manifest.parent)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("when", [0, 1, 3, "manifest.json"])
def test_a_full_disk_loses_nothing(trainer, monkeypatch, number: int, when) -> None:
    """The disk fills up at any file of a save: the message says so, the old checkpoint is whole, no debris stays."""
    before = {p.name: p.read_bytes() for p in (trainer.directory / "checkpoint-00000001").iterdir()}
    calls, real = [], os.fsync

    def full(fd):
        calls.append(fd)
        name = os.readlink(f"/proc/self/fd/{fd}") if os.path.exists("/proc/self/fd") else ""
        if len(calls) - 1 == when or (isinstance(when, str) and name.endswith(when)):
            raise OSError(number, os.strerror(number))
        return real(fd)

    if isinstance(when, str) and not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc")
    trainer.train_step()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            CheckpointError, match=rf"cannot be written: {os.strerror(number)}; nothing that was saved before is lost"
        ):
            trainer.save()
    assert {p.name: p.read_bytes() for p in (trainer.directory / "checkpoint-00000001").iterdir()} == before
    assert [p.name for p in trainer.directory.iterdir() if "checkpoint" in p.name] == ["checkpoint-00000001"]
    trainer.save()  # room again
    assert saving.newest_valid(trainer.directory, print).name == "checkpoint-00000002"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_FSIZE")
def test_a_really_full_disk(trainer) -> None:
    """The system refuses the write itself (a file size limit stands in for a full disk)."""
    code = f"""
import resource, signal, sys
import xtrain as xt
from xtrain.models import Qwen3, Qwen3Config
from xtrain import saving
from xtrain.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
m = Qwen3(Qwen3Config(**{CONFIG!r}))
sys.dont_write_bytecode = True  # byte code that the limit has cut would be read later
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    saving.save_checkpoint({str(trainer.directory / "checkpoint-00000009")!r}, m)
except CheckpointError as e:
    print("refused:", e)
m.loss(xt.zeros(1, 4, dtype=xt.int64), xt.zeros(1, 4, dtype=xt.int64)).backward()
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout
    assert "cannot be written" in done.stdout
    assert saving.newest_valid(trainer.directory, print).name == "checkpoint-00000001"
    assert not (trainer.directory / "checkpoint-00000009").exists()


def test_replacing_a_model_in_two_renames(tmp_path, monkeypatch) -> None:
    """As on a system that cannot exchange two directories in one step."""
    monkeypatch.setattr(saving.directory._C, "exchange", lambda *_: False)
    m = model()
    m.save_pretrained(tmp_path / "m")
    before = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    real = os.rename

    def broken(a, b):
        if ".tmp-" in os.fspath(a):
            raise OSError(errno.EIO, "I/O error")
        return real(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", broken)
        with pytest.raises(CheckpointError):
            model().save_pretrained(tmp_path / "m")
    assert os.listdir(tmp_path) == ["m"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()} == before
    model().save_pretrained(tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() != before["model.safetensors"]


def test_debris_of_a_killed_save_is_removed(trainer) -> None:
    debris = trainer.directory / ".checkpoint-00000005.tmp-123"
    debris.mkdir()
    (debris / "model.safetensors").write_bytes(b"half")
    assert saving.newest_valid(trainer.directory, print).name == "checkpoint-00000001"
    saving.clean_temporary(trainer.directory)
    assert not debris.exists()


def test_old_checkpoints_are_removed_only_after_the_new_one_exists(trainer, monkeypatch) -> None:
    trainer.config.keep = 1
    seen = []
    real = saving.remove_checkpoint
    monkeypatch.setattr(
        saving,
        "remove_checkpoint",
        lambda p: (seen.append([c.name for c in saving.find_checkpoints(trainer.directory)]), real(p)),
    )
    trainer.train_step()
    trainer.save()
    assert seen == [["checkpoint-00000002", "checkpoint-00000001"]]
    assert [c.name for c in saving.find_checkpoints(trainer.directory)] == ["checkpoint-00000002"]


def test_a_checkpoint_of_another_model_is_refused(trainer, tmp_path) -> None:
    other = model()
    with pytest.raises(CheckpointError, match="tensor|shape"):
        saving.load_checkpoint(trainer.directory / "checkpoint-00000001", other, xt.optim.AdamW(other.parameters()))
