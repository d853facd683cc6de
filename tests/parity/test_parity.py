"""Token for token the same as stock vLLM, with pools so small that every request leaves the GPU and comes back.

Host pools are NaN where nothing was stored, GPU blocks are NaN until their copy is done, and each case asserts that
there were evictions and prefetches: an engine that never moved anything proves nothing.

One engine for each kind takes on a pairwise cover of batches, pools and loads; ``test_full`` has the whole matrix.
"""

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pipemax.domain.plan import Batching
from tests.parity.cases import (
    BLOCK_TOKENS,
    EVERYTHING,
    LONG,
    PLAIN,
    SEEDED,
    TEMPLATED,
    Answers,
    Load,
    different,
)
from tests.parity.conftest import EngineOf, Reference
from tests.parity.engines import HOST_MIB, Kind, ParityEngine, Setting
from tests.parity.faulty_connector import Fault
from tests.parity.make_model import SMALL

V1 = Kind()
V1_ASYNC = Kind(asynchronous=True)
V1_PIPELINE = Kind(pp=2)
V2 = Kind(runner=2)
"""In ``make parity-full``: ``V2_PIPELINE`` has the same runner, and more steps in flight."""
V2_PIPELINE = Kind(pp=2, runner=2, asynchronous=True)
TENSOR = Kind(tp=2, pp=2)
"""Four workers, on two cores in CI: its loads are light ones."""


TIGHT = {"gpu_blocks": 18, "host_blocks": 48}  # one long sequence on the GPU, three on the host


def light(load: Load) -> Load:
    """For interpreted kernels: 50 ms a step and more."""
    return replace(load, count=10, output_tokens=(4, 14))


FULL = pytest.mark.parity_full
CASES: list[Any] = [  # kind, setting, load
    pytest.param(V1, Setting(num_batches=2), PLAIN, marks=FULL),
    pytest.param(V1, Setting(num_batches=3, **TIGHT), TEMPLATED, marks=FULL),
    pytest.param(V1, Setting(num_batches=4, gpu_blocks=30), EVERYTHING, marks=FULL),
    pytest.param(V1, Setting(num_batches=2, gpu_blocks=30, host_blocks=80), SEEDED, marks=FULL),
    pytest.param(V1, Setting(num_batches=5), LONG, marks=FULL),
    (V1_ASYNC, Setting(num_batches=2), TEMPLATED),
    (V1_ASYNC, Setting(num_batches=3), EVERYTHING),
    pytest.param(V1_ASYNC, Setting(num_batches=4, **TIGHT), PLAIN, marks=FULL),
    pytest.param(V1_ASYNC, Setting(num_batches=3), SEEDED, marks=FULL),
    (V1_PIPELINE, Setting(num_batches=3, **TIGHT), EVERYTHING),
    pytest.param(V1_PIPELINE, Setting(num_batches=2), TEMPLATED, marks=FULL),
    pytest.param(V1_PIPELINE, Setting(num_batches=5, gpu_blocks=30), PLAIN, marks=FULL),
    (V1_PIPELINE, Setting(num_batches=4), SEEDED),
    (V1_PIPELINE, Setting(num_batches=2, **TIGHT), LONG),
    pytest.param(V2, Setting(num_batches=2, gpu_blocks=18, slots=5), light(EVERYTHING), marks=FULL),
    pytest.param(V2, Setting(num_batches=3, gpu_blocks=18), light(TEMPLATED), marks=FULL),
    pytest.param(V2_PIPELINE, Setting(num_batches=2, gpu_blocks=18), light(EVERYTHING), marks=FULL),
    (V2_PIPELINE, Setting(num_batches=4, slots=5), light(TEMPLATED)),
    pytest.param(V2_PIPELINE, Setting(num_batches=2, **TIGHT), light(PLAIN), marks=FULL),
    pytest.param(V2_PIPELINE, Setting(num_batches=3, gpu_blocks=18), light(SEEDED), marks=FULL),
    (TENSOR, Setting(num_batches=3, **TIGHT), light(EVERYTHING)),
    pytest.param(TENSOR, Setting(num_batches=2, gpu_blocks=18), light(SEEDED), marks=FULL),
]


MIXED = {"batching": Batching.MIXED, "mixed_step_tokens": 48}
"""A maximum that several prompts share with the decodes, and that cuts long ones."""

