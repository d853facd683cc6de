"""Engines that are started once and take on many settings: pools, batches, faults and policy change while idle.

An engine core runs in this process, its workers in theirs. Between two loads the core gets a new scheduler, and the
workers' copies are told to go wrong or not; the model stays loaded. Tests drive vLLM's ``LLMEngine`` themselves.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from vllm.envs import disable_envs_cache
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from pipemax.config import EngineConfig
from pipemax.domain.plan import Phase, StepId, StepPlan
from pipemax.transfer.commands import StepCopies
from pipemax.transfer.cuda.device import Fence
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config
from pipemax.vllm_ext.runtime_settings import RuntimeSettings
from pipemax.vllm_ext.scheduler.scheduler import PipeMaxAsyncScheduler, PipeMaxScheduler
from pipemax.vllm_ext.scheduler.tunable import TunableAsyncScheduler, TunableScheduler
from pipemax.vllm_ext.worker.connector import StepMetadata
from tests.fakes.vllm_kinds import (
    asynchronous_scheduling_on_cpu,
    restrict_sampling_by_pytorch,
    runner_version,
)
from tests.parity.cases import BLOCK_TOKENS, MAX_MODEL_LEN, Answer, Answers, Request
from tests.parity.families import MULTIMODAL
from tests.parity.faulty_connector import Fault, WorkerPool, host_pool, set_fault

_REPOSITORY = Path(__file__).parents[2]
GPU_BLOCKS = 320  # at start; settings take fewer
HOST_MIB = 96
WAVE_GROUPS = 4
"""A layer each, of the four of a stage."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What an engine is for its whole life."""

    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters, which ``families`` makes."""
    family: str = "llama"
    """Of the model: see ``families``."""
    tp: int = 1
    pp: int = 1
    runner: int = 1
    asynchronous: bool = False
    policy: str = "pipemax"
    kv_cache_dtype: str = "auto"
    frees_windows: bool = False
    """KV that has left windows is freed, by vLLM's hybrid KV cache manager."""
    gpu_path: bool = False
    """A GPU's worker and transfers, over vLLM's worker for CPUs and ``late_cuda``."""

    @property
    def dtype(self) -> str:
        """float32, because batches differ and their arithmetic must not; kernels for quantized weights take 16 bits."""
        return "bfloat16" if self.family in ("awq", "gptq", "fp8") else "float32"

    @property
    def block_tokens(self) -> int:
        """vLLM's kernels for latent attention on a CPU know one size only."""
        return 16 if self.family == "deepseek" else BLOCK_TOKENS

    @property
    def has_waves(self) -> bool:
        """Whether the layers tell of their computation, and settings may have waves."""
        is_plain = self.family == "llama" and not (self.gpu_path or self.frees_windows)
        return is_plain and self.policy == "pipemax" and self.pp == 2 and self.tp == 1

    @property
    def depth(self) -> int:
        """Steps that can be in flight."""
        return self.pp + self.asynchronous

    def __str__(self) -> str:
        path = " GPU path" if self.gpu_path else ""
        kv = "" if self.kv_cache_dtype == "auto" else f" KV {self.kv_cache_dtype}"
        kv += " freed windows" if self.frees_windows else ""
        tensor = "" if self.tp == 1 else f"tp{self.tp} "
        family = "" if self.family == "llama" else f"{self.family} "
        schedule = "async" if self.asynchronous else "sync"
        family += "LoRA " if self.adapters else ""
        return f"{family}{tensor}pp{self.pp} V{self.runner} {schedule}{path}{kv}"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What can change while an engine is idle."""

    num_batches: int = 2
    gpu_blocks: int = 24
    """At least 17 hold a sequence of ``MAX_MODEL_LEN`` and its next token."""
    host_blocks: int = 256
    slots: int | None = None
    """Of the V2 runner; default: as many as it has."""
    fault: Fault | Fence = Fault.POISON
    """A fence is one that copies and computation over the GPU path do without."""
    is_stock: bool = False
    """vLLM's own scheduler, with ample blocks: what the answers must be."""
    has_live_limits: bool = False
    """vLLM's own scheduler, with limits that may change."""
    controller: dict[str, Any] = field(default_factory=dict)
    waves: bool = False
    """Only of a kind that ``has_waves``."""


STOCK = Setting(is_stock=True, gpu_blocks=GPU_BLOCKS - 1, fault=Fault.NONE)


