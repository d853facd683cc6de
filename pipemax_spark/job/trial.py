"""``pipemax try``: answer the first rows of an input, by one engine, under one prompt after the other.

The prompts are rendered, and the rows annotated, by the code of the job. Nothing is written but logs. Of the input's
other rows nothing is checked, so what is wrong with them stays unknown here: the job, and its dry run, check all.
``tune`` and ``compare`` answer rows by the same ``Trial``.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from pipemax_spark.engines.stop import stop_engines
from pipemax_spark.errors import JobError
from pipemax_spark.executor.early_start import BeginLoading
from pipemax_spark.executor.task import TaskPlan
from pipemax_spark.job.arguments import OPTIONS
from pipemax_spark.job.checks import check_engine, input_of
from pipemax_spark.job.job import EngineCall, new_run_id
from pipemax_spark.job.settings import job_settings
from pipemax_spark.options import JobOptions
from pipemax_spark.report.accuracy import Compared
from pipemax_spark.report.sampled_rows import answer_of
from pipemax_spark.report.side_by_side import TriedRow, print_rows
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.columns import prompt_text
from pipemax_spark.request.prompts import PromptSource, resolve_names
from pipemax_spark.rows.annotated import ANNOTATION, annotate_requests, annotated_schema
from pipemax_spark.rows.remaining import rows_where
from pipemax_spark.spark.jobs import jobs_of
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.sources import Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

UNUSED = frozenset(
    {
        *("output", "batch_output", "select", "id_columns", "summary", "work_dir", "checkpoint", "compact"),
        *("limit", "expect_rows", "fail_if_empty", "incremental", "skip_changes", "rescan", "if_running"),
        "on_delete",
        *("on_error", "max_error_rate", "retry_errors", "redo_changed", "new_spec", "commit_every"),
        *("group_by_prefix", "order_by", "compute_each", "reuse", "mlflow_experiment", "price_per_hour"),
        *("max_cost", "max_hours", "max_tokens_total", "done_by", "budget_is_success", "canary"),
        *("collector_port", "metrics_port", "notify", "gold_column", "dry_run"),
        *(
            "cascade",
            "agree",
            "confidence",
            "agree_fields",
            "agree_tolerance",
            "cascade_sample",
            "cascade_reset",
        ),
    }
)
"""Options of the job that have no meaning here: they are about the output, the whole table, or the run."""
_NUMBER, _PROMPT, _COMPLETED = "pipemax number", "pipemax prompt", "pipemax completed"
_IDS, _TRUTHS, _COMPARED = "pipemax ids", "pipemax truths", "pipemax compared"
_NOT_HASHED = ("map<", "variant", "interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """The options of one trial. ``JobError`` says what is wrong with them."""

    job: JobOptions
    rows: int = 20
    """How many of the input's rows are answered, the first ones that Spark reads."""
    once: bool = False
    """Whether to end after the first prompt."""

    def __post_init__(self) -> None:
        if self.job.no_sample:
            raise JobError("--no-sample shows no rows, and showing some is all that try does; leave it out")


def run_trial(
    spark: "SparkSession", options: TrialOptions, terminal: Terminal, next_template: Callable[[], str | None]
) -> None:
    """Answer the rows under the job's prompt, and under each template that ``next_template`` returns, until None.

    Raise ``JobError`` for what the user can fix. A template that cannot be rendered is only reported, and the next one
    asked for, unless there is to be only one.
    """
    source: PromptSource | None = options.job.source
    with job_settings(spark), Trial.of_first_rows(spark, options, terminal) as trial:
        while source is not None:
            try:
                requests = trial.render(source)
            except JobError as error:
                if options.once:
                    raise
                terminal.error(str(error))
            else:
                rows, seconds = trial.answer(source, requests)
                print_rows(terminal, rows, seconds=seconds)
            if options.once:
                return
            source = with_template(options.job.source, next_template())


def with_template(source: PromptSource, template: str | None) -> PromptSource | None:
    """Return the source with this template in place of its prompt; None if there is no template."""
    if template is None:
        return None
    return replace(source, prompt_column=None, messages_column=None, template=template)


def asked_template(terminal: Terminal) -> str | None:
    """Ask for a template until there is one that is not blank, and return it; None at the end of standard input."""
    read = OPTIONS["template"].read
    assert read is not None, "a template's line breaks are read"
    is_typed = sys.stdin is not None and sys.stdin.isatty()
    if is_typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lets the line be edited, and earlier ones be recalled
        terminal.say("", "Another template, such as 'Summarise: {body}'? Ctrl-D ends.")
    while True:
        try:
            line = input("> " if is_typed else "")
        except (EOFError, RuntimeError):  # RuntimeError: the process began without a standard input
            return None
        if line.strip():
            if not is_typed:
                terminal.say("Template", line)
            return str(read(line))


