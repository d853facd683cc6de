"""``make faults``: strikes jobs on two tables at random, and counts what became of the rows.

python -m tests.spark.faults.random_kills [--strikes 20] [--seed N] [--report FILE] [--endpoint]: exit status 1 if a row
was lost, doubled, changed or condemned, if a foreign file was touched, or if a job ended in another way than it should.
A job whose driver was killed, or that ended by itself, is started again by the same command. With ``--endpoint`` the
engines send their rows to servers that also break transfers, refuse requests and are slow.

A full disk needs the right to mount a tmpfs; without it this kind is left out. There is no strike at a clock: under
libfaketime 0.9.10, with which a process would have one of its own, ``time.sleep`` of Python 3.11 fails (EINVAL).
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

from tests.endpoints.faulty_server import MANY_FAULTS, NO_FAULT, FaultyServer
from tests.endpoints.openai_server import serving
from tests.spark.faults.cluster import Cluster
from tests.spark.faults.disk import SmallDisk
from tests.spark.faults.foreign import ForeignFolders
from tests.spark.faults.report import Outcome, Served, report
from tests.spark.faults.table import ROW_PROMPT, Table
from tests.spark.faults.table_strikes import FULL_DISK, KINDS, WITH_WORKER, TableStrikes

_TABLES = ("first-table", "second-table")
_WORK_DIRS = ("work", "other-work")
_DISK_MIB = 256
_NETWORKS = ("127.0.1", "127.0.2")
"""Of each table's drivers, for their executors."""
_APPLICATIONS = 2 * len(_TABLES)
"""That run at once: on each table at most two."""
ROWS = 30_000
"""For each table: with two engines, 20 minutes while it is held."""
_HELD_ROW_S = 0.08
_HELD_ENDPOINT_ROW_S = 0.03
"""All engines of a table share its endpoint."""


def deal(strikes: int, rng: random.Random, among: Sequence[str] = KINDS) -> list[list[str]]:
    """Return the kinds of the strikes for each table: each kind as often as any other, by one at most."""
    kinds: list[str] = []
    while len(kinds) < strikes:
        kinds += rng.sample(among, len(among))
    return [kinds[:strikes][number :: len(_TABLES)] for number in range(len(_TABLES))]


def strike(
    directory: Path, strikes: int, seed: int, endpoints: Sequence[FaultyServer | None] = (None, None)
) -> Outcome:
    """Strike both tables at once, each on a thread of its own, and look at their outputs.

    ``endpoints``: for each table the server that its engines ask, or None for the fake engine.
    """
    disk = SmallDisk(directory / "disk", mib=_DISK_MIB)
    with disk.mounted():
        return _strike(directory, disk, strikes, random.Random(seed), endpoints)


def _strike(
    directory: Path,
    disk: SmallDisk,
    strikes: int,
    rng: random.Random,
    endpoints: Sequence[FaultyServer | None],
) -> Outcome:
    work, other_work = (disk.directory / name for name in _WORK_DIRS)
    foreign = ForeignFolders()
    for work_dir in (work, other_work):
        foreign.add(work_dir / "archive", has_marker=False)
        foreign.add(work_dir / "pipemax" / "another-program", has_marker=True)
    held_row_s = _HELD_ROW_S if endpoints[0] is None else _HELD_ENDPOINT_ROW_S
    tables = [
        Table(directory / name, rows=ROWS, held_row_s=held_row_s, endpoint=endpoint)
        for name, endpoint in zip(_TABLES, endpoints, strict=True)
    ]
    can_be = {WITH_WORKER: endpoints[0] is None, FULL_DISK: disk.is_mounted}
    kinds_there_are = [kind for kind in KINDS if can_be.get(kind, True)]
    with Cluster(directory, applications=_APPLICATIONS) as cluster:
        stories = [
            TableStrikes(
                cluster,
                table,
                kinds=kinds,
                work_dirs=(work, other_work),
                foreign=foreign,
                disk=disk,
                network=network,
                rng=random.Random(rng.random()),
            )
            for table, kinds, network in zip(
                tables, deal(strikes, rng, kinds_there_are), _NETWORKS, strict=True
            )
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
        served={table.name: served(table.endpoint) for table in tables if table.endpoint is not None},
    )


def served(server: FaultyServer) -> Served:
    """Return what a table's endpoint was asked for its rows."""
    answered = [number for prompt, number in server.answered.items() if prompt.startswith(ROW_PROMPT)]
    return Served(
        requests=server.had.total(),
        faults={kind: number for kind, number in server.had.items() if kind != NO_FAULT},
        answers=sum(answered),
        answered_again=sum(answered) - len(answered),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strikes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--endpoint", action="store_true")
    options = parser.parse_args()
    started_s, load = time.monotonic(), os.getloadavg()[0]
    directory = Path(tempfile.mkdtemp(prefix="pipemax-faults-"))
    print(f"seed {options.seed}; logs in {directory}", flush=True)
    with ExitStack() as stack:
        endpoints = [
            stack.enter_context(serving(FaultyServer(faults=MANY_FAULTS, seed=number)))
            if options.endpoint
            else None
            for number, _ in enumerate(_TABLES)
        ]
        outcome = strike(directory, options.strikes, options.seed, endpoints)
    text = report(outcome, seed=options.seed, rows=ROWS, seconds=time.monotonic() - started_s, load=load)
    print(text)
    if options.report is not None:
        options.report.write_text(text)
    sys.exit(0 if outcome.is_good else 1)


if __name__ == "__main__":
    main()
