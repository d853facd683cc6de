"""``pipemax-annotate``: read the command line, run the job, and turn failures into sentences and exit codes.

Exit codes: 0 done, 1 failed while running, 2 an error in the call or the input that the user can fix, 130 interrupted.
"""

import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from pipemax.wire import PACKAGE_VERSION, GenerationSpec
from pipemax_spark.annotate import checked_schema, engine_config
from pipemax_spark.errors import JobError, JobFailedError, OnError, cause_of
from pipemax_spark.job.options import JobOptions, driver_directory
from pipemax_spark.keywords import takes
from pipemax_spark.prompts import PromptSource

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich", add_completion=False)
log = logging.getLogger(__name__)

_INPUT, _PROMPT, _MODEL = "Input and output", "Prompt", "Model and generation"
_ROWS, _RUN = "Errors and reruns", "Run"
_LOG_WIDTH = 160
"""Columns of the report if no terminal gives its own width."""
_RESUME = "Finished chunks are committed; the same command goes on from there."


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pipemax-annotate {PACKAGE_VERSION}")
        raise typer.Exit


def _read_engine(file: Path) -> dict[str, Any]:
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


def _read_schema(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError) as error:
        raise JobError(f"response-format {str(file)!r} cannot be read as JSON: {error}") from error
    return checked_schema(text)


def _key_value(option: str) -> tuple[str, str]:
    key, separator, value = option.partition("=")
    if not separator:
        raise JobError(f"input-option {option!r} is not of the form KEY=VALUE")
    return key, value


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) == 0:
        raise JobError(f"commit-every is {text!r}; write it as 15m, 900s or 1h")
    return timedelta(seconds=float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """An option of the command, with the name, type and default of the field that it fills."""

    panel: str
    help: str
    given: Any = None
    """Its type on the command line, if that differs from the field's; its value is then None if it is not given."""
    show: Callable[[Any], str] | None = None
    """From the field's default to what is given for it."""
    read: Callable[[Any], Any] | None = None
    """Converts the given value into the field's value; ``JobError`` says what is wrong with it."""
    typer: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for ``typer.Option``."""


def _option(panel: str, text: str, **rest: Any) -> _Option:
    own = {name: rest.pop(name) for name in ("given", "show", "read") if name in rest}
    return _Option(panel=panel, help=text, typer=rest, **own)


_OPTIONS: dict[str, _Option] = {
    "input": _option(_INPUT, "Delta table, by path or name; or Parquet, CSV or JSON files, by path."),
    "output": _option(_INPUT, "Delta table, by path or name; made where it is missing."),
    "input_format": _option(_INPUT, "delta, parquet, csv or json; default: by what is there."),
    "input_option": _option(
        _INPUT,
        "KEY=VALUE for Spark's reader, such as sep=;. May be repeated.",
        given=list[str],
        read=lambda given: dict(map(_key_value, given)),
    ),
    "id_columns": _option(
        _INPUT,
        "Columns that tell rows apart, comma-separated; default: the whole row's content.",
        given=str,
        read=lambda given: tuple(name.strip() for name in given.split(",") if name.strip()),
    ),
    "limit": _option(_INPUT, "At most so many new rows in this run.", min=1),
    "incremental": _option(
        _INPUT, "Only what was appended to the input, a Delta table, since the last such run."
    ),
    "skip_changes": _option(
        _INPUT, "With --incremental: pass over commits that updated or deleted rows of the input."
    ),
    "prompt_column": _option(_PROMPT, "Column that is the prompt."),
    "messages_column": _option(_PROMPT, "Column of conversations, array<struct<role, content>>."),
    "template": _option(
        _PROMPT,
        "Prompt with {column} in it. {{ and }} are braces, \\n is a line break.",
        read=lambda given: given.replace("\\n", "\n"),
    ),
    "system": _option(_PROMPT, "System message before every prompt."),
    "overrides_column": _option(
        _PROMPT,
        "Column with a row's own max_tokens, temperature, top_p, top_k, seed or stop: a struct of any.",
    ),
    "model": _option(_MODEL, "Checkpoint directory or hub name; may stand in --engine instead.", given=str),
    "engine": _option(
        _MODEL, "Engine config, YAML; every field has a default.", given=Path, read=_read_engine
    ),
    "engine_python": _option(
        _MODEL, "Python of the environment with vLLM, on the executors; default: the tasks' own."
    ),
    "max_tokens": _option(_MODEL, "Most output tokens of a row.", min=1),
    "temperature": _option(_MODEL, "0 is greedy."),
    "top_p": _option(_MODEL, "Keep the likeliest tokens up to this share."),
    "top_k": _option(_MODEL, "Keep so many likeliest tokens; 0 keeps all."),
    "seed": _option(_MODEL, "Makes sampling repeatable."),
    "stop": _option(_MODEL, "Stop string. May be repeated.", given=list[str], read=tuple),
    "response_format": _option(
        _MODEL,
        "File with a JSON schema that every output must satisfy.",
        given=Path,
        read=_read_schema,
    ),
    "on_error": _option(
        _ROWS,
        "row: keep a failed row with its error; fail: end the job at the first one.",
        given=str,
        show=str,
        read=OnError.of,
    ),
    "max_error_rate": _option(
        _ROWS, "After 1,000 rows, a larger share of error rows ends the job.", min=0.0, max=1.0
    ),
    "retry_errors": _option(_ROWS, "Retry error rows of earlier runs."),
    "new_spec": _option(
        _ROWS, "Annotate all rows in a new way (model, prompt, schema, sampling) beside the old ones."
    ),
    "commit_every": _option(
        _RUN,
        "How often finished rows are committed, or less often to keep the engines fed: 15m, 900s, 1h.",
        given=str,
        show=lambda default: f"{default // timedelta(minutes=1)}m",
        read=_duration,
    ),
    "compact": _option(
        _RUN,
        "Compact the output's small files at the end, by Delta's OPTIMIZE; each chunk leaves one per task.",
    ),
    "group_by_prefix": _option(
        _RUN, "Sort the rows by prompt, so that the engine reads a beginning that many share once."
    ),
    "work_dir": _option(
        _RUN, "Storage for work in progress that all executors see; default: in the output's directory."
    ),
    "checkpoint": _option(
        _RUN, "Directory for the checkpoints of --incremental; default: in the work directory."
    ),
    "mlflow_experiment": _option(
        _RUN,
        "MLflow experiment, or '' to record nothing; the store is MLFLOW_TRACKING_URI, or next to the output.",
    ),
    "price_per_hour": _option(_RUN, "Of the whole cluster; shows what the run costs.", min=0.0),
    "collector_port": _option(
        _RUN,
        "Port of the driver to which engines report; default: one that is free. Name one where a firewall stands "
        "between executors and driver.",
        min=0,
        max=65535,
        show_default=False,
    ),
    "gold_column": _option(_RUN, "Column of right answers, for the schema's property of the same name."),
    "summary": _option(_RUN, "Write the totals to this file, as JSON."),
    "log_dir": _option(_RUN, "Logs; default: PIPEMAX_LOG_DIR, or logs beside the output.", given=Path),
    "dry_run": _option(_RUN, "Check everything, count rows and tokens, start no engine."),
}
"""Options by name, in the order of ``--help``."""


def _parameters(*kinds: type) -> list[inspect.Parameter]:
    """Return the command's parameters: ``_OPTIONS``, which fill the fields of ``kinds``, and ``--version``."""
    types = {name: kind for each in kinds for name, kind in get_type_hints(each).items()}
    defaults = {each.name: each.default for kind in kinds for each in fields(kind)}

    def parameter(name: str, option: _Option) -> inspect.Parameter:
        is_flag = option.given is None and types[name] is bool
        declared = typer.Option(
            *([f"--{name.replace('_', '-')}"] if is_flag else []),
            help=option.help,
            rich_help_panel=option.panel,
            **option.typer,
        )
        default = defaults.get(name, MISSING)
        if option.given is not None:
            default = None if option.show is None else option.show(default)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[types[name] if option.given is None else option.given | None, declared],
        )

    version = typer.Option(
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version.",
        rich_help_panel=_RUN,
    )
    return [
        *(parameter(name, option) for name, option in _OPTIONS.items()),
        inspect.Parameter(
            "version",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, version],
        ),
    ]


