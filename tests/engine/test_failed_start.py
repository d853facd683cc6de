"""An engine that fails in one of vLLM's other processes says why in its error."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipemax.api import OfflineEngine
from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from pipemax.wire import GenerationSpec, SessionErrorCode
from pipemax_spark.cli import failure_text
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.client import EngineOptions
from tests.engine.conftest import DEFAULTS, DEMO_MODEL, POLICIES, REPOSITORY
from tests.serve.support import FakeJvm, run_prompts

pytestmark = pytest.mark.long  # engines that fail take as long to start as others


def test_too_little_kv_memory_is_told_to_the_job_with_vllm_s_figures_and_the_settings(
    jvm: FakeJvm, tmp_path: Path
) -> None:
    opts = EngineOptions(
        engine={**DEFAULTS, "policy": "vllm", "cpu_kv_gib": 0.0005},
        generation=GenerationSpec(max_tokens=4),
        job_id="job",
        engine_python=sys.executable,
        log_dir=str(tmp_path),
    )
    with pytest.raises(EngineSessionError) as raised:
        run_prompts(["one"], opts)
    error = raised.value
    assert error.code is SessionErrorCode.ENGINE_START_FAILED
    assert error.message.startswith(
        f"model {str(DEMO_MODEL)!r} could not be loaded: ValueError: To serve at least one request with the model's "
        "max seq len (512)"
    )
    assert "is larger than the available KV cache memory" in error.message
    assert "the estimated maximum model length is 128. Remedy: raise" in error.message
    assert "cpu_kv_gib" in error.message
    assert "lower max_model_len" in error.message
    of_spark = f"Traceback:\npipemax_spark.errors.EngineSessionError: {error}\n\nDriver stacktrace:"
    assert failure_text(RuntimeError(of_spark)) == str(error), "the job's error is one line, all of it"


def test_an_exception_is_told_where_vllm_loads_no_plugin_of_ours() -> None:
    """Where the package is on PYTHONPATH only."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.engine.engine_without_plugin"],
        cwd=REPOSITORY,
        env=os.environ | {"VLLM_PLUGINS": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    [cause] = re.findall("^cause: (.*)", told, re.MULTILINE)
    assert "could not be loaded: IndexError: pop from an empty deque (" in cause
    assert "raising_worker.py" in cause


@pytest.mark.long  # as with too little memory, the error of another process is told
def test_a_worker_that_is_killed_while_it_loads_is_named_with_its_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)  # workers import the tests
    killed = {"reasoning_parser": None, "vllm": {"worker_cls": "tests.fakes.killed_worker.KilledWorker"}}
    with pytest.raises(EngineStartError) as raised:
        OfflineEngine(EngineConfig.parse(DEFAULTS | POLICIES["pipemax on two stages"] | killed))
    error = str(raised.value)
    assert "could not be loaded: vLLM's process VllmWorker-1 was killed by SIGKILL" in error
    assert "when memory runs out: lower host_kv_gib" in error
