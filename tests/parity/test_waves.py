"""Waves give stock vLLM's tokens: blocks are overwritten behind the computation, layer by layer.

A group's part of a block is NaN from when the step has computed the group until the copy is done.
"""

from typing import Any

import pytest

from tests.parity.cases import EVERYTHING, LONG, PLAIN, SEEDED, TEMPLATED, Load, different
from tests.parity.conftest import EngineOf, Reference
from tests.parity.engines import Kind, Setting
from tests.parity.faulty_connector import Fault
from tests.parity.test_parity import FULL, MIXED, TIGHT, V1_PIPELINE, V2_PIPELINE, check, light, name_of

CASES: list[Any] = [  # kind, setting, load
    (V1_PIPELINE, Setting(num_batches=2, waves=True), TEMPLATED),
    (V1_PIPELINE, Setting(num_batches=3, waves=True, controller=MIXED), EVERYTHING),
    pytest.param(V1_PIPELINE, Setting(num_batches=3, waves=True, **TIGHT), PLAIN, marks=FULL),
    pytest.param(V1_PIPELINE, Setting(num_batches=2, waves=True), LONG, marks=FULL),
    pytest.param(V1_PIPELINE, Setting(num_batches=4, waves=True, controller=MIXED), SEEDED, marks=FULL),
    pytest.param(V2_PIPELINE, Setting(num_batches=2, waves=True), light(TEMPLATED), marks=FULL),
    pytest.param(
        V2_PIPELINE, Setting(num_batches=3, waves=True, gpu_blocks=18), light(EVERYTHING), marks=FULL
    ),
    pytest.param(
        V2_PIPELINE,
        Setting(num_batches=2, waves=True, gpu_blocks=18, controller=MIXED),
        light(SEEDED),
        marks=FULL,
    ),
]


@pytest.mark.parametrize(("kind", "setting", "load"), CASES, ids=name_of)
def test_tokens_are_those_of_stock_vllm_with_waves(
    kind: Kind, setting: Setting, load: Load, engine_of: EngineOf, reference: Reference
) -> None:
    engine = engine_of(kind)
    check(engine, setting, load, reference(kind, load))
    assert engine.scheduler.num_wave_prefetches > 0


@pytest.mark.parametrize("kind", [V1_PIPELINE], ids=str)
def test_copies_of_a_wave_one_group_too_early_change_the_tokens(
    kind: Kind, engine_of: EngineOf, reference: Reference
) -> None:
    """The negative control."""
    engine = engine_of(kind)
    engine.reset(Setting(num_batches=2, waves=True, fault=Fault.EARLY))
    answers = engine.run(PLAIN.make())
    assert engine.scheduler.num_wave_prefetches > 0
    assert [*different(answers, reference(kind, PLAIN))]
