"""Find out what one address of an endpoint can, by a few small requests whose answers are looked at.

A server may ignore what it does not know and answer 200, so a status says little: constraints are tried with texts that
no model writes by itself. Requests are made by the code that makes those of rows.
"""

import asyncio
import json
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipemax.answers.asks import Ask, Prompt, Reply
from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.client import Answered, Broken, Busy, Client, Outcome, RowRefused, RunRefused
from pipemax.endpoints.replies import UnreadableError, reply_of, said_in, spent_of
from pipemax.endpoints.requests import Body, generation_body
from pipemax.generation import GenerationRequest, Image, Message, Sampling, Spent

_QUESTION = "What do you see when you look at the sea? Answer in one sentence."
_SCHEMA = {
    "type": "object",
    "properties": {"qzv": {"type": "string", "enum": ["k7"]}},
    "required": ["qzv"],
    "additionalProperties": False,
}
_CHOICES = ("qzv-17", "qzv-42")
_REGEX, _OF_REGEX = "qzv[0-9]{3}", "qzv"
_GRAMMAR, _OF_GRAMMAR = 'root ::= "qzv1" | "qzv2"', ("qzv1", "qzv2")
_FEW_TOKENS, _MANY_TOKENS = 32, 2_048
"""Tokens of an answer; many where thinking has taken the few."""
_PAUSES_S = (0.25, 0.5)
"""Before the further tries of a request that breaks."""
_LONGEST_PAUSE_S = 30.0
_IMAGE_PIXELS = 64


class UnusableError(ValueError):
    """The address cannot be used at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why a request has no answer that can be used."""

    text: str


