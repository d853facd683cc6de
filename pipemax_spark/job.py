"""The annotation job, step by step: read, check, find what is left, run it in chunks, report.

Whatever ends a run, the next one finds what is left from the output table alone.
"""

import hashlib
import json
import logging
import math
import sys
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pipemax.wire import GenerationSpec, PreflightReply, PreflightRequest
from pipemax_spark.annotate import ANNOTATION, AnnotationPlan, annotate_with, output_schema
from pipemax_spark.chunks import (
    FIRST_CHUNK_ROWS,
    SLICES,
    Chunk,
    WorkDirectory,
    check_ids,
    default_work_directory,
    done_rows,
    rows_left,
)
from pipemax_spark.client import EngineOptions
from pipemax_spark.collector import Collector
from pipemax_spark.errors import JobError
from pipemax_spark.preflight import run_preflight
from pipemax_spark.progress import Progress
from pipemax_spark.prompts import PromptSource, check_column
from pipemax_spark.report import Findings, Summary, plot, print_report
from pipemax_spark.response_format import load_schema
from pipemax_spark.tables import DeltaTarget, Source, is_path, read_source
from pipemax_spark.tracking import Tracker

log = logging.getLogger(__name__)

_DRY_RUN_SAMPLE = 200
_SHOWN_ROWS = 5
_TERMINAL_PERIOD_S, _LOG_PERIOD_S = 2.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The command line, read and typed."""

    input: str
    output: str
    source: PromptSource
    engine: Mapping[str, Any]
    generation: GenerationSpec
    id_columns: tuple[str, ...] = ()
    input_format: str | None = None
    input_options: Mapping[str, str] = field(default_factory=dict)
    engine_python: str | None = None
    fails_on_error: bool = False
    max_error_rate: float = 0.5
    retries_errors: bool = False
    allows_new_spec: bool = False
    work_dir: str | None = None
    commit_every_s: float = 900.0
    limit: int | None = None
    mlflow_experiment: str = "pipemax"
    price_per_hour: float | None = None
    gold_column: str | None = None
    summary_file: Path | None = None
    is_dry_run: bool = False
    log_dir: Path

    @property
    def driver_dir(self) -> Path:
        """Where the driver puts what is not rows: beside a local output, else under the working directory."""
        local = self.output.removeprefix("file:")
        if is_path(self.output) and "://" not in local:
            return Path(local).absolute().parent
        return Path.cwd() / "pipemax"


class AnnotationJob:
    """One run."""

    def __init__(self, spark: Any, options: JobOptions, console: Console) -> None:
        self._spark = spark
        self._options = options
        self._console = console
        self._run_id = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
        self._output = DeltaTarget(options.output)
        self._cancelled_because: str | None = None

    def run(self) -> Summary | None:
        """The summary; None after a dry run. ``JobError`` for what the user can mend."""
        options, console = self._options, self._console
        source = self._read_source()
        reply = self._preflight(source.rows)
        spec = self._spec(reply)
        spec_hash = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
        self._check_output(spec_hash, spec)
        rows_in = source.rows.count()
        console.print(f"Input    {source.description}: {rows_in:,} rows")
        console.print(f"Model    {options.engine['model']}, at most {reply.max_model_len:,} tokens a row")
        if options.is_dry_run:
            self._print_dry_run(source.rows, rows_in, reply, spec_hash)
            return None
        plan = self._plan(spec_hash)
        self._output.prepare(self._spark, output_schema(source.rows, plan), spec_hash, spec)
        work = WorkDirectory(self._spark, self._work_dir(), run_id=self._run_id)
        try:
            left = work.write(self._left(source.rows, spec_hash))
            console.print(f"Output   {options.output}: {rows_in - left:,} done before, {left:,} to do")
            if left == 0:
                console.print("Nothing new to do; no engine was started.")
                summary = Summary(
                    rows_in=rows_in, rows_out=0, rows_error=0, rows_skipped=rows_in, output=options.output
                )
                self._finish(summary, self._findings(spec_hash, shows_sample=False), {})
                return summary
            return self._annotate(work, plan, reply, rows_in=rows_in)
        finally:
            work.remove()

    # -- before any engine starts -----------------------------------------------------------------------------

    def _read_source(self) -> Source:
        options = self._options
        source = read_source(
            self._spark, options.input, file_format=options.input_format, options=options.input_options
        )
        if ANNOTATION in source.rows.columns:
            raise JobError(f"input {options.input!r} has a column {ANNOTATION!r} already; rename it first")
        options.source.column(source.rows.columns)  # names the column that does not exist
        if options.gold_column is not None:
            check_column(options.gold_column, source.rows.columns)
            _check_gold(options.gold_column, options.generation.response_format)
        if options.id_columns:
            check_ids(source.rows, options.id_columns)
        return source

    def _preflight(self, rows: Any) -> PreflightReply:
        options = self._options
        sample = _DRY_RUN_SAMPLE if options.is_dry_run else 1
        prompt = options.source.column(rows.columns)
        if options.source.messages_column is not None:
            from pyspark.sql import functions as F  # noqa: N812

            prompt = F.array_join(F.transform(prompt, lambda message: message["content"]), "\n")
        prompts = [row[0] for row in rows.select(prompt).limit(sample).collect()]
        request = PreflightRequest(
            engine=dict(options.engine), generation=options.generation, prompts=prompts
        )
        return run_preflight(self._spark, request, engine_python=options.engine_python)

    def _spec(self, reply: PreflightReply) -> dict[str, Any]:
        """What makes two outputs comparable: everything that decides a row's answer, nothing else."""
        options = self._options
        generation = asdict(options.generation)
        if generation["response_format"] is not None:
            generation["response_format"] = load_schema(generation["response_format"])
        engine = {name: options.engine.get(name) for name in ("tokenizer", "dtype", "quantization", "chat")}
        return {
            "model": reply.model_fingerprint,
            "max_model_len": reply.max_model_len,
            "engine": {name: value for name, value in engine.items() if value is not None},
            "prompt": {name: value for name, value in asdict(options.source).items() if value is not None},
            **{name: value for name, value in generation.items() if value not in (None, ())},
        }

    def _check_output(self, spec_hash: str, spec: Mapping[str, Any]) -> None:
        if not self._output.exists(self._spark):
            return
        specs = self._output.specs(self._spark)
        if not specs and ANNOTATION not in self._output.read(self._spark).columns:
            raise JobError(f"output {self._output.name!r} is a table of something else; name a new one")
        if not specs or spec_hash in specs or self._options.allows_new_spec:
            return
        nearest = min(specs.values(), key=lambda other: len(_differences(other, spec)))
        changes = "; ".join(
            f"{name} was {_brief(old)}, is {_brief(new)}"
            for name, (old, new) in _differences(nearest, spec).items()
        )
        raise JobError(
            f"output {self._output.name!r} holds annotations made in another way: {changes}. Name another output, or "
            "give --new-spec to add rows made in the new way beside the old ones (told apart by annotation.spec_hash)"
        )

    def _left(self, rows: Any, spec_hash: str) -> Any:
        if self._options.retries_errors:
            before = self._output.version(self._spark)
            self._spark.sql(
                f"DELETE FROM {self._output.sql_name} "
                f"WHERE {ANNOTATION}.spec_hash = '{spec_hash}' AND {ANNOTATION}.error IS NOT NULL"
            )
            if self._output.version(self._spark) > before:
                self._console.print("         error rows of earlier runs were taken out, to be tried again")
        left = rows_left(rows, done_rows(self._spark, self._output, spec_hash), self._options.id_columns)
        return left if self._options.limit is None else left.limit(self._options.limit)

    def _print_dry_run(self, rows: Any, rows_in: int, reply: PreflightReply, spec_hash: str) -> None:
        left = rows_left(
            rows, done_rows(self._spark, self._output, spec_hash), self._options.id_columns
        ).count()
        left = left if self._options.limit is None else min(left, self._options.limit)
        counted = reply.prompt_tokens or [0]
        mean = sum(counted) / len(counted)
        longest = max(counted)
        console = self._console
        console.print(
            f"Output   {self._output.name}: {rows_in - left:,} done before or left out, {left:,} to do"
        )
        console.print(
            f"Tokens   about {mean * left:,.0f} of prompt ({mean:,.1f} a row, {longest:,} at most, from the first "
            f"{len(counted):,} rows), and up to {self._options.generation.max_tokens * left:,} of output"
        )
        console.print("The first prompt, as the model would see it:")
        console.print(reply.first_prompt, markup=False, highlight=False)
        console.print("Dry run: nothing was written and no engine was started.")

    # -- running ----------------------------------------------------------------------------------------------

    def _plan(self, spec_hash: str) -> AnnotationPlan:
        options = self._options
        engine = EngineOptions(
            engine=options.engine,
            generation=options.generation,
            job_id=self._run_id,
            engine_python=options.engine_python,
            log_dir=str(options.log_dir),
        )
        return AnnotationPlan(
            source=options.source,
            options=engine,
            spec_hash=spec_hash,
            run_id=self._run_id,
            fails_on_error=options.fails_on_error,
        )

    def _work_dir(self) -> str:
        return self._options.work_dir or default_work_directory(self._spark, self._output)

    def _annotate(
        self, work: WorkDirectory, plan: AnnotationPlan, reply: PreflightReply, *, rows_in: int
    ) -> Summary:
        options = self._options
        started_s = time.monotonic()
        host = self._spark.conf.get("spark.driver.host")
        tracker = Tracker(
            options.mlflow_experiment, local_store=options.driver_dir / "mlflow", warn=self._warn
        )
        tracker.start(self._run_id, self._params(plan, reply))
        is_terminal = self._console.is_terminal
        status = "FAILED"
        samples = []
        try:
            with (
                Collector(host, self._run_id) as collector,
                Progress(
                    collector,
                    rows_total=work.rows,
                    max_error_rate=options.max_error_rate,
                    cancel=self._cancel,
                    show=lambda line: self._console.print(f"  {line}", highlight=False),
                    show_period_s=_TERMINAL_PERIOD_S if is_terminal else _LOG_PERIOD_S,
                    price_per_hour=options.price_per_hour,
                ) as progress,
            ):
                reporting = replace(plan, options=replace(plan.options, collector=collector.address))
                samples = progress.samples
                self._run_chunks(work, reporting, progress, tracker)
                engines = collector.engines()
            status = "FINISHED"
        finally:
            tracker.log_samples(samples)
            if status != "FINISHED":
                tracker.finish("FAILED", {}, [])
        summary = self._summarise(rows_in, rows_in - work.rows, time.monotonic() - started_s, engines)
        run_dir = options.driver_dir / "runs" / self._run_id
        plot(samples, run_dir / "throughput.png")
        summary = replace(summary, mlflow_run_id=tracker.run_id)
        summary.write(run_dir / "summary.json")
        totals = {
            name: float(value) for name, value in asdict(summary).items() if isinstance(value, int | float)
        }
        tracker.finish(status, totals, [run_dir / "summary.json", run_dir / "throughput.png"])
        places = {
            "MLflow run": f"{summary.mlflow_run_id or 'none'} in {tracker.uri}",
            "Plot": str(run_dir / "throughput.png"),
        }
        self._finish(summary, self._findings(plan.spec_hash, shows_sample=True), places)
        return summary

    def _run_chunks(
        self, work: WorkDirectory, plan: AnnotationPlan, progress: Progress, tracker: Tracker
    ) -> None:
        """Two at a time: while one chunk's last rows decode, the next one's fill the engine."""
        application_id = hashlib.sha256(
            f"{self._output.table_id(self._spark)}/{self._run_id}".encode()
        ).hexdigest()
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="pipemax-chunk") as pool:
            try:
                while True:
                    while len(running) < 2 and (chunk := work.next_chunk(self._chunk_rows(progress))):
                        running.add(pool.submit(self._run_chunk, work, plan, chunk, application_id))
                    if not running:
                        return
                    done, running = wait(running, timeout=30.0, return_when=FIRST_COMPLETED)
                    tracker.log_samples(progress.samples)
                    for future in done:
                        future.result()
            except BaseException as error:
                self._spark.sparkContext.cancelJobsWithTag(self._run_id)
                if self._cancelled_because is not None:
                    raise JobFailedError(self._cancelled_because) from error
                raise

    def _chunk_rows(self, progress: Progress) -> int:
        rate = progress.rows_per_s()
        return FIRST_CHUNK_ROWS if rate is None else max(1, round(rate * self._options.commit_every_s))

    def _run_chunk(
        self, work: WorkDirectory, plan: AnnotationPlan, chunk: Chunk, application_id: str
    ) -> None:
        context = self._spark.sparkContext
        context.addJobTag(self._run_id)
        context.setJobDescription(f"annotate chunk {chunk.number} of run {self._run_id}")
        rows = work.read(chunk, partitions=self._partitions(work, chunk))
        self._output.commit(
            annotate_with(rows, plan),
            application_id=application_id,
            number=chunk.number,
            note=f"pipemax {self._run_id} chunk {chunk.number}",
        )

    def _partitions(self, work: WorkDirectory, chunk: Chunk) -> int:
        """Every slot busy, and pieces small enough that the slots end at about the same time."""
        slots: int = self._spark.sparkContext.defaultParallelism
        rows = work.rows * (chunk.end_slice - chunk.first_slice) / SLICES
        return max(slots, min(4 * slots, math.ceil(rows / 250)))

    def _cancel(self, reason: str) -> None:
        self._cancelled_because = reason
        self._spark.sparkContext.cancelJobsWithTag(self._run_id)

    # -- after ------------------------------------------------------------------------------------------------

    def _summarise(self, rows_in: int, rows_skipped: int, seconds: float, engines: int) -> Summary:
        from pyspark.sql import functions as F  # noqa: N812

        note = f"pipemax {self._run_id} "
        committed = self._output.rows_committed(self._spark, note)
        own = self._output.read(self._spark).where(f"{ANNOTATION}.run_id = '{self._run_id}'")
        row = own.agg(
            F.count(f"{ANNOTATION}.error").alias("errors"),
            F.coalesce(F.sum(f"{ANNOTATION}.prompt_tokens"), F.lit(0)).alias("prompt"),
            F.coalesce(F.sum(f"{ANNOTATION}.completion_tokens"), F.lit(0)).alias("completion"),
        ).head()
        return Summary(
            rows_in=rows_in,
            rows_out=committed,
            rows_error=row["errors"],
            rows_skipped=rows_skipped,
            prompt_tokens=row["prompt"],
            completion_tokens=row["completion"],
            seconds=round(seconds, 3),
            rows_per_s=round(committed / seconds, 3),
            tokens_per_s=round((row["prompt"] + row["completion"]) / seconds, 3),
            output=self._output.name,
            engines=engines,
        )

    def _findings(self, spec_hash: str, *, shows_sample: bool) -> Findings:
        from pyspark.sql import functions as F  # noqa: N812

        rows = self._output.read(self._spark).where(f"{ANNOTATION}.spec_hash = '{spec_hash}'")
        own = rows.where(f"{ANNOTATION}.run_id = '{self._run_id}'")
        errors = own.where(f"{ANNOTATION}.error IS NOT NULL").groupBy(f"{ANNOTATION}.error.code")
        counted = errors.agg(
            F.count("*").alias("rows"), F.first(f"{ANNOTATION}.error.message").alias("example")
        )
        accuracy = None
        if (gold := self._options.gold_column) is not None:
            right = (F.col(gold) == F.col(f"{ANNOTATION}.parsed.{gold}")).cast("double")
            share, compared = rows.agg(F.avg(F.coalesce(right, F.lit(0.0))), F.count("*")).head()
            accuracy = (gold, share or 0.0, compared)
        return Findings(
            errors={row["code"]: (row["rows"], row["example"]) for row in counted.collect()},
            sample=self._sample(own) if shows_sample else (),
            accuracy=accuracy,
        )

    def _sample(self, rows: Any) -> list[dict[str, Any]]:
        ids = list(self._options.id_columns) or rows.columns[:1]
        gold = [self._options.gold_column] if self._options.gold_column else []
        chosen = rows.where(f"{ANNOTATION}.error IS NULL").limit(_SHOWN_ROWS).collect()
        return [
            {name: row[name] for name in [*ids, *gold]} | {"text": row[ANNOTATION]["text"]} for row in chosen
        ]

    def _finish(self, summary: Summary, findings: Findings, places: dict[str, str]) -> None:
        options = self._options
        if options.summary_file is not None:
            summary.write(options.summary_file)
        places = {"Delta table": summary.output, **places, "Logs": str(options.log_dir)}
        print_report(self._console, summary, findings, places, price_per_hour=options.price_per_hour)

    def _params(self, plan: AnnotationPlan, reply: PreflightReply) -> dict[str, Any]:
        spark_settings = {
            f"spark.{name}": self._spark.conf.get(f"spark.{name}", "")
            for name in ("master", "executor.instances", "executor.cores", "executor.memory")
        }
        return {
            "run": self._run_id,
            "spec_hash": plan.spec_hash,
            "input": self._options.input,
            "output": self._options.output,
            "model_fingerprint": reply.model_fingerprint,
            **{f"engine.{name}": value for name, value in reply.engine.items()},
            **{f"generation.{name}": value for name, value in asdict(plan.options.generation).items()},
            **spark_settings,
            "version.spark": self._spark.version,
            "version.python": sys.version.split()[0],
            **{f"version.{name}": version for name, version in reply.versions.items()},
        }

    def _warn(self, text: str) -> None:
        self._console.print(f"  Warning: {text}", markup=False, highlight=False)


class JobFailedError(RuntimeError):
    """The job ended itself; the message says why. Chunks committed before stay."""


def _check_gold(column: str, response_format: str | None) -> None:
    properties = load_schema(response_format).get("properties", {}) if response_format else {}
    if column not in properties:
        raise JobError(
            f"gold-column {column!r} is compared with the property of that name in the response format, which has "
            f"{', '.join(properties) or 'none'}"
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted({*old, *new})
    return {
        name: (old.get(name), new.get(name))
        for name in names
        if _plain(old.get(name)) != _plain(new.get(name))
    }


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _brief(value: Any) -> str:
    text = _plain(value)
    return text if len(text) <= 120 else text[:117] + "…"
