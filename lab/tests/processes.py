"""Whether a process that a test started is still there."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether it is there, and no zombie that only its new parent has to wait for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
