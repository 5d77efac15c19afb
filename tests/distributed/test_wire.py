"""What strangers may send to rank 0: a closed connection is all that comes of it."""

from __future__ import annotations

import json
import random
import socket
import threading
import time

import pytest

from xtrain.distributed import store
from xtrain.distributed.env import Launch

pytestmark = pytest.mark.on_cpu
ZERO = Launch("by hand", 0, 3, 0, 3, host="127.0.0.1", ports=(1,), run_id="run", token="secret")
HELLO = {"rank": 1, "channel": 0, "world": 3, "run": "run", "restart": 0, "nonce": "00" * 16}
VALUES = (None, True, -1, 0, 3, 10**30, 1.5, "", "x", "\ud800", [], {}, [[1]], {"rank": 1})


def greeted(said: bytes) -> str:
    """What rank 0 does about these bytes: "gone" where it closes, else what it refuses."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        try:
            store._greet(ZERO, ZERO.token, ours, set(), threading.Lock())
        except store.Refused as refused:
            return str(refused)
        except store.NO_GREETING:
            return "gone"
    return "welcome"


def framed(*parts: bytes) -> bytes:
    return b"".join(store.LENGTH.pack(len(part)) + part for part in parts)


def test_a_stranger_never_joins() -> None:
    """A greeting with a change, cut anywhere, or other bytes: without the token there is no welcome."""
    chance = random.Random(7)
    for _ in range(1500):
        hello = {**HELLO, chance.choice([*HELLO, "more"]): chance.choice(VALUES)}
        text = json.dumps(hello if chance.random() < 0.9 else chance.choice(VALUES)).encode()
        data = bytearray(framed(text, chance.randbytes(chance.choice((0, 31, 32, 64)))))
        for _ in range(chance.choice((0, 0, 1, 3))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        said = greeted(bytes(data[: chance.choice((len(data), len(data), chance.randrange(len(data) + 1)))]))
        assert said == "gone" or "another" in said, said


@pytest.mark.parametrize("hello", [b"[" * 60_000, b"9" * 60_000, b"\xff\xfe" * 9, b'{"rank": ' * 7_000, b"null"])
def test_greetings_that_parsers_choke_on(hello: bytes) -> None:
    assert greeted(framed(hello, b"")) == "gone"


def test_a_long_message_is_not_waited_for() -> None:
    for size in (1 << 17, 2**64 - 1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(store.LENGTH.pack(size))
            ours.settimeout(5)
            with pytest.raises(ValueError, match=f"a message of {size} bytes"):
                store.receive(ours, 1 << 16)


def answered(answer: bytes) -> socket.socket:
    """Rank 1 joins somebody who greets as rank 0 does, and then sends this answer."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(store.MAGIC + b"0" * 16)
            store.receive(connection, 1 << 16)
            store.receive(connection, 64)
            store.send(connection, answer)

    one = Launch("by hand", 1, 3, 1, 3, host="127.0.0.1", ports=(1,), run_id="run", token="secret")
    thread = threading.Thread(target=pretend)
    thread.start()
    try:
        return store._join(one, one.token, "127.0.0.1", listener.getsockname()[1], time.monotonic() + 60, 60.0)
    finally:
        listener.close()
        thread.join()


@pytest.mark.parametrize("proof", ["00" * 32, "\u00e9", "", 3])
def test_a_rank_0_without_the_token_is_refused(proof: object) -> None:
    """Whoever listens in its place cannot make the proof that the token is known."""
    with pytest.raises(store.Refused, match="^rank 0 does not know the token$"):
        answered(json.dumps({"welcome": proof}).encode())


@pytest.mark.parametrize("answer", [b"5", b"null", b"[]", b"{}", b'"refused"', b"\xff", b"[" * 60_000])
def test_an_answer_that_is_none_is_a_stranger(answer: bytes) -> None:
    """The rank tries the other ports, and again."""
    with pytest.raises(store.NO_GREETING):
        answered(answer)


def test_a_rank_goes_on_after_a_stranger(monkeypatch) -> None:
    """Of every kind."""
    strangers = iter((*(kind() for kind in store.NO_GREETING), None))

    def join(*_: object) -> str:
        if (error := next(strangers)) is not None:
            raise error
        return "the connection"

    monkeypatch.setattr(store, "_join", join)
    one = Launch("by hand", 1, 3, 1, 3, host="127.0.0.1", ports=(1, 2), run_id="run", token="secret")
    assert store._connect(one, time.monotonic() + 60, 60.0, 0, 0) == "the connection"
