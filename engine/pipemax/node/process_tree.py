"""End every process below this one: the last resort for an engine that does not close.

The stacks of all threads are written first, here and by the processes that can (``lifetime.write_stacks_when_told``),
so that the log says what did not end.
"""

import faulthandler
import os
import signal
import time
from collections import defaultdict

from pipemax.node.lifetime import STACKS_SIGNAL
from pipemax.node.process import ProcessIdentity, all_processes

_STACKS_S = 1.0
"""How long processes may take to write their stacks."""
_KILLED_S = 10.0
"""How long killed processes may take to end: the driver of a GPU can hold them up."""
_LOOK_S = 0.02


def kill_engine_processes(*, own_group: bool = False) -> list[int]:
    """Write the stacks, then kill all processes below this one. Return those that still have not ended.

    With ``own_group`` also kill the others of this process's group, such as those whose parent has died.
    """
    faulthandler.dump_traceback(all_threads=True)
    for process in _running(own_group=own_group):
        process.send(STACKS_SIGNAL)
    time.sleep(_STACKS_S)
    until_s = time.monotonic() + _KILLED_S
    while (left := _running(own_group=own_group)) and time.monotonic() < until_s:
        for process in left:
            process.send(signal.SIGKILL)
        time.sleep(_LOOK_S)
    return [process.pid for process in left]


def _running(*, own_group: bool) -> list[ProcessIdentity]:
    """Return the processes below this one, and the others of its group if asked for, without zombies."""
    this_pid, group = os.getpid(), os.getpgrp()
    below: dict[int, list[int]] = defaultdict(list)
    running: dict[int, ProcessIdentity] = {}
    descendants: set[int] = set()
    for process, state, parent, process_group in all_processes():
        below[parent].append(process.pid)
        if state not in "ZX":
            running[process.pid] = process
        if own_group and process_group == group:
            descendants.add(process.pid)
    parents = [this_pid, *descendants]
    while parents:
        children = set(below[parents.pop()]) - descendants
        descendants |= children
        parents += children
    return [running[pid] for pid in sorted(descendants - {this_pid}) if pid in running]
