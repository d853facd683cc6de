"""One batch of a growing table under its ledger: what is fixed before labels are seen, and what follows from them.

A batch is opened once, with the ledger that the batch before it has left, and closed once. Both records are pure
functions of stored facts and of the seed that ``OpenBatch`` holds, so whoever finishes a batch reaches the same ledger.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from pipemax_spark.cascade.certificate import Certificate
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ledger import Ledger
from pipemax_spark.cascade.ordered_rows import Cut, LabelledRow, cut_of
from pipemax_spark.cascade.records import canonical_json, read_fields

_ROWS_WORTH_A_SMALL_MODEL = 300
"""Of fewer rows the starts of two engines cost more than a small model saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatch:
    """A batch whose rows are fixed, recorded before the large model answers any of them."""

    ledger: Ledger
    """As the batch before this one has left it."""
    draw: Draw
    kept_before: int
    """Rows of the ledger's earlier batches that keep the small answer."""
    is_audited: bool
    """Whether the small model answers the batch: not where it cannot keep a row, or not enough to pay."""

    @classmethod
    def of(cls, ledger: Ledger, *, rows: int, manifest_digest: str, kept_before: int) -> Self:
        """Open the ledger's next batch, and draw its coins."""
        return cls(
            ledger=ledger,
            draw=ledger.draw(rows, manifest_digest),
            kept_before=kept_before,
            is_audited=rows >= _ROWS_WORTH_A_SMALL_MODEL and ledger.can_keep(rows),
        )

    @property
    def after_large_model(self) -> Ledger:
        """The ledger after a batch that is not audited, all of whose rows the large model answers."""
        return self.ledger.pass_batch(self.draw.rows)

    def close(self, audited: Iterable[LabelledRow]) -> "ClosedBatch":
        """Return what follows from the audited rows, all of them; see ``Ledger.close_batch``."""
        rows = list(audited)
        ledger, cut = self.ledger.close_batch(self.draw, rows)
        return ClosedBatch(
            draw=self.draw, cut=cut, sampled_rows=len(rows), ledger=ledger, kept_before=self.kept_before
        )

    def to_json(self) -> str:
        """Return the batch as one line of JSON, the same bytes for equal batches."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self | None:
        """Read an open batch; None if the text is a draw without a ledger. Raise ``ValueError`` if it is neither."""
        values = json.loads(text)
        if "ledger" not in values:
            return None
        return cls(**_read(cls, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedBatch:
    """What holds for a batch and for the table so far: a pure function of the open batch and its audited rows."""

    draw: Draw
    cut: Cut
    sampled_rows: int
    ledger: Ledger
    """After the batch."""
    kept_before: int
    """Rows of the ledger's earlier batches that keep the small answer."""

    def sentence(self, kept_rows: int) -> str:
        """Say in counts what is promised, where so many rows of this batch keep the small answer."""
        return self.ledger.sentence(self.kept_before + kept_rows)

    def to_json(self) -> str:
        """Return the batch as one line of JSON, the same bytes for the same facts."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a closed batch. Raise ``ValueError`` if the text is none."""
        values = _read(cls, json.loads(text))
        return cls(**(values | {"cut": cut_of(values["cut"])}))


Decision: TypeAlias = Certificate | ClosedBatch
"""What says which rows of an epoch keep the small answer."""


def _read(kind: type[OpenBatch | ClosedBatch], values: dict[str, Any]) -> dict[str, Any]:
    values = read_fields(kind, values)
    known = {"ledger": Ledger, "draw": Draw}
    return values | {name: made(**read_fields(made, values[name])) for name, made in known.items()}
