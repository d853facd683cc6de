"""Begin vLLM's processes with our own lines: they end with the engine server, record why they fail, and show stacks.

vLLM loads ``pipemax.node.lifetime`` as a plugin only where this package is installed, not where it is on PYTHONPATH
only, and only after imports that may fail. So the functions that its processes run are replaced as they are started.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

from pipemax.node.failure_records import Failure, record
from pipemax.node.lifetime import end_with_server, write_stacks_when_told

# Taken now: in a forked process the classes have our functions.
_VLLM_S_CORE: Callable[..., None] = EngineCoreProc.run_engine_core
_VLLM_S_WORKER: Callable[..., None] = WorkerProc.worker_main

CORE_PROCESS = "EngineCore"
"""The name of vLLM's core process begins so."""


@contextmanager
def begun_by_us() -> Iterator[None]:
    """Have the cores and workers that this process starts meanwhile begin with our lines."""
    cores, workers = vars(EngineCoreProc)["run_engine_core"], vars(WorkerProc)["worker_main"]
    setattr(EngineCoreProc, "run_engine_core", staticmethod(run_core))  # noqa: B010  # mypy knows no assignment
    setattr(WorkerProc, "worker_main", staticmethod(run_worker))  # noqa: B010
    try:
        yield
    finally:
        setattr(EngineCoreProc, "run_engine_core", cores)  # noqa: B010
        setattr(WorkerProc, "worker_main", workers)  # noqa: B010


def run_core(*args: Any, **kwargs: Any) -> None:
    """Run vLLM's core, and record the exception that ends it."""
    _begin()
    try:
        _VLLM_S_CORE(*args, **kwargs)
    except Exception as error:
        record(Failure.of(error, process=CORE_PROCESS))
        raise


def run_worker(*args: Any, **kwargs: Any) -> None:
    """Run a worker, which logs the exception that ends it; logged exceptions are recorded."""
    _begin()
    _VLLM_S_WORKER(*args, **kwargs)


def _begin() -> None:
    write_stacks_when_told()
    end_with_server()
