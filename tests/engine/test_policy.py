"""What an engine knows of itself after its start, and which policy it took."""

import pytest

from pipemax.api import OfflineEngine
from pipemax.config import EngineConfig, RowLengths
from pipemax.policy.row_sample import choose_policy
from pipemax.vllm_ext.launch.forecast import forecast
from pipemax.vllm_ext.launch.known_check import Verdict, kept_check
from pipemax.vllm_ext.launch.vllm_config import make_vllm_config
from tests.engine.conftest import DEFAULTS, POLICIES


def test_an_engine_of_one_stage_takes_stock_vllm_and_says_why(engine: OfflineEngine) -> None:
    if engine.measured is not None:
        pytest.skip("an engine of two stages, whose config names its policy")
    assert engine.policy_choice.chosen == "vllm"
    assert engine.policy_choice.reason.startswith("with one pipeline stage no batch waits")
    assert engine.stats().policy["chosen"] == "vllm"


def test_an_engine_under_pipemax_measures_itself_once_and_is_known_and_chosen_by_from_then_on(
    engine: OfflineEngine,
) -> None:
    if engine.measured is None:
        pytest.skip("an engine of one stage, which has nothing to measure")
    assert len(engine.measured.stages) == 2
    for stage in engine.measured.stages:
        assert 0 < stage.decode_time.seconds(8, 800) < 10
        assert stage.prefill_time.seconds(256, 256 * 128) > 0
        assert stage.h2d_bytes_per_s > 1e6
    expected = forecast(EngineConfig.parse(DEFAULTS | POLICIES["pipemax on two stages"]))
    assert expected.engine == engine.measured, "known from the cache, before another engine starts"
    lengths = RowLengths.model_validate({"prompt_tokens": [30, 60, 90], "max_tokens": 40})
    choice = choose_policy(engine.measured, lengths)
    assert choice.predicted_tokens_per_s.keys() == {"pipemax", "vllm"}
    assert min(choice.predicted_tokens_per_s.values()) > 0


def test_an_engine_under_pipemax_has_checked_its_copies_and_prefetches_on_this_machine(
    engine: OfflineEngine,
) -> None:
    if engine.measured is None:
        pytest.skip("an engine under stock vLLM, which copies nothing")
    own = EngineConfig.parse(DEFAULTS | POLICIES["pipemax on two stages"])
    check = kept_check(own, make_vllm_config(own))
    assert check is not None
    assert check.verdict is Verdict.PASSED, check.parts
    assert [part.name for part in check.parts] == ["copies", "poison"]
