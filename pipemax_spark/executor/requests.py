"""Turn rows with the columns that the driver adds into requests: the one way from a table to the engine.

The tasks that annotate and the sample of a dry run come through here. This module knows nothing of sessions.
"""

from dataclasses import asdict

import pyarrow as pa

from pipemax.wire import FAULT_TYPE, REQUEST_SCHEMA, RequestError
from pipemax_spark.executor.conversations import messages_of
from pipemax_spark.executor.images import images_of
from pipemax_spark.executor.overrides import overrides_of
from pipemax_spark.executor.questions import question_requests

PROMPT_COLUMN = "__pipemax_prompt"
MESSAGES_COLUMN = "__pipemax_messages"
IMAGES_COLUMN = "__pipemax_images"
OVERRIDES_COLUMN = "__pipemax_overrides"
FAULT_COLUMN = "__pipemax_fault"
"""The error of a row that cannot be asked, as a struct of code and message; null where it can."""
ENDINGS_COLUMN = "__pipemax_endings"
"""The text with which each question ends, in an array; only if there are questions."""
NULLS_COLUMN = "__pipemax_nulls"
"""For each question, the name of a column whose null makes its text null; only if there are questions."""
KEY_COLUMN = "__pipemax_key"
"""The key by which the spool identifies a row; only jobs with a spool have this column."""
_HELPERS = {
    PROMPT_COLUMN: "prompt",
    MESSAGES_COLUMN: "messages",
    IMAGES_COLUMN: "images",
    OVERRIDES_COLUMN: "overrides",
    FAULT_COLUMN: "fault",
}
"""Column that the driver adds → field of a request."""


def request_batch(first_row_id: int, rows: int, **arrays: pa.Array) -> pa.RecordBatch:
    """Return a batch of REQUEST_SCHEMA with ascending row ids; columns that are not given are null.

    Images, conversations and overrides may be of any type that users have them in (``executor.images``,
    ``executor.conversations``, ``executor.overrides``). A row whose values cannot become a request has its error in
    ``fault``. Raise ``JobError`` for a column of a wrong type.
    """
    faults: list[RequestError | None] = [None] * rows
    if "fault" in arrays:
        faults = [fault and RequestError(**fault) for fault in arrays["fault"].to_pylist()]
    for name, convert in (("overrides", overrides_of), ("messages", messages_of)):
        if name in arrays:
            arrays[name], new_faults = convert(arrays[name])
            faults = [old or new for old, new in zip(faults, new_faults, strict=True)]
    if "images" in arrays:
        arrays["images"] = images_of(arrays["images"])
    arrays["fault"] = pa.array([fault and asdict(fault) for fault in faults], FAULT_TYPE)
    row_ids = pa.array(range(first_row_id, first_row_id + rows), pa.int64())
    columns = [
        arrays[field.name].cast(field.type) if field.name in arrays else pa.nulls(rows, field.type)
        for field in REQUEST_SCHEMA
        if field.name != "row_id"
    ]
    return pa.RecordBatch.from_arrays([row_ids, *columns], schema=REQUEST_SCHEMA)


def piece_requests(piece: pa.RecordBatch, first_row_id: int, *, questions: int = 0) -> pa.RecordBatch:
    """Return the requests of rows that have their helper columns; with ``questions``, so many for each row."""
    arrays = {
        field: piece.column(helper) for helper, field in _HELPERS.items() if helper in piece.schema.names
    }
    requests = request_batch(first_row_id, piece.num_rows, **arrays)
    if not questions:
        return requests
    return question_requests(requests, piece.column(ENDINGS_COLUMN), piece.column(NULLS_COLUMN), questions)


def without_helpers(piece: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with the user's columns only."""
    helpers = (*_HELPERS, ENDINGS_COLUMN, NULLS_COLUMN, KEY_COLUMN)
    return piece.drop_columns([name for name in piece.schema.names if name in helpers])
