"""The meeting of all ranks at rank 0: some connections a rank, from a handshake that refuses strangers.

    rank 0 listens; the others connect, in any order, and try again until the deadline
    rank 0 -> rank   MAGIC, 16 random bytes
    rank -> rank 0   who it is and which connection this is (JSON), its own random bytes, and an HMAC-SHA256 of all that
                     under the token
    rank 0 -> rank   "welcome" and an HMAC, or a sentence that says what was refused

Nothing that comes over the wire is executed or unpickled: frames are JSON and raw bytes, with their lengths in front.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
from typing import Any

from ..errors import ConfigError, PeerError, shown
from ..files import reason
from .env import Launch

MAGIC = b"xtrain/1"
_NONCE = 16
_LONGEST_HELLO = 1 << 16  # bytes
_HANDSHAKE = 30.0  # seconds: a stranger that connects to rank 0 and is silent costs no more
_GREETING = 1.0  # seconds that a rank waits for a listener's first word; twice as long in each round, to _HANDSHAKE
_PAUSE = 0.02  # seconds between two rounds over the ports
LENGTH = struct.Struct("<Q")
# What the bytes of a stranger lead to; RecursionError: JSON of many levels.
NO_GREETING = (OSError, ValueError, EOFError, RecursionError)


class Refused(Exception):
    """Rank 0 has refused a connection. final: another attempt would be refused, too."""

    def __init__(self, text: str, final: bool) -> None:
        super().__init__(text)
        self.final = final


def meet(launch: Launch, timeout: float, channels: int = 1) -> list[dict[int, socket.socket]]:
    """Connect all ranks, `channels` times. For each channel, rank 0 gets {rank: socket} of the others, and they get
    {0: socket}.

    ConfigError: the port is taken, or rank 0 refuses this rank. PeerError: a rank is missing after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    if launch.rank == 0:
        found = _listen(launch, deadline, timeout, channels)
        return [{rank: found[rank, channel] for rank in range(1, launch.world_size)} for channel in range(channels)]
    mine: list[dict[int, socket.socket]] = []
    try:
        for channel in range(channels):
            found_at = mine[0][0].getpeername()[1] if mine else 0
            mine.append({0: _connect(launch, deadline, timeout, channel, found_at)})
    except BaseException:
        for one in mine:
            one[0].close()
        raise
    return mine


# ---- rank 0 ----------------------------------------------------------------------------------------------------------


def _listen(launch: Launch, deadline: float, timeout: float, channels: int) -> dict[tuple[int, int], socket.socket]:
    """Accept the connections of all other ranks; return {(rank, channel): socket}."""
    listener = _Listener(launch, deadline, channels)
    try:
        listener.open()
        return listener.wait_for_all(timeout)
    finally:
        listener.close()


class _Listener:
    """Rank 0's port in a meeting. One thread accepts connections, and each has a thread for its handshake, so that a
    stranger who is silent keeps nobody else waiting.
    """

    def __init__(self, launch: Launch, deadline: float, channels: int) -> None:
        self.launch, self.deadline, self.channels = launch, deadline, channels
        self.token = launch.token or ("" if not launch.file else secrets.token_hex(16))
        self.socket = _bind(launch)
        # Of each handshake that is over: ((rank, channel), its connection), or a sentence about who was refused.
        self.results: queue.SimpleQueue[tuple[tuple[int, int], socket.socket] | str] = queue.SimpleQueue()
        self.taken: set[tuple[int, int]] = set()  # ranks and channels that have come; under the lock
        self.lock = threading.Lock()
        self.closing = threading.Event()

    def open(self) -> None:
        """Say in the meeting file, if there is one, where this listens, and begin to accept."""
        if self.launch.file:
            _publish(self.launch.file, self.socket.getsockname()[1], self.token)
        threading.Thread(target=self._accept, daemon=True).start()

    def wait_for_all(self, timeout: float) -> dict[tuple[int, int], socket.socket]:
        """{(rank, channel): connection} when all have come. PeerError at the deadline, which was `timeout` seconds
        away when the meeting began; what has come by then is closed.
        """
        found: dict[tuple[int, int], socket.socket] = {}
        refused = ""
        try:
            while len(found) < (self.launch.world_size - 1) * self.channels:
                try:
                    result = self.results.get(timeout=max(0.0, self.deadline - time.monotonic()))
                except queue.Empty:
                    raise PeerError(self._missing(found, timeout, refused)) from None
                if isinstance(result, str):
                    refused = result
                else:
                    found[result[0]] = result[1]
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        return found

    def close(self) -> None:
        """Accept nobody else, and remove the meeting file."""
        self.closing.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self.socket.close()
        if self.launch.file:
            with contextlib.suppress(OSError):
                os.unlink(self.launch.file)

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                connection, address = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._shake, args=(connection, address), daemon=True).start()

    def _shake(self, connection: socket.socket, address: Any) -> None:
        """The handshake with one connection; its result goes to `results`."""
        try:
            connection.settimeout(max(0.1, min(_HANDSHAKE, self.deadline - time.monotonic())))
            who = _greet(self.launch, self.token, connection, self.taken, self.lock, self.channels)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.results.put((who, connection))
        except Refused as error:
            connection.close()
            self.results.put(f"{address[0]} was refused: {error}")
        except NO_GREETING:
            connection.close()  # a stranger, or a rank that ended: it is missed, or comes again

    def _missing(self, found: dict[tuple[int, int], socket.socket], timeout: float, refused: str) -> str:
        """Which ranks have not come, and who was refused last, as a sentence."""
        size = self.launch.world_size
        missing = [rank for rank in range(1, size) if (rank, self.channels - 1) not in found]
        text = f"distributed: {ranks_text(missing)} of {size} did not come within {timeout:g} s"
        return f"{text}; {refused}" if refused else text


