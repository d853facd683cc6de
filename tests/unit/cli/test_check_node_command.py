"""``pipemax check-node``: what is wrong is said before an engine starts, and the verdict is the command's status."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipemax.cli.app import app
from pipemax.config import EngineConfig, Policy
from pipemax.vllm_ext.launch.known_check import CheckPart, NodeCheck, Verdict
from pipemax.vllm_ext.node_check import node
from pipemax.vllm_ext.node_check.node import CheckedNode


def test_a_command_without_a_model_ends_with_one_line() -> None:
    result = CliRunner().invoke(app, ["check-node"])
    assert result.exit_code == 2
    assert result.output.strip() == "pipemax: give --model, or --engine with a file that names one"


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
    def checked(config: EngineConfig, say: Callable[[str], None]) -> CheckedNode:
        say("tokens       two engines, a minute each")
        assert config.policy is Policy.PIPEMAX
        part = CheckPart(name="tokens", verdict=verdict, detail="24 prompts")
        check = NodeCheck(
            device="d", model="m", checked="today", seconds=3, parts=(part,), figures={"GB/s": 4.5}
        )
        return CheckedNode(check=check, path=tmp_path / "kept.json", calibration="today")

    monkeypatch.setattr(node, "check_this_node", checked)
    report = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["check-node", "--model", "m", "--json", str(report)])
    assert result.exit_code == status
    assert result.output.startswith("tokens       two engines, a minute each")
    assert f"{mark:<13}tokens: 24 prompts" in result.output
    assert f"{verdict}: {meaning}" in result.output
    assert json.loads(report.read_text())["verdict"] == verdict
