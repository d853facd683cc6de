"""Each cause of a failed start is told with its figures, and with fields of the engine config to change."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import filter_duplicate_safetensors_files
from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.worker.utils import request_memory

from pipemax.config import EngineConfig
from pipemax.domain.errors import TransferError
from pipemax.domain.units import GIB
from pipemax.node.failure_records import (
    FAILURES_VARIABLE,
    Failure,
    FailureRecords,
    record,
    record_what_vllm_logs,
)
from pipemax.transfer.cuda.pinned_pool import PinnedHostPool
from pipemax.transfer.layout import BlockLayout
from pipemax.vllm_ext.launch.failure_causes import cause_of

CORE_FAILED = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailureRecords]:
    records = FailureRecords()
    monkeypatch.setenv(FAILURES_VARIABLE, records.path)
    record_what_vllm_logs()
    yield records
    records.close()


def fail_in_core(fail: Callable[[], object], *, logger: str = "vllm.v1.engine.core") -> None:
    """Do what vLLM's process does with an exception that ends it: log it."""
    try:
        fail()
    except Exception:
        logging.getLogger(logger).exception("EngineCore failed to start.")
    else:
        pytest.fail("nothing failed")


def too_little_kv_memory() -> None:
    _check_enough_kv_cache_memory(2 * GIB, lambda: 4 * GIB, 8192, lambda _: 4096)


def no_kv_memory() -> None:
    _check_enough_kv_cache_memory(0, lambda: 4 * GIB, 8192, lambda _: 4096)


def gpu_in_use() -> None:
    snapshot = SimpleNamespace(free_memory=8 * GIB, total_memory=24 * GIB, device_="cuda:0")
    request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=0.9))


def out_of_gpu_memory() -> None:
    # torch raises it on a GPU only; the words are those of torch 2.
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.10 GiB is "
        "free."
    )


def out_of_node_memory() -> None:
    # The words of vLLM's CPU worker, which raises them after it has loaded a model.
    raise ValueError(
        "Available memory on node 0 (3.0/8.0 GiB) on kv cache allocation is less than requested memory for kv (4.0 "
        "GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
    )


def out_of_host_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def no_weights(directory: Path) -> None:
    loader = DefaultModelLoader(LoadConfig())
    loader._prepare_weights(str(directory), None, None, fall_back_to_pt=True, allow_patterns_overrides=None)


def a_weight_file_missing(directory: Path) -> None:
    index = {"weight_map": {"layer": "model-2-of-2.safetensors"}}
    (directory / "index.json").write_text(json.dumps(index))
    filter_duplicate_safetensors_files([], str(directory), "index.json")


def a_weight_file_cut_short(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 16)
    safe_open(directory / "model.safetensors", framework="pt").__enter__()


def pool_not_pinned() -> None:
    class Refusal:
        def register(self, address: int, num_bytes: int) -> None:
            raise TransferError("CUDA could not pin 64 bytes: out of memory")

    layout = BlockLayout(
        num_layers=1, num_kv_heads=1, block_tokens=1, content_bytes=64, layer_stride_bytes=64, block_bytes=64
    )
    PinnedHostPool(layout, 1, Refusal())


@pytest.mark.parametrize(
    ("fail", "told", "settings"),
    [
        (too_little_kv_memory, r"4\.0 GiB KV cache is needed.*\(2\.0 GiB\).* is 4096\. Remedy", "cpu_kv_gib"),
        (no_kv_memory, r"No available memory for the cache blocks\. Remedy", "gpu_memory_utilization"),
        (gpu_in_use, r"cuda:0 \(8\.0/24\.0 GiB\).* Remedy: end what else", "gpu_memory_utilization"),
        (out_of_gpu_memory, r"OutOfMemoryError: CUDA out of memory.* 2\.00 GiB", "tensor_parallel_size"),
        (out_of_node_memory, r"\(3\.0/8\.0 GiB\).*\(4\.0 GiB\)", "cpu_kv_gib"),
        (
            out_of_host_memory,
            r"can't allocate memory: you tried to allocate 1152921504606846976",
            "host_kv_gib",
        ),
        (
            pool_not_pinned,
            r"pool of 0\.0 GiB cannot be pinned, .*out of memory\. Remedy",
            "ulimit -l unlimited",
        ),
    ],
)
def test_too_little_memory_is_told_with_figures_and_settings(
    records: FailureRecords, fail: Callable[[], None], told: str, settings: str
) -> None:
    fail_in_core(fail)
    cause = cause_of(CORE_FAILED, records.read())
    assert re.search(told, cause), cause
    assert settings in remedy(cause)


