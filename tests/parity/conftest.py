"""Engines for parity: at most one of PipeMax is up, next to stock vLLM's."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import pytest

from tests.parity.cases import SEEDED, Answers, Load
from tests.parity.engines import STOCK, Kind, ParityEngine
from tests.parity.families import ADAPTERS, make_adapter, make_family

IN_MAKE_TEST = (
    Kind(pp=2),
    Kind(pp=2, runner=2, asynchronous=True),
)
"""The kinds of engines that ``make test`` starts; the others are for ``make parity-full``."""

ModelOf = Callable[[str], str]
EngineOf = Callable[[Kind], ParityEngine]
Reference = Callable[[Kind, Load], Answers]


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one kind of engine become neighbours, so that each is started once; most kinds are nightly."""
    for item in items:
        if (kind := _kind_of(item)) is not None and kind not in IN_MAKE_TEST:
            item.add_marker(pytest.mark.parity_full)
    places = [place for place, item in enumerate(items) if _kind_of(item) is not None]
    ordered = sorted((items[place] for place in places), key=lambda item: str(_kind_of(item)))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _kind_of(item: pytest.Item) -> Kind | None:
    callspec = getattr(item, "callspec", None)
    kind = callspec.params.get("kind") if callspec else None
    return kind if isinstance(kind, Kind) else None


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """The directory of a family's model, made once."""

    @cache
    def model_of(family: str) -> str:
        directory: Path = tmp_path_factory.mktemp("varied-model")
        make_family(directory, family)
        if family == "llama":
            for name in ADAPTERS:
                make_adapter(Path(f"{directory}-{name}"), name)
        return str(directory)

    return model_of


@pytest.fixture(scope="session")
def engine_of(model_of: ModelOf, unit_end: ExitStack) -> Iterator[EngineOf]:
    """The engine of a kind; another kind ends it."""
    with ExitStack() as stack:
        unit_end.callback(stack.close)
        engines: dict[Kind, ParityEngine] = {}

        def engine_of(kind: Kind) -> ParityEngine:
            if kind not in engines:
                engines.clear()
                stack.pop_all().close()
                engines[kind] = stack.enter_context(closing(ParityEngine(model_of(kind.family), kind)))
            return engines[kind]

        yield engine_of


@pytest.fixture(scope="session")
def reference(model_of: ModelOf, engine_of: EngineOf, unit_end: ExitStack) -> Iterator[Reference]:
    """Stock vLLM, one stage, synchronous, ample KV of the same type: each load is run once.

    Seeds are the exception: the two runners draw differently, so V2's reference is vLLM's scheduler on V2.
    """
    known: dict[tuple[str, tuple[str, ...], int, str, Load], Answers] = {}
    with ExitStack() as stack:
        unit_end.callback(stack.close)
        engines: dict[tuple[str, tuple[str, ...], str], ParityEngine] = {}

        def stock(family: str, adapters: tuple[str, ...], kv_cache_dtype: str) -> ParityEngine:
            if any(other[:2] != (family, adapters) for other in engines):  # tests are ordered by them
                engines.clear()
                stack.pop_all().close()
            key = family, adapters, kv_cache_dtype
            if key not in engines:
                kind = Kind(policy="vllm", family=family, adapters=adapters, kv_cache_dtype=kv_cache_dtype)
                engines[key] = stack.enter_context(closing(ParityEngine(model_of(family), kind)))
            return engines[key]

        def answers(kind: Kind, load: Load) -> Answers:
            runner = kind.runner if load.choose is SEEDED.choose else 1
            key = kind.family, kind.adapters, runner, kind.kv_cache_dtype, load
            if key not in known:
                engine = (
                    stock(kind.family, kind.adapters, kind.kv_cache_dtype) if runner == 1 else engine_of(kind)
                )
                if runner == 2:
                    engine.reset(STOCK)
                known[key] = engine.run(load.make())
            return known[key]

        yield answers
