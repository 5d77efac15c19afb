"""Callbacks of a run, its writers, and what its records say of the machine."""

from __future__ import annotations

import csv
import functools
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xtrain import data, models
from xtrain.cli import main
from xtrain.errors import ConfigError, DataError, PeerError
from xtrain.saving import find_checkpoints
from xtrain.train import Callback, Trainer, train
from xtrain.train.callbacks import WandbWriter
from xtrain.train.callbacks.tensorboard import TensorBoardWriter, masked_crc
from xtrain.train.callbacks.writers import WRITERS

pytestmark = pytest.mark.on_cpu


@pytest.fixture
def given(tmp_path) -> dict:
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog ran home; " * 40)
    small = {"model.num_hidden_layers": 1, "model.hidden_size": 16, "model.intermediate_size": 16, "sample.tokens": 0}
    run = dict(data=str(tmp_path / "text.txt"), model="tiny", out=str(tmp_path / "run"), steps=4, batch_size=2)
    return {
        **run,
        **small,
        "seq_len": 16,
        "eval_tokens": 32,
        "eval_every": 2,
        "save_every": 2,
        "plot": False,
        "device": "cpu",
    }


def records(given: dict) -> list[dict]:
    return [json.loads(line) for line in Path(given["out"], "metrics.jsonl").read_text().splitlines()]


class Listener(Callback):
    def __init__(self) -> None:
        self.heard: list = []

    def on_start(self, state) -> None:
        self.heard.append(("start", state.step))

    def on_step_begin(self, state) -> None:
        self.heard.append(("begin", state.step))

    def on_step(self, state, record):
        self.heard.append(("step", record["step"], state.step))

    def on_checkpoint(self, state, path) -> None:
        self.heard.append(("checkpoint", path.name))

    def on_end(self, state, result) -> None:
        self.heard.append(("end", None if result is None else result.step))


# ---- callbacks


def test_what_a_callback_hears(given) -> None:
    one = Listener()
    heard = []
    Trainer(given, quiet=True, callbacks=[one, lambda state, record: heard.append(record)]).run()
    name = "checkpoint-{:08}".format
    assert one.heard == [
        ("start", 0), ("begin", 0), ("step", 1, 1), ("begin", 1), ("step", 2, 2), ("checkpoint", name(2)),
        ("begin", 2), ("step", 3, 3), ("begin", 3), ("step", 4, 4), ("checkpoint", name(4)), ("end", 4),
    ]  # fmt: skip
    assert heard == records(given) and "val_loss" in heard[1] and "val_loss" not in heard[0]
    again = Listener()
    Trainer({"resume": given["out"], "steps": 5, "extend": True}, quiet=True, callbacks=[again]).run()
    assert again.heard[:2] == [("start", 4), ("begin", 4)]


def test_a_checkpoint_is_whole_when_callbacks_hear_of_it(given) -> None:
    found: list[tuple[bool, int]] = []

    class Looks(Callback):
        def on_checkpoint(self, state, path) -> None:
            found.append((next(iter(find_checkpoints(given["out"])), None) == path, state.saved_at))
            models.load(path)

    trainer = Trainer(given, quiet=True, callbacks=[Looks()])
    trainer.run()
    trainer.save()  # by hand
    assert found == [(True, 2), (True, 4), (True, 4)]


def test_a_callback_ends_a_run(given) -> None:
    """After the step, which is saved; every callback hears of it, whoever asks for the end."""
    last = Listener()
    result = train(quiet=True, callbacks=[lambda state, record: record["step"] == 3, last], **tree(given))
    assert (result.stopped, result.step) == ("callback", 3) and last.heard[-1] == ("end", 3)
    assert next(path.name for path in find_checkpoints(given["out"])) == "checkpoint-00000003"
    assert ("step", 3, 3) in last.heard and len(records(given)) == 3
    assert (
        train(quiet=True, callbacks=[lambda state, record: 1], **tree({**given, "out": given["out"] + "2"})).step == 4
    )


