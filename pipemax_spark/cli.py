"""``pipemax annotate``, ``try``, ``tune``, ``compare``: read the command line, run it, turn failures into exit codes.

Exit codes: 0 done, 1 failed while running, 2 an error in the call or the input that the user can fix, 3 ended by a
limit on cost, time or tokens, 4 by its canary, 130 interrupted.
``docs/guide/ends.md`` lists every end.
"""

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pipemax.plain_help import PlainCommand, PlainTyper
from pipemax.removed import explain_option
from pipemax_spark.errors import CanaryError, JobError, failure_text, is_interrupt
from pipemax_spark.job.arguments import OPTIONS, job_options, log_directory, log_handler
from pipemax_spark.job.compare import COMPARED, DEFAULT_ROWS, CompareOptions, run_comparison, two_templates
from pipemax_spark.job.limits import LIMITS
from pipemax_spark.job.option_values import read_names, with_new_spec
from pipemax_spark.job.parameters import command_parameters
from pipemax_spark.job.trial import UNUSED, TrialOptions, asked_template, run_trial
from pipemax_spark.job.tune import run_tuning
from pipemax_spark.options import JobOptions
from pipemax_spark.report.lossy_stream import drop_unwritten, lossy
from pipemax_spark.report.summary import Summary
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.argument_types import takes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

app = PlainTyper()
try_app = PlainTyper()
tune_app = PlainTyper()
compare_app = PlainTyper()
forget_app = PlainTyper()
log = logging.getLogger(__name__)

_OPTIONAL, _HIDDEN = UNUSED | {"input"}, UNUSED | {"no_sample"}
"""The job's options that ``pipemax try`` and ``tune`` do without, and those that their help leaves out."""
_Table = Annotated[
    str | None, typer.Argument(metavar="INPUT", help="The input; the same as --input.", show_default=False)
]
_LIMIT_REACHED, _CANARY_MOVED = 3, 4
_Work = Callable[["SparkSession", Terminal], object]
_RESUME = "Finished chunks are committed; run the same command again to continue."


