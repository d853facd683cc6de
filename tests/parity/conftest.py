"""Engines for parity: at most one of PipeMax is up, beside stock vLLM's."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.parity.cases import SEEDED, Answers, Load
from tests.parity.engines import STOCK, Kind, ParityEngine
from tests.parity.make_model import SMALL, make_model

EngineOf = Callable[[Kind], ParityEngine]
Reference = Callable[[Kind, Load], Answers]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one kind of engine become neighbours, so that each is started once."""
    places = [place for place, item in enumerate(items) if _kind_of(item) is not None]
    ordered = sorted((items[place] for place in places), key=lambda item: str(_kind_of(item)))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _kind_of(item: pytest.Item) -> Kind | None:
    callspec = getattr(item, "callspec", None)
    kind = callspec.params.get("kind") if callspec else None
    return kind if isinstance(kind, Kind) else None


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("varied-model")
    make_model(directory, SMALL)
    return str(directory)


@pytest.fixture(scope="session")
def engine_of(model: str, unit_end: ExitStack) -> Iterator[EngineOf]:
    """The engine of a kind; another kind ends it."""
    with ExitStack() as stack:
        unit_end.callback(stack.close)
        engines: dict[Kind, ParityEngine] = {}

        def engine_of(kind: Kind) -> ParityEngine:
            if kind not in engines:
                engines.clear()
                stack.pop_all().close()
                engines[kind] = stack.enter_context(closing(ParityEngine(model, kind)))
            return engines[kind]

        yield engine_of


@pytest.fixture(scope="session")
def reference(model: str, engine_of: EngineOf, unit_end: ExitStack) -> Iterator[Reference]:
    """Stock vLLM, one stage, synchronous, ample KV of the same type: each load is run once.

    Seeds are the exception: the two runners draw differently, so V2's reference is vLLM's scheduler on V2.
    """
    known: dict[tuple[int, str, Load], Answers] = {}
    with ExitStack() as stack:
        unit_end.callback(stack.close)
        engines: dict[str, ParityEngine] = {}

        def stock(kv_cache_dtype: str) -> ParityEngine:
            if kv_cache_dtype not in engines:
                kind = Kind(policy="vllm", kv_cache_dtype=kv_cache_dtype)
                engines[kv_cache_dtype] = stack.enter_context(closing(ParityEngine(model, kind)))
            return engines[kv_cache_dtype]

        def answers(kind: Kind, load: Load) -> Answers:
            runner = kind.runner if load.choose is SEEDED.choose else 1
            key = runner, kind.kv_cache_dtype, load
            if key not in known:
                engine = stock(kind.kv_cache_dtype) if runner == 1 else engine_of(kind)
                if runner == 2:
                    engine.reset(STOCK)
                known[key] = engine.run(load.make())
            return known[key]

        yield answers
