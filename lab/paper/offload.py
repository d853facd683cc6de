"""Offloading on single GPUs, as FlexGen and TightLLM do it.

There are as many independent engines as GPUs, each with its share of the requests and of host memory, and each
streaming the whole model. A step goes through the layers once for all of its requests (zig-zag: layer outer, batch
inner), so the weights and the KV that are not on the GPU are loaded once per step, during the computation. FlexGen
keeps KV on the host, fills the GPU with weights and runs blocks of requests to their end. TightLLM divides the GPU
between weights and KV by what it predicts to be fastest, and refills places as they become free.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np

from pipemax.domain.specs import Parallelism
from pipemax.sim.event_queue import EventQueue, Priority
from pipemax.sim.links import Direction, Links
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.result import Progress, SimulationResult, Usage, summarize
from pipemax.sim.stage_times import StageTimes, StepWork
from pipemax.sim.systems.running_requests import RunningSet
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.systems.waiting_prompts import Prompt, add_prefill, waiting_prompts

PASS_TOKENS = 16384
"""Prompt tokens in one pass over the layers."""
PIECE_BYTES = float(1 << 20)
"""Weights and KV move in large pieces."""
BUFFERED_LAYERS = 2
"""Layers of weights that the GPU holds to load into while it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one engine keeps weights and KV. The GPU's room for KV is filled first; the rest is on the host."""

    gpu_weight_bytes: float
    gpu_kv_tokens: int
    host_kv_tokens: int

    @property
    def kv_tokens(self) -> int:
        return self.gpu_kv_tokens + self.host_kv_tokens


def _placements(scenario: Scenario) -> list[Placement]:
    """Return divisions of one GPU between weights and KV, by how much of the host share is used for KV."""
    node, model = scenario.node, scenario.model
    layer_bytes = model.layer_weight_bytes
    free_bytes = node.gpu.memory_bytes * node.gpu_memory_fraction - node.gpu_reserve_bytes
    free_bytes -= BUFFERED_LAYERS * layer_bytes
    if free_bytes <= 0:
        raise ValueError(f"{model.name}: {BUFFERED_LAYERS} layers do not fit on one {node.gpu.name}")
    host_tokens = int(node.host_kv_bytes / node.num_gpus / model.kv_bytes_per_token)
    choices = []
    for weight_share in np.linspace(0.0, 1.0, 21).tolist():
        weights = min(weight_share * free_bytes, model.weight_bytes)
        gpu_tokens = int((free_bytes - weights) / model.kv_bytes_per_token)
        for host_share in (0.0, 0.1, 0.25, 0.5, 1.0):
            tokens = int(host_share * host_tokens)
            choices.append(
                Placement(gpu_weight_bytes=weights, gpu_kv_tokens=gpu_tokens, host_kv_tokens=tokens)
            )
    return choices


class Offloading:
    """One run: TightLLM's if ``is_adaptive``, otherwise FlexGen's."""

    def __init__(self, scenario: Scenario, *, is_adaptive: bool) -> None:
        self._scenario = scenario
        self._is_adaptive = is_adaptive
        self._queue, self._links, self._recording = scenario.start()
        num_gpus = scenario.node.num_gpus
        times = StageTimes(scenario.node, scenario.model, Parallelism(pipeline=1, tensor=1))
        prompts = list(waiting_prompts(scenario.workload))
        longest = max(prompt.tokens + prompt.outputs for prompt in prompts)
        choices = [choice for choice in _placements(scenario) if choice.kv_tokens >= longest]
        if not choices:
            raise ValueError(
                f"a request of {longest} tokens does not fit into one GPU's share of host memory"
            )
        usages = [Usage() for _ in range(num_gpus)]
        self._progress = Progress(scenario.workload, self._queue, usages)
        step = _StepModel(scenario, times)
        if is_adaptive:
            placement = max(choices, key=lambda choice: step.predicted_tokens_per_s(choice))
        else:
            placement = max(choices, key=lambda choice: (choice.host_kv_tokens, choice.gpu_weight_bytes))
        self._placement = placement
        self._engines = [
            _Engine(self._queue, self._links, gpu, scenario, step, placement, usages[gpu], self._progress)
            for gpu in range(num_gpus)
        ]
        for gpu, engine in enumerate(self._engines):
            engine.waiting = deque(prompts[gpu::num_gpus])
            engine.refills = is_adaptive
        self._usages = usages

    def simulate(self) -> SimulationResult:
        for engine in self._engines:
            engine.start_step()
        self._queue.run()
        return summarize(
            "tightllm" if self._is_adaptive else "flexgen",
            self._scenario.workload,
            self._usages,
            self._links,
            self._progress,
            self._recording,
            num_gpus=self._scenario.node.num_gpus,
            gpu_kv_tokens=self._placement.gpu_kv_tokens * self._scenario.node.num_gpus,
            seconds=self._queue.now_s(),
        )


