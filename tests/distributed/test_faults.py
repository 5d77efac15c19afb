"""Faults in a run of several processes: who is named, how all end, and that the run goes on with the same bits."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from ranks import Rank, at_once, run_ranks
from runs import options, text_file, weights
from test_watch import ABOUT, SOON

from xtrain import saving
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu
STEPS = 6

# The rank of the fault has `bad`; `fault` is a function of this trainer and record, called after each step.
RUN = """
import builtins, errno, os, signal, sys, time
import xtrain as xt
from xtrain import saving
from xtrain.cli.guard import guard
from xtrain.distributed import env, host, progress, world
from xtrain.errors import CheckpointError
from xtrain.saving.directory import DirectoryWriter
from xtrain.train import Trainer
bad = env.detect().rank == {bad}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def killed_computing(trainer, record):
    if bad and trainer.step == 5:
        time.sleep(0.3)
        die()

def killed_exchanging(trainer, record):
    if bad and trainer.step == 5:
        send = host._send
        def half(connection, kind, number, name, sections=()):
            connection.sendall(host._HEAD.pack(host._MAGIC, kind, number, len(name), len(sections)))
            die()
        host._send = half

def killed_saving(trainer, record):
    if bad and trainer.step == 4:
        if trainer.team.rank == 0:
            DirectoryWriter.publish = lambda self: die()
        else:
            begin = progress.Progress.begin
            def watched(self, number, signature):
                if self.phase == "saving" and "exp_avg" in signature:
                    die()
                begin(self, number, signature)
            progress.Progress.begin = watched

def next_batch(trainer, fail):  # an error in a callback ends no run, one in the data does
    if bad and trainer.step == 3:
        trainer.loader.next_batch = fail

def throw(error):
    raise error

def raises(error):
    return lambda trainer, record: next_batch(trainer, lambda: throw(error))

def no_memory(trainer, record):
    next_batch(trainer, lambda: xt.zeros(1 << 48))

def ends(trainer, record):
    if bad and trainer.step == 3:
        sys.exit(3)

def careless(trainer, record):
    if bad:
        raise ValueError("no luck")

def exchanging(trainer, record):
    if bad and trainer.step == 3:
        raise ValueError("no luck")
    xt.distributed.gather_json(record["step"])

def evaluates(trainer, record):
    if bad and trainer.step == 3:
        trainer.evaluate()

def away(trainer, record):
    if trainer.team.rank == 0 and trainer.step == 3:
        time.sleep(1000)
    ends(trainer, record)

def asleep(trainer, record):
    if bad and trainer.step == 3:
        time.sleep(15)

def flipped(trainer, record):
    if bad and trainer.step == 4:
        flat = next(p for n, p in trainer.model.named_parameters() if n.endswith("up_proj.weight")).detach().reshape(-1)
        flat[5] = flat[5] * (1 + 2.0**-23)

def full_disk(trainer, record):
    if trainer.step == 1:
        if trainer.team.rank == 0:  # the disk of the run: full at the saves of 4 and 6
            write = DirectoryWriter.write
            def full(self, name, pieces):
                write(self, name, pieces)
                if name == "optimizer.safetensors" and trainer.step >= 4:
                    with self._clear_errors():
                        raise OSError(errno.ENOSPC, "No space left on device", name)
            DirectoryWriter.write = full
        else:  # another disk, of which nothing is needed
            opened = builtins.open
            def nothing(file, mode="r", *rest, **more):
                if set(mode) & set("wax+"):
                    raise OSError(errno.ENOSPC, "No space left on device", file)
                return opened(file, mode, *rest, **more)
            builtins.open = nothing

def takes_a_batch(trainer, record):
    if bad and trainer.step == 1:
        trainer.loader.next_batch()

def seeds(trainer, record):
    if bad and trainer.step == 1:
        xt.manual_seed(5)

def run(words):
    Trainer({values!r}, callbacks=[{fault}]).run()