class Trial:
    """The first rows of an input, and the engine that answers them, which ends with the context."""

    def __init__(self, call: EngineCall, rows: "DataFrame", num_rows: int) -> None:
        self._call = call
        self._rows = rows
        self.num_rows = num_rows
        self._plan: TaskPlan | None = None

    @classmethod
    def of_first_rows(cls, spark: "SparkSession", options: TrialOptions, terminal: Terminal) -> Self:
        """Read the rows. Raise ``JobError`` if the input cannot be read or has none."""
        call = _call(spark, options.job, terminal)
        with terminal.doing("reading the first rows"):
            source = _read(call)
            rows, num_rows = _first_rows(source.rows, options.rows)
        _say_input(call, source, num_rows, f"the first {num_rows:,} rows")
        return cls(call, rows, num_rows)

    @classmethod
    def of_drawn_rows(
        cls, spark: "SparkSession", job: JobOptions, terminal: Terminal, *, rows: int, seed: int
    ) -> "tuple[Self, int]":
        """Draw so many rows, the same ones for the same table and seed, and count the input's. Reads all of it.

        Raise ``JobError`` if the input cannot be read, has none, or lacks a column of ids or of right answers.
        """
        call = _call(spark, job, terminal)
        with terminal.doing("drawing rows"):
            source = _read(call)
            golds = [gold.column for gold in job.golds]
            resolve_names([*job.id_columns, *golds], source.rows.schema)
            rows_in = source.rows.count()
            drawn, num_rows = _first_rows(in_drawn_order(source.rows, seed), rows)
        _say_input(call, source, num_rows, f"{num_rows:,} of {rows_in:,} rows, drawn with seed {seed}")
        return cls(call, drawn, num_rows), rows_in

    def with_engine(self, engine: Mapping[str, Any]) -> Self:
        """Return a trial of the same rows with an engine of this config, which has not been started."""
        return self.with_job(replace(self._call.options, engine=engine))

    def with_job(self, options: JobOptions) -> Self:
        """Return a trial of the same rows under these options, whose engine has not been started."""
        call = replace(self._call, options=replace(options, compute_each=True), run_id=new_run_id())
        return type(self)(call, self._rows, self.num_rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._plan is None:
            return
        call = self._call
        # A task that is left would start its engine again.
        jobs_of(call.spark).cancel(call.run_id)
        with call.terminal.doing("stopping the engine"):
            stop_engines(call.spark, force=True)

    def render(self, source: PromptSource) -> "DataFrame":
        """Return the rows with the columns of their requests. ``JobError`` says what is wrong with the prompt."""
        options = self._call.options
        requests = replace(options.request_columns, source=source).add(self._rows)
        annotated_schema(self._rows.schema, ANNOTATION, options.generation, options.ask)
        return requests

    def answer(
        self, source: PromptSource, requests: "DataFrame", *, compared: "Sequence[Column]" = ()
    ) -> tuple[list[TriedRow], float]:
        """Return the engine's answers to the requests, and the seconds they took. The first call loads the engine.

        ``compared`` are columns of the annotated rows that each of them brings too.
        """
        plan, jobs = self._loaded(source), jobs_of(self._call.spark)
        jobs.tag(self._call.run_id)
        try:
            with self._call.terminal.doing("waiting for the answers"):
                began_unix_s, began_s = time.time(), time.monotonic()
                collected = _annotated(requests, plan, self._call.options, compared)
                seconds = time.monotonic() - began_s
        finally:
            jobs.untag(self._call.run_id)
        return [_tried(row, self._call.options, began_unix_s=began_unix_s) for row in collected], seconds

    def _loaded(self, source: PromptSource) -> TaskPlan:
        """Return the plan of the tasks, after checking and loading the engine if that has not been done."""
        if self._plan is not None:
            return self._plan
        call = replace(self._call, options=replace(self._call.options, source=source))
        with call.terminal.doing("checking the engine and the model"):
            engine, _ = check_engine(call, self._rows, self.num_rows)
        self._plan = TaskPlan(
            options=engine,
            spec_hash="",
            run_id=call.run_id,
            output_column=ANNOTATION,
            questions=call.options.ask,
        )
        began_s = time.monotonic()
        jobs = jobs_of(call.spark)
        jobs.tag(call.run_id)
        try:
            with call.terminal.doing("loading the engine"):
                one = call.spark.range(0, 1, 1, 1)
                one.mapInArrow(BeginLoading(engine, waits=True), "id long").collect()
        finally:
            jobs.untag(call.run_id)
        call.terminal.say("Engine", f"loaded in {time.monotonic() - began_s:.1f} s")
        return self._plan


def _call(spark: "SparkSession", job: JobOptions, terminal: Terminal) -> EngineCall:
    options = replace(job, compute_each=True)
    return EngineCall(spark=spark, options=options, terminal=terminal, run_id=new_run_id())


def _say_input(call: EngineCall, source: Source, num_rows: int, which_rows: str) -> None:
    """Say which rows are answered. Raise ``JobError`` if there are none."""
    where = call.options.where
    condition = "" if where is None else f" where {where}"
    if not num_rows:
        raise JobError(f"input {source.name!r} has no rows{condition}")
    call.terminal.say("Input", f"{source.description}: {which_rows}{condition}")


def _read(call: EngineCall) -> Source:
    """Return the input with the rows that ``--where`` selects, without the lines of text files that are no rows."""
    source = input_of(call)
    rows = source.rows
    if source.text is not None and source.text.user_says is None and source.text.columns:
        rows = source.text.good_rows
    if source.is_blank or not rows.columns:
        raise JobError(f"input {source.name!r} has no rows")
    return replace(source, rows=rows_where(rows, call.options.where))


def _first_rows(rows: "DataFrame", num_rows: int) -> "tuple[DataFrame, int]":
    """Return the first rows that Spark reads, kept in the driver in their order, and their number.

    They stay in the JVM, so that no type of a column is changed on the way.
    """
    from pyspark.sql import DataFrame

    spark = rows.sparkSession
    first = rows.limit(num_rows)._jdf.collectAsList()
    kept = spark._jsparkSession.createDataFrame(first, rows._jdf.schema())
    return DataFrame(kept, spark), int(first.size())


def in_drawn_order(rows: "DataFrame", seed: int) -> "DataFrame":
    """Return the rows in an order that depends on their content and on the seed, and not on files or partitions.

    Columns whose type Spark cannot hash, such as maps, do not matter for it.
    """
    from pyspark.sql import functions as F  # noqa: N812

    hashed = [
        quoted(column.name)
        for column in rows.schema.fields
        if not any(kind in column.dataType.simpleString() for kind in _NOT_HASHED)
    ]
    return rows.orderBy(F.xxhash64(F.lit(seed), *hashed))


def _annotated(
    requests: "DataFrame", plan: TaskPlan, options: JobOptions, compared: "Sequence[Column]"
) -> "list[Row]":
    """Return the rows' answers in the order of the rows, each with its prompt and the instant of its completion.

    They come with their ids, and with the right answers and whether these were the answers.
    """
    from pyspark.sql import functions as F  # noqa: N812

    numbered = requests.coalesce(1).withColumns(
        {_NUMBER: F.monotonically_increasing_id(), _PROMPT: prompt_text(requests).cast("string")}
    )
    done = annotate_requests(numbered, plan)
    answers = [question.name for question in plan.questions]
    completed = F.unix_micros(f"{ANNOTATION}.completed_at").alias(_COMPLETED)
    ids = F.array(*(F.col(quoted(name)).cast("string") for name in options.id_columns)).alias(_IDS)
    judged = [Compared.of(done, gold) for gold in options.golds]
    truths = F.array(*(F.struct(one.gold.alias("gold"), one.is_right.alias("is_right")) for one in judged))
    shown = done.select(
        *map(quoted, (_NUMBER, _PROMPT, *answers, ANNOTATION)),
        completed,
        ids,
        truths.alias(_TRUTHS),
        F.array(*compared).alias(_COMPARED),
    )
    return sorted(shown.collect(), key=lambda row: int(row[_NUMBER]))


def _tried(row: "Row", options: JobOptions, *, began_unix_s: float) -> TriedRow:
    annotation = row[ANNOTATION]
    names = [question.name for question in options.ask] or [ANNOTATION]
    truths = zip(options.golds, row[_TRUTHS], strict=True)
    answers = {name: answer_of(row[name])[1] for name in names}
    errors = {name: row[name]["error"] for name in names if row[name]["error"] is not None}
    is_cut = any("finish_reason" in row[name] and row[name]["finish_reason"] == "length" for name in names)
    return TriedRow(
        number=row[_NUMBER] + 1,
        prompt=row[_PROMPT],
        answers=answers,
        errors={name: (error["code"], error["message"]) for name, error in errors.items()},
        prompt_tokens=annotation["prompt_tokens"] or 0,
        completion_tokens=(annotation["completion_tokens"] or 0) if "completion_tokens" in annotation else 0,
        seconds=max(0.0, row[_COMPLETED] / 1e6 - began_unix_s),
        is_cut=is_cut,
        compared=[*row[_COMPARED]],
        ids={
            name: "" if value is None else value
            for name, value in zip(options.id_columns, row[_IDS], strict=True)
        },
        truths={
            gold.answers: (one["gold"], one["is_right"]) for gold, one in truths if one["gold"] is not None
        },
    )
