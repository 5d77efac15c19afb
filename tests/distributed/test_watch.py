"""The watchdog, between processes that only exchange: the right rank is named by all, in time, and no process stays."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
from ranks import HANGS, Rank, at_once, run_ranks
from runs import wait_until

from xtrain.distributed import agree, world
from xtrain.distributed.progress import Times, times
from xtrain.errors import ConfigError, NonFiniteError, PeerError

pytestmark = pytest.mark.on_cpu
SOON = 5.0  # seconds: 2 are promised, and a busy machine starts threads late; other ways to notice take 10 and more
ABOUT = r" \(host \S+, pid \d+, step \d+, exchange \d+, [a-z]+ for [\d.]+ s\)"

# What a rank does is one of the functions; a PeerError that nobody catches ends it.
SCRIPT = """
import ctypes, os, signal, sys, time
import xtrain as xt
from xtrain.distributed import world
d = xt.distributed
d.init()
me = d.rank()
d.barrier("begin")

def stopped():
    print("ready", flush=True)
    while not os.path.exists(sys.argv[2]):
        d.gather_json(me)
        time.sleep(0.01)

def busy():
    time.sleep(0.4)  # until a heartbeat has come
    if me == 1:
        ctypes.PyDLL(None).usleep(3000000)  # C code that keeps the GIL
    d.barrier("end")

def nap():
    while True:
        time.sleep(1000)

def stuck():
    if me == 0:
        with world.phase("saving"):
            time.sleep(2)
    d.barrier("saved")
    if me == 2:
        nap()
    d.barrier("end")

def slow():
    for step in range(1, 250):
        world.at_step(step)
        time.sleep(0.012 if me == 1 else 0.004)
        d.gather_json(step)

def other():
    d.all_gather(xt.ones(2)) if me else d.all_reduce(xt.ones(2).long())
    time.sleep(9)

def size():
    d.all_to_all(xt.ones(2 if me else 4))

def more():
    if me:
        d.barrier("one more")
    d.barrier("end")

def ends():
    if me == 0:
        time.sleep(1000)  # away from exchanges
    if me == 1:
        return d.shutdown() if sys.argv[2] == "in order" else sys.exit(3)
    d.barrier("end")

def keeps_on():
    if me:
        os.kill(os.getpid(), signal.SIGKILL)
    import atexit
    handler = lambda: ctypes.PyDLL(None).usleep(100000000)  # keeps the GIL
    atexit.unregister(world._at_exit), atexit.register(handler), atexit.register(world._at_exit)
    d.barrier("end")

def forked():
    if me:
        child = os.fork()
        if child == 0:
            try:
                d.barrier("of a child")
            except xt.errors.PeerError as error:
                print(error, flush=True)
            os.read(0, 1)
            sys.exit(0)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    d.barrier("end")

