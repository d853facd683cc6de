"""The tokens' part of a node's check, with an engine whose rounding depends on how many prompts run at once."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pipemax.vllm_ext.node_check import run
from pipemax.vllm_ext.node_check.answers import Answer

NOISE = 0.0012
"""Of a prompt that runs by itself: matrices with one row take other kernels."""


class RoundingEngine(run._TokenCheck):
    """Answers as a random model of 93 million parameters did in float32, whatever happens to its KV."""

    fault: float = 0.0
    """Added to the log probabilities while the pool is small."""

    def _answer(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        noise = NOISE if len(prompts) == 1 else 0.0001
        return [Answer(tokens=(1, 2), logprobs=({1: -0.5}, {2: -0.5 + noise})) for _ in prompts]

    def _answer_evicted(self) -> list[Answer]:
        found = self._answer(self._prompts[:1])[0]
        wrong = Answer(tokens=(1, 2), logprobs=({1: -0.5}, {2: -0.5 + NOISE + self.fault}))
        return [wrong if self.fault else found for _ in self._prompts]


@pytest.fixture
def token_check(monkeypatch: pytest.MonkeyPatch) -> RoundingEngine:
    monkeypatch.setattr(run, "resize_gpu", lambda *_: None)
    monkeypatch.setattr(run, "poison_prefetches", lambda *_, is_on: None)
    counts = {"evictions": 20.0, "prefetches": 20.0, "prefetched_blocks": 40.0, "stall_s": 0.0}
    monkeypatch.setattr(run, "copy_counts", lambda _: counts)
    copies = [SimpleNamespace(stage_s=[0.1, 0.1])]
    monkeypatch.setattr(run, "take_profile", lambda _: SimpleNamespace(copies=copies))
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32, num_gpu_blocks=60),
        model_config=SimpleNamespace(max_model_len=512, get_vocab_size=lambda: 512),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        additional_config={},
    )
    monkeypatch.setattr(run, "runtime_settings", lambda _: SimpleNamespace(host_blocks=lambda _: 500))
    engine: Any = None
    return RoundingEngine(engine, config, 24)


def test_what_rounding_does_to_few_prompts_at_once_is_no_fault(token_check: RoundingEngine) -> None:
    parts = token_check.run({})
    assert [part.name for part in parts if not part.passed] == []


def test_what_goes_beyond_it_is_one(token_check: RoundingEngine) -> None:
    token_check.fault = 0.01
    parts = token_check.run({})
    assert [part.name for part in parts if not part.passed] == ["tokens, prefetched over poison", "tokens"]
