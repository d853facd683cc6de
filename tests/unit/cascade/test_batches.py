"""The records of a batch: what is fixed before it is audited, what follows, and how the next batch goes on."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.cascade.batches import ONE_ANSWER, ClosedBatch, OpenBatch, closed_json
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ledger import Ledger
from pipemax_spark.cascade.ordered_rows import Kept, LabelledRow
from pipemax_spark.cascade.promise import Promise
from pipemax_spark.cascade.records import ordinal
from tests.unit.cascade.draws import labelled

USUAL = Promise(agree=0.97, confidence=0.95)


def begun(first_rows: int = 20_000, *, number: int = 1) -> Ledger:
    return Ledger.begin(USUAL, first_rows=first_rows, spec_hash="spec", number=number)


def batch_of(ledger: Ledger, rows: int, *, kept_before: int = 0) -> OpenBatch:
    return OpenBatch.of({ONE_ANSWER: ledger}, rows=rows, manifest_digest="manifest", kept_before=kept_before)


def closed(batch: OpenBatch, audited: list[LabelledRow]) -> ClosedBatch:
    return batch.close({ONE_ANSWER: audited})[ONE_ANSWER]


def test_a_closed_batch_is_the_ledgers_and_counts_the_rows_kept_before() -> None:
    batch = batch_of(begun(), 20_000, kept_before=100)
    audited = labelled([False] * 1_000 + [True] * 60)
    end = closed(batch, audited)
    assert (end.ledger, end.cut) == batch.ledgers[ONE_ANSWER].close_batch(batch.draw, audited)
    assert end.cut.kept is Kept.ABOVE
    assert end.sampled_rows == 1_060
    assert end.sentence(9_000) == end.ledger.sentence(9_100)


@pytest.mark.parametrize("differing", [0, 60])
def test_a_batch_that_is_read_again_closes_with_the_same_bytes(differing: int) -> None:
    batch = batch_of(begun(), 20_000, kept_before=7)
    again = OpenBatch.from_json(batch.to_json())
    assert again == batch
    audited = labelled([False] * 1_000 + [True] * differing)
    end = closed(batch, audited)
    assert closed(again, audited[::-1]).to_json() == end.to_json()
    assert ClosedBatch.from_json(end.to_json()) == end
    assert closed_json({ONE_ANSWER: end}) == end.to_json(), "as before there were ledgers of questions"
    assert ClosedBatch.all_from_json(end.to_json()) == {ONE_ANSWER: end}
    assert '"ledger":' in batch.to_json()


def test_a_draw_of_a_certificate_is_no_batch() -> None:
    draw = begun().draw(20_000, "manifest")
    assert OpenBatch.from_json(draw.to_json()) is None
    assert Draw.from_json(draw.to_json()) == draw


@pytest.mark.parametrize(
    ("first_rows", "rows", "is_audited"),
    [(20_000, 20_000, True), (1_000, 1_000, False), (20_000, 299, False)],
)
def test_a_batch_that_cannot_keep_a_row_or_hardly_any_is_not_audited(
    first_rows: int, rows: int, is_audited: bool
) -> None:
    ledger = begun(first_rows)
    if rows < first_rows:
        ledger, _ = ledger.close_batch(ledger.draw(first_rows, "manifest"), labelled([False] * 1_000))
        assert ledger.can_keep(rows)
    assert batch_of(ledger, rows).is_audited is is_audited


def test_rows_that_the_large_model_answers_alone_are_seen_and_allow_more_misses_later() -> None:
    ledger = begun(1_000)
    after = batch_of(ledger, 1_000).after_large_model[ONE_ANSWER]
    assert after == replace(ledger, batches=1, seen_rows=1_000)
    assert after.draw(1_000, "manifest").number == 2
    assert not ledger.can_keep(1_100)
    assert after.can_keep(1_100)


def test_a_batch_after_a_bad_one_cannot_keep_a_row_until_enough_rows_are_seen() -> None:
    ledger = begun()
    ledger, _ = ledger.close_batch(ledger.draw(20_000, "manifest"), labelled([True] * 1_000))
    assert not ledger.can_keep(100)
    assert ledger.can_keep(20_000)


QUESTIONS = ("kind", "deal")
TABLES = st.lists(
    st.lists(st.tuples(st.booleans(), *[st.tuples(st.integers(0, 9), st.booleans())] * 2), max_size=60),
    min_size=1,
    max_size=5,
)
"""Of each batch the rows: whether a row is audited, and each question's score and whether it differs."""


@given(TABLES)
def test_each_question_has_the_ledger_that_it_would_have_alone(
    tables: list[list[tuple[bool, tuple[int, bool], tuple[int, bool]]]],
) -> None:
    promise = Promise(agree=0.7, confidence=0.6).of_each(2)
    first = Ledger.begin(promise, first_rows=5_000, spec_hash="spec", number=1)
    ledgers, alone = dict.fromkeys(QUESTIONS, first), dict.fromkeys(QUESTIONS, first)
    for rows in tables:
        num_rows = 20 * len(rows) + 1
        batch = OpenBatch.of(ledgers, rows=num_rows, manifest_digest="manifest", kept_before=0)
        assert OpenBatch.from_json(batch.to_json()) == batch
        assert batch.is_audited == (
            num_rows >= 300 and all(ledger.can_keep(num_rows) for ledger in ledgers.values())
        )
        if not batch.is_audited:
            ledgers = batch.after_large_model
            alone = {name: ledger.pass_batch(num_rows) for name, ledger in alone.items()}
            continue
        audited = {
            name: [
                LabelledRow(row[place][0], number, row[place][1]) for number, row in enumerate(rows) if row[0]
            ]
            for place, name in enumerate(QUESTIONS, 1)
        }
        ends = batch.close(audited)
        assert ClosedBatch.all_from_json(closed_json(ends)) == ends
        for name, ledger in alone.items():
            alone[name], cut = ledger.close_batch(batch.draw, audited[name])
            assert ends[name].cut == cut
            assert ends[name].sampled_rows == len(audited[name])
        ledgers = {name: end.ledger for name, end in ends.items()}
    assert ledgers == alone


def test_a_batch_is_audited_only_if_each_question_can_keep_a_row_of_it() -> None:
    good = replace(begun(), batches=1, seen_rows=20_000)
    spent = replace(good, differing_rows=100)
    batch = OpenBatch.of({"kind": good, "deal": spent}, rows=300, manifest_digest="manifest", kept_before=0)
    assert (good.can_keep(300), spent.can_keep(300), batch.is_audited) == (True, False, False)
    assert {ledger.seen_rows for ledger in batch.after_large_model.values()} == {20_300}


def test_audited_rows_of_another_question_are_refused() -> None:
    batch = OpenBatch.of({"kind": begun()}, rows=20_000, manifest_digest="manifest", kept_before=0)
    with pytest.raises(ValueError, match=r"ledgers of \['kind'\], and the rows are of \['deal'\]"):
        batch.close({"deal": []})


def test_a_ledgers_horizon_is_the_first_batch_or_5_000_rows() -> None:
    assert begun(20_000) == Ledger.of(USUAL, horizon_rows=20_000, spec_hash="spec")
    assert begun(12) == Ledger.of(USUAL, horizon_rows=5_000, spec_hash="spec")


def test_a_ledger_after_a_reset_says_that_it_is_not_the_first() -> None:
    assert "ledger" not in begun().sentence(0)
    assert (
        begun(number=2).sentence(0).endswith("This is the table's 2nd ledger: what came before was given up.")
    )


def test_places_in_an_order_end_as_people_say_them() -> None:
    assert [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th")
    ]
