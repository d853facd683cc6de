"""Find out what the addresses of an endpoint serve and can, before anything is claimed or asked.

All addresses must serve the same model and can the same, because any of them takes any row.
"""

import asyncio
import json
import re
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pipemax.answers.asks import Ask, Prompt, Reply
from pipemax.answers.references import validator_of
from pipemax.domain.errors import EngineStartError
from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.address_probe import AddressProbe, Refused, UnusableError
from pipemax.endpoints.client import Answered, Client, RunRefused
from pipemax.endpoints.models import facts_of
from pipemax.endpoints.replies import UnreadableError, pooled_of
from pipemax.endpoints.requests import generation_body, pooling_body, unknown_setting
from pipemax.generation import PAIR, GenerationRequest, Message, Sampling, Spent

_T = TypeVar("_T")
_KINDS = {"vllm": "vllm", "llamacpp": "llama.cpp", "me": "llama.cpp"}
"""By who owns a model, as servers list it; llama-cpp-python says ``me``."""
_LIMIT_S = 240.0
"""Time for the whole probe; a job waits 600 s for its check."""
_REQUEST_S = 120.0
_FEW_TOKENS = 64
_SHOWN = 300
_OF_STRUCTURE = frozenset({"type", "required", "enum", "const", "additionalProperties"})
"""Keywords of JSON schemas that every server which follows schemas enforces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What was found, at what cost."""

    server: ServerFacts
    version: str | None
    """Of vLLM, where the server is one."""
    spent: Spent


def probe(config: EndpointConfig, asked: Sequence[Sampling], *, has_images: bool = False) -> Probed:
    """Return what all addresses serve and can, as far as these settings ask for it.

    ``ValueError`` names what an address cannot do, or why it cannot be used.
    """
    return run_hurried(_probe(config, asked, has_images=has_images))


def run_hurried(work: Coroutine[Any, Any, _T]) -> _T:
    """Return what the work comes to. ``ValueError`` if it takes too long, or an address may not be used."""
    try:
        return asyncio.run(asyncio.wait_for(work, 2 * _LIMIT_S))
    except EngineStartError as error:
        raise ValueError(str(error)) from None
    except TimeoutError:
        raise ValueError(f"the endpoint has not answered within {2 * _LIMIT_S:.0f} s") from None


async def _probe(config: EndpointConfig, asked: Sequence[Sampling], *, has_images: bool) -> Probed:
    async with Client(hurried(config)) as client:
        probes = probes_of(client, config)
        found = await asyncio.gather(
            *(_of_address(client, one, config, asked, has_images=has_images) for one in probes)
        )
    (server, version), *others = found
    for one, (facts, _) in zip(probes[1:], others, strict=True):
        _check_equal(probes[0].name, server, one.name, facts)
    names = [one.answered_as for one in probes]
    is_stable = all(len(of_address) == 1 for of_address in names)
    if is_stable and len(set.union(*names)) > 1:
        said = ", ".join(f"{one.name} as {min(one.answered_as)!r}" for one in probes)
        raise ValueError(f"the addresses of the endpoint answer as different models: {said}")
    answers_as = min(names[0]) if is_stable else None
    return Probed(
        server=server.model_copy(update={"answers_as": answers_as}),
        version=version,
        spent=sum((one.spent for one in probes), Spent()),
    )


def hurried(config: EndpointConfig) -> EndpointConfig:
    """Return the config with a shorter time for each answer."""
    return config.model_copy(update={"timeout_s": min(config.timeout_s, _REQUEST_S)})


def probes_of(client: Client, config: EndpointConfig) -> list[AddressProbe]:
    """Return a probe of each address."""
    deadline_s = time.monotonic() + _LIMIT_S
    return [
        AddressProbe(client, number, config, deadline_s=deadline_s) for number in range(len(config.endpoint))
    ]


