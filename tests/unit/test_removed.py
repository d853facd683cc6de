"""What was removed is refused with the sentence that names what replaces it, and a page lists it all."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pipemax_spark.cli
from pipemax.config import EngineConfig
from pipemax.removed import COMMANDS, KEYS, OPTIONS
from pipemax_spark import annotate, annotate_table
from pipemax_spark.cli import command

PAGE = Path(__file__).parents[2] / "docs" / "deploy" / "upgrade.md"
INSTEAD = "the weather decides"


def refusal(program: str, *arguments: str) -> str:
    """What a command line ends with, on one line, without the frame around it."""
    app = command() if program == "pipemax" else pipemax_spark.cli.app
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "1000", "TERMINAL_WIDTH": "1000"})
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_removed_command_names_what_replaces_it(name: str) -> None:
    told = f"pipemax {name} was removed: {COMMANDS[name]}."
    assert told in refusal("pipemax", name)
    assert told in refusal("pipemax", name, "--input", "x")


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.startswith("annotate ")])
def test_a_removed_option_names_what_replaces_it(option: str) -> None:
    name, flag = option.split()
    for arguments in ([flag], [flag, "7"], [f"{flag}=7"]):
        assert f"{flag} was removed: {OPTIONS[option]}." in refusal("pipemax", name, *arguments)


@pytest.mark.parametrize("name", KEYS)
def test_a_removed_key_names_what_replaces_it(name: str, tmp_path: Path) -> None:
    values = 0
    for part in reversed(name.split(".")):
        values = {part: values}
    with pytest.raises(ValueError, match=re.escape(f"{name} was removed: {KEYS[name]}.")):
        EngineConfig.parse({"model": "m", **values})


def test_a_removed_option_of_the_job_is_refused_by_each_way_to_give_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OPTIONS, "annotate --old-way", INSTEAD)
    told = f"--old-way was removed: {INSTEAD}."
    for arguments in (["--old-way"], ["--input", "t", "--old-way", "3"], ["--old-way=3"]):
        assert told in refusal("pipemax", "annotate", *arguments)
        assert told in refusal("pipemax-annotate", *arguments)
    for function in (annotate, annotate_table):
        with pytest.raises(TypeError, match=f"does not take 'old_way': old_way was removed: {INSTEAD}"):
            function(old_way=3)


def test_what_never_was_is_told_as_before() -> None:
    assert "No such command 'run-bath'" in refusal("pipemax", "run-bath")
    assert "No such option: --never-was" in refusal("pipemax", "plan-capacity", "--never-was")
    assert "No such option: --never-was" in refusal("pipemax-annotate", "--never-was")
    with pytest.raises(ValueError, match="unknown field 'never_was'"):
        EngineConfig.parse({"model": "m", "never_was": 1})


def test_the_page_lists_what_was_removed() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## What was removed")[2].partition("\n## ")[0]
    rows = [
        [cell.replace("`", "").strip() for cell in line.strip("|").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    assert rows == [
        *([f"pipemax {name}", instead] for name, instead in COMMANDS.items()),
        *([f"pipemax {option}", instead] for option, instead in OPTIONS.items()),
        *([f"{key}: in the engine config", instead] for key, instead in KEYS.items()),
    ]
