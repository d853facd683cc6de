"""Make tables whose two answers to each row are known, and nights of rows that drift, for simulations of a cascade.

A table is its rows' scores, whether the answers differ, and which request each row makes. The scores of most kinds are
binormal: calibrated, with the share of small answers that agree and the area under the curve that the kind names.
"""

from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from pipemax_spark.cascade.promise import Promise

KINDS = {
    "easy": (0.96, 0.90),
    "typical": (0.90, 0.85),
    "hard": (0.75, 0.80),
    "small: 2,000 rows": (0.90, 0.85),
    "score says nothing": (0.90, 0.85),
    "overconfident": (0.90, 0.85),
    "score upside down": (0.90, 0.85),
    "ties: one decimal": (0.90, 0.85),
    "surely wrong at the top": (0.92, 0.85),
    "two languages": (0.97, 0.90),
    "drift over the order": (0.98, 0.80),
    "one wrong block, sure": (0.95, 0.85),
    "cliff": (0.40, 0.50),
    "just over, anywhere": (0.96, 0.50),
    "just over, at the top": (0.96, 0.85),
    "nothing differs": (1.00, 0.50),
    "large at temperature 1": (0.95, 0.85),
    "errors": (0.93, 0.85),
    "equal rows": (0.92, 0.70),
}
"""The share of small answers that agree, and the AUC of the score, before a kind changes them."""
STREAMS = ("steady", "worse", "jump", "weekly", "adversary", "again")
LARGE_ERROR_SCORE = 0.999
"""Of the rows of the kind "errors" on which the large model fails."""
_REPEATED_ROWS = 45


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows in the table's order."""

    scores: np.ndarray
    """(rows,) NaN where there is no score."""
    differs: np.ndarray
    """(rows,) bool."""
    requests: np.ndarray
    """(rows,) int: equal for equal requests."""


def make_table(kind: str, rng: np.random.Generator, rows: int, promise: Promise) -> Table:
    """Return a table of a kind of ``KINDS``."""
    drift = np.linspace(0, 0.2, rows) if kind == "drift over the order" else 0.0
    scores, differs = _binormal(rng, rows, *KINDS[kind], drift)
    some, place, begin = rng.random(rows), np.arange(rows), rng.integers(0, rows - rows // 10)
    requests = place
    match kind:
        case "score says nothing" | "overconfident" | "score upside down" | "ties: one decimal":
            scores = _other_scores(kind, scores, some)
        case "surely wrong at the top":
            scores, differs = np.where(some < 0.02, 1.0, scores), differs | (some < 0.02)
        case "two languages":
            other = some < 0.15
            scores = np.where(other, rng.beta(8, 1, rows), scores)
            differs = np.where(other, rng.random(rows) < 0.4, differs)
        case "one wrong block, sure":
            block = (place >= begin) & (place < begin + rows // 10)
            scores, differs = np.where(block, 0.97 + 0.03 * some, scores), differs | block
        case "cliff":
            scores, differs = -place / rows, place > 0.4 * rows
        case "just over, anywhere":
            scores, differs = some, rng.permutation(place < _least_favourable(promise, rows))
        case "just over, at the top":
            scores, differs = -place / rows, place < _least_favourable(promise, rows)
        case "nothing differs":
            scores, differs = some, np.zeros(rows, bool)
        case "large at temperature 1":
            unsure = some < 0.05
            scores = np.where(unsure, 0.99, scores)
            differs = np.where(unsure, rng.random(rows) < 0.4, differs)
        case "errors":
            missing, failed = some < 0.03, (some >= 0.03) & (some < 0.05)
            scores = np.where(missing, np.nan, np.where(failed, LARGE_ERROR_SCORE, scores))
            differs = differs | missing | failed
        case "equal rows":
            requests = np.repeat(place, np.minimum(rng.zipf(1.5, rows), 400))[:rows]
            scores, differs = scores[requests], differs[requests]
    return Table(scores=scores, differs=differs, requests=requests)


def _other_scores(kind: str, scores: np.ndarray, some: np.ndarray) -> np.ndarray:
    match kind:
        case "overconfident":
            return 1 - (1 - scores) / 20
        case "score upside down":
            return 1 - scores
        case "ties: one decimal":
            return np.round(scores, 1)
    return some


def make_night(kind: str, rng: np.random.Generator, rows: int, night: int, nights: int) -> Table:
    """Return one night's rows of a kind of ``STREAMS``; the adversary's come from ``steady`` ones."""
    shift = {
        "worse": 0.15 * night / nights,
        "jump": 0.3 * (night >= nights // 2),
        "weekly": 0.2 * (night % 7 > 4),
    }
    scores, differs = _binormal(rng, rows, 0.93, 0.85, shift.get(kind, 0.0))
    requests = np.arange(rows) + rows * (night + 1)
    if kind == "again":
        again = np.arange(rows) < _REPEATED_ROWS
        # The same rows come every night, wrong and sure; the others agree.
        scores, differs, requests = (
            np.where(again, 2.0, scores),
            again,
            np.where(again, np.arange(rows), requests),
        )
    return Table(scores=scores, differs=differs, requests=requests)


def _binormal(
    rng: np.random.Generator, rows: int, agree: float, auc: float, shift: float | np.ndarray = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return calibrated scores and what differs; ``shift`` makes more answers differ, which the scores do not know."""
    differs, distance = rng.random(rows) > agree - shift, stats.norm.ppf(auc) * np.sqrt(2)
    evidence = distance * (rng.normal(size=rows) + distance * ~differs) - distance**2 / 2
    return special.expit(special.logit(agree) + evidence), differs


def _least_favourable(promise: Promise, rows: int) -> int:
    """Return the number of differing rows with which a table breaks the promise as often as any."""
    allowed = promise.allowed_differing(rows, promise.default_sample_share(rows))
    return promise.budget(rows) + 1 + (allowed or 0)
