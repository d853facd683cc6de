"""Prepare a job over a table of up to a billion rows on this machine, stage by stage, and go on after a kill.

    python -m lab.bench.preparation DIRECTORY --rows 1000000000 [--memory-gib 24] [--heap-gib 14] [--json FILE]

Five steps, each in a process of its own, which is ended if its process, Spark and Spark's workers together hold more
than ``--memory-gib``:

- ``make``: a Delta table of ids; the prompt is made of the id;
- ``prepare``: the job itself, up to the commit of its first chunk, at which it dies as if it were killed: the ids are
  checked, the output is claimed, and the rows are written in slices;
- ``resume``: the same job again, which takes over what the first had prepared;
- ``fill``: 97 rows of 100 get into the output, as if they had been annotated;
- ``rerun``: the same job again, which must look for the rows that are left.

DIRECTORY keeps what is done, so the same command goes on after a kill: a step that has ended is not repeated, nor are
parts of ``make`` and ``fill`` that are committed, and what becomes of a job's step is the product's own resume. Once
all is done the directory is deleted and ``--json`` gets a line. Rows and bytes are Spark's own counts; memory and disk
are looked at twice a second.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = ("make", "prepare", "resume", "fill", "rerun")
PART_ROWS = 50_000_000
DONE_OF_100 = 97
PERIOD_S = 0.5
PART_NOTE = "lab part "
GIB = 2**30


class PreparedError(RuntimeError):
    """The job has come to its first commit, which ends it."""


@dataclass(slots=True)
class Stages:
    """Seconds, rows and bytes of the stages of one step, none of which is a part of another."""

    spark: Any
    found: list[dict[str, Any]] = field(default_factory=list)

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Have each call of this function be a stage."""
        from tests.spark.spark_work import counted

        is_method_of_class = isinstance(vars(owner)[name], classmethod)
        function = getattr(owner, name)

        @wraps(function)
        def measured(*args: Any, **named: Any) -> Any:
            began_s = time.time()
            with counted(self.spark) as work:
                value = function(*args, **named)
            figures = {
                "rows_read": work.rows_read,
                "rows_shuffled": work.rows_shuffled,
                "bytes_shuffled": work.bytes_shuffled,
            }
            self.found.append({"stage": stage, "began_s": began_s, "ended_s": time.time(), **figures})
            return value

        setattr(owner, name, staticmethod(measured) if is_method_of_class else measured)


def append_parts(spark: Any, path: Path, rows: int, select: Callable[[Any], Any]) -> dict[str, Any]:
    """Append what is selected of this many ids, in parts, but for those that are in the table's history."""
    from pipemax_spark.storage.tables import DeltaTable

    table = DeltaTable(spark, str(path))
    done = {*table.notes(PART_NOTE, since_version=-1)} if table.exists() else set()
    for first in range(0, rows, PART_ROWS):
        note = f"{PART_NOTE}{first}"
        if note in done:
            continue
        part = select(spark.range(first, min(rows, first + PART_ROWS)))
        part.write.format("delta").mode("append").option("userMetadata", note).save(str(path))
    return {"rows": table.read().count(), "bytes_written": size_of(path)}


def make(spark: Any, directory: Path, rows: int) -> dict[str, Any]:
    return append_parts(spark, directory / "in", rows, lambda ids: ids)


def fill(spark: Any, directory: Path, rows: int) -> dict[str, Any]:
    """Annotate 97 of 100 rows, as far as a rerun looks at them."""
    from pipemax_spark.storage.spec_properties import spec_texts
    from pipemax_spark.storage.tables import DeltaTable

    table = DeltaTable(spark, str(directory / "out"))
    [spec_hash] = spec_texts(table.properties())
    kind: Any = table.read().schema["annotation"].dataType
    values = {one.name: f"CAST(NULL AS {one.dataType.simpleString()})" for one in kind.fields}
    values["spec_hash"] = f"'{spec_hash}'"
    fields = ", ".join(f"'{name}', {value}" for name, value in values.items())
    annotation = f"named_struct({fields}) AS annotation"

    def annotated(ids: Any) -> Any:
        return ids.where(f"id % 100 < {DONE_OF_100}").selectExpr("id", annotation)

    return append_parts(spark, directory / "out", rows, annotated)


