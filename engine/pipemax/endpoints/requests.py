"""Write rows as requests of OpenAI's API: chat, completions, embeddings, and vLLM's classes and scores. Pure."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipemax.answers.asks import Ask, Prompt
from pipemax.checkpoint.image_sources import ImageSourceError, is_web_url, read_source, too_large
from pipemax.checkpoint.pooling_texts import row_texts
from pipemax.config import ChatMode, ImageConfig
from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.generation import PAIR, GenerationRequest, Image, Message, RequestError, Sampling
from pipemax.wire import ErrorCode, RowFaultError, encodable

MOST_ALTERNATIVES = 20
"""Alternatives of a token that a server lists at most (``top_logprobs``)."""
CHOICE_FIELD = "answer"
"""The field that holds a choice where the server takes only schemas."""
_ANSWER = "answer"
_BYTES_PER_TOKEN = 4
_OF_VLLM = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos", "bad_words")
"""Settings beyond OpenAI's that vLLM's server takes under the same names."""
_CONTROL_ROWS = {
    "embed": GenerationRequest(request_id="control", prompt="Hi", sampling=Sampling(task="embed")),
    "classify": GenerationRequest(request_id="control", prompt="Hi", sampling=Sampling(task="classify")),
    "score": GenerationRequest(
        request_id="control",
        messages=tuple(Message(role=role, content="Hi") for role in PAIR),
        sampling=Sampling(task="score"),
    ),
}
_OF_LLAMA = ("top_k", "min_p")
"""Those of them that llama.cpp's servers take. Their penalty of repetition looks at the last tokens only."""
_BEYOND_OPENAI = (*_OF_VLLM, "chat_template_kwargs", "thinking_tokens")
_KINDS_OF_IMAGES = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A request, ready to be sent to any address."""

    path: str
    """Below the API's root, or beside it if ``is_beside``."""
    values: dict[str, Any]
    tokens: int
    """About how many tokens it takes, prompt and output, for limits a minute."""
    is_beside: bool = False


def row_fault(request: GenerationRequest, config: EndpointConfig) -> RequestError | None:
    """Return why a row cannot become a request, if it cannot."""
    sampling = request.sampling
    if sampling.task != config.task:
        message = f"the row's task is {sampling.task}, and the engine was started for {config.task}"
        return RequestError(code=ErrorCode.INVALID_PARAMETER, message=message)
    if (
        fault := unknown_setting(sampling, config, config.server or ServerFacts.model_validate({}))
    ) is not None:
        return RequestError(code=ErrorCode.INVALID_PARAMETER, message=fault)
    if config.is_pooling:
        texts = row_texts(request)
        return texts if isinstance(texts, RequestError) else None
    if request.prompt is not None and request.messages is not None:
        return RequestError(code=ErrorCode.INVALID_PROMPT, message="both a prompt and messages are given")
    if request.messages is None and (request.prompt is None or not request.prompt.strip()):
        what = "null" if request.prompt is None else "empty or blank"
        return RequestError(code=ErrorCode.EMPTY_PROMPT, message=f"the prompt is {what}")
    if request.messages is not None and not request.messages:
        return RequestError(code=ErrorCode.EMPTY_PROMPT, message="the list of messages is empty")
    return None


def unknown_setting(sampling: Sampling, config: EndpointConfig, server: ServerFacts) -> str | None:
    """Return why the server cannot honour these settings, as far as is known of it; None if it can."""
    if sampling.lora is not None:
        return "lora is given, and an endpoint serves adapters as models: name the adapter as model and leave lora out"
    if sampling.stop_repetition:
        return "stop_repetition is given, which no server's API has; leave it out"
    if sampling.include_reasoning is not None and config.reasoning_parser is None:
        return (
            "include_reasoning is given, and nothing splits off the model's thinking; set reasoning_parser: server (or "
            "think_tags) in the engine config, or leave it out"
        )
    if sampling.logprobs and config.reasoning_parser is not None:
        return (
            "logprobs are given, and reasoning_parser: a server does not say which of its tokens are the answer's; "
            "leave one of them out"
        )
    if server.kind != "vllm":
        known = _OF_LLAMA if server.kind == "llama.cpp" else ()
        extras = [name for name in _BEYOND_OPENAI if name not in known]
        if name := next((one for one in extras if getattr(sampling, one) != getattr(Sampling(), one)), None):
            return (
                f"{name} is given, which is no part of OpenAI's API, and this server is not known to take it; leave it "
                "out, or write it under extra_body in the engine config if the server has it"
            )
    for name, how in (("choice", server.choice_by), ("response_format", server.schema_by)):
        if getattr(sampling, name) not in (None, ()) and how == "none":
            return (
                f"{name} is given, and this server follows none (pipemax doctor --engine shows what it can)"
            )
    if (sampling.regex is not None or sampling.grammar is not None) and server.pattern_by == "none":
        name = "grammar" if sampling.regex is None else "regex"
        return f"{name} is given, and this server follows none; a JSON schema may do, or leave {name} out"
    if sampling.regex is not None and server.pattern_by == "grammar":
        return "regex is given, and this server follows grammars only; write it as a grammar"
    return None


