"""Encoding documents in several processes, and keeping what an interrupted run has encoded."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile

import numpy as np

from ..errors import DataError, shown
from ..files import check_regular, make_folders, reason, write_file
from ..tokenizers import FileTokenizer, StoredFiles, Tokenizer
from .readers import Document
from .records import Encoded, Encoder, batches

MOST = 256  # processes
_KEY = "key.json"
_worker: Encoder | None = None  # of a process of the pool


def encode(
    documents: Iterable[Document], tokenizer: Tokenizer, field: str | None, processes: int, kept: Kept | None = None
) -> Iterator[list[Encoded]]:
    """The encoded documents, batch after batch, in order. The batches do not depend on the number of processes. kept:
    where encoded batches are kept, and looked for. Other processes leave Ctrl-C to this one, and end with it, also when
    it is killed.
    """
    numbered = enumerate(batches(documents))
    make = _here(tokenizer, field) if processes == 1 else _elsewhere(tokenizer, field, processes)
    with make as start:
        waiting: deque[tuple[int, Callable[[], list[Encoded]], bool]] = deque()
        for number, batch in numbered:
            known = kept.load(number) if kept is not None else None
            waiting.append(
                (number, start(batch), False) if known is None else (number, lambda found=known: found, True)
            )
            if len(waiting) > 2 * processes:
                yield _finish(waiting.popleft(), kept)
        while waiting:
            yield _finish(waiting.popleft(), kept)


def _finish(one: tuple[int, Callable[[], list[Encoded]], bool], kept: Kept | None) -> list[Encoded]:
    number, result, known = one
    try:
        found = result()
    except BrokenProcessPool:
        raise DataError("data: a process that encodes has ended: is there too little memory?") from None
    if kept is not None and not known:
        kept.store(number, found)
    return found


_Start = Callable[[list[Document]], Callable[[], list[Encoded]]]


@contextlib.contextmanager
def _here(tokenizer: Tokenizer, field: str | None) -> Iterator[_Start]:
    encoder = Encoder(tokenizer, field)

    def start(batch: list[Document]) -> Callable[[], list[Encoded]]:
        found = encoder.encode_batch(batch)  # now: a broken document is told before the next batch is read
        return lambda: found

    yield start


@contextlib.contextmanager
def _elsewhere(tokenizer: Tokenizer, field: str | None, processes: int) -> Iterator[_Start]:
    made = (tokenizer.name, tokenizer.files()) if isinstance(tokenizer, FileTokenizer) else tokenizer
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (made, field))
    try:

        def start(batch: list[Document]) -> Callable[[], list[Encoded]]:
            with _children_without_interrupts():  # the pool starts its processes as work comes
                future: Future[list[Encoded]] = pool.submit(_encode, batch)
            return future.result

        yield start
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _children_without_interrupts() -> Iterator[None]:
    """Processes that start inside never see Ctrl-C, which a terminal sends to all: each would print a traceback, also
    one that still imports. An interrupt that comes meanwhile is raised at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Waits for the end of the process that has started this one: a pool of a process that was killed waits for work
    for ever.
    """
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _begin(tokenizer: tuple[str, dict[str, bytes]] | Tokenizer, field: str | None) -> None:
    """In a process of the pool, once."""
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process has one thread
    if isinstance(tokenizer, tuple):
        name, files = tokenizer
        tokenizer = FileTokenizer(StoredFiles(Path(name).parent, files))
    _worker = Encoder(tokenizer, field)


def _encode(batch: list[Document]) -> list[Encoded]:
    assert _worker is not None
    return _worker.encode_batch(batch)


class Kept:
    """Encoded batches in a folder, of one work: of these files as they are now, this tokenizer and this field. Those of
    another work are removed.
    """

    def __init__(self, folder: Path, files: Iterable[str], tokenizer: Tokenizer, field: str | None) -> None:
        self._folder = folder
        self.found = 0  # batches that have been loaded
        digest = hashlib.sha256()
        for name, data in sorted(tokenizer.files().items()):
            digest.update(f"{name} {len(data)}\n".encode() + data)
        stats = [(os.path.abspath(file), os.stat(file)) for file in files]
        key = {
            "version": 2,  # of how documents are cut into batches, too
            "files": [[path, one.st_size, one.st_mtime_ns] for path, one in stats],
            "tokenizer": [type(tokenizer).__name__, digest.hexdigest()],
            "field": field,
        }
        try:
            make_folders(folder)
            if _read(folder / _KEY) != key:
                if any(name != _KEY and not name.endswith(".npz") for name in os.listdir(folder)):
                    raise DataError(f"data: {folder} must be a folder of kept batches, but it holds other files")
                shutil.rmtree(folder)
                make_folders(folder)
                write_file(folder / _KEY, lambda stream: stream.write(json.dumps(key).encode("ascii")))
        except OSError as error:
            raise DataError(f"data: {folder} cannot be written: {reason(error)}") from None

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.npz"

    def load(self, number: int) -> list[Encoded] | None:
        """A batch that was stored; None where there is none."""
        path = self._path(number)
        try:
            # O_NONBLOCK: a FIFO would wait for a writer.
            with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as stream:
                check_regular(os.fstat(stream.fileno()))
                tokens, learned, all_learned, counts, texts = _arrays(stream)
        except FileNotFoundError:
            return None
        except MemoryError:
            raise DataError(f"data: {path} does not fit into memory") from None
        except Exception as error:  # zipfile and NumPy raise errors of ten classes, which change with their versions
            # EINVAL: it is not a regular file, or a damaged place in it lies before its beginning.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise DataError(f"data: {path} cannot be read: {reason(error)}") from None
            text = shown(error) or type(error).__name__
            raise DataError(f"data: {path} is damaged, remove it: {text}") from None
        ends = np.cumsum(counts)[:-1]
        parts = zip(np.split(tokens, ends), np.split(learned, ends), all_learned, texts, strict=True)
        self.found += 1
        return (
            [Encoded(ids, None if every else mask, int(size)) for ids, mask, every, size in parts] if len(texts) else []
        )

    def store(self, number: int, batch: list[Encoded]) -> None:
        """Keep a batch: whole, or not at all."""
        ids = [one.tokens.astype(np.uint32, copy=False) for one in batch]
        masks = [np.ones(len(one.tokens), bool) if one.learned is None else one.learned for one in batch]
        content = io.BytesIO()
        values = (
            np.concatenate([np.empty(0, np.uint32), *ids]),
            np.concatenate([np.empty(0, bool), *masks]),
            np.array([one.learned is None for one in batch], bool),
            np.array([len(one.tokens) for one in batch], np.int64),
            np.array([one.text for one in batch], np.int64),
        )
        named: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
        np.savez(content, **named)
        try:
            write_file(self._path(number), lambda stream: stream.write(content.getvalue()))
        except OSError as error:
            raise DataError(f"data: {self._path(number)} cannot be written: {reason(error)}") from None

    def remove(self) -> None:
        """The work is done."""
        shutil.rmtree(self._folder, ignore_errors=True)


_FIELDS = {"tokens": np.uint32, "learned": np.bool_, "all_learned": np.bool_, "counts": np.int64, "texts": np.int64}


def _arrays(stream: BinaryIO) -> list[np.ndarray]:
    """The arrays of _FIELDS, which fit each other. Members are read whole, so that their checksums are compared."""
    found: list[np.ndarray] = []
    size = os.fstat(stream.fileno()).st_size
    with ZipFile(stream) as archive:
        for name, dtype in _FIELDS.items():
            member = archive.getinfo(f"{name}.npy")
            if member.file_size > size:
                raise ValueError(f"{name} is larger than its file")
            array = np.lib.format.read_array(io.BytesIO(archive.read(member)), allow_pickle=False)
            if array.ndim != 1 or array.dtype != dtype:
                raise ValueError(f"{name} must be {np.dtype(dtype)} of one dimension, got {array.dtype} {array.shape}")
            found.append(array)
    tokens, learned, all_learned, counts, texts = found
    if not len(counts) == len(all_learned) == len(texts):
        raise ValueError("its documents must have a count, a mask and a size each")
    if (counts < 0).any() or not sum(counts.tolist()) == len(tokens) == len(learned):
        raise ValueError("the counts must add up to the tokens and to their mask")
    return found


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
