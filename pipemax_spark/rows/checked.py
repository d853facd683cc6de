"""The facts about a job that has passed all checks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax.wire import PreflightReply
from pipemax_spark.executor.task import TaskPlan
from pipemax_spark.request.spec import AnnotationSpec
from pipemax_spark.storage.sources import Source

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The facts about a job that has passed all checks."""

    source: Source
    """The source, with only the rows that ``--where`` selects."""
    rows_in: int
    """The number of these rows when the job began."""
    schema: "StructType"
    """The input's columns that go to the output."""
    id_columns: tuple[str, ...]
    reply: PreflightReply
    spec: AnnotationSpec
    plan: TaskPlan
    unique_ids: str | None = None
    """What the claim notes of the check of the ids; see ``unique_ids``."""
