"""Mixed steps on real vLLM structures: every request still sees its own KV."""

from random import Random

import pytest

from pipemax.domain.plan import Batching
from tests.unit.vllm_ext.fake_worker import FakeCore, make_request, make_scheduler
from tests.unit.vllm_ext.scheduler.test_scheduler import counts, random_templates, run_random_requests


@pytest.mark.parametrize(
    ("runner", "stages", "asynchronous"),
    [
        (1, 1, False),
        pytest.param(1, 3, False, marks=pytest.mark.long),
        pytest.param(1, 1, True, marks=pytest.mark.long),
        (2, 2, True),
        pytest.param(2, 4, True, marks=pytest.mark.long),
    ],
    ids=["v1 pp1", "v1 pp3", "v1 async", "v2 pp2", "v2 pp4"],
)
@pytest.mark.parametrize("num_batches", [2, 3, 5])
@pytest.mark.parametrize("templated", [False, True], ids=["plain", "templated"])
def test_every_request_sees_its_own_kv_in_mixed_steps(
    runner: int, stages: int, asynchronous: bool, num_batches: int, templated: bool
) -> None:
    rng = Random(100 * stages + 10 * num_batches + templated)
    templates = random_templates(rng) if templated else []
    scheduler = make_scheduler(
        gpu_blocks=24,
        host_blocks=120,
        num_batches=num_batches,
        stages=stages,
        chunk_tokens=24,
        runner=runner,
        asynchronous=asynchronous,
        batching=Batching.MIXED,
    )
    core = FakeCore(scheduler, stages + asynchronous)
    run_random_requests(core, 60, rng, templates)
    assert core.counters.evictions > 0
    assert core.counters.prefetches > 0
    assert core.counters.decode_steps > 0
    if templated:
        assert counts(core)["found_blocks"] > 0, "shared blocks need no prefetch"


def test_steps_decode_and_take_prompts_up_to_the_engine_s_maximum() -> None:
    scheduler = make_scheduler(
        gpu_blocks=60, host_blocks=200, num_batches=3, chunk_tokens=24, batching=Batching.MIXED
    )
    steps: list[dict[str, int]] = []
    schedule = scheduler.schedule

    def recorded() -> object:
        output = schedule()
        steps.append({**output.num_scheduled_tokens})
        return output

    scheduler.schedule = recorded  # type: ignore[method-assign,assignment]
    core = FakeCore(scheduler, 1)
    run_random_requests(core, 40, Random(1))
    assert max(sum(step.values()) for step in steps) == 24
    assert any(min(step.values()) == 1 < max(step.values()) for step in steps if step)


def test_an_idle_engine_changes_its_batching_and_changes_it_back() -> None:
    """As a calibration does: each batching runs its own steps, and every request sees its own KV."""
    scheduler = make_scheduler(
        gpu_blocks=24, host_blocks=120, num_batches=3, chunk_tokens=24, batching=Batching.MIXED
    )
    core = FakeCore(scheduler, 1)
    for batching in (Batching.MIXED, Batching.SEPARATED, Batching.MIXED):
        scheduler.use_batching(batching.value)
        core.outputs.clear()
        run_random_requests(core, 30, Random(1))
        stats = scheduler.make_stats()
        assert stats is not None
        assert stats.kv_connector_stats is not None
        assert stats.kv_connector_stats["is_mixed_batching"] == (batching is Batching.MIXED)
        assert core.counters.decode_steps > 0


def test_an_engine_at_work_does_not_change_its_batching() -> None:
    scheduler = make_scheduler(gpu_blocks=24, host_blocks=120, num_batches=3)
    scheduler.add_request(make_request("r", [1000] * 8, 4))
    scheduler.schedule()
    with pytest.raises(ValueError, match="the batching is to change while 1 requests are under way"):
        scheduler.use_batching("mixed")
