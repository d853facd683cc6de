"""The jobs of a cascade before the one that fills the output: each answers rows of the epoch in a table of its own.

All jobs of a run share its limits. Each is resumed as any job is.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import EndedBy, LimitReachedError, OnDelete, OnError
from pipemax_spark.job.annotation_job import AnnotationJob
from pipemax_spark.job.cascade_facts import phase_facts
from pipemax_spark.job.record import EndRecord
from pipemax_spark.options import JobOptions
from pipemax_spark.report.summary import Summary
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.rows.checked import Checked
from pipemax_spark.storage.cascade_store import CascadeStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NOTHING_LEFT = 1e-6
"""Of a limit: the job then ends before its first row."""


class PhaseEndedError(Exception):
    """A limit has ended a run in a phase before the output is filled."""

    def __init__(self, phase: str, summary: Summary | None) -> None:
        super().__init__(phase)
        self._phase = phase
        self._summary = summary

    def recorded(self, end: EndRecord, checked: Checked, terminal: Terminal) -> Summary | None:
        """Write how the run has ended, and return its summary; None if another run holds the phase's table."""
        summary = self._summary
        if summary is None:
            return None
        assert summary.ended_by is not None, summary
        limit = summary.ended_by.replace("_", "-")
        end_of_run = f"--{limit} ended the run in '{self._phase}'"
        sentence = f"So far nothing is certified and nothing is in the output: {end_of_run}."
        end.summary = replace(
            summary,
            output=end.output,
            rows_in=checked.rows_in,
            rows_out=0,
            rows_error=0,
            rows_skipped=0,
            rows_left=None,
            cascade={"sentence": sentence, "rows_kept": 0, "rows_sampled": 0},
        )
        terminal.warn(f"{sentence} Run the same command again to go on")
        end.close(LimitReachedError(sentence, ended_by=EndedBy(summary.ended_by)))
        return end.summary


class Phases:
    """Runs the jobs of one run of a cascade, from whose beginning its limits count."""

    def __init__(
        self, spark: "SparkSession", options: JobOptions, terminal: Terminal, *, small: JobOptions
    ) -> None:
        """``options`` are those of the cascade, ``small`` those of its small model."""
        self._spark = spark
        self._options = options
        self._terminal = terminal
        self._small = small
        self.done: dict[str, Mapping[str, Any]] = {}
        """What each job of the epoch has done and cost, by the name of its table."""
        self._began_s = time.monotonic()
        # Of the jobs that have ended:
        self._tokens = 0
        self._token_cost = 0.0

    def begin_epoch(self) -> None:
        """Count what the jobs do from now on as another epoch's."""
        self.done = {}

    def small(self, store: CascadeStore, rows: str, answers: str, *, says: str) -> Summary:
        """Have the small model answer these rows. Raise ``PhaseEndedError`` if a limit leaves some of them."""
        options = replace(
            self._side(store, rows, answers),
            engine=self._small.engine,
            generation=self._small.generation,
            ask=self._small.ask,
            max_error_rate=1.0,  # a row without a small answer goes to the large model
            on_error=OnError.ROW,
        )
        return self._phase(options, answers, says)

    def large(
        self,
        store: CascadeStore,
        rows: str,
        answers: str,
        checked: Checked,
        *,
        says: str,
        computes_each: bool = False,
    ) -> Summary:
        """Have the large model answer these rows, likewise; with ``computes_each`` also those that it has answered.

        Its engine is laid out for all rows of the output's job, which goes on with it without another start.
        """
        engine = self._options.engine
        if (lengths := checked.plan.options.engine.get("row_lengths")) is not None:
            engine = {**engine, "row_lengths": lengths}
        options = replace(self._side(store, rows, answers), engine=engine, compute_each=computes_each)
        return self._phase(options, answers, says)

    def _phase(self, options: JobOptions, name: str, says: str) -> Summary:
        self._terminal.say("Cascade", says)
        summary = self.run(options)
        if summary is not None:
            self.done[name] = phase_facts(summary, options.prices)
        if summary is None or not summary.complete:
            raise PhaseEndedError(says, summary)
        return summary

    def run(self, options: JobOptions) -> Summary | None:
        """Run one of the jobs within what the ones before it have left of the limits."""
        hours = (time.monotonic() - self._began_s) / 3600
        spent = {
            "max_hours": hours,
            "max_cost": hours * (options.price_per_hour or 0.0) + self._token_cost,
            "max_tokens_total": self._tokens,
        }
        left = {
            name: max(_NOTHING_LEFT, limit - spent[name])
            for name in spent
            if (limit := getattr(options, name)) is not None
        }
        summary = AnnotationJob(self._spark, replace(options, **left), self._terminal).run()
        if summary is not None:
            self._tokens += summary.prompt_tokens + summary.completion_tokens
            self._token_cost += options.prices.cost(seconds=0.0, spent=summary.spent)
        return summary

    def _side(self, store: CascadeStore, rows: str, answers: str) -> JobOptions:
        """Return the options of a job between two tables of the epoch."""
        return replace(
            self._options,
            **reading(store.path(rows)),
            output=store.path(answers),
            cascade=None,
            work_dir=None,
            select=(),
            mlflow_experiment="",
            gold_column=None,
            summary=None,
            canary=None,
            notify=None,
            metrics_port=None,
            compact=False,
            batch_output=None,
        )


def reading(path: str) -> dict[str, Any]:
    """Return the options of a job that reads the rows of an epoch, which were chosen from the input already."""
    return {
        "input": path,
        "input_format": None,
        "input_option": {},
        "where": None,
        "limit": None,
        "expect_rows": None,
        "fail_if_empty": False,
        "incremental": False,
        "checkpoint": None,
        "skip_changes": False,
        "rescan": False,
        "on_delete": OnDelete.KEEP,
        "cascade_reset": False,
    }
