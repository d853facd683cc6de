"""An OpenAI-compatible server on this machine: it answers by a function of the prompt, can what it is told it can."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

VLLM = frozenset(
    {
        *("chat", "completions", "response_format", "structured_outputs", "logprobs"),
        *("tokenize", "detokenize", "version"),
    }
)
"""What ``vllm serve`` of 0.12 and newer can."""
OPENAI = frozenset({"chat", "response_format", "logprobs", "refuses_unknown_fields"})
PATTERNS = {"qzv[0-9]{3}": "qzv123", 'root ::= "qzv1" | "qzv2"': "qzv1"}
"""Texts that regular expressions and grammars allow."""
_KNOWN = frozenset(
    {
        *(
            "model",
            "messages",
            "prompt",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "seed",
        ),
        *("stop", "presence_penalty", "frequency_penalty", "reasoning_effort", "logprobs", "top_logprobs"),
        *("response_format", "n"),
    }
)


Server = TypeVar("Server", bound="OpenAIServer")


def echo(prompt: str) -> str:
    """What the model says of a prompt unless a test says otherwise."""
    return f"said: {prompt}"


@dataclass
class OpenAIServer:
    """What is served. Fields may be changed while it runs."""

    port: int = 0
    model: str = "demo"
    facts: dict[str, Any] = field(
        default_factory=lambda: {"owned_by": "vllm", "root": "/models/demo", "max_model_len": 512}
    )
    can: frozenset[str] = VLLM
    answer: Callable[[str], str] = echo
    key: str | None = None
    refuses: dict[str, str] = field(default_factory=dict)
    """Fields of requests that are answered 400 with this message."""
    answers_as: str | None = None
    early: Callable[[str, dict[str, Any]], web.Response | None] = lambda path, body: None
    """What a request is answered instead, by its path and body."""
    requests: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def config(self, **changes: Any) -> dict[str, Any]:
        """An engine config that names this server."""
        return {"endpoint": self.url, "model": self.model, "model_revision": "1", **changes}

    @property
    def prompts(self) -> list[str]:
        """The prompts that were answered by the model, in order."""
        return [prompt_of(body) for body in self.bodies]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/v1")
        self.requests[path] += 1
        body = await request.json() if request.body_exists else {}
        if (response := self.early(path, body)) is not None:
            return response
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "Unauthorized")
        match path:
            case "/models":
                return web.json_response({"object": "list", "data": [{"id": self.model, **self.facts}]})
            case "/version" if "version" in self.can:
                return web.json_response({"version": "0.32.0"})
            case "/tokenize" if "tokenize" in self.can:
                return web.json_response({"tokens": _token_ids(prompt_of(body)), "max_model_len": 512})
            case "/detokenize" if "detokenize" in self.can:
                return web.json_response({"prompt": "".join(map(chr, body["tokens"]))})
            case "/embeddings" if "embeddings" in self.can:
                vector = [float(len(body["input"])), 1.0, 0.0]
                data = [{"index": 0, "embedding": vector[: body.get("dimensions")]}]
                return web.json_response({"data": data, "usage": {"prompt_tokens": 3}})
            case "/chat/completions" if "chat" in self.can:
                return self._generated(body, is_chat=True)
            case "/completions" if "completions" in self.can:
                return self._generated(body, is_chat=False)
        return web.json_response({"detail": "Not Found"}, status=404)

    def _generated(self, body: dict[str, Any], *, is_chat: bool) -> web.Response:
        if body["model"] != self.model:
            return _error(404, f"The model `{body['model']}` does not exist.")
        for name, message in self.refuses.items():
            if name in body:
                return _error(400, message)
        if "refuses_unknown_fields" in self.can and (unknown := sorted(set(body) - _KNOWN)):
            return _error(400, f"Unrecognized request argument supplied: {unknown[0]}")
        self.bodies.append(body)
        text = self._constrained(body)
        text = self.answer(prompt_of(body)) if text is None else text
        limit = body.get("max_completion_tokens", body.get("max_tokens", 1_000))
        tokens = list(text)[: limit * 4]
        text, is_cut = "".join(tokens), len(tokens) < len(text)
        choice = {"index": 0, "finish_reason": "length" if is_cut else "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if body.get("logprobs") and "logprobs" in self.can:
            choice["logprobs"] = _logprobs(text, is_chat=is_chat)
        usage = {"prompt_tokens": len(_token_ids(prompt_of(body))), "completion_tokens": len(text) // 4 + 1}
        return web.json_response(
            {"model": self.answers_as or self.model, "choices": [choice], "usage": usage}
        )

    def _constrained(self, body: dict[str, Any]) -> str | None:
        """Return the text that a constraint of the request allows, if the server follows it."""
        if "structured_outputs" in self.can and (asked := body.get("structured_outputs")):
            (name,) = asked
            return _allowed("choice" if name == "choice" else name, asked[name])
        if "guided" in self.can:
            for name in ("choice", "regex", "grammar", "json"):
                if f"guided_{name}" in body:
                    return _allowed(name, body[f"guided_{name}"])
        if "grammar" in self.can and "grammar" in body:
            return _allowed("grammar", body["grammar"])
        form = body.get("response_format") or {}
        if form.get("type") == "json_schema" and "response_format" in self.can:
            return _allowed("json", form["json_schema"]["schema"])
        if form.get("type") == "json_object" and "json_object" in self.can:
            return _allowed("json", form["schema"])
        return None


def _allowed(kind: str, asked: Any) -> str:
    match kind:
        case "choice":
            return str(asked[0])
        case "json":
            return json.dumps(_value(asked))
    return PATTERNS[asked]


def _value(schema: dict[str, Any]) -> Any:
    """A value that a schema allows, as far as tests use schemas."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {name: _value(inner) for name, inner in schema.get("properties", {}).items()}
        case "array":
            return [_value(schema["items"])]
        case "integer" | "number":
            return 1
        case "boolean":
            return True
    return "text"


def prompt_of(body: dict[str, Any]) -> str:
    """Everything that a request says, as one text."""
    if "prompt" in body:
        return str(body["prompt"])
    texts = []
    for message in body.get("messages", ()):
        content = message["content"]
        texts.append(
            content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        )
    return "\n".join(texts)


def _token_ids(text: str) -> list[int]:
    return list(map(ord, text))


def _logprobs(text: str, *, is_chat: bool) -> dict[str, Any]:
    if not is_chat:
        return {
            "tokens": list(text),
            "token_logprobs": [-0.1] * len(text),
            "top_logprobs": [{"?": -3.0}] * len(text),
        }
    other = [{"token": "?", "logprob": -3.0}]
    return {"content": [{"token": part, "logprob": -0.1, "top_logprobs": other} for part in text]}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def openai_server(**fields: Any) -> AbstractContextManager[OpenAIServer]:
    """Serve on a free port of this machine until the context ends."""
    return serving(OpenAIServer(**fields))


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Have a server answer, at its port or a free one, until the context ends."""
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", server.port)
        await site.start()
        server.port = runner.addresses[0][1]
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
