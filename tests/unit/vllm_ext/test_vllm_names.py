"""Each argument of this vLLM has its place in an engine config."""

from dataclasses import fields

from vllm.engine.arg_utils import EngineArgs

from pipemax.vllm_names import CHANGE_ANSWERS, MOVED_TO_SPEED


def test_every_public_argument_of_this_vllm_is_known_to_change_answers_or_not_to() -> None:
    """One that a later vLLM adds must be looked at: it belongs to the list, or it may stand under ``vllm_speed``."""
    public = {argument.name for argument in fields(EngineArgs) if not argument.name.startswith("_")}
    assert public == CHANGE_ANSWERS | MOVED_TO_SPEED
    assert not CHANGE_ANSWERS & MOVED_TO_SPEED
