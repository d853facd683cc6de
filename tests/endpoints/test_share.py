import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemax.endpoints.share import AddressLimits, Share


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def share_of(*limits: AddressLimits) -> tuple[Share, Clock]:
    clock = Clock()
    return Share(limits, clock=clock), clock


def limits(name: str = "http://a", max_concurrency: int = 64, **per_minute: float) -> AddressLimits:
    return AddressLimits(name=name, max_concurrency=max_concurrency, **per_minute)


def take_all(share: Share, tokens: int = 100) -> list[int]:
    taken = []
    while (address := share.take(tokens)) is not None:
        taken.append(address)
    return taken


def break_one(share: Share, address: int = 0) -> None:
    share.broken(address, reason="500", tokens_estimated=100, is_timeout=False)


def answer_one(share: Share, address: int = 0, *, latency_s: float = 1.0, tokens: int = 100) -> None:
    share.answered(address, latency_s=latency_s, tokens_estimated=100, tokens=tokens)


def leave_out(share: Share, address: int = 0, *, of: int = 1) -> None:
    """Fail three requests of one address of so many."""
    others = frozenset(range(of)) - {address}
    for _ in range(3):
        assert share.take(100, avoid=others) == address
    for _ in range(3):
        break_one(share, address)


def test_the_first_requests_are_few_and_bounded_by_the_limit() -> None:
    share, _ = share_of(limits())
    assert len(take_all(share)) == share.open_requests == share.capacity == 8
    assert share.wait_s() > 0
    share, _ = share_of(limits(max_concurrency=3))
    assert len(take_all(share)) == 3


def test_an_address_that_fails_three_in_a_row_is_left_out_longer_each_time_and_then_tried_with_one() -> None:
    share, clock = share_of(limits())
    leave_out(share)
    assert "has failed 3 requests in a row (500): it is left out for 30 s" in share.take_notes()[0]
    for rest_s in (30.0, 60.0, 120.0, 240.0, 300.0, 300.0):
        assert share.take(100) is None
        assert share.figures()["left_out"] == 1
        clock.now_s += rest_s - 0.5
        assert share.take(100) is None
        assert share.wait_s() == pytest.approx(0.5)
        clock.now_s += 0.5
        assert take_all(share) == [0]
        break_one(share)
    assert share.take_notes() == []
    clock.now_s += 300
    assert take_all(share) == [0]
    answer_one(share)
    assert share.take_notes() == ["endpoint http://a answers again"]
    assert len(take_all(share)) > 1


def test_failures_of_requests_since_whose_begin_others_were_answered_say_nothing_against_the_address() -> (
    None
):
    share, clock = share_of(limits())
    began_s = clock.now_s
    take_all(share)
    clock.now_s += 1
    answer_one(share)
    for _ in range(7):
        share.broken(0, reason="late", tokens_estimated=100, is_timeout=True, began_s=began_s)
    assert share.take(100) == 0


def test_a_rest_that_ends_before_anyone_looks_is_not_worth_a_line() -> None:
    share, _ = share_of(limits())
    take_all(share)
    for _ in range(3):
        break_one(share)
    answer_one(share)
    assert share.take_notes() == []


def test_a_refusal_or_an_answer_between_failures_keeps_an_address_in() -> None:
    share, _ = share_of(limits())
    for is_answer in (True, False) * 3:
        for _ in range(3):
            share.take(100)
        break_one(share)
        break_one(share)
        if is_answer:
            answer_one(share)
        else:
            share.refused(0, tokens_estimated=100)
    assert share.take(100) == 0
    assert share.take_notes() == []


def test_an_answer_to_an_earlier_request_brings_an_address_back_at_once() -> None:
    share, _ = share_of(limits())
    take_all(share)
    for _ in range(3):
        break_one(share)
    assert share.take(100) is None
    answer_one(share)
    assert share.take(100) == 0


def test_failures_of_earlier_requests_do_not_lengthen_a_rest() -> None:
    share, clock = share_of(limits())
    take_all(share)
    for _ in range(8):
        break_one(share)
    clock.now_s += 30
    assert take_all(share) == [0]


def test_a_dead_address_leaves_its_share_to_the_others() -> None:
    share, _ = share_of(limits("http://a"), limits("http://b"))
    assert sorted(take_all(share)) == [0] * 8 + [1] * 8
    for _ in range(8):
        break_one(share, 0)
        answer_one(share, 1)
    assert set(take_all(share)) == {1}


def test_a_request_goes_back_where_it_failed_only_while_all_others_are_left_out() -> None:
    share, clock = share_of(limits("http://a", max_concurrency=2), limits("http://b", max_concurrency=2))
    avoid = frozenset({0})
    assert [share.take(100, avoid=avoid) for _ in range(3)] == [1, 1, None]
    for _ in range(2):
        break_one(share, 1)
    assert share.take(100, avoid=avoid) == 1
    break_one(share, 1)
    assert share.take(100, avoid=avoid) == 0
    clock.now_s += 30
    assert share.take(100, avoid=avoid) == 1  # the trial
    assert share.take(100, avoid=avoid) is None
    assert share.take(100, avoid=frozenset({0, 1})) == 0


