"""The check of a node, by real engines: right copies pass, damaged ones do not, and the engine is as before."""

import pytest

from pipemax.config import EngineConfig
from pipemax.vllm_ext.launch.known_check import NodeCheck
from pipemax.vllm_ext.node_check.run import check_engine
from tests.parity.cases import PLAIN
from tests.parity.conftest import EngineOf, Reference
from tests.parity.engines import GPU_BLOCKS, Kind, ParityEngine, Setting
from tests.parity.faulty_connector import Fault
from tests.parity.test_parity import V1_ASYNC, V1_PIPELINE, check

PARTS = ["copies", "tokens, prefetched over poison", "tokens", "overlap"]


def checked(engine: ParityEngine, fault: Fault) -> NodeCheck:
    engine.reset(Setting(num_batches=2, gpu_blocks=GPU_BLOCKS - 1, host_blocks=300, fault=fault))
    return check_engine(engine.llm, engine.vllm_config, EngineConfig(model="varied-model"), most_prompts=8)


@pytest.mark.parametrize(
    "kind", [V1_PIPELINE, pytest.param(V1_ASYNC, marks=pytest.mark.parity_full)], ids=str
)
def test_an_engine_with_right_copies_passes_and_answers_as_before(
    kind: Kind, engine_of: EngineOf, reference: Reference
) -> None:
    engine = engine_of(kind)
    result = checked(engine, Fault.NONE)
    assert result.passed, result.failure
    assert [part.name for part in result.parts] == PARTS
    assert result.figures["prefetch, scattered blocks, GB/s"] > 0
    assert engine.scheduler._gpu.num_free == GPU_BLOCKS - 1, "all blocks are requests' again"
    check(engine, Setting(num_batches=3), PLAIN, reference(kind, PLAIN))


@pytest.mark.parametrize("kind", [V1_PIPELINE], ids=str)
def test_an_engine_with_damaged_copies_fails_by_its_bytes_and_by_its_tokens(
    kind: Kind, engine_of: EngineOf
) -> None:
    result = checked(engine_of(kind), Fault.CORRUPT)
    assert not result.passed
    assert [part.name for part in result.parts if not part.passed] == PARTS[:3]
    assert result.failure.startswith("copies: worker 0: ")
    assert "of 8 prompts the same" in result.failure