def tree(given: dict) -> dict:
    """Dotted names as nested dicts, as keywords are."""
    found: dict = {"model": {"preset": given["model"]}}
    for name, value in given.items():
        head, _, last = name.rpartition(".")
        if name != "model":
            (found.setdefault(head, {}) if head else found)[last] = value
    return found


class Fails(Callback):
    """Fails in every method."""

    def fail(self, state, *_) -> None:
        raise RuntimeError("of the\nuser")

    on_start = on_step_begin = on_step = on_checkpoint = on_end = fail


def test_an_error_of_a_callback_ends_no_run(given, capsys) -> None:
    """It is told once for each callback and method, with its step, counted after that, and the others hear everything."""
    first, last = Listener(), Listener()

    def stops(state, record) -> bool:
        if record["step"] == 2:
            raise ZeroDivisionError
        return record["step"] == 3

    result = Trainer({**given, "log_every": 1}, callbacks=[first, Fails(), Fails(), stops, last]).run()
    assert (result.step, result.stopped) == (3, "callback")
    assert first.heard == last.heard and last.heard[-1] == ("end", 3) and len(last.heard) == 10
    assert [record["step"] for record in records(given)] == [1, 2, 3]
    out = capsys.readouterr().out.splitlines()
    said = [line for line in out if line.startswith("warning: the callback ")]
    goes_on = "and training goes on: RuntimeError: of the user"
    fails = [
        f"warning: the callback {name} ({hook}) failed at step {step}, {goes_on}"
        for hook, step in (("on_start", 0), ("on_step_begin", 0), ("on_step", 1), ("on_checkpoint", 2), ("on_end", 3))
        for name in ("Fails", "Fails 2")
    ]
    stop = "warning: the callback stops (on_step) failed at step 2, and training goes on: ZeroDivisionError: no message"
    assert said == [*fails[:6], stop, *fails[6:]]
    more = [("2 more failures", "on_step_begin"), ("2 more failures", "on_step"), ("1 more failure", "on_checkpoint")]
    counts = [f"warning: {n} of the callback {name} ({hook})" for n, hook in more for name in ("Fails", "Fails 2")]
    assert [line for line in out if " more failure" in line] == counts == out[-6:]


def test_what_a_callback_fails_with_may_be_anything(given, capsys) -> None:
    """An error without a text of its own, and a result that is neither true nor false."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    class Array(Callback):
        def on_step(self, state, record):
            return np.zeros(2) < 1

    def mute(state, record) -> None:
        raise Mute

    assert Trainer(given, callbacks=[mute, Array(), functools.partial(mute)]).run().step == 4
    said = capsys.readouterr().out
    assert "the callback mute (on_step) failed at step 1, and training goes on: Mute: no message\n" in said
    assert "the callback Array (on_step) failed at step 1, and training goes on: ValueError: The truth value of" in said
    assert "the callback partial (on_step) failed at step 1, " in said


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), PeerError("distributed: rank 1 is gone")])
def test_what_ends_a_process_ends_the_run_from_a_callback_too(given, error) -> None:
    """With one record a step, an emergency checkpoint of it, and an end without a result. A PeerError is no callback's
    own: the processes of the run are no more.
    """
    listener = Listener()

    def fails(state, record) -> None:
        if record["step"] == 3:
            raise error

    with pytest.raises(type(error)) as raised:
        Trainer(given, quiet=True, callbacks=[fails, listener]).run()
    assert raised.value is error
    assert [record["step"] for record in records(given)] == [1, 2, 3]
    assert listener.heard[-1] == ("end", None) and ("step", 2, 2) in listener.heard
    assert (Path(given["out"]) / "emergency-checkpoint-00000003").is_dir()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), PeerError("distributed: rank 1 is gone")])
def test_later_failures_are_told_whatever_on_end_raises(given, capsys, error) -> None:
    class Ends(Callback):
        def on_end(self, state, result) -> None:
            raise error

    def careless(state, record) -> None:
        raise ValueError("no luck")

    with pytest.raises(type(error)) as raised:
        Trainer(given, callbacks=[careless, Ends()]).run()
    assert raised.value is error
    assert capsys.readouterr().out.endswith("warning: 3 more failures of the callback careless (on_step)\n")


def test_an_option_of_a_callback_is_wrong_before_the_first_step(given, monkeypatch) -> None:
    """A ConfigError of on_start is raised, as of a writer: a package that is missing is told before the run, not after."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb needs the package wandb"):
        Trainer(given, quiet=True, callbacks=[WandbWriter()]).run()
    assert records(given) == []

    def refuses(state, record) -> None:
        raise ConfigError("too late")

    assert Trainer({**given, "out": given["out"] + "2"}, quiet=True, callbacks=[refuses]).run().step == 4


