"""Read the answers of OpenAI-compatible servers. Pure.

``UnreadableError`` is for a body that is no such answer: its transfer broke, and the request is sent again.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipemax.answers.asks import Reply, Split
from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.chances import chances_of, listed_tokens
from pipemax.endpoints.requests import CHOICE_FIELD
from pipemax.generation import Completion, RequestError, Sampling, Spent
from pipemax.wire import REFUSED, ErrorCode, encodable

THINK_END = "</think>"
_THINK_START = "<think>"
_TOO_LONG = (
    *("context_length_exceeded", "maximum context length", "max_model_len", "context size", "context window"),
    *("input_tokens", "input_text"),
)
_SHOWN = 300


class UnreadableError(ValueError):
    """The body is no answer of this API."""


def reply_of(values: Any, sampling: Sampling, config: EndpointConfig, server: ServerFacts) -> Reply:
    """Return a server's answer to an ask for text."""
    choice = _only_choice(values)
    message = choice.get("message")
    is_chat = isinstance(message, dict)
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if text is not None and not isinstance(text, str):
        raise UnreadableError(f"its content is a {type(text).__name__}")
    spent = spent_of(values)
    counts: dict[str, Any] = {"prompt_tokens": spent.prompt_tokens, "output_tokens": spent.output_tokens}
    reason = choice.get("finish_reason")
    refusal = message.get("refusal") if isinstance(message, dict) else None
    if reason == "content_filter" or refusal:
        said = f": {str(refusal)[:_SHOWN]}" if refusal else ""
        what = "the model refused to answer" if refusal else "the endpoint's filter withheld the answer"
        return Reply(
            error=RequestError(code=ErrorCode.CONTENT_FILTER, message=encodable(f"{what}{said}")), **counts
        )
    text = encodable(text or "")
    reasoning = _reasoning(_mapping(message))
    if config.reasoning_parser == "think_tags":
        reasoning, text = _split_tags(text)
    if sampling.choice and server.choice_by == "schema":
        text = _choice_in(text)
    tokens = None
    if sampling.logprobs:
        try:
            tokens = listed_tokens(_mapping(choice.get("logprobs")), is_chat=is_chat)
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableError(f"its log-probabilities cannot be read: {error!r}") from None
    details = _mapping(_mapping(values.get("usage")).get("completion_tokens_details"))
    return Reply(
        text=text,
        token_ids=tuple(
            int(token) for token in choice.get("token_ids") or ()
        ),  # with vLLM's return_token_ids
        finish_reason="length" if reason == "length" else "stop",
        logprobs=None if tokens is None else [token.logprob for token in tokens],
        pieces=None if tokens is None else [token.text for token in tokens],
        reasoning=reasoning,
        reasoning_tokens=int(details.get("reasoning_tokens") or 0),
        chances=chances_of(text, sampling.choice, tokens) if tokens is not None and sampling.choice else None,
        **counts,
    )


def _only_choice(values: Any) -> dict[str, Any]:
    choices = values.get("choices") if isinstance(values, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UnreadableError("it has no choices")
    choice: dict[str, Any] = choices[0]
    if choice.get("finish_reason") is None:
        raise UnreadableError("it does not say how the output ended")
    if not isinstance(choice.get("message"), dict) and "text" not in choice:
        raise UnreadableError("it has neither a message nor a text")
    return choice


def spent_of(values: Any) -> Spent:
    """Return the tokens that an answer says were used."""
    usage = _mapping(values.get("usage") if isinstance(values, dict) else None)
    return Spent(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or 0),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _reasoning(message: Mapping[str, Any]) -> str | None:
    text = message.get("reasoning") or message.get("reasoning_content")
    return encodable(text) if isinstance(text, str) else None


def _split_tags(text: str) -> tuple[str | None, str]:
    """Split the thinking off a text, whose first tag the chat template may have written into the prompt."""
    before, end, after = text.partition(THINK_END)
    if not end:
        is_thinking = text.lstrip().startswith(_THINK_START)
        return (text.lstrip().removeprefix(_THINK_START), "") if is_thinking else (None, text)
    return before.lstrip().removeprefix(_THINK_START).strip("\n"), after.lstrip("\n")


def _choice_in(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    choice = value.get(CHOICE_FIELD) if isinstance(value, dict) else None
    return choice if isinstance(choice, str) else text


class EndpointThinking:
    """``answers.row.Thinking`` of a server, which has split its output already."""

    def is_over(self, prompt: Sequence[int], sampling: Sampling) -> bool:
        """Never: the server decides."""
        return False

    def split(self, prompt: Sequence[int], reply: Reply, sampling: Sampling) -> Split:
        is_cut = reply.finish_reason != "stop" and not reply.text
        return Split(
            reasoning=reply.reasoning,
            answer=None if is_cut else reply.text,
            answer_tokens=0 if is_cut else max(0, reply.num_tokens - reply.reasoning_tokens),
        )


def pooled_of(values: Any, request_id: str, task: str) -> Completion:
    """Return the completion of a row that was embedded, classified or scored."""
    data = values.get("data") if isinstance(values, dict) else None
    if not isinstance(data, list) or not data or not isinstance(data[0], dict):
        raise UnreadableError("it has no data")
    first, tokens = data[0], spent_of(values).prompt_tokens
    try:
        match task:
            case "embed":
                vector = np.asarray(first["embedding"], dtype=np.float32)
                if vector.ndim != 1 or not len(vector) or not np.isfinite(vector).all():
                    return Completion(request_id=request_id, prompt_tokens=tokens, error=_NOT_FINITE)
                return Completion(request_id=request_id, prompt_tokens=tokens, embedding=vector.tobytes())
            case "classify":
                chances = [float(chance) for chance in first["probs"]]
                return Completion(
                    request_id=request_id,
                    prompt_tokens=tokens,
                    label=str(first["label"]),
                    probability=max(chances),
                )
        score = float(first["score"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableError(f"its data cannot be read: {error!r}") from None
    if not math.isfinite(score):
        return Completion(request_id=request_id, prompt_tokens=tokens, error=_NOT_FINITE)
    return Completion(request_id=request_id, prompt_tokens=tokens, score=score)


_NOT_FINITE = RequestError(
    code=ErrorCode.ENGINE_ERROR, message="the model's output for the row is not finite"
)


def refusal_of(status: int, text: str) -> RequestError:
    """Return the error of a row that an endpoint refused with this status and body."""
    said, code = said_in(text)
    lowered = f"{said} {code}".lower()
    if "content_filter" in lowered or "content management policy" in lowered:
        return RequestError(
            code=ErrorCode.CONTENT_FILTER,
            message=encodable(f"the endpoint's filter refused the prompt: {said}"),
        )
    if status == 413 or any(mark in lowered for mark in _TOO_LONG):
        return RequestError(
            code=ErrorCode.PROMPT_TOO_LONG, message=encodable(f"{REFUSED} ({status}): {said}")
        )
    return RequestError(code=ErrorCode.ENGINE_ERROR, message=encodable(f"{REFUSED} ({status}): {said}"))


def said_in(text: str) -> tuple[str, str]:
    """Return what the body of a refusal says, and its code, if it has one."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()[:_SHOWN] or "no reason given", ""
    error = values.get("error", values) if isinstance(values, dict) else values
    if isinstance(error, dict):
        said = error.get("message") or error.get("detail") or values.get("detail") or json.dumps(error)
        return str(said)[:_SHOWN], " ".join(str(error.get(name) or "") for name in ("code", "type", "param"))
    return str(error)[:_SHOWN], ""
