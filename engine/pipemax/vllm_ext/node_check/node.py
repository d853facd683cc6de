"""``pipemax check-node``: start an engine, check it, calibrate it, and keep both for the starts to come."""

from dataclasses import dataclass
from pathlib import Path

from pipemax.config import EngineConfig
from pipemax.vllm_ext.calibration.measure import measure
from pipemax.vllm_ext.launch.known_calibration import remember_calibration
from pipemax.vllm_ext.launch.known_check import NodeCheck, Verdict, check_path, keep_check
from pipemax.vllm_ext.launch.start import RunningVllm
from pipemax.vllm_ext.node_check.run import check_engine

_CALIBRATION_LIMIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """A check, the file where it is kept, and how the engine was calibrated."""

    check: NodeCheck
    path: Path | None
    calibration: str


def check_this_node(config: EngineConfig) -> CheckedNode:
    """Check an engine of ``config``, whose policy is pipemax.

    ``EngineStartError`` says why it cannot start; vLLM's own errors pass.
    """
    vllm = RunningVllm.start(config)
    engine, vllm_config = vllm.engine, vllm.vllm_config
    try:
        check = check_engine(engine, vllm_config, config)
        path = keep_check(check_path(config, vllm_config), check)
        if check.verdict is Verdict.FAILED:
            return CheckedNode(check=check, path=path, calibration="not measured")
        calibration = measure(engine, vllm_config, config, time_limit_s=_CALIBRATION_LIMIT_S).calibration
    finally:
        vllm.close()
    remember_calibration(config, vllm_config, calibration)
    return CheckedNode(check=check, path=path, calibration=calibration.measured)
