"""An engine that serves rows over a virtual node, as far as no core is needed."""

import pytest

from pipemax.config import EngineConfig
from pipemax.presets import load_workload
from pipemax.vllm_ext.launch.vllm_config import make_vllm_config
from pipemax.vllm_ext.rehearsal.served import AnswerLengths

VIRTUAL = {"node": "rtx5090x8", "model": "llama2-70b", "output_tokens": 16}


def test_answers_are_as_long_as_the_workload_says_and_the_same_for_the_same_prompt() -> None:
    workload = load_workload("sharegpt")
    first, second = AnswerLengths(workload), AnswerLengths(workload)
    prompts = [[number, 7, 3 * number] for number in range(5_000)]
    lengths = [first.of(prompt) for prompt in prompts]
    assert lengths == [second.of(tuple(prompt)) for prompt in prompts]
    assert sum(lengths) / len(lengths) == pytest.approx(workload.output.mean, rel=0.1)
    assert min(lengths) >= 1


def test_a_number_is_the_length_of_every_answer() -> None:
    assert {AnswerLengths(16).of([number]) for number in range(50)} == {16}


def test_calibration_and_the_check_of_a_node_load_no_model_in_the_place_of_a_virtual_node() -> None:
    config = EngineConfig.parse({"model": "m", "policy": "pipemax", "virtual_node": VIRTUAL})
    with pytest.raises(ValueError, match="names a virtual_node, which has nothing that could be loaded"):
        make_vllm_config(config)