sys.exit(guard(run, []))
"""


def values(data: Path, out: Path, **changes) -> dict:
    same = dict(max_ranks=2, steps=STEPS, save_every=2, device="cpu", optim__lr=0.01, keep=0, batch_size=6)
    return options(data, out, **{**same, **changes})


def start(fault: str, bad: int, data: Path, folder: Path, size: int = 2, limits: str = "", **changes) -> list[Rank]:
    code = RUN.replace("{bad}", str(bad)).replace("{fault}", fault)
    code = code.replace("{values!r}", repr(values(data, folder / "run", **changes)))
    return run_ranks(size, ["-c", code], folder, lambda rank: {"XTRAIN_WATCH_TIMES": limits})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return text_file(tmp_path_factory.mktemp("data") / "data.txt")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The bytes of the run that nothing has disturbed, made by one process."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return weights(Trainer(values(data, out), quiet=True).run().checkpoint)


def steps(run: Path) -> list[int]:
    """Of the checkpoints, which are all whole."""
    found = sorted(path for path in run.iterdir() if re.match(r"(emergency-)?checkpoint-", path.name))
    for path in found:
        saving.verify_checkpoint(path)
    return [int(path.name.removeprefix("checkpoint-")) for path in found]


def goes_on(run: Path) -> bytes:
    """What the run ends with once it is resumed, on one process."""
    return weights(Trainer({"resume": str(run)}, quiet=True).run().checkpoint)


def error_lines(one: Rank) -> list[str]:
    return [line for line in one.err.splitlines() if line.startswith("xtrain: ")]


def test_a_rank_is_killed(data, whole, tmp_path):
    """The other names it within seconds, the checkpoints are whole, and the run goes on to the same bits."""
    cases = [(when, bad) for when in ("computing", "exchanging", "saving") for bad in (0, 1)]
    calls = [lambda c=c: start(f"killed_{c[0]}", c[1], data, tmp_path / f"{c[0]}{c[1]}") for c in cases]
    for (when, bad), found in zip(cases, at_once(*calls), strict=True):
        other, run = 1 - bad, tmp_path / f"{when}{bad}" / "run"
        assert (found[bad].status, found[other].status) == (-signal.SIGKILL, 75), (when, bad, found)
        told = f"xtrain: error: distributed: rank {bad} is gone: its connection has ended{ABOUT}"
        assert len(error_lines(found[other])) == 1, (when, bad, found)
        assert re.fullmatch(told, error_lines(found[other])[0]), (when, bad, found)
        assert found[other].ended - found[bad].ended < SOON, (when, bad)
        assert steps(run) == ([2] if when == "saving" else [2, 4]), (when, bad)
        assert goes_on(run) == whole, (when, bad)


def test_an_error_of_one_rank(data, whole, tmp_path):
    """It ends as always; the others hear of it at once, also one that is away, which is ended. One that does not come
    is waited for as long as --comm-timeout says.
    """
    cases = {
        "raises(ValueError('no luck'))": (1, "ValueError: no luck", 1),
        "ends": (0, "SystemExit: 3", 3),
        "no_memory": (1, r"OutOfMemoryError: full: .*", 1),
        "away": (1, "SystemExit: 3", 3),
    }
    calls = [
        lambda n=n, f=f: start(f, cases[f][0], data, tmp_path / str(n), limits="exit=0.3") for n, f in enumerate(cases)
    ]
    *all_found, late = at_once(
        *calls, lambda: start("asleep", 1, data, tmp_path / "late", limits="beat=0.1,exit=0.3", comm_timeout=1.0)
    )
    for one in late:
        assert one.status == 75 and len(error_lines(one)) == 1, late
        assert re.match(r"xtrain: error: distributed: rank 1 is stuck: others have waited \d s", error_lines(one)[0]), (
            late
        )
    for number, (found, (bad, why, status)) in enumerate(zip(all_found, cases.values(), strict=True)):
        other, run = 1 - bad, tmp_path / str(number) / "run"
        assert (found[bad].status, found[other].status) == (status, 75), found
        told = f"xtrain: error: distributed: rank {bad} left: {why}{ABOUT}"
        assert len(error_lines(found[other])) == 1 and re.fullmatch(told, error_lines(found[other])[0]), found
        assert len(error_lines(found[bad])) == (status == 1) and "distributed" not in found[bad].err, found
        assert found[other].ended - found[bad].ended < SOON, found
        assert steps(run) == [2], found
    assert goes_on(tmp_path / "0" / "run") == whole


def test_an_error_of_a_callback_of_one_rank_ends_nothing(data, whole, tmp_path):
    """That rank tells it once, at the end how many followed, and the run has the bits of one without."""
    for bad in (0, 1):
        found = start("careless", bad, data, tmp_path / str(bad))
        assert [one.status for one in found] == [0, 0], found
        head = "[rank 1] warning: " if bad else "warning: "
        first = "the callback careless (on_step) failed at step 1, and training goes on: ValueError: no luck"
        more = f"{STEPS - 1} more failures of the callback careless (on_step)"
        for rank, one in enumerate(found):
            said = [line for line in one.out.splitlines() if "careless" in line]
            assert said == ([head + first, head + more] if rank == bad else []), found
        assert weights(tmp_path / str(bad) / "run" / f"checkpoint-{STEPS:08d}") == whole


def test_a_callback_that_exchanges_fails_on_one_rank(data, tmp_path):
    """That rank skips its exchange and goes on to the next one: all say so and end, and nobody waits."""
    calls = [lambda b=bad: start("exchanging", b, data, tmp_path / str(b)) for bad in (0, 1)]
    for bad, found in enumerate(at_once(*calls)):
        exchanges = [r"'\{\"all_gather\": \"json\"\}'"] * 2
        exchanges[bad] = r"'\{\"all_gather\": \"reasons to stop\"\}'"
        of = [f"exchange \\d+ of rank {rank} is {exchange}" for rank, exchange in enumerate(exchanges)]
        told = rf"xtrain: error: distributed: ranks do not do the same: {of[0]}, {of[1]} \(rank 0: host .*\)"
        for one in found:
            assert one.status == 75 and len(error_lines(one)) == 1, found
            assert re.fullmatch(told, error_lines(one)[0]), found
        assert "the callback exchanging (on_step) failed at step 3, and training goes on: " in found[bad].out, found
        assert abs(found[0].ended - found[1].ended) < SOON, found
        assert steps(tmp_path / str(bad) / "run") == [2], found


def test_an_evaluation_of_one_rank_alone(data, tmp_path):
    """The others, which gather reasons to stop, would take its losses for one."""
    for bad, found in enumerate(at_once(*[lambda b=b: start("evaluates", b, data, tmp_path / str(b)) for b in (0, 1)])):
        names = ["reasons to stop"] * 2
        names[bad] = "losses of an evaluation"
        of = [f"exchange \\d+ of rank {rank} is '.*{name}.*'" for rank, name in enumerate(names)]
        for one in found:
            assert one.status == 75 and len(error_lines(one)) == 1, found
            assert re.search(rf"ranks do not do the same: {of[0]}, {of[1]} \(rank 0: host ", error_lines(one)[0]), found
        assert steps(tmp_path / str(bad) / "run") == [2], found


def test_a_bit_of_the_parameters_is_flipped(data, tmp_path):
    """Found at the next comparison, and nothing is saved from then on: of two ranks it may be either."""
    three, two, saved = at_once(
        lambda: start("flipped", 1, data, tmp_path / "3", 3, "hashes=2", max_ranks=3, save_every=0),
        lambda: start("flipped", 1, data, tmp_path / "2", 2, "hashes=2", save_every=0),
        lambda: start("flipped", 1, data, tmp_path / "s", 2, "hashes=100", save_every=4),
    )
    place = r" after step 4: bank float32, tensor model\.layers\.0\.mlp\.up_proj\.weight \(.*host \S+, pid \d+.*\)"
    for found in (three, two, saved):
        who = (
            "rank 1 has other parameters than the others" if found is three else "ranks 0, 1 have different parameters"
        )
        told = f"xtrain: error: distributed: {who}{place}"
        for one in found:
            assert one.status == 75 and len(error_lines(one)) == 1, found
            assert re.fullmatch(told, error_lines(one)[0]), found
    assert [steps(tmp_path / name / "run") for name in ("3", "2", "s")] == [[], [], []]


def test_a_callback_that_takes_a_batch_or_random_numbers(data, tmp_path):
    """On one rank: it would train on other rows than those of its leaves, or with other random numbers. Parameters stay
    equal, as every gradient comes to all.
    """
    cases = [("takes_a_batch", 0, "hashes=2"), ("takes_a_batch", 1, "hashes=100"), ("seeds", 1, "hashes=2")]
    calls = [lambda c=c: start(*c[:2], data, tmp_path / "".join(c[::2]), 2, c[2]) for c in cases]
    for (fault, _, _), found in zip(cases, at_once(*calls), strict=True):
        what = "random state" if fault == "seeds" else "position in the data"
        said = rf"xtrain: error: distributed: DataParallel: {what} must be the same on every rank, got .+ on rank 0 and .+ on rank 1\n"
        for one in found:
            assert one.status == 2 and re.fullmatch(said, one.err), found
    assert [steps(tmp_path / "".join(c[::2]) / "run") for c in cases] == [[], [], []]


def test_a_full_disk(data, tmp_path):
    """Of the rank that writes: saves on the way are left out with one warning, the last one is an error on all."""
    found = start("full_disk", 0, data, tmp_path, steps=30)
    run = tmp_path / "run"
    assert [one.status for one in found] == [1, 1], found
    for rank, one in enumerate(found):
        assert "checkpoint-00000030" in error_lines(one)[0] and "No space left on device" in error_lines(one)[0], found
        assert len(error_lines(one)) == 1 and "distributed" not in one.err, found
        warning = "[rank 1] warning: rank 0: " if rank else "warning: "
        assert one.out.count("cannot be written") == 1, found
        assert f"{warning}{run / 'checkpoint-00000004'} cannot be written: No space left on device" in one.out, found
    assert steps(run) == [2]


def test_other_data_and_seeds_are_refused(data, tmp_path):
    """Before the first step. The same path may hold other data on another host: here it is that of each process."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        text_file(tmp_path / str(rank) / "data.txt", seed=rank)

    def code(rank: int, **changes) -> list[str]:
        here = f"import os, sys\nos.chdir({str(tmp_path / str(rank))!r})\n"
        given = values(Path("/proc/self/cwd/data.txt"), tmp_path / "run", **changes)
        call = f"guard(lambda words: Trainer({given!r}).run(), [])"
        return ["-c", f"{here}from xtrain.cli.guard import guard\nfrom xtrain.train import Trainer\nsys.exit({call})"]

    contents, seeds = at_once(
        lambda: run_ranks(2, code, tmp_path / "contents"),
        lambda: run_ranks(2, lambda rank: code(rank, seed=rank), tmp_path / "seeds"),
    )
    for one in contents:
        assert one.status == 2 and one.err.startswith("xtrain: error: distributed: data must be the same on every"), one
        assert one.err.count("on rank") == 2, one
    for one in seeds:
        assert one.status == 2, one
        said = "xtrain: error: distributed: seed must be the same on every rank, got 0 on rank 0 and 1 on rank 1\n"
        assert one.err == said
    assert not (tmp_path / "run").exists()


