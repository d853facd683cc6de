"""Counts what the planned steps compute of each request: prompt tokens, output tokens, and steps in flight.

A plan counts as carried out once it is made; ``retract`` and ``observe_hit`` correct the step planned last.
"""

from collections.abc import Sequence

from pipemax.control.state.block_needs import BlockNeeds
from pipemax.control.state.ledger import Ledger
from pipemax.control.state.live_requests import RequestPlaces
from pipemax.control.state.request_state import Place, RequestState
from pipemax.control.state.residents import Residents
from pipemax.control.state.shared_prefixes import SharedPrefixes


class StepProgress:
    """Advances requests by steps, and takes steps back.

    Invariant: the ledger's live KV of a request is that of its ``computed_tokens``, and a resident holds the GPU blocks
    of ``computed_tokens``, with or without the slot of its next token.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        needs: BlockNeeds,
        prefixes: SharedPrefixes,
        places: RequestPlaces,
        residents: Residents,
        block_tokens: int,
    ) -> None:
        self._ledger = ledger
        self._needs = needs
        self._prefixes = prefixes
        self._places = places
        self._residents = residents
        self._block_tokens = block_tokens

    # Prefill.

    def advance_prefill(self, state: RequestState, num_tokens: int) -> None:
        """Plan a request's next prefill chunk; the first one begins behind the cached part of its prefix.

        Raise ``PoolExhaustedError`` if its GPU blocks are not free.
        """
        if state.computed_tokens == 0:
            state.computed_tokens = state.cached_tokens = self._needs.cached_prefix_tokens(state)
        computed = state.computed_tokens + num_tokens
        held = self._needs.gpu_blocks(state, state.computed_tokens, computed)
        if state.id in self._ledger.gpu:
            self._ledger.gpu.resize(state.id, held)
        else:
            self._ledger.gpu.take(state.id, held, self._prefixes.share(state))
        self._ledger.set_live(state.id, self._needs.own_blocks(state, computed))
        state.computed_tokens = computed
        state.num_in_flight += 1
        self._end_chunk(state)

    def observe_hit(self, state: RequestState, *, cached_tokens: int, computed_tokens: int) -> None:
        """Correct a planned chunk: the engine found more of the prompt cached than the plan assumed.

        ``computed_tokens`` are computed once the planned chunk has run. The request must be PREFILLING.
        """
        state.cached_tokens = cached_tokens
        held = self._needs.gpu_blocks(state, cached_tokens, computed_tokens)
        self._ledger.gpu.observe_resize(state.id, held)
        self._ledger.set_live(state.id, self._needs.own_blocks(state, computed_tokens))
        state.computed_tokens = computed_tokens
        self._end_chunk(state)

    def _end_chunk(self, state: RequestState) -> None:
        self._prefixes.note_filled(state)
        if state.computed_tokens >= state.target_tokens:
            state.blocks = self._needs.own_blocks_with_next(state)
            self._places.join(state, self._residents.unassigned)

    # Decode.

    def advance_decode(self, states: Sequence[RequestState]) -> None:
        """Plan one decode step for members of one batch. GPU and host blocks for their growth must be free."""
        if not states:
            return
        places, block_tokens = self._needs.changing_places, self._block_tokens
        batch = self._residents.batch_of(states[0])
        for state in states:
            state.num_in_flight += 1
            state.is_deferred = False
            computed = state.computed_tokens
            if computed % block_tokens in places:
                self._resize(state)
            state.computed_tokens = computed = computed + 1
            if computed % block_tokens in places:
                batch.resize(state, self._needs.own_blocks_with_next(state))
        batch.add_tokens(len(states))

    def _resize(self, state: RequestState) -> None:
        """Take the blocks that a request's next token begins, and give back those that left its windows."""
        held = self._needs.gpu_blocks(state, state.computed_tokens, state.computed_tokens + 1)
        if held != self._ledger.gpu.own_blocks(state.id):
            self._ledger.gpu.resize(state.id, held)
        self._ledger.set_live(state.id, state.blocks)

    # In flight.

    def complete(self, state: RequestState, *, makes_output: bool) -> None:
        """Complete the oldest step in flight that runs a request, and count the output token that it made, if any."""
        assert state.num_in_flight > 0, state.id
        state.num_in_flight -= 1
        if state.place is Place.PARKED and state.num_in_flight == 0:
            self._places.settle(state)
        state.output_tokens += makes_output

    def retract(self, state: RequestState, num_tokens: int) -> None:
        """Take back ``num_tokens`` of a request that the step planned last did not run."""
        state.num_in_flight -= 1
        if state.computed_tokens - num_tokens < state.target_tokens:
            self._places.resume_prefill(state)
            state.computed_tokens -= num_tokens
            self._retract_prefill(state)
        else:
            # Its growth block stays counted: the request needs it when it runs again.
            batch = self._residents.batch_of(state)
            self._residents.remove(state)
            state.computed_tokens -= num_tokens
            self._ledger.set_live(state.id, self._needs.own_blocks(state, state.computed_tokens))
            state.blocks = self._needs.own_blocks_with_next(state)
            self._residents.add(state, batch)

    def _retract_prefill(self, state: RequestState) -> None:
        if state.computed_tokens == state.cached_tokens:  # it had not begun
            self._ledger.gpu.release(state.id)
            state.computed_tokens = state.cached_tokens = 0
        else:
            computed = state.computed_tokens
            self._ledger.gpu.resize(state.id, self._needs.gpu_blocks(state, computed, computed))
        self._ledger.set_live(state.id, self._needs.own_blocks(state, state.computed_tokens))
        state.blocks = 0