@pytest.mark.parametrize(
    ("fail", "told"),
    [
        (no_weights, "Cannot find any model weights with `"),
        (a_weight_file_missing, "model-2-of-2.safetensors"),
        (a_weight_file_cut_short, "SafetensorError: Error while deserializing header"),
    ],
)
def test_a_missing_or_broken_file_is_named(
    records: FailureRecords, tmp_path: Path, fail: Callable[[Path], None], told: str
) -> None:
    fail_in_core(lambda: fail(tmp_path), logger="vllm.v1.executor.multiproc_executor")
    cause = cause_of(CORE_FAILED, records.read())
    assert told in cause
    assert remedy(cause).startswith("let model name")


def test_the_first_of_several_exceptions_is_told(records: FailureRecords) -> None:
    fail_in_core(out_of_gpu_memory, logger="vllm.v1.executor.multiproc_executor")
    fail_in_core(lambda: (_ for _ in ()).throw(RuntimeError("WorkerProc initialization failed")))
    assert "CUDA out of memory" in cause_of(CORE_FAILED, records.read())


def test_an_exception_that_no_remedy_is_known_for_is_told_with_its_place(records: FailureRecords) -> None:
    fail_in_core(lambda: 1 // 0)
    cause = cause_of(CORE_FAILED, records.read())
    assert re.fullmatch(r"ZeroDivisionError: .* \(.*test_failure_causes\.py:\d+ in <lambda>\)", cause), cause


@pytest.mark.parametrize(
    ("exit_code", "told"),
    [
        (
            -9,
            "VllmWorker-1 was killed by SIGKILL, which the kernel does when memory runs out: lower host_kv_gib",
        ),
        (-7, "VllmWorker-1 was killed by SIGBUS, which the kernel does when shared memory runs out: enlarge"),
        (-11, "VllmWorker-1 was killed by SIGSEGV"),
        (3, "VllmWorker-1 ended with status 3 and left no exception"),
    ],
)
def test_a_worker_that_was_killed_or_left_is_told_before_the_exceptions_that_follow(
    records: FailureRecords, exit_code: int, told: str
) -> None:
    fail_in_core(lambda: (_ for _ in ()).throw(RuntimeError("connection closed by peer")))
    record(Failure(pid=1, process="VllmWorker-1", exit_code=exit_code))
    assert told in cause_of(CORE_FAILED, records.read())


def test_a_worker_that_ends_with_the_failed_core_is_not_the_cause(records: FailureRecords) -> None:
    record(
        Failure(pid=1, process="EngineCore", error="ValueError", message="no such layout", place="core.py:1")
    )
    record(Failure(pid=2, process="VllmWorker-0", exit_code=-15))
    assert cause_of(CORE_FAILED, records.read()) == "ValueError: no such layout (core.py:1)"


def test_a_worker_that_raised_and_then_left_with_a_status_is_told_by_its_exception(
    records: FailureRecords,
) -> None:
    fail_in_core(out_of_gpu_memory)
    raised = records.read()[0]
    record(Failure(pid=raised.pid, process="VllmWorker-0", exit_code=1))
    assert "CUDA out of memory" in cause_of(CORE_FAILED, records.read())


def test_a_core_that_was_killed_is_told() -> None:
    known = RuntimeError(str(CORE_FAILED).replace("{}", "{'EngineCore': -9}"))
    assert "EngineCore was killed by SIGKILL" in cause_of(known, [])
    for error in (CORE_FAILED, EngineDeadError()):
        assert "core process ended without an exception" in cause_of(error, [])
        assert "lower host_kv_gib" in cause_of(error, [])


def test_a_core_that_ended_by_itself_is_not_said_to_have_been_killed() -> None:
    cause = cause_of(EngineDeadError(), [], core_exit_code=1)
    assert cause == "vLLM's process EngineCore ended with status 1 and left no exception"
    assert "EngineCore was killed by SIGSEGV" in cause_of(EngineDeadError(), [], core_exit_code=-11)


def remedy(cause: str) -> str:
    """Return the remedy, all of whose settings exist."""
    text = cause.partition("Remedy: ")[2]
    unknown = set(re.findall(r"[a-z]+(?:_[a-z]+)+", text)) - EngineConfig.model_fields.keys()
    assert text
    assert not unknown, unknown
    return text
