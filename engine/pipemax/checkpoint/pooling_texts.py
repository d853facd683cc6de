"""Take from a row the texts that a pooling model reads: one, or a query and a document.

Neither a chat template nor a system message is put around them; what a model wants in front of its input, such as an
instruction, belongs to the job's prompt template.
"""

from collections.abc import Sequence

from pipemax.generation import PAIR, GenerationRequest, RequestError
from pipemax.wire import ErrorCode


def row_texts(request: GenerationRequest) -> Sequence[str] | RequestError:
    """Return the row's texts, or why it has none."""
    if request.images:
        return RequestError(
            code=ErrorCode.INVALID_IMAGE,
            message=f"the task {request.sampling.task} reads texts, and the row has images",
        )
    if request.sampling.task != "score":
        if request.messages is not None:
            return RequestError(
                code=ErrorCode.INVALID_PROMPT,
                message=f"the task {request.sampling.task} takes a text, and the row has messages",
            )
        return _checked({"prompt": request.prompt})
    if request.messages is None:
        what = "a query or a document is null" if request.prompt is None else "the row has no query"
        return RequestError(code=ErrorCode.EMPTY_PROMPT, message=what)
    roles = tuple(message.role for message in request.messages)
    if roles != PAIR:
        return RequestError(
            code=ErrorCode.INVALID_PROMPT,
            message=f"the task score takes the messages query and document, not {', '.join(roles) or 'none'}",
        )
    if with_fields := next((message for message in request.messages if message.fields is not None), None):
        return RequestError(
            code=ErrorCode.INVALID_PROMPT,
            message=f"the task score reads texts, and the {with_fields.role} has further fields",
        )
    return _checked({message.role: "".join(message.texts) for message in request.messages})


def _checked(texts: dict[str, str | None]) -> Sequence[str] | RequestError:
    for name, text in texts.items():
        if text is None or not text.strip():
            what = "null" if text is None else "empty or blank"
            return RequestError(code=ErrorCode.EMPTY_PROMPT, message=f"the {name} is {what}")
    return [text or "" for text in texts.values()]
