"""Stages × GPUs a stage against the GPUs that there are."""

import re

import pytest

from pipemax.config import EngineConfig
from pipemax.node.gpus import pipeline_parallel_size


@pytest.mark.parametrize(
    ("asked", "tensor", "num_gpus", "stages"),
    [
        (None, 1, 0, 1),
        (3, 1, 0, 3),
        (None, 2, 0, 1),
        (2, 2, 0, 2),
        (None, 1, 8, 8),
        (None, 2, 8, 4),
        (None, 3, 8, 2),
        (2, 4, 8, 2),
    ],
)
def test_the_stages_are_as_asked_or_as_many_as_the_gpus_allow(
    asked: int | None, tensor: int, num_gpus: int, stages: int
) -> None:
    config = EngineConfig(model="any", pipeline_parallel_size=asked, tensor_parallel_size=tensor)
    assert pipeline_parallel_size(config, num_gpus=num_gpus) == stages


@pytest.mark.parametrize(("asked", "tensor", "needed"), [(8, 1, 8), (2, 2, 4), (None, 4, 4)])
def test_too_few_gpus_are_reported_with_both_degrees(
    asked: int | None, tensor: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    config = EngineConfig(model="any", pipeline_parallel_size=asked, tensor_parallel_size=tensor)
    told = (
        f"pipeline_parallel_size {asked or 1} × tensor_parallel_size {tensor} needs {needed} GPUs, and this executor "
        "has 2 (CUDA_VISIBLE_DEVICES=4,5)"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        pipeline_parallel_size(config, num_gpus=2)
