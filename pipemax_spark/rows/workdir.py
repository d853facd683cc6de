"""Manage a run's work directory: its owner, whether that run is still running, and the manifest of its chunks.

Everything that PipeMax writes for one output table is in ``<work_dir>/pipemax/<table id>/``, by default in
``_pipemax/<table id>/`` under the output's own directory, which readers and VACUUM ignore. Each run has its own
directory there, and in it a marker, ``owner.json``, that names the table, the run and the process. Only a directory
whose marker names this table and the directory's own run is ever deleted, taken over or waited for; everything else
there belongs to others. When a directory is deleted, its marker goes last.

A run that dies or fails leaves its recorded rows and its spool, the completions that were not committed. The next run
on the table uses them, and deletes the directory once none of its rows is left.

Nothing in a work directory says which rows are done: only the output table does. A run that finds another run alive
there refuses to start, because two jobs on one table would compute the same rows. The table itself ensures that they
could not both *commit* them (``fence``).
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pipemax.wire import ProcessIdentity, pid_namespace
from pipemax_spark.errors import JobError, OtherRunError
from pipemax_spark.rows.chunks import Chunk
from pipemax_spark.spark.session import is_connect
from pipemax_spark.storage.executor_files import Files, spool_fault_of
from pipemax_spark.storage.hadoop import check_storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_KIND = "pipemax run"
"""The kind that our markers name."""
_MARKER = "owner.json"
CHECKPOINTS = "checkpoints"
"""The directory of the streams' checkpoints, which belongs to no run and is kept."""
_SPOOL = "spool"
_CHUNKS = "chunks"
_MANIFEST = "manifest.json"
_ENDED = "ended"
"""Marks the directory of a run that is known to be dead, so that no other run waits to see whether it is still
running."""
_STOP = "stop"
"""Tells a run to stop; it names the run that takes over."""
_HEARTBEAT = "heartbeat"
_HEARTBEAT_S = 10.0
_STOPS_WITHIN_S = 120.0
"""How long a run that takes over waits for the other one to stop: a heartbeat, and the end of its Spark jobs."""
_DEAD_AFTER_S = 35.0
"""A run whose heartbeat does not change for this long is dead. Only the waiting job's own clock counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftRun:
    """A dead run's remains: its manifest and possibly completions, some of which may not be committed."""

    run_id: str
    path: str
    manifest: Mapping[str, Any]
    has_spool: bool

    @property
    def spec_hash(self) -> str:
        return str(self.manifest["spec_hash"])

    @property
    def spool_path(self) -> str:
        return f"{self.path}/{_SPOOL}"


