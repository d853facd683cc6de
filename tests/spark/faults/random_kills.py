"""``make faults``: strikes the processes of one job at random, and counts what became of its rows.

python -m tests.spark.faults.random_kills [--strikes 20] [--seed N] [--report FILE]: exit status 1 if a row was lost,
doubled, changed or condemned. A job whose driver was killed, or that ended with an error, is started again by the same
command.
"""

import argparse
import functools
import os
import platform
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.spark.faults.cluster import Cluster, Node
from tests.spark.faults.strikes import STRIKES, Strike
from tests.spark.faults.table import Damage, Table
from tests.spark.processes import wait_until

ROWS = 30_000
_DRIVER = "driver killed"
_TARGETS = [*STRIKES, _DRIVER]
_LONGEST_PAUSE_S = 4.0
_SHARE_OF_PAIRS = 0.25
_MOST_FAILED_RUNS = 5


@dataclass(slots=True)
class History:
    """What was struck."""

    recoveries_s: dict[str, list[float | None]] = field(
        default_factory=lambda: {name: [] for name in _TARGETS}
    )
    """From the strike until rows were done on that node again (after a driver's: on both), in seconds; None where the
    run ended of it."""
    failed_runs: int = 0
    """Runs that ended by themselves."""

    @property
    def strikes(self) -> int:
        return sum(map(len, self.recoveries_s.values()))


class RandomStrikes:
    """Strikes while a table's job runs, at times, nodes and processes that the seed chooses."""

    def __init__(self, cluster: Cluster, table: Table, rng: random.Random) -> None:
        self._nodes = cluster.nodes
        self._table = table
        self._rng = rng
        self.history = History()

    def run(self, strikes: int) -> Damage:
        """Strike so often, let the job end, and look at its output."""
        self._start()
        while self.history.strikes < strikes:
            time.sleep(self._rng.uniform(0.0, _LONGEST_PAUSE_S))
            if self._table.is_running():
                self._strike_some(strikes - self.history.strikes)
            else:
                self._revive()
        self._table.release()
        while self._table.exit_code() != 0:
            self._revive()
        return self._table.damage()

    def _strike_some(self, most: int) -> None:
        """One node's process; sometimes one on each node at once; or the driver."""
        rng = self._rng
        nodes = rng.sample(self._nodes, 2 if most > 1 and rng.random() < _SHARE_OF_PAIRS else 1)
        names = [rng.choice(_TARGETS) for _ in nodes]
        if _DRIVER in names:
            self._strike_driver()
            return
        strikes = [(name, self._strike(name, node)) for name, node in zip(names, nodes, strict=True)]
        for name, strike in strikes:
            if strike is not None:
                recovery_s = strike.wait_until_recovered(self._is_over)
                self.history.recoveries_s[name].append(recovery_s)

    def _strike(self, name: str, node: Node) -> Strike | None:
        strike = STRIKES[name](node)
        if strike is not None:
            _say(f"{self.history.strikes + 1}: {name} on {node.address}")
        return strike

    def _strike_driver(self) -> None:
        _say(f"{self.history.strikes + 1}: {_DRIVER}")
        struck_s = time.monotonic()
        self._table.kill_driver()
        self._start()
        self.history.recoveries_s[_DRIVER].append(time.monotonic() - struck_s)

    def _start(self) -> None:
        """Until rows are done on both nodes, or the job is over."""
        since = [node.progress() for node in self._nodes]
        self._table.start_job()
        for node, before in zip(self._nodes, since, strict=True):
            has_gone_on = functools.partial(node.has_gone_on, before)
            wait_until(lambda: has_gone_on() or self._is_over(), 240, f"{node.address} does rows")  # noqa: B023

    def _revive(self) -> None:
        """Run the job again, which has ended by itself."""
        if self._table.exit_code() == 0:
            sys.exit(f"all rows are done after {self.history.strikes} strikes: this machine needs more ROWS")
        self.history.failed_runs += 1
        if self.history.failed_runs > _MOST_FAILED_RUNS:
            sys.exit(f"{self.history.failed_runs} runs have ended by themselves")
        _say(f"the job has ended and is run again: {self._table.printed()[-500:]}")
        self._start()

    def _is_over(self) -> bool:
        return not self._table.is_running()


def report(history: History, damage: Damage, *, command: str, seed: int, seconds: float, load: float) -> str:
    lines = [f"| {name} | {len(times)} | {_spread(times)} |" for name, times in history.recoveries_s.items()]
    table = "\n".join(lines)
    return f"""# Kills at random

`{command}` on {time.strftime("%Y-%m-%d")}: {os.cpu_count()} cores, {platform.system()}, load {load:.1f} at the
start, seed {seed}, {seconds:.0f} s in all. One job of {ROWS:,} rows on a standalone cluster of two nodes on one
machine, each with one executor of two task slots and the real server around a fake engine, which has a worker process
of its own and takes 1 s to load; commits every 5 s. The strikes fall up to {_LONGEST_PAUSE_S:.0f} s after a node has
recovered from the one before, every fourth time on both nodes at once.

| what was done | times | rows are done there again after, s: median (longest) |
|---|---:|---|
{table}

| {history.strikes} strikes | |
|---|---:|
| rows lost | {damage.lost} |
| rows doubled | {damage.doubled} |
| rows whose answer differs from an undisturbed run's | {damage.changed} |
| rows condemned | {len(damage.condemned)} |
| runs that ended by themselves and were run again | {history.failed_runs} |

A stopped server is noticed after 30 s of silence; a decommissioned executor ends its tasks before it goes; a killed
driver's recovery is that of the same command run again, the start of Spark and of the engines included.
"""


def _spread(times_s: list[float | None]) -> str:
    known = [time_s for time_s in times_s if time_s is not None]
    return f"{median(known):.1f} ({max(known):.1f})" if known else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strikes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    started_s, load = time.monotonic(), os.getloadavg()[0]
    directory = Path(tempfile.mkdtemp(prefix="pipemax-faults-"))
    _say(f"seed {options.seed}; logs in {directory}")
    with Cluster(directory) as cluster:
        table = Table(cluster, directory, rows=ROWS, work_dir=directory / "work")
        strikes = RandomStrikes(cluster, table, random.Random(options.seed))
        try:
            damage = strikes.run(options.strikes)
        finally:
            table.kill_driver()
    command = f"make faults SEED={options.seed}"
    seconds = time.monotonic() - started_s
    text = report(strikes.history, damage, command=command, seed=options.seed, seconds=seconds, load=load)
    print(text)
    if options.report is not None:
        options.report.write_text(text)
    sys.exit(0 if damage == Damage(lost=0, doubled=0, changed=0, condemned=frozenset()) else 1)


def _say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", flush=True)


if __name__ == "__main__":
    main()
