"""Which horizon a ledger should have: the rows that a growing table is expected to keep, by the horizon and its growth.

By expected counts, with binormal scores (agreement 0.9, AUC 0.85), at 97 %: `python -m lab.cascade.horizon`.
"""

import math
from statistics import NormalDist

from pipemax_spark.cascade.ledger import Ledger
from pipemax_spark.cascade.promise import Promise

_NORMAL, _PROMISE = NormalDist(), Promise(agree=0.97, confidence=0.95)
_AGREE, _AUC = 0.9, 0.85
_GROWTHS = (
    *((300, 300, 365), (1_000, 1_000, 30), (1_000, 1_000, 365), (2_000, 2_000, 365), (5_000, 5_000, 10)),
    *((10_000, 10_000, 30), (10_000, 10_000, 365), (20_000, 500, 100), (20_000, 20_000, 0)),
    *((100_000, 1_000, 30), (100_000, 1_000, 365), (100_000, 100_000, 365), (1_000_000, 5_000, 365)),
)
"""Rows of the first batch, rows of each later night, and nights."""
_HORIZONS = [int(step * 10**power) for power in range(3, 8) for step in (1, 2, 5)]


def kept_share(differing_passed: float) -> float:
    """Return the share of a batch above the score at which the rows that differ are this share of the batch."""
    passed = min(differing_passed, (1 - _AGREE) * (1 - 1e-12))
    if passed < 1e-15:
        return 0.0
    threshold = _NORMAL.inv_cdf(1 - passed / (1 - _AGREE))
    return _AGREE * _NORMAL.cdf(math.sqrt(2) * _NORMAL.inv_cdf(_AUC) - threshold) + passed


def kept_of_table(ledger: Ledger, first: int, night: int, nights: int) -> float:
    """Return the share of the table that keeps the small answer in the end."""
    seen, counted, kept, share = 0, 0.0, 0.0, ledger.sample_share
    for rows in [first, *[night] * nights]:
        seen += rows
        allowed = ledger.allowed_differing(seen)
        if allowed is None or allowed < counted:
            continue
        passed = min((allowed - counted) / (share * rows), 1 - _AGREE)
        counted += passed * share * rows
        kept += (1 - share) * kept_share(passed) * rows
    return kept / seen


def main() -> None:
    """Print the shares kept at the product's horizon, at the best one and at that of a year of first batches."""
    for growth in _GROWTHS:
        ours = Ledger.begin(_PROMISE, first_rows=growth[0], spec_hash="", number=1)
        at = {
            horizon: kept_of_table(Ledger.of(_PROMISE, horizon_rows=horizon, spec_hash=""), *growth)
            for horizon in (*_HORIZONS, 365 * growth[0])
        }
        best = max(at, key=lambda horizon: at[horizon])
        print(
            f"{growth[0]:>9,} rows, then {growth[2]:>3} × {growth[1]:>7,}: {kept_of_table(ours, *growth):.1%}; best "
            f"{at[best]:.1%} at {best:,}; a year's {at[365 * growth[0]]:.1%}"
        )


if __name__ == "__main__":
    main()