def test_nothing_is_sent_before_the_time_that_the_server_names() -> None:
    share, clock = share_of(limits())
    take_all(share)
    share.throttled(0, tokens_estimated=100, retry_after_s=90)
    assert any("nothing is sent to it for 90 s" in note for note in share.take_notes())
    for _ in range(7):
        answer_one(share)
    assert share.take(100) is None
    clock.now_s += 89.9
    assert share.take(100) is None
    clock.now_s += 0.2
    assert share.take(100) == 0


def test_a_server_that_throttles_without_a_time_is_left_alone_longer_each_time() -> None:
    share, clock = share_of(limits())
    pauses_s = []
    for _ in range(25):
        while share.take(100) is None:
            pauses_s.append(share.wait_s())
            clock.now_s += share.wait_s()
        share.throttled(0, tokens_estimated=100, retry_after_s=None)
    waited_s = clock.now_s - 1000
    assert pauses_s[0] == pytest.approx(0.5)
    assert waited_s == pytest.approx(0.5 + 1 + 2 + 4 + 8 + 16 + 32 + 60)


def test_silence_counts_from_the_first_request_and_ends_with_an_answer_or_a_refusal() -> None:
    share, clock = share_of(limits())
    clock.now_s += 50
    assert share.silent_s == 0
    share.take(100)
    clock.now_s += 5
    break_one(share)
    share.take(100)
    clock.now_s += 5
    assert share.silent_s == 10
    share.refused(0, tokens_estimated=100)
    assert share.silent_s == 0
    clock.now_s += 3600  # no rows
    share.take(100)
    assert share.silent_s == 0


def test_an_address_says_whether_it_has_answered_since() -> None:
    share, clock = share_of(limits())
    since_s = clock.now_s
    share.take(100)
    share.take(100)
    assert not share.answered_others_since(0, since_s)
    clock.now_s += 1
    answer_one(share)
    assert share.answered_others_since(0, since_s)
    assert not share.answered_others_since(0, clock.now_s)


@pytest.mark.parametrize(
    "bad", [{"max_concurrency": 0}, {"requests_per_minute": 0}, {"tokens_per_minute": -1.0}]
)
def test_bad_limits_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        limits(**bad)


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["take", "take", "take", "answer", "refuse", "throttle", "break", "time out", "release"]
        ),
        st.integers(0, 1_000),
        st.floats(0, 40),
    ),
    max_size=200,
)


@settings(max_examples=200, deadline=None)
@given(_EVENTS, st.integers(1, 40), st.sampled_from([None, 0.5, 7.0, 60.0]), st.sampled_from([None, 900.0]))
def test_the_books_are_right_whatever_happens(
    events: Sequence[tuple[str, int, float]],
    max_concurrency: int,
    per_minute: float | None,
    tokens: float | None,
) -> None:
    """No more open than the limit, none negative, nothing before ``Retry-After`` or beyond the minute's limits."""
    bounds = {"requests_per_minute": per_minute, "tokens_per_minute": tokens}
    share, clock = share_of(
        *(AddressLimits(name=name, max_concurrency=max_concurrency, **bounds) for name in ("a", "b"))
    )
    open_ones: list[tuple[int, int, float]] = []
    sent: list[tuple[int, float, int]] = []
    closed_until_s = [-math.inf, -math.inf]
    for kind, number, seconds in events:
        clock.now_s += seconds
        if kind == "take":
            address = share.take(number)
            if address is not None:
                assert clock.now_s >= closed_until_s[address]
                open_ones.append((address, number, clock.now_s))
                sent.append((address, clock.now_s, number))
                minute = [n for a, at_s, n in sent if a == address and at_s > clock.now_s - 60]
                assert len(minute) <= max(1, per_minute or math.inf)
                assert sum(minute) <= (tokens or math.inf) or len(minute) == 1
            else:
                assert share.wait_s() > 0
        elif open_ones:
            address, estimated, sent_s = open_ones.pop(number % len(open_ones))
            end(share, kind, address, estimated, clock.now_s - sent_s)
            if kind == "throttle":
                closed_until_s[address] = max(closed_until_s[address], clock.now_s + estimated / 20)
        assert share.open_requests == len(open_ones)
        assert 1 <= share.capacity <= 2 * max_concurrency
        for address in range(2):
            assert sum(a == address for a, *_ in open_ones) <= max_concurrency


def end(share: Share, kind: str, address: int, estimated: int, latency_s: float) -> None:
    match kind:
        case "answer":
            share.answered(address, latency_s=latency_s, tokens_estimated=estimated, tokens=estimated)
        case "refuse":
            share.refused(address, tokens_estimated=estimated)
        case "throttle":
            share.throttled(address, tokens_estimated=estimated, retry_after_s=estimated / 20)
        case "break" | "time out":
            share.broken(address, reason="reset", tokens_estimated=estimated, is_timeout=kind == "time out")
        case _:
            share.released(address, tokens_estimated=estimated)
