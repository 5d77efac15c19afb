"""Bytes from GPU to GPU: the NCCL plane, on the device and the NCCL of tests/support/fakes."""

import ctypes.util
import os
import re
import subprocess
import sys

import pytest
from fake_library import on_device
from ranks import HANGS, RANK, at_once, clean_environment, run_ranks
from runs import weights
from test_runs import choices, newest, records, trained

import xtrain as xt


def test_bytes_of_nccl_are_those_of_one_process(package, nccl, data, tmp_path):
    """And replays of a graph, which begin with step 3, are steps."""
    files = []
    for size, graph in ((1, True), (2, True), (2, False)):
        out = tmp_path / f"run{size}{graph}"
        values = choices(data, out, device="cuda", steps=5, optim__name="muon", max_ranks=2, graph=graph)
        more = nccl() if size > 1 else on_device(package)
        said = trained(size, values, tmp_path / f"{size}{graph}", more=more)
        assert "run eagerly" not in said[0].out + said[0].err, said
        files.append((weights(newest(out)), records(out)))
    assert files[0] == files[1] == files[2]


CAPTURED = (
    RANK
    + """
import hashlib, sys
from xtrain.distributed import bank
dtype, leaves = getattr(xt, sys.argv[1]), int(sys.argv[2])
bank.BUCKET = 1000  # two banks
sent = []  # of a step: which bank, and how many parameters of the first layer had no gradient yet

def trained(captured, overlap):
    xt.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 96), nn.Dropout(0.1), nn.SiLU(), nn.Linear(96, 16)).to(dtype).to("cuda")
    opt = optim.AdamW(model.parameters(), lr=1e-2)
    dp = xt.distributed.DataParallel(model, opt, max_ranks=leaves, overlap=overlap)
    send = dp._send

    def seen():
        sent.append((dp._order[len(dp._sent)], sum(p.grad is None for p in model[0].parameters())))
        send()

    dp._send = seen

    def step(x):
        losses = []
        sent.clear()
        for (rows,) in dp.leaves((x,), backwards=None if overlap is False else 1):
            losses.append((model(rows) + rows).square().sum() / x.shape[0])
            losses[-1].backward()
        norm = dp.step(clip=5.0)  # first: an exchange of losses would wait for those of gradients
        return dp.tree_of(dp.of_leaves(losses)), norm

    call, said = xt.cuda.graph(step, optimizers=[opt]) if captured else step, []
    for i in range(5):
        opt.param_groups[0]["lr"] = 1e-2 / (1 + i)
        loss, norm = call(xt.randn(8, 16).to(dtype).to("cuda"))
        said.append((loss.item(), norm.item(), xt._C.get_rng_state()))
    assert not captured or call.captured
    with dp.whole_optimizer():
        states = [value for kept in opt.state_dict()["state"].values() for value in kept.values()]
    kept = [value if isinstance(value, int) else value.tolist() for value in states]
    return [said, kept, [p.detach().tolist() for p in model.parameters()]], call

eager, _ = trained(False, False)
for captured, overlap in ((True, False), (False, True), (True, True)):
    found, graph = trained(captured, overlap)
    assert found == eager, (captured, overlap, found[0], eager[0])
# The last layer's bank goes first, while the first layer has no gradient.
assert sent == ([] if xt.distributed.world_size() == 1 else [(1, 2), (0, 0)]), sent
found, graph = trained(True, None)
assert found == eager and sent == [], sent  # ranks of one host
print(hashlib.sha256(repr(eager[0:3:2]).encode()).hexdigest())
xt.distributed.shutdown()
if xt.distributed.world_size() > 1:
    try:
        graph(xt.zeros(8, 16))
    except RuntimeError as error:
        assert "have ended" in str(error), error
"""
)


def test_captured_steps_are_eager_steps(nccl, tmp_path):
    """On one process and on two, whose gradients are sent in the backward or behind it; with dropout, a learning rate
    that changes, and steps that the device counts.
    """
    said = [run_ranks(size, ["-c", CAPTURED, "bfloat16", "4"], tmp_path / str(size), nccl()) for size in (1, 2)]
    assert [one.status for found in said for one in found] == [0] * 3, said
    assert len({one.out for found in said for one in found}) == 1, said


