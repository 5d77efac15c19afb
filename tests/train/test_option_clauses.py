"""What options promise: their values, the rules between them, TOML files, and the words of a command line."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
from places import ROOT
from runs import options as run_options
from runs import text_file

from xtrain import _C, cli, errors, saving
from xtrain.cli.train import help_text, parse_arguments
from xtrain.errors import ConfigError, DataError, NonFiniteError
from xtrain.models.presets import PRESETS
from xtrain.tokenizers import ByteTokenizer
from xtrain.train import Trainer, config, options, rundir
from xtrain.train.config import build, resolve_model, to_toml, warmup_steps

pytestmark = pytest.mark.on_cpu


def line(*words: str) -> dict:
    return parse_arguments(list(words))[1]


# ---- values


def test_a_whole_number_is_a_number() -> None:
    lr = build({"optim.lr": 1}).optim.lr
    assert lr == 1.0 and isinstance(lr, float)


@pytest.mark.parametrize(
    "name,value,words",
    [
        ("optim.lr", math.inf, "must be finite, got inf"),
        ("optim.lr", -math.inf, "must be finite, got -inf"),
        ("optim.eps", 0.0, "must be greater than 0.0, got 0.0"),
        ("sample.top_p", 0.0, "must be greater than 0.0"),
        ("sample.top_p", 1.0 + 1e-9, "must be at most 1.0"),
        ("val_fraction", 0.5 + 1e-9, "must be at most 0.5"),
        ("threads", 257, "must be at most 256"),
        ("seed", 2**63, f"must be at most {2**63 - 1}"),
        ("steps", 1.0, "must be a whole number, got 1.0"),
        ("plot", 1, "must be true or false, got 1"),
        ("optim.lr", True, "must be a number, got True"),
        ("data", 3, "must be text, got 3"),
        ("data", "a\0b", "must not hold a NUL character"),
        ("steps", None, "must be a whole number, got None"),
    ],
)
def test_values_that_are_refused(name: str, value, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} {words}"):
        build({name: value})


def test_ends_of_ranges_are_inside() -> None:
    for name, value in (
        ("optim.lr", 0.0),
        ("sample.top_p", 1.0),
        ("val_fraction", 0.5),
        ("threads", 256),
        ("seed", 2**63 - 1),
        ("sample.prompt", "a\0b"),
        ("optim.warmup", 1200),  # as many as steps
        ("grad_accum", 8),  # as many as sequences
        ("model.mhc_streams", 8),
    ):
        build({name: value})


def test_words_for_values() -> None:
    for word in ("none", "None", "NONE"):
        assert line("--optim.warmup", word)["optim.warmup"] is None
    for word, steps in (("1e3", 1000), ("1E3", 1000), ("1.5e1", 15)):
        assert line("--steps", word)["steps"] == steps
    for word in ("1.5e0", "1e-1", "1e999", "3.0"):
        with pytest.raises(ConfigError, match=f"steps must be a whole number, got '{word}'"):
            line("--steps", word)
    for word, plot in (("yes", True), ("1", True), ("TRUE", True), ("no", False), ("0", False), ("False", False)):
        assert line(f"--plot={word}")["plot"] is plot
    with pytest.raises(ConfigError, match="steps must be a whole number, got 'none'"):
        line("--steps", "none")  # it has a default that is not None


def test_rules_between_values() -> None:
    for values, words in [
        ({"optim.beta2": 1.0}, r"optim\.beta2 must be less than 1\.0, got 1\.0"),
        ({"sample.prompt": ""}, r"sample\.prompt must not be empty"),
        (
            {"model.mhc_streams": 0, "model.mhc_contraction": "sum"},
            "mhc_contraction must be mean, or left out, without",
        ),
        (
            {"model.num_attention_heads": 6, "model.num_key_value_heads": 4},
            r"must divide model\.num_attention_heads \(6\)",
        ),
    ]:
        with pytest.raises(ConfigError, match=words):
            build(values)
    build({"model.mhc_streams": 0, "model.mhc_contraction": "mean"})


@pytest.mark.parametrize(
    "name,value,what,needed",
    [
        ("lora.alpha", 32.0, "lora.r", {"lora.r": 4, "model.preset": "somewhere"}),
        ("lora.dropout", 0.1, "lora.r", {"lora.r": 4, "model.preset": "somewhere"}),
        ("lora.targets", "q_proj", "lora.r", {"lora.r": 4, "model.preset": "somewhere"}),
        ("optim.muon_momentum", 0.9, "optim.name muon", {"optim.name": "muon"}),
        ("optim.ns_steps", 4, "optim.name muon", {"optim.name": "muon"}),
        ("optim.ns_dtype", "float16", "optim.name muon", {"optim.name": "muon"}),
        ("optim.adjust_lr_fn", "original", "optim.name muon", {"optim.name": "muon"}),
        ("optim.decay", 7, "optim.schedule wsd", {"optim.schedule": "wsd"}),
        ("optim.decay_form", "1-sqrt", "optim.schedule wsd", {"optim.schedule": "wsd"}),
        ("optim.final_lr", 1e-5, "optim.schedule cosine, linear or wsd", {"optim.schedule": "wsd"}),
        ("optim.qk_clip_every", 2, "optim.qk_clip", {"optim.qk_clip": 100.0}),
        ("extend", True, "resume", {"resume": "auto"}),
    ],
)
def test_an_option_that_would_do_nothing(tmp_path, monkeypatch, name: str, value, what: str, needed: dict) -> None:
    """A new run without lora.r would train the whole model. Defaults may be there, as in every config.toml."""
    monkeypatch.chdir(tmp_path)
    words = re.escape(f"{name} must be left out without {what}")
    without = {"optim.schedule": "constant"} if name == "optim.final_lr" else {}
    with pytest.raises(ConfigError, match=f"^{words}, got .*$"):
        rundir.plan({name: value, "device": "cpu", **without}, lambda text: None)
    rundir.plan({name: value, "device": "cpu", **needed}, lambda text: None)
    rundir.plan({name: config.KEYS[name].default, "device": "cpu"}, lambda text: None)


def test_a_twentieth_of_the_steps_warms_up() -> None:
    assert warmup_steps(build({"steps": 100})) == 5 and warmup_steps(build({"steps": 100, "optim.warmup": 0})) == 0


# ---- models


def test_what_a_preset_leaves_open() -> None:
    """The vocabulary holds bytes at least, and positions go as far as a sequence."""
    for vocab, want in ((3, 256), (256, 256), (300, 300)):
        keys = resolve_model(build({"model.preset": "tiny", "seq_len": 48}), vocab)
        assert keys is not None and keys["vocab_size"] == want and keys["max_position_embeddings"] == 48
    made = build({"model.preset": "tiny", "model.vocab_size": 1000, "model.max_position_embeddings": 7})
    keys = resolve_model(made, 300)
    assert keys is not None and (keys["vocab_size"], keys["max_position_embeddings"]) == (1000, 7)
    assert made.model.hidden_size == PRESETS["tiny"]["hidden_size"]


def test_a_model_directory_decides(tmp_path) -> None:
    stored = {"model_type": "qwen3", "hidden_size": 64, "rope_parameters": {"rope_theta": 5e5}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    made = build({"model.preset": os.fspath(tmp_path), "model.hidden_size": 64})
    assert resolve_model(made, 256) is None
    assert (made.model.hidden_size, made.model.rope_theta, made.model.mhc_streams, made.model.mhc_contraction) == (
        64,
        5e5,
        0,
        "mean",
    )
    for name, value, there in (("hidden_size", 65, 64), ("rope_theta", 1e4, "500000.0"), ("mhc_streams", 4, 0)):
        with pytest.raises(ConfigError, match=f"model.{name} must be {there}, as in .*config.json, got {value}"):
            resolve_model(build({"model.preset": os.fspath(tmp_path), f"model.{name}": value}), 256)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object, got list"):
        resolve_model(build({"model.preset": os.fspath(tmp_path)}), 256)


def test_what_a_model_directory_does_not_say_cannot_be_given(tmp_path) -> None:
    """It would be ignored, and written into the config.toml of the run: GPT-2 has n_layer, and no RoPE."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "vocab_size": 256}))
    for name, value in (("num_hidden_layers", 1), ("rope_theta", 1e4), ("tie_word_embeddings", False)):
        with pytest.raises(ConfigError, match=f"model.{name} must be left out, as .*config.json has none, got {value}"):
            resolve_model(build({"model.preset": os.fspath(tmp_path), f"model.{name}": value}), 256)
    made = build({"model.preset": os.fspath(tmp_path), "model.vocab_size": 256, "model.mhc_streams": 0})
    assert resolve_model(made, 256) is None and made.model.num_hidden_layers is None


