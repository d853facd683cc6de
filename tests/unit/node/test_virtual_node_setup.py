"""What an engine config says of a virtual node, with its profiles."""

import pytest

from pipemax.config import EngineConfig
from pipemax.domain.workload import WorkloadSpec
from pipemax.node.virtual_node import VirtualNodeSetup


def setup(engine: dict[str, object] | None = None, **node: object) -> VirtualNodeSetup:
    virtual = {"node": "rtx5090x8", "model": "llama2-70b", "output_tokens": 16, **node}
    config = {"model": "m", "policy": "vllm", "virtual_node": virtual, **(engine or {})}
    return VirtualNodeSetup.of(EngineConfig.parse(config))


def test_each_gpu_of_the_node_is_a_stage_unless_the_config_says_otherwise() -> None:
    assert setup().parallelism.pipeline == 8
    assert setup({"tensor_parallel_size": 2}).parallelism.pipeline == 4
    assert setup({"pipeline_parallel_size": 6}).parallelism.pipeline == 6


def test_answers_have_a_number_of_tokens_or_a_workload_s() -> None:
    assert setup().output_tokens == 16
    assert isinstance(setup(output_tokens="sharegpt").output_tokens, WorkloadSpec)


def test_it_says_that_nothing_is_computed() -> None:
    assert str(setup()) == "the virtual node rtx5090x8 as if it ran llama2-70b: nothing was computed"


@pytest.mark.parametrize(
    ("engine", "node", "told"),
    [
        ({}, {"node": "rtx6090"}, "virtual_node: no node profile 'rtx6090'; there are h100x8,"),
        ({}, {"model": "gpt"}, "virtual_node: no model profile 'gpt'"),
        ({}, {"output_tokens": "chats"}, "virtual_node: no workload profile 'chats'"),
        ({}, {"node": "/none/node.yaml"}, "virtual_node: .*No such file"),
        ({"pipeline_parallel_size": 9}, {}, "needs 9 GPUs, and the virtual node rtx5090x8 has 8"),
        ({"pipeline_parallel_size": 1}, {}, "llama2-70b does not fit on rtx5090x8"),
    ],
)
def test_what_is_wrong_with_it_is_said(engine: dict[str, object], node: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        setup(engine, **node)
