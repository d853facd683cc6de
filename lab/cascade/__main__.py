"""Simulate cascades over tables whose answers are known, and count how often the promise is broken.

    python -m lab.cascade [--tables 1000] [--rows 20000] [--seed 1] [--agree 0.97] [--confidence 0.95] [--json FILE]

No Spark and no engine: 19 kinds of tables and six kinds of nights drive the job's own coins, certificates, pilots and
ledgers (``pipemax_spark.cascade``), next to mistakes that somebody will make. A cell is the share of tables with more
misses than promised, and of rows that keep the small answer, both in percent; * marks more violations than chance
explains (p < 0.001). The command fails if the rule, its bound, the pilot or the ledger has one.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from scipy import stats

from lab.cascade.tables import KINDS, STREAMS
from lab.cascade.trials import Outcome, Outcomes, one_stream, one_table
from pipemax_spark.cascade.promise import Promise

TABLE_COLUMNS = (
    "count",
    "bound",
    "pilot",
    "plug-in",
    "score",
    "redrawn",
    "first",
    "dropped",
    "content",
    "forecast",
)
STREAM_COLUMNS = ("ledger", "bound", "frozen", "one seed")
PROMISED = ("count", "bound", "pilot", "ledger")
FORECAST_RISK = 0.2


def most_violations(number: int, risk: float) -> int:
    """Return how many violations of so many tables chance explains with 99.9 %."""
    return int(stats.binom.ppf(0.999, number, risk))


def cell(outcomes: Sequence[Outcome], risk: float) -> str:
    violated = sum(outcome.violated for outcome in outcomes)
    mark = "*" if violated > most_violations(len(outcomes), risk) else ""
    share = sum(outcome.kept_share for outcome in outcomes) / len(outcomes)
    return f"{100 * violated / len(outcomes):.1f}{mark} / {100 * share:.1f}"


def line(kind: str, columns: Sequence[str], outcomes: Sequence[Outcomes], risk: float) -> str:
    cells = (
        cell([each[name] for each in outcomes], FORECAST_RISK if name == "forecast" else risk)
        for name in columns
    )
    return f"| {kind} | {' | '.join(cells)} |"


def simulate(
    title: str, columns: Sequence[str], kinds: Sequence[str], options: argparse.Namespace
) -> dict[str, list[Outcomes]]:
    """Simulate these kinds one after the other, and print a line of a table as soon as a kind is done."""
    promise = Promise(agree=options.agree, confidence=options.confidence)
    results: dict[str, list[Outcomes]] = {}
    for kind in kinds:
        if kind not in options.kinds:
            continue
        if not results:
            print(f"\n| {title} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}", sep="\n")
        place = [*KINDS, *STREAMS].index(kind)
        generators = (
            np.random.default_rng([options.seed, place, number]) for number in range(options.tables)
        )
        results[kind] = [
            one_table(rng, kind, options.rows, promise) if kind in KINDS else one_stream(rng, kind, promise)
            for rng in generators
        ]
        print(line(kind, columns, results[kind], promise.risk), flush=True)
    return results


def broken(results: dict[str, list[Outcomes]], risk: float) -> list[str]:
    """Return the promises that were broken more often than chance explains."""
    return [
        f"{name} on {kind}"
        for kind, outcomes in results.items()
        for name in PROMISED
        if name in outcomes[0]
        and sum(each[name].violated for each in outcomes) > most_violations(len(outcomes), risk)
    ]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=1_000, help="of each kind, and streams of each kind")
    parser.add_argument("--rows", type=int, default=20_000, help="of a table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--agree", type=float, default=0.97)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS, *STREAMS], help="all of them if none is named")
    parser.add_argument("--json", type=Path, help="where every table's outcome is written")
    return parser.parse_args()


def main() -> None:
    options = read_arguments()
    results = simulate("table", TABLE_COLUMNS, list(KINDS), options)
    results |= simulate("nights", STREAM_COLUMNS, STREAMS, options)
    if options.json:
        rows = {
            kind: [{name: asdict(outcome) for name, outcome in each.items()} for each in outcomes]
            for kind, outcomes in results.items()
        }
        options.json.write_text(json.dumps(rows), encoding="utf-8")
    if faults := broken(results, Promise(agree=options.agree, confidence=options.confidence).risk):
        sys.exit(f"broken more often than chance explains: {', '.join(faults)}")


if __name__ == "__main__":
    main()