class _Annotate(PlainCommand):
    """The command, which tells what replaces an option that was removed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, with_new_spec(args))
        except Exception as error:
            explain_option(error, "annotate")
            raise


@app.command(cls=_Annotate)
@takes(command_parameters())
def annotate(**arguments: Any) -> None:
    r"""Annotate every row of a table with a language model, through Spark.

    The output has the input's columns and a struct column, annotation. Whatever ends a run, run the same command
    again: it annotates only the rows that are left.

    For example:

      pipemax annotate --input tickets --output labelled --id-columns id \
          --model org/name --template "Summarise: {body}" --max-tokens 100

      pipemax annotate --input reviews.parquet --output out/reviews \
          --prompt-column text --engine engine.yaml \
          --response-format schema.json --dry-run
    """
    del arguments["version"]  # if it was given, it has already ended the command
    logs = log_directory(arguments.pop("log_dir"), arguments["output"])
    try:
        raise typer.Exit(_exit_code(lambda: _run(arguments, logs), logs, advice=_RESUME))
    finally:
        drop_unwritten()


@try_app.command(name="try", cls=_Annotate)
@takes(command_parameters(optional=_OPTIONAL, hidden=_HIDDEN))
def try_prompt(
    table: _Table = None,
    rows: Annotated[
        int, typer.Option(min=1, max=1000, help="How many rows to answer: the first ones of the input.")
    ] = 20,
    once: Annotated[
        bool, typer.Option("--once", help="End after the first prompt, and ask for no other template.")
    ] = False,
    **arguments: Any,
) -> None:
    r"""Try a prompt on the first rows of a table, and see prompt and answer side by side.

    Takes the options of `pipemax annotate`, and writes nothing: those about the output are ignored. Spark and the
    engine run on this machine. The engine stays for one template after the other, until Ctrl-D, and then ends.

      pipemax try tickets.parquet --model org/name --max-tokens 100 \
          --template "Summarise: {body}"
    """
    del arguments["version"]

    def prepared(job: JobOptions) -> _Work:
        options = TrialOptions(job=job, rows=rows, once=once)
        return lambda spark, terminal: run_trial(spark, options, terminal, lambda: asked_template(terminal))

    _on_some_rows("try", table, arguments, prepared)


@tune_app.command(name="tune", cls=_Annotate)
@takes(command_parameters(optional=_OPTIONAL, hidden=_HIDDEN))
def tune(
    table: _Table = None,
    rows: Annotated[
        int, typer.Option(min=10, max=10_000, help="How many rows to answer: the first ones of the input.")
    ] = 300,
    **arguments: Any,
) -> None:
    r"""Measure what settings that change answers would gain: FP8 KV, FP8 weights, n-gram speculation.

    The same rows are answered by one engine after the other, each with one more line in its config, and in the end once
    more without. Printed are the rates, the share of answers that stayed the same, and the line for your engine config.
    Nothing is written or changed.

      pipemax tune tickets.parquet --model org/name --max-tokens 100 \
          --template "Summarise: {body}"
    """
    del arguments["version"]

    def prepared(job: JobOptions) -> _Work:
        options = TrialOptions(job=job, rows=rows, once=True)
        return lambda spark, terminal: run_tuning(spark, options, terminal)

    _on_some_rows("tune", table, arguments, prepared)


@compare_app.command(name="compare", cls=_Annotate)
@takes(
    command_parameters(optional=_OPTIONAL, hidden=(UNUSED - COMPARED) | {"prompt_column", "messages_column"})
)
def compare(
    table: _Table = None,
    template: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompt with {column} placeholders; give two.",
            rich_help_panel=OPTIONS["template"].panel,
            show_default=False,
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, max=10_000, help="How many rows to draw.")] = DEFAULT_ROWS,
    draw_seed: Annotated[int, typer.Option(help="Another seed draws other rows.")] = 0,
    page: Annotated[
        str, typer.Option(help="File for the page of rows that differ; '' writes none.")
    ] = "compare.html",
    **arguments: Any,
) -> None:
    r"""Compare two prompts on the same rows of a table: where answers differ, which is right, and what each costs.

    One engine on this machine answers the rows under both, and ends. Nothing is written but the page.

      pipemax compare tickets.parquet --model org/name --gold-column label \
          --choice bug --choice praise \
          --template "Is this praise? {body}" --template "{body}\nBug or praise?"
    """
    del arguments["version"]
    read = OPTIONS["template"].read or str

    def prepared(job: JobOptions) -> _Work:
        options = CompareOptions(
            job=job, other_template=second, rows=rows, draw_seed=draw_seed, page=page or None
        )
        return lambda spark, terminal: run_comparison(spark, options, terminal)

    try:
        first, second = (read(text) for text in two_templates(template or ()))
    except JobError as error:
        raise typer.BadParameter(str(error)) from error
    _on_some_rows("compare", table, {"template": first, **arguments}, prepared, unused=UNUSED - COMPARED)


@forget_app.command(name="forget")
def forget(
    output: Annotated[str, typer.Option(help="The job's output.")],
    id_columns: Annotated[str, typer.Option(help="Columns that identify a row, comma-separated.")],
    ids: Annotated[
        str | None, typer.Option(help="File with an id on each line; CSV for several columns.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="SQL condition on the output's rows, in place of ids.")
    ] = None,
    work_dir: Annotated[str | None, typer.Option(help="As the jobs had it.")] = None,
    log_dir: Annotated[str | None, typer.Option(help="As the jobs had it.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Forget the rows; without it they are counted.")] = False,
) -> None:
    r"""Remove rows from a job's output and from all that its runs wrote: work directory, pages, logs, MLflow.

    Without --yes it says where the rows are, and changes nothing.

      pipemax forget --output labelled --id-columns id --ids ids.txt
    """
    with tempfile.TemporaryDirectory(prefix="pipemax-forget-") as own_logs:

        def run() -> None:
            from pipemax_spark.job.forget import ForgetOptions
            from pipemax_spark.job.forget import forget as forget_rows

            rows: dict[str, Any] = {"id_columns": read_names(id_columns), "ids": ids, "where": where}
            options = ForgetOptions(
                output=output, **rows, work_dir=work_dir, log_dir=log_dir, is_confirmed=yes
            )
            spark = _sessions("pipemax-forget", Path(own_logs))()
            forget_rows(spark, options, Terminal.standard())
            _stop(spark)

        raise typer.Exit(_exit_code(run, Path(own_logs), advice="Run the same command again."))


def _on_some_rows(
    name: str,
    table: str | None,
    arguments: dict[str, Any],
    prepared: Callable[[JobOptions], _Work],
    *,
    unused: frozenset[str] = UNUSED,
) -> None:
    """Do a command's work on some rows of an input, on this machine; its logs go once it has succeeded."""
    if table is not None and arguments["input"] not in (None, table):
        raise typer.BadParameter(f"the input is {table!r}, and --input is {arguments['input']!r}; give one")
    arguments["input"] = table or arguments["input"]
    if arguments["input"] is None:
        raise typer.BadParameter("no input is named; give a table or files, as INPUT or with --input")
    log_dir = arguments.pop("log_dir") or os.environ.get("PIPEMAX_LOG_DIR")
    logs = Path(log_dir or tempfile.mkdtemp(prefix=f"pipemax-{name}-")).absolute()

    def run() -> None:
        ignored = [option for option in arguments if option in unused and arguments[option] is not None]
        used = {option: value for option, value in arguments.items() if option not in unused}
        session = _sessions(f"pipemax-{name}", logs, on_this_machine=True)
        work = prepared(_read_options({**used, "output": ""}, logs, session))
        terminal = Terminal.standard()
        if ignored:
            names = ", ".join(f"--{option.replace('_', '-')}" for option in ignored)
            terminal.say("Ignored", f"{names}: {name} writes no table and answers some rows only")
        with terminal.doing("starting Spark"):
            spark = session()
        work(spark, terminal)
        _stop(spark)

    code = 1
    try:
        code = _exit_code(run, logs)
        raise typer.Exit(code)
    finally:
        if log_dir is None and code in (0, 2):
            shutil.rmtree(logs, ignore_errors=True)
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