globals()[sys.argv[1]]()
d.shutdown()
"""


def start(size: int, folder, *words: str, limits: str = "", **more) -> list[Rank]:
    return run_ranks(size, ["-c", SCRIPT, *words], folder, lambda rank: {"XTRAIN_WATCH_TIMES": limits}, **more)


def lines(one: Rank) -> list[str]:
    return one.err.splitlines()


class Network:
    """A port whose connections go on to another one, until they are cut: no byte arrives any more, and none ends."""

    def __init__(self, to: int, held: ExitStack) -> None:
        self._to, self._held, self._cut = to, held, False
        self._listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self._listener.getsockname()[1]
        self.cut_at = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut, self.cut_at = True, time.monotonic()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # nobody listens yet; the rank tries again
                    near.close()
                    continue
                for ends in ((near, far), (far, near)):
                    self._held.enter_context(ends[0])
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._cut:
                    return
                target.sendall(data)
            if not self._cut:
                target.shutdown(socket.SHUT_WR)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def test_waiting(tmp_path):
    """Who is silent, stuck, slow or only late; all at once, as they mostly sleep."""
    end = tmp_path / "end"
    stopped_at = [0.0]
    port = free_port()
    held = ExitStack()
    network = Network(port, held)

    def cut(processes) -> None:
        ready = tmp_path / "cut" / "out-1.txt"
        wait_until(lambda: ready.exists() and ready.read_text(), processes[0], "three ranks")
        network.cut()

    def of_two_hosts(rank: int) -> dict[str, str]:
        place = network.port if rank == 1 else port
        return {"XTRAIN_WATCH_TIMES": "beat=0.1,silent=2", "XTRAIN_STORE": f"127.0.0.1:{place}"}

    def stop_and_go(processes) -> None:
        ready = tmp_path / "stopped" / "out-1.txt"
        wait_until(lambda: ready.exists() and ready.read_text(), processes[0], "three ranks")
        processes[1].send_signal(signal.SIGSTOP)
        time.sleep(0.7)
        processes[1].send_signal(signal.SIGCONT)
        time.sleep(0.7)
        assert all(process.poll() is None for process in processes)  # nobody is blamed
        processes[1].send_signal(signal.SIGSTOP)
        stopped_at[0] = time.monotonic()
        for process in (processes[0], processes[2]):
            process.wait(HANGS)
        processes[1].send_signal(signal.SIGCONT)

    with held:
        stopped, busy, stuck, slow, apart = at_once(
            lambda: start(3, tmp_path / "stopped", "stopped", str(end), limits="beat=0.1,silent=2", act=stop_and_go),
            lambda: start(2, tmp_path / "busy", "busy", limits="beat=0.1,silent=2,report=1"),
            lambda: start(3, tmp_path / "stuck", "stuck", limits="beat=0.1,timeout=1.5,exit=0.5"),
            lambda: start(2, tmp_path / "slow", "slow", limits="beat=0.1,window=0.3"),
            lambda: run_ranks(3, ["-c", SCRIPT, "stopped", str(end)], tmp_path / "cut", of_two_hosts, act=cut),
            most=5,
        )
    # Cut off: its side names rank 0, the only one that it talks to; the others name it.
    assert [one.status for one in apart] == [75] * 3, apart
    for rank, one in enumerate(apart):
        lost = 0 if rank == 1 else 1
        assert re.fullmatch(f"xtrain: error: distributed: rank {lost} is silent for 2 s{ABOUT}\n", one.err), apart
        assert one.ended - network.cut_at < 2 + SOON, (rank, one.ended - network.cut_at)
    # Stopped: named by all, also by itself once it goes on.
    assert [one.status for one in stopped] == [75] * 3, stopped
    for one in stopped:
        assert re.fullmatch(f"xtrain: error: distributed: rank 1 is silent for 2 s{ABOUT}\n", one.err), stopped
    assert stopped[0].ended - stopped_at[0] < 2 + SOON
    # Busy in C for longer than `silent`: late, and reported once, with the place.
    assert [one.status for one in busy] == [0, 0], busy
    assert busy[1].err == "" and len(lines(busy[0])) == 1, busy
    late = r"xtrain: warning: distributed: rank 1 lets others wait for \d s with exchange 5, {\"all_gather\": \"barrier end\"}"
    assert re.match(late + ABOUT + r"; rank 1 is in <string>:\d+ busy, ", busy[0].err), busy
    # Stuck: not while it saves; then named by all, with its stack, and ended though it never comes back.
    assert [one.status for one in stuck] == [75] * 3, stuck
    for one in stuck:
        named = r"xtrain: error: distributed: rank 2 is stuck: others have waited \d s for exchange 6, .*barrier end.*"
        assert re.fullmatch(named + ABOUT + r"; rank 2 is in <string>:\d+ nap, <string>:\d+ stuck, .*\n", one.err), one
    # Slow: one warning, with both times.
    assert [one.status for one in slow] == [0, 0] and slow[1].err == "" and len(lines(slow[0])) == 1, slow
    match = re.match(
        r"xtrain: warning: distributed: rank 1 is slow: a step takes it ([\d.]+) s, and the others ([\d.]+) s \(median\)",
        slow[0].err,
    )
    assert match and float(match[1]) > 1.15 * float(match[2]) > 0.004, slow


def test_ranks_that_do_not_do_the_same(tmp_path):
    """All hear both signatures, on one line each, and end with 75 though their scripts catch nothing."""
    cases = {
        "other": (
            '{"all_gather": "all_reduce sum int64 (2,)"}',
            '{"all_gather": "float32 (2,)"}',
        ),
        "size": (
            '{"all_to_all": "float32 (4,)", "bytes": [8, 8]}',
            '{"all_to_all": "float32 (2,)", "bytes": [4, 4]}',
        ),
        "more": ('{"all_gather": "barrier end"}', '{"all_gather": "barrier one more"}'),
    }
    found = at_once(*(lambda case=case: start(2, tmp_path / case, case) for case in cases))
    for group, (mine, theirs) in zip(found, cases.values(), strict=True):
        assert [one.status for one in group] == [75, 75], group
        for one in group:
            text = (
                f"xtrain: error: distributed: ranks do not do the same: exchange 5 of rank 0 is '{mine}', exchange 5 of "
                f"rank 1 is '{theirs}' (rank 0: host "
            )
            assert one.err.startswith(text) and len(lines(one)) == 1, group


def test_a_script_that_ends_after_the_verdict(tmp_path):
    """Without another exchange, and so without an exception; also in what it has printed."""
    code = """
import time
import xtrain as xt
xt.distributed.init()
if xt.distributed.rank():
    raise ValueError("no luck")
while xt.distributed.world._watch.verdict is None:
    time.sleep(0.01)
