"""Known advisories of dependencies: what the command says and ends with, for each answer of a service of the test's own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata

import pytest

from tools import advisories

pytestmark = pytest.mark.on_cpu
NUMPY = metadata.version("numpy")
FOUND = {"id": "PYSEC-1", "fixed_in": ["9.9", "10.1"], "summary": "a hole", "withdrawn": None}


@contextlib.contextmanager
def service(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """(its address, the paths that were asked for). answer: from a package to a status and a text."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, text = answer(self.path.split("/")[2])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/pypi", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def said(monkeypatch, capsys, answer: Callable[[str], tuple[int, bytes]]) -> tuple[int, dict[str, str], list[str]]:
    """(exit status, what the lines say of each package, the paths that were asked for)."""
    monkeypatch.setenv("no_proxy", "*")
    with service(answer) as (address, asked):
        status = advisories.main(["--service", address])
    lines = capsys.readouterr().out.splitlines()
    return status, {line.partition(":")[0].partition(" ")[0]: line.partition(": ")[2] for line in lines}, asked


def body(*found: dict) -> bytes:
    return json.dumps({"info": {}, "vulnerabilities": found}).encode()


def test_what_pyproject_names() -> None:
    names = advisories.named()
    assert {"numpy", "tqdm", "setuptools", "scipy-openblas32", "tokenizers", "torch", "nvidia-cublas"} <= set(names)
    assert "xtrain" not in names and len(names) == len(set(names))


def test_no_advisory(monkeypatch, capsys) -> None:
    withdrawn = {**FOUND, "withdrawn": "2024-01-01T00:00:00Z"}
    status, lines, asked = said(monkeypatch, capsys, lambda name: (200, body(withdrawn) if name == "tqdm" else body()))
    assert status == 0 and set(lines) == set(advisories.named())
    assert lines["numpy"] == lines["tqdm"] == "no advisory" and f"/pypi/numpy/{NUMPY}/json" in asked
    assert set(lines.values()) == {"no advisory", "not installed, not asked for"} or all(
        text == "no advisory" for text in lines.values()
    )


def test_an_advisory_is_status_1(monkeypatch, capsys) -> None:
    unfixed = {"id": "GHSA-2\x1b[2J\n", "fixed_in": []}
    status, lines, _ = said(
        monkeypatch,
        capsys,
        lambda name: (200, body(FOUND, unfixed) if name == "numpy" else b"{" if name == "tqdm" else body()),
    )
    assert status == 1, "a broken answer after it hides no advisory"
    assert lines["numpy"] == r"PYSEC-1, fixed in 9.9, 10.1; GHSA-2\x1b[2J\n, fixed in none"


def test_a_version_that_is_not_known_there(monkeypatch, capsys) -> None:
    status, lines, _ = said(monkeypatch, capsys, lambda name: (404, b"") if name == "numpy" else (200, body()))
    assert (status, lines["numpy"]) == (0, "not known there") and "the" not in lines
    status, lines, _ = said(monkeypatch, capsys, lambda name: (404, b""))
    assert status == 0 and lines["the"].endswith(" knows none of these versions"), "a mirror of files alone"


def test_a_version_of_a_builder_is_asked_for_as_its_release(monkeypatch, capsys) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.11.0+cpu")
    status, lines, asked = said(monkeypatch, capsys, lambda name: (200, body()))
    assert status == 0 and "/pypi/torch/2.11.0/json" in asked


@pytest.mark.parametrize(
    "answer",
    [(500, b""), (200, b""), (200, b"<html>"), (200, b"[]"), (200, b"{}"), (200, b"\xff"), (200, b'{"vulnerabilities": 3}'),
     (200, b'{"vulnerabilities": [3]}'), (200, b'{"vulnerabilities": [{"id": 1, "fixed_in": [2]}]}'), (200, b"[" * 100_000)],
)  # fmt: skip
def test_a_broken_answer_is_status_2(monkeypatch, capsys, answer) -> None:
    status, lines, _ = said(monkeypatch, capsys, lambda name: answer if name == "numpy" else (200, body()))
    assert status == 2 and lines["numpy"].startswith("broken answer: ") and lines["tqdm"] == "no advisory"


@contextlib.contextmanager
def no_http(*words: bytes) -> Iterator[str]:
    """The address of a server that answers each connection with the next of these bytes, as they are."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for word in words:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(word)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/pypi"
        thread.join()


def test_what_is_no_http_is_a_broken_answer(monkeypatch, capsys) -> None:
    """No status line; a status that is no number; a chunk without its end."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(advisories, "named", lambda: ["numpy", "tqdm", "pytest"])
    cut = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"
    with no_http(b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 x\r\n\r\n", cut) as address:
        assert advisories.main(["--service", address]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2].partition(":")[0] for line in lines] == ["broken answer"] * 3, lines


def test_a_service_that_cannot_be_reached_is_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with service(lambda name: (200, body())) as (address, _):
        pass  # its port is closed
    monkeypatch.setattr(advisories, "named", lambda: ["numpy", "pytest"])  # installed wherever tests run
    assert advisories.main(["--service", address]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"the service cannot be reached: {address}: ")


def test_a_service_that_stops_answering_is_told(monkeypatch, capsys) -> None:
    """What was not asked for is not taken for free of advisories; an advisory that was found stays status 1."""
    monkeypatch.setenv("no_proxy", "*")
    real = advisories.ask

    def ask(service: str, name: str, version: str) -> list[str] | None:
        if name == "tqdm":
            raise TimeoutError("timed out")
        return real(service, name, version)

    monkeypatch.setattr(advisories, "named", lambda: ["numpy", "tqdm", "pytest", "setuptools"])
    monkeypatch.setattr(advisories, "ask", ask)
    for answer, status in (((200, body()), 2), ((404, b""), 2), ((500, b""), 2), ((200, body(FOUND)), 1)):
        with service(lambda name, answer=answer: answer) as (address, asked):
            assert advisories.main(["--service", address]) == status, answer
        first, last = capsys.readouterr().out.splitlines()
        assert first.startswith("numpy ") and len(asked) == 1
        assert last == f"stopped at tqdm; 2 not asked for: {address}: timed out"
    monkeypatch.setattr(advisories, "named", lambda: ["absent-here", "tqdm", "numpy"])
    found, lines, _ = said(monkeypatch, capsys, lambda name: (200, body()))
    assert found == 0 and set(lines) == {"absent-here", "the"}, "nothing was reached"
