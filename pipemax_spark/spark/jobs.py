"""Name, watch and cancel a session's Spark jobs, in a session of either kind.

A classic session has a context in the driver, which tells what each job's tasks do. Over Spark Connect the driver is
elsewhere and tells a client nothing of tasks that it can rely on; there is only the tag, by which jobs are cancelled.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipemax_spark.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTasks:
    """The tasks of a chunk that annotate. All are 0 as long as none has begun, and where Spark does not tell."""

    total: int = 0
    running: int = 0
    completed: int = 0

    @property
    def has_waiting(self) -> bool:
        """Whether a task waits for a slot."""
        return self.running + self.completed < max(1, self.total)


class SparkJobs(Protocol):
    """The Spark jobs of one session."""

    def tag(self, tag: str) -> None:
        """Give this tag to the jobs that this thread starts from now on."""
        ...

    def untag(self, tag: str) -> None:
        """Give it to this thread's jobs no more."""
        ...

    def describe(self, text: str, *, group: str | None = None) -> None:
        """Give this text, and the group, to the jobs that this thread starts from now on."""
        ...

    def cancel(self, tag: str) -> None:
        """Cancel the running jobs with this tag, whichever thread has started them."""
        ...

    def tasks_of(self, group: str) -> ChunkTasks:
        """Return the tasks of the group's stage that annotates: in a job of two stages, the one after the shuffle."""
        ...

    def running_tasks(self) -> int:
        """Count the running tasks of all jobs."""
        ...


def jobs_of(spark: "SparkSession") -> SparkJobs:
    """Return the session's jobs."""
    return _ConnectJobs(spark) if is_connect(spark) else _ClassicJobs(spark.sparkContext)


class _ClassicJobs:
    def __init__(self, context: "SparkContext") -> None:
        # Not the session's own tags, which it knows only in the thread that has added them.
        self._context = context

    def tag(self, tag: str) -> None:
        self._context.addJobTag(tag)

    def untag(self, tag: str) -> None:
        self._context.removeJobTag(tag)

    def describe(self, text: str, *, group: str | None = None) -> None:
        if group is None:
            self._context.setJobDescription(text)
        else:
            self._context.setJobGroup(group, text, interruptOnCancel=True)

    def cancel(self, tag: str) -> None:
        self._context.cancelJobsWithTag(tag)

    def tasks_of(self, group: str) -> ChunkTasks:
        tracker = self._context.statusTracker()
        for job_id in tracker.getJobIdsForGroup(group):
            job = tracker.getJobInfo(job_id)
            if job is None or len(job.stageIds) < 2:
                continue
            stage = tracker.getStageInfo(max(job.stageIds))
            if stage is not None and stage.numActiveTasks + stage.numCompletedTasks > 0:
                return ChunkTasks(
                    total=stage.numTasks, running=stage.numActiveTasks, completed=stage.numCompletedTasks
                )
        return ChunkTasks()

    def running_tasks(self) -> int:
        tracker = self._context.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        return sum(stage.numActiveTasks for stage in stages if stage is not None)


class _ConnectJobs:
    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark

    def tag(self, tag: str) -> None:
        self._spark.addTag(tag)

    def untag(self, tag: str) -> None:
        self._spark.removeTag(tag)

    def describe(self, text: str, *, group: str | None = None) -> None:
        """Do nothing: a client cannot describe its jobs."""

    def cancel(self, tag: str) -> None:
        self._spark.interruptTag(tag)

    def tasks_of(self, group: str) -> ChunkTasks:
        return ChunkTasks()

    def running_tasks(self) -> int:
        return 0
