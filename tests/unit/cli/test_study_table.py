"""What ``pipemax simulate`` takes by name, and what it prints."""

import io
from pathlib import Path

from rich.console import Console

from pipemax.cli.common import open_workload
from pipemax.cli.study_table import table
from pipemax.sim.study import run_study
from tests.unit.sim.machines import small_model, small_node, small_workload


def test_table_has_a_line_for_each_system() -> None:
    study = run_study(
        small_node(kv_gb=0.4), small_model(), small_workload(80), ["pipemax", "vllm_pp", "static_10"]
    )
    screen = io.StringIO()
    Console(width=200, file=screen).print(table(study))
    text = screen.getvalue()
    assert all(result.system in text for result in study.results)


def test_workloads_are_named_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    path.write_text('{"prompt_tokens": 5, "completion_tokens": 2}\n')
    assert len(open_workload(str(path), 100)) == 1
    assert len(open_workload("longbench", 100)) == 100
