"""A table's time from a run, and what limits it."""

from typing import Any

import pytest

from pipemax.rehearsal.steady_part import KvSample, SteadyPart, forecast_table, limiting_factor


def steady(**values: Any) -> SteadyPart:
    shares: dict[str, Any] = {
        "prompts": 0.2,
        "decode": 0.7,
        "mixed": 0.0,
        "host_bubble": 0.0,
        "host_to_gpu": 0.1,
    }
    return SteadyPart(**{"seconds": 10.0, "tokens": 9_000, "mean_decode_batch": 32.0, **shares, **values})


def test_a_table_takes_its_bulk_at_the_steady_rate_and_one_drain() -> None:
    forecast = forecast_table(
        steady(), run_seconds=14.0, run_tokens=10_000, run_rows=100, table_rows=720_010, num_engines=2
    )
    assert forecast.tokens_per_s == 1_800
    assert forecast.rows_per_s == 18
    assert forecast.drain_s == 4
    # Each engine's last 1,000 tokens come in the drain: 72,001,000 - 2,000 tokens at 1,800 tokens/s, and 4 s.
    assert forecast.hours == pytest.approx((71_999_000 / 1_800 + 4) / 3600)


def test_idle_is_what_is_left() -> None:
    assert steady().idle == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("values", "gpu", "host", "told"),
    [
        ({"host_bubble": 0.2}, 0.5, 0.0, "the scheduler: the first stage waits for it 20%"),
        ({"decode": 0.2, "host_to_gpu": 0.9}, 0.5, 0.0, "copies of KV from host memory"),
        ({"decode": 0.2}, 0.5, 0.0, "stages that wait for each other"),
        ({"prompts": 0.6, "decode": 0.3}, 0.5, 0.0, "computing prompts, 60%"),
        ({}, 0.97, 0.0, "batches of 32 requests, which the GPUs' memory limits (97%"),
        ({}, 0.5, 0.95, "which the host's memory limits (up to 95%"),
        ({}, 0.5, 0.2, "no pool of KV is full (50% of the GPUs' blocks are in use, up to 20% of"),
        ({"decode": 0.1, "mixed": 0.7}, 0.5, 0.2, "steps that decode and take prompt tokens, 70%"),
    ],
)
def test_the_limit_is_named(values: dict[str, Any], gpu: float, host: float, told: str) -> None:
    kv = [KvSample(time_s=5.0, gpu=gpu, host=host), KvSample(time_s=12.0, gpu=0.01, host=1.0)]  # the drain
    assert told in limiting_factor(steady(**values), kv)
