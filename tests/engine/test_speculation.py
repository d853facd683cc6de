"""Two replicas of stock vLLM, one of which tries n-gram speculation: rows keep their tokens, and sampled rows too."""

import time
from itertools import cycle, islice
from pathlib import Path

import pytest

from pipemax.api import Completion, GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig
from pipemax.serve.flow.live_tuning import LiveTuning
from pipemax.tuning.canary import CanaryRules
from tests.engine.conftest import DEFAULTS
from tests.engine.test_live_tuning import QUICK, OneJob
from tests.engine.test_offline_engine import demo_prompts

PROMPTS = 60
IN_FLIGHT = 200
TRIED = CanaryRules(pairs=1, block_s=3.0, worth=-10.0)
"""Whatever the rate on these cores, it is taken."""
CONFIG = EngineConfig.parse(
    {**DEFAULTS, "policy": "vllm", "replicas": 2, "max_num_seqs": 16, "cpu_kv_gib": 0.25}
)
REPEATED = "Package: a-b-c a-b-c a-b-c a-b-c\nSummary: a-b-c a-b-c"
"""Its beginnings come again, so that drafts are made."""


def requests(sampling: Sampling, first: int, count: int) -> list[GenerationRequest]:
    prompts = islice(
        cycle([f"{REPEATED}\n{prompt}" for prompt in demo_prompts(PROMPTS)]), first, first + count
    )
    return [
        GenerationRequest(request_id=f"{number}", prompt=prompt, sampling=sampling)
        for number, prompt in enumerate(prompts, first)
    ]


def tokens_of(engine: OfflineEngine, sampling: Sampling) -> dict[int, tuple[int, ...]]:
    return {int(row.request_id): row.token_ids for row in engine.generate(requests(sampling, 0, PROMPTS))}


@pytest.mark.long  # two engines of vLLM, each of which starts twice
def test_rows_keep_their_tokens_while_a_replica_tries_speculation_and_when_all_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    greedy = Sampling(max_tokens=48, regex="[a-z ]{40,44}")
    sampled = Sampling(max_tokens=24, temperature=1.0, seed=7)
    with OfflineEngine(CONFIG) as engine:
        expected, expected_sampled = tokens_of(engine, greedy), tokens_of(engine, sampled)
        tuning = LiveTuning(OneJob(), rules=QUICK, canary_rules=TRIED)
        rows: dict[int, Completion] = {}
        sent, deadline_s = 0, time.monotonic() + 600

        def step(most: int) -> None:
            nonlocal sent
            count = min(most, IN_FLIGHT) - (sent - len(rows))
            if count > 0:
                engine.submit(requests(greedy, sent, count))
                sent += count
            ended = engine.poll(0.1)
            for row in ended:
                assert rows.setdefault(int(row.request_id), row) is row, "each row comes once"
            tuning.learn(ended)
            tuning.see(engine, CONFIG)
            assert time.monotonic() < deadline_s, (tuning.note, engine.stats().replicas)

        while not all(own["speculates"] and own["state"] == "up" for own in engine.stats().replicas):
            step(IN_FLIGHT)
        assert tuning.note.endswith(", taken")
        assert [own["restarts"] for own in engine.stats().replicas] == [1, 1]
        until = sent + IN_FLIGHT  # rows of which both replicas have some
        while len(rows) < until:
            step(IN_FLIGHT)
        while len(rows) < sent:
            step(0)
        differing = [number for number, row in rows.items() if row.token_ids != expected[number % PROMPTS]]
        assert not differing
        assert tokens_of(engine, sampled) == expected_sampled
        assert not all(own["speculates"] for own in engine.stats().replicas)
