"""GreedySelect and ShortFirstFill on random parked sets: never over budget, never worse by exchanging."""

from itertools import combinations
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pipemax.control.planners.selection import (
    Basket,
    Refinement,
    TimeGap,
    fill_longest_first,
    fill_shortest_first,
)
from pipemax.control.state.request import RequestState
from pipemax.control.state.table import RequestTable
from tests.unit.control.tables import parked, resident, roomy_table

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=40)


def gap_for(basket_s: float, *, beta_s: float) -> TimeGap:
    return TimeGap(gap_s=basket_s, alpha_s=1.0, beta_s=beta_s, tolerance_s=0.01)


def parked_set(lengths: list[int], sharing: list[bool]) -> tuple[RequestTable, list[RequestState]]:
    table = roomy_table()
    resident(table, "holder", 60, prefix="held")
    states = []
    for index, (length, shares) in enumerate(zip(lengths, sharing, strict=False)):
        prefix = ("held" if index % 2 else "elsewhere") if shares and length > 32 else None
        states.append(parked(table, f"p{index}", length, prefix=prefix))
    return table, states


def check_limits(basket: Basket, table: RequestTable, max_blocks: int, max_requests: int) -> None:
    chosen = [state for state in table if state.id in basket.ids]
    cost = sum(map(table.needs.prefetch_cost, chosen))
    assert basket.num_blocks == cost <= max_blocks
    assert basket.blocks_left == max_blocks - cost
    assert len(chosen) == len(basket) <= max_requests
    assert basket.kv_tokens == sum(state.computed_tokens for state in chosen)


@given(
    lengths=LENGTHS,
    sharing=st.lists(st.booleans(), min_size=40, max_size=40),
    max_blocks=st.integers(0, 200),
    max_requests=st.integers(1, 30),
    gap_s=st.floats(0.0, 60.0),
    beta_s=st.sampled_from([0.0, 0.001, 0.02]),
)
def test_exchanges_keep_to_the_limits_and_never_worsen_the_gap(
    lengths: list[int],
    sharing: list[bool],
    max_blocks: int,
    max_requests: int,
    gap_s: float,
    beta_s: float,
) -> None:
    table, _ = parked_set(lengths, sharing)
    basket = Basket(table.needs, max_blocks=max_blocks, max_requests=max_requests)
    picker = table.parked_picker()
    fill_longest_first(basket, picker)
    check_limits(basket, table, max_blocks, max_requests)
    gap = gap_for(gap_s, beta_s=beta_s)
    before_s = abs(gap.mismatch_s(len(basket), basket.kv_tokens))
    greedy_blocks = basket.num_blocks
    made = Refinement(basket, picker, gap).run(32)
    check_limits(basket, table, max_blocks, max_requests)
    after_s = abs(gap.mismatch_s(len(basket), basket.kv_tokens))
    assert after_s < before_s if made else after_s == before_s
    assert basket.num_blocks >= 0.95 * greedy_blocks


@given(lengths=LENGTHS, max_blocks=st.integers(0, 200), max_requests=st.integers(1, 30))
def test_no_set_within_the_budget_has_more_requests_than_short_first_fill(
    lengths: list[int], max_blocks: int, max_requests: int
) -> None:
    table, states = parked_set(lengths, [False] * len(lengths))
    basket = Basket(table.needs, max_blocks=max_blocks, max_requests=max_requests)
    fill_shortest_first(basket, table.parked_picker())
    check_limits(basket, table, max_blocks, max_requests)
    shortest = sorted(state.blocks for state in states)
    most = next((n for n in range(len(shortest) + 1) if sum(shortest[: n + 1]) > max_blocks), len(shortest))
    assert len(basket) == min(most, len(shortest), max_requests)


@given(lengths=LENGTHS, max_blocks=st.integers(0, 200))
def test_greedy_leaves_no_room_that_a_parked_request_would_fit_into(
    lengths: list[int], max_blocks: int
) -> None:
    table, states = parked_set(lengths, [False] * len(lengths))
    basket = Basket(table.needs, max_blocks=max_blocks, max_requests=100)
    fill_longest_first(basket, table.parked_picker())
    assert not [s for s in states if s.id not in basket.ids and s.blocks <= basket.blocks_left]


def best_mismatch_s(states: list[RequestState], gap: TimeGap, *, least: float, most: int) -> float:
    """Of every subset that fills the budget to at least ``least`` blocks: exhaustive."""
    return min(
        abs(gap.mismatch_s(count, sum(state.computed_tokens for state in chosen)))
        for count in range(len(states) + 1)
        for chosen in combinations(states, count)
        if least <= sum(state.blocks for state in chosen) <= most
    )


def test_exchanges_come_close_to_the_exhaustive_optimum_on_small_sets() -> None:
    """Ten parked requests, a budget of half their blocks, a gap that some set can meet. Times in α, one request.

    The exchanges are a heuristic, and so few requests leave them little choice: in three of four sets they must come
    within one request's time of the optimum, and recover 60 % of what greedy leaves of it (measured: 161 of 200, 69 %).
    """
    rng = Random(5)
    greedy_s, refined_s, optimal_s = [], [], []
    for _ in range(200):
        table, states = parked_set([rng.randint(10, 300) for _ in range(10)], [False] * 10)
        budget = sum(state.blocks for state in states) // 2
        gap = gap_for(rng.uniform(2, 8), beta_s=0.001)
        basket = Basket(table.needs, max_blocks=budget, max_requests=10)
        picker = table.parked_picker()
        fill_longest_first(basket, picker)
        least = 0.95 * basket.num_blocks
        greedy_s.append(abs(gap.mismatch_s(len(basket), basket.kv_tokens)))
        Refinement(basket, picker, gap).run(32)
        refined_s.append(abs(gap.mismatch_s(len(basket), basket.kv_tokens)))
        optimal_s.append(best_mismatch_s(states, gap, least=least, most=budget))
    assert all(best <= refined + 1e-9 for best, refined in zip(optimal_s, refined_s, strict=True))
    regrets = [refined - best for best, refined in zip(optimal_s, refined_s, strict=True)]
    assert sum(regret < 1.0 for regret in regrets) >= 150
    assert sum(regrets) < 0.4 * (sum(greedy_s) - sum(optimal_s))
