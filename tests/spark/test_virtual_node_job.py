"""A job over real engine servers on a virtual node: vLLM's real core, nothing computed, and every output says so."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

from pipemax.wire import ErrorCode, GenerationSpec
from pipemax_spark.engine_stop import stop_engines
from pipemax_spark.errors import JobError
from tests.engine.conftest import DEMO_MODEL
from tests.spark.conftest import Jobs

ROWS = 300
MARK = "[virtual node: nothing was computed] "


def virtual(policy: str) -> dict[str, Any]:
    node = {"node": "rtx5090x8", "model": "llama2-70b", "output_tokens": 12, "stretch": 0.05}
    return {"model": str(DEMO_MODEL), "policy": policy, "max_num_batched_tokens": 512, "virtual_node": node}


@pytest.mark.parametrize("policy", ["pipemax", pytest.param("vllm", marks=pytest.mark.long)])
def test_every_row_is_there_once_and_says_that_nothing_was_computed(
    tracked_jobs: Callable[[], Jobs], policy: str
) -> None:
    run = tracked_jobs()
    run.defaults = replace(
        run.defaults,
        engine=virtual(policy),
        engine_python=sys.executable,
        generation=GenerationSpec(max_tokens=16),
        mlflow_experiment="pipemax"
        if policy == "pipemax"
        else "",  # once is enough: its store takes ten seconds
        summary=str(run.directory / "summary.json"),
    )
    run.write_input([(i, f"word {i}") for i in range(ROWS)] + [(ROWS, None)])
    try:
        summary = run.run(id_columns=("id",))
    finally:
        stop_engines(run.spark, force=True)
    assert summary is not None
    assert (summary.rows_out, summary.rows_error, summary.engines) == (ROWS + 1, 1, 1)
    rows = {row["id"]: row["annotation"] for row in run.rows()}
    assert sorted(rows) == list(range(ROWS + 1)), "a row is lost"
    assert len(run.rows()) == ROWS + 1, "a row is there twice"
    assert rows.pop(ROWS)["error"]["code"] == ErrorCode.EMPTY_PROMPT
    assert all(row["text"].startswith(MARK) for row in rows.values())
    assert {row["completion_tokens"] for row in rows.values()} == {12}
    # A few prompts have the same sum modulo the vocabulary, and so the same tokens.
    assert len({row["text"] for row in rows.values()}) > 0.9 * ROWS

    assert "NOTHING IS COMPUTED: the virtual node rtx5090x8 stands in for GPUs" in run.printed
    assert "NOTHING COMPUTED   the virtual node rtx5090x8 stood in for GPUs with llama2-70b" in run.printed
    told = json.loads((run.directory / "summary.json").read_text())
    assert told["virtual_node"]["model"] == "llama2-70b"
    assert [
        (choice["chosen"], "nothing was computed" in choice["reason"]) for choice in told["policies"]
    ] == [(policy, True)]
    (reports,) = run.directory.glob("runs/*/engine_metrics.parquet")
    metrics = [dict(row) for row in pq.read_table(reports).column("metrics").to_pylist()]
    assert any(of_report.get("nothing_computed") == 1.0 for of_report in metrics)

    if summary.mlflow_run_id is not None:
        recorded = MlflowClient(f"sqlite:///{run.directory / 'mlflow' / 'mlflow.db'}").get_run(
            summary.mlflow_run_id
        )
        assert recorded.data.tags["nothing_computed"].startswith("virtual node {'node': 'rtx5090x8'")
    assert (summary.mlflow_run_id is not None) == (policy == "pipemax")

    real = {"model": str(DEMO_MODEL), "policy": policy}
    with pytest.raises(JobError, match=r"annotated in another way: engine was .*virtual_node.*, is "):
        run.run(id_columns=("id",), engine=real)
