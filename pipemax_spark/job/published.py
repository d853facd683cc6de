"""Publish a run that has filled a table: its page, the files of its directory, and its run in MLflow."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from pipemax_spark.job.description import run_facts
from pipemax_spark.job.job import Job
from pipemax_spark.report.cascade_texts import cascade_metrics
from pipemax_spark.report.charts import charts_of
from pipemax_spark.report.engine_log import ENGINE_METRICS
from pipemax_spark.report.engine_tracks import EngineTrack
from pipemax_spark.report.report_page import report_page
from pipemax_spark.report.samples import Sample
from pipemax_spark.report.summary import SUMMARY_FILE, Findings, Summary
from pipemax_spark.report.tracking import Tracker
from pipemax_spark.storage.hadoop import write_file

_ARTIFACTS = (SUMMARY_FILE, ENGINE_METRICS, "throughput.svg", "report.html")
"""Files of a run's directory that MLflow gets, as far as they are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a run went: its run in MLflow, and what its engines reported."""

    tracker: Tracker
    tracks: Mapping[str, EngineTrack] = field(default_factory=dict)
    samples: Sequence[Sample] = ()


def published(
    job: Job, course: Course, summary: Summary, findings: Findings, *, status: str, stopped_by: str | None
) -> tuple[Summary, dict[str, str]]:
    """Write the files of a run that has ended, and end it in MLflow; return its summary, and where both are."""
    write_of_run(job, SUMMARY_FILE, summary.to_json())
    report, tracker = write_page(job, course, summary, findings, stopped_by=stopped_by), course.tracker
    figures = {key: float(v) for key, v in asdict(summary).items() if isinstance(v, int | float)}
    figures |= {f"time_{part}_s": seconds for part, seconds in summary.time_account_s.items()}
    for accuracy in findings.accuracies:
        if accuracy.rows:
            name = "accuracy" if accuracy.question is None else f"accuracy_{accuracy.question}"
            figures[name] = accuracy.right / accuracy.rows
    if summary.cascade is not None:
        figures |= cascade_metrics(summary.cascade)
        tracker.tag({"cascade": str(summary.cascade["sentence"])})
    artifacts = [path for name in _ARTIFACTS if (path := job.directory / name).exists()]
    tracker.finish(status, course.samples, figures, artifacts)
    places = {**({} if report is None else {"Report": str(report)}), "MLflow run": tracker.place}
    # A store that was slow at first may have returned its run id only now.
    return replace(summary, mlflow_run_id=tracker.run_id), places


def write_page(
    job: Job, course: Course, summary: Summary, findings: Findings, *, stopped_by: str | None
) -> Path | None:
    """Write the run's page and return its path, or None if it could not be written."""
    page = report_page(
        run_facts(job, ended=datetime.now(UTC), stopped_by=stopped_by),
        summary,
        findings,
        places_of(job, {"MLflow run": course.tracker.place}),
        charts_of(course.tracks),
        prices=job.options.prices,
    )
    return write_of_run(job, "report.html", page)


def write_of_run(job: Job, name: str, text: str) -> Path | None:
    """Write a file of the run's directory; return its path.

    The rows are committed, so a failure costs a warning only, and None is returned.
    """
    path = job.directory / name
    try:
        write_file(str(path), text, job.spark)
    except OSError as error:
        job.terminal.warn(f"{path} could not be written: {error}")
        return None
    return path


def places_of(job: Job, places: Mapping[str, str]) -> dict[str, str]:
    """Return where a person finds what the run has left, by name."""
    return {**places, "Logs": str(job.options.log_dir)}
