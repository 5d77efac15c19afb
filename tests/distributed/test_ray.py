"""Two workers of Ray on this machine; skipped where Ray is missing."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest
from ranks import HANGS, clean_environment, run_ranks
from runs import python
from test_runs import choices, data, newest, weights  # noqa: F401

from xtrain.distributed import ray as ours
from xtrain.errors import ConfigError

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install ray")
one_build = pytest.mark.skipif(
    bool(os.environ.get("XTRAIN_SANITIZE")), reason="Ray's workers import the editable build, which has other bits"
)
CODE = """
import xtrain.distributed.ray as ours
for options in {!r}:
    try:
        print("done", ours.train(options, workers=2)["step"])
    except Exception as error:
        print("failed", type(error).__name__, str(error).strip().splitlines()[-1])
"""


@pytest.mark.slow
@needs_ray
@one_build
def test_two_workers(data, tmp_path):  # noqa: F811
    """They write what two ranks write that have been started by hand; a wrong option is an error here, and spoils no later run."""
    same = {"steps": 2, "eval_every": 0, "max_ranks": 2}
    wrong = choices(data, tmp_path / "wrong", batch_size=7)
    # Started once, as it takes seconds; the next test leaves it to train().
    code = "import ray\nray.init(include_dashboard=False)" + CODE.format(
        [wrong, choices(data, tmp_path / "ray", **same)]
    )
    done = python("-c", code, env=clean_environment())
    assert "batch_size must be a multiple of max_ranks x grad_accum (4 x 1), got 7\n" in done.stdout, done
    assert "done 2\n" in done.stdout and "ranks  2, started by Ray; a batch in 2 leaves" in done.stdout, done
    code = f"from xtrain.train import Trainer\nTrainer({choices(data, tmp_path / 'hand', **same)!r}).run()"
    assert [one.status for one in run_ranks(2, ["-c", code], tmp_path / "x")] == [0, 0]
    assert weights(newest(tmp_path / "ray")) == weights(newest(tmp_path / "hand"))


@pytest.mark.slow
@needs_ray
@one_build
def test_ctrl_c_saves(data, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    code = CODE.format([choices(data, run, steps=100_000, eval_every=0, max_ranks=2, log_every=1)])
    driver = subprocess.Popen([sys.executable, "-c", code], env=clean_environment(), stderr=subprocess.PIPE, text=True)
    until, metrics = time.monotonic() + HANGS, run / "metrics.jsonl"
    while not (metrics.exists() and '"step": 3' in metrics.read_text()):
        assert driver.poll() is None and time.monotonic() < until, driver.communicate()[1]
        time.sleep(0.05)
    driver.send_signal(signal.SIGINT)
    err = driver.communicate(timeout=HANGS)[1]
    assert "KeyboardInterrupt" in err and newest(run).name > "checkpoint-00000002", err


def test_bad_arguments(monkeypatch):
    for workers in (0, True, 1.5):
        with pytest.raises(ValueError, match="^train: workers must be a whole number of at least 1, got "):
            ours.train({}, workers=workers)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^distributed: Ray is missing: pip install 'xtrain\[ray\]'$"):
        ours.train({})
