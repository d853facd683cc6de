"""TD-Pipe: prefill and decode separated in time, batches balanced by count, KV only on the GPU.

It follows the published scheduler: prompts are taken first come first served, in small steps, until the predicted usage
at some future point reaches 0.9 of the blocks. Every n decode steps, decode's intensity is compared with the share
of a prefill phase that would not be bubble. Decode goes on behind the last prompt with the requests that are ready.
Two things flatter it: output lengths are predicted perfectly, and that comparison uses the same 0.9 (its code
counts up to 1.0 there, and so goes back for a prompt or two at a time).
"""

from collections import deque
from collections.abc import Iterable
from functools import partial

import numpy as np

from pipemax.domain.specs import Parallelism
from pipemax.sim.machine import BLOCK_TOKENS, Machine, summarize_machines
from pipemax.sim.pipeline import Step
from pipemax.sim.result import Progress, SimulationResult
from pipemax.sim.stage_times import StepWork
from pipemax.sim.systems.running_requests import RunningSet
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.systems.waiting_prompts import BlockPool, Prompt, add_prefill, require_fit, waiting_prompts

FUTURE_POINTS = np.array([5] + [2**power for power in range(3, 13)])
USAGE_LIMIT = 0.9
PEAK_BATCH = 192
"""Tokens that close a prefill step (prompts × longest prompt), and the batch beyond which decode is intense."""
REFERENCE_BATCH = 256
REFILL_SHARES = (0.15, 0.25, 0.35, 0.5, 0.65)


