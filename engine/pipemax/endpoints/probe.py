"""Find out what the addresses of an endpoint serve and can, before anything is claimed or asked."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pipemax.domain.errors import EngineStartError
from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.client import Answered, Broken, Busy, Client, RowRefused, RunRefused
from pipemax.endpoints.models import facts_of
from pipemax.generation import Sampling

_KINDS = {"vllm": "vllm", "llamacpp": "llama.cpp"}


def probe(config: EndpointConfig, asked: Sequence[Sampling]) -> ServerFacts:
    """Return what all addresses serve and can. ``ValueError`` says why they cannot be used."""
    try:
        return asyncio.run(_probe(config, asked))
    except EngineStartError as error:
        raise ValueError(str(error)) from None


async def _probe(config: EndpointConfig, asked: Sequence[Sampling]) -> ServerFacts:
    async with Client(config) as client:
        found = [await _models(client, number, config) for number in range(len(config.endpoint))]
        first, *others = found
        for address, facts in zip(config.endpoint[1:], others, strict=True):
            if facts.models != first.models:
                raise ValueError(
                    f"the addresses of the endpoint serve different models: {config.endpoint[0].name} has "
                    f"{list(first.models)}, {address.name} has {list(facts.models)}"
                )
        return first


async def _models(client: Client, address: int, config: EndpointConfig) -> ServerFacts:
    name = config.endpoint[address].name
    match await client.get(address, config.endpoint[address].url_of("models")):
        case Answered(values=values):
            kept = facts_of(values, config.model)
            owners = {str(one.get("owned_by")) for one in _entries(values)}
            kind = next((_KINDS[owner] for owner in owners if owner in _KINDS), "other")
            if not kept and kind != "other":
                served = ", ".join(repr(one.get("id")) for one in _entries(values)) or "none"
                raise ValueError(f"endpoint {name} serves no model {config.model!r}; it serves {served}")
            by_vllm = kind == "vllm"
            return ServerFacts.model_validate(
                {
                    "kind": kind,
                    "models": kept,
                    "choice_by": "structured_outputs" if by_vllm else "schema",
                    "pattern_by": "structured_outputs"
                    if by_vllm
                    else "grammar"
                    if kind == "llama.cpp"
                    else "none",
                    "has_tokenize": by_vllm,
                }
            )
        case RunRefused(status=404):
            return ServerFacts.model_validate({})
        case RunRefused(reason=reason):
            raise ValueError(reason)
        case Busy(reason=reason) | Broken(reason=reason) | RowRefused(text=reason):
            raise ValueError(f"endpoint {name} does not answer: {reason}")


def _entries(values: Any) -> list[dict[str, Any]]:
    data = values.get("data") if isinstance(values, dict) else None
    return [entry for entry in data or () if isinstance(entry, dict)]