def is_chat(request: GenerationRequest, config: EndpointConfig) -> bool:
    """Tell whether a row goes to the chat API."""
    return request.messages is not None or request.system is not None or config.chat is not ChatMode.NEVER


def generation_body(ask: Ask, config: EndpointConfig, server: ServerFacts) -> Body:
    """Return the request of an ask for text. ``RowFaultError`` for an image that cannot be had."""
    request: GenerationRequest = ask.prompt.media
    values: dict[str, Any] = {"model": config.model}
    chat = is_chat(request, config)
    if chat:
        values["messages"] = messages_of(request, config.images)
    else:
        values["prompt"] = encodable(request.prompt or "")
    values |= sampling_values(ask, config, server, is_chat=chat)
    values |= _constraint(ask.sampling, server)
    values |= config.extra_body
    text = json.dumps(values.get("messages", values.get("prompt")))
    return Body(
        path="chat/completions" if chat else "completions",
        values=values,
        tokens=len(text) // _BYTES_PER_TOKEN + ask.sampling.max_tokens,
    )


def control_body(config: EndpointConfig, server: ServerFacts) -> Body:
    """Return the shortest request that the config's rows could be, which every row's fate is compared with."""
    if config.is_pooling:
        return pooling_body(_CONTROL_ROWS[config.task], config)
    request = GenerationRequest(request_id="control", prompt="Hi", sampling=Sampling(max_tokens=1))
    return generation_body(
        Ask(ask_id="control", prompt=Prompt((), request), sampling=request.sampling), config, server
    )


def sampling_values(
    ask: Ask, config: EndpointConfig, server: ServerFacts, *, is_chat: bool
) -> dict[str, Any]:
    """Return the settings of an ask under OpenAI's names, and vLLM's where the server is one."""
    sampling = ask.sampling
    values: dict[str, Any] = {
        (server.max_tokens_name if is_chat else "max_tokens"): sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": ask.seed,
        "stop": list(sampling.stop) or None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "reasoning_effort": sampling.reasoning_effort,
    }
    if server.kind == "vllm":
        # Written out, because vLLM otherwise takes them from the model's generation_config.json.
        values |= {name: _plain(getattr(sampling, name)) for name in _OF_VLLM}
        values["thinking_token_budget"] = sampling.thinking_tokens
        if sampling.chat_template_kwargs is not None:
            values["chat_template_kwargs"] = json.loads(sampling.chat_template_kwargs)
    elif server.kind == "llama.cpp":
        # By default it samples from few tokens, and llama-cpp-python's server penalises repetition.
        values |= {name: getattr(sampling, name) for name in _OF_LLAMA} | {"repeat_penalty": 1.0}
    else:  # these are OpenAI's defaults, and some models refuse even those by name
        for name, default in (("temperature", 1.0), ("top_p", 1.0)):
            if values[name] == default:
                del values[name]
    if sampling.logprobs:
        alternatives = MOST_ALTERNATIVES if sampling.choice else 0
        values |= (
            {"logprobs": True, "top_logprobs": alternatives} if is_chat else {"logprobs": alternatives or 1}
        )
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    return (list(value) or None) if isinstance(value, tuple) else value


def _constraint(sampling: Sampling, server: ServerFacts) -> dict[str, Any]:
    if sampling.response_format is not None:
        return _schema(json.loads(sampling.response_format), server)
    if sampling.choice:
        match server.choice_by:
            case "structured_outputs":
                return {"structured_outputs": {"choice": list(sampling.choice)}}
            case "guided_choice":
                return {"guided_choice": list(sampling.choice)}
        return _schema(choice_schema(sampling.choice), server)
    for name, text in (("regex", sampling.regex), ("grammar", sampling.grammar)):
        if text is not None:
            match server.pattern_by:
                case "structured_outputs":
                    return {"structured_outputs": {name: text}}
                case "guided":
                    return {f"guided_{name}": text}
            return {"grammar": text}
    return {}


