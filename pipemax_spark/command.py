"""``pipemax``: one command for everything, the job on Spark and the engine's own commands.

``pipemax annotate`` is ``pipemax-annotate``. The other commands are the engine's, and load what they need when they
run. So the command is there in an environment of Spark's side only, too.
"""

import sys
from functools import cache

import typer

from pipemax_spark import cli


def main() -> None:
    """Run the command. ``pipemax annotate`` loads nothing of the engine."""
    if sys.argv[1:2] == ["annotate"]:
        del sys.argv[1]
        cli.main("pipemax annotate")
    else:
        command()()


@cache
def command() -> typer.Typer:
    """Return the engine's command with the job's as its first subcommand."""
    from pipemax.cli.app import app

    app.command("annotate", rich_help_panel="Annotate a table")(cli.annotate)
    app.registered_commands.insert(0, app.registered_commands.pop())
    return app
