"""Write down how a run ended, whatever ended it: ``complete``, ``rows_left`` and ``ended_by`` in the summary's files.

A run that is killed writes nothing more, so the file of ``--summary`` says from the start that the run is not complete.
"""

import logging
from dataclasses import replace
from types import TracebackType
from typing import Self

from pipemax_spark.errors import JobError, RowCountError, ended_by
from pipemax_spark.job.job import JobCall
from pipemax_spark.job.record import RowCounts
from pipemax_spark.job.run import Run
from pipemax_spark.report.summary import Summary
from pipemax_spark.storage.hadoop import write_file

log = logging.getLogger(__name__)


class EndRecord:
    """The record of one run's end, from entry to exit; ``counts``, ``run`` and ``summary`` say what is known so far."""

    def __init__(self, call: JobCall) -> None:
        self._call = call
        self._path = call.options.summary
        self.counts = RowCounts()
        self.run: Run | None = None
        """The run, once there are rows to do."""
        self.summary: Summary | None = None
        """The run's own summary, which it has written, and after the exit that of its end."""

    def __enter__(self) -> Self:
        """Say in the file that the run works. Raise ``JobError`` if the file cannot be written."""
        if self._path is not None:
            try:
                write_file(self._path, self._so_far().to_json(), self._call.spark)
            except OSError as error:
                raise JobError(f"summary {self._path!r} cannot be written: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        self.summary = replace(self.summary or self._so_far(), ended_by=str(ended_by(error)))
        if isinstance(error, RowCountError):
            self.summary = replace(self.summary, rows_in=error.rows)
        of_run = None if self.run is None else str(self._call.directory / "summary.json")
        for path in (self._path, of_run):
            if path is None:
                continue
            try:
                write_file(path, self.summary.to_json(), self._call.spark)
            except Exception:  # the error that ended the run must reach the caller
                log.warning("%s could not be written", path, exc_info=True)

    def _so_far(self) -> Summary:
        counts, committed = self.counts, 0 if self.run is None else self.run.committed_rows
        rows_left = None
        if counts.to_do is not None and not self._call.options.incremental:
            rows_left = counts.to_do - committed + counts.left_out
        return Summary(
            complete=rows_left == 0,
            rows_left=rows_left,
            rows_in=counts.rows_in,
            rows_out=committed,
            rows_skipped=counts.skipped,
            rows_left_out=counts.left_out,
            output=self._call.table.name,
            output_format=self._call.table.format_name,
            mlflow_run_id=None if self.run is None else self.run.tracker.run_id,
        )
