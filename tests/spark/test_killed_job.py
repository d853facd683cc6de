"""A job that is killed in its midst, and run again on an input that has grown."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pipemax_spark.options import JobOptions
from tests.fakes.engine import fake_config
from tests.spark.conftest import Jobs
from tests.spark.processes import servers_of, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
SLOW = fake_config(tokens_per_s=1_500)


def start_job(options: JobOptions) -> subprocess.Popen[bytes]:
    """The same job as a process group of its own, driver and JVM."""
    engine_file = options.log_dir.parent / "engine.yaml"
    engine_file.write_text("model: fake\nmax_num_seqs: 16\nvllm: {fake: {tokens_per_s: 1500}}\n")
    return subprocess.Popen(
        [
            *(sys.executable, REPOSITORY / "jobs" / "annotate.py"),
            *("--input", options.input, "--output", options.output),
            *("--template", options.source.template or "", "--engine", engine_file),
            *("--max-tokens", str(options.generation.max_tokens), "--commit-every", "1s"),
            *("--engine-python", options.engine_python or "", "--log-dir", options.log_dir),
        ],
        env={**os.environ, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def committed_chunks(output: str) -> int:
    commits = Path(output, "_delta_log").glob("*.json")
    return sum("pipemax run" in commit.read_text() for commit in commits)


def test_killed_and_run_again_on_a_longer_table_every_row_is_there_as_often_as_in_the_input(
    jobs: Callable[[], Jobs],
) -> None:
    run = jobs()
    rows = [(i % 900, f"word {i % 900}") for i in range(6_000)]  # texts repeat
    run.write_input(rows)
    job = start_job(run.defaults)
    try:
        wait_until(lambda: committed_chunks(run.output) >= 1 or job.poll() is not None, 120, "a first commit")
        assert job.poll() is None, "the job ended before it could be killed"
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    done = len(run.rows())
    assert 0 < done < len(rows), "it was to be killed with some rows committed and some not"
    wait_until(lambda: not servers_of(run.defaults.engine_python or ""), 15, "the killed job's engine ends")

    more = [*rows, *rows[:50], (1_000, "a new word")]
    run.write_input(more)
    summary = run.run(engine=SLOW)
    assert summary is not None
    assert (summary.rows_skipped, summary.rows_out) == (done, len(more) - done)
    assert Counter((row["id"], row["text"]) for row in run.rows()) == Counter(more)
    assert not Path(run.output, "_pipemax").exists(), "the dead run's work directory is removed"
    assert "nothing new to do" not in run.printed
