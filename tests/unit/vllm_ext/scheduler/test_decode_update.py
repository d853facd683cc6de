"""What becomes of a step's outputs is what vLLM's ``update_from_output`` alone would make of them."""

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

from tests.unit.vllm_ext.fake_worker import (
    MAX_MODEL_LEN,
    FakeCore,
    equal_cores,
    make_request,
    state_of,
)

EOS, STOPS = 5, [6, 7]


class Grammar:
    """Accepts the first tokens of an answer and rejects the next; it must be asked of each once."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._num_left -= len(tokens)
        return self._num_left >= 0


def few_tokens(tokens: list[int]) -> int:
    """Return a token of few, so that answers repeat themselves and stop."""
    return hash(tuple(tokens[-5:])) % 40 + 3


def random_request(index: int, rng: Random) -> Request:
    """Return a request that may ask for anything at which vLLM looks when an output comes in."""
    prompt = [1] * 6 * rng.randint(0, 1) + [rng.randrange(100, 999) for _ in range(rng.randint(1, 20))]
    request = make_request(
        str(index), prompt, rng.choice([rng.randint(1, 30), 100])
    )  # 100: to the model's limit
    params = request.sampling_params
    assert params is not None
    params.min_tokens = rng.choice([0, 0, 4])
    params.logprobs = rng.choice([None, 1])
    params.stop_token_ids = rng.choice([None, STOPS])
    params._eos_token_id = rng.choice([None, EOS])
    if rng.random() < 0.1:
        params.repetition_detection = RepetitionDetectionParams(
            max_pattern_size=2, min_pattern_size=1, min_count=2
        )
    if rng.random() < 0.2:
        structured: Any = SimpleNamespace(grammar=Grammar(rng.randint(2, 20)), reasoning_ended=True)
        request.structured_output_request = structured
    request.trace_headers = rng.choice([None, None, None, {"traceparent": "1"}])
    return request


def with_logprobs(output: ModelRunnerOutput) -> ModelRunnerOutput:
    """Add log probabilities, which differ from token to token."""
    tokens = np.array([(row or [0])[-1:] for row in output.sampled_token_ids], dtype=np.int32).reshape(-1, 1)
    output.logprobs = LogprobsLists(tokens, -tokens / 100, tokens[:, 0] % 7)
    return output


def comparable(outputs: dict[int, EngineCoreOutputs]) -> dict[int, tuple[object, ...]]:
    """Return what the clients receive. The requests' order says nothing; times of events differ between two runs."""
    found: dict[int, tuple[object, ...]] = {}
    for client, of_client in outputs.items():
        stats = of_client.scheduler_stats
        if stats is not None:
            stats.kv_connector_stats.pop("schedule_s")
            stats.kv_connector_stats.pop("prefetch_stall_s")
        for output in of_client.outputs:
            for event in output.events or ():
                event.timestamp = 0.0
        rows = sorted(map(repr, of_client.outputs))
        found[client] = (rows, repr(stats), of_client.finished_requests)
    return found


class Pair:
    """Two cores with the same requests: one uses the short loop, the other only vLLM's own."""

    def __init__(self, *, asynchronous: bool, seed: int, **more: Any) -> None:
        self.cores = equal_cores(num_batches=2, asynchronous=asynchronous, **more)
        self.cores[1].scheduler._updates_decodes = False
        self.taken: list[list[dict[int, tuple[object, ...]]]] = [[], []]
        self.num_own_loops = [0, 0]
        for number, core in enumerate(self.cores):
            self._watch(core, number)
            core.worker.next_token = few_tokens
            rng = Random(seed)
            for index in range(60):
                core.add(random_request(index, rng))
            core.add(make_request("to the limit", [1] * 20, 100))
            core.add(make_request("of one token", [1], 10))

    def _watch(self, core: FakeCore, number: int) -> None:
        scheduler, execute = core.scheduler, core.worker.execute
        update, own = scheduler.update_from_output, scheduler._update_request_with_output

        def watched(*args: Any) -> dict[int, EngineCoreOutputs]:
            outputs = update(*args)
            self.taken[number].append(comparable(outputs))
            return outputs

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_own_loops[number] += 1
            return own(*args, **kwargs)

        core.worker.execute = lambda output: with_logprobs(execute(output))  # type: ignore[method-assign]
        scheduler.update_from_output = watched  # type: ignore[method-assign]
        scheduler._update_request_with_output = counted  # type: ignore[method-assign]

    def run(self, disturb: Callable[[FakeCore, int], None]) -> None:
        while any(core.scheduler.has_requests() for core in self.cores):
            for core in self.cores:
                core.step()
                disturb(core, core.num_steps)
            assert state_of(self.cores[0].scheduler) == state_of(self.cores[1].scheduler)
            assert self.taken[0] == self.taken[1]
            for taken in self.taken:
                taken.clear()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("asynchronous", "more"),
    [(False, {}), (True, {}), (True, {"batching": "mixed", "mixed_step_tokens": 12})],
    ids=["sync", "async", "async-mixed"],
)
def test_outputs_requests_and_blocks_are_those_of_vllm_s_own_loop(
    asynchronous: bool, more: dict[str, Any], seed: int
) -> None:
    pair = Pair(asynchronous=asynchronous, seed=seed, **more)

    def disturb(core: FakeCore, step: int) -> None:
        live = sorted(core.scheduler.requests)
        if step % 7 == 0 and live:
            core.scheduler.requests[live[-1]].record_event(EngineCoreEventType.QUEUED)
        if step % 9 == 0:
            core.abort(
                [name for name in live if name != "to the limit"][:1]
            )  # perhaps with a token on its way
        if step == 31:
            core.scheduler.reset_prefix_cache()

    pair.run(disturb)
    assert pair.cores[0].outputs == pair.cores[1].outputs
    assert len(pair.cores[0].outputs["to the limit"]) == MAX_MODEL_LEN - 20
    assert pair.num_own_loops[0] < 0.6 * pair.num_own_loops[1], pair.num_own_loops
    assert not pair.cores[0].scheduler._decode_updates._decoding, "requests that are gone are remembered"
