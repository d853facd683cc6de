"""FP8 KV: token for token the same as stock vLLM with FP8 KV, over pools so small that every request comes back.

The kernels for CPUs need AVX-512 for it. Quantizing can make much of a difference of rounding: these engines compute in
float32, where it does not here.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipemax.vllm_ext.launch.known_calibration import kv_bytes_per_token
from pipemax.vllm_ext.launch.known_check import Verdict
from tests.parity.cases import BLOCK_TOKENS, EVERYTHING, PLAIN, TEMPLATED, Load, different
from tests.parity.conftest import EngineOf, Reference
from tests.parity.engines import Kind, Setting
from tests.parity.faulty_connector import Fault
from tests.parity.make_model import SMALL
from tests.parity.test_node_check import checked
from tests.parity.test_parity import MIXED, TIGHT, V1_PIPELINE, check, light

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's FP8 KV on a CPU needs AVX-512"
)

E4M3 = Kind(pp=2, kv_cache_dtype="fp8")
OTHERS = [
    Kind(pp=2, kv_cache_dtype="fp8_e5m2"),
    Kind(pp=2, kv_cache_dtype="fp8", runner=2, asynchronous=True),
    Kind(pp=2, kv_cache_dtype="fp8", gpu_path=True),
]


@pytest.mark.parametrize(
    ("load", "controller"),
    [
        (PLAIN, {}),
        pytest.param(TEMPLATED, {}, marks=pytest.mark.parity_full),
        (TEMPLATED, MIXED),
    ],
    ids=["plain", "templated", "templated, mixed steps"],
)
@pytest.mark.parametrize("kind", [E4M3], ids=str)
def test_tokens_are_those_of_stock_vllm_with_fp8_kv(
    kind: Kind, load: Load, controller: dict[str, Any], engine_of: EngineOf, reference: Reference
) -> None:
    setting = Setting(num_batches=3, controller=controller, **TIGHT)
    check(engine_of(kind), setting, load, reference(kind, load))


@pytest.mark.parametrize("kind", [E4M3], ids=str)
def test_a_value_of_fp8_kv_takes_one_byte_in_every_copy(kind: Kind, engine_of: EngineOf) -> None:
    engine = engine_of(kind)
    engine.reset(Setting(num_batches=3, **TIGHT))
    engine.run(light(PLAIN).make())
    loaded_before = engine.loaded_bytes()
    blocks_before = engine.counters.prefetched_blocks
    engine.run(light(TEMPLATED).make())
    num_blocks = engine.counters.prefetched_blocks - blocks_before
    assert num_blocks > 0
    token_bytes = SMALL["num_hidden_layers"] // 2 * 2 * SMALL["num_key_value_heads"] * SMALL["head_dim"]
    assert kv_bytes_per_token(engine.vllm_config) == [token_bytes, token_bytes]
    for before, after in zip(loaded_before, engine.loaded_bytes(), strict=True):
        assert after - before == num_blocks * BLOCK_TOKENS * token_bytes


@pytest.mark.parity_full  # another stock engine
@pytest.mark.parametrize("kind", [V1_PIPELINE], ids=str)
def test_fp8_kv_changes_answers(kind: Kind, reference: Reference) -> None:
    """So it was not kept in float32, and a table must not mix the two."""
    assert [*different(reference(E4M3, PLAIN), reference(kind, PLAIN))]


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.LOST], ids=lambda fault: fault.value)
@pytest.mark.parametrize("kind", [E4M3], ids=str)
def test_a_wrong_or_a_lost_copy_of_fp8_kv_changes_the_tokens(
    kind: Kind, fault: Fault, engine_of: EngineOf, reference: Reference
) -> None:
    """The negative controls: poison in e4m3 is no NaN to these kernels, but as far from any value."""
    engine = engine_of(kind)
    engine.reset(Setting(num_batches=3, fault=fault))
    answers = engine.run(PLAIN.make())
    assert engine.counters.prefetches > 0
    assert [*different(answers, reference(kind, PLAIN))]


@pytest.mark.parity_full  # test_node_check shows it of KV in float32
@pytest.mark.parametrize("fault", [Fault.NONE, Fault.CORRUPT], ids=lambda fault: fault.value)
@pytest.mark.parametrize("kind", [E4M3], ids=str)
def test_the_check_of_a_node_tells_right_copies_of_fp8_kv_from_damaged_ones(
    kind: Kind, fault: Fault, engine_of: EngineOf
) -> None:
    result = checked(engine_of(kind), fault)
    failed = [part.name for part in result.parts if part.verdict is Verdict.FAILED]
    assert failed == ([] if fault is Fault.NONE else ["copies"]), result.parts


@pytest.mark.parity_full
@pytest.mark.parametrize("load", [TEMPLATED, EVERYTHING], ids=["templated", "everything"])
@pytest.mark.parametrize("kind", OTHERS, ids=str)
def test_every_way_of_copying_fp8_kv_gives_stock_tokens(
    kind: Kind, load: Load, engine_of: EngineOf, reference: Reference
) -> None:
    """Layer by layer, by a GPU's worker, with the V2 runner, and as e5m2."""
    few = replace(light(load), count=7) if kind.runner == 2 or kind.gpu_path else load
    check(engine_of(kind), Setting(num_batches=3, **TIGHT), few, reference(kind, few))
