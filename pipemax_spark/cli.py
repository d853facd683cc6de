"""``pipemax-annotate``: read the command line, run the job, and turn failures into sentences and exit codes.

Exit codes: 0 done, 1 failed while running, 2 an error in the call or the input that the user can fix, 130 interrupted.
``docs/guide/ends.md`` lists every end.
"""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand

from pipemax.removed import explain_option
from pipemax.wire import PACKAGE_VERSION, GenerationSpec
from pipemax_spark.errors import JobError, failure_text, is_interrupt
from pipemax_spark.job.arguments import OPTIONS, Option, job_options, log_directory, log_handler
from pipemax_spark.options import JobOptions
from pipemax_spark.report.lossy_stream import drop_unwritten, lossy
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.keywords import takes
from pipemax_spark.request.prompts import PromptSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
log = logging.getLogger(__name__)

_RESUME = "Finished chunks are committed; run the same command again to continue."


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pipemax-annotate {PACKAGE_VERSION}")
        raise typer.Exit


def _parameters(*kinds: type) -> list[inspect.Parameter]:
    """Return the command's parameters: ``OPTIONS``, which fill the fields of ``kinds``, and ``--version``."""
    types = {name: kind for owner in kinds for name, kind in get_type_hints(owner).items()}
    defaults = {field.name: field.default for kind in kinds for field in fields(kind)}

    def parameter(name: str, option: Option) -> inspect.Parameter:
        is_flag = option.cli_type is None and types[name] is bool
        declared = typer.Option(
            *([f"--{name.replace('_', '-')}"] if is_flag else []),
            help=option.help,
            rich_help_panel=option.panel,
            **option.typer,
        )
        default = defaults.get(name, MISSING)
        if option.cli_type is not None:
            default = None if option.show is None else option.show(default)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[
                types[name] if option.cli_type is None else option.cli_type | None, declared
            ],
        )

    version = typer.Option(
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version.",
        rich_help_panel=OPTIONS["dry_run"].panel,
    )
    return [
        *(parameter(name, option) for name, option in OPTIONS.items()),
        inspect.Parameter(
            "version",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, version],
        ),
    ]


class _Annotate(TyperCommand):
    """The command, which tells what replaces an option that was removed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            explain_option(error, "annotate")
            raise


@app.command(cls=_Annotate)
@takes(_parameters(JobOptions, PromptSource, GenerationSpec))
def annotate(**arguments: Any) -> None:
    """Annotate every row of a table with a language model, through Spark.

    The output has the input's columns and a struct column, [b]annotation[/b]. Whatever ends a run, run the same command
    again: it annotates only the rows that are left.

    [b]Examples[/b]

    pipemax annotate --input tickets --output labelled --id-columns id --model org/name
    --template "Summarise: {body}" --max-tokens 100

    pipemax annotate --input reviews.parquet --output out/reviews --prompt-column text --engine engine.yaml
    --response-format schema.json --dry-run
    """
    del arguments["version"]  # if it was given, it has already ended the command
    logs = log_directory(arguments.pop("log_dir"), arguments["output"])
    try:
        raise typer.Exit(_run(arguments, logs))
    finally:
        drop_unwritten()


def _read_options(
    arguments: Mapping[str, Any], logs: Path, session: Callable[[], "SparkSession"]
) -> JobOptions:
    """Return the job's options.

    ``session`` is called only if an option needs it: for a file on remote storage, or a Spark type.
    """
    values = {}
    for name, value in arguments.items():
        if value is None:
            continue
        option = OPTIONS[name]
        if option.read_with_session is not None:
            values[name] = option.read_with_session(value, session)
        else:
            values[name] = value if option.read is None else option.read(value)
    return job_options(values, log_dir=logs)


def main(name: str | None = None) -> None:
    """Run the command under its own name or the given one, and return after success instead of raising ``SystemExit``.

    A scheduler that calls this function may take any ``SystemExit`` for a failure.
    """
    try:
        app(prog_name=name)
    except SystemExit as end:
        if end.code:
            raise


def _run(arguments: Mapping[str, Any], logs: Path) -> int:
    """Run the job and return the exit code."""

    @cache
    def session() -> "SparkSession":
        from pipemax_spark.spark.session import get_session

        _log_to_file(logs)
        return get_session("pipemax-annotate", log_dir=logs)

    try:
        # Report a wrong call before anything is written, even a log.
        options = _read_options(arguments, logs, session)
        terminal = Terminal.standard()
        terminal.say("Job", f"{options.input} to {options.output}")
        with terminal.doing("starting Spark"):
            spark = session()
        from pipemax_spark.job.annotation_job import AnnotationJob

        AnnotationJob(spark, options, terminal).run()
        # Not in a ``finally``: after a failure the process ends at once, and the JVM with it.
        if "DATABRICKS_RUNTIME_VERSION" not in os.environ:  # there the session belongs to the cluster
            spark.stop()
        return 0
    except JobError as error:
        log.info("refused", exc_info=True)
        return _fail(str(error), 2)
    except BaseException as error:
        if is_interrupt(error):
            return _fail(f"Interrupted. {_RESUME}", 130)
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        log.exception("the job failed")
        return _fail(f"{failure_text(error)}\n{_RESUME} Details: {logs}", 1)


def _fail(text: str, code: int) -> int:
    console = Console(file=lossy("stderr"), soft_wrap=True, highlight=False)
    console.print(f"Error: {text}", style="bold red" if console.is_terminal else None, markup=False)
    return code


def _log_to_file(directory: Path) -> None:
    logging.basicConfig(level=logging.INFO, handlers=[log_handler(directory)], force=True)
    logging.captureWarnings(True)
    logging.getLogger("py4j").setLevel(logging.WARNING)


def pipemax() -> None:
    """Run the command ``pipemax``. ``pipemax annotate`` is ``pipemax-annotate``, and loads nothing of the engine."""
    if sys.argv[1:2] == ["annotate"]:
        del sys.argv[1]
        main("pipemax annotate")
    else:
        command()()


@cache
def command() -> typer.Typer:
    """Return the engine's command with the job's as its first subcommand.

    The other commands load what they need when they run, so an environment of Spark's side only has it too.
    """
    from pipemax.cli.app import app

    app.command("annotate", rich_help_panel="Annotate a table")(annotate)
    app.registered_commands.insert(0, app.registered_commands.pop())
    return app
