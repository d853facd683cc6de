"""``make faults``: strikes jobs on two tables at random, and counts what became of the rows.

python -m tests.spark.faults.random_kills [--strikes 20] [--seed N] [--report FILE]: exit status 1 if a row was lost,
doubled, changed or condemned, if a foreign file was touched, or if a job ended in another way than it should. A job
whose driver was killed, or that ended by itself, is started again by the same command.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from tests.spark.faults.cluster import Cluster
from tests.spark.faults.foreign import ForeignFolders
from tests.spark.faults.report import Outcome, report
from tests.spark.faults.table import Table
from tests.spark.faults.table_strikes import KINDS, TableStrikes

_TABLES = ("first-table", "second-table")
_WORK_DIRS = ("work", "other-work")
_APPLICATIONS = 2 * len(_TABLES)
"""That run at once: on each table at most two."""
ROWS = 30_000
"""For each table: with two engines, 20 minutes while it is held."""
_HELD_ROW_S = 0.08


def deal(strikes: int, rng: random.Random) -> list[list[str]]:
    """Return the kinds of the strikes for each table: each kind as often as any other, by one at most."""
    kinds: list[str] = []
    while len(kinds) < strikes:
        kinds += rng.sample(KINDS, len(KINDS))
    return [kinds[:strikes][number :: len(_TABLES)] for number in range(len(_TABLES))]


def strike(directory: Path, strikes: int, seed: int) -> Outcome:
    """Strike both tables at once, each on a thread of its own, and look at their outputs."""
    rng = random.Random(seed)
    work, other_work = (directory / name for name in _WORK_DIRS)
    foreign = ForeignFolders()
    for work_dir in (work, other_work):
        foreign.add(work_dir / "archive", has_marker=False)
        foreign.add(work_dir / "pipemax" / "another-program", has_marker=True)
    tables = [Table(directory / name, rows=ROWS, held_row_s=_HELD_ROW_S) for name in _TABLES]
    with Cluster(directory, applications=_APPLICATIONS) as cluster:
        stories = [
            TableStrikes(
                cluster,
                table,
                kinds=kinds,
                work_dirs=(work, other_work),
                foreign=foreign,
                rng=random.Random(rng.random()),
            )
            for table, kinds in zip(tables, deal(strikes, rng), strict=True)
        ]
        with ThreadPoolExecutor(len(stories)) as pool:
            futures = [pool.submit(story.run) for story in stories]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                for story in stories:
                    story.stop()
        for future in futures:
            future.result()
    return Outcome(
        histories=[story.history for story in stories],
        damage={table.name: table.damage() for table in tables},
        num_foreign_files=foreign.num_files,
        touched_files=[str(path.relative_to(directory)) for path in foreign.touched()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strikes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    started_s, load = time.monotonic(), os.getloadavg()[0]
    directory = Path(tempfile.mkdtemp(prefix="pipemax-faults-"))
    print(f"seed {options.seed}; logs in {directory}", flush=True)
    outcome = strike(directory, options.strikes, options.seed)
    text = report(outcome, seed=options.seed, rows=ROWS, seconds=time.monotonic() - started_s, load=load)
    print(text)
    if options.report is not None:
        options.report.write_text(text)
    sys.exit(0 if outcome.is_good else 1)


if __name__ == "__main__":
    main()
