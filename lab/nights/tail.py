"""Model what the end of a table costs, by the order in which rows go to the engines.

    python lab/nights/tail.py [--rows 1000 3000 100000] [--engines 1 4] [--running 64 256]
        [--correlation -0.5 0 0.3 0.6 0.9] [--json FILE]

No Spark and no engine: an event-level model drives the job's own decisions, how many rows a chunk has (``ChunkPlan``),
how many partitions (``Slots``) and in which order the last one goes (``order_of_last_chunk``). Rows, engines and steps
are made up. An engine runs at most ``--running`` rows; a step takes ``STEP_S`` and ``DECODE_S`` for each of them, and a
prompt's tokens ``PREFILL_S`` each when it is admitted. It is sent half as many more, from its partitions one after
the other; a partition holds its slot until its last row has ended. Lengths are log-normal, and the logarithms of a
row's prompt and answer have the correlation.

Rows are dealt, and come within a slice ``shortest`` prompt first, as in the job, ``longest`` first, or in ``any``
order.
With ``known``, the correlation is known before the first chunk is cut. The last chunk is in the order of the
``prompts``, the longest first, whatever is known, or in that of the ``answers``, which nobody knows beforehand. What is
lost is the time beyond that of engines which are full to the end.
"""

import argparse
import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from pipemax_spark.rows.chunks import Chunk, ChunkPlan, RowOrder, number_of_slices, order_of_last_chunk
from pipemax_spark.spark.slots import Slots

STEP_S, DECODE_S, PREFILL_S = 8e-3, 4e-5, 5e-5
SLOTS, COMMIT_EVERY_S = 4, 900.0
MEAN_PROMPT, PROMPT_SIGMA = 400, 0.8
MEAN_OUTPUT, OUTPUT_SIGMA, MAX_OUTPUT = 200, 1.0, 2_000
ORDERS = ("shortest", "any", "longest", "known", "prompts", "answers")
_MIN_OBSERVED = 200
"""Rows that have to end before the engines tell a correlation (``serve.flow.length_relation``)."""


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of a row."""

    prompt: int
    output: int


def window_of(running: int) -> int:
    """Return how many rows an engine is sent that runs so many (``serve.flow.pacing``)."""
    return running + running // 2


def make_rows(count: int, correlation: float, random: Random) -> list[Row]:
    """Return rows whose lengths' logarithms correlate so."""

    def tokens(mean: float, sigma: float, normal: float) -> int:
        return max(1, round(mean * math.exp(sigma * normal - sigma**2 / 2)))

    rows = []
    for _ in range(count):
        prompt, rest = random.gauss(0, 1), random.gauss(0, 1)
        output = correlation * prompt + math.sqrt(1 - correlation**2) * rest
        rows.append(
            Row(
                tokens(MEAN_PROMPT, PROMPT_SIGMA, prompt),
                min(MAX_OUTPUT, tokens(MEAN_OUTPUT, OUTPUT_SIGMA, output)),
            )
        )
    return rows


@dataclass(slots=True)
class Partition:
    """A task's rows."""

    rows: deque[Row]
    not_ended: int


@dataclass(slots=True)
class Engine:
    """One engine and the tasks that feed it."""

    most_running: int
    now_s: float = 0.0
    tokens: float = 0.0
    """Tokens that a row would have which runs since the beginning."""
    running: list[tuple[float, int, Partition]] = field(default_factory=list)
    waiting: deque[tuple[Row, Partition]] = field(default_factory=deque)
    partitions: list[Partition] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def next_end_s(self) -> float:
        """Return when the next row ends."""
        step_s = STEP_S + DECODE_S * len(self.running)
        return self.now_s + (self.running[0][0] - self.tokens) * step_s

    def end_one(self) -> None:
        """Let the next row end."""
        self.now_s = self.next_end_s()
        self.tokens, _, partition = heapq.heappop(self.running)
        partition.not_ended -= 1
        if not partition.not_ended:
            self.partitions.remove(partition)

    def fill(self) -> None:
        """Take in rows of the partitions, and admit those that may run."""
        for partition in self.partitions:
            while partition.rows and len(self.running) + len(self.waiting) < window_of(self.most_running):
                self.waiting.append((partition.rows.popleft(), partition))
        while self.waiting and len(self.running) < self.most_running:
            row, partition = self.waiting.popleft()
            self.now_s += PREFILL_S * row.prompt
            heapq.heappush(self.running, (self.tokens + row.output, next(self.numbers), partition))


