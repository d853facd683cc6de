"""What all parts of one run of the job share. Each object is complete when it is made, and never changes."""

import time
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from pipemax_spark.options import JobOptions
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.remaining import Remaining
from pipemax_spark.rows.workdir import WorkDirectory
from pipemax_spark.storage.output_table import OutputTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """A call that has rows answered by an engine."""

    spark: "SparkSession"
    options: JobOptions
    terminal: Terminal
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCall(EngineCall):
    """One call of the job, as far as it is known before anything is checked."""

    table: OutputTable
    """The output, which need not exist."""

    @property
    def directory(self) -> Path:
        """The driver's directory for the run."""
        return self.options.driver_dir / "runs" / self.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobCall):
    """One run of a job that has passed all checks, whose output exists and whose work directory is claimed."""

    checked: Checked
    work: WorkDirectory

    @classmethod
    def of(cls, call: JobCall, checked: Checked, work: WorkDirectory) -> "Job":
        known = {field.name: getattr(call, field.name) for field in fields(JobCall)}
        return cls(**known, checked=checked, work=work)

    @property
    def remaining(self) -> Remaining:
        """The object that says which rows are left."""
        return Remaining(self.table, self.options, self.checked)


def new_run_id() -> str:
    """Return the id of a new run, which begins with the time of its start."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
