"""A GPU's worker, connector, clock and transfers give stock vLLM's tokens, on two stages, over streams that run late.

``tests/fakes/late_cuda.py`` takes the place of CUDA, and vLLM's worker for CPUs that of its worker for GPUs.
"""

from dataclasses import replace

import pytest

pytest.importorskip("cuda.core", reason="cuda-core is not installed: a GPU's worker needs it")

from pipemax.transfer.cuda.device import Fence
from tests.parity.cases import TEMPLATED, different
from tests.parity.conftest import EngineOf, Reference
from tests.parity.engines import Kind, Setting
from tests.parity.test_parity import TIGHT, check, light

V1 = Kind(pp=2, gpu_path=True)
V2 = Kind(pp=2, runner=2, asynchronous=True, gpu_path=True)
LOAD = replace(light(TEMPLATED), count=7)


@pytest.mark.parametrize("kind", [V1, V2], ids=str)
def test_tokens_over_a_gpu_s_path_are_those_of_stock_vllm(
    kind: Kind, engine_of: EngineOf, reference: Reference
) -> None:
    engine = engine_of(kind)
    check(engine, Setting(num_batches=3, **TIGHT), LOAD, reference(kind, LOAD))
    assert min(engine.loaded_bytes()) > 0
    profile = engine.scheduler.take_profile()
    assert profile["steps"], "both stages have timed the same steps, by events"
    assert profile["copies"], "and the same prefetches"


@pytest.mark.parametrize(
    ("kind", "fence"),
    [
        (V1, Fence.COMPUTE_AFTER_PREFETCH),
        (V1, Fence.COMPUTE_AFTER_STORE),
        (V1, Fence.PREFETCH_AFTER_STORE),
        (V2, Fence.COMPUTE_AFTER_PREFETCH),
    ],
    ids=lambda value: value.name if isinstance(value, Fence) else str(value),
)
def test_a_fence_that_is_left_out_changes_the_tokens(
    kind: Kind, fence: Fence, engine_of: EngineOf, reference: Reference
) -> None:
    """The negative control. The other fences wait for computation, which here has always run."""
    engine = engine_of(kind)
    engine.reset(Setting(num_batches=3, fault=fence, **TIGHT))
    answers = engine.run(LOAD.make())
    assert engine.counters.prefetches > 0
    assert [*different(answers, reference(kind, LOAD))]
