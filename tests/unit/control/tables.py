"""Requests put where a test wants them, through the transitions that the controller itself uses."""

from collections.abc import Iterable

from pipemax.control.state.batches import Batch, Flight
from pipemax.control.state.request import RequestState
from pipemax.control.state.table import RequestTable
from pipemax.domain.plan import StepId
from pipemax.domain.request import PrefixId, SharedPrefix
from pipemax.domain.units import RequestId, ceil_div
from tests.unit.control.fake_engine import spec


def roomy_table(*, gpu_blocks: int = 10_000, host_blocks: int = 10_000) -> RequestTable:
    return RequestTable(gpu_blocks=gpu_blocks, host_blocks=host_blocks, block_tokens=16)


def waiting(
    table: RequestTable, name: str, prompt_tokens: int, *, max_tokens: int = 100, prefix: str | None = None
) -> RequestState:
    """``prefix`` names a shared prefix of 32 tokens: two blocks."""
    shared = SharedPrefix(prefix_id=PrefixId(prefix), num_tokens=32) if prefix else None
    request = spec(name, prompt_tokens, max_tokens, prefix=shared)
    table.admit(request, request.max_kv_tokens)
    state = table.find(RequestId(name))
    assert state is not None
    return state


def land(table: RequestTable, *states: RequestState) -> None:
    """Complete a step that makes an output for each of these."""
    flight = Flight(
        step_id=StepId(0),
        states=[*states],
        lives=[state.life for state in states],
        tokens=[1] * len(states),
        makes_output=[True] * len(states),
    )
    table.complete(flight)


def resident(
    table: RequestTable,
    name: str,
    prompt_tokens: int,
    *,
    batch: Batch | None = None,
    max_tokens: int = 100,
    prefix: str | None = None,
) -> RequestState:
    """Prefilled, nothing in flight, on GPU and host."""
    state = waiting(table, name, prompt_tokens, max_tokens=max_tokens, prefix=prefix)
    table.start_prefill(state, max(0, ceil_div(prompt_tokens, 16) - state.num_shared_blocks))
    table.advance_prefill(state, prompt_tokens - table.needs.cached_prefix_tokens(state))
    land(table, state)
    table.begin_plan(0)
    if batch is not None:
        table.assign(state, batch)
    return state


def parked(
    table: RequestTable, name: str, prompt_tokens: int, *, max_tokens: int = 100, prefix: str | None = None
) -> RequestState:
    """On the host only."""
    state = resident(table, name, prompt_tokens, max_tokens=max_tokens, prefix=prefix)
    table.evict(state)
    return state


def park_lengths(table: RequestTable, lengths: Iterable[int]) -> list[RequestState]:
    return [parked(table, f"p{index}", length) for index, length in enumerate(lengths)]
