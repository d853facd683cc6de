"""Runs with ``--cascade`` that a limit or another run ends, and runs that do rows again."""

import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipemax_spark.errors import IfRunning, OtherRunError
from pipemax_spark.job import cascade, cascade_phases
from pipemax_spark.job.cascade_phases import Phases
from pipemax_spark.storage.cascade_store import CascadeStore
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs
from tests.spark.test_cascade import SEED, facts_of, large_answers, run_cascade, texts, with_cascade


@pytest.fixture
def jobs(run: Jobs, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setattr(cascade, "new_seed", lambda: SEED)
    return with_cascade(run)


def records(jobs: Jobs) -> dict[str, str]:
    (path,) = jobs.directory.rglob("records")
    return {row["name"]: row["text"] for row in jobs.spark.read.format("delta").load(str(path)).collect()}


@pytest.mark.long  # five runs
def test_a_limit_ends_any_phase_and_the_next_run_goes_on(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade, "pilot_share", lambda rows: 60 / rows)
    jobs.write_input(texts(0, 400))
    real, now_s = Phases.run, [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(cascade_phases, "time", clock)

    def run_until(job: str) -> Any:
        """Two hours have passed when this job begins."""

        def late(self: Phases, options: Any) -> Any:
            now_s[0] = 7_200.0 if Path(options.output).name == job else 0.0
            return real(self, options)

        now_s[0] = 0.0
        with monkeypatch.context() as patch:
            patch.setattr(Phases, "run", late)
            return run_cascade(jobs, max_hours=1.0)

    for job in ("small", "pilot_labels", "labels"):
        summary = run_until(job)
        told = json.loads((jobs.directory / "summary.json").read_text())
        for said in (summary.ended_by, told["ended_by"]):
            assert said == "max_hours", job
        assert (told["complete"], told["rows_out"], told["rows_in"]) == (False, 0, 400)
        assert told["output"] == jobs.output
        assert told["cascade"]["sentence"].startswith("So far nothing is certified")
        assert "Run the same command again to go on" in " ".join(jobs.printed.split())
        assert jobs.rows() == [], job

    assert run_until("out").ended_by == "max_hours"
    facts, first = facts_of(jobs, "summary.json"), records(jobs)
    assert facts["sentence"].startswith("So far, ")
    large = large_answers(jobs)
    so_far = {row["id"]: row["annotation"] for row in jobs.rows()}
    assert 0 < len(so_far) < 400
    assert sum(row["model"] == "fake-small" for row in so_far.values()) == facts["rows_kept"] > 0
    misses = sum(row["text"] != large[key] for key, row in so_far.items())
    assert misses <= facts["certificate"]["max_misses"]

    assert run_cascade(jobs).complete
    assert records(jobs) == first
    rows = {row["id"]: row["annotation"] for row in jobs.rows()}
    assert len(rows) == len(jobs.rows()) == 400
    assert all(rows[key]["text"] == row["text"] for key, row in so_far.items())


@pytest.mark.long  # three jobs, and MLflow's store
def test_a_run_that_leaves_the_large_model_nothing_more_has_its_page_and_its_run_in_mlflow(
    tracked_run: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setattr(cascade, "new_seed", lambda: SEED)
    jobs = with_cascade(tracked_run)
    jobs.write_input(texts(0, 400))
    right = {"cascade": fake_config("fake-small", errs=1e-9), "agree": 0.5, "price_per_hour": 3.0}
    summary = run_cascade(jobs, **right)
    assert (summary.complete, summary.rows_out, len(jobs.rows())) == (True, 0, 400)
    sentence = summary.cascade["sentence"]
    (page,) = (path for path in Path(jobs.directory, "runs").glob("*/report.html"))
    assert sentence in unescape(page.read_text())
    assert "the large model alone about" in page.read_text()
    assert json.loads((page.parent / "summary.json").read_text())["cascade"]["rows_kept"] > 200
    client = MlflowClient(f"sqlite:///{jobs.defaults.driver_dir / 'mlflow' / 'mlflow.db'}")
    tracked = client.get_run(summary.mlflow_run_id)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags["cascade"] == sentence[:500]
    assert any(name.endswith("cascade_rows_kept") for name in tracked.data.metrics)


@pytest.mark.long  # a cascade, and two jobs
def test_rows_done_again_ask_the_large_model_and_never_change_the_certificate(jobs: Jobs) -> None:
    errors = [(i, f"shop sells [[error]] {i}") for i in range(400, 403)]
    jobs.write_input([*texts(0, 400), *errors])
    jobs.defaults = replace(jobs.defaults, max_error_rate=1.0)
    assert run_cascade(jobs).complete
    first = records(jobs)
    before = {row["id"]: row["annotation"] for row in jobs.rows()}
    assert {key for key, row in before.items() if row["error"] is not None} == {400, 401, 402}
    kept = [key for key, row in before.items() if row["model"] == "fake-small"]

    retried = run_cascade(jobs, retry_errors=True)
    assert retried.rows_out == 3
    assert "fake-small" not in {row["annotation"]["model"] for row in jobs.rows() if row["id"] >= 400}

    changed = [(key, f"shop sells another item {key}") for key in kept[:5]]
    others = [row for row in texts(0, 400) if row[0] not in kept[:5]]
    jobs.write_input([*others, *changed, *errors])
    assert run_cascade(jobs, redo_changed=True).rows_out == 5
    after = {row["id"]: row["annotation"] for row in jobs.rows()}
    assert {after[key]["model"] for key in kept[:5]} == {"fake"}
    assert all(after[key]["text"] == before[key]["text"] for key in kept[5:])
    assert records(jobs) == first
    assert run_cascade(jobs).rows_out == 0


@pytest.mark.long  # a cascade
def test_the_rows_of_a_limit_are_the_first_in_the_order(jobs: Jobs) -> None:
    jobs.write_input(texts(0, 500))
    summary = run_cascade(jobs, limit=400, order_by="id DESC")
    assert sorted(row["id"] for row in jobs.rows()) == list(range(100, 500))
    assert (summary.rows_in, summary.rows_left, summary.complete, summary.ended_by) == (
        500,
        100,
        False,
        "limit",
    )
    rest = run_cascade(jobs)
    assert (rest.rows_in, rest.complete) == (500, True)
    assert rest.rows_skipped >= 400
    assert sorted(row["id"] for row in jobs.rows()) == list(range(500))


@pytest.mark.long  # two cascades
def test_a_run_that_finishes_another_s_rows_goes_on_with_those_that_came_since(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.write_input(texts(0, 300))
    real = CascadeStore.write

    def dies(self: CascadeStore, name: str, rows: Any) -> None:
        if name == "answers":
            raise RuntimeError("the driver dies")
        real(self, name, rows)

    with monkeypatch.context() as patch:
        patch.setattr(CascadeStore, "write", dies)
        with pytest.raises(RuntimeError, match="dies"):
            run_cascade(jobs)
    jobs.write_input(texts(0, 600))
    summary = run_cascade(jobs)
    assert (summary.rows_in, summary.complete) == (600, True)
    assert summary.rows_skipped >= 300
    assert sorted(row["id"] for row in jobs.rows()) == list(range(600))


@pytest.mark.long  # a cascade
def test_a_second_run_is_refused_while_one_works_and_finds_its_records_afterwards(jobs: Jobs) -> None:
    jobs.write_input(texts(0, 400))
    real = CascadeStore.put
    refused: list[str] = []

    def put(self: CascadeStore, name: str, text: str) -> str:
        """In the midst of the first run, a second one begins."""
        if not refused:
            refused.append(name)
            with pytest.raises(OtherRunError, match="another job"):
                run_cascade(jobs, summary=None)
            skipped = run_cascade(jobs, summary=None, if_running=IfRunning.SKIP)
            assert (skipped.complete, skipped.ended_by) == (False, "other_run")
        return real(self, name, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CascadeStore, "put", put)
        assert run_cascade(jobs).complete
    assert refused == ["draw"]
    assert len({row["id"] for row in jobs.rows()}) == len(jobs.rows()) == 400