def prepare(spark: Any, directory: Path, rows: int) -> dict[str, Any]:
    """Run the job up to its first commit."""
    from rich.console import Console

    from pipemax.wire import GenerationSpec
    from pipemax_spark.job import checks
    from pipemax_spark.job.annotation_job import AnnotationJob
    from pipemax_spark.job.preparing import Preparing
    from pipemax_spark.options import JobOptions
    from pipemax_spark.report.terminal import Terminal
    from pipemax_spark.request.prompts import PromptSource
    from pipemax_spark.rows import slicing
    from pipemax_spark.storage.fence import Claim
    from pipemax_spark.storage.tables import DeltaTable, Transaction
    from tests.fakes.engine_python import write_engine_python
    from tests.fakes.settings import fake_config

    class DyingTable(DeltaTable):
        def append(self, rows: Any, transaction: Transaction) -> None:
            if re.match(r"pipemax run \S+ chunk ", transaction.note):
                raise PreparedError
            super().append(rows, transaction)

    options = JobOptions(
        input=str(directory / "in"),
        output=str(directory / "out"),
        source=PromptSource(template="Say {id}"),
        engine=fake_config(),
        generation=GenerationSpec(max_tokens=8),
        engine_python=write_engine_python(directory / "engine-python"),
        id_columns=("id",),
        mlflow_experiment="",
        log_dir=directory / "logs",
    )
    stages, prepared = Stages(spark), []
    whole = Preparing.prepare

    def keep(self: Preparing, *args: Any, **named: Any) -> Any:
        prepared.append(whole(self, *args, **named))
        prepared.append(time.time())
        return prepared[0]

    stages.watch(checks, "check_input_ids", "check ids")
    stages.watch(Preparing, "_find_left", "search")
    stages.watch(Claim, "take", "claim")
    stages.watch(slicing, "frequent_keys", "sample frequent requests")
    stages.watch(slicing, "write_slices", "write slices")
    stages.watch(slicing.Slicing, "read", "count slices")
    Preparing.prepare = keep  # type: ignore[method-assign]
    began_s = time.time()
    job = AnnotationJob(
        spark,
        options,
        Terminal(Console(file=sys.stderr, width=120)),
        table=DyingTable(spark, options.output),
    )
    try:
        job.run()
    except PreparedError:
        rows_left, ended_s = prepared[0].rows.rows, prepared[1]
        return {
            "rows": rows_left,
            "began_s": began_s,
            "ended_s": ended_s,
            "stages": stages.found,
            "bytes_written": sum(size_of(path) for path in (directory / "out" / "_pipemax").glob("*/*/rows")),
        }
    raise SystemExit("the job has ended without a commit of its own")


def size_of(path: Path) -> int:
    """Return the bytes of all files below, as far as they stay."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(folder, name).lstat().st_size
    return total


def run_step(args: argparse.Namespace) -> None:
    """Do one step in this process, and write what it came to."""
    from pipemax_spark.spark.session import get_session

    directory: Path = args.directory
    spark = get_session("preparation", log_dir=directory / "logs")
    began_s = time.time()
    act: Callable[..., dict[str, Any]] = {"make": make, "fill": fill}.get(args.step, prepare)
    found = {"began_s": began_s, "ended_s": time.time(), **act(spark, directory, args.rows)}
    found["ended_s"] = max(found["ended_s"], time.time()) if "stages" not in found else found["ended_s"]
    temporary = directory / f"{args.step}.part"
    temporary.write_text(json.dumps(found))
    temporary.rename(directory / f"{args.step}.json")
    spark.stop()


@dataclass(slots=True)
class Watch:
    """Memory of a process and those that it has started, and disk below a directory, sampled until stopped."""

    process: psutil.Process
    directory: Path
    most_bytes: int
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, memory and disk, in bytes."""
    is_over: bool = False
    stopped: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self.stopped.wait(PERIOD_S):
            try:
                processes = [self.process, *self.process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            memory = 0
            for process in processes:
                try:
                    memory += process.memory_info().rss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.samples.append((time.time(), memory, size_of(self.directory)))
            if memory > self.most_bytes:
                self.is_over = True
                for process in reversed(processes):
                    process.kill()
                return

    def peak(self, began_s: float, ended_s: float) -> dict[str, float | None]:
        """Return the peaks between these times, in GiB; None where nothing was sampled."""
        within = [sample for sample in self.samples if began_s <= sample[0] <= ended_s]
        names = ("memory_gib", "disk_gib")
        return {
            name: round(max(sample[place] for sample in within) / GIB, 2) if within else None
            for place, name in enumerate(names, start=1)
        }


def watched_step(args: argparse.Namespace, step: str) -> dict[str, Any]:
    """Run the step in a process that ends with this one; raise ``SystemExit`` if it fails."""
    directory: Path = args.directory
    local = directory / "spark"
    shutil.rmtree(local, ignore_errors=True)  # what a killed step had shuffled
    local.mkdir(parents=True)
    settings = {
        "spark.driver.memory": f"{args.heap_gib}g",
        "spark.local.dir": str(local),
        "spark.io.compression.codec": "zstd",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.ui.enabled": "false",
        "spark.ui.retainedStages": "10000",
        "spark.sql.ui.retainedExecutions": "10000",
    }
    submit = " ".join(f"--conf {name}={value}" for name, value in settings.items())
    parent = os.getpid()

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    child = subprocess.Popen(
        [sys.executable, "-m", "lab.bench.preparation", directory, "--rows", str(args.rows), "--step", step],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "engine")]),
            "PYSPARK_SUBMIT_ARGS": f"{submit} pyspark-shell",
            "PYSPARK_PYTHON": sys.executable,
        },
        preexec_fn=die_with_parent,
    )
    watch = Watch(psutil.Process(child.pid), directory, int(args.memory_gib * GIB))
    thread = threading.Thread(target=watch.watch)
    thread.start()
    code = child.wait()
    watch.stopped.set()
    thread.join()
    if watch.is_over:
        raise SystemExit(f"{step} held more than {args.memory_gib} GiB; what is done stays in {directory}")
    if code:
        raise SystemExit(f"{step} ended with {code}; its log: {directory / 'logs'}")
    found: dict[str, Any] = json.loads((directory / f"{step}.json").read_text())
    found |= watch.peak(found["began_s"], found["ended_s"])
    for stage in found.get("stages", ()):
        stage |= watch.peak(stage["began_s"], stage["ended_s"])
    shutil.rmtree(local)
    return found


