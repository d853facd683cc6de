"""The credit window: bounded, fair enough, and never a deadlock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.serve.flow.credit import CreditWindow, StreamCredit
from pipemax.serve.limits import WindowLimits

_LIMITS = WindowLimits(
    chunk_rows=8, chunk_bytes=800, max_rows=40, max_bytes=4_000, undelivered_rows=16, undelivered_bytes=1_600
)


def _send_all(stream: StreamCredit) -> int:
    """Use up all credit with rows of 100 bytes; how many rows that were."""
    rows = 0
    while (grant := stream.grant()) is not None and grant.rows:
        stream.receive(rows=grant.rows, size=grant.rows * 100)
        rows += grant.rows
    return rows


def test_one_stream_may_fill_the_window_and_no_more() -> None:
    stream = CreditWindow(_LIMITS).open_stream()
    assert 40 - 8 // 4 < _send_all(stream) <= 40


def test_a_full_window_leaves_each_further_stream_a_chunk() -> None:
    window = CreditWindow(_LIMITS)
    _send_all(window.open_stream())
    for _ in range(5):
        grant = window.open_stream().grant()
        assert grant is not None
        assert (grant.rows, grant.bytes) >= (8, 800)


def test_beyond_its_chunk_a_stream_waits_for_older_ones_that_ask() -> None:
    window = CreditWindow(_LIMITS)
    older, younger = window.open_stream(), window.open_stream()
    taken = _send_all(older)
    assert 40 - 8 // 4 < taken <= 40
    assert _send_all(younger) == 8
    older.finish(rows=taken, size=taken * 100, output_size=1)
    older.deliver(rows=taken, output_size=1)
    assert _send_all(younger) == 0, "the room is the older one's"
    assert _send_all(older) > 16
    older.end_input()
    younger.finish(rows=8, size=800, output_size=1)
    assert _send_all(younger) >= 8, "its turn has come"


def test_an_older_stream_that_stopped_asking_does_not_block_others() -> None:
    now_s = 0.0
    window = CreditWindow(_LIMITS, clock=lambda: now_s)
    silent, other = window.open_stream(), window.open_stream()
    sent = _send_all(silent)
    silent.finish(rows=sent // 2, size=sent // 2 * 100, output_size=1)
    assert _send_all(other) == 8
    now_s = 1.0
    assert _send_all(other) > 4
    window.check_integrity()


def test_a_stream_that_is_slow_to_send_leaves_the_room_to_younger_ones() -> None:
    window = CreditWindow(_LIMITS)
    slow, other = window.open_stream(), window.open_stream()
    held = slow.grant()
    assert held is not None
    assert _send_all(other) >= 40 - held.rows - 8 // 4


def test_undelivered_rows_stop_only_their_own_stream() -> None:
    window = CreditWindow(_LIMITS)
    stuck, free = window.open_stream(), window.open_stream()
    sent = _send_all(stuck)
    stuck.finish(rows=sent, size=sent * 100, output_size=sent * 10)
    assert sent >= _LIMITS.undelivered_rows
    assert stuck.grant() is None
    assert _send_all(free) >= _LIMITS.max_rows - _LIMITS.chunk_rows
    stuck.deliver(rows=sent, output_size=sent * 10)
    assert stuck.grant() is not None


def test_a_row_that_waits_for_an_equal_one_leaves_the_window_and_bounds_its_own_stream() -> None:
    window = CreditWindow(_LIMITS)
    copies, others = window.open_stream(), window.open_stream()
    sent = _send_all(copies)
    copies.set_aside(rows=sent, size=sent * 100)
    assert window.running_rows == 0
    assert copies.grant() is None, "it has as many undelivered rows as it may have"
    assert _send_all(others) >= _LIMITS.max_rows - _LIMITS.chunk_rows, "the engine's room is free"
    for _ in range(sent):
        copies.finish_waiting(output_size=10)
    copies.deliver(rows=sent, output_size=10 * sent)
    assert copies.grant() is not None
    window.check_integrity()


def test_a_full_window_frees_rows_in_batches_not_one_by_one() -> None:
    window = CreditWindow(_LIMITS)
    stream = window.open_stream()
    _send_all(stream)
    grants = []
    for _ in range(16):
        stream.finish(rows=1, size=100, output_size=1)
        stream.deliver(rows=1, output_size=1)
        grants.append(stream.grant())
    assert 2 <= sum(grant is not None for grant in grants) <= 8


def test_a_row_larger_than_all_credit_overdraws_and_is_paid_back() -> None:
    window = CreditWindow(_LIMITS)
    stream = window.open_stream()
    assert stream.grant() is not None
    stream.receive(rows=1, size=1_000_000)
    assert stream.grant() is None
    neighbour = window.open_stream().grant()
    assert neighbour is not None
    assert neighbour.bytes == 800
    stream.finish(rows=1, size=1_000_000, output_size=1)
    stream.deliver(rows=1, output_size=1)
    paid_back = stream.grant()
    assert paid_back is not None
    assert paid_back.bytes >= 800


def test_a_stream_whose_input_has_ended_keeps_no_credit_from_others() -> None:
    window = CreditWindow(_LIMITS)
    ended, other = window.open_stream(), window.open_stream()
    grant = ended.grant()
    assert grant is not None
    ended.receive(rows=3, size=300)
    ended.end_input()
    window.check_integrity()
    assert _send_all(other) >= _LIMITS.max_rows - 3 - _LIMITS.chunk_rows // 4
    ended.close()
    ended.end_input()
    window.check_integrity()


def test_more_rows_than_credit_are_an_error() -> None:
    stream = CreditWindow(_LIMITS).open_stream()
    with pytest.raises(AssertionError, match="1 rows sent on 0 rows of credit"):
        stream.receive(rows=1, size=1)


_STEP = st.tuples(
    st.integers(0, 3), st.sampled_from(["grant", "send", "finish", "deliver", "reopen"]), st.integers(1, 9)
)


@given(st.lists(_STEP, max_size=200), st.integers(1, 60))
def test_whatever_happens_the_window_is_bounded_and_every_stream_can_go_on(
    steps: list[tuple[int, str, int]], window_rows: int
) -> None:
    window = CreditWindow(_LIMITS)
    window.resize(window_rows)
    streams = [window.open_stream() for _ in range(4)]
    for index, action, amount in steps:
        stream = streams[index]
        unused, running, done = stream.rows.unused, stream.rows.running, stream.rows.undelivered
        match action:
            case "grant":
                foretold = stream.would_grant()
                assert (stream.grant() is not None) == foretold
            case "send" if unused >= amount and stream.bytes.unused > 0:
                stream.receive(rows=amount, size=amount * 100)
            case "finish" if running >= amount:
                stream.finish(rows=amount, size=amount * 100, output_size=amount)
            case "deliver" if done >= amount:
                stream.deliver(rows=amount, output_size=amount)
            case "reopen":
                stream.close()
                streams[index] = window.open_stream()
        window.check_integrity()
        assert sum(s.rows.held() for s in streams) <= min(window_rows, 40) + 4 * 8
    for stream in streams:
        # Whatever the others hold: with nothing running and nothing undelivered, a stream can send.
        rows, size = stream.rows, stream.bytes
        stream.finish(rows=rows.running, size=size.running, output_size=0)
        stream.deliver(rows=rows.undelivered, output_size=size.undelivered)
        stream.grant()
        assert rows.unused > 0
        assert size.unused > 0
