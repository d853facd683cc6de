"""The help of each command on a terminal of 80 columns."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pipemax_spark.cli import app, command

PIPEMAX = command()


def commands_of(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command with the words that call it."""
    yield path, group
    for name, listed in getattr(group, "commands", {}).items():
        yield from commands_of(listed, (*path, name))


COMMANDS = dict(commands_of(typer.main.get_command(PIPEMAX)))


def help_of(called: typer.Typer, words: tuple[str, ...]) -> list[str]:
    result = CliRunner().invoke(called, [*words, "--help"], env={"COLUMNS": "80"}, prog_name="pipemax")
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_80_columns_cuts_no_option_and_says_what_each_does(words: tuple[str, ...]) -> None:
    lines = help_of(PIPEMAX, words)
    assert max(map(len, lines)) <= 80
    texts = " ".join(" ".join(lines).split())
    shown = [line.split() for line in lines if line.startswith("  ") and line[2] != " "]
    for parameter in COMMANDS[words].params:
        if not parameter.hidden:
            words_of = (
                parameter.opts
                if parameter.param_type_name == "option"
                else [parameter.metavar or parameter.name]
            )
            names = [f"{name}," for name in words_of[:-1]] + [words_of[-1]]
            assert any(entry[: len(names)] == names for entry in shown), parameter.name
            assert " ".join(parameter.help.split()) in texts, parameter.name


def test_both_names_of_the_job_have_the_same_help() -> None:
    of_job, of_pipemax = help_of(app, ()), help_of(PIPEMAX, ("annotate",))
    other = of_job.index("Other options:")  # of an application that is one command also: its shell completion
    assert of_job[1:other] == of_pipemax[1 : of_pipemax.index("Other options:")]
