"""tools/gpu_proof.sh says for each part whether it passed, failed or could not run, and why."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "tools" / "gpu_proof.sh"

PYTHON_WITH_A_GPU = """#!/usr/bin/env bash
# A Python on a machine with a GPU of 36 GB, without vLLM, where the kernels' tests fail.
case "$*" in
    "- "*) [ "$2" -le 36 ] || { echo "the GPU has 36 GB, $2 are needed"; exit 1; } ;;
    -) echo "| packages | torch |" ;;
    "-c import vllm") echo "ModuleNotFoundError: No module named 'vllm'"; exit 1 ;;
    "-m pytest"*) echo "1 failed, 9 passed in 3 s"; exit 1 ;;
    "bench/transfer.py --json"*) printf 'pool: 13 GiB\\n\\n## peak\\n\\n| direction |\\n| --- |\\n| host to GPU |\\n' ;;
esac
"""


def prove(*arguments: str) -> tuple[int, dict[str, list[str]], str]:
    """The exit status, the table's row of each part, and all output. No GPU is visible."""
    command = ["bash", str(SCRIPT), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    parts = {row[0]: row[1:] for row in cells if len(row) == 4 and row[0] not in ("part", "---")}
    return done.returncode, parts, done.stdout + done.stderr


def test_without_a_gpu_every_part_is_skipped_with_a_reason(tmp_path: Path) -> None:
    status, parts, output = prove("--python", sys.executable, "--out", str(tmp_path))
    assert status == 3, output
    assert list(parts) == ["tests", "sanitizer", "transfer", "one_stage", "check-node"]
    assert {row[0] for row in parts.values()} == {"skipped"}
    assert all(
        "finds no CUDA GPU" in parts[part][2] for part in ("tests", "sanitizer", "transfer", "one_stage")
    )
    assert parts["check-node"][2] == "no engine was named: give --engine engine.yaml"
    assert (tmp_path / "summary.md").read_text() in output


def test_each_part_s_outcome_is_in_the_table_and_a_failure_in_the_exit_status(tmp_path: Path) -> None:
    python, engine = tmp_path / "python", tmp_path / "engine.yaml"
    python.write_text(PYTHON_WITH_A_GPU)
    python.chmod(0o755)
    engine.write_text("model: tiny\n")
    options = ("--python", str(python), "--engine", str(engine), "--out", str(tmp_path))
    status, parts, output = prove(*options, "tests", "transfer", "one_stage", "check-node")
    assert status == 1, output
    assert parts["tests"][0::2] == ["**failed**", "1 failed, 9 passed in 3 s"]
    assert parts["transfer"][0::2] == ["passed", "pool: 13 GiB"]
    assert parts["one_stage"][0::2] == ["skipped", "the GPU has 36 GB, 40 are needed"]
    assert parts["check-node"][0::2] == ["skipped", "ModuleNotFoundError: No module named 'vllm'"]
    assert "## peak\n\n| direction |" in (tmp_path / "summary.md").read_text()
    assert prove(*options, "transfer")[0] == 0


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    status, _, output = prove("--out", str(tmp_path), "kernels")
    assert status == 2
    assert "unknown part kernels" in output
