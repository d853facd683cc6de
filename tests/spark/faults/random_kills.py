"""``make faults``: kills and stops processes of running jobs at random, and counts what became of their rows.

python -m tests.spark.faults.random_kills [--strikes 20] [--seed N] [--report FILE]: exit status 1 if a row was lost,
doubled, changed or condemned. A job that ends with an error is run again, as its scheduler would do.
"""

import argparse
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipemax.wire import ProcessIdentity
from tests.fakes.engine import expected_text
from tests.spark.faults.cluster import MAX_TOKENS, ROWS, Cluster

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
_MOST_RERUNS = 10

TARGETS: dict[str, tuple[Callable[[Cluster], list[ProcessIdentity]], signal.Signals]] = {
    "engine server": (Cluster.servers, signal.SIGKILL),
    "worker process of the engine": (Cluster.engine_workers, signal.SIGKILL),
    "Python worker": (Cluster.python_workers, signal.SIGKILL),
    "executor": (Cluster.executors, signal.SIGKILL),
    "engine server, stopped": (Cluster.servers, signal.SIGSTOP),
}
DRIVER = "driver"


@dataclass(slots=True)
class Counts:
    """What was struck, and what became of the rows."""

    struck: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    reruns: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0
    condemned: int = 0

    def add_job(self, rows: list[tuple[int, str | None, str | None]]) -> None:
        times = Counter(row[0] for row in rows)
        self.jobs += 1
        self.lost += ROWS - len(times)
        self.doubled += sum(count - 1 for count in times.values())
        self.condemned += sum(code is not None for _, _, code in rows)
        expected = {row: expected_text(f"Say word {row}", MAX_TOKENS) for row in times}
        self.changed += sum(code is None and text != expected[row] for row, text, code in rows)

    @property
    def is_clean(self) -> bool:
        return self.lost == self.doubled == self.changed == self.condemned == 0


def strike_at_random(cluster: Cluster, counts: Counts, rng: random.Random, *, strikes: int) -> None:
    """Run jobs until so many processes were struck."""
    while counts.struck.total() < strikes:
        output = str(cluster.directory / f"random-{counts.jobs}")
        for _ in range(_MOST_RERUNS):
            answer = _run_struck_job(cluster, counts, rng, output=output, strikes=strikes)
            if answer is not None:
                break
            counts.reruns += 1
        else:
            sys.exit(f"the job was run {_MOST_RERUNS} times and has not ended well: {cluster.directory}")
        counts.add_job(answer)


def _run_struck_job(
    cluster: Cluster, counts: Counts, rng: random.Random, *, output: str, strikes: int
) -> list[tuple[int, str | None, str | None]] | None:
    """The output's rows; None if the run ended early."""
    number = cluster.submit("job", output=output)
    while counts.struck.total() < strikes:
        pause_s = rng.uniform(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        if cluster.has_answered(number, within_s=pause_s):
            break
        target = rng.choice([*TARGETS, DRIVER])
        if target == DRIVER:
            print(f"{time.strftime('%X')} {target}", flush=True)
            counts.struck[target] += 1
            cluster.kill_driver()
            cluster.restart()
            return None
        find, number_of_signal = TARGETS[target]
        victims = find(cluster)
        if victims:
            os.kill(rng.choice(victims).pid, number_of_signal)
            print(f"{time.strftime('%X')} {target}", flush=True)
            counts.struck[target] += 1
    answer = cluster.answer(number, timeout_s=400)
    if answer.error is not None:
        print(f"{time.strftime('%X')} run again: {answer.error[:300]}", flush=True)
        return None
    return answer.rows


def report(counts: Counts, *, seed: int, seconds: float, load: float) -> str:
    struck = "\n".join(f"| {target} | {counts.struck[target]} |" for target in [*TARGETS, DRIVER])
    return f"""# Kills at random

`make faults` on {time.strftime("%Y-%m-%d")}, {os.cpu_count()} cores, Linux {platform.release()}, load {load:.1f} at the
end, {seconds:.0f} s, seed {seed}: jobs of {ROWS} rows on two executors of a local cluster, with the real server around
a fake engine whose worker outlives it by 0.5 s. Processes get SIGKILL (or SIGSTOP) {_FIRST_PAUSE_S} to
{_LONGEST_PAUSE_S} s after one another, whatever runs then; a job that ends with an error is run again.

| struck | times |
|---|---|
{struck}

| {counts.jobs} jobs, {counts.jobs * ROWS:,} rows | |
|---|---|
| runs that ended early and were run again | {counts.reruns} |
| rows lost | {counts.lost} |
| rows doubled | {counts.doubled} |
| rows whose answer differs from an undisturbed run's | {counts.changed} |
| rows condemned | {counts.condemned} |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strikes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    counts, started_s = Counts(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipemax-faults-") as directory:
        print(f"seed {options.seed}, logs in {directory}", flush=True)
        with Cluster(Path(directory)) as cluster:
            strike_at_random(cluster, counts, random.Random(options.seed), strikes=options.strikes)
    text = report(counts, seed=options.seed, seconds=time.monotonic() - started_s, load=os.getloadavg()[0])
    print(text)
    if options.report is not None:
        options.report.write_text(text)
    sys.exit(0 if counts.is_clean else 1)


if __name__ == "__main__":
    main()
