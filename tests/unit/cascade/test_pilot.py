"""The pilot: its forecast holds, its choice of the sample keeps more rows, and it refuses what does not pay."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pipemax_spark.cascade.certificate import certify
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import LabelledRow
from pipemax_spark.cascade.pilot import (
    Outlook,
    _poisson_quantile,
    assess,
    choose_sample_share,
    forecast,
    of_all,
    pilot_share,
)
from tests.unit.cascade.draws import labelled, make_draw


@given(st.floats(0, 600), st.sampled_from([0.1, 0.5, 0.9]))
def test_the_quantiles_are_scipys(mean: float, p: float) -> None:
    assert _poisson_quantile(mean, p) == stats.poisson.ppf(p, mean)


def make_table(rng: np.random.Generator, rows: int, wrong_share: float) -> list[LabelledRow]:
    """Return rows of which this share differs, more of them where the score is low."""
    score = rng.random(rows)
    differs = rng.random(rows) < 2 * wrong_share * (1 - score)
    return [LabelledRow(float(s), 0.5, bool(d)) for s, d in zip(score, differs, strict=True)]


def kept_share(rng: np.random.Generator, draw: Draw, table: list[LabelledRow]) -> float:
    coins = rng.random(len(table))
    certificate = certify(draw, [row for row, c in zip(table, coins, strict=True) if draw.is_sampled(c)])
    kept = [
        certificate.keeps(row.score, row.tie_break, is_sampled=c < draw.sampled_below)
        for row, c in zip(table, coins, strict=True)
    ]
    return sum(kept) / len(table)


def test_most_tables_keep_what_their_pilots_forecast() -> None:
    rng, inside = np.random.default_rng(3), 0
    for _ in range(50):
        draw = make_draw(6_000, sample_share=0.1, pilot_share=0.05)
        table = make_table(rng, 6_000, 0.15)
        outlook = forecast(draw, [table[i] for i in rng.choice(6_000, 300, replace=False)])
        inside += outlook.low - 0.02 <= kept_share(rng, draw, table) <= outlook.high + 0.02
    assert inside >= 36  # of 50; 40 are promised


def test_where_nothing_differs_a_smaller_sample_is_chosen_and_keeps_more() -> None:
    draw, pilot = make_draw(20_000, sample_share=0.07, pilot_share=0.015), labelled([False] * 300)
    share = choose_sample_share(draw, pilot)
    assert share < draw.promise.default_sample_share(20_000)
    assert forecast(draw.after_pilot(share), pilot).middle > forecast(draw, pilot).middle


def test_a_sample_share_is_chosen_that_can_certify_something() -> None:
    draw = make_draw(6_000, sample_share=0.1, pilot_share=0.05)
    for wrong_share in (0.0, 0.05, 0.2, 0.5):
        pilot = make_table(np.random.default_rng(1), 300, wrong_share)
        share = choose_sample_share(draw, pilot)
        assert draw.promise.allowed_differing(6_000, share) is not None
        assert 0 < share < 1


def test_rows_without_a_score_are_forecast_to_go_to_the_large_model() -> None:
    draw = make_draw(20_000, sample_share=0.07, pilot_share=0.015)
    scored = labelled([False] * 300)
    half = [row._replace(score=None) if place % 2 else row for place, row in enumerate(scored)]
    assert forecast(draw, half).high == pytest.approx(forecast(draw, scored).high / 2)


DRAW = make_draw(20_000, sample_share=0.07, pilot_share=0.015)


def test_a_small_model_that_agrees_pays() -> None:
    said = assess(DRAW, labelled([False] * 290 + [True] * 10), cost_ratio=0.1, starts_share=0.05)
    assert said.outlook is Outlook.PAYS
    assert said.sentence == (
        "The small model agrees on 97 % of 300 rows; at 97 % agreement a cascade pays: about 91 % of the rows would "
        "keep the small answer (90 to 92 %), and the small model costs 15 % of the large one's time."
    )


def test_a_small_model_whose_surest_answers_differ_is_refused_before_anything_is_spent() -> None:
    said = assess(DRAW, labelled([True] * 100 + [False] * 200), cost_ratio=0.1, starts_share=0.05)
    assert said.outlook is Outlook.REFUSED
    assert said.sentence.startswith(
        "The small model agrees on 67 % of 300 rows; at 97 % agreement no threshold pays: about "
    )


def test_where_only_the_low_end_does_not_pay_it_may_not_pay() -> None:
    kept = assess(DRAW, make_table(np.random.default_rng(2), 300, 0.3), cost_ratio=0.01).kept
    assert 0 < kept.low < kept.middle < kept.high
    between = (kept.low + kept.middle) / 2
    pilot = make_table(np.random.default_rng(2), 300, 0.3)
    assert assess(DRAW, pilot, cost_ratio=between).outlook is Outlook.MAY_NOT_PAY
    assert assess(DRAW, pilot, cost_ratio=kept.middle).outlook is Outlook.REFUSED


def test_too_few_rows_are_refused_whatever_the_pilot_shows() -> None:
    said = assess(make_draw(50, sample_share=0.3), labelled([False] * 20), cost_ratio=0.1)
    assert (said.outlook, said.kept.high) == (Outlook.REFUSED, 0.0)
    assert said.sentence.endswith("at 97 % agreement no sample can show it: too few rows may differ.")


def test_a_pilot_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="the pilot has no rows"):
        assess(DRAW, [], cost_ratio=0.1)


def test_only_tables_of_more_than_5_000_rows_have_a_pilot() -> None:
    assert pilot_share(5_000) == 0.0
    assert pilot_share(30_000) == 0.01


def test_a_row_of_several_columns_pays_as_far_as_the_column_of_which_the_least_is_kept() -> None:
    draw = make_draw(rows=20_000)
    good = [LabelledRow(1 - place / 300, 0.5, place > 280) for place in range(300)]
    bad = [LabelledRow(1 - place / 300, 0.5, place % 2 == 0) for place in range(300)]
    each = [assess(draw, rows, cost_ratio=0.1) for rows in (good, bad)]
    both = of_all(["topic", "tone"], each)
    assert (each[0].outlook, each[1].outlook) == (Outlook.PAYS, Outlook.REFUSED)
    assert (both.outlook, both.kept) == (Outlook.REFUSED, each[1].kept)
    assert both.sentence.startswith(f"topic: {each[0].sentence} tone: {each[1].sentence} ")
