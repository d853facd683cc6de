"""``pipemax``: the engine's command line. It parses arguments and prints; the work is done in other packages."""

import os
import sys
from typing import Annotated, Any

import typer

from pipemax import __version__
from pipemax.cli.capacity import plan_capacity
from pipemax.cli.check_node import check_node
from pipemax.cli.doctor import doctor
from pipemax.cli.trace import trace_app
from pipemax.plain_help import PlainGroup, PlainTyper
from pipemax.removed import explain_option, removed_command


class _Commands(PlainGroup):
    """The commands; refuses removed commands and options with the sentence that names what replaces them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (replacement := removed_command(args[0])) is not None:
            ctx.fail(replacement)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            explain_option(error, ctx.invoked_subcommand or "")
            raise


app = PlainTyper(
    cls=_Commands,
    help="PipeMax: offline LLM inference over tables. `pipemax annotate` annotates a table with Spark.",
    no_args_is_help=True,
    add_completion=True,
)
_PLAN, _MACHINE, _STUDY = "Before you rent a node", "On a machine", "Study the scheduler"
app.command(rich_help_panel=_PLAN)(plan_capacity)
app.command(rich_help_panel=_MACHINE)(doctor)
app.command(rich_help_panel=_MACHINE)(check_node)
app.add_typer(trace_app, name="trace", rich_help_panel=_STUDY)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pipemax {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel=_MACHINE)
def preflight() -> None:
    """Check an engine config without loading the model.

    Reads a JSON request from standard input and writes the reply to standard output. A job runs this before it starts
    engines.
    """
    from pipemax.serve.preflight_checks import preflight as run_preflight
    from pipemax.wire import PreflightRequest

    # Libraries may print to standard output, but it must carry only the reply.
    reply_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    reply = run_preflight(PreflightRequest.from_bytes(sys.stdin.buffer.read()))
    with os.fdopen(reply_fd, "wb") as stdout:
        stdout.write(reply.to_bytes() + b"\n")