def _schema(schema: dict[str, Any], server: ServerFacts) -> dict[str, Any]:
    match server.schema_by:
        case "structured_outputs":
            return {"structured_outputs": {"json": schema}}
        case "json_object":  # llama-cpp-python's name for it
            return {"response_format": {"type": "json_object", "schema": schema}}
    named = {"name": _ANSWER, "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def choice_schema(choices: Sequence[str]) -> dict[str, Any]:
    """Return the schema of an object with one of the choices, for servers that take only schemas."""
    return {
        "type": "object",
        "properties": {CHOICE_FIELD: {"type": "string", "enum": list(choices)}},
        "required": [CHOICE_FIELD],
        "additionalProperties": False,
    }


def pooling_body(request: GenerationRequest, config: EndpointConfig) -> Body:
    """Return the request of a row that is embedded, classified or scored."""
    texts = row_texts(request)
    assert not isinstance(texts, RequestError)
    sampling, texts = request.sampling, [encodable(text) for text in texts]
    values: dict[str, Any] = {"model": config.model}
    match config.task:
        case "embed":
            values |= {"input": texts[0], "encoding_format": "float", "dimensions": sampling.dimensions}
            path = "embeddings"
        case "classify":
            values["input"], path = texts[0], "classify"
        case _:
            values |= {"text_1": texts[0], "text_2": texts[1]}
            path = "score"
    if sampling.normalize is not None:
        values["use_activation"] = sampling.normalize
    if sampling.truncate:
        values["truncate_prompt_tokens"] = -1
    values |= config.extra_body
    return Body(
        path=path,
        values={name: value for name, value in values.items() if value is not None},
        tokens=sum(map(len, texts)) // _BYTES_PER_TOKEN + 1,
        is_beside=path != "embeddings",
    )


def messages_of(request: GenerationRequest, images: ImageConfig) -> list[dict[str, Any]]:
    """Return a row's conversation. ``RowFaultError`` for an image that cannot be had, or fields that are no JSON."""
    turns: list[dict[str, Any]] = []
    if request.system is not None:
        turns.append({"role": "system", "content": request.system})
    if request.messages is None:
        turns.append({"role": "user", "content": encodable(request.prompt or "")})
    limit = images.max_per_row
    if len(request.images) > limit:
        raise RowFaultError(
            ErrorCode.INVALID_IMAGE,
            f"the row has {len(request.images)} images, and images.max_per_row is {limit}",
        )
    for message in request.messages or ():
        content: Any = message.content
        if isinstance(content, str):
            content = encodable(content)
        else:
            content = [
                {"type": "image_url", "image_url": {"url": image_url(part, images)}}
                if isinstance(part, Image)
                else {"type": "text", "text": encodable(part)}
                for part in content
            ]
        turns.append({"role": message.role, "content": content, **_fields(message.fields)})
    return turns


def image_url(image: Image, limits: ImageConfig) -> str:
    """Return an image as a ``data:`` URL, or the web address of an allowed host, which the server then fetches."""
    source = image.source or ""
    if image.content is None and is_web_url(source):
        host = source.partition("://")[2].partition("/")[0].rpartition("@")[2].partition(":")[0].lower()
        if "*" in limits.allow_urls or host in limits.allow_urls:
            return source
        raise RowFaultError(
            ErrorCode.INVALID_IMAGE,
            f"images from {host} may not be fetched: allow it by --allow-image-urls {host}",
        )
    try:
        content = image.content
        if content is None:
            content = read_source(source, max_bytes=limits.max_bytes, directories=limits.directories)
        elif len(content) > limits.max_bytes:
            raise ImageSourceError(too_large(len(content), limits.max_bytes))
    except ImageSourceError as error:
        raise RowFaultError(ErrorCode.INVALID_IMAGE, str(error)) from None
    kind = next((name for start, name in _KINDS_OF_IMAGES if content.startswith(start)), None)
    if kind is None:
        raise RowFaultError(ErrorCode.INVALID_IMAGE, "the image is none of PNG, JPEG, GIF and WebP")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _fields(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowFaultError(
            ErrorCode.INVALID_PROMPT, f"the further fields of a message are no JSON: {error}"
        ) from None
    if not isinstance(fields, dict):
        raise RowFaultError(ErrorCode.INVALID_PROMPT, "the further fields of a message are no JSON object")
    return fields
