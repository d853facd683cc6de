"""``stop_engines``: end the engine servers of a session's executors, to free their GPUs or to load a changed model.

An engine server listens on a socket of its own node, so only a task on its executor reaches it. Spark has no way to run
one task on each executor. So this module runs rounds of tasks, with one task per slot and each task long enough that
Spark uses all free slots, until each executor that Spark knows has run one. A session over Spark Connect does not list
its executors, so only one round runs there.
"""

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError
from pipemax_spark.executor.stopping import END_S, VISIT_SCHEMA, Visit, is_own_name
from pipemax_spark.spark.jobs import jobs_of
from pipemax_spark.spark.session import is_connect, is_local

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row, SparkSession

log = logging.getLogger(__name__)

_STAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Minimum duration of a task in each round; the last value also applies to further rounds."""
_CANCEL_PERIOD_S = 1.0
"""Repeat the cancellation, because Spark may not have started the tasks yet."""
_DEFAULT_PROFILE = 0
_CONNECT_ROWS = 100_000
"""More than a cluster has slots: Spark distributes them over as many tasks as it has cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEngines:
    """The engines that ``stop_engines`` has stopped."""

    engines: int
    hosts: Mapping[str, int]
    """Host → number of stopped engines that ran there."""
    unreached: tuple[str, ...] = ()
    """Hosts of executors that had no task slot free in time: engines may still run there."""


def stop_engines(spark: "SparkSession", *, force: bool = False, timeout_s: float = 60.0) -> StoppedEngines:
    """Stop the engines of this session's executors, and return when their servers have ended.

    The next ``annotate_table()``, action on ``annotate()`` or query with a UDF starts engines again. Answers that the
    servers kept for UDFs are lost.

    Raise ``JobError``, and stop nothing, if tasks are using one of the engines, or one does not answer. With ``force``
    such engines are stopped too. That ends no job: its tasks start their engine again, and the rows that were in it are
    computed again.

    Executors whose task slots are all busy for ``timeout_s`` seconds cannot be reached: ``StoppedEngines.unreached``
    names their hosts. Raise ``JobError`` if no executor can be reached.
    """
    seen, unreached = _visit_executors(spark, Visit(force=force), timeout_s)
    if not force and (use := _use_text(seen)):
        raise JobError(
            f"{use}: wait for those tasks or cancel their job; force=True stops their engine, and tasks that are "
            "still running start it again. Nothing was stopped"
        )
    servers = frozenset(row["server"] for row in seen if row["server"] is not None)
    if servers:
        seen, unreached = _visit_executors(spark, Visit(stops=servers, force=force), timeout_s + END_S)
    hosts = {row["server"]: row["host"] for row in seen if row["ended"]}
    still_there = [row for row in seen if row["server"] in servers - hosts.keys()]
    if use := _use_text(still_there):
        raise JobError(
            f"{len(hosts)} engines were stopped, but meanwhile {use}: call stop_engines again later"
        )
    if unreached:
        log.warning(
            "stop_engines did not reach %d executors, on %s, because no task slot became free there: engines may still "
            "run on them",
            len(unreached),
            ", ".join(unreached),
        )
    return StoppedEngines(engines=len(hosts), hosts=dict(Counter(hosts.values())), unreached=unreached)


