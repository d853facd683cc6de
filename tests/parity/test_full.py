"""The slow part, by ``make parity-full``: every kind of engine with every load and n, and random settings.

``PIPEMAX_KINDS``, 0 to 6, leaves two of the kinds, for one night. ``PIPEMAX_SOAK_ROUNDS`` (default 6) random rounds
for each kind; the seed of a failing one is in its name. The V2 runner's kernels are interpreted without a GPU: its
loads are light ones, and its GPU pools so much smaller.
"""

import os
from dataclasses import replace
from random import Random

import pytest

from tests.parity.cases import BLOCK_TOKENS, LOADS, MAX_MODEL_LEN, Load, different, everything, greedy, seeded
from tests.parity.conftest import EngineOf, Reference
from tests.parity.engines import Kind, Setting
from tests.parity.test_parity import TIGHT, check, light

pytestmark = pytest.mark.parity_full

KINDS = [
    Kind(asynchronous=True),
    *(Kind(pp=pp) for pp in (1, 2, 4)),
    *(Kind(tp=2, pp=pp) for pp in (1, 2)),
    Kind(tp=2, pp=2, runner=2, asynchronous=True),
    *(Kind(pp=pp, runner=2, asynchronous=asynchronous) for pp in (1, 2, 4) for asynchronous in (False, True)),
]
if share := os.environ.get("PIPEMAX_KINDS"):
    KINDS = KINDS[int(share) :: 7]
SETTINGS = {
    "n2": Setting(num_batches=2),
    "n3 tight": Setting(num_batches=3, **TIGHT),
    "n4": Setting(num_batches=4, gpu_blocks=30),
    "n5": Setting(num_batches=5, gpu_blocks=22, host_blocks=100),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_load_gives_stock_tokens_on_every_engine(
    kind: Kind, setting: Setting, load: Load, engine_of: EngineOf, reference: Reference
) -> None:
    if kind.runner == 2:
        setting, load = replace(setting, gpu_blocks=18), light(load)
    check(engine_of(kind), setting, load, reference(kind, load))


@pytest.mark.parametrize("seed", range(int(os.environ.get("PIPEMAX_SOAK_ROUNDS", "6"))))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_long_random_schedules_read_only_what_was_computed(
    kind: Kind, seed: int, engine_of: EngineOf, reference: Reference
) -> None:
    """Pools, batches and loads at random, a fifth of the requests given up at random moments."""
    rng = Random(seed)
    longest = MAX_MODEL_LEN // BLOCK_TOKENS + 1
    setting = Setting(
        num_batches=rng.randint(2, 5),
        gpu_blocks=rng.randint(longest + 1, 3 * longest),
        host_blocks=rng.randint(2 * longest, 256),
        slots=rng.choice([None, 5, 12]) if kind.runner == 2 else None,
        controller={"prefill_chunk_tokens": rng.choice([64, 100, 256])},
    )
    load = Load(
        count=rng.randint(10, 60),
        seed=rng.randrange(10**6),
        template_tokens=rng.choice([0, 0, 70, 200]),
        prompt_tokens=(1, rng.randint(20, 250)),
        output_tokens=(1, rng.randint(2, 60)),
        choose=rng.choice([greedy, seeded, everything]),
    )
    load = load if kind.runner == 1 else light(load)
    expected = reference(kind, load)
    engine = engine_of(kind)
    engine.reset(setting)
    requests = load.make()
    given_up = rng.sample([request.id for request in requests], len(requests) // 5)
    abort_at = {rng.randint(1, 150): [name] for name in given_up}
    answers = engine.run(requests, abort_at=abort_at)
    assert {request.id for request in requests} - set(given_up) <= answers.keys()
    assert not [*different(answers, {name: expected[name] for name in answers})]
