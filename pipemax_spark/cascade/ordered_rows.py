"""Order rows by how sure the small model was, and walk down them until too many sampled rows differ."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pipemax_spark.cascade.records import read_fields

Key = tuple[float, float]
"""A row's score, and the tie break of its request. Larger is surer."""


class Kept(StrEnum):
    """Which rows keep the small answer; sampled ones, and those without a score, never do."""

    NONE = "none"
    ABOVE = "above"
    """Rows whose key is greater than the threshold; an equal one is not."""
    ALL = "all"
    """All that have a score."""


class LabelledRow(NamedTuple):
    """A row that both models were asked for."""

    score: float | None
    """None, NaN and infinity are no score."""
    tie_break: float
    differs: bool
    """Whether the answers differ. The large model's error counts as differing, whatever became of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a walk ended, and what was passed on the way."""

    kept: Kept
    threshold: Key | None
    """The key of the row at which the walk ended, for ``Kept.ABOVE``; else None."""
    labelled_above: int
    differing_above: int

    def keeps(self, score: float | None, tie: float) -> bool:
        """Tell whether a row that is not sampled keeps the small answer."""
        key = key_of(score, tie)
        if key is None or self.kept is Kept.NONE:
            return False
        return self.threshold is None or key > self.threshold


def cut_of(values: Mapping[str, Any]) -> Cut:
    """Read a cut from what its JSON holds. Raise ``ValueError`` if that is none."""
    cut = read_fields(Cut, values)
    threshold = cut["threshold"]
    return Cut(
        **(cut | {"kept": Kept(cut["kept"]), "threshold": None if threshold is None else tuple(threshold)})
    )


KEEP_NONE = Cut(kept=Kept.NONE, threshold=None, labelled_above=0, differing_above=0)


def key_of(score: float | None, tie: float) -> Key | None:
    """Return a row's place in the order; None for a row without a score, which never keeps the small answer.

    In Spark's SQL, NaN is larger than every number: a filter by score has to leave it out.
    """
    # Adding 0.0 makes one zero of -0.0 and 0.0, which are equal and would be written differently.
    return None if score is None or not math.isfinite(score) else (score + 0.0, tie)


def cut_at(rows: Iterable[LabelledRow], allowed: int | None) -> Cut:
    """Walk down the labelled rows and stop at the one that differs after ``allowed`` others did.

    None or less than 0 allows no row to be passed. The order in which the rows come does not matter.
    """
    if allowed is None or allowed < 0:
        return KEEP_NONE
    keys = [(key, row.differs) for row in rows if (key := key_of(row.score, row.tie_break)) is not None]
    differing = sorted((key for key, differs in keys if differs), reverse=True)
    if len(differing) <= allowed:
        return Cut(kept=Kept.ALL, threshold=None, labelled_above=len(keys), differing_above=len(differing))
    threshold = differing[allowed]
    above = [differs for key, differs in keys if key > threshold]
    return Cut(kept=Kept.ABOVE, threshold=threshold, labelled_above=len(above), differing_above=sum(above))