def ranks_text(ranks: list[int]) -> str:
    """ "rank 1" or "ranks 1, 2"."""
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def _bind(launch: Launch) -> socket.socket:
    if launch.file:
        return socket.create_server(("127.0.0.1", 0), backlog=launch.world_size + 16)
    last: OSError | None = None
    for port in launch.ports:
        try:
            family = socket.AF_INET6 if ":" in launch.host else socket.AF_INET
            local = launch.host in ("localhost", "::1") or launch.host.startswith("127.")
            return socket.create_server(
                (launch.host if local else "", port), family=family, backlog=launch.world_size + 16
            )
        except OSError as error:
            last = error
    ports = str(launch.ports[0]) if len(launch.ports) == 1 else f"{launch.ports[0]} to {launch.ports[-1]}"
    why = os.strerror(last.errno) if last and last.errno else last
    raise ConfigError(f"distributed: rank 0 must listen on {launch.host} port {ports}, got: {why}") from None


def _publish(path: str, port: int, token: str) -> None:
    """Write the meeting file, readable for this user alone; a file that an earlier job has left is replaced."""
    temporary = f"{path}.{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump({"port": port, "token": token}, file)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"distributed: {path}, where all ranks meet, cannot be written: {reason(error)}") from None


def _greet(
    launch: Launch,
    token: str,
    connection: socket.socket,
    taken: set[tuple[int, int]],
    lock: Any,
    channels: int = 1,
) -> tuple[int, int]:
    """The handshake of rank 0 with one connection: rank and channel. Refused for one that must not join."""
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(MAGIC + mine)
    hello = receive(connection, _LONGEST_HELLO)
    mac = receive(connection, 64)
    who = json.loads(hello)
    if not isinstance(who, dict) or not isinstance(who.get("rank"), int) or not isinstance(who.get("channel"), int):
        raise ValueError("no greeting of a rank")

    def refuse(text: str, final: bool) -> Refused:
        send(connection, json.dumps({"refused": text, "final": final}).encode())
        return Refused(text, final)

    if who.get("run") != launch.run_id:
        raise refuse(f"rank 0 belongs to another run, {shown(launch.run_id)}", False)
    if not hmac.compare_digest(mac, _mac(token, mine + hello)):
        raise refuse(f"rank {who['rank']} has another token than rank 0", True)
    if who.get("restart") != launch.restart:
        raise refuse(f"rank 0 belongs to start {launch.restart} of the run, got start {who.get('restart')}", False)
    if who.get("world") != launch.world_size:
        raise refuse(f"the world size is {launch.world_size} on rank 0, got {who.get('world')}", True)
    place: tuple[int, int] = who["rank"], who["channel"]
    with lock:
        if place in taken or not 0 < who["rank"] < launch.world_size or place[1] not in range(channels):
            raise refuse(f"rank {who['rank']} is there already", True)
        taken.add(place)
    try:
        theirs = bytes.fromhex(str(who.get("nonce")))
        send(connection, json.dumps({"welcome": _mac(token, theirs + mine).hex()}).encode())
    except BaseException:
        taken.discard(place)  # it has ended; its next start may come
        raise
    return place


