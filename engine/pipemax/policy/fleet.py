"""Models a fleet of nodes that runs one table: start-up, chunks, drain, nodes of unlike speed, lost nodes.

The rules are those of the job: a chunk is cut into partitions, a free task slot takes the oldest one, the next chunk's
partitions follow while the last chunk's rows still run, and a slot is free again when the partition's last row is
done. A node takes in rows at its steady rate, those that it has room for at once, and needs its drain after its last
one. When a node is lost, the rows that were in its engine are computed again, all others are in the spool, and its
partitions go on in any free slot; a replacement is up after the start-up time.

Not in the model: the time Spark takes between tasks, rows that are read from the spool, retried commits, nodes that
change their speed, and nodes that come or go otherwise. Pure; the random draws come from a seed.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, mean

import numpy as np
import numpy.typing as npt

_PARTITIONS_PER_SLOT = 2
_FED_PARTITION = 4.0
_LEAST_PARTITION_ROWS = 64
"""As the job cuts its chunks (``pipemax_spark.slots``)."""
_SHARE_OF_THE_REST = 6
"""While far more rows are left, a chunk of the model has this part of them, which spares events and changes little."""
_DRAWS = 8
"""Of speeds and losses; one is enough where nothing is random."""
_MOST_LOSSES_PER_NODE = 1_000
_FEW_NODES = 64
"""With fewer, the hours of a fleet of unlike nodes depend on their draw more than on their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """How fast one node works through the table's rows."""

    rows_per_s: float
    """In the midst of the table."""
    drain_s: float
    """From the end of the steady rate to the last row."""
    drain_rows: float
    """Rows' worth of work that is done in the drain."""
    held_rows: float
    """Rows that its engines hold at once, which a lost node's successor computes again."""

    def __post_init__(self) -> None:
        if self.rows_per_s <= 0 or min(self.drain_s, self.drain_rows, self.held_rows) < 0:
            raise ValueError(f"a node's rate must be above 0, and nothing of it below: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What is known of the nodes, and of the job apart from its engines."""

    start_up_s: float
    """From the order of a node, or of its replacement, to its engine's first step: model load and calibration too."""
    speed_spread: float = 0.0
    """Coefficient of variation of the nodes' speeds, which are log-normal with mean 1."""
    lost_per_hour: float = 0.0
    """Rate at which one node is lost."""
    commit_every_s: float
    commit_s: float = 10.0
    """From the last row of a chunk to the end of its commit."""
    slots_per_node: int = 4
    """Task slots."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = (self.start_up_s, self.speed_spread, self.lost_per_hour, self.commit_s)
        if min(least) < 0 or self.commit_every_s <= 0 or self.slots_per_node < 1:
            raise ValueError(
                "a fleet's times, spread and rate of lost nodes must not be negative, its commits be some time apart, "
                f"and a node have a slot: {self}"
            )

    @property
    def is_random(self) -> bool:
        return self.speed_spread > 0 or self.lost_per_hour > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """One table on a fleet; means over the draws, unless they say otherwise."""

    nodes: int
    hours: float
    """From the order of the nodes to the last commit."""
    least_hours: float
    """Of the draws."""
    most_hours: float
    """Of the draws."""
    start_up_share: float
    """Of the nodes' hours, from their order to the first step of all."""
    uneven_share: float
    """Of the nodes' hours: the drain, nodes that wait for slower ones, and all that lost nodes cost."""
    lost_nodes: float
    rows_again: float
    """Rows that were in a lost node's engine."""


def run_fleet(
    rows: int, nodes: int, work: NodeWork, settings: FleetSettings, *, losses_s: Sequence[float] = ()
) -> FleetRun:
    """Predict a table's run on ``nodes`` nodes. Raise ``ValueError`` if nodes are lost faster than they get ready.

    ``losses_s`` are times from the order of the nodes at which one more of them is lost, apart from random losses.
    """
    if rows < 1 or nodes < 1:
        raise ValueError(f"a fleet needs at least one row and one node: {rows} and {nodes}")
    if len(losses_s) > nodes:
        raise ValueError(f"{nodes} nodes cannot be lost {len(losses_s)} times: each is lost once at most")
    draws = _DRAWS if settings.is_random else 1
    rng = np.random.default_rng(settings.seed)
    deviates = _deviates(draws * nodes, rng).reshape(draws, nodes)
    runs = [
        _Fleet(rows, work, settings, of_draw, draw_rng, losses_s).run()
        for of_draw, draw_rng in zip(deviates, rng.spawn(draws), strict=True)
    ]
    hours = [run.seconds / 3600 for run in runs]
    used_s = mean(run.seconds for run in runs)
    start_up_share = min(1.0, settings.start_up_s / used_s)
    return FleetRun(
        nodes=nodes,
        hours=used_s / 3600,
        least_hours=min(hours),
        most_hours=max(hours),
        start_up_share=start_up_share,
        uneven_share=max(0.0, 1.0 - start_up_share - rows / (nodes * work.rows_per_s) / used_s),
        lost_nodes=mean(run.lost_nodes for run in runs),
        rows_again=mean(run.rows_again for run in runs),
    )


def fewest_nodes(rows: int, work: NodeWork, settings: FleetSettings, *, within_hours: float) -> FleetRun:
    """Predict the run on the fewest nodes that are done in time in every draw. ``ValueError`` if no number is."""
    most = _useful_nodes(rows, work, settings)
    low, high = 0, max(1, min(most, math.ceil(rows / work.rows_per_s / 3600 / within_hours)))
    while (found := run_fleet(rows, high, work, settings)).most_hours > within_hours:
        if high >= most:
            raise ValueError(
                f"no number of nodes is done in {within_hours:,.2f} hours: {high:,} need {found.most_hours:,.2f}, of "
                f"which start-up is {settings.start_up_s / 3600:,.2f} and the drain {work.drain_s / 3600:,.2f}"
            )
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        run = run_fleet(rows, middle, work, settings)
        if run.most_hours > within_hours:
            low = middle
        else:
            high, found = middle, run
    return found


def most_nodes(
    rows: int, work: NodeWork, settings: FleetSettings, *, price_per_hour: float, budget: float
) -> FleetRun:
    """Predict the run on the most nodes that the budget pays for on average, since more nodes are done sooner.

    Nodes are paid from their order to the last commit. ``ValueError`` if the budget pays for no number of nodes.
    """
    if price_per_hour <= 0:
        raise ValueError("a budget says nothing of nodes that cost nothing: give a --price above 0")
    runs: dict[int, FleetRun] = {}

    def cost(nodes: int) -> float:
        if nodes not in runs:
            runs[nodes] = run_fleet(rows, nodes, work, settings)
        return runs[nodes].hours * nodes * price_per_hour

    most = _useful_nodes(rows, work, settings)
    # One node of unknown speed costs a little more than two of them, so a number that is too dear is not the end.
    numbers = [1]
    while numbers[-1] < most and (cost(numbers[-1]) <= budget or numbers[-1] < _FEW_NODES):
        numbers.append(min(most, 2 * numbers[-1]))
    paid = [nodes for nodes in numbers if cost(nodes) <= budget]
    if not paid:
        cheapest = min(numbers, key=cost)
        raise ValueError(
            f"a budget of {budget:,.0f} is too small: the cheapest fleet has {cheapest} "
            f"node{'s' if cheapest > 1 else ''} and costs {cost(cheapest):,.0f}"
        )
    low = paid[-1]
    high = next((nodes for nodes in numbers if nodes > low), most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if cost(middle) > budget:
            high = middle
        else:
            low = middle
    return runs[low]


def _useful_nodes(rows: int, work: NodeWork, settings: FleetSettings) -> int:
    """Return the number of nodes from which on each has no more rows than are in its drain, or in two partitions."""
    return max(
        1, math.ceil(rows / max(work.drain_rows, _LEAST_PARTITION_ROWS * settings.slots_per_node, 1.0))
    )


def _deviates(count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw standard normal deviates, one in each of ``count`` equal strata, so that few have the right mean."""
    quantiles = (rng.permutation(count) + rng.random(count)) / count
    normal = NormalDist()
    return np.array([normal.inv_cdf(min(max(quantile, 1e-9), 1 - 1e-9)) for quantile in quantiles])


@dataclass(slots=True, kw_only=True, eq=False)
class _Node:
    """One place of the fleet: a node, and its replacements one after the other."""

    rows_per_s: float
    tail_s: float
    up_s: float
    taken_until_s: float | None = None
    """When its engines have taken in all rows that its tasks have brought; None before the first."""
    tasks: list[float] = field(default_factory=list)
    """Rows of those that hold its slots, in the order in which they began."""
    life: int = 0
    losses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    seconds: float
    lost_nodes: int
    rows_again: float


class _Fleet:
    """One draw."""

    def __init__(
        self,
        rows: int,
        work: NodeWork,
        settings: FleetSettings,
        deviates: Iterable[float],
        rng: np.random.Generator,
        losses_s: Iterable[float],
    ) -> None:
        """``deviates`` are those of the first nodes' speeds, one for each node. See ``run_fleet`` for the losses."""
        deviates = list(deviates)
        nodes = len(deviates)
        self._work, self._settings, self._rng = work, settings, rng
        self._left = float(rows)
        self._num_slots = nodes * settings.slots_per_node
        self._fed_rows = math.ceil(_FED_PARTITION * work.held_rows / max(1, settings.slots_per_node - 1))
        self._chunk_rows = max(
            1.0, settings.commit_every_s * nodes * work.rows_per_s, self._num_slots * self._fed_rows
        )
        self._waiting: deque[float] = deque()
        self._num_running = 0
        self._free: deque[tuple[_Node, int]] = deque()
        self._events: list[tuple[float, int, str, _Node, int]] = []
        self._number = 0
        self._lost_nodes, self._rows_again = 0, 0.0
        first_nodes = [_Node(rows_per_s=0.0, tail_s=0.0, up_s=0.0) for _ in deviates]
        for node, deviate in zip(first_nodes, deviates, strict=True):
            self._start(node, 0.0, deviate)
        for node, loss_s in zip(first_nodes, losses_s, strict=False):
            self._at(loss_s, "lost", node)

    def run(self) -> _Draw:
        now_s = 0.0
        while self._left or self._waiting or self._num_running:
            now_s, _, what, node, life = heapq.heappop(self._events)
            if life != node.life:
                continue
            match what:
                case "up":
                    self._free.extend((node, life) for _ in range(self._settings.slots_per_node))
                case "end":
                    node.tasks.pop(0)
                    self._num_running -= 1
                    self._free.append((node, life))
                case "lost":
                    self._lose(node, now_s)
            self._give_slots(now_s)
        return _Draw(
            seconds=now_s + self._settings.commit_s, lost_nodes=self._lost_nodes, rows_again=self._rows_again
        )

    def _start(self, node: _Node, now_s: float, deviate: float) -> None:
        """Order a node for this place, with the speed that the deviate says, and draw when it is lost."""
        variance = math.log(1 + self._settings.speed_spread**2)
        speed = math.exp(math.sqrt(variance) * deviate - variance / 2)
        node.rows_per_s, node.tail_s = self._work.rows_per_s * speed, self._work.drain_s / speed
        node.up_s, node.taken_until_s, node.tasks = now_s + self._settings.start_up_s, None, []
        self._at(node.up_s, "up", node)
        if self._settings.lost_per_hour > 0:
            self._at(now_s + self._rng.exponential(3600 / self._settings.lost_per_hour), "lost", node)

    def _lose(self, node: _Node, now_s: float) -> None:
        self._lost_nodes += 1
        node.losses += 1
        if node.losses > _MOST_LOSSES_PER_NODE:
            raise ValueError(
                f"nodes are lost {self._settings.lost_per_hour:g} times an hour, faster than they get rows done: "
                f"start-up takes {self._settings.start_up_s / 3600:,.2f} hours"
            )
        assigned = sum(node.tasks)
        untaken = min(assigned, max(0.0, ((node.taken_until_s or now_s) - now_s) * node.rows_per_s))
        again = min(self._work.held_rows, assigned - untaken)
        self._rows_again += again
        rest = untaken + again
        for rows in reversed(node.tasks):  # the newest have been taken in last
            if rest > 0:
                self._waiting.appendleft(min(rows, rest))
            rest -= min(rows, rest)
        self._num_running -= len(node.tasks)
        node.life += 1
        self._start(node, now_s, self._rng.standard_normal())

    def _give_slots(self, now_s: float) -> None:
        while self._free:
            if not self._waiting:
                self._cut_chunk()
            if not self._waiting:
                return
            node, life = self._free.popleft()
            if life != node.life:
                continue
            self._num_running += 1
            self._at(self._begin_task(node, self._waiting.popleft(), now_s), "end", node)

    def _begin_task(self, node: _Node, rows: float, now_s: float) -> float:
        """Give a task to a node; return when its last row is done.

        An engine that went without rows has room again for those that it has done since, as an empty one has at first.
        """
        begin_s = now_s - self._work.drain_rows / node.rows_per_s
        if node.taken_until_s is not None:
            begin_s = max(begin_s, node.taken_until_s)
        node.taken_until_s = begin_s + rows / node.rows_per_s
        node.tasks.append(rows)
        return max(node.taken_until_s, now_s) + node.tail_s

    def _cut_chunk(self) -> None:
        """Put the next chunk's partitions in line, if there is one."""
        if not self._left:
            return
        least = self._num_slots * self._fed_rows
        rows = max(self._chunk_rows, self._left / _SHARE_OF_THE_REST)
        is_last = self._left < 1.25 * rows or self._left - rows < least
        rows = self._left if is_last else rows
        self._left -= rows
        most = _PARTITIONS_PER_SLOT * self._num_slots
        if is_last and self._num_slots > self._settings.slots_per_node:
            wanted = most
        elif self._fed_rows:
            wanted = max(self._num_slots, min(most, int(rows // self._fed_rows)))
        else:
            wanted = self._num_slots
        enough = max(1, min(self._num_slots, int(rows)), math.ceil(rows / _LEAST_PARTITION_ROWS))
        partitions = min(wanted, enough)
        self._waiting.extend([rows / partitions] * partitions)

    def _at(self, at_s: float, what: str, node: _Node) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, what, node, node.life))
