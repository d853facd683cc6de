"""``pipemax-annotate``: reads the command line, runs the job, and turns failures into sentences and exit codes.

Exit codes: 0 done, 1 failed while running, 2 something to mend in the call or the input, 130 interrupted.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pipemax.wire import PACKAGE_VERSION, GenerationSpec
from pipemax_spark.errors import JobError, JobFailedError, cause_of

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich", add_completion=False)
log = logging.getLogger(__name__)

_INPUT, _PROMPT, _MODEL = "Input and output", "Prompt", "Model and generation"
_ROWS, _RUN = "Errors and reruns", "Run"
_LOG_WIDTH = 160
"""Columns of the report where no terminal says its own."""
_RESUME = "Finished chunks are committed; the same command goes on from there."


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pipemax-annotate {PACKAGE_VERSION}")
        raise typer.Exit


def _option(panel: str, text: str, **rest: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **rest)


@app.command()
def annotate(
    input: Annotated[  # noqa: A002
        str, _option(_INPUT, "Delta table, by path or name; or Parquet, CSV or JSON files, by path.")
    ],
    output: Annotated[str, _option(_INPUT, "Delta table, by path or name; made where it is missing.")],
    input_format: Annotated[
        str | None, _option(_INPUT, "delta, parquet, csv or json; default: by what is there.")
    ] = None,
    input_option: Annotated[
        list[str] | None, _option(_INPUT, "KEY=VALUE for Spark's reader, such as sep=;. May be repeated.")
    ] = None,
    id_columns: Annotated[
        str | None,
        _option(_INPUT, "Columns that tell rows apart, comma-separated; default: the whole row's content."),
    ] = None,
    limit: Annotated[int | None, _option(_INPUT, "At most so many new rows in this run.", min=1)] = None,
    incremental: Annotated[
        bool,
        typer.Option(
            "--incremental",
            help="Only what was appended to the input, a Delta table, since the last such run.",
            rich_help_panel=_INPUT,
        ),
    ] = False,
    skip_changes: Annotated[
        bool,
        typer.Option(
            "--skip-changes",
            help="With --incremental: pass over commits that updated or deleted rows of the input.",
            rich_help_panel=_INPUT,
        ),
    ] = False,
    prompt_column: Annotated[str | None, _option(_PROMPT, "Column that is the prompt.")] = None,
    messages_column: Annotated[
        str | None, _option(_PROMPT, "Column of conversations, array<struct<role, content>>.")
    ] = None,
    template: Annotated[
        str | None,
        _option(_PROMPT, "Prompt with {column} in it. {{ and }} are braces, \\n is a line break."),
    ] = None,
    system: Annotated[str | None, _option(_PROMPT, "System message before every prompt.")] = None,
    overrides_column: Annotated[
        str | None,
        _option(
            _PROMPT,
            "Column with a row's own max_tokens, temperature, top_p, top_k, seed or stop: a struct of any.",
        ),
    ] = None,
    model: Annotated[
        str | None, _option(_MODEL, "Checkpoint directory or hub name; may stand in --engine instead.")
    ] = None,
    engine: Annotated[Path | None, _option(_MODEL, "Engine config, YAML; every field has a default.")] = None,
    engine_python: Annotated[
        str | None,
        _option(_MODEL, "Python of the environment with vLLM, on the executors; default: the tasks' own."),
    ] = None,
    max_tokens: Annotated[int, _option(_MODEL, "Most output tokens of a row.", min=1)] = 256,
    temperature: Annotated[float, _option(_MODEL, "0 is greedy.")] = 0.0,
    top_p: Annotated[float, _option(_MODEL, "Keep the likeliest tokens up to this share.")] = 1.0,
    top_k: Annotated[int, _option(_MODEL, "Keep so many likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int | None, _option(_MODEL, "Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, _option(_MODEL, "Stop string. May be repeated.")] = None,
    response_format: Annotated[
        Path | None, _option(_MODEL, "File with a JSON schema that every output must satisfy.")
    ] = None,
    on_error: Annotated[
        str, _option(_ROWS, "row: keep a failed row with its error; fail: end the job at the first one.")
    ] = "row",
    max_error_rate: Annotated[
        float,
        _option(_ROWS, "After 1,000 rows, a larger share of error rows ends the job.", min=0.0, max=1.0),
    ] = 0.5,
    retry_errors: Annotated[
        bool,
        typer.Option("--retry-errors", help="Retry error rows of earlier runs.", rich_help_panel=_ROWS),
    ] = False,
    new_spec: Annotated[
        bool,
        typer.Option(
            "--new-spec",
            help="Annotate all rows in a new way (model, prompt, schema, sampling) beside the old ones.",
            rich_help_panel=_ROWS,
        ),
    ] = False,
    commit_every: Annotated[
        str,
        _option(
            _RUN,
            "How often finished rows are committed, or less often to keep the engines fed: 15m, 900s, 1h.",
        ),
    ] = "15m",
    group_by_prefix: Annotated[
        bool,
        typer.Option(
            "--group-by-prefix",
            help="Sort the rows by prompt, so that the engine reads a beginning that many share once.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    work_dir: Annotated[
        str | None,
        _option(
            _RUN, "Storage for work in progress that all executors see; default: in the output's directory."
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        _option(_RUN, "Directory for the checkpoints of --incremental; default: in the work directory."),
    ] = None,
    mlflow_experiment: Annotated[
        str, _option(_RUN, "MLflow experiment; the store is MLFLOW_TRACKING_URI, or beside the output.")
    ] = "pipemax",
    price_per_hour: Annotated[
        float | None, _option(_RUN, "Of the whole cluster; shows what the run costs.", min=0.0)
    ] = None,
    collector_port: Annotated[
        int,
        _option(
            _RUN,
            "Port of the driver to which engines report; default: one that is free. Name one where a firewall stands "
            "between executors and driver.",
            min=0,
            max=65535,
            show_default=False,
        ),
    ] = 0,
    gold_column: Annotated[
        str | None, _option(_RUN, "Column of right answers, for the schema's property of the same name.")
    ] = None,
    summary: Annotated[Path | None, _option(_RUN, "Write the totals to this file, as JSON.")] = None,
    log_dir: Annotated[
        Path | None, _option(_RUN, "Logs; default: PIPEMAX_LOG_DIR, or logs beside the output.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, count rows and tokens, start no engine.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Annotate every row of a table with a language model, through Spark.

    The output has the input's columns and a struct, [b]annotation[/b]. Run the same command again after anything: it
    does what is left.

    [b]Examples[/b]

    pipemax-annotate --input tickets --output labelled --id-columns id --model org/name
    --template "Summarise: {body}" --max-tokens 100

    pipemax-annotate --input reviews.parquet --output out/reviews --prompt-column text --engine engine.yaml
    --response-format schema.json --dry-run
    """
    from pipemax_spark.job.options import driver_directory

    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    logs = log_dir or Path(os.environ.get("PIPEMAX_LOG_DIR") or driver_directory(output) / "logs")
    logs = logs.absolute()

    def make_options() -> Any:
        from pipemax_spark.annotate import engine_config, fails_on_error, schema_text
        from pipemax_spark.job.options import JobOptions
        from pipemax_spark.prompts import PromptSource

        return JobOptions(
            input=input,
            output=output,
            source=PromptSource(
                prompt_column=prompt_column,
                messages_column=messages_column,
                template=None if template is None else template.replace("\\n", "\n"),
            ),
            engine=_with_absolute_model(engine_config(_read_engine(engine), model)),
            generation=GenerationSpec(
                system=system,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                stop=tuple(stop or ()),
                seed=seed,
                response_format=schema_text(_read_schema(response_format)),
            ),
            overrides_column=overrides_column,
            id_columns=tuple(name.strip() for name in (id_columns or "").split(",") if name.strip()),
            input_format=input_format,
            input_options=dict(_key_value(option) for option in input_option or ()),
            engine_python=engine_python,
            fails_on_error=fails_on_error(on_error),
            max_error_rate=max_error_rate,
            retries_errors=retry_errors,
            allows_new_spec=new_spec,
            groups_by_prefix=group_by_prefix,
            work_dir=work_dir,
            commit_every_s=_seconds(commit_every),
            limit=limit,
            is_incremental=incremental,
            checkpoint=checkpoint,
            skips_changes=skip_changes,
            mlflow_experiment=mlflow_experiment,
            price_per_hour=price_per_hour,
            collector_port=collector_port,
            gold_column=gold_column,
            summary_file=summary,
            is_dry_run=dry_run,
            log_dir=logs,
        )

    raise typer.Exit(_run(make_options, console, logs))


