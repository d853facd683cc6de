"""A server with replicas: to its clients it is one engine, whichever of them dies."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipemax_spark.executor.client import EngineOptions, complete
from tests.fakes.settings import fake_config
from tests.serve.support import (
    FakeJvm,
    assert_exactly_once,
    files_of,
    options,
    request_batches,
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