class Model:
    """One table's run."""

    def __init__(
        self, *, rows: int, engines: int, running: int, correlation: float, order: str, seed: int
    ) -> None:
        random = Random(seed)
        self._rows = make_rows(rows, correlation, random)
        self._correlation = correlation
        self._running = running
        self._order = order
        self._slots = Slots(total=engines * SLOTS, per_executor=SLOTS)
        num_slices = number_of_slices(rows, self._slots.total)
        self._slices: list[list[Row]] = [[] for _ in range(num_slices)]
        for row in self._rows:
            random.choice(self._slices).append(row)
        sign = {"any": 0, "longest": -1}.get(order, 1)
        for rows_of_slice in self._slices:
            rows_of_slice.sort(key=lambda row: sign * row.prompt)
        slice_rows = [len(rows_of_slice) for rows_of_slice in self._slices]
        self._plan = ChunkPlan(slice_rows=slice_rows, slots=self._slots.total, commit_every_s=COMMIT_EVERY_S)
        self._engines = [Engine(running) for _ in range(engines)]
        self._queue: deque[list[Row]] = deque()
        self._ended = 0

    def run(self) -> float:
        """Return the share of time that the table's end, and its beginning, cost: 0 if all engines were always full."""
        # Spark gives each executor a task, then each a second one.
        for _, engine in itertools.product(range(SLOTS), self._engines):
            self._take_partition(engine)
        for engine in self._engines:
            engine.fill()
        while working := [engine for engine in self._engines if engine.running]:
            engine = min(working, key=Engine.next_end_s)
            engine.end_one()
            self._ended += 1
            self._refill(engine)
        assert self._ended == len(self._rows)
        step_s = (STEP_S + DECODE_S * self._running) / self._running
        ideal_s = sum(row.output * step_s + row.prompt * PREFILL_S for row in self._rows) / len(self._engines)
        return max(engine.now_s for engine in self._engines) / ideal_s - 1

    def _refill(self, engine: Engine) -> None:
        if len(engine.partitions) < SLOTS:
            self._take_partition(engine)
        engine.fill()

    def _take_partition(self, engine: Engine) -> None:
        if rows := self._next_partition(engine.now_s):
            engine.partitions.append(Partition(deque(rows), len(rows)))

    def _next_partition(self, now_s: float) -> list[Row] | None:
        if not self._queue:
            rate = self._ended / now_s if self._ended else None
            fed_rows = self._slots.fed_partition_rows(window_of(self._running)) or 0
            chunk = self._plan.next(rate, at_least=self._slots.total * fed_rows)
            if chunk is None:
                return None
            self._queue.extend(rows for rows in self._partitions_of(chunk) if rows)
        return self._queue.popleft()

    def _partitions_of(self, chunk: Chunk) -> Sequence[list[Row]]:
        is_last = chunk.end_slice == len(self._slices)
        count = self._slots.partitions_for(chunk.rows, engine_rows=window_of(self._running), is_last=is_last)
        chosen = self._slices[chunk.first_slice : chunk.end_slice]
        is_known = self._order == "known" or self._ended >= _MIN_OBSERVED
        known = self._correlation if is_known else None
        order = order_of_last_chunk(has_own_max_tokens=False, length_correlation=known)
        if self._order in ("prompts", "answers"):
            order = RowOrder.LAST_RANK_FIRST
        if not is_last or order is RowOrder.AS_DEALT:
            dealt: list[list[Row]] = [[] for _ in range(count)]
            for place, row in enumerate(itertools.chain.from_iterable(chosen)):
                dealt[place % count].append(row)
            return dealt
        rows = sorted(
            itertools.chain.from_iterable(chosen),
            key=lambda row: row.output if self._order == "answers" else row.prompt,
            reverse=order is RowOrder.LAST_RANK_FIRST,
        )
        # Groups of a partition for each engine, in turn.
        group = math.ceil(len(rows) / max(1, count // len(self._engines)))
        return [
            rows[start : start + group][place :: len(self._engines)]
            for start in range(0, len(rows), group)
            for place in range(len(self._engines))
        ]


def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """Return a row of figures for each table, number of engines and correlation: medians over the seeds."""
    table: list[dict[str, float]] = []
    settings = itertools.product(args.rows, args.engines, args.running, args.correlation)
    for rows, engines, running, correlation in settings:
        setting: dict[str, Any] = {
            "rows": rows,
            "engines": engines,
            "running": running,
            "correlation": correlation,
        }
        figures: dict[str, float] = dict(setting)
        for order in ORDERS:
            lost = [Model(**setting, order=order, seed=seed).run() for seed in range(args.seeds)]
            figures |= {order: median(lost), f"{order}_least": min(lost), f"{order}_most": max(lost)}
        table.append(figures)
        shown = ", ".join(f"{order} {figures[order]:.1%}" for order in ORDERS)
        print(
            f"{rows:,} rows, {engines} engines of {running}, correlation {correlation:g}: lost {shown}",
            flush=True,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 3_000, 100_000])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256], help="rows at once, at most")
    parser.add_argument("--correlation", type=float, nargs="+", default=[-0.5, 0.0, 0.3, 0.6, 0.9])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    table = measure(args)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
