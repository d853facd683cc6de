"""The type of the KV cache: what vLLM is given, what its bytes are counted as, and which types PipeMax refuses."""

import json
import shutil
from pathlib import Path

import pytest

from pipemax.vllm_ext.launch.forecast import runtime_settings
from pipemax.vllm_ext.launch.known_calibration import kv_bytes_per_token
from pipemax.vllm_ext.launch.vllm_config import make_vllm_config
from tests.unit.vllm_ext.launch.demo_config import DEMO_MODEL
from tests.unit.vllm_ext.launch.demo_config import two_stages as config

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize(
    ("field", "arguments", "given"),
    [
        ("auto", {}, "auto"),
        ("fp8", {}, "fp8"),
        ("fp8", {"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ("auto", {"kv_cache_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_vllm_is_given_the_type_of_the_kv_cache(field: str, arguments: dict[str, str], given: str) -> None:
    vllm_config = make_vllm_config(config(dtype="float32", kv_cache_dtype=field, vllm=arguments))
    assert vllm_config.cache_config.cache_dtype == given
    of_float32 = make_vllm_config(config(dtype="float32"))
    value_bytes = {"auto": 4, "bfloat16": 2}.get(given, 1)
    assert [4 * own for own in kv_bytes_per_token(vllm_config)] == [
        value_bytes * own for own in kv_bytes_per_token(of_float32)
    ]


def test_the_host_pool_holds_four_times_the_tokens_of_fp8_kv_that_it_holds_of_float32() -> None:
    def host_kv_tokens(**values: object) -> int:
        vllm_config = make_vllm_config(config(dtype="float32", host_kv_gib=0.5, **values))
        return runtime_settings(vllm_config).host_kv_tokens

    assert host_kv_tokens(kv_cache_dtype="fp8") == 4 * host_kv_tokens()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"kv_cache_dtype": "int8_per_token_head"}, "its KV cache is int8_per_token_head, and only auto, "),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "its KV cache is fp8_per_token_head, and only auto, "),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
            "some layers keep their KV in another",
        ),
    ],
)
def test_kv_whose_blocks_hold_more_than_keys_and_values_of_one_type_is_refused(
    arguments: dict[str, object], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        make_vllm_config(config(vllm=arguments))


def test_a_checkpoint_that_asks_for_fp8_kv_is_counted_with_it_under_auto(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
    }
    values = json.loads((model / "config.json").read_text())
    values["quantization_config"] = quantization | {"kv_cache_scheme": scheme}
    (model / "config.json").write_text(json.dumps(values))
    of_16_bits = kv_bytes_per_token(make_vllm_config(config()))
    asks = make_vllm_config(config(model=str(model)))
    assert [2 * own for own in kv_bytes_per_token(asks)] == of_16_bits
    kept = make_vllm_config(config(model=str(model), vllm={"kv_cache_dtype": "bfloat16"}))
    assert kv_bytes_per_token(kept) == of_16_bits
