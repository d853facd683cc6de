"""Token for token the same as stock vLLM, with pools so small that every request leaves the GPU and comes back.

Host pools are NaN where nothing was stored, GPU blocks are NaN until their copy is done, and each case asserts that
there were evictions and prefetches: an engine that never moved anything proves nothing.
"""

import time
from collections.abc import Callable

import pytest

from pipemax.api import OfflineEngine
from tests.parity.cases import Outcome, Requests, run
from tests.parity.conftest import MakeEngine

Reference = Callable[[Requests], Outcome]

PLAIN = Requests()
TEMPLATED = Requests(seed=1, template_tokens=150)
SAMPLED = Requests(seed=2, sampled=True)
STRUCTURED = Requests(seed=3, structured=True, output_tokens=(40, 60))
STOPPED = Requests(seed=4, stop=("e", "qu"))
LONG = Requests(seed=5, count=8, prompt_tokens=(300, 440), output_tokens=(20, 60))
SETS = {
    "plain": PLAIN,
    "templated": TEMPLATED,
    "sampled": SAMPLED,
    "structured": STRUCTURED,
    "stop strings": STOPPED,
    "long": LONG,
}

# One engine each; at least 17 GPU blocks hold a sequence of max_model_len and its next token.
ENGINES = {
    "pp1 n2": {"pp": 1, "gpu_blocks": 24, "num_batches": 2},
    "pp1 n3, host smaller than the work": {"pp": 1, "gpu_blocks": 20, "num_batches": 3, "host_mib": 10},
    "pp2 n2": {"pp": 2, "gpu_blocks": 24, "num_batches": 2},
    "pp2 n3, a GPU pool of one long sequence": {"pp": 2, "gpu_blocks": 18, "num_batches": 3, "host_mib": 12},
}


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert not outcome.errors
    different = {name: (expected.tokens[name], tokens) for name, tokens in outcome.tokens.items()}
    different = {name: pair for name, pair in different.items() if pair[0] != pair[1]}
    assert not different
    assert outcome.tokens.keys() == expected.tokens.keys()
    assert outcome.texts == expected.texts
    assert outcome.metrics["prefetches"] > 0, outcome.metrics
    assert outcome.metrics["evictions"] > 0, outcome.metrics
    assert outcome.metrics["prefetched_blocks"] > 0, outcome.metrics


@pytest.mark.parametrize("requests", SETS.values(), ids=SETS.keys())
@pytest.mark.parametrize("arguments", ENGINES.values(), ids=ENGINES.keys())
def test_tokens_are_those_of_stock_vllm(
    arguments: dict[str, int], requests: Requests, make_engine: MakeEngine, reference: Reference
) -> None:
    expected = reference(requests)
    outcome = run(make_engine(**arguments), requests.make())
    assert_same(outcome, expected)
    if "host_mib" in arguments and requests.count > 20:
        assert outcome.metrics["phase_switches"] > 2, outcome.metrics


def test_the_models_output_varies(reference: Reference) -> None:
    assert reference(PLAIN).num_distinct_tokens > 100


@pytest.mark.parametrize("when", [0, 3, 12])
def test_aborts_leave_the_others_as_they_are(
    when: int, make_engine: MakeEngine, reference: Reference
) -> None:
    """``when``: completions seen before a third of the requests is given up, wherever they are."""
    engine = make_engine(**ENGINES["pp2 n3, a GPU pool of one long sequence"])
    requests = PLAIN.make()
    engine.submit(requests)
    tokens = poll_some(engine, when)
    aborted = {request.request_id for request in requests[::3]} - tokens.keys()
    engine.abort(sorted(aborted))
    tokens |= poll_some(engine, len(requests) - len(aborted) - len(tokens))
    assert not engine.poll(timeout_s=0.5)
    expected = reference(PLAIN).tokens
    assert tokens == {name: expected[name] for name in expected if name not in aborted}


def poll_some(engine: OfflineEngine, count: int) -> dict[str, tuple[int, ...]]:
    """At least ``count`` completions."""
    tokens: dict[str, tuple[int, ...]] = {}
    deadline_s = time.monotonic() + 120
    while len(tokens) < count and time.monotonic() < deadline_s:
        tokens |= {done.request_id: done.token_ids for done in engine.poll(timeout_s=1.0)}
    assert len(tokens) >= count
    return tokens


def test_a_wrong_copy_shows_in_the_tokens(make_engine: MakeEngine, reference: Reference) -> None:
    """The negative control: were this to pass unnoticed, the comparisons above would be worth nothing."""
    engine = make_engine(pp=1, gpu_blocks=24, num_batches=2, faults="CorruptingConnector")
    outcome = run(engine, PLAIN.make())
    assert outcome.metrics["prefetches"] > 0
    assert outcome.tokens != reference(PLAIN).tokens