class AddressProbe:
    """Asks one address, and counts what that takes."""

    def __init__(self, client: Client, number: int, config: EndpointConfig, *, deadline_s: float) -> None:
        """Probe the address of this number. ``deadline_s``, on the monotonic clock, ends waiting for it."""
        self._client = client
        self.number = number
        self._config = config
        self._deadline_s = deadline_s
        self._address = config.endpoint[number]
        self.spent = Spent()
        self.latency_s: float | None = None
        """The time of the first small request."""
        self.answered_as: set[str] = set()
        """The models that answers named."""
        self.reasons: dict[str, str] = {}
        """Why the address cannot do what it was tried for, by the name."""

    @property
    def name(self) -> str:
        return self._address.name

    @property
    def _request(self) -> GenerationRequest:
        return GenerationRequest(request_id="probe", prompt=_QUESTION)

    # Each of these tries something, and returns how it is asked for.

    async def max_tokens_name(self, server: ServerFacts) -> str:
        """Ask for one short answer. ``UnusableError`` if there is none."""
        try:
            reply = await self.reply(_neutral(max_tokens=_FEW_TOKENS), server)
        except UnusableError as error:
            if not server.models or ": 404" not in str(error):
                raise
            raise UnusableError(
                f"{error}. It lists the model: if that embeds, classifies or scores, name the task (--task, or task in "
                "the engine config)"
            ) from None
        if isinstance(reply, Refused) and "max_completion_tokens" in reply.text:
            server = server.model_copy(update={"max_tokens_name": "max_completion_tokens"})
            reply = await self.reply(_neutral(max_tokens=_FEW_TOKENS), server)
        if isinstance(reply, Refused):
            raise UnusableError(f"endpoint {self.name} does not answer a plain prompt: {reply.text}")
        return server.max_tokens_name

    async def schema_by(self, server: ServerFacts) -> str:
        """Return how a JSON schema is asked for, or ``none``."""
        sampling = _neutral(response_format=json.dumps(_SCHEMA))
        ways = ("response_format", "json_object", "structured_outputs")
        return await self._way("schema_by", ways, sampling, server, _follows_schema, "JSON schemas")

    async def choice_by(self, server: ServerFacts) -> str:
        """Return how a choice is asked for, or ``none``."""
        sampling = _neutral(choice=_CHOICES)
        ways: tuple[str, ...] = ("structured_outputs", "guided_choice")
        if server.schema_by != "none":
            ways = (*ways, "schema")
        return await self._way("choice_by", ways, sampling, server, _CHOICES.__contains__, "choices")

    async def pattern_by(self, server: ServerFacts, *, regex: bool) -> str:
        """Return how a regular expression, or else a grammar, is asked for, or ``none``."""
        if regex:
            ways, sampling = ["structured_outputs", "guided"], _neutral(regex=_REGEX)
            return await self._way(
                "pattern_by", ways, sampling, server, _follows_regex, "regular expressions"
            )
        ways, sampling = ["structured_outputs", "guided", "grammar"], _neutral(grammar=_GRAMMAR)
        return await self._way("pattern_by", ways, sampling, server, _OF_GRAMMAR.__contains__, "grammars")

    async def lists_logprobs(self, server: ServerFacts) -> bool:
        """Tell whether answers have the log-probabilities of their tokens."""
        reply = await self.reply(_neutral(logprobs=True), server)
        if isinstance(reply, Refused):
            self.reasons["log-probabilities"] = reply.text
        return isinstance(reply, Reply)

    async def takes_images(self, server: ServerFacts) -> bool:
        """Tell whether a prompt may have an image."""
        turn = Message(role="user", content=(Image(content=_png()), _QUESTION))
        request = GenerationRequest(request_id="probe", messages=(turn,))
        reply = await self.reply(_neutral(), server, request=request)
        if isinstance(reply, Refused):
            self.reasons["images"] = reply.text
        return isinstance(reply, Reply)

    async def repeats_seeds(self, server: ServerFacts) -> bool | None:
        """Tell whether the same seed gives the same answer twice; None if no seed is taken."""
        texts = []
        for _ in range(2):
            reply = await self.reply(_neutral(max_tokens=_FEW_TOKENS, seed=7), server)
            if isinstance(reply, Refused):
                self.reasons["seeds"] = reply.text
                return None
            texts.append(reply.text)
        return texts[0] == texts[1]

    async def has_completions(self, server: ServerFacts, *, is_chat: bool) -> bool:
        """Tell whether there is the other API than the one that the config uses for prompts."""
        values: dict[str, Any] = {"model": self._config.model, "max_tokens": _FEW_TOKENS}
        prompt = {"messages": [{"role": "user", "content": _QUESTION}]} if is_chat else {"prompt": _QUESTION}
        path = "chat/completions" if is_chat else "completions"
        try:
            outcome = await self.post(self._address.url_of(path), {**values, **prompt})
        except UnusableError:
            return False
        return isinstance(outcome, Answered)

    async def _way(
        self,
        field: str,
        ways: Sequence[str],
        sampling: Sampling,
        server: ServerFacts,
        follows: Callable[[str], bool],
        what: str,
    ) -> str:
        """Return the first way in which the address follows the constraint, or ``none``, and note why not."""
        faults = []
        for way in ways:
            reply = await self.reply(sampling, server.model_copy(update={field: way}))
            if isinstance(reply, Reply) and follows(reply.text):
                return way
            said = reply.text if isinstance(reply, Refused) else f"answered {reply.text[:40]!r}"
            faults.append(f"{way}: {said}")
        self.reasons[what] = "; ".join(faults)
        return "none"

    async def reply(
        self, sampling: Sampling, server: ServerFacts, *, request: GenerationRequest | None = None
    ) -> Reply | Refused:
        """Return the answer to a prompt under these settings, with more tokens if thinking took the first ones."""
        request = replace(request or self._request, sampling=sampling)
        for tokens in dict.fromkeys((sampling.max_tokens, _MANY_TOKENS)):
            asked = replace(sampling, max_tokens=tokens)
            ask = Ask(ask_id="probe", prompt=Prompt((), request), sampling=asked, seed=asked.seed)
            body = generation_body(ask, self._config, server)
            outcome = await self.post(self._url(body), body.values)
            if not isinstance(outcome, Answered):
                return Refused(text=outcome.text)
            try:
                reply = reply_of(outcome.values, asked, self._config, server)
            except UnreadableError as error:
                return Refused(text=f"its answer cannot be read: {error}")
            if reply.error is not None:
                return Refused(text=reply.error.message)
            if reply.finish_reason != "length" or not _is_still_thinking(reply):
                break
        return reply

    async def get(self, url: str) -> Answered | RunRefused:
        """Return what is there. ``UnusableError`` if the address does not answer."""
        for pause_s in (*_PAUSES_S, None):
            match outcome := await self._client.get(self.number, url):
                case Answered() | RunRefused():
                    return outcome
                case RowRefused(text=reason) | Broken(reason=reason) | Busy(reason=reason):
                    said = reason
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise UnusableError(f"endpoint {self.name} does not answer: {said}")

    async def post(self, url: str, values: dict[str, Any]) -> Answered | Refused:
        """Send a request, again where the address is busy or breaks it. ``UnusableError`` if it refuses them all."""
        while True:
            outcome = await self._with_tries(url, values)
            match outcome:
                case Answered():
                    self._count(outcome)
                    return outcome
                case RowRefused(status=status, text=text):
                    return Refused(text=f"{status}: {said_in(text)[0]}")
                case Broken(reason=reason):
                    return Refused(text=reason)
                case RunRefused(reason=reason):
                    raise UnusableError(reason)
                case Busy(retry_after_s=pause_s, reason=reason):
                    pause_s = min(1.0 if pause_s is None else pause_s, _LONGEST_PAUSE_S)
                    if time.monotonic() + pause_s > self._deadline_s:
                        raise UnusableError(f"endpoint {self.name} is busy, and takes no request: {reason}")
                    await asyncio.sleep(pause_s)

    async def _with_tries(self, url: str, values: dict[str, Any]) -> Outcome:
        for pause_s in (*_PAUSES_S, None):
            self.spent += Spent(requests=1)
            outcome = await self._client.post(self.number, url, values)
            if not isinstance(outcome, Broken) or pause_s is None or time.monotonic() > self._deadline_s:
                break
            await asyncio.sleep(pause_s)
        return outcome

    def _count(self, outcome: Answered) -> None:
        self.spent += spent_of(outcome.values)
        if self.latency_s is None:
            self.latency_s = outcome.latency_s
        named = outcome.values.get("model") if isinstance(outcome.values, dict) else None
        if isinstance(named, str):
            self.answered_as.add(named)

    def _url(self, body: Body) -> str:
        return self._address.server_url_of(body.path) if body.is_beside else self._address.url_of(body.path)


def _neutral(**settings: Any) -> Sampling:
    """Return settings that are the servers' own defaults, besides these."""
    return Sampling(**{"temperature": 1.0, "max_tokens": _FEW_TOKENS, **settings})


def _is_still_thinking(reply: Reply) -> bool:
    return not reply.text.strip() or reply.text.lstrip().startswith("<think>")


def _follows_schema(text: str) -> bool:
    try:
        return bool(json.loads(text) == {"qzv": "k7"})
    except (ValueError, RecursionError):
        return False


def _follows_regex(text: str) -> bool:
    return text.startswith(_OF_REGEX) and text.removeprefix(_OF_REGEX).isdecimal()


def _png() -> bytes:
    """Return a grey image."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", _IMAGE_PIXELS, _IMAGE_PIXELS, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\x80" * 3 * _IMAGE_PIXELS) * _IMAGE_PIXELS
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
