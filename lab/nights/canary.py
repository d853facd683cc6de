"""Model how often a canary raises a false alarm, and how often it notices a change of the answers.

    python -m lab.nights.canary [--nights 1000] [--rows 200 500 2000] [--json FILE]

No Spark and no engine: each night draws the answers of an earlier run and of a canary, and the job's own comparison
(``pipemax_spark.report.drift``) tells whether they differ. Tables differ in their labels: two of which one is rare
(95 : 5), two (80 : 20), five, twenty by Zipf's law, and none (free text). One row of a hundred is an error; lengths are
log-normal.

Changes: the labels of a tenth of the rows are drawn at random (``shuffled``); ``another model`` gives 15 % of the rows
the next label, and its outputs are a quarter longer; a ``swapped template`` has shares of its own, and outputs of half
the length. As many rows of the earlier run are asked again, of which one in 200 changes by itself (a near tie). A free
text has no labels: shuffling changes nothing, and none is asked again.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.random import Generator

from pipemax_spark.report.distributions import Choices, Distributions, Lengths
from pipemax_spark.report.drift import Sampled, asked_again, compared, moved

EARLIER_ROWS = 20_000
ERROR_SHARE = 0.01
NEAR_TIES = 0.005
MOST_FALSE_ALARMS = 0.015
TABLES: Mapping[str, Sequence[float]] = {
    "95 : 5": (0.95, 0.05),
    "80 : 20": (0.8, 0.2),
    "five labels": (0.4, 0.25, 0.2, 0.1, 0.05),
    "twenty labels": tuple(1 / place for place in range(1, 21)),
    "free text": (1.0,),
}
CHANGES = ("none", "shuffled", "another model", "swapped template")


@dataclass(frozen=True, slots=True)
class Answers:
    """How a run's answers are distributed."""

    labels: Sequence[float]
    """Weights."""
    output_scale: float = 1.0

    def draw(self, rows: int, random: Generator) -> Sampled:
        """Draw a run's rows."""
        failed = int(random.binomial(rows, ERROR_SHARE))
        chosen = random.multinomial(rows - failed, np.array(self.labels) / sum(self.labels))
        choices = [Choices(name="text", rows={str(label): int(n) for label, n in enumerate(chosen) if n})]
        lengths = [
            _lengths("prompt tokens", 6.0, 0.6, rows - failed, random),
            _lengths("generated tokens", 3.5, 0.5, rows - failed, random, self.output_scale),
        ]
        distributions = Distributions(choices=choices if len(self.labels) > 1 else [], lengths=lengths)
        return Sampled(
            rows=rows, distributions=distributions, errors={"engine_error": failed} if failed else {}
        )

    def changed(self, change: str, random: Generator) -> "Answers":
        """Return how they are distributed after the change."""
        total, count = sum(self.labels), len(self.labels)
        shares = [weight / total for weight in self.labels]
        match change:
            case "shuffled":
                return replace(self, labels=[0.9 * share + 0.1 / count for share in shares])
            case "another model":
                moved_on = [0.85 * share + 0.15 * shares[place - 1] for place, share in enumerate(shares)]
                return Answers(labels=moved_on, output_scale=1.25)
            case "swapped template":
                return Answers(labels=[*random.dirichlet([1.0] * count)], output_scale=0.5)
        return self


def _lengths(
    name: str, mean: float, sigma: float, rows: int, random: Generator, scale: float = 1.0
) -> Lengths:
    drawn = np.maximum(1, np.round(scale * random.lognormal(mean, sigma, rows))).astype(int)
    tokens, counts = np.unique(drawn, return_counts=True)
    return Lengths(name=name, rows=dict(zip(tokens.tolist(), counts.tolist(), strict=True)))


def _changed_share(before: Answers, now: Answers, change: str) -> float:
    """Return in which share of the rows asked again another label comes."""
    of_before, of_now = (np.array(answers.labels) / sum(answers.labels) for answers in (before, now))
    changed = {
        "none": 0.0,
        "shuffled": 0.1 * (1 - 1 / len(before.labels)),
        "another model": 0.15,
        "swapped template": 1 - float(of_before @ of_now),
    }
    return NEAR_TIES + (1 - NEAR_TIES) * changed[change]


def share_of_alarms(table: str, change: str, *, rows: int, nights: int, seed: int = 0) -> float:
    """Return in which share of the nights a canary of so many rows differs from the run before."""
    random = np.random.default_rng([*f"{table} {change}".encode(), rows, seed])
    before, alarms = Answers(TABLES[table]), 0
    for _ in range(nights):
        now = before.changed(change, random)
        comparisons = compared(before.draw(EARLIER_ROWS, random), now.draw(rows, random))
        if len(before.labels) > 1:
            other = int(random.binomial(rows, _changed_share(before, now, change)))
            comparisons.append(asked_again(same=rows - other, other=other))
        alarms += bool(moved(comparisons))
    return alarms / nights


def main() -> None:
    """Print a table for each number of rows. Fails if there are more false alarms than allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nights", type=int, default=1_000)
    parser.add_argument("--rows", type=int, nargs="+", default=[200, 500, 2_000])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for rows in arguments.rows:
        print(f"\n{rows:,} rows, {arguments.nights:,} nights each\n\n| table | " + " | ".join(CHANGES) + " |")
        print("|---|" + "---|" * len(CHANGES))
        for table in TABLES:
            shares = {
                change: share_of_alarms(table, change, rows=rows, nights=arguments.nights)
                for change in CHANGES
            }
            results.append({"rows": rows, "table": table, "nights": arguments.nights, **shares})
            print(
                f"| {table} | " + " | ".join(f"{share:.1%}" for share in shares.values()) + " |", flush=True
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    alarms = sum(result["none"] for result in results) / len(results)
    print(f"\nfalse alarms over all tables: {alarms:.2%}")
    if alarms > MOST_FALSE_ALARMS:
        raise SystemExit(f"more false alarms than {MOST_FALSE_ALARMS:.1%}")


if __name__ == "__main__":
    main()
