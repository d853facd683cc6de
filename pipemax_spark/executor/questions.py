"""Ask several questions about each row: a request for each, a column for each, and the row as a whole.

The requests of a row follow one another, because they begin with the same text: the engine reads it once. Each of them
is spooled, fails and is reported like a request of its own. A row leaves the task when all of its questions have ended.
This module knows nothing of sessions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipemax.wire import COMPLETION_SCHEMA, FAULT_TYPE, REQUEST_SCHEMA, ErrorCode, GenerationSpec

NULL_PROMPT = "the prompt is null, because a column of its template is: "
_ROW_ID = COMPLETION_SCHEMA.get_field_index("row_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One of the questions about a row."""

    name: str
    """The name of its column."""
    template: str
    """The text that follows the row's prompt; it may have ``{column}`` in it."""
    generation: GenerationSpec


def question_requests(
    requests: pa.RecordBatch, endings: pa.ListArray, nulls: pa.ListArray, questions: int
) -> pa.RecordBatch:
    """Return a request for each question of each row, row by row.

    A prompt is the row's prompt and the question's ending; row ids are ``row_id * questions + question``. ``nulls``
    holds, for each ending that is null, the name of the column that makes it null.
    """
    rows = requests.num_rows
    repeated = requests.take(pa.array([row for row in range(rows) for _ in range(questions)], pa.int64()))
    number = pa.array([*range(questions)] * rows, pa.int32())
    columns = {name: repeated.column(name) for name in repeated.schema.names}
    columns["question"] = number
    columns["row_id"] = pc.add(pc.multiply(repeated.column("row_id"), questions), number.cast(pa.int64()))
    faults = [
        fault or (name and {"code": ErrorCode.EMPTY_PROMPT, "message": f"{NULL_PROMPT}{name}"})
        for fault, name in zip(columns["fault"].to_pylist(), nulls.flatten().to_pylist(), strict=True)
    ]
    columns["fault"] = pa.array(faults, FAULT_TYPE)
    columns["prompt"] = pc.binary_join_element_wise(
        repeated.column("prompt"), endings.flatten().cast(pa.string()), ""
    )
    return pa.RecordBatch.from_arrays([columns[name] for name in REQUEST_SCHEMA.names], schema=REQUEST_SCHEMA)


def question_key(row_key: str, question: int) -> str:
    """Return the key by which the spool identifies a row's question."""
    return f"{row_key}:{question}"


class AnswersByRow:
    """Completions of questions, until all of a row's have come."""

    def __init__(self, questions: int) -> None:
        self._questions = questions
        self._held: dict[int, dict[int, pa.RecordBatch]] = {}
        """Row → question → its completion: a slice, which keeps its batch until all slices of it have gone."""

    def add(self, completions: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Take completions; return those of the rows that are now complete.

        There is one batch for each question, with the rows' ids in ascending order, or none if no row is complete.
        """
        complete = []
        for place, request_id in enumerate(completions.column("row_id").to_pylist()):
            row, question = divmod(request_id, self._questions)
            answers = self._held.setdefault(row, {})
            answers[question] = completions.slice(place, 1)
            if len(answers) == self._questions:
                complete.append(row)
        if not complete:
            return []
        complete.sort()
        ended = [self._held.pop(row) for row in complete]
        row_ids, field = pa.array(complete, pa.int64()), COMPLETION_SCHEMA.field(_ROW_ID)
        batches = []
        for question in range(self._questions):
            table = pa.Table.from_batches([answers[question] for answers in ended])
            # Combined, these few rows are one batch. (pyarrow 18 cannot concatenate batches themselves.)
            batches += table.set_column(_ROW_ID, field, row_ids).combine_chunks().to_batches()
        return batches


def row_annotations(
    answers: Sequence[pa.StructArray], questions: Sequence[Question], kind: pa.StructType
) -> pa.StructArray:
    """Return the annotations of whole rows: tokens of all questions, the first error, and when the last one ended."""
    rows = len(answers[0])
    columns: dict[str, pa.Array] = {
        name: _sum([answer.field(name) for answer in answers])
        for name in ("prompt_tokens", "completion_tokens")
    }
    ends = [answer.field("completed_at") for answer in answers]
    # Arrow has no maximum of times with a zone.
    last = pc.max_element_wise(*(end.cast(pa.int64()) for end in ends))
    columns["completed_at"] = last.cast(ends[0].type)
    for name in ("spec_hash", "run_id", "model"):  # equal in all of them; the model only in a cascade
        if kind.get_field_index(name) >= 0:
            columns[name] = answers[0].field(name)
    by_question = [answer.field("error").to_pylist() for answer in answers]
    errors = []
    for of_row in zip(*by_question, strict=True):
        first = next(((n, error) for n, error in enumerate(of_row) if error is not None), None)
        errors.append(
            None
            if first is None
            else {"code": first[1]["code"], "message": f"{questions[first[0]].name}: {first[1]['message']}"}
        )
    columns["error"] = pa.array(errors, kind.field("error").type)
    fields = list(kind)
    arrays = [columns[f.name] if f.name in columns else pa.nulls(rows, f.type) for f in fields]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _sum(columns: Sequence[pa.Array]) -> pa.Array:
    total = pc.fill_null(columns[0], 0)
    for column in columns[1:]:
        total = pc.add(total, pc.fill_null(column, 0))
    return total
