"""Make the tables of results: PipeMax against stock vLLM in every layout of a node, in simulation.

    python -m lab.bench.results [FILE] [--jobs 2] [--only WORD ...] [--page] [--plan | --tables]

Each cell, a system in one layout over one drawing of a table, is a line of FILE, lab/results/tables.jsonl by default,
written when it is done: a run that was stopped goes on where it was. First come all cells of stock vLLM, with and
without balanced decode batches, and what ``auto`` chooses; then PipeMax in the layouts whose bound says that they may
be the fastest. When all are done the tables are checked and printed. ``--only`` takes the settings whose names have one
of the words, ``--plan`` says how long the rest takes, ``--tables`` prints what is done, and ``--page`` the table of
docs/results/pays.md.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lab.bench.results.cells import Cell, System, pipemax_cells, stock_cells
from lab.bench.results.pays import page_settings, print_page
from lab.bench.results.remaining import Remaining
from lab.bench.results.settings import GROUPS, Setting
from lab.bench.results.store import Store
from lab.bench.results.tables import print_tables

FILE = Path(__file__).parents[2] / "results" / "tables.jsonl"


def run_cell(cell: Cell) -> tuple[Cell, dict[str, Any], float]:
    """Run one cell; return it with its figures and its seconds."""
    begin_s = time.monotonic()
    return cell, cell.run(), time.monotonic() - begin_s


def run_cells(cells: Sequence[Cell], store: Store, remaining: Remaining, num_jobs: int) -> None:
    """Run what is missing of the cells, the longest first, and say after each how long the rest takes."""
    missing = sorted((cell for cell in cells if cell not in store), key=remaining.expected_s, reverse=True)
    for cell, figures, seconds in _results(missing, num_jobs):
        store[cell] = figures
        remaining.done(cell, seconds)
        print(f"{cell.name} {seconds:.0f} s; {remaining}", file=sys.stderr, flush=True)


def run_pipemax(settings: Sequence[Setting], store: Store, remaining: Remaining, num_jobs: int) -> None:
    """Run PipeMax in one layout of each table after another, until none may be faster than what was run."""
    while True:
        cells = pipemax_cells(settings, store)
        if all(cell in store for cell in cells):
            return
        remaining.know(System.PIPEMAX, cells)
        run_cells(cells, store, remaining, num_jobs)


def _results(cells: Sequence[Cell], num_jobs: int) -> Iterator[tuple[Cell, dict[str, Any], float]]:
    if num_jobs == 1:
        yield from map(run_cell, cells)
        return
    with ProcessPoolExecutor(num_jobs) as pool:
        futures = [pool.submit(run_cell, cell) for cell in cells]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def chosen_groups(words: Sequence[str] | None) -> dict[str, list[Setting]]:
    """Return the tables' settings whose names have one of the words."""
    groups = {
        title: [
            setting for setting in settings if words is None or any(word in setting.name for word in words)
        ]
        for title, settings in GROUPS.items()
    }
    return {title: settings for title, settings in groups.items() if settings}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.results",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="WORD")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args(arguments)
    groups = chosen_groups(options.only)
    settings = [setting for group in groups.values() for setting in group]
    if not settings:
        parser.error("no setting has such a name")
    store = Store(options.file)
    if options.page:
        settings = page_settings(settings)
    if not options.tables:
        first = stock_cells(settings)
        remaining = Remaining(first, store, num_jobs=options.jobs)
        if all(cell in store for cell in first):
            remaining.know(System.PIPEMAX, pipemax_cells(settings, store))
        print(remaining, file=sys.stderr, flush=True)
        if options.plan:
            return 0
        run_cells(first, store, remaining, options.jobs)
        run_pipemax(settings, store, remaining, options.jobs)
    if options.page:
        print_page(settings, store)
    else:
        print_tables(groups, store)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
