"""What tests of real servers share: the engine of an endpoint, demo rows, and how answers are compared."""

from collections.abc import Iterator, Sequence
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


def endpoint_config(server: ModelServer, *asked: Sampling, **more: Any) -> EndpointConfig:
    """Return the config with its key and with what the probe finds for what is asked."""
    config = EndpointConfig.parse(endpoint_values(server, **more)).with_keys({KEY_VARIABLE: KEY})
    return config.model_copy(update={"server": probe(config, asked).server})


@contextmanager
def endpoint_engine(server: ModelServer, *asked: Sampling, **more: Any) -> Iterator[OfflineEngine]:
    """Yield the engine that a job would start, whose check has probed the server."""
    with OfflineEngine(endpoint_config(server, *asked, **more)) as engine:
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
    for one, other in zip(found, expected, strict=True):
        assert (one.error and one.error.code) == (other.error and other.error.code), (one.error, other.error)
        for name in set(EXACT) - set(but):
            assert getattr(one, name) == getattr(other, name), (name, one, other)
        for name in set(NEAR) - set(but):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-3), (name, one, other)
