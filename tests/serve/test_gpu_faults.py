"""A GPU's fault is never a row's, through the real server: rows run again, and none is suspected of it."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipemax.wire import ErrorCode, SessionErrorCode
from pipemax_spark.errors import EngineSessionError
from tests.fakes.collector import FakeCollector
from tests.fakes.settings import expected_text
from tests.serve.support import files_of, options, run_prompts
from tests.serve.test_replicas_served import with_replicas

EnginePython = Callable[..., str]


def test_rows_that_run_while_a_gpu_fails_run_again_and_none_is_suspected(
    fake_engine_python: EnginePython, tmp_path: Path
) -> None:
    opts = options(fake_engine_python(), max_num_seqs=64, latency_s=0.02)
    prompts = [f"row {row}" for row in range(60)]
    for row in (20, 40):
        prompts[row] += f" [[gpu-once {tmp_path}/{row}]]"
    with FakeCollector() as collector:
        opts = replace(opts, collector=collector.address("t"))
        rows = run_prompts(prompts, opts)
        reported = {report.machine_fault for report in collector.reports}
    assert [row["text"] for row in rows] == [expected_text(prompt) for prompt in prompts]
    assert any("illegal memory access" in fault for fault in reported), "the driver hears of it"
    log = files_of(opts).log.read_text()
    assert 1 <= log.count("listening") - 1 <= 2, "no group of rows was run by itself"
    assert "looking for the row" not in log
    assert "no row's" in log


def test_the_driver_hears_of_the_fault_also_while_it_is_slow_to_take_reports(
    fake_engine_python: EnginePython, tmp_path: Path
) -> None:
    """The last report is sent after the rows' stream has ended, and the server must not end before it."""
    with FakeCollector() as collector:
        collector.stalls_s = [1.0]
        opts = options(fake_engine_python("--stats-push-s=0.1"), collector=collector.address("t"))
        (row,) = run_prompts([f"[[slow 0.4]] [[gpu-once {tmp_path}/0]]"], opts)
        assert row["error_code"] is None
        assert any("illegal memory access" in report.machine_fault for report in collector.reports)


@pytest.mark.long  # a variant
def test_a_machine_whose_gpu_fails_again_and_again_fails_the_task_and_is_named(
    fake_engine_python: EnginePython, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[1])
    engine_python = fake_engine_python()
    opts = options(engine_python, dies="of its GPU")
    prompts = [f"row {row}" for row in range(8)]
    with pytest.raises(EngineSessionError, match="3 times in a row") as caught:
        run_prompts(prompts, opts)
    assert caught.value.code is SessionErrorCode.MACHINE_FAULT
    assert f"a fault of the machine {socket.gethostname()}, GPU {gpus[1]}, and no row's" in str(caught.value)
    assert "illegal memory access" in str(caught.value)
    # The same rows on the same executor, once its GPU is in order: nothing is held against them.
    rows = run_prompts(prompts, options(engine_python, job_id="another"))
    assert [row["text"] for row in rows] == [expected_text(prompt) for prompt in prompts]


@pytest.mark.long  # as a row that kills the engine, in test_culprits
def test_a_row_that_trips_a_kernel_s_assertion_is_found_and_condemned(
    fake_engine_python: EnginePython,
) -> None:
    rows = run_prompts(["one", "two [[assert]]", "three", "four"], options(fake_engine_python()))
    assert [row["error_code"] for row in rows] == [None, ErrorCode.ENGINE_DIED, None, None]
    assert "by itself" in rows[1]["error_message"]


@pytest.mark.long  # as rows of one engine, above
def test_a_row_that_is_in_two_replicas_as_their_gpus_fail_is_not_suspected(
    fake_engine_python: EnginePython, tmp_path: Path
) -> None:
    opts = with_replicas(fake_engine_python(), 2, latency_s=0.02)
    prompts = [f"row {row}" for row in range(8)]
    prompts[3] += f" [[gpu-once {tmp_path}/first]] [[gpu-once {tmp_path}/second]]"
    rows = run_prompts(prompts, opts)
    assert [row["text"] for row in rows] == [expected_text(prompt) for prompt in prompts]
    log = files_of(opts).log.read_text()
    assert log.count("listening") == 1, "the replicas were replaced, not the server"
    assert log.count("illegal memory access") >= 2
