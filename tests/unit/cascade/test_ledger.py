"""The ledger of a growing table: its walks, its promise against the worst of all tables, and its bytes."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.cascade.beta import log_wealth
from pipemax_spark.cascade.ledger import Ledger
from pipemax_spark.cascade.ordered_rows import Kept
from pipemax_spark.cascade.promise import Promise
from tests.unit.cascade.draws import labelled

USUAL = Promise(agree=0.97, confidence=0.95)


def make_ledger(horizon_rows: int = 40_000, *, sample_share: float = 0.1, agree: float = 0.97) -> Ledger:
    prior = Promise(agree=agree, confidence=0.95).budget(horizon_rows) / 16
    return Ledger(agree=agree, confidence=0.95, sample_share=sample_share, prior_rows=prior, spec_hash="spec")


def walk(batches: Sequence[tuple[int, Sequence[tuple[bool, bool]]]], ledger: Ledger) -> list[tuple[int, int]]:
    """Walk row by row as the design says; return the differing rows counted and the misses after each batch.

    A batch is its number of rows, and of those in falling order of score whether each is audited and differs.
    """
    seen = counted = misses = 0
    after = []
    for rows, ordered in batches:
        seen += rows
        allowed = ledger.allowed_differing(seen)
        if allowed is not None:
            for is_audited, differs in ordered:
                if counted > allowed:
                    break
                counted += is_audited and differs
                misses += not is_audited and differs
        after.append((counted, misses))
    return after


BATCHES = st.lists(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80), min_size=1, max_size=6
)


@given(BATCHES)
def test_the_ledger_counts_and_keeps_what_a_walk_row_by_row_does(
    batches: list[list[tuple[bool, bool]]],
) -> None:
    ledger = make_ledger(600, sample_share=0.3, agree=0.6)
    tables = [(len(ordered), ordered) for ordered in batches]
    misses = 0
    for (rows, ordered), (counted, missed) in zip(tables, walk(tables, ledger), strict=True):
        table = labelled(differs for _, differs in ordered)
        audited = [row for row, (is_audited, _) in zip(table, ordered, strict=True) if is_audited]
        ledger, cut = ledger.close_batch(ledger.draw(rows, "manifest"), audited)
        misses += sum(
            differs and not is_audited and cut.keeps(row.score, row.tie_break)
            for row, (is_audited, differs) in zip(table, ordered, strict=True)
        )
        assert (ledger.differing_rows, misses) == (counted, missed)
        assert ledger.max_misses <= USUAL.budget(0) + Promise(agree=0.6, confidence=0.95).budget(
            ledger.seen_rows
        )


def worst_chance(ledger: Ledger, *, batches: int, rows: int) -> float:
    """Return the largest P(ever more misses than the budget) over all who choose each row after the last one's coin.

    By dynamic programming over (differing rows counted, misses), from the last batch back to the first. A batch may
    have any number of differing rows, which is more than a table can do.
    """
    promise, share = Promise(agree=ledger.agree, confidence=ledger.confidence), ledger.sample_share
    limits = [ledger.allowed_differing((number + 1) * rows) for number in range(batches)]
    budgets = [promise.budget((number + 1) * rows) for number in range(batches)]
    counts, misses = max(limit or 0 for limit in limits) + 2, budgets[-1] + 2
    later = np.zeros((misses, counts))
    for limit, budget in zip(reversed(limits), reversed(budgets), strict=True):
        now = later.copy()
        now[budget + 1 :] = 1.0
        if limit is not None:
            for missed in range(min(budget, misses - 2), -1, -1):
                for counted in range(limit, -1, -1):
                    goes_on = share * now[missed, counted + 1] + (1 - share) * now[missed + 1, counted]
                    now[missed, counted] = max(later[missed, counted], goes_on)
        later = now
    return float(later[0, 0])


@pytest.mark.parametrize(
    ("batches", "rows", "share", "at_least"),
    [
        (20, 300, 0.15, 0.005),
        (1, 20_000, 0.07, 0.002),
        (40, 1_000, 0.1, 0.02),
        pytest.param(20, 5_000, 0.05, 0.015, marks=pytest.mark.long),
    ],
)
def test_nobody_who_sees_the_ledger_breaks_its_promise(
    batches: int, rows: int, share: float, at_least: float
) -> None:
    worst = worst_chance(make_ledger(batches * rows, sample_share=share), batches=batches, rows=rows)
    assert at_least < worst <= 0.05


def test_a_ledger_that_is_not_sure_enough_is_broken_by_somebody_who_sees_it() -> None:
    """The search for the worst table finds it: a ledger at 40 % confidence breaks a promise of 95 %."""
    ledger = make_ledger(6_000, sample_share=0.15)
    assert worst_chance(replace(ledger, confidence=0.4), batches=20, rows=300) > 0.05


def violations(*, one_seed: bool, tables: int = 40, nights: int = 20, rows: int = 400) -> int:
    """Count tables with too many misses, in which the same 20 rows, wrong and sure, come again every night."""
    violated = 0
    for table in range(tables):
        ledger, missed, is_violated = make_ledger(nights * rows, sample_share=0.15), 0, False
        for night in range(nights):
            seed = f"{table:032x}" if one_seed else f"{1_000 * table + night:032x}"
            draw = replace(ledger.draw(rows, "manifest"), seed=seed)
            table_rows = labelled(row < 20 for row in range(rows))
            names = [f"wrong {row}" if row < 20 else f"{night} {row}" for row in range(rows)]
            is_audited = [draw.is_sampled(draw.coin(name, 1)) for name in names]
            ledger, cut = ledger.close_batch(draw, itertools.compress(table_rows, is_audited))
            missed += sum(
                row.differs and not bit and cut.keeps(row.score, row.tie_break)
                for row, bit in zip(table_rows, is_audited, strict=True)
            )
            is_violated |= missed > USUAL.budget(ledger.seen_rows)
        violated += is_violated
    return violated


def test_rows_that_come_again_need_a_new_seed_in_each_batch() -> None:
    assert violations(one_seed=False) <= 2
    assert violations(one_seed=True) >= 8


def test_before_some_2_500_rows_nothing_is_kept_and_nothing_is_counted() -> None:
    ledger = make_ledger()
    assert ledger.allowed_differing(2_000) is None
    assert ledger.allowed_differing(3_000) is not None
    after, cut = ledger.close_batch(ledger.draw(1_000, "manifest"), labelled([True] * 50))
    assert cut.kept is Kept.NONE
    assert (after.batches, after.seen_rows, after.differing_rows, after.max_misses) == (1, 1_000, 0, 0)


@given(st.integers(3_000, 200_000))
def test_one_differing_row_more_would_not_be_evidence_enough(seen_rows: int) -> None:
    ledger = make_ledger()
    allowed, misses = ledger.allowed_differing(seen_rows), USUAL.budget(seen_rows) + 1
    assert allowed is not None
    last, next_one = (
        log_wealth(count, misses, ledger.sample_share, ledger.prior_rows) for count in (allowed, allowed + 1)
    )
    assert next_one < math.log(20) <= last


def test_a_bad_batch_is_paid_for_by_those_that_come_later() -> None:
    ledger = make_ledger()
    for _ in range(4):
        ledger, cut = ledger.close_batch(ledger.draw(1_000, "manifest"), labelled([False] * 100))
        last_kept = cut.kept
    assert last_kept is Kept.ALL
    allowed = ledger.allowed_differing(5_000)
    assert allowed is not None
    ledger, cut = ledger.close_batch(ledger.draw(1_000, "manifest"), labelled([True] * 100))
    assert (cut.kept, cut.differing_above, ledger.differing_rows) == (Kept.ABOVE, allowed, allowed + 1)
    later, cut = ledger.close_batch(ledger.draw(10, "manifest"), labelled([False]))
    assert cut.kept is Kept.NONE
    assert later.max_misses == ledger.max_misses <= USUAL.budget(5_000)


def test_a_promise_for_all_times_costs_few_rows() -> None:
    ledger = Ledger.of(USUAL, horizon_rows=20_000, spec_hash="spec")
    assert ledger.sample_share == USUAL.default_sample_share(20_000)
    assert (ledger.allowed_differing(20_000), USUAL.allowed_differing(20_000, ledger.sample_share)) == (
        27,
        34,
    )


def test_a_draw_of_another_batch_is_refused() -> None:
    ledger = make_ledger()
    draw = ledger.draw(1_000, "manifest")
    after, _ = ledger.close_batch(draw, [])
    with pytest.raises(ValueError, match=r"the draw has the number 1 .* next one has the number 2"):
        after.close_batch(draw, [])


def test_each_batch_draws_a_seed() -> None:
    ledger = make_ledger()
    assert ledger.draw(10, "manifest").seed != ledger.draw(10, "manifest").seed


def test_a_ledger_that_is_read_again_is_the_same() -> None:
    ledger, _ = make_ledger().close_batch(make_ledger().draw(5_000, "manifest"), labelled([True] * 20))
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_the_sentence_has_the_counts_of_the_table_so_far() -> None:
    ledger = make_ledger()
    ledger, _ = ledger.close_batch(ledger.draw(5_000, "manifest"), labelled([False] * 400 + [True] * 20))
    assert ledger.sentence(4_000) == (
        "After run 1, 4,000 of 5,000 rows keep the small answer. With 95 % confidence, now and after every earlier "
        "run, at most 140 of them differ from what the large model would have said (2.8 % of the column). Audited rows "
        "that differed: 6."
    )


@pytest.mark.parametrize(("name", "value"), [("sample_share", 1.0), ("prior_rows", 0.0), ("agree", 2.0)])
def test_a_bad_value_of_a_ledger_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        replace(make_ledger(), **{name: value})
