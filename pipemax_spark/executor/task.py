"""Run in a Spark task: turn input batches into annotated batches, in the order in which rows complete.

It needs only pyarrow, and knows nothing of tables or chunks. Rows that wait for the engine are kept in small pieces, so
memory is bounded by the server's credit and one Arrow batch, whatever the partition's size.
"""

import contextlib
import queue
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from pipemax.wire import (
    COMPLETION_SCHEMA,
    FAULT_TYPE,
    ErrorCode,
    GenerationSpec,
    RequestError,
    annotation_fields,
    guarded_all,
    python_values,
)
from pipemax_spark.errors import OnError, RowFailedError
from pipemax_spark.executor.client import EngineOptions, complete
from pipemax_spark.executor.json_values import Parser
from pipemax_spark.executor.questions import (
    AnswersByRow,
    Question,
    question_key,
    row_annotations,
)
from pipemax_spark.executor.requests import KEY_COLUMN, piece_requests, without_helpers
from pipemax_spark.executor.response_format import compile_schema, load_schema, parse
from pipemax_spark.executor.spool import Spool
from pipemax_spark.executor.task_reports import TaskReporter

PIECE_ROWS = 256
_MAX_OUTPUT_BYTES = 64 * 2**20
"""About how many bytes of input rows leave in one batch: Arrow's arrays hold 2 GiB, and rows may hold images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """Everything that a task needs to know; it travels to the executors."""

    options: EngineOptions
    spec_hash: str
    run_id: str
    output_column: str
    questions: tuple[Question, ...] = ()
    """The questions about each row, each with a column of its own; without any, the row's prompt is the question."""
    on_error: OnError = OnError.ROW
    quotes_rows: bool = True
    """Whether an exception may hold a row's error message, which may quote its prompt or its output."""
    spool: str | None = None
    """Directory for completions that are not committed yet."""
    beats: str | None = None
    """A file, already there, that tasks write every few seconds: what their driver writes waits for their slots."""
    answered_by: str | None = None
    """The model that answers, where rows may have another model's answer: the annotation then says whose it is."""


ANSWERED_BY = (("model", pa.string()), ("score", pa.float64()))
"""Fields of the annotation with ``TaskPlan.answered_by``: the model, and how sure the small model was.

Where the answer is a score itself, nothing says how sure.
"""


def annotation_type(generation: GenerationSpec, *, names_model: bool = False) -> pa.StructType:
    """Return the type of the annotation column; with ``names_model`` it has ``ANSWERED_BY``."""
    parser = _parser(generation)
    answer, *others = [(name, COMPLETION_SCHEMA.field(name).type) for name in annotation_fields(generation)]
    return pa.struct(
        [
            answer,
            *([] if parser is None else [("parsed", parser.arrow_type)]),
            *[field for field in others if not names_model or field[0] not in dict(ANSWERED_BY)],
            *(field for field in ANSWERED_BY if names_model and field[0] != answer[0]),
            ("error", FAULT_TYPE),
            ("spec_hash", pa.string()),
            ("run_id", pa.string()),
            ("completed_at", pa.timestamp("us", tz="UTC")),
        ]
    )


def _parser(generation: GenerationSpec) -> Parser | None:
    text = generation.response_format
    return None if text is None else compile_schema(load_schema(text))


@dataclass(frozen=True, slots=True)
class AnnotateTask:
    """The function of ``mapInArrow``."""

    plan: TaskPlan

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        plan = self.plan
        annotator = QuestionAnnotator(plan) if plan.questions else Annotator(plan)
        with (
            Spool(plan.spool, partition=_partition(), beats=plan.beats) as spool,
            TaskReporter(plan.options.collector, plan.options.job_id) as reporter,
        ):
            pending = PendingRows(batches, spool, questions=len(plan.questions))
            for completions in pending.completions(plan.options):
                ended = annotator.take(completions, pending)
                if ended is not None:
                    reporter.count(annotator.unreported_errors)
                    yield ended


class QuestionAnnotator:
    """Annotates rows with a column for each question, and one for the row as a whole."""

    def __init__(self, plan: TaskPlan) -> None:
        self._name = plan.output_column
        self._questions = plan.questions
        self._type = annotation_type(GenerationSpec(), names_model=plan.answered_by is not None)
        self._answers = AnswersByRow(len(plan.questions))
        self._annotators = [
            Annotator(replace(plan, options=replace(plan.options, generation=question.generation)))
            for question in plan.questions
        ]
        self.unreported_errors: Counter[tuple[str, str]] = Counter()
        """See ``Annotator``."""

    def take(self, completions: pa.RecordBatch, pending: "PendingRows") -> pa.RecordBatch | None:
        """Return the annotated rows that these completions complete, if any."""
        answers = self._answers.add(completions)
        if not answers:
            return None
        rows, _ = pending.take(answers[0])  # ascending row ids stay in their order
        return _with_columns(rows, self.columns(answers))

    def columns(self, answers: Sequence[pa.RecordBatch]) -> dict[str, pa.Array]:
        """Return the columns for completions of the same rows, a batch for each question."""
        columns = {
            question.name: annotator.annotations(batch)
            for question, annotator, batch in zip(self._questions, self._annotators, answers, strict=True)
        }
        self.unreported_errors = sum(
            (annotator.unreported_errors for annotator in self._annotators), Counter()
        )
        whole = row_annotations([*columns.values()], self._questions, self._type)
        return {**columns, self._name: whole}


