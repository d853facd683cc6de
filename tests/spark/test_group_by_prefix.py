"""``--group-by-prefix``: prompts that begin alike reach the engine together, and the report says what it is worth."""

from collections.abc import Callable
from random import Random

import pytest

from pipemax_spark.request.prompts import PromptSource
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs

DOCUMENT_WORDS = 40


@pytest.mark.long  # what is printed
def test_the_hit_rate_is_reported_and_the_flag_advised_where_it_helps(jobs: Callable[[], Jobs]) -> None:
    run = jobs()
    documents = [" ".join(f"w{document}x{i}" for i in range(DOCUMENT_WORDS)) for document in range(60)]
    rows = [(i, f"{documents[i % 60]} question {i}") for i in range(600)]
    Random(0).shuffle(rows)
    run.write_input(rows)
    rates = {}
    for groups in (False, True):
        # Of another model, so that each run has an engine of its own.
        engine = fake_config(model=f"fake-{groups}", prefix_memory=8)
        summary = run.run(
            engine=engine,
            source=PromptSource(prompt_column="text"),
            output=f"{run.output}-{groups}",
            group_by_prefix=groups,
        )
        assert summary is not None
        assert summary.rows_out == 600
        assert summary.prefix_cache_hit_rate is not None
        assert f"Prefix cache       {summary.prefix_cache_hit_rate:.1%}" in run.printed
        assert ("Worth a try        --group-by-prefix" in run.printed) is not groups
        rates[groups] = summary.prefix_cache_hit_rate
    # Nine of ten questions of a document find it read, but for the documents that a partition's end cuts.
    assert rates[False] < 0.4
    assert rates[True] > 0.8
