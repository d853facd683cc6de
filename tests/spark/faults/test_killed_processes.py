"""Whatever process is killed or stopped in a job's midst: the output is that of an undisturbed run."""

import os
import signal
from collections.abc import Callable

import pytest

from pipemax.wire import ProcessIdentity
from tests.fakes.engine import fake_config
from tests.spark.faults.cluster import TOKENS_PER_S, Cluster, assert_as_undisturbed
from tests.spark.processes import wait_until

TARGETS: dict[str, Callable[[Cluster], list[ProcessIdentity]]] = {
    "executor": Cluster.executors,
    "Python worker": Cluster.python_workers,
    "engine server": Cluster.servers,
    "worker of the engine": Cluster.engine_workers,
}


@pytest.mark.parametrize("find", TARGETS.values(), ids=TARGETS.keys())
def test_a_killed_process_costs_no_row(
    cluster: Cluster, find: Callable[[Cluster], list[ProcessIdentity]]
) -> None:
    order = cluster.submit()
    cluster.wait_until_rows_run()
    victim = find(cluster)[0]
    os.kill(victim.pid, signal.SIGKILL)
    assert cluster.is_running(order), "the job ended before anything was killed"
    assert_as_undisturbed(cluster.answer(order))
    wait_until(lambda: not victim.is_running(), 10, "the victim is gone")


def test_a_stopped_server_is_replaced(cluster: Cluster) -> None:
    order = cluster.submit()
    cluster.wait_until_rows_run()
    victim = cluster.servers()[0]
    os.kill(victim.pid, signal.SIGSTOP)
    assert_as_undisturbed(cluster.answer(order))
    assert not victim.is_running()


def test_an_executor_replaced_while_its_model_loads_gets_its_engine(cluster: Cluster) -> None:
    engine = fake_config(tokens_per_s=TOKENS_PER_S, load_s=3.0)
    order = cluster.submit(engine=engine)
    loading: list[ProcessIdentity] = []
    wait_until(lambda: loading.extend(_loading_servers(cluster)) or loading, 120, "an engine loads")
    victim = next(e for e in cluster.executors() if cluster.executor_of(loading[0]) == e.pid)
    os.kill(victim.pid, signal.SIGKILL)
    assert_as_undisturbed(cluster.answer(order))
    assert not loading[0].is_running()


def test_a_decommissioned_executor_ends_its_tasks_and_goes(cluster: Cluster) -> None:
    order = cluster.submit()
    cluster.wait_until_rows_run()
    leaving = cluster.executors()[0]
    os.kill(leaving.pid, signal.SIGPWR)
    assert_as_undisturbed(cluster.answer(order))
    wait_until(lambda: not leaving.is_running(), 60, "the decommissioned executor ends")


def _loading_servers(cluster: Cluster) -> list[ProcessIdentity]:
    pids = {stats.pid for stats in cluster.stats() if stats.state == "loading"}
    return [server for server in cluster.servers() if server.pid in pids]