def main() -> None:
    """The command; comes back after success, for a scheduler that calls it may take any SystemExit for a failure."""
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise


def _run(make_options: Any, console: Console, logs: Path) -> int:
    """The exit code."""
    try:
        # What is wrong with the call is said before anything is written, be it a log.
        options = make_options()
        _log_to_file(logs)
        from pipemax_spark.job.annotation_job import AnnotationJob
        from pipemax_spark.spark_session import get_session

        spark = get_session("pipemax-annotate", log_dir=logs)
        AnnotationJob(spark, options, console).run()
        # Not in a ``finally``: after a failure the process ends at once, and the JVM with it.
        if "DATABRICKS_RUNTIME_VERSION" not in os.environ:  # there the session is the cluster's
            spark.stop()
        return 0
    except JobError as error:
        log.info("refused", exc_info=True)
        return _fail(str(error), 2)
    except BaseException as error:
        if _is_interrupt(error):
            return _fail(f"Interrupted. {_RESUME}", 130)
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        log.exception("the job failed")
        return _fail(f"{failure_text(error)}\n{_RESUME} Details: {logs}", 1)


def _fail(text: str, code: int) -> int:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"Error: {text}", style="bold red" if console.is_terminal else None, markup=False)
    return code


def _is_interrupt(error: BaseException) -> bool:
    """Ctrl-C; or what failed after it, for under spark-submit the JVM gets it too and is gone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def failure_text(error: BaseException) -> str:
    """One sentence: for what a task raised, that exception's own, out of Spark's and Python's traces around it."""
    text = str(error)
    if isinstance(error, JobFailedError):
        return text
    for name in ("EngineSessionError", "RowFailedError"):
        if found := re.findall(rf"^(?:\S+\.)?{name}: (.+)$", text, re.MULTILINE):
            return str(found[-1])
    return cause_of(error)


