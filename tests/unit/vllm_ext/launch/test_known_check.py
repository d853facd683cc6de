"""What is kept of a node's check, and what an engine does that finds it at its start."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from pipemax.vllm_ext.launch import known_check
from pipemax.vllm_ext.launch.forecast import forecast
from pipemax.vllm_ext.launch.known_check import (
    CheckPart,
    NodeCheck,
    Verdict,
    check_path,
    keep_check,
    kept_check,
    tokens_path,
)
from pipemax.vllm_ext.launch.vllm_config import make_vllm_config
from pipemax.vllm_ext.node_check.run import check_at_start
from tests.unit.vllm_ext.launch.demo_config import two_stages as config

pytestmark = pytest.mark.usefixtures("cache")

NO_ENGINE: Any = None
"""What is known already needs none."""


def node_check(name: str, verdict: Verdict) -> NodeCheck:
    parts = (
        CheckPart(name="copies", verdict=Verdict.PASSED, detail="32 blocks"),
        CheckPart(name=name, verdict=verdict, detail="3 of 24 prompts differ"),
    )
    return NodeCheck(
        device="here", model="demo", checked="today", seconds=2.5, parts=parts, figures={"GB/s": 4.5}
    )


def kept(own: EngineConfig, verdict: Verdict, *, part: str = "poison", tokens: Verdict | None = None) -> Any:
    vllm_config = make_vllm_config(own)
    assert kept_check(own, vllm_config) is None
    keep_check(check_path(own, vllm_config), node_check(part, verdict))
    if tokens is not None:
        keep_check(tokens_path(vllm_config), node_check("tokens", tokens))
    return vllm_config


def test_a_check_is_found_at_the_next_start_and_another_driver_asks_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config = kept(config(), Verdict.PASSED)
    assert kept_check(config(host_kv_gib=0.5), vllm_config) == node_check("poison", Verdict.PASSED)
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 580.1\nGCC\n")
    monkeypatch.setattr(known_check, "_DRIVER", driver)
    assert kept_check(config(), vllm_config) is None


def test_where_the_check_passed_an_engine_starts_without_another() -> None:
    vllm_config = kept(config(), Verdict.PASSED)
    check = check_at_start(NO_ENGINE, vllm_config, config())
    assert check is not None
    assert check.verdict is Verdict.PASSED
    assert not forecast(config()).refusal


def test_tokens_that_tell_nothing_cost_a_warning_and_auto_may_run_pipemax(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vllm_config = kept(config(), Verdict.PASSED, tokens=Verdict.INCONCLUSIVE)
    check_at_start(NO_ENGINE, vllm_config, config())
    (warning,) = [record for record in caplog.records if record.name.startswith("pipemax")]
    assert "inconclusive (tokens: 3 of 24 prompts differ)" in warning.getMessage()
    assert not forecast(config()).refusal


def test_poison_that_tells_nothing_costs_a_warning_and_auto_takes_stock_vllm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vllm_config = kept(config(), Verdict.INCONCLUSIVE)
    check_at_start(NO_ENGINE, vllm_config, config())
    (warning,) = [record for record in caplog.records if record.name.startswith("pipemax")]
    assert "inconclusive (poison: 3 of 24 prompts differ)" in warning.getMessage()
    assert "inconclusive (poison" in forecast(config()).refusal


def test_tokens_that_differ_refuse_pipemax_whatever_the_engine_has_shown() -> None:
    vllm_config = kept(config(), Verdict.PASSED, tokens=Verdict.FAILED)
    with pytest.raises(EngineStartError, match=r"failed PipeMax's check \(tokens: 3 of 24"):
        check_at_start(NO_ENGINE, vllm_config, config())
    assert "tokens: 3 of 24 prompts differ" in forecast(config()).refusal


def test_a_check_of_the_old_form_is_as_none() -> None:
    vllm_config = kept(config(), Verdict.FAILED)
    path = check_path(config(), vllm_config)
    part = {"name": "tokens", "passed": False, "detail": "0 of 13 prompts the same"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parts": [part]}))
    assert kept_check(config(), vllm_config) is None
    assert not forecast(config()).refusal


def test_where_the_check_failed_pipemax_does_not_start_and_auto_knows_it_before() -> None:
    vllm_config = kept(config(), Verdict.FAILED)
    told = r"failed PipeMax's check \(poison: 3 of 24 prompts differ\); `pipemax check-node` repeats it"
    with pytest.raises(EngineStartError, match=f"{told}, policy: vllm runs without"):
        check_at_start(NO_ENGINE, vllm_config, config())
    assert "poison: 3 of 24 prompts differ" in forecast(config()).refusal


def test_an_engine_that_is_told_not_to_check_does_not() -> None:
    own = config(check_at_start=False)
    vllm_config = kept(own, Verdict.FAILED)
    check_at_start(NO_ENGINE, vllm_config, own)
    assert not forecast(own).refusal


def test_a_torn_file_is_as_none(caplog: pytest.LogCaptureFixture) -> None:
    vllm_config = kept(config(), Verdict.FAILED)
    check_path(config(), vllm_config).write_text('{"device": "here"}')
    assert kept_check(config(), vllm_config) is None
    assert "is made again" in caplog.text
