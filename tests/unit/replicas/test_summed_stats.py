"""Replicas' statistics together."""

from pipemax.engine import EngineStats
from pipemax.replicas.summed_stats import carried_counts, summed, with_carried


def test_work_is_added_up_and_rates_and_times_are_means() -> None:
    one = EngineStats(
        phase="decode",
        running_requests=3,
        kv_usage=0.5,
        metrics={
            "evictions": 4.0,
            "max_num_seqs": 256.0,
            "prefix_cache_hit_rate": 0.5,
            "time_decode_s": 10.0,
        },
    )
    other = EngineStats(
        phase="idle",
        running_requests=1,
        kv_usage=0.1,
        metrics={"evictions": 1.0, "max_num_seqs": 1024.0, "time_decode_s": 6.0},
    )
    both = summed([one, other])
    assert (both.phase, both.running_requests, both.kv_usage) == ("decode", 4, 0.3)
    assert both.metrics == {
        "evictions": 5.0,
        "max_num_seqs": 1280.0,
        "prefix_cache_hit_rate": 0.5,
        "time_decode_s": 8.0,
    }


def test_an_engine_that_has_had_no_request_says_nothing_of_their_size() -> None:
    sizes = [EngineStats(metrics={"kv_tokens_per_request": size}) for size in (0.0, 300.0)]
    assert summed(sizes).metrics == {"kv_tokens_per_request": 300.0}


def test_what_a_dead_replica_had_counted_stays_counted() -> None:
    last = {"evictions": 3.0, "batch_size": 9.0, "time_drain_s": 4.0, "drain_at_full_rate_s": 1.0}
    carried = carried_counts({"evictions": 2.0}, last)
    assert with_carried({"evictions": 1.0, "batch_size": 4.0}, carried) == {
        "evictions": 6.0,
        "batch_size": 4.0,
        "time_drain_s": 4.0,
        "drain_at_full_rate_s": 1.0,
    }


def test_different_phases_are_mixed() -> None:
    assert summed([EngineStats(phase="prefill"), EngineStats(phase="decode")]).phase == "mixed"
    assert summed([]).phase == "idle"
