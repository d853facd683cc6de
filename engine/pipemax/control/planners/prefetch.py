"""Chooses what is copied host → GPU while a step runs: the prefetch-aware scheduler (PipeMax, §3.3.2, Appendix A.3).

In each iteration, the budget follows from the executing batch's predicted time. Residents of D_j stay. P_t is chosen
from the parked requests: short ones first while the budget still grows, then by GreedySelect towards the executing
batch's time.

With waves, which are not in the paper, room comes from D_i instead of D_k: the copies into a group of a stage's layers
follow the step that computes it, and the next step waits for them before it computes the same group. A batch then
gives up room only once it has run, and holds b = M/n + p·(1 − 1/n) of a pool M, if p is prefetched in a step, instead
of M/n + p·(1 − 2/n); p counts here also the last block of each victim, which the step writes to and which stays for
one step more. The budget is the same: with G groups, the copies of group g can begin once g/G of the step is over, and
must end before (g − 1)/G of the next one is. A step's copies of at most B·T̂ take T̂/G for each group. So from two
groups on they keep up with steps of equal length: the last group's begin when the step ends, and end when the next one
has computed its first group.

Not in the paper: a share of the budget is kept for requests that were parked long ago. Within this share, one request
longer than the whole budget is prefetched over several iterations, with its GPU blocks reserved from the first
iteration. PipeMax, §3.1.2 (C1), spreads a batch over iterations, never one request.
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from pipemax.control.controller_config import ControllerConfig
from pipemax.control.planners.selection import (
    Basket,
    Refinement,
    TimeGap,
    fill_longest_first,
    fill_shortest_first,
)
from pipemax.control.planners.victims import RoomSource, evict_for_room, overwrite_for_room
from pipemax.control.state.batches import Batch, Rotation
from pipemax.control.state.request import RequestState
from pipemax.control.state.table import RequestTable
from pipemax.control.times.stage_estimators import StageEstimators
from pipemax.domain.plan import Prefetch, PrefetchMode
from pipemax.domain.units import RequestId


class SteadyDetector:
    """Detects the steady phase: the budget's relative variation over the last w iterations is below the threshold.

    Source: PipeMax, Appendix A.3.1, which gives no values. Once steady, it stays so until the next switch to decode,
    whereas Algorithm 1 updates the flag in each iteration: the tail of a decode phase, whose budget shrinks with the
    batches, is no second warm-up.
    """

    def __init__(self, window: int, threshold: float) -> None:
        self._window = window
        self._threshold = threshold
        self._budgets: deque[int] = deque(maxlen=window)
        self.is_steady = False

    def observe(self, budget_blocks: int) -> None:
        self._budgets.append(budget_blocks)
        if self.is_steady or len(self._budgets) < self._window:
            return
        spread = max(self._budgets) - min(self._budgets)
        self.is_steady = spread * self._window < self._threshold * sum(self._budgets)

    def reset(self) -> None:
        self._budgets.clear()
        self.is_steady = False


@dataclass(slots=True, kw_only=True)
class PrefetchStep:
    """One step's copies."""

    mode: PrefetchMode = PrefetchMode.NONE
    budget_blocks: int = 0
    gap_s: float = 0.0
    items: list[Prefetch] = field(default_factory=list)
    evicted: list[RequestState] = field(default_factory=list)
    overwritten: list[RequestState] = field(default_factory=list)
    """Evicted in a wave."""

    @property
    def num_blocks(self) -> int:
        return sum(item.num_blocks for item in self.items)


