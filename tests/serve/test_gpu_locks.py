"""A GPU has one engine at a time, the processes that a dead engine left behind included."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipemax.node.gpus import visible_gpus
from pipemax.wire import ProcessIdentity
from pipemax_spark.errors import EngineSessionError
from tests.serve.support import FakeJvm, files_of, options, run_prompts, server_of, server_stats
from tests.waiting import wait_until

EnginePython = Callable[..., str]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2]), ("1,0", [0, 1]), ("", []), ("1,-1,0", [1]), ("GPU-prefix", [2])],
    ids=["all", "by index", "none", "up to a negative one", "by UUID"],
)
def test_the_gpus_of_an_engine_are_those_that_cuda_shows(
    gpus: list[str], visible: str | None, indices: list[int]
) -> None:
    environ = dict(os.environ)
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = gpus[2][:12] if visible == "GPU-prefix" else visible
    assert visible_gpus(environ) == sorted(gpus[index] for index in indices)


def test_a_mig_instance_counts_as_a_gpu(gpus: list[str]) -> None:
    assert visible_gpus({**os.environ, "CUDA_VISIBLE_DEVICES": "MIG-1234"}) == ["MIG-1234"]


def test_without_the_gpu_driver_no_gpu_is_locked(tmp_path: Path) -> None:
    assert visible_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}) == []


def test_a_killed_server_s_successor_waits_for_a_worker_that_outlives_it(
    fake_engine_python: EnginePython, gpus: list[str]
) -> None:
    opts = options(fake_engine_python(), child_process=True, child_ends_after_s=8.0)
    run_prompts(["one"], opts)
    wait_until(lambda: server_stats(opts).engine_metrics)
    worker = ProcessIdentity.of(int(server_stats(opts).engine_metrics["child_pid"]))
    os.kill(server_of(opts).pid, signal.SIGKILL)
    run_prompts(["two"], opts)
    assert not worker.is_running(), "the successor loaded its engine next to a worker of the dead one"
    log = files_of(opts).log.read_text()
    assert "waiting for GPU" in log
    assert f"which process {worker.pid} (" in log


@pytest.mark.long  # the other test waits too
def test_engines_of_other_gpus_do_not_wait_and_those_of_the_same_say_for_whom(
    fake_engine_python: EnginePython, gpus: list[str], jvm: FakeJvm, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = options(fake_engine_python()), options(fake_engine_python(), start_timeout_s=30.0)
    third = options(fake_engine_python())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run_prompts(["one"], first)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    run_prompts(["two"], third)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"2,{gpus[0]}")
    holders = f"process ({server_of(first).pid}|{server_of(third).pid}) "
    with pytest.raises(EngineSessionError, match=f"no engine after .*waiting for GPU .* which {holders}"):
        run_prompts(["three"], second)
    for server in (server_of(first), server_of(third)):
        os.kill(server.pid, signal.SIGKILL)
    run_prompts(["three"], options(second.engine_python or ""))