def _log_to_file(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(directory / "annotate.log", encoding="utf-8")
    except OSError as error:
        raise JobError(f"logs cannot be written to {str(directory)!r}: {error}; give --log-dir") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("py4j").setLevel(logging.WARNING)


def _read_engine(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise JobError(
            f"engine config {str(file)!r} cannot be read: {' '.join(str(error).split())}"
        ) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise JobError(
            f"engine config {str(file)!r} holds a {type(values).__name__}; write 'name: value' lines"
        )
    return values


def _with_absolute_model(engine: dict[str, Any]) -> dict[str, Any]:
    """Servers run in a directory of their own: a path that is right here must be right there."""
    paths = {
        name: str(Path(engine[name]).absolute())
        for name in ("model", "tokenizer")
        if isinstance(engine.get(name), str) and Path(engine[name]).is_dir()
    }
    return {**engine, **paths}


def _read_schema(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError) as error:
        raise JobError(f"response-format {str(file)!r} cannot be read as JSON: {error}") from error
    return text


def _key_value(option: str) -> tuple[str, str]:
    key, separator, value = option.partition("=")
    if not separator:
        raise JobError(f"input-option {option!r} is not of the form KEY=VALUE")
    return key, value


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) == 0:
        raise JobError(f"commit-every is {text!r}; write it as 15m, 900s or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
