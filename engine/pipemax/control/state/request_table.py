"""All live requests, and every change of where a request's KV is.

Each transition updates the ledger and the indexes together, so that no decision ever scans the parked requests:

    WAITING ─start→ PREFILLING ─prompt complete→ RESIDENT ⇄ PARKED   (evict; prefetch, PREFETCHING if in parts)
       ↑                                            │
       └────────────────── recompute ───────────────┘

It decides nothing: the planners choose which request moves.
"""

from pipemax.control.state.batches import Batch
from pipemax.control.state.block_needs import BlockNeeds
from pipemax.control.state.ledger import Ledger, Pools
from pipemax.control.state.live_requests import LiveRequests, RequestPlaces
from pipemax.control.state.request_state import Place, RequestState
from pipemax.control.state.residents import Residents
from pipemax.control.state.shared_prefixes import SharedPrefixes
from pipemax.control.state.step_progress import StepProgress
from pipemax.domain.kv_groups import WHOLE_KV, KvGroups
from pipemax.domain.request import RequestSpec


class RequestTable:
    """Live requests, and the moves between their places.

    Invariant: a request holds blocks in the ledger exactly as its place says: WAITING none; PREFILLING, RESIDENT and
    PREFETCHING on GPU and host; PARKED on the host only.

    Pools are in blocks of ``block_tokens`` tokens. Each move asserts the place that its docstring names.
    """

    def __init__(
        self, *, gpu_blocks: int, host_blocks: int, block_tokens: int, groups: KvGroups = WHOLE_KV
    ) -> None:
        self.block_tokens = block_tokens
        self._ledger = Ledger(gpu_blocks=gpu_blocks, host_blocks=host_blocks)
        self.ledger: Pools = self._ledger.pools
        """Blocks held on the GPU, reserved on the host, and live, for reading."""
        self.residents = Residents()
        """Batch membership of the residents; moving one between batches is no move of KV."""
        self._places = RequestPlaces(self.residents)
        self.requests: LiveRequests = self._places
        """The live requests by place, for reading."""
        self.needs = BlockNeeds(self.ledger, block_tokens, groups)
        """Blocks that a request needs."""
        self._prefixes = SharedPrefixes(self._ledger.gpu, self.needs, self._places, block_tokens)
        self.progress = StepProgress(
            ledger=self._ledger,
            needs=self.needs,
            prefixes=self._prefixes,
            places=self._places,
            residents=self.residents,
            block_tokens=block_tokens,
        )
        """What the planned steps compute of the requests."""

    # Reading.

    @property
    def num_on_gpu(self) -> int:
        """The number of requests that hold GPU blocks, and with them a runner slot each."""
        return len(self._ledger.gpu)

    def is_prefix_provider(self, state: RequestState) -> bool:
        """Return whether a request must not be evicted: the plan being made shares the prefix that it holds."""
        return self._prefixes.is_provider(state)

    def check_integrity(self) -> None:
        """Recount the pools; ``AssertionError`` with the values where counts differ. O(live): for tests."""
        self._ledger.check_integrity()

    # Plans.

    def begin_plan(self, step: int) -> None:
        """Begin the plan of a step: let prefixes be shared that the last plan filled."""
        self._places.begin_plan(step)
        self._prefixes.publish()

    def observe_free_gpu_blocks(self, num_free: int) -> None:
        """Adopt the engine's count of free GPU blocks if it is lower than ours."""
        self._ledger.gpu.observe_free(num_free)

    # Admission and end.

    def admit(self, spec: RequestSpec, expected_kv_tokens: int) -> None:
        """Queue a request that is forecast to hold ``expected_kv_tokens`` at its end.

        Raise ``ValueError`` if its id is live, it can never fit, or its prefix has another length than before.
        """
        if self._places.find(spec.request_id) is not None:
            raise ValueError(f"request {spec.request_id} is admitted already")
        needed = self.needs.most_blocks(spec.max_kv_tokens)
        room = min(self._ledger.gpu.num_blocks, self._ledger.host.num_blocks)
        if needed > room:
            raise ValueError(
                f"request {spec.request_id} may need {needed} blocks, more than the smaller pool's {room}"
            )
        shared = self._prefixes.declare(spec) if self.needs.shares_prefixes() else None
        shared_tokens = shared.num_blocks * self.block_tokens if shared else 0
        self._places.admit(
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
        self._places.remove(state)
        self._ledger.release(state.id)
        state.life += 1

    def start_prefill(self, state: RequestState, reserved_blocks: int) -> None:
        """Reserve host blocks for a waiting request, whose chunks may be planned from then on.

        Raise ``PoolExhaustedError`` if they are not free; then nothing has changed.
        """
        assert state.place is Place.WAITING, state
        self._ledger.reserve(state.id, reserved_blocks, state.shared)
        self._places.start_prefill(state)

    def recompute(self, state: RequestState) -> None:
        """Drop a request's KV on GPU and host; it waits, ahead of the others, to be prefilled with its output so far.

        Steps in flight that run it no longer concern it.
        """
        assert state.place is not Place.WAITING, state.id
        state.target_tokens = state.spec.prompt_tokens + state.output_tokens
        most_tokens = self.needs.most_kv_tokens(state.max_kv_tokens)
        state.expected_kv_tokens = most_tokens - state.num_shared_blocks * self.block_tokens
        self._places.requeue(state)
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
        self._places.park(state)
        state.prefetched_blocks = 0

    def prefetch(self, state: RequestState, batch: Batch) -> None:
        """Prefetch a parked request in one step; it joins a batch.

        Raise ``PoolExhaustedError`` if its GPU blocks are not free; then nothing has changed.
        """
        self._take_gpu_blocks(state)
        self._places.join(state, batch)

    def start_prefetching(self, state: RequestState) -> None:
        """Take all GPU blocks of a parked request now, to be filled over several steps. Raises as ``prefetch`` does."""
        first_block = self.needs.first_missing_block(state)
        self._take_gpu_blocks(state)
        self._places.start_prefetching(state)
        state.prefetched_blocks = first_block

    def prefetch_part(self, state: RequestState, num_blocks: int) -> None:
        """Count the next blocks of a request that is prefetched over several steps."""
        assert state.place is Place.PREFETCHING, state
        state.prefetched_blocks += num_blocks

    def finish_prefetching(self, state: RequestState, batch: Batch) -> None:
        """Prefetch the last blocks of a request that is prefetched over several steps; it joins a batch."""
        assert state.place is Place.PREFETCHING, state
        self._places.join(state, batch)
        state.prefetched_blocks = 0
        self._prefixes.note_filled(state)

    def _take_gpu_blocks(self, state: RequestState) -> None:
        assert state.place is Place.PARKED, (state.id, state.place)
        assert state.num_in_flight == 0, (state.id, state.num_in_flight)
        held = self.needs.gpu_blocks(state, state.computed_tokens, state.computed_tokens + 1)
        self._ledger.gpu.take(state.id, held, self._prefixes.share(state))
        self._prefixes.note_filled(state)
