"""A run's work directory: whose it is, whether that run still lives, and the manifest of its chunks.

It lies under ``_pipemax`` in the output's directory, which readers and VACUUM pass over, or under ``--work-dir``.
Nothing in it says what is done; only the output table does. A run that finds another one alive there refuses to
start, for people's sake: two jobs on one table would compute the same rows. That they could not *commit* them twice
is the table's own doing (``tables.RUN_PROPERTY``).
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pipemax.wire import ProcessIdentity
from pipemax_spark.chunks import Chunk
from pipemax_spark.errors import JobError
from pipemax_spark.hadoop import HadoopFiles

log = logging.getLogger(__name__)

_CHECKPOINTS = "checkpoints"
"""Of streams: no run's, and kept."""
_ENDED = "ended"
"""Marks the directory of a run that failed in order, so that nobody waits to see whether it lives."""
_HEARTBEAT_S = 10.0
_DEAD_AFTER_S = 35.0
"""A run whose heartbeat does not change for so long is dead. Only the waiting job's own clock counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftSpool:
    """What a dead run had completed, some of it perhaps not committed."""

    run_id: str
    spec_hash: str
    directory: str


class ChunkSpools:
    """Where the tasks of each chunk of a run keep completions until the chunk is committed."""

    def __init__(self, files: HadoopFiles, root: str) -> None:
        self._files = files
        self._root = root

    def directory(self, chunk: int) -> str:
        return f"{self._root}/chunk-{chunk}"

    def delete(self, chunk: int) -> None:
        """After the chunk's commit."""
        self._files.delete(self.directory(chunk))


class WorkDirectory:
    """Claimed from entry to exit, then removed; after a failure, all but the spool, which the next run commits."""

    def __init__(
        self,
        files: HadoopFiles,
        root: str,
        *,
        run_id: str,
        say: Callable[[str], None],
        dead_after_s: float = _DEAD_AFTER_S,
    ) -> None:
        self._files = files
        self._root = root.rstrip("/")
        self._run_id = run_id
        self._say = say
        self._dead_after_s = dead_after_s
        self.left_spools: list[LeftSpool] = []
        """Of dead runs; ``drop_left_spools`` removes them."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pipemax-work-dir", daemon=True)

    @property
    def path(self) -> str:
        return f"{self._root}/{self._run_id}"

    @property
    def checkpoints_path(self) -> str:
        """Of the streams that read into this output, for all runs."""
        return f"{self._root}/{_CHECKPOINTS}"

    def rows_path(self, batch: int) -> str:
        """Of the run's first, second, … batch of rows."""
        return f"{self._rows_path}/{batch}"

    @property
    def _rows_path(self) -> str:
        return f"{self.path}/rows"

    @property
    def spool_path(self) -> str:
        return f"{self.path}/spool"

    def __enter__(self) -> Self:
        """``JobError`` while another run lives here."""
        self._files.write_text(f"{self.path}/owner.json", json.dumps(_this_process()))
        self._files.write_text(f"{self.path}/heartbeat", "")
        self._thread.start()
        try:
            for other in self._files.list(self._root):
                if other.is_directory and other.name not in (self._run_id, _CHECKPOINTS):
                    self._take_over(other.path, other.name)
        except BaseException:
            self.__exit__(None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        if kind is not None and self._files.list(self.spool_path):
            self._files.delete(self._rows_path)
            self._write_if_possible(_ENDED, "")
            return
        self._files.delete(self.path)
        self._files.delete_if_empty(self._root)

    def chunk_spools(self) -> ChunkSpools:
        """For this run's chunks."""
        return ChunkSpools(self._files, self.spool_path)

    def delete_rows(self, batch: int) -> None:
        self._files.delete(self.rows_path(batch))

    def drop_left_spools(self) -> None:
        """What they held is committed now, or of no use."""
        for spool in self.left_spools:
            self._files.delete(f"{self._root}/{spool.run_id}")
        self.left_spools.clear()

    def write_manifest(self, facts: Mapping[str, Any]) -> None:
        """Once, before the first chunk: by it the next run knows what it finds in the spool."""
        manifest = {"run_id": self._run_id, **facts}
        self._files.write_text(f"{self.path}/manifest.json", json.dumps(manifest, indent=1))

    def note_chunk(self, chunk: Chunk) -> None:
        """Before it starts: what its rows are stands here from then on, for people."""
        self._write_if_possible(f"chunks/{chunk.number}.json", json.dumps(asdict(chunk)))

    def _take_over(self, path: str, run_id: str) -> None:
        if self._is_alive(path, run_id):
            raise JobError(
                f"another job, run {run_id}, is writing to this output now ({self._owner_text(path)}); wait for its "
                "end, or stop it"
            )
        spec_hash = self._spec_hash(path)
        if spec_hash is not None and self._files.list(f"{path}/spool"):
            self.left_spools.append(LeftSpool(run_id=run_id, spec_hash=spec_hash, directory=f"{path}/spool"))
            return
        log.info("removing the work directory of run %s, which is dead", run_id)
        self._files.delete(path)

    def _spec_hash(self, path: str) -> str | None:
        """Of the run's manifest; None where it was killed before it had written one."""
        try:
            return str(json.loads(self._files.read_text(f"{path}/manifest.json"))["spec_hash"])
        except (FileNotFoundError, ValueError, KeyError):
            return None

    def _is_alive(self, path: str, run_id: str) -> bool:
        if self._files.exists(f"{path}/{_ENDED}"):
            return False
        owner = self._owner(path)
        here = _this_process()
        if owner is not None and (owner["host"], owner["boot_id"]) == (here["host"], here["boot_id"]):
            return ProcessIdentity(pid=owner["pid"], start_ticks=owner["start_ticks"]).is_running()
        beat = self._files.modified_ms(f"{path}/heartbeat")
        self._say(
            f"run {run_id} left a work directory ({self._owner_text(path)}); waiting {self._dead_after_s:.0f} s to "
            "see whether it still lives"
        )
        deadline_s = time.monotonic() + self._dead_after_s
        while time.monotonic() < deadline_s:
            time.sleep(min(1.0, self._dead_after_s / 4))
            if self._files.modified_ms(f"{path}/heartbeat") != beat:
                # It beats, or has just removed its directory at its end: in both cases it lived.
                return self._files.exists(path)
        return False

    def _owner(self, path: str) -> dict[str, Any] | None:
        try:
            owner = json.loads(self._files.read_text(f"{path}/owner.json"))
        except (FileNotFoundError, ValueError):
            return None  # killed before it had written it down, or something that is no run
        return owner if isinstance(owner, dict) else None

    def _owner_text(self, path: str) -> str:
        owner = self._owner(path)
        return f"process {owner['pid']} on {owner['host']}" if owner else f"owner unknown, {path}"

    def _beat(self) -> None:
        while not self._stopped.wait(_HEARTBEAT_S):
            self._write_if_possible("heartbeat", str(time.time()))

    def _write_if_possible(self, name: str, text: str) -> None:
        try:
            self._files.write_text(f"{self.path}/{name}", text)
        # Storage that is full, or away for a moment, must not end the job: the table is what counts.
        except Exception:
            log.warning("%s/%s could not be written", self.path, name, exc_info=True)


def _this_process() -> dict[str, Any]:
    identity = ProcessIdentity.own()
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(),
        "boot_id": boot_id.read_text().strip() if boot_id.exists() else "",
        "user": os.getuid(),
        **asdict(identity),
    }