def _with_columns(rows: pa.RecordBatch, columns: dict[str, pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [*rows.columns, *columns.values()], names=[*rows.schema.names, *columns]
    )


class PendingRows:
    """Input rows that the engine has not completed.

    Pieces come in on the feeder's thread and leave on the task's thread, when their last row is complete. A row id is
    the piece's number times the piece's size, plus the row's place in it.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], spool: Spool, *, questions: int = 0) -> None:
        """Keep the rows of ``batches``; with ``questions``, a row has so many requests, and its id counts rows."""
        self._batches = batches
        self._questions = questions
        self._spool = spool
        self._recalled: queue.SimpleQueue[pa.RecordBatch] = queue.SimpleQueue()
        self._pieces: dict[int, pa.RecordBatch] = {}
        self._keys: dict[int, list[str]] = {}  # where there is a key column
        self._open_rows: dict[int, int] = {}
        self._largest_row = 1  # bytes, as the mean of a piece

    def completions(self, options: EngineOptions) -> Iterator[pa.RecordBatch]:
        """Yield completions of all rows (COMPLETION_SCHEMA), from the spool or otherwise from the engine."""
        for completions in complete(self.requests(), options, task=task_label()):
            self._keep(completions)
            yield from self._in_parts(completions)
            yield from self._take_recalled()
        yield from self._take_recalled()

    def _in_parts(self, completions: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Cut completions of rows that are too large to leave together."""
        rows = max(1, _MAX_OUTPUT_BYTES // self._largest_row)
        for start in range(0, completions.num_rows, rows):
            yield completions.slice(start, rows)

    def requests(self) -> Iterator[pa.RecordBatch]:
        """Yield batches of REQUEST_SCHEMA, without the rows that the spool has."""
        number = 0
        for batch in self._batches:
            for start in range(0, batch.num_rows, PIECE_ROWS):
                piece = _copied(batch.slice(start, PIECE_ROWS))
                # Keep the piece before its request is sent or answered by the spool: its completions may be taken at
                # once.
                self._open_rows[number] = piece.num_rows
                kept = self._pieces[number] = without_helpers(piece)
                self._largest_row = max(self._largest_row, kept.nbytes // kept.num_rows)
                request = piece_requests(piece, number * PIECE_ROWS, questions=self._questions)
                if KEY_COLUMN in piece.schema.names:
                    keys = self._keys[number] = self._request_keys(piece)
                    request = self._without_recalled(request, keys)
                yield request
                number += 1

    def take(self, completions: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return the input rows of these completions, and the completions in the same order; forget the rows."""
        row_ids: list[int] = completions.column("row_id").to_pylist()
        places = by_piece(row_ids)
        parts = []
        # Go piece by piece: taking from all pieces at once would copy every one of them whole.
        for number, indices in places.items():
            offsets = [row_ids[i] % PIECE_ROWS for i in indices]
            parts.append(self._pieces[number].take(pa.array(offsets, pa.int32())))
            self._open_rows[number] -= len(indices)
            if self._open_rows[number] == 0:
                del self._pieces[number], self._open_rows[number]
                self._keys.pop(number, None)
        order = [i for indices in places.values() for i in indices]
        rows = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
        return rows, completions.take(pa.array(order, pa.int32()))

    def _request_keys(self, piece: pa.RecordBatch) -> list[str]:
        keys: list[str] = piece.column(KEY_COLUMN).to_pylist()
        if not self._questions:
            return keys
        return [question_key(key, number) for key in keys for number in range(self._questions)]

    def _without_recalled(self, request: pa.RecordBatch, keys: list[str]) -> pa.RecordBatch:
        recalled = self._spool.recall(keys, request.column("row_id"))
        if not recalled.num_rows:
            return request
        self._recalled.put(recalled)
        return request.filter(pc.invert(pc.is_in(request.column("row_id"), recalled.column("row_id"))))

    def _take_recalled(self) -> Iterator[pa.RecordBatch]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield from self._in_parts(self._recalled.get_nowait())

    def _keep(self, completions: pa.RecordBatch) -> None:
        if self._keys:
            row_ids: list[int] = completions.column("row_id").to_pylist()
            size = PIECE_ROWS * max(1, self._questions)
            keys = [self._keys[i // size][i % size] for i in row_ids]
            self._spool.keep(pa.array(keys, pa.string()), completions)


class Annotator:
    """Turns completions into the annotation column."""

    def __init__(self, plan: TaskPlan) -> None:
        self._plan = plan
        self._parser = _parser(plan.options.generation)
        self._type = annotation_type(plan.options.generation, names_model=plan.answered_by is not None)
        self.unreported_errors: Counter[tuple[str, str]] = Counter()
        """(code, message) → rows of the last batch that failed here: the engine server does not know of them."""

    def take(self, completions: pa.RecordBatch, pending: PendingRows) -> pa.RecordBatch:
        """Return the annotated rows of these completions."""
        rows, completions = pending.take(completions)
        return _with_columns(rows, {self._plan.output_column: self.annotations(completions)})

    def annotations(self, completions: pa.RecordBatch) -> pa.StructArray:
        columns = {name: completions.column(name) for name in completions.schema.names}
        rows = completions.num_rows
        codes: list[str | None] = columns.pop("error_code").to_pylist()
        messages: list[str | None] = columns.pop("error_message").to_pylist()
        self.unreported_errors = Counter()
        if self._parser is not None:
            columns["parsed"] = self._parsed(self._parser, columns["text"], codes, messages)
        self._fail_on(codes, messages)
        columns["error"] = pa.array(
            [
                None if code is None else {"code": code, "message": message}
                for code, message in zip(codes, messages, strict=True)
            ],
            FAULT_TYPE,
        )
        columns["spec_hash"] = pa.repeat(pa.scalar(self._plan.spec_hash), rows)
        columns["run_id"] = pa.repeat(pa.scalar(self._plan.run_id), rows)
        if self._plan.answered_by is not None:
            columns["model"] = pa.repeat(pa.scalar(self._plan.answered_by), rows)
            if self._plan.options.generation.task != "score":
                columns["score"] = pa.nulls(rows, pa.float64())
        fields = list(self._type)
        return pa.StructArray.from_arrays([columns[field.name] for field in fields], fields=fields)

    def _parsed(
        self, parser: Parser, texts: pa.Array, codes: list[str | None], messages: list[str | None]
    ) -> pa.Array:
        """Return the texts' values.

        A text that does not match the format makes its row an error in ``codes`` and ``messages``.
        """
        is_good = pa.array([code is None for code in codes], pa.bool_())
        values, faults = parsed_texts(parser, pc.if_else(is_good, texts, pa.scalar(None, texts.type)))
        for i, fault in enumerate(faults):
            if fault is not None:
                codes[i], messages[i] = fault.code, fault.message
                self.unreported_errors[fault.code, fault.message] += 1
        return values

    def _fail_on(self, codes: list[str | None], messages: list[str | None]) -> None:
        if self._plan.on_error is not OnError.FAIL:
            return
        for code, message in zip(codes, messages, strict=True):
            if code is not None:
                quote = f": {message}" if self._plan.quotes_rows else ""
                raise RowFailedError(f"a row failed with {code}{quote}")


def parsed_texts(parser: Parser, texts: pa.Array) -> tuple[pa.Array, list[RequestError | None]]:
    """Return the texts' values, and the error of each text that has none; a null has neither."""
    null = pa.nulls(1, parser.arrow_type)

    def value_of(text: str | None) -> pa.Array:
        return null if text is None else pa.array([parse(text, parser)], parser.arrow_type)

    values, faults = guarded_all(value_of, python_values(texts), ErrorCode.RESPONSE_FORMAT)
    arrays = [null if value is None else value for value in values]
    return pa.concat_arrays(arrays) if arrays else pa.nulls(0, parser.arrow_type), faults


def by_piece(row_ids: Sequence[int]) -> dict[int, list[int]]:
    """Map each piece to the places of its rows in ``row_ids``."""
    places: dict[int, list[int]] = {}
    for i, row_id in enumerate(row_ids):
        places.setdefault(row_id // PIECE_ROWS, []).append(i)
    return places


def _copied(piece: pa.RecordBatch) -> pa.RecordBatch:
    """Return a copy: a slice pins the whole batch that it was cut from, a copy does not."""
    return piece.take(pa.array(range(piece.num_rows), pa.int32()))


def _partition() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def task_label() -> str:
    """Return this task's stage, partition and attempt, by which the engine server distinguishes tasks."""
    from pyspark import TaskContext  # present wherever a task runs

    context = TaskContext.get()
    if context is None:
        return "no task"
    return f"stage {context.stageId()} partition {context.partitionId()} attempt {context.attemptNumber()}"
