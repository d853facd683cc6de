"""Seesaw: prefill under pipeline parallelism into host KV, then resharded weights and decode under tensor parallelism.

Requests are swapped in whenever GPU blocks are free. Phases change when host KV is full and when it is empty. Copies
are charged one piece per block, as PipeMax's are: that is generous, since tensor parallel shards of a layer-first cache
are smaller.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from pipemax.domain.specs import Parallelism
from pipemax.domain.units import ceil_div
from pipemax.sim.event_queue import Priority
from pipemax.sim.links import Direction
from pipemax.sim.machine import BLOCK_TOKENS, Machine, summarize_machines
from pipemax.sim.pipeline import Step
from pipemax.sim.result import Progress, SimulationResult
from pipemax.sim.stage_times import StepWork
from pipemax.sim.systems.running_requests import RunningSet
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.systems.waiting_prompts import BlockPool, Prompt, add_prefill, require_fit, waiting_prompts

RESHARD_PIECES = 100
"""Weights move in large pieces, whose fixed cost hardly counts."""
PREFILL_WINDOW = 4
"""Prefill steps in flight, in pipeline depths: enough that a long step ahead does not starve stage 1."""
GROWTH_RESERVE = 0.02
"""Share of the GPU's blocks that swapping in leaves for the growth of running requests."""


