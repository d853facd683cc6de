"""Model the engine time that a slow node costs the other nodes, by the number of chunks that may be in flight.

    python lab/nights/chunks.py [--nodes 200] [--slow-nodes 1] [--slow-by 10] [--slots 4] [--hours 24]
        [--json FILE]

No Spark and no engine: an event-level model drives the job's own decisions, when a chunk is submitted
(``pipemax_spark.rows.turns``), how many rows it has (``ChunkPlan``) and how many partitions (``Slots``). Nodes, tasks
and commits are made up: a node's engine takes in the rows of its tasks at a fixed rate, one task after the other; a
task keeps its slot until the last row that was taken in has ended, which takes as long as the engine takes to take in
all the rows that it has room for. Free slots get the tasks of the oldest chunk, in random order of the slots.

An engine's time is lost while it could take in rows and has none. It counts from the first row to the moment at which
the last chunk is submitted: the table's end is another matter. The share is over all nodes but the slow ones.
"""

import argparse
import heapq
import itertools
import json
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from pipemax_spark.rows.chunks import Chunk, ChunkPlan, number_of_slices
from pipemax_spark.rows.turns import may_submit
from pipemax_spark.spark.jobs import ChunkTasks
from pipemax_spark.spark.slots import Slots

ROWS_PER_S = 10.0
ENGINE_ROWS = 500
COMMIT_EVERY_S = 900.0
SUBMIT_S, COMMIT_S = 10.0, 10.0
"""From the decision to a chunk's first task (Spark plans it and shuffles its rows), and from its last task to the end
of its commit."""
POLL_S = 1.0


@dataclass(slots=True)
class Node:
    """One engine."""

    rows_per_s: float
    taken_until_s: float | None = None
    """When the engine has taken in all rows that its tasks have brought; None before its first task."""
    idle_spans: list[tuple[float, float]] = field(default_factory=list)

    def begin_task(self, rows: float, now_s: float) -> float:
        """Give a task to the node; return when it ends."""
        if self.taken_until_s is not None and self.taken_until_s < now_s:
            self.idle_spans.append((self.taken_until_s, now_s))
        begin_s = max(now_s, self.taken_until_s or 0.0)
        self.taken_until_s = begin_s + rows / self.rows_per_s
        return self.taken_until_s + ENGINE_ROWS / self.rows_per_s