LATE = """
import os, sys, time
os.chdir({folder!r})
from xtrain.cli.guard import guard
from xtrain.train import trainer
made = trainer.{late}
def late(*args, **more):
    time.sleep({seconds})
    return made(*args, **more)
trainer.{late} = late
class Wrong(trainer.Callback):
    def on_start(self, state):
        if state.team.rank:
            raise trainer.ConfigError("a wrong start")
class Evaluates(trainer.Callback):
    def on_start(self, state):
        if state.team.rank == {bad}:
            raise trainer.ConfigError("a wrong start")
        state.evaluate()
sys.exit(guard(lambda words: trainer.Trainer({given!r}, callbacks={callbacks}).run(), []))
"""


@pytest.mark.parametrize("without", [(1,), (0, 1)])
def test_data_that_a_host_lacks(without, data, tmp_path):
    """One sentence on each rank, with the status of an error that a new start does not mend. Rank 0 comes to its data
    later, and would hear of a rank that leaves.
    """
    given = values(Path("/proc/self/cwd/data.txt"), tmp_path / "run")
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        if rank not in without:
            text_file(tmp_path / str(rank) / "data.txt")

    def code(rank: int) -> list[str]:
        about = dict(late="open_corpus", seconds=1 - rank, given=given, callbacks=[], bad=0)
        return ["-c", LATE.format(folder=str(tmp_path / str(rank)), **about)]

    found = run_ranks(2, code, tmp_path / "ranks")
    missing = f"data: {given['data']} does not exist; give 'python', a text file, a folder, or a token file"
    for rank, one in enumerate(found):
        who = "" if rank in without else "rank 1: "
        assert (one.status, one.err) == (1, f"xtrain: error: {who}{missing}\n"), found
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("late", "wrong", "callbacks", "said"),
    [
        ("_given", {"nothing": 1}, "[]", "unknown option nothing"),
        ("make_model", {"freeze": "nothing"}, "[]", "freeze must name parameters of the model, got 'nothing', which"),
        ("make_model", {}, "3", "callbacks must be a list of Callbacks or functions of (state, record), got int"),
        ("Stepper", {"optim.qk_clip": 9.0}, "[]", "optim.qk_clip must be 0 for Qwen3: model must not normalise"),
        ("Stepper", {}, "[Wrong()]", "a wrong start"),
    ],
)
def test_a_wrong_start_of_all_ranks(late, wrong, callbacks, said, data, tmp_path):
    """Status 2 on all, as in one process: 75 would let a launcher start them again and again. Rank 0 comes later."""
    given = {**values(data, tmp_path / "run"), **wrong}

    def code(rank: int) -> list[str]:
        about = dict(late=late, seconds=1 - rank, given=given, callbacks=callbacks, bad=0)
        return ["-c", LATE.format(folder=str(tmp_path), **about)]

    for rank, one in enumerate(run_ranks(2, code, tmp_path / "ranks")):
        who = "rank 1: " if callbacks == "[Wrong()]" and not rank else ""
        assert one.status == 2 and one.err.startswith(f"xtrain: error: {who}{said}") and one.err.count("\n") == 1, one


