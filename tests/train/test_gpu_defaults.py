"""What a run on a GPU does when no option says otherwise: chosen without a GPU here, run by tests/cuda/test_graph.py."""

from __future__ import annotations

import pytest
from runs import arguments, options, text_file, xtrain

import xtrain as xt
from xtrain import _C
from xtrain.errors import ConfigError
from xtrain.train import TrainConfig, rundir
from xtrain.train.report import Report, _speed_of

pytestmark = pytest.mark.on_cpu


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has one GPU, an H200."""
    monkeypatch.setattr(xt.cuda, "is_available", lambda: True)
    monkeypatch.setattr(xt.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_C, "cuda_info", lambda device: {"name": "NVIDIA H200"})
    monkeypatch.setattr(xt.cuda, "max_memory_allocated", lambda device: 3 << 29)


def planned(tmp_path, **given):
    config, _, _ = rundir.plan({"out": str(tmp_path / "run"), **given}, print)
    return config


def test_a_gpu_runs_in_bfloat16_by_a_graph(tmp_path, gpu) -> None:
    config = planned(tmp_path)
    assert (config.precision, config.graph, config.model.preset, config.batch_size) == ("bfloat16", True, "gpu", 32)
    config = planned(tmp_path, **{"model.preset": "tiny"})
    assert (config.precision, config.graph, config.batch_size) == ("bfloat16", True, 8)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_what_is_asked_for_wins(tmp_path, gpu, precision: str) -> None:
    config = planned(tmp_path, precision=precision, graph=False)
    assert (config.precision, config.graph) == (precision, False)
    config = TrainConfig(precision=precision)
    config.model.preset = "tiny"
    assert planned(tmp_path, **rundir.given_options(config)).precision == precision
    assert planned(tmp_path, device="cpu", precision=precision).precision == precision


def test_a_cpu_runs_in_float32(tmp_path, gpu) -> None:
    config = planned(tmp_path, device="cpu")
    assert (config.precision, config.model.preset) == ("float32", "default")


def test_a_run_on_a_cpu_says_nothing_of_graphs(tmp_path) -> None:
    given = options(text_file(tmp_path / "text.txt"), tmp_path / "run", device="cpu")
    del given["precision"], given["graph"]
    done = xtrain("train", *arguments(given))
    assert done.returncode == 0 and "float32, cpu" in done.stdout, done.stderr
    assert not [line for line in done.stdout.splitlines() if line.startswith(("graph", "speed")) or "MFU" in line]
    text = (tmp_path / "run/config.toml").read_text()
    assert 'precision = "float32"' in text and "graph = true" in text


def test_sizes_without_values_are_no_device_of_a_run(gpu) -> None:
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or cuda:N, got 'meta'"):
        rundir.resolve_device("meta")


class _State:
    device = "cuda"

    def __init__(self, precision: str, model: object) -> None:
        self.config, self.model = TrainConfig(precision=precision, seq_len=100), model


class _Model:
    def flops_per_token(self, seq_len: int) -> int:
        return 10_000_000 * seq_len


def test_speed_as_a_share_of_what_the_gpu_can_do(gpu, capsys) -> None:
    state = _State("bfloat16", _Model())
    assert _speed_of(state)(494_700) == "494,700 tokens/s, MFU 50.0 %"
    assert _speed_of(_State("tf32", _Model()))(494_700) == "494,700 tokens/s, MFU 100.0 %"
    assert _speed_of(_State("bfloat16", object()))(494_700) == "494,700 tokens/s"
    report = Report(quiet=False)
    report.speed(state, 494_700)
    assert capsys.readouterr().out == "speed  494,700 tokens/s, MFU 50.0 %, 1.50 GiB of memory at the most\n"
    state.device = "cpu"
    report.speed(state, 494_700)
    assert _speed_of(state)(5) == "5 tokens/s" and capsys.readouterr().out == ""


def test_peaks_of_devices(gpu, monkeypatch) -> None:
    assert xt.cuda.peak_flops("float32") == 66.9e12
    for name, peak in (("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989.4e12), ("Some GPU", None)):
        monkeypatch.setattr(_C, "cuda_info", lambda device, name=name: {"name": name})
        assert xt.cuda.peak_flops("bfloat16") == peak
    with pytest.raises(ValueError, match="precision must be one of bfloat16, tf32, float32, got 'int8'"):
        xt.cuda.peak_flops("int8")
