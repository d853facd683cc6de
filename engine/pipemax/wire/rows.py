"""Rows as they travel: Arrow's schemas of requests and completions, and the codes of rows that failed."""

from enum import StrEnum

import pyarrow as pa

from pipemax.generation import CARRIED, SETTINGS

OVERRIDES_TYPE = pa.struct(
    [(name, row.row_type) for name, row in SETTINGS.items() if row.row_type is not None]
)
"""Per-row sampling: a null field, or a null struct, keeps the job's value."""

IMAGE_TYPE = pa.struct([("content", pa.binary()), ("source", pa.string())])
"""An image: its bytes, or a path or URL at which the engine finds it."""

MESSAGE_TYPE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("parts", pa.list_(pa.struct([("text", pa.string()), ("image", IMAGE_TYPE)]))),
        ("fields", pa.string()),
    ]
)
"""A turn of a conversation: text, or parts in place of it, each of which is a text or an image; and a JSON object of
the turn's further fields, such as ``tool_calls``, if it has any."""

FAULT_TYPE = pa.struct([("code", pa.string()), ("message", pa.string())])
"""Why a row's values cannot become a request: the code and the message of its error."""

REQUEST_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),  # the client's number, unique within the session
        pa.field("prompt", pa.string()),  # one of prompt and messages; both null is an error row
        pa.field("messages", pa.list_(MESSAGE_TYPE)),
        pa.field("images", pa.list_(IMAGE_TYPE)),  # before the text of the prompt
        pa.field("overrides", OVERRIDES_TYPE),
        pa.field("question", pa.int32()),  # place in the header's questions; null: the header's generation
        pa.field("fault", FAULT_TYPE),  # found by the client: the row is not asked, and ends with this error
    ]
)

_OUTCOME = [
    pa.field("error_code", pa.string()),  # an ErrorCode, null when the row succeeded
    pa.field("error_message", pa.string()),
    pa.field("completed_at", pa.timestamp("us", tz="UTC"), nullable=False),
]
_CARRIED = [pa.field(name, row.wire_type) for name, row in CARRIED.items()]
_OUTCOME_AT = [*CARRIED].index("reasoning")
COMPLETION_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),
        *_CARRIED[:_OUTCOME_AT],
        *_OUTCOME,
        *_CARRIED[_OUTCOME_AT:],  # null unless the job asks for them
    ]
)


REFUSED = "the engine refused the row"
"""How the message of an ``engine_error`` begins where vLLM refuses a request before it runs, such as for its schema."""


class ErrorCode(StrEnum):
    """The error codes of rows. This is the only list of them: tables, metrics and docs use these names."""

    EMPTY_PROMPT = "empty_prompt"
    """The prompt is null, empty or blank."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt and one output token (none, for a pooling task) exceed ``max_model_len``."""
    INVALID_PROMPT = "invalid_prompt"
    """Messages that the chat template cannot render, or text that is not UTF-8."""
    INVALID_IMAGE = "invalid_image"
    """An image is missing, is no image, is larger than allowed, or may not be fetched."""
    INVALID_PARAMETER = "invalid_parameter"
    """A per-row override is out of range."""
    RESPONSE_FORMAT = "response_format"
    """The output does not match its schema, choice, regular expression or grammar, for instance because ``max_tokens``
    cut it off."""
    REASONING_UNFINISHED = "reasoning_unfinished"
    """The model's thinking ended before an answer began, for instance because ``max_tokens`` cut it off."""
    CONTENT_FILTER = "content_filter"
    """An endpoint's filter refused the prompt or the answer, or the model refused to answer."""
    ENGINE_ERROR = "engine_error"
    """The engine refused or failed only this row."""
    ENGINE_DIED = "engine_died"
    """The engine died whenever it ran this row by itself."""
