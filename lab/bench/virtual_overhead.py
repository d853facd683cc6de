"""``lab/bench/spark_overhead.py --virtual``: two engines on virtual nodes, fed through Spark and fed directly.

    python lab/bench/spark_overhead.py --virtual [--rows 200000] [--repeats 3] [--policy vllm] [--json FILE]

NOTHING IS COMPUTED: the engines run vLLM's real core over GPUs that only take time (docs/guide/rehearsal.md). They need
so little of this machine's cores that Spark does not slow them down by sharing these, as it does without virtual nodes.
So this is the measure of the Spark path itself.

Each turn has two runs over the same rows, each with new engines, the bare run first in every other turn. Bare: two
processes, an ``OfflineEngine`` and half of the rows each, from Parquet to Parquet. Through Spark: the job of
``jobs/annotate.py`` from Parquet to Delta on ``local-cluster[2,4,2048]``, two executors with an engine server each.
Both are judged by the engines' own counters, read once a second:

    tokens_per_s          generated tokens of both engines, from when a tenth of all was made until nine tenths were
    ratio_to_bare_engine  Spark's over bare; one for each turn, and the least of them
    busy                  share of that time in which the engines had a request (their time accounts)
    memory_growth         median resident memory of that time's last third over that of its first, by kind of process
    cpu_ms_per_row        CPU time of the whole run, by kind of process

Bare engines are sent rows as far as they have room, as a server sends them. Under ``--policy pipemax`` each engine has
a few long phases, and the time that is judged begins and ends within one: that ratio tells less.

Answers have 1 to 64 tokens (``short_answers.yaml``), 16 on average. If all had the same length, the requests of an
engine would begin and end in waves, for whole minutes faster or slower by a third, and the ratio would say which engine
had more of either. Steps have at most 256 tokens, at which stock vLLM is fastest.

``STRETCH`` is chosen so that all processes together use little more than half of two cores: through Spark a row costs
them two milliseconds of CPU time, of which the engines' two processes take most, and two nodes at this stretch take
some 550 rows/s. So 200,000 rows take about six minutes, and each run a minute or two more to start.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from lab.bench import virtual_child
from lab.bench.peers.load import REPOSITORY
from lab.bench.virtual_child import CHECKPOINT, MODEL, NODE, engine
from lab.bench.virtual_judge import RUN_VARIABLE, Series, Watch, sustained
from pipemax_spark.executor.engine_environment import ENGINE_PYTHONPATH_VARIABLE

STRETCH = 0.35
EXECUTORS, SLOTS = 2, 4
WORDS = "a package for tools that keep data in small files of old text"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run's figures; see the module."""

    rows: int
    distinct_ids: int
    checksum: int
    """Of all ids with their texts; equal for equal answers."""
    seconds: float
    tokens_per_s: float
    sustained_s: float
    busy: float
    peak_mib: dict[str, float]
    memory_growth: dict[str, float]
    cpu_ms_per_row: dict[str, float]
    load: float
    """Busy cores of the machine, whoever used them."""


