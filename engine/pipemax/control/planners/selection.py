"""Chooses the parked requests that fill a prefetch budget: ShortFirstFill and GreedySelect (PipeMax, Algorithms 1, 2).

The choices are made over an index of the parked requests; nothing is moved. Sizes are in blocks, since whole blocks are
copied; execution time is by tokens.
"""

from dataclasses import dataclass
from itertools import islice

from pipemax.control.state.pools import BlockNeeds
from pipemax.control.state.request import LengthIndex, Picker, RequestState
from pipemax.domain.request import PrefixId
from pipemax.domain.units import RequestId

MAX_MISFITS = 8
"""The search ends once this many requests were passed over: their shared prefix is not resident and would not fit."""
MAX_SPLIT = 4
"""Selected requests that a split tries, the longest first, before it gives up."""
MIN_KEPT_BLOCKS = 0.95
"""Exchanges keep at least this share of the blocks that the greedy choice filled."""


class Basket:
    """The set P_t being chosen. It never exceeds its limits on blocks and requests."""

    def __init__(self, needs: BlockNeeds, *, max_blocks: int, max_requests: int) -> None:
        self._needs = needs
        self.blocks_left = max_blocks
        self.requests_left = max_requests
        self.by_length = LengthIndex()
        self.ids: set[RequestId] = set()
        self.kv_tokens = 0
        self.num_blocks = 0
        self._brought: set[PrefixId] = set()
        self._staying: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self.by_length)

    def cost(self, state: RequestState) -> int:
        """Return the GPU blocks that prefetching the request takes."""
        return self._needs.prefetch_cost(state)

    def fits(self, state: RequestState) -> bool:
        """Return whether the request may be added.

        A prefix that one request brings can be shared only after the step, so other requests with the same prefix
        do not fit.
        """
        if state.shared is not None and state.shared.prefix_id in self._brought:
            return False
        return self.requests_left > 0 and self.cost(state) <= self.blocks_left and state.id not in self.ids

    def add(self, state: RequestState, *, stays: bool = False) -> None:
        """Add a request; one that stays is not exchanged for others.

        What no picker has handed out must stay: given back to one, it would be handed out twice.
        """
        if stays:
            self._staying.add(state.id)
        cost = self.cost(state)
        if cost > state.blocks and state.shared is not None:
            self._brought.add(state.shared.prefix_id)
        self._put(state, cost)

    def is_exchangeable(self, state: RequestState) -> bool:
        """Return whether the request may leave, and costs only its own blocks, that is, brings no prefix."""
        return state.id not in self._staying and self.cost(state) == state.blocks

    def exchange(self, leave: list[RequestState], enter: list[RequestState]) -> None:
        """Replace exchangeable requests of the basket by others."""
        for state in leave:
            self.by_length.discard(state, state.blocks)
            self.ids.remove(state.id)
            self.num_blocks -= state.blocks
            self.blocks_left += state.blocks
            self.requests_left += 1
            self.kv_tokens -= state.computed_tokens
        for state in enter:
            self._put(state, state.blocks)

    def _put(self, state: RequestState, cost: int) -> None:
        self.by_length.add(state, state.blocks)
        self.ids.add(state.id)
        self.num_blocks += cost
        self.blocks_left -= cost
        self.requests_left -= 1
        self.kv_tokens += state.computed_tokens


def fill_shortest_first(
    basket: Basket, picker: Picker, target: "TimeGap | None" = None, *, free_blocks: int = 0
) -> None:
    """Add as many requests as the budget holds, the shortest first (ShortFirstFill).

    Where a time gap is given, stop once it is closed and ``free_blocks`` are used up.
    """
    misfits = 0
    while basket.requests_left and misfits < MAX_MISFITS:
        is_wanted = target is None or target.mismatch_s(len(basket), basket.kv_tokens) > 0
        if not is_wanted and basket.num_blocks >= free_blocks:
            return
        state = picker.take_smallest()
        if state is None or state.blocks > basket.blocks_left:
            return
        if basket.fits(state):
            basket.add(state)
        else:
            misfits += 1


def fill_longest_first(basket: Basket, picker: Picker) -> None:
    """Add whatever still fits, by descending length: the greedy part of GreedySelect."""
    misfits = 0
    while basket.requests_left and misfits < MAX_MISFITS:
        state = picker.take_at_most(basket.blocks_left)
        if state is None:
            return
        if basket.fits(state):
            basket.add(state)
        else:
            misfits += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeGap:
    """The time that the chosen set should add to the next batch: α·|P| + β·ΣL close to ΔT̂ (PipeMax, Equation 8)."""

    gap_s: float
    alpha_s: float
    beta_s: float
    tolerance_s: float

    def mismatch_s(self, num_requests: int, kv_tokens: int) -> float:
        """Return the gap less the set's time, in seconds: positive if the set falls short of the gap."""
        return self.gap_s - self.alpha_s * num_requests - self.beta_s * kv_tokens


