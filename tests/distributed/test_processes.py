"""Several processes: they meet, exchange bytes in order, and say in one sentence why they do not."""

import math
import re
import socket
import threading
import time

import pytest
from clock import ends_within
from ranks import HANGS, at_once, run_ranks
from runs import python

import xtrain as xt
from xtrain.distributed import store
from xtrain.distributed.env import Launch
from xtrain.distributed.host import HostPlane
from xtrain.distributed.progress import Progress
from xtrain.distributed.store import meet
from xtrain.errors import ConfigError, PeerError

LATE = 30  # seconds for what two threads of this process do at once

TALK = """
import sys, xtrain as xt
from xtrain.errors import PeerError
d = xt.distributed
d.init()
me, all_ = d.rank(), d.world_size()
assert d.is_initialized() and d.launcher() == "by hand" and (d.local_rank(), d.local_world_size()) == (me, all_)
t = xt.tensor([float(me), 10.0 + me])
for dtype in (xt.float32, xt.bfloat16, xt.int64):
    gathered = d.all_gather(t.to(dtype))
    assert gathered.dtype is dtype and gathered.tolist() == [[r, 10 + r] for r in range(all_)]
x = xt.arange(2 * all_) + 100 * me
assert d.all_to_all(x).tolist() == [100 * r + 2 * me + k for r in range(all_) for k in range(2)]
assert d.broadcast(t, all_ - 1).tolist() == [all_ - 1, 9.0 + all_]
assert d.gather_json({"me": [me, None]}) == [{"me": [r, None]} for r in range(all_)]
assert d.all_gather(xt.zeros(0, 3)).shape == (all_, 0, 3)
big = xt.full((1 << 20,), float(me))  # more than sockets hold
assert d.all_gather(big).sum(1).tolist() == [float(r << 20) for r in range(all_)]
# The tree of four: (x0 + x1) + (x2 + x3); every other order gives another sum here.
y = xt.tensor([1.0, 2.0**-24, 2.0**-24, 2.0**-24][me % 4])
want = [1.0 + 2.0**-23, 1.0][0] if all_ == 4 else None
assert d.all_reduce(y).item() == want or all_ != 4, d.all_reduce(y).item()
assert d.all_reduce(t, "max").tolist() == [all_ - 1, 9.0 + all_] and d.all_reduce(t, "min").tolist() == [0, 10]
assert d.reduce_scatter(xt.arange(all_) + me).tolist() == [all_ * me + all_ * (all_ - 1) // 2]
d.barrier("the end")
if sys.argv[1] == "differ":
    try:
        d.all_gather(t if me else t.reshape(2, 1))
    except PeerError as error:
        print(error)
d.shutdown()
"""


def test_exchanges(tmp_path):
    """Four ranks, whose exchanges differ in the end: all hear both."""
    found = run_ranks(4, ["-c", TALK, "differ"], tmp_path)
    assert [one.status for one in found] == [0] * 4, found
    for one in found:
        assert 'exchange 17 of rank 0 is \'{"all_gather": "float32 (2, 1)"}\'' in one.out, found
        assert '"float32 (2,)"' in one.out


def test_ranks_must_have_one_version(tmp_path):
    """And one build: another compiler, flag, contract of kernels or processor may give other bits."""
    code = (
        "import os, sys, xtrain as xt\nfrom xtrain import _C\nfrom xtrain.distributed import world\n"
        "if os.environ['XTRAIN_RANK'] == '1':\n    about = _C.build_info()\n    {}\n"
        "from xtrain.cli.guard import guard\nsys.exit(guard(lambda words: xt.distributed.init(), []))"
    )
    cases = {"version of xtrain": "world.__version__ = '9'"}
    for name, key in (("contract of kernels", "contract"), ("flags of the compiler", "flags")):
        cases[name] = f"about['{key}'] = '9'; _C.build_info = lambda: about"
    found = at_once(*(lambda n=n, c=c: run_ranks(2, ["-c", code.format(c)], tmp_path / n) for n, c in cases.items()))
    for name, ranks in zip(cases, found, strict=True):
        for one in ranks:
            told = f"xtrain: error: distributed: {name} must be the same on every rank, got "
            assert one.status == 2 and one.err.startswith(told) and "on rank 0 and '9' on rank 1" in one.err, one


def planes(patience):
    """The host planes of two ranks in this process, without a watchdog."""
    ends = socket.socketpair()
    return [HostPlane(rank, 2, {1 - rank: end}, patience, Progress()) for rank, end in enumerate(ends)]


