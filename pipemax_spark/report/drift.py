"""Tell whether the answers of two sets of rows are distributed alike: choices, error codes and lengths.

Each distribution is compared by Pearson's chi-square test of homogeneity over two samples. A group of which fewer than
five rows are expected in the smaller sample goes with the other such groups; if even these are too few, they are
compared by the hypergeometric distribution (Fisher's exact test, one-sided: more rows than expected), which holds for
any number of rows. Lengths are compared by the quartiles of both samples together. Rows that were asked again are
compared with their answers of before: where a tenth of the labels is wrong, shares hardly move, and these do. Holm's
correction bounds the chance of any false alarm, over all tests, by ``LEVEL`` (Holm 1979, "A simple sequentially
rejective multiple test procedure").
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipemax_spark.report.distributions import Distributions

LEVEL = 0.01
"""The chance that two samples of the same distribution are said to differ."""
_MIN_EXPECTED = 5.0
"""Rows that a group must be expected to have for the chi-square distribution to hold (Cochran's rule)."""
OTHERS = "all others"
_ANSWERED = "answered"
_SAME, _OTHER = "the same answer", "another answer"
_USUAL_CHANGES = 0.01
"""Share of rows whose greedy answer among few changes by itself, because they are computed next to other rows."""
_SHOWN_GROUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What is compared of a set of rows."""

    rows: int
    """At least one."""
    distributions: Distributions
    errors: Mapping[str, int]
    """Error code → rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One distribution over the rows of before and of now, and how likely it is that it has not changed."""

    name: str
    before: Mapping[str, int]
    now: Mapping[str, int]
    """Group → rows; both have the same groups, in the same order."""
    p_value: float
    """The chance of a difference as large as this one if nothing has changed, from 0 to 1."""

    def changes(self) -> list[tuple[str, float, float]]:
        """Return each group's share of before and of now, from 0 to 1, the largest change first."""
        before, now = sum(self.before.values()), sum(self.now.values())
        shares = [(group, self.before[group] / before, self.now[group] / now) for group in self.before]
        return sorted(shares, key=lambda change: -abs(change[2] - change[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What the comparison of a run's first rows with an earlier run came to."""

    rows: int
    earlier_run: str | None
    """None if the output holds no earlier run's rows under the spec."""
    earlier_rows: int = 0
    comparisons: Sequence[Comparison] = ()

    @property
    def moved(self) -> list[Comparison]:
        """The distributions that have changed, the surest first."""
        return moved(self.comparisons)

    def facts(self) -> dict[str, Any]:
        """Return the facts for the summary."""
        return {
            "rows": self.rows,
            "earlier_run": self.earlier_run,
            "earlier_rows": self.earlier_rows,
            "moved": [comparison.name for comparison in self.moved],
            "smallest_p_value": min((comparison.p_value for comparison in self.comparisons), default=None),
        }

    def __str__(self) -> str:
        if self.earlier_run is None:
            return f"{self.rows:,} random rows came first; no earlier run under this spec is there to compare them with"
        of = f"the {self.earlier_rows:,} rows of run {self.earlier_run}"
        if not self.moved:
            return f"{self.rows:,} random rows came first, and are distributed like {of}"
        changes = "; ".join(f"{comparison.name}: {_changes_of(comparison)}" for comparison in self.moved)
        return f"{self.rows:,} random rows came first, and are distributed otherwise than {of}: {changes}"


def compared(before: Sampled, now: Sampled) -> list[Comparison]:
    """Compare what both sets of rows have: error codes, each field's choices, and each length."""
    errors = [_with_answered(sampled) for sampled in (before, now)]
    comparisons = [*_comparisons("errors", *errors)]
    of_before = {choices.name: choices.rows for choices in before.distributions.choices}
    for choices in now.distributions.choices:
        comparisons += _comparisons(choices.name, of_before.get(choices.name, {}), choices.rows)
    lengths_before = {lengths.name: lengths.rows for lengths in before.distributions.lengths}
    for lengths in now.distributions.lengths:
        comparisons += _comparisons(
            lengths.name, *_by_quartile(lengths_before.get(lengths.name, {}), lengths.rows)
        )
    return comparisons


def asked_again(*, same: int, other: int) -> Comparison:
    """Compare rows that were asked again with their answers of before; there must be at least one."""
    rows = same + other
    return Comparison(
        name="rows asked again",
        before={_SAME: rows, _OTHER: 0},
        now={_SAME: same, _OTHER: other},
        p_value=binomial_tail(other, rows, _USUAL_CHANGES),
    )


def moved(comparisons: Sequence[Comparison], level: float = LEVEL) -> list[Comparison]:
    """Return the distributions that have changed, the surest first, with at most ``level`` of false alarms over all."""
    ordered = sorted(comparisons, key=lambda comparison: comparison.p_value)
    for number, comparison in enumerate(ordered):
        if comparison.p_value > level / (len(ordered) - number):
            return ordered[:number]
    return ordered


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return the chance that a chi-square variable of so many degrees of freedom, at least 1, exceeds the statistic.

    For whole degrees the tail is a finite sum (Abramowitz and Stegun, 26.4.4 and 26.4.5).
    """
    if statistic <= 0:
        return 1.0
    half = statistic / 2
    tail, power = (math.exp(-half), 1.0) if degrees % 2 == 0 else (math.erfc(math.sqrt(half)), 0.5)
    while power < degrees / 2:
        tail += math.exp(power * math.log(half) - half - math.lgamma(power + 1))
        power += 1
    return min(1.0, tail)


def hypergeometric_tail(hits: int, drawn: int, marked: int, total: int) -> float:
    """Return the chance of at least ``hits`` marked ones among so many ``drawn`` of ``total`` without replacement."""
    last = min(drawn, marked)
    logs = (
        _log_choose(marked, k) + _log_choose(total - marked, drawn - k) - _log_choose(total, drawn)
        for k in range(max(hits, drawn - (total - marked)), last + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def binomial_tail(hits: int, drawn: int, share: float) -> float:
    """Return the chance of at least ``hits`` among so many ``drawn``, each with this chance."""
    logs = (
        _log_choose(drawn, k) + k * math.log(share) + (drawn - k) * math.log1p(-share)
        for k in range(hits, drawn + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def _log_choose(total: int, drawn: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(drawn + 1) - math.lgamma(total - drawn + 1)


def _changes_of(comparison: Comparison) -> str:
    changes = comparison.changes()[:_SHOWN_GROUPS]
    return ", ".join(f"{group} {before:.1%} before and {now:.1%} now" for group, before, now in changes)


def _with_answered(sampled: Sampled) -> dict[str, int]:
    return {_ANSWERED: sampled.rows - sum(sampled.errors.values()), **sampled.errors}


def _by_quartile(before: Mapping[int, int], now: Mapping[int, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the rows of before and of now in each quarter of both together."""
    both = sorted((Counter(before) + Counter(now)).items())
    total = sum(rows for _, rows in both)
    edges, seen = list[int](), 0
    for tokens, rows in both:
        seen += rows
        while len(edges) < 3 and seen >= (len(edges) + 1) / 4 * total:
            edges.append(tokens)
    ends = sorted({*edges, both[-1][0]}) if both else []
    starts = [0, *(end + 1 for end in ends)]
    quarters = [(start, end) for start, end in zip(starts, ends, strict=False) if start <= end]
    names = {f"{start:,} to {end:,}": (start, end) for start, end in quarters}
    of_before, of_now = (
        {name: sum(rows for tokens, rows in lengths.items() if start <= tokens <= end)
         for name, (start, end) in names.items()}
        for lengths in (before, now)
    )  # fmt: skip
    return of_before, of_now


def _comparisons(name: str, before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[Comparison]:
    """Yield the comparison of the groups; nothing if a side has no rows, or all rows are in one group."""
    num_before, num_now = sum(before.values()), sum(now.values())
    if not num_before or not num_now:
        return
    groups = sorted({*before, *now}, key=lambda group: -(before.get(group, 0) + now.get(group, 0)))
    pairs = {group: (before.get(group, 0), now.get(group, 0)) for group in groups}
    total = num_before + num_now
    fewer = min(num_before, num_now)
    rare = [group for group in groups if sum(pairs[group]) * fewer < _MIN_EXPECTED * total]
    of_rare = (sum(pairs[group][0] for group in rare), sum(pairs[group][1] for group in rare))
    kept = {group: pair for group, pair in pairs.items() if group not in rare}
    if sum(of_rare) * fewer >= _MIN_EXPECTED * total:
        kept[OTHERS] = of_rare
    elif rare:
        p_value = hypergeometric_tail(of_rare[1], num_now, sum(of_rare), total)
        rest = (num_before - of_rare[0], num_now - of_rare[1])
        shown = {", ".join(rare[:3]) + (", …" if len(rare) > 3 else ""): of_rare, OTHERS: rest}
        yield _made(f"{name}, rare ones", shown, p_value)
    if len(kept) > 1:
        yield _made(name, kept, chi_square_tail(_statistic(list(kept.values())), len(kept) - 1))


def _statistic(pairs: Sequence[tuple[int, int]]) -> float:
    """Return Pearson's statistic of a table of two columns."""
    columns = [sum(pair[side] for pair in pairs) for side in (0, 1)]
    total = sum(columns)
    return math.fsum(
        (count - sum(pair) * column / total) ** 2 / (sum(pair) * column / total)
        for pair in pairs
        for count, column in zip(pair, columns, strict=True)
    )


def _made(name: str, pairs: Mapping[str, tuple[int, int]], p_value: float) -> Comparison:
    before, now = ({group: pair[side] for group, pair in pairs.items()} for side in (0, 1))
    return Comparison(name=name, before=before, now=now, p_value=p_value)
