"""A step of decodes that vLLM's ``schedule`` does not make is the one that it would make."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput

from pipemax.vllm_ext.scheduler.scheduler import PipeMaxScheduler
from tests.unit.vllm_ext.fake_worker import FakeCore, equal_cores, make_request, make_scheduler, state_of


def comparable(output: SchedulerOutput) -> tuple[object, ...]:
    """Return the whole message: arrays of copies compare by what they hold."""
    return replace(output, kv_connector_metadata=None), repr(output.kv_connector_metadata)


def count_own_loops(scheduler: PipeMaxScheduler, count: dict[str, int], name: str) -> None:
    """Count the calls of something that only vLLM's ``schedule`` calls, once in each step."""
    manager = scheduler.kv_cache_manager
    take = manager.take_kv_cache_block_copies
    count[name] = 0

    def counted() -> Any:
        count[name] += 1
        return take()

    manager.take_kv_cache_block_copies = counted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("asynchronous", "more"),
    [(False, {}), (True, {}), (True, {"batching": "mixed", "mixed_step_tokens": 12})],
    ids=["sync", "async", "async-mixed"],
)
def test_the_message_is_vllm_s_own(asynchronous: bool, more: dict[str, Any]) -> None:
    cores = equal_cores(num_batches=3, chunk_tokens=16, asynchronous=asynchronous, **more)
    loops: dict[str, int] = {}
    for core, name in zip(cores, ("short", "own"), strict=True):
        count_own_loops(core.scheduler, loops, name)
        rng = Random(11)
        for index in range(40):
            prompt = [1] * 6 * rng.randint(0, 1) + [
                rng.randrange(100, 999) for _ in range(rng.randint(1, 20))
            ]
            core.add(make_request(str(index), prompt, rng.randint(1, 24)))
            if index % 3 == 0:
                any_schema: Any = SimpleNamespace(
                    grammar=SimpleNamespace(accept_tokens=lambda *_: True), reasoning_ended=True
                )
                core.scheduler.requests[str(index)].structured_output_request = any_schema
    cores[1].scheduler._schedules_decodes = False
    while cores[0].scheduler.has_requests() or cores[1].scheduler.has_requests():
        short, own = (core.step() for core in cores)
        assert comparable(short) == comparable(own)
        assert state_of(cores[0].scheduler) == state_of(cores[1].scheduler)
        if cores[0].num_steps == 40:
            for core in cores:
                core.abort(list(core.scheduler.requests)[:2])
    assert cores[0].outputs == cores[1].outputs
    assert loops["short"] < 0.6 * loops["own"], loops


def test_a_paused_scheduler_decodes_nothing() -> None:
    core = FakeCore(make_scheduler(gpu_blocks=40, host_blocks=100, num_batches=2, runner=2))
    core.add(make_request("a", [1, 2, 3], 10))
    core.step()
    core.step()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not core.step().num_scheduled_tokens
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert len(core.run()["a"]) == 10
