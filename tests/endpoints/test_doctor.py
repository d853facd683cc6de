"""``pipemax doctor --engine``: what an endpoint serves and can, and what keeps it from being used."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from pipemax.cli.app import app
from tests.endpoints.openai_server import openai_server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "engine.yaml"


def doctor(file: Path, config: dict[str, Any]) -> Result:
    file.write_text(yaml.safe_dump(config))
    return CliRunner().invoke(app, ["doctor", "--engine", str(file)])


def test_the_table_says_what_is_served_and_what_it_can_without_the_key(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDPOINT_KEY", "sk-secret")
    with openai_server(key="sk-secret") as server:
        result = doctor(file, server.config(api_key_env="ENDPOINT_KEY"))
    said = dict(line.strip().split("  ", 1) for line in result.output.splitlines() if line.startswith("  "))
    assert result.exit_code == 0
    assert said["serves"].strip() == "demo (root /models/demo, max_model_len 512), vLLM 0.32.0"
    assert said["chat"].strip().endswith("s for a small request")
    assert said["choices"].strip() == "yes, by structured_outputs"
    assert "sk-secret" not in result.output


def test_a_model_that_cannot_be_used_ends_with_status_1_and_the_reason(file: Path) -> None:
    with openai_server() as server:
        result = doctor(file, server.config() | {"model": "other"})
    assert result.exit_code == 1
    assert f"To mend: endpoint http://127.0.0.1:{server.port} serves no model 'other'" in result.output


def test_a_key_that_is_not_set_is_named(file: Path) -> None:
    result = doctor(
        file,
        {"endpoint": "http://127.0.0.1/v1", "model": "m", "model_revision": "1", "api_key_env": "NO_KEY"},
    )
    assert result.exit_code == 2
    assert "the environment variable NO_KEY is not set" in result.output


def test_an_engine_of_ones_own_is_checked_by_another_command(file: Path) -> None:
    result = doctor(file, {"model": "m"})
    assert result.exit_code == 2
    assert "names no endpoint" in result.output
    assert f"pipemax check-node --engine {file}" in result.output


@pytest.mark.parametrize(
    "command", [["check-node", "--engine"], ["plan-capacity", "--rows", "9", "--node", "8xL4", "--model"]]
)
def test_commands_about_ones_own_engines_say_that_an_endpoint_is_none(file: Path, command: list[str]) -> None:
    file.write_text("endpoint: http://127.0.0.1/v1\nmodel: m\n")
    result = CliRunner().invoke(app, [*command, str(file)])
    assert result.exit_code == 2
    assert "whose server decides how its model runs" in result.output.replace("\n", " ")


def test_fields_of_ones_own_engines_are_named_as_the_servers(file: Path) -> None:
    config = {"endpoint": "http://127.0.0.1/v1", "model": "m", "model_revision": "1"}
    result = doctor(file, config | {"vllm": {}, "tensor_parallel_size": 2})
    assert "tensor_parallel_size, vllm: an endpoint's server decides these; leave them out" in result.output
    assert "the name of your version is model_revision" in doctor(file, config | {"revision": "main"}).output
