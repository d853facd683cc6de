"""Waves on real vLLM structures: what a step reads is overwritten behind it, and every request sees its own KV."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from pipemax.domain.plan import Batching
from pipemax.vllm_ext.worker.connector import StepMetadata
from tests.unit.vllm_ext.fake_worker import (
    BLOCK_TOKENS,
    FakeCore,
    expected_output,
    make_request,
    make_scheduler,
)
from tests.unit.vllm_ext.scheduler.test_scheduler import counts, random_templates, run_random_requests

KINDS = pytest.mark.parametrize(
    ("runner", "stages", "asynchronous"),
    [(1, 2, False), pytest.param(1, 1, True, marks=pytest.mark.long), (2, 2, True), (2, 4, True)],
    ids=["v1 pp2", "v1 async", "v2 pp2", "v2 pp4"],
)


class _WaveCore(FakeCore):
    """Checks which blocks a wave overwrites: some that its step reads, and none that it writes to."""

    overwritten: Sequence[str] = ()
    """Requests of the last step with blocks that a wave overwrites."""

    def step(self) -> SchedulerOutput:
        output = super().step()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        copies = metadata.copies
        assert copies.in_groups is bool(output.num_scheduled_tokens)
        read, written = set[int](), set[int]()
        for name, count in output.num_scheduled_tokens.items():
            (table,), computed = self.worker.tables[name], self.worker.computed[name]
            read.update(table[: computed // BLOCK_TOKENS])
            written.update(table[computed // BLOCK_TOKENS : -(-(computed + count) // BLOCK_TOKENS)])
        behind = {prefetch.target for prefetch in copies.wave_prefetches}
        assert behind <= read
        tables = self.worker.tables
        self.overwritten = [name for name in output.num_scheduled_tokens if behind & {*tables[name][0]}]
        assert not behind & written
        assert not {prefetch.target for prefetch in (*copies.prefetches, *copies.later_prefetches)} & (
            read | written
        )
        return output


def make_core(runner: int, stages: int, asynchronous: bool, *, num_batches: int, **more: Any) -> _WaveCore:
    scheduler = make_scheduler(
        gpu_blocks=24,
        host_blocks=120,
        num_batches=num_batches,
        stages=stages,
        chunk_tokens=24,
        runner=runner,
        asynchronous=asynchronous,
        wave_groups=2,
        **more,
    )
    return _WaveCore(scheduler, stages + asynchronous)


@KINDS
@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("num_batches", [2, pytest.param(3, marks=pytest.mark.long), 5])
@pytest.mark.parametrize(
    "templated", [pytest.param(False, marks=pytest.mark.long), True], ids=["plain", "templated"]
)
def test_every_request_sees_its_own_kv(
    runner: int, stages: int, asynchronous: bool, batching: Batching, num_batches: int, templated: bool
) -> None:
    rng = Random(100 * stages + 10 * num_batches + templated)
    templates = random_templates(rng) if templated else []
    core = make_core(runner, stages, asynchronous, num_batches=num_batches, batching=batching)
    run_random_requests(core, 60, rng, templates)
    assert core.worker.num_wave_prefetches > 0
    if templated:
        assert counts(core)["found_blocks"] > 0, "shared blocks need no prefetch"


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
def test_requests_end_and_are_given_up_while_they_are_overwritten(seed: int) -> None:
    rng = Random(seed)
    core = make_core(2, 2, True, num_batches=2)
    template = [rng.randrange(1000) for _ in range(13)]
    expected: dict[str, list[int]] = {}
    given_up = 0
    for index in range(60):
        prompt = template[: rng.choice([0, 8, 13])] + [rng.randrange(1000) for _ in range(rng.randint(1, 24))]
        expected[str(index)] = expected_output(prompt, max_tokens := rng.randint(1, 16))
        core.add(make_request(str(index), prompt, max_tokens))
    while core.scheduler.get_num_unfinished_requests():
        core.step()
        if core.overwritten and rng.random() < 0.1:
            given_up += 1
            core.abort([core.overwritten[0]])
            expected.pop(core.overwritten[0], None)
    outputs = core.run()
    assert given_up > 0
    assert {name: outputs[name] for name in expected} == expected