def measure(kind: str, directory: Path, arguments: argparse.Namespace) -> Run:
    """Run one kind in ``directory``, which holds the input. Raise ``SystemExit`` if a process fails."""
    run = uuid.uuid4().hex
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "engine")])
    environment = {
        **os.environ,
        RUN_VARIABLE: run,
        "PYTHONPATH": paths,
        ENGINE_PYTHONPATH_VARIABLE: paths,
        "PYSPARK_SUBMIT_ARGS": f"--master local-cluster[{EXECUTORS},{SLOTS},2048] --conf spark.executor.memory=1g "
        "--conf spark.driver.memory=1g --conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=8 "
        # As the job itself sets it where Spark runs within one machine's driver.
        "--conf spark.databricks.delta.snapshotPartitions=4 pyspark-shell",
        "PIPEMAX_LOG_DIR": str(directory / "logs"),
        "SPARK_WORKER_DIR": str(directory / "work"),
    }
    numbers = range(EXECUTORS) if kind == "bare" else range(1)
    watch = Watch(run=run)
    watcher = threading.Thread(target=watch.watch)
    watcher.start()
    before, begin_s = psutil.cpu_times(), time.time()
    given = [virtual_child.__file__, "--child", kind, str(directory), "--policy", arguments.policy]
    given += ["--stretch", str(arguments.stretch), "--commit-every", str(arguments.commit_every)]
    log = (directory / f"{kind}.log").open("a")
    children = [
        subprocess.Popen(
            [sys.executable, *given, "--number", str(number)], env=environment, stdout=log, stderr=log
        )
        for number in numbers
    ]
    try:
        while not all((directory / f"ready-{number}").exists() for number in numbers):
            if kind == "spark" or any(child.poll() for child in children):
                break
            time.sleep(0.1)
        (directory / "go").touch()
        statuses = [child.wait() for child in children]
    finally:
        watch.stopped.set()
        watcher.join()
        for child in children:
            child.kill()
        log.close()
    if any(statuses):
        raise SystemExit(
            f"a process ended with {max(statuses)}:\n{(directory / f'{kind}.log').read_text()[-4000:]}"
        )
    seconds, after = time.time() - begin_s, psutil.cpu_times()
    names = [f"bare-{number}.json" for number in numbers] if kind == "bare" else ["spark.json"]
    outcomes = [json.loads((directory / name).read_text()) for name in names]
    part = sustained([Series(**series) for outcome in outcomes for series in outcome["series"]])
    idle_s = after.idle + after.iowait - before.idle - before.iowait
    return Run(
        **{name: sum(outcome[name] for outcome in outcomes) for name in ("rows", "distinct_ids", "checksum")},
        seconds=round(seconds, 1),
        tokens_per_s=round(part.tokens_per_s, 1),
        sustained_s=round(part.end_s - part.begin_s, 1),
        busy=round(part.busy, 4),
        peak_mib={name: round(max(mib)) for name, mib in watch.mib.items() if max(mib)},
        memory_growth=watch.growth(part),
        cpu_ms_per_row=watch.cpu_ms_per_row(arguments.rows),
        load=round((sum(after) - sum(before) - idle_s) / seconds, 2),
    )


def write_rows(directory: Path, rows: int) -> None:
    """Write the input in a file for each engine; no two rows share more than the template's beginning."""
    (directory / "in").mkdir(parents=True)
    for number in range(EXECUTORS):
        ids = list(range(number, rows, EXECUTORS))
        texts = [f"{row} {' '.join(WORDS.split()[row % 7 :])} {row * row}" for row in ids]
        pq.write_table(pa.table({"id": ids, "text": texts}), directory / "in" / f"part-{number}.parquet")


def report(turns: list[dict[str, Run]], arguments: argparse.Namespace) -> str:
    ratios = [round(turn["spark"].tokens_per_s / turn["bare"].tokens_per_s, 4) for turn in turns]
    facts = {
        "nothing_was_computed": f"virtual node {NODE} as if it ran {MODEL}",
        "ratio_to_bare_engine": min(ratios),
        "ratios": ratios,
        "texts_identical": all(turn["spark"].checksum == turn["bare"].checksum for turn in turns),
        "rows_once": all(
            run.rows == run.distinct_ids == arguments.rows for turn in turns for run in turn.values()
        ),
        "engine": engine(arguments.policy, arguments.stretch) | {"model": CHECKPOINT.name},
        "cores": len(os.sched_getaffinity(0)),
        "turns": [{kind: asdict(run) for kind, run in turn.items()} for turn in turns],
    }
    return json.dumps(facts, indent=1)


def compare(arguments: argparse.Namespace) -> None:
    """Run all turns; print the report, and write it after each turn."""
    turns: list[dict[str, Run]] = []
    for number in range(arguments.repeats):
        turn: dict[str, Run] = {}
        for kind in ("spark", "bare") if number % 2 else ("bare", "spark"):
            with tempfile.TemporaryDirectory() as directory:
                write_rows(Path(directory), arguments.rows)
                turn[kind] = measure(kind, Path(directory), arguments)
        turns.append(turn)
        text = report(turns, arguments)
        if arguments.json:
            arguments.json.write_text(text + "\n")
        print(f"turn {len(turns)}: {json.loads(text)['ratios'][-1]}", flush=True)
    print(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", choices=("vllm", "pipemax"), default="vllm", help="--virtual: the scheduler"
    )
    parser.add_argument(
        "--stretch", type=float, default=STRETCH, help="--virtual: seconds for one of the node"
    )
    parser.add_argument("--commit-every", type=float, default=60.0, help="--virtual: seconds between commits")
