"""The live requests with their blocks: what a plan asks, and each move of a request with what it takes and frees.

The steps in flight count as carried out: what a plan says is what the table holds.
"""

from collections.abc import Sequence

from pipemax.control.state.batches import Batch, Flight, Rotation
from pipemax.control.state.places import LiveRequests
from pipemax.control.state.pools import BlockNeeds, Ledger, SharedPrefixes
from pipemax.control.state.request import Place, RequestState
from pipemax.domain.kv_groups import WHOLE_KV, KvGroups
from pipemax.domain.request import RequestSpec
from pipemax.domain.units import RequestId


class RequestTable(LiveRequests):
    """Live requests, and the moves between their places.

    Invariant: a request holds blocks in the ledger exactly as its place says: WAITING none; PREFILLING, RESIDENT and
    PREFETCHING on GPU and host; PARKED on the host only.

    Exception: what is overwritten in a wave is PARKED, and holds some blocks on the GPU until the next plan.

    Pools are in blocks of ``block_tokens`` tokens. Each move asserts the place that its docstring names.
    """

    def __init__(
        self, *, gpu_blocks: int, host_blocks: int, block_tokens: int, groups: KvGroups = WHOLE_KV
    ) -> None:
        super().__init__()
        self.block_tokens = block_tokens
        self._ledger = Ledger(gpu_blocks=gpu_blocks, host_blocks=host_blocks)
        self.needs = BlockNeeds(self._ledger, block_tokens, groups)
        """Blocks that a request needs."""
        self._overwritten: list[RequestState] = []  # in waves, by the step planned last
        self._prefixes = SharedPrefixes(self._ledger.gpu, self.needs, self.find, block_tokens)

    # Blocks.

    @property
    def num_on_gpu(self) -> int:
        """The number of requests that hold GPU blocks, and with them a runner slot each."""
        return len(self._ledger.gpu)

    @property
    def free_gpu_blocks(self) -> int:
        """The free blocks of the GPU; negative if the engine holds more than fits next to our count."""
        return self._ledger.gpu.num_free

    @property
    def free_host_blocks(self) -> int:
        """The blocks of the host pool that nobody has reserved."""
        return self._ledger.host.num_free

    @property
    def reserved_blocks(self) -> int:
        """The blocks of the host pool that requests may grow into, each shared prefix counted once."""
        return self._ledger.host.num_used

    @property
    def live_blocks(self) -> int:
        """The blocks of KV that exist, each shared prefix counted once."""
        return self._ledger.live.num_used

    def gpu_blocks_of(self, state: RequestState) -> int:
        """Return the GPU blocks that a request holds apart from its shared prefix; 0 if it is not there."""
        return self._ledger.gpu.own_blocks(state.id) if self.is_on_gpu(state) else 0

    def overwritable_blocks(self, state: RequestState) -> int:
        """Return the blocks of a resident that a wave may overwrite while the step being planned decodes it.

        Those are the ones that steps before have filled and that hold no shared prefix: all but the last, which this
        step writes to.
        """
        prefix_copy = 0 if self._ledger.gpu.shares(state.id) else state.num_shared_blocks
        return self._ledger.gpu.own_blocks(state.id) - 1 - prefix_copy

    def is_on_gpu(self, state: RequestState) -> bool:
        return state.id in self._ledger.gpu

    def reserved_blocks_of(self, state: RequestState) -> int:
        """Return the host blocks that a request with KV has reserved apart from its shared prefix."""
        return self._ledger.host.own_blocks(state.id)

    def reservation_cost(self, state: RequestState, own_blocks: int) -> int:
        """Return the host blocks that reserving ``own_blocks`` takes: with its prefix unless that is there."""
        return self._ledger.host.cost(own_blocks, state.shared)

    def is_prefix_provider(self, state: RequestState) -> bool:
        """Return whether a request must not be evicted: the plan being made shares the prefix that it holds."""
        return self._prefixes.is_provider(state)

    # Plans.

    def begin_plan(self, step: int) -> None:
        """Begin the plan of a step: free what the last plan's wave left; let prefixes be shared that it filled."""
        self._begin_step(step)
        for state in self._overwritten:
            # It may have finished, or been dropped, since.
            if self.find(state.id) is state and state.place is Place.PARKED:
                self._ledger.gpu.release(state.id)
        self._overwritten.clear()
        self._prefixes.publish()

    def observe_free_gpu_blocks(self, num_free: int) -> None:
        """Adopt the engine's count of free GPU blocks if it is lower than ours."""
        self._ledger.gpu.observe_free(num_free)

    # Admission and end.

    def admit(self, spec: RequestSpec, expected_kv_tokens: int) -> None:
        """Queue a request that is forecast to hold ``expected_kv_tokens`` at its end.

        Raise ``ValueError`` if its id is live, it can never fit, or its prefix has another length than before.
        """
        if self.find(spec.request_id) is not None:
            raise ValueError(f"request {spec.request_id} is admitted already")
        needed = self.needs.most_blocks(spec.max_kv_tokens)
        room = min(self._ledger.gpu.num_blocks, self._ledger.host.num_blocks)
        if needed > room:
            raise ValueError(
                f"request {spec.request_id} may need {needed} blocks, more than the smaller pool's {room}"
            )
        shared = self._prefixes.declare(spec) if self.needs.shares_prefixes() else None
        shared_tokens = shared.num_blocks * self.block_tokens if shared else 0
        self._queue(
            RequestState(
                spec=spec,
                id=spec.request_id,
                shared=shared,
                target_tokens=spec.prompt_tokens,
                expected_kv_tokens=max(0, self.needs.most_kv_tokens(expected_kv_tokens) - shared_tokens),
            )
        )

    def remove(self, state: RequestState) -> None:
        """Forget a request that finished or was aborted, wherever it is."""
        self._forget(state)
        self._ledger.release(state.id)
        state.life += 1

    def start_prefill(self, state: RequestState, reserved_blocks: int) -> None:
        """Reserve host blocks for a waiting request, whose chunks may be planned from then on.

        Raise ``PoolExhaustedError`` if they are not free; then nothing has changed.
        """
        assert state.place is Place.WAITING, state
        self._ledger.reserve(state.id, reserved_blocks, state.shared)
        self._begin_prefill(state)

    def recompute(self, state: RequestState) -> None:
        """Drop a request's KV on GPU and host; it waits, ahead of the others, to be prefilled with its output so far.

        Steps in flight that run it no longer concern it.
        """
        assert state.place is not Place.WAITING, state.id
        state.target_tokens = state.spec.prompt_tokens + state.output_tokens
        most_tokens = self.needs.most_kv_tokens(state.max_kv_tokens)
        state.expected_kv_tokens = most_tokens - state.num_shared_blocks * self.block_tokens
        self._requeue(state)
        self._ledger.release(state.id)
        state.life += 1
        state.num_recomputes += 1
        state.num_in_flight = 0
        state.computed_tokens = state.cached_tokens = state.blocks = state.prefetched_blocks = 0

    # GPU ⇄ host.

    def evict(self, state: RequestState) -> None:
        """Free the GPU blocks of a request that is resident or prefetched in part.

        The host has its replica, including the KV of steps in flight once that arrives.
        """
        assert state.place is Place.RESIDENT or state.place is Place.PREFETCHING, state
        self._ledger.gpu.release(state.id)
        self._park(state)
        state.prefetched_blocks = 0

    def overwrite(self, state: RequestState) -> None:
        """Evict a resident behind the computation of the step being planned, which decodes it.

        What is not among its ``overwritable_blocks`` stays until the next plan.
        """
        assert state.place is Place.RESIDENT, (state.id, state.place)
        assert state.num_in_flight > 0, state.id
        kept = self._ledger.gpu.own_blocks(state.id) - self.overwritable_blocks(state)
        self._ledger.gpu.resize(state.id, kept)
        self._park(state)
        self._overwritten.append(state)

    def prefetch(self, state: RequestState, batch: Batch) -> None:
        """Prefetch a parked request in one step; it joins a batch.

        Raise ``PoolExhaustedError`` if its GPU blocks are not free; then nothing has changed.
        """
        self._take_gpu_blocks(state)
        self._join(state, batch)

    def start_prefetching(self, state: RequestState) -> None:
        """Take all GPU blocks of a parked request now, to be filled over several steps. Raises as ``prefetch`` does."""
        first_block = self.needs.first_missing_block(state)
        self._take_gpu_blocks(state)
        self._begin_prefetching(state)
        state.prefetched_blocks = first_block

    def prefetch_part(self, state: RequestState, num_blocks: int) -> None:
        """Count the next blocks of a request that is prefetched over several steps."""
        assert state.place is Place.PREFETCHING, state
        state.prefetched_blocks += num_blocks

    def finish_prefetching(self, state: RequestState, batch: Batch) -> None:
        """Prefetch the last blocks of a request that is prefetched over several steps; it joins a batch."""
        assert state.place is Place.PREFETCHING, state
        self._join(state, batch)
        state.prefetched_blocks = 0
        self._prefixes.note_filled(state)

    def _take_gpu_blocks(self, state: RequestState) -> None:
        assert state.place is Place.PARKED, (state.id, state.place)
        assert state.num_in_flight == 0, (state.id, state.num_in_flight)
        held = self.needs.gpu_blocks(state, state.computed_tokens, state.computed_tokens + 1)
        self._ledger.gpu.take(state.id, held, self._prefixes.share(state))
        self._prefixes.note_filled(state)

    # Prefill.

    def advance_prefill(self, state: RequestState, num_tokens: int) -> None:
        """Plan a request's next prefill chunk; the first one begins behind the cached part of its prefix.

        Raise ``PoolExhaustedError`` if its GPU blocks are not free.
        """
        if state.computed_tokens == 0:
            state.computed_tokens = state.cached_tokens = self.needs.cached_prefix_tokens(state)
        computed = state.computed_tokens + num_tokens
        held = self.needs.gpu_blocks(state, state.computed_tokens, computed)
        if state.id in self._ledger.gpu:
            self._ledger.gpu.resize(state.id, held)
        else:
            self._ledger.gpu.take(state.id, held, self._prefixes.share(state))
        self._ledger.set_live(state.id, self.needs.own_blocks(state, computed))
        state.computed_tokens = computed
        state.num_in_flight += 1
        self._end_chunk(state)

    def observe_hit(self, state: RequestState, *, cached_tokens: int, computed_tokens: int) -> None:
        """Correct a planned chunk: the engine found more of the prompt cached than the plan assumed.

        ``computed_tokens`` are computed once the planned chunk has run. The request must be PREFILLING.
        """
        state.cached_tokens = cached_tokens
        held = self.needs.gpu_blocks(state, cached_tokens, computed_tokens)
        self._ledger.gpu.observe_resize(state.id, held)
        self._ledger.set_live(state.id, self.needs.own_blocks(state, computed_tokens))
        state.computed_tokens = computed_tokens
        self._end_chunk(state)

    def _end_chunk(self, state: RequestState) -> None:
        self._prefixes.note_filled(state)
        if state.computed_tokens >= state.target_tokens:
            state.blocks = self.needs.own_blocks_with_next(state)
            self._join(state, self.unassigned)

    # Decode.

    def advance_decode(self, states: Sequence[RequestState]) -> None:
        """Plan one decode step for members of one batch. GPU and host blocks for their growth must be free."""
        if not states:
            return
        places, block_tokens = self.needs.changing_places, self.block_tokens
        batch = self._batch_of[states[0].id]
        for state in states:
            state.num_in_flight += 1
            state.is_deferred = False
            computed = state.computed_tokens
            if computed % block_tokens in places:
                self._resize(state)
            state.computed_tokens = computed = computed + 1
            if computed % block_tokens in places:
                batch.resize(state, self.needs.own_blocks_with_next(state))
        batch.add_tokens(len(states))

    def _resize(self, state: RequestState) -> None:
        """Take the blocks that a request's next token begins, and give back those that left its windows."""
        held = self.needs.gpu_blocks(state, state.computed_tokens, state.computed_tokens + 1)
        if held != self._ledger.gpu.own_blocks(state.id):
            self._ledger.gpu.resize(state.id, held)
        self._ledger.set_live(state.id, state.blocks)

    # In flight.

    def complete(self, flight: Flight) -> dict[RequestId, RequestState]:
        """Complete a step for each of its requests whose KV was not dropped since, and count the outputs that it made.

        It must be the oldest in flight. Return the requests that have their ``max_tokens`` outputs.
        """
        spent: dict[RequestId, RequestState] = {}
        parked = Place.PARKED
        for state, life, makes_output in zip(flight.states, flight.lives, flight.makes_output, strict=True):
            if state.life != life:
                continue
            assert state.num_in_flight > 0, state.id
            state.num_in_flight -= 1
            if state.num_in_flight == 0 and state.place is parked:
                self._settle(state)
            if makes_output:
                state.output_tokens += 1
                if state.output_tokens >= state.spec.max_tokens:
                    spent[state.id] = state
        return spent

    def retract(self, state: RequestState, num_tokens: int) -> None:
        """Take back ``num_tokens`` of a request that the step planned last did not run."""
        state.num_in_flight -= 1
        if state.computed_tokens - num_tokens < state.target_tokens:
            self._resume_prefill(state)
            state.computed_tokens -= num_tokens
            self._retract_prefill(state)
        elif state.place is Place.PARKED:  # overwritten by the same plan
            state.computed_tokens -= num_tokens
            self._ledger.set_live(state.id, self.needs.own_blocks(state, state.computed_tokens))
            state.blocks = self.needs.own_blocks_with_next(state)
            if state.num_in_flight == 0:
                self._settle(state)
        else:
            # Its growth block stays counted: the request needs it when it runs again.
            batch = self._batch_of[state.id]
            batch.remove(state)
            state.computed_tokens -= num_tokens
            self._ledger.set_live(state.id, self.needs.own_blocks(state, state.computed_tokens))
            state.blocks = self.needs.own_blocks_with_next(state)
            batch.add(state)

    def _retract_prefill(self, state: RequestState) -> None:
        if state.computed_tokens == state.cached_tokens:  # it had not begun
            self._ledger.gpu.release(state.id)
            state.computed_tokens = state.cached_tokens = 0
        else:
            computed = state.computed_tokens
            self._ledger.gpu.resize(state.id, self.needs.gpu_blocks(state, computed, computed))
        self._ledger.set_live(state.id, self.needs.own_blocks(state, state.computed_tokens))
        state.blocks = 0

    def check_integrity(self, rotation: Rotation) -> None:
        """Recount everything that must hold between requests, indexes and blocks; O(live): for tests.

        Raise ``AssertionError`` with the values if anything differs.
        """
        self._ledger.check_integrity()
        self._check_places(rotation)
        for state in self:
            self._check_state(state)

    def _check_state(self, state: RequestState) -> None:
        ledger, needs = self._ledger, self.needs
        on_gpu = state.id in ledger.gpu
        if state.place is Place.WAITING:
            assert not on_gpu, state
            assert state.id not in ledger.host, state
            return
        # What has left its windows is counted until its next step.
        needed, live = needs.own_blocks(state, state.computed_tokens), ledger.live.own_blocks(state.id)
        assert needed <= live <= max(needed, needs.reserved_blocks(state, state.computed_tokens)), (
            state,
            needed,
        )
        assert live == needed or not needs.shares_prefixes(), (state, needed)
        if state.place is Place.PREFILLING:
            return
        is_overwritten = any(state is other for other in self._overwritten)
        assert on_gpu is (state.place is not Place.PARKED or is_overwritten), state
        if on_gpu and not is_overwritten:
            held = ledger.gpu.own_blocks(state.id)
            computed = state.computed_tokens
            needed = needs.gpu_blocks(state, computed, computed)
            limit = needs.gpu_blocks(state, 0, computed + 1)
            assert needed <= held <= limit, (state, needed, held, limit)
        next_slot = needs.own_blocks_with_next(state)
        assert state.blocks == next_slot, (state, next_slot)
        assert state.target_tokens <= state.computed_tokens <= state.max_kv_tokens, state
