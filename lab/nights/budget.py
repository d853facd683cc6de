"""Simulate nights that end at a limit, and check how far they run over it and how much of it stays unused.

    python -m lab.nights.budget [--nights 500] [--seed 0] [--json FILE]

No Spark and no engine: an event-level model drives the job's own decisions: how many rows fit (``rows.budget``), when
a chunk is submitted (``rows.turns``), how many rows it has (``ChunkPlan``) and how many partitions (``Slots``). Each
night has a table, a cluster and a limit of its own, drawn from its seed: rows become up to three times as long or as
short, at once or bit by bit; an engine is lost, with or without a successor, and what its tasks had not completed is
done again; executors come late; a quarter of the nights is limited in tokens; half of them know the rate of an earlier
run, which is up to 30 % wrong. A task takes its rows in one after the other; a row ends as long after that as the
engine takes to take in all the rows that it has room for, and a task's last row up to three times as late.

At the limit, the running tasks are cancelled: that takes ``CANCEL_S``, and a commit that has begun is waited for. The
command fails if a night runs over its limit by more than 2 % of it and by more than a minute of its cluster.
"""

import argparse
import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from lab.nights.chunks import SUBMIT_S, InFlight
from pipemax_spark.errors import EndedBy
from pipemax_spark.rows.budget import Interval, Limit, Pace, Prior, Sample, forecast, most_rows, reached
from pipemax_spark.rows.chunks import ChunkPlan, number_of_slices
from pipemax_spark.rows.turns import may_submit
from pipemax_spark.spark.slots import Slots

ROWS_PER_S, ENGINE_ROWS, SLOTS = 10.0, 500, 4
COMMIT_EVERY_S = 900.0
CANCEL_S, COMMIT_S, START_S = (2.0, 15.0), (5.0, 30.0), (60.0, 300.0)
"""The time of a cancelled job's end, of a commit, and of an engine's start, in seconds: from, to."""
LOOK_S = 5.0
"""The job looks every second."""
TOKENS = 300.0
"""Of a row, before the lengths drift."""
ALLOWED_SHARE, ALLOWED_S = 0.02, 60.0


@dataclass(slots=True, eq=False)
class Engine:
    """One node's engine."""

    taken_until_s: float = 0.0
    is_lost: bool = False


