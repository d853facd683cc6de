"""Say of a run's figures whether each is good enough: one row of a table for each criterion."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.gpu.tables import print_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    criterion: str
    figure: str
    passed: bool


def print_verdict(name: str, criteria: Sequence[Criterion]) -> bool:
    """Print the table and a last line, ``NAME PASSED`` or ``NAME FAILED: …``. Return whether all criteria passed."""
    if criteria:
        print_table(f"{name}: criteria", criteria)
    failed = [each.criterion for each in criteria if not each.passed]
    passed = bool(criteria) and not failed
    reason = "; ".join(failed) if criteria else "nothing was measured"
    print(f"\n{name.upper()} PASSED" if passed else f"\n{name.upper()} FAILED: {reason}", flush=True)
    return passed
