"""What the summary and the report say of a cascade: the certificates in sentences, and what the sampled rows show."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from pipemax_spark.cascade.batches import ONE_ANSWER, ClosedBatch, Decision, OpenBatch
from pipemax_spark.cascade.ordered_rows import KEEP_NONE, LabelledRow
from pipemax_spark.cascade.records import percent
from pipemax_spark.job.cascade_answers import ComparedAnswer
from pipemax_spark.report.summary import Summary
from pipemax_spark.request.prices import Prices

_SHOWN_DISAGREEMENTS, _SHOWN_LABELS = 10, 50
_TENTHS, _FEWEST_OF_A_TENTH = 10, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """An answer of a sampled row, as people read it; None for an error."""

    row: LabelledRow
    """How sure the small model was, and whether the answers differ."""
    small: str | None
    large: str | None
    answered_us: int | None
    """When the large model had answered, in microseconds of Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAgain:
    """How often the large model has given the same answer when it was asked again."""

    rows: int = 0
    """0 where too few would be asked to show anything."""
    same: int = 0
    """An error is not the same as anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the sample has shown of one answer."""

    answer: ComparedAnswer
    labelled: Sequence[Labelled]
    certificate: Decision
    asked_again: AskedAgain = AskedAgain()

    @property
    def is_useless(self) -> bool:
        """Whether the small model is mostly wrong where it is surest."""
        cut = self.certificate.cut
        return 2 * cut.differing_above > cut.labelled_above

    @property
    def applied(self) -> Decision:
        """The certificate by which rows are kept: keeping nothing is always within the promise."""
        return replace(self.certificate, cut=KEEP_NONE) if self.is_useless else self.certificate

    def sentence(self, kept_rows: int) -> str:
        """Say in counts what is promised, where so many rows keep the small answer."""
        promise = self.certificate.sentence(kept_rows)
        if not self.is_useless:
            return promise
        cut = self.certificate.cut
        why = (
            f"All {self.certificate.draw.rows:,} rows go to the large model: of {cut.labelled_above:,} sampled rows of "
            f"which the small model was the surest, {cut.differing_above:,} differ."
        )
        return f"{why} {promise}" if isinstance(self.certificate, ClosedBatch) else why

    def facts(self, kept_rows: int, *, shows_answers: bool) -> dict[str, Any]:
        return {
            "sentence": self.sentence(kept_rows),
            "certificate": json.loads(self.certificate.to_json()),
            "asked_again": asdict(self.asked_again),
            **(
                {"ledger": asdict(self.certificate.ledger)}
                if isinstance(self.certificate, ClosedBatch)
                else {}
            ),
            **(_described(self.labelled) if shows_answers else {}),
        }


def certified_facts(
    findings: Sequence[Finding], kept_rows: int, *, confidence: float, shows_answers: bool
) -> dict[str, Any]:
    """Return the facts of the one answer, or those of each question under its name, with a sentence for all."""
    of_each = {one.answer.name: one.facts(kept_rows, shows_answers=shows_answers) for one in findings}
    return _of_all(of_each, confidence=confidence)


def passed_facts(batch: OpenBatch, *, confidence: float) -> dict[str, Any]:
    """Return what the summary says of a batch that only the large model answers."""
    of_each = {
        name: {"sentence": ledger.sentence(batch.kept_before), "ledger": asdict(ledger)}
        for name, ledger in batch.after_large_model.items()
    }
    return {"rows_kept": 0, "rows_sampled": 0, **_of_all(of_each, confidence=confidence)}


def _of_all(of_each: Mapping[str, dict[str, Any]], *, confidence: float) -> dict[str, Any]:
    if of_each.keys() == {ONE_ANSWER}:
        return of_each[ONE_ANSWER]
    sentences = [f"{name}: {facts['sentence']}" for name, facts in of_each.items()]
    together = f"Together this holds with {percent(confidence)} confidence."
    return {"sentence": " ".join([*sentences, together]), "questions": of_each}


def _described(labelled: Sequence[Labelled]) -> dict[str, Any]:
    """Return what the report shows of the sampled rows: agreement by label, and the surest disagreements."""
    by_label: dict[str, list[bool]] = defaultdict(list)
    for one in labelled:
        by_label[one.small if one.small is not None else "(error)"].append(not one.row.differs)
    apart = [one for one in labelled if one.row.differs and one.row.score is not None]
    apart.sort(key=lambda one: (-(one.row.score or 0.0), one.small or "", one.large or ""))
    facts: dict[str, Any] = {
        "disagreements": [
            {"score": one.row.score, "small": one.small, "large": one.large or "(error)"}
            for one in apart[:_SHOWN_DISAGREEMENTS]
        ]
    }
    if len(labelled) >= _TENTHS * _FEWEST_OF_A_TENTH:
        facts["tenths"] = _tenths(labelled)
    if len(by_label) <= _SHOWN_LABELS:
        facts["labels"] = [
            {"label": label, "sampled": len(agrees), "agreeing": sum(agrees)}
            for label, agrees in sorted(by_label.items())
        ]
    return facts


def _tenths(labelled: Sequence[Labelled]) -> list[dict[str, int]]:
    """Return the agreement of each tenth of the rows, in the order in which the large model answered them."""
    ordered = sorted(labelled, key=lambda one: (one.answered_us or 0, one.row.tie_break))
    borders = [len(ordered) * tenth // _TENTHS for tenth in range(_TENTHS + 1)]
    parts = [ordered[first:end] for first, end in pairwise(borders)]
    return [{"sampled": len(part), "agreeing": sum(not one.row.differs for one in part)} for part in parts]


def phase_facts(summary: Summary, prices: Prices) -> dict[str, Any]:
    """Return what one job of the cascade has done and cost."""
    return {
        "rows": summary.rows_out,
        "seconds": summary.seconds,
        "tokens": summary.prompt_tokens + summary.completion_tokens,
        "cost": prices.cost(seconds=summary.seconds, spent=summary.spent) if prices.are_known else None,
    }
