"""Define a job's options: the command line, parsed and typed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import IfRunning, JobError, NewSpec, OnDelete, OnError, RowCountError
from pipemax_spark.executor.questions import Question
from pipemax_spark.request.columns import RequestColumns
from pipemax_spark.request.error_limits import ErrorLimits
from pipemax_spark.request.expected_rows import ExpectedRows
from pipemax_spark.request.generation import check_pooling
from pipemax_spark.request.golds import Gold, golds_of
from pipemax_spark.request.prices import Prices
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.request.urls import check_url
from pipemax_spark.storage.bad_lines import BadLines
from pipemax_spark.storage.hadoop import is_remote, plain_path
from pipemax_spark.storage.names import is_path
from pipemax_spark.storage.openai_batch import FORMAT as BATCH_FORMAT
from pipemax_spark.storage.openai_batch import ROW_FAULT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MIN_CANARY_ROWS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """What a cascade has decided before the run that fills its output."""

    spec: Mapping[str, Any]
    """What the output's spec holds of it: the small model, the promise, the equality."""
    model: str
    """The large model, as its engine config names it."""
    facts: Mapping[str, Any] | None = None
    """What the summary says of it; None before there is a certificate."""
    whole: "DataFrame | None" = None
    """The input of which the run's rows are a part, if they have no ids: how many equal rows the output may hold."""
    rows_skipped: int = 0
    """Rows of the input that the output held before."""
    rows_left_out: int = 0
    """Rows of the input that ``--limit`` leaves for a later run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of one job. Raise ``JobError`` for values that are wrong, as far as that is visible without Spark."""

    input: str
    output: str
    source: PromptSource
    engine: Mapping[str, Any]
    """An EngineConfig; the engine's side checks it."""
    generation: GenerationSpec
    ask: tuple[Question, ...] = ()
    """Questions about each row, whose prompts begin with the row's prompt."""
    overrides_column: str | None = None
    allow_image_urls: tuple[str, ...] = ()
    """Hosts from which images may be fetched."""
    id_columns: tuple[str, ...] = ()
    where: str | None = None
    """A SQL condition that selects the input rows to annotate."""
    select: tuple[str, ...] = ()
    """The input's columns that go to the output; empty for all."""
    input_format: str | None = None
    input_option: Mapping[str, str] = field(default_factory=dict)
    bad_lines: BadLines = BadLines.FAIL
    """What becomes of a line of a text file that is no row."""
    batch_output: str | None = None
    """File of answers as OpenAI's Batch API writes it, once all rows are done."""
    engine_python: str | None = None
    on_error: OnError = OnError.ROW
    max_error_rate: float = 0.5
    retry_errors: bool = False
    redo_changed: bool = False
    """Annotate rows again whose request has changed under the same id, and replace their old rows."""
    new_spec: NewSpec | None = None
    """Annotate rows that the output holds under another spec; None refuses to."""
    canary: int | None = None
    """Commit about so many random rows first, and end the run if their answers differ from those of the last run."""
    group_by_prefix: bool = False
    """Sort the rows by prompt, so that the engine reads only once a prefix that neighbours share."""
    order_by: str | None = None
    """The order in which rows are annotated, as in SQL; nulls last."""
    compute_each: bool = False
    """Compute every row, even if its request equals another row's."""
    work_dir: str | None = None
    commit_every: timedelta = timedelta(minutes=15)
    reuse: str | None = None
    """An earlier output of the same spec, from which answers of equal requests are taken."""
    cascade: Mapping[str, Any] | None = None
    """Engine config of a small model, which answers all rows first and keeps those that ``agree`` and ``confidence``
    allow."""
    agree: float = 0.97
    confidence: float = 0.95
    agree_fields: tuple[str, ...] = ()
    agree_tolerance: str = "0"
    cascade_reset: bool = False
    """Give up the draw of rows that are not done, or the ledger of a growing table, and begin again."""
    cascade_sample: float | None = None
    """The share of rows that both models answer; None for one near the cheapest."""
    certified: Certified | None = None
    """Set by a cascade for the run that fills its output."""
    limit: int | None = None
    expect_rows: ExpectedRows | None = None
    """How many rows the input may have, or with ``incremental`` what was appended to it."""
    fail_if_empty: bool = False
    """Fail if the input has no rows, or with ``incremental`` if none were appended."""
    if_running: IfRunning = IfRunning.FAIL
    incremental: bool = False
    """Annotate only rows that a table got since the last run, or of which it changed the request."""
    on_delete: OnDelete = OnDelete.KEEP
    """What becomes of the output's rows whose rows an incremental run finds deleted in the input."""
    checkpoint: str | None = None
    """Directory in which earlier versions kept the positions of incremental runs; default: in the work directory."""
    skip_changes: bool = False
    """Skip rows that commits to the input updated or deleted; rows that the same commits inserted are annotated."""
    rescan: bool = False
    """Compare all rows of the input with the output, and let later incremental runs go on from there."""
    mlflow_experiment: str = "pipemax"
    """Empty to record nothing."""
    price_per_hour: float | None = None
    """Price of all the job's machines together, in any currency."""
    max_cost: float | None = None
    """End the run before it costs more, by ``prices``, counted from its start like the other limits."""
    max_hours: float | None = None
    max_tokens_total: int | None = None
    """Of prompts and answers together, as engines report them."""
    done_by: datetime | None = None
    """With a time zone."""
    budget_is_success: bool = False
    """Exit with status 0 instead of 3 if one of these four limits ends the run."""
    collector_port: int = 0
    """Port at which the driver listens for the engines' reports; 0 takes a free one."""
    metrics_port: int | None = None
    """Port at which the driver serves the run's figures to Prometheus; 0 takes a free one, None serves none."""
    notify: str | None = field(default=None, repr=False)
    """URL that is told of the run's start and end; it may be a secret."""
    compact: bool = False
    """Join the output's small files at the end."""
    gold_column: str | Mapping[str, str] | None = None
    """The input's column of right answers; with questions, such a column for some of them, by the question's name."""
    summary: str | None = None
    no_sample: bool = False
    """Keep rows, prompts and outputs out of what is printed and logged."""
    dry_run: bool = False
    over_connect: bool = False
    """Whether the driver is elsewhere, so that a local output's path is none of this machine's."""
    log_dir: Path

    def __post_init__(self) -> None:
        if plain_path(self.input).rstrip("/") == plain_path(self.output).rstrip("/"):
            raise JobError(
                f"input and output are both {self.output!r}; name another output, which will hold the input's columns "
                "too"
            )
        self._check_incremental()
        self._check_ids_given()
        self._check_questions()
        self._check_canary()
        self._check_limits()
        if self.notify is not None:
            check_url(self.notify)
        self._check_order()
        self._check_reuse()
        check_pooling(
            self.generation,
            self.source,
            ask=self.ask,
            overrides_column=self.overrides_column,
            gold_column=self.gold_column,
        )
        golds_of(self.gold_column, self.generation, self.ask)  # raises for what cannot be compared

    def _check_incremental(self) -> None:
        if not self.incremental:
            details = {
                "checkpoint": self.checkpoint,
                "skip-changes": self.skip_changes,
                "rescan": self.rescan,
                "on-delete": self.on_delete is not OnDelete.KEEP,
            }
            for name, value in details.items():
                if value:
                    raise JobError(f"--{name} says how --incremental reads its input; give both, or neither")
            return
        alone = {
            "limit": self.limit is not None,
            "retry-errors": self.retry_errors,
            "redo-changed": self.redo_changed,
        }
        for name, value in alone.items():
            if value:
                raise JobError(
                    f"--{name} cannot be combined with --incremental, which reads each appended row once; run the job "
                    "once without --incremental: each kind of run knows what the other has done"
                )
        if self.on_delete is OnDelete.KEEP:
            return
        if not self.id_columns or self.skip_changes:
            raise JobError(
                f"--on-delete {self.on_delete} needs --id-columns, by which the deleted rows are known, and no "
                "--skip-changes"
            )

    def _check_canary(self) -> None:
        if self.canary is None:
            return
        if self.canary < _MIN_CANARY_ROWS:
            raise JobError(
                f"--canary is {self.canary}; give at least {_MIN_CANARY_ROWS} rows: fewer tell too little"
            )
        if self.retry_errors:
            raise JobError(
                "--canary compares rows with those of the last run, and the error rows that --retry-errors does again "
                "are not like others; retry them in a run without --canary"
            )

    def _check_questions(self) -> None:
        if not self.ask:
            return
        if self.source.is_messages:
            raise JobError(
                "--ask needs a --prompt-column or a --template: a question is text that follows the prompt"
            )
        if self.retry_errors and not self.id_columns:
            raise JobError("--retry-errors needs --id-columns if there are several questions (--ask)")

    @property
    def golds(self) -> tuple[Gold, ...]:
        """What is compared with which column of right answers."""
        return golds_of(self.gold_column, self.generation, self.ask)

    @property
    def prices(self) -> Prices:
        """What the run's hours and tokens cost."""
        return Prices.of(self.price_per_hour, self.engine)

    def _check_limits(self) -> None:
        limits = {
            "max-cost": self.max_cost,
            "max-hours": self.max_hours,
            "max-tokens-total": self.max_tokens_total,
        }
        for name, value in limits.items():
            if value is not None and not 0 < value < math.inf:
                raise JobError(f"{name} is {value}; give a number above 0")
        if self.cascade_sample is not None and not 0 < self.cascade_sample < 1:
            raise JobError(f"cascade-sample is {self.cascade_sample}; give a share above 0 and below 1")
        if self.max_cost is not None and not (self.price_per_hour or self.prices.has_tokens):
            raise JobError(
                "--max-cost needs --price-per-hour, the price of the whole cluster, or an endpoint's engine config "
                "with price_per_million_prompt_tokens and price_per_million_output_tokens"
            )

    def _check_order(self) -> None:
        if self.order_by is not None and self.group_by_prefix:
            raise JobError(
                "--order-by and --group-by-prefix are two orders of the same rows; give one of them"
            )

    def _check_reuse(self) -> None:
        if self.reuse is None:
            return
        if self.compute_each:
            raise JobError(
                "--compute-each computes every row, so nothing is taken from --reuse; give one of them"
            )
        if any(one.temperature != 0 and one.seed is None for one in self.generations):
            raise JobError(
                "--reuse needs repeatable answers: with --temperature and no --seed, each row is to have its own"
            )

    def _check_ids_given(self) -> None:
        for name, value in (("select", self.select), ("redo-changed", self.redo_changed)):
            if value and not self.id_columns:
                raise JobError(
                    f"--{name} needs --id-columns: without ids, a row is matched by the content of all its columns"
                )

    @property
    def replacing(self) -> str | None:
        """The first option by which the run replaces rows of the output; None if it only adds rows."""
        options = {
            "--retry-errors": self.retry_errors,
            "--redo-changed": self.redo_changed,
            "--new-spec replace": self.new_spec is NewSpec.REPLACE,
            f"--on-delete {self.on_delete}": self.on_delete is not OnDelete.KEEP,
        }
        return next((name for name, is_given in options.items() if is_given), None)

    def check_row_count(self, rows: int, *, source: str) -> None:
        """Raise ``RowCountError`` if ``source`` has more or fewer rows than the caller expects."""
        if rows == 0 and self.fail_if_empty:
            raise RowCountError(
                f"{source} has no rows (--fail-if-empty); look at what should have delivered them", rows=rows
            )
        if self.expect_rows is not None and rows not in self.expect_rows:
            raise RowCountError(
                f"{source} has {rows:,} rows, and --expect-rows allows {self.expect_rows}; look at what delivers "
                "them, or give other numbers",
                rows=rows,
            )

    @property
    def request_columns(self) -> RequestColumns:
        is_batch = self.input_format == BATCH_FORMAT
        return RequestColumns(
            self.source, self.overrides_column, self.select, self.ask, ROW_FAULT if is_batch else None
        )

    @property
    def generations(self) -> list[GenerationSpec]:
        """The settings of each question, or of the one request that a row makes."""
        return [question.generation for question in self.ask] or [self.generation]

    @property
    def error_limits(self) -> ErrorLimits:
        return ErrorLimits(
            max_rate=self.max_error_rate,
            fails_on_first=self.on_error is OnError.FAIL,
            quotes_rows=not self.no_sample,
        )

    @property
    def driver_dir(self) -> Path:
        return driver_directory("" if self.over_connect else self.output)


def driver_directory(output: str) -> Path:
    """Return the driver's directory for everything but rows: next to a local output, or under the working directory."""
    if is_path(output) and not is_remote(output):
        return Path(plain_path(output)).absolute().parent
    return Path.cwd() / "pipemax"
