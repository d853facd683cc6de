"""What runs cost by the hour and by an endpoint's tokens, and the limit that ``--max-cost`` sets to both."""

import re
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.wire import PreflightReply, Spent
from pipemax_spark.errors import EndedBy, JobError
from pipemax_spark.job.limits import RunLimits, forecast_lines, limits_of, prior_of
from pipemax_spark.report.summary import Findings, Summary, facts_of
from pipemax_spark.request.prices import Prices
from tests.unit.spark.test_budget import NOW, options

ENDPOINT = {"endpoint": "https://host/v1", "model": "m", "unpinned_model": True}
PRICED = {**ENDPOINT, "price_per_million_prompt_tokens": 2.0, "price_per_million_output_tokens": 8.0}


def test_hours_and_tokens_add_up() -> None:
    spent = Spent(prompt_tokens=1_000_000, output_tokens=500_000)
    assert Prices.of(None, PRICED).cost(seconds=3_600, spent=spent) == 6.0
    assert Prices.of(3.0, PRICED).cost(seconds=1_800, spent=spent) == 7.5
    assert Prices.of(3.0, ENDPOINT).cost(seconds=1_800, spent=spent) == 1.5
    assert (
        str(Prices.of(3.0, PRICED))
        == "3.00 an hour, 2 per million prompt tokens, 8 per million output tokens"
    )
    assert not Prices.of(None, ENDPOINT).are_known


def test_the_report_says_what_an_endpoint_was_asked_and_what_that_costs() -> None:
    summary = Summary(
        rows_in=2_000,
        rows_out=2_000,
        seconds=36.0,
        output="t",
        endpoint_requests=2_231,
        endpoint_retries=8,
        billed_prompt_tokens=1_000_000,
        billed_output_tokens=40_000,
    )
    facts = dict(facts_of(summary, Findings(), Prices.of(100.0, PRICED)))
    assert facts["Endpoint"] == "2,231 requests (8 again), 1,000,000 prompt and 40,000 output tokens billed"
    assert facts["Cost"].startswith(
        "3.32 at 100.00 an hour, 2 per million prompt tokens, 8 per million output tokens;"
    )
    plain = dict(facts_of(Summary(rows_in=1, rows_out=1, seconds=1.0, output="t"), Findings(), Prices()))
    assert not {"Endpoint", "Cost"} & set(plain)


@pytest.mark.parametrize("engine", [ENDPOINT, {**PRICED, **dict.fromkeys(list(PRICED)[-2:], 0)}])
def test_a_maximum_cost_needs_a_price(engine: dict[str, Any]) -> None:
    with pytest.raises(
        JobError, match=r"--max-cost needs --price-per-hour, .* price_per_million_prompt_tokens"
    ):
        options(max_cost=1.0, engine=engine)
    options(max_cost=1.0, engine=PRICED)


def test_without_a_price_per_hour_time_costs_nothing() -> None:
    limits = RunLimits(options(max_cost=1.0, engine=PRICED), clock_s=lambda: 1e6, now=NOW)
    assert limits.look(rows=10, tokens=0, warn=print, spent=Spent(prompt_tokens=249_999)) is None
    assert limits.left_text() == "0.50 of max-cost 1 left"
    end = limits.look(rows=20, tokens=0, warn=print, spent=Spent(prompt_tokens=300_000, output_tokens=50_000))
    assert end is not None
    assert end.ended_by is EndedBy.MAX_COST
    assert "cost 1.00" in limits.used()


def test_the_forecast_goes_by_the_sampled_rows_tokens() -> None:
    reply = PreflightReply(prompt_tokens=[900, 1_100], output_tokens=[100, 100])

    def line(rows: int, **changes: Any) -> str:
        given_options = options(max_cost=1.0, engine=PRICED, **changes)
        limits = limits_of(given_options, now=NOW)
        prior = prior_of(None, reply, requests_per_row=1, prices=given_options.prices)
        [said] = forecast_lines(limits, prior, rows, now=NOW, speed=None)
        return said

    assert line(300) == "max-cost 1: all 300 rows fit, even with the longest answers"
    assert line(400) == "max-cost 1: 357 of 400 rows fit with the longest answers, more with shorter ones"
    assert line(1_000) == "max-cost 1: at most 50% of 1,000 rows fit: the prompts alone cost more"
    assert "no forecast before the first rows" in line(300, price_per_hour=1.0), (
        "how long they take is not known"
    )


class EndpointRun:
    """A run whose rows cost by their tokens; its chunks are as large as its limits allow."""

    open_rows = 32

    def __init__(self, random: Random, price_per_hour: float | None, *, sampled: bool) -> None:
        self.random, self.now_s, self.seconds = random, 0.0, 0
        mean = random.uniform(100, 3_000)
        self.tokens = lambda: int(min(20_000, mean * random.lognormvariate(0, 0.7)))
        self.rows_per_s = random.uniform(1, 60)
        self.options = options(max_cost=random.uniform(2, 40), price_per_hour=price_per_hour, engine=PRICED)
        self.limits = RunLimits(self.options, clock_s=lambda: self.now_s, now=NOW)
        self.limits.expect(10**9)
        self.warnings: list[str] = []
        if sampled:
            counts = [self.tokens() for _ in range(200)]
            reply = PreflightReply(prompt_tokens=counts, output_tokens=[500] * 200)
            self.limits._prior = prior_of(None, reply, requests_per_row=1, prices=self.options.prices)
        self.rows = self.begun = 0
        self.spent = Spent()

    def cost(self) -> float:
        return self.options.prices.cost(seconds=self.now_s, spent=self.spent)

    def run(self) -> tuple[float, float, str]:
        """Return the cost at the end, that of the rows which were open then, and how it ended."""
        for chunk in range(100_000):
            most = self.limits.most_rows()
            usual = int(60 * self.rows_per_s) + 1
            size = usual if most is None else min(max(1, most // 2), usual)
            if most == 0:
                return self.cost(), 0.0, str(self.limits.none_fits())
            self.limits.begun(chunk, size)
            self.begun += size
            while self.rows < self.begun:
                before = self.cost()
                self.second()
                end = self.limits.look(rows=self.rows, tokens=0, warn=self.warnings.append, spent=self.spent)
                if end is not None:
                    return self.cost(), self.cost() - before + self.open_cost(), str(end)
            self.limits.committed(chunk)
        raise AssertionError("the run has no end")

    def second(self) -> None:
        self.now_s += 1.0
        rows = min(self.begun - self.rows, max(1, int(self.random.gauss(1, 0.2) * self.rows_per_s)))
        self.rows += rows
        tokens = [(self.tokens(), min(500, self.tokens())) for _ in range(rows)]
        self.spent += Spent(
            requests=rows,
            prompt_tokens=sum(prompt for prompt, _ in tokens),
            output_tokens=sum(output for _, output in tokens),
        )

    def open_cost(self) -> float:
        return self.open_rows * self.options.prices.of_tokens(20_000, 500)


@given(st.integers(0, 10**6), st.sampled_from([None, 0.5, 50.0]), st.booleans())
def test_a_run_ends_within_its_cost_and_what_one_second_and_the_open_requests_cost(
    seed: int, price_per_hour: float | None, sampled: bool
) -> None:
    run = EndpointRun(Random(seed), price_per_hour, sampled=sampled)
    cost, last, end = run.run()
    most = run.options.max_cost
    assert most is not None
    assert re.match(r"--max-cost [\d.,]+ (is reached|leaves too little)", end)
    assert cost <= most + last
    assert cost > 0.9 * most, "and it uses what it may"
