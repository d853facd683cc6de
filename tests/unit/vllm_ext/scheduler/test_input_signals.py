"""What the engine's side tells the scheduler of the input, and what the scheduler says it could take in."""

from typing import Any

from tests.unit.vllm_ext.fake_worker import FakeCore, make_request, make_scheduler


def make_core() -> FakeCore:
    return FakeCore(make_scheduler(gpu_blocks=64, host_blocks=100, num_batches=2, input_grace_s=1e6))


def metrics(core: FakeCore) -> dict[str, Any]:
    stats = core.scheduler.make_stats()
    assert stats is not None
    assert stats.kv_connector_stats is not None
    return stats.kv_connector_stats


def test_with_its_input_open_a_prefill_phase_waits_and_goes_on_when_it_has_ended() -> None:
    core = make_core()
    core.scheduler.set_input_open(True)
    core.add(make_request("a", [5, 6, 7], max_tokens=4))
    for _ in range(10):
        core.step()
    assert metrics(core)["awaits_input"] == 1
    assert core.outputs["a"] != [], "its prompt is done"
    assert len(core.outputs["a"]) == 1, "it does not decode yet"
    core.scheduler.set_input_open(False)
    assert len(core.run()["a"]) == 4


def test_without_an_input_signal_the_scheduler_does_not_wait() -> None:
    core = make_core()
    core.add(make_request("a", [5, 6, 7], max_tokens=4))
    assert len(core.run(max_steps=10)["a"]) == 4


def test_the_demand_shrinks_by_what_is_known_and_says_how_many_that_are() -> None:
    core = make_core()
    core.scheduler.set_input_open(True)
    for name in ("a", "b"):
        core.add(make_request(name, [5, 6, 7], max_tokens=6))
    core.step()
    before = metrics(core)
    assert before["known_requests"] == 2
    # 95 of 100 blocks of 4 tokens may be filled; 8 tokens of KV each are 2 blocks.
    assert before["admission_demand_tokens"] == (95 - 4) * 4
    assert before["kv_tokens_per_request"] == 8
    core.add(make_request("c", [5, 6, 7], max_tokens=6))
    assert metrics(core)["known_requests"] == 2, "it was sent, and no plan knows it"
    core.step()
    assert metrics(core)["known_requests"] == 3
    assert metrics(core)["admission_demand_tokens"] == (95 - 6) * 4
