"""Every second belongs to one part."""

import pytest

from pipemax.vllm_ext.engine.time_account import TimeAccount, TimePart


def test_time_account_parts_sum_to_the_time_since_start() -> None:
    account = TimeAccount(100.0)
    account.charge(110.0, {TimePart.START_UP: 1.0})
    account.charge(116.0, {TimePart.PREFILL: 2.0, TimePart.DECODE: 1.0})
    account.charge(115.0, {TimePart.DRAIN: 1.0})  # an instant that has been charged already
    account.charge(117.5, {TimePart.DRAIN: 1.0})
    seconds = account.seconds()
    assert seconds[TimePart.START_UP] == 10.0
    assert seconds[TimePart.PREFILL] == pytest.approx(4.0)
    assert seconds[TimePart.DRAIN] == pytest.approx(1.5)
    assert sum(seconds.values()) == pytest.approx(17.5)
    assert account.span_s(118.0) == pytest.approx(0.5)
