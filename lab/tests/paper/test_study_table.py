"""What ``python -m lab.paper`` takes by name, and what it prints."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from lab.paper.lengths import open_workload, replay_workload
from lab.paper.study import run_study
from lab.paper.study_table import table
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


def test_recorded_lengths_are_replayed_in_order(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    path.write_text(
        '{"prompt_tokens": 5, "completion_tokens": 2}\n\n{"prompt_tokens": 7, "completion_tokens": 1}\n'
    )
    workload = replay_workload(path)
    assert workload.prompt_tokens.tolist() == [5, 7]
    assert workload.output_tokens.tolist() == [2, 1]
    path.write_text('{"prompt_tokens": 5}\n')
    with pytest.raises(ValueError, match="line 1"):
        replay_workload(path)
