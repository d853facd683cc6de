"""Which residents decode together, in which order the batches do, and the steps in flight.

The decode batches D_0 … D_{n−1} rotate (PipeMax, §3.3.2, Equations 3 to 5): at iteration t, i_t = t mod n executes,
j_t = i_t + 1 is what the prefetch joins, k_t = i_t − 1 is overwritten. The paper's n is the pipeline's depth; here the
number of batches is a setting of its own.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, ValuesView
from dataclasses import dataclass

from pipemax.control.state.request import LengthIndex, RequestState
from pipemax.domain.plan import StepId
from pipemax.domain.units import RequestId


class Batch:
    """Residents that run together, in the order in which they joined. ``LiveRequests`` adds and removes them.

    Invariant: ``kv_tokens`` and ``own_blocks`` are the sums over the members, and the index holds the members.
    """

    def __init__(self) -> None:
        self._members: dict[RequestId, RequestState] = {}
        self._by_length = LengthIndex()
        self.kv_tokens = 0
        """Σ L_i: every prefix token counted for each member, as attention reads it."""
        self.own_blocks = 0
        """Σ of the members' blocks apart from shared prefixes, each with the next token's slot."""

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> ValuesView[RequestState]:
        """The members, the first to join first."""
        return self._members.values()

    def longest_first(self) -> Iterator[RequestState]:
        """Iterate over the members by descending blocks. The batch must not change meanwhile."""
        return self._by_length.descending()

    def victims(self) -> Iterator[RequestState]:
        """Iterate over the members in the order of eviction. The batch must not change meanwhile."""
        return self.longest_first()

    def add(self, state: RequestState) -> None:
        self._members[state.id] = state
        self._by_length.add(state, state.blocks)
        self.kv_tokens += state.computed_tokens
        self.own_blocks += state.blocks

    def remove(self, state: RequestState) -> None:
        del self._members[state.id]
        self._by_length.discard(state, state.blocks)
        self.kv_tokens -= state.computed_tokens
        self.own_blocks -= state.blocks

    def resize(self, state: RequestState, blocks: int) -> None:
        """Count another number of blocks for a member."""
        self._by_length.discard(state, state.blocks)
        self.own_blocks += blocks - state.blocks
        state.blocks = blocks
        self._by_length.add(state, blocks)

    def add_tokens(self, num_tokens: int) -> None:
        """Count tokens by which the members' ``computed_tokens`` grew together."""
        self.kv_tokens += num_tokens

    def check_integrity(self) -> None:
        """Recount the sums; ``AssertionError`` with the values where one differs. O(members): for tests."""
        assert self.kv_tokens == sum(state.computed_tokens for state in self.members), self.kv_tokens
        assert self.own_blocks == sum(state.blocks for state in self.members), self.own_blocks
        assert len(self._by_length) == len(self), (len(self._by_length), len(self))
        for state in self.members:
            assert state in self._by_length, state.id


def partition_balanced(states: Iterable[RequestState], num_batches: int) -> list[list[RequestState]]:
    """Return batches of equal size (± 1) and of nearly equal KV length (PipeMax, §3.3.2, "Initial Decode Batches").

    The paper gives no method. Here the requests go by descending length, n at a time, the longest of which goes to the
    batch with the least KV so far: the batches' lengths then differ by no more than the longest request's.
    """
    batches: list[list[RequestState]] = [[] for _ in range(num_batches)]
    kv_tokens = [0] * num_batches
    ordered = sorted(states, key=lambda state: -state.computed_tokens)
    for first in range(0, len(ordered), num_batches):
        emptiest = sorted(range(num_batches), key=kv_tokens.__getitem__)
        for index, state in zip(emptiest, ordered[first : first + num_batches], strict=False):
            batches[index].append(state)
            kv_tokens[index] += state.computed_tokens
    return batches


class Rotation:
    """Which batch executes, which is next and which is overwritten."""

    def __init__(self, num_batches: int) -> None:
        self.batches: Sequence[Batch] = tuple(Batch() for _ in range(num_batches))
        self.iteration = 0

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_requests(self) -> int:
        return sum(len(batch) for batch in self.batches)

    @property
    def executing(self) -> int:
        """i_t."""
        return self.iteration % len(self.batches)

    @property
    def next(self) -> int:
        """j_t."""
        return (self.iteration + 1) % len(self.batches)

    @property
    def overwritten(self) -> int:
        """k_t."""
        return (self.iteration - 1) % len(self.batches)

    def skip_empty(self) -> int:
        """Advance to the next batch that has members, if any has; return how many batches were skipped."""
        for num_skipped in range(len(self.batches)):
            if len(self.batches[self.executing]):
                return num_skipped
            self.iteration += 1
        return len(self.batches)

    def behind(self) -> list[Batch]:
        """Return the other batches, from the one that waits longest for its next turn (k_t) to the next one (j_t)."""
        count = len(self.batches)
        return [self.batches[(self.iteration - step) % count] for step in range(1, count)]


@dataclass(slots=True, kw_only=True)
class Flight:
    """The requests of one step, in parallel lists."""

    step_id: StepId
    states: list[RequestState]
    lives: list[int]
    """Each request's ``life`` when the step was planned. If it has changed since, the step no longer concerns it."""
    tokens: list[int]
    makes_output: list[bool]
    """Whether the step makes an output token for each request: a decode or a prompt's last chunk does."""

    def position(self, request_id: RequestId) -> int:
        """Return a request's position in the lists. Raise ``ValueError`` if the step does not run it."""
        for index, state in enumerate(self.states):
            if state.id == request_id:
                return index
        raise ValueError(f"step {self.step_id} does not run request {request_id}")

    def drop(self, index: int) -> None:
        """Forget the request at a position: the step does not run it after all."""
        del self.states[index], self.lives[index], self.tokens[index], self.makes_output[index]


class Flights:
    """The planned steps, which complete in order. Each request that a step runs is told the step's number."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self.num_launched = 0
        """Steps planned so far of which something ran."""

    def __bool__(self) -> bool:
        return bool(self._flights)

    def launch(self, step_id: StepId, states: list[RequestState], tokens: list[int]) -> None:
        for state in states:
            state.last_step = self.num_launched
        self.num_launched += 1
        flight = Flight(
            step_id=step_id,
            states=states,
            lives=[state.life for state in states],
            tokens=tokens,
            makes_output=[state.computed_tokens >= state.target_tokens for state in states],
        )
        self._flights.append(flight)

    def land(self, step_id: StepId) -> Flight:
        """Remove and return the oldest step, whose outputs came back. Raise ``ValueError`` if that is another one."""
        if not self._flights or self._flights[0].step_id != step_id:
            oldest = self._flights[0].step_id if self._flights else None
            raise ValueError(f"step {step_id} completed, but the oldest in flight is {oldest}")
        return self._flights.popleft()

    def latest(self, step_id: StepId) -> Flight:
        """Return the step planned last, which may still be corrected. Raise ``ValueError`` if that is another one."""
        if not self._flights or self._flights[-1].step_id != step_id:
            latest = self._flights[-1].step_id if self._flights else None
            raise ValueError(f"step {step_id} is corrected, but the one planned last is {latest}")
        return self._flights[-1]

    def drop_latest(self) -> None:
        """Forget the step planned last, of which nothing runs."""
        self._flights.pop()
        self.num_launched -= 1
