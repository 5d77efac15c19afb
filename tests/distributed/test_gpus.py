"""Ranks on GPUs, each a process with a device of tests/support/fakes/fake_device.c: which GPU is whose, and the same bytes."""

from pathlib import Path

import pytest
from fake_library import on_device, run
from ranks import RANK, run_ranks
from runs import arguments, weights
from test_runs import choices, newest, records, trained


def test_bytes_do_not_depend_on_the_number_of_ranks(package, data, tmp_path):
    """On 1 and on 4 that share a GPU."""
    files = []
    for size in (1, 4):
        out = tmp_path / f"run{size}"
        values = choices(data, out, device="cuda", grad_accum=2, steps=4, eval_every=2)
        said = trained(size, values, tmp_path / str(size), more=on_device(package, XTRAIN_PLANE="host"))
        assert ", cuda" in said[0].out, said
        files.append((weights(newest(out)), records(out)))
    assert files[0] == files[1]


def test_another_number_of_ranks_goes_on(package, data, tmp_path):
    """In bfloat16, with all that an optimizer keeps: on 2 to step 2, then on 1, as on 1 alone."""
    more = dict(device="cuda", precision="bfloat16", steps=4, eval_every=0, optim__name="muon", ema=0.9)
    for name, parts in (("whole", ((1, 4),)), ("run", ((2, 2), (1, 4)))):
        out = tmp_path / name
        for size, until in parts:
            values = {"resume": str(out)} if out.exists() else choices(data, out, **more)
            code = f"from xtrain.train import Trainer\nTrainer({values!r}, callbacks=[lambda t, r: t.step == {until}]).run()"
            given = on_device(package, XTRAIN_PLANE="host")
            found = run_ranks(size, ["-c", code], tmp_path / f"{name}{size}", more=given)
            assert [one.status for one in found] == [0] * size, found
    assert weights(newest(tmp_path / "whole")) == weights(newest(tmp_path / "run"))


ALONE = """
import xtrain as xt
from xtrain import nn, optim
from xtrain.distributed import DataParallel

def cost(dtype, leaves):
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(3)]).to(dtype).to("cuda")
    opt = optim.AdamW(model.parameters(), lr=1e-3)
    dp = DataParallel(model, opt, max_ranks=leaves) if leaves else None
    x = xt.randn(8, 128).to(dtype).to("cuda")
    for _ in range(2):
        before = xt.cuda.counters()
        if dp is None:
            opt.zero_grad()
            model(x).square().mean().backward()
            optim.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        else:
            for (rows,) in dp.leaves((x,)):
                model(rows).square().mean().backward()
            dp.step(clip=1.0)
        after = xt.cuda.counters()
    return [after[name] - before[name] for name in ("launches", "synchronizations", "to_host", "from_host")]

for dtype in (xt.float32, xt.bfloat16):
    plain, one, four = (cost(dtype, leaves) for leaves in (0, 1, 4))
    assert one == plain and plain[1:] == [0, 0, 0], (plain, one)
    computing = plain[0] - 3  # but the norm, clipping and the optimizer
    assert four == [4 * computing + 3, 0, 0, 0], (plain, four)  # one sum, the norm, the optimizer
"""


def test_one_process_pays_nothing(package):
    """No launch and no wait more than a plain loop has; leaves cost their computations alone."""
    run(Path(package), ALONE)


LOOP = RANK + (
    "model = nn.Linear(3, 3).to('cuda')\n"
    "dp = xt.distributed.DataParallel(model, optim.AdamW(model.parameters()))\n"
    "for (rows,) in dp.leaves((xt.ones(4, 3).to('cuda'),)):\n    model(rows).sum().backward()\n"
    "print(dp.step(), xt.distributed.all_reduce(xt.ones(2).to('cuda')).tolist())\n"
    # As from Python 3.12 on, no thread can be started while the process ends.
    "import atexit, threading\n"
    'def refuse(thread): raise RuntimeError("can\'t create new thread at interpreter shutdown")\n'
    "atexit.register(lambda: setattr(threading.Thread, 'start', refuse))"
)
SHARED = (
    "distributed: every rank must have a GPU of its own, got one for ranks 0, 1; XTRAIN_PLANE=host lets ranks share one"
)


@pytest.mark.parametrize(
    ("variables", "errors"),
    [
        (lambda rank: {}, (SHARED,) * 2),
        (
            lambda rank: {"FAKE_DEVICE_UUID": f"GPU-{rank}", "FAKE_DEVICE_NAME": f"H{1 + rank}00"},
            ("distributed: name of the GPU must be the same on every rank, got 'H100' on rank 0 and 'H200' on rank 1",)
            * 2,
        ),
        (
            lambda rank: {"FAKE_DEVICE_COUNT": str(1 - rank)},
            (
                "rank 1: device must be cpu, because no usable CUDA device was found, got 'cuda'; see xtrain doctor",
                "device must be cpu, because no usable CUDA device was found, got 'cuda'; see xtrain doctor",
            ),
        ),
    ],
)  # fmt: skip
def test_ranks_without_a_gpu_of_their_own_are_refused(variables, errors, package, data, tmp_path):
    words = ["-m", "xtrain", "train", *arguments(choices(data, tmp_path / "run", device="cuda"))]
    found = run_ranks(2, words, tmp_path / "x", more=lambda rank: on_device(package, **variables(rank))(rank))
    for one, error in zip(found, errors, strict=True):
        assert (one.status, one.err) == (2, f"xtrain: error: {error}\n"), found
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_chosen_must_be_the_same(package, data, tmp_path):
    """One rank finds a GPU, and the other none."""
    words = ["-m", "xtrain", "train", *arguments(choices(data, tmp_path / "run", device="auto"))]
    for one in run_ranks(
        2, words, tmp_path / "x", lambda rank: on_device(package, FAKE_DEVICE_COUNT=str(1 - rank))(rank)
    ):
        assert one.status == 2, one
        assert one.err.endswith("device must be the same on every rank, got 'cuda' on rank 0 and 'cpu' on rank 1\n"), (
            one
        )


def test_own_loop_on_gpus(package, nccl, tmp_path):
    """Two GPUs need no switch; one for both does. They end in order without `shutdown`."""
    found = run_ranks(2, ["-c", LOOP], tmp_path / "two", nccl())
    assert [(one.status, one.err) for one in found] == [(0, "")] * 2 and found[0].out == found[1].out, found
    assert found[0].out.endswith("[2.0, 2.0]\n")
    for one in run_ranks(2, ["-c", LOOP], tmp_path / "one", on_device(package)):
        assert one.status == 1 and one.err.endswith(f"ConfigError: {SHARED}\n"), one


@pytest.mark.parametrize(
    ("ranks", "plane", "names", "error"),
    [
        (3, "host", "cuda:0 cuda:1 cuda:0", ""),
        (2, "", "cuda:0 cuda:1", ""),
        (3, "", "", "device must have a GPU for each of the 3 ranks of this host, got 2; XTRAIN_PLANE=host lets ranks share one"),
    ],
)  # fmt: skip
def test_each_rank_of_a_host_has_the_gpu_of_its_number(ranks, plane, names, error, package, tmp_path):
    code = RANK + ("from xtrain.distributed.world import choose_gpu\nprint(choose_gpu(lambda: 'cuda'))")
    found = run_ranks(
        ranks, ["-c", code], tmp_path / "x", more=on_device(package, FAKE_DEVICE_COUNT="2", XTRAIN_PLANE=plane)
    )
    assert " ".join(one.out.strip() for one in found) == (names or "  "), found
    assert all(error in one.err for one in found), found
