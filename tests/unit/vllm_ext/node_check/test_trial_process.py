"""The trial's process is given two engine configs and leaves one part of the check."""

import sys

from pipemax.config import EngineConfig
from pipemax.vllm_ext.launch.known_check import CheckPart, Verdict
from pipemax.vllm_ext.node_check.trial_config import TrialConfigs
from pipemax.vllm_ext.node_check.trial_process import compare_in_process

CONFIGS = TrialConfigs(
    stock=EngineConfig.parse({"model": "m", "policy": "vllm"}),
    pipemax=EngineConfig.parse({"model": "m", "policy": "pipemax"}),
    num_layers=4,
)

ECHO = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
configs = json.loads((folder / "configs.json").read_text())
part = {"name": "tokens", "verdict": "failed", "detail": " ".join(c["policy"] for c in configs.values())}
(folder / "part.json").write_text(json.dumps(part))
"""


def test_the_part_is_what_the_process_leaves() -> None:
    part = compare_in_process(CONFIGS, (sys.executable, "-c", ECHO))
    assert part == CheckPart(name="tokens", verdict=Verdict.FAILED, detail="vllm pipemax")


def test_a_process_that_dies_leaves_the_tokens_inconclusive() -> None:
    part = compare_in_process(CONFIGS, (sys.executable, "-c", "raise SystemExit(7)"))
    assert part.verdict is Verdict.INCONCLUSIVE
    assert "ended early with status 7" in part.detail
