"""Run jobs next to each other in processes forked from this one, which has imported vLLM and touched no GPU.

An import of vLLM takes 25 s, and each engine is a process of its own: forked ones start with everything imported.
"""

import argparse
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import seed
from types import FrameType

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # all models are made here: nothing is asked of a hub
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",  # no report of this run to vLLM's makers
    "VLLM_USE_DEEP_GEMM": "0",  # its kernels are compiled on the machine, for minutes
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # likewise
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",  # CUDA graphs of steps with prompt tokens, without compiling the model
    "OMP_NUM_THREADS": "2",  # several engines share the cores
    "PYTHONUNBUFFERED": "1",  # logs show how far a job came that was ended
}
"""What these runs want of vLLM and its libraries. The caller's environment comes first."""

GPU_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.dummy_loader",
    "pipemax.vllm_ext.engine.vllm_engine",
    "pipemax.vllm_ext.worker.gpu_worker",
    "pipemax.vllm_ext.worker.connector",
    "pipemax.vllm_ext.scheduler.scheduler",
    "pipemax.policy.start",
    "pipemax.api",
    "pipemax.cli.common",
    "lab.gpu.drive",
)

_GRACE_S = 3.0
"""From SIGTERM to SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    name: str
    work: Callable[[], object]
    """Runs in the job's process. An exception fails the job."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    name: str
    seconds: float
    result: str
    """``done``, ``failed`` or ``out of time``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run of several engines is given."""

    out: Path
    """For logs and figures."""
    deadline_s: float
    """By ``time.monotonic``."""


def begin_run(description: str | None, arguments: Sequence[str]) -> Limits:
    """Parse a run's ``--out`` and ``--seconds``, and prepare its environment and directory."""
    begin_s = time.monotonic()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for logs and figures")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the whole run (default 300)")
    options = parser.parse_args(arguments)
    set_environment()
    options.out.mkdir(parents=True, exist_ok=True)
    return Limits(out=options.out, deadline_s=begin_s + options.seconds)


def set_environment() -> None:
    """Set what the caller has not set. Call this before vLLM is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def preload(modules: Sequence[str]) -> None:
    """Import modules for all jobs. One that cannot be imported is named, and left to the job that needs it."""
    begin_s = time.monotonic()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            print(f"{name} is not imported beforehand: {type(error).__name__}: {reason}", flush=True)
    print(f"modules imported in {time.monotonic() - begin_s:.0f} s", flush=True)
    require_safe_fork()


def require_safe_fork() -> None:
    """Raise ``SystemExit`` if a forked process cannot use CUDA, because an import has touched the driver here."""
    if not Path("/dev/nvidiactl").exists():
        return
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            import torch

            torch.zeros(1, device="cuda").item()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("a forked process cannot use CUDA: an import has touched the driver in this one")


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into ``SystemExit``, so that jobs are ended on the way out."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(124)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_together(jobs: Sequence[Job], logs: Path, *, limit_s: float) -> list[JobEnd]:
    """Run jobs at the same time, each with its output in ``logs``. End those that are not done after ``limit_s``.

    Whatever processes a job leaves behind are ended with it.
    """
    begin_s = time.monotonic()
    running: dict[int, str] = {}
    ends: list[JobEnd] = []
    try:
        for job in jobs:
            running[_fork(job, logs / f"{job.name}.log")] = job.name
        while running:
            seconds = time.monotonic() - begin_s
            if seconds > limit_s:
                ends += [
                    JobEnd(name=name, seconds=seconds, result="out of time") for name in running.values()
                ]
                break
            for pid, status in _ended(running):
                _signal_group(pid, signal.SIGKILL)
                result = "failed" if os.waitstatus_to_exitcode(status) else "done"
                ends.append(JobEnd(name=running.pop(pid), seconds=seconds, result=result))
            time.sleep(0.05)
    finally:
        _end_groups(list(running))
    return ends


def _ended(running: Mapping[int, str]) -> list[tuple[int, int]]:
    waited = [os.waitpid(pid, os.WNOHANG) for pid in running]
    return [(pid, status) for pid, status in waited if pid]


def _end_groups(pids: Sequence[int]) -> None:
    for pid in pids:
        _signal_group(pid, signal.SIGTERM)
    deadline_s, left = time.monotonic() + _GRACE_S, set(pids)
    while left and time.monotonic() < deadline_s:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.05)
    for pid in pids:
        _signal_group(pid, signal.SIGKILL)
    for pid in left:
        os.waitpid(pid, 0)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _fork(job: Job, log: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        with suppress(OSError):  # the child does it too: whoever comes first
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(job.environment)
        seed(os.urandom(8))  # names that vLLM draws must differ between jobs
        job.work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