SENT = (
    RANK
    + """
from xtrain.autograd import checkpoint
from xtrain.distributed import bank
bank.BUCKET = 1

def trained(backwards, called):
    xt.manual_seed(1)
    model = nn.Module()
    model.first, model.unused, model.last = (nn.Linear(4, 4, bias=False) for _ in range(3))
    model.to("cuda")
    dp = xt.distributed.DataParallel(model, optim.AdamW(model.parameters(), lr=0.1), max_ranks=2, overlap=True)
    for _ in range(2):
        for (rows,) in dp.leaves((xt.arange(8).float().reshape(2, 4).to("cuda"),), backwards):
            for _ in range(called):
                h = model.last(model.first(rows))
                checkpoint(lambda h: model.last(h).tanh(), h).sum().backward()
        dp.step()
    return [p.detach().tolist() for p in model.parameters()]

for called in (1, 2):
    assert trained(called, called) == trained(None, called)
assert trained(3, 1) == trained(None, 1)  # fewer than promised
try:
    trained(1, 2)
except RuntimeError as error:
    print(error)
xt.distributed.shutdown()
"""
)


def test_every_gradient_is_sent_once(nccl, tmp_path):
    """Of a parameter that is used twice, one that a recomputation uses, one that nothing uses; of several backwards."""
    for one in run_ranks(2, ["-c", SENT], tmp_path / "x", nccl()):
        said = "leaves: backward must not be called more often for a leaf than `backwards` says: gradients came after they "
        assert (one.status, one.out) == (0, f"{said}had been taken\n"), one


AGAIN = (
    RANK
    + """
from xtrain.distributed import bank, world
bank.BUCKET = 1000

def trained(captured):
    xt.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 96), nn.SiLU(), nn.Linear(96, 16)).to("cuda")
    opt = optim.AdamW(model.parameters(), lr=1e-2)
    dp = xt.distributed.DataParallel(model, opt, overlap=True)
    compared, captures = [], []
    dp.compare_parameters = lambda: compared.append(dp.steps)

    def step(x):
        for (rows,) in dp.leaves((x,), backwards=1):
            (model(rows) + rows).square().mean().backward()
        if call is not step and call.ready:
            captures.append(1)
            if len(captures) == 1 and xt.distributed.rank() == 0:
                raise ValueError("no luck")
        return dp.step(clip=5.0)

    call = step
    if captured:
        call = xt.cuda.graph(step, optimizers=[opt])
    norms = []
    for i in range(10):
        x = xt.randn(8, 16).to("cuda")
        if captured and call.ready and not call.captured:
            try:
                call.capture(x)  # rank 1 has its graph then, and rank 0 tries once more
            except ValueError as error:
                assert str(error) == "no luck"
        dp.begin()
        norms.append(call(x).item())
    return norms, compared

eager, compared = trained(False)
found, again = trained(True)
assert found == eager, (found[:5], eager[:5])
assert sorted(set(compared)) == sorted(set(again)) == [0, 4, 8], (compared, again)
print(list(world._plane.gpus._graphs.values())[-1])  # exchanges of the graph, and their digest
"""
)


def test_a_capture_that_failed_is_forgotten(nccl, tmp_path):
    """On one rank, with gradients on their way: the next one has nothing of it. Replays count as steps."""
    found = run_ranks(2, ["-c", AGAIN], tmp_path / "x", nccl(XTRAIN_WATCH_TIMES="hashes=4"))
    assert [(one.status, one.err) for one in found] == [(0, "")] * 2, found
    assert found[0].out == found[1].out, found  # a heartbeat would compare them, too, unless the run ends before


@pytest.mark.parametrize("plane", ["nccl", "host"])
def test_a_bad_replica_is_named_late(plane, package, nccl, data, tmp_path):
    """When the loss is read, the value has been replaced by its owner's, rank 0's, or has come to all from rank 1."""
    more = dict(log_every=4, eval_every=0, model__intermediate_size=256, graph=plane == "nccl")
    code = (
        "import sys\nfrom xtrain.cli.guard import guard\nfrom xtrain.train import Trainer\n"
        "def spoil(trainer, record):\n"
        "    if trainer.team.rank == 1 and trainer.step == 4:\n"
        "        (owned,) = trainer.parallel._owned\n"
        "        number, at = 0, 0\n"
        "        if sys.argv[1] == 'mine':\n"
        "            number = owned.segments[0].parameter\n"
        "            at = owned.begin + owned.segments[0].begin - owned.bank.offsets[number]\n"
        "        owned.bank.parameters[number].detach().reshape(-1)[at].fill_(float('nan'))\n"
        f"values = {choices(data, tmp_path / 'run', device='cuda', max_ranks=2, steps=12, **more)!r}\n"
        "values['out'] += sys.argv[1]\n"
        "sys.exit(guard(lambda words: Trainer(values, callbacks=[spoil]).run(), []))"
    )
    more = nccl() if plane == "nccl" else on_device(package, XTRAIN_PLANE="host")
    theirs, mine = at_once(*(lambda w=w: run_ranks(2, ["-c", code, w], tmp_path / w, more) for w in ("theirs", "mine")))
    for found, why in (
        (theirs, "the loss of leaf 1, whose parameters have changed since, on rank 1"),
        (mine, r"parameter \S+ \(1 of \d+ values are NaN or infinite\).* on rank 1"),
    ):
        assert [one.status for one in found] == [1, 1], found
        for one in found:
            assert re.search(f"error: step 5: the loss is nan; first bad value: {why}\n", one.err), one


