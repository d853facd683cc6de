"""Strikes at the jobs of one table: at their processes, disk and network, and by second jobs on the same table.

Two jobs with different work directories do not see each other. The later one takes over, and the earlier one, from then
on the overtaken job, must end at its next commit. It is struck like any other job until it does. Two jobs with the same
work directory see each other, and the second must refuse to start.
"""

import random
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.spark.faults.cluster import Cluster
from tests.spark.faults.disk import SmallDisk
from tests.spark.faults.foreign import ForeignFolders
from tests.spark.faults.job import Job
from tests.spark.faults.network import Network
from tests.spark.faults.strikes import STRIKES
from tests.spark.faults.table import Table

DRIVER = "driver killed"
OVERTAKE = "second job with another work directory"
OVERTAKE_PAUSED = "second job with another work directory, driver of the first stopped"
INTRUDE = "second job with the same work directory"
LOSE_SPOOL = "spool directories lost"
FULL_DISK = "disk of the work directories full for 5 s"
DELAY = "network to the driver slow for 5 s"
CUT = "connections to the driver cut"
_SURROUNDINGS = (LOSE_SPOOL, FULL_DISK, DELAY, CUT)
"""Kinds that strike no process."""
_SECOND_JOBS = (OVERTAKE, OVERTAKE_PAUSED, INTRUDE)
KINDS = (*STRIKES, DRIVER, *_SURROUNDINGS, *_SECOND_JOBS)
WITH_WORKER = "worker process of the engine killed"
"""The kind that an engine over an endpoint cannot have: it has no process but its server."""

LONGEST_PAUSE_S = 4.0
_RUNS = "2*T*-*"
"""How the directories of runs are called: others there are foreign."""
_STRUCK_S = 5.0
_DELAY_S = 0.2
"""For each piece of at most 64 KiB."""
SHARE_OF_PAIRS = 0.25
_MOST_FAILED_RUNS = 5
_OVERTAKEN_S = 600.0
"""The longest time until an overtaken job ends."""


