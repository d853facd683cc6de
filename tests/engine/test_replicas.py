"""Two replicas of the demo model: the tokens of one engine, and no pause of one while the other is replaced."""

import os
import signal
import time
from pathlib import Path

import pytest

from pipemax.api import Completion, GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig
from tests.engine.conftest import DEFAULTS, POLICIES, StartedEngine
from tests.engine.test_offline_engine import demo_prompts

ROWS = 300
REQUESTS = [
    GenerationRequest(
        request_id=str(i), prompt=f"{prompt}\nRow {i}", sampling=Sampling(max_tokens=32 + i % 64)
    )
    for i, prompt in enumerate(demo_prompts(ROWS))
]


def tokens_of(completions: list[Completion]) -> dict[str, tuple[int, ...]]:
    assert len({completion.request_id for completion in completions}) == len(completions) == ROWS
    assert [completion.error for completion in completions if completion.error] == []
    return {completion.request_id: completion.token_ids for completion in completions}


@pytest.mark.long  # minutes; tests/serve/test_replicas_served.py kills a replica of fakes
@pytest.mark.parametrize("started", [POLICIES["vllm"]], ids=["vllm"], indirect=True)
def test_two_replicas_give_the_tokens_of_one_engine_although_one_is_killed_in_mid_work(
    started: StartedEngine,
) -> None:
    expected = tokens_of(list(started.engine.generate(REQUESTS)))
    with OfflineEngine(EngineConfig.parse({**DEFAULTS, "replicas": 2})) as engine:
        assert engine.policy_choice.reason.startswith("in each of 2 replicas: with one pipeline stage")
        first, second = engine.stats().replicas
        assert first["cores"] == second["cores"] == max(1, len(os.sched_getaffinity(0)) // 2)
        engine.submit(REQUESTS)
        ended: list[Completion] = []
        while len(ended) < ROWS // 6:
            ended += engine.poll(1.0)
        first, second = engine.stats().replicas
        assert first["running_requests"] > 0
        os.kill(first["pid"], signal.SIGKILL)
        meanwhile = 0
        while (own := engine.stats().replicas)[0]["restarts"] == 0 or own[0]["state"] != "up":
            completions = engine.poll(0.1)
            meanwhile += len(completions)
            ended += completions
        assert meanwhile > ROWS // 6, "the other goes on"
        while len(ended) < ROWS:
            ended += engine.poll(1.0)
        assert tokens_of(ended) == expected
        first, second = engine.stats().replicas
        assert first["rows_done"] + second["rows_done"] == ROWS
        pids = [first["pid"], second["pid"]]
    deadline_s = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline_s, "a replica outlived the engine"
        time.sleep(0.1)
