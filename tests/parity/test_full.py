"""The slow part, by ``make parity-full``: four stages, and random pools and loads for as long as one likes.

``PIPEMAX_SOAK_ROUNDS`` (default 6) random rounds; the seed of a failing one is in its assertion.
"""

import os
from random import Random

import pytest

from tests.parity.cases import BLOCK_TOKENS, MAX_MODEL_LEN, Requests, run
from tests.parity.conftest import MakeEngine
from tests.parity.test_parity import SETS, Reference, assert_same

pytestmark = pytest.mark.parity_full

FOUR_STAGES = {
    "n4": {"pp": 4, "gpu_blocks": 30, "num_batches": 4},
    "n5, host smaller than the work": {"pp": 4, "gpu_blocks": 22, "num_batches": 5, "host_mib": 4},
}


@pytest.mark.parametrize("requests", SETS.values(), ids=SETS.keys())
@pytest.mark.parametrize("arguments", FOUR_STAGES.values(), ids=FOUR_STAGES.keys())
def test_four_stages(
    arguments: dict[str, int], requests: Requests, make_engine: MakeEngine, reference: Reference
) -> None:
    expected = reference(requests)
    assert_same(run(make_engine(**arguments), requests.make()), expected)


@pytest.mark.parametrize("seed", range(int(os.environ.get("PIPEMAX_SOAK_ROUNDS", "6"))))
def test_soak(seed: int, make_engine: MakeEngine, reference: Reference) -> None:
    """A pipeline, pools and loads at random; several loads for each engine."""
    rng = Random(seed)
    pp = rng.choice([1, 2, 2, 3])
    longest = MAX_MODEL_LEN // BLOCK_TOKENS + 1
    engine = make_engine(
        pp=pp,
        gpu_blocks=rng.randint(longest + 1, 3 * longest),
        num_batches=rng.randint(2, 5),
        host_mib=rng.randint(5, 40) // pp + 2,
        max_num_batched_tokens=rng.choice([64, 100, 256]),
    )
    for _ in range(3):
        requests = Requests(
            count=rng.randint(10, 60),
            seed=rng.randrange(10**6),
            template_tokens=rng.choice([0, 0, 70, 200]),
            prompt_tokens=(1, rng.randint(20, 250)),
            output_tokens=(1, rng.randint(2, 60)),
            sampled=rng.random() < 0.3,
            structured=rng.random() < 0.2,
        )
        outcome = run(engine, requests.make())
        assert outcome.tokens == reference(requests).tokens, (seed, requests)
