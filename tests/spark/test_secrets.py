"""No secret of a job's environment, and with --no-sample no row, is in what a job prints, logs and reports.

And the collector hears those with the token.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import flight

from pipemax.wire import COLLECTOR_ACTION_STATS, CollectorAddress, ServerStats
from pipemax_spark.report.collector import Collector
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import fake_config
from tests.spark.processes import SMALL_SPARK

REPOSITORY = Path(__file__).resolve().parents[2]
SECRETS = {
    name: f"canary-{name.lower().replace('_', '-')}"
    for name in ("AWS_SECRET_ACCESS_KEY", "DATABRICKS_TOKEN", "HF_TOKEN", "COLLECTOR_TOKEN")
} | {"PIPEMAX_NOTIFY_URL": "http://127.0.0.1:9/canary-notify-url"}
COMMAND = f"""
import secrets
secrets.token_urlsafe = lambda length: {SECRETS["COLLECTOR_TOKEN"]!r}
from pipemax_spark.cli import main
main()
"""


@pytest.fixture(scope="module")
def left_files(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, bytes]:
    """All that a job has written, one that ends at a bad row, so that its spool stays; Parquet files as text.

    The bad row's output is an object, and its error's message quotes it.
    """
    directory = tmp_path_factory.mktemp("secrets")
    (directory / "events").mkdir()
    (directory / "rows.csv").write_text(
        "id,text\n" + "".join(f"{i},canary-prompt {i}\n" for i in range(400)) + "400,[[counts]]\n"
    )
    (directory / "schema.json").write_text('{"type": "array", "items": {"type": "string"}}')
    (directory / "engine.yaml").write_text(str(fake_config(model="a-model", tokens_per_s=2000)))
    submit = (
        f"--conf spark.eventLog.enabled=true --conf spark.eventLog.compress=false "
        f"--conf spark.eventLog.dir=file://{directory / 'events'} "
        f"--conf spark.executorEnv.HF_TOKEN={SECRETS['HF_TOKEN']} {SMALL_SPARK} pyspark-shell"
    )
    job = subprocess.run(
        [
            *(
                sys.executable,
                "-c",
                COMMAND,
                "--input",
                directory / "rows.csv",
                "--output",
                directory / "out",
            ),
            *("--engine", directory / "engine.yaml", "--prompt-column", "text", "--on-error", "fail"),
            *("--response-format", directory / "schema.json", "--no-sample"),
            *("--engine-python", write_engine_python(directory / "engine-python")),
        ],
        cwd=REPOSITORY,
        env={
            **os.environ,
            **SECRETS,
            "PYSPARK_SUBMIT_ARGS": submit,
            "SPARK_LOCAL_DIRS": str(directory / "local"),
            "PIPEMAX_LOG_DIR": str(directory / "logs"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert job.returncode == 1, job.stderr[-4000:]
    assert "a row failed with response_format\n" in job.stderr
    (directory / "printed").write_text(job.stdout + job.stderr)
    return {path: content_of(path) for path in directory.rglob("*") if path.is_file()}


def content_of(path: Path) -> bytes:
    if path.suffix == ".parquet":
        with contextlib.suppress(pa.ArrowInvalid):  # a cancelled task leaves files that it did not finish
            return str(pq.read_table(path).to_pylist()).encode()
    return path.read_bytes()


def files_with(text: str, files: dict[Path, bytes]) -> set[str]:
    return {path.name for path, content in files.items() if text.encode() in content}


@pytest.mark.long  # a process
@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_in_no_file(left_files: dict[Path, bytes], name: str) -> None:
    assert files_with(SECRETS[name], left_files) == set()


@pytest.mark.long  # a process
def test_the_secret_search_reads_logs_tracking_events_and_spool(left_files: dict[Path, bytes]) -> None:
    """Else finding nothing would mean nothing."""
    assert {"mlflow.db", "annotate.log"} <= files_with("response_format", left_files) | files_with(
        "a-model", left_files
    )
    answered = files_with('["text-', left_files)
    assert any("spool" in path.parts for path in left_files if path.name in answered)
    assert files_with("spark.executorEnv.HF_TOKEN", left_files), "Spark's event log, which hides the value"
    assert any(path.name.startswith("pipemax-engine-") for path in left_files)


@pytest.mark.long  # a process
def test_without_samples_no_prompt_and_no_output_is_in_what_is_printed_logged_or_tracked(
    left_files: dict[Path, bytes],
) -> None:
    reported = {
        path: content
        for path, content in left_files.items()
        if not {"out", "local"} & set(path.parts) and path.suffix != ".csv"
    }
    assert {"printed", "annotate.log", "spark.log", "mlflow.db"} <= {path.name for path in reported}
    for quoted in ("canary-prompt", '["text-', '"submitted"'):
        assert files_with(quoted, reported) == set()


@pytest.mark.parametrize("token", ["", "wrong"])
def test_the_collector_hears_only_those_who_know_its_token(token: str) -> None:
    with Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job") as collector:
        assert len(collector.address.token) >= 32
        with pytest.raises(flight.FlightUnauthenticatedError):
            _report(collector.address, token)
        assert collector.servers() == []
        _report(collector.address, collector.address.token)
        assert len(collector.servers()) == 1


def _report(address: CollectorAddress, token: str) -> None:
    stats = ServerStats(server_id="s", host="h", pid=1, at_unix_s=1.0, state="ready")
    options = flight.FlightCallOptions(
        timeout=10, headers=[(b"authorization", f"Bearer {token}".encode())] if token else []
    )
    with flight.FlightClient(f"grpc+tcp://{address.host}:{address.port}") as client:
        list(client.do_action(flight.Action(COLLECTOR_ACTION_STATS, stats.to_bytes()), options))
