"""Continuous batching as vLLM does it: tensor parallel, pipeline parallel as it was once and as it is, or both.

They differ in how many groups of requests are in flight, whether each group owns a share of the KV pool and of the
requests or all draw on one, whether prefill comes first or is mixed into decode steps in chunks, and whether the groups
are kept equal. Preemption is by recomputation, last in first out. KV is kept only on the GPU. Stock vLLM frees the KV
of layers with a window once the window has moved on.
"""

from collections import deque
from dataclasses import dataclass, replace
from functools import partial

from pipemax.domain.specs import Parallelism
from pipemax.sim.machine import Machine, summarize_machines
from pipemax.sim.pipeline import Step
from pipemax.sim.result import Progress, SimulationResult
from pipemax.sim.stage_times import StepWork
from pipemax.sim.systems.running_requests import RunningSet
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.systems.waiting_prompts import BlockPool, Prompt, add_prefill, require_fit, waiting_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousPolicy:
    """The scheduling of one version and setup of vLLM."""

    name: str
    tensor: int | None
    """GPUs of a stage, None for all of the node's; there are as many groups as stages."""
    own_queues: bool
    """Each group owns 1/n of the blocks and, from the start, 1/n of the requests."""
    prefill_first: bool
    """Steps are prefill or decode, prefill first; otherwise chunks are mixed into decode steps."""
    max_batched_tokens: int
    watermark: float = 0.01
    """Share of the pool that an admission leaves free."""
    max_running: int | None = None
    """Maximum number of requests that run at once, over all groups."""
    keeps_preempted: bool = False
    """A preempted request's blocks stay in the prefix cache until others need them."""
    frees_windows: bool = False
    """Layers with a window keep KV of the window only."""
    balances_decodes: bool = False
    """A step decodes at most an equal share of the running requests; others of its group go with the next step."""


VLLM_TP = ContinuousPolicy(
    name="vllm_tp", tensor=None, own_queues=False, prefill_first=False, max_batched_tokens=2048
)
VLLM_PP = ContinuousPolicy(
    name="vllm_pp", tensor=1, own_queues=True, prefill_first=True, max_batched_tokens=4096
)
STOCK_VLLM = ContinuousPolicy(
    name="vllm",
    tensor=1,
    own_queues=False,
    prefill_first=False,
    max_batched_tokens=8192,
    watermark=0.0,
    frees_windows=True,
)


def stock_vllm(
    step_tokens: int,
    *,
    tensor: int = 1,
    max_num_seqs: int | None = None,
    keeps_preempted: bool = False,
    balances_decodes: bool = False,
    name: str = STOCK_VLLM.name,
) -> ContinuousPolicy:
    """Return stock vLLM with steps of at most this many tokens.

    It allows no more requests at once than a step has tokens, nor than ``max_num_seqs``. ``balances_decodes``: as an
    open change to vLLM does ("Balance async PP decode batches"), which caps a step's decodes at the stages' share of
    ``max_num_seqs`` and leaves prompts uncapped. Here the share is of the requests that run, which is no worse.
    """
    return replace(
        STOCK_VLLM,
        name=name,
        tensor=tensor,
        max_batched_tokens=step_tokens,
        max_running=step_tokens if max_num_seqs is None else min(max_num_seqs, step_tokens),
        keeps_preempted=keeps_preempted,
        balances_decodes=balances_decodes,
    )


@dataclass(frozen=True, slots=True)
class _Dropped:
    """Blocks of a preempted request at the end of the queue of free ones."""

    num_blocks: int
    num_ahead: int
    """Free blocks that are taken before them."""
    num_taken: int
    """Blocks that had been taken from the pool by then."""


class _Group:
    """Requests that decode in the same steps."""

    def __init__(self, pool: BlockPool, waiting: deque[Prompt], running: RunningSet) -> None:
        self.pool = pool
        self.waiting = waiting
        self.running = running
        self.in_flight = False


