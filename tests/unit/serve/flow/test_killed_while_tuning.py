"""A replica is killed in each stage of a tuning: every row comes once with its answer, and the tuning goes on."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipemax.tuning.rules import TuningRules
from tests.unit.replicas.test_replica_set import pid_of, replica_set
from tests.unit.replicas.test_speculation import seen
from tests.unit.serve.flow.served_replicas import Served

QUICK = TuningRules(
    max_s=40.0,
    least_table_s=1.0,
    sweep_setting_s=1.0,
    block_s=2.0,
    residences=1.0,
    fewest_residences=1.0,
    worth=-1.0,
    worth_errors=0.0,
)
"""A race whatever the simulation says."""
MOST_LIMITS = (2048, 64)


@pytest.mark.parametrize(
    "stage",
    ["race", *(pytest.param(stage, marks=pytest.mark.long) for stage in ("start", "sweep", "settled"))],
)
def test_rows_come_once_and_the_tuning_ends_although_a_replica_is_killed(
    stage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stages: dict[str, Callable[[], bool]] = {
        "start": lambda: bool(served.rows),
        "settled": lambda: bool(served.tuning.note),
    }
    fake = {"tokens_per_s": 400.0, "steps_s": 1.0, "tunings": str(tmp_path / "model.yaml")}
    with replica_set(2, most_limits=MOST_LIMITS, **fake) as engine:
        served = Served(engine, rules=QUICK)
        served.run_until(stages.get(stage, lambda: f"tuning: {stage}" in caplog.messages))
        os.kill(pid_of(engine, 1), signal.SIGKILL)
        served.run_until(lambda: seen(engine, "restarts") == [1, 0] and seen(engine, "state") == ["up", "up"])
        served.run_until(lambda: served.tuning.note.startswith("Tuned: steps of "))
        served.finish()
        begun = [message for message in caplog.messages if message.startswith("tuning: ")]
        assert begun == [f"tuning: {name}" for name in ("sweep", "model", "race", "settled")]
        assert {(limits.step_tokens, limits.running_rows) for limits in engine.limits()} != set()
        assert len(set(engine.limits())) == 1, "both replicas have what was found"
