"""Real vLLM servers with pooling models as endpoints: rows get what the engine that runs vLLM itself gives them."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipemax.api import Completion, OfflineEngine, Sampling
from pipemax.config import EngineConfig
from pipemax.wire import ErrorCode
from tests.endpoints.real import demo_prompts, endpoint_engine
from tests.endpoints.servers import DEMO_MODEL, vllm_server
from tests.engine.conftest import DEFAULTS
from tests.engine.test_pooling import LABELS, ask, make_bert, values

pytestmark = pytest.mark.long  # three servers and three engines

LONG = "word " * 400
EMBEDS = ("--runner", "pooling", "--convert", "embed", "--max-model-len", "256")


@pytest.fixture(autouse=True)
def _core_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts in half the time."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def both(
    directory: Path, model: Path, rows: list[Any], settings: list[Sampling], *arguments: str, **config: Any
) -> list[tuple[list[Completion], list[Completion]]]:
    """Return for each of the settings the endpoint's completions, and the engine's own."""
    task = settings[0].task
    with ExitStack() as stack:
        server = stack.enter_context(vllm_server(directory, *arguments, model=model))
        endpoint = stack.enter_context(endpoint_engine(server, *settings, task=task))
        parsed = EngineConfig.parse(
            DEFAULTS | {"model": str(model), "task": task, "max_model_len": None} | config
        )
        itself = stack.enter_context(OfflineEngine(parsed))
        return [(ask(endpoint, rows, one), ask(itself, rows, one)) for one in settings]


def test_embeddings_are_those_of_the_engine_itself(tmp_path: Path) -> None:
    settings = [
        Sampling(task="embed"),
        Sampling(task="embed", normalize=False),
        Sampling(task="embed", truncate=True),
    ]
    rows = [*demo_prompts(8), LONG, " "]
    for found, expected in both(tmp_path, DEMO_MODEL, rows, settings, *EMBEDS, max_model_len=256):
        for one, other in zip(found, expected, strict=True):
            assert (one.error and one.error.code) == (other.error and other.error.code), one
            assert one.prompt_tokens == other.prompt_tokens
            if other.error is None:
                np.testing.assert_allclose(values(one), values(other), atol=1e-4)
        assert found[-1].error.code == ErrorCode.EMPTY_PROMPT


def test_labels_are_those_of_the_engine_itself(tmp_path: Path) -> None:
    """The server says the probability of each class, and the name of the best one only."""
    model = make_bert(tmp_path, LABELS)
    ((found, expected),) = both(tmp_path, model, [*demo_prompts(3), "a", LONG], [Sampling(task="classify")])
    for one, other in zip(found, expected, strict=True):
        assert (one.error and one.error.code) == (other.error and other.error.code), one
        assert (one.label, one.prompt_tokens) == (other.label, other.prompt_tokens)
        assert one.probability == pytest.approx(other.probability, abs=1e-4)


def test_scores_are_those_of_the_engine_itself(tmp_path: Path) -> None:
    model = make_bert(tmp_path, {0: "relevant"})
    rows = [("a package", "its summary"), ("a package", "b"), ("a", LONG)]
    ((found, expected),) = both(tmp_path, model, rows, [Sampling(task="score")])
    for one, other in zip(found, expected, strict=True):
        assert (one.error and one.error.code) == (other.error and other.error.code), one
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.prompt_tokens == other.prompt_tokens
