"""What prompts have in common, and when sorting them is advised."""

import pytest

from pipemax.wire import ServerStats
from pipemax_spark.rows.prefix import hit_rate, shared_prefixes


def test_what_all_prompts_begin_with_is_not_counted() -> None:
    share = shared_prefixes([f"Answer in one word: {letter * 10}" for letter in "abc"])
    assert (share.as_they_come, share.sorted) == (0, 0)
    assert share.advice is None


def test_sorting_brings_prompts_together_that_begin_alike() -> None:
    documents = [f"Read: {letter * 200}" for letter in "abcd"]
    prompts = [f"{document}. Question {i}" for i in range(5) for document in documents]
    share = shared_prefixes(prompts)
    assert share.as_they_come == 0
    assert share.sorted == pytest.approx(16 * 200 / (20 * 220), rel=0.1)
    assert (share.advice or "").startswith("--group-by-prefix: 7")
    assert shared_prefixes(sorted(prompts)).advice is None, "they come in order already"


@pytest.mark.parametrize("prompts", [[], ["a"], ["", ""], ["same", "same"]])
def test_a_small_sample_gives_no_advice(prompts: list[str]) -> None:
    assert shared_prefixes(prompts).advice is None


def test_the_hit_rate_is_that_of_the_engines_that_say_one() -> None:
    def server(**metrics: float) -> ServerStats:
        return ServerStats(
            server_id="s", host="h", pid=1, at_unix_s=0.0, state="ready", engine_metrics=metrics
        )

    assert hit_rate([server(), server(prefix_cache_hit_rate=0.2), server(prefix_cache_hit_rate=0.6)]) == 0.4
    assert hit_rate([server()]) is None
