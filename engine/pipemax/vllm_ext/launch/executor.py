"""Record how a worker of vLLM's ended that raised nothing: killed by the kernel, crashed, or ended by a library.

Only its parent, vLLM's core process, learns that. vLLM 0.32 logs it at most, and at a start not even that.
"""

import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from pipemax.node.failure_records import Failure, record

_SETTLE_S = 1.0
_POLL_S = 0.02


class RecordingExecutor(MultiprocExecutor):
    """vLLM's executor of several workers."""

    @staticmethod
    def _ensure_worker_termination(worker_procs: list[Any]) -> None:
        # vLLM comes here before it ends the other workers, so none of these was ended by it. It hears of a dead worker
        # by a closed pipe, which the kernel closes shortly before the process has its exit code.
        until_s = time.monotonic() + _SETTLE_S
        while all(process.exitcode is None for process in worker_procs) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        for process in worker_procs:
            if process.exitcode:  # a worker that raised, or was told to end, has 0
                record(Failure(pid=process.pid or 0, process=process.name, exit_code=process.exitcode))
        MultiprocExecutor._ensure_worker_termination(worker_procs)


def executor_class(vllm_config: VllmConfig) -> type[Executor]:
    """Return the class that vLLM would take, or ours in place of that of several local workers."""
    chosen: type[Executor] = Executor.get_class(vllm_config)
    return RecordingExecutor if chosen is MultiprocExecutor else chosen