class _ObservedScheduler(PipeMaxScheduler):
    """Ours, watched."""

    on_plan: Callable[[StepPlan], None] | None = None
    """Called with each plan, before it is carried out."""
    num_evicted_in_flight = 0
    num_planned_in_flight = 0
    num_resent = 0
    num_found_prefixes = 0
    num_wave_prefetches = 0

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[Any, int, int, bool]:
        found = super()._get_local_prefix_cache_hit(request)
        self.num_found_prefixes += found[1] > 0
        return found

    def sort_started(self, *args: Any) -> tuple[list[Any], list[Any]]:
        started = super().sort_started(*args)
        self.num_resent += len(self._resent)
        return started

    def step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        metadata = super().step_metadata(output)
        self.num_wave_prefetches += len(metadata.copies.wave_prefetches)
        return metadata

    def _make_room(self, plan: StepPlan) -> None:
        if self.on_plan is not None:
            self.on_plan(plan)
        self.num_evicted_in_flight += sum(
            self.requests[victim].num_in_flight_tokens > 0 for victim in plan.evict
        )
        decodes = plan.run if plan.phase is Phase.DECODE else plan.run[: plan.num_decodes or 0]
        self.num_planned_in_flight += sum(self.requests[name].num_output_placeholders > 0 for name in decodes)
        super()._make_room(plan)


class _ObservedAsyncScheduler(_ObservedScheduler, PipeMaxAsyncScheduler):
    pass


class _StockScheduler(Scheduler):
    """vLLM's own, with a connector that has nothing to do."""

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: SchedulerOutput) -> StepMetadata:
        return StepMetadata(StepId(self.current_step), StepCopies())

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        model_runner_output.kv_connector_output = None  # measured times, only for ours
        return super().update_from_output(scheduler_output, model_runner_output)


class _StockAsyncScheduler(_StockScheduler, AsyncScheduler):
    pass


class _LimitedScheduler(_StockScheduler, TunableScheduler):
    pass


class _LimitedAsyncScheduler(_StockScheduler, TunableAsyncScheduler):
    pass


