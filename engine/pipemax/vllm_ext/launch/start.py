"""Start vLLM's engine, and keep what its processes record of their failures for as long as it runs."""

import threading
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import vllm.envs
from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerFactory

from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from pipemax.node.failure_records import FailureRecords
from pipemax.node.repeated_sigterm import sigterm_repeated
from pipemax.vllm_ext.launch.executor import WORKERS_END_S, executor_class
from pipemax.vllm_ext.launch.failure_causes import cause_of
from pipemax.vllm_ext.launch.processes import begun_by_us
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config

_ENGINE_ENDS_S = WORKERS_END_S + 20.0
"""How long vLLM's core may take to end its workers and itself, before it is killed with them."""
_DEATH_LOOK_S = 0.5
_CORE_SETTLES_S = 1.0
"""How long a core that is reported dead may take to have its exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningVllm:
    """vLLM's engine, loaded."""

    engine: LLMEngine
    vllm_config: VllmConfig
    failures: FailureRecords
    closed: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        stat_loggers: list[StatLoggerFactory] | None = None,
    ) -> Self:
        """Block until the model is loaded. ``EngineStartError`` says why it could not be, and what to change."""
        failures = FailureRecords()
        try:
            with launch_environment(config, failures=failures.path), begun_by_us():
                vllm_config = make_vllm_config(config)
                engine = LLMEngine(
                    vllm_config=vllm_config,
                    executor_class=executor_class(vllm_config),
                    log_stats=True,
                    usage_context=UsageContext.LLM_CLASS,
                    stat_loggers=stat_loggers,
                    multiprocess_mode=vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING,
                )
        except Exception as error:  # vLLM's start-up raises errors of any type, of any module
            cause = cause_of(error, failures.read())
            failures.close()
            raise EngineStartError(f"model {config.model!r} could not be loaded: {cause}") from error
        running = cls(engine=engine, vllm_config=vllm_config, failures=failures)
        if not isinstance(engine.engine_core, InprocClient):
            watch = (engine.engine_core, running.closed)
            threading.Thread(target=tell_death, args=watch, name="core-death", daemon=True).start()
        return running

    def cause_of(self, error: BaseException) -> str:
        """Explain in one line an error that the engine raised."""
        return cause_of(error, self.failures.read(), core_exit_code=self._core_exit_code())

    def _core_exit_code(self) -> int | None:
        """Return how vLLM's core process ended; None while it runs, and for a core in this process."""
        core: Any = self.engine.engine_core  # the clients' base class in vLLM lacks what each client has
        if isinstance(core, InprocClient) or not core.resources.engine_dead:
            return None
        for process in getattr(core.resources.engine_manager, "processes", ()):
            process.join(_CORE_SETTLES_S)
            if process.exitcode:
                return int(process.exitcode)
        return None

    def close(self) -> None:
        """End vLLM's processes: those of an engine that has not failed may take their time, to unpin host memory."""
        core: Any = self.engine.engine_core  # the clients' base class in vLLM lacks what each client has
        self.closed.set()
        if isinstance(core, InprocClient):
            core.shutdown()
        else:
            timeout_s = None if core.resources.engine_dead else _ENGINE_ENDS_S
            cores = getattr(core.resources.engine_manager, "processes", ())
            with sigterm_repeated([process.pid for process in cores]):
                core.shutdown(timeout=timeout_s)
        self.failures.close()


def tell_death(client: Any, closed: threading.Event) -> None:
    """Have who waits for a dead core's output or answer hear of it, until ``closed``.

    A core that raises says so before it ends, to who waits for output. One that is killed says nothing: vLLM's client
    notices, closes the connection, and would let both wait forever.
    """
    while not closed.wait(_DEATH_LOOK_S):
        if client.resources.engine_dead:
            for answer in list(client.utility_results.values()):
                with suppress(InvalidStateError):  # it has come
                    answer.set_exception(EngineDeadError())
            client.outputs_queue.put_nowait(EngineDeadError())
            return
