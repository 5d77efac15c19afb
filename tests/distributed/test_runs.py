"""`xtrain train` on several processes: the files of a run have the same bytes on 1, 2 and 4."""

import json
import signal
from pathlib import Path

import pytest
from ranks import clean_environment, run_ranks
from runs import TINY, arguments, options, python, text_file, wait_until, weights, xtrain

from xtrain.errors import ConfigError
from xtrain.train import Trainer

TIMES = ("time", "wall_time", "tokens_per_second", "memory", "ranks", "mfu")


@pytest.fixture
def data(tmp_path):
    return text_file(tmp_path / "data.txt")


def trained(size, values, folder, **more):
    found = run_ranks(size, ["-m", "xtrain", "train", *arguments(values)], folder, **more)
    assert [one.status for one in found] == [0] * size, found
    return found


def records(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def newest(directory: Path) -> Path:
    return max(directory.glob("checkpoint-*"))


def choices(data, out, **changes):
    values = dict(
        max_ranks=4, steps=5, batch_size=8, device="cpu", eval_every=3, eval_tokens=600, clip=0.5, optim__lr=0.01
    )
    return options(data, out, **{**values, **changes})


@pytest.mark.parametrize(("precision", "name"), [("float32", "adamw"), ("bfloat16", "muon")])
def test_bytes_do_not_depend_on_the_number_of_processes(precision, name, data, tmp_path):
    found, samples = {}, {}
    more = dict(precision=precision, grad_accum=2, optim__name=name, sample__tokens=12)
    if name == "muon":
        more |= dict(ema=0.9, z_loss=1e-3, optim__lr_factors="model.embed_tokens.*=0.5")
    for size in (1, 2, 4):
        out = tmp_path / f"run{size}"
        threads = 2 if size == 2 else 0  # 0: the ranks share the processors
        said = trained(size, choices(data, out, threads=threads, **more), tmp_path / str(size))
        found[size] = weights(newest(out)), records(out)
        samples[size] = [line for line in said[0].out.splitlines() if line.startswith("    | ")]
        assert "step 5" in said[0].out or "5 steps" in said[0].out
        assert all(one.out == "" for one in said[1:]), said
        assert len(list(out.glob("checkpoint-*"))) == 1
    assert len({files for files, _ in found.values()}) == 1
    assert (newest(out) / "ema.safetensors").exists() == (name == "muon")
    for size in found:
        assert found[size][1] == found[1][1], size
    assert samples[1] and samples[1] == samples[2] == samples[4]
    assert any("val_loss" in record for record in found[1][1])
    assert min(record["grad_norm"] for record in found[1][1]) > 0.5  # it clips


def test_rank_0_alone_profiles_and_shows_a_dry_run(data, tmp_path):
    """Ranks that write one file leave the trace of either."""
    values = choices(data, tmp_path / "run", max_ranks=2)
    for words, said in ((["--dry-run"], "--recompute"), (["--profile", str(tmp_path / "trace.json")], "profile")):
        found = run_ranks(2, ["-m", "xtrain", "train", *arguments(values), *words], tmp_path / words[0])
        assert [one.status for one in found] == [0, 0] and said in found[0].out, found
        assert (found[1].out, found[1].err) == ("", ""), found


def test_rows_of_a_mixture_do_not_depend_on_the_number_of_processes(tmp_path):
    """In packed rows; the second source has an epoch within the run."""
    for name, size in (("a.txt", 9000), ("b.txt", 900)):
        (tmp_path / name).mkdir()
        for i in range(12):
            text_file(tmp_path / name / str(i), size // 12 + i, seed=i)
    found = []
    for size in (1, 2):
        out = tmp_path / f"run{size}"
        mixture = f"{tmp_path}/a.txt:2,{tmp_path}/b.txt:1"
        trained(size, choices(mixture, out, pack=True, max_ranks=2, steps=12), tmp_path / str(size))
        found.append((weights(newest(out)), records(out)))
    assert found[0] == found[1]
    assert found[0][1][-1]["epochs/b.txt"] > 0.5 and "val_loss/b.txt" in found[0][1][-1]


def test_another_number_of_processes_goes_on(data, tmp_path):
    """On 4 to step 2, on 2 to 4, on 1 to 6: the run that never stopped."""
    whole = tmp_path / "whole"
    trained(1, choices(data, whole, steps=6, eval_every=0), tmp_path / "1")
    out = tmp_path / "run"
    for size, until in ((4, 2), (2, 4), (1, 6)):
        values = choices(data, out, steps=6, eval_every=0) if size == 4 else {"resume": str(out)}
        code = (
            f"from xtrain.train import Trainer\nTrainer({values!r}, callbacks=[lambda t, r: t.step == {until}]).run()"
        )
        found = run_ranks(size, ["-c", code], tmp_path / f"{size}")
        assert [one.status for one in found] == [0] * size, found
        assert int(newest(out).name.rpartition("-")[2]) == until
    assert weights(newest(out)) == weights(newest(whole))
    assert records(out)[-1] == {**records(whole)[-1]}


def test_ranks_make_up_an_evaluation(data, tmp_path):
    """Rank 0 alone has the records, and asks all for an evaluation that the step of the checkpoint lacks."""
    values = dict(max_ranks=2, steps=4)
    Trainer(choices(data, tmp_path / "whole", **values), quiet=True).run()
    trainer = Trainer(choices(data, tmp_path / "run", **values), quiet=True)
    trainer.evaluate = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert "val_loss" not in records(tmp_path / "run")[-1]
    trained(2, {"resume": str(tmp_path / "run")}, tmp_path / "2")
    assert records(tmp_path / "run") == records(tmp_path / "whole") and "val_loss" in records(tmp_path / "run")[2]


def test_ranks_that_were_given_different_options_are_refused(data, tmp_path):
    def words(rank):
        return ["-m", "xtrain", "train", *arguments(choices(data, tmp_path / "run", optim__lr=0.01 + 0.01 * rank))]

    for one in run_ranks(2, words, tmp_path / "x"):
        assert one.status == 2, one
        assert one.err == (
            "xtrain: error: distributed: optim.lr must be the same on every rank, got 0.01 on rank 0 and 0.02 on rank 1\n"
        )
    assert not (tmp_path / "run").exists()


def test_a_batch_must_be_cut_evenly(data, tmp_path):
    done = xtrain("train", *arguments(choices(data, tmp_path / "run", batch_size=6)))
    assert done.returncode == 2
    assert done.stderr.endswith("batch_size must be a multiple of max_ranks x grad_accum (4 x 1), got 6\n")


def test_a_number_of_ranks_that_does_not_fit(data, tmp_path):
    """All have the error, so none waits to tell the others that it leaves."""
    values = choices(data, tmp_path / "run", max_ranks=3, batch_size=6)
    code = f"""
from xtrain.train import Trainer
try:
    Trainer({values!r})
except ValueError as error:
    print(type(error).__name__, error, vars(error))
"""
    for one in run_ranks(2, ["-c", code], tmp_path / "x"):
        said = "ConfigError max_ranks 3 must run on 1 or 3 processes, got 2 {'on_all_ranks': True}\n"
        assert (one.status, one.out, one.err) == (0, said, ""), one
    assert not (tmp_path / "run").exists()


def test_max_ranks_of_a_run_stays(data, tmp_path):
    out = tmp_path / "run"
    trainer = Trainer(choices(data, out, steps=2, max_ranks=2, eval_every=0))
    trainer.run()
    resume = {"resume": str(out)}
    assert Trainer(resume).parallel.max_ranks == 2
    with pytest.raises(
        ConfigError,
        match=r"^resume: max_ranks was 2 in this run, got 4; --extend allows it, with other bits from here on$",
    ):
        Trainer({**resume, "max_ranks": 4})
    assert Trainer({**resume, "max_ranks": 4, "extend": True}).parallel.max_ranks == 4
    with pytest.raises(ConfigError, match="^resume: grad_accum was 1 in this run, got 2"):
        Trainer({**resume, "grad_accum": 2})
    assert Trainer(options(data, tmp_path / "plain", steps=2)).parallel is None
    assert TINY["batch_size"] == 4


def test_a_signal_for_one_rank_stops_all_after_one_step(data, tmp_path):
    """They save, and end with its status; the run goes on afterwards."""
    out = tmp_path / "run"
    values = choices(data, out, steps=1_000_000, optim__warmup=0, max_ranks=2, eval_every=0)

    def act(processes):
        metrics_file = out / "metrics.jsonl"
        wait_until(
            lambda: metrics_file.exists() and metrics_file.read_text().count("\n") > 2, processes[0], "two ranks"
        )
        processes[1].send_signal(signal.SIGTERM)

    found = run_ranks(2, ["-m", "xtrain", "train", *arguments(values)], tmp_path / "x", act=act, limit=60)
    assert [one.status for one in found] == [143, 143], found
    step = records(out)[-1]["step"]
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{step:08d}"]
    assert f"stopped by SIGTERM after step {step}; continue with: xtrain train --resume {out}" in found[0].out


def test_nan_of_one_rank_is_found_by_all(data, tmp_path):
    """They raise the same error at the same step, save the step before, and name the rank that has the value."""
    out = tmp_path / "run"
    code = (
        "import sys\nfrom xtrain.cli.guard import guard\nfrom xtrain.train import Trainer\n"
        "def spoil(trainer, record):\n"
        "    if trainer.team.rank == 1 and trainer.step == 2:\n"
        "        next(iter(trainer.model.parameters())).detach().fill_(float('nan'))\n"
        f"def run(words): Trainer({choices(data, out, max_ranks=2)!r}, callbacks=[spoil]).run()\n"
        "sys.exit(guard(run, []))"
    )
    found = run_ranks(2, ["-c", code], tmp_path / "x")
    assert [one.status for one in found] == [1, 1], found
    error = "xtrain: error: step 3: the loss is nan; first bad value: parameter model.embed_tokens.weight ("
    for one in found:
        where = "values are NaN or infinite) in leaf 1 on rank 1\n"
        assert error in one.err and where in one.err, found
    assert [path.name for path in out.glob("*checkpoint-*")] == ["emergency-checkpoint-00000002"], list(out.iterdir())


def test_a_run_of_one_process_imports_nothing_for_others(data, tmp_path):
    values = options(data, tmp_path / "run", steps=2)
    code = (
        f"import sys, threading\nfrom xtrain.train import Trainer\nTrainer({values!r}, quiet=True).run()\n"
        "found = {m for m in sys.modules if m.startswith('xtrain.distributed')}\n"
        "assert found == {'xtrain.distributed', 'xtrain.distributed.env'}, found\n"
        "assert 'mpi4py' not in sys.modules and threading.active_count() == 1, threading.enumerate()\n"
    )
    done = python("-c", code, env=clean_environment())
    assert done.returncode == 0, done.stderr
