"""``pipemax calibrate``: start an engine, measure it, and judge its calibration by steps that were not fitted."""

from dataclasses import dataclass

from pipemax.config import EngineConfig
from pipemax.control.times.calibration import Calibration
from pipemax.control.times.estimator import PredictionError
from pipemax.control.times.mixed_profiling import mixed_predicted_and_measured
from pipemax.control.times.profiling import (
    predicted_and_measured,
    prediction_error,
)
from pipemax.domain.plan import Phase
from pipemax.vllm_ext.calibration.measure import OnWave, measure, run_other
from pipemax.vllm_ext.core_calls import recalibrate
from pipemax.vllm_ext.launch.known_calibration import remember_calibration
from pipemax.vllm_ext.launch.start import RunningVllm

_OTHER_REQUESTS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """A calibration, and how well it predicts."""

    calibration: Calibration
    pairs: dict[str, list[tuple[float, float]]]
    """(predicted, measured) seconds on each stage, for fitted and for other steps, by a name for people."""

    @property
    def errors(self) -> dict[str, PredictionError]:
        return {name: prediction_error(pairs) for name, pairs in self.pairs.items()}


def run_calibration(config: EngineConfig, *, time_limit_s: float, on_wave: OnWave) -> CalibrationReport:
    """Calibrate an engine of ``config``, whose policy is pipemax.

    ``EngineStartError`` says why it cannot start; vLLM's own errors pass.
    """
    vllm = RunningVllm.start(config)
    engine, vllm_config = vllm.engine, vllm.vllm_config
    try:
        measured = measure(engine, vllm_config, config, time_limit_s=time_limit_s, on_wave=on_wave)
        stages = measured.calibration.stages
        recalibrate(engine, stages)
        other = run_other(engine, vllm_config, config, num_requests=_OTHER_REQUESTS, seed=1)
    finally:
        vllm.close()
    remember_calibration(config, vllm_config, measured.calibration)
    pairs = {
        f"{name} {phase}": predicted_and_measured(stages, steps, phase)
        for name, steps in (("fitted", measured.steps), ("other", other))
        for phase in (Phase.PREFILL, Phase.DECODE)
    }
    if measured.mixed_steps:
        pairs["fitted mixed"] = mixed_predicted_and_measured(stages, measured.mixed_steps)
    return CalibrationReport(calibration=measured.calibration, pairs=pairs)
