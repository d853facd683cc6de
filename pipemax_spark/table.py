"""``annotate_table`` and ``compare_prompts``: the commands from Python, for notebooks and schedulers with a session."""

import inspect
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobError, JobFailedError, failure_text, is_interrupt
from pipemax_spark.job.arguments import OPTIONS, job_options, log_directory, log_handler
from pipemax_spark.job.cascade import run_job
from pipemax_spark.job.compare import COMPARED, DEFAULT_ROWS, CompareOptions, run_comparison, two_templates
from pipemax_spark.job.option_values import read_engine
from pipemax_spark.job.over_connect import connect_options
from pipemax_spark.job.trial import UNUSED
from pipemax_spark.options import JobOptions
from pipemax_spark.report.comparison import Comparison
from pipemax_spark.report.summary import Summary
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.argument_types import checks_arguments, takes_fields
from pipemax_spark.request.formats import ResponseFormat
from pipemax_spark.request.generation import generation_values
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.spark.session import check_session, is_connect
from pipemax_spark.transform import TemplateVariables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_P = ParamSpec("_P")
_T = TypeVar("_T")
_READ_AS_TEXT = frozenset(
    {
        *("id_columns", "select", "allow_image_urls", "commit_every", "agree_fields"),
        *("on_error", "bad_lines", "if_running", "new_spec", "expect_rows", "done_by"),
    }
)
"""Arguments that become the fields' values as on the command line; some may also be of the fields' types."""