@dataclass(slots=True)
class InFlight:
    """A chunk from its submission to its commit."""

    chunk: Chunk
    partitions: int
    waiting: int = 0
    running: int = 0
    completed: int = 0

    @property
    def tasks(self) -> ChunkTasks:
        """What Spark tells of the chunk: nothing until a task has begun."""
        if not self.running + self.completed:
            return ChunkTasks()
        return ChunkTasks(total=self.partitions, running=self.running, completed=self.completed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of the model."""

    lost_share: float
    """Of the other nodes' time, until the last chunk is submitted."""
    hours: float
    """Until the last commit."""
    chunks: int
    most_in_flight: int


class Model:
    """One table's run."""

    def __init__(
        self,
        *,
        nodes: int,
        slow_nodes: int,
        slots: int,
        hours: float,
        slow_by: float,
        max_in_flight: int,
        seed: int,
    ) -> None:
        self._random = Random(seed)
        self._slots = Slots(total=nodes * slots, per_executor=slots)
        self._nodes = [Node(ROWS_PER_S) for _ in range(nodes)]
        for node in self._nodes[:slow_nodes]:
            node.rows_per_s /= slow_by
        self._others = self._nodes[slow_nodes:]
        self._free = [node for node in self._nodes for _ in range(slots)]
        rows = int(hours * 3600 * sum(node.rows_per_s for node in self._nodes))
        slices = number_of_slices(rows, self._slots.total)
        slice_rows = [rows * (i + 1) // slices - rows * i // slices for i in range(slices)]
        self._plan = ChunkPlan(slice_rows=slice_rows, slots=self._slots.total, commit_every_s=COMMIT_EVERY_S)
        self._num_slices = slices
        self._max_in_flight = max_in_flight
        self._in_flight: deque[InFlight] = deque()
        self._events: list[tuple[float, int, str, InFlight | None, Node | None]] = []
        self._numbers = itertools.count()
        self._rows_done = 0.0
        self._first_row_s: float | None = None
        self._all_submitted_s: float | None = None
        self._most_in_flight = 0

    def run(self) -> Outcome:
        self._at(0.0, "look")
        now_s = 0.0
        while self._events:
            now_s, _, what, chunk, node = heapq.heappop(self._events)
            match what:
                case "look":
                    self._submit(now_s)
                    if self._all_submitted_s is None:
                        self._at(now_s + POLL_S, "look")
                case "begin":
                    assert chunk is not None
                    chunk.waiting = chunk.partitions
                    self._give_slots(now_s)
                case "end":
                    assert chunk is not None
                    assert node is not None
                    self._end_task(chunk, node, now_s)
                case _:
                    assert chunk is not None
                    self._in_flight.remove(chunk)
        return self._outcome(now_s)

    def _submit(self, now_s: float) -> None:
        if len(self._in_flight) >= self._max_in_flight:
            return
        if not may_submit(
            [chunk.tasks for chunk in self._in_flight], is_room_known=self._first_row_s is not None
        ):
            return
        rate = None
        if self._rows_done and self._first_row_s is not None:
            rate = self._rows_done / (now_s - self._first_row_s)
        fed_rows = self._slots.fed_partition_rows(ENGINE_ROWS) or 0
        chunk = self._plan.next(rate, at_least=self._slots.total * fed_rows)
        if chunk is None:
            self._all_submitted_s = now_s if self._all_submitted_s is None else self._all_submitted_s
            return
        is_last = chunk.end_slice == self._num_slices
        partitions = self._slots.partitions_for(chunk.rows, engine_rows=ENGINE_ROWS, is_last=is_last)
        self._in_flight.append(InFlight(chunk, partitions))
        self._most_in_flight = max(self._most_in_flight, len(self._in_flight))
        self._at(now_s + SUBMIT_S, "begin", self._in_flight[-1])

    def _give_slots(self, now_s: float) -> None:
        for chunk in self._in_flight:
            while chunk.waiting and self._free:
                place = self._random.randrange(len(self._free))
                self._free[place], self._free[-1] = self._free[-1], self._free[place]
                node = self._free.pop()
                chunk.waiting -= 1
                chunk.running += 1
                self._first_row_s = now_s if self._first_row_s is None else self._first_row_s
                ends_s = node.begin_task(chunk.chunk.rows / chunk.partitions, now_s)
                self._at(ends_s, "end", chunk, node)

    def _end_task(self, chunk: InFlight, node: Node, now_s: float) -> None:
        self._free.append(node)
        self._rows_done += chunk.chunk.rows / chunk.partitions
        chunk.running -= 1
        chunk.completed += 1
        if chunk.completed == chunk.partitions:
            self._at(now_s + COMMIT_S, "committed", chunk)
        self._give_slots(now_s)

    def _at(self, at_s: float, what: str, chunk: InFlight | None = None, node: Node | None = None) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), what, chunk, node))

    def _outcome(self, now_s: float) -> Outcome:
        first_s, until_s = self._first_row_s or 0.0, self._all_submitted_s or now_s
        lost_s = 0.0
        for node in self._others:
            taken_until_s = first_s if node.taken_until_s is None else node.taken_until_s
            spans = [*node.idle_spans, (taken_until_s, now_s)]
            lost_s += sum(max(0.0, min(end_s, until_s) - min(begin_s, until_s)) for begin_s, end_s in spans)
        return Outcome(
            lost_share=lost_s / (until_s - first_s) / len(self._others),
            hours=now_s / 3600,
            chunks=len(self._plan.chunks),
            most_in_flight=self._most_in_flight,
        )


def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """Return a row of figures for each node speed and maximum of chunks in flight: medians over the seeds."""
    table = []
    for slow_by, max_in_flight in itertools.product([1.0, args.slow_by], args.in_flight):
        runs = [
            Model(
                nodes=args.nodes,
                slow_nodes=args.slow_nodes,
                slots=args.slots,
                hours=args.hours,
                slow_by=slow_by,
                max_in_flight=max_in_flight,
                seed=seed,
            ).run()
            for seed in range(args.seeds)
        ]
        shares = [run.lost_share for run in runs]
        row = {
            **asdict(runs[0]),
            "slow_by": slow_by,
            "max_in_flight": max_in_flight,
            "lost_share": median(shares),
            "lost_share_least": min(shares),
            "lost_share_most": max(shares),
            "hours": median(run.hours for run in runs),
        }
        table.append(row)
        nodes = f"{args.slow_nodes} of {args.nodes} nodes {slow_by:g} times slower"
        print(
            f"{'all nodes alike' if slow_by == 1 else nodes}, at most {max_in_flight} chunks in flight: "
            f"{row['lost_share']:.1%} lost ({min(shares):.1%} to {max(shares):.1%}), {row['hours']:.1f} h, "
            f"{row['chunks']} chunks, {row['most_in_flight']} in flight"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--slow-nodes", type=int, default=1)
    parser.add_argument("--slots", type=int, default=4, help="task slots of each node")
    parser.add_argument("--hours", type=float, default=24.0, help="of work for all nodes together")
    parser.add_argument("--slow-by", type=float, default=10.0, help="how many times slower a slow node is")
    parser.add_argument(
        "--in-flight", type=int, nargs="+", default=[2, 3, 4, 5, 6, 8], help="maxima to compare"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    table = measure(args)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