@dataclass(slots=True)
class History:
    """What was struck, and what came of it."""

    recoveries_s: dict[str, list[float | None]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    """Seconds until rows were done again; None where the run ended before. See the report for second jobs."""
    failed_runs: int = 0
    """Runs that ended by themselves and that no other job had overtaken."""
    failures: list[str] = field(default_factory=list)
    """Jobs that ended in another way than they should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overtaken:
    """A job that must end because another one has taken over."""

    job: Job
    kind: str
    since_s: float


class TableStrikes:
    """Strikes while a table's jobs run, at times, nodes and processes that ``rng`` chooses."""

    def __init__(
        self,
        cluster: Cluster,
        table: Table,
        *,
        kinds: Sequence[str],
        work_dirs: tuple[Path, Path],
        foreign: ForeignFolders,
        disk: SmallDisk,
        network: str,
        rng: random.Random,
    ) -> None:
        """``kinds`` are the strikes to come. The first job has the first of the work directories.

        ``disk`` holds the work directories; ``network`` begins the addresses at which executors reach their drivers.
        """
        self.history = History()
        self._cluster = cluster
        self._table = table
        self._kinds = list(kinds)
        self._work_dirs = work_dirs
        self._foreign = foreign
        self._disk = disk
        self._network = network
        self._networks: dict[str, Network] = {}
        self._ends = ExitStack()
        self._rng = rng
        self._jobs: list[Job] = []
        self._is_stopped = False
        self._job: Job
        self._overtaken: _Overtaken | None = None

    def run(self) -> None:
        """Strike as often as there are kinds, and let the last job run to its end."""
        try:
            self._job = self._start_until_working(self._work_dirs[0])
            for work_dir in self._work_dirs:
                self._foreign.add(work_dir / "pipemax" / self._table.id() / "backup", has_marker=True)
            while self._kinds:
                time.sleep(self._rng.uniform(0.0, LONGEST_PAUSE_S))
                self._look_at_ends()
                self._strike_next()
            self._say("is released")
            self._table.release()
            while self._overtaken is not None or self._job.is_running() or self._job.exit_code() != 0:
                time.sleep(1.0)
                self._look_at_ends()
        finally:
            self.stop()

    def stop(self) -> None:
        """End all jobs; ``run`` then raises if it has not ended yet."""
        self._is_stopped = True
        for job in list(self._jobs):
            job.kill_driver()
        self._ends.close()

    # Strikes.

    def _strike_next(self) -> None:
        # A third job on the table would only make it harder to say which of them must end.
        kinds = [kind for kind in self._kinds if self._overtaken is None or kind not in _SECOND_JOBS]
        if not kinds:
            return
        if kinds[0] == DRIVER:
            self._kill_driver()
        elif kinds[0] == INTRUDE:
            self._intrude()
        elif kinds[0] in _SURROUNDINGS:
            self._strike_surroundings(kinds[0])
        elif kinds[0] in _SECOND_JOBS:
            self._overtake(kinds[0])
        else:
            self._strike_nodes([kind for kind in kinds if kind in STRIKES])

    def _strike_nodes(self, kinds: list[str]) -> None:
        """Strike one node's process, or one on each node at once."""
        jobs = [self._job, *([] if self._overtaken is None else [self._overtaken.job])]
        job = self._rng.choice(jobs)
        nodes = self._rng.sample(job.nodes, 2 if self._rng.random() < SHARE_OF_PAIRS else 1)
        struck = [(kind, node, STRIKES[kind](node)) for kind, node in zip(kinds, nodes, strict=False)]
        for kind, node, strike in struck:
            if strike is not None:
                self._kinds.remove(kind)
                self._say(f"{job.name}: {kind} on {node.address}")
        for kind, node, strike in struck:
            if strike is not None:
                recovery_s = strike.wait_until_recovered(lambda node=node: job.is_over_on(node))  # type: ignore[misc]
                self.history.recoveries_s[kind].append(recovery_s)

    def _kill_driver(self) -> None:
        self._kinds.remove(DRIVER)
        self._say(f"{self._job.name}: {DRIVER}")
        struck_s = time.monotonic()
        self._job.kill_driver()
        self._job = self._start_until_working(self._job.work_dir)
        self.history.recoveries_s[DRIVER].append(time.monotonic() - struck_s)

    def _strike_surroundings(self, kind: str) -> None:
        self._kinds.remove(kind)
        job = self._job
        self._say(f"{job.name}: {kind}")
        struck_s, network = time.monotonic(), self._networks[job.name]
        if kind == LOSE_SPOOL:
            for spool in job.work_dir.glob(f"pipemax/{self._table.id()}/{_RUNS}/spool"):
                shutil.rmtree(spool, ignore_errors=True)
        elif kind == FULL_DISK:
            struck_s = self._disk.be_full(_STRUCK_S)
        elif kind == DELAY:
            network.delay_s = _DELAY_S
            time.sleep(_STRUCK_S)
            network.delay_s = 0.0
        else:
            self._say(f"{network.cut()} connections are cut")
        job.wait_until_working()
        took_s = time.monotonic() - struck_s
        self.history.recoveries_s[kind].append(took_s if job.is_running() else None)

    def _overtake(self, kind: str) -> None:
        """Start a second job that does not see the first one."""
        self._kinds.remove(kind)
        first = self._job
        (work_dir,) = (other for other in self._work_dirs if other != first.work_dir)
        self._say(f"{first.name}: {kind}")
        since_s = time.monotonic()
        try:
            if kind == OVERTAKE_PAUSED:
                first.pause_driver()
            self._job = self._start_until_working(work_dir)
        finally:
            if kind == OVERTAKE_PAUSED:
                first.resume_driver()
                since_s = time.monotonic()
        self._overtaken = _Overtaken(job=first, kind=kind, since_s=since_s)

    def _intrude(self) -> None:
        """Start a second job that sees the first one."""
        self._kinds.remove(INTRUDE)
        self._say(f"{self._job.name}: {INTRUDE}")
        since_s = time.monotonic()
        with self._disk.kept_free():
            second = self._start(self._job.work_dir)
            if not second.was_refused():
                self._fail(second, "was not refused")
        self.history.recoveries_s[INTRUDE].append(time.monotonic() - since_s)
        self._job.wait_until_working()
        if not self._job.is_running():
            self._fail(self._job, f"ended while {second.name} was refused")

    # Starts and ends.

    def _start(self, work_dir: Path) -> Job:
        assert not self._is_stopped, "stopped before the end"
        name = f"{self._table.name}-{len(self._jobs) + 1}"
        network = Network(f"{self._network}.{len(self._jobs) + 1}")
        self._networks[name] = self._ends.enter_context(network)
        job = Job(self._cluster, self._table, name, work_dir=work_dir, network=network)
        self._jobs.append(job)
        self._say(f"{name} starts in {work_dir.name}")
        return job

    def _start_until_working(self, work_dir: Path) -> Job:
        with self._disk.kept_free():  # a job that cannot write its marker does not start
            job = self._start(work_dir)
            job.wait_until_working()
        return job

    def _look_at_ends(self) -> None:
        """Check how jobs have ended, and start the table's job again if it has ended by itself."""
        if self._overtaken is not None:
            self._look_at_overtaken(self._overtaken)
        if self._job.is_running() or (not self._kinds and self._job.exit_code() == 0):
            return
        assert self._job.exit_code() != 0, (
            f"all rows are done and {self._kinds} are left: this needs more ROWS"
        )
        self._say(f"{self._job.name} has ended and is run again: {self._job.printed()[-500:]}")
        self.history.failed_runs += 1
        assert self.history.failed_runs <= _MOST_FAILED_RUNS, "too many runs have ended by themselves"
        self._job = self._start_until_working(self._job.work_dir)

    def _look_at_overtaken(self, overtaken: _Overtaken) -> None:
        job, waited_s = overtaken.job, time.monotonic() - overtaken.since_s
        if job.is_running() and waited_s <= _OVERTAKEN_S:
            return
        if job.is_running():
            self._fail(job, f"was overtaken and has not ended in {_OVERTAKEN_S:.0f} s")
            job.kill_driver()
        elif not job.was_taken_over():
            self._fail(job, "was overtaken and has ended in another way")
        self._say(f"{job.name} has ended after {waited_s:.1f} s")
        self.history.recoveries_s[overtaken.kind].append(waited_s)
        self._overtaken = None

    def _fail(self, job: Job, what: str) -> None:
        code = "none" if job.is_running() else job.exit_code()
        self.history.failures.append(f"{job.name} {what}; exit code {code}")
        self._say(f"FAILURE: {self.history.failures[-1]}: {job.printed()[-1_500:]}")

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%X')} {self._table.name}, {len(self._kinds)} left: {text}", flush=True)