def test_a_run_is_no_model(tmp_path) -> None:
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step:08d}").mkdir()
    said = f"or a directory with a config.json, got '{tmp_path}', a run: name its checkpoint, {tmp_path}/checkpoint-00000010$"
    with pytest.raises(ConfigError, match=said):
        resolve_model(build({"model.preset": os.fspath(tmp_path)}), 256)


# ---- TOML


@pytest.mark.parametrize("text", ["\U0001f600", "\x7f\x1f\0\n", "\u2028é\ufffe", "\udcff"])
def test_any_text_is_written_as_toml(tmp_path, text: str) -> None:
    """Only bytes that are no text have no spelling: who reads the file is told."""
    (tmp_path / "c.toml").write_text(to_toml(build({"sample.prompt": text})), encoding="utf-8")
    with contextlib.nullcontext() if text != "\udcff" else pytest.raises(ConfigError, match="is not valid TOML"):
        assert options.read_toml(tmp_path / "c.toml")["sample.prompt"] == text


def test_what_is_written_about_a_run(tmp_path) -> None:
    """All that decides the numbers, and nothing about this start of the program."""
    made = build({"optim.lr": 1e22, "name": "n", "out": "o", "resume": "r", "extend": True})
    (tmp_path / "c.toml").write_text(to_toml(made), encoding="utf-8")
    read = options.read_toml(tmp_path / "c.toml")
    assert read["optim.lr"] == 1e22
    assert not {"name", "out", "resume", "extend"} & set(read) and {"steps", "seed", "data"} <= set(read)


