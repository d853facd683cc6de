"""Chooses the requests that the next decode step runs, and makes room for their growth.

The members of D_i run, unless they wait for their last token. As in stock vLLM, a member is planned with that token
still on its way if its last step was as many steps ago as there are stages: then the token will be there once the step
begins. Not in the paper, whose engine knows each token before it plans. If the token turns out to be the request's last
one, the step computes another in vain.

Room for the members' growth is made first, so that a plan never fails for lack of a block: on the GPU by evicting the
requests that run last, and on the host, where reservations were exceeded, by recomputing the youngest requests as a
last resort. Either way the oldest request can always go on.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from pipemax.control.controller_config import ControllerConfig
from pipemax.control.planners.victims import evict_for_room
from pipemax.control.state.batches import Batch, Flights, Rotation, partition_balanced
from pipemax.control.state.request import RequestState
from pipemax.control.state.table import RequestTable
from pipemax.control.times.stage_estimators import StageEstimators

MAX_PASSED_ON = 64
"""Maximum number of requests considered for moving from the executing batch to another."""


@dataclass(slots=True, kw_only=True)
class DecodeStep:
    """One step's batch, and the requests that were evicted or dropped for it."""

    states: list[RequestState] = field(default_factory=list)
    kv_tokens: int = 0
    """Σ L_i before the step."""
    evicted: list[RequestState] = field(default_factory=list)
    recomputed: list[RequestState] = field(default_factory=list)


