"""What a job over an endpoint is said to cost, and its end before it costs more."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipemax_spark.rows import chunks
from tests.endpoints.openai_server import OpenAIServer, openai_server
from tests.spark.conftest import Jobs, words

ROWS = 400
PER_PROMPT_TOKEN, PER_OUTPUT_TOKEN = 0.001, 0.01
PRICES = {
    "price_per_million_prompt_tokens": 1e6 * PER_PROMPT_TOKEN,
    "price_per_million_output_tokens": 1e6 * PER_OUTPUT_TOKEN,
}


@pytest.fixture(scope="module")
def served() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


@pytest.fixture
def job(run: Jobs, served: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setattr(chunks, "_MIN_SLICE_ROWS_PER_SLOT", 5)  # so that there are several
    monkeypatch.setattr(chunks, "_MIN_FIRST_ROWS_PER_SLOT", 20)
    run.defaults = replace(run.defaults, engine=served.config(**PRICES), engine_python=None)
    run.write_input(words(0, ROWS))
    return run


@pytest.mark.long  # three jobs; the decisions are units
def test_a_job_ends_before_its_tokens_cost_more_and_the_next_run_does_the_rest(job: Jobs) -> None:
    job.dry_run(max_cost=15.0)
    low, high = re.search(
        r"Cost +of tokens, ([\d.]+) to ([\d.]+), by how long the answers are", job.printed
    ).groups()  # type: ignore[union-attr]
    assert 0 < float(low) < 15.0 < float(high)
    assert re.search(
        r"max-cost 15: \d+ of 400 rows fit with the longest answers, more with shorter ones", job.printed
    )

    summary = job.run(max_cost=15.0)
    assert (summary.ended_by, summary.complete) == ("max_cost", False)
    assert 0 < summary.rows_out < ROWS
    cost = summary.billed_prompt_tokens * PER_PROMPT_TOKEN + summary.billed_output_tokens * PER_OUTPUT_TOKEN
    assert cost <= 15.0
    assert summary.endpoint_requests == summary.rows_out, "no row was begun in vain"
    assert "--max-cost 15 leaves too little for another chunk" in job.printed
    assert (
        f"Cost               {cost:,.2f} at 1,000 per million prompt tokens, 10,000 per million"
        in job.printed
    )

    rest = job.run()
    assert (rest.complete, rest.rows_out) == (True, ROWS - summary.rows_out)
    assert rest.endpoint_requests == rest.rows_out
    assert len({row["id"] for row in job.rows()}) == len(job.rows()) == ROWS


@pytest.mark.long  # a server and two jobs
def test_rows_that_take_the_answer_of_an_equal_one_are_not_billed(job: Jobs) -> None:
    job.write_input([(number, f"another word {number % 10}") for number in range(ROWS)])
    summary = job.run()
    assert (summary.rows_out, summary.rows_reused) == (ROWS, ROWS - 10)
    assert (summary.endpoint_requests, summary.endpoint_retries) == (10, 0)
