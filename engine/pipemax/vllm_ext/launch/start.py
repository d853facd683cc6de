"""Start vLLM's engine, and keep what its processes record of their failures for as long as it runs."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Self

from pipemax.config import EngineConfig
from pipemax.domain.envelope import StartEnvelope
from pipemax.domain.errors import EngineStartError
from pipemax.node.failure_records import FailureRecords
from pipemax.node.repeated_sigterm import sigterm_repeated
from pipemax.vllm_ext.launch.failure_causes import cause_of
from pipemax.vllm_ext.launch.start_envelope import start_envelope, with_fitting_rows
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config
from pipemax.vllm_ext.seam.core_client import core_exit_code, core_processes, end_core, watch_core
from pipemax.vllm_ext.seam.executor import WORKERS_END_S, make_engine
from pipemax.vllm_ext.seam.processes import begun_by_us
from pipemax.vllm_ext.seam.vllm_types import LLMEngine, StatLoggerFactory, VllmConfig

_ENGINE_ENDS_S = WORKERS_END_S + 20.0
"""How long vLLM's core may take to end its workers and itself, before it is killed with them."""


log = logging.getLogger(__name__)

Loaded = tuple[VllmConfig, LLMEngine]
Load = Callable[[EngineConfig, StartEnvelope | None, list[StatLoggerFactory] | None], Loaded]


def _load(
    config: EngineConfig, envelope: StartEnvelope | None, stat_loggers: list[StatLoggerFactory] | None
) -> Loaded:
    vllm_config = make_vllm_config(config, envelope)
    return vllm_config, make_engine(vllm_config, stat_loggers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningVllm:
    """vLLM's engine, loaded."""

    engine: LLMEngine
    vllm_config: VllmConfig
    failures: FailureRecords
    envelope: StartEnvelope | None = None
    """What stock vLLM was started for; ``None`` if that was left to vLLM."""
    closed: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        stat_loggers: list[StatLoggerFactory] | None = None,
        load: Load | None = None,
    ) -> Self:
        """Block until the model is loaded. ``EngineStartError`` says why it could not be, and what to change.

        An engine with more rows in a step than vLLM has Mamba blocks is started once more, with as many rows.
        ``load`` makes the engine; by default vLLM's.
        """
        load = load or _load
        plan = cache(partial(start_envelope, config))  # called within a start, which tells its errors
        try:
            return cls._start(config, stat_loggers, load, plan)
        except EngineStartError as error:
            fewer = with_fitting_rows(config, str(error))
            if fewer is None:
                raise
            log.warning("starting once more, with max_num_seqs %d: %s", fewer.max_num_seqs, error)
        return cls._start(fewer, stat_loggers, load, plan)

    @classmethod
    def _start(
        cls,
        config: EngineConfig,
        stat_loggers: list[StatLoggerFactory] | None,
        load: Load,
        plan: Callable[[], StartEnvelope | None],
    ) -> Self:
        failures = FailureRecords()
        try:
            with launch_environment(config, failures=failures.path), begun_by_us():
                envelope, most_rows = plan(), config.vllm_argument("max_num_seqs")
                if envelope is not None and most_rows is not None:
                    envelope = envelope.with_rows(most_rows)
                vllm_config, engine = load(config, envelope, stat_loggers)
        except Exception as error:  # vLLM's start-up raises errors of any type, of any module
            cause = cause_of(error, failures.read())
            failures.close()
            raise EngineStartError(f"model {config.model!r} could not be loaded: {cause}") from error
        running = cls(engine=engine, vllm_config=vllm_config, failures=failures, envelope=envelope)
        watch_core(engine, running.closed)
        return running

    def cause_of(self, error: BaseException) -> str:
        """Explain in one line an error that the engine raised."""
        return cause_of(error, self.failures.read(), core_exit_code=core_exit_code(self.engine))

    def close(self) -> None:
        """End vLLM's processes: those of an engine that has not failed may take their time, to unpin host memory."""
        self.closed.set()
        with sigterm_repeated([process.pid for process in core_processes(self.engine)]):
            end_core(self.engine, _ENGINE_ENDS_S)
        self.failures.close()
