"""What a pilot inside a run decides, without Spark."""

import pytest

from pipemax_spark.cascade.pilot import Outlook
from pipemax_spark.job.run_pilot import Cost, Decision, comes_first
from pipemax_spark.report.summary import Summary
from tests.unit.cascade.draws import make_draw


def test_the_pilot_comes_first_where_it_may_save_a_long_small_pass_or_needs_no_start() -> None:
    assert comes_first(100_001, {"model": "small"})
    assert not comes_first(100_000, {"model": "small"})
    assert comes_first(5_001, {"model": "small", "endpoint": ["http://small"]})


def of_pilot(rows_per_s: float, start_s: float, engines: int = 1) -> Summary:
    return Summary(
        rows_in=300,
        output="out",
        working_rows_per_s=rows_per_s,
        engines=engines,
        time_account_s={"start_up": start_s * engines},
    )


def test_the_small_model_costs_its_time_and_the_two_starts_as_shares_of_the_large_models_time() -> None:
    cost = Cost.of(of_pilot(200.0, 60.0), of_pilot(10.0, 140.0, engines=2), rows=100_000)
    assert (cost.ratio, cost.starts_share) == pytest.approx((0.05, 0.02))


def test_what_an_earlier_run_has_done_costs_nothing_because_its_time_is_not_known() -> None:
    assert Cost.of(of_pilot(0.0, 60.0), of_pilot(10.0, 60.0), rows=100_000) == Cost()


def test_a_decision_is_read_as_it_was_recorded() -> None:
    draw = make_draw(20_000, sample_share=0.07, pilot_share=0.015)
    decision = Decision(draw=draw, outlook=Outlook.MAY_NOT_PAY, sentence="a cascade may not pay", rows=301)
    assert Decision.from_json(decision.to_json()) == decision
