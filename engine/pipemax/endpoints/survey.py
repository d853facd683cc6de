"""Find out all that the addresses of an endpoint can do, for ``pipemax doctor --engine``."""

import asyncio
from dataclasses import dataclass, field

from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.address_probe import AddressProbe
from pipemax.endpoints.client import Client
from pipemax.endpoints.probe import hurried, pool, probes_of, run_hurried, served, with_facts
from pipemax.generation import Sampling


@dataclass(slots=True, kw_only=True)
class Survey:
    """What one address can."""

    name: str
    found: dict[str, str] = field(default_factory=dict)
    """By what was looked for, in order."""
    fault: str | None = None
    """Why it cannot be used at all."""


def survey(config: EndpointConfig) -> list[Survey]:
    """Return what each address can. ``ValueError`` if the config's addresses or certificates cannot be used."""
    return run_hurried(_survey(config))


async def _survey(config: EndpointConfig) -> list[Survey]:
    async with Client(hurried(config)) as client:
        return list(
            await asyncio.gather(*(_surveyed(client, one, config) for one in probes_of(client, config)))
        )


async def _surveyed(client: Client, one: AddressProbe, config: EndpointConfig) -> Survey:
    seen = Survey(name=one.name)
    try:
        server, version = await served(client, one, config)
        seen.found["serves"] = _served_text(config, server, version)
        if config.is_pooling:
            await pool(one, config, Sampling(task=config.task))
            seen.found[config.task] = f"yes{_took(one)}"
        else:
            await _survey_text(one, config, server, seen)
    except ValueError as error:
        seen.fault = str(error)
    seen.found["asked"] = (
        f"{one.spent.requests:,} requests, {one.spent.prompt_tokens:,} tokens of prompts and "
        f"{one.spent.output_tokens:,} of answers"
    )
    return seen


async def _survey_text(one: AddressProbe, config: EndpointConfig, server: ServerFacts, seen: Survey) -> None:
    server = with_facts(server, max_tokens_name=await one.max_tokens_name(server))
    is_chat = config.chat != "never"
    names = ("chat", "completions") if is_chat else ("completions", "chat")
    seen.found[names[0]] = f"yes{_took(one)}"
    seen.found[names[1]] = "yes" if await one.has_completions(server, is_chat=not is_chat) else "no"
    server = with_facts(server, schema_by=await one.schema_by(server))
    server = with_facts(server, choice_by=await one.choice_by(server))
    by_regex, by_grammar = [await one.pattern_by(server, regex=regex) for regex in (True, False)]
    for what, way in {
        "JSON schemas": server.schema_by,
        "choices": server.choice_by,
        "regular expressions": by_regex,
        "grammars": by_grammar,
    }.items():
        seen.found[what] = f"no ({one.reasons[what]})" if way == "none" else f"yes, by {way}"
    has_logprobs = await one.lists_logprobs(server)
    seen.found["log-probabilities"] = "yes" if has_logprobs else f"no ({one.reasons['log-probabilities']})"
    repeats = await one.repeats_seeds(server)
    seen.found["seeds"] = {
        None: f"no ({one.reasons.get('seeds')})",
        True: "yes: the same seed gave the same answer",
        False: "taken, and the same seed gave another answer",
    }[repeats]
    takes_images = await one.takes_images(server)
    seen.found["images"] = "yes" if takes_images else f"no ({one.reasons['images']})"
    counts = server.tokenize_by != "none"
    seen.found["token counts"] = (
        "exact, by /tokenize" if counts else "estimated from characters (no /tokenize)"
    )


def _served_text(config: EndpointConfig, server: ServerFacts, version: str | None) -> str:
    known = [f"{name} {value}" for model in server.models for name, value in model.items() if name != "id"]
    listed = f" ({', '.join(known)})" if known else ""
    if not server.models:
        listed = " (not in its list of models)"
    software = {"vllm": "vLLM", "llama.cpp": "llama.cpp", "other": "an OpenAI-compatible server"}[server.kind]
    return f"{config.model}{listed}, {software}{f' {version}' if version else ''}"


def _took(one: AddressProbe) -> str:
    return "" if one.latency_s is None else f", {one.latency_s:.2f} s for a small request"
