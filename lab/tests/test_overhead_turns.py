"""A turn of the bench of Spark's path counts only if its rows were computed and its ratio is possible."""

from collections import Counter
from dataclasses import replace

import pytest

from lab.bench.overhead_turns import Run, Turn, check_turn

RUN = Run(seconds=60.0, tokens=240_000, computed_tokens=240_000, texts=Counter({"text": 8_000}))


def test_a_turn_whose_rows_were_computed_counts_at_either_speed() -> None:
    for seconds in (55.0, 60.0, 200.0):
        check_turn(Turn(bare=RUN, spark=replace(RUN, seconds=seconds)))


def test_a_run_that_was_answered_from_the_server_s_cache_is_refused() -> None:
    """As seven of eight turns were: 2 s for 60 s of work, and a ratio of 31."""
    cached = replace(RUN, seconds=2.0, computed_tokens=0)
    with pytest.raises(
        ValueError, match="in Spark's run the engine computed 0 output tokens, and the answers have"
    ):
        check_turn(Turn(bare=RUN, spark=cached))
    in_part = replace(RUN, seconds=58.0, computed_tokens=238_000)
    with pytest.raises(ValueError, match="such as a cache of answers"):
        check_turn(Turn(bare=RUN, spark=in_part))


def test_a_run_that_computed_its_rows_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="in the bare engine's run the engine computed 480,000"):
        check_turn(Turn(bare=replace(RUN, computed_tokens=480_000), spark=RUN))


def test_a_ratio_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="times as fast as the bare engine"):
        check_turn(Turn(bare=RUN, spark=replace(RUN, seconds=60.0 / 31.0)))
