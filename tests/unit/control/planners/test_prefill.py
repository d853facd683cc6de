"""Which prompt tokens a step computes, and who makes room for them."""

import pytest

from pipemax.control.planners.prefill import OutputLengths
from pipemax.domain.plan import Batching, Phase
from pipemax.domain.request import PrefixId, SharedPrefix
from tests.unit.control.fake_engine import FakeEngine, small_config, spec


def prefill_plans(engine: FakeEngine) -> list:
    while engine.controller.phase is Phase.PREFILL and engine.sequences:
        engine.step()
    return [plan for plan in engine.plans if plan.phase is Phase.PREFILL and plan.run]


def test_steps_have_equal_tokens_whatever_the_prompts() -> None:
    engine = FakeEngine(config=small_config())
    for index, length in enumerate([10, 700, 3, 90, 300, 500, 41, 64]):
        engine.admit(spec(f"r{index}", length), 5)
    tokens = [sum(plan.run_tokens) for plan in prefill_plans(engine)]
    assert tokens[:-1] == [256] * (len(tokens) - 1)
    assert sum(tokens) == 1708


def test_whole_prompts_are_not_cut_and_all_of_them_end() -> None:
    """Neither by a step's tokens nor by room on the GPU, which here is too small for all of them."""
    engine = FakeEngine(config=small_config(whole_prompts=True, prefill_chunk_tokens=512))
    lengths = {f"r{index}": length for index, length in enumerate([10, 500, 3, 90, 300, 512, 41, 64])}
    for name, length in lengths.items():
        engine.admit(spec(name, length, 5), 5)
    engine.run()
    first_steps = [
        (request, tokens)
        for plan in engine.plans
        if plan.phase is Phase.PREFILL
        for request, tokens in zip(plan.run, plan.run_tokens, strict=True)
    ]
    assert sorted(first_steps) == sorted(lengths.items())


def test_whole_prompts_need_separated_batching() -> None:
    with pytest.raises(ValueError, match="whole_prompts needs separated batching"):
        small_config(whole_prompts=True, batching=Batching.MIXED)


def test_prompts_are_prefilled_first_come_first_served() -> None:
    engine = FakeEngine(config=small_config())
    for index in range(6):
        engine.admit(spec(f"r{index}", 150), 5)
    order = [request for plan in prefill_plans(engine) for request in plan.run]
    assert order == sorted(order)


def test_the_longest_replicated_requests_make_room_and_the_short_stay_for_the_first_batches() -> None:
    engine = FakeEngine(config=small_config())
    lengths = [400, 30, 500, 40, 600, 50, 300, 20]
    for index, length in enumerate(lengths):
        engine.admit(spec(f"r{index}", length, 20), 20)
    plans = prefill_plans(engine)
    evicted = [request for plan in plans for request in plan.evict]
    resident = {name for name, sequence in engine.sequences.items() if sequence.gpu_blocks}
    assert {"r1", "r3", "r5", "r7"} <= resident
    assert set(evicted) <= {"r0", "r2", "r4", "r6"}
    assert evicted


def test_no_more_is_reserved_on_the_host_than_the_high_watermark() -> None:
    config = small_config(host_blocks=200, initial_output_tokens=32)
    engine = FakeEngine(config=config)
    for index in range(40):
        engine.admit(spec(f"r{index}", 97, 60), 30)  # 8 blocks at their expected ends
    prefill_plans(engine)
    started = sum(sequence.computed_tokens > 0 for sequence in engine.sequences.values())
    assert started == 190 // 8
    assert engine.controller.admission_demand_tokens < 0, "more waits than fits"


def test_a_shared_prefix_is_computed_once() -> None:
    engine = FakeEngine(config=small_config(max_num_seqs=1))
    prefix = SharedPrefix(prefix_id=PrefixId("instruction"), num_tokens=64)
    for index in range(4):
        engine.admit(spec(f"r{index}", 80, 10, prefix=prefix), 10)
    plans = prefill_plans(engine)
    assert [plan.run_tokens for plan in plans] == [(80,), (16,), (16,), (16,)]


@pytest.mark.parametrize(("max_resident", "expected"), [(3, 3), (1000, 20)])
def test_no_more_requests_on_the_gpu_than_the_runner_has_slots(max_resident: int, expected: int) -> None:
    engine = FakeEngine(config=small_config(max_resident_requests=max_resident))
    for index in range(20):
        engine.admit(spec(f"r{index}", 20, 20), 20)
    prefill_plans(engine)
    assert sum(sequence.gpu_blocks > 0 for sequence in engine.sequences.values()) == expected


def test_output_lengths_are_forecast_from_what_finished() -> None:
    outputs = OutputLengths(None)
    assert outputs.expected_kv_tokens(spec("a", 100, 50)) == 149
    for _ in range(OutputLengths.MIN_FINISHED):
        outputs.observe(10)
    assert outputs.expected_kv_tokens(spec("a", 100, 50)) == 109
    assert outputs.expected_kv_tokens(spec("a", 100, 5)) == 104
    assert outputs.expected_kv_tokens(spec("a", 100, 50, expected_output_tokens=20)) == 119
    assert OutputLengths(7).expected_kv_tokens(spec("a", 100, 50)) == 106