async def _of_address(
    client: Client, one: AddressProbe, config: EndpointConfig, asked: Sequence[Sampling], *, has_images: bool
) -> tuple[ServerFacts, str | None]:
    """Return what an address serves and can of what is asked for, and its version."""
    server, version = await served(client, one, config)
    if config.is_pooling:
        for sampling in asked:
            await pool(one, config, sampling)
        return server, version
    server = with_facts(server, max_tokens_name=await one.max_tokens_name(server))
    if any(sampling.response_format or sampling.choice for sampling in asked):
        server = with_facts(server, schema_by=await one.schema_by(server))
    if any(sampling.choice for sampling in asked):
        server = with_facts(server, choice_by=await one.choice_by(server))
    for name in ("regex", "grammar"):
        if any(getattr(sampling, name) for sampling in asked):
            server = with_facts(server, pattern_by=await one.pattern_by(server, regex=name == "regex"))
            if server.pattern_by == "none":
                break
    if any(sampling.logprobs for sampling in asked) and not await one.lists_logprobs(server):
        raise ValueError(
            f"logprobs are given, and endpoint {one.name} lists none: {one.reasons['log-probabilities']}; leave "
            "logprobs out"
        )
    for sampling in asked:
        if (fault := unknown_setting(sampling, config, server)) is not None:
            raise ValueError(f"{fault}{_reasons(one)}")
        await _check_settings(one, config, sampling, server)
    if has_images and not await one.takes_images(server):
        raise ValueError(
            f"rows have images, and endpoint {one.name} takes none: {one.reasons['images']}; name a model with image "
            "input, or leave the images out"
        )
    return server, version


def _reasons(one: AddressProbe) -> str:
    """Return a sentence that says what came of what was tried."""
    tried = "; ".join(f"{what}, {reason}" for what, reason in one.reasons.items())
    return f". At {one.name} was tried: {tried}" if tried else ""


def with_facts(server: ServerFacts, **values: str) -> ServerFacts:
    """Return the facts with these values."""
    return ServerFacts.model_validate(server.model_dump() | values)


async def served(client: Client, one: AddressProbe, config: EndpointConfig) -> tuple[ServerFacts, str | None]:
    """Return whose server it is, what it lists of the model, and its version.

    ``UnusableError`` if it cannot be used.
    """
    address = config.endpoint[one.number]
    outcome = await one.get(address.url_of("models"))
    if isinstance(outcome, RunRefused):
        if outcome.status != 404:
            raise UnusableError(outcome.reason)
        return ServerFacts.model_validate({}), None
    data = outcome.values.get("data") if isinstance(outcome.values, dict) else None
    entries = [entry for entry in data or () if isinstance(entry, dict)]
    owners = {str(entry.get("owned_by")) for entry in entries}
    kind = next((_KINDS[owner] for owner in sorted(owners) if owner in _KINDS), "other")
    kept = facts_of(outcome.values, config.model)
    if not kept and kind != "other":  # a gateway may list other names than those that it takes
        listed = ", ".join(repr(entry.get("id")) for entry in entries)
        raise UnusableError(f"endpoint {one.name} serves no model {config.model!r}; it serves {listed}")
    version = None
    if kind == "vllm":
        told = await client.get(one.number, address.server_url_of("version"))
        version = told.values.get("version") if isinstance(told, Answered) else None
    tokenize_by = await _tokenize_by(client, one.number, config, kind)
    facts = {"kind": kind, "models": kept, "tokenize_by": tokenize_by}
    return ServerFacts.model_validate(facts), version


async def _tokenize_by(client: Client, number: int, config: EndpointConfig, kind: str) -> str:
    ways = {"vllm": ("messages", "prompt"), "llama.cpp": ("content", "content")}
    if kind not in ways:
        return "none"
    way, name = ways[kind]
    url = config.endpoint[number].server_url_of("tokenize")
    told = await client.post(number, url, {"model": config.model, name: "sea"})
    is_there = isinstance(told, Answered) and isinstance(told.values.get("tokens"), list)
    return way if is_there else "none"


def _check_equal(name: str, server: ServerFacts, other_name: str, other: ServerFacts) -> None:
    if server.models != other.models:
        raise ValueError(
            f"the addresses of the endpoint serve different models: {name} has {list(server.models)}, {other_name} has "
            f"{list(other.models)}; rows of one spec must come from one model"
        )
    for fact in ("kind", "max_tokens_name", "schema_by", "choice_by", "pattern_by"):
        one, another = getattr(server, fact), getattr(other, fact)
        if one != another:
            raise ValueError(
                f"the addresses of the endpoint can different things: {fact} is {one!r} at {name} and {another!r} at "
                f"{other_name}; name only addresses of servers of one kind and version"
            )


