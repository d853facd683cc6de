"""Real vLLM engines on the demo model, one for each policy: they take up to a minute to start."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from pipemax.api import OfflineEngine
from pipemax.config import EngineConfig
from pipemax_spark.executor.engine_environment import ENGINE_PYTHONPATH_VARIABLE
from pipemax_spark.executor.server_process import EXECUTOR_VARIABLE
from tests.fakes.fixtures import gpus  # noqa: F401
from tests.serve.support import FakeJvm
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPOSITORY / "examples" / "model"
MAX_MODEL_LEN = 512

DEFAULTS: dict[str, object] = {
    "model": str(DEMO_MODEL),
    "dtype": "float32",  # so that another implementation's arithmetic gives the same tokens
    "max_model_len": MAX_MODEL_LEN,
    "cpu_kv_gib": 0.25,
    "max_num_seqs": 32,
}

PARSER_PLUGIN = str(REPOSITORY / "tests" / "fakes" / "reasoning_parser.py")
"""A row whose template's variables say nothing of thinking is answered as by an engine without a parser."""
POLICIES: dict[str, dict[str, object]] = {
    # With one stage there is nothing to measure: it takes stock vLLM.
    "vllm": {
        "policy": "auto",
        "reasoning_parser": "demo",
        "vllm": {"reasoning_parser_plugin": PARSER_PLUGIN},
    },
    # So few blocks on each stage that a few dozen requests leave it and come back.
    "pipemax on two stages": {
        "policy": "pipemax",
        "pipeline_parallel_size": 2,
        "block_size": 32,
        "calibrate_at_start_s": 3,
        "reasoning_parser": "demo",
        "vllm": {"num_gpu_blocks_override": 24, "reasoning_parser_plugin": PARSER_PLUGIN},
    },
}


@dataclass(frozen=True)
class PrefixCounters:
    """vLLM's own, in tokens, of all engines that this process has had."""

    queries: float
    hits: float

    @classmethod
    def now(cls) -> "PrefixCounters":
        counts = {sample.name: sample.value for metric in REGISTRY.collect() for sample in metric.samples}
        return cls(
            queries=counts.get("vllm:prefix_cache_queries_total", 0.0),
            hits=counts.get("vllm:prefix_cache_hits_total", 0.0),
        )


@dataclass(frozen=True)
class StartedEngine:
    engine: OfflineEngine
    prefixes: PrefixCounters
    """When it had started: it measures itself with requests of its own."""


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(POLICIES["vllm"], marks=pytest.mark.long),
        POLICIES["pipemax on two stages"],
    ],
    ids=POLICIES.keys(),
)
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, unit_end: ExitStack
) -> Iterator[StartedEngine]:
    with ExitStack() as own:
        unit_end.callback(own.close)
        patch = own.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # vLLM compiles a small function for its first logprob, which takes longer than all tests of it.
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        engine = own.enter_context(OfflineEngine(EngineConfig.parse(DEFAULTS | request.param)))
        yield StartedEngine(engine, PrefixCounters.now())


@pytest.fixture(scope="session")
def engine(started: StartedEngine) -> OfflineEngine:
    return started.engine


@pytest.fixture
def jvm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJvm]:
    fake = FakeJvm()
    monkeypatch.setenv(EXECUTOR_VARIABLE, str(fake.pid))
    monkeypatch.setenv(ENGINE_PYTHONPATH_VARIABLE, f"{REPOSITORY / 'engine'}:{REPOSITORY}")
    yield fake
    fake.kill()
    wait_until(lambda: fake.servers() == [], 120, "the server ends with its executor")