class Refinement:
    """The exchanges of GreedySelect (PipeMax, Algorithm 2, from line 10): they change |P|, ΣL stays near the budget.

    Each exchange lowers the mismatch, respects the basket's limits and keeps ``MIN_KEPT_BLOCKS`` of its blocks. The
    search ends when no such exchange is found.
    """

    def __init__(self, basket: Basket, picker: Picker, target: TimeGap) -> None:
        self._basket = basket
        self._picker = picker
        self._target = target
        self._min_blocks = MIN_KEPT_BLOCKS * basket.num_blocks

    def run(self, max_exchanges: int) -> int:
        """Improve the basket by at most ``max_exchanges`` exchanges; return how many were made."""
        for made in range(max_exchanges):
            mismatch_s = self._mismatch_s()
            if abs(mismatch_s) <= self._target.tolerance_s or self._target.alpha_s <= 0:
                return made
            # As many requests more or fewer as would close the mismatch, and at least one.
            change = max(1, round(abs(mismatch_s) / self._target.alpha_s))
            if not (self._split(change) if mismatch_s > 0 else self._merge(change)):
                return made
        return max_exchanges

    def _mismatch_s(self) -> float:
        return self._target.mismatch_s(len(self._basket), self._basket.kv_tokens)

    def _split(self, change: int) -> bool:
        """Replace one of the longest selected requests by several shorter unselected ones."""
        candidates = (s for s in self._basket.by_length.descending() if self._basket.is_exchangeable(s))
        return any(self._split_one(long, change) for long in list(islice(candidates, MAX_SPLIT)))

    def _split_one(self, long: RequestState, change: int) -> bool:
        count = min(change + 1, long.blocks, self._basket.requests_left + 1)
        while count >= 2:
            shorter = self._pick_shorter(count, long.blocks)
            if len(shorter) >= 2 and self._accept([long], shorter):
                return True
            self._give_back(shorter)
            count //= 2
        return False

    def _pick_shorter(self, count: int, blocks: int) -> list[RequestState]:
        """Return up to ``count`` unselected requests shorter than ``blocks``, of about that length together."""
        picked: list[RequestState] = []
        left = blocks + self._basket.blocks_left
        for share in range(count, 0, -1):
            state = self._picker.take_at_most(min(left // share, blocks - 1))
            if state is None:
                break
            if state.id in self._basket.ids:
                continue
            if not self._basket.is_exchangeable(state):
                self._picker.give_back(state)
                break
            picked.append(state)
            left -= state.blocks
        return picked

    def _merge(self, change: int) -> bool:
        """Replace several short selected requests by one longer unselected one."""
        candidates = (s for s in self._basket.by_length.ascending() if self._basket.is_exchangeable(s))
        shortest = list(islice(candidates, change + 1))
        count = len(shortest)
        while count >= 2:
            short = shortest[:count]
            longer = self._picker.take_at_most(sum(s.blocks for s in short) + self._basket.blocks_left)
            if longer is None:
                return False
            if longer.id not in self._basket.ids:
                fits = longer.blocks > short[-1].blocks and self._basket.is_exchangeable(longer)
                if fits and self._accept(short, [longer]):
                    return True
                self._picker.give_back(longer)
            count //= 2
        return False

    def _accept(self, leave: list[RequestState], enter: list[RequestState]) -> bool:
        """Make an exchange if it lowers the mismatch and keeps the budget filled."""
        basket = self._basket
        num_requests = len(basket) + len(enter) - len(leave)
        more_blocks = sum(s.blocks for s in enter) - sum(s.blocks for s in leave)
        more_tokens = sum(s.computed_tokens for s in enter) - sum(s.computed_tokens for s in leave)
        after_s = self._target.mismatch_s(num_requests, basket.kv_tokens + more_tokens)
        if abs(after_s) >= abs(self._mismatch_s()) or more_blocks > basket.blocks_left:
            return False
        if basket.num_blocks + more_blocks < self._min_blocks:
            return False
        basket.exchange(leave, enter)
        self._give_back(leave)
        return True

    def _give_back(self, states: list[RequestState]) -> None:
        for state in states:
            self._picker.give_back(state)
