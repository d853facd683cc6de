"""All live requests, and every change of where one is. The one place that writes to a ``RequestState``.

Each transition updates the ledger and the indexes together, so that no decision ever scans the parked requests:

    WAITING ─start→ PREFILLING ─prompt complete→ RESIDENT ⇄ PARKED   (evict; prefetch, PREFETCHING if in parts)
       ↑                                            │
       └────────────── void (recompute) ────────────┘

It decides nothing: which request moves, the planners say.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from pipemax.control.state.batches import Batch, Rotation
from pipemax.control.state.ledger import Ledger, SharedBlocks
from pipemax.control.state.length_index import LengthIndex
from pipemax.control.state.request_state import Place, RequestState
from pipemax.domain.request import PrefixId, RequestSpec
from pipemax.domain.units import RequestId, ceil_div


class RequestTable:
    """Live requests by place."""

    def __init__(self, *, gpu_blocks: int, host_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.step = 0  # of the plan being made
        self.ledger = Ledger(gpu_blocks=gpu_blocks, host_blocks=host_blocks)
        self.states: dict[RequestId, RequestState] = {}
        # Queues are OrderedDicts: a dict whose front was popped often is slow to find its first entry.
        self.waiting: OrderedDict[RequestId, RequestState] = OrderedDict()  # first come, first served
        self.dropped: OrderedDict[RequestId, RequestState] = (
            OrderedDict()
        )  # to recompute: ahead of the others
        self.prefilling: dict[RequestId, RequestState] = {}
        self.prefetching: dict[RequestId, RequestState] = {}
        self.unassigned = Batch()  # residents of no decode batch: all of them in prefill
        self.parked = LengthIndex()  # parked with nothing in flight: what may be prefetched
        self.parked_in_order: OrderedDict[RequestId, RequestState] = OrderedDict()  # longest parked first
        self.waiting_kv_tokens = 0  # Σ expected_kv_tokens of those that wait: their shared prefixes apart
        self._started: OrderedDict[RequestId, RequestState] = OrderedDict()  # all but those that wait, by age
        self._prefix_tokens: dict[PrefixId, int] = {}
        self.kept: set[RequestId] = set()  # must stay for this plan: others in it rely on their prefix
        self._unpublished: list[
            RequestState
        ] = []  # got their prefix in the step planned last, if nobody refused

    # What the planners ask.

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.dropped)

    @property
    def num_started(self) -> int:
        """Requests that hold KV."""
        return len(self._started)

    @property
    def num_decodable(self) -> int:
        return len(self._started) - len(self.prefilling)

    @property
    def num_on_gpu(self) -> int:
        """Requests that take a runner's slot."""
        return len(self.ledger.gpu)

    def first_waiting(self) -> RequestState | None:
        return next(iter(self.dropped.values()), None) or next(iter(self.waiting.values()), None)

    def youngest_started(self) -> Iterator[RequestState]:
        """Those that hold KV, latest come first."""
        return reversed(self._started.values())

    def longest_parked(self) -> RequestState | None:
        return next(iter(self.parked_in_order.values()), None)

    def own_blocks_for(self, state: RequestState, num_tokens: int) -> int:
        """Blocks beside its shared prefix that hold this many of its tokens."""
        return max(0, ceil_div(num_tokens, self.block_tokens) - state.num_shared_blocks)

    def gpu_blocks_for(self, state: RequestState, num_tokens: int) -> int:
        """GPU blocks that it holds itself with this many tokens: all of them, but for a prefix held together."""
        gpu = self.ledger.gpu
        sharing = gpu.shares(state.id) if state.id in gpu else self._may_share(state)
        return ceil_div(num_tokens, self.block_tokens) - (state.num_shared_blocks if sharing else 0)

    def _may_share(self, state: RequestState) -> bool:
        return state.shared is not None and self.ledger.gpu.holds_prefix(state.shared.prefix_id)

    def _share(self, state: RequestState) -> SharedBlocks | None:
        """The prefix that it finds on the GPU. The plan's evictions come first: its holder must not be among them."""
        if state.shared is None or not self._may_share(state):
            return None
        self.kept.add(self.ledger.gpu.prefix_holder(state.shared.prefix_id))
        return state.shared

    def prefetch_cost(self, state: RequestState) -> int:
        """GPU blocks to bring a parked request back: its own, and its prefix unless that is on the GPU."""
        return self.ledger.gpu.cost(state.blocks, state.shared)

    def cached_prefix_tokens(self, state: RequestState) -> int:
        """Tokens that its prefill, which has not begun, finds computed on the GPU."""
        return state.num_shared_blocks * self.block_tokens if self._may_share(state) else 0

    def publish_prefixes(self) -> None:
        """Before a plan: what the last one computed or copied, and nobody refused, may be shared."""
        for state in self._unpublished:
            shared, is_on_gpu = (
                state.shared,
                state.id in self.ledger.gpu and state.place is not Place.PREFETCHING,
            )
            complete = state.computed_tokens >= state.num_shared_blocks * self.block_tokens
            if shared and is_on_gpu and complete and self.states.get(state.id) is state:
                self.ledger.gpu.publish(state.id, shared)
        self._unpublished.clear()
        self.kept.clear()

    # Coming and going.

    def admit(self, spec: RequestSpec, expected_kv_tokens: int) -> None:
        """A request waits. ``ValueError`` where its id is live, it can never fit, or its prefix is ill-defined."""
        if spec.request_id in self.states:
            raise ValueError(f"request {spec.request_id} is admitted already")
        needed = ceil_div(spec.max_kv_tokens, self.block_tokens)
        room = min(self.ledger.gpu.num_blocks, self.ledger.host.num_blocks)
        if needed > room:
            raise ValueError(
                f"request {spec.request_id} may need {needed} blocks, more than the smaller pool's {room}"
            )
        shared = self._shared_blocks(spec)
        shared_tokens = shared.num_blocks * self.block_tokens if shared else 0
        state = RequestState(
            spec=spec,
            id=spec.request_id,
            shared=shared,
            target_tokens=spec.prompt_tokens,
            expected_kv_tokens=max(0, expected_kv_tokens - shared_tokens),
        )
        self.states[state.id] = self.waiting[state.id] = state
        self.waiting_kv_tokens += state.expected_kv_tokens

    def _shared_blocks(self, spec: RequestSpec) -> SharedBlocks | None:
        """None where nothing can be shared: at least one token of a prompt is always computed."""
        if spec.prefix is None:
            return None
        known = self._prefix_tokens.setdefault(spec.prefix.prefix_id, spec.prefix.num_tokens)
        if known != spec.prefix.num_tokens:
            raise ValueError(
                f"request {spec.request_id}: prefix {spec.prefix.prefix_id} has {known} tokens, "
                f"not {spec.prefix.num_tokens}"
            )
        num_blocks = spec.prefix.num_tokens // self.block_tokens
        if num_blocks == 0 or spec.prompt_tokens <= num_blocks * self.block_tokens:
            return None
        return SharedBlocks(spec.prefix.prefix_id, num_blocks)

    def remove(self, state: RequestState) -> None:
        """Finished or given up, wherever it is."""
        self._leave_place(state)
        del self.states[state.id]
        state.life += 1

    def void(self, state: RequestState) -> None:
        """Drop its KV; it waits, ahead of the others, to be prefilled with its output so far."""
        assert state.place is not Place.WAITING, state.id
        self._leave_place(state)
        state.life += 1
        state.num_recomputes += 1
        state.num_in_flight = 0
        state.computed_tokens = state.cached_tokens = state.blocks = state.prefetched_blocks = 0
        state.target_tokens = state.spec.prompt_tokens + state.output_tokens
        state.expected_kv_tokens = state.max_kv_tokens - state.num_shared_blocks * self.block_tokens
        state.place = Place.WAITING
        self.dropped[state.id] = state
        self.waiting_kv_tokens += state.expected_kv_tokens

    def _leave_place(self, state: RequestState) -> None:
        match state.place:
            case Place.WAITING:
                self.waiting.pop(state.id, None)
                self.dropped.pop(state.id, None)
                self.waiting_kv_tokens -= state.expected_kv_tokens
                return
            case Place.PREFILLING:
                del self.prefilling[state.id]
            case Place.RESIDENT:
                self._batch_of(state).remove(state)
            case Place.PREFETCHING:
                del self.prefetching[state.id]
            case Place.PARKED:
                self._leave_parked(state)
        del self._started[state.id]
        self.ledger.release(state.id)

    def _batch_of(self, state: RequestState) -> Batch:
        assert state.batch is not None, (state.id, state.place)
        return state.batch

    def _leave_parked(self, state: RequestState) -> None:
        if state.num_in_flight == 0:
            self.parked.discard(state, state.blocks)
            del self.parked_in_order[state.id]

    # Prefill.

    def start_prefill(self, state: RequestState, reserved_blocks: int) -> None:
        """Reserve its place on the host. All or nothing."""
        self.ledger.reserve(state.id, reserved_blocks, state.shared)
        self.waiting.pop(state.id, None)
        self.dropped.pop(state.id, None)
        self.waiting_kv_tokens -= state.expected_kv_tokens
        state.place = Place.PREFILLING
        self.prefilling[state.id] = self._started[state.id] = state

    def advance_prefill(self, state: RequestState, num_tokens: int) -> None:
        """Its next chunk is planned, the first one behind what is cached of its prefix; GPU blocks must be free."""
        if state.computed_tokens == 0:
            state.computed_tokens = state.cached_tokens = self.cached_prefix_tokens(state)
        computed = state.computed_tokens + num_tokens
        held = self.gpu_blocks_for(state, computed)
        if state.id in self.ledger.gpu:
            self.ledger.gpu.resize(state.id, held)
        else:
            self.ledger.gpu.take(state.id, held, self._share(state))
        self.ledger.set_live(state.id, self.own_blocks_for(state, computed))
        state.computed_tokens = computed
        state.num_in_flight += 1
        self._prefilled(state)

    def _prefilled(self, state: RequestState) -> None:
        """After its computed tokens changed: perhaps the prompt is complete."""
        if state.shared:
            self._unpublished.append(state)
        if state.computed_tokens >= state.target_tokens:
            del self.prefilling[state.id]
            state.place = Place.RESIDENT
            state.blocks = self._next_blocks(state)
            self.unassigned.add(state)

    def observe_hit(self, state: RequestState, num_computed: int) -> None:
        """The engine found more of its prompt on the GPU than was planned with."""
        if state.place is not Place.PREFILLING:
            return
        self.ledger.gpu.observe_resize(state.id, self.gpu_blocks_for(state, num_computed))
        self.ledger.set_live(state.id, self.own_blocks_for(state, num_computed))
        state.computed_tokens = num_computed
        self._prefilled(state)

    # Decode.

    def advance_decode(self, states: Iterable[RequestState]) -> None:
        """Each runs one step: GPU and host blocks for its growth must be free."""
        block_tokens = self.block_tokens
        for state in states:
            batch = self._batch_of(state)
            state.num_in_flight += 1
            state.is_deferred = False
            if state.computed_tokens % block_tokens == 0:
                self._grow(state)
            state.computed_tokens += 1
            batch.kv_tokens += 1
            if state.computed_tokens % block_tokens == 0:
                old = state.blocks
                state.blocks = old + 1
                batch.resized(state, old_blocks=old)

    def _grow(self, state: RequestState) -> None:
        """Its next token begins a block."""
        if self.grows_on_gpu(state):
            self.ledger.gpu.resize(state.id, self.gpu_blocks_for(state, state.computed_tokens + 1))
        self.ledger.set_live(state.id, state.blocks)

    def grows_on_gpu(self, state: RequestState) -> bool:
        """Whether its next token needs a block that it does not hold."""
        if state.computed_tokens % self.block_tokens:
            return False
        return self.ledger.gpu.own_blocks(state.id) < self.gpu_blocks_for(state, state.computed_tokens + 1)

    def grows_on_host(self, state: RequestState) -> bool:
        """Whether its next token needs more than it reserved."""
        return (
            state.computed_tokens % self.block_tokens == 0
            and self.ledger.host.own_blocks(state.id) < state.blocks
        )

    def _next_blocks(self, state: RequestState) -> int:
        return state.computed_tokens // self.block_tokens + 1 - state.num_shared_blocks

    def assign(self, state: RequestState, batch: Batch) -> None:
        """Move a resident to another batch."""
        self._batch_of(state).remove(state)
        batch.add(state)

    def dissolve(self, rotation: Rotation) -> None:
        """Back to prefill: no resident belongs to a decode batch."""
        for batch in rotation.batches:
            for state in list(batch.members.values()):
                self.assign(state, self.unassigned)

    # GPU ⇄ host.

    def evict(self, state: RequestState) -> None:
        """Free its GPU blocks; the host has a replica, of what is in flight as well once that arrives."""
        if state.place is Place.PREFETCHING:
            del self.prefetching[state.id]
        else:
            self._batch_of(state).remove(state)
        self.ledger.gpu.release(state.id)
        self._park(state)

    def _park(self, state: RequestState) -> None:
        state.place = Place.PARKED
        state.prefetched_blocks = 0
        if state.num_in_flight == 0:
            self._ready(state)

    def _ready(self, state: RequestState) -> None:
        state.parked_at = self.step
        self.parked.add(state, state.blocks)
        self.parked_in_order[state.id] = state

    def prefetch(self, state: RequestState, batch: Batch) -> None:
        """Bring it back whole; it joins a batch."""
        self._take_gpu(state)
        state.place = Place.RESIDENT
        batch.add(state)

    def begin_prefetching(self, state: RequestState) -> None:
        """Take all its GPU blocks now; they are filled over several steps."""
        self._take_gpu(state)
        state.place = Place.PREFETCHING
        self.prefetching[state.id] = state

    def _take_gpu(self, state: RequestState) -> None:
        assert state.place is Place.PARKED, (state.id, state.place)
        assert state.num_in_flight == 0, (state.id, state.num_in_flight)
        held = self.gpu_blocks_for(state, state.computed_tokens + 1)
        self.ledger.gpu.take(state.id, held, self._share(state))
        self._leave_parked(state)
        if state.shared:
            self._unpublished.append(state)

    def prefetch_more(self, state: RequestState, num_blocks: int) -> None:
        state.prefetched_blocks += num_blocks

    def finish_prefetching(self, state: RequestState, batch: Batch) -> None:
        del self.prefetching[state.id]
        state.place = Place.RESIDENT
        state.prefetched_blocks = 0
        batch.add(state)
        if state.shared:
            self._unpublished.append(state)

    # In flight.

    def complete(self, state: RequestState) -> None:
        """A step that ran it came back."""
        assert state.num_in_flight > 0, state.id
        state.num_in_flight -= 1
        if state.num_in_flight == 0 and state.place is Place.PARKED:
            self._ready(state)

    def retract(self, state: RequestState, num_tokens: int) -> None:
        """The last planned step did not run it: it is as it was before."""
        state.num_in_flight -= 1
        batch = self._batch_of(state) if state.place is Place.RESIDENT else None
        if batch is not None:
            batch.remove(state)
        state.computed_tokens -= num_tokens
        if state.computed_tokens < state.target_tokens:
            self._retract_prefill(state)
        else:
            # Its growth block stays counted: it wants it again when it runs again.
            assert batch is not None, (state.id, state.place)
            self.ledger.set_live(state.id, self.own_blocks_for(state, state.computed_tokens))
            state.blocks = self._next_blocks(state)
            batch.add(state)

    def _retract_prefill(self, state: RequestState) -> None:
        if state.computed_tokens == state.cached_tokens:  # it had not begun
            self.ledger.gpu.release(state.id)
            state.computed_tokens = state.cached_tokens = 0
        else:
            self.ledger.gpu.resize(state.id, self.gpu_blocks_for(state, state.computed_tokens))
        self.ledger.set_live(state.id, self.own_blocks_for(state, state.computed_tokens))
        state.place = Place.PREFILLING
        state.blocks = 0
        self.prefilling = {state.id: state, **self.prefilling}
