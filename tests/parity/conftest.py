"""Engines for parity, one of a kind for the whole session: each takes half a minute to start."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipemax.api import OfflineEngine
from tests.parity.cases import Outcome, Requests, engine_config, run
from tests.parity.make_model import SMALL, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("varied-model")
    make_model(directory, SMALL)
    return str(directory)


@pytest.fixture(scope="session")
def reference(model: str) -> Iterator[Callable[[Requests], Outcome]]:
    """Stock vLLM with ample KV; each set is run once."""
    known: dict[Requests, Outcome] = {}
    with ExitStack() as stack:
        engines: list[OfflineEngine] = []

        def outcome(requests: Requests) -> Outcome:
            if requests not in known:
                if not engines:
                    engines.append(stack.enter_context(OfflineEngine(engine_config(model, policy="vllm"))))
                known[requests] = run(engines[0], requests.make())
            return known[requests]

        yield outcome


def connector(name: str) -> dict[str, object]:
    """vLLM arguments that put a connector of the tests in the place of ours."""
    return {
        "kv_transfer_config": {
            "kv_connector": name,
            "kv_connector_module_path": "tests.parity.faulty_connector",
            "kv_role": "kv_both",
        }
    }


MakeEngine = Callable[..., OfflineEngine]


@pytest.fixture(scope="session")
def make_engine(model: str) -> Iterator[MakeEngine]:
    """PipeMax with small pools; engines of equal arguments are one, and at most one is up."""
    current: dict[str, object] = {}

    def make(
        *,
        pp: int,
        gpu_blocks: int,
        host_mib: int = 64,
        num_batches: int | None = None,
        faults: str = "PoisonedConnector",
        **values: object,
    ) -> OfflineEngine:
        key = repr((pp, gpu_blocks, host_mib, num_batches, faults, sorted(values.items())))
        if current.get("key") != key:
            close()
            config = engine_config(
                model,
                policy="pipemax",
                pipeline_parallel_size=pp,
                host_kv_gib=host_mib / 1024,
                num_batches=num_batches,
                vllm={"num_gpu_blocks_override": gpu_blocks, **connector(faults)},
                **values,
            )
            current.update(key=key, engine=OfflineEngine(config))
        engine = current["engine"]
        assert isinstance(engine, OfflineEngine)
        return engine

    def close() -> None:
        engine = current.pop("engine", None)
        if isinstance(engine, OfflineEngine):
            engine.close()

    yield make
    close()
