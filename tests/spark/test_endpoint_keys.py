"""The key of an endpoint is in nothing that a job writes, prints, records or plans.

The server repeats the key in all that it says, good or bad, and the job has rows that it refuses.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.engines.check import check_hidden
from pipemax_spark.errors import JobError
from tests.endpoints.keys_server import BROKEN, FILTERED, REFUSED, SAID, keys_server
from tests.spark.processes import SMALL_SPARK
from tests.spark.test_secrets import content_of

REPOSITORY = Path(__file__).resolve().parents[2]
KEY = "sk-canary/of+this=test"
VARIABLE = "CANARY_API_KEY"
FORMS = [KEY, KEY.replace("/", "\\/"), "sk-canary%2Fof", "sk-canary"]
COMMAND = "from pipemax_spark.cli import main; main()"
ROWS = 200


@dataclass
class Left:
    """What a job has left, Parquet files as text, and what it was while it ran."""

    printed: str
    status: int
    files: dict[Path, bytes]
    commands: set[str]
    """The command lines of all processes while it ran."""
    summary: dict[str, Any]

    def files_with(self, text: str) -> set[str]:
        return {path.name for path, content in self.files.items() if text.encode() in content}


def run_job(directory: Path, config: dict[str, Any], *arguments: str) -> Left:
    """Run a job in a process of its own, with Spark's event log, and look at all processes meanwhile."""
    (directory / "events").mkdir(exist_ok=True)
    prompts = [*(f"row {i}" for i in range(ROWS)), REFUSED, FILTERED, SAID, BROKEN]
    (directory / "rows.csv").write_text("text\n" + "\n".join(prompts) + "\n")
    (directory / "engine.yaml").write_text(json.dumps(config))
    submit = (
        f"--conf spark.eventLog.enabled=true --conf spark.eventLog.compress=false "
        f"--conf spark.eventLog.dir=file://{directory / 'events'} {SMALL_SPARK} pyspark-shell"
    )
    job = subprocess.Popen(
        [
            *(sys.executable, "-c", COMMAND, "--input", directory / "rows.csv"),
            *(
                "--output",
                directory / "out",
                "--engine",
                directory / "engine.yaml",
                "--prompt-column",
                "text",
            ),
            *("--summary", directory / "summary.json", *arguments),
        ],
        cwd=REPOSITORY,
        env={
            **os.environ,
            VARIABLE: KEY,
            "PYSPARK_SUBMIT_ARGS": submit,
            "SPARK_LOCAL_DIRS": str(directory / "local"),
            "PIPEMAX_LOG_DIR": str(directory / "logs"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    commands: set[str] = set()
    while True:
        commands |= command_lines()
        with contextlib.suppress(subprocess.TimeoutExpired):
            printed, _ = job.communicate(timeout=0.2)
            break
    summary = json.loads((directory / "summary.json").read_text())
    return Left(printed, job.returncode, files_in(directory), commands, summary)


def files_in(directory: Path) -> dict[Path, bytes]:
    """The files that are left; Spark's JVM still deletes its own."""
    files = {}
    for folder, _, names in os.walk(directory):
        for path in (Path(folder) / name for name in names):
            with contextlib.suppress(FileNotFoundError):
                files[path] = content_of(path)
    return files


def command_lines() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found.add(path.read_text(errors="replace"))
    return found


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """What two jobs have left: one with all its rows, and one that a refused row ended, whose spool stays."""
    prices = {"price_per_million_prompt_tokens": 1e3, "price_per_million_output_tokens": 1e4}
    jobs = []
    for arguments in (("--max-cost", "1000"), ("--on-error", "fail")):
        with keys_server(KEY) as server:
            server.refuses_after = ROWS
            config = server.config(api_key_env=VARIABLE, **prices)
            jobs.append(run_job(tmp_path_factory.mktemp("keys"), config, *arguments))
            assert server.headers_with(f"Bearer {KEY}") == len(server.seen) > ROWS
    done, stopped = jobs
    assert done.status == 0, done.printed[-4000:]
    assert stopped.status == 1, stopped.printed[-4000:]
    assert "a row failed with " in stopped.printed
    return Left(
        done.printed + stopped.printed,
        done.status,
        done.files | stopped.files,
        done.commands | stopped.commands,
        done.summary,
    )


@pytest.mark.long  # a process
@pytest.mark.parametrize("form", FORMS)
def test_the_key_is_in_no_file_no_output_and_no_command_line(left: Left, form: str) -> None:
    assert left.files_with(form) == set()
    assert form not in left.printed
    assert [command for command in left.commands if form in command and "pytest" not in command] == []


@pytest.mark.long  # a process
def test_the_search_for_the_key_reads_table_logs_tracking_report_events_and_plans(left: Left) -> None:
    """Else finding nothing would mean nothing."""
    assert any(
        "out" in path.parts and b"*** may not ask for" in content for path, content in left.files.items()
    )
    said = left.files_with(VARIABLE)
    assert {"mlflow.db", "engine.yaml"} <= said, "the variable's name is no secret"
    assert {"report.html", "summary.json", "annotate.log", "spark.log"} <= {path.name for path in left.files}
    assert any(name.startswith("pipemax-engine-") for name in (path.name for path in left.files))
    assert any(
        "events" in path.parts and b"SparkListenerSQLExecutionStart" in content and b"MapInArrow" in content
        for path, content in left.files.items()
    ), "Spark's plans"
    assert any("spool" in path.parts and b"reply to row" in content for path, content in left.files.items())
    assert any("pipemax.serve" in command for command in left.commands)


@pytest.mark.long  # a process
def test_the_summary_counts_what_the_endpoint_was_asked_and_what_that_costs(left: Left) -> None:
    named = ("endpoint_requests", "endpoint_retries", "billed_prompt_tokens", "billed_output_tokens")
    prompt, output = 2 * ROWS + 3 + 3, 4 * ROWS + 4 + 5
    assert [left.summary[name] for name in named] == [ROWS + 5, 1, prompt, output]
    told = f"{ROWS + 5} requests (1 again), {prompt} prompt and {output:,} output tokens billed"
    assert told in left.printed
    assert (
        f"{prompt / 1e3 + output / 1e2:,.2f} at 1,000 per million prompt tokens, 10,000 per" in left.printed
    )
    assert (
        told in next(content for path, content in left.files.items() if path.name == "report.html").decode()
    )


@pytest.mark.long  # a process
def test_a_key_that_is_written_into_the_config_is_refused_and_nowhere_repeated(tmp_path: Path) -> None:
    config = {"endpoint": "https://127.0.0.1:9/v1", "model": "m", "model_revision": "1"}
    job = run_job(tmp_path, {**config, "headers": {"api-key": KEY}})
    assert job.status == 2, job.printed[-4000:]
    assert "headers: " in job.printed
    assert "api-key looks like a key" in job.printed
    assert KEY not in job.printed
    assert job.files_with(KEY) == {"engine.yaml"}


@pytest.mark.parametrize(
    ("settings", "redaction", "is_shown"),
    [
        (["spark.executorEnv.OPENAI_API_KEY"], None, True),
        (["spark.executorEnv.OPENAI_API_KEY"], "(?i)secret|password|token|key", False),
        (["spark.executorEnv.ENDPOINT_TOKEN"], None, False),
        ([], None, False),
    ],
)
def test_a_setting_that_spark_would_show_with_the_key_is_refused(
    settings: Sequence[str], redaction: str | None, is_shown: bool
) -> None:
    if not is_shown:
        check_hidden(settings, redaction)
        return
    with pytest.raises(
        JobError, match=r"spark\.executorEnv\.OPENAI_API_KEY holds a key, and Spark shows it in its pages"
    ):
        check_hidden(settings, redaction)
