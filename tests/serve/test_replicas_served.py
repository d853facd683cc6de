"""A server with replicas: to its clients it is one engine, whichever of them dies."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import ErrorCode
from pipemax_spark.executor.client import EngineOptions, complete
from tests.fakes.settings import expected_text, fake_config
from tests.serve.support import (
    FakeJvm,
    assert_exactly_once,
    files_of,
    options,
    request_batches,
    run_prompts,
    server_stats,
)
from tests.waiting import wait_until

EnginePython = Callable[..., str]


def with_replicas(engine_python: str, count: int, **fake: Any) -> EngineOptions:
    engine = {**fake_config(**fake), "policy": "vllm", "replicas": count}
    return options(engine_python, engine=engine)


def test_a_killed_replica_costs_no_row_and_no_restart_of_the_server(
    fake_engine_python: EnginePython, jvm: FakeJvm
) -> None:
    opts = with_replicas(fake_engine_python("--stats-push-s=0.2"), 2, latency_s=0.05)
    batches, taken, killed = [], 0, None
    for batch in complete(request_batches(1_500, 40), opts, task="task"):
        batches.append(batch)
        taken += batch.num_rows
        if taken > 500 and killed is None:
            killed = server_stats(opts).replicas[0]["pid"]
            os.kill(killed, signal.SIGKILL)
    assert_exactly_once(batches, 1_500)
    assert files_of(opts).log.read_text().count("listening") == 1
    wait_until(lambda: server_stats(opts).replicas[0]["state"] == "up", what="it is replaced")
    stats = server_stats(opts)
    assert [own["restarts"] for own in stats.replicas] == [1, 0]
    assert stats.replicas[0]["pid"] != killed
    assert sum(own["rows_done"] for own in stats.replicas) == 1_500
    assert stats.engine_starts == 1
    assert stats.policy["reason"] == "in each of 2 replicas: a fake has no scheduler"
    jvm.kill()
    pids = [own["pid"] for own in stats.replicas]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="replicas end too")


@pytest.mark.long  # tests/unit/replicas shows it
def test_a_row_that_kills_replicas_is_found_and_the_others_are_answered(
    fake_engine_python: EnginePython,
) -> None:
    opts = with_replicas(fake_engine_python(), 2)
    prompts = [f"row {row}{' [[crash]]' if row == 5 else ''}" for row in range(8)]
    rows = run_prompts(prompts, opts)
    assert rows[5]["error_code"] == ErrorCode.ENGINE_DIED
    assert "by itself" in rows[5]["error_message"]
    assert [row["text"] for row in rows[:5] + rows[6:]] == [
        expected_text(prompt) for prompt in prompts[:5] + prompts[6:]
    ]
