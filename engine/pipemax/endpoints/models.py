"""What the addresses of an endpoint say they serve, and whether it is still the same."""

from typing import Any

from pipemax.endpoint_config import Address, EndpointConfig, ServerFacts
from pipemax.endpoints.client import Answered, Client, Outcome, RunRefused

_KEPT = ("id", "root", "max_model_len")


async def listed_models(
    client: Client, address: int, config: EndpointConfig
) -> list[dict[str, Any]] | Outcome:
    """Return the entries of the config's model in an address's list, as far as a spec holds them.

    A server without such a list returns an empty one.
    """
    outcome = await client.get(address, config.endpoint[address].url_of("models"))
    if isinstance(outcome, RunRefused) and outcome.status == 404:
        return []
    if not isinstance(outcome, Answered):
        return outcome
    return facts_of(outcome.values, config.model)


def facts_of(values: Any, model: str) -> list[dict[str, Any]]:
    """Return what a list of models says of one, with its fields that a spec holds."""
    data = values.get("data") if isinstance(values, dict) else None
    entries = [entry for entry in data or () if isinstance(entry, dict) and entry.get("id") == model]
    return [{name: entry[name] for name in _KEPT if entry.get(name) is not None} for entry in entries]


def changed_models(
    found: list[dict[str, Any]], server: ServerFacts, config: EndpointConfig, address: Address
) -> str | None:
    """Return why what an address serves now is not what the check has found; None if it is."""
    expected = list(server.models)
    if found == expected or not expected:
        return None
    now = f"serves {found[0]}" if found else f"no longer lists model {config.model!r}"
    return (
        f"endpoint {address.name} {now}, and the run began with {expected[0]}: rows of one spec must come from one "
        "model. Start the job again with another model_revision if the new one is meant"
    )
