"""KV that has left windows is freed, on real vLLM structures: every request still sees its own KV."""

from random import Random
from typing import Any

import pytest

from pipemax.domain.plan import Batching
from tests.unit.vllm_ext.fake_worker import FakeCore, make_scheduler
from tests.unit.vllm_ext.scheduler.test_scheduler import run_random_requests

WINDOWS = [(None, 10), (10, None), (7, None, 7, 7), (10,)]
"""As of gpt-oss, of models whose first layer has a window, of Gemma 3, and of Mistral 7B v0.1; in tokens."""


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("batching", "stores_tokens"),
    [(Batching.SEPARATED, False), (Batching.MIXED, True)],
    ids=["phases", "mixed steps, token stores"],
)
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
def test_every_request_sees_its_own_kv_within_its_windows(
    windows: tuple[int | None, ...],
    batching: Batching,
    stores_tokens: bool,
    runner: int,
    stages: int,
    asynchronous: bool,
) -> None:
    core = make_core(windows, runner, stages, asynchronous, batching=batching, stores_tokens=stores_tokens)
    run_random_requests(core, 60, Random(10 * stages + len(windows)))
    assert core.counters.evictions > 0
    assert core.counters.prefetches > 0


def make_core(
    windows: tuple[int | None, ...], runner: int, stages: int, asynchronous: bool, **more: Any
) -> FakeCore:
    scheduler = make_scheduler(
        gpu_blocks=24 * len(windows),
        host_blocks=400,
        num_batches=3,
        stages=stages,
        chunk_tokens=24,
        runner=runner,
        asynchronous=asynchronous,
        windows=windows,
        **more,
    )
    return FakeCore(scheduler, stages + asynchronous)


def test_requests_hold_only_the_blocks_of_their_windows() -> None:
    """On both sides, once a step that needs no more has run."""
    core = make_core((None, 10), 2, 2, True)
    most = {"GPU": 0, "host": 0}
    schedule = core.scheduler.schedule

    def watched() -> Any:
        output = schedule()
        for name in output.num_scheduled_tokens:
            _, windowed = core.scheduler.kv_cache_manager.get_block_ids(name)
            most["GPU"] = max(most["GPU"], sum(block > 0 for block in windowed))
            most["host"] = max(most["host"], len(core.scheduler._host._tables[name].groups[1]))
        return output

    core.scheduler.schedule = watched  # type: ignore[method-assign]
    run_random_requests(core, 40, Random(5))
    # The nine tokens before a part of 24 prompt tokens, and these; on the host the nine that the next token needs.
    assert most == {"GPU": 9, "host": 3}
