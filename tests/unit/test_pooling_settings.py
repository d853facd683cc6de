"""Settings that mean nothing for a pooling task are refused by name."""

from typing import Any

import pytest

from pipemax.config import EngineConfig
from pipemax.generation import Sampling
from pipemax.wire import GenerationSpec


@pytest.mark.parametrize(
    "setting",
    [
        {"max_tokens": 5},
        {"temperature": 0.5},
        {"stop": ("x",)},
        {"seed": 1},
        {"response_format": "{}"},
        {"choice": ("a", "b")},
        {"regex": "a"},
        {"logprobs": True},
        {"n": 2},
        {"attempts": 2},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": "{}"},
    ],
)
@pytest.mark.parametrize("task", ["embed", "classify", "score"])
def test_settings_of_generation_are_refused_by_name(task: str, setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=f"task {task} generates no text, so {name} has no meaning"):
        Sampling(task=task, **setting)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"task": "rank"}, "task is 'rank', must be generate, embed, classify, score"),
        ({"dimensions": 8}, "dimensions is for the task embed, and the task is generate"),
        (
            {"task": "classify", "normalize": True},
            "normalize is for the task embed, and the task is classify",
        ),
        ({"truncate": True}, "truncate is for the tasks embed, classify, score"),
        ({"task": "embed", "dimensions": 0}, "dimensions is 0, must be at least 1"),
    ],
)
def test_settings_of_pooling_are_refused_elsewhere(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Sampling(**settings)


def test_a_pooling_task_has_no_system_message() -> None:
    with pytest.raises(ValueError, match="takes no system message"):
        GenerationSpec(task="embed", system="Be brief.").sampling()
    assert GenerationSpec(task="embed", dimensions=8, truncate=True, lora="a").sampling().is_pooling


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"policy": "pipemax"},
            "task: Value error, embed generates no tokens, so policy pipemax has nothing to schedule",
        ),
        (
            {"reasoning_parser": "qwen3"},
            "reasoning_parser: Value error, is only for generation, and the task is embed",
        ),
    ],
)
def test_an_engine_config_for_a_pooling_task_takes_stock_vllm_only(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineConfig.parse({"model": "m", "task": "embed"} | settings)


def test_an_engine_of_a_pooling_task_is_another_engine() -> None:
    ids = {
        EngineConfig.parse({"model": "m", "task": task}).engine_id()
        for task in ("generate", "embed", "score")
    }
    assert len(ids) == 3
