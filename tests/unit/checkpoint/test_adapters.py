"""LoRA adapters as their directories describe them."""

import json
from pathlib import Path

import pytest

from pipemax.checkpoint.adapters import check_adapters, max_rank
from pipemax.config import EngineConfig


def config_with(directory: Path, ranks: dict[str, object]) -> EngineConfig:
    for name, rank in ranks.items():
        (directory / name).mkdir()
        (directory / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
        (directory / name / "adapter_model.safetensors").write_bytes(b"w")
    return EngineConfig(model="m", lora={name: str(directory / name) for name in ranks})


def test_the_largest_rank_counts_rounded_up_to_one_that_vllm_has(tmp_path: Path) -> None:
    config = config_with(tmp_path, {"a": 4, "b": 17})
    check_adapters(config)
    assert max_rank(config) == 32


@pytest.mark.parametrize(
    ("rank", "why"),
    [("16", "is '16'"), (0, "is 0"), (4096, "an adapter has rank 4096; vLLM takes at most 512")],
)
def test_a_rank_that_vllm_cannot_take_is_refused(rank: object, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        check_adapters(config_with(tmp_path, {"a": rank}))


def test_a_directory_that_is_no_adapter_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter 'a': .* cannot be read, or gives no rank"):
        check_adapters(EngineConfig(model="m", lora={"a": str(tmp_path)}))
    config = config_with(tmp_path, {"b": 8})
    (tmp_path / "b" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"adapter 'b': .* holds no weights"):
        check_adapters(config)
