"""Forecast from a few hundred rows, which both models answer first, what a cascade keeps, and whether it pays.

The rows of the pilot keep the large answer and are not sampled. Given them, the other rows' coins are fresh, so that
the sample share, the score and even the choice of the small model may depend on the pilot.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import LabelledRow, key_of
from pipemax_spark.cascade.records import percent

PILOT_ROWS = 300
_ROWS_WORTH_A_PILOT = 5_000
_QUANTILES = (0.1, 0.5, 0.9)
_TRIED_SHARES = tuple(0.1 * 25 ** (step / 14) for step in range(15))
"""Of the default sample share: from a tenth to two and a half times."""


class Outlook(StrEnum):
    """Whether a cascade pays."""

    PAYS = "pays"
    MAY_NOT_PAY = "may not pay"
    """Only the low end of the forecast does not."""
    REFUSED = "refused"
    """No threshold can hold, or the middle of the forecast does not pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The share of all rows that will keep the small answer: 80 % of tables are between ``low`` and ``high``."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What the pilot says, before anything else is spent."""

    outlook: Outlook
    kept: Forecast
    sentence: str


def pilot_share(rows: int) -> float:
    """Return the probability that a row is in the pilot: of some 300 rows, or none of a table of up to 5,000."""
    return PILOT_ROWS / rows if rows > _ROWS_WORTH_A_PILOT else 0.0


def forecast(draw: Draw, pilot: Sequence[LabelledRow]) -> Forecast:
    """Return which share of the rows will be kept, from the labelled rows of the pilot, one at least."""
    tops = _tops(pilot)
    if (mean := _mean_differing(draw, len(pilot))) is None:
        return Forecast(low=0.0, middle=0.0, high=0.0)
    kept = [_asked_once(draw) * tops[min(_poisson_quantile(mean, p), len(tops) - 1)] for p in _QUANTILES]
    return Forecast(low=kept[0], middle=kept[1], high=kept[2])


def choose_sample_share(draw: Draw, pilot: Sequence[LabelledRow]) -> float:
    """Return the sample share of 15 around the default under which the most rows are expected to be kept."""
    default = draw.promise.default_sample_share(draw.rows)
    tops = _tops(pilot)
    return max(
        (default * part for part in _TRIED_SHARES),
        key=lambda share: _mean_kept(draw.after_pilot(share), tops, len(pilot)),
    )


def assess(
    draw: Draw, pilot: Sequence[LabelledRow], *, cost_ratio: float, starts_share: float = 0.0
) -> Assessment:
    """Say whether a cascade pays, from the labelled rows of the pilot, one at least.

    ``cost_ratio`` is the small model's time for all rows, and ``starts_share`` that of the engines' starts, each as
    a share of the large model's time for all rows. A cascade pays if it keeps a larger share of the rows than the sum
    of both.
    """
    if not pilot:
        raise ValueError("the pilot has no rows; a forecast needs one at least")
    kept, needed = forecast(draw, pilot), cost_ratio + starts_share
    if draw.promise.allowed_differing(draw.rows, draw.sample_share) is None:
        outlook, what = Outlook.REFUSED, "no sample can show it: too few rows may differ"
    else:
        outlook = _outlook(kept, needed)
        what = {
            Outlook.PAYS: "a cascade pays",
            Outlook.MAY_NOT_PAY: "a cascade may not pay",
            Outlook.REFUSED: "no threshold pays",
        }[outlook]
        what += (
            f": about {100 * kept.middle:.0f} % of the rows would keep the small answer "
            f"({100 * kept.low:.0f} to {100 * kept.high:.0f} %), and the small model costs "
            f"{100 * needed:.0f} % of the large one's time"
        )
    agreeing = sum(not row.differs for row in pilot) / len(pilot)
    sentence = (
        f"The small model agrees on {100 * agreeing:.0f} % of {len(pilot):,} rows; "
        f"at {percent(draw.agree)} agreement {what}."
    )
    return Assessment(outlook=outlook, kept=kept, sentence=sentence)


def of_all(names: Sequence[str], assessments: Sequence[Assessment]) -> Assessment:
    """Return the assessment of a row that keeps its small answers only if those of all these columns are kept."""
    worst = min(assessments, key=lambda one: one.kept.middle)
    sentences = [f"{name}: {one.sentence}" for name, one in zip(names, assessments, strict=True)]
    sentences.append(
        "A row keeps its small answers where all of them may be kept: of no more rows than the least."
    )
    return Assessment(outlook=worst.outlook, kept=worst.kept, sentence=" ".join(sentences))


def _outlook(kept: Forecast, needed: float) -> Outlook:
    if kept.middle <= needed:
        return Outlook.REFUSED
    return Outlook.PAYS if kept.low > needed else Outlook.MAY_NOT_PAY


def _asked_once(draw: Draw) -> float:
    """Return the share of rows that are neither in the pilot nor sampled."""
    return (1 - draw.pilot_share) * (1 - draw.sample_share)


def _mean_differing(draw: Draw, pilot_rows: int) -> float | None:
    """Return how many of the pilot's differing rows are expected above the threshold; None if no threshold holds."""
    allowed = draw.promise.allowed_differing(draw.rows, draw.sample_share)
    if allowed is None:
        return None
    return pilot_rows * allowed / (draw.sample_share * (1 - draw.pilot_share) * draw.rows)


def _tops(pilot: Sequence[LabelledRow]) -> list[float]:
    """Return the share of the pilot above its first differing row, its second, and so on; last, all with a score."""
    scored = [(key, row.differs) for row in pilot if (key := key_of(row.score, row.tie_break)) is not None]
    scored.sort(reverse=True)
    places = [place for place, (_, differs) in enumerate(scored) if differs]
    return [place / len(pilot) for place in [*places, len(scored)]]


def _mean_kept(draw: Draw, tops: Sequence[float], pilot_rows: int) -> float:
    if (mean := _mean_differing(draw, pilot_rows)) is None:
        return 0.0
    total, left = 0.0, 1.0
    for top, probability in zip(tops, _poisson(mean), strict=False):
        total += top * probability
        left -= probability
    return _asked_once(draw) * (total + tops[-1] * max(0.0, left))


def _poisson_quantile(mean: float, p: float) -> int:
    """Return the smallest count that is not exceeded with at least the probability ``p``."""
    below = 0.0
    for count, probability in enumerate(_poisson(mean)):
        below += probability
        if below >= p:
            return count
    raise AssertionError(f"the Poisson probabilities of the mean {mean} add up to {below}")


def _poisson(mean: float) -> Iterator[float]:
    """Yield the probabilities of 0, 1, 2, … events, as far as they are worth counting."""
    if mean == 0:
        yield 1.0
        return
    for count in range(int(mean + 20 * math.sqrt(mean) + 50)):
        yield math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