print("the end")"""
    found = run_ranks(2, ["-c", code], tmp_path)
    assert [one.status for one in found] == [75, 1], found
    assert found[0].out == "the end\n", found


def test_ends_that_others_hear_of(tmp_path):
    """Also where a rank is away from exchanges, and through a forked child that lives on; told to torchrun, too."""
    file = tmp_path / "error.json"
    reader, writer = os.pipe()

    def torchrun(rank: int) -> dict[str, str]:
        return {"TORCHELASTIC_ERROR_FILE": str(file) if rank == 2 else "", "XTRAIN_WATCH_TIMES": "exit=0.5"}

    try:
        in_order, ended, forked, keeps_on = at_once(
            lambda: run_ranks(3, ["-c", SCRIPT, "ends", "in order"], tmp_path / "order", torchrun, limit=40),
            lambda: start(3, tmp_path / "exit", "ends", "exit", limits="exit=0.5", limit=40),
            lambda: start(2, tmp_path / "forked", "forked", stdin=reader, limit=40),
            lambda: start(2, tmp_path / "keeps_on", "keeps_on", limits="exit=1", limit=40),
        )
    finally:
        os.close(reader)
        os.close(writer)
    for group, status in ((in_order, 0), (ended, 3)):
        assert [one.status for one in group] == [75, status, 75], group
        for one in (group[0], group[2]):
            assert re.fullmatch(f"xtrain: error: distributed: rank 1 left: it has ended{ABOUT}\n", one.err), group
        assert max(one.ended for one in group) - group[1].ended < SOON
    told = json.loads(file.read_text())["message"]
    assert told["message"] == in_order[2].err.removeprefix("xtrain: ").strip()
    assert abs(int(told["extraInfo"]["timestamp"]) - time.time()) < HANGS
    assert [one.status for one in forked] == [75, -signal.SIGKILL], forked
    # Its exit handler keeps the GIL: the process ends all the same.
    assert [one.status for one in keeps_on] == [75, -signal.SIGKILL], keeps_on
    assert keeps_on[0].ended - keeps_on[1].ended < 1 + SOON
    assert re.fullmatch(f"xtrain: error: distributed: rank 1 is gone: its connection has ended{ABOUT}\n", forked[0].err)
    assert forked[1].out == "distributed: this process was forked from rank 1, and is no rank itself\n"
    assert forked[0].ended - forked[1].ended < SOON


def test_times():
    assert times({}) == Times() and Times().timeout == 300.0
    assert times({"XTRAIN_COMM_TIMEOUT": "2.5"}) == Times(timeout=2.5)
    assert times({"XTRAIN_WATCH_TIMES": "silent=2,report=1"}) == Times(silent=2.0, report=1.0)
    assert Times().limit("saving") == 1800.0 and Times(timeout=3000).limit("saving") == 3000.0
    for text in ("0", "-1", "nan", "soon", "1e7"):
        with pytest.raises(ConfigError, match=rf"XTRAIN_COMM_TIMEOUT must be seconds in \(0, 1e6\], got '{text}'$"):
            times({"XTRAIN_COMM_TIMEOUT": text})
    with pytest.raises(ConfigError, match="^distributed: XTRAIN_WATCH_TIMES must name beat, .*, got 'sleep'$"):
        times({"XTRAIN_WATCH_TIMES": "sleep=1"})


def test_a_pulse_needs_sockets():
    """Any other descriptor would get bytes."""
    from xtrain import _C

    for sockets, message in (
        (3, "must be a list of descriptors, got int"),
        ([0.5], "must be a list of descriptors of open sockets, got float"),
        ([-1], "must be a list of descriptors of open sockets, got int"),
        ([os.open(os.devnull, os.O_RDONLY)], "must be a list of descriptors of open sockets, got int"),
    ):
        with pytest.raises(TypeError, match=f"^pulse_start: argument 'sockets' {message}$"):
            _C.pulse_start(sockets, 1.0)
    with pytest.raises(ValueError, match=r"^pulse_start: seconds must be in \[0.001, 3600\]"):
        _C.pulse_start([], 0.0)
    _C.pulse_start([], 1.0)
    with pytest.raises(RuntimeError, match="^pulse_start: pulse_stop must come before the next start$"):
        _C.pulse_start([], 1.0)
    _C.pulse_stop()
    _C.pulse_stop()


def test_what_all_ranks_raise_is_not_told(monkeypatch):
    """All others are told of an error of one rank."""
    said = []
    watch = SimpleNamespace(leave=said.append, stop=lambda: None, verdict=None)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    cases = (
        (ValueError("x"), "ValueError: x"),
        (SystemExit(3), "SystemExit: 3"),
        (PeerError("x"), None),
        (NonFiniteError("x"), None),
        (agree.on_all_ranks(ConfigError("x")), None),
    )
    for error, _ in cases:
        monkeypatch.setattr(world, "_watch", watch)
        world.leave(error)
    assert said == [why for _, why in cases]
    with pytest.raises(ConfigError) as refused:
        world.together(lambda: times({"XTRAIN_COMM_TIMEOUT": "0"}))
    assert refused.value.on_all_ranks