class ParityEngine:
    """One engine. Not thread-safe: the caller steps it."""

    def __init__(self, model: str, kind: Kind) -> None:
        self.kind = kind
        self._adapters = {
            name: LoRARequest(name, number, f"{model}-{name}") for number, name in enumerate(kind.adapters, 1)
        }
        config = _engine_config(model, kind)
        with _starting(config, kind):
            vllm_config = make_vllm_config(config)
            if vllm_config.kv_transfer_config is not None:
                vllm_config.kv_transfer_config.kv_connector = "FaultyConnector"
                vllm_config.kv_transfer_config.kv_connector_module_path = "tests.parity.faulty_connector"
            if kind.gpu_path:
                vllm_config.parallel_config.worker_cls = "tests.parity.gpu_path.GpuPathWorker"
                vllm_config.kv_transfer_config.kv_connector = "GpuPathConnector"
                vllm_config.kv_transfer_config.kv_connector_module_path = "tests.parity.gpu_path"
            self.max_concurrent_batches = vllm_config.max_concurrent_batches
            self.vllm_config = vllm_config
            self.llm = LLMEngine.from_vllm_config(
                vllm_config, usage_context=UsageContext.LLM_CLASS, disable_log_stats=True
            )
        self._core: Any = self.llm.engine_core.engine_core
        if kind.runner == 2:
            self.call_workers(restrict_sampling_by_pytorch)
        self._num_slots = vllm_config.scheduler_config.max_num_seqs
        self._num_runs = 0
        self.max_left_in_flight = 0
        """Most steps with requests that were in flight after a step of the core, since the last ``reset``."""

    @property
    def scheduler(self) -> Any:
        return self._core.scheduler

    @property
    def counters(self) -> Any:
        """Since the last ``reset``."""
        return self._core.scheduler._counters

    @property
    def num_resent(self) -> int:
        """Requests that had lost their slot when they came back, since the last ``reset``."""
        return int(self._core.scheduler.num_resent)

    def reset(self, setting: Setting) -> None:
        """A new scheduler, empty pools; NaN in the host's, if the fault is that."""
        self._drain()
        self.max_left_in_flight = 0
        core, old = self._core, self._core.scheduler
        config = core.vllm_config
        config.cache_config.num_gpu_blocks = setting.gpu_blocks + 1  # vLLM keeps one as its null block
        config.scheduler_config.max_num_seqs = setting.slots or self._num_slots
        extra_config = config.kv_transfer_config.kv_connector_extra_config
        settings = RuntimeSettings.from_extra_config(extra_config)
        assert self.kind.has_waves or not setting.waves, self.kind
        extra_config.update(
            replace(
                settings,
                num_batches=setting.num_batches,
                host_kv_tokens=setting.host_blocks * self.kind.block_tokens,
                stores_tokens=self.kind.gpu_path,
                controller=setting.controller,
                wave_groups=WAVE_GROUPS if setting.waves else None,
            ).to_extra_config()
        )
        with runner_version(self.kind.runner):
            core.scheduler = _scheduler_class(setting, self.kind)(
                vllm_config=config,
                kv_cache_config=replace(old.kv_cache_config, num_blocks=setting.gpu_blocks + 1),
                structured_output_manager=core.structured_output_manager,
                block_size=self.kind.block_tokens,
            )
        core.scheduler.finished_req_ids = old.finished_req_ids  # the workers have not heard of them
        self.call_workers(set_fault, setting.fault)

    def run(
        self,
        requests: Sequence[Request],
        abort_at: dict[int, Sequence[str]] | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> Answers:
        """All at once; ``abort_at``: who is given up after how many steps. Answers of all that ended by themselves."""
        with runner_version(self.kind.runner):  # vLLM asks the environment for each request
            return self._run(requests, abort_at or {}, before_step)

    def _run(
        self,
        requests: Sequence[Request],
        abort_at: dict[int, Sequence[str]],
        before_step: Callable[[], None],
    ) -> Answers:
        self._num_runs += 1
        names: dict[str, str] = {}
        for request in requests:
            unique = f"{request.id}-run{self._num_runs}"  # an aborted id's last step may still be in flight
            names[unique] = request.id
            adapter = self._adapters.get(request.adapter or "")
            self.llm.add_request(
                unique, tokens_input(list(request.prompt)), request.params, lora_request=adapter
            )
        answers: Answers = {}
        num_steps = 0
        while self.llm.has_unfinished_requests():
            before_step()
            for output in self.llm.step():
                if output.finished:
                    assert isinstance(output, RequestOutput)
                    answers[names[output.request_id]] = _answer(output)
            left = [
                output for _, output, _ in self._core.batch_queue or () if output.total_num_scheduled_tokens
            ]
            self.max_left_in_flight = max(self.max_left_in_flight, len(left))
            num_steps += 1
            given_up = abort_at.get(num_steps, ())
            self.llm.abort_request([unique for unique, name in names.items() if name in given_up])
        return {name: answer for name, answer in answers.items() if answer.finish_reason != "abort"}

    def host_pools(self) -> list[WorkerPool]:
        """Each worker's."""
        return self.call_workers(host_pool)

    def loaded_bytes(self) -> list[int]:
        """Bytes copied to each stage's GPU pools since the last ``reset``, as the workers have reported."""
        return [copies.loaded_bytes for copies in self.scheduler._reports.copies]

    def call_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of the worker and ``args`` on each worker; return what they return."""
        answers: list[Any] = self._core.model_executor.collective_rpc(function, args=args)
        return answers

    def _drain(self) -> None:
        """Steps that were still in flight when the last request ended."""
        while self._core.batch_queue:
            self._core.step_fn()

    def close(self) -> None:
        self.llm.engine_core.shutdown()


def _scheduler_class(setting: Setting, kind: Kind) -> type[Scheduler]:
    if setting.has_live_limits:
        return _LimitedAsyncScheduler if kind.asynchronous else _LimitedScheduler
    if setting.is_stock:
        return _StockAsyncScheduler if kind.asynchronous else _StockScheduler
    return _ObservedAsyncScheduler if kind.asynchronous else _ObservedScheduler


def _answer(output: RequestOutput) -> Answer:
    (sequence,) = output.outputs
    return Answer(
        tokens=tuple(sequence.token_ids),
        text=sequence.text,
        finish_reason=sequence.finish_reason,
        logprobs=tuple(
            {token: entry.logprob for token, entry in position.items()}
            for position in sequence.logprobs or ()
        ),
    )


def _engine_config(model: str, kind: Kind) -> EngineConfig:
    return EngineConfig(
        model=model,
        policy=kind.policy,
        dtype=kind.dtype,
        lora={name: f"{model}-{name}" for name in kind.adapters},
        quantization="fp8_per_channel" if kind.family == "fp8" else None,
        kv_cache_dtype=kind.kv_cache_dtype,
        tensor_parallel_size=kind.tp,
        pipeline_parallel_size=kind.pp,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=24,
        max_num_batched_tokens=256,
        block_size=kind.block_tokens,
        cpu_kv_gib=0.25,
        host_kv_gib=HOST_MIB / 1024,
        batching="separated" if kind.family == "deepseek" else "auto",
        enable_prefix_caching=not kind.frees_windows,
        waves="on" if kind.has_waves else "auto",
        vllm={
            "num_gpu_blocks_override": GPU_BLOCKS,
            "distributed_executor_backend": "mp",
            # On a CPU with AMX, stock vLLM would take other kernels, for 16 bits.
            **({"attention_backend": "CPU_MLA"} if kind.family == "deepseek" else {}),
            **({"language_model_only": True} if kind.family in MULTIMODAL else {}),
            **({"disable_hybrid_kv_cache_manager": False} if kind.frees_windows else {}),
        },
    )


@contextmanager
def _starting(config: EngineConfig, kind: Kind) -> Iterator[None]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
        )  # the core in this process, so that it can be reset
        patch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")  # with split KV, sums depend on the batch
        patch.setenv("PYTHONPATH", str(_REPOSITORY), prepend=os.pathsep)  # the workers import the tests
        stack.enter_context(launch_environment(config))
        stack.enter_context(runner_version(kind.runner))
        if kind.asynchronous:
            stack.enter_context(asynchronous_scheduling_on_cpu())
        stack.callback(
            disable_envs_cache
        )  # a core that started keeps the environment, and the next kind differs
        yield
