"""One batch of a growing table under its ledgers: what is fixed before labels are seen, and what follows from them.

A batch is opened once, with the ledger that the batch before it has left for each answer of a row, and closed once.
Both records are pure functions of stored facts and of the seed that ``OpenBatch`` holds, so whoever finishes a batch
reaches the same ledgers. All ledgers share the coins: each promise is about its own answers, and together they hold
with the sum of their risks, whatever depends on what.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeAlias

from pipemax_spark.cascade.certificate import Certificate
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ledger import Ledger
from pipemax_spark.cascade.ordered_rows import Cut, LabelledRow, cut_of
from pipemax_spark.cascade.records import canonical_json, canonical_text, read_fields

_ROWS_WORTH_A_SMALL_MODEL = 300
"""Of fewer rows the starts of two engines cost more than a small model saves."""

ONE_ANSWER = ""
"""The name of a row's answer where no questions are asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatch:
    """A batch whose rows are fixed, recorded before the large model answers any of them."""

    ledgers: Mapping[str, Ledger]
    """Of each question, or of ``ONE_ANSWER``, as the batch before this one has left it."""
    draw: Draw
    kept_before: int
    """Rows of the ledgers' earlier batches that keep the small answers."""
    is_audited: bool
    """Whether the small model answers the batch: not where it cannot keep a row, or not enough to pay."""

    @classmethod
    def of(cls, ledgers: Mapping[str, Ledger], *, rows: int, manifest_digest: str, kept_before: int) -> Self:
        """Open the ledgers' next batch, and draw its coins. They have been through the same batches, one at least."""
        first, *_ = ledgers.values()
        # A row keeps its small answers only if each of them may be kept.
        can_keep = all(ledger.can_keep(rows) for ledger in ledgers.values())
        return cls(
            ledgers=ledgers,
            draw=first.draw(rows, manifest_digest),
            kept_before=kept_before,
            is_audited=rows >= _ROWS_WORTH_A_SMALL_MODEL and can_keep,
        )

    @property
    def after_large_model(self) -> dict[str, Ledger]:
        """The ledgers after a batch that is not audited, all of whose rows the large model answers."""
        return {name: ledger.pass_batch(self.draw.rows) for name, ledger in self.ledgers.items()}

    def close(self, audited: Mapping[str, Iterable[LabelledRow]]) -> "dict[str, ClosedBatch]":
        """Return what follows for each answer from its audited rows, all of them; see ``Ledger.close_batch``."""
        if audited.keys() != self.ledgers.keys():
            raise ValueError(
                f"the batch has ledgers of {sorted(self.ledgers)}, and the rows are of {sorted(audited)}"
            )
        return {name: self._closed(ledger, list(audited[name])) for name, ledger in self.ledgers.items()}

    def _closed(self, ledger: Ledger, audited: list[LabelledRow]) -> "ClosedBatch":
        after, cut = ledger.close_batch(self.draw, audited)
        return ClosedBatch(
            draw=self.draw, cut=cut, sampled_rows=len(audited), ledger=after, kept_before=self.kept_before
        )

    def to_json(self) -> str:
        """Return the batch as one line of JSON, the same bytes for equal batches."""
        values = asdict(self)
        if self.ledgers.keys() == {ONE_ANSWER}:
            values["ledger"] = values.pop("ledgers")[ONE_ANSWER]
        return canonical_text(values)

    @classmethod
    def from_json(cls, text: str) -> Self | None:
        """Read an open batch; None if the text is a draw without a ledger. Raise ``ValueError`` if it is neither."""
        values = json.loads(text)
        if "ledger" in values:
            values["ledgers"] = {ONE_ANSWER: values.pop("ledger")}
        if "ledgers" not in values:
            return None
        values = read_fields(cls, values)
        ledgers = {name: _ledger_of(ledger) for name, ledger in values["ledgers"].items()}
        return cls(**(values | {"ledgers": ledgers, "draw": _draw_of(values["draw"])}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedBatch:
    """What holds for an answer of a batch and of the table so far: a pure function of open batch and audited rows."""

    draw: Draw
    cut: Cut
    sampled_rows: int
    ledger: Ledger
    """After the batch."""
    kept_before: int
    """Rows of the ledger's earlier batches that keep the small answers."""

    def sentence(self, kept_rows: int) -> str:
        """Say in counts what is promised, where so many rows of this batch keep the small answer."""
        return self.ledger.sentence(self.kept_before + kept_rows)

    def to_json(self) -> str:
        """Return the batch as one line of JSON, the same bytes for the same facts."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a closed batch. Raise ``ValueError`` if the text is none."""
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Self:
        read = read_fields(cls, values)
        known = {
            "draw": _draw_of(read["draw"]),
            "ledger": _ledger_of(read["ledger"]),
            "cut": cut_of(read["cut"]),
        }
        return cls(**(read | known))

    @classmethod
    def all_from_json(cls, text: str) -> dict[str, Self]:
        """Read a closed batch of each answer. Raise ``ValueError`` if the text is none."""
        values = json.loads(text)
        if "questions" not in values:
            return {ONE_ANSWER: cls._of(values)}
        return {name: cls._of(of_question) for name, of_question in values["questions"].items()}


Decision: TypeAlias = Certificate | ClosedBatch
"""What says which rows of an epoch keep the small answer."""


def closed_json(closed: Mapping[str, ClosedBatch]) -> str:
    """Return a closed batch of each answer as one line of JSON, the same bytes for the same facts."""
    if closed.keys() == {ONE_ANSWER}:
        return closed[ONE_ANSWER].to_json()
    return canonical_text({"questions": {name: asdict(one) for name, one in closed.items()}})


def _ledger_of(values: Mapping[str, Any]) -> Ledger:
    return Ledger(**read_fields(Ledger, values))


def _draw_of(values: Mapping[str, Any]) -> Draw:
    return Draw(**read_fields(Draw, values))
