"""The demo model's smaller sibling is small, loads, and is clearly worse: what a cascade needs to be shown."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipemax.api import GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig
from tests.engine.conftest import DEFAULTS, DEMO_MODEL

SMALL_MODEL = DEMO_MODEL.parent / "model-small"
DEMO_TABLE = DEMO_MODEL.parent / "data" / "debian_packages.parquet"


def rows(every: int) -> list[dict[str, Any]]:
    return pq.read_table(DEMO_TABLE).to_pylist()[::every]


def prompt_of(row: dict[str, Any]) -> str:
    return f"Package: {row['package']}\nSummary: {row['summary']}\nDescription: {row['description']}"


@torch.inference_mode()
def answers_by_transformers(path: Path, prompts: list[str]) -> list[str]:
    """Return greedy answers, 64 at a time."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answers: list[str] = []
    for start in range(0, len(prompts), 64):
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts[start : start + 64]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        generated = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        answers += tokenizer.batch_decode(
            generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return answers


def accuracy(path: Path, table: list[dict[str, Any]]) -> float:
    answers = answers_by_transformers(path, [prompt_of(row) for row in table])
    right = [json.dumps({"section": row["section"]}) for row in table]
    return sum(map(str.__eq__, answers, right)) / len(table)


def test_it_is_at_most_two_and_a_half_megabytes() -> None:
    assert sum(file.stat().st_size for file in SMALL_MODEL.iterdir()) <= 2_500_000


def test_it_is_six_points_or_more_below_the_larger_model_and_no_guess() -> None:
    table = rows(every=4)
    small, large = accuracy(SMALL_MODEL, table), accuracy(DEMO_MODEL, table)
    assert 0.65 < small <= large - 0.06


@pytest.mark.long
def test_vllm_answers_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompts = [prompt_of(row) for row in rows(every=100)]
    config = EngineConfig.parse(DEFAULTS | {"model": str(SMALL_MODEL), "policy": "vllm"})
    with OfflineEngine(config) as engine:
        requests = [
            GenerationRequest(request_id=str(i), prompt=prompt, sampling=Sampling(max_tokens=16))
            for i, prompt in enumerate(prompts)
        ]
        texts = {completion.request_id: completion.text for completion in engine.generate(requests)}
    assert [texts[str(i)] for i in range(len(prompts))] == answers_by_transformers(SMALL_MODEL, prompts)
