"""An engine that fails in one of vLLM's other processes says why in its error."""

import os
from pathlib import Path

import pytest

from pipemax.api import OfflineEngine
from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from tests.engine.conftest import DEFAULTS, DEMO_MODEL, POLICIES


def error_of_start(**values: object) -> str:
    with pytest.raises(EngineStartError) as raised:
        OfflineEngine(EngineConfig.parse(DEFAULTS | values))
    return str(raised.value)


def test_too_little_kv_memory_is_told_with_vllm_s_figures_and_the_settings() -> None:
    error = error_of_start(policy="vllm", cpu_kv_gib=0.0005)
    assert error.startswith(
        f"model {str(DEMO_MODEL)!r} could not be loaded: ValueError: To serve at least one request with the model's "
        "max seq len (512)"
    )
    assert "is larger than the available KV cache memory" in error
    assert "the estimated maximum model length is 128. Remedy: raise" in error
    assert "cpu_kv_gib" in error
    assert "lower max_model_len" in error


def test_a_worker_that_is_killed_while_it_loads_is_named_with_its_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep
    )  # workers import the tests
    policy = POLICIES["pipemax on two stages"]
    error = error_of_start(**policy | {"vllm": {"worker_cls": "tests.fakes.killed_worker.KilledWorker"}})
    assert "could not be loaded: vLLM's process VllmWorker-1 was killed by SIGKILL" in error
    assert "when memory runs out: lower host_kv_gib" in error
