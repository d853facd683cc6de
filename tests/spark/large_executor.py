"""An application with one executor of many cores, run by ``test_large_executor`` as a process of its own.

python -m tests.spark.large_executor DIRECTORY ENGINE_PYTHON: prints one JSON object.
"""

import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipemax_spark import annotate
from pipemax_spark.spark.session import get_session
from pipemax_spark.spark.slots import other_slots, slots_of
from tests.fakes.settings import fake_config
from tests.waiting import wait_until

ROWS = 20
_STEADY_S = 2.0


def active_tasks(spark: Any) -> int:
    """Tasks that run now on executors."""
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    executors = (listed.apply(index) for index in range(listed.size()))
    return sum(executor.activeTasks() for executor in executors if executor.id() != "driver")


def main(directory: Path, engine_python: str) -> None:
    spark = get_session("large executor", log_dir=directory / "logs")
    held = directory / "held"
    held.touch()
    rows = spark.range(0, ROWS, 1, ROWS).selectExpr("concat('row ', id) AS text")
    options = {
        "prompt_column": "text",
        "engine_python": engine_python,
        # Held: every slot has a task, and none ends.
        "engine": fake_config(held_by=str(held), held_row_s=600.0),
    }
    # Two calls in one stage: Spark refuses a stage with two profiles.
    annotated = annotate(annotate(rows, **options), output_column="again", **options)
    found: list[tuple[str, str]] = []
    job = threading.Thread(
        target=lambda: found.extend(
            (row["annotation"]["text"], row["again"]["text"]) for row in annotated.collect()
        ),
        daemon=True,
    )
    job.start()
    slots = slots_of(spark)
    wait_until(lambda: active_tasks(spark) >= slots.total, 120, "tasks in all slots")
    time.sleep(_STEADY_S)
    most = active_tasks(spark)
    held.unlink()
    job.join(120)
    report = {
        "slots": asdict(slots),
        "other_slots": other_slots(spark),
        "active_tasks": most,
        "answers": sorted(found),
    }
    print(json.dumps(report), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
