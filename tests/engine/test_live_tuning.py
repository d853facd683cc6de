"""Stock vLLM tunes itself while it answers: every row once, with the tokens that it has without tuning."""

from itertools import cycle, islice
from pathlib import Path

import pytest

from pipemax.api import Completion, GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig
from pipemax.serve.flow.live_tuning import LiveTuning
from pipemax.tuning.rules import TuningRules
from tests.engine.conftest import DEFAULTS
from tests.engine.test_offline_engine import demo_prompts

PROMPTS = 60
QUICK = TuningRules(
    max_s=40.0,
    least_table_s=1.0,
    sweep_setting_s=0.6,
    block_s=1.5,
    residences=1.0,
    fewest_residences=1.0,
    worth=-1.0,
    worth_errors=0.0,
)
"""Every stage within a minute, and a race whatever the simulation says."""


class OneJob:
    def jobs(self) -> frozenset[str]:
        return frozenset({"job"})

    def share_left(self) -> int:
        return 1_000_000

    def traits(self) -> frozenset[str]:
        return frozenset()


@pytest.mark.long  # an engine of vLLM for a minute
def test_rows_come_once_and_with_the_same_tokens_while_the_engine_tunes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig.parse({**DEFAULTS, "policy": "vllm"})
    prompts = demo_prompts(PROMPTS)
    requests = (
        GenerationRequest(request_id=f"{n}", prompt=prompt, sampling=Sampling(max_tokens=24))
        for n, prompt in enumerate(cycle(prompts))
    )
    with OfflineEngine(config) as engine:
        expected = {
            int(row.request_id): row.token_ids for row in engine.generate([*islice(requests, PROMPTS)])
        }
        tuning = LiveTuning(OneJob(), rules=QUICK)
        rows: dict[int, Completion] = {}
        num_sent = PROMPTS
        while not tuning.note and len(rows) < 50_000:
            if num_sent - PROMPTS - len(rows) < 150:
                engine.submit([*islice(requests, 100)])
                num_sent += 100
            ended = engine.poll(0.1)
            for row in ended:
                assert rows.setdefault(int(row.request_id), row) is row, "each row comes once"
            tuning.learn(ended)
            tuning.see(engine, config)
        while len(rows) < num_sent - PROMPTS:
            rows |= {int(row.request_id): row for row in engine.poll(1.0)}
    assert tuning.note.startswith("Tuned: steps of ")
    assert [*(tmp_path / "pipemax" / "tunings").glob("model--*.yaml")]
    differing = [n for n, row in rows.items() if row.token_ids != expected[n % PROMPTS]]
    assert not differing
