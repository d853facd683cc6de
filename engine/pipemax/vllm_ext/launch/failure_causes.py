"""Say in one line why an engine failed, and what to change in its config: what vLLM's processes recorded, and remedies.

The remedies name the fields of ``pipemax.config.EngineConfig``. They are found by vLLM's words; a cause in other
words is told without a remedy.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from pydantic import ValidationError

from pipemax.node.failure_records import Failure, innermost
from pipemax.vllm_ext.seam.processes import CORE_PROCESS
from pipemax.vllm_ext.seam.vllm_types import EngineDeadError

_MORE_GPUS = "split the model over more GPUs (pipeline_parallel_size, tensor_parallel_size)"
_LESS_HOST_MEMORY = (
    "lower host_kv_gib (policy pipemax) or cpu_kv_gib, or give the executor more memory "
    "(spark.executor.memoryOverhead)"
)
_REMEDIES = (
    (
        r"host KV pool .* cannot be pinned",
        "raise the limit on locked memory (ulimit -l unlimited in the shell, LimitMEMLOCK=infinity of a service, "
        "--ulimit memlock=-1 of a container, on Kubernetes that of its runtime), or lower host_kv_gib",
    ),
    (
        r"KV cache is needed, which is larger than the available|No available memory for the cache blocks",
        "raise the KV cache's memory (gpu_memory_utilization, without GPUs cpu_kv_gib, or what vllm: sets instead), "
        f"lower max_model_len, or {_MORE_GPUS}",
    ),
    (
        r"Free memory on device .* is less than desired GPU memory utilization",
        "end what else uses the GPU, or lower gpu_memory_utilization",
    ),
    (
        r"OutOfMemoryError|out of memory",
        f"{_MORE_GPUS}, or lower gpu_memory_utilization, max_num_seqs or max_num_batched_tokens",
    ),
    (
        r"is less than requested memory for kv|leaving none\s+for the KV cache",
        "lower cpu_kv_gib, which each pipeline stage takes, or pipeline_parallel_size",
    ),
    (r"MemoryError|[Cc]an(no|')t allocate memory", _LESS_HOST_MEMORY),
    (
        r"Model architecture.* (not supported|was supported|failed to be inspected)",
        "name another model, or an engine environment (--engine-python) whose vLLM has this one",
    ),
    (
        r"Cannot find any model weights|Weight files referenced in index but missing|SafetensorError|"
        r"Invalid repository ID or local directory|HFValidationError|Couldn't instantiate the backend tokenizer|"
        r"FileNotFoundError",
        "let model name a hub model, or a directory that every executor has, with the checkpoint's config.json, "
        "weights and tokenizer, all complete",
    ),
    (
        r"trust_remote_code",
        "set trust_remote_code: true, if you trust the code that comes with the checkpoint",
    ),
)
_SIGNAL_REMEDIES = {
    signal.SIGKILL: f"which the kernel does when memory runs out: {_LESS_HOST_MEMORY}",
    signal.SIGBUS: "which the kernel does when shared memory runs out: enlarge the container's /dev/shm",
}
_VLLM_S_ADVICE = re.compile(
    r"(Try increasing|Supported architectures:|See https?:|To resolve:|Please ).*", re.DOTALL
)
_MOST_CHARACTERS = 500


def cause_of(error: BaseException, failures: Sequence[Failure], *, core_exit_code: int | None = None) -> str:
    """Explain an error that reached the engine's own process, by the failures that its other processes recorded.

    ``core_exit_code`` is that of vLLM's core process, if it has ended and vLLM still knows it.
    """
    failure = _first_cause(failures)
    if failure is None and _is_death_of_core(error):
        return _death_of_core(error, core_exit_code)
    if failure is None:
        failure = _own_failure(error)
    return _exit(failure) if failure.exit_code is not None else _exception(failure)


def _own_failure(error: BaseException) -> Failure:
    failure = Failure.of(error)
    cause = innermost(error)
    if not isinstance(cause, ValidationError):
        return failure
    # Its text has further lines, with the values, which may be secret.
    faults = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in cause.errors())
    return replace(failure, error="ValueError", message=faults)


def _first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Choose the first process that ended without a word, otherwise the first exception: others follow from it.

    When the core fails, its workers end with it, so what is recorded after the core's exception says nothing.
    """
    of_core = [n for n, failure in enumerate(failures) if failure.process.startswith(CORE_PROCESS)]
    failures = failures[: of_core[0] + 1] if of_core else failures
    raised = [failure for failure in failures if failure.exit_code is None]
    pids = {failure.pid for failure in raised}
    silent = [failure for failure in failures if failure.pid not in pids]
    return next(iter([*silent, *raised]), None)


def _is_death_of_core(error: BaseException) -> bool:
    return isinstance(error, EngineDeadError) or "Failed core proc(s)" in str(error)


def _death_of_core(error: BaseException, exit_code: int | None) -> str:
    """Explain the end of vLLM's core process. At a start vLLM has its exit code at times, in its error's text."""
    match = re.search(r"Failed core proc\(s\): \{'\w+': (-?\d+)\}", str(error))
    if match is not None:
        exit_code = int(match[1])
    if exit_code is not None:
        return _exit(Failure(pid=0, process=CORE_PROCESS, exit_code=exit_code))
    return (
        "vLLM's core process ended without an exception, as a process does that is killed; the kernel does that when "
        f"memory runs out: {_LESS_HOST_MEMORY}"
    )


def _exit(failure: Failure) -> str:
    assert failure.exit_code is not None, failure
    if failure.exit_code >= 0:
        return f"vLLM's process {failure.process} ended with status {failure.exit_code} and left no exception"
    try:
        number = signal.Signals(-failure.exit_code)
    except ValueError:
        return f"vLLM's process {failure.process} was killed by signal {-failure.exit_code}"
    remedy = _SIGNAL_REMEDIES.get(number)
    return f"vLLM's process {failure.process} was killed by {number.name}" + (f", {remedy}" if remedy else "")


def _exception(failure: Failure) -> str:
    text = f"{failure.error}: {failure.message}"
    cause = " ".join(_VLLM_S_ADVICE.sub("", text).split()).rstrip(".: ")
    cause = cause if len(cause) <= _MOST_CHARACTERS else f"{cause[:_MOST_CHARACTERS]} …"
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, text, re.DOTALL):
            return f"{cause}. Remedy: {remedy}"
    return f"{cause} ({failure.place})" if failure.process else cause
