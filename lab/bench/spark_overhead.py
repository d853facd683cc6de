"""Measure the Spark path's tokens per second over the bare engine's: the demo model, the same rows and settings.

    python lab/bench/spark_overhead.py [--json FILE] [--repeats 8] [--rows 8000] [--lengths skewed] [--engine-cores 1]
                                       [--niceness 10]

The prompts, their output lengths and the engine's settings are those of ``lab.bench.peers``. Both engines are started
and warmed up first, which is reported separately, and stay. Then there are turns of two runs each, with the bare
engine's run first in every other turn, so that whatever else the machine does affects both. One run sends all rows
through ``OfflineEngine``, from Parquet files to a Parquet file; the other sends the same files through ``annotate()``
over two slots to a Delta table. Each comes after a run of a few rows of its own kind, which is not counted.
``ratio_to_bare_engine`` is the median of the turns' ratios, ``ratios`` are all of them. No two runs of Spark's share a
request, or the engine server would answer the second one from its cache; a turn whose rows were not computed, by the
engines' own counts, ends the command (``lab.bench.overhead_turns``).

On a GPU node the engine does not compute on the cores that Spark runs on. On a CPU it does, and then Spark's own work
slows the engine down whatever the path does. So in both runs the engine's compute threads have ``--engine-cores``
cores, one by default, and vLLM's own processes go first: everything else (JVM, Python, the thread that tokenizes) is
nicer by ``--niceness``. With ``--niceness 0`` all compete alike, and with ``--engine-cores 0`` the engine computes on
all cores: the ratio then counts Spark's CPU time against the path.
"""

import argparse
import json
import os
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from lab.bench.overhead_turns import Run, Turn, check_turn, tokens_computed_below
from lab.bench.peers.engines import pipemax_requests
from lab.bench.peers.load import LENGTHS, Load, write_model, write_table
from lab.bench.peers.on_spark import annotated
from pipemax.api import Completion, GenerationRequest, OfflineEngine
from pipemax.config import EngineConfig
from pipemax_spark.spark.session import get_session

WARM_UP_ROWS = 64
MOST_ROWS_AHEAD, ROWS_AT_ONCE = 2_048, 256
SLOTS = 2
RUN_VARIABLE = "LC_SPARK_OVERHEAD_RUN"
"""Set in the environment of every process that a run of this command starts, and of no other. An engine server inherits
variables that begin with ``LC_``."""
PAUSE_S = 2.0
"""Pause before each run: a worker of vLLM spins for a second after its last step."""


@dataclass(frozen=True, kw_only=True)
class Starts:
    """The times before the turns."""

    bare_s: float
    spark_s: float
    """Seconds until the warm-up's rows were there: Spark, checks and engine."""
    fixed_cost_s: float
    """How much longer a job over only the warm-up's rows takes than the bare engine, both warm: planning, tasks,
    Delta's commit. This part of every Spark run does not grow with the table."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Rates count output tokens."""

    ratio_to_bare_engine: float
    ratios: list[float]
    bare_tokens_per_s: list[float]
    spark_tokens_per_s: list[float]
    bare_seconds: list[float]
    spark_seconds: list[float]
    bare_busy_cpu_s: list[float]
    spark_busy_cpu_s: list[float]
    lengths: str
    rows: int
    tokens: int
    starts: Starts
    texts_identical: bool
    cores: int
    engine_cores: str
    """The cores to which vLLM was told to bind its compute threads."""
    niceness: int
    """The niceness of all other processes, in both runs."""
    load_average: tuple[float, float, float]
    """The machine's load average when the last run had ended."""


