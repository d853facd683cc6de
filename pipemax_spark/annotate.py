"""A DataFrame in, the same rows with one more column out: ``annotation``, a struct with the model's answer.

Each task sends its rows to its executor's engine server and yields them as they complete, so rows change their
order. What waits for the engine is bounded by the server's credit, whatever the partition's size.
"""

import bisect
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipemax.wire import REQUEST_SCHEMA, CollectorAddress, ErrorCode, GenerationSpec
from pipemax_spark.client import EngineOptions, complete
from pipemax_spark.prompts import PromptSource
from pipemax_spark.response_format import arrow_type, load_schema, parse

ANNOTATION = "annotation"
_PROMPT = "__pipemax_prompt"
_ERROR_TYPE = pa.struct([("code", pa.string()), ("message", pa.string())])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationPlan:
    """How to annotate: what a task needs to know, and no more. Travels to the executors."""

    source: PromptSource
    options: EngineOptions
    spec_hash: str
    run_id: str
    fails_on_error: bool = False
    """Raise at the first error row instead of keeping it."""

    @property
    def parsed_type(self) -> pa.DataType | None:
        text = self.options.generation.response_format
        return None if text is None else arrow_type(load_schema(text))

    @property
    def annotation_type(self) -> pa.StructType:
        parsed = self.parsed_type
        return pa.struct(
            [
                ("text", pa.string()),
                *([] if parsed is None else [("parsed", parsed)]),
                ("finish_reason", pa.string()),
                ("prompt_tokens", pa.int32()),
                ("completion_tokens", pa.int32()),
                ("error", _ERROR_TYPE),
                ("spec_hash", pa.string()),
                ("run_id", pa.string()),
                ("completed_at", pa.timestamp("us", tz="UTC")),
            ]
        )


def annotate(
    df: Any,
    *,
    engine: Mapping[str, Any] | None = None,
    model: str | None = None,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    template: str | None = None,
    response_format: Mapping[str, Any] | str | None = None,
    engine_python: str | None = None,
    collector: CollectorAddress | None = None,
    **generation: Any,
) -> Any:
    """``df`` with the column ``annotation``; lazy, like any transformation, and evaluated anew by every action.

    Give ``model`` or a whole ``engine`` config, and one of ``prompt_column``, ``messages_column`` and ``template``
    (such as ``"Summarise: {text}"``). ``generation`` takes the fields of ``pipemax.wire.GenerationSpec``:
    ``system``, ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``stop``, ``seed``. Write the result to a table
    before using it twice. ``ValueError`` for what is wrong with the arguments.
    """
    if (model is None) == (engine is None or "model" not in engine):
        raise ValueError("give either model or an engine config that names one")
    schema_text = json.dumps(response_format) if isinstance(response_format, Mapping) else response_format
    options = EngineOptions(
        engine={**(engine or {}), **({"model": model} if model else {})},
        generation=GenerationSpec(
            response_format=schema_text, stop=tuple(generation.pop("stop", ())), **generation
        ),
        job_id=uuid.uuid4().hex,
        engine_python=engine_python,
        collector=collector,
    )
    source = PromptSource(prompt_column=prompt_column, messages_column=messages_column, template=template)
    return annotate_with(
        df, AnnotationPlan(source=source, options=options, spec_hash="", run_id=options.job_id)
    )


def annotate_with(df: Any, plan: AnnotationPlan) -> Any:
    """As ``annotate``, from a ready plan."""
    if ANNOTATION in df.columns:
        raise ValueError(f"the input has a column {ANNOTATION!r} already; rename it first")
    prepared = df.withColumn(_PROMPT, plan.source.column(df.columns))
    return prepared.mapInArrow(_task(plan), output_schema(df, plan))


def output_schema(df: Any, plan: AnnotationPlan) -> Any:
    """The Spark schema of what ``annotate_with`` returns."""
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructField, StructType

    return StructType([*df.schema.fields, StructField(ANNOTATION, from_arrow_type(plan.annotation_type))])