def test_an_init_that_fails_leaves_nothing_behind(tmp_path):
    """A second one meets the others again, and hears the same, in place of going on with ranks that were refused."""
    code = """
import threading, xtrain as xt
for _ in range(2):
    try:
        xt.distributed.init()
    except ValueError as error:
        print(error, xt.distributed.is_initialized(), threading.active_count())
"""
    found = run_ranks(2, ["-c", code], tmp_path, lambda rank: {"XTRAIN_PLANE": ("host", "mpi")[rank]})
    said = "distributed: plane must be the same on every rank, got 'host' on rank 0 and 'mpi' on rank 1 False 1\n"
    assert [(one.status, one.out) for one in found] == [(0, said * 2)] * 2, found


def test_an_init_without_its_watchdog_leaves_nothing_behind(tmp_path):
    """Where a rank may have no more threads: it has not joined, its files are closed, and the others hear why."""
    code = """
import os, threading, xtrain as xt
from xtrain.errors import PeerError
def fails(self):
    raise RuntimeError("can't start new thread")
def files():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
before = files()
if xt.distributed.rank() == 1:
    threading.Thread.start = fails
try:
    xt.distributed.init()
except (RuntimeError, PeerError) as error:
    print(error, xt.distributed.is_initialized(), threading.active_count(), files() - before)
"""
    first, second = run_ranks(2, ["-c", code], tmp_path, limit=60)
    assert [one.status for one in (first, second)] == [0, 0] and second.err == "", (first, second)
    assert first.out.startswith("distributed: rank 1 left: RuntimeError: can't start new thread") and second.out == (
        "can't start new thread False 1 0\n"
    ), (first, second)


@ends_within(30)
def test_a_plane_alone_knows_who_is_late_or_has_left():
    """Also where the watchdog has failed."""
    first, second = planes(0.05)
    with pytest.raises(
        PeerError, match=r"^distributed: rank 1 did not come to exchange 1, .*barrier.*, within 0.05 s$"
    ):
        first.all_gather(b"", "barrier")
    with pytest.raises(PeerError, match="^distributed: rank 1 did not come to exchange 1"):
        second.all_gather(b"", "barrier")
    first, second = planes(HANGS)
    second.leave("no luck")
    with pytest.raises(PeerError, match="^distributed: rank 1 left: no luck$"):
        first.all_gather(b"", "barrier")


def test_an_error_that_is_announced_is_one_line():
    """Heartbeats carry it, and a verdict is one line."""
    one, _ = planes(1)
    one.announce("no such\n  thing: " + "x" * 5000)
    number, text = one.progress.failed
    assert number == 1 and text == ("no such thing: " + "x" * 5000)[:1000]


def test_an_exchange_that_waits_can_be_ended():
    """By another thread, on either side."""
    for rank in (0, 1):
        both = planes(10)
        ending = threading.Timer(0.05, lambda both=both, rank=rank: both[rank].abort("distributed: it is over"))
        ending.start()
        with pytest.raises(PeerError, match=f"^distributed: rank {1 - rank} left without a word$"):
            both[rank].all_gather(b"", "barrier")
        ending.join()
        with pytest.raises(PeerError, match="^distributed: "):
            both[rank].all_gather(b"", "barrier")


def launch(rank=0, size=2, port=None, file="", token="a", run="r", restart=0):
    ports = (port,) if port else ()
    return Launch("test", rank, size, rank, size, "127.0.0.1" if port else "", ports, file, run, restart, token)


def test_the_port_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=f"^distributed: rank 0 must listen on 127.0.0.1 port {port}, got: Address already in use$",
        ):
            meet(launch(port=port), HANGS)


def test_a_rank_is_missing(tmp_path):
    with pytest.raises(PeerError, match=r"^distributed: ranks 1, 2 of 3 did not come within 0.05 s$"):
        meet(launch(size=3, file=str(tmp_path / "meeting")), 0.05)
    assert not list(tmp_path.iterdir())
    with pytest.raises(PeerError, match=r"^distributed: rank 0 was not found at .*meeting within 0.05 s by rank 1$"):
        meet(launch(1, file=str(tmp_path / "meeting")), 0.05)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"token": "b"}, "rank 1 has another token than rank 0"),
        ({"size": 3}, "the world size is 2 on rank 0, got 3"),
        ({"rank": 2, "size": 2}, "rank 2 is there already"),
    ],
)
def test_a_stranger_is_refused(other, message, tmp_path):
    """And the rank that belongs there joins after it."""
    import json

    from xtrain.distributed import store

    file = str(tmp_path / "meeting")
    found = {}
    mine = launch(file=file)
    server = threading.Thread(target=lambda: found.update(meet(mine, LATE)[0]), daemon=True)
    server.start()
    try:
        while not (address := store._read_meeting(file))[1]:
            assert server.is_alive()
        stranger = launch(**{"rank": 1, "port": address[1][0], **other})
        with pytest.raises(ConfigError, match=f"^distributed: rank {stranger.rank} was refused: {message}$"):
            meet(stranger, LATE)
        for changed, said in (({"run": "s"}, "belongs to another run, 'r'"), ({"restart": 1}, "start 0 of the run, got start 1")):  # fmt: skip
            foreign = launch(**{"rank": 1, "port": address[1][0], **changed})
            with pytest.raises(store.Refused, match=said) as refused:
                store._join(foreign, mine.token, "127.0.0.1", address[1][0], time.monotonic() + LATE, LATE)
            assert not refused.value.final  # rank 0 of its own run may come
        with socket.create_connection(("127.0.0.1", address[1][0])) as silent:
            silent.sendall(store.LENGTH.pack(1 << 60))  # no greeting
        assert json.loads((tmp_path / "meeting").read_text())["token"] == mine.token
        assert (tmp_path / "meeting").stat().st_mode & 0o777 == 0o600
    finally:
        right = meet(launch(1, file=file), LATE)[0]
        server.join(LATE)
    for one in [*right.values(), *found.values()]:
        one.close()


