"""What tests of real servers share: the engine of an endpoint, demo rows, and how answers are compared."""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipemax.api import Completion, GenerationRequest, OfflineEngine, Sampling
from pipemax.endpoint_config import EndpointConfig
from pipemax.endpoints.probe import probe
from tests.endpoints.servers import KEY, REPOSITORY, SERVED_NAME, ModelServer

KEY_VARIABLE = "REAL_SERVER_KEY"
_DEMO_TABLE = REPOSITORY / "examples" / "data" / "debian_packages.parquet"


def endpoint_values(server: ModelServer, **more: Any) -> dict[str, Any]:
    """Return an engine config, as YAML would have it, for a server."""
    values = {"endpoint": server.url, "model": SERVED_NAME, "model_revision": "1"}
    return values | {"api_key_env": KEY_VARIABLE} | more


def endpoint_config(server: ModelServer, **more: Any) -> EndpointConfig:
    """Return the config with its key and with what the probe finds."""
    config = EndpointConfig.parse(endpoint_values(server, **more)).with_keys({KEY_VARIABLE: KEY})
    return config.model_copy(update={"server": probe(config, [])})


@contextmanager
def endpoint_engine(server: ModelServer, **more: Any):
    with OfflineEngine(endpoint_config(server, **more)) as engine:
        yield engine


def demo_prompts(number: int) -> list[str]:
    rows = pq.read_table(_DEMO_TABLE).slice(0, number).to_pylist()
    return [
        f"Package: {row['package']}\nSummary: {row['summary']}\nDescription: {row['description']}"
        for row in rows
    ]


def completions(engine: OfflineEngine, prompts: Sequence[str | None], sampling: Sampling) -> list[Completion]:
    """Return the prompts' completions, in their order."""
    requests = [
        GenerationRequest(request_id=str(number), prompt=prompt, sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]
    return sorted(engine.generate(requests), key=lambda completion: int(completion.request_id))


EXACT = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "samples", "agreement", "attempts")
NEAR = ("logprob_sum", "logprob_mean", "probability")


def assert_equal_answers(
    found: Sequence[Completion], expected: Sequence[Completion], *, but: Sequence[str] = ()
) -> None:
    """Compare answers, those numbers that come of float32 arithmetic up to its error."""
    exact = [name for name in EXACT if name not in but]
    assert [_values(one, exact) for one in found] == [_values(one, exact) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.error and one.error.code) == (other.error and other.error.code), (one.error, other.error)
        for name in NEAR:
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-3), (name, one, other)
        if other.probabilities is not None:
            assert dict(one.probabilities or ()) == pytest.approx(dict(other.probabilities), abs=1e-3)


def _values(completion: Completion, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(completion, name) for name in names}
