"""The coins: fixed by seed, identity and number for ever, even, and independent of each other."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pipemax_spark.cascade.coins import coin, new_seed, tie_break
from tests.unit.cascade.draws import make_draw

SEED = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("identity", "occurrence", "expected"),
    [
        ("row", 1, 0x874ADF79AF49),
        ("row", 2, 0x9314696E81ED),
        ("Zeile ü", 1, 0xA0C8C5277062),
        ("", 1, 0x0D03A8A4B821),
    ],
)
def test_a_coin_never_changes(identity: str, occurrence: int, expected: int) -> None:
    """Other values would draw again in the middle of a run. These are sha256sum's."""
    assert coin(SEED, identity, occurrence) == expected / 2**48


def test_a_tie_break_never_changes() -> None:
    assert tie_break(SEED, "request") == 0xCD0A2CF5926A / 2**48


@given(st.text(st.characters(codec="utf-8")), st.integers(1, 1_000))
def test_a_coin_is_the_first_48_bits_of_the_hash(identity: str, occurrence: int) -> None:
    text = "\0".join([SEED, identity, str(occurrence)])
    digest = hashlib.sha256(text.encode()).digest()
    assert coin(SEED, identity, occurrence) == int.from_bytes(digest[:6], "big") / 2**48


def test_coins_are_even_over_rows_over_copies_and_over_seeds() -> None:
    for coins in (
        [coin(SEED, str(row), 1) for row in range(20_000)],
        [coin(SEED, "the same row", copy + 1) for copy in range(20_000)],
        [coin(f"{seed:032x}", "row", 1) for seed in range(20_000)],
    ):
        assert stats.kstest(coins, "uniform").pvalue > 1e-4


def test_a_rows_coin_says_nothing_about_its_tie_break_or_the_next_rows_coin() -> None:
    coins = [coin(SEED, str(row), 1) for row in range(20_000)]
    ties = [tie_break(SEED, str(row)) for row in range(20_000)]
    assert abs(stats.pearsonr(coins, ties).statistic) < 0.03
    assert abs(stats.pearsonr(coins[1:], coins[:-1]).statistic) < 0.03


def test_each_seed_is_new_and_fits_a_draw() -> None:
    seeds = {new_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(len(seed) == 32 and int(seed, 16) >= 0 for seed in seeds)


def test_pilot_and_sample_share_no_row_and_have_their_shares() -> None:
    draw = make_draw(20_000, sample_share=0.2, pilot_share=0.05)
    coins = [draw.coin(str(row), 1) for row in range(20_000)]
    pilot, sampled = ([test(value) for value in coins] for test in (draw.is_pilot, draw.is_sampled))
    assert not any(first and second for first, second in zip(pilot, sampled, strict=True))
    assert sum(pilot) / 20_000 == pytest.approx(0.05, abs=0.006)
    assert sum(sampled) / (20_000 - sum(pilot)) == pytest.approx(0.2, abs=0.012)


def test_another_sample_share_after_the_pilot_moves_no_row_of_the_pilot() -> None:
    draw = make_draw(1_000, sample_share=0.2, pilot_share=0.05)
    after = draw.after_pilot(0.02)
    coins = [draw.coin(str(row), 1) for row in range(1_000)]
    assert [after.is_pilot(value) for value in coins] == [draw.is_pilot(value) for value in coins]
    assert sum(map(after.is_sampled, coins)) < sum(map(draw.is_sampled, coins))


def test_without_a_pilot_the_sample_share_stays() -> None:
    with pytest.raises(ValueError, match="a draw without a pilot keeps its sample share"):
        make_draw(1_000).after_pilot(0.02)
