"""Certificates: the same bytes from the same facts, thresholds that leave equal keys out, errors that count."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.cascade.certificate import Certificate, certify
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import Kept, LabelledRow, cut_at
from tests.unit.cascade.draws import labelled, make_draw

SCORES = st.one_of(st.none(), st.sampled_from([0.0, -0.0, 0.5, 1.0]), st.floats())
ROWS = st.lists(st.builds(LabelledRow, SCORES, st.floats(0, 0.99), st.booleans()), max_size=60)
USUAL = make_draw(400, agree=0.9, sample_share=0.2)


def test_the_walk_ends_at_the_differing_row_after_the_allowed_ones() -> None:
    cut = cut_at(labelled([False, True, False, True, False]), 1)
    assert cut.threshold == (-3.0, 0.5)
    assert (cut.kept, cut.labelled_above, cut.differing_above) == (Kept.ABOVE, 3, 1)
    assert cut.keeps(-2.9, 0.0)
    assert not cut.keeps(-3.0, 0.4)


def test_rows_of_equal_score_are_told_apart_by_their_tie_break_and_an_equal_key_is_not_kept() -> None:
    cut = cut_at([LabelledRow(1.0, 0.3, True), LabelledRow(1.0, 0.6, True)], 1)
    assert cut.threshold == (1.0, 0.3)
    assert cut.keeps(1.0, 0.31)
    assert not cut.keeps(1.0, 0.3)


def test_copies_of_a_request_that_stand_at_the_threshold_lower_no_bound() -> None:
    copies = [LabelledRow(0.5, 0.5, True)] * 40
    certificate = certify(USUAL, copies)
    assert certificate.cut.differing_above == 0
    assert certificate.allowed_rows is not None
    assert certificate.max_misses == USUAL.promise.bound_misses(certificate.allowed_rows, 0.2)
    assert certificate.max_misses > USUAL.promise.bound_misses(0, 0.2)


def test_where_few_sampled_rows_differ_all_rows_with_a_score_are_kept() -> None:
    certificate = certify(USUAL, labelled([True, False, False]))
    assert certificate.cut.kept is Kept.ALL
    assert certificate.keeps(-1e300, 0.0, is_sampled=False)
    assert certificate.max_misses == USUAL.promise.bound_misses(1, 0.2) < certificate.budget_rows


@pytest.mark.parametrize("score", [None, float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_score_is_never_kept(score: float | None) -> None:
    for rows in (labelled([]), labelled([True] * 100)):
        assert not certify(USUAL, rows).keeps(score, 0.99, is_sampled=False)


def test_a_sampled_row_is_never_kept() -> None:
    assert not certify(USUAL, []).keeps(1.0, 0.5, is_sampled=True)


def test_where_no_threshold_can_hold_nothing_is_kept_and_the_sentence_says_why() -> None:
    certificate = certify(make_draw(20), labelled([False] * 5))
    assert certificate.allowed_rows is None
    assert certificate.cut.kept is Kept.NONE
    assert not certificate.keeps(1.0, 0.5, is_sampled=False)
    assert certificate.sentence(0) == (
        "All 20 rows go to the large model: 97 % agreement allows 0 misses, which a sample of 10 % of the rows "
        "cannot show with 95 % confidence."
    )


def test_a_table_of_one_row_goes_to_the_large_model() -> None:
    assert certify(make_draw(1, sample_share=1 / 3), labelled([False])).cut.kept is Kept.NONE


@given(ROWS, st.randoms())
def test_the_order_of_the_facts_does_not_change_a_byte(rows: list[LabelledRow], order: random.Random) -> None:
    shuffled = list(rows)
    order.shuffle(shuffled)
    assert certify(USUAL, shuffled).to_json() == certify(USUAL, rows).to_json()


@given(ROWS)
def test_a_certificate_that_is_read_again_is_the_same(rows: list[LabelledRow]) -> None:
    certificate = certify(USUAL, rows)
    again = Certificate.from_json(certificate.to_json())
    assert again == certificate
    assert again.to_json() == certificate.to_json()


@given(ROWS, st.data())
def test_a_row_that_differs_after_all_never_keeps_more_rows(
    rows: list[LabelledRow], data: st.DataObject
) -> None:
    if not rows:
        return
    place = data.draw(st.integers(0, len(rows) - 1))
    worse = [*rows[:place], rows[place]._replace(differs=True), *rows[place + 1 :]]
    before, after = certify(USUAL, rows), certify(USUAL, worse)
    for row in rows:
        score, tie = row.score, row.tie_break
        assert before.keeps(score, tie, is_sampled=False) or not after.keeps(score, tie, is_sampled=False)


def test_the_bytes_of_a_certificate_never_change() -> None:
    """Other bytes here would make a resumed run believe that its certificate is another one's."""
    rows = [LabelledRow(place / 10, 0.25, differs=True) for place in range(6)] + [
        LabelledRow(-0.0, 0.5, False)
    ]
    draw = (
        '{"agree":0.9,"confidence":0.95,"manifest_digest":"manifest","number":1,"pilot_share":0.0,"rows":400,'
        '"sample_share":0.2,"seed":"0123456789abcdef0123456789abcdef","spec_hash":"spec"}'
    )
    cut = '{"differing_above":4,"kept":"above","labelled_above":4,"threshold":[0.1,0.25]}'
    assert certify(USUAL, rows).to_json() == (
        f'{{"allowed_rows":4,"budget_rows":40,"cut":{cut},"draw":{draw},"max_misses":39,"sampled_rows":7}}'
    )


