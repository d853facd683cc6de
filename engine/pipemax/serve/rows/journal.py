"""Record which rows run in the engine and which are suspect, in a file that outlives the server.

A killed server cannot say what it ran, so it writes that down beforehand: one small append per submitted batch and one
per delivered batch. They are not synced, because what write(2) has taken survives the process (not the machine, whose
rows a new executor runs again). The successor replays the file; rows that still run at its end were running when the
engine died.

The file is a sequence of records: one byte (``Record``), four bytes of payload length, little-endian, and the payload.
The first is a ``STATE``. A record that a kill cut short ends the file. Rows are known by their keys of ``KEY_BYTES``.
"""

import contextlib
import logging
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path

from pipemax.serve.rows.result_cache import KEY_BYTES
from pipemax.serve.rows.suspects import Suspects

log = logging.getLogger(__name__)

COMPACT_BYTES = 4 * 2**20
"""The file is rewritten once it is larger than this and ten times as large as when it was last rewritten."""
_HEAD = struct.Struct("<BI")


class Record(IntEnum):
    """The kinds of record, which say what happened to the keys."""

    STATE = 1  # the Suspects, as JSON
    STARTED = 2  # about to be submitted to the engine
    ENDED = 3  # came out of the engine
    WITHDRAWN = 4  # aborted, or never taken by the engine
    CLEARED = 5  # suspect no more
    GOOD = 6  # no keys: a row has completed well
    JOB = 7  # no keys: a job's id, as text


class Journal:
    """The journal of one server at a time. The caller must not let calls overlap.

    If the file cannot be written (a full disk), it is removed, and deaths are attributed to no row.
    """

    def __init__(self, path: Path, *, compact_bytes: int = COMPACT_BYTES) -> None:
        self._path = path
        self._compact_bytes = compact_bytes
        self._fd: int | None = None
        self._size = self._size_when_new = 0
        self._running: Counter[bytes] = Counter()
        self.suspects = Suspects()
        self._replay()
        if self._running:
            log.warning("the last engine died with %d rows running", len(self._running))
            self.suspects.record_death(self._running)
            self._running.clear()
        self._write_anew()

    @property
    def running(self) -> Counter[bytes]:
        """The number of rows that the engine runs, by key. Read only."""
        return self._running

    def start(self, keys: list[bytes]) -> None:
        """Record that the engine is about to get these rows."""
        self._record(Record.STARTED, b"".join(keys))

    def end(self, keys: list[bytes], *, good: bool) -> None:
        """Record that the engine has delivered these rows, at least one of them well if ``good``."""
        self._record(Record.ENDED, b"".join(keys))
        if good and self.suspects.condemned_in_a_row:
            self._record(Record.GOOD, b"")

    def withdraw(self, keys: list[bytes]) -> None:
        """Record that the engine does not run these rows; nothing is learnt from them."""
        self._record(Record.WITHDRAWN, b"".join(keys))

    def clear(self, keys: Iterable[bytes]) -> None:
        """Clear these rows of suspicion: they will not come again, or no task waits for them."""
        self._record(Record.CLEARED, b"".join(keys))

    def join(self, job_id: str) -> None:
        """Record that a job sends rows, if there are suspects."""
        if self.suspects.groups and job_id not in self.suspects.jobs:
            self._record(Record.JOB, job_id.encode())

    def close(self) -> None:
        """Close the journal of a server that ends in order: no row that still runs is to blame for anything."""
        self._running.clear()
        if self.suspects == Suspects():
            self._path.unlink(missing_ok=True)
        else:
            self._write_anew()
        self._close_file()

    def _record(self, kind: Record, payload: bytes) -> None:
        self._apply(kind, payload)
        if self._fd is None:
            return
        self._append(_HEAD.pack(kind, len(payload)) + payload)
        if self._size > max(self._compact_bytes, 10 * self._size_when_new):
            self._write_anew()

    def _apply(self, kind: Record, payload: bytes) -> None:
        match kind:
            case Record.STATE:
                self.suspects = Suspects.from_json(payload)
                self._running.clear()
            case Record.STARTED:
                self._running.update(_split(payload))
            case Record.ENDED:
                keys = _split(payload)
                self._stop(keys)
                self.suspects.record_end(keys)
            case Record.WITHDRAWN:
                self._stop(_split(payload))
            case Record.CLEARED:
                self.suspects.clear(_split(payload))
            case Record.GOOD:
                self.suspects.record_good()
            case Record.JOB:
                self.suspects.record_job(payload.decode())

    def _stop(self, keys: list[bytes]) -> None:
        for key in keys:
            if self._running[key] <= 1:
                del self._running[key]
            else:
                self._running[key] -= 1

    def _replay(self) -> None:
        try:
            for kind, payload in _records(self._path.read_bytes()):
                self._apply(Record(kind), payload)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the journal %s cannot be read, no row is suspect: %r", self._path, error)
            self.suspects = Suspects()
            self._running.clear()

    def _write_anew(self) -> None:
        """Rewrite the file: the state and what runs, in place of the records that led there."""
        running = b"".join(self._running.elements())
        state = self.suspects.to_json()
        content = (
            _HEAD.pack(Record.STATE, len(state)) + state + _HEAD.pack(Record.STARTED, len(running)) + running
        )
        draft = self._path.with_suffix(".journal-draft")
        self._close_file()
        try:
            draft.write_bytes(content)
            draft.rename(self._path)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            self._size = self._size_when_new = len(content)
        except OSError as error:
            self._give_up(error)

    def _append(self, record: bytes) -> None:
        assert self._fd is not None
        try:
            written = os.write(self._fd, record)
            if written < len(record):
                raise OSError(f"only {written} of {len(record)} bytes could be written")
            self._size += written
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("no journal any more, deaths are attributed to no row: %s: %s", self._path, error)
        self._close_file()
        # A file that has missed records would accuse rows that have long ended.
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _records(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, payload) of each whole record."""
    at = 0
    while at + _HEAD.size <= len(content):
        kind, length = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        if at + length > len(content):
            return
        yield kind, content[at : at + length]
        at += length


def _split(payload: bytes) -> list[bytes]:
    return [payload[at : at + KEY_BYTES] for at in range(0, len(payload), KEY_BYTES)]
