"""The options of a job as users give them: their words, how a given value is read, and ``JobOptions`` made of them.

The command (``cli``) and ``annotate_table`` (``table``) take the same options. Names, types and defaults are those of
the fields of ``JobOptions``, ``PromptSource`` and ``GenerationSpec``.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax.wire import GenerationSpec
from pipemax_spark.dataframe import engine_config
from pipemax_spark.errors import JobError, OnError
from pipemax_spark.job.options import JobOptions, driver_directory
from pipemax_spark.prompts import PromptSource
from pipemax_spark.storage.hadoop import read_file
from pipemax_spark.structured_output import is_inline, response_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    Session = Callable[[], SparkSession]

_INPUT, _PROMPT, _MODEL = "Input and output", "Prompt", "Model and generation"
_ROWS, _RUN = "Errors and reruns", "Run"
_LOG_BYTES = 64 * 2**20
"""Maximum size of ``annotate.log``, and of ``annotate.log.1`` with what came before."""


def read_engine(file: str, text: str) -> dict[str, Any]:
    """Return the engine config that this file's text holds. Raise ``JobError`` if it holds none."""
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JobError(f"engine config {file!r} cannot be read: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise JobError(f"engine config {file!r} holds a {type(values).__name__}; write 'name: value' lines")
    return values


def read_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of columns, which are comma-separated if they come as one string."""
    names = given.split(",") if isinstance(given, str) else given
    return tuple(name.strip() for name in names if name.strip())


def read_duration(given: str | timedelta) -> timedelta:
    """Return the time of ``commit_every``. Raise ``JobError`` if the text is none."""
    if isinstance(given, timedelta):
        return given
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", given.strip())
    if match is None or float(match[1]) == 0:
        raise JobError(f"commit-every is {given!r}; write it as 15m, 900s or 1h")
    return timedelta(seconds=float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]])


def _read_engine_file(file: str, session: "Session") -> dict[str, Any]:
    return read_engine(file, read_file(file, session, option="engine"))


def _read_response_format(given: str, session: "Session") -> str | None:
    text = given if is_inline(given) else read_file(given, session, option="response_format")
    return response_schema(text, session)


def _key_value(option: str) -> tuple[str, str]:
    key, separator, value = option.partition("=")
    if not separator:
        raise JobError(f"input-option {option!r} is not of the form KEY=VALUE")
    return key, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of the command, with the name, type and default of the field that it fills."""

    panel: str
    help: str
    given: Any = None
    """Its type on the command line, if that differs from the field's; its value is then None if it is not given."""
    show: Callable[[Any], str] | None = None
    """From the field's default to what is given for it."""
    read: Callable[[Any], Any] | None = None
    """Converts the given value into the field's value; ``JobError`` says what is wrong with it."""
    read_with_session: "Callable[[str, Session], Any] | None" = None
    """Converts the given value, in place of ``read``; calls for a session only if it needs one."""
    typer: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for ``typer.Option``."""


def _option(panel: str, text: str, **rest: Any) -> Option:
    own = {name: rest.pop(name) for name in ("given", "show", "read", "read_with_session") if name in rest}
    return Option(panel=panel, help=text, typer=rest, **own)


OPTIONS: dict[str, Option] = {
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
        read=read_names,
    ),
    "where": _option(_INPUT, "Only input rows that this SQL condition takes, such as lang = 'en'."),
    "select": _option(
        _INPUT,
        "Input columns that go to the output, comma-separated; default: all. Needs --id-columns.",
        given=str,
        read=read_names,
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
        _MODEL,
        "File with the engine config, YAML; every field has a default.",
        given=str,
        read_with_session=_read_engine_file,
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
        "What every output must be: a JSON schema, ai_query's envelope of one, or a Spark type such as "
        "STRUCT<label: STRING>; as text, or the file that holds it.",
        given=str,
        read_with_session=_read_response_format,
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
    "redo_changed": _option(
        _ROWS,
        "Annotate again rows whose prompt or overrides have changed under the same id, and replace their old rows.",
    ),
    "new_spec": _option(
        _ROWS, "Annotate all rows in a new way (model, prompt, schema, sampling) beside the old ones."
    ),
    "commit_every": _option(
        _RUN,
        "How often finished rows are committed, or less often to keep the engines fed: 15m, 900s, 1h.",
        given=str,
        show=lambda default: f"{default // timedelta(minutes=1)}m",
        read=read_duration,
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
    "no_sample": _option(
        _RUN, "Show no rows, and quote no prompt and no output, in the report, in errors and in logs."
    ),
    "summary": _option(_RUN, "Write the totals to this file, as JSON."),
    "log_dir": _option(_RUN, "Logs; default: PIPEMAX_LOG_DIR, or logs next to the output.", given=Path),
    "dry_run": _option(_RUN, "Check everything, count rows and tokens, start no engine."),
}
"""Options by name, in the order of ``--help``."""


def job_options(values: Mapping[str, Any], *, log_dir: Path) -> JobOptions:
    """Return the job's options from the values of all fields that are given, and of ``model``.

    ``JobError`` says what is wrong with them.
    """
    rest = dict(values)
    engine = engine_config(rest.pop("engine", None), rest.pop("model", None))

    def taken(kind: type) -> dict[str, Any]:
        return {each.name: rest.pop(each.name) for each in fields(kind) if each.name in rest}

    return JobOptions(
        source=PromptSource(**taken(PromptSource)),
        engine=_with_absolute_model(engine),
        generation=GenerationSpec(**taken(GenerationSpec)),
        log_dir=log_dir,
        **rest,
    )


def log_directory(given: str | os.PathLike[str] | None, output: str) -> Path:
    """Return the directory of the logs: as given, or as PIPEMAX_LOG_DIR says, or ``logs`` next to the output."""
    named = given or os.environ.get("PIPEMAX_LOG_DIR") or driver_directory(output) / "logs"
    return Path(named).absolute()


def log_handler(directory: Path) -> logging.Handler:
    """Return the handler that writes ``annotate.log`` in the directory. Raise ``JobError`` if it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(
            directory / "annotate.log", maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8"
        )
    except OSError as error:
        raise JobError(f"logs cannot be written to {str(directory)!r}: {error}; give --log-dir") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def _with_absolute_model(engine: dict[str, Any]) -> dict[str, Any]:
    """Make local paths absolute, because servers run in a directory of their own."""
    paths = {
        name: str(Path(engine[name]).absolute())
        for name in ("model", "tokenizer")
        if isinstance(engine.get(name), str) and Path(engine[name]).is_dir()
    }
    return {**engine, **paths}