# ---- the others ------------------------------------------------------------------------------------------------------


def _connect(launch: Launch, deadline: float, timeout: float, channel: int, found_at: int) -> socket.socket:
    """found_at: the port to be tried first; strangers at others cost time."""
    refused: Refused | None = None
    greeting = _GREETING
    while True:
        host, ports, token = launch.host, launch.ports, launch.token
        if launch.file:
            host, ports, token = _read_meeting(launch.file)
        for port in sorted(ports, key=lambda port: port != found_at):
            try:
                return _join(launch, token, host, port, deadline, greeting, channel)
            except Refused as error:
                refused = error
                if error.final:
                    raise ConfigError(f"distributed: rank {launch.rank} was refused: {error}") from None
            except NO_GREETING:
                pass  # not there yet, or a stranger
        if time.monotonic() >= deadline:
            where = launch.file or f"{launch.host} port {', '.join(map(str, launch.ports))}"
            heard = f"; it said: {refused}" if refused else ""
            raise PeerError(
                f"distributed: rank 0 was not found at {where} within {timeout:g} s by rank {launch.rank}{heard}"
            )
        greeting = min(2 * greeting, _HANDSHAKE)
        time.sleep(_PAUSE)


def _read_meeting(path: str) -> tuple[str, tuple[int, ...], str]:
    """Host, ports and token of a meeting file; no ports while there is none. ConfigError for one of another user."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise ConfigError(f"distributed: {path} must belong to this user alone, got mode {status.st_mode:o}")
            values = json.loads(file.read(4096))
        return "127.0.0.1", (int(values["port"]),), str(values["token"])
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return "127.0.0.1", (), ""


def _join(
    launch: Launch, token: str, host: str, port: int, deadline: float, greeting: float, channel: int = 0
) -> socket.socket:
    wait = max(0.1, min(greeting, deadline - time.monotonic()))
    connection = socket.create_connection((host, port), timeout=wait)
    try:
        if connection.getsockname() == connection.getpeername():  # nobody listens: the system joined it to itself
            raise ConnectionError("connected to itself")
        theirs = receive_exactly(connection, len(MAGIC) + _NONCE)
        if theirs[: len(MAGIC)] != MAGIC:
            raise ValueError("no rank 0")
        # It is one. Whoever left now would be taken for there: rank 0 answers, or the deadline comes.
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        mine = secrets.token_bytes(_NONCE)
        who = {
            "rank": launch.rank,
            "channel": channel,
            "world": launch.world_size,
            "run": launch.run_id,
            "restart": launch.restart,
            "nonce": mine.hex(),
        }
        hello = json.dumps(who).encode()
        send(connection, hello)
        send(connection, _mac(token, bytes(theirs[len(MAGIC) :]) + hello))
        answer = json.loads(receive(connection, _LONGEST_HELLO))
        if not isinstance(answer, dict) or not {"refused", "welcome"} & answer.keys():
            raise ValueError("no answer of rank 0")
        if "refused" in answer:
            raise Refused(str(answer["refused"]), bool(answer.get("final")))
        proof = _mac(token, mine + bytes(theirs[len(MAGIC) :])).hex()
        if not hmac.compare_digest(ascii(answer["welcome"]), ascii(proof)):
            raise Refused("rank 0 does not know the token", True)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    except BaseException:
        connection.close()
        raise


def _mac(token: str, data: bytes) -> bytes:
    return hmac.digest(token.encode(), data, "sha256")


# ---- bytes with their length in front --------------------------------------------------------------------------------


def send(connection: socket.socket, data: bytes) -> None:
    """Send the length, then the bytes."""
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket, most: int) -> bytes:
    """What `send` sent; ValueError for more than `most` bytes, EOFError when the other end has closed."""
    size = LENGTH.unpack(receive_exactly(connection, LENGTH.size))[0]
    if size > most:
        raise ValueError(f"a message of {size} bytes")
    return bytes(receive_exactly(connection, size))


def receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """The next `size` bytes. EOFError when the other end closes before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection has ended")
        view = view[count:]
    return data
