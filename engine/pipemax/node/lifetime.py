"""Makes the children of an engine server end with it, however it ends, and hold its GPUs until they have ended.

vLLM runs its engine and workers in processes of their own, which outlive a killed parent. Each of them calls this
module as it begins, and where this package is installed vLLM loads it as a plugin, too. The process takes a shared lock
on each GPU, and a thread waits on the server's pidfd and ends the process when the server is gone. Outside a server
(the variables below are not set) only the process's failures are recorded (``pipemax.node.failure_records``).
"""

import faulthandler
import fcntl
import os
import select
import signal
import threading

from pipemax.node.failure_records import record_what_vllm_logs
from pipemax.node.process import ProcessIdentity
from pipemax.node.repeated_lines import hold_back_repeated_lines, leave_out_warning_of_our_schedulers

SERVER_IDENTITY_VARIABLE = "PIPEMAX_SERVER_IDENTITY"
"""``PID:START_TICKS`` of the engine server, set by the server before it starts an engine."""
GPU_USERS_VARIABLE = "PIPEMAX_GPU_USERS"
"""The files whose shared locks say that a GPU is in use, separated by colons; see ``pipemax.serve.gpu_locks``."""

SIGTERM_CLOSE_S = 5.0
"""Most time that an engine gets to close on SIGTERM, whose sender is about to send SIGKILL."""
STACKS_SIGNAL = signal.SIGUSR2
"""Makes a process of the engine write the stacks of all its threads to the log."""


def end_with_server() -> None:
    """Watch the server, and end this process when the server is gone. Record an exception that ends it earlier.

    This is the entry point ``vllm.general_plugins``; vLLM may call it more than once in a process.
    """
    record_what_vllm_logs()
    leave_out_warning_of_our_schedulers()
    identity = os.environ.get(SERVER_IDENTITY_VARIABLE)
    if identity is None:
        return
    server = ProcessIdentity.parse(identity)
    hold_back_repeated_lines()
    if server.pid == os.getpid() or any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    write_stacks_when_told()
    # First: if the server is found alive after this, no successor of it can have found the GPUs unused.
    hold_gpus()
    try:
        pidfd = os.pidfd_open(server.pid)
        # Since the server's death its pid may have been given to another process.
        is_server = ProcessIdentity.of(server.pid) == server
    except ProcessLookupError:
        is_server = False
    if not is_server:
        os._exit(1)
    threading.Thread(target=_exit_when_gone, args=(pidfd,), name=_THREAD_NAME, daemon=True).start()


def write_stacks_when_told() -> None:
    """Write all stacks on ``STACKS_SIGNAL`` and on a crash: this shows where a process hangs, without its help."""
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL)


def hold_gpus() -> None:
    """Hold the server's GPUs until this process, and every process that it forks, has ended.

    vLLM spawns its workers with all descriptors closed, so none could inherit a lock: each takes its own.
    """
    for file in filter(None, os.environ.get(GPU_USERS_VARIABLE, "").split(os.pathsep)):
        # Never closed: the kernel does that as it takes the process down.
        fcntl.flock(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_SH)


_THREAD_NAME = "pipemax-lifetime"


def _exit_when_gone(pidfd: int) -> None:
    select.select([pidfd], [], [])
    # No clean-up: the kernel frees the GPU's memory, and no process is left to talk to.
    os._exit(1)
