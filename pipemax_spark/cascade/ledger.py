"""Keep the promise for a table that grows, after every run, whatever drifts between the runs.

Earlier samples say nothing about tonight's rows, so each batch of rows is audited by coins of its own, and one ledger
counts the differing rows that the walks of all batches pass. Each of them is audited with the same probability whatever
came before, so ``log_wealth`` is the log of a martingale with mean 1, which ever reaches 1/risk with at most the
probability ``risk`` (Ville, 1939). That holds even if somebody chooses a batch after looking at the ledger, as long as
its seed is drawn after its rows are fixed. The promise is about the table so far: good nights may pay for a bad one.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from pipemax_spark.cascade.beta import log_wealth
from pipemax_spark.cascade.coins import new_seed
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import Cut, Kept, LabelledRow, cut_at
from pipemax_spark.cascade.promise import Promise, last_true
from pipemax_spark.cascade.records import canonical_json, of_reset, percent, read_fields

_PRIOR_PART = 1 / 16
"""Of the budget at the horizon. Between 1/8 and 1/64 the rows kept hardly change."""

_FEWEST_HORIZON_ROWS = 5_000
"""A ledger's horizon is the table's first batch, or this if that has fewer rows. With binormal scores (agreement 0.9,
AUC 0.85, 97 %), tables of 20,000 to 37 million rows that grew in 13 ways keep at most 3 points of rows less than at the
best horizon (expected counts, 2026-11-28, `python -m lab.cascade.horizon`).
A year's rows, for which the first batch cannot speak, keep nothing of a table whose first batch is most of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The state of a table's promise after a number of batches."""

    agree: float
    confidence: float
    sample_share: float
    """The probability that a row is audited, the same in all batches."""
    prior_rows: float
    """The weight of the mixture's distribution, in differing rows."""
    spec_hash: str
    batches: int = 0
    seen_rows: int = 0
    """Of all batches, audited ones too."""
    differing_rows: int = 0
    """Audited rows that differ and that the walks passed, with those at which a walk ended."""
    max_misses: int = 0
    """With the confidence, the table so far has no more misses, now and after every earlier batch."""
    number: int = 1
    """How many ledgers the table has had with this one: a reset is counted."""

    def __post_init__(self) -> None:
        if not 0 < self.sample_share < 1:
            raise ValueError(f"sample_share is {self.sample_share}; give a share above 0 and below 1")
        if not self.prior_rows > 0:
            raise ValueError(f"prior_rows is {self.prior_rows}; give a number above 0")
        Promise(agree=self.agree, confidence=self.confidence)

    @classmethod
    def of(cls, promise: Promise, *, horizon_rows: int, spec_hash: str, number: int = 1) -> Self:
        """Return an empty ledger that is cheapest near so many rows; it is valid at any."""
        return cls(
            agree=promise.agree,
            confidence=promise.confidence,
            sample_share=promise.default_sample_share(horizon_rows),
            prior_rows=max(1, promise.budget(horizon_rows)) * _PRIOR_PART,
            spec_hash=spec_hash,
            number=number,
        )

    @classmethod
    def begin(cls, promise: Promise, *, first_rows: int, spec_hash: str, number: int) -> Self:
        """Return an empty ledger for a table whose first batch has so many rows."""
        horizon_rows = max(first_rows, _FEWEST_HORIZON_ROWS)
        return cls.of(promise, horizon_rows=horizon_rows, spec_hash=spec_hash, number=number)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a ledger. Raise ``ValueError`` if the text is none."""
        return cls(**read_fields(cls, json.loads(text)))

    def to_json(self) -> str:
        """Return the ledger as one line of JSON, the same bytes for equal ledgers."""
        return canonical_json(self)

    def draw(self, rows: int, manifest_digest: str) -> Draw:
        """Draw the coins of the next batch, whose rows are fixed; to be recorded before the large model answers any.

        A seed for all batches would give a row that comes again the coin that everybody has seen.
        """
        return Draw(
            seed=new_seed(),
            rows=rows,
            agree=self.agree,
            confidence=self.confidence,
            sample_share=self.sample_share,
            spec_hash=self.spec_hash,
            manifest_digest=manifest_digest,
            number=self.batches + 1,
        )

    def allowed_differing(self, seen_rows: int) -> int | None:
        """Return how many differing rows the walks may pass, all batches together; None if none may be kept yet."""
        misses = self._promise.budget(seen_rows) + 1
        return last_true(lambda differing: self._wealth(differing, misses) >= self._log_limit)

    def close_batch(self, draw: Draw, audited: Iterable[LabelledRow]) -> tuple["Ledger", Cut]:
        """Return the ledger after a batch, and which of its rows keep the small answer.

        ``audited`` are all rows for which ``draw.is_sampled`` holds, as in ``certify``. ``ValueError`` says that the
        draw is not this ledger's next one.
        """
        if draw.number != self.batches + 1 or draw.sample_share != self.sample_share:
            raise ValueError(
                f"the draw has the number {draw.number} and the sample share {draw.sample_share}; the ledger's "
                f"next one has the number {self.batches + 1} and the sample share {self.sample_share}"
            )
        seen_rows = self.seen_rows + draw.rows
        allowed = self.allowed_differing(seen_rows)
        cut = cut_at(audited, None if allowed is None else allowed - self.differing_rows)
        differing, max_misses = self.differing_rows, self.max_misses
        match cut.kept:
            case Kept.ABOVE:
                assert allowed is not None
                # The row that ended the walk is counted, but the bound is that of the moment before: nothing was kept
                # after it.
                differing, max_misses = allowed + 1, self._bound_misses(allowed)
            case Kept.ALL:
                differing += cut.differing_above
                max_misses = self._bound_misses(differing)
            case Kept.NONE:
                pass
        after = replace(
            self,
            batches=self.batches + 1,
            seen_rows=seen_rows,
            differing_rows=differing,
            max_misses=max_misses,
        )
        return after, cut

    def can_keep(self, rows: int) -> bool:
        """Tell whether a row of a next batch of so many rows can keep the small answer."""
        allowed = self.allowed_differing(self.seen_rows + rows)
        return allowed is not None and allowed >= self.differing_rows

    def pass_batch(self, rows: int) -> "Ledger":
        """Return the ledger after a batch that only the large model answers, as is decided before any coin.

        Its rows are seen, and agree by definition.
        """
        return replace(self, batches=self.batches + 1, seen_rows=self.seen_rows + rows)

    def sentence(self, kept_rows: int) -> str:
        """Say in counts what is promised, where so many rows of all batches keep the small answer."""
        bound = min(self.max_misses, kept_rows)
        share = bound / self.seen_rows if self.seen_rows else 0.0
        return (
            f"After run {self.batches:,}, {kept_rows:,} of {self.seen_rows:,} rows keep the small answer. With "
            f"{percent(self.confidence)} confidence, now and after every earlier run, at most {bound:,} of them "
            f"differ from what the large model would have said ({100 * share:.1f} % of the column). Audited rows "
            f"that differed: {self.differing_rows:,}.{of_reset('ledger', self.number)}"
        )

    @property
    def _promise(self) -> Promise:
        return Promise(agree=self.agree, confidence=self.confidence)

    @property
    def _log_limit(self) -> float:
        return -math.log(self._promise.risk)

    def _wealth(self, differing: int, misses: int) -> float:
        return log_wealth(differing, misses, self.sample_share, self.prior_rows)

    def _bound_misses(self, differing: int) -> int:
        bound = last_true(lambda misses: self._wealth(differing, misses) < self._log_limit)
        assert bound is not None, "without a miss there is no evidence"
        return bound