class DecodePlanner:
    """Forms D_0 … D_{n−1} at the switch to decode, and each step's batch from them."""

    def __init__(
        self,
        config: ControllerConfig,
        table: RequestTable,
        rotation: Rotation,
        flights: Flights,
        times: StageEstimators,
    ) -> None:
        self._config = config
        self._table = table
        self._rotation = rotation
        self._flights = flights
        self._times = times
        self._loads_s: deque[float] = deque(maxlen=len(rotation))

    def initialize(self) -> None:
        """Partition the residents into balanced batches; t = 0 (PipeMax, Algorithm 1, lines 1 to 4)."""
        self._rotation.iteration = 0
        self._loads_s.clear()
        groups = partition_balanced(self._table.unassigned.members, len(self._rotation))
        for batch, states in zip(self._rotation.batches, groups, strict=True):
            for state in states:
                self._table.assign(state, batch)

    def form(self) -> DecodeStep:
        """Form the step of D_i, whose turn it is. It is empty if none of D_i may run, or no batch has members."""
        num_skipped = self._rotation.skip_empty()
        self._loads_s.extend([0.0] * num_skipped)
        batch = self._rotation.batches[self._rotation.executing]
        if not any(map(self._may_run, batch.members)):
            return DecodeStep()
        self._pass_on_excess(batch)
        may_run = self._may_run
        ready = [state for state in batch.members if state.num_in_flight == 0 or may_run(state)]
        step = DecodeStep(states=ready[: self._config.max_batch_requests])
        if growing := self._growing(step.states):
            self._make_host_room(step, growing)
            self._make_gpu_room(step)
        whole = len(step.states) == len(batch)
        step.kv_tokens = batch.kv_tokens if whole else sum(s.computed_tokens for s in step.states)
        self._table.advance_decode(step.states)
        return step

    def _may_run(self, state: RequestState) -> bool:
        """Return whether a member's next input token is known once the step begins on the first stage."""
        if state.num_in_flight == 0:
            return True
        num_stages = len(self._config.stages)
        return (
            num_stages > 1
            and state.num_in_flight == 1
            and self._flights.num_launched - state.last_step >= num_stages
            and state.output_tokens + 1 < state.spec.max_tokens
        )

    def pass_empty_turn(self) -> None:
        """Count the turn of a batch that decodes nobody, since prompts fill its step."""
        self._loads_s.append(0.0)

    def _pass_on_excess(self, batch: Batch) -> None:
        """Level the batches: move what D_i has above the mean of the last round to the lightest batch.

        Residents move without a copy. Selection levels only what it adds, so a batch that grew too large would stay
        so, and in the tail nothing is added at all (TD-Pipe's work stealing is for that case). Only requests that
        may run move, and none moves a second time before it has run.
        """
        least_s = self._times.decode_seconds(1, 0)
        load_s = self._load_s(batch, least_s)
        self._loads_s.append(load_s)
        mean_s = sum(self._loads_s) / len(self._loads_s)
        loads_s = [self._load_s(other, least_s) for other in self._rotation.batches]
        lightest_s = min(loads_s)
        lightest = self._rotation.batches[loads_s.index(lightest_s)]
        left_s = min(load_s - mean_s, mean_s - lightest_s)
        if left_s <= self._config.balance_tolerance * self._times.decode_seconds(len(batch), batch.kv_tokens):
            return
        movable = [
            state
            for state in islice(batch.longest_first(), min(MAX_PASSED_ON, len(batch) - 1))
            if self._may_run(state) and not state.is_deferred
        ]
        for state in movable:
            cost_s = self._times.decode_marginal_s(len(batch), state.computed_tokens)
            if cost_s <= left_s and len(lightest) < self._config.max_batch_requests:
                left_s -= cost_s
                self._table.defer(state, lightest)
        self._loads_s[-1] = self._load_s(batch, least_s)

    def _load_s(self, batch: Batch, least_s: float) -> float:
        """Return the seconds by which a batch's step exceeds the smallest step, of ``least_s``; 0 if it is empty."""
        return self._times.decode_seconds(len(batch), batch.kv_tokens) - least_s if len(batch) else 0.0

    def _growing(self, states: list[RequestState]) -> list[RequestState]:
        """Return those of a step's requests whose next token begins a block."""
        block_tokens = self._config.block_tokens
        return [state for state in states if state.computed_tokens % block_tokens == 0]

    def _make_host_room(self, step: DecodeStep, growing: list[RequestState]) -> None:
        """Recompute the youngest requests until growth beyond the reservations fits into the host pool."""
        table = self._table

        def lacking(growing: list[RequestState]) -> int:
            return sum(map(table.needs.growth_on_host, growing)) - table.free_host_blocks

        num_blocks = lacking(growing)
        if num_blocks <= 0:
            return
        running = {state.id for state in step.states}
        for state in table.youngest_started():
            if state.num_in_flight == 0 and state.id not in running:
                step.recomputed.append(state)
                num_blocks -= table.reserved_blocks_of(state)
                if num_blocks <= 0:
                    break
        for state in step.recomputed:
            table.recompute(state)
        if lacking(self._growing(step.states)) > 0:
            # The batch's own members except its oldest, which must go on.
            members = [state for state in table.youngest_started() if state.id in running]
            for state in [state for state in members[:-1] if state.num_in_flight == 0]:
                step.states.remove(state)
                step.recomputed.append(state)
                table.recompute(state)
                if lacking(self._growing(step.states)) <= 0:
                    break
        # All others are in flight: members that still need more wait for them.
        if lacking(self._growing(step.states)) > 0:
            step.states = []

    def _make_gpu_room(self, step: DecodeStep) -> None:
        """Evict requests until this batch's growth fits: those that run last first, its own youngest members last."""
        table = self._table

        def needed() -> int:
            return sum(map(table.needs.growth_on_gpu, self._growing(step.states)))

        num_blocks = needed()
        step.evicted += evict_for_room(
            table,
            self._rotation.behind(),
            free_blocks=num_blocks,
            max_on_gpu=self._config.max_on_gpu,
        )
        if num_blocks <= max(0, table.free_gpu_blocks):
            return
        spare = table.prefetching()
        batch = self._rotation.batches[self._rotation.executing]
        running = {state.id for state in step.states}
        spare += [state for state in batch.members if state.id not in running]
        while num_blocks > max(0, table.free_gpu_blocks):
            if spare:
                victim = spare.pop(0)
            elif len(step.states) > 1:
                victim = step.states.pop()
            else:
                # The engine still holds blocks: the one request left waits until they are free.
                step.states = []
                return
            table.evict(victim)
            step.evicted.append(victim)
            num_blocks = needed()
