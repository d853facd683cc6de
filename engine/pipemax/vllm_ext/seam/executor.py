"""Let workers end in their own time, and record how a worker ended that raised nothing: killed, or crashed.

Only a worker's parent, vLLM's core process, learns the latter. vLLM 0.32 logs it at most, and at a start not even that.
A worker that unpins a large host pool needs longer than the 5 s after which vLLM terminates it, and while it ends it
holds its GPU's memory, which the next engine may be waiting for.
"""

import time
from typing import Any

import vllm.envs
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from pipemax.node.failure_records import Failure, record
from pipemax.vllm_ext.seam.processes import begun_by_us
from pipemax.vllm_ext.seam.vllm_types import LLMEngine, StatLoggerFactory, UsageContext, VllmConfig

WORKERS_END_S = 60.0
"""How long workers may take that are told to end and have not failed."""
_SETTLE_S = 1.0
_POLL_S = 0.02


class RecordingExecutor(MultiprocExecutor):
    """vLLM's executor of several workers."""

    def _init_executor(self) -> None:
        with begun_by_us():
            super()._init_executor()

    def _ensure_worker_termination(self, worker_procs: list[Any]) -> None:  # type: ignore[override]  # static there
        # vLLM comes here before it ends the other workers, so none of these was ended by it. It hears of a dead worker
        # by a closed pipe, which the kernel closes shortly before the process has its exit code.
        until_s = time.monotonic() + _SETTLE_S
        while all(process.exitcode is None for process in worker_procs) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        for process in worker_procs:
            if process.exitcode:  # a worker that raised, or was told to end, has 0
                record(Failure(pid=process.pid or 0, process=process.name, exit_code=process.exitcode))
        # At a start that failed, or where a worker died, the others may hang in a collective call.
        if self.workers_have_started and not self.is_failed:
            _wait_for(worker_procs, WORKERS_END_S)
        MultiprocExecutor._ensure_worker_termination(worker_procs)

    @property
    def workers_have_started(self) -> bool:
        return bool(getattr(self, "workers", None))  # which vLLM sets once all are ready


def _wait_for(processes: list[Any], limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, until_s - time.monotonic()))


def make_engine(vllm_config: VllmConfig, stat_loggers: list[StatLoggerFactory] | None) -> LLMEngine:
    """Make vLLM's engine, with our executor in place of its own of several local workers."""
    chosen: type[Executor] = Executor.get_class(vllm_config)
    return LLMEngine(
        vllm_config=vllm_config,
        executor_class=RecordingExecutor if chosen is MultiprocExecutor else chosen,
        log_stats=True,
        usage_context=UsageContext.LLM_CLASS,
        stat_loggers=stat_loggers,
        multiprocess_mode=vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING,
    )
