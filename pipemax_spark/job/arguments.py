"""Declare a job's options: help texts, how to read a given value, and how to build ``JobOptions`` from the values.

The command (``cli``) and ``annotate_table`` (``table``) take the same options. Names, types and defaults are those of
the fields of ``JobOptions``, ``PromptSource`` and ``GenerationSpec``; help texts of settings are those of their table.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import timedelta
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax.wire import OVERRIDES_TYPE, SETTINGS, GenerationSpec
from pipemax_spark.engines.config import engine_config
from pipemax_spark.errors import IfRunning, JobError, NewSpec, OnDelete, OnError
from pipemax_spark.job.limits import read_done_by
from pipemax_spark.job.option_values import (
    read_ask,
    read_duration,
    read_engine,
    read_grammar,
    read_key_value,
    read_names,
    read_response_format,
    with_batch_columns,
)
from pipemax_spark.options import JobOptions, driver_directory
from pipemax_spark.request.expected_rows import ExpectedRows
from pipemax_spark.request.generation import with_task
from pipemax_spark.request.golds import read_gold_columns
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.request.questions import read_questions
from pipemax_spark.request.urls import default_url
from pipemax_spark.storage.bad_lines import BadLines

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    Session = Callable[[], SparkSession]

_INPUT, _PROMPT, _MODEL = "Input and output", "Prompt", "Model and generation"
_ROWS, _RUN = "Errors and reruns", "Run"
_LOG_BYTES = 64 * 2**20
"""Maximum size of ``annotate.log``, and of ``annotate.log.1``, which holds the earlier lines."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command, with the name, type and default of the field that it fills."""

    panel: str
    help: str
    _: KW_ONLY
    cli_type: Any = None
    """Its type on the command line, if that differs from the field's; its value is then None if it is not given."""
    show: Callable[[Any], str] | None = None
    """Converts the field's default into the text that a user would give for it."""
    read: Callable[[Any], Any] | None = None
    """Converts the given value into the field's value; ``JobError`` says what is wrong with it."""
    read_with_session: "Callable[[Any, Session], Any] | None" = None
    """Converts the given value, in place of ``read``; requests a session only if it needs one."""
    typer: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for ``typer.Option``."""


_PANELS = {"attempts": _ROWS, "attempts_show_error": _ROWS}
_READ_AS: dict[str, dict[str, Any]] = {
    "max_tokens": {"typer": {"min": 1}},
    "dimensions": {"typer": {"min": 1}},
    "normalize": {"cli_type": bool},
    "include_reasoning": {"cli_type": bool},
    "stop": {"cli_type": list[str], "read": tuple},
    "stop_token_ids": {"cli_type": list[int], "read": tuple},
    "bad_words": {"cli_type": list[str], "read": tuple},
    "choice": {"cli_type": list[str], "read": tuple},
    "grammar": {"cli_type": str, "read_with_session": read_grammar},
    "response_format": {"cli_type": str, "read_with_session": read_response_format},
}
"""Settings of the table of fields that the command line reads or limits in its own way."""

OPTIONS: dict[str, Option] = {
    "input": Option(
        _INPUT,
        "Delta table, by path or name; Iceberg table, by name; or Parquet, CSV or JSON files, by path.",
    ),
    "output": Option(
        _INPUT, "Delta table, by path or name, or Iceberg table, by name; created if it does not exist."
    ),
    "input_format": Option(
        _INPUT,
        "delta, parquet, csv, json, or openai-batch: files of requests in OpenAI's batch format, with id, messages and "
        "overrides; default: inferred from the input.",
    ),
    "batch_output": Option(
        _INPUT,
        "With openai-batch: once all rows are done, write their answers to this file in OpenAI's format, and errors to "
        "one next to it.",
    ),
    "input_option": Option(
        _INPUT,
        "KEY=VALUE for Spark's reader, such as sep=;. May be repeated.",
        cli_type=list[str],
        read=lambda value: dict(map(read_key_value, value)),
    ),
    "bad_lines": Option(
        _INPUT,
        "What becomes of lines of CSV and JSON files that are no rows: fail ends the job before anything is written, "
        "drop leaves them out and counts them.",
        cli_type=str,
        show=str,
        read=BadLines.of,
    ),
    "id_columns": Option(
        _INPUT,
        "Columns that identify a row, comma-separated; default: the whole row's content.",
        cli_type=str,
        read=read_names,
    ),
    "where": Option(_INPUT, "SQL condition that selects input rows, such as lang = 'en'."),
    "select": Option(
        _INPUT,
        "Input columns to copy to the output, comma-separated; default: all. Needs --id-columns.",
        cli_type=str,
        read=read_names,
    ),
    "limit": Option(_INPUT, "Maximum number of new rows in this run.", typer={"min": 1}),
    "expect_rows": Option(
        _INPUT,
        "MINIMUM:MAXIMUM of the input's rows, such as 1000:2000000; with other numbers the job ends with status 2 "
        "before an engine starts. With --incremental: of the rows that were appended.",
        cli_type=str,
        read=ExpectedRows.of,
    ),
    "fail_if_empty": Option(
        _INPUT, "End with status 2 if the input has no rows, or with --incremental if none were appended."
    ),
    "incremental": Option(
        _INPUT,
        "Annotate only rows that were appended to the input (a Delta table) since the last incremental run or, with "
        "--id-columns and a change data feed, were also changed.",
    ),
    "on_delete": Option(
        _INPUT,
        "With --incremental and a change data feed: what becomes of the output's rows whose rows were deleted in the "
        "input: keep, mark (with the time in annotation_deleted_at) or remove. For an output that no other input "
        "fills.",
        cli_type=str,
        show=str,
        read=OnDelete.of,
    ),
    "skip_changes": Option(
        _INPUT,
        "With --incremental: skip rows that were updated or deleted in the input. Rows that the same commits inserted "
        "are annotated; without --id-columns, updated rows of such commits are, too.",
    ),
    "rescan": Option(
        _INPUT,
        "With --incremental: compare all rows of the input with the output once, annotate those that are missing, and "
        "let the next incremental run go on from there. For an input that cannot be followed from where the last run "
        "ended.",
    ),
    "prompt_column": Option(_PROMPT, "Column that holds the prompt."),
    "messages_column": Option(
        _PROMPT,
        "Column that holds conversations: array<struct<role, content>>; content is text, or an array of parts with "
        "text and image_url.",
    ),
    "image_column": Option(
        _PROMPT, "Column of images, their paths or URLs, or arrays of them, shown before the prompt's text."
    ),
    "allow_image_urls": Option(
        _PROMPT,
        "Hosts whose http(s) URLs of images may be fetched, comma-separated; * allows any. Default: none.",
        cli_type=str,
        read=read_names,
    ),
    "template": Option(
        _PROMPT,
        "Prompt with {column} placeholders. Write {{ and }} for braces, \\n for a line break.",
        read=lambda value: value.replace("\\n", "\n"),
    ),
    "query_column": Option(
        _PROMPT, "With --task score: column that holds the query; the prompt is the document that is scored."
    ),
    "ask": Option(
        _PROMPT,
        "NAME=TEMPLATE: a question about each row, answered in a column NAME; its text follows the prompt. Or a YAML "
        "file of questions with settings of their own. May be repeated.",
        cli_type=list[str],
        read_with_session=read_ask,
    ),
    "system": Option(_PROMPT, "System message to put before every prompt."),
    "overrides_column": Option(
        _PROMPT,
        f"Struct column with per-row values for any of {', '.join(OVERRIDES_TYPE.names[:-1])} and "
        f"{OVERRIDES_TYPE.names[-1]}.",
    ),
    "model": Option(
        _MODEL,
        "Checkpoint directory, hub name or models:/NAME/VERSION of MLflow; may be set in the --engine file instead.",
        cli_type=str,
    ),
    "engine": Option(
        _MODEL,
        "YAML file with the engine config; every field except model has a default.",
        cli_type=str,
        read_with_session=read_engine,
    ),
    "json_whitespace": Option(
        _MODEL,
        "White space between the tokens of JSON answers: compact (the default) forbids it, any leaves it to the model. "
        "The same as json_whitespace in the engine config.",
        cli_type=str,
    ),
    "unpinned_model": Option(
        _MODEL,
        "With an endpoint: do without model_revision, so rows are of one spec whatever is served by the model's name.",
        cli_type=bool,
    ),
    "engine_python": Option(
        _MODEL, "Path on the executors of a Python that has vLLM; default: the Python of Spark's tasks."
    ),
    **{
        name: Option(_PANELS.get(name, _MODEL), setting.help, **_READ_AS.get(name, {}))
        for name, setting in SETTINGS.items()
    },
    "cascade": Option(
        _MODEL,
        "YAML file with the engine config of a small model: it answers all rows, and keeps those of which at most the "
        "share that --agree leaves would be answered otherwise by the model of --engine, which answers the others.",
        cli_type=str,
        read_with_session=read_engine,
    ),
    "agree": Option(
        _MODEL,
        "With --cascade: the share of answers that are to be the large model's.",
        typer={"show_default": True},
    ),
    "confidence": Option(_MODEL, "With --cascade: how sure that is to be."),
    "agree_fields": Option(
        _MODEL,
        "With --cascade and a schema: the properties that are compared, comma-separated; with --ask as question.field; "
        "default: all.",
        cli_type=str,
        read=read_names,
    ),
    "agree_tolerance": Option(
        _MODEL, "With --cascade and a schema or --task score: how far numbers that agree may be apart."
    ),
    "cascade_reset": Option(
        _MODEL,
        "With --cascade, once: draw again for rows that an unfinished run has drawn for, or with --incremental begin a "
        "new ledger for the rows from now on. The report counts it.",
    ),
    "cascade_sample": Option(
        _MODEL,
        "With --cascade: the share of rows that both models answer; any is valid, the default near the cheapest.",
        typer={"show_default": False},
    ),
    "reuse": Option(
        _ROWS,
        "Earlier output of the same spec, Delta or Iceberg: rows with the request of one of its good rows take that "
        "row's answer. --limit counts the other rows.",
    ),
    "on_error": Option(
        _ROWS,
        "row: keep a failed row with its error; fail: end the job at the first failed row.",
        cli_type=str,
        show=str,
        read=OnError.of,
    ),
    "max_error_rate": Option(
        _ROWS,
        "Maximum share of error rows of a run; a larger share makes the job fail, and ends it early from 1,000 rows "
        "on.",
        typer={"min": 0.0, "max": 1.0},
    ),
    "retry_errors": Option(_ROWS, "Retry error rows from earlier runs."),
    "redo_changed": Option(
        _ROWS,
        "Annotate rows again if their prompt or overrides changed under the same id, and replace the old rows.",
    ),
    "new_spec": Option(
        _ROWS,
        "Annotate all rows in a new way (model, prompt, schema, sampling): stack keeps the old rows next to the new "
        "ones, replace removes each in the commit that brings its new one. Without a value: stack.",
        cli_type=str,
        read=NewSpec.of,
    ),
    "commit_every": Option(
        _RUN,
        "How often to commit finished rows: 15m, 900s, 1h. Commits are less frequent if that keeps the engines busy.",
        cli_type=str,
        show=lambda default: f"{default // timedelta(minutes=1)}m",
        read=read_duration,
    ),
    "canary": Option(
        _RUN,
        "Commit about this many random rows first, and compare their choices, errors and lengths with the last run's, "
        "of which as many are asked again; if anything has changed, the run ends with status 4 before the rest.",
    ),
    "compact": Option(
        _RUN,
        "Compact the output's small files at the end with Delta's OPTIMIZE or Iceberg's rewrite_data_files; each "
        "chunk leaves one file per task.",
    ),
    "group_by_prefix": Option(
        _RUN, "Sort the rows by prompt, so that the engine reads a prefix that many prompts share only once."
    ),
    "order_by": Option(
        _RUN,
        "The order in which rows are annotated, as in SQL: 'priority DESC', 'length(text), id'; nulls last. "
        "--limit, or an early end, leaves out the last rows.",
    ),
    "compute_each": Option(
        _RUN,
        "Compute every row; default: equal requests are computed once, and all of their rows get the answer.",
    ),
    "work_dir": Option(
        _RUN,
        "Storage for work in progress, visible to all executors; default: inside the output's directory.",
    ),
    "if_running": Option(
        _RUN,
        "While another run is writing to the output with the same work directory: fail (end with status 2), skip (end "
        "with status 0) or take-over (stop the other run and do the rest).",
        cli_type=str,
        show=str,
        read=IfRunning.of,
    ),
    "checkpoint": Option(
        _RUN,
        "Directory in which earlier versions kept how far --incremental has read; it is read until the output itself "
        "says so. Default: inside the work directory.",
    ),
    "mlflow_experiment": Option(
        _RUN,
        "MLflow experiment; '' records nothing. The store is MLFLOW_TRACKING_URI, or a file next to the output.",
    ),
    "price_per_hour": Option(
        _RUN,
        "Price per hour of the whole cluster; the report then shows what the run costs.",
        typer={"min": 0.0},
    ),
    "max_cost": Option(
        _RUN,
        "End the run in order before it costs more than this, by --price-per-hour and an endpoint's prices of tokens, "
        "counted from its start; the exit status is then 3, and the next run goes on.",
        typer={"show_default": False},
    ),
    "max_hours": Option(_RUN, "Likewise for its hours.", typer={"show_default": False}),
    "max_tokens_total": Option(
        _RUN, "Likewise for its tokens, of prompts and answers together.", typer={"show_default": False}
    ),
    "done_by": Option(
        _RUN,
        "Likewise at this time: 06:00, the next one, or a date and time such as 2026-12-01T06:00.",
        cli_type=str,
        read=read_done_by,
    ),
    "budget_is_success": Option(
        _RUN, "Exit with status 0 in place of 3 if one of these four limits ends the run."
    ),
    "collector_port": Option(
        _RUN,
        "Driver port that engines report to; default: any free port. Set it if there is a firewall between executors "
        "and driver.",
        typer={"min": 0, "max": 65535, "show_default": False},
    ),
    "metrics_port": Option(
        _RUN,
        "Driver port at which Prometheus finds the run's figures; 0 takes a free one; default: none.",
        typer={"min": 0, "max": 65535},
    ),
    "notify": Option(
        _RUN,
        "URL (https) that gets a JSON post when the run starts and when it ends; default: PIPEMAX_NOTIFY_URL.",
    ),
    "gold_column": Option(
        _RUN,
        "Column of right answers, to compare with the schema's property of the same name, or with the choice. With "
        "--ask: QUESTION=COLUMN, which may be repeated.",
        cli_type=list[str],
        read=read_gold_columns,
    ),
    "no_sample": Option(
        _RUN, "Show no rows and quote no prompts or outputs, in the report, in errors and in logs."
    ),
    "summary": Option(_RUN, "Write to this file as JSON how the run ended, with its totals."),
    "log_dir": Option(
        _RUN, "Directory for logs; default: PIPEMAX_LOG_DIR, or logs next to the output.", cli_type=Path
    ),
    "dry_run": Option(
        _RUN,
        "Check everything and count rows and tokens, but start no engine; with --cascade, have both models answer 300 "
        "rows for a forecast.",
    ),
}
"""Options by name, in the order of ``--help``."""


def job_options(values: Mapping[str, Any], *, log_dir: Path) -> JobOptions:
    """Return the job's options from the values of all fields that are given, and of ``model``.

    ``JobError`` says what is wrong with them.
    """
    rest = with_batch_columns(values)
    config = engine_config(
        rest.pop("engine", None),
        rest.pop("model", None),
        json_whitespace=rest.pop("json_whitespace", None),
        unpinned_model=rest.pop("unpinned_model", None),
    )
    if (small := rest.pop("cascade", None)) is not None:
        rest["cascade"] = engine_config(small, None)
    rest.setdefault("notify", default_url())

    def taken(kind: type) -> dict[str, Any]:
        return {member.name: rest.pop(member.name) for member in fields(kind) if member.name in rest}

    source = PromptSource(**taken(PromptSource))
    engine, generation = with_task(config, GenerationSpec(**taken(GenerationSpec)))
    return JobOptions(
        source=source,
        engine=engine,
        generation=generation,
        ask=read_questions(rest.pop("ask", {}), generation),
        log_dir=log_dir,
        **rest,
    )


def log_directory(directory: str | os.PathLike[str] | None, output: str) -> Path:
    """Return the directory of the logs: as given, or from PIPEMAX_LOG_DIR, or ``logs`` next to the output."""
    named = directory or os.environ.get("PIPEMAX_LOG_DIR") or driver_directory(output) / "logs"
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
