"""Draws and labelled rows for the tests of this folder."""

from collections.abc import Iterable

from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import LabelledRow


def make_draw(
    rows: int,
    *,
    agree: float = 0.97,
    confidence: float = 0.95,
    sample_share: float = 0.1,
    pilot_share: float = 0.0,
    number: int = 1,
) -> Draw:
    return Draw(
        seed="0123456789abcdef" * 2,
        rows=rows,
        agree=agree,
        confidence=confidence,
        sample_share=sample_share,
        pilot_share=pilot_share,
        spec_hash="spec",
        manifest_digest="manifest",
        number=number,
    )


def labelled(differs: Iterable[bool]) -> list[LabelledRow]:
    """Return rows of falling scores, the surest first."""
    return [LabelledRow(-float(place), 0.5, bit) for place, bit in enumerate(differs)]
