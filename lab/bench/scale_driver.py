"""Measure what the driver pays for reports of many tasks and engines: CPU time and memory. No Spark, no engine.

    python lab/bench/scale_driver.py reports [--tasks 100000] [--engines 200] [--seconds 20]
    python lab/bench/scale_driver.py samples [--days 7] [--engines 200] [--period 10]

``reports``: a process of its own sends made-up reports over Flight to a collector that runs as in a job, with progress
and the Parquet file. After one report each of ``--tasks`` tasks, it reports for each engine once a second, or as seldom
as the collector asks (``engines``); then once a second whatever the collector asks (``unpaced``); then as many reports,
each of a new task (``tasks``). The CPU time of the collector's process is measured.

``samples``: the reports of ``--days`` days are given to the collector as fast as it takes them, ``--period`` seconds
apart, with a sample after each round, and the process's memory is measured. Fewer, longer periods keep as much as one a
second does: the samples kept are far fewer than those taken.
"""

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from pyarrow import flight

from pipemax.wire import COLLECTOR_ACTION_STATS, CollectorAddress, JobOutlook, JobStats, ServerStats
from pipemax_spark.executor.task_reports import TASK_ENDED_STATE
from pipemax_spark.report.charts import picture_of
from pipemax_spark.report.collector import Collector
from pipemax_spark.report.engine_log import EngineLog
from pipemax_spark.report.progress import Progress, ProgressLine
from pipemax_spark.report.samples import SHOWN_METRICS
from pipemax_spark.request.error_limits import ErrorLimits

JOB_ID = "job"
PHASES = ("engines", "unpaced", "tasks")
PARTS = ("start_up", "wait", "prefill", "decode", "prefetch_stall", "drain")
MIB = 2**20


def engine_report(number: int, at_unix_s: float, age_s: float) -> ServerStats:
    rows = int(10 * age_s)
    return ServerStats(
        server_id=f"10.0.0.{number}:{number:08x}",
        host=f"10.0.0.{number}",
        pid=number,
        at_unix_s=at_unix_s,
        state="ready",
        engine_starts=1,
        phase=("prefill", "decode")[int(age_s / 60) % 2],
        running_requests=64,
        waiting_requests=number,
        kv_usage=(age_s % 100) / 100,
        engine_metrics={name: age_s + i for i, name in enumerate(SHOWN_METRICS)}
        | {f"time_{part}_s": age_s / len(PARTS) for part in PARTS},
        jobs={JOB_ID: JobStats(rows_received=rows + 64, rows_done=rows, completion_tokens=100 * rows)},
    )


def task_report(number: int) -> ServerStats:
    job = JobStats(errors={"response_format": 1}, error_examples={"response_format": "x" * 200})
    return ServerStats(
        server_id=f"task:{number:032x}",
        host="",
        pid=0,
        at_unix_s=time.time(),
        state=TASK_ENDED_STATE,
        jobs={JOB_ID: job},
    )


def send_reports(address: CollectorAddress, args: argparse.Namespace, phases: Any) -> None:
    """Send the tasks' reports, then those of the two measured phases; tell ``phases`` when each begins and ends."""
    client = flight.FlightClient(f"grpc+tcp://{address.host}:{address.port}")
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {address.token}".encode())])

    def send(stats: ServerStats) -> float:
        """Return after how many seconds the next report is wanted."""
        answers = list(client.do_action(flight.Action(COLLECTOR_ACTION_STATS, stats.to_bytes()), options))
        return JobOutlook.from_bytes(answers[0].body.to_pybytes()).report_after_s

    for number in range(args.tasks):
        send(task_report(number))
    for phase in PHASES:
        sent, began_s = 0, time.monotonic()
        due_s = [number / args.engines for number in range(args.engines)]
        phases.put((phase, "began", sent, began_s))
        while (age_s := time.monotonic() - began_s) < args.seconds:
            number = min(range(args.engines), key=due_s.__getitem__)
            if due_s[number] > age_s:
                time.sleep(0.5 / args.engines)
                continue
            is_task = phase == "tasks"
            stats = task_report(args.tasks + sent) if is_task else engine_report(number, time.time(), age_s)
            asked_s = send(stats)
            due_s[number] += max(1.0, asked_s) if phase == "engines" else 1.0
            sent += 1
        phases.put((phase, "ended", sent, time.monotonic()))