def _task(plan: AnnotationPlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def annotate_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pending = _PendingRows(batches, is_messages=plan.source.messages_column is not None)
        for completions in complete(pending.requests(), plan.options, task=_task_label()):
            yield _annotated(pending.take(completions.column("row_id").to_pylist()), completions, plan)

    return annotate_partition


def _task_label() -> str:
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return "no task"
    return f"stage {context.stageId()} partition {context.partitionId()} attempt {context.attemptNumber()}"


class _PendingRows:
    """Input rows that the engine has not completed. Batches come in on the feeder's thread and leave, row by row,
    on the task's; a batch is dropped when its last row has left."""

    def __init__(self, batches: Iterator[pa.RecordBatch], *, is_messages: bool) -> None:
        self._batches = batches
        self._prompt_field = "messages" if is_messages else "prompt"
        self._starts: list[int] = []  # row id of each kept batch's first row, ascending
        self._kept: dict[
            int, tuple[pa.RecordBatch, int]
        ] = {}  # by that row id: the batch, and its rows still open

    def requests(self) -> Iterator[pa.RecordBatch]:
        next_row_id = 0
        for batch in self._batches:
            count = batch.num_rows
            prompt = batch.column(batch.schema.get_field_index(_PROMPT))
            kept = batch.select([name for name in batch.schema.names if name != _PROMPT])
            # Before the request is sent: its completion may come at once.
            self._kept[next_row_id] = (kept, count)
            self._starts.append(next_row_id)
            columns = [
                pa.array(range(next_row_id, next_row_id + count), pa.int64())
                if field.name == "row_id"
                else prompt.cast(field.type)
                if field.name == self._prompt_field
                else pa.nulls(count, field.type)
                for field in REQUEST_SCHEMA
            ]
            next_row_id += count
            yield pa.RecordBatch.from_arrays(columns, schema=REQUEST_SCHEMA)

    def take(self, row_ids: list[int]) -> pa.RecordBatch:
        """These rows, in this order; they are forgotten."""
        starts = [self._starts[bisect.bisect_right(self._starts, row_id) - 1] for row_id in row_ids]
        offsets: dict[int, int] = {}  # where each batch's rows begin in the concatenation below
        total = 0
        parts = []
        for start in dict.fromkeys(starts):
            batch, _ = self._kept[start]
            parts.append(batch)
            offsets[start] = total
            total += batch.num_rows
        indices = [offsets[start] + row_id - start for start, row_id in zip(starts, row_ids, strict=True)]
        rows = pa.concat_tables([pa.Table.from_batches([part]) for part in parts]).take(pa.array(indices))
        for start in starts:
            batch, still_open = self._kept[start]
            self._kept[start] = (batch, still_open - 1)
            if still_open == 1:
                del self._kept[start]
                self._starts.remove(start)
        return rows.combine_chunks().to_batches()[0]


def _annotated(rows: pa.RecordBatch, completions: pa.RecordBatch, plan: AnnotationPlan) -> pa.RecordBatch:
    columns = {name: completions.column(name) for name in completions.schema.names}
    codes, messages = columns["error_code"].to_pylist(), columns["error_message"].to_pylist()
    arrays: dict[str, pa.Array] = {
        "text": columns["text"],
        "finish_reason": columns["finish_reason"],
        "prompt_tokens": columns["prompt_tokens"],
        "completion_tokens": columns["completion_tokens"],
        "spec_hash": pa.array([plan.spec_hash] * len(codes), pa.string()),
        "run_id": pa.array([plan.run_id] * len(codes), pa.string()),
        "completed_at": columns["completed_at"],
    }
    if (parsed_type := plan.parsed_type) is not None:
        arrays["parsed"] = _parsed(columns["text"].to_pylist(), parsed_type, codes, messages)
    errors = [
        None if code is None else {"code": code, "message": message}
        for code, message in zip(codes, messages, strict=True)
    ]
    if plan.fails_on_error and (first := next((error for error in errors if error), None)):
        raise RowFailedError(f"a row failed with {first['code']}: {first['message']}")
    arrays["error"] = pa.array(errors, _ERROR_TYPE)
    fields = list(plan.annotation_type)
    annotation = pa.StructArray.from_arrays([arrays[field.name] for field in fields], fields=fields)
    return pa.RecordBatch.from_arrays([*rows.columns, annotation], names=[*rows.schema.names, ANNOTATION])


def _parsed(
    texts: list[str | None], parsed_type: pa.DataType, codes: list[str | None], messages: list[str | None]
) -> pa.Array:
    """The texts' values; where one does not fit the schema, its row becomes an error in ``codes`` and ``messages``."""
    values: list[Any] = []
    for i, text in enumerate(texts):
        value = None
        if text is not None and codes[i] is None:
            try:
                value = parse(text, parsed_type)
            except ValueError as error:
                codes[i], messages[i] = ErrorCode.RESPONSE_FORMAT.value, str(error)
        values.append(value)
    return pa.array(values, parsed_type)


class RowFailedError(RuntimeError):
    """A row ended in an error under ``--on-error fail``."""