def _use_text(seen: "Sequence[Row]") -> str:
    """Say which engines are in use; empty if none is."""
    uses = {row["server"]: row for row in seen if row["server"] is not None and row["tasks"] != 0}
    texts = (
        f"the engine on {row['host']} "
        + ("does not answer" if row["tasks"] is None else f"is in use by {row['tasks']} tasks")
        for row in uses.values()
    )
    return ", ".join(sorted(texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Executor:
    """An executor, as Spark lists it."""

    name: str
    host: str
    slots: int
    profile_id: int


def _visit_executors(
    spark: "SparkSession", visit: Visit, timeout_s: float
) -> "tuple[list[Row], tuple[str, ...]]":
    """Run rounds of tasks until each executor has had one, or the time is over.

    Return the rows of VISIT_SCHEMA, and the hosts of executors that had none. Raise ``JobError`` if all of them are.
    """
    deadline_s = time.monotonic() + timeout_s
    executors, rows = _executors(spark), []
    unreached = executors or []
    for stay_s in chain(_STAYS_S, repeat(_STAYS_S[-1])):
        for frame in _tasks(spark, replace(visit, stay_s=stay_s), executors, unreached):
            rows += _rows_within(frame, deadline_s)
        executors = _executors(spark)
        unreached = _unreached(executors or [], {row["executor"] for row in rows})
        if not unreached or time.monotonic() > deadline_s:
            break
    if not rows and unreached:
        raise JobError(
            f"no executor could be reached within {timeout_s:g} s: other Spark jobs take all task slots. Cancel them, "
            "or give a longer timeout_s. Nothing was stopped"
        )
    return rows, tuple(sorted(executor.host for executor in unreached))


def _executors(spark: "SparkSession") -> list[_Executor] | None:
    """Return Spark's current executors (in local mode, the driver), or None over Spark Connect."""
    if is_connect(spark):
        return None
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    executors = [
        _Executor(
            name=executor.id(),
            host=executor.hostPort().rpartition(":")[0],
            slots=max(1, executor.maxTasks()),
            profile_id=executor.resourceProfileId(),
        )
        for executor in (listed.apply(index) for index in range(listed.size()))
    ]
    return executors if is_local(spark) else [e for e in executors if e.name != "driver"]


def _unreached(executors: Sequence[_Executor], visited: set[str]) -> list[_Executor]:
    """Return the executors that were not visited.

    A visited executor that does not know its Spark id reports an id of our own; such executors are only counted.
    """
    without = [executor for executor in executors if executor.name not in visited]
    num_unnamed = sum(is_own_name(name) for name in visited)
    return without[: max(0, len(without) - num_unnamed)]


def _tasks(
    spark: "SparkSession", visit: Visit, executors: Sequence[_Executor] | None, unreached: Sequence[_Executor]
) -> "Iterator[DataFrame]":
    """Yield DataFrames whose tasks visit executors: one for each resource profile, with a task for each slot."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(VISIT_SCHEMA)
    if executors is None:
        yield spark.range(_CONNECT_ROWS).mapInArrow(visit, schema)
        return
    for profile_id in sorted({executor.profile_id for executor in unreached}):
        slots = sum(executor.slots for executor in executors if executor.profile_id == profile_id)
        rows = spark.range(0, slots, 1, slots)
        yield rows.mapInArrow(visit, schema, profile=_profile(spark, profile_id))


def _profile(spark: "SparkSession", profile_id: int) -> "ResourceProfile | None":
    from pyspark.resource import ResourceProfile

    if profile_id == _DEFAULT_PROFILE:
        return None
    manager = spark.sparkContext._jsc.sc().resourceProfileManager()
    return ResourceProfile(_java_resource_profile=manager.resourceProfileFromId(profile_id))


def _rows_within(frame: "DataFrame", deadline_s: float) -> "list[Row]":
    """Return the frame's rows, or no rows if that takes too long; its tasks are then cancelled."""
    spark, tag = frame.sparkSession, f"pipemax-stop-{uuid.uuid4().hex}"
    is_done, is_late = threading.Event(), threading.Event()
    jobs = jobs_of(spark)

    def cancel() -> None:
        while not is_done.wait(max(_CANCEL_PERIOD_S, deadline_s - time.monotonic())):
            is_late.set()
            jobs.cancel(tag)

    jobs.tag(tag)
    threading.Thread(target=cancel, name="pipemax-stop", daemon=True).start()
    try:
        return frame.collect()
    except Exception:
        if is_late.is_set():
            return []
        raise
    finally:
        is_done.set()
        jobs.untag(tag)
