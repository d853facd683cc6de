"""ShortFirstFill and GreedySelect over the parked requests."""

from pipemax.control.planners.selection import (
    Basket,
    Refinement,
    TimeGap,
    fill_longest_first,
    fill_shortest_first,
)
from pipemax.control.state.table import RequestTable
from tests.unit.control.tables import park_lengths, parked, resident, roomy_table


def basket_of(table: RequestTable, *, blocks: int, requests: int = 64) -> Basket:
    return Basket(table.needs, max_blocks=blocks, max_requests=requests)


def gap(gap_s: float, *, alpha_s: float = 1.0, beta_s: float = 0.0, tolerance_s: float = 0.1) -> TimeGap:
    return TimeGap(gap_s=gap_s, alpha_s=alpha_s, beta_s=beta_s, tolerance_s=tolerance_s)


def test_short_first_fill_stops_at_the_gap_in_time() -> None:
    table = roomy_table()
    park_lengths(table, [20] * 10)
    basket = basket_of(table, blocks=100)
    fill_shortest_first(basket, table.parked_picker(), gap(2.5))
    assert len(basket) == 3


def test_greedy_takes_the_longest_that_still_fits() -> None:
    table = roomy_table()
    park_lengths(table, [100, 20, 300, 40])
    basket = basket_of(table, blocks=24)
    fill_longest_first(basket, table.parked_picker())
    assert basket.ids == {"p2", "p3", "p1"}
    assert basket.num_blocks == 24


def test_a_step_that_falls_short_gets_more_and_shorter_requests() -> None:
    table = roomy_table()
    park_lengths(table, [319, 79, 79, 79, 79])  # 20 blocks, and four of 5
    basket, picker = basket_of(table, blocks=20), table.parked_picker()
    fill_longest_first(basket, picker)
    assert basket.ids == {"p0"}
    Refinement(basket, picker, gap(4.0)).run(8)
    assert basket.ids == {"p1", "p2", "p3", "p4"}
    assert basket.num_blocks == 20


def test_a_step_that_is_too_long_gets_fewer_and_longer_requests() -> None:
    table = roomy_table()
    _, *short = park_lengths(table, [319, 79, 79, 79, 79])
    basket, picker = basket_of(table, blocks=20), table.parked_picker()
    for state in short:
        basket.add(state)
    Refinement(basket, picker, gap(1.0)).run(8)
    assert basket.ids == {"p0"}


def test_a_request_that_stays_is_not_exchanged() -> None:
    table = roomy_table()
    overdue, *_ = park_lengths(table, [319, 79, 79, 79, 79, 639])
    for better in (gap(4.0), gap(0.5)):  # several shorter ones, or a longer one
        basket, picker = basket_of(table, blocks=40), table.parked_picker()
        basket.add(overdue, stays=True)
        fill_shortest_first(basket, picker, gap(1.5))
        Refinement(basket, picker, better).run(8)
        assert "p0" in basket.ids


def test_exchanges_stop_within_the_tolerance() -> None:
    table = roomy_table()
    park_lengths(table, [319, 79, 79, 79, 79])
    basket, picker = basket_of(table, blocks=20), table.parked_picker()
    fill_longest_first(basket, picker)
    assert Refinement(basket, picker, gap(1.05)).run(8) == 0
    assert Refinement(basket, picker, gap(4.0)).run(0) == 0


def test_a_prefix_on_the_gpu_costs_nothing_and_is_attended_to_in_full() -> None:
    table = roomy_table()
    resident(table, "holder", 50, prefix="shared")
    sharing = parked(table, "sharing", 60, prefix="shared")
    basket = basket_of(table, blocks=2)
    assert basket.cost(sharing) == 2  # of 4: two hold the prefix
    basket.add(sharing)
    assert basket.kv_tokens == 60


def test_only_one_request_of_a_step_brings_a_prefix_along() -> None:
    table = roomy_table()
    states = [parked(table, name, 60, prefix="shared") for name in ("a", "b")]
    basket = basket_of(table, blocks=100)
    assert basket.cost(states[0]) == 4
    fill_longest_first(basket, table.parked_picker())
    assert basket.ids == {"a"}
