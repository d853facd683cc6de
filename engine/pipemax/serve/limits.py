"""Define all times and sizes of the engine server, with defaults. Each is a flag of ``python -m pipemax.serve``."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The server's waiting times and periods, in seconds."""

    idle_exit_s: float = 1800.0
    """Without a session for this long, the server ends and frees the GPUs."""
    daemons_grace_s: float = 5.0
    """The server ends once its known Python daemons are gone this long: in local mode the JVM outlives its session."""
    replace_grace_s: float = 2.0
    """An engine is replaced once it has had no session for this long: longer than the gap between two tasks."""
    same_task_conflict_s: float = 10.0
    """If one task holds sessions of two configs and nothing moves for this long, one waits for the other."""
    still_conflict_s: float = 120.0
    """The same between tasks; longer, because the resident engine's input may only be slow."""
    poll_stall_s: float = 60.0
    """Once ``Engine.poll`` has not returned for this long, the server stops vouching for the engine by heartbeats."""
    stats_push_s: float = 1.0
    """Period of the reports to the collectors."""
    stats_timeout_s: float = 5.0
    """Timeout of one report: a driver that plans a chunk on busy cores takes seconds to answer."""
    close_timeout_s: float = 90.0
    """Maximum time for an engine to close before its processes are killed; large host pools take long to unpin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """Limits on the rows and bytes that the server accepts beyond those that it has answered."""

    chunk_rows: int = 64
    """Approximate credit that every open stream keeps, whatever the others hold."""
    chunk_bytes: int = 2 * 2**20
    max_rows: int = 65_536
    """Maximum of rows in the engine and granted, over all streams (plus one chunk per stream)."""
    max_bytes: int = 512 * 2**20
    undelivered_rows: int = 4_096
    """A stream with this many finished rows that its client has not taken gets no further credit."""
    undelivered_bytes: int = 64 * 2**20
    cache_bytes: int = 256 * 2**20
    """Maximum size of the answers kept for sessions that reuse results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """Limits on the server's log, which the engine's processes write to as well."""

    log_bytes: int = 64 * 2**20
    """Maximum size of the log, and of the file next to it with the earlier lines."""
    log_look_s: float = 5.0
    """Period of the size checks, in seconds."""