class _StepModel:
    """What a step computes and loads, and how long that takes."""

    def __init__(self, scenario: Scenario, times: StageTimes) -> None:
        self._node, self._model, self._times = scenario.node, scenario.model, times
        workload = scenario.workload
        self._mean_tokens = float((workload.prompt_tokens + workload.output_tokens / 2).mean())

    def compute_s(self, work: StepWork) -> float:
        return self._times.stage_s(work)[0]

    def load_bytes(self, placement: Placement, context_tokens: int) -> float:
        weights = self._model.weight_bytes - placement.gpu_weight_bytes
        on_host = max(0, context_tokens - placement.gpu_kv_tokens)
        return weights + on_host * self._model.kv_bytes_per_token

    def store_bytes(self, tokens: int) -> float:
        return tokens * self._model.kv_bytes_per_token

    def predicted_tokens_per_s(self, placement: Placement) -> float:
        """Predict the tokens per second of steady decode with the KV full."""
        batch = int(placement.kv_tokens / self._mean_tokens)
        work = StepWork(decode_requests=batch, decode_context_tokens=placement.kv_tokens)
        link = self._node.link.host_to_gpu_bytes_per_s
        rate = min(link, self._node.host_dram_bytes_per_s / self._node.num_gpus)
        load_s = self.load_bytes(placement, placement.kv_tokens) / rate
        return batch / max(self.compute_s(work), load_s)


class _Engine:
    """One GPU's loop."""

    def __init__(
        self,
        queue: EventQueue,
        links: Links,
        gpu: int,
        scenario: Scenario,
        step: _StepModel,
        placement: Placement,
        usage: Usage,
        progress: Progress,
    ) -> None:
        self._queue, self._links, self._gpu = queue, links, gpu
        self._scenario, self._step, self._placement = scenario, step, placement
        self._usage, self._progress = usage, progress
        self._shared = scenario.workload.shared_prefix_tokens
        self._running = RunningSet(BLOCK_TOKENS, self._shared)
        self._reserved: dict[int, int] = {}  # request → KV tokens at its end
        self._reserved_tokens = scenario.workload.shared_prefix_tokens
        self._block_is_filling = True
        self.waiting: deque[Prompt] = deque()
        self.refills = False

    def start_step(self) -> None:
        work, ended = StepWork(), list[Prompt]()
        self._admit(work, ended)
        if work.prefill_tokens == 0 or self.refills:
            work.decode_requests = len(self._running)
            work.decode_context_tokens = self._running.context_tokens
        if work.tokens == 0:
            return
        compute_s = self._step.compute_s(work)
        self._usage.busy_gpu_s += compute_s
        if work.prefill_tokens == 0:
            self._usage.decode_gpu_s += compute_s
        if work.decode_requests:
            self._usage.decode_steps += 1
            self._usage.decode_requests += work.decode_requests
        left = [3]
        end = partial(self._part_done, left, work, ended)
        self._queue.at(self._queue.now_s() + compute_s, Priority.STAGE_DONE, end)
        loads = self._step.load_bytes(self._placement, work.decode_context_tokens)
        for direction, num_bytes in (
            (Direction.HOST_TO_GPU, loads),
            (Direction.GPU_TO_HOST, self._step.store_bytes(work.tokens)),
        ):
            if num_bytes > 0:
                pieces = num_bytes / PIECE_BYTES
                self._links.copy(self._gpu, direction, num_bytes=num_bytes, num_pieces=pieces, on_done=end)
            else:
                left[0] -= 1

    def _admit(self, work: StepWork, ended: list[Prompt]) -> None:
        """Add prompts to this pass. Without refilling, do so only while a new block of requests is being filled."""
        if not self.refills and len(self._running) and not self._block_is_filling:
            return
        self._block_is_filling = False
        while self.waiting and work.prefill_tokens < PASS_TOKENS:
            prompt = self.waiting[0]
            need = prompt.tokens + prompt.outputs
            if self._reserved_tokens + need > self._placement.kv_tokens:
                return
            self.waiting.popleft()
            self._reserved[prompt.request] = need
            self._reserved_tokens += need
            add_prefill(work, self._shared, prompt.tokens, ends=True)
            ended.append(prompt)
        self._block_is_filling = True

    def _part_done(self, left: list[int], work: StepWork, ended: list[Prompt]) -> None:
        """Count one part of the step as done.

        Computation, load and store run concurrently: the step ends with the last of them.
        """
        left[0] -= 1
        if left[0]:
            return
        self._usage.tokens_done += work.tokens + work.prefill_outputs * (1 + self._shared)
        if work.decode_requests:
            for request, _ in self._running.step():
                self._end(request)
        for prompt in ended:
            if prompt.outputs == 1:
                self._end(prompt.request)
            else:
                self._running.join(prompt.request, prompt.tokens, prompt.outputs - 1)
        self.start_step()

    def _end(self, request: int) -> None:
        self._reserved_tokens -= self._reserved.pop(request)
        self._progress.finish(request)
        self._scenario.report(self._progress.num_finished)