def test_a_wrong_start_while_others_exchange(data, tmp_path):
    """The exchanges differ, but the reason is an option: its sentence, and the status that lets nobody start them again."""

    def started(bad: int, ranks: int):
        given = values(data, tmp_path / f"{bad}{ranks}" / "run", max_ranks=ranks)
        about = dict(late="Stepper", seconds=0, given=given, callbacks="[Evaluates()]", bad=bad)
        code = ["-c", LATE.format(folder=str(tmp_path), **about)]
        return run_ranks(ranks, lambda rank: code, tmp_path / f"ranks{bad}{ranks}")

    cases = [(0, 2), (1, 2), (2, 3)]
    for (bad, _), found in zip(cases, at_once(*[lambda c=c: started(*c) for c in cases]), strict=True):
        told = rf"xtrain: error: distributed: rank {bad}: a wrong start \(host .*\)\n"
        for one in found:
            assert one.status == 2 and re.fullmatch(told, one.err), found
        assert abs(found[0].ended - found[1].ended) < SOON, found


def test_another_checkpoint_of_the_same_name(data, tmp_path):
    """On a host that does not share the folder: of a run with another seed."""
    for rank in (0, 1):
        Trainer(options(data, tmp_path / str(rank) / "run", steps=2, save_every=2, device="cpu", seed=rank)).run()

    def code(rank: int) -> list[str]:
        words = ["--resume", "/proc/self/cwd/run", "--extend", "--steps", "4", "--max-ranks", "2"]
        return [
            "-c",
            f"import os\nos.chdir({str(tmp_path / str(rank))!r})\nimport sys\nfrom xtrain.cli import main\nsys.exit(main({['train', *words]!r}))",
        ]

    for one in run_ranks(2, code, tmp_path / "ranks"):
        assert one.status == 2 and re.search(
            "checkpoint must be the same on every rank, got '[0-9a-f.]+' on", one.err
        ), one
