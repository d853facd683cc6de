"""How fast a run's engines were while they had all the rows they could take, and how far that varied.

The record is the run's ``engine_metrics.parquet``, which has a report of each engine about every second. Between two
reports an engine was full if rows waited in it at both. The interval is a bootstrap (Efron 1979) over blocks of such
spans, because spans that follow one another are alike. It covers how the speed varied within the run, with the lengths
of its rows. It does not cover rows, engines or machines that differ from the run's.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipemax_spark.report.engine_log import ENGINE_METRICS
from pipemax_spark.rows.prompt_order import Finding

_COLUMNS = ("at", "server_id", "state", "waiting_requests", "rows_done", "metrics")
_PREFILL, *_OTHER_WORK = ("prefill", "decode", "prefetch_stall")
"""The parts of a full engine's time account."""
_RESAMPLES = 1_000
_TAIL = 0.025
_BLOCKS = 20
_MIN_FULL_S = 10.0
"""An engine that was full for less than this is not known at its full speed."""
_GAIN = 1.05
"""Below this a factor is as good as none: the time of a step with prompts and decodes is split by tokens only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpeed:
    """The speed of a run."""

    run_id: str
    engines: int
    """How many worked at a time, at most."""
    rows_per_s: float
    """Of all engines together: while they were full, or if they never were, while they worked."""
    full_s: float
    """Seconds in which an engine was full, over all engines."""
    interval: tuple[float, float] | None
    """The bounds of ``rows_per_s`` at 95 %; None if the engines were not full for long enough to tell."""
    prefill_share: float | None = None
    """The share of the engines' time that prompts took, from 0 to 1, while they were full; None if it is unknown."""


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the bounds at 95 % of the ratio of the pairs' sums, by resampling pairs. The same pairs give the same."""
    rng = random.Random(0)
    ratios = []
    for _ in range(_RESAMPLES):
        chosen = rng.choices(pairs, k=len(pairs))
        ratios.append(sum(above for above, _ in chosen) / sum(below for _, below in chosen))
    ratios.sort()
    place = int(_TAIL * _RESAMPLES)
    return ratios[place], ratios[-1 - place]


def speed_of_run(runs: Path, run_id: str, *, requests_per_row: int = 1) -> RunSpeed | None:
    """Return a run's speed from its record under ``runs``; None without a record, or if no row is in it."""
    try:
        reports = _read(runs / run_id / ENGINE_METRICS)
    except (OSError, pa.ArrowException):  # a run on another machine, or one that is being written
        return None
    by_server: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for report in reports:
        if report["state"] == "ready":
            by_server[report["server_id"]].append(report)
    spans = [span for of_one in by_server.values() for span in _spans(of_one, requests_per_row)]
    full = [span for span in spans if span.is_full]
    full_s = sum(span.seconds for span in full)
    blocks = _blocks(full, full_s / _BLOCKS) if full_s >= _MIN_FULL_S else []
    counted = full if blocks else spans
    seconds, rows = sum(span.seconds for span in counted), sum(span.rows for span in counted)
    if not seconds or not rows:
        return None
    engines = _most_at_a_time([(of_one[0]["at"], of_one[-1]["at"]) for of_one in by_server.values()])
    low, high = ratio_interval(blocks) if blocks else (0.0, 0.0)
    return RunSpeed(
        run_id=run_id,
        engines=engines,
        rows_per_s=engines * rows / seconds,
        full_s=full_s,
        interval=(engines * low, engines * high) if blocks else None,
        prefill_share=prefill_share(_account_of(full)) if blocks else None,
    )


def prefill_share(account: Mapping[str, float]) -> float | None:
    """Return the share of prompts in an account's seconds of computing, from 0 to 1; None if there are none."""
    prefill_s = account.get(_PREFILL, 0.0)
    work_s = prefill_s + sum(account.get(part, 0.0) for part in _OTHER_WORK)
    return prefill_s / work_s if work_s > 0 else None


def rate_factor(finding: Finding, prefill_share: float) -> float | None:
    """Return how many times the rows/s a finding makes, where prompts took this share of the time; None if no more."""
    now = 1 - finding.now
    left = 1 - prefill_share * (finding.then - finding.now) / now if now > 0 else 1.0
    return 1 / left if 0 < left <= 1 / _GAIN else None


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the reports, each with the seconds of its engine's account by part, which may be None."""
    table = pq.read_table(path, columns=list(_COLUMNS))
    for part in (_PREFILL, *_OTHER_WORK):
        seconds = pc.map_lookup(table["metrics"], pa.scalar(f"time_{part}_s"), "first")
        table = table.append_column(part, seconds)
    return list(table.drop_columns(["metrics"]).to_pylist())


@dataclass(frozen=True, slots=True)
class _Span:
    """The time between two reports of an engine."""

    seconds: float
    rows: float
    is_full: bool
    account: Mapping[str, float]


def _spans(reports: Sequence[Mapping[str, Any]], requests_per_row: int) -> list[_Span]:
    spans = []
    for before, after in pairwise(reports):
        seconds = (after["at"] - before["at"]).total_seconds()
        rows = (after["rows_done"] - before["rows_done"]) / requests_per_row
        if seconds > 0:
            is_full = before["waiting_requests"] > 0 and after["waiting_requests"] > 0
            spans.append(_Span(seconds, rows, is_full, _account_between(before, after)))
    return spans


def _account_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    # An engine that was started again begins its account again.
    parts = (_PREFILL, *_OTHER_WORK)
    return {part: max(0.0, (after[part] or 0.0) - (before[part] or 0.0)) for part in parts}


def _account_of(spans: Sequence[_Span]) -> dict[str, float]:
    return {part: sum(span.account[part] for span in spans) for part in (_PREFILL, *_OTHER_WORK)}


def _blocks(spans: Sequence[_Span], min_s: float) -> list[tuple[float, float]]:
    """Join spans that follow one another to blocks of rows and seconds; the last may be shorter."""
    blocks: list[tuple[float, float]] = []
    rows = seconds = 0.0
    for span in spans:
        rows, seconds = rows + span.rows, seconds + span.seconds
        if seconds >= min_s:
            blocks.append((rows, seconds))
            rows = seconds = 0.0
    return [*blocks, (rows, seconds)] if seconds else blocks


def _most_at_a_time(intervals: Sequence[tuple[Any, Any]]) -> int:
    """Return the largest number of intervals that share an instant."""
    return max(
        (sum(first <= at <= last for first, last in intervals) for at, _ in intervals),
        default=0,
    )
