"""Run the server process: detach it, listen, and leave nothing behind.

The process that starts it is a short-lived Spark worker, so it forks at once: the parent stays only until the child
listens (exit status 0) or has failed (1). The server then has no parent that must reap it, so it never becomes a
zombie.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax.node.bounded_log import BoundedLog
from pipemax.node.lifetime import SERVER_IDENTITY_VARIABLE, SIGTERM_CLOSE_S, write_stacks_when_told
from pipemax.node.process import ProcessIdentity
from pipemax.node.repeated_lines import hold_back_repeated_lines
from pipemax.serve.limits import LogLimits, Timings, WindowLimits

if TYPE_CHECKING:
    from pipemax.serve.engine_host import EngineFactory
    from pipemax.serve.lifecycle import Exit, Lifecycle
    from pipemax.serve.server import EngineServer

log = logging.getLogger(__name__)

_NO_TIME_S = 0.5
_NOTICE_S = 2.0
"""Most time for clients and collectors to hear that the server ends."""
_LOOK_S = 0.1
_SETTINGS: dict[str, Any] = {"timings": Timings, "limits": WindowLimits, "log_limits": LogLimits}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The options of the command line."""

    socket: Path
    watch_jvm: ProcessIdentity
    """The process that bounds the server's life."""
    log: Path
    timings: Timings
    limits: WindowLimits
    log_limits: LogLimits

    @property
    def record(self) -> Path:
        """The file that identifies the server, for clients that find it hanging."""
        return self.socket.with_suffix(".json")

    @property
    def journal(self) -> Path:
        """The file that lists the rows in the server's engine, for its successor."""
        return self.socket.with_suffix(".journal")

    @property
    def gpu_locks(self) -> Path:
        """The directory of the locks that all servers of this user and machine share."""
        return self.socket.with_name("gpus")


def parse_options(arguments: Sequence[str]) -> ServerOptions:
    """Parse the command line. ``SystemExit``, with the usage on standard error, for a bad option."""
    parser = argparse.ArgumentParser(prog="python -m pipemax.serve", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--watch-jvm", type=ProcessIdentity.parse, required=True, metavar="PID:TICKS")
    parser.add_argument("--log", type=Path, required=True)
    for settings in _SETTINGS.values():
        for field in fields(settings):
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, type=type(field.default), default=field.default)
    values = vars(parser.parse_args(arguments))
    groups = {
        name: settings(**{field.name: values.pop(field.name) for field in fields(settings)})
        for name, settings in _SETTINGS.items()
    }
    return ServerOptions(**groups, **values)


