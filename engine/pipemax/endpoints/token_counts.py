"""Count the tokens of sampled prompts: by the server where it has /tokenize, else by an estimate that says so."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipemax.checkpoint.pooling_texts import row_texts
from pipemax.checkpoint.prompt_encoder import shared_prefix_tokens
from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.client import Answered, Client
from pipemax.endpoints.requests import is_chat, messages_of, row_fault
from pipemax.generation import GenerationRequest, RequestError
from pipemax.wire import encodable

_AT_ONCE = 16
_LIMIT_S = 60.0
_BYTES_PER_TOKEN = 4
_TOKENS_PER_TURN = 4
"""Of the chat template, as a guess."""
ESTIMATED = "estimated from characters, because the endpoint counts no tokens"
WITHOUT_TEMPLATE = "without the chat template, which the endpoint does not count"


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPrompts:
    """What sampled prompts come to."""

    tokens: list[int]
    """Of each; 0 for one that would end as an error."""
    note: str
    """How they are not exact; empty if they are."""
    shared_prefix: int
    first_prompt: str


def count_prompts(
    config: EndpointConfig, server: ServerFacts, sampled: Sequence[GenerationRequest | RequestError]
) -> CountedPrompts:
    """Count the prompts of sampled rows, of which images are left out."""
    texts = [_text(one, config) for one in sampled]
    by_server = asyncio.run(_counted(config, server, sampled)) if sampled else None
    first = next(iter(texts), "")
    if by_server is None:
        turns = [_num_turns(one, config) for one in sampled]
        tokens = [_estimate(text, num) for text, num in zip(texts, turns, strict=True)]
        return CountedPrompts(
            tokens=tokens, note=ESTIMATED if sampled else "", shared_prefix=0, first_prompt=first or ""
        )
    token_ids, rendered = by_server
    known = [ids for ids in token_ids if ids]
    longest = max((model.get("max_model_len") or 0 for model in server.models), default=0)
    is_whole = server.tokenize_by == "messages" or not any(_num_turns(one, config) for one in sampled)
    return CountedPrompts(
        tokens=[0 if longest and len(ids) >= longest else len(ids) for ids in token_ids],
        note="" if is_whole else WITHOUT_TEMPLATE,
        shared_prefix=shared_prefix_tokens(known),
        first_prompt=rendered or first or "",
    )


async def _counted(
    config: EndpointConfig, server: ServerFacts, sampled: Sequence[GenerationRequest | RequestError]
) -> tuple[list[list[int]], str | None] | None:
    """Return the token ids of each prompt, and the text of the first; None if the server does not count them all."""
    if server.tokenize_by == "none":
        return None
    gate = asyncio.Semaphore(_AT_ONCE)
    async with Client(config) as client:

        async def token_ids(one: GenerationRequest | RequestError) -> list[int] | None:
            values = _values(one, config, server)
            if values is None:
                return []
            async with gate:
                url = config.endpoint[0].server_url_of("tokenize")
                outcome = await client.post(0, url, {"model": config.model, **values})
            found = outcome.values.get("tokens") if isinstance(outcome, Answered) else None
            return found if isinstance(found, list) else None

        try:
            counted = await asyncio.wait_for(asyncio.gather(*map(token_ids, sampled)), _LIMIT_S)
        except TimeoutError:
            return None
        known = [ids for ids in counted if ids is not None]
        if len(known) < len(counted):
            return None
        return known, await _rendered(client, config, known[0]) if server.kind == "vllm" else None


async def _rendered(client: Client, config: EndpointConfig, token_ids: list[int]) -> str | None:
    if not token_ids:
        return None
    url = config.endpoint[0].server_url_of("detokenize")
    outcome = await client.post(0, url, {"model": config.model, "tokens": token_ids})
    text = outcome.values.get("prompt") if isinstance(outcome, Answered) else None
    return text if isinstance(text, str) else None


def _values(
    one: GenerationRequest | RequestError, config: EndpointConfig, server: ServerFacts
) -> dict[str, Any] | None:
    """Return what /tokenize is sent for a row; None for one that would end as an error."""
    text = _text(one, config)
    if text is None or isinstance(one, RequestError):
        return None
    if server.tokenize_by == "content":
        return {"content": text, "add_special": True}
    if config.is_pooling or not is_chat(one, config):
        return {"prompt": text}
    return {"messages": messages_of(one, config.images)}


def _text(one: GenerationRequest | RequestError, config: EndpointConfig) -> str | None:
    """Return everything that a row says, as text; None for one that would end as an error."""
    if isinstance(one, RequestError) or row_fault(one, config) is not None:
        return None
    if config.is_pooling:
        texts = row_texts(one)
        return None if isinstance(texts, RequestError) else "\n".join(map(encodable, texts))
    if not is_chat(one, config):
        return encodable(one.prompt or "")
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in messages_of(one, config.images))


def _num_turns(one: GenerationRequest | RequestError, config: EndpointConfig) -> int:
    if isinstance(one, RequestError) or config.is_pooling or not is_chat(one, config):
        return 0
    return len(one.messages or ("prompt",)) + (one.system is not None)


def _estimate(text: str | None, num_turns: int) -> int:
    if text is None:
        return 0
    return max(1, len(text.encode()) // _BYTES_PER_TOKEN + _TOKENS_PER_TURN * num_turns)