def split(load: Load, directory: Path) -> None:
    """Write the load's table into a file for each of Spark's slots."""
    table = pq.read_table(load.table)
    directory.mkdir()
    rows_per_file = -(-table.num_rows // SLOTS)
    for number in range(SLOTS):
        pq.write_table(
            table.slice(number * rows_per_file, rows_per_file), directory / f"part-{number}.parquet"
        )


def generate(engine: OfflineEngine, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
    """Run all requests, with at most ``MOST_ROWS_AHEAD`` in the engine at a time.

    If all were submitted at once, all would be tokenized first, and the whole run would take longer.
    """
    submitted = ended = 0
    while ended < len(requests):
        while submitted < len(requests) and submitted - ended < MOST_ROWS_AHEAD:
            following = requests[submitted : submitted + ROWS_AT_ONCE]
            engine.submit(following)
            submitted += len(following)
        completions = engine.poll(timeout_s=1.0)
        ended += len(completions)
        yield from completions


def run_bare(engine: OfflineEngine, table: Path, output: Path, limit: int | None = None) -> Run:
    begin_s = time.perf_counter()
    rows = pq.read_table(table).slice(0, limit).to_pylist()
    completions = list(generate(engine, pipemax_requests(rows)))
    texts = [done.text for done in completions]
    pq.write_table(pa.table({"text": texts}), output)
    seconds = time.perf_counter() - begin_s
    return Run(
        seconds=seconds, tokens=sum(done.completion_tokens for done in completions), texts=Counter(texts)
    )


def run_spark(
    load: Load, frame: Any, output: Path, seeds: Iterator[int], engine_python: str | None = None
) -> Run:
    begin_s = time.perf_counter()
    answers = annotated(load, frame, seed=next(seeds), engine_python=engine_python)
    answers.write.format("delta").mode("overwrite").save(str(output))
    seconds = time.perf_counter() - begin_s
    written = frame.sparkSession.read.format("delta").load(str(output))
    rows = written.select("annotation.text", "annotation.completion_tokens").collect()
    return Run(
        seconds=seconds,
        tokens=sum(row["completion_tokens"] for row in rows),
        texts=Counter(row["text"] for row in rows),
    )


def let_engines_go_first(niceness: int) -> None:
    """Make all processes of this command nicer, except vLLM's; what they start later inherits that."""
    for process in psutil.process_iter():
        try:
            is_own = (
                process.pid == os.getpid() or process.environ().get(RUN_VARIABLE) == os.environ[RUN_VARIABLE]
            )
            if is_own and not process.name().startswith("VLLM::"):
                for thread in process.threads():
                    before = os.getpriority(os.PRIO_PROCESS, thread.id)
                    os.setpriority(os.PRIO_PROCESS, thread.id, before + niceness)
        except (psutil.Error, ProcessLookupError):  # the process has ended, or is another user's
            continue


def warm(few: Callable[[], Run], run: Callable[[], Run], computed_tokens: Callable[[], int]) -> Run:
    """Do a run after a short one of the same kind and a pause.

    Return it with the CPU time that the machine spent, and the output tokens that its engine counted.

    While the other engine has its turn, Spark ends its idle Python workers, and the next run would pay for that.
    """
    few()
    time.sleep(PAUSE_S)
    tokens_before, before = computed_tokens(), psutil.cpu_times()
    done = run()
    after = psutil.cpu_times()
    busy_s = sum(after) - sum(before) - (after.idle - before.idle) - (after.iowait - before.iowait)
    return replace(done, busy_cpu_s=busy_s, computed_tokens=computed_tokens() - tokens_before)


@contextmanager
def spark_session(directory: Path) -> Iterator[Any]:
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--master local[{SLOTS}] pyspark-shell"
    spark = get_session("spark overhead", log_dir=directory / "logs")
    try:
        yield spark
    finally:
        spark.stop()


def turns(load: Load, niceness: int) -> Iterator[tuple[Starts, Turn]]:
    """Yield each turn as it ends, with the times before the turns."""
    directory = Path(load.directory)
    table = directory / "in"
    write_model(load)
    write_table(load)
    split(load, table)
    begin_s = time.perf_counter()
    with OfflineEngine(EngineConfig.parse(load.pipemax_engine())) as engine:
        bare = partial(run_bare, engine, table, directory / "bare.parquet")
        few_bare = partial(bare, WARM_UP_ROWS)
        warm_bare = partial(warm, few_bare, bare, lambda: int(engine.stats().metrics["output_tokens"]))
        few_bare()
        bare_start_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        with spark_session(directory) as spark:
            frame = spark.read.parquet(str(table))
            seeds = count(1)
            on_spark = partial(run_spark, load, frame, directory / "out", seeds)
            few_on_spark = partial(run_spark, load, frame.limit(WARM_UP_ROWS), directory / "few", seeds)
            jvm_pid = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
            warm_on_spark = partial(warm, few_on_spark, on_spark, partial(tokens_computed_below, jvm_pid))
            few_on_spark()
            spark_start_s = time.perf_counter() - begin_s
            let_engines_go_first(niceness)
            fixed_cost_s = median(few_on_spark().seconds - few_bare().seconds for _ in range(3))
            starts = Starts(bare_s=bare_start_s, spark_s=spark_start_s, fixed_cost_s=fixed_cost_s)
            for number in range(load.repeats):
                if number % 2:
                    spark_run, bare_run = warm_on_spark(), warm_bare()
                else:
                    bare_run, spark_run = warm_bare(), warm_on_spark()
                turn = Turn(bare=bare_run, spark=spark_run)
                check_turn(turn)
                yield starts, turn


def summarize(load: Load, starts: Starts, niceness: int, turns_so_far: list[Turn]) -> Result:
    bare, spark = [turn.bare for turn in turns_so_far], [turn.spark for turn in turns_so_far]
    return Result(
        ratio_to_bare_engine=round(median(turn.ratio for turn in turns_so_far), 4),
        ratios=[round(turn.ratio, 4) for turn in turns_so_far],
        bare_tokens_per_s=[round(run.tokens_per_s, 1) for run in bare],
        spark_tokens_per_s=[round(run.tokens_per_s, 1) for run in spark],
        bare_seconds=[round(run.seconds, 2) for run in bare],
        spark_seconds=[round(run.seconds, 2) for run in spark],
        bare_busy_cpu_s=[round(run.busy_cpu_s, 1) for run in bare],
        spark_busy_cpu_s=[round(run.busy_cpu_s, 1) for run in spark],
        lengths=load.lengths,
        rows=load.rows,
        tokens=bare[0].tokens,
        starts=starts,
        texts_identical=all(turn.bare.texts == turn.spark.texts for turn in turns_so_far),
        cores=len(load.cores),
        engine_cores=os.environ["VLLM_CPU_OMP_THREADS_BIND"],
        niceness=niceness,
        load_average=os.getloadavg(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result here, too, after each turn")
    parser.add_argument("--repeats", type=int, default=8, help="turns, of two runs each")
    parser.add_argument("--rows", type=int, default=8_000)
    parser.add_argument("--lengths", choices=LENGTHS, default="skewed", help="of the answers")
    parser.add_argument("--engine-cores", type=int, default=1, help="that either engine computes on; 0: all")
    parser.add_argument("--niceness", type=int, default=10, help="of everything but vLLM's processes")
    arguments = parser.parse_args()
    niceness = arguments.niceness
    os.environ[RUN_VARIABLE] = uuid.uuid4().hex
    cores = tuple(sorted(os.sched_getaffinity(0)))
    # Both engines take these from here, Spark's by way of the JVM and the task.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores[: arguments.engine_cores or None]))
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    done: list[Turn] = []
    with tempfile.TemporaryDirectory() as directory:
        load = Load(
            directory=directory,
            rows=arguments.rows,
            lengths=arguments.lengths,
            repeats=arguments.repeats,
            cores=cores,
        )
        for starts, turn in turns(load, niceness):
            done.append(turn)
            report = json.dumps(asdict(summarize(load, starts, niceness, done)), indent=1)
            if arguments.json:
                arguments.json.write_text(report + "\n")
            print(f"turn {len(done)}: {turn.bare.seconds:.1f} s, {turn.spark.seconds:.1f} s", flush=True)
    print(report)


if __name__ == "__main__":
    main()
