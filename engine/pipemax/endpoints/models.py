"""What the addresses of an endpoint say they serve, and whether it is still the same."""

import asyncio
from typing import Any

from pipemax.endpoint_config import Address, EndpointConfig, ServerFacts
from pipemax.endpoints.client import Answered, Client, Outcome, RunRefused

_KEPT = ("id", "root", "max_model_len")
_REMEDY = (
    "rows of one spec must come from one model. Start the job again with another model_revision if the new one is "
    "meant"
)


class ModelWatch:
    """Compares what is served with what the check before the run has found."""

    def __init__(self, client: Client, config: EndpointConfig, server: ServerFacts) -> None:
        self._client = client
        self._config = config
        self._server = server

    async def fault(self) -> str | None:
        """Ask every address. Return why the run cannot go on; None if it can, or an address does not answer now."""
        addresses = self._config.endpoint
        found = await asyncio.gather(
            *(listed_models(self._client, number, self._config) for number in range(len(addresses)))
        )
        for address, outcome in zip(addresses, found, strict=True):
            match outcome:
                case RunRefused(reason=reason):
                    return reason
                case list() if (fault := self._fault_of_list(outcome, address)) is not None:
                    return fault
        return None

    def fault_of_answer(self, values: Any, address: int) -> str | None:
        """Return why the run cannot go on after this answer, whose model is another; None if it is the same."""
        expected = self._server.answers_as
        named = values.get("model") if isinstance(values, dict) else None
        if expected is None or not isinstance(named, str) or named == expected:
            return None
        return (
            f"endpoint {self._config.endpoint[address].name} answered as model {named!r}, and the run began with "
            f"{expected!r}: {_REMEDY}"
        )

    def _fault_of_list(self, found: list[dict[str, Any]], address: Address) -> str | None:
        expected = list(self._server.models)
        if found == expected or not expected:
            return None
        now = f"serves {found[0]}" if found else f"no longer lists model {self._config.model!r}"
        return f"endpoint {address.name} {now}, and the run began with {expected[0]}: {_REMEDY}"


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
