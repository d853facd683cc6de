"""Certify a threshold: from the sampled rows to the rows that keep the small answer, and a sentence that says so."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import Cut, Kept, LabelledRow, cut_at, cut_of
from pipemax_spark.cascade.records import canonical_json, of_reset, percent, read_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What holds for the rows of a draw: a pure function of the draw and of what the sampled rows were answered."""

    draw: Draw
    budget_rows: int
    """How many misses the promise allows."""
    allowed_rows: int | None
    """How many sampled rows above the threshold may differ; None if no threshold can hold."""
    sampled_rows: int
    cut: Cut
    max_misses: int
    """With the draw's confidence, no more kept rows than this differ; at most the budget."""

    def keeps(self, score: float | None, tie: float, *, is_sampled: bool) -> bool:
        """Tell whether a row's final answer is the small model's.

        ``is_sampled`` holds too if a copy of the row's request was sampled, or if the pilot had it: then the large
        answer is there, and is taken.
        """
        return not is_sampled and self.cut.keeps(score, tie)

    @property
    def estimated_misses(self) -> float:
        """The expected number of misses, without a bound."""
        share = self.draw.sample_share
        return self.cut.differing_above * (1 - share) / share

    def to_json(self) -> str:
        """Return the certificate as one line of JSON, the same bytes for the same facts."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a certificate. Raise ``ValueError`` if the text is none."""
        values = read_fields(cls, json.loads(text))
        draw = Draw(**read_fields(Draw, values["draw"]))
        return cls(**(values | {"draw": draw, "cut": cut_of(values["cut"])}))

    def sentence(self, kept_rows: int) -> str:
        """Say in counts what is promised, where so many rows keep the small answer."""
        draw, cut = self.draw, self.cut
        if cut.kept is Kept.NONE:
            return self._refusal()
        bound, estimate = min(self.max_misses, kept_rows), min(round(self.estimated_misses), kept_rows)
        shares = f"{100 * bound / draw.rows:.1f} % of the column"
        if kept_rows:
            shares += f", {100 * bound / kept_rows:.1f} % of the kept"
        where = "above the threshold" if cut.kept is Kept.ABOVE else "with a score"
        return (
            f"{kept_rows:,} of {draw.rows:,} rows keep the small answer. With {percent(draw.confidence)} "
            f"confidence at most {bound:,} of them differ from what the large model would have said ({shares}); "
            f"estimate {estimate:,}. Sampled {self.sampled_rows:,}, of these {cut.labelled_above:,} {where}, "
            f"{cut.differing_above:,} differing.{of_reset('draw', draw.number)}"
        )

    def _refusal(self) -> str:
        draw = self.draw
        return (
            f"All {draw.rows:,} rows go to the large model: {percent(draw.agree)} agreement allows "
            f"{self.budget_rows:,} misses, which a sample of {percent(draw.sample_share)} of the rows cannot show "
            f"with {percent(draw.confidence)} confidence.{of_reset('draw', draw.number)}"
        )


def certify(draw: Draw, sampled: Iterable[LabelledRow]) -> Certificate:
    """Return the certificate of a draw, once every sampled row has both answers or is an error.

    ``sampled`` are the rows for which ``draw.is_sampled`` holds, all of them, in any order: leaving out rows on which
    the large model failed would break the promise.
    """
    rows, promise = list(sampled), draw.promise
    allowed = promise.allowed_differing(draw.rows, draw.sample_share)
    cut = cut_at(rows, allowed)
    max_misses = 0
    if cut.kept is not Kept.NONE:
        assert allowed is not None
        # Fewer differ above the threshold where rows of one request stand at it; the bound is that of the walk.
        passed = allowed if cut.kept is Kept.ABOVE else cut.differing_above
        max_misses = promise.bound_misses(passed, draw.sample_share)
    return Certificate(
        draw=draw,
        budget_rows=promise.budget(draw.rows),
        allowed_rows=allowed,
        sampled_rows=len(rows),
        cut=cut,
        max_misses=max_misses,
    )
