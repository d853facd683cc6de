"""Find this executor's engine server, start it if none runs, and kill it if it hangs.

There is one server per executor, that is per JVM: the nearest ``java`` above this process. Without a JVM (plain Python,
tests), the executor is this process itself, or the process that ``PIPEMAX_EXECUTOR_PID`` names, which several processes
can share. A server's files are in ``/tmp/pipemax-UID``, named after a digest of the executor and ``engine_python``: the
socket, a record of the server's process, the lock under which the server is started, the server's journal of the rows
in its engine, and its log.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import flight

from pipemax.wire import ProcessIdentity, ServerAction, ServerStats, SessionErrorCode, pid_namespace
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.engine_environment import (
    address_space_limit_fault,
    engine_command,
    engine_environment,
)
from pipemax_spark.executor.resources import gpu_environment

log = logging.getLogger(__name__)

EXECUTOR_VARIABLE = "PIPEMAX_EXECUTOR_PID"
"""Names the process that bounds the server's life, instead of the JVM above this process."""
STREAM_ERRORS = (flight.FlightError, pa.ArrowException, OSError)
"""The exceptions that pyarrow raises when the other end of a stream is gone."""

_PROBE_TIMEOUT_S = 5.0
_HANG_S = 300.0
"""A server that exists but answers no probe for this long is killed. It is not killed earlier, because a server that
imports its engine's libraries from a cold disk does not answer either."""
_RETRY_S = 0.1
_STACKS_SIGNAL = signal.SIGUSR2
"""The server's side handles it: ``pipemax.node.lifetime``."""
_STACKS_S = 1.0
_OLD_LOG_S = 7 * 24 * 3600.0
_CHANNEL_OPTIONS = [
    # What the consumer has not taken must wait in the server, which counts it, not in gRPC's window.
    ("grpc.http2.lookahead_bytes", 256 * 1024),
    ("grpc.http2.bdp_probe", 0),
    # A channel of its own: a shared one remembers a dead server and backs off from its successor.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """The executor whose server this process uses."""

    process: ProcessIdentity
    daemon: ProcessIdentity
    """The Python process directly below it: Spark's daemon, or this process itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFiles:
    """The files of one executor's server."""

    socket: Path
    log: Path

    @property
    def record(self) -> Path:
        return self.socket.with_suffix(".json")

    @property
    def lock(self) -> Path:
        return self.socket.with_suffix(".lock")

    @property
    def location(self) -> str:
        return f"grpc+unix://{self.socket}"

    def log_tail(self, lines: int = 15) -> str:
        """Return the log's last lines, for an error message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 16_384))
                tail = file.read().decode(errors="replace").splitlines()[-lines:]
        except OSError as error:
            return f"(its log {self.log} cannot be read: {error})"
        return "\n".join([f"The last lines of its log {self.log}:", *(f"  {line}" for line in tail)])

    def recorded(self) -> ProcessIdentity | None:
        """Return the server that last recorded that it serves here, dead or alive."""
        record = self._read_record()
        return (
            None if record is None else ProcessIdentity(pid=record["pid"], start_ticks=record["start_ticks"])
        )

    def recorded_suspects(self) -> int | None:
        """Return how many rows may have killed an engine here, as the recorded server knew when it started.

        That server searches for the poison row among them. Return None if there is no record.
        """
        record = self._read_record()
        # A server of another version records no suspects, and its session will report the mismatch.
        return None if record is None else int(record.get("suspects", 0))

    def _read_record(self) -> dict[str, int] | None:
        try:
            record: dict[str, int] = json.loads(self.record.read_text())
            return record
        except FileNotFoundError:
            return None


def find_executor() -> Executor:
    """Find this process's executor, as the module's docstring says."""
    process = ProcessIdentity.of_this_process()
    named = os.environ.get(EXECUTOR_VARIABLE)
    if named is not None:
        return Executor(process=ProcessIdentity.of(int(named)), daemon=process)
    below = process
    for pid in _ancestors():
        if _is_java(pid):
            return Executor(process=ProcessIdentity.of(pid), daemon=below)
        below = ProcessIdentity.of(pid)
    return Executor(process=process, daemon=process)


def server_files(executor: Executor, engine_python: str | None, log_dir: str | None) -> ServerFiles:
    """Return the files of the executor's server, and make their directories."""
    directory = _servers_directory()
    process = executor.process
    key = f"{process}:{engine_python or sys.executable}"
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    logs = Path(log_dir) if log_dir else directory
    logs.mkdir(parents=True, exist_ok=True)
    return ServerFiles(socket=directory / f"{name}.sock", log=logs / f"pipemax-engine-{name}.log")


def files_of_all_servers(executor: Executor) -> list[ServerFiles]:
    """Return the files of each server that this executor has ever started, one for each ``engine_python``."""
    process = executor.process
    owner = [process.pid, process.start_ticks, pid_namespace()]
    locks = []
    for lock in sorted(_servers_directory().glob("*.lock")):
        # Another task may have just made the file, or remove it.
        with contextlib.suppress(FileNotFoundError, ValueError):
            if json.loads(lock.read_text()) == owner:
                # The server's own log may be elsewhere; nothing is read from it here.
                locks.append(ServerFiles(socket=lock.with_suffix(".sock"), log=lock.with_suffix(".log")))
    return locks


def connect(files: ServerFiles) -> flight.FlightClient:
    """Return a client of the server; only the first call shows whether the server runs."""
    return flight.FlightClient(files.location, generic_options=_CHANNEL_OPTIONS)


def ask_server(
    client: flight.FlightClient, action: ServerAction, *, timeout_s: float = _PROBE_TIMEOUT_S
) -> ServerStats:
    """Return the server's answer to an action. Raise one of ``STREAM_ERRORS`` if it does not answer."""
    (answer,) = client.do_action(flight.Action(action, b""), flight.FlightCallOptions(timeout=timeout_s))
    return ServerStats.from_bytes(answer.body.to_pybytes())


def ensure_server(
    files: ServerFiles,
    executor: Executor,
    engine_python: str | None,
    *,
    deadline_s: float,
    gpu_discovery_script: str | None = None,
) -> ProcessIdentity:
    """Return the server that runs now, started if there was none. ``deadline_s`` is on the monotonic clock."""
    identity = _serving(files)
    if identity is not None:
        return identity
    with _locked(files.lock, executor.process, deadline_s):
        identity = _wait_for_predecessor(files, deadline_s)
        if identity is not None:
            return identity
        gpus = gpu_environment(executor.process.pid, gpu_discovery_script)
        return _start(files, executor, engine_python, deadline_s, gpus)


def kill_server(identity: ProcessIdentity, reason: str) -> None:
    """Kill the server and its process group with SIGKILL, if it is still the same process.

    Their stacks are written to the server's log first.
    """
    if not identity.is_running():
        return
    log.warning("killing the engine server, pid %d: %s", identity.pid, reason)
    # The server leads its group. Processes that it started outside the group watch it and end by themselves.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(identity.pid, _STACKS_SIGNAL)
        time.sleep(_STACKS_S)
        os.killpg(identity.pid, signal.SIGKILL)


def _serving(files: ServerFiles) -> ProcessIdentity | None:
    """Return the recorded server if it runs and answers."""
    identity = files.recorded()
    if identity is None or not identity.is_running() or not files.socket.exists():
        return None
    try:
        with connect(files) as client:
            stats = ask_server(client, ServerAction.HEALTH)
    except STREAM_ERRORS as error:
        log.info("the engine server, pid %d, does not answer: %s", identity.pid, error)
        return None
    return None if stats.state == "stopping" or stats.pid != identity.pid else identity


def _wait_for_predecessor(files: ServerFiles, deadline_s: float) -> ProcessIdentity | None:
    """Return the server if it serves after all, or ``None`` once no earlier server is left. Called under the lock.

    A server that is ending still holds the GPUs while its engine closes: starting another one next to it would fail.
    """
    started_s = time.monotonic()
    while (recorded := files.recorded()) is not None and recorded.is_running():
        serving = _serving(files)
        if serving is not None:
            return serving
        if time.monotonic() - started_s > _HANG_S:
            kill_server(recorded, f"it has not answered for {_HANG_S:.0f} s")
        if time.monotonic() > deadline_s:
            raise _start_failure(f"an earlier server, pid {recorded.pid}, does not end", files)
        time.sleep(_RETRY_S)
    files.socket.unlink(missing_ok=True)
    files.record.unlink(missing_ok=True)
    return None


def _start(
    files: ServerFiles,
    executor: Executor,
    engine_python: str | None,
    deadline_s: float,
    gpus: Mapping[str, str],
) -> ProcessIdentity:
    fault = address_space_limit_fault()
    if fault is None and not executor.process.is_running():
        fault = f"the executor, pid {executor.process.pid}, is gone, and with it its engine server"
    if fault is not None:
        raise EngineSessionError(SessionErrorCode.ENGINE_START_FAILED, fault)
    _sweep(files.socket.parent)
    command = engine_command(
        engine_python,
        "pipemax.serve",
        *("--socket", str(files.socket)),
        *("--watch-jvm", str(executor.process)),
        *("--log", str(files.log)),
    )
    with os.fdopen(os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        try:
            # Returns as soon as the server, which has detached itself, listens (status 0) or has failed.
            status = subprocess.run(
                command,
                env=engine_environment() | dict(gpus),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
                timeout=max(1.0, deadline_s - time.monotonic()),
                check=False,
            ).returncode
        except OSError as error:
            raise _start_failure(f"{command[0]} cannot be run: {error}", files) from error
        except subprocess.TimeoutExpired:
            raise _start_failure("it did not listen in time", files) from None
    identity = files.recorded()
    if status != 0 or identity is None:
        raise _start_failure(f"'{' '.join(command[:3])} ...' ended with status {status}", files)
    return identity


def _start_failure(reason: str, files: ServerFiles) -> EngineSessionError:
    return EngineSessionError(
        SessionErrorCode.ENGINE_START_FAILED, f"the engine server did not start: {reason}. {files.log_tail()}"
    )


@contextlib.contextmanager
def _locked(path: Path, executor: ProcessIdentity, deadline_s: float) -> Iterator[None]:
    """Hold the file's lock, and poll for it, because a blocking lock could not be given up at the deadline.

    The file names the executor and its pid namespace. It stays while that executor lives: if it were removed, two tasks
    could hold two locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise EngineSessionError(
                        SessionErrorCode.ENGINE_START_FAILED, f"another task has held {path} for too long"
                    ) from None
                time.sleep(_RETRY_S)
        owner = json.dumps([executor.pid, executor.start_ticks, pid_namespace()]).encode()
        os.pwrite(fd, owner, 0)
        yield
    finally:
        os.close(fd)


def _servers_directory() -> Path:
    return private_directory(Path(f"/tmp/pipemax-{os.getuid()}"))


def private_directory(directory: Path) -> Path:
    """Make the directory accessible only to this user: whoever can write there could pose as the server."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()  # not stat(), because a link may lead anywhere
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise EngineSessionError(
            SessionErrorCode.ENGINE_START_FAILED,
            f"{directory} must be a directory of user {os.getuid()}, but is something else or of user "
            f"{status.st_uid}: have it removed",
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        directory.chmod(0o700)
    return directory


def _sweep(directory: Path) -> None:
    """Remove files that servers of dead executors in this pid namespace left behind.

    Hazard: containers may share the directory. Another container's executor lives without a pid here.
    """
    here = pid_namespace()
    for lock in directory.glob("*.lock"):
        # Another task may sweep too, or have just made the file; or an earlier version wrote no namespace into it.
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid, start_ticks, namespace = json.loads(lock.read_text())
            if namespace is None or namespace != here:
                continue
            if ProcessIdentity(pid=pid, start_ticks=start_ticks).is_running():
                continue
            server = ServerFiles(socket=lock.with_suffix(".sock"), log=lock).recorded()
            if server is None or not server.is_running():
                for suffix in (".sock", ".json", ".journal", ".journal-draft", ".lock"):
                    lock.with_suffix(suffix).unlink(missing_ok=True)
    for log_path in directory.glob("pipemax-engine-*.log*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - log_path.stat().st_mtime > _OLD_LOG_S:
                log_path.unlink()


def _ancestors() -> Iterator[int]:
    """Yield the pids above this process, the nearest first, without pid 0."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return  # it ended while we climbed
        pid = int(after_name[1])


def _is_java(pid: int) -> bool:
    """Tell whether a process is Java, by its executable or, if that cannot be read, by its command's name."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("java")
    except OSError:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/comm").read_text().strip() == "java"
    return False
