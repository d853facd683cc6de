"""The records of a batch: what is fixed before it is audited, what follows, and how the next batch goes on."""

from dataclasses import replace

import pytest

from pipemax_spark.cascade.batches import ClosedBatch, OpenBatch
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ledger import Ledger
from pipemax_spark.cascade.ordered_rows import Kept
from pipemax_spark.cascade.promise import Promise
from pipemax_spark.cascade.records import ordinal
from tests.unit.cascade.draws import labelled

USUAL = Promise(agree=0.97, confidence=0.95)


def begun(first_rows: int = 20_000, *, number: int = 1) -> Ledger:
    return Ledger.begin(USUAL, first_rows=first_rows, spec_hash="spec", number=number)


def batch_of(ledger: Ledger, rows: int, *, kept_before: int = 0) -> OpenBatch:
    return OpenBatch.of(ledger, rows=rows, manifest_digest="manifest", kept_before=kept_before)


def test_a_closed_batch_is_the_ledgers_and_counts_the_rows_kept_before() -> None:
    batch = batch_of(begun(), 20_000, kept_before=100)
    audited = labelled([False] * 1_000 + [True] * 60)
    end = batch.close(audited)
    assert (end.ledger, end.cut) == batch.ledger.close_batch(batch.draw, audited)
    assert end.cut.kept is Kept.ABOVE
    assert end.sampled_rows == 1_060
    assert end.sentence(9_000) == end.ledger.sentence(9_100)


@pytest.mark.parametrize("differing", [0, 60])
def test_a_batch_that_is_read_again_closes_with_the_same_bytes(differing: int) -> None:
    batch = batch_of(begun(), 20_000, kept_before=7)
    again = OpenBatch.from_json(batch.to_json())
    assert again == batch
    audited = labelled([False] * 1_000 + [True] * differing)
    end = batch.close(audited)
    assert again.close(reversed(audited)).to_json() == end.to_json()
    assert ClosedBatch.from_json(end.to_json()) == end


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
    after = batch_of(ledger, 1_000).after_large_model
    assert after == replace(ledger, batches=1, seen_rows=1_000)
    assert after.draw(1_000, "manifest").number == 2
    assert not ledger.can_keep(1_100)
    assert after.can_keep(1_100)


def test_a_batch_after_a_bad_one_cannot_keep_a_row_until_enough_rows_are_seen() -> None:
    ledger = begun()
    ledger, _ = ledger.close_batch(ledger.draw(20_000, "manifest"), labelled([True] * 1_000))
    assert not ledger.can_keep(100)
    assert ledger.can_keep(20_000)


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
