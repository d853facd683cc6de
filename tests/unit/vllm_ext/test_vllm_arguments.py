"""The list of arguments that no answer depends on, by the vLLM that it was made for."""

from dataclasses import fields

from vllm.engine.arg_utils import EngineArgs

from pipemax_spark.vllm_arguments import WITHOUT_EFFECT_ON_ANSWERS


def test_every_argument_that_is_left_out_of_the_spec_is_one_of_this_vllm() -> None:
    assert {argument.name for argument in fields(EngineArgs)} >= WITHOUT_EFFECT_ON_ANSWERS
