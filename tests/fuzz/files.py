"""Damaged files at every reader: safetensors, manifest, config.json, tokenizer.json, tokens, .npy, TOML, metrics.jsonl, a run's state, LoRA,
averages, JSON lines, gzip, Parquet, nanoGPT's .bin, kept batches, chat templates.

A reader raises what READERS says, with a message of one line, or returns. It never needs more than its worker's memory, never waits for a
pipe, and where a manifest lists a file, what is read of it are the bytes that were saved.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from damage import (
    Damage,
    damaged_bytes,
    damaged_gzip,
    damaged_json,
    damaged_lines,
    damaged_safetensors,
    put_something_else,
)
from frame import Family, Wrong

sys.path.append(os.fspath(Path(__file__).resolve().parent.parent / "support"))
from runs import options, text_file

import xtrain as xt
from xtrain import data, lora, saving
from xtrain.data.encoding import Kept
from xtrain.data.readers import read_documents
from xtrain.data.records import Encoded, Encoder
from xtrain.data.token_files import open_tokens
from xtrain.errors import CheckpointError, ConfigError, DataError
from xtrain.models import Qwen3, Qwen3Config
from xtrain.saving.safetensors import SafetensorsFile
from xtrain.tokenizers import ByteTokenizer, ChatTemplate, load_tokenizer
from xtrain.train import Trainer
from xtrain.train.metrics import read_metrics
from xtrain.train.options import with_file

# Files that once broke a reader, and their like: FORMAT-WHAT. Cases take them as they are, or damage them further.
CORPUS = Path(__file__).resolve().parent / "corpus"
MEMORY = (CheckpointError, xt.OutOfMemoryError)
# Of the format: the documented exceptions of its reader, and how it is damaged.
READERS: dict[str, tuple[tuple[type[BaseException], ...], Damage]] = {
    "safetensors": (MEMORY, damaged_safetensors),
    "config": (MEMORY, damaged_json),
    "index": (MEMORY, damaged_json),
    "manifest": (MEMORY, damaged_json),
    "listed": (MEMORY, damaged_bytes),
    "state": ((*MEMORY, ConfigError, DataError), damaged_json),
    "moments": (MEMORY, damaged_safetensors),
    "tokens": ((DataError,), damaged_bytes),
    "npy": ((DataError,), damaged_bytes),
    "toml": ((ConfigError,), damaged_lines),
    "metrics": ((OSError,), damaged_lines),
    "tokenizer": ((DataError, CheckpointError), damaged_json),
    "beside": ((DataError, CheckpointError), damaged_json),
    "text": ((DataError,), damaged_bytes),
    "adapter": (MEMORY, damaged_json),
    "lora": (MEMORY, damaged_safetensors),
    "averages": (MEMORY, damaged_safetensors),
    "named": (MEMORY, damaged_safetensors),
    "lines": ((DataError,), damaged_lines),
    "gzip": ((DataError,), damaged_gzip),
    "parquet": ((DataError,), damaged_bytes),
    "raw": ((DataError,), damaged_bytes),
    "kept": ((DataError,), damaged_bytes),
    "template": ((DataError,), damaged_bytes),
    "settings": ((DataError,), damaged_json),
}
# What these formats are read with; a family without one of them is told by run.py.
PACKAGES = {"tokenizers": ("tokenizer", "beside"), "pyarrow": ("parquet",), "jinja2": ("template", "settings")}
SIZES = dict(
    vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
)  # fmt: skip
TOKENIZER = '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]},"pre_tokenizer":null,"added_tokens":[]}'
TEMPLATE = """{% for m in messages %}{% if m['role'] == 'user' %}<u>{{ m['content'] }}{% else %}<a>
{%- generation %}{{ m['content'] | trim }}{% endgeneration %}{% endif %}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}<a>{% endif %}"""
HEADER = np.array([20240520, 1, 300, *[0] * 253], "<i4").tobytes()  # that other trainers write
TALK = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "x"}]
# A case of these takes a millisecond or two: others, whose readers take part in theirs, are some four times as frequent.
SLOW = {
    "trainer_state.json", "optimizer.safetensors", "model.safetensors.index.json", "ema.safetensors", "chat_template.jinja", "p.parquet",
}  # fmt: skip
SHARED = Path("/dev/shm")  # memory, where there is: no disk waits


class Files(Family):
    name = "files"
    slow = 120.0

    def __init__(self, folder: Path) -> None:
        if os.access(SHARED, os.W_OK):
            self.own = folder = Path(tempfile.mkdtemp(prefix="xtrain-fuzz-", dir=SHARED))
        super().__init__(folder)
        self.last, self.kind, self.bytes = "", "", b""
        self.good: dict[Path, bytes] = {}
        model = Qwen3(Qwen3Config(**SIZES))
        self.model = folder / "model"
        saving.save_model(model, self.model)
        self.saved = _weights(model)
        saving.save_model(model, folder / "shards", shard_bytes=500)
        self.plain = folder / "plain"  # without a manifest
        shutil.copytree(folder / "shards", self.plain)
        (self.plain / "manifest.json").unlink()
        shutil.copytree(self.model, folder / "one")
        (folder / "one" / "manifest.json").unlink()
        text = text_file(folder / "text.txt", 3000)
        self.run_folder = folder / "run"
        changes = {
            "model.hidden_size": 8,
            "model.intermediate_size": 16,
            "model.head_dim": 4,
            "seq_len": 8,
            "batch_size": 2,
        }
        trainer = Trainer(options(text, self.run_folder, steps=2, device="cpu", **changes), quiet=True)
        trainer.run()
        self.checkpoint = saving.find_checkpoints(self.run_folder)[0]
        self.trainer = Trainer({"resume": os.fspath(self.run_folder)}, quiet=True)
        data.prepare(text, folder / "x.tokens")
        np.save(folder / "x.npy", np.arange(60, dtype=np.int32))
        np.save(folder / "y.npy", np.arange(60, dtype=np.uint16))
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer.json").write_text(TOKENIZER)
        (folder / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "ab", "eos_token_id": 2}')
        (folder / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
        self.write_others(folder)
        self.targets = self.places()
        self.seeds: dict[str, list[bytes]] = {}
        for path in sorted(CORPUS.iterdir()):
            self.seeds.setdefault(path.name.partition("-")[0], []).append(path.read_bytes())

    @classmethod
    def lacks(cls) -> list[str]:
        return [name for name in PACKAGES if importlib.util.find_spec(name) is None]

    def write_others(self, folder: Path) -> None:
        """Good files of formats that nothing above has written."""
        model = lora.apply(Qwen3(Qwen3Config(**SIZES)), r=2, target_modules=["q_proj", "down_proj"])
        saving.adapter.save_adapter(model, folder / "lora")
        (folder / "lora" / "manifest.json").unlink()
        shutil.copytree(folder / "one", folder / "averages")
        xt.save(dict(self.model_tensors()), folder / "averages" / "ema.safetensors")
        xt.save({"a": xt.arange(6, dtype="int64"), "b": xt.ones(2, 3), "c": xt.zeros(0)}, folder / "x.safetensors")
        rows = [{"text": "one"}, {"prompt": "two", "completion": "three"}, {"messages": TALK}, {"text": "é\n" * 9}]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / "a.jsonl").write_bytes(lines)
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
        (folder / "b.txt.gz").write_bytes(gzip.compress(b"some text; " * 9, mtime=0))
        np.arange(300, dtype="<u2").tofile(folder / "x.bin")
        (folder / "y.bin").write_bytes(HEADER + np.arange(300, dtype="<u2").tobytes())
        self.kept = Kept(folder / "kept.part", [], ByteTokenizer(), None)
        ids, mask = np.arange(5, dtype=np.uint32), np.array([True, False, True])
        self.batch = [Encoded(ids, None, 5), Encoded(ids[:3], mask, 9), Encoded(ids[:0], None, 0)]
        self.kept.store(0, self.batch)
        (folder / "chat").mkdir()
        (folder / "chat" / "chat_template.jinja").write_text(TEMPLATE)
        settings = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": TEMPLATE}
        (folder / "chat" / "tokenizer_config.json").write_text(json.dumps(settings))
        if "pyarrow" not in self.lacks():
            import pyarrow
            import pyarrow.parquet

            table = pyarrow.table({"text": ["one", "two", "", "é"], "id": [1, 2, 3, 4]})
            pyarrow.parquet.write_table(table, folder / "p.parquet")
            said = pyarrow.table({"messages": [TALK, TALK[:1]]})
            pyarrow.parquet.write_table(said, folder / "q.parquet", compression="zstd")
            pyarrow.set_cpu_count(1)  # many processes run side by side
            pyarrow.set_io_thread_count(1)

    def model_tensors(self) -> list[tuple[str, Any]]:
        return list(saving.load_model(self.folder / "one").named_parameters())

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            shutil.rmtree(self.own, ignore_errors=True)

    def places(self) -> list[tuple[str, Path, Callable[[Path], Any]]]:
        """(format, the file that is damaged, the reader)."""
        f, tokenizer = self.folder, self.folder / "tokenizer"
        listed = sorted(path for path in self.model.iterdir() if path.name != "manifest.json")
        found: list[tuple[str, Path, Callable[[Path], Any]]] = [
            ("safetensors", f / "one" / "model.safetensors", self.read_safetensors),
            ("safetensors", f / "one" / "model.safetensors", lambda path: saving.load_model(path.parent)),
            ("config", f / "one" / "config.json", lambda path: saving.load_model(path.parent)),
            ("index", self.plain / "model.safetensors.index.json", lambda path: saving.load_model(path.parent)),
            ("manifest", self.model / "manifest.json", self.read_whole),
            ("state", self.checkpoint / "trainer_state.json", self.resume),
            ("moments", self.checkpoint / "optimizer.safetensors", self.resume),
            ("tokens", f / "x.tokens", lambda path: open_tokens(path)[0][:]),
            ("npy", f / "x.npy", lambda path: open_tokens(path)[0][:]),
            ("npy", f / "y.npy", lambda path: open_tokens(path)[0][:]),
            ("toml", self.run_folder / "config.toml", lambda path: with_file(path, {})),
            ("metrics", self.run_folder / "metrics.jsonl", self.read_metrics),
            ("text", f / "text.txt", data.open_data),
        ]
        found += [("listed", path, self.read_whole) for path in listed]
        found += [
            ("tokenizer", tokenizer / "tokenizer.json", self.read_tokenizer),
            ("beside", tokenizer / "tokenizer_config.json", self.read_tokenizer),
            ("beside", tokenizer / "generation_config.json", self.read_tokenizer),
            ("adapter", f / "lora" / "adapter_config.json", self.read_adapter),
            ("lora", f / "lora" / "adapter_model.safetensors", self.read_adapter),
            ("averages", f / "averages" / "ema.safetensors", lambda path: saving.load_model(path.parent, ema=True)),
            ("named", f / "x.safetensors", xt.load),
            ("lines", f / "a.jsonl", self.read_documents),
            ("gzip", f / "a.jsonl.gz", self.read_documents),
            ("gzip", f / "b.txt.gz", self.read_documents),
            ("parquet", f / "p.parquet", self.read_documents),
            ("parquet", f / "q.parquet", self.read_documents),
            ("raw", f / "x.bin", self.read_raw),
            ("raw", f / "y.bin", self.read_raw),
            ("kept", f / "kept.part" / "00000000.npz", self.read_kept),
            ("template", f / "chat" / "chat_template.jinja", self.read_template),
            ("settings", f / "chat" / "tokenizer_config.json", self.read_template),
        ]
        left_out = {kind for name in self.lacks() for kind in PACKAGES[name]}
        return [place for place in found if place[0] not in left_out]

    def describe(self) -> str:
        return f"{self.last}, {len(self.bytes)} bytes: {self.bytes[:300]!r}"

    def run(self, chance: random.Random) -> None:
        kind, path, read = chance.choice(self.targets)
        if path.name in SLOW and chance.random() < 0.75:  # of the rest come four while one of these runs
            kind, path, read = chance.choice(self.targets)
        if path not in self.good:
            self.good[path] = path.read_bytes()
        good = self.good[path]
        self.last, self.kind, self.bytes, other = f"{kind}: {path.name}", kind, b"", ""
        listed = kind in ("state", "moments")
        try:
            if chance.random() < 0.03:
                other = put_something_else(chance, path)
                self.last += ", " + other
            else:
                self.bytes = self.damaged(chance, kind, good)
                write(path, self.bytes)
                listed = listed and chance.random() < 0.9
                if listed:
                    relist(path, self.bytes)  # so that the manifest is right, and the reader sees the content
            self.tried(kind, path, read)
        finally:
            if other:
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                path.unlink(missing_ok=True)
                path.with_name("." + path.name).unlink(missing_ok=True)
            write(path, good)
            if listed:
                relist(path, good)

    def damaged(self, chance: random.Random, kind: str, good: bytes) -> bytes:
        seeds = self.seeds.get(kind)
        if seeds and chance.random() < 0.03:
            self.counts["of the corpus"] += 1
            found = chance.choice(seeds)
            return found if chance.random() < 0.5 else damaged_bytes(chance, found)
        return READERS[kind][1](chance, good)

    def tried(self, kind: str, path: Path, read: Callable[[Path], Any]) -> bool:
        """Whether the reader takes the file. Wrong: another exception than READERS says, or a bad message."""
        try:
            read(path)
        except READERS[kind][0] as error:
            text = str(error)
            if "\n" in text or "\0" in text or len(text) > 1500 or not text:
                raise Wrong(f"{kind}: the message must be one short line, got {text[:400]!r}") from None
            self.counts["refused"] += 1
            return False
        self.counts["taken"] += 1
        return True

    # ---- readers

    def read_safetensors(self, path: Path) -> None:
        with SafetensorsFile(path) as file:
            for name, entry in file.entries.items():
                if file.read(name) != path.read_bytes()[entry.start : entry.stop]:
                    raise Wrong(f"tensor {name} has other bytes than the file")
                with contextlib.suppress(CheckpointError):  # a dtype that xtrain has not, or more dimensions
                    file.tensor(name)

    def read_whole(self, path: Path) -> None:
        """A directory with a manifest: what is loaded is what was saved."""
        if _weights(saving.load_model(path.parent)) != self.saved:
            raise Wrong("damage was accepted: other weights than were saved")

    def resume(self, path: Path) -> None:
        from xtrain.train.resume import restore

        restore(self.trainer, path.parent)

    def read_metrics(self, path: Path) -> None:
        for record in read_metrics(path):
            if type(record["step"]) is not int:
                raise Wrong(f"step must be an int, got {record['step']!r}")

    def read_tokenizer(self, path: Path) -> None:
        found = load_tokenizer(path.parent)
        ids = found.encode(b"abba ab")
        found.decode(ids)
        if len(ids) and int(ids.max()) >= found.vocab_size:
            raise Wrong(f"a token of {int(ids.max())} in a vocabulary of {found.vocab_size}")

    def read_adapter(self, path: Path) -> None:
        lora.load(Qwen3(Qwen3Config(**SIZES)), path.parent)

    def read_documents(self, path: Path) -> None:
        """As prepare does, one document after the other."""
        documents = list(read_documents(os.fspath(path)))
        encoder = Encoder(ByteTokenizer(), None)
        for document in documents:
            if not (isinstance(document.content, dict) and "messages" in document.content):
                encoder.encode_batch([document])

    def read_raw(self, path: Path) -> None:
        out = path.with_suffix(".prepared")
        try:
            data.prepare(path, out, token_bytes=2)
            if self.bytes:  # a file, and no other thing
                packed = len(self.bytes) >= 1024 and self.bytes[:4] == HEADER[:4]
                if not np.array_equal(open_tokens(out)[0][:], np.frombuffer(self.bytes[1024 * packed :], "<u2")):
                    raise Wrong("other tokens than the file holds")
        finally:
            out.unlink(missing_ok=True)

    def read_kept(self, path: Path) -> None:
        """What is taken is what was stored: each member has a checksum."""
        found = self.kept.load(0)
        if found is not None and [(list(a), None if b is None else list(b), c) for a, b, c in found] != [
            (list(a), None if b is None else list(b), c) for a, b, c in self.batch
        ]:
            raise Wrong("damage was accepted: another batch than was stored")

    def read_template(self, path: Path) -> None:
        files = {path.name: path.read_bytes()} if path.is_file() and path.stat().st_size < 1 << 20 else {}
        if not files:
            raise DataError("no template")
        template = ChatTemplate(files)
        text, spans = template.spans(TALK)
        template.render(TALK[:1], add_generation_prompt=True)
        if any(not 0 <= a <= b <= len(text) for a, b in spans):
            raise Wrong(f"spans {spans} in a text of {len(text)}")


def write(path: Path, content: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(content)


def relist(path: Path, content: bytes) -> None:
    """Writes what a file has now into the manifest."""
    manifest = path.with_name("manifest.json")
    values = json.loads(manifest.read_text())
    values["files"][path.name] = {"size": len(content), "pieces": [[len(content), hashlib.sha256(content).hexdigest()]]}
    if path.suffix == ".safetensors":  # each tensor has a piece of its own
        with contextlib.suppress(CheckpointError), SafetensorsFile(path) as file:
            ends = sorted(
                {entry.stop for entry in file.entries.values()}
                | {min((e.start for e in file.entries.values()), default=0)}
            )
            pieces = [content[a:b] for a, b in zip([0, *ends], ends)]
            values["files"][path.name]["pieces"] = [[len(p), hashlib.sha256(p).hexdigest()] for p in pieces]
    manifest.write_text(json.dumps(values))


def _weights(model: Any) -> dict[str, bytes]:
    return {name: saving.model.raw_bytes(tensor).tobytes() for name, tensor in model.state_dict().items()}


FAMILY = Files
