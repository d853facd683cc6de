"""What a table takes on a fleet: alike and unlike nodes, start-up, drain, lost nodes, and the number of nodes."""

from dataclasses import replace

import pytest

from pipemax.policy.fleet import FleetSettings, NodeWork, fewest_nodes, most_nodes, run_fleet

WORK = NodeWork(rows_per_s=10.0, drain_s=120.0, drain_rows=500.0, held_rows=1000.0)
SETTINGS = FleetSettings(start_up_s=300.0, commit_every_s=900.0, commit_s=0.0)
DAY_ROWS = 10 * 24 * 3600
"""Of one node."""


def test_one_node_takes_its_start_the_bulk_at_the_steady_rate_and_one_drain() -> None:
    run = run_fleet(DAY_ROWS, 1, WORK, SETTINGS)
    assert run.hours * 3600 == pytest.approx(300 + (DAY_ROWS - 500) / 10 + 120)
    assert run.start_up_share * run.hours * 3600 == pytest.approx(300)
    assert run.uneven_share * run.hours * 3600 == pytest.approx(120 - 500 / 10), "the drain's own loss"
    assert (run.least_hours, run.most_hours) == (run.hours, run.hours), "nothing is random"


def test_nodes_alike_divide_the_bulk_and_drain_together() -> None:
    run = run_fleet(8 * DAY_ROWS, 8, WORK, SETTINGS)
    alone = run_fleet(DAY_ROWS, 1, WORK, SETTINGS)
    assert run.hours == pytest.approx(alone.hours, rel=1e-3)


def test_slots_never_wait_between_chunks() -> None:
    rare = run_fleet(8 * DAY_ROWS, 8, WORK, replace(SETTINGS, commit_every_s=7200.0))
    often = run_fleet(8 * DAY_ROWS, 8, WORK, replace(SETTINGS, commit_every_s=60.0))
    assert often.hours == pytest.approx(rare.hours, rel=2e-3)


def test_unlike_nodes_share_by_their_speed_and_only_the_end_is_uneven() -> None:
    """Were rows divided evenly, the slowest of 40 nodes would take far longer than the mean."""
    alike = run_fleet(40 * DAY_ROWS, 40, WORK, SETTINGS)
    spread = run_fleet(40 * DAY_ROWS, 40, WORK, replace(SETTINGS, speed_spread=0.3))
    assert spread.least_hours < spread.hours < spread.most_hours
    assert alike.hours * 0.9 < spread.hours < alike.hours * 1.2
    few_rows = replace(SETTINGS, speed_spread=0.3)
    short = run_fleet(DAY_ROWS, 40, WORK, few_rows)
    assert short.uneven_share > 3 * spread.uneven_share, "a short table is mostly its end"


def test_a_lost_node_costs_the_rows_it_held_and_a_start() -> None:
    lossy = replace(SETTINGS, lost_per_hour=0.1)
    run, safe = run_fleet(20 * DAY_ROWS, 20, WORK, lossy), run_fleet(20 * DAY_ROWS, 20, WORK, SETTINGS)
    assert run.lost_nodes == pytest.approx(0.1 * 20 * run.hours, rel=0.2)
    assert 0 < run.rows_again <= run.lost_nodes * WORK.held_rows
    # Each loss takes a start, and the rows held for which the successor has room at once are not done twice.
    lost_s = run.lost_nodes * (300 + (1000 - 500) / 10)
    assert (run.hours - safe.hours) * 3600 * 20 == pytest.approx(lost_s, rel=0.25)


def test_losses_at_given_times_cost_what_was_held_and_a_start() -> None:
    run = run_fleet(2 * DAY_ROWS, 2, WORK, SETTINGS, losses_s=[3600.0])
    safe = run_fleet(2 * DAY_ROWS, 2, WORK, SETTINGS)
    assert (run.lost_nodes, run.rows_again) == (1, 1000)
    # A start, and the rows held for which the successor has no room at once; and the end is less even.
    assert 300 + (1000 - 500) / 10 <= (run.hours - safe.hours) * 3600 * 2 <= 300 + 2 * 1000 / 10
    assert run_fleet(2 * DAY_ROWS, 2, WORK, SETTINGS, losses_s=[1e9]) == safe, "after the table's end"
    with pytest.raises(ValueError, match="2 nodes cannot be lost 3 times"):
        run_fleet(DAY_ROWS, 2, WORK, SETTINGS, losses_s=[1.0, 2.0, 3.0])


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    settings = replace(SETTINGS, speed_spread=0.2, lost_per_hour=0.05)
    run = run_fleet(4 * DAY_ROWS, 4, WORK, settings)
    assert run_fleet(4 * DAY_ROWS, 4, WORK, settings) == run
    assert run_fleet(4 * DAY_ROWS, 4, WORK, replace(settings, seed=1)) != run


def test_nodes_lost_before_they_are_up_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"faster than they get rows done: start-up takes 0\.08 hours"):
        run_fleet(DAY_ROWS, 1, WORK, replace(SETTINGS, lost_per_hour=500.0))


def test_the_fewest_nodes_are_in_time_and_one_less_is_not() -> None:
    settings = replace(SETTINGS, speed_spread=0.2)
    run = fewest_nodes(20 * DAY_ROWS, WORK, settings, within_hours=8.0)
    assert run.most_hours <= 8.0
    assert run_fleet(20 * DAY_ROWS, run.nodes - 1, WORK, settings).most_hours > 8.0


def test_no_number_of_nodes_beats_start_up_and_drain() -> None:
    with pytest.raises(ValueError, match=r"no number of nodes is done in 0\.10 hours.* start-up is 0\.08"):
        fewest_nodes(DAY_ROWS, WORK, SETTINGS, within_hours=0.1)


def test_the_most_nodes_are_paid_for_and_one_more_is_not() -> None:
    settings = replace(SETTINGS, speed_spread=0.2)
    run = most_nodes(10 * DAY_ROWS, WORK, settings, price_per_hour=2.0, budget=525.0)
    assert run.nodes > 10
    assert run.hours * run.nodes * 2.0 <= 525.0
    more = run_fleet(10 * DAY_ROWS, run.nodes + 1, WORK, settings)
    assert more.hours * more.nodes * 2.0 > 525.0


def test_a_budget_that_pays_for_no_node_or_for_any_number_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="a budget of 10 is too small: the cheapest fleet has 1 node and costs 48"
    ):
        most_nodes(DAY_ROWS, WORK, SETTINGS, price_per_hour=2.0, budget=10.0)
    with pytest.raises(ValueError, match="give a --price above 0"):
        most_nodes(DAY_ROWS, WORK, SETTINGS, price_per_hour=0.0, budget=10.0)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        replace(SETTINGS, speed_spread=-0.1)
    with pytest.raises(ValueError, match="must be above 0"):
        replace(WORK, rows_per_s=0.0)
    with pytest.raises(ValueError, match="at least one row and one node"):
        run_fleet(1, 0, WORK, SETTINGS)
