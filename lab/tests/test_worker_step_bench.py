"""The bench of a worker's step: vLLM's runner at a small size, in a process that finds Triton."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_each_part_of_a_step_has_its_figures_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    sizes = ["--decodes", "16", "--returning", "4", "--tokens", "2000", "--steps", "8", "--rounds", "2"]
    command = [sys.executable, "-m", "lab.bench.worker_step", *sizes, "--json", str(path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "array, a returning row: resend" in ended.stdout
    figures = json.loads(path.read_text())
    assert [*figures] == ["list", "array"]
    for rounds in figures.values():
        for one in rounds:
            assert one["returning"]["bytes"] > 4 * 2000, "the tokens are sent"
            assert one["step"]["launches"] > 0