@dataclass(slots=True, eq=False)
class Task:
    """A task that runs: its engine takes its rows in from ``begin_s`` on."""

    chunk: InFlight
    engine: Engine
    rows: float
    begin_s: float
    rows_per_s: float
    is_over: bool = False

    def done(self, now_s: float) -> float:
        """Return how many of the rows are done."""
        taken_s = now_s - self.begin_s - ENGINE_ROWS / self.rows_per_s
        return min(self.rows, max(0.0, taken_s * self.rows_per_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a night ended."""

    seed: int
    ended_by: str
    limit: float
    """Seconds or tokens."""
    used: float
    """Of the limit, in the same unit, until the last job has ended."""
    allowed: float
    """What the night may use beyond the limit."""
    committed_share: float
    """Of the rows that were done; the others wait for the next run in their tasks' files."""
    warned_at: float | None
    """The share of the limit after which the forecast said that the table will not fit; None if it did not."""

    @property
    def over(self) -> float:
        return max(0.0, self.used - self.limit)

    @property
    def unused_share(self) -> float:
        return max(0.0, 1 - self.used / self.limit)


class Night:
    """One run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random = Random(seed)
        self._num_engines = random.choice([1, 2, 4, 8, 16, 32])
        self._limit_s = math.exp(random.uniform(math.log(900.0), math.log(36_000.0)))
        self._drift_to = 3 ** random.uniform(-1, 1)
        self._drift_from_s = random.uniform(0.0, 1.0) * self._limit_s
        self._drifts_at_once = random.random() < 0.5
        full_rate = self._num_engines * ROWS_PER_S
        rows = int(self._limit_s * full_rate * math.exp(random.uniform(math.log(0.3), math.log(10.0))))
        self._slots = Slots(total=self._num_engines * SLOTS, per_executor=SLOTS)
        slices = number_of_slices(rows, self._slots.total)
        slice_rows = [rows * (i + 1) // slices - rows * i // slices for i in range(slices)]
        commit_every_s = min(COMMIT_EVERY_S, self._limit_s / 8)
        self._plan = ChunkPlan(slice_rows=slice_rows, slots=self._slots.total, commit_every_s=commit_every_s)
        self._limit = Limit(ended_by=EndedBy.MAX_HOURS, text="max-hours", seconds=self._limit_s)
        prior_rate = None
        if random.random() < 0.5:
            known = full_rate * random.uniform(0.7, 1.3)
            prior_rate = Interval(low=0.95 * known, middle=known, high=1.05 * known)
        if random.random() < 0.25:
            tokens = int(self._limit_s * full_rate * TOKENS)
            self._limit = Limit(ended_by=EndedBy.MAX_TOKENS_TOTAL, text="max-tokens-total", tokens=tokens)
        self._prior = Prior(
            rows_per_s=prior_rate, tokens_per_row=Interval(low=100.0, middle=400.0, high=600.0)
        )
        self._pace = Pace()
        self._in_flight: deque[InFlight] = deque()
        self._places: dict[int, int] = {}
        self._tasks: set[Task] = set()
        self._free: list[Engine] = []
        self._redone: deque[tuple[InFlight, float]] = deque()
        self._events: list[tuple[float, int, str, InFlight | None, Task | Engine | None]] = []
        self._numbers = itertools.count()
        self._ended_rows = self._ended_tokens = 0.0
        self._committed_rows = 0
        self._warned_at: float | None = None

    def run(self) -> Outcome:
        random = self._random
        for _ in range(self._num_engines):
            late_s = random.uniform(0.0, 0.3) * self._limit_s if random.random() < 0.2 else 0.0
            self._at(late_s + random.uniform(*START_S), "join", None, Engine())
        if random.random() < 0.5:
            self._at(random.random() * self._limit_s, "lose")
        self._at(0.0, "look")
        committing_until_s = now_s = 0.0
        while self._events:
            now_s, _, what, chunk, other = heapq.heappop(self._events)
            if what == "look":
                self._pace.add(self._sample(now_s))
                if reached([self._limit], self._pace.last):
                    now_s = max(now_s + random.uniform(*CANCEL_S), committing_until_s)
                    return self._outcome(now_s, self._limit.ended_by)
                if not self._submit(now_s):
                    break
                self._at(now_s + LOOK_S, "look")
            elif what == "committed":
                assert chunk is not None
                self._in_flight.remove(chunk)
                self._committed_rows += chunk.chunk.rows
                self._pace.commit(now_s, self._places[chunk.chunk.number])
            elif self._step(now_s, what, chunk, other):
                committed_s = now_s + random.uniform(*COMMIT_S)
                committing_until_s = max(committing_until_s, committed_s)
                self._at(committed_s, "committed", chunk)
        is_done = self._plan.is_used_up
        return self._outcome(now_s, EndedBy.DONE if is_done else self._limit.ended_by)

    def _step(self, now_s: float, what: str, chunk: InFlight | None, other: Task | Engine | None) -> bool:
        """Let something happen to engines and tasks; return True if it was the end of the chunk's last task."""
        match what:
            case "begin":
                assert chunk is not None
                chunk.waiting = chunk.partitions
            case "join":
                assert isinstance(other, Engine)
                other.taken_until_s = now_s
                self._free += [other] * SLOTS
            case "lose":
                self._lose(now_s)
            case _:
                assert isinstance(other, Task)
                return not other.is_over and self._end(other, now_s)
        self._give_slots(now_s)
        return False

    def _submit(self, now_s: float) -> bool:
        """Submit a chunk if one may begin; return False if none will any more."""
        outlook = forecast([self._limit], self._pace, self._prior)
        is_known = outlook is not None and self._pace.last.rows > 0
        if self._warned_at is None and is_known and outlook.rows.high < self._plan.rows:
            self._warned_at = now_s / self._limit_s
        is_room_known = self._ended_rows > 0 or bool(self._tasks)
        if not may_submit([chunk.tasks for chunk in self._in_flight], is_room_known=is_room_known):
            return True
        rate = self._pace.rows_per_s()
        fed_rows = self._slots.fed_partition_rows(ENGINE_ROWS) or 0
        chunk = self._plan.next(
            None if rate is None else rate.middle,
            at_least=self._slots.total * fed_rows,
            at_most=most_rows([self._limit], self._pace, self._prior),
        )
        if chunk is None:
            return bool(self._in_flight)
        partitions = self._slots.partitions_for(
            chunk.rows, engine_rows=ENGINE_ROWS, is_last=self._plan.is_used_up
        )
        self._places[chunk.number] = self._pace.begin(chunk.rows)
        self._in_flight.append(InFlight(chunk, partitions))
        self._at(now_s + SUBMIT_S, "begin", self._in_flight[-1])
        return True

    def _give_slots(self, now_s: float) -> None:
        while self._free and self._redone:
            self._begin(*self._redone.popleft(), now_s)
        for chunk in self._in_flight:
            while chunk.waiting and self._free:
                chunk.waiting -= 1
                chunk.running += 1
                self._begin(chunk, chunk.chunk.rows / chunk.partitions, now_s)

    def _begin(self, chunk: InFlight, rows: float, now_s: float) -> None:
        place = self._random.randrange(len(self._free))
        self._free[place], self._free[-1] = self._free[-1], self._free[place]
        engine = self._free.pop()
        begin_s = max(now_s, engine.taken_until_s)
        rate = ROWS_PER_S / self._length(begin_s) * math.exp(self._random.gauss(0.0, 0.08))
        task = Task(chunk=chunk, engine=engine, rows=rows, begin_s=begin_s, rows_per_s=rate)
        self._tasks.add(task)
        engine.taken_until_s = begin_s + rows / rate
        last_s = ENGINE_ROWS / rate * self._random.uniform(1.2, 3.0)
        self._at(engine.taken_until_s + last_s, "end", chunk, task)

    def _end(self, task: Task, now_s: float) -> bool:
        self._stop(task, task.rows)
        task.chunk.running -= 1
        task.chunk.completed += 1
        self._free.append(task.engine)
        self._give_slots(now_s)
        return task.chunk.completed == task.chunk.partitions

    def _lose(self, now_s: float) -> None:
        engines = {task.engine for task in self._tasks} | set(self._free)
        if len(engines) < 2:
            return
        lost = self._random.choice(sorted(engines, key=lambda engine: engine.taken_until_s))
        self._free = [engine for engine in self._free if engine is not lost]
        for task in sorted(self._tasks, key=lambda task: task.begin_s):
            if task.engine is lost:
                done = task.done(now_s)
                self._stop(task, done)
                self._redone.append((task.chunk, task.rows - done))
        if self._random.random() < 0.5:
            self._at(now_s + self._random.uniform(60.0, 900.0), "join", None, Engine())

    def _stop(self, task: Task, rows: float) -> None:
        task.is_over = True
        self._tasks.remove(task)
        self._ended_rows += rows
        self._ended_tokens += rows * TOKENS * self._length(task.begin_s)

    def _length(self, now_s: float) -> float:
        """Return the rows' length, as a multiple of that of the first ones."""
        if now_s < self._drift_from_s:
            return 1.0
        if self._drifts_at_once:
            return self._drift_to
        return self._drift_to ** min(
            1.0, (now_s - self._drift_from_s) / max(1.0, self._limit_s - self._drift_from_s)
        )

    def _sample(self, now_s: float) -> Sample:
        rows, tokens = self._ended_rows, self._ended_tokens
        for task in self._tasks:
            done = task.done(now_s)
            rows += done
            tokens += done * TOKENS * self._length(task.begin_s)
        return Sample(seconds=now_s, rows=int(rows), tokens=int(tokens))

    def _at(
        self, at_s: float, what: str, chunk: InFlight | None = None, other: Task | Engine | None = None
    ) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), what, chunk, other))

    def _outcome(self, now_s: float, ended_by: EndedBy) -> Outcome:
        last = self._pace.last
        if self._limit.tokens is not None:
            # What engines complete until their jobs have ended.
            limit, used = float(self._limit.tokens), float(self._sample(now_s).tokens)
            minute = ALLOWED_S * used / max(1.0, now_s)
        else:
            limit, used, minute = self._limit_s, now_s, ALLOWED_S
        return Outcome(
            seed=self._seed,
            ended_by=str(ended_by),
            limit=limit,
            used=used,
            allowed=max(ALLOWED_SHARE * limit, minute),
            committed_share=self._committed_rows / max(1, last.rows),
            warned_at=self._warned_at,
        )


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(seeds: Sequence[int]) -> list[Outcome]:
    """Run the nights, print their figures, and check that none runs over by more than it may."""
    nights = [Night(seed).run() for seed in seeds]
    ended = [night for night in nights if night.ended_by != EndedBy.DONE]
    print(f"{len(nights)} nights, {len(ended)} of them ended by their limit, the others did their table")
    for name, values in {
        "over the limit": [night.over / night.limit for night in ended],
        "over, of what is allowed": [night.over / night.allowed for night in ended],
        "unused": [night.unused_share for night in ended],
        "done rows that are committed": [night.committed_share for night in ended],
    }.items():
        shares = ", ".join(f"{quantile(values, q):.2%}" for q in (0.0, 0.05, 0.5, 0.95, 1.0))
        print(f"{name}: {shares} (least, 5 %, median, 95 %, most)")
    warned = [night.warned_at for night in ended if night.warned_at is not None]
    of_done = sum(night.warned_at is not None for night in nights if night.ended_by == EndedBy.DONE)
    if warned:
        print(
            f"warned: {len(warned)} of {len(ended)} that did not fit, in the median after {quantile(warned, 0.5):.1%} "
            f"of the limit; and {of_done} of {len(nights) - len(ended)} that did"
        )
    too_far = [night for night in ended if night.over > night.allowed]
    assert not too_far, f"over by more than allowed: {too_far}"
    return nights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nights", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first night; each has the next one")
    parser.add_argument("--json", type=Path, help="write each night's figures here, too")
    args = parser.parse_args()
    nights = measure(range(args.seed, args.seed + args.nights))
    if args.json:
        args.json.write_text(json.dumps([asdict(night) for night in nights], indent=1) + "\n")


if __name__ == "__main__":
    main()