def main(name: str | None = None, commands: typer.Typer = app) -> None:
    """Run the command under its own name or the given one, and return after success instead of raising ``SystemExit``.

    A scheduler that calls this function may take any ``SystemExit`` for a failure.
    """
    try:
        commands(prog_name=name)
    except SystemExit as end:
        if end.code:
            raise


def _sessions(name: str, logs: Path, *, on_this_machine: bool = False) -> Callable[[], "SparkSession"]:
    """Return the function that starts the session at its first call, and returns it."""

    @cache
    def session() -> "SparkSession":
        from pipemax_spark.spark.session import get_session

        _log_to_file(logs)
        return get_session(name, log_dir=logs, on_this_machine=on_this_machine)

    return session


def _run(arguments: Mapping[str, Any], logs: Path) -> int:
    """Run the job and return the exit code."""
    session = _sessions("pipemax-annotate", logs)
    # Report a wrong call before anything is written, even a log.
    options = _read_options(arguments, logs, session)
    terminal = Terminal.standard()
    terminal.say("Job", f"{options.input} to {options.output}")
    with terminal.doing("starting Spark"):
        spark = session()
    from pipemax_spark.job.cascade import run_job

    summary = run_job(spark, options, terminal)
    _stop(spark)
    return exit_status(summary, options)


def exit_status(summary: Summary | None, options: JobOptions) -> int:
    """Return the exit status of a job that has raised nothing: 3 if a limit on cost, time or tokens has ended it."""
    is_over = summary is not None and summary.ended_by in LIMITS
    return _LIMIT_REACHED if is_over and not options.budget_is_success else 0


def _stop(spark: "SparkSession") -> None:
    """Stop the session after success: after a failure the process ends at once, and the JVM with it."""
    if "DATABRICKS_RUNTIME_VERSION" not in os.environ:  # there the session belongs to the cluster
        spark.stop()


def _exit_code(work: Callable[[], int | None], logs: Path, *, advice: str = "") -> int:
    """Do the work and return its exit code, or 0; a failure becomes a sentence, with ``advice`` behind it."""
    try:
        return work() or 0
    except JobError as error:
        log.info("refused", exc_info=True)
        return _fail(str(error), 2)
    except BaseException as error:
        if is_interrupt(error):
            return _fail(f"Interrupted. {advice}".rstrip(), 130)
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        log.exception("%s failed", work)
        is_canary = isinstance(error, CanaryError)  # its text says how to go on
        details = f"{'' if is_canary else advice} Details: {logs}".lstrip()
        return _fail("\n".join([failure_text(error), details]), _CANARY_MOVED if is_canary else 1)


def _fail(text: str, code: int) -> int:
    Terminal(Console(file=lossy("stderr"))).error(text)
    return code


def _log_to_file(directory: Path) -> None:
    logging.basicConfig(level=logging.INFO, handlers=[log_handler(directory)], force=True)
    logging.captureWarnings(True)
    logging.getLogger("py4j").setLevel(logging.WARNING)


def pipemax() -> None:
    """Run the command ``pipemax``. ``pipemax annotate`` is ``pipemax-annotate``.

    Neither it nor ``pipemax try``, ``tune`` and ``compare`` load anything of the engine.
    """
    apps = {"annotate": app, "try": try_app, "tune": tune_app, "compare": compare_app, "forget": forget_app}
    commands = apps.get("".join(sys.argv[1:2]))
    if commands is not None:
        main(f"pipemax {sys.argv.pop(1)}", commands)
    else:
        command()()


@cache
def command() -> typer.Typer:
    """Return the engine's command with the job's as its first subcommands.

    The other commands load what they need when they run, so an environment of Spark's side only has it too.
    """
    from pipemax.cli.app import app

    panel = "Annotate a table"
    app.command("annotate", rich_help_panel=panel)(annotate)
    app.command("try", rich_help_panel=panel)(try_prompt)
    app.command("tune", rich_help_panel=panel)(tune)
    app.command("compare", rich_help_panel=panel)(compare)
    app.command("forget", rich_help_panel=panel)(forget)
    app.registered_commands = [*app.registered_commands[-5:], *app.registered_commands[:-5]]
    return app
