"""The processes of a real engine end with their killed server, and hold its GPUs until they have."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from pipemax.wire import GenerationSpec, ProcessIdentity
from pipemax_spark.executor.client import EngineOptions
from tests.engine.conftest import DEMO_MODEL
from tests.serve.support import FakeJvm, run_prompts, server_of
from tests.waiting import wait_until

ENGINE = {
    "model": str(DEMO_MODEL),
    "max_model_len": 512,
    "cpu_kv_gib": 0.25,
    "max_num_seqs": 8,
}


def engine_processes(server: ProcessIdentity) -> set[ProcessIdentity]:
    """All that the server started: it leads their process group."""
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            pid = int(directory.name)
            if pid != server.pid and os.getpgid(pid) == server.pid:
                found.add(ProcessIdentity.of(pid))
    return found


def holds(process: ProcessIdentity, gpu: str) -> bool:
    """Whether the process has the file open by which a GPU's users lock it."""
    for fd in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if fd.readlink().name == f"{gpu}.users":
                return True
    return False


@pytest.mark.long  # tests/serve/test_gpu_locks.py shows it with a fake
def test_the_engine_s_process_holds_the_gpus_and_ends_with_a_killed_server(
    jvm: FakeJvm, gpus: list[str], tmp_path: Path
) -> None:
    opts = EngineOptions(
        engine=ENGINE,
        generation=GenerationSpec(max_tokens=4),
        job_id="job",
        engine_python=sys.executable,
        log_dir=str(tmp_path),
    )
    run_prompts(["one"], opts)
    server = server_of(opts)
    processes = engine_processes(server)
    holders = {process for process in processes if holds(process, gpus[0])}
    assert holders, "no process of the engine holds the GPU"
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not any(p.is_running() for p in processes), 20.0, "the engine's processes end")