@app.command()
@takes(_parameters(JobOptions, PromptSource, GenerationSpec))
def annotate(**given: Any) -> None:
    """Annotate every row of a table with a language model, through Spark.

    The output has the input's columns and a struct, [b]annotation[/b]. Run the same command again after anything: it
    does what is left.

    [b]Examples[/b]

    pipemax-annotate --input tickets --output labelled --id-columns id --model org/name
    --template "Summarise: {body}" --max-tokens 100

    pipemax-annotate --input reviews.parquet --output out/reviews --prompt-column text --engine engine.yaml
    --response-format schema.json --dry-run
    """
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    del given["version"]  # it has ended the command, where it was given
    log_dir = (
        given.pop("log_dir")
        or os.environ.get("PIPEMAX_LOG_DIR")
        or driver_directory(given["output"]) / "logs"
    )
    logs = Path(log_dir).absolute()
    raise typer.Exit(_run(lambda: _job_options(given, logs), console, logs))


def _job_options(given: Mapping[str, Any], logs: Path) -> JobOptions:
    """Return the job's options. ``JobError`` says what is wrong with the call."""
    values = {}
    for name, value in given.items():
        if value is not None:
            read = _OPTIONS[name].read
            values[name] = value if read is None else read(value)
    engine = engine_config(values.pop("engine", None), values.pop("model", None))

    def taken(kind: type) -> dict[str, Any]:
        return {each.name: values.pop(each.name) for each in fields(kind) if each.name in values}

    return JobOptions(
        source=PromptSource(**taken(PromptSource)),
        engine=_with_absolute_model(engine),
        generation=GenerationSpec(**taken(GenerationSpec)),
        log_dir=logs,
        **values,
    )


def _with_absolute_model(engine: dict[str, Any]) -> dict[str, Any]:
    """Make local paths absolute, because servers run in a directory of their own."""
    paths = {
        name: str(Path(engine[name]).absolute())
        for name in ("model", "tokenizer")
        if isinstance(engine.get(name), str) and Path(engine[name]).is_dir()
    }
    return {**engine, **paths}


def main() -> None:
    """Run the command, and return after success instead of raising ``SystemExit``.

    A scheduler that calls this function may take any ``SystemExit`` for a failure.
    """
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise


def _run(make_options: Any, console: Console, logs: Path) -> int:
    """Run the job and return the exit code."""
    try:
        # Report a wrong call before anything is written, even a log.
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
    """Tell whether the error is Ctrl-C or its consequence.

    Under spark-submit the JVM gets Ctrl-C too and is gone, so calls to it fail.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def failure_text(error: BaseException) -> str:
    """Return the error as one sentence.

    For an exception that a task raised, it is that exception's own message, without Spark's and Python's traces.
    """
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
