"""Jobs that are killed in their midst, and run again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.task import TaskPlan
from pipemax_spark.options import JobOptions
from pipemax_spark.request.columns import RequestColumns
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows.annotated import annotate_requests
from tests.fakes.settings import expected_text, fake_config
from tests.spark.conftest import Jobs
from tests.spark.processes import SMALL_SPARK, servers_of
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
SLOW = fake_config(tokens_per_s=1_500)


def start_job(
    options: JobOptions, *arguments: str, commit_every: str, fake: str = "tokens_per_s: 1500"
) -> subprocess.Popen[bytes]:
    """The same job as a process group of its own, driver and JVM. ``fake`` are the fake engine's options."""
    engine_file = options.log_dir.parent / "engine.yaml"
    engine_file.write_text(f"model: fake\nmax_num_seqs: 16\nvllm: {{fake: {{{fake}}}}}\n")
    return subprocess.Popen(
        [
            *(sys.executable, REPOSITORY / "jobs" / "annotate.py"),
            *("--input", options.input, "--output", options.output),
            *("--template", options.source.template or "", "--engine", engine_file),
            *("--max-tokens", str(options.generation.max_tokens), "--commit-every", commit_every),
            *("--engine-python", options.engine_python or "", "--log-dir", options.log_dir),
            *("--mlflow-experiment", "", *arguments),
        ],
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": f"{SMALL_SPARK} pyspark-shell"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def committed_chunks(output: str) -> int:
    commits = Path(output, "_delta_log").glob("*.json")
    return sum("pipemax run" in commit.read_text() for commit in commits)


def kill_when(condition: Callable[[], bool], job: subprocess.Popen[bytes], options: JobOptions) -> None:
    """kill -9 of driver and JVM at once."""
    try:
        wait_until(lambda: condition() or job.poll() is not None, 300, "something to be lost")
        assert job.poll() is None, "the job ended before it could be killed"
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    wait_until(lambda: not servers_of(options.log_dir), 120, "the killed job's engine ends")


def rows_in_spool(directory: Path) -> int:
    """Count the rows of the files that are complete: a killed job may leave some that it was writing."""
    num_rows = 0
    for file in directory.glob("*/*/spool/*/part-*/*.parquet"):
        with contextlib.suppress(pa.ArrowInvalid):
            num_rows += pq.read_metadata(file).num_rows
    return num_rows


def test_what_a_killed_job_had_completed_is_committed_by_the_next(run: Jobs) -> None:
    rows = [(i, f"word {i % 500}") for i in range(600)]
    run.write_input(rows)
    held = run.directory / "held"
    held.touch()
    # Held, it cannot end before it is killed, on however slow a machine.
    job = start_job(run.defaults, commit_every="1h", fake=f"held_by: '{held}', held_row_s: 0.5")
    spooled = Path(run.output, "_pipemax")
    kill_when(lambda: rows_in_spool(spooled) > 0, job, run.defaults)
    held.unlink()
    num_spooled = rows_in_spool(spooled)
    assert run.rows() == []

    summary = run.run()
    assert "had completed were committed now" in run.printed
    # A Python worker may outlive its killed driver by a moment, and write down a row more.
    num_recovered = summary.rows_skipped
    assert num_spooled <= num_recovered < len(rows)
    assert summary.rows_out == len(rows) - num_recovered
    done = run.rows()
    runs = Counter(row["annotation"]["run_id"] for row in done)
    assert sorted(runs.values()) == sorted((num_recovered, summary.rows_out))
    assert Counter((row["id"], row["text"]) for row in done) == Counter(rows)
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16) for row in done)
    assert len(runs) == 2, "each row names the run that computed it"
    assert not spooled.exists()


def test_a_retried_partition_does_not_ask_the_engine_for_completed_rows(
    spark: Any, engine_python: str, tmp_path: Path
) -> None:
    columns = RequestColumns(PromptSource(template="Say {text}"))
    plan = TaskPlan(
        options=EngineOptions(engine=fake_config(), job_id="again", engine_python=engine_python),
        spec_hash="hash",
        run_id="run",
        output_column="annotation",
        spool=str(tmp_path),
    )
    texts = [f"word {i}" if i % 10 else "[[error]]" for i in range(1_000)]
    rows = spark.createDataFrame([(text,) for text in texts], "text string").coalesce(1)
    requests = columns.add_with_keys(rows)
    first = annotate_requests(requests, plan).collect()
    before = num_requests(spark, engine_python)
    second = annotate_requests(requests, plan).collect()
    assert num_requests(spark, engine_python) - before - 1 == 100, "the error rows, which are tried again"
    good = [sorted(row for row in rows if row["annotation"]["error"] is None) for rows in (first, second)]
    assert len(good[0]) == 900
    assert good[0] == good[1], "the very same completions, their times included"


def num_requests(spark: Any, engine_python: str) -> int:
    """What the engine was asked so far, this question included."""
    plan = TaskPlan(
        options=EngineOptions(engine=fake_config(), job_id="count", engine_python=engine_python),
        spec_hash="",
        run_id="",
        output_column="annotation",
    )
    question = spark.createDataFrame([("[[counts]]",)], "text string")
    requests = RequestColumns(PromptSource(prompt_column="text")).add(question)
    answer = annotate_requests(requests, plan).head()["annotation"]["text"]
    return int(json.loads(answer)["submitted"])
