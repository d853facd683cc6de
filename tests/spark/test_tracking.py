"""The MLflow run of a job, read with MLflow's own client."""

import json
import os
from pathlib import Path

import pytest

from pipemax_spark.report.tracking import Tracker
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs


@pytest.mark.long  # a store of MLflow's
def test_a_job_is_one_run_with_what_is_needed_to_understand_it(tracked_run: Jobs) -> None:
    from mlflow import MlflowClient

    tracked_run.write_input([(i, f"word {i}") for i in range(600)])
    summary = tracked_run.run(id_columns=("id",), engine=fake_config(tokens_per_s=600))
    (choice,) = summary.policies
    assert choice["inputs"] == {"sampled_rows": 600, "rows": 600}, "what policy: auto decides by"
    assert "Policy   vllm: a fake has no scheduler\n" in tracked_run.printed
    assert summary.mlflow_run_id is not None
    client = MlflowClient(tracking_uri=f"sqlite:///{tracked_run.directory / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("pipemax")
    assert experiment is not None
    (recorded,) = client.search_runs([experiment.experiment_id])
    assert recorded.info.run_id == summary.mlflow_run_id
    assert recorded.info.status == "FINISHED"
    params, metrics = recorded.data.params, recorded.data.metrics
    assert params["engine.model"] == "fake"
    assert params["generation.max_tokens"] == "16"
    assert {"version.spark", "version.vllm", "spark.master", "spec_hash"} <= params.keys()
    assert metrics["total/rows_out"] == 600
    assert metrics["total/completion_tokens"] == summary.completion_tokens
    assert recorded.data.tags["policy"] == "vllm"
    history = client.get_metric_history(recorded.info.run_id, "throughput/rows_done")
    assert len(history) >= 2, "metrics over time"
    assert max(point.value for point in history) == 600
    artifacts = {artifact.path for artifact in client.list_artifacts(recorded.info.run_id)}
    assert artifacts == {"summary.json", "throughput.svg", "report.html", "engine_metrics.parquet"}
    assert {name.partition("/")[0] for name in metrics} >= {"throughput", "kv", "total"}
    description = recorded.data.tags["mlflow.note.content"].splitlines()
    assert len(description) == 5
    assert "600 rows" in description[0]
    (dataset,) = recorded.inputs.dataset_inputs
    assert dataset.dataset.name.endswith("in.parquet")
    (stored,) = Path(tracked_run.directory, "mlflow", "artifacts").rglob("summary.json")
    assert json.loads(stored.read_text())["rows_out"] == 600


@pytest.mark.long  # test_notebooks runs a job within a notebook
def test_within_a_notebook_s_run_a_job_is_a_child_run_and_the_notebook_s_run_goes_on(
    tracked_run: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = f"sqlite:///{tmp_path / 'notebook.db'}"
    tracked_run.write_input([(1, "a")])
    mlflow.set_tracking_uri(store)
    try:
        mlflow.set_experiment("of the notebook")
        with mlflow.start_run() as notebook:
            summary = tracked_run.run(id_columns=("id",))
            active = mlflow.active_run()
            assert active is not None
            assert active.info.run_id == notebook.info.run_id
            mlflow.log_metric("after", 1.0)
            tracked_run.write_input([(2, "b")])
            again = tracked_run.run(id_columns=("id",))
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]  # which unsets the environment's too
    client = mlflow.MlflowClient(tracking_uri=store)
    runs = {each.info.run_id: each for each in client.search_runs([notebook.info.experiment_id])}
    assert runs.keys() == {notebook.info.run_id, summary.mlflow_run_id, again.mlflow_run_id}
    for child in (summary.mlflow_run_id, again.mlflow_run_id):
        assert runs[child].data.tags["mlflow.parentRunId"] == notebook.info.run_id
        assert runs[child].info.status == "FINISHED"
        assert runs[child].data.metrics["total/rows_out"] == 1
    assert f"child of run {notebook.info.run_id}, at {store}" in tracked_run.printed
    assert dict(runs[notebook.info.run_id].data.metrics) == {"after": 1.0}
    assert not (tracked_run.directory / "mlflow").exists()


def test_the_caller_s_environment_is_as_it_was_once_a_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    tracker = Tracker("pipemax", local_store=tmp_path / "no" / "such", warn=lambda _: None)
    tracker.uri = "oddstore://nowhere"
    tracker.start("run", {})
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"
    tracker.finish("FINISHED", [])
    assert dict(os.environ) == before
