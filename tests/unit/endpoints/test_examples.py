"""The engine configs in ``examples/engines`` are whole and short, say what was tried, and hold no key."""

from pathlib import Path

import pytest
import yaml

from pipemax.endpoint_config import EndpointConfig, parse_config
from pipemax.endpoint_keys import secret_variables

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "engines").glob("*.yaml"))
VARIABLES = {
    "azure-openai": ("AZURE_OPENAI_API_KEY",),
    "litellm": ("LITELLM_API_KEY",),
    "llama-cpp": (),
    "openai": ("OPENAI_API_KEY",),
    "vllm": (),
}


def test_there_is_an_example_for_each_kind_of_server() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(VARIABLES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_config_of_ten_lines_that_says_what_was_tried(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    assert len(values) <= 10
    assert any(line.startswith(("# Tried: ", "# Not tried: ")) for line in text.splitlines())
    variables = VARIABLES[path.stem]
    assert secret_variables(values) == variables
    config = parse_config(values)
    assert isinstance(config, EndpointConfig)
    assert config.model_revision is not None
    config = config.with_keys(dict.fromkeys(variables, "the-key"))
    for address in config.endpoint:
        assert sum("the-key" in text for text in config.headers_of(address).values()) == len(variables)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_an_example_leaves_commented_out_is_valid_too(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    options = [line.removeprefix("# ") for line in lines if line.startswith("# ") and ": " in line]
    named = [line for line in options if line.partition(":")[0] in EndpointConfig.model_fields]
    EndpointConfig.parse(yaml.safe_load("\n".join([*lines, *named])))