JOINED = """
import sys
import xtrain as xt
from xtrain import nn, optim
from xtrain.distributed import DataParallel, bank, world
from xtrain.distributed.host import HostPlane
from xtrain.distributed.progress import Progress
bank.BUCKET = 1000

def trained(leaves, plane, captured, backwards):
    world._plane = plane
    xt.manual_seed(1)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Dropout(0.1)).to(xt.bfloat16).to("cuda")
    opt = optim.AdamW(model.parameters(), lr=1e-3)
    dp = DataParallel(model, opt, max_ranks=leaves, overlap=True)

    def step(x):
        losses = []
        for (rows,) in dp.leaves((x,), backwards):
            losses.append((model(rows) + rows).square().sum() / x.numel())
            losses[-1].backward()
        return dp.tree_of(dp.of_leaves(losses)), dp.step(clip=1.0)

    call, said = xt.cuda.graph(step, optimizers=[opt]) if captured else step, []
    for _ in range(5):
        loss, norm = call(xt.randn(16, 64).to(xt.bfloat16).to("cuda"))
        said.append((loss.item(), norm.item()))
    assert not captured or call.captured
    return said, [p.detach().tolist() for p in model.parameters()]

plane = HostPlane(0, 1, {}, 300.0, Progress())
for leaves in (1, 4):
    alone = trained(leaves, None, False, None)
    assert trained(leaves, None, True, None) == alone
    for captured in (False, True):
        for backwards in (None, 1):
            assert trained(leaves, plane, captured, backwards) == alone, (leaves, captured, backwards)
assert type(plane.gpus).__name__ == "NcclPlane" and xt._C.nccl_idle(plane.gpus._comm, 1000)
try: raise SystemExit(f"not refused: {xt._C.nccl_idle(plane.gpus._comm, 2_000_000)}")
except ValueError as error: assert str(error) == "nccl_idle: wait must be in [0, 1000000] microseconds, got 2000000"
plane.gpus.leave(True)
world._plane = None
"""


