"""Give a message's further fields, such as ``tool_calls``, to a chat template, or say why it cannot have them.

Tool calls come as OpenAI writes them, with their arguments as JSON text; templates expect values, and vLLM gives them
those. Arguments that are no JSON object are the row's error here, where vLLM gives an empty object.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from pipemax.generation import Message
from pipemax.wire import encodable

_THINKING = ("reasoning", "reasoning_content")
"""Two names of one field; vLLM gives templates both."""


def message_fields(message: Message) -> dict[str, Any]:
    """Return a message's further fields as a template takes them. ``ValueError`` says what cannot be passed on."""
    if message.fields is None:
        return {}
    try:
        fields = json.loads(message.fields)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the further fields of a message are no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("the further fields of a message are no JSON object")
    fields = with_texts(fields, encodable)
    if "tool_calls" in fields:
        fields["tool_calls"] = _calls(fields["tool_calls"])
    thinking = next((fields[name] for name in _THINKING if name in fields), None)
    return fields if thinking is None else {**dict.fromkeys(_THINKING, thinking), **fields}


def fault_of_fields(messages: tuple[Message, ...], template: object) -> str | None:
    """Return why the template cannot be given the messages' further fields; None if it reads them all."""
    for number, message in enumerate(messages, start=1):
        if message.fields is None:
            continue
        try:
            names = message_fields(message).keys()
            unread = _unread(names, template)
        except ValueError as error:
            return f"message {number}: {error}"
        if unread:
            return (
                f"message {number} has the field {unread[0]!r}, which the model's chat template does not read; leave "
                "it out, or use a model whose template reads it"
            )
    return None


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, names of fields too."""
    match value:
        case str():
            yield value
        case list():
            for part in value:
                yield from texts_in(part)
        case dict():
            for name, part in value.items():
                yield name
                yield from texts_in(part)


def with_texts(value: Any, new: Callable[[str], str]) -> Any:
    """Return a JSON value with each text replaced, in the order of ``texts_in``."""
    match value:
        case str():
            return new(value)
        case list():
            return [with_texts(part, new) for part in value]
        case dict():
            return {new(name): with_texts(part, new) for name, part in value.items()}
    return value


def _unread(names: Any, template: object) -> list[str]:
    if isinstance(template, dict):  # several templates: without tools, transformers takes this one
        template = template.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"its field {next(iter(names))!r} cannot be passed on: the model's chat template is no text"
        )
    # jinja2 comes with transformers, and a process that only reads a model's files needs neither.
    from pipemax.checkpoint.template_reads import fields_read

    read = fields_read(template)
    if read is None:
        return []
    of_thinking = set(_THINKING) if read & set(_THINKING) else set()
    return [name for name in names if name not in read | of_thinking]


def _calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError("its field 'tool_calls' is no array")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise ValueError("its field 'tool_calls' has an entry that is no call of a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(
                f"the arguments of the call of {function.get('name')!r} in its field 'tool_calls' are no JSON"
            ) from None
    if arguments in (None, "") or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(
            f"the arguments of the call of {function.get('name')!r} in its field 'tool_calls' are no JSON object"
        )
    return {**call, "function": {**function, "arguments": with_texts(arguments, encodable)}}
