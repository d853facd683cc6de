"""``pipemax check-node``: compare tokens, start the engine, check it, calibrate it, and keep all for later starts."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipemax.config import EngineConfig
from pipemax.control.times.calibration import Calibration
from pipemax.control.times.estimator import PredictionError
from pipemax.control.times.profiling import predicted_and_measured, prediction_error
from pipemax.domain.plan import Phase
from pipemax.vllm_ext.calibration.measure import measure, run_other
from pipemax.vllm_ext.core_calls import recalibrate
from pipemax.vllm_ext.launch.known_calibration import remember_calibration
from pipemax.vllm_ext.launch.known_check import (
    CheckPart,
    NodeCheck,
    Verdict,
    check_path,
    keep_check,
    tokens_path,
)
from pipemax.vllm_ext.launch.start import RunningVllm
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config
from pipemax.vllm_ext.node_check.run import check_engine, new_check
from pipemax.vllm_ext.node_check.trial_config import TrialConfigs, trial_configs
from pipemax.vllm_ext.node_check.trial_process import compare_in_process, inconclusive
from pipemax.vllm_ext.seam.vllm_types import LLMEngine, VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """A check, the file where the engine's part of it is kept, and the engine's calibration."""

    check: NodeCheck
    path: Path | None
    calibration: Calibration | None = None
    """None after a check that failed."""
    errors: dict[str, PredictionError] = field(default_factory=dict)
    """How well the calibration predicts, by kinds of steps: fitted ones, and others."""


def check_this_node(config: EngineConfig, say: Callable[[str], None], *, calibrate_s: float) -> CheckedNode:
    """Check an engine of ``config``, whose policy is pipemax, and calibrate it; ``say`` tells what is about to happen.

    ``EngineStartError`` says why it cannot start, ``ValueError`` why it cannot run under PipeMax; vLLM's own errors
    pass.
    """
    with launch_environment(config):
        vllm_config = make_vllm_config(config)
    tokens = check_tokens(config, vllm_config, say)
    say("copies       starting your engine, to check its copies and measure its steps")
    vllm = RunningVllm.start(config)
    engine, vllm_config = vllm.engine, vllm.vllm_config
    try:
        check = check_engine(engine, vllm_config, config)
        path = keep_check(check_path(config, vllm_config), check)
        check = check.joined(tokens)
        if check.verdict is Verdict.FAILED:
            return CheckedNode(check=check, path=path)
        calibration, errors = _calibrate(engine, vllm_config, config, time_limit_s=calibrate_s)
    finally:
        vllm.close()
    remember_calibration(config, vllm_config, calibration)
    return CheckedNode(check=check, path=path, calibration=calibration, errors=errors)


def _calibrate(
    engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig, *, time_limit_s: float
) -> tuple[Calibration, dict[str, PredictionError]]:
    """Measure an idle engine, and judge its calibration by steps that were not fitted as well."""
    measured = measure(engine, vllm_config, config, time_limit_s=time_limit_s)
    stages = measured.calibration.stages
    recalibrate(engine, stages)
    kinds = {"fitted": measured.steps, "other": run_other(engine, vllm_config, config)}
    return measured.calibration, {
        f"{name} {phase}": prediction_error(pairs)
        for name, steps in kinds.items()
        for phase in Phase
        if (pairs := predicted_and_measured(stages, steps, phase))
    }


def check_tokens(
    config: EngineConfig,
    vllm_config: VllmConfig,
    say: Callable[[str], None],
    *,
    compare: Callable[[TrialConfigs], CheckPart] = compare_in_process,
) -> NodeCheck:
    """Compare tokens with stock vLLM's, and keep the result for all models of this architecture."""
    begin_s, architecture = time.monotonic(), vllm_config.model_config.architecture
    try:
        configs = trial_configs(config, vllm_config)
    except ValueError as error:
        part = inconclusive(f"{architecture} cannot be cut to a few layers: {error}")
    else:
        say(
            f"tokens       starting stock vLLM, then PipeMax, on {configs.num_layers} random layers of {architecture}: "
            "one to three minutes each"
        )
        part = compare(configs)
    check = new_check(vllm_config, architecture, begin_s, [part], {})
    keep_check(tokens_path(vllm_config), check)
    return check
