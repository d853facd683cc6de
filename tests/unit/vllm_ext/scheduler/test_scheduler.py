"""The scheduler on real vLLM structures, with a fake worker that knows what every KV block must hold."""

import statistics
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from tests.unit.vllm_ext.fake_worker import FakeCore, expected_output, make_request, make_scheduler


def random_prompt(rng: Random, templates: Sequence[list[int]], longest: int = 40) -> list[int]:
    template = rng.choice(templates) if templates and rng.random() < 0.7 else []
    own = [rng.randrange(1000, 1999) for _ in range(rng.randint(1, longest - len(template)))]
    return template + own


def counts(core: FakeCore) -> dict[str, float]:
    return {
        name: getattr(core.counters, name)
        for name in ("evictions", "prefetches", "found_blocks", "recomputes")
    }


def random_templates(rng: Random) -> list[list[int]]:
    """Beginnings that prompts share: of whole blocks, and not."""
    return [[rng.randrange(1000) for _ in range(length)] for length in (8, 13, 21)]


def run_random_requests(
    core: FakeCore, num_requests: int, rng: Random, templates: Sequence[list[int]] = ()
) -> None:
    """Run them together and check each one's output: it depends on all of the KV that the request has seen."""
    expected: dict[str, list[int]] = {}
    for index in range(num_requests):
        prompt, max_tokens = random_prompt(rng, templates), rng.randint(1, 20)
        expected[str(index)] = expected_output(prompt, max_tokens)
        core.add(make_request(str(index), prompt, max_tokens))
    assert core.run() == expected


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("num_batches", [2, pytest.param(3, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("templated", [False, True], ids=["plain", "templated"])
def test_every_request_sees_its_own_kv_whatever_moves(depth: int, num_batches: int, templated: bool) -> None:
    rng = Random(1000 * depth + 10 * num_batches + templated)
    templates = random_templates(rng) if templated else []
    core = FakeCore(
        make_scheduler(gpu_blocks=24, host_blocks=120, num_batches=num_batches, stages=depth), depth
    )
    run_random_requests(core, 60, rng, templates)
    assert counts(core)["evictions"] > 0
    assert counts(core)["prefetches"] > 0
    if templated:
        assert counts(core)["found_blocks"] > 0, "shared blocks need no prefetch"


@pytest.mark.parametrize(
    ("runner", "stages", "depth"),
    [(1, 1, 2), (2, 1, 2), (2, 2, 3), (2, 4, 5)],
    ids=["v1 pp1", "v2 pp1", "v2 pp2", "v2 pp4"],
)
@pytest.mark.parametrize("num_batches", [2, pytest.param(3, marks=pytest.mark.long), 5])
def test_asynchronous_scheduling_moves_kv_all_the_same(
    num_batches: int, runner: int, stages: int, depth: int
) -> None:
    rng = Random(10 * num_batches + depth)
    templates = [[rng.randrange(1000) for _ in range(length)] for length in (8, 13)]
    scheduler = make_scheduler(
        gpu_blocks=24,
        host_blocks=120,
        num_batches=num_batches,
        stages=stages,
        runner=runner,
        asynchronous=True,
    )
    core = FakeCore(scheduler, depth)
    run_random_requests(core, 60, rng, templates)
    assert counts(core)["evictions"] > 0
    assert counts(core)["prefetches"] > 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_parked_requests_give_up_their_slots_where_slots_are_few(stages: int, asynchronous: bool) -> None:
    """The V2 runner: two batches of three requests at most, and no more state than that on the workers."""
    rng = Random(stages)
    scheduler = make_scheduler(
        gpu_blocks=40,
        host_blocks=200,
        num_batches=2,
        stages=stages,
        max_num_seqs=3,
        runner=2,
        asynchronous=asynchronous,
    )
    core = FakeCore(scheduler, stages + asynchronous)
    run_random_requests(core, 40, rng)
    assert core.worker.num_resent > 0
    assert counts(core)["prefetches"] > core.worker.num_resent / 2
    assert len(scheduler._workers.slots) == 0
    assert not scheduler.prev_step_scheduled_req_ids, "requests that are gone are forgotten"


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 12))]
)
def test_arrivals_and_aborts_at_any_moment(seed: int) -> None:
    rng = Random(seed)
    templates = [[rng.randrange(1000) for _ in range(12)]]
    stages, runner = rng.randint(1, 3), rng.choice([1, 2])
    asynchronous = rng.random() < 0.5 and (runner == 2 or stages == 1)
    core = FakeCore(
        make_scheduler(
            gpu_blocks=rng.randint(17, 40),
            host_blocks=rng.randint(40, 160),
            num_batches=rng.randint(2, 4),
            stages=stages,
            chunk_tokens=rng.choice([17, 64]),
            max_num_seqs=rng.choice([4, 16]),
            runner=runner,
            asynchronous=asynchronous,
        ),
        stages + asynchronous,
    )
    expected: dict[str, list[int]] = {}
    for index in range(250):
        if rng.random() < 0.4:
            prompt, max_tokens = random_prompt(rng, templates), rng.randint(1, 20)
            expected[str(index)] = expected_output(prompt, max_tokens)
            core.add(make_request(str(index), prompt, max_tokens))
        if expected and rng.random() < 0.1:
            name = rng.choice([*expected])
            if name in core.scheduler.requests:
                core.abort([name])
                del expected[name]
        core.step()
    outputs = core.run()
    assert {name: outputs[name] for name in expected} == expected
    assert not core.scheduler.requests


def test_an_aborted_request_s_id_may_be_used_again() -> None:
    core = FakeCore(make_scheduler(gpu_blocks=24, host_blocks=60, num_batches=2))
    core.add(make_request("a", [1, 2, 3], 10))
    core.step()
    core.abort(["a"])
    core.add(make_request("a", [7, 8], 3))
    assert core.run()["a"][-3:] == expected_output([7, 8], 3)


@pytest.mark.long  # speed
def test_a_step_costs_the_same_however_many_requests_are_parked() -> None:
    """The steps' own sizes are equal; what differs is how many others there are: 500 or 20,000.

    The cost is counted in function calls of the scheduler, Python's and C's, so it is the same on any machine.
    """

    def calls_of_a_step(num_requests: int) -> float:
        # Prompts of one block, outputs that do not end: the host holds them all, the GPU 64.
        scheduler = make_scheduler(
            gpu_blocks=128, host_blocks=8 * num_requests, num_batches=2, chunk_tokens=4096, max_num_seqs=32
        )
        core = FakeCore(scheduler, checks_blocks=False)
        for index in range(num_requests):
            core.add(make_request(str(index), [index % 900, index // 900, 5], 28))
        while not core.counters.decode_steps or core.num_steps < 4:
            core.step()
        for _ in range(20):
            core.step()
        assert len(core.outputs) > 0.8 * num_requests
        samples = []
        for _ in range(60):
            scheduler_output, in_schedule = counted_calls(scheduler.schedule)
            outputs = core.worker.execute(scheduler_output)
            _, in_update = counted_calls(scheduler.update_from_output, scheduler_output, outputs)
            samples.append(in_schedule + in_update)
        return statistics.median(samples)

    few, many = calls_of_a_step(500), calls_of_a_step(20_000)
    assert many < 1.5 * few, f"{few} calls with 500 requests, {many} with 20,000"


def counted_calls(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Call the function; return what it returns, and how many functions were called within."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        return function(*arguments), calls
    finally:
        sys.setprofile(None)