def test_a_config_error_that_ends_all_ranks_ends_the_run(given) -> None:
    """A verdict of the watchdog, which may reach a rank in an exchange of any callback."""
    verdict = ConfigError("distributed: rank 1: a wrong start")
    verdict.told = True

    def exchanges(state, record) -> None:
        raise verdict

    with pytest.raises(ConfigError) as raised:
        Trainer(given, quiet=True, callbacks=[exchanges]).run()
    assert raised.value is verdict


@pytest.mark.parametrize("wrong,got", [(Listener, "the class Listener"), ("csv", "str"), (3, "int")])
def test_what_is_no_callback(given, wrong, got: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^callbacks must be Callbacks or functions of \(state, record\), got {got}$"
    ):
        Trainer(given, quiet=True, callbacks=[wrong])
    if got == "int":
        with pytest.raises(ConfigError, match="^callbacks must be a list of Callbacks or functions .* got int$"):
            Trainer(given, quiet=True, callbacks=wrong)


# ---- a model that is there


def llama(**options) -> models.Llama:
    sizes = dict(vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    return models.Llama(models.LlamaConfig(**{**sizes, **options}))


def run_of(given: dict, model, /, **options):
    rest = {name: value for name, value in given.items() if "." not in name and name not in ("model", "data")}
    return train(model, given["data"], quiet=True, **{**rest, "sample": {"tokens": 0}, **options})


def test_a_model_that_is_there_is_trained(given) -> None:
    model = llama()
    before = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    result = run_of(given, model)
    assert all((before[name] != p.detach().numpy()).any() for name, p in model.named_parameters())
    saved = models.load(result.directory / "checkpoint-00000004")
    assert all((p.detach().numpy() == saved.state_dict()[name].numpy()).all() for name, p in model.named_parameters())
    again = llama()
    half = result.directory / "checkpoint-00000002"
    run_of({"data": given["data"]}, again, resume=str(half))
    assert all((p.detach().numpy() == saved.state_dict()[n].numpy()).all() for n, p in again.named_parameters())
    Trainer({"resume": str(half)}, quiet=True)  # without the model, too: the checkpoint has it


def test_the_dtype_of_a_model_is_kept(given) -> None:
    import xtrain as xt

    model = llama().bfloat16()
    run_of(given, model, steps=2)
    assert {p.dtype for p in model.parameters()} == {xt.bfloat16}
    run_of({**given, "out": given["out"] + "2"}, model, steps=2, precision="float32")
    assert {p.dtype for p in model.parameters()} == {xt.float32}


def test_lora_of_a_model_that_is_there(given) -> None:
    from xtrain import lora

    model = lora.apply(llama(), r=2)
    result = run_of(given, model)
    assert (result.directory / "checkpoint-00000004" / "adapter_model.safetensors").exists()


def test_what_a_model_that_is_there_excludes(given) -> None:
    for options, words in (
        ({"lora": {"r": 2}}, r"lora\.r must be left out with a model, got 2: see xtrain\.lora\.apply"),
        ({"model": "tiny"}, r"model\.preset must be left out with a model, got 'tiny': the model is given"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_of(given, llama(), **options)
    with pytest.raises(ConfigError, match="the first argument must be a model or a TrainConfig, got str"):
        train("tiny")
    with pytest.raises(ConfigError, match=r"^data must be text, got \[1, 2\]"):
        train(llama(), [1, 2])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="needs a vocabulary of 256 tokens, the model has 100"):
        run_of(given, llama(vocab_size=100))


# ---- records


def test_records_say_more_of_the_machine(given) -> None:
    Trainer(given, quiet=True).run()
    for record in records(given):
        assert record["wall_time"] > 1.7e9 and record["memory"] > 0 and "mfu" not in record
        assert record["lr_groups"] == [record["lr"]] * 2
    assert [r["memory"] for r in records(given)] == sorted(r["memory"] for r in records(given))


def test_the_share_of_a_gpu_is_a_record(given, monkeypatch) -> None:
    from xtrain.train import report

    monkeypatch.setattr(report, "_share_of", lambda state: 1e-5)  # of the peak a token
    Trainer(given, quiet=True).run()
    assert all(abs(r["mfu"] - 1e-5 * r["tokens_per_second"]) < 1e-3 for r in records(given))


@pytest.mark.parametrize("make", [
    lambda: models.GPT2(models.GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=4)),
    lambda: models.Llama(models.LlamaConfig(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)),
])  # fmt: skip
def test_frozen_weights_take_two_thirds(make) -> None:
    """Their gradient is not computed: 4 operations a weight in place of 6. Those of tables cost nothing either way."""
    model = make()
    whole = model.flops_per_token(0)
    tables = [m for m in model.modules() if type(m).__name__ == "Embedding"]
    for table in tables[1:] if model.lm_head is None else tables:
        table.requires_grad_(False)
    assert model.flops_per_token(0) == whole
    model.requires_grad_(False)
    assert model.flops_per_token(0) == whole * 4 // 6 and model.flops_per_token(10) - whole * 4 // 6 == 12 * 2 * 24 * 10


# ---- writers


def events(path: Path) -> list[tuple[int, dict[str, float], bytes]]:
    """(step, {tag: value}, the rest) of each event of a file, with every checksum compared."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = content[12 : 12 + length]
        assert content[8:12] == masked_crc(content[:8]) and content[12 + length : 16 + length] == masked_crc(event)
        content = content[16 + length :]
        assert event[0] == 0x09 and event[9] == 0x10
        step, rest = varint(event[10:])
        values = {}
        if rest[0] == 5 << 3 | 2:
            size, rest = varint(rest[1:])
            assert size == len(rest)
            while rest:
                assert rest[0] == 0x0A
                size, rest = varint(rest[1:])
                value, rest = rest[:size], rest[size:]
                size, value = varint(value[1:])
                values[value[:size].decode()] = struct.unpack("<f", value[size + 1 :])[0]
        found.append((step, values, rest))
    return found


def varint(data: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for i, byte in enumerate(data):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, data[i + 1 :]
    raise AssertionError("no end")


def test_checksums() -> None:
    """CRC-32C of the check string is 0xE3069283 (Koopman's catalogue); the mask turns it by 15 and adds a constant."""
    crc = 0xE3069283
    assert masked_crc(b"123456789") == struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_events_for_tensorboard(given) -> None:
    Trainer({**given, "writers": "tensorboard"}, quiet=True).run()
    (path,) = Path(given["out"], "tensorboard").iterdir()
    first, *steps = events(path)
    assert first[0] == 0 and first[2] == b"\x1a\rbrain.Event:2" and path.name.startswith("events.out.tfevents.")
    assert [step for step, _, _ in steps] == [1, 2, 3, 4]
    for (_, values, _), record in zip(steps, records(given), strict=True):
        assert values["loss"] == pytest.approx(record["loss"], rel=1e-6) and "step" not in values
        assert values["lr_groups/1"] == pytest.approx(record["lr"], rel=1e-6)
    assert steps[1][1]["val_loss"] > 0
    Trainer({"resume": given["out"], "steps": 5, "extend": True}, quiet=True).run()
    newest = max(Path(given["out"], "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert newest != path, "the option is part of the run"
    start, session, step = events(newest)
    assert session[0] == 5 and session[2] == b"\x3a\x02\x08\x01" and step[0] == 5


def test_events_of_long_runs(tmp_path) -> None:
    """Steps of one, two and three bytes; the time is that of the record, and a list has numbers from 0."""
    writer, state = TensorBoardWriter(), SimpleNamespace(directory=tmp_path, step=0)
    writer.on_start(state)
    numbers = (1, 127, 128, 129, 16383, 16384)
    for step in numbers:
        writer.on_step(state, {"step": step, "wall_time": 1.5e9 + step, "loss": 0.5, "lr_groups": [0.25, 0.125]})
    writer.on_end(state, None)
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert [step for step, _, _ in events(path)] == [0, *numbers]
    assert all(values == {"loss": 0.5, "lr_groups/0": 0.25, "lr_groups/1": 0.125} for _, values, _ in events(path)[1:])
    assert all(struct.pack("<d", 1.5e9 + step) in path.read_bytes() for step in numbers)


def test_a_table_of_metrics(given) -> None:
    Trainer({**given, "writers": "csv", "steps": 4}, quiet=True).run()
    path = Path(given["out"], "metrics.csv")
    rows = list(csv.DictReader(path.open(newline="")))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    for row, record in zip(rows, records(given), strict=True):
        assert float(row["loss"]) == record["loss"] and (row["val_loss"] == "") == ("val_loss" not in record)
    half = Path(given["out"], "checkpoint-00000002")
    Trainer({"resume": str(half)}, quiet=True).run()
    assert [int(row["step"]) for row in csv.DictReader(path.open(newline=""))] == [1, 2, 3, 4]


def test_what_writers_wrote_of_a_step_can_be_read_before_the_next(given) -> None:
    """The user's callbacks come before the writers: at a step they find those before it."""
    run = Path(given["out"])
    found: list[tuple[int, int]] = []

    def look(state, record) -> None:
        (events,) = (run / "tensorboard").iterdir()
        found.append(((run / "metrics.csv").read_text().count("\n"), events.stat().st_size))

    Trainer({**given, "writers": "csv,tensorboard"}, quiet=True, callbacks=[look]).run()
    assert [lines for lines, _ in found] == [1, 2, 3, 4]
    sizes = [size for _, size in found]
    assert sizes == sorted(set(sizes))  # grows with every step


def test_a_table_that_is_a_link_is_not_written(given, capsys) -> None:
    """A warning, and the run goes on."""
    run, victim = Path(given["out"]), Path(given["out"] + ".csv")
    run.mkdir()
    victim.write_text("of somebody else")
    trainer = Trainer({**given, "writers": "csv"})
    (run / "metrics.csv").symlink_to(victim)
    assert trainer.run().step == 4
    assert "the writer csv failed, and training goes on: " in capsys.readouterr().out
    assert (run / "metrics.csv").is_symlink() and victim.read_text() == "of somebody else"


def test_options_of_wandb_are_those_of_its_init(given, monkeypatch) -> None:
    """They win over what a run says of itself."""
    found: list[dict] = []

    def init(**options):
        found.append(options)
        return SimpleNamespace(log=lambda values, step: None, finish=lambda exit_code: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    Trainer(given, quiet=True, callbacks=[WandbWriter(project="mine", name="other", group="g", config={"a": 1})]).run()
    assert [found[0][key] for key in ("project", "name", "group", "config")] == ["mine", "other", "g", {"a": 1}]
    assert found[0]["resume"] == "allow" and found[0]["dir"] == given["out"]


def test_wandb(given, monkeypatch) -> None:
    logged: list = []
    run = SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda **end: logged.append(end)
    )

    def init(**options):
        logged.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    Trainer({**given, "writers": "wandb"}, quiet=True).run()
    options, *steps, end = logged
    assert options["project"] == "xtrain" and options["config"]["optim.lr"] == 3e-3 and options["name"] == "run"
    assert [step for step, _ in steps] == [1, 2, 3, 4] and end == {"exit_code": 0}
    assert steps[1][1]["val_loss"] == records(given)[1]["val_loss"]
    with pytest.raises(SystemExit):
        Trainer(
            {**given, "writers": "wandb", "out": given["out"] + "2"}, quiet=True, callbacks=[lambda *_: sys.exit(3)]
        ).run()
    assert logged[-1] == {"exit_code": 1}


def test_wandb_without_its_package(given, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = [f"--{name.replace('_', '-') if '.' not in name else name}={value}" for name, value in given.items()]
    assert main(["train", *words, "--writers", "wandb"]) == 2
    assert "writers: wandb needs the package wandb: pip install wandb" in capsys.readouterr().err


def test_a_writer_that_fails_ends_no_run(given, monkeypatch, capsys) -> None:
    def log(values, step) -> None:
        logged.append(step)
        raise OSError("no network")

    logged: list = []

    def finish(exit_code) -> None:
        ended.append(exit_code)
        raise OSError("no network yet")

    ended: list = []
    run = SimpleNamespace(log=log, finish=finish)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    assert Trainer({**given, "writers": "csv, wandb"}).run().step == 4
    said = capsys.readouterr().out
    assert said.count("the writer wandb failed, and training goes on: OSError: no network") == 1 and logged == [1]
    assert ended == [0] and "no network yet" not in said, "it is ended, and its first error is the one that is told"
    assert len(Path(given["out"], "metrics.csv").read_text().splitlines()) == 5


def test_a_writer_that_failed_is_opened_by_the_next_run(given, monkeypatch) -> None:
    writer, seen = Callback(), []

    def on_step(state, record) -> None:
        seen.append(record["step"])
        if len(seen) == 1:
            raise ValueError("the first")

    writer.on_step = on_step
    monkeypatch.setitem(WRITERS, "csv", lambda: writer)
    trainer = Trainer({**given, "writers": "csv"}, quiet=True)
    assert trainer.run().step == 4 and seen == [1]
    trainer.callbacks.on_start(trainer)  # as a second run does
    trainer.callbacks.on_step(trainer, {"step": 5})
    assert seen == [1, 5]


@pytest.mark.parametrize("writer", ["csv", "tensorboard"])
def test_a_writer_that_fails_closes_its_file(given, writer: str, monkeypatch) -> None:
    """Also where the error is one of its own, such as a record that it cannot write."""
    made: list[Any] = []
    kind = WRITERS[writer]

    def make() -> Callback:
        made.append(kind())
        made[0].on_step = broken
        return made[0]

    def broken(state, record) -> None:
        raise ValueError("a record that it cannot write")

    monkeypatch.setitem(WRITERS, writer, make)
    assert Trainer({**given, "writers": writer}, quiet=True).run().step == 4
    assert made[0]._file.closed


@pytest.mark.parametrize("name,hint", [("tensorbord", r"; did you mean tensorboard\?"), ("xyzzy", "")])
def test_a_writer_that_there_is_not(given, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"^writers must be among csv, tensorboard, wandb, got '{name}'{hint}$"):
        Trainer({**given, "writers": f"csv,{name}"}, quiet=True)


def test_what_writers_write_is_no_data(given, tmp_path) -> None:
    Trainer({**given, "writers": "csv,tensorboard"}, quiet=True).run()
    names = {path.name for path in Path(given["out"]).iterdir()}
    assert {"metrics.csv", "tensorboard"} <= names
    (tmp_path / "more.txt").write_text("x" * 500)
    assert data.open_data(tmp_path).train_tokens + data.open_data(tmp_path).val_tokens == 45 * 40 + 1 + 500 + 1