def _describes_options(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Add the command's help text for each of the function's options to the docstring."""
    descriptions = [
        f"    {name}: {OPTIONS[name].help}"
        for name in inspect.signature(function).parameters
        if name in OPTIONS
    ]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Args:", *descriptions])
    return function


_TYPES: Mapping[str, Any] = {
    "id_columns": Sequence[str] | str,
    "cascade": Mapping[str, Any] | str | os.PathLike[str] | None,
    "agree_fields": Sequence[str] | str,
    "select": Sequence[str] | str,
    "allow_image_urls": Sequence[str] | str,
    "commit_every": timedelta | str,
    "on_error": str,
    "bad_lines": str,
    "if_running": str,
    "new_spec": bool | str | None,
    "expect_rows": Sequence[int | None] | str | None,
    "done_by": datetime | str | None,
    "summary": str | os.PathLike[str] | None,
    "chat_template_kwargs": TemplateVariables,
    "response_format": ResponseFormat,
    "ask": Mapping[str, Any],
}
"""Types of arguments that differ from their fields'."""


@checks_arguments
@_describes_options
@takes_fields(JobOptions, PromptSource, GenerationSpec, without={"certified", "over_connect"}, **_TYPES)
def annotate_table(
    spark: "SparkSession",
    *,
    model: str | None = None,
    engine: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    json_whitespace: str | None = None,
    unpinned_model: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Summary | None:
    """Run the resumable job ``pipemax-annotate`` in this session, and return its totals, or None after a dry run.

    Make the same call again to annotate the rows that are left. The options are the command's, with ``_`` for ``-`` and
    Python values: ``engine`` is a dict or the path of a YAML file, ``response_format`` a dict, a string, a Spark
    ``DataType`` or the class of a Pydantic model, ``id_columns`` a list, ``input_option`` a dict, ``stop`` and
    ``choice`` lists, ``commit_every`` a ``timedelta`` or text such as ``"15m"``, ``expect_rows`` a pair of numbers or
    text such as ``"1000:2000000"``.

    A run that reaches ``max_cost``, ``max_hours``, ``max_tokens_total`` or ``done_by`` raises nothing: its summary has
    ``complete=False`` and ``ended_by``.

    Print the command's report meanwhile. Interrupting the call (Ctrl-C, or the notebook's button) stops the job;
    committed rows stay.

    Raise ``JobError``, a ``ValueError``, for errors that the caller can fix, before any engine has started, and
    ``JobFailedError`` if the job fails while it runs. Over Spark Connect some options are refused, by their names.
    """
    check_session(spark, takes_connect=True)
    if missing := {"input", "output"} - {name for name, value in options.items() if value is not None}:
        raise TypeError(f"annotate_table() needs {' and '.join(sorted(missing))}")
    over_connect = is_connect(spark)
    logs = log_directory(log_dir, "" if over_connect else options["output"])
    engines = {
        "engine": _engine(engine, spark),
        "model": model,
        "json_whitespace": json_whitespace,
        "unpinned_model": unpinned_model,
    }
    options["cascade"] = _engine(options.get("cascade"), spark)
    job = _job_of(options, engines, logs)
    if over_connect:
        job = connect_options(job)
    terminal = Terminal.standard()
    advice = "Finished chunks are committed; make the same call again to continue."
    with _logs_to(logs), _failures_told(terminal, logs, advice):
        return run_job(spark, job, terminal)


@checks_arguments
@_describes_options
@takes_fields(
    JobOptions,
    PromptSource,
    GenerationSpec,
    without=(UNUSED - COMPARED) | {"certified", "template", "prompt_column", "messages_column", "log_dir"},
    **_TYPES,
)
def compare_prompts(
    spark: "SparkSession",
    *,
    templates: Sequence[str],
    rows: int = DEFAULT_ROWS,
    draw_seed: int = 0,
    page: str | os.PathLike[str] | None = None,
    model: str | None = None,
    engine: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    json_whitespace: str | None = None,
    unpinned_model: bool = False,
    **options: Any,
) -> Comparison:
    """Answer the same rows of a table under two templates, print what differs and costs, and return the comparison.

    ``rows`` are drawn by the rows' content and ``draw_seed``: the same ones at each call. One engine answers them under
    both templates; then this session's engines end. No table is written, and only with ``page`` a file, the page of the
    rows that differ. The other options are those of ``annotate_table``; ``gold_column`` adds which of the two is right,
    ``price_per_hour`` the cost, ``id_columns`` the names of rows.

    Raise ``JobError``, a ``ValueError``, for errors that the caller can fix, and ``JobFailedError`` if the engine
    fails. The session must be a classic one.
    """
    check_session(spark)
    if options.get("input") is None:
        raise TypeError("compare_prompts() needs input")
    template, other_template = two_templates(templates)
    logs = Path(tempfile.mkdtemp(prefix="pipemax-compare-"))
    engines = {
        "engine": _engine(engine, spark),
        "model": model,
        "json_whitespace": json_whitespace,
        "unpinned_model": unpinned_model,
    }
    job = _job_of({**options, "output": "", "template": template}, engines, logs)
    compared = CompareOptions(
        job=job,
        other_template=other_template,
        rows=rows,
        draw_seed=draw_seed,
        page=None if page is None else os.fspath(page),
    )
    terminal = Terminal.standard()
    try:
        with _logs_to(logs), _failures_told(terminal, logs, "Nothing was written."):
            comparison = run_comparison(spark, compared, terminal)
    except JobError:
        shutil.rmtree(logs, ignore_errors=True)
        raise
    shutil.rmtree(logs, ignore_errors=True)
    return comparison


def _job_of(options: Mapping[str, Any], engines: Mapping[str, Any], logs: Path) -> JobOptions:
    """Return the job's options; those that are None are not given."""
    values = {name: _field_value(name, value) for name, value in options.items() if value is not None}
    return job_options({**generation_values(values), **engines}, log_dir=logs)


@contextmanager
def _failures_told(terminal: Terminal, logs: Path, advice: str) -> Iterator[None]:
    """Raise ``JobFailedError`` for what fails while it runs, and ``KeyboardInterrupt`` for what interrupts it."""
    try:
        yield
    except (JobError, JobFailedError):
        raise
    except BaseException as error:
        if is_interrupt(error):
            terminal.say("", f"Interrupted. {advice}")
            raise KeyboardInterrupt from error
        if not isinstance(error, Exception):
            raise
        raise JobFailedError(f"{failure_text(error)}. Details: {logs}") from error


def _field_value(name: str, value: Any) -> Any:
    read = OPTIONS[name].read if name in _READ_AS_TEXT else None
    return value if read is None else read(value)


def _engine(
    engine: Mapping[str, Any] | str | os.PathLike[str] | None, spark: "SparkSession"
) -> Mapping[str, Any] | None:
    if engine is None or isinstance(engine, Mapping):
        return engine
    return read_engine(os.fspath(engine), lambda: spark)


@contextmanager
def _logs_to(directory: Path) -> Iterator[None]:
    """Write this package's log to ``annotate.log`` in the directory, and nowhere else; the terminal shows warnings."""
    logger = logging.getLogger("pipemax_spark")
    handler = log_handler(directory)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(level)
        logger.propagate = propagates
