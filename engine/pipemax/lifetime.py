"""Children of an engine server end with it, however it ends.

vLLM runs its engine and workers in processes of their own, which outlive a killed parent. vLLM loads this
module as a plugin in each of them: a thread waits on the server's pidfd and ends the process when the server is
gone. Outside a server (the variable below is not set) the plugin does nothing.
"""

import os
import select
import threading
from pathlib import Path

SERVER_IDENTITY_VARIABLE = "PIPEMAX_SERVER_IDENTITY"
"""``PID:START_TICKS`` of the engine server, set by the server before it starts an engine."""


def end_with_server() -> None:
    """Entry point ``vllm.general_plugins``; vLLM may call it more than once in a process."""
    identity = os.environ.get(SERVER_IDENTITY_VARIABLE)
    if identity is None:
        return
    pid, start_ticks = (int(part) for part in identity.split(":"))
    if pid == os.getpid() or any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    # Between the server's death and now its pid may have gone to another process.
    if _start_ticks(pid) != start_ticks:
        os._exit(1)
    threading.Thread(target=_exit_when_gone, args=(pidfd,), name=_THREAD_NAME, daemon=True).start()


_THREAD_NAME = "pipemax-lifetime"


def _exit_when_gone(pidfd: int) -> None:
    select.select([pidfd], [], [])
    # No clean-up: the GPU's memory is given back by the kernel, and nobody is left to talk to.
    os._exit(1)


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