def checked(step: str, found: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the step's figures with seconds in place of times. Raise ``SystemExit`` for figures that cannot be."""
    done = sum(1 for number in range(rows % 100) if number < DONE_OF_100) + rows // 100 * DONE_OF_100
    expected = {"fill": done, "rerun": rows - done}.get(step, rows)
    if found["rows"] != expected:
        raise SystemExit(f"{step} came to {found['rows']:,} rows, and there are {expected:,}")
    wall_s = found.pop("ended_s") - found.pop("began_s")
    stages = []
    for stage in found.get("stages", ()):
        seconds = stage.pop("ended_s") - stage.pop("began_s")
        stages.append({"stage": stage.pop("stage"), "seconds": round(seconds, 1), **stage})
    in_stages_s = sum(stage["seconds"] for stage in stages)
    if in_stages_s > wall_s + 0.1 * len(stages):
        raise SystemExit(f"the stages of {step} took {in_stages_s:.1f} s, and all of it {wall_s:.1f} s")
    for stage in stages:
        if stage["stage"] == "write slices" and stage["rows_shuffled"] < found["rows"]:
            raise SystemExit(
                f"{step} shuffled {stage['rows_shuffled']:,} of {found['rows']:,} rows into slices"
            )
    found["stages"] = stages
    return {"seconds": round(wall_s, 1), **found}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="keeps what is done; the same one goes on")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--memory-gib", type=float, default=24.0, help="of all processes of a step")
    parser.add_argument("--heap-gib", type=int, default=14, help="of the JVM")
    parser.add_argument("--json", type=Path, help="gets a line once all is done")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)  # this process is the step
    args = parser.parse_args(arguments)
    args.directory = args.directory.resolve()
    if args.step:
        run_step(args)
        return
    args.directory.mkdir(parents=True, exist_ok=True)
    journal = args.directory / "journal.json"
    done: dict[str, Any] = json.loads(journal.read_text()) if journal.exists() else {"rows": args.rows}
    if done["rows"] != args.rows:
        raise SystemExit(f"{args.directory} has a table of {done['rows']:,} rows; give --rows {done['rows']}")
    for step in STEPS:
        if step in done:
            print(f"{step}: done before", file=sys.stderr, flush=True)
            continue
        found = checked(step, watched_step(args, step), args.rows)
        if step == "resume":  # the slices are of no use to the rerun
            shutil.rmtree(args.directory / "out" / "_pipemax")
        done[step] = found
        temporary = journal.with_suffix(".part")
        temporary.write_text(json.dumps(done, indent=1))
        temporary.rename(journal)
        print(f"{step}: {json.dumps(found)}", file=sys.stderr, flush=True)
    done["load_average"] = os.getloadavg()
    done["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    done |= {"heap_gib": args.heap_gib, "cpus": os.cpu_count()}
    print(json.dumps(done, indent=1))
    if args.json:
        with args.json.open("a") as lines:
            lines.write(json.dumps(done) + "\n")
    shutil.rmtree(args.directory)


if __name__ == "__main__":
    main()
