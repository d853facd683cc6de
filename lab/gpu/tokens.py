"""Compare the token ids of two rounds row by row. Knows nothing of engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Tokens = Mapping[str, Sequence[int]]
"""Request id → its output's token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many rows of a round have the tokens of another one."""

    round: str
    against: str
    kind: str
    """What the comparison is for: ``control``, ``PipeMax``, ``across`` or ``planted fault``."""
    rows: int
    """Rows that both rounds have; 0 if one of the rounds is missing."""
    equal_rows: int
    first_difference: int | None
    """The first position at which any row differs."""
    passed: bool | None
    """Whether it came out as it must; None where either result is right."""


def compare(round_: str, against: str, rounds: Mapping[str, Tokens], *, kind: str) -> Comparison:
    """Compare two rounds by their names. All rows must be equal, but for a planted fault, which must be seen."""
    mine, others = rounds.get(round_, {}), rounds.get(against, {})
    shared = [row for row in mine if row in others]
    differing = [row for row in shared if list(mine[row]) != list(others[row])]
    is_whole = bool(shared) and len(shared) == len(mine) == len(others)
    passed = is_whole and bool(differing) == (kind == "planted fault")
    return Comparison(
        round=round_,
        against=against,
        kind=kind,
        rows=len(shared),
        equal_rows=len(shared) - len(differing),
        first_difference=min((_first_difference(mine[row], others[row]) for row in differing), default=None),
        passed=None if kind == "across" else passed,
    )


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Return one line that begins with ``PARITY PASSED`` or ``PARITY FAILED``."""
    wrong = [each for each in comparisons if each.passed is False]
    if not comparisons:
        return "PARITY FAILED: nothing was compared"
    if not wrong:
        return f"PARITY PASSED: {sum(each.passed is True for each in comparisons)} comparisons"
    if any(each.kind == "control" for each in wrong):
        return "PARITY FAILED: stock vLLM's own tokens depend on the batch, or are missing: nothing is known of PipeMax"
    return "PARITY FAILED: " + "; ".join(
        f"{each.round} against {each.against}: {each.equal_rows} of {each.rows} rows equal" for each in wrong
    )
