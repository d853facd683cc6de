"""``pipemax trace``: explain what a recorded controller did, and why."""

from pathlib import Path
from typing import Annotated

import typer

from pipemax.cli.common import one_line_errors
from pipemax.plain_help import PlainTyper

trace_app = PlainTyper(help="Explain recorded decisions in words.", no_args_is_help=True)

TraceFile = Annotated[
    Path,
    typer.Argument(
        help="A trace of decisions: JSON lines, as `python -m lab.paper --decisions` writes them."
    ),
]


@trace_app.callback()
def _trace() -> None:
    pass


@trace_app.command()
def explain(file: TraceFile) -> None:
    """Explain in words what each step did and why: one line per step, and one for what happened before it."""
    from pipemax.control.decision_trace import explain as explain_trace

    with one_line_errors():
        for line in explain_trace(file):
            typer.echo(line)