class PrefetchPlanner:
    """Chooses P_t, makes room for it in D_k or in a wave over D_i, and puts it into D_j."""

    def __init__(
        self, config: ControllerConfig, table: RequestTable, rotation: Rotation, times: StageEstimators
    ) -> None:
        self._config = config
        self._table = table
        self._rotation = rotation
        self._times = times
        self._steady = SteadyDetector(config.steady_window, config.steady_threshold)
        self._max_on_gpu = config.max_on_gpu
        self._overdue_credit = 0  # blocks of past budgets that overdue requests may use

    @property
    def is_steady(self) -> bool:
        return self._steady.is_steady

    def initialize(self) -> None:
        """Reset what is kept between iterations. Call at each switch to decode."""
        self._steady.reset()
        self._overdue_credit = 0

    def plan(
        self,
        stage_s: tuple[float, ...],
        *,
        level_s: tuple[float, ...] | None = None,
        running: Collection[RequestId] = (),
    ) -> PrefetchStep:
        """Choose P_t for D_j, to be copied while a step of these predicted stage times runs.

        ``level_s`` are the stage times that D_j's step should come close to; None takes ``stage_s``. ``running`` are
        the decodes of the step, some of which a wave may overwrite.
        """
        level_s = level_s or stage_s
        target = self._rotation.batches[self._rotation.next]
        source = self._source(running)
        step = PrefetchStep(budget_blocks=self.budget(stage_s))
        self._steady.observe(step.budget_blocks)
        slowest = self._times.slowest_decode(level_s)
        step.gap_s = max(level_s) - slowest.seconds(len(target), target.kv_tokens)
        share = self._prefetching_share(step.budget_blocks)
        taken = self._continue_prefetching(step, target, share)
        if not self._table.prefetching() and not taken:
            room = self._basket(target, source, step.budget_blocks).blocks_left
            taken = self._start_prefetching(step, target, share, room)
        basket = self._basket(target, source, step.budget_blocks - taken)
        if not self._table.num_parked or not basket.requests_left:
            return step
        self._add_overdue(basket, step.budget_blocks)
        step.mode = self.select(basket, level_s, step.gap_s)
        self._load(step, basket, target, source)
        return step

    def plan_forced(self) -> PrefetchStep:
        """Prefetch a batch's share when no batch has a resident, although no step hides the copies.

        A request that is already being prefetched comes first, and is completed. Otherwise the longest parked request
        is taken, and short ones with it.
        """
        target = self._rotation.batches[self._rotation.executing]
        step = PrefetchStep(mode=PrefetchMode.FORCED)
        self._continue_prefetching(step, target, self._config.gpu_blocks)
        first = self._table.longest_parked()
        if step.items or first is None:
            return step
        share = self._table.free_gpu_blocks // len(self._rotation)
        basket = self._basket(target, None, max(share, self._table.needs.prefetch_cost(first)))
        if basket.fits(first):
            basket.add(first)
        fill_shortest_first(basket, self._table.parked_picker())
        self._load(step, basket, target, None)
        return step

    def budget(self, stage_s: tuple[float, ...]) -> int:
        """Return how many blocks are copied while a step of these predicted stage times runs."""
        return self._times.budget_blocks(stage_s)

    def _source(self, running: Collection[RequestId]) -> RoomSource | None:
        """Return where P_t finds room; None where nothing is overwritten."""
        batches, rotation = self._rotation.batches, self._rotation
        if self._config.wave_groups is not None:
            return RoomSource(batch=batches[rotation.executing], running=running)
        return RoomSource(batch=batches[rotation.overwritten]) if self._config.overwrites else None

    def _basket(self, target: Batch, source: RoomSource | None, budget_blocks: int) -> Basket:
        """Return an empty basket, limited by the budget, free or overwritable blocks and slots, and the batch size."""
        table = self._table
        blocks, slots = table.free_gpu_blocks, self._max_on_gpu - table.num_on_gpu
        if source is not None:
            blocks, slots = blocks + source.max_blocks, slots + source.max_slots
        return Basket(
            table.needs,
            max_blocks=max(0, min(budget_blocks, blocks)),
            max_requests=max(
                0,
                min(slots, self._config.max_batch_requests - len(target), self._config.max_prefetch_requests),
            ),
        )

    def _add_overdue(self, basket: Basket, budget_blocks: int) -> None:
        """Add the longest parked requests within their share of the budget.

        For a request that costs more, the share is saved up over several iterations.
        """
        share = math.ceil(self._config.overdue_budget_fraction * budget_blocks)
        self._overdue_credit = min(self._overdue_credit + share, budget_blocks)
        for state in self._table.parked_by_age():
            if not self._is_overdue(state):
                self._overdue_credit = 0
                return
            cost = basket.cost(state)
            if cost > self._overdue_credit or not basket.fits(state):
                return
            self._overdue_credit -= cost
            basket.add(state, stays=True)

    def _is_overdue(self, state: RequestState) -> bool:
        return self._table.steps_parked(state) >= self._config.overdue_iterations

    def select(self, basket: Basket, stage_s: tuple[float, ...], gap_s: float) -> PrefetchMode:
        """Fill the basket from the parked requests; return how they were chosen."""
        picker = self._table.parked_picker()
        slowest = self._times.slowest_decode(stage_s)
        target = self._rotation.batches[self._rotation.next]
        gap = TimeGap(
            gap_s=gap_s,
            alpha_s=slowest.alpha_s(len(target)),
            beta_s=slowest.beta_s,
            tolerance_s=self._config.exchange_tolerance * max(stage_s),
        )
        if self._steady.is_steady:
            fill_longest_first(basket, picker)
            Refinement(basket, picker, gap).run(self._config.max_exchanges)
            return PrefetchMode.STEADY
        growth_s = self._config.warm_up_growth * max(stage_s)
        # Idle blocks belong to all batches equally, which grow into them faster than by growth_s per step.
        share = self._table.free_gpu_blocks // len(self._rotation)
        fill_shortest_first(basket, picker, replace(gap, gap_s=gap_s + growth_s), free_blocks=share)
        return PrefetchMode.WARM_UP

    def _load(self, step: PrefetchStep, basket: Basket, target: Batch, source: RoomSource | None) -> None:
        """Evict as much as needed, then prefetch the chosen requests; those without room after all stay parked."""
        if source is not None and source.running is not None:
            step.overwritten += overwrite_for_room(self._table, source, free_blocks=basket.num_blocks)
        elif source is not None:
            self._evict(step, [source.batch], free_blocks=basket.num_blocks, num_new=len(basket))
        for state in basket.by_length.ascending():
            if not self._has_room(state):
                break
            first_block = self._table.needs.first_missing_block(state)
            self._table.prefetch(state, target)
            num_blocks = self._end_block(state) - first_block
            step.items.append(
                Prefetch(
                    request_id=state.id,
                    first_block=first_block,
                    num_blocks=num_blocks,
                    is_first=True,
                    is_last=True,
                )
            )

    def _evict(self, step: PrefetchStep, sources: list[Batch], *, free_blocks: int, num_new: int) -> None:
        step.evicted += evict_for_room(
            self._table,
            sources,
            free_blocks=free_blocks,
            max_on_gpu=self._max_on_gpu - num_new,
            keep={item.request_id for item in step.items},  # with two batches they are in D_k already
        )

    def _has_room(self, state: RequestState) -> bool:
        table = self._table
        return (
            table.needs.prefetch_cost(state) <= table.free_gpu_blocks and table.num_on_gpu < self._max_on_gpu
        )

    # A request longer than the budget.

    def _continue_prefetching(self, step: PrefetchStep, target: Batch, max_blocks: int) -> int:
        """Copy the next part of the request that is being prefetched; return how many blocks that took."""
        state = next(iter(self._table.prefetching()), None)
        return 0 if state is None else self._prefetch_part(step, state, target, max_blocks, is_first=False)

    def _start_prefetching(self, step: PrefetchStep, target: Batch, max_blocks: int, room_blocks: int) -> int:
        """Reserve GPU blocks for a request longer than the budget, and copy its first part; return the blocks copied.

        This is the longest parked request, once it is overdue or when no parked request fits. ``room_blocks`` is the
        maximum that one iteration can prefetch, by the budget and by the room that can be made.
        """
        state = self._table.longest_parked()
        shortest = self._table.shortest_parked()
        if self._table.prefetching() or state is None or shortest is None or max_blocks == 0:
            return 0
        cost = self._table.needs.prefetch_cost(state)
        nothing_fits = self._table.needs.prefetch_cost(shortest) > room_blocks
        if cost <= room_blocks or not (self._is_overdue(state) or nothing_fits):
            return 0
        executing = self._rotation.batches[self._rotation.executing]
        sources = [
            batch for batch in self._rotation.behind() if batch is not target and batch is not executing
        ]
        if not sources and self._config.overwrites and self._is_overdue(state):
            sources = [target]  # with two batches only D_j can make room: its members lose turns, for once
        # Each member holds its blocks, less one of each table at most: the room is certain before anyone is evicted.
        certain = sum(batch.own_blocks - len(batch) * self._config.kv_groups.count for batch in sources)
        if cost > self._table.free_gpu_blocks + certain:
            return 0
        self._evict(step, sources, free_blocks=cost, num_new=1)
        if not self._has_room(state):
            return 0
        self._table.start_prefetching(state)
        return self._prefetch_part(step, state, target, max_blocks, is_first=True)

    def _prefetch_part(
        self, step: PrefetchStep, state: RequestState, target: Batch, max_blocks: int, *, is_first: bool
    ) -> int:
        first_block, end_block = state.prefetched_blocks, self._end_block(state)
        num_blocks = min(max_blocks, end_block - first_block)
        is_last = first_block + num_blocks == end_block
        if is_last and len(target) >= self._config.max_batch_requests:
            num_blocks, is_last = num_blocks - 1, False
        if num_blocks <= 0 and not is_first:
            return 0
        step.items.append(
            Prefetch(
                request_id=state.id,
                first_block=first_block,
                num_blocks=num_blocks,
                is_first=is_first,
                is_last=is_last,
            )
        )
        if is_last:
            self._table.finish_prefetching(state, target)
        else:
            self._table.prefetch_part(state, num_blocks)
        return num_blocks

    def _prefetching_share(self, budget_blocks: int) -> int:
        """Return the blocks for a prefetch over several iterations: the whole budget if no other request is parked."""
        if not self._table.num_parked:
            return budget_blocks
        return math.ceil(budget_blocks * self._config.overdue_budget_fraction)

    def _end_block(self, state: RequestState) -> int:
        """Return the end of a request's KV, in blocks of its replica."""
        return state.num_shared_blocks + self._table.needs.own_blocks(state, state.computed_tokens)
