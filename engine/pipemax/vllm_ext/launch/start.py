"""Start vLLM's engine, and keep what its processes record of their failures for as long as it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import vllm.envs
from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerFactory

from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from pipemax.node.failure_records import FailureRecords
from pipemax.vllm_ext.launch.executor import WORKERS_END_S, executor_class
from pipemax.vllm_ext.launch.failure_causes import cause_of
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config

_ENGINE_ENDS_S = WORKERS_END_S + 20.0
"""How long vLLM's core may take to end its workers and itself, before it is killed with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningVllm:
    """vLLM's engine, loaded."""

    engine: LLMEngine
    vllm_config: VllmConfig
    failures: FailureRecords

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        stat_loggers: list[StatLoggerFactory] | None = None,
        make_config: Callable[[EngineConfig], VllmConfig] = make_vllm_config,
    ) -> Self:
        """Block until the model is loaded. ``EngineStartError`` says why it could not be, and what to change.

        ``make_config`` makes vLLM's config, the executor included; a virtual node has its own.
        """
        failures = FailureRecords()
        try:
            with launch_environment(config, failures=failures.path):
                vllm_config = make_config(config)
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
        return cls(engine=engine, vllm_config=vllm_config, failures=failures)

    def cause_of(self, error: BaseException) -> str:
        """Explain in one line an error that the engine raised."""
        return cause_of(error, self.failures.read())

    def close(self) -> None:
        """End vLLM's processes: those of an engine that has not failed may take their time, to unpin host memory."""
        core: Any = self.engine.engine_core  # the clients' base class in vLLM lacks what each client has
        has_failed = not isinstance(core, InprocClient) and core.resources.engine_dead
        core.shutdown(timeout=None if has_failed else _ENGINE_ENDS_S)
        self.failures.close()
