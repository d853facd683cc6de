"""Two replicas of stock vLLM, one of which tries n-gram speculation: rows keep their tokens, and sampled rows too."""

import logging
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from pipemax.api import Completion, GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig
from pipemax.serve.flow.live_tuning import LiveTuning
from pipemax.tuning.canary import CanaryRules
from pipemax.tuning.remembered import TableKind
from tests.engine.conftest import DEFAULTS
from tests.engine.test_live_tuning import OneJob
from tests.engine.test_offline_engine import demo_prompts
from tests.serve.test_tuning import remember

ROWS = 60
"""Different ones, which come again and again."""
IN_FLIGHT = 100
TRIED = CanaryRules(restarts=0.0, pairs=1, block_s=3.0, worth=-10.0)
"""However long a start takes and whatever the rate is on these cores, it is tried and taken."""
CONFIG = EngineConfig.parse(
    {**DEFAULTS, "policy": "vllm", "replicas": 2, "max_num_seqs": 16, "enable_prefix_caching": False}
)
REPEATED = "Package: a-b-c a-b-c a-b-c a-b-c\nSummary: a-b-c a-b-c"
"""Its beginnings come again, so that drafts are made."""
PROMPTS = [f"{REPEATED}\n{prompt}" for prompt in demo_prompts(ROWS)]


def requests(sampling: Sampling, first: int, count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=f"{number}", prompt=PROMPTS[number % ROWS], sampling=sampling)
        for number in range(first, first + count)
    ]


def rows_of(engine: OfflineEngine, sampling: Sampling) -> dict[int, Completion]:
    return {int(row.request_id): row for row in engine.generate(requests(sampling, 0, ROWS))}


def tokens_of(rows: dict[int, Completion]) -> list[tuple[int, ...]]:
    return [row.token_ids for _, row in sorted(rows.items())]


def remember_limits(engine: OfflineEngine, rows: dict[int, Completion]) -> None:
    """Have the tuning find that the engine's own limits are the best for such rows: a trial is next."""
    facts, (limits, _) = engine.tuning_facts(), engine.limits()
    assert facts is not None
    assert facts.can_speculate
    prompts = [row.prompt_tokens for row in rows.values()]
    kind = TableKind(
        mean_prompt=fmean(prompts),
        mean_output=fmean(row.completion_tokens for row in rows.values()),
        prompt_spread=pstdev(prompts),
        shared_share=0.0,
    )
    remember(Path(facts.kept_in), (limits.step_tokens, limits.running_rows), kind)


@pytest.mark.long  # two engines of vLLM, each of which starts three times
@pytest.mark.timeout(1_200)  # a start may take minutes on busy cores
def test_rows_keep_their_tokens_while_a_replica_tries_speculation_and_when_all_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    greedy = Sampling(max_tokens=48, regex="[a-z ]{40,44}")
    sampled = Sampling(max_tokens=24, temperature=1.0, seed=7)
    with OfflineEngine(CONFIG) as engine:
        first = rows_of(engine, greedy)
        expected, expected_sampled = tokens_of(first), tokens_of(rows_of(engine, sampled))
        remember_limits(engine, first)
        tuning = LiveTuning(OneJob(), canary_rules=TRIED)
        rows: dict[int, Completion] = {}
        sent = 0

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
            assert "n-gram speculation is not tried" not in caplog.text, caplog.messages[-1]

        while not all(own["speculates"] and own["state"] == "up" for own in engine.stats().replicas):
            step(IN_FLIGHT)
        assert tuning.note.endswith(", taken")
        assert [own["restarts"] for own in engine.stats().replicas] == [1, 1]
        until = sent + IN_FLIGHT  # rows of which both replicas have some
        while len(rows) < until:
            step(IN_FLIGHT)
        while len(rows) < sent:
            step(0)
        differing = [number for number, row in rows.items() if row.token_ids != expected[number % ROWS]]
        assert not differing
        assert tokens_of(rows_of(engine, sampled)) == expected_sampled
        assert not all(own["speculates"] for own in engine.stats().replicas)
