"""The check of tokens says what it is about to do, and is kept for all models of an architecture."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from pipemax.config import EngineConfig
from pipemax.vllm_ext.launch.known_check import CheckPart, Verdict, kept_tokens
from pipemax.vllm_ext.launch.vllm_config import make_vllm_config
from pipemax.vllm_ext.node_check.node import check_tokens
from pipemax.vllm_ext.node_check.trial_config import TrialConfigs
from tests.unit.vllm_ext.launch.demo_config import two_stages

PART = CheckPart(name="tokens", verdict=Verdict.PASSED, detail="24 of 24")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_it_says_how_long_it_takes_before_it_begins_and_another_model_of_the_kind_knows_it(
    tmp_path: Path,
) -> None:
    said: list[str] = []

    def compare(configs: TrialConfigs) -> CheckPart:
        said.append("compared")
        return PART

    config = two_stages()
    vllm_config = make_vllm_config(config)
    assert kept_tokens(vllm_config) is None
    check = check_tokens(config, vllm_config, said.append, compare=compare)
    assert check.parts == (PART,)
    announced, compared = said
    assert "on 2 random layers of LlamaForCausalLM: one to three minutes each" in announced
    assert compared == "compared"

    other_model = LlamaConfig(
        architectures=["LlamaForCausalLM"], num_hidden_layers=4, hidden_size=64, num_attention_heads=2
    )
    other_model.save_pretrained(tmp_path)
    other = EngineConfig.parse({"model": str(tmp_path), "policy": "pipemax", "max_model_len": 256})
    assert kept_tokens(make_vllm_config(other)) == check


def test_a_model_that_cannot_be_cut_is_inconclusive_and_starts_no_engine() -> None:
    config = two_stages()
    vllm_config = make_vllm_config(config)
    vllm_config.model_config.hf_config.auto_map = {"AutoModelForCausalLM": "modeling_own.Own"}
    said: list[str] = []
    check = check_tokens(config, vllm_config, said.append, compare=lambda _: pytest.fail("compared"))
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "LlamaForCausalLM cannot be cut to a few layers: the checkpoint brings code" in check.warning()
    assert said == []