class TdPipe:
    """One run.

    ``refill_share`` replaces the published comparison: decode goes back to prefill once this share of the blocks is
    free.
    """

    def __init__(self, scenario: Scenario, *, refill_share: float | None = None) -> None:
        self._scenario = scenario
        self._refill_share = refill_share
        self._queue, self._links, recording = scenario.start()
        self._n = scenario.node.num_gpus
        self._shared = scenario.workload.shared_prefix_tokens
        self._machine = Machine(
            self._queue,
            self._links,
            scenario.node,
            scenario.model,
            Parallelism(pipeline=self._n, tensor=1),
            recording,
            shared_tokens=self._shared,
        )
        self._progress = Progress(scenario.workload, self._queue, [self._machine.usage])
        self._pool = BlockPool(self._machine.capacity.gpu_blocks, BLOCK_TOKENS, self._shared)
        self._waiting = waiting_prompts(scenario.workload)
        require_fit(self._pool, self._waiting)
        self._batches = [RunningSet(BLOCK_TOKENS, self._shared) for _ in range(self._n)]
        self._ready: deque[tuple[int, int, int]] = deque()  # request, KV tokens, outputs to come: in no batch
        self._in_flight = [False] * self._n
        self._decode_count = 0
        self._num_prefilling = 0
        self._recomputed_tokens = 0

    def simulate(self) -> SimulationResult:
        self._start_prefill()
        self._queue.run()
        return summarize_machines(
            "td_pipe" if self._refill_share is None else "td_pipe_tuned",
            self._scenario.workload,
            [self._machine],
            self._progress,
            recomputed_tokens=self._recomputed_tokens,
        )

    def _live(self) -> Iterable[tuple[int, int, int]]:
        yield from self._ready
        for batch in self._batches:
            yield from batch.members()

    def _next_prompts(self) -> list[Prompt]:
        """Return waiting prompts in order, until the predicted usage at some future point reaches its limit."""
        usage = np.zeros(len(FUTURE_POINTS))
        live = list(self._live())
        if live:
            lengths = np.array(live)
            alive = lengths[:, 2, None] >= FUTURE_POINTS
            usage += (-(-(lengths[:, 1, None] + FUTURE_POINTS) // BLOCK_TOKENS) * alive).sum(axis=0)
        chosen, free = [], self._pool.num_free
        for prompt in self._waiting:
            need = self._pool.blocks_of(prompt.tokens)
            if need > free or usage.max() >= USAGE_LIMIT * self._pool.num_blocks:
                break
            usage += -(-(prompt.tokens + FUTURE_POINTS) // BLOCK_TOKENS) * (prompt.outputs >= FUTURE_POINTS)
            free -= need
            chosen.append(prompt)
        return chosen

    def _prefill_steps(self, prompts: list[Prompt]) -> list[list[Prompt]]:
        steps: list[list[Prompt]] = []
        for prompt in prompts:
            if not steps or len(steps[-1]) * max(member.tokens for member in steps[-1]) >= PEAK_BATCH:
                steps.append([])
            steps[-1].append(prompt)
        return steps

    def _start_prefill(self) -> None:
        """Submit all prefill steps at once: prompts do not depend on one another, so stage 1 stays busy."""
        for members in self._prefill_steps(self._next_prompts()):
            work = StepWork()
            for prompt in members:
                self._waiting.popleft()
                self._pool.take(self._pool.blocks_of(prompt.tokens))
                add_prefill(work, self._shared, prompt.tokens, ends=True)
            self._num_prefilling += len(members)
            self._machine.run(work, partial(self._prefilled, members))

    def _prefilled(self, prompts: list[Prompt], _: Step) -> None:
        self._num_prefilling -= len(prompts)
        for prompt in prompts:
            if prompt.outputs == 1:
                self._pool.give_back(self._pool.blocks_of(prompt.tokens))
                self._progress.finish(prompt.request)
            else:
                self._ready.append((prompt.request, prompt.tokens, prompt.outputs - 1))
        self._resume_decode()

    def _resume_decode(self) -> None:
        idle = [index for index in range(self._n) if not self._in_flight[index]]
        for index in idle:
            self._give_up_surplus(index)
        for index in idle:
            self._decode(index)
        if not any(self._in_flight) and self._num_prefilling == 0 and self._waiting:
            self._start_prefill()

    def _decode(self, index: int) -> None:
        """Send batch ``index``, after the phase check and the balancing of counts."""
        batch = self._batches[index]
        while len(batch) < self._share(index) and self._ready:
            batch.join(*self._ready.popleft())
        if not len(batch):
            return
        if self._decode_count % self._n == 0 and self._num_prefilling == 0 and self._prefill_is_better():
            self._start_prefill()
        self._decode_count += 1
        while len(batch) and batch.new_blocks() > self._pool.num_free:
            self._preempt(batch)
        if not len(batch):
            return
        self._pool.take(batch.new_blocks())
        self._in_flight[index] = True
        work = StepWork(decode_requests=len(batch), decode_context_tokens=batch.context_tokens)
        self._machine.run(work, partial(self._decoded, index))

    def _decoded(self, index: int, _: Step) -> None:
        self._in_flight[index] = False
        for request, num_blocks in self._batches[index].step():
            self._pool.give_back(num_blocks)
            self._progress.finish(request)
        self._scenario.report(self._progress.num_finished)
        self._resume_decode()

    def _share(self, index: int) -> int:
        """Return how many of all requests a batch should hold: work stealing balances the count."""
        total = self._num_prefilling + len(self._ready) + sum(len(batch) for batch in self._batches)
        return total // self._n + (index < total % self._n)

    def _give_up_surplus(self, index: int) -> None:
        batch, share = self._batches[index], self._share(index)
        while len(batch) > share:
            request = batch.newest
            self._ready.append((request, *batch.leave(request)))

    def _preempt(self, batch: RunningSet) -> None:
        request = batch.newest
        self._pool.give_back(batch.blocks_of(request))
        context_tokens, outputs = batch.leave(request)
        self._waiting.appendleft(Prompt(request=request, tokens=context_tokens + 1, outputs=outputs))
        self._recomputed_tokens += context_tokens + 1
        self._machine.usage.tokens_done -= context_tokens + 1 + self._shared

    def _prefill_is_better(self) -> bool:
        """Return whether decode's intensity is below the share of a prefill phase that is not bubble."""
        if self._refill_share is not None:
            return self._pool.num_free >= self._refill_share * self._pool.num_blocks
        num_live = sum(1 for _ in self._live())
        batch = num_live // self._n
        if not self._waiting or batch > PEAK_BATCH:
            return False
        prompts = self._next_prompts()
        if not prompts:
            return False
        stage_s = [self._tokens_s(prompt.tokens) for prompt in prompts]
        longest_s = max(stage_s)
        prefill_s = sum(stage_s) + (self._n - 1) * longest_s
        decode_s = self._tokens_s((num_live + len(prompts)) // self._n)
        bubble_s = (longest_s - decode_s) * (self._n - 1)
        intensity = batch / self._tokens_s(batch) / (REFERENCE_BATCH / self._tokens_s(REFERENCE_BATCH))
        return (1.0 if batch >= PEAK_BATCH else intensity) < (prefill_s - bubble_s) / prefill_s

    def _tokens_s(self, tokens: int) -> float:
        """Return the seconds of a step on a stage by its tokens only, as TD-Pipe's profile does."""
        return self._machine.times.stage_s(StepWork(prefill_tokens=tokens))[0]


def simulate_tuned(scenario: Scenario) -> SimulationResult:
    """Simulate with the refill share chosen by hindsight: the best that separate phases on only the GPU can do."""
    runs = [TdPipe(scenario, refill_share=share).simulate() for share in REFILL_SHARES]
    return max(runs, key=lambda run: run.total_tokens_per_s)
