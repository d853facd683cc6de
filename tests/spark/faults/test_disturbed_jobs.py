"""One job on two nodes, disturbed in every way that it should survive, then killed and run again.

A cluster takes longer to start than to be disturbed, so there is one story (``Story``), and the tests are about its
parts. What shows every other kind of death is listed in lab/results/deaths.md.
"""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.faults.cluster import Cluster, Node, send, wait_patiently
from tests.spark.faults.disk import SmallDisk
from tests.spark.faults.job import Job
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

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1_800)]  # the story is the first test's setup
ROWS = 8_000
_STRIKES = {
    "executor": kill_executor,
    "Python workers": kill_python_workers,
    "engine server": kill_server,
    "worker of the engine": kill_engine_worker,
    "socket": delete_socket,
    "executor on notice": decommission_executor,
}


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk | None]:
    """A file system of its own; None where none can be mounted."""
    disk = SmallDisk(tmp_path_factory.mktemp("disk"), mib=8)
    with disk.mounted():
        yield disk if disk.is_mounted else None


class Story:
    """What happened, in this order."""

    def __init__(self, cluster: Cluster, table: Table, work_dir: Path) -> None:
        self.table = table
        self._cluster = cluster
        self._work_dir = work_dir
        self.recovery_s: dict[str, float] = {}

    def run_first(self, disk: SmallDisk | None) -> None:
        """Disturb a run on both nodes, change the table under it, and kill its driver once it has gone on."""
        self.first = Job(self._cluster, self.table, "first", work_dir=self._work_dir)
        try:
            self._disturb(self.first, disk)
            # With it another chunk begins, which is written down on the full disk or nowhere.
            self._wait_until_more_is_committed(than=0)
            if disk is not None:
                disk.free()
            self.first.wait_until_working()
            self.table.change_metadata()
            log.info("the table was changed by another writer")
            self.rows_at_change = len(self.table.rows())
            self._wait_until_more_is_committed(than=self.rows_at_change)
            self.survived_change = self.first.is_running()
        finally:
            self.first.kill_driver()
        self.damage_of_first = self.table.damage()

    def run_second(self) -> None:
        """Run the same command on a longer table, with speculation; Python workers stand still, a row kills engines."""
        (self.culprit,) = self.table.append(["[[die]]"])
        speculation = {
            "spark.speculation": "true",
            "spark.speculation.interval": "200ms",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.minTaskRuntime": "1s",
        }
        second = Job(self._cluster, self.table, "second", work_dir=self._work_dir, conf=speculation)
        try:
            node = second.nodes[0]
            wait_patiently(lambda: node.has_gone_on(None), "rows are done in the second run")
            self.frozen = node.python_workers()
            send(signal.SIGSTOP, self.frozen)
            self.table.release()
            self.second_exit_code = second.exit_code()
        finally:
            second.kill_driver()
        self.damage = self.table.damage()

    def executor_logs(self) -> str:
        return "".join(log.read_text() for log in self._cluster.directory.glob("127.0.0.*/app-*/*/stderr"))

    def _disturb(self, job: Job, disk: SmallDisk | None) -> None:
        first, second = job.nodes
        wait_patiently(lambda: _is_loading(second), "an engine loads")
        self._note_recovery(job, "executor while its model loads", _struck(kill_executor(second)))
        wait_patiently(lambda: first.has_gone_on(None), f"{first.address} does rows")
        if disk is not None:
            disk.fill()
        stopped = _struck(stop_server(first))
        for name, strike in _STRIKES.items():
            self._note_recovery(job, name, _struck(strike(second)))
        self._note_recovery(job, "stopped server", stopped)

    def _note_recovery(self, job: Job, name: str, strike: Strike) -> None:
        recovery_s = strike.wait_until_recovered(lambda: not job.is_running())
        assert recovery_s is not None, f"{name}: the job has ended: {job.printed()[-3_000:]}"
        self.recovery_s[name] = recovery_s
        log.info("%s: rows are done again after %.1f s", name, recovery_s)

    def _wait_until_more_is_committed(self, *, than: int) -> None:
        wait_patiently(
            lambda: len(self.table.rows()) > than or not self.first.is_running(),
            f"more than {than} rows are committed",
        )


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, small_disk: SmallDisk | None) -> Iterator[Story]:
    directory = tmp_path_factory.mktemp("faults")
    with Cluster(directory) as cluster:
        work_dir = (small_disk.directory if small_disk else directory) / "work"
        story = Story(cluster, Table(directory, rows=ROWS), work_dir)
        story.run_first(small_disk)
        story.run_second()
        yield story


@pytest.mark.parametrize("name", [*_STRIKES, "stopped server", "executor while its model loads"])
def test_rows_are_completed_again_after_a_strike(story: Story, name: str) -> None:
    assert name in story.recovery_s


def test_a_disturbed_run_condemns_and_duplicates_no_row(story: Story) -> None:
    damage = story.damage_of_first
    assert 0 < damage.lost < ROWS, "it was to be killed with some rows committed and some not"
    assert (damage.doubled, damage.changed, damage.condemned) == (0, 0, frozenset())


def test_a_commit_is_retried_when_another_writer_changes_the_table_under_it(story: Story) -> None:
    assert story.survived_change, story.first.printed()[-3_000:]
    assert "is retried, because another writer changed the table" in story.first.logged()
    assert ROWS - story.damage_of_first.lost > story.rows_at_change


def test_a_full_disk_costs_only_the_spool(story: Story, small_disk: SmallDisk | None) -> None:
    if small_disk is None:
        pytest.skip("no file system can be mounted here")
    assert "No space left" in story.executor_logs()
    assert story.damage_of_first.lost < ROWS


def test_a_suspended_task_is_replaced_by_its_speculative_copy_on_another_node(story: Story) -> None:
    assert story.second_exit_code == 0
    assert story.frozen
    assert not any(worker.is_running() for worker in story.frozen)


def test_only_the_poison_row_is_condemned_and_all_others_are_as_undisturbed(
    story: Story,
) -> None:
    assert story.damage == Damage(lost=0, doubled=0, changed=0, condemned=frozenset({story.culprit}))


def _struck(strike: Strike | None) -> Strike:
    assert strike is not None, "there was nothing to strike"
    return strike


def _is_loading(node: Node) -> bool:
    stats = node.stats()
    return stats is not None and stats.state == "loading"
