"""``pipemax check-node``: what is wrong is said before an engine starts, and the verdict is the command's status."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipemax.cli.app import app
from pipemax.cli.check_node import as_first_replica
from pipemax.config import EngineConfig, Policy
from pipemax.control.controller_config import StageConfig
from pipemax.control.times.calibration import Calibration, load_calibration
from pipemax.control.times.estimator import PredictionError
from pipemax.domain.step_times import StepTimeModel
from pipemax.vllm_ext.launch.known_check import CheckPart, NodeCheck, Verdict
from pipemax.vllm_ext.node_check import node
from pipemax.vllm_ext.node_check.node import CheckedNode

TIME = StepTimeModel.linear(alpha_s=1e-3, beta_s=1e-7, delta_s=1e-2)
STAGE = StageConfig(kv_bytes_per_token=1024, h2d_bytes_per_s=4e9, decode_time=TIME, prefill_time=TIME)
CALIBRATION = Calibration(device="d", model="m", measured="today", stages=(STAGE,))
IN_ITS_PLACE = """
import os
from pipemax.cli.check_node import as_first_replica
from pipemax.config import EngineConfig

before = len(os.sched_getaffinity(0))
config = as_first_replica(EngineConfig(model="any", replicas=2, cpu_kv_gib=3.0))
assert len(os.sched_getaffinity(0)) == max(1, before // 2), os.sched_getaffinity(0)
assert (config.replicas, config.cpu_kv_gib) == (None, 1.5), config
"""
ERROR = PredictionError(num_steps=10, within_5_percent=0.9, worst=0.2, mean=0.02)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give --model, or --engine with a file that names one"),
        (["--out", "/no/such/place/x.yaml", "--model", "m"], "there is no directory /no/such/place"),
        (["--engine", "none.yaml"], "none.yaml"),
    ],
)
def test_wrong_arguments_end_the_command_with_one_line(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["check-node", *arguments])
    assert result.exit_code == 2
    assert told in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_an_engine_config_for_a_pooling_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("model: m\ntask: embed\n")
    result = CliRunner().invoke(app, ["check-node", "--engine", str(tmp_path / "engine.yaml")])
    assert result.exit_code == 2
    assert "generates no tokens, so policy pipemax has nothing to schedule" in result.output


@pytest.mark.parametrize(
    ("verdict", "status", "mark", "meaning"),
    [
        (Verdict.PASSED, 0, "passed", "PipeMax may run here"),
        (Verdict.FAILED, 1, "FAILED", "PipeMax must not run here"),
        (Verdict.INCONCLUSIVE, 3, "inconclusive", "nothing is known to be wrong"),
    ],
)
def test_the_verdict_is_printed_and_is_the_commands_status(
    verdict: Verdict, status: int, mark: str, meaning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(config: EngineConfig, say: Callable[[str], None], *, calibrate_s: float) -> CheckedNode:
        say("tokens       two engines, a minute each")
        assert config.policy is Policy.PIPEMAX
        part = CheckPart(name="tokens", verdict=verdict, detail="24 prompts")
        check = NodeCheck(
            device="d", model="m", checked="today", seconds=3, parts=(part,), figures={"GB/s": 4.5}
        )
        assert calibrate_s == 40
        calibration = None if verdict is Verdict.FAILED else CALIBRATION
        return CheckedNode(
            check=check, path=tmp_path / "kept.json", calibration=calibration, errors={"other": ERROR}
        )

    monkeypatch.setattr(node, "check_this_node", checked)
    report, out = tmp_path / "report.json", tmp_path / "calibration.yaml"
    result = CliRunner().invoke(
        app, ["check-node", "--model", "m", "--json", str(report), "--seconds", "40", "--out", str(out)]
    )
    assert result.exit_code == status
    assert result.output.startswith("tokens       two engines, a minute each")
    assert f"{mark:<13}tokens: 24 prompts" in result.output
    assert f"{verdict}: {meaning}" in result.output
    if verdict is Verdict.FAILED:
        assert "not measured" in result.output
        assert not out.exists()
    else:
        assert load_calibration(out) == CALIBRATION
        assert "90% within 5 %" in result.output
    assert json.loads(report.read_text())["verdict"] == verdict


def test_the_node_of_a_config_with_replicas_is_checked_in_the_first_one_s_place() -> None:
    config = EngineConfig(model="any")
    assert as_first_replica(config) is config, "without replicas nothing changes"
    subprocess.run([sys.executable, "-c", IN_ITS_PLACE], check=True, timeout=60)
