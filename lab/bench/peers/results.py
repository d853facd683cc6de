"""The results of all systems in one file, and as a table. It starts nothing and reads no clock."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

OURS = "pipemax_spark"
BARE = "bare_engine"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One system on one load. A run that failed has ``failure`` and whatever was measured before it."""

    system: str
    lengths: str
    rows: int
    batch_rows: int
    engines: int
    start_s: list[float]
    seconds: list[float]
    output_tokens: int
    load_average: list[float]
    """The machine's load average over the last minute, before and after."""
    ended_at: str
    failure: str | None = None

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.lengths, self.system, self.rows, self.batch_rows

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.median_s

    @property
    def spread(self) -> float:
        """The spread of the runs: (slowest − fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s


def read_results(path: Path) -> list[Result]:
    """Read the results in a file, none if it does not exist. Raise ``ValueError`` if it is not one of this bench."""
    if not path.exists():
        return []
    try:
        return [Result(**values) for values in json.loads(path.read_text())]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds no results of lab.bench.peers ({error}): name another file"
        ) from error


def add_result(path: Path, result: Result) -> None:
    """Add a result to a file, replacing the one with the same system and load, if there is one."""
    results = {old.key: old for old in read_results(path)} | {result.key: result}
    partly = path.with_suffix(".partly")
    partly.write_text(json.dumps([asdict(each) for each in results.values()], indent=1) + "\n")
    partly.replace(path)


def markdown(results: Iterable[Result]) -> str:
    """Return a table for each load, with ratios only within it."""
    groups = groupby(sorted(results, key=_load_of), key=_load_of)
    return "\n\n".join(_table(*load, list(group)) for load, group in groups)


def _load_of(result: Result) -> tuple[str, int, int]:
    return result.lengths, result.rows, result.batch_rows


def _table(lengths: str, rows: int, batch_rows: int, results: list[Result]) -> str:
    measured = {result.system: result for result in results if result.seconds}
    tokens = next(iter(measured.values())).output_tokens if measured else 0
    lines = [
        f"**{lengths.capitalize()} lengths**, {rows:,} rows, batches of {batch_rows}, {tokens:,} output tokens a run",
        "",
        "| system | engines | rows/s | spread | output tokens/s | start, s | of bare engine | PipeMax ÷ it (range) |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    fastest_first = sorted(measured.values(), key=lambda result: result.median_s)
    lines += [_line(result, measured.get(BARE), measured.get(OURS)) for result in fastest_first]
    lines += ["", *(f"- {each.system} failed: {each.failure}" for each in results if each.failure)]
    return "\n".join(lines).rstrip()


def _line(result: Result, bare: Result | None, ours: Result | None) -> str:
    cells = [
        result.system,
        str(result.engines),
        f"{result.rows_per_s:.1f}",
        f"{result.spread:.1%} of {len(result.seconds)}",
        f"{result.output_tokens / result.median_s:,.0f}",
        f"{median(result.start_s):.0f}",
        "" if bare is None else f"{result.rows_per_s / bare.rows_per_s:.3f}",
        "" if ours is None or result.system == OURS else _faster_by(ours, result),
    ]
    return f"| {' | '.join(cells)} |"


def _faster_by(ours: Result, other: Result) -> str:
    """Return the ratio of the medians, and its range over the runs' spread."""
    lowest = min(other.seconds) / max(ours.seconds)
    highest = max(other.seconds) / min(ours.seconds)
    return f"×{other.median_s / ours.median_s:.2f} ({lowest:.2f}–{highest:.2f})"
