"""Whatever the lengths, the pools, the shared prefixes and the faults, every request finishes, and the books balance.

The fake engine checks that each plan is legal on counts of its own; ``check_integrity`` recounts the controller's
after every call. A plan that does nothing while nothing is in flight fails there too.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from pipemax.domain.kv_groups import KvGroups
from pipemax.domain.plan import Batching
from pipemax.domain.request import PrefixId, SharedPrefix
from tests.unit.control.fake_engine import FakeEngine, Faults, small_config, spec, stage

PREFIXES = {None: 0, "short": 16, "odd": 50, "long": 130}
FAULTS = st.builds(
    Faults,
    refuse_run=st.sampled_from([0.0, 0.02]),
    refuse_prefetch=st.sampled_from([0.0, 0.3]),
    abort=st.sampled_from([0.0, 0.01]),
    preempt=st.sampled_from([0.0, 0.01]),
    cache_hit=st.sampled_from([0.0, 0.3]),
)


@dataclass(frozen=True)
class Row:
    prompt_tokens: int
    max_tokens: int
    num_outputs: int
    prefix: str | None


@st.composite
def pools(draw: st.DrawFn, *, with_waves: bool = False) -> dict[str, Any]:
    """From pools that hold one request to pools that hold all."""
    waves = {"wave_groups": draw(st.integers(2, 5))} if with_waves else {}
    return waves | {
        "gpu_blocks": draw(st.sampled_from([14, 20, 40, 100])),
        "host_blocks": draw(st.sampled_from([14, 30, 100, 400, 2000])),
        "num_batches": draw(st.integers(2 if with_waves else 1, 5)),
        "prefill_chunk_tokens": draw(st.sampled_from([7, 64, 256, 1000])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 16, 64])),
        "max_resident_requests": draw(st.sampled_from([2, 5, 20, 1000])),
        "initial_output_tokens": draw(st.sampled_from([None, 1, 20])),
        "stages": (stage(h2d_bytes_per_s=draw(st.sampled_from([1e6, 1e7, 4e7, 1e9]))), stage()),
        "steady_window": draw(st.sampled_from([1, 4, 16])),
        "overdue_iterations": draw(st.sampled_from([1, 20, 512])),
        "host_high_watermark": draw(st.sampled_from([0.5, 0.95, 1.0])),
        "max_prefetch_requests": draw(st.sampled_from([1, 64])),
    }


@st.composite
def rows(draw: st.DrawFn, most_tokens: int, prefixes: bool) -> list[Row]:
    """Lengths around block borders, and up to what the smaller pool can hold."""
    drawn: list[Row] = []
    for _ in range(draw(st.integers(1, 25))):
        prompt = draw(
            st.one_of(st.integers(1, 40), st.sampled_from([15, 16, 17]), st.integers(1, most_tokens - 1))
        )
        most = draw(st.integers(1, min(60, most_tokens - prompt)))
        prefix = draw(st.sampled_from(list(PREFIXES))) if prefixes else None
        fits = PREFIXES[prefix] <= prompt
        drawn.append(Row(prompt, most, draw(st.integers(1, most)), prefix if fits else None))
    return drawn


def run_all(
    changes: dict[str, Any],
    table: list[Row],
    faults: Faults,
    seed: int,
    max_in_flight: int,
) -> FakeEngine:
    engine = FakeEngine(
        config=small_config(**changes),
        rng=Random(seed),
        faults=faults,
        max_in_flight=max_in_flight,
    )
    for index, row in enumerate(table):
        shared = (
            SharedPrefix(prefix_id=PrefixId(row.prefix), num_tokens=PREFIXES[row.prefix])
            if row.prefix
            else None
        )
        engine.admit(spec(f"r{index}", row.prompt_tokens, row.max_tokens, prefix=shared), row.num_outputs)
    engine.run(60_000)
    return engine


def check(engine: FakeEngine, table: list[Row]) -> None:
    finished = {f"r{index}": row.num_outputs for index, row in enumerate(table)}
    for aborted in engine.aborted:
        del finished[aborted]
    assert engine.finished == finished
    assert engine.controller.num_unfinished == 0
    table_left = engine.controller._table
    assert table_left.num_on_gpu == table_left.reserved_blocks == table_left.live_blocks == 0


@given(data=st.data(), changes=pools(), seed=st.integers(0, 2**16), max_in_flight=st.integers(1, 6))
def test_every_request_finishes_with_its_own_number_of_outputs(
    data: st.DataObject, changes: dict[str, Any], seed: int, max_in_flight: int
) -> None:
    most_tokens = 16 * min(changes["gpu_blocks"], changes["host_blocks"])
    table = data.draw(rows(most_tokens, prefixes=True))
    check(run_all(changes, table, Faults(), seed, max_in_flight), table)


WINDOWS = st.builds(
    KvGroups,
    full=st.integers(0, 2),
    window=st.integers(1, 3),
    window_tokens=st.sampled_from([2, 16, 17, 40, 128]),
)


@given(
    data=st.data(),
    changes=pools(),
    groups=WINDOWS,
    faults=FAULTS,
    seed=st.integers(0, 2**16),
    max_in_flight=st.integers(1, 6),
)
def test_rows_whose_blocks_leave_windows_finish_too(
    data: st.DataObject,
    changes: dict[str, Any],
    groups: KvGroups,
    faults: Faults,
    seed: int,
    max_in_flight: int,
) -> None:
    room = min(changes["gpu_blocks"], changes["host_blocks"])
    fitting = [n for n in range(2, 1000) if groups.prompt_blocks(n, 16, in_flight_tokens=0) <= room]
    assume(fitting and max(fitting) > 41)
    table = data.draw(rows(max(fitting), prefixes=True))
    check(
        run_all({**changes, "kv_groups": groups}, table, replace(faults, cache_hit=0.0), seed, max_in_flight),
        table,
    )


@given(
    data=st.data(),
    changes=pools(),
    faults=FAULTS,
    seed=st.integers(0, 2**16),
    max_in_flight=st.integers(1, 6),
)
def test_refusals_aborts_preemptions_and_cache_hits_lose_nobody(
    data: st.DataObject, changes: dict[str, Any], faults: Faults, seed: int, max_in_flight: int
) -> None:
    most_tokens = 16 * min(changes["gpu_blocks"], changes["host_blocks"])
    table = data.draw(rows(most_tokens, prefixes=True))
    check(run_all(changes, table, faults, seed, max_in_flight), table)


@given(
    data=st.data(),
    changes=pools(with_waves=True),
    batching=st.sampled_from(Batching),
    faults=FAULTS,
    seed=st.integers(0, 2**16),
    max_in_flight=st.integers(1, 6),
)
def test_waves_lose_nobody_either(
    data: st.DataObject,
    changes: dict[str, Any],
    batching: Batching,
    faults: Faults,
    seed: int,
    max_in_flight: int,
) -> None:
    most_tokens = 16 * min(changes["gpu_blocks"], changes["host_blocks"])
    table = data.draw(rows(most_tokens, prefixes=True))
    check(run_all({**changes, "batching": batching}, table, faults, seed, max_in_flight), table)


def test_a_prefetch_of_a_wave_is_refused_where_prefix_hits_took_its_blocks() -> None:
    """Found by the test above: a wave's prefetches take their blocks once the step has its own."""
    prompts = [1, 1, 19, 27, 38, 298, 1, 1, 1, 17, 33, 177]
    table = [Row(prompt, 1, 1, None) for prompt in prompts]
    table[0] = Row(1, 3, 3, None)
    changes = {
        "gpu_blocks": 20,
        "host_blocks": 100,
        "num_batches": 4,
        "wave_groups": 2,
        "batching": Batching.MIXED,
        "prefill_chunk_tokens": 64,
        "max_num_seqs": 16,
        "max_resident_requests": 20,
        "initial_output_tokens": None,
        "stages": (stage(h2d_bytes_per_s=1e7), stage(h2d_bytes_per_s=4e7)),
        "steady_window": 1,
        "overdue_iterations": 1,
        "host_high_watermark": 0.5,
        "max_prefetch_requests": 1,
    }
    check(run_all(changes, table, Faults(preempt=0.01, cache_hit=0.3), 10767, 3), table)