def test_a_world_of_one_with_nccl(nccl):
    """NCCL itself where there are a GPU and NCCL: eager, captured, and with gradients that are sent early."""
    real = xt.cuda.is_available() and nccl_is_installed()
    own = {"XTRAIN_PLANE": ""} if real else nccl()(0)
    env = {**clean_environment(), **own}
    done = subprocess.run([sys.executable, "-c", JOINED], env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_exchanges_through_hosts_are_not_captured(package, tmp_path):
    """One line says so, and the ranks go on."""
    code = RANK + (
        "total = lambda x: xt.distributed.all_reduce(x)\n"
        "graph = xt.cuda.graph(total)\nx = xt.ones(2).to('cuda')\nfor _ in range(2): graph(x)\n"
        "try: graph(x)\nexcept RuntimeError as error: print(error)\nprint(total(x).tolist())"
    )
    for one in run_ranks(2, ["-c", code], tmp_path / "x", on_device(package, XTRAIN_PLANE="host")):
        said = "cuda.graph: exchanges through hosts cannot be captured; those of NCCL can"
        assert (one.status, one.out) == (0, f"{said}\n[2.0, 2.0]\n"), one


def test_a_rank_that_waits_leaves_the_processor_to_others(nccl, tmp_path):
    """For another one, two seconds: first it asks the device without a pause, a millisecond at a time; later it sleeps
    between questions that take no time.
    """
    code = RANK + (
        "import time\none = xt.ones(2).to('cuda')\nxt.distributed.all_reduce(one)\n"
        "if xt.distributed.rank(): time.sleep(2)\n"
        "asked, ask = [], xt._C.nccl_idle\n"
        "xt._C.nccl_idle = lambda comm, wait=0: (asked.append(wait), ask(comm, wait))[1]\n"
        "xt.distributed.all_reduce(one)\nprint(asked[0], asked[-1])"
    )
    found = run_ranks(2, ["-c", code], tmp_path / "x", nccl())
    assert [one.status for one in found] == [0, 0] and found[0].out == "1000 0\n", found


COLLECTIVES = RANK + (
    "d, r = xt.distributed, xt.distributed.rank()\n"
    "x = xt.arange(6).float().reshape(3, 2).to('cuda') + 10 * r\n"
    "print(d.all_gather(x[1:]).tolist(), d.all_to_all(x.reshape(6)[:3]).tolist())\n"
    "print(d.broadcast(x.T, 2).tolist(), d.all_reduce(x.bfloat16(), 'max').tolist(), d.reduce_scatter(x).tolist())\n"
    "print(d.all_gather(xt.ones(0).to('cuda')).shape, d.all_gather(x.cpu()[:1]).tolist(), x.tolist())\n"
    "from xtrain.distributed import world\nprint(type(world._plane.gpus).__name__)\n"
    "d.shutdown()"
)


def test_gradients_are_sent_early_between_hosts(nccl, tmp_path):
    """By default; ranks of one host send them behind the backward."""
    code = (
        RANK
        + "model = nn.Linear(3, 3).to('cuda')\ndp = xt.distributed.DataParallel(model, optim.AdamW(model.parameters()))\n"
    )
    code += "print(xt.distributed.local_world_size(), dp._overlap)"
    for own, said in (({}, "2 False\n"), ({"XTRAIN_LOCAL_RANK": "0", "XTRAIN_LOCAL_WORLD_SIZE": "1"}, "1 True\n")):
        found = run_ranks(2, ["-c", code], tmp_path / said.split()[0], nccl(**own))
        assert [(one.status, one.out) for one in found] == [(0, said)] * 2, found


def test_collectives_of_nccl(nccl, package, tmp_path):
    """The same as over the host plane, also of views and of nothing; tensors of the CPU still go through the host."""
    said = {}
    for plane, more in (("NcclPlane", nccl()), ("NoneType", on_device(package, XTRAIN_PLANE="host"))):
        found = run_ranks(3, ["-c", COLLECTIVES], tmp_path / plane, more)
        assert [(one.status, one.err) for one in found] == [(0, "")] * 3, found
        assert all(one.out.endswith(f"{plane}\n") for one in found), found
        said[plane] = [one.out.splitlines()[:-1] for one in found]
    assert said["NcclPlane"] == said["NoneType"]
    assert said["NcclPlane"][1][0].startswith("[[[2.0, 3.0], [4.0, 5.0]], [[12.0, 13.0], [14.0, 15.0]], [[22.0, 23.0]")


def nccl_is_installed() -> bool:
    """In a package that ranks see, or where the loader looks."""
    wheels = (os.path.join(folder, "nvidia/nccl/lib/libnccl.so.2") for folder in sys.path)
    return any(map(os.path.exists, wheels)) or ctypes.util.find_library("nccl") is not None


AFTER = RANK + "one = xt.ones(2).to('cuda')\nxt.distributed.all_reduce(one)\nprint('joined', flush=True)\n"


@pytest.mark.parametrize(
    ("variables", "code", "statuses", "said"),
    [
        (
            {"PYTHONPATH": None},
            AFTER,
            (1, 1),
            "ConfigError: distributed: ranks on GPUs need NCCL (libnccl.so.2): it is neither among the Python packages "
            "(nvidia/nccl/lib) nor where the loader looks; XTRAIN_PLANE=host works without it\n",
        ),
        ({"FAKE_NCCL_VERSION": "21703"}, AFTER, (1, 1), "is version 2.17.3, and 2.18 is the oldest that is known; XTRAIN"),
        (
            lambda rank: {"FAKE_NCCL_VERSION": str(22809 + rank)},
            AFTER,
            (1, 1),
            "version of NCCL must be the same on every rank, got 22809 on rank 0 and 22810 on rank 1\n",
        ),
        (
            lambda rank: {"FAKE_NCCL_FAILS": "CommInitRankConfig"} if rank else {},
            AFTER,
            (75, 1),
            "CudaError: distributed: ncclCommInitRankConfig failed: unhandled system error",
        ),
        (
            {"XTRAIN_COMM_TIMEOUT": "0.5"},
            "import time\n" + RANK + "xt._C.nccl_open = lambda *_: time.sleep(60)\nxt.distributed.all_reduce(xt.ones(2).to('cuda'))",
            (75, 75),
            "did not end within 0.5 s",
        ),
        (
            {},
            AFTER + (
                "def broken(comm, wait): raise xt._C.CudaError('an illegal access')\nif xt.distributed.rank(): xt._C.nccl_idle = broken\n"
                "for _ in range(2): xt.distributed.all_reduce(one)"
            ),
            (75, 1),
            "xtrain: error: distributed: rank 1 left: CudaError: an illegal access (host ",
        ),
        (
            {},
            AFTER + "if xt.distributed.rank(): os._exit(1)\nxt.distributed.all_reduce(one)",
            (75, 1),
            "xtrain: error: distributed: rank 1 is gone",
        ),
        (
            {},
            AFTER + "if xt.distributed.rank(): one = xt.ones(3).to('cuda')\nxt.distributed.all_reduce(one)",
            (75, 75),
            "xtrain: error: distributed: ranks do not do the same",
        ),
        (
            lambda rank: {"FAKE_NCCL_ASYNC": "3"} if rank == 0 else {},
            AFTER + "xt.distributed.all_reduce(one)",
            (75, 75),
            "distributed: ncclCommGetAsyncError failed: remote process exited: said by the fake",
        ),
    ],
)  # fmt: skip
def test_what_ends_ranks_that_nccl_joins(variables, code, statuses, said, nccl, package, tmp_path):
    """Nobody waits for ever in NCCL: an error of one rank, or its death, ends all."""
    if variables == {"PYTHONPATH": None} and nccl_is_installed():
        pytest.skip("NCCL is installed here; the test is about a machine without it")

    def more(rank):
        own = {**(variables(rank) if callable(variables) else variables)}
        if "PYTHONPATH" in own:
            own["PYTHONPATH"] = package
        return nccl(XTRAIN_WATCH_TIMES="beat=0.1", **own)(rank)

    found = run_ranks(2, ["-c", "import os\n" + code], tmp_path / "x", more)
    assert tuple(one.status for one in found) == statuses, found
    says = [said in one.err for one in found]
    assert all(says) if statuses == (1, 1) else any(says), found  # what is missing is said by every rank
    assert max(one.ended for one in found) - min(one.ended for one in found) < 10


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            lambda rank: {"FAKE_NCCL_VERSION": "21703"},
            "is version 2.17.3, and 2.18 is the oldest that is known; XTRAIN",
        ),
        (
            lambda rank: {"FAKE_NCCL_VERSION": str(22809 + rank)},
            "version of NCCL must be the same on every rank, got 22809 on rank 0 and 22810 on rank 1\n",
        ),
    ],
)
def test_the_command_calls_a_wrong_nccl_wrong_usage(variables, said, nccl, data, tmp_path):
    values = choices(data, tmp_path / "run", device="cuda", max_ranks=2, steps=2, eval_every=0)
    code = (
        "import sys\nfrom xtrain.cli.guard import guard\nfrom xtrain.train import Trainer\n"
        f"sys.exit(guard(lambda words: Trainer({values!r}).run(), []))"
    )
    for one in run_ranks(2, ["-c", code], tmp_path / "x", lambda rank: nccl(**variables(rank))(rank)):
        assert one.status == 2 and said in one.err, one


def test_a_verdict_ends_what_nccl_does(nccl, tmp_path):
    """So that whoever catches it can use the GPU, which waits for the rank that is lost."""
    code = (
        "import os, time\n"
        + AFTER
        + (
            "from xtrain import _C\nfrom xtrain.distributed import world\nfrom xtrain.errors import PeerError\n"
            "if xt.distributed.rank(): os._exit(1)\n"
            "try: xt.distributed.all_reduce(one)\nexcept PeerError: pass\n"
            "try:\n    for _ in range(40): _C.nccl_idle(world._plane.gpus._comm), time.sleep(0.1)\n"
            "except RuntimeError as error: print(error)\n"
            "xt.distributed.shutdown()"
        )
    )
    found = run_ranks(2, ["-c", code], tmp_path / "x", nccl())
    assert (found[0].status, found[0].out) == (0, "joined\ndistributed: NCCL's communicator has been closed\n"), found
