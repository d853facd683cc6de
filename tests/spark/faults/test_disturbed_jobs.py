"""One job on two nodes, disturbed in every way that it should survive, and run again where it should not.

A cluster takes longer to start than to be disturbed, so there is one story (``Story``), and the tests are about its
parts. What shows every other kind of death is listed in docs/cluster.md.
"""

import contextlib
import logging
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.faults.cluster import Cluster, Node, send
from tests.spark.faults.strikes import (
    Strike,
    decommission_executor,
    delete_socket,
    kill_engine_worker,
    kill_executor,
    kill_python_workers,
    kill_server,
    stop_server,
)
from tests.spark.faults.table import Damage, Table
from tests.spark.processes import wait_until

log = logging.getLogger(__name__)

ROWS = 4_000
_STRIKES = {
    "executor": kill_executor,
    "Python workers": kill_python_workers,
    "engine server": kill_server,
    "worker of the engine": kill_engine_worker,
    "socket": delete_socket,
    "executor on notice": decommission_executor,
}


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A file system of its own, of 8 MiB; None where none can be mounted."""
    directory = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(directory)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


class Story:
    """What happened, in this order."""

    def __init__(self, cluster: Cluster, table: Table) -> None:
        self.table = table
        self._directory = cluster.directory
        self._first, self._second = cluster.nodes
        self.recovery_s: dict[str, float] = {}

    def run_first(self, disk: Path | None) -> None:
        """Disturb a run on both nodes, until another writer's commit ends it."""
        self.table.start_job()
        self._kill_while_a_model_loads(self._second)
        self._wait_until_rows_are_done(self._first)
        if disk is not None:
            _fill(disk)
        stopped = _struck(stop_server(self._first))
        for name, strike in _STRIKES.items():
            self._note_recovery(name, _struck(strike(self._second)))
        self._note_recovery("stopped server", stopped)
        # With it another chunk begins, which is written down on the full disk or nowhere.
        wait_until(
            lambda: bool(self.table.rows()) or not self.table.is_running(), 240, "a chunk is committed"
        )
        since = self._second.progress()
        wait_until(lambda: self._second.has_gone_on(since), 240, "the job goes on")
        self.table.change_metadata()
        self.table.release()
        log.info("the table was changed by another writer")
        self.first_exit_code = self.table.exit_code()
        self.damage_of_first = self.table.damage()
        if disk is not None:
            (disk / "filler").unlink()

    def run_second(self) -> None:
        """The same command on a longer table, with speculation; Python workers stand still, a row kills engines."""
        self.table.hold()
        (self.culprit,) = self.table.append(["[[die]]"])
        since = self._first.progress()  # the first run's server may still be ending
        self.table.start_job(
            spark_speculation="true",
            spark_speculation_interval="200ms",
            spark_speculation_quantile="0.5",
            spark_speculation_minTaskRuntime="1s",
        )
        wait_until(lambda: self._first.has_gone_on(since), 240, "rows are done in the second run")
        self.frozen = self._first.python_workers()
        send(signal.SIGSTOP, self.frozen)
        self.table.release()
        self.second_exit_code = self.table.exit_code()
        self.damage = self.table.damage()

    def executor_logs(self) -> str:
        return "".join(log.read_text() for log in self._directory.glob("127.0.0.*/app-*/*/stderr"))

    def _kill_while_a_model_loads(self, node: Node) -> None:
        wait_until(lambda: _is_loading(node), 240, "an engine loads")
        self._note_recovery("executor while its model loads", _struck(kill_executor(node)))

    def _note_recovery(self, name: str, strike: Strike) -> None:
        recovery_s = strike.wait_until_recovered(lambda: not self.table.is_running())
        assert recovery_s is not None, f"{name}: the job has ended: {self.table.printed()[-3_000:]}"
        self.recovery_s[name] = recovery_s
        log.info("%s: rows are done again after %.1f s", name, recovery_s)

    def _wait_until_rows_are_done(self, node: Node) -> None:
        wait_until(lambda: node.has_gone_on(None), 240, f"{node.address} does rows")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, small_disk: Path | None) -> Iterator[Story]:
    directory = tmp_path_factory.mktemp("faults")
    with Cluster(directory) as cluster:
        work_dir = (small_disk or directory) / "work"
        table = Table(cluster, directory, rows=ROWS, work_dir=work_dir)
        story = Story(cluster, table)
        try:
            story.run_first(small_disk)
            story.run_second()
            yield story
        finally:
            table.kill_driver()


@pytest.mark.parametrize("name", [*_STRIKES, "stopped server", "executor while its model loads"])
def test_rows_are_done_again_after(story: Story, name: str) -> None:
    assert name in story.recovery_s


def test_no_row_is_condemned_or_doubled_by_a_disturbed_run(story: Story) -> None:
    damage = story.damage_of_first
    assert 0 < damage.lost < ROWS, "it was to be ended with some rows committed and some not"
    assert (damage.doubled, damage.changed, damage.condemned) == (0, 0, frozenset())


def test_a_commit_beside_another_writer_s_ends_the_run_and_the_next_completes_it(story: Story) -> None:
    assert story.first_exit_code != 0
    assert "MetadataChangedException" in story.table.printed()
    assert story.second_exit_code == 0


def test_a_full_disk_costs_the_spool_alone(story: Story, small_disk: Path | None) -> None:
    if small_disk is None:
        pytest.skip("no file system can be mounted here")
    assert "No space left" in story.executor_logs()
    assert story.damage_of_first.lost < ROWS


def test_a_task_that_stands_still_is_overtaken_by_its_copy_on_another_node(story: Story) -> None:
    assert story.second_exit_code == 0
    assert story.frozen
    assert not any(worker.is_running() for worker in story.frozen)


def test_the_row_that_kills_engines_is_condemned_alone_and_every_other_is_as_undisturbed(
    story: Story,
) -> None:
    assert story.damage == Damage(lost=0, doubled=0, changed=0, condemned=frozenset({story.culprit}))


def _struck(strike: Strike | None) -> Strike:
    assert strike is not None, "there was nothing to strike"
    return strike


def _is_loading(node: Node) -> bool:
    stats = node.stats()
    return stats is not None and stats.state == "loading"


def _fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4_096)