def measure_reports(args: argparse.Namespace, directory: Path) -> dict[str, float]:
    figures: dict[str, float] = {"tasks": args.tasks, "engines": args.engines}
    log = EngineLog(directory / "engine_metrics.parquet")
    with log, _collector(log) as collector, _progress(collector):
        collector.expect(10**9)
        context = multiprocessing.get_context("spawn")
        phases = context.Queue()
        sender = context.Process(target=send_reports, args=(collector.address, args, phases))
        sender.start()
        errors = args.tasks
        for phase in PHASES:
            _, _, _, began_s = phases.get()
            cpu_s = time.process_time()
            _, _, sent, ended_s = phases.get()
            cpu_s = time.process_time() - cpu_s
            figures[f"{phase}_reports_per_s"] = sent / (ended_s - began_s)
            figures[f"{phase}_cpu_ms_per_report"] = cpu_s / sent * 1e3
            figures[f"{phase}_share_of_a_core"] = cpu_s / (ended_s - began_s)
            errors += sent if phase == "tasks" else 0
        sender.join()
        assert collector.totals().rows_error == errors, "each task's errors count once"
        figures["resident_mib"] = psutil.Process().memory_info().rss / MIB
    return figures


def measure_samples(args: argparse.Namespace, directory: Path) -> dict[str, float]:
    log = EngineLog(directory / "engine_metrics.parquet")
    process = psutil.Process()
    with log, _collector(log) as collector:
        progress = _progress(collector)
        for stats in (engine_report(number, time.time(), 0.0) for number in range(3)):
            collector._answer(stats)
        gc.collect()
        before, peak, began_s = process.memory_info().rss, 0, time.time()
        for round_number in range(1, int(args.days * 86_400 / args.period) + 1):
            age_s = round_number * args.period
            for number in range(args.engines):
                collector._answer(engine_report(number, began_s + age_s, age_s))
            progress.take_sample()
            if round_number % 100 == 0:
                peak = max(peak, process.memory_info().rss)
        seconds = time.time() - began_s
        samples = progress.samples
        gc.collect()
        held = process.memory_info().rss
    plot_began_s = time.time()
    (directory / "throughput.svg").write_text(picture_of(progress.tracks.by_server))
    return {
        "engines": args.engines,
        "days": args.days,
        "reports": args.engines * int(args.days * 86_400 / args.period),
        "samples_kept": len(samples),
        "held_mib": (held - before) / MIB,
        "peak_mib": (peak - before) / MIB,
        "after_plot_mib": (process.memory_info().rss - before) / MIB,
        "plot_s": time.time() - plot_began_s,
        "seconds": seconds,
        "parquet_mib": log.path.stat().st_size / MIB,
    }


def _collector(log: EngineLog) -> Collector:
    return Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id=JOB_ID, on_report=log.add)


def _progress(collector: Collector) -> Progress:
    line = ProgressLine(show=lambda text: None, period_s=1.0)
    progress = Progress(collector, line, limits=ErrorLimits(max_rate=1.0), stop_job=lambda reason: None)
    progress.expect(10**9)
    return progress


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("reports", "samples"))
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measured phase")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--period", type=float, default=10.0, help="seconds between two reports of an engine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure = measure_reports if args.part == "reports" else measure_samples
        figures = measure(args, Path(directory))
    rounded = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps(rounded | {"load_average": os.getloadavg()}, indent=2))


if __name__ == "__main__":
    main()