@pytest.fixture
def agent():
    """The port of a torchrun that listens, and of somebody else behind it, who is silent."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    yield port
                    return
            except OSError:
                continue


def test_torchrun_listens_itself(agent, tmp_path):
    """Ranks meet at the first port behind its own that is free, past a stranger."""

    def variables(rank):
        return {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1",
        }  # fmt: skip

    code = (
        "import os, xtrain as xt\nfor name in list(os.environ):\n    if name.startswith('XTRAIN_'): del os.environ[name]\n"
        "xt.distributed.init()\nprint(xt.distributed.launcher(), xt.distributed.gather_json(xt.distributed.rank()))"
    )
    found = run_ranks(2, ["-c", code], tmp_path, variables)
    assert [(one.status, one.out) for one in found] == [(0, "torchrun [0, 1]\n")] * 2, found


def test_a_rank_that_comes_twice_is_refused(tmp_path):
    file = str(tmp_path / "meeting")
    found = {}
    server = threading.Thread(target=lambda: found.update(meet(launch(size=3, file=file), HANGS)[0]))
    server.start()
    connections = []
    try:
        connections += meet(launch(1, size=3, file=file), HANGS)[0].values()
        with pytest.raises(ConfigError, match="^distributed: rank 1 was refused: rank 1 is there already$"):
            meet(launch(1, size=3, file=file), HANGS)
    finally:
        connections += meet(launch(2, size=3, file=file), HANGS)[0].values()
        server.join()
    for one in [*connections, *found.values()]:
        one.close()


def test_exchanges_need_init(monkeypatch):
    for name, value in {"XTRAIN_RANK": "1", "XTRAIN_WORLD_SIZE": "2", "XTRAIN_STORE": "file:/x"}.items():
        monkeypatch.setenv(name, value)
    assert (xt.distributed.rank(), xt.distributed.world_size(), xt.distributed.is_initialized()) == (1, 2, False)
    with pytest.raises(
        RuntimeError, match=r"^all_gather: xtrain.distributed.init\(\) must be called first on every rank$"
    ):
        xt.distributed.all_gather(xt.ones(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.all_gather([1]), r"all_gather: t must be a Tensor, got list"),
        (
            lambda d: d.all_to_all(xt.ones(())),
            r"all_to_all: the first dimension of t must be a multiple of 1, got shape",
        ),
        (lambda d: d.broadcast(xt.ones(1), 1), r"broadcast: src must be a rank in \[0, 1\), got 1"),
        (lambda d: d.all_reduce(xt.ones(1), "mean"), r"all_reduce: op must be sum, max or min, got 'mean'"),
        (lambda d: d.init(timeout=0), r"init: timeout must be a number of seconds in \(0, 1e6\], got 0"),
        (lambda d: d.init(timeout=math.inf), r"init: timeout must be a number of seconds in \(0, 1e6\], got inf"),
    ],
)
def test_wrong_arguments(call, message, monkeypatch):
    from xtrain.distributed import world

    monkeypatch.setattr(world, "_launch", None)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call(xt.distributed)


def test_a_meeting_file_of_somebody_else_is_refused(tmp_path):
    path = tmp_path / "meeting"
    path.write_text('{"port": 1, "token": "x"}')
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"meeting must belong to this user alone, got mode 100644$"):
        meet(launch(1, file=str(path)), HANGS)
    path.chmod(0o600)
    assert store._read_meeting(str(path)) == ("127.0.0.1", (1,), "x")
    (tmp_path / "link").symlink_to(path)
    assert store._read_meeting(str(tmp_path / "link")) == ("127.0.0.1", (), "")


def test_parts_of_another_size_are_another_exchange():
    """Each knows the sizes of what it sends, and would take those of the other for its own."""
    first, second = planes(HANGS)
    heard = []

    def other():
        with pytest.raises(PeerError) as caught:
            second.all_to_all([b"abc", b"abc"], "x")
        heard.append(str(caught.value))

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(PeerError, match=r'ranks do not do the same: .*"bytes": \[2, 2\].*"bytes": \[3, 3\]'):
        first.all_to_all([b"ab", b"ab"], "x")
    thread.join()
    assert "ranks do not do the same" in heard[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('d.all_reduce(t, "max")', "d.all_reduce(t)"),
        ("d.all_gather(t)", "d.all_reduce(t)"),
        ("d.all_to_all(t)", "d.reduce_scatter(t)"),
        ("d.gather_json(1)", 'd.gather_json(1, "another")'),
    ],
)
def test_functions_that_send_the_same_bytes_are_different_exchanges(first, second, tmp_path):
    """Each rank would go on, with another result."""
    code = (
        f"import xtrain as xt\nd = xt.distributed\nd.init()\nt = xt.ones(2)\nprint({second} if d.rank() else {first})"
    )
    for one in run_ranks(2, ["-c", code], tmp_path / "ranks"):
        assert (one.status, one.out) == (75, "") and "ranks do not do the same: exchange 4 of rank 0 is" in one.err, one


def test_an_error_that_nobody_catches_is_told(tmp_path):
    """By rank 1 when its script ends, without shutdown or leave."""
    code = "import sys, xtrain as xt\nd = xt.distributed\nd.init()\nif d.rank():\n    raise ValueError('no luck')\nd.barrier('x')"
    first, second = run_ranks(2, ["-c", code], tmp_path / "ranks")
    assert (first.status, second.status) == (75, 1), (first, second)
    assert "xtrain: error: distributed: rank 1 left: ValueError: no luck (host " in first.err


def test_a_config_error_that_is_a_verdict_is_one_line_of_a_script(tmp_path):
    """And status 2, though nothing catches it; any other ConfigError is shown as Python shows it."""
    code = (
        "import sys, xtrain as xt\nfrom xtrain.distributed import world\nfrom xtrain.errors import ConfigError\n"
        "d = xt.distributed\nd.init()\n"
        "def act(): raise ConfigError('a wrong start')\n"
        "if d.rank() or sys.argv[1] == 'all': world.all_or_none(act)\nd.barrier('x')"
    )
    for one in run_ranks(2, ["-c", code, "one"], tmp_path / "one"):
        assert one.status == 2, one
        assert re.fullmatch(r"xtrain: error: distributed: rank 1: a wrong start \(host .*\)\n", one.err), one
    for one in run_ranks(2, ["-c", code, "all"], tmp_path / "all"):
        assert one.status == 1 and one.err.endswith("xtrain.errors.ConfigError: a wrong start\n"), one


def test_a_rank_with_an_error_ends_last(tmp_path):
    """mpirun kills the others when one has ended with an error: they would not have said why."""
    code = (
        "import atexit, os, sys, time, xtrain as xt\nd, said = xt.distributed, sys.argv[1]\n"
        "atexit.register(lambda: print(os.path.exists(said)))\nd.init()\nd.barrier('x')\nif d.rank(): raise ValueError\n"
        "try: d.barrier('y')\nfinally:\n    time.sleep(0.5)\n    open(said, 'w')"
    )
    found = run_ranks(2, ["-c", code, str(tmp_path / "said")], tmp_path / "ranks")
    assert [(one.status, one.out) for one in found] == [(75, "True\n"), (1, "True\n")], found


def test_ranks_with_errors_do_not_wait_for_each_other(tmp_path):
    """None hears of the other's error before it leaves itself: their watchdogs are held until both do."""
    code = """
import atexit, os, sys, time
import xtrain as xt
from xtrain.distributed import world
atexit.register(lambda: print(round(time.monotonic() - begun, 2)))  # after that of init
xt.distributed.init()
xt.distributed.barrier("x")
me, watch = xt.distributed.rank(), world._watch

def hold():
    while not watch._stopping:
        time.sleep(0.001)
    open(f"{sys.argv[1]}/{me}", "w").close()
    while not os.path.exists(f"{sys.argv[1]}/{1 - me}"):
        time.sleep(0.001)

watch._order(hold)
begun = time.monotonic()
raise ValueError"""
    found = run_ranks(2, ["-c", code, str(tmp_path)], tmp_path / "ranks")
    assert all(float(one.out) < 2 for one in found), found


def test_a_missing_rank_ends_the_command_with_75():
    code = (
        "import sys\nfrom xtrain.cli.guard import guard\nfrom xtrain.errors import PeerError\n"
        "def lost(words): raise PeerError('distributed: rank 1 left')\nsys.exit(guard(lost, []))"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (75, "xtrain: error: distributed: rank 1 left\n")