def main(
    arguments: Sequence[str] | None = None, *, load_factory: "Callable[[], EngineFactory] | None" = None
) -> None:
    """Start the server as a detached process. Never returns; ``load_factory`` is called in that process."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    tell_listening = _detach(options.log)
    # Import only now, in the server's own process: pyarrow and gRPC start threads, which a fork would lose.
    try:
        status = _serve(options, (load_factory or _offline_engine)(), tell_listening)
    except BaseException:
        logging.exception("the server failed")
        status = 1
    logging.shutdown()
    os._exit(status)  # gRPC's threads may hold open calls, which need not be waited for


def _offline_engine() -> "EngineFactory":
    from pipemax.api import OfflineEngine

    return OfflineEngine


def _detach(log_path: Path) -> Callable[[], None]:
    """Fork; the child continues in its own process group, with stdin empty and its output in the log.

    It does not get its own session: where Linux schedules by session (autogroup), tasks and engine would be two groups.
    On cores that an engine fills, the tasks' group has been left without any for up to 15 s at a time, so that the
    engine ran out of rows (lab/results/spark_overhead.md).

    Return the function that the child calls once it listens, which lets the parent exit.
    """
    listening, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        os._exit(0 if os.read(listening, 1) else 1)  # nothing to read: the child ended
    os.close(listening)
    os.setpgid(0, 0)
    empty = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((empty, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(empty)
    os.close(output)
    write_stacks_when_told()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    hold_back_repeated_lines()

    def tell_listening() -> None:
        os.write(tell, b"1")
        os.close(tell)

    return tell_listening


def _serve(options: ServerOptions, factory: "EngineFactory", tell_listening: Callable[[], None]) -> int:
    from pipemax.node.gpus import visible_gpus
    from pipemax.serve.gpu_locks import GpuLocks
    from pipemax.serve.lifecycle import Exit, Lifecycle
    from pipemax.serve.rows.journal import Journal
    from pipemax.serve.server import EngineServer

    BoundedLog(options.log, max_bytes=options.log_limits.log_bytes).watch(
        period_s=options.log_limits.log_look_s
    )
    process = ProcessIdentity.of_this_process()
    # The engine's processes inherit it, and end when the process that it names has ended.
    os.environ[SERVER_IDENTITY_VARIABLE] = str(process)
    lifecycle = Lifecycle(options.watch_jvm, options.timings, socket=options.socket)
    terminated = Exit(reason="SIGTERM", close_within_s=SIGTERM_CLOSE_S)
    signal.signal(signal.SIGTERM, lambda *_: lifecycle.stop(terminated))
    os.umask(0o077)
    gpus = GpuLocks(options.gpu_locks, visible_gpus(os.environ))
    os.environ.update(gpus.environment)
    journal = Journal(options.journal)
    num_suspects = journal.suspects.count
    server = EngineServer(
        str(options.socket),
        engine_factory=factory,
        lifecycle=lifecycle,
        journal=journal,
        timings=options.timings,
        limits=options.limits,
        gpus=gpus,
    )
    _write_record(options, process, num_suspects)
    lifecycle.start()
    log.info("listening, pid %d, for the executor with pid %d", process.pid, options.watch_jvm.pid)
    tell_listening()
    cause = lifecycle.wait()
    log.info("ending: %s", cause.reason)
    _take_down(server, lifecycle, cause, options)
    return cause.status


def _write_record(options: ServerOptions, process: ProcessIdentity, num_suspects: int) -> None:
    draft = options.record.with_suffix(".draft")
    draft.write_text(
        json.dumps(
            {
                "pid": process.pid,
                "start_ticks": process.start_ticks,
                "executor": [options.watch_jvm.pid, options.watch_jvm.start_ticks],
                "log": str(options.log),
                "suspects": num_suspects,
            }
        )
    )
    draft.rename(options.record)


def _take_down(server: "EngineServer", lifecycle: "Lifecycle", cause: "Exit", options: ServerOptions) -> None:
    """Close the socket to new sessions, then the sessions, then the engine; kill whatever does not close in time."""
    from pipemax.node.process_tree import kill_engine_processes

    # The record is removed last: while this process lives, a successor must know that it does.
    options.socket.unlink(missing_ok=True)
    started_s = time.monotonic()
    closed = _close(server, lifecycle, cause, options.timings)
    took_s = time.monotonic() - started_s
    log.info("the engine %s after %.1f s", "closed" if closed else "DID NOT CLOSE", took_s)
    if not closed and (left := kill_engine_processes(own_group=True)):
        log.error("the engine's processes %s do not end although they are killed", left)
    options.record.unlink(missing_ok=True)


def _close(server: "EngineServer", lifecycle: "Lifecycle", cause: "Exit", timings: Timings) -> bool:
    """Close the sessions and the engine. Return ``False`` if that takes longer than the causes leave it."""

    def limit_s(cause: "Exit") -> float:
        if cause.close_within_s is None:
            return timings.close_timeout_s
        # A load cannot be interrupted, and there is nothing yet that needs closing.
        return _NO_TIME_S if is_loading else min(cause.close_within_s, timings.close_timeout_s)

    is_loading = server.is_loading
    deadline_s = time.monotonic() + limit_s(cause)
    server.stop(cause, notice_s=min(_NOTICE_S, limit_s(cause)))
    while not server.wait_until_closed(_LOOK_S):
        if (later := lifecycle.later_cause()) is not None:
            log.info("ending sooner: %s", later.reason)
            deadline_s = min(deadline_s, time.monotonic() + limit_s(later))
        if time.monotonic() >= deadline_s:
            return False
    return True