MIXED_CASES: list[Any] = [
    pytest.param(V1, Setting(num_batches=3, controller=MIXED, **TIGHT), TEMPLATED, marks=FULL),
    (V1_ASYNC, Setting(num_batches=3, controller=MIXED), EVERYTHING),
    (V1_PIPELINE, Setting(num_batches=4, controller=MIXED, **TIGHT), SEEDED),
    pytest.param(V2, Setting(num_batches=3, controller=MIXED, gpu_blocks=18), light(PLAIN), marks=FULL),
    pytest.param(
        V2_PIPELINE, Setting(num_batches=2, controller=MIXED, gpu_blocks=18), light(TEMPLATED), marks=FULL
    ),
    (TENSOR, Setting(num_batches=4, controller=MIXED, gpu_blocks=18), light(TEMPLATED)),
]


def name_of(value: object) -> str:
    match value:
        case Setting():
            slots = f" slots{value.slots}" if value.slots else ""
            return f"n{value.num_batches} gpu{value.gpu_blocks} host{value.host_blocks}{slots}"
        case Load():
            return f"{value.choose.__name__}{' templated' if value.template_tokens else ''} {value.prompt_tokens[1]}"
        case _:
            return str(value)


def check(engine: ParityEngine, setting: Setting, load: Load, expected: Answers) -> None:
    """The same answers, and they were hard to give."""
    engine.reset(setting)
    assert not [*different(engine.run(load.make()), expected)]
    counters = engine.counters
    assert counters.evictions > 0
    assert counters.prefetches > 0
    assert counters.prefetched_blocks > 0
    if setting.slots is not None:
        assert engine.num_resent > 0
    if load.template_tokens and not engine.kind.frees_windows:  # which shares no prefixes
        assert engine.scheduler.num_found_prefixes > 0


@pytest.mark.parametrize(("kind", "setting", "load"), CASES, ids=name_of)
def test_tokens_are_those_of_stock_vllm(
    kind: Kind, setting: Setting, load: Load, engine_of: EngineOf, reference: Reference
) -> None:
    check(engine_of(kind), setting, load, reference(kind, load))


@pytest.mark.parametrize(("kind", "setting", "load"), MIXED_CASES, ids=name_of)
def test_tokens_are_the_same_in_mixed_steps(
    kind: Kind, setting: Setting, load: Load, engine_of: EngineOf, reference: Reference
) -> None:
    engine = engine_of(kind)
    check(engine, setting, load, reference(kind, load))
    assert engine.counters.decode_steps > 0


@pytest.mark.parametrize(
    ("batching", "load"),
    [
        pytest.param({}, light(SEEDED), marks=FULL),
        (MIXED, light(EVERYTHING)),
        pytest.param(MIXED, light(LONG), marks=FULL),
    ],
    ids=["in phases, seeded", "mixed, everything", "mixed, long"],
)
@pytest.mark.parametrize("kind", [V2_PIPELINE], ids=str)
def test_tokens_are_the_same_where_a_step_is_planned_before_the_last_token_is_known(
    kind: Kind, batching: dict[str, Any], load: Load, engine_of: EngineOf, reference: Reference
) -> None:
    """As many batches as stages, where one step more is in flight."""
    engine = engine_of(kind)
    setting = Setting(num_batches=kind.pp, gpu_blocks=18, controller=batching)
    check(engine, setting, load, reference(kind, load))
    assert engine.scheduler.num_planned_in_flight > 0


@pytest.mark.parametrize("kind", [V1, V1_ASYNC, V1_PIPELINE, V2_PIPELINE], ids=str)
def test_tokens_of_stock_vllm_are_the_same_while_its_limits_change_in_every_step(
    kind: Kind, engine_of: EngineOf, reference: Reference
) -> None:
    load, rng, steps = light(EVERYTHING), Random(0), itertools.count()
    engine = engine_of(kind)
    engine.reset(Setting(has_live_limits=True, gpu_blocks=24, fault=Fault.NONE))
    most_tokens, most_rows = engine.scheduler.most_limits()

    def change_limits() -> None:
        assert next(steps) < 2_000, "rows do not end"
        engine.scheduler.set_limits(rng.randint(8, most_tokens), rng.randint(1, most_rows))

    answers = engine.run(load.make(), before_step=change_limits)
    assert [*different(answers, reference(kind, load))] == []