def test_a_file_of_options_has_a_limit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(options, "_LARGEST", 9)
    (tmp_path / "c.toml").write_text("steps = 3")
    assert options.read_toml(tmp_path / "c.toml") == {"steps": 3}
    (tmp_path / "c.toml").write_text("steps = 30")
    with pytest.raises(ConfigError, match="must have at most 9 bytes"):
        options.read_toml(tmp_path / "c.toml")


def test_tables_and_names(tmp_path) -> None:
    for tree, words in (
        ({"model": {"optim": {"lr": 1.0}}}, "unknown option model.optim"),
        ({"optim": {"lr": {"a": 1}}}, r"optim\.lr must be a value, not a table"),
        ({"steps": {"a": 1}}, "steps must be a value, not a table"),
        ({3: 1}, "option names must be text, got 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            options.from_tree(tree)
    assert options.from_tree({"batch-size": 3, "model": "tiny"}) == {"batch_size": 3, "model.preset": "tiny"}


def test_a_command_line_is_over_its_file(tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("steps = 3\nseed = 4\n")
    assert options.with_file(folder / "config.toml", {"steps": 5}) == {"steps": 5, "seed": 4}
    assert "out" not in options.with_file(folder / "config.toml", {"resume": "last"})  # no run has written it
    (folder / ".lock").touch()
    for values, out in (
        ({"resume": "last"}, os.fspath(folder)),
        ({"resume": "auto"}, os.fspath(folder)),
        ({"resume": "last", "name": "x"}, None),
        ({"resume": "last", "out": "y"}, "y"),
        ({"resume": "somewhere"}, None),
        ({}, None),
    ):
        assert options.with_file(folder / "config.toml", values).get("out") == out


# ---- words of a command line


def test_command_lines() -> None:
    assert line("--steps", "3", "--steps=4") == {"steps": 4}, "the last one wins"
    assert line("--plot", "--steps", "3") == {"plot": True, "steps": 3}
    assert line("--plot", "False") == line("--no-plot") == line("--plot=false") == {"plot": False}
    assert parse_arguments(["--plot", "a.toml"]) == ("a.toml", {"plot": True})
    assert parse_arguments(["--resume", "a.toml"]) == ("a.toml", {"resume": "last"})
    assert line("--resume") == {"resume": "last"} and line("--resume", "--no-plot") == {"resume": "last", "plot": False}
    assert line("--resume", "runs/a") == {"resume": "runs/a"}
    assert line("--optim.lr", "-0.0") == {"optim.lr": 0.0}, "a negative number is a value"
    for words, text in (
        (["-"], "unexpected argument '-'"),
        (["-s"], "unexpected argument '-s'; options are written --name value"),
        (["--data", "--steps", "3"], "--data needs a value"),
        (["--no-plot=true"], "--no-plot takes no value, got 'true'"),
        (["--no-steps"], "unknown option --no-steps"),
        (["--steps="], "steps must be a whole number, got ''"),
        (["one.toml", "two.toml", "three.toml"], "unexpected argument 'two.toml'"),
    ):
        with pytest.raises(ConfigError, match=text):
            parse_arguments(words)


def test_hints_name_the_nearest_option() -> None:
    known = ["model.num_hidden_layers", "optim.weight_decay", "seed"]
    assert errors.nearest("momentum_decay", known, "--") == "; did you mean --optim.weight_decay?"
    assert errors.nearest("num_hiden_layers", known) == "; did you mean model.num_hidden_layers?"
    for word, hint in (
        ("--momentum_decay", "did you mean --optim.weight_decay?"),  # by its last part
        ("--sample.resume", "did you mean --resume?"),  # --sample.tokens is farther
        ("--STEPS", "did you mean --steps?"),
        ("--Seq_Len2", "did you mean --seq-len?"),
    ):
        with pytest.raises(ConfigError, match=f"unknown option {word}; {hint}".replace("?", r"\?")):
            line(word, "3")


# ---- commands in this process


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory of a small trained model with bytes as tokens, and one without an end-of-document token."""
    place = tmp_path_factory.mktemp("options")
    trainer = Trainer(run_options(text_file(place / "text.txt"), place / "run"), quiet=True)
    trainer.run()
    saving.save_model(
        trainer.model, place / "model", tokenizer=trainer.tokenizer if hasattr(trainer, "tokenizer") else None
    )
    return place / "model"


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize(
    "words,rule",
    [
        (("--max-tokens", "0"), r"--max-tokens must be in \[1, 10000000\], got 0"),
        (("--temperature", "nan"), "--temperature must be "),
        (("--temperature", "inf"), "--temperature must be "),
        (("--temperature", "-0.5"), "--temperature must be "),
        (("--top-k", "-1"), "--top-k must be at least 0, got -1"),
        (("--top-p", "0"), "--top-p must be greater than 0, got 0.0"),
        (("--top-p", "1.5"), r"--top-p must be in \[0, 1\], got 1.5"),
        (("--seed", "-1"), "--seed must be in "),
        (("--seed", str(2**63)), rf"--seed must be in \[0, {2**63 - 1}\], got {2**63}"),
        (("--repetition-penalty", "0"), "--repetition-penalty must be greater than 0, got 0.0"),
        (("--threads", "257"), r"--threads must be in \[0, 256\], got 257"),
        (("--seed",), "--seed needs a value"),
        (("more",), "expected 1 argument, got 2; usage: xtrain sample DIR"),
    ],
)
def test_options_of_sampling(capsys, model, words, rule: str) -> None:
    import re

    status, out, err = run(capsys, "sample", model, *words)
    assert (status, out) == (2, "") and re.match(f"xtrain: error: {rule}", err) and err.count("\n") == 1


def test_samples_follow_their_options(capsys, model) -> None:
    def text(*words: str) -> str:
        status, out, _ = run(
            capsys, "sample", model, "--prompt", "def ", "--max-tokens", "20", "--temperature", "5", *words
        )
        assert status == 0
        return out

    assert text() == text("--seed", "0") != text("--seed", "1")
    assert text("--top-k", "1", "--seed", "0") == text("--top-k", "1", "--seed", "1")
    assert text("--top-p", "1e-9", "--seed", "0") == text("--top-p", "1e-9", "--seed", "1") == text("--top-k", "1")
    before = _C.get_num_threads()
    text("--threads", str(before + 1))
    assert _C.get_num_threads() == before + 1
    text("--threads", "0")
    assert _C.get_num_threads() == before + 1, "0 leaves them as they are"


def test_prompts(capsys, model, monkeypatch) -> None:
    """Without one, the end-of-document token, of which nothing is shown; one that is no Unicode has its bytes."""
    from xtrain.cli import sample

    seen: list = []
    monkeypatch.setattr(
        sample, "generate_text", lambda m, t, ids, n, **k: seen.append(list(map(int, ids))) or "\0\0text"
    )
    assert run(capsys, "sample", model)[1] == "text\n" and seen.pop() == [0]
    assert run(capsys, "sample", model, "--prompt", "a\udcff")[1] == "\0\0text\n" and seen.pop() == [97, 255]

    class NoEnd(ByteTokenizer):
        eos = None

    monkeypatch.setattr(sample, "load_tokenizer", lambda path: NoEnd())
    run(capsys, "sample", model)
    assert seen.pop() == [10]


def test_what_sampling_hands_on(capsys, model, monkeypatch) -> None:
    """Averages are asked for; what generation warns of is told, a line each."""
    from xtrain.cli import sample

    asked: list[bool] = []
    load = saving.load_model

    def text(*arguments, **options) -> str:
        warnings.warn("the first", UserWarning, stacklevel=1)
        warnings.warn("the second", UserWarning, stacklevel=1)
        return "text"

    monkeypatch.setattr(sample, "generate_text", text)
    monkeypatch.setattr(sample.saving, "load_model", lambda path, ema: asked.append(ema) or load(path))
    for words in ((), ("--ema",)):
        status, out, err = run(capsys, "sample", model, *words)
        assert (status, out, err) == (0, "text\n", "xtrain: warning: the first\nxtrain: warning: the second\n")
    assert asked == [False, True]


def test_what_preparing_hands_on(capsys, monkeypatch) -> None:
    from xtrain.cli import prepare

    seen: list[dict] = []
    monkeypatch.setattr(prepare, "prepare", lambda source, out, tokenizer, **options: seen.append(options) or 1234)
    words = ("--field", "body", "--processes", "3", "--resume", "--token-bytes", "2")
    assert run(capsys, "prepare", "a", "b", *words)[:2] == (0, "b: 1,234 tokens\n")
    del seen[0]["progress"]
    assert seen == [{"field": "body", "processes": 3, "resume": True, "token_bytes": 2}]


@pytest.mark.parametrize(
    "stopped,status", [(None, 0), ("SIGHUP", 129), ("SIGINT", 130), ("SIGUSR1", 138), ("SIGTERM", 143)]
)
def test_what_training_hands_on(monkeypatch, stopped: str | None, status: int) -> None:
    """--dry-run and --profile stand anywhere among the other options; the signal makes the status."""
    from xtrain import train
    from xtrain.cli import train as command
    from xtrain.train import estimate

    seen: list[tuple[dict, list]] = []

    class Run:
        def __init__(self, values, callbacks) -> None:
            seen.append((values, callbacks))

        def run(self):
            return SimpleNamespace(stopped=stopped)

    monkeypatch.setattr(train, "Trainer", Run)
    monkeypatch.setattr(estimate, "dry_run", lambda values: seen.append((values, [])) or "dry")
    want = {"steps": 3, "seed": 5}
    for trace in (["--profile", "t.json"], ["--profile=t.json"]):
        assert command.command(["--steps", "3", *trace, "--seed", "5"]) == status
        values, (writer,) = seen.pop()
        assert values == want and writer._path == "t.json"
    assert command.command(["--steps", "3", "--dry-run", "--seed", "5"]) == 0 and seen == [(want, [])]


def test_help_of_training() -> None:
    """Choices, all of them, and defaults as they are typed."""
    text = " ".join(help_text(100).split())
    for part in ("--precision {float32,tf32,bfloat16} ", "[default true]", "[default false]", "[tokens; default "):
        assert part in text, part
    assert "True" not in text and "False" not in text


def test_what_the_output_cannot_show_ends_nothing(monkeypatch) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    assert cli.main(["trian\u00e9"]) == 2 and cli.main(["-V"]) == 0
    for stream in streams:
        stream.write("\u4e16")
        stream.flush()
    said, told = (stream.buffer.getvalue().decode() for stream in streams)
    assert said.startswith("xtrain ") and said.endswith("?")
    assert told.startswith("xtrain: error: unknown command 'trian?'; did you mean train?\n")


def test_usage_and_help(capsys) -> None:
    assert run(capsys)[0] == 2 and run(capsys, "--help")[0] == run(capsys, "help")[0] == run(capsys, "-h")[0] == 0
    for command in ("train", "sample", "verify", "prepare", "bench", "check", "doctor"):
        for word in ("-h", "--help"):
            status, out, _ = run(capsys, command, word)
            assert status == 0 and out.startswith(f"usage: xtrain {command}")


@pytest.mark.parametrize(
    "error,status,text",
    [
        (ConfigError("no such option"), 2, "no such option"),
        (DataError("no data"), 1, "no data"),
        (errors.CheckpointError("damaged"), 1, "damaged"),
        (NonFiniteError("NaN"), 1, "NaN"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
        (MemoryError("1 GiB"), 1, "1 GiB"),
        (MemoryError(), 1, "MemoryError: no message (XTRAIN_DEBUG=1 shows where)"),
        (RuntimeError("one\ntwo   three"), 1, "RuntimeError: one two three (XTRAIN_DEBUG=1 shows where)"),
        (FileNotFoundError(2, "No such file or directory", b"/a"), 1, "/a: No such file or directory"),
        (OSError(122, "Disk quota exceeded"), 1, "standard output: Disk quota exceeded"),
    ],
)
def test_every_error_is_one_line_and_a_status(
    capsys, monkeypatch, error: BaseException, status: int, text: str
) -> None:
    from xtrain.cli import guard

    monkeypatch.setattr(guard, "_forget_output", lambda: None)
    monkeypatch.delenv("XTRAIN_DEBUG", raising=False)

    def fails(arguments: list[str]) -> int:
        raise error

    assert guard.guard(fails, []) == status
    assert capsys.readouterr().err == f"xtrain: error: {text}\n"
    if isinstance(error, Exception):
        monkeypatch.setenv("XTRAIN_DEBUG", "1")
        with pytest.raises(type(error)):
            guard.guard(fails, [])


@pytest.mark.parametrize("extra", ["plot", "hf", "data", "chat"])
def test_doctor_knows_the_extras_of_users(extra: str) -> None:
    from xtrain.cli import doctor

    package = re.search(rf'^{extra} = \["(\w+)', (ROOT / "pyproject.toml").read_text(), re.M)
    assert package and doctor._PACKAGES[package[1]][:2] == (False, f"'xtrain[{extra}]'")


def test_doctor_shows_a_gpu_that_cannot_be_used(capsys, monkeypatch) -> None:
    """One has no memory for its first use, another none for a product: both are rows, and the rest of the table is there."""
    from xtrain.cli import doctor

    known = {
        "capability": (9, 0),
        "driver": 13000,
        "runtime": 13000,
        "multiprocessors": 132,
        "built_for": "sm_90",
        "blas": None,
    }
    known |= {"name": "GPU", "memory_free": 0, "memory_total": 2**30}

    def properties(index: int) -> dict:
        if index == 0:
            raise _C.CudaError("choosing the device: out of memory (cudaErrorMemoryAllocation)")
        return known

    def tensor(data, device):
        if device != "cpu":
            raise _C.OutOfMemoryError("tensor: no memory")
        return real(data, device=device)

    real = _C.tensor
    monkeypatch.setattr(_C, "tensor", tensor)
    monkeypatch.setattr(doctor.cuda, "why_unavailable", lambda: None)
    monkeypatch.setattr(doctor.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor.cuda, "get_device_properties", properties)
    monkeypatch.setattr(doctor.explain, "usual", lambda device: [])
    for kind in ("gemm_backends", "attention_backends"):
        names = getattr(_C, kind)
        monkeypatch.setattr(
            doctor._backends, kind, lambda device, names=names: ["tiled"] if device == "cuda:1" else names(device)
        )
    status, out, errs = run(capsys, "doctor")
    assert status == 0, errs
    assert "cuda:0      CUDA cannot use it: choosing the device: out of memory (cudaErrorMemoryAllocation)\n" in out
    assert (
        "cuda:1      the tiled matrix product fails: tensor: no memory\n" in out
        and "\ncheck       matrix products" in out
    )


def test_doctor_fails_where_something_required_is_missing(capsys, monkeypatch) -> None:
    from xtrain.cli import doctor

    assert run(capsys, "doctor")[0] == 0
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "matplotlib" else real(name))
    status, out, _ = run(capsys, "doctor")
    assert status == 0 and "pip install 'xtrain[plot]'" in out
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "tqdm" else real(name))
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "tqdm, for the progress bar: pip install tqdm" in out
    monkeypatch.setattr(doctor, "_version", real)
    *_, last = doctor._backends.gemm_backends("cpu")
    product = _C.matmul
    with monkeypatch.context() as patch:  # one backend computes one value wrong
        patch.setattr(_C, "matmul", lambda a, b, backend: product(a, b, backend=backend) + (backend == last))
        status, out, _ = run(capsys, "doctor")
    assert status == 1 and f"\ncheck       the {last} matrix product gives wrong results\n" in out
    monkeypatch.setattr(doctor, "_compute_check", lambda device="cpu": "wrong")
    assert run(capsys, "doctor")[0] == 1


def test_an_output_that_fails_leaves_the_status(monkeypatch) -> None:
    """A standard error that has gone; and a disk that is full when the last lines go out."""
    from xtrain.cli import guard

    class Gone(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Gone())
        assert guard.fail("text", 3) == 3
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    monkeypatch.setattr(sys, "stdout", Gone())
    assert guard.guard(lambda _: 0, []) == 1
    assert told.getvalue() == "xtrain: error: standard output: No space left on device\n"
    with pytest.raises(ConfigError, match="^expected no arguments, got 1; usage: xtrain doctor$"):
        cli.parser.simple_options(["word"], {}, 0, "usage: xtrain doctor\nmore")


def test_defaults_of_a_run_on_a_gpu_are_options() -> None:
    """Each has a legal value, and options that are given win (see the start of a run)."""
    build(config.GPU_RUN)
