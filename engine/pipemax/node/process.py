"""Identifies a process for those that watch it from outside, by what Linux says of it in /proc.

Spark's side gets this from ``pipemax.wire``, whose messages name processes.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process, not to be confused with a later one of the same pid."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: clock ticks after boot."""

    def __str__(self) -> str:
        return f"{self.pid}:{self.start_ticks}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the process that ``str`` wrote. ``ValueError`` for any other text."""
        pid, start_ticks = map(int, text.split(":"))
        return cls(pid=pid, start_ticks=start_ticks)

    @classmethod
    def of(cls, pid: int) -> Self:
        """Read a process's identity from /proc. Raise ``ProcessLookupError`` if there is no such process."""
        return cls(pid=pid, start_ticks=_process_state(pid)[1])

    @classmethod
    def of_this_process(cls) -> Self:
        return cls.of(os.getpid())

    def is_running(self) -> bool:
        """Return whether this very process still exists and is no zombie."""
        try:
            state, start_ticks = _process_state(self.pid)
        except ProcessLookupError:
            return False
        return state not in "ZX" and start_ticks == self.start_ticks

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.is_running():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def pid_namespace() -> str | None:
    """Return this process's pid namespace, such as ``pid:[4026531836]``; None if Linux does not say.

    Two containers on one machine have one each: a process without a pid here may live in the other.
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def all_processes() -> Iterator[tuple[ProcessIdentity, str, int, int]]:
    """Yield each process with its state letter, its parent's pid and its process group."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = stat_fields(int(directory.name))
        except ProcessLookupError:
            continue
        process = ProcessIdentity(pid=int(directory.name), start_ticks=int(fields[19]))
        yield process, fields[0], int(fields[1]), int(fields[2])


def running_in_group(group: int) -> list[int]:
    """Return the pids of a process group's members that are no zombies."""
    return [
        process.pid
        for process, state, _, process_group in all_processes()
        if process_group == group and state not in "ZX"
    ]


def _process_state(pid: int) -> tuple[str, int]:
    """Return a process's state letter and start ticks (fields 3 and 22 of /proc/PID/stat).

    Raise ``ProcessLookupError`` if there is no such process.
    """
    fields = stat_fields(pid)
    return fields[0], int(fields[19])


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third, the state letter, on."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    # The command name is in parentheses and may itself contain spaces and parentheses.
    return stat.rpartition(")")[2].split()