def test_both_zeros_are_one_score_and_one_text() -> None:
    cuts = [cut_at([LabelledRow(zero, 0.5, differs=True)], 0) for zero in (0.0, -0.0)]
    assert [str(cut.threshold) for cut in cuts] == ["(0.0, 0.5)"] * 2


def test_the_sentence_has_the_counts_of_the_promise() -> None:
    rows = [LabelledRow(1.0 - place / 20_000, 0.5, place % 25 == 0) for place in range(19_309)]
    assert certify(make_draw(1_000_000, sample_share=0.019309), rows).sentence(712_331) == (
        "712,331 of 1,000,000 rows keep the small answer. With 95 % confidence at most 29,994 of them differ from what "
        "the large model would have said (3.0 % of the column, 4.2 % of the kept); estimate 27,934. Sampled 19,309, of "
        "these 13,750 above the threshold, 550 differing."
    )


def test_the_bound_in_the_sentence_is_not_larger_than_the_rows_kept() -> None:
    certificate = certify(USUAL, labelled([False]))
    assert "at most 3 of them differ" in certificate.sentence(3)


def test_a_draw_that_is_read_again_is_the_same() -> None:
    draw = make_draw(1_000, pilot_share=0.1)
    assert Draw.from_json(draw.to_json()) == draw
    assert json.loads(draw.to_json())["seed"] == draw.seed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "abc"}, "the seed of a draw is 'abc'; it must have 32 hexadecimal digits"),
        ({"rows": 0}, "a draw is over 0 rows"),
        ({"sample_share": 0.0}, "sample_share is 0.0"),
        ({"pilot_share": 1.0}, "pilot_share is 1.0"),
        ({"agree": 1.0}, "agree is 1"),
        ({"number": 0}, "the number of a draw is 0; the first one is 1"),
    ],
)
def test_a_bad_value_of_a_draw_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(USUAL, **change)


def test_a_record_with_an_unknown_or_without_a_required_field_is_refused_by_name() -> None:
    values = json.loads(USUAL.to_json())
    with pytest.raises(ValueError, match="a record of Draw has the unknown field 'colour'"):
        Draw.from_json(json.dumps(values | {"colour": 1}))
    del values["seed"]
    with pytest.raises(ValueError, match="a record of Draw lacks the field 'seed'"):
        Draw.from_json(json.dumps(values))
