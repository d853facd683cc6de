"""What Spark did meanwhile, by its own counts, and under which settings."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Work:
    """Totals over stages and queries."""

    tasks: int = 0
    rows_read: int = 0
    """From files; of those that are read by their footers only, too."""
    rows_shuffled: int = 0
    bytes_shuffled: int = 0
    plans: tuple[str, ...] = ()
    """Of all queries, as Spark describes them."""

    def plans_with(self, word: str) -> int:
        return sum(word in plan for plan in self.plans)


@contextlib.contextmanager
def counted(spark: Any) -> Iterator[Work]:
    """Yield the work that is done within the context, filled in at its end."""
    context, gateway = spark.sparkContext._jsc.sc(), spark.sparkContext._gateway
    queries = spark._jsparkSession.sharedState().statusStore()

    def stages() -> dict[tuple[int, int], Any]:
        context.listenerBus().waitUntilEmpty()
        none = gateway.new_array(gateway.jvm.double, 0)
        empty = gateway.jvm.java.util.ArrayList()
        found = context.statusStore().stageList(empty, False, False, none, empty)
        found = [found.apply(i) for i in range(found.size())]
        return {(stage.stageId(), stage.attemptId()): stage for stage in found}

    def plans() -> dict[int, str]:
        found = queries.executionsList()
        found = [found.apply(i) for i in range(found.size())]
        return {query.executionId(): query.physicalPlanDescription() for query in found}

    before, plans_before = set(stages()), set(plans())
    work = Work()
    yield work
    new = [stage for number, stage in stages().items() if number not in before]
    work.tasks = sum(stage.numCompleteTasks() for stage in new)
    work.rows_read = sum(stage.inputRecords() for stage in new)
    work.rows_shuffled = sum(stage.shuffleWriteRecords() for stage in new)
    work.bytes_shuffled = sum(stage.shuffleWriteBytes() for stage in new)
    work.plans = tuple(plan for number, plan in plans().items() if number not in plans_before)


@contextlib.contextmanager
def set_to(spark: Any, values: Mapping[str, str | None]) -> Iterator[None]:
    """Set these settings of the session within the context, None to none, and restore them at its end."""

    def put(settings: Mapping[str, str | None]) -> None:
        for name, value in settings.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)

    before = {name: spark.conf.get(name, None) for name in values}
    put(values)
    try:
        yield
    finally:
        put(before)
