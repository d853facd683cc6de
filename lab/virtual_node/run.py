"""Run a workload through a rehearsed engine, all requests there at the start, and say how fast it was."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from lab.virtual_node.executor import OUTPUT_TOKENS, VirtualNodeExecutor
from lab.virtual_node.launch import RehearsedEngine, rehearsed_core
from lab.virtual_node.sequences import END_TOKEN
from lab.virtual_node.steady_part import KvSample, SteadyPart
from lab.virtual_node.watch import RunWatch
from pipemax.sim.result import STEADY_SHARE
from pipemax.sim.workloads import Workload

_FIRST_TOKEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalResult:
    """One run's figures; seconds are the node's."""

    seconds: float
    num_steps: int
    total_tokens_per_s: float
    """Prompts and outputs over the whole run, drain included; a prompt computed twice counts once."""
    steady_tokens_per_s: float
    """The same until STEADY_SHARE of the requests had finished: outputs made by then, and prompts that had ended."""
    host_ms_per_step: float
    """The core's own time, scheduler and all, by the run's clock."""
    host_bubble: float
    """Share of the run in which the first stage had no step while the core worked."""
    busy: float
    """Share of the run in which a stage computes, mean over the stages."""
    copy_counts: dict[str, float]
    """PipeMax's counts of evictions and prefetches; empty for stock vLLM."""
    steady: SteadyPart
    """The run until STEADY_SHARE of the requests had finished."""
    kv: tuple[KvSample, ...]
    """How full the pools were, over the whole run."""


def rehearse(
    engine: RehearsedEngine,
    workload: Workload,
    *,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> RehearsalResult:
    """Run all requests. ``on_step`` is called after each step with the number of requests that have finished."""
    with rehearsed_core(engine) as core:
        executor = core.model_executor
        assert isinstance(executor, VirtualNodeExecutor), executor
        with executor.clock.paused():
            add_requests(core, workload, vocab_size=engine.model.vocab_size, seed=seed)
        begin_s, worked_s = executor.clock.now_s(), executor.clock.worked_s
        watch = RunWatch(core, executor)
        steady = _run(core, executor, workload, watch, on_step)
        seconds = executor.clock.now_s() - begin_s
        usage = executor.node.usage
        scheduler = core.scheduler
        return RehearsalResult(
            seconds=seconds,
            num_steps=usage.num_steps,
            total_tokens_per_s=workload.total_tokens / seconds,
            steady_tokens_per_s=steady.tokens_per_s,
            host_ms_per_step=1e3 * (executor.clock.worked_s - worked_s) / usage.num_steps,
            host_bubble=usage.host_bubble_s / seconds,
            busy=usage.stage_s / executor.node.num_stages / seconds,
            copy_counts=scheduler.copy_counts() if hasattr(scheduler, "copy_counts") else {},
            steady=steady,
            kv=watch.kv(),
        )


def add_requests(core: EngineCore, workload: Workload, *, vocab_size: int, seed: int = 0) -> None:
    """Add all requests, named by their numbers, with random prompts that share only the workload's prefix.

    Their ``max_tokens`` is what a careful user would set: the longest output of the table.
    """
    rng = np.random.default_rng(seed)
    most = int(workload.output_tokens.max())
    prefix = rng.integers(_FIRST_TOKEN, vocab_size, workload.shared_prefix_tokens).tolist()
    for number, (num_prompt, num_outputs) in enumerate(
        zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True)
    ):
        own = rng.integers(_FIRST_TOKEN, vocab_size, num_prompt - len(prefix)).tolist()
        request = EngineCoreRequest(
            request_id=str(number),
            prompt_token_ids=prefix + own,
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=most,
                temperature=0.0,
                ignore_eos=True,
                stop_token_ids=[END_TOKEN],
                detokenize=False,
                extra_args={OUTPUT_TOKENS: num_outputs},
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(request))


def _run(
    core: EngineCore,
    executor: VirtualNodeExecutor,
    workload: Workload,
    watch: RunWatch,
    on_step: Callable[[int], None] | None,
) -> SteadyPart:
    left = dict(enumerate(workload.output_tokens.tolist()))
    prompts: list[int] = workload.prompt_tokens.tolist()
    drain_at = min(len(workload) - 1, len(workload) - int(STEADY_SHARE * len(workload)))
    steady: SteadyPart | None = None
    num_tokens = 0
    begun: set[int] = set()
    while left:
        by_client, _ = core.step_fn()
        with executor.clock.paused():
            for output in (by_client or {}).get(0, EngineCoreOutputs()).outputs:
                number = int(output.request_id)
                num_tokens += len(output.new_token_ids)
                left[number] -= len(output.new_token_ids)
                if number not in begun:
                    begun.add(number)
                    num_tokens += prompts[number]
                if output.finish_reason is not None:
                    missing = left.pop(number)
                    assert missing == 0, f"request {number} ended {missing} tokens early"
                    if len(left) == drain_at:
                        steady = watch.steady_part(num_tokens)
            watch.sample()
            if on_step is not None:
                on_step(len(workload) - len(left))
    assert steady is not None, "a workload has requests, so its steady part ends"
    return steady
