"""The level against simulated servers: nothing sleeps, and each outcome follows from a seed."""

import pytest

from pipemax.endpoints.share import AddressLimits
from tests.endpoints.simulated_server import MEAN_TOKENS, Server, simulate

LATENCIES_S = (0.05, 10.0, 120.0)


def server(slots: int, latency_s: float, *, slope: float = 0.0, **settings: float) -> Server:
    """Decode so many rows at once; a lone one takes ``latency_s`` on the mean, all together 1 + ``slope`` times it."""
    step_s = latency_s / MEAN_TOKENS
    return Server(slots=lambda _: slots, step_s=lambda rows: step_s * (1 + slope * rows / slots), **settings)


def max_rate(slots: int, latency_s: float, slope: float = 0.0) -> float:
    return slots * MEAN_TOKENS / (latency_s * (1 + slope))


@pytest.mark.parametrize("latency_s", LATENCIES_S)
@pytest.mark.parametrize("slots", [1, 8, 64, 300])
def test_a_server_that_queues_is_kept_full_and_its_queue_bounded(slots: int, latency_s: float) -> None:
    duration_s = max(60, 2000 / slots) * latency_s
    record = simulate([server(slots, latency_s)], duration_s, seed=slots)
    levels = record.levels_in(duration_s / 3, duration_s)
    assert min(levels) >= slots
    assert max(levels) <= max(32, 4 * slots)
    assert record.rate(duration_s / 3, duration_s) >= 0.97 * max_rate(slots, latency_s)


@pytest.mark.parametrize("slope", [1.0, 5.0])
def test_a_server_whose_rows_slow_each_other_down_is_filled(slope: float) -> None:
    """As ``vllm serve``: each further row still pays, but less and less."""
    duration_s = 100 * 10.0 * (1 + slope)
    record = simulate([server(256, 10.0, slope=slope)], duration_s)
    assert min(record.levels_in(duration_s / 3, duration_s)) >= 256
    assert record.rate(duration_s / 3, duration_s) >= 0.97 * max_rate(256, 10.0, slope)


def test_a_server_that_does_not_count_tokens_is_filled_more_slowly() -> None:
    duration_s = 150 * 10.0
    record = simulate([server(64, 10.0)], duration_s, is_token_known=False)
    assert record.rate(duration_s / 3, duration_s) >= 0.97 * max_rate(64, 10.0)


@pytest.mark.parametrize("sigma", [0.1, 1.5])
def test_the_level_holds_over_thousands_of_rows_of_equal_and_of_very_unequal_lengths(sigma: float) -> None:
    duration_s = 3000 * 10.0
    record = simulate([server(8, 10.0)], duration_s, sigma=sigma)
    levels = record.levels_in(duration_s / 10, duration_s)
    assert min(levels) >= 8
    assert max(levels) <= 64
    assert record.rate(duration_s / 10, duration_s) >= 0.95 * max_rate(8, 10.0)


def test_the_level_does_not_grow_while_too_few_rows_come() -> None:
    record = simulate([server(300, 10.0)], 3000.0, rows_per_s=2.0)  # 20 are open on the mean
    assert max(level for _, level in record.levels) <= 32


@pytest.mark.parametrize("latency_s", LATENCIES_S)
@pytest.mark.parametrize("retry_after_s", [None, 1.0])
def test_a_server_that_throttles_above_40_keeps_about_40_open(
    latency_s: float, retry_after_s: float | None
) -> None:
    duration_s = max(100 * latency_s, 40.0)
    throttling = server(500, latency_s, retry_after_s=retry_after_s)
    throttling.bears = lambda _: 40
    record = simulate([throttling], duration_s)
    levels = record.levels_in(duration_s / 5, duration_s)
    assert 25 <= min(levels) <= max(levels) <= 52
    assert record.rate(duration_s / 5, duration_s) >= 0.9 * max_rate(40, latency_s)
    assert record.throttled < 0.06 * len(record.answers)


@pytest.mark.parametrize("seed", range(3))
def test_a_server_that_is_busy_now_and_then_whatever_is_open_keeps_its_rate(seed: int) -> None:
    record = simulate([server(64, 10.0, sporadic=0.05)], 1500.0, seed=seed)
    assert record.rate(300, 1500) >= 0.9 * max_rate(64, 10.0)


def test_a_server_that_loses_half_of_its_slots_and_gets_them_back_stays_full() -> None:
    def slots(now_s: float) -> int:
        return 32 if 1000 <= now_s < 2000 else 64

    record = simulate([Server(slots=slots, step_s=lambda _: 10.0 / MEAN_TOKENS)], 3000.0)
    for begin_s, slots_then in ((300, 64), (1100, 32), (2100, 64)):
        assert record.rate(begin_s, begin_s + 700) >= 0.97 * max_rate(slots_then, 10.0)


def test_a_throttling_server_that_bears_half_as_much_for_a_while_gets_its_share_again() -> None:
    def bears(now_s: float) -> float:
        return 20 if 1000 <= now_s < 2000 else 40

    throttling = Server(slots=lambda _: 500, step_s=lambda _: 10.0 / MEAN_TOKENS, bears=bears)
    record = simulate([throttling], 3500.0)
    for begin_s, borne in ((200, 40), (1100, 20), (2500, 40)):
        assert record.rate(begin_s, begin_s + 800) >= 0.9 * max_rate(borne, 10.0)


def test_time_outs_of_a_long_queue_halve_the_level_and_those_of_long_rows_do_not() -> None:
    duration_s = 2000.0
    record = simulate(
        [server(64, 10.0, timeout_s=25.0)], duration_s, sigma=0.5
    )  # 2 % of the rows take longer
    assert min(record.levels_in(duration_s / 4, duration_s)) >= 50
    assert max(record.levels_in(duration_s / 4, duration_s)) <= 128
    assert record.rate(duration_s / 4, duration_s) >= 0.9 * max_rate(64, 10.0)
    record = simulate([server(64, 10.0, timeout_s=12.0)], duration_s, sigma=0.5)  # 30 % of them
    assert record.rate(duration_s / 4, duration_s) >= 0.5 * max_rate(64, 10.0)


def test_two_addresses_take_what_they_can_and_the_faster_one_the_more() -> None:
    fast, slow = server(64, 10.0), server(8, 20.0)
    record = simulate([fast, slow], 1000.0)
    assert record.rate(250, 1000, 0) >= 0.97 * max_rate(64, 10.0)
    assert record.rate(250, 1000, 1) >= 0.95 * max_rate(8, 20.0)


@pytest.mark.parametrize("limit", [{"requests_per_minute": 90}, {"tokens_per_minute": 20_000}])
def test_limits_per_minute_hold_in_every_window_and_are_used(limit: dict[str, float]) -> None:
    limits = [AddressLimits(name="http://a", max_concurrency=500, **limit)]
    record = simulate([server(300, 5.0)], 900.0, limits=limits)
    ((name, most),) = limit.items()
    used = [requests if name == "requests_per_minute" else tokens for requests, tokens in record.minutes]
    assert max(used) <= most
    assert len(record.answers) / 15 >= 0.9 * (most if name == "requests_per_minute" else most / MEAN_TOKENS)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (simulate([server(8, 1.0)], 60.0, seed=3) for _ in range(2))
    assert first.answers
    assert first.answers == second.answers