class WorkDirectory:
    """A run's directory: claimed from entry to exit, then removed.

    After a failure, the recorded rows and the spool stay for the next run.
    """

    def __init__(
        self,
        files: Files,
        base: str,
        *,
        table_id: str,
        run_id: str,
        say: Callable[[str], None],
        takes_over: bool = False,
        dead_after_s: float = _DEAD_AFTER_S,
        heartbeat_s: float = _HEARTBEAT_S,
        stops_within_s: float = _STOPS_WITHIN_S,
    ) -> None:
        """Prepare the directory in ``base``, PipeMax's own directory for any number of tables: see ``work_base``.

        With ``takes_over``, a run that is alive there is told to stop.
        """
        self._files = files
        self._base = base.rstrip("/")
        self._root = f"{self._base}/{table_id}"
        self._table_id = table_id
        self._run_id = run_id
        self._say = say
        self._takes_over = takes_over
        self._dead_after_s = dead_after_s
        self._heartbeat_s = heartbeat_s
        self._stops_within_s = stops_within_s
        self._stop_lock = threading.Lock()
        self._told_to_stop_by: str | None = None
        self._on_stop: Callable[[str], None] = lambda by: None
        self.left_runs: list[LeftRun] = []
        """The dead runs of the table; ``drop_left_runs`` removes what they left."""
        self._has_rows_to_do = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pipemax-work-dir", daemon=True)

    @property
    def path(self) -> str:
        return f"{self._root}/{self._run_id}"

    @property
    def checkpoints_path(self) -> str:
        """The directory of the positions up to which incremental runs have read their inputs, for all runs."""
        return f"{self._root}/{CHECKPOINTS}"

    def rows_path(self, batch: int, kind: str) -> str:
        """Return a directory for rows of this kind of the run's batch ``batch``, counted from 0."""
        return f"{self._rows_path}/{batch}/{kind}"

    @property
    def _rows_path(self) -> str:
        return f"{self.path}/rows"

    @property
    def outcomes_path(self) -> str:
        """The directory for annotated rows that are about to be merged into the table."""
        return f"{self.path}/outcomes"

    @property
    def spool_path(self) -> str:
        return f"{self.path}/{_SPOOL}"

    @property
    def heartbeat_path(self) -> str:
        """The file that changes while the run lives."""
        return f"{self.path}/{_HEARTBEAT}"

    def __enter__(self) -> Self:
        """Claim the directory. Raise ``OtherRunError`` while another run lives here, unless this one takes over."""
        marker = {"kind": _KIND, "table_id": self._table_id, "run_id": self._run_id, **_this_process()}
        self._files.write_text(f"{self.path}/{_MARKER}", json.dumps(marker))
        self._files.write_text(self.heartbeat_path, "")
        self._thread.start()
        try:
            for other in self._files.list(self._root):
                if not other.is_directory or other.name in (self._run_id, CHECKPOINTS):
                    continue
                owner = self._owner(other.name)
                if owner is None:
                    log.info("%s has no marker of a run on this table, so it is kept", other.path)
                    continue
                self._take_over(other.name, owner)
        except BaseException:
            self.__exit__(None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        has_spool = kind is not None and bool(self._files.list(self.spool_path))
        if has_spool or (kind is not None and self._has_rows_to_do):
            if not self._has_rows_to_do:
                self._files.delete(self._rows_path)
            self._write_if_possible(_ENDED, "")
            return
        self._delete_run(self._run_id)
        for directory in (self._root, self._base):
            self._files.delete_if_empty(directory)

    def when_told_to_stop(self, on_stop: Callable[[str], None]) -> None:
        """Call ``on_stop`` with the id of the run that takes over, once, if one does or has done so. On any thread."""
        with self._stop_lock:
            self._on_stop = on_stop
            by = self._told_to_stop_by
        if by is not None:
            on_stop(by)

    def chunk_spool_path(self, chunk: int) -> str:
        """Return the directory in which the chunk's tasks keep completions until the chunk is committed."""
        return f"{self.spool_path}/chunk-{chunk}"

    def delete_chunk_spool(self, chunk: int) -> None:
        self._files.delete(self.chunk_spool_path(chunk))

    def delete_rows(self, batch: int) -> None:
        """Delete the recorded rows of a batch whose rows are all done."""
        self._has_rows_to_do = False
        self._files.delete(f"{self._rows_path}/{batch}")

    def drop_left_spools(self) -> None:
        """Delete the spools of dead runs: their completions are committed now, or of no use."""
        for run in self.left_runs:
            self._files.delete(run.spool_path)
        self.left_runs = [replace(run, has_spool=False) for run in self.left_runs]

    def drop_left_runs(self) -> None:
        """Delete the directories of dead runs, because none of their rows is left."""
        for run in self.left_runs:
            self._delete_run(run.run_id)
        self.left_runs.clear()

    def write_manifest(self, facts: Mapping[str, Any]) -> None:
        """Write the manifest, once, before the first chunk: it tells the next run what this one leaves.

        It has the ``spec_hash``, and as ``rows`` the facts with which the next run can use the recorded rows, or None
        if it must not.
        """
        manifest = {"run_id": self._run_id, **facts}
        self._files.write_text(f"{self.path}/{_MANIFEST}", json.dumps(manifest, indent=1))
        self._has_rows_to_do = facts.get("rows") is not None

    def note_chunk(self, chunk: Chunk) -> None:
        """Record a chunk before it starts: the next run, and people, can look up its rows here."""
        self._write_if_possible(f"{_CHUNKS}/{chunk.number}.json", json.dumps(asdict(chunk)))

    def noted_chunks(self, run: LeftRun, *, besides: Set[int]) -> list[Chunk]:
        """Return the chunks that a dead run had started, as far as it recorded them, but not those ``besides``."""
        chunks = []
        for file in self._files.list(f"{run.path}/{_CHUNKS}"):
            number, _, ending = file.name.partition(".")
            if ending == "json" and number.isdecimal() and int(number) not in besides:
                with contextlib.suppress(ValueError, TypeError):  # torn when the run died
                    chunks.append(Chunk(**json.loads(self._files.read_text(file.path))))
        return chunks

    def _take_over(self, run_id: str, owner: Mapping[str, Any]) -> None:
        path = f"{self._root}/{run_id}"
        if self._is_alive(path, run_id, owner):
            if not self._takes_over:
                raise OtherRunError(
                    f"another job, run {run_id}, is writing to this output now ({_describe(owner)}); wait until it "
                    "ends, stop it, or give --if-running skip or take-over"
                )
            if not self._has_stopped(path, run_id, owner):
                self._say(
                    f"run {run_id} does not stop; this run goes on without it, and the table refuses what that one "
                    "commits from now on"
                )
                return
            if not self._files.exists(f"{path}/{_MARKER}"):
                return
        manifest = self._manifest(path)
        has_spool = bool(self._files.list(f"{path}/{_SPOOL}"))
        if manifest is not None and (has_spool or manifest.get("rows") is not None):
            run = LeftRun(run_id=run_id, path=path, manifest=manifest, has_spool=has_spool)
            self.left_runs.append(run)
            # If this run dies too, the next one need not wait for the same run again.
            self._files.write_text(f"{path}/{_ENDED}", "")
            return
        log.info("removing the work directory of run %s, which is dead", run_id)
        self._delete_run(run_id)

    def _has_stopped(self, path: str, run_id: str, owner: Mapping[str, Any]) -> bool:
        """Tell the run to stop, and wait until it has; return False if it does not."""
        self._say(f"run {run_id} is writing to this output ({_describe(owner)}); it is told to stop")
        self._files.write_text(f"{path}/{_STOP}", self._run_id)
        deadline_s = time.monotonic() + self._stops_within_s
        while time.monotonic() < deadline_s:
            if not self._files.exists(f"{path}/{_MARKER}"):
                # It ended by itself, perhaps before it was told, and then only this file is in its directory.
                self._files.delete(f"{path}/{_STOP}")
                self._files.delete_if_empty(path)
                return True
            if self._files.exists(f"{path}/{_ENDED}") or _has_died(owner):
                return True
            time.sleep(min(0.5, self._stops_within_s / 4))
        return False

    def _delete_run(self, run_id: str) -> None:
        """Delete a run's directory, its marker last; keep a directory without a marker of that run."""
        path = f"{self._root}/{run_id}"
        if self._owner(run_id) is None:
            log.warning(
                "%s is not deleted, because its marker is gone or is not that of run %s", path, run_id
            )
            return
        for entry in self._files.list(path):
            if entry.name != _MARKER:
                self._files.delete(entry.path)
        self._files.delete(path)

    def _manifest(self, path: str) -> Mapping[str, Any] | None:
        """Return the run's manifest; None if the run was killed before it had written one."""
        try:
            manifest = json.loads(self._files.read_text(f"{path}/{_MANIFEST}"))
        except (FileNotFoundError, ValueError):
            return None
        return manifest if isinstance(manifest, dict) and "spec_hash" in manifest else None

    def _is_alive(self, path: str, run_id: str, owner: Mapping[str, Any]) -> bool:
        if self._files.exists(f"{path}/{_ENDED}"):
            return False
        if _sees_processes_of(owner):
            return not _has_died(owner)
        beat = self._files.modified_ms(f"{path}/{_HEARTBEAT}")
        self._say(
            f"run {run_id} left a work directory ({_describe(owner)}); waiting {self._dead_after_s:.0f} s to see "
            "whether it is still running"
        )
        deadline_s = time.monotonic() + self._dead_after_s
        while time.monotonic() < deadline_s:
            time.sleep(min(1.0, self._dead_after_s / 4))
            if self._files.modified_ms(f"{path}/{_HEARTBEAT}") != beat:
                # Its heart beats, or it has just ended and removed its directory: in both cases it was alive.
                return self._files.exists(path)
        return False

    def _owner(self, run_id: str) -> dict[str, Any] | None:
        """Return the marker of this run on this table; None if there is none, or one of another run or table."""
        try:
            marker = json.loads(self._files.read_text(f"{self._root}/{run_id}/{_MARKER}"))
        except (FileNotFoundError, ValueError):
            return None
        expected = {"kind": _KIND, "table_id": self._table_id, "run_id": run_id}
        if not isinstance(marker, dict) or not expected.items() <= marker.items():
            return None
        return marker

    def _beat(self) -> None:
        while not self._stopped.wait(self._heartbeat_s):
            try:
                is_ours = self._owner(self._run_id) is not None
                self._look_whether_to_stop()
            except Exception:  # the storage is unavailable for a moment; the next heartbeat will show
                log.warning("%s could not be read", self.path, exc_info=True)
                continue
            if not is_ours:
                log.warning("the work directory %s is gone: another run has taken over", self.path)
                return
            self._write_if_possible(_HEARTBEAT, str(time.time()))

    def _look_whether_to_stop(self) -> None:
        path = f"{self.path}/{_STOP}"
        if self._told_to_stop_by is not None or not self._files.exists(path):
            return
        by = self._files.read_text(path)
        if not by:
            return  # it is being written: the next heartbeat reads it
        with self._stop_lock:
            self._told_to_stop_by = by
            on_stop = self._on_stop
        log.warning("run %s takes over and tells this run to stop", by)
        on_stop(by)

    def _write_if_possible(self, name: str, text: str) -> None:
        try:
            self._files.write_text(f"{self.path}/{name}", text)
        # Storage that is full, or unavailable for a moment, must not end the job: the table is what counts.
        except Exception:
            log.warning("%s/%s could not be written", self.path, name, exc_info=True)


def work_base(work_dir: str | None, table_location: str) -> str:
    """Return PipeMax's own directory in the user's ``work_dir`` or, without one, under the table's directory."""
    return f"{table_location.rstrip('/')}/_pipemax" if work_dir is None else f"{work_dir.rstrip('/')}/pipemax"


def usable_work_base(spark: "SparkSession", work_dir: str | None, table_location: str) -> str:
    """Return ``work_base``. Raise ``JobError`` if it is on storage that the session, or its executors, do not know."""
    base = work_base(work_dir, table_location)
    if is_connect(spark):
        if fault := spool_fault_of(spark, base):
            raise JobError(f"work-dir {base!r} cannot be written ({fault}); name one that all executors see")
        return base
    try:
        check_storage(base, spark, option="work-dir")
    except JobError as error:
        if work_dir is not None:
            raise
        # A catalog may have Iceberg's files on storage of which Spark itself knows nothing.
        raise JobError(
            f"{error.args[0]}; without --work-dir it lies in the output's directory: name another by --work-dir"
        ) from error
    return base


def _this_process() -> dict[str, Any]:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(),
        "boot_id": boot_id.read_text().strip() if boot_id.exists() else None,
        "pid_namespace": pid_namespace(),
        "user": os.getuid(),
        **asdict(ProcessIdentity.of_this_process()),
    }


def _has_died(owner: Mapping[str, Any]) -> bool:
    """Tell whether the owner is a process that this one would see, and it is gone."""
    if not _sees_processes_of(owner):
        return False
    return not ProcessIdentity(pid=owner["pid"], start_ticks=owner["start_ticks"]).is_running()


def _sees_processes_of(owner: Mapping[str, Any]) -> bool:
    """Tell whether the owner's process id means the same process here: same boot of the machine, same container."""
    here = _this_process()
    return all(
        here[name] is not None and owner.get(name) == here[name] for name in ("boot_id", "pid_namespace")
    )


def _describe(owner: Mapping[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}"
