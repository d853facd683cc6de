"""Chooses the prompt tokens that the next prefill step computes (PipeMax, §3.1.1 and Appendix A.1, "Implication").

The paper prefills without a pause, keeps the first stage busy, and overwrites requests whose prompt is complete. Their
replica on the host is written through, so evicting them waits for nothing.

Not in the paper: steps of equal tokens, and the order of eviction. A step takes up to ``prefill_chunk_tokens`` from the
prompts in line, and cuts the last one. The longest of the complete requests are evicted first, so that the short ones
are left at the switch to decode and make the first batches large; PipeMax, §3.3.2, has its warm-up phase for that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipemax.control.controller_config import ControllerConfig
from pipemax.control.planners.phase import PhasePolicy
from pipemax.control.planners.victims import evict_for_room
from pipemax.control.state.batches import Batch
from pipemax.control.state.request import Place, RequestState
from pipemax.control.state.table import RequestTable
from pipemax.domain.request import RequestSpec


class OutputLengths:
    """Forecasts output lengths: the mean over finished requests, once enough have finished."""

    MIN_FINISHED = 32
    """Fewer finished requests say little, and the first to finish are the short ones."""
    MEMORY = 1000
    """Number of finished requests from which on older ones count less."""

    def __init__(self, initial_tokens: int | None) -> None:
        self._initial_tokens = initial_tokens
        self.forget()

    def forget(self) -> None:
        self._num_finished = 0
        self._mean = 0.0

    def observe(self, output_tokens: int) -> None:
        self._num_finished += 1
        self._mean += (output_tokens - self._mean) / min(self._num_finished, self.MEMORY)

    def expected_kv_tokens(self, spec: RequestSpec) -> int:
        """Return the KV tokens that a request is expected to hold at its end."""
        expected = spec.expected_output_tokens
        if expected is None:
            known = self._num_finished >= self.MIN_FINISHED
            expected = round(self._mean) if known else self._initial_tokens or spec.max_tokens
        return spec.prompt_tokens + max(1, min(expected, spec.max_tokens)) - 1


@dataclass(slots=True, kw_only=True)
class PrefillStep:
    """One step's chunks."""

    states: list[RequestState] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    token_pairs: int = 0
    """Σ over chunks of (token, attended token) pairs: the attention's work."""
    evicted: list[RequestState] = field(default_factory=list)
    recomputed: list[RequestState] = field(default_factory=list)

    def add(self, state: RequestState, num_tokens: int, first_token: int) -> None:
        self.states.append(state)
        self.tokens.append(num_tokens)
        self.token_pairs += num_tokens * first_token + num_tokens * (num_tokens + 1) // 2


class PrefillPlanner:
    """Forms prefill steps; admits from the waiting queue up to the high watermark."""

    def __init__(
        self, config: ControllerConfig, table: RequestTable, policy: PhasePolicy, outputs: OutputLengths
    ) -> None:
        self._config = config
        self._table = table
        self._policy = policy
        self._outputs = outputs
        self._max_on_gpu = config.max_on_gpu

    def next_fits(self) -> bool:
        """Return whether the first request in line can be admitted now."""
        state = self._table.first_waiting()
        return state is not None and self._fits(state)

    def _fits(self, state: RequestState) -> bool:
        table = self._table
        cost = table.reservation_cost(state, self._reservation(state))
        return self._policy.admits(cost, reserved_blocks=table.reserved_blocks, num_started=table.num_started)

    def _reservation(self, state: RequestState) -> int:
        """Return the host blocks to reserve: up to the expected end, or to the maximum once it was recomputed."""
        expected = (
            state.max_kv_tokens if state.num_recomputes else self._outputs.expected_kv_tokens(state.spec)
        )
        return self._table.needs.reserved_blocks(state, max(expected, state.target_tokens))

    def form(self, *, anything_in_flight: bool) -> PrefillStep:
        """Form a step of at most ``prefill_chunk_tokens``, from the next chunks of the requests in line."""
        step = PrefillStep()
        for state in self._table.prefetching():  # its blocks lie idle for as long as nobody decodes
            self._table.evict(state)
            step.evicted.append(state)
        self.take_chunks(
            step,
            [self._table.unassigned],
            max_tokens=self._config.prefill_chunk_tokens,
            max_requests=self._config.max_num_seqs,
        )
        if not step.states and not anything_in_flight:
            self.give_way(step)
        return step

    def take_chunks(
        self,
        step: PrefillStep,
        sources: Sequence[Batch],
        *,
        max_tokens: int,
        max_requests: int,
        begins: bool = True,
    ) -> None:
        """Add the next chunks of the requests in line, for which members of ``sources`` may be evicted.

        Unless ``begins``, only prompts that are begun go on.
        """
        tokens_left = max_tokens
        for state in self._in_line(begins=begins):
            if tokens_left == 0 or len(step.states) >= max_requests:
                return
            num_tokens = self._advance(step, state, sources, tokens_left)
            if num_tokens == 0:
                return
            tokens_left -= num_tokens

    def give_way(self, step: PrefillStep) -> None:
        """Recompute the youngest of several begun prompts, none of which finds room next to the others.

        Refused runs left them half done.
        """
        if self._table.num_prefilling > 1:
            youngest = self._table.prefilling()[-1]
            self._table.recompute(youngest)
            step.recomputed.append(youngest)

    def _in_line(self, *, begins: bool) -> Iterator[RequestState]:
        yield from self._table.prefilling()
        while begins and (state := self._table.first_waiting()) is not None and self._fits(state):
            yield state

    def _advance(
        self, step: PrefillStep, state: RequestState, sources: Sequence[Batch], tokens_left: int
    ) -> int:
        """Plan a request's next chunk and return its tokens.

        Return 0 if the GPU has no room for a single one; where prompts are not cut, for all of them.
        """
        first_token = state.computed_tokens or self._table.needs.cached_prefix_tokens(state)
        wanted = min(tokens_left, state.target_tokens - first_token)
        end = self._make_room(step, state, sources, first_token, first_token + wanted)
        num_tokens = min(wanted, end - first_token)
        if num_tokens <= 0 or (self._config.whole_prompts and num_tokens < state.target_tokens - first_token):
            return 0
        # Making room may have dropped the last holder of its prefix.
        first_token = state.computed_tokens or self._table.needs.cached_prefix_tokens(state)
        if state.place is Place.WAITING:
            self._table.start_prefill(state, self._reservation(state))
        self._table.advance_prefill(state, num_tokens)
        step.add(state, num_tokens, first_token)
        return num_tokens

    def _make_room(
        self, step: PrefillStep, state: RequestState, sources: Sequence[Batch], first: int, end: int
    ) -> int:
        """Evict until a step of a request's tokens ``[first, end)`` fits on the GPU.

        Return the end of what fits once no more can leave.
        """
        is_new = not self._table.is_on_gpu(state)
        held = self._table.gpu_blocks_of(state)
        needed = self._table.needs.gpu_blocks(state, first, end) - held
        step.evicted += evict_for_room(
            self._table,
            sources,
            free_blocks=needed,
            max_on_gpu=self._max_on_gpu - int(is_new),
            keep={other.id for other in step.states},
        )
        if is_new and self._table.num_on_gpu >= self._max_on_gpu:
            return 0
        # The blocks of its prefix come on top of its own, unless an eviction took them along.
        return min(end, self._table.needs.fitting_tokens(state, first, held + self._table.free_gpu_blocks))
