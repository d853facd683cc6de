"""``stop_engines``: the engines end, those in use are left unless told otherwise, and the next call starts new ones."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark import annotate, stop_engines
from pipemax_spark.errors import JobError
from pipemax_spark.spark.slots import slots_of
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import expected_text, fake_config
from tests.spark.processes import servers_of
from tests.waiting import wait_until

Texts = Callable[..., list[str]]


@pytest.fixture
def own_python(tmp_path: Path) -> str:
    return write_engine_python(tmp_path / "python")


@pytest.fixture
def texts(spark: Any, own_python: str) -> Texts:
    """Annotates as many rows as partitions, and returns their answers."""

    def annotated(partitions: int, **options: Any) -> list[str]:
        frame = spark.range(0, partitions, 1, partitions).selectExpr("concat('row ', id) AS text")
        rows = annotate(
            frame, prompt_column="text", engine=fake_config(**options), engine_python=own_python
        ).collect()
        return sorted(row["annotation"]["text"] for row in rows)

    return annotated


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """While this file exists, an engine that is told of it finishes no row."""
    path = tmp_path / "held"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def expected(rows: int) -> list[str]:
    return sorted(expected_text(f"row {row}") for row in range(rows))


def test_engines_end_with_their_processes_and_the_next_action_starts_one(
    spark: Any, own_python: str, texts: Texts
) -> None:
    assert texts(2, child_process=True) == expected(2)
    (server,) = servers_of(own_python)
    stopped = stop_engines(spark)
    assert not server.is_running()
    assert not servers_of(own_python)
    # Those of other tests, which use the same session, end as well.
    assert stopped.engines == sum(stopped.hosts.values()) >= 1
    assert stopped.unreached == ()
    assert stop_engines(spark).engines == 0
    assert texts(2) == expected(2)
    (successor,) = servers_of(own_python)
    assert successor != server


@pytest.mark.long  # engines that start
def test_an_engine_in_use_is_stopped_only_by_force_and_its_tasks_start_it_again(
    spark: Any, own_python: str, texts: Texts, held: Path
) -> None:
    answers: list[str] = []
    options = {"held_by": str(held), "held_row_s": 600.0}
    job = threading.Thread(daemon=True, target=lambda: answers.extend(texts(2, **options)))
    job.start()
    wait_until(lambda: servers_of(own_python), 120, "the engine's start")
    # An engine that no task has asked yet is not in use: it is stopped, and the tasks start another.
    wait_until(lambda: in_use(spark), 120, "tasks that use the engine")
    (server,) = servers_of(own_python)
    stopped = stop_engines(spark, force=True)
    assert stopped.engines >= 1
    assert not server.is_running()
    held.unlink()
    job.join(60)
    assert answers == expected(2)
    assert stop_engines(spark).engines == 1


def in_use(spark: Any) -> bool:
    try:
        stop_engines(spark)
    except JobError as error:
        return "is in use by 2 tasks" in str(error)
    return False


@pytest.mark.long  # waits for slots
def test_executors_without_a_free_slot_are_reported_in_time(
    spark: Any, own_python: str, texts: Texts, held: Path
) -> None:
    answers: list[str] = []
    slots = slots_of(spark).total
    options = {"held_by": str(held), "held_row_s": 600.0}
    job = threading.Thread(daemon=True, target=lambda: answers.extend(texts(2 * slots, **options)))
    job.start()
    tracker = spark.sparkContext.statusTracker()

    def busy_slots() -> int:
        stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
        return sum(stage.numActiveTasks for stage in stages if stage is not None)

    wait_until(lambda: busy_slots() == slots and servers_of(own_python), 120, "tasks in all slots")
    with pytest.raises(JobError, match=r"could be reached within 2 s: other Spark jobs take all task slots"):
        stop_engines(spark, timeout_s=2.0)
    assert servers_of(own_python)
    held.unlink()
    job.join(60)
    assert answers == expected(2 * slots)