def test_a_prefix_hit_whose_chunk_finds_no_block_is_refused_like_any_other() -> None:
    """Found by the test above: the GPU is full, and the hit moves the chunk into a block that nobody planned."""
    table = [
        Row(32, 32, 13, "short"),
        Row(145, 1, 1, None),
        Row(15, 46, 34, None),
        Row(27, 46, 23, None),
        Row(17, 38, 5, None),
        Row(63, 19, 1, None),
        Row(15, 31, 4, None),
        Row(4, 54, 24, None),
        Row(18, 41, 40, None),
        Row(29, 44, 21, None),
        Row(12, 39, 21, None),
        Row(22, 1, 1, "short"),
        Row(40, 1, 1, "short"),
        Row(1, 1, 1, None),
        Row(1, 1, 1, None),
        Row(1, 1, 1, None),
        Row(1, 1, 1, None),
        Row(1, 1, 1, None),
        Row(1, 1, 1, None),
        Row(1, 1, 1, None),
    ]
    changes = {
        "gpu_blocks": 14,
        "host_blocks": 2000,
        "num_batches": 5,
        "prefill_chunk_tokens": 7,
        "max_num_seqs": 64,
        "stages": (stage(h2d_bytes_per_s=1e6), stage()),
        "steady_window": 1,
        "overdue_iterations": 1,
        "host_high_watermark": 0.5,
        "max_prefetch_requests": 1,
    }
    check(run_all(changes, table, Faults(abort=0.01, preempt=0.01, cache_hit=0.3), 539, 1), table)


@given(
    seed=st.integers(0, 2**16),
    giant_blocks=st.integers(10, 14),
    h2d_bytes_per_s=st.sampled_from([2e5, 2e6]),
    num_short=st.integers(5, 25),
)
def test_a_request_longer_than_the_budget_finishes_among_short_ones(
    seed: int, giant_blocks: int, h2d_bytes_per_s: float, num_short: int
) -> None:
    """The paper's ``S + L_r ≤ B_t`` alone would never take it: the budget is 0 or 1 blocks here."""
    changes = {
        "gpu_blocks": 20,
        "host_blocks": 300,
        "num_batches": 3,
        "stages": (stage(h2d_bytes_per_s=h2d_bytes_per_s),),
    }
    giant = Row(16 * giant_blocks, 30, 30, None)
    table = [giant, *[Row(20 + index % 7, 40, 30, None) for index in range(num_short)]]
    check(run_all(changes, table, Faults(), seed, 3), table)


@given(seed=st.integers(0, 2**16), host_blocks=st.integers(14, 40), num_requests=st.integers(2, 20))
def test_a_host_pool_that_overflows_loses_no_request(seed: int, host_blocks: int, num_requests: int) -> None:
    """Outputs were forecast at one token and are sixty: reservations are exceeded all the time."""
    changes = {"gpu_blocks": 14, "host_blocks": host_blocks, "initial_output_tokens": 1}
    table = [Row(30 + index, 60, 60, None) for index in range(num_requests)]
    check(run_all(changes, table, Faults(), seed, 4), table)