async def _check_settings(
    one: AddressProbe, config: EndpointConfig, sampling: Sampling, server: ServerFacts
) -> None:
    """Ask for one short answer under the settings. ``ValueError`` if they are refused, or not followed."""
    small = replace(sampling, max_tokens=max(min(sampling.max_tokens, _FEW_TOKENS), sampling.min_tokens))
    reply = await one.reply(small, server)
    if isinstance(reply, Refused):
        request = GenerationRequest(request_id="", prompt="")
        ask = Ask(ask_id="", prompt=Prompt((), request), sampling=sampling, seed=sampling.seed)
        values = generation_body(ask, config, server).values
        shown = {name: value for name, value in values.items() if name not in ("model", "messages", "prompt")}
        raise ValueError(
            f"endpoint {one.name} refuses the job's settings: {reply.text.rstrip('.')}. They are "
            f"{json.dumps(shown)[:_SHOWN]}; change what it names, or leave it out"
        )
    if (fault := _unfollowed(sampling, reply)) is not None:
        raise ValueError(
            f"endpoint {one.name} answers, and does not follow {fault}: it answered {reply.text[:_SHOWN]!r}"
        )


def _unfollowed(sampling: Sampling, reply: Reply) -> str | None:
    """Return which of the settings an answer shows not to be followed; None if it does not show that."""
    is_cut, text = reply.finish_reason == "length", reply.text.strip()
    if sampling.choice and text not in sampling.choice and not is_cut:
        return "choice"
    if sampling.response_format is not None and not _may_fit(sampling.response_format, text, is_cut=is_cut):
        return "response_format, the job's JSON schema"
    if sampling.regex is not None and not is_cut:
        try:
            fits = re.fullmatch(sampling.regex, reply.text) is not None
        except re.error:  # of another dialect than Python's
            fits = True
        return None if fits else "regex"
    return None


def _may_fit(schema_text: str, text: str, *, is_cut: bool) -> bool:
    """Tell whether an answer, or its beginning, may be one of the schema."""
    if is_cut:
        return text[:1] in '{["0123456789-tfn'
    try:
        value, schema = json.loads(text), json.loads(schema_text)
    except (ValueError, RecursionError):
        return False
    errors = validator_of(schema).iter_errors(value)
    return not any(error.validator in _OF_STRUCTURE for error in errors)


async def pool(one: AddressProbe, config: EndpointConfig, sampling: Sampling) -> None:
    """Ask for the output of one text. ``ValueError`` if there is none."""
    texts = ("What is wide?", "The sea is wide.")
    turns = tuple(Message(role=role, content=text) for role, text in zip(PAIR, texts, strict=True))
    pair = {"messages": turns} if config.task == "score" else {"prompt": texts[1]}
    request = GenerationRequest(request_id="probe", sampling=sampling, **pair)
    body = pooling_body(request, config)
    address = config.endpoint[one.number]
    url = address.server_url_of(body.path) if body.is_beside else address.url_of(body.path)
    try:
        outcome = await one.post(url, body.values)
        fault = outcome.text if isinstance(outcome, Refused) else None
        completion = (
            pooled_of(outcome.values, "probe", config.task) if isinstance(outcome, Answered) else None
        )
    except UnreadableError as error:
        fault, completion = f"its answer cannot be read: {error}", None
    except UnusableError as error:
        fault, completion = str(error), None
    if completion is not None and completion.error is not None:
        fault = completion.error.message
    if fault is not None:
        raise ValueError(
            f"the job's task is {config.task}, and endpoint {one.name} cannot do it (/{body.path}): {fault}. vLLM has "
            "it when it serves a pooling model (--runner pooling)"
        )
    if completion is not None and completion.embedding is not None and sampling.dimensions is not None:
        num_dimensions = len(completion.embedding) // 4
        if num_dimensions != sampling.dimensions:
            raise ValueError(
                f"dimensions is {sampling.dimensions}, and endpoint {one.name} returns {num_dimensions} whatever is "
                "asked for; leave dimensions out"
            )
