"""The limits of a started engine's steps, and the records of its steps, between the engine's thread and others."""

import threading
from collections.abc import Sequence

from pipemax.config import EngineConfig
from pipemax.domain.step_records import MOST_STEPS, StepLimits, StepRecords, TuningFacts, check_limits
from pipemax.tuning.remembered import TUNINGS
from pipemax.vllm_ext.core_calls import ask_step_records, most_limits, set_limits
from pipemax.vllm_ext.launch.known_calibration import cache_file, engine_facts
from pipemax.vllm_ext.launch.tunable_scheduler import has_tunable_scheduler
from pipemax.vllm_ext.seam.vllm_types import LLMEngine, VllmConfig


def tuning_facts(config: EngineConfig, vllm_config: VllmConfig) -> TuningFacts:
    """Return what a tuner must know of an engine that has started, so that its KV blocks are known."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    # Recurrent layers lose accepted tokens after a step without drafts (vllm-project/vllm#39273, open).
    is_recurrent = model.is_hybrid or model.has_inner_state
    return TuningFacts(
        kv_blocks=cache.num_gpu_blocks or 1,
        block_tokens=cache.block_size,
        kept_in=str(cache_file(TUNINGS, config.model, engine_facts(config, vllm_config), suffix=".yaml")),
        can_speculate=not is_recurrent and "speculative_config" not in config.vllm_arguments,
    )


class LiveLimits:
    """Speaks with a tunable scheduler; of an engine without one it says that its limits are fixed."""

    def __init__(self, engine: LLMEngine, vllm_config: VllmConfig, *, begin: StepLimits | None) -> None:
        """Ask the scheduler for its largest limits, and have it begin with those given, as far as they are below.

        Call this before the engine's thread begins.
        """
        self._engine = engine
        self.ceilings = [most_limits(engine)] if has_tunable_scheduler(vllm_config) else []
        """One entry, or none for limits that are fixed."""
        self.present = self.ceilings
        """Those that were set last."""
        if self.ceilings and begin is not None:
            self.present = [begin.within(self.ceilings[0])]
            self.set(self.present[0])
        self._lock = threading.Lock()
        self._records = StepRecords.none()
        self._is_asked = False

    # -- any thread -------------------------------------------------------------------------------------------

    def choose(self, limits: Sequence[StepLimits]) -> None:
        """Note the limits that ``set`` will send. ``ValueError`` for those that ``Engine.set_limits`` does not take."""
        check_limits(limits, self.ceilings)
        self.present = [*limits]

    def take(self) -> list[StepRecords]:
        """Return the records that have come from the scheduler since the last call."""
        with self._lock:
            records, self._records = self._records, StepRecords.none()
        return [records] if self.ceilings else []

    # -- the engine's thread ----------------------------------------------------------------------------------

    def set(self, limits: StepLimits) -> None:
        """Send the scheduler its limits."""
        set_limits(self._engine, limits)

    def ask(self) -> None:
        """Ask the scheduler for its records, unless an answer is on its way."""
        with self._lock:
            if self._is_asked:
                return
            self._is_asked = True
        ask_step_records(self._engine, self._keep)

    def _keep(self, records: StepRecords) -> None:
        with self._lock:
            self._records = StepRecords.joined([self._records, records], newest=MOST_STEPS)
            self._is_asked = False