@pytest.mark.parametrize("kind", [TENSOR], ids=str)
def test_each_rank_of_a_stage_has_a_pool_and_copies_for_its_share_of_the_heads(
    kind: Kind, engine_of: EngineOf
) -> None:
    engine = engine_of(kind)
    engine.reset(Setting(num_batches=3, **TIGHT))
    engine.run(light(PLAIN).make())
    loaded_before = engine.loaded_bytes()
    blocks_before = engine.counters.prefetched_blocks
    engine.run(light(TEMPLATED).make())
    num_blocks = engine.counters.prefetched_blocks - blocks_before
    assert num_blocks > 0
    layers, heads = SMALL["num_hidden_layers"] // kind.pp, SMALL["num_key_value_heads"] // kind.tp
    rank_token_bytes = layers * heads * 2 * SMALL["head_dim"] * 4
    for before, after in zip(loaded_before, engine.loaded_bytes(), strict=True):
        assert after - before == num_blocks * BLOCK_TOKENS * rank_token_bytes * kind.tp
    pools = engine.host_pools()
    assert len(pools) == kind.tp * kind.pp
    assert {(pool.layout.num_layers, pool.layout.num_kv_heads) for pool in pools} == {(layers, heads)}
    assert {pool.num_blocks for pool in pools} == {(HOST_MIB << 20) // (BLOCK_TOKENS * rank_token_bytes)}


@pytest.mark.parametrize("kind", [V1_PIPELINE, V1_ASYNC, pytest.param(V2_PIPELINE, marks=FULL)], ids=str)
def test_steps_are_in_flight_together_and_their_requests_are_evicted(
    kind: Kind, engine_of: EngineOf, reference: Reference
) -> None:
    """As many steps as vLLM would have in flight: one more than stages with the V2 runner and asynchronous."""
    engine = engine_of(kind)
    assert engine.max_concurrent_batches == kind.depth
    load = PLAIN if kind.runner == 1 else light(PLAIN)
    check(engine, Setting(num_batches=max(3, kind.depth), gpu_blocks=18), load, reference(kind, load))
    assert engine.max_left_in_flight == kind.depth - 1
    assert engine.scheduler.num_evicted_in_flight > 0


@pytest.mark.parametrize("kind", [V1_PIPELINE, V1_ASYNC, pytest.param(V2_PIPELINE, marks=FULL)], ids=str)
def test_aborts_leave_the_others_as_they_are(kind: Kind, engine_of: EngineOf, reference: Reference) -> None:
    """A third of the requests is given up, some at each of several moments, wherever they are."""
    engine = engine_of(kind)
    engine.reset(Setting(num_batches=3, **TIGHT))
    load = PLAIN if kind.runner == 1 else light(PLAIN)
    requests = load.make()
    given_up = [request.id for request in requests[::3]]
    moments = {1: given_up[:1], 9: given_up[1:2], 25: given_up[2:6], 60: given_up[6:]}
    answers = engine.run(requests, abort_at=moments)
    expected = reference(kind, load)
    kept = {request.id for request in requests} - set(given_up)
    assert kept <= answers.keys()
    assert not [*different(answers, {name: expected[name] for name in answers})]
    assert engine.scheduler._host.num_free == engine.scheduler._host.num_blocks


def test_the_models_output_varies(reference: Reference) -> None:
    answers = reference(V1_ASYNC, PLAIN).values()
    assert len({token for answer in answers for token in answer.tokens}) > 100


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.LOST], ids=lambda fault: fault.value)
@pytest.mark.parametrize("kind", [V1_PIPELINE], ids=str)
def test_a_corrupted_or_a_lost_copy_changes_the_tokens(
    kind: Kind, fault: Fault, engine_of: EngineOf, reference: Reference
) -> None:
    """The negative controls: were they to pass unnoticed, the comparisons above would be worth nothing."""
    engine = engine_of(kind)
    engine.reset(Setting(num_batches=3, fault=fault))
    answers = engine.run(PLAIN.make())
    assert engine.counters.prefetches > 0
    assert [*different(answers, reference(kind, PLAIN))]
