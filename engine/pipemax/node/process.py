"""Who a process is, for those who watch it from outside: what Linux says of it in /proc.

Spark's side gets this from ``pipemax.wire``, in whose messages processes are named.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process that cannot be confused with a later one of the same pid."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: clock ticks after boot."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Read from /proc. ``ProcessLookupError`` when there is no such process."""
        return cls(pid=pid, start_ticks=_process_state(pid)[1])

    @classmethod
    def own(cls) -> Self:
        return cls.of(os.getpid())

    def is_running(self) -> bool:
        """True while this very process exists and is no zombie."""
        try:
            state, start_ticks = _process_state(self.pid)
        except ProcessLookupError:
            return False
        return state not in "ZX" and start_ticks == self.start_ticks


def pid_namespace() -> str | None:
    """The namespace in which this process's pids count, such as ``pid:[4026531836]``; None where Linux does not say.

    Two containers on one machine have one each: what has no pid here may live there.
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def _process_state(pid: int) -> tuple[str, int]:
    """The process's state letter and start ticks (fields 3 and 22 of /proc/PID/stat)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    # The command name is in parentheses and may itself hold spaces and parentheses.
    after_name = stat.rpartition(")")[2].split()
    return after_name[0], int(after_name[19])
