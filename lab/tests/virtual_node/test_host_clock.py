"""How the host's time enters a virtual node's."""

import pytest

from lab.virtual_node.host_clock import SkippingClock, WallClock


def test_a_host_that_takes_no_time_moves_the_clock_by_waiting_only() -> None:
    clock = SkippingClock(0.0)
    sum(range(100_000))
    assert clock.now_s() == 0.0
    clock.wait_until(30.0)
    clock.wait_until(20.0)
    assert (clock.now_s(), clock.waited_s, clock.worked_s) == (30.0, 30.0, 0.0)


def test_work_between_waits_counts_and_work_for_the_node_does_not() -> None:
    cpu_s = iter([10.0, 10.0, 10.5, 11.0, 13.0, 13.5])
    clock = SkippingClock(2.0, cpu_s=lambda: next(cpu_s))  # made at 10
    clock.wait_until(5.0)
    assert clock.now_s() == 5.0 + 2 * 0.5
    with clock.paused():  # from 11 to 13
        pass
    assert clock.worked_s == 2 * (0.5 + 0.5 + 0.5)


def test_the_host_s_own_work_moves_the_clock() -> None:
    clock = SkippingClock(1.0)
    while clock.now_s() == 0.0:
        sum(range(1_000))
    assert clock.worked_s > 0.0


def test_the_wall_clock_waits_and_a_stretched_second_is_longer() -> None:
    fast, slow = WallClock(1e-3), WallClock(1e3)
    fast.wait_until(5.0)
    assert fast.now_s() >= 5.0
    assert 0.0 < slow.now_s() < fast.now_s()


def test_bad_factors_are_refused() -> None:
    with pytest.raises(ValueError, match="stretch"):
        WallClock(0.0)
    with pytest.raises(ValueError, match="host_factor"):
        SkippingClock(-1.0)


def test_a_wall_clock_that_never_stops_counts_work_for_the_node() -> None:
    clock = WallClock(1e-6, never_stops=True)
    with clock.paused():
        before_s = clock.now_s()
        sum(range(100_000))
        during_s = clock.now_s()
    assert before_s < during_s < clock.now_s()
