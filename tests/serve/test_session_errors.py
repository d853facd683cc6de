"""What cannot be served ends with a typed error that says why and what to do, and starts nothing twice."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

from pipemax.wire import (
    COMPLETION_SCHEMA,
    PACKAGE_VERSION,
    WIRE_VERSION,
    GenerationSpec,
    MessageKind,
    ProcessIdentity,
    ServerMessage,
    ServerStats,
    SessionErrorCode,
    SessionHeader,
)
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.client import complete
from pipemax_spark.executor.server_process import private_directory
from tests.fakes.settings import fake_config
from tests.serve.support import (
    SILENCE_S,
    FakeJvm,
    at_once,
    files_of,
    options,
    request_batch,
    run_prompts,
    server_stats,
)

EnginePython = Callable[..., str]
_REPOSITORY = Path(__file__).resolve().parents[2]


def _failure(engine_python: str, **changes: object) -> EngineSessionError:
    with pytest.raises(EngineSessionError) as caught:
        run_prompts(["hello"], options(engine_python, **changes))
    return caught.value


@pytest.mark.parametrize(
    ("generation", "says"),
    [
        (GenerationSpec(temperature=-1.0), "temperature is -1.0"),
        (GenerationSpec(max_tokens=0), "max_tokens is 0"),
        (GenerationSpec(response_format="{"), "response_format is not JSON"),
        (GenerationSpec(response_format="[]"), "JSON schema object"),
    ],
)
def test_a_bad_generation_is_refused(
    shared_engine_python: str, generation: GenerationSpec, says: str
) -> None:
    failure = _failure(shared_engine_python, generation=generation)
    assert failure.code is SessionErrorCode.INVALID_GENERATION
    assert says in str(failure)


def test_a_bad_engine_config_is_refused_by_name(shared_engine_python: str) -> None:
    failure = _failure(shared_engine_python, engine={"model": "fake", "max_model_length": 5})
    assert failure.code is SessionErrorCode.INVALID_ENGINE_CONFIG
    assert "unknown field 'max_model_length'" in str(failure)


def test_a_start_failure_reaches_its_job_which_does_not_retry(fake_engine_python: EnginePython) -> None:
    engine_python = fake_engine_python()
    changes = {"start_error": "the GPU has 3 GiB free, the model needs 5"}
    for _ in range(2):
        failure = _failure(engine_python, **changes)
        assert failure.code is SessionErrorCode.ENGINE_START_FAILED
        assert "the GPU has 3 GiB free, the model needs 5" in str(failure)
    log = files_of(options(engine_python)).log
    assert str(log) in str(failure)
    assert log.read_text().count("loading model") == 1
    _failure(engine_python, job_id="another job", **changes)
    assert log.read_text().count("loading model") == 2
    assert server_stats(options(engine_python)).state == "failed"


def test_all_sessions_that_wait_hear_of_a_start_failure(fake_engine_python: EnginePython) -> None:
    engine_python = fake_engine_python()
    failures = at_once(
        lambda job: _failure(engine_python, job_id=job, load_s=0.5, start_error="no such model"), ["job"] * 3
    )
    assert ["no such model" in str(failure) for failure in failures] == [True] * 3


def test_a_load_beyond_the_start_timeout_fails_with_what_it_was_doing(
    fake_engine_python: EnginePython,
) -> None:
    engine_python = fake_engine_python("--replace-grace-s=0")
    run_prompts(["hello"], options(engine_python))  # the server is there, however long its imports took
    failure = _failure(engine_python, load_s=60.0, start_timeout_s=4.0)
    assert failure.code is SessionErrorCode.ENGINE_START_FAILED
    assert "loading model fake" in str(failure)


def test_a_slow_load_and_a_slow_row_are_waited_for(shared_engine_python: str) -> None:
    opts = options(shared_engine_python, engine=fake_config("slow", load_s=1.0), silence_timeout_s=SILENCE_S)
    row = f"[[slow {SILENCE_S + 1}]] hello"
    assert run_prompts([row], opts)[0]["finish_reason"] == "stop"


def test_an_interpreter_that_is_missing_or_fails_is_named_with_its_words(tmp_path: Path) -> None:
    failure = _failure("/no/such/python")
    assert failure.code is SessionErrorCode.ENGINE_START_FAILED
    assert "/no/such/python" in str(failure)
    broken = tmp_path / "broken-python"
    broken.write_text("#!/bin/sh\necho 'No module named pipemax' >&2\nexit 3\n")
    broken.chmod(0o700)
    failure = _failure(str(broken))
    assert "ended with status 3" in str(failure)
    assert "No module named pipemax" in str(failure)


def test_an_address_space_limit_is_refused_by_the_setting_that_causes_it(
    fake_engine_python: EnginePython,
) -> None:
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30));"
        "from tests.serve.support import *; run_prompts(['hello'], options(sys.argv[1]))"
    )
    client = subprocess.run(
        [sys.executable, "-c", script, fake_engine_python()], cwd=_REPOSITORY, capture_output=True, text=True
    )
    assert client.returncode != 0
    assert "spark.executor.pyspark.memory" in client.stderr


def test_a_socket_directory_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineSessionError, match="must be a directory of user"):
        private_directory(tmp_path / "link")
    ours = private_directory(tmp_path / "ours")
    assert ours.stat().st_mode & 0o777 == 0o700


def test_the_server_refuses_a_client_of_another_version(shared_engine_python: str) -> None:
    opts = options(shared_engine_python)
    run_prompts(["hello"], opts)
    own = ProcessIdentity.of_this_process()
    newer = SessionHeader(
        job_id="job",
        task="task",
        daemon=own,
        engine={},
        wire_version=99,
        package_version="9.9",
    )
    for text, code in ((newer.to_bytes(), "version_mismatch"), (b"what?", "version_mismatch")):
        message = _first_message(files_of(opts).location, text)
        assert message.kind is MessageKind.FAILED
        assert message.code == code
        assert PACKAGE_VERSION in message.detail
    assert "install the same version" in message.detail
    headless = json.dumps({"wire_version": WIRE_VERSION, "package_version": PACKAGE_VERSION}).encode()
    assert _first_message(files_of(opts).location, headless).code is SessionErrorCode.INVALID_HEADER


def test_the_client_refuses_a_server_of_another_version(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python())
    with _ServerOfAnotherVersion(files_of(opts).location):
        files_of(opts).record.write_text(json.dumps(asdict(ProcessIdentity.of_this_process())))
        with pytest.raises(EngineSessionError, match=r"0\.0\.7.*this side has.*install the same") as caught:
            run_prompts(["hello"], opts)
    assert caught.value.code is SessionErrorCode.VERSION_MISMATCH


def test_another_config_replaces_the_engine_once_it_is_idle(fake_engine_python: EnginePython) -> None:
    engine_python = fake_engine_python("--replace-grace-s=0.2")
    first = options(engine_python, engine=fake_config("first"), job_id="one")
    second = options(engine_python, engine=fake_config("second"), job_id="two", start_timeout_s=0.6)
    slow = complete([request_batch(["quick", "[[slow 1.2]] one"])], first, task="task 1")
    next(slow)
    finished: list[float] = []

    def waiting_session() -> None:
        run_prompts(["hello"], second)  # waits longer than its start timeout, which does not count here
        finished.append(time.monotonic())

    thread = threading.Thread(target=waiting_session)
    thread.start()
    assert sum(batch.num_rows for batch in slow) == 1
    first_ended_s = time.monotonic()
    thread.join()
    assert finished[0] > first_ended_s
    stats = server_stats(second)
    assert (stats.engine_starts, stats.state) == (2, "ready")
    assert "in place of" in files_of(second).log.read_text()


def test_two_configs_chained_in_one_task_are_a_conflict(fake_engine_python: EnginePython) -> None:
    engine_python = fake_engine_python("--same-task-conflict-s=1", "--undelivered-rows=8")
    inner_options = options(engine_python, engine=fake_config("model-a"), job_id="a")
    outer_options = options(engine_python, engine=fake_config("model-b"), job_id="b")
    endless = (request_batch([f"row {row}"], row) for row in range(10**9))
    inner = complete(endless, inner_options, task="stage 1 partition 0")
    again = (request_batch(["x"] * batch.num_rows, batch["row_id"][0].as_py()) for batch in inner)
    with pytest.raises(EngineSessionError, match=r"model-a.*model-b.*Write the first annotation") as caught:
        list(complete(again, outer_options, task="stage 1 partition 0"))
    assert caught.value.code is SessionErrorCode.ENGINE_CONFLICT
    inner.close()


def test_the_server_gets_a_short_list_of_variables(
    fake_engine_python: EnginePython, monkeypatch: pytest.MonkeyPatch, jvm: FakeJvm
) -> None:
    secrets = {"PYTHONPATH": "/spark", "PYTHONHOME": "/usr", "SPARK_HOME": "/spark", "OMP_NUM_THREADS": "1"}
    secrets |= {
        "PYTHON_WORKER_FACTORY_SECRET": "s",
        "PYSPARK_PYTHON": "python",
        "AWS_SECRET_ACCESS_KEY": "key",
    }
    kept = {"HF_HOME": "/hf", "CUDA_VISIBLE_DEVICES": "2,3", "VLLM_LOGGING_LEVEL": "INFO", "LC_TIME": "C"}
    kept["OMP_WAIT_POLICY"] = "PASSIVE"
    for name, value in (secrets | kept).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONHOME")  # our own interpreter would not start with it
    uncut = GenerationSpec(max_tokens=10**6)
    (row,) = run_prompts(["[[environ]]"], options(fake_engine_python(), generation=uncut))
    environ = json.loads(row["text"])
    assert not secrets.keys() & environ.keys()
    assert kept.items() <= environ.items()
    (server,) = jvm.servers()
    assert environ["PIPEMAX_SERVER_IDENTITY"] == f"{server.pid}:{server.start_ticks}"
    assert Path(f"/proc/{server.pid}/cwd").readlink() == Path("/")
    assert Path(f"/proc/{server.pid}/fd/0").readlink() == Path(os.devnull)


def test_a_checkout_can_be_named_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipemax_spark.executor.engine_environment import engine_environment

    monkeypatch.setenv("PIPEMAX_ENGINE_PYTHONPATH", "/checkout/engine")
    assert engine_environment()["PYTHONPATH"] == "/checkout/engine"


class _ServerOfAnotherVersion(flight.FlightServerBase):
    def __init__(self, location: str) -> None:
        super().__init__(location)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[flight.Result]:
        stats = ServerStats(server_id="", host="", pid=os.getpid(), at_unix_s=0.0, state="ready")
        return iter([flight.Result(stats.to_bytes())])

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        versions = {b"pipemax_wire_version": b"0", b"pipemax_package_version": b"0.0.7"}
        writer.begin(COMPLETION_SCHEMA.with_metadata(versions))
        with suppress(pa.ArrowException):  # to the client a server that leaves at once would be a lost one
            for _ in reader:
                pass


def _first_message(location: str, header: bytes) -> ServerMessage:
    with flight.FlightClient(location) as client:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(header))
        writer.begin(pa.schema([]))
        message = ServerMessage.from_bytes(reader.read_chunk().app_metadata.to_pybytes())
        reader.cancel()
    return message
