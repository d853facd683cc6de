"""What a tuner is told of a started engine: whether n-gram speculation would keep the tokens of its rows."""

import json
from pathlib import Path

from pipemax.config import EngineConfig
from pipemax.vllm_ext.engine.live_limits import tuning_facts
from pipemax.vllm_ext.launch.vllm_config import make_vllm_config
from tests.unit.vllm_ext.launch.demo_config import DEMO_MODEL

_HYBRID = Path(__file__).parents[3] / "fakes" / "model_configs" / "qwen3-next-80b-a3b.json"


def can_speculate(config: EngineConfig) -> bool:
    return tuning_facts(config, make_vllm_config(config)).can_speculate


def test_a_model_without_recurrent_layers_may_speculate_unless_the_user_has_decided() -> None:
    plain = {"model": DEMO_MODEL, "policy": "vllm", "max_model_len": 512}
    chosen = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2}}
    assert can_speculate(EngineConfig.parse(plain))
    assert not can_speculate(EngineConfig.parse({**plain, "vllm": chosen}))


def test_a_hybrid_may_not_for_vllm_s_recurrent_states_lose_accepted_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(_HYBRID.read_text(encoding="utf-8"), encoding="utf-8")
    assert "linear" in json.dumps(json.loads(_HYBRID.read_text(encoding="utf-8")))
    config = {"model": str(tmp_path), "policy": "vllm", "max_model_len": 512}
    assert not can_speculate(EngineConfig.parse({**config, "vllm": {"skip_tokenizer_init": True}}))