class ContinuousBatching:
    """One run of one policy."""

    def __init__(self, scenario: Scenario, policy: ContinuousPolicy) -> None:
        self._scenario = scenario
        if scenario.measured is not None:
            policy = replace(
                policy,
                max_batched_tokens=scenario.measured.max_batched_tokens,
                max_running=scenario.measured.max_num_seqs,
                keeps_preempted=True,
            )
        self._policy = policy
        self._num_running = 0
        self._queue, self._links, recording = scenario.start()
        num_gpus = scenario.node.num_gpus
        tensor = policy.tensor or num_gpus
        layout = Parallelism(pipeline=num_gpus // tensor, tensor=tensor)
        self._shared = scenario.workload.shared_prefix_tokens
        self.machine = Machine(
            self._queue,
            self._links,
            scenario.node,
            scenario.model,
            layout,
            recording,
            measured=scenario.measured,
            block_tokens=scenario.block_tokens,
            shared_tokens=self._shared,
            frees_windows=policy.frees_windows,
        )
        self._window_tokens = scenario.model.window_tokens
        self._progress = Progress(
            scenario.workload,
            self._queue,
            [self.machine.usage],
            stops_at_drain=scenario.stops_at_drain,
            stops_below=scenario.stops_below,
        )
        self.recomputed_tokens = 0
        """Of preempted requests, less those that were found in the prefix cache."""
        self.num_preempted = 0
        self._prefilled_of_head: dict[int, int] = {}  # request → own tokens computed of a prompt begun
        self._dropped: dict[int, _Dropped] = {}  # preempted requests that may find blocks again
        self._left_over: deque[tuple[int, int, int]] = (
            deque()
        )  # running, in no group: request, KV tokens, outputs
        self._groups = self._make_groups(layout.pipeline)

    def simulate(self) -> SimulationResult:
        self.start()
        self._queue.run()
        return summarize_machines(
            self._policy.name,
            self._scenario.workload,
            [self.machine],
            self._progress,
            recomputed_tokens=self.recomputed_tokens,
        )

    def set_limits(self, *, step_tokens: int, running_rows: int) -> None:
        """Change the maximum size of the steps from the next one on; requests that run go on running."""
        self._policy = replace(self._policy, max_batched_tokens=step_tokens, max_running=running_rows)

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return sum(map(len, {id(group.waiting): group.waiting for group in self._groups}.values()))

    def start(self) -> None:
        """Send the first steps, for callers that advance the machine's queue themselves."""
        for group in self._groups:
            self._schedule(group)

    def _make_groups(self, count: int) -> list[_Group]:
        prompts = waiting_prompts(self._scenario.workload)
        shares = count if self._policy.own_queues else 1
        capacity = self.machine.capacity
        pools = [
            BlockPool(
                capacity.gpu_blocks // shares,
                capacity.block_tokens,
                self._shared,
                capacity.groups,
                in_flight_tokens=count * self._policy.max_batched_tokens,
            )
            for _ in range(shares)
        ]
        require_fit(pools[0], prompts)
        # A request stays with the scheduler that had the fewest unfinished: as all arrive at once, they go in turn.
        queues = [deque(list(prompts)[share::shares]) for share in range(shares)]
        running = [
            RunningSet(
                capacity.block_tokens,
                self._shared,
                window_tokens=self._window_tokens,
                groups=capacity.groups,
            )
            for _ in range(count)
        ]
        return [_Group(pools[i % shares], queues[i % shares], running[i]) for i in range(count)]

    def _schedule(self, group: _Group) -> None:
        """Send the group's next step, if it has one."""
        if group.in_flight:
            return
        work, ended, preempted = StepWork(), list[Prompt](), False
        if self._policy.prefill_first:
            self._admit(group, work, ended)
        if work.prefill_tokens == 0:
            if self._policy.balances_decodes:
                self._level(group)
            preempted = self._decode(group, work)
        if not self._policy.prefill_first and not preempted:
            self._admit(group, work, ended)
        if work.tokens == 0:
            return
        group.in_flight = True
        self.machine.run(work, partial(self._complete, group, work.decode_requests > 0, ended))

    def _level(self, group: _Group) -> None:
        """Leave the newest requests above the group's share to the next step, or take what others left."""
        num_running = len(self._left_over) + sum(len(one.running) for one in self._groups)
        share = -(-num_running // len(self._groups))
        while len(group.running) > share:
            request = group.running.newest
            self._left_over.append((request, *group.running.leave(request)))
        while self._left_over and len(group.running) < share:
            group.running.join(*self._left_over.popleft())

    def _decode(self, group: _Group, work: StepWork) -> bool:
        """Add the running requests to the step, preempting the newest until all fit; return whether any was."""
        running, before = group.running, len(group.running)
        while len(running) and running.new_blocks() > group.pool.num_free:
            self._preempt(group, running.newest)
        group.pool.exchange(running.new_blocks())
        work.decode_requests = len(running)
        work.decode_context_tokens = running.context_tokens
        work.decode_window_tokens = running.attended_in_windows
        return len(running) < before

    def _preempt(self, group: _Group, request: int) -> None:
        pool, num_blocks = group.pool, group.running.blocks_of(request)
        if self._policy.keeps_preempted:
            self._dropped[request] = _Dropped(num_blocks, pool.num_free, pool.num_taken)
        pool.give_back(num_blocks)
        context_tokens, outputs = group.running.leave(request)
        # The token sampled last has no KV yet: it is computed with the others.
        again = Prompt(request=request, tokens=context_tokens + 1, outputs=outputs)
        group.waiting.appendleft(again)
        self._num_running -= 1
        self.num_preempted += 1
        self.recomputed_tokens += again.tokens
        self.machine.usage.tokens_done -= again.tokens + self._shared

    def _admit(self, group: _Group, work: StepWork, ended: list[Prompt]) -> None:
        """Add prompts to the step in order, while tokens of the step and blocks are left."""
        pool, budget = group.pool, self._policy.max_batched_tokens - work.tokens
        reserve = int(self._policy.watermark * pool.num_blocks)
        while group.waiting and budget > 0:
            prompt = group.waiting[0]
            computed = self._prefilled_of_head.get(prompt.request, 0)
            if computed == 0:
                if self._policy.max_running is not None and self._num_running >= self._policy.max_running:
                    return
                need = pool.blocks_of(prompt.tokens)
                idle = pool.num_free == pool.num_blocks  # a lone request may use the reserve
                if need > pool.num_free - (0 if idle else reserve):
                    return
                if self._policy.prefill_first and prompt.tokens > budget and work.prefill_tokens:
                    return
                computed = self._take_found(pool, prompt)
                pool.take(need)
                self._num_running += 1
            tokens = prompt.tokens - computed
            if not self._policy.prefill_first:
                tokens = min(tokens, budget)
            ends = computed + tokens == prompt.tokens
            add_prefill(work, self._shared + computed, tokens, ends=ends, window_tokens=self._window_tokens)
            budget -= tokens
            if not ends:
                self._prefilled_of_head[prompt.request] = computed + tokens
                return
            self._prefilled_of_head.pop(prompt.request, None)
            group.waiting.popleft()
            ended.append(prompt)

    def _take_found(self, pool: BlockPool, prompt: Prompt) -> int:
        """Take and count the leading tokens of a preempted request whose blocks were not taken since.

        Its last blocks are taken by others first.
        """
        dropped = self._dropped.pop(prompt.request, None)
        if dropped is None or pool.groups.fixed_blocks:  # a state is not kept
            return 0
        num_lost = max(0, pool.num_taken - dropped.num_taken - dropped.num_ahead)
        # Only full blocks are found, and the last token is computed whatever is found.
        num_whole = (prompt.tokens - 1) // pool.block_tokens
        num_found = min(max(0, dropped.num_blocks - num_lost) // pool.groups.count, num_whole)
        if pool.groups.skipped_blocks(prompt.tokens, pool.block_tokens):
            # Before a lost block, layers with a window would need what was freed as they moved on.
            num_found = 0 if num_lost else num_whole
        self.recomputed_tokens -= num_found * pool.block_tokens
        self.machine.usage.tokens_done += num_found * pool.block_tokens
        return num_found * pool.block_tokens

    def _complete(self, group: _Group, decoded: bool, prompts: list[Prompt], _: Step) -> None:
        group.in_flight = False
        if decoded:
            for request, num_blocks in group.running.step():
                group.pool.give_back(num_blocks)
                self._finish(request)
        for prompt in prompts:
            if prompt.outputs == 1:
                group.pool.give_back(group.pool.blocks_of(prompt.tokens))
                self._finish(prompt.request)
            else:
                group.pool.settle(prompt.tokens)
                group.running.join(prompt.request, prompt.tokens, prompt.outputs - 1)
        self._scenario.report(self._progress.num_finished)
        self._schedule(group)
        for other in self._groups:
            self._schedule(other)

    def _finish(self, request: int) -> None:
        self._num_running -= 1
        self._progress.finish(request)
