"""A start that fails before vLLM has any process."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from pipemax.vllm_ext.launch.start import RunningVllm

DEMO_MODEL = Path(__file__).parents[4] / "examples" / "model"


def change_config(checkpoint: Path, **values: object) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def of_unknown_architecture(checkpoint: Path) -> None:
    change_config(checkpoint, architectures=["UnheardOfForCausalLM"])


def with_code_of_its_own(checkpoint: Path) -> None:
    change_config(checkpoint, model_type="unheard_of", auto_map={"AutoConfig": "configuration.Config"})


def without_its_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()


def without_its_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()


def test_an_argument_that_vllm_does_not_have_is_named_with_its_place_in_the_config() -> None:
    config = EngineConfig(model=str(DEMO_MODEL), policy="vllm", vllm={"quantizaton": "awq"})
    with pytest.raises(EngineStartError, match=r"vllm: .*'quantizaton' \(these are the arguments of vLLM 0"):
        RunningVllm.start(config)


@pytest.mark.parametrize(
    ("policy", "damage", "told", "remedy"),
    [
        (
            "pipemax",
            of_unknown_architecture,
            "['UnheardOfForCausalLM'] are not supported",
            "name another model",
        ),
        ("vllm", of_unknown_architecture, "['UnheardOfForCausalLM'] are not supported", "name another model"),
        ("vllm", with_code_of_its_own, "contains custom code", "set trust_remote_code: true"),
        ("vllm", without_its_config, "local directory specified", "the checkpoint's config.json"),
        ("vllm", without_its_tokenizer, "tokenizer", "weights and tokenizer"),
        ("vllm", shutil.rmtree, "'repo_name'", "a directory that every executor has"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_told_with_a_remedy(
    tmp_path: Path, policy: str, damage: Callable[[Path], None], told: str, remedy: str
) -> None:
    checkpoint = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, checkpoint)
    damage(checkpoint)
    with pytest.raises(EngineStartError) as raised:
        RunningVllm.start(EngineConfig(model=str(checkpoint), policy=policy, max_model_len=512))
    cause, _, advice = str(raised.value).partition(" Remedy: ")
    assert cause.startswith(f"model {str(checkpoint)!r} could not be loaded: ")
    assert told in cause
    assert remedy in advice