class Seesaw:
    """One run; ``decode`` is the parallelism of the decode phase."""

    def __init__(self, scenario: Scenario, decode: Parallelism, *, name: str) -> None:
        self._name = name
        self._scenario = scenario
        self._queue, self._links, recording = scenario.start()
        self._n = scenario.node.num_gpus
        shared = scenario.workload.shared_prefix_tokens

        def machine(parallelism: Parallelism) -> Machine:
            return Machine(
                self._queue,
                self._links,
                scenario.node,
                scenario.model,
                parallelism,
                recording,
                shared_tokens=shared,
            )

        self._prefill = machine(Parallelism(pipeline=self._n, tensor=1))
        self._decode = machine(decode)
        self._shared = shared
        self._progress = Progress(scenario.workload, self._queue, [self._prefill.usage, self._decode.usage])
        self._waiting = waiting_prompts(scenario.workload)
        self._gpu = BlockPool(self._decode.capacity.gpu_blocks, BLOCK_TOKENS, shared)
        self._host = BlockPool(self._prefill.capacity.host_blocks, BLOCK_TOKENS, shared)
        require_fit(self._gpu, self._waiting)
        require_fit(self._host, self._waiting)
        self._parked: deque[tuple[int, int, int]] = deque()  # request, KV tokens, outputs to come
        self._groups = [RunningSet(BLOCK_TOKENS, shared) for _ in range(decode.pipeline)]
        self._arrived: deque[tuple[int, int, int]] = deque()  # swapped in, waiting for a step's end
        self._in_flight = [False] * decode.pipeline
        self._swaps = 0
        self._prefills = 0
        self._is_prefilling = True

    def simulate(self) -> SimulationResult:
        self._feed_prefill()
        self._queue.run()
        return summarize_machines(
            self._name,
            self._scenario.workload,
            [self._prefill, self._decode],
            self._progress,
        )

    # Prefill.

    def _feed_prefill(self) -> None:
        """Keep the pipeline full while the host has room."""
        while self._prefills < PREFILL_WINDOW * self._n and self._fits_on_host():
            work, prompts = StepWork(), list[Prompt]()
            while self._fits_on_host():
                tokens = self._waiting[0].tokens
                if prompts and work.prefill_tokens + tokens > self._prefill.prefill_step_tokens:
                    break
                prompt = self._waiting.popleft()
                self._host.take(self._host.blocks_of(prompt.tokens))
                add_prefill(work, self._shared, tokens, ends=True)
                prompts.append(prompt)
            self._prefills += 1
            self._prefill.run(work, partial(self._prefilled, work, prompts))
        if self._prefills == 0:
            self._switch_to_decode()

    def _fits_on_host(self) -> bool:
        return bool(self._waiting) and self._host.blocks_of(self._waiting[0].tokens) <= self._host.num_free

    def _prefilled(self, work: StepWork, prompts: list[Prompt], _: Step) -> None:
        for prompt in prompts:
            if prompt.outputs == 1:
                self._host.give_back(self._host.blocks_of(prompt.tokens))
                self._progress.finish(prompt.request)
            else:
                self._parked.append((prompt.request, prompt.tokens, prompt.outputs - 1))
        blocks = ceil_div(work.prefill_tokens, BLOCK_TOKENS)
        self._copy(self._prefill, Direction.GPU_TO_HOST, blocks, self._offloaded)

    def _offloaded(self) -> None:
        self._prefills -= 1
        self._feed_prefill()

    # Changing shards.

    def _switch_to_decode(self) -> None:
        if self._progress.all_done:
            return
        self._is_prefilling = False
        self._reload_weights(self._decode, self._resume_decode)

    def _switch_to_prefill(self) -> None:
        """Switch to prefill when host KV is empty: running requests go to the host, whose shards differ."""
        self._is_prefilling = True
        blocks = 0
        for group in self._groups:
            for request, _, _ in list(group.members()):
                blocks += group.blocks_of(request)
                self._parked.append((request, *group.leave(request)))
        while self._arrived:
            request, tokens, outputs = self._arrived.popleft()
            blocks += self._gpu.blocks_of(tokens)
            self._parked.append((request, tokens, outputs))
        self._gpu.give_back(blocks)
        self._host.take(blocks)
        reload = partial(self._reload_weights, self._prefill, self._feed_prefill)
        if blocks:
            self._copy(self._decode, Direction.GPU_TO_HOST, blocks, reload)
        else:
            reload()

    def _reload_weights(self, machine: Machine, then: Callable[[], None]) -> None:
        num_bytes = self._scenario.model.weight_bytes / self._n
        left = [self._n]

        def one_done() -> None:
            left[0] -= 1
            if left[0] == 0:
                self._queue.at(self._queue.now_s(), Priority.DECIDE, then)

        for gpu in range(machine.node.num_gpus):
            self._links.copy(
                gpu,
                Direction.HOST_TO_GPU,
                num_bytes=num_bytes,
                num_pieces=RESHARD_PIECES,
                on_done=one_done,
            )

    # Decode.

    def _resume_decode(self) -> None:
        if self._is_prefilling:
            return
        self._swap_in()
        for index in range(len(self._groups)):
            if not self._in_flight[index]:
                self._run(index)
        idle = not any(self._in_flight) and self._swaps == 0
        if idle and (self._waiting or self._parked or self._arrived):
            self._switch_to_prefill()

    def _swap_in(self) -> None:
        """Swap parked requests in, oldest first, as far as blocks are free."""
        reserve = int(GROWTH_RESERVE * self._gpu.num_blocks)
        while self._parked:
            request, tokens, outputs = self._parked[0]
            blocks = self._gpu.blocks_of(tokens)
            nothing_runs = self._gpu.num_free == self._gpu.num_blocks
            if blocks > self._gpu.num_free - (0 if nothing_runs else reserve):
                return
            self._parked.popleft()
            self._gpu.take(blocks)
            self._host.give_back(blocks)
            self._swaps += 1
            swapped = partial(self._swapped, request, tokens, outputs)
            self._copy(self._decode, Direction.HOST_TO_GPU, blocks, swapped)

    def _swapped(self, request: int, tokens: int, outputs: int) -> None:
        self._swaps -= 1
        self._arrived.append((request, tokens, outputs))
        self._queue.at(self._queue.now_s(), Priority.DECIDE, self._resume_decode)

    def _run(self, index: int) -> None:
        group = self._groups[index]
        total = sum(len(other) for other in self._groups) + len(self._arrived)
        while self._arrived and len(group) < ceil_div(total, len(self._groups)):
            group.join(*self._arrived.popleft())
        while len(group) and group.new_blocks() > self._gpu.num_free:
            self._swap_out(group)
        if not len(group) or (not self._parked and self._swaps == 0 and self._waiting):
            return  # host KV is empty and prompts wait: the steps in flight are the last of this phase
        self._gpu.take(group.new_blocks())
        self._in_flight[index] = True
        work = StepWork(decode_requests=len(group), decode_context_tokens=group.context_tokens)
        self._decode.run(work, partial(self._decoded, index))

    def _swap_out(self, group: RunningSet) -> None:
        """Swap out the newest request.

        Its blocks are free once the host has them; here they are free at once, because they are few.
        """
        request = group.newest
        blocks = group.blocks_of(request)
        context_tokens, outputs = group.leave(request)
        self._gpu.give_back(blocks)
        self._host.take(min(blocks, self._host.num_free))
        self._parked.appendleft((request, context_tokens, outputs))
        self._copy(self._decode, Direction.GPU_TO_HOST, blocks, lambda: None)

    def _decoded(self, index: int, _: Step) -> None:
        self._in_flight[index] = False
        for request, num_blocks in self._groups[index].step():
            self._gpu.give_back(num_blocks)
            self._progress.finish(request)
        self._scenario.report(self._progress.num_finished)
        self._resume_decode()

    def _copy(self, machine: Machine, direction: Direction, blocks: int, on_done: Callable[[], None]) -> None:
        """Copy blocks on all GPUs that hold a part of each; call ``on_done`` once the last copy has ended."""
        left = [machine.node.num_gpus]

        def one_done() -> None:
            left[0] -= 1
            if left[0] == 0:
                on_done()

        for stage in range(machine.parallelism.pipeline):
            for gpu in machine.gpus_of(stage):
                num_bytes = blocks * machine.block_bytes(stage)
                self._links.copy(gpu, direction, num_bytes=num_bytes, num_pieces=blocks, on_done=one_done)
