"""An engine without a model: carries a controller's plans out on its own counts, and checks that they are legal.

Requests run to output lengths given beforehand. The engine keeps its own pools, so that a plan that needs a block
which is not there, runs what is in flight or not resident, or copies in the wrong order, fails here and not only in
the controller's own books. Faults (refusals, aborts, preemptions, cache hits, late steps) come from a seeded rng.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from pipemax.control.controller import Controller, TraceSink
from pipemax.control.controller_config import ControllerConfig, StageConfig
from pipemax.domain.events import (
    Event,
    GpuBlocksObserved,
    PrefetchRefused,
    PrefixCacheHit,
    RequestAborted,
    RequestAdmitted,
    RequestPreempted,
    RunRefused,
    StepCompleted,
    StepTimed,
    TransferTimed,
)
from pipemax.domain.plan import Phase, Prefetch, StepPlan
from pipemax.domain.request import RequestSpec
from pipemax.domain.step_times import StepTimeModel
from pipemax.domain.units import RequestId, ceil_div

STEP_S = 0.01
MAX_PREEMPTIONS = 100
"""A run has no more. At one token a step and a preemption in a hundred steps, a prompt of 620 tokens would be begun
some 500 times before it is complete."""


def stage(
    *, h2d_bytes_per_s: float = 4e7, alpha_s: float = 1e-4, beta_s: float = 1e-7, delta_s: float = 0.01
) -> StageConfig:
    """1,000 bytes of KV a token: the default budget is about 25 blocks of 16 tokens in 10 ms."""
    return StageConfig(
        kv_bytes_per_token=1000,
        h2d_bytes_per_s=h2d_bytes_per_s,
        decode_time=StepTimeModel.linear(alpha_s=alpha_s, beta_s=beta_s, delta_s=delta_s),
        prefill_time=StepTimeModel.linear(alpha_s=1e-5, beta_s=1e-10, delta_s=0.001),
    )


def small_config(**changes: object) -> ControllerConfig:
    defaults: dict[str, object] = {
        "num_batches": 4,
        "stages": (stage(),),
        "gpu_blocks": 100,
        "host_blocks": 1000,
        "prefill_chunk_tokens": 256,
        "max_num_seqs": 64,
    }
    return ControllerConfig(**(defaults | changes))  # type: ignore[arg-type]


def spec(name: str, prompt_tokens: int, max_tokens: int = 100, **more: object) -> RequestSpec:
    return RequestSpec(
        request_id=RequestId(name),
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        **more,  # type: ignore[arg-type]
    )


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Chances per plan (or per item of a plan)."""

    refuse_run: float = 0.0
    refuse_prefetch: float = 0.0
    abort: float = 0.0
    preempt: float = 0.0
    cache_hit: float = 0.0


@dataclass(kw_only=True)
class Sequence:
    """A request as the engine sees it."""

    spec: RequestSpec
    outputs_left: int
    target_tokens: int
    computed_tokens: int = 0
    gpu_blocks: int = 0
    held_tokens: int = 0
    """Tokens for which it has blocks, windows apart."""
    num_outputs: int = 0
    in_flight: int = 0
    last_step: int = 0
    """Among the steps of which something ran."""
    prefetched_to: int | None = None
    """The block up to which its copy came; None when nothing is being copied."""
    found_prefix: bool = False
    """Whether the copy under way began behind a prefix that was on the GPU, and that others find there too."""
    life: int = 0

    @property
    def is_prefilled(self) -> bool:
        return self.computed_tokens >= self.target_tokens


@dataclass(kw_only=True)
class FakeEngine:
    config: ControllerConfig
    rng: Random = field(default_factory=lambda: Random(0))
    faults: Faults = field(default_factory=Faults)
    max_in_flight: int = 4
    trace: TraceSink | None = None
    checks_integrity: bool = True
    checks_each_run: bool = True
    """Whether each request's blocks are there when it runs, next to the sum over all after each step."""
    sequences: dict[RequestId, Sequence] = field(default_factory=dict)
    finished: dict[RequestId, int] = field(default_factory=dict)
    """Request → output tokens."""
    aborted: set[RequestId] = field(default_factory=set)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = Controller(self.config, self.trace)
        self._in_flight: deque[tuple[StepPlan, list[tuple[RequestId, int, bool]]]] = deque()
        self._num_steps = 0
        self._num_preemptions = 0
        self._block_tokens = self.config.block_tokens
        self._shares_by_itself = self.faults.cache_hit > 0
        self._overwritten: list[Sequence] = []

    # Driving.

    def admit(self, request: RequestSpec, num_outputs: int) -> None:
        self.sequences[request.request_id] = Sequence(
            spec=request, outputs_left=num_outputs, target_tokens=request.prompt_tokens
        )
        self._shares_by_itself |= request.prefix is not None
        self.apply([RequestAdmitted(request=request)])

    def run(self, max_plans: int = 100_000) -> None:
        """Until every request has finished or was aborted. A plan that does nothing while nothing is in flight
        breaks the liveness contract."""
        while self.sequences:
            assert len(self.plans) < max_plans, f"{len(self.sequences)} requests do not finish"
            self.step()
        while self._in_flight:
            self._complete_oldest()

    def step(self) -> StepPlan:
        """One plan, carried out; and the oldest step's outputs where the pipeline is full or waited for."""
        self._inject_faults()
        plan = self.controller.plan_step(len(self.plans) * STEP_S)
        self.plans.append(plan)
        self._check()
        self.apply(self._carry_out(plan))
        if plan.is_empty and self.sequences and plan.wait_until_s is None:
            assert self._in_flight, (
                f"nothing in flight, {len(self.sequences)} unfinished, and an empty plan: {plan}"
            )
        if self._in_flight and (plan.is_empty or len(self._in_flight) >= self.max_in_flight):
            self._complete_oldest()
        return plan

    def apply(self, events: list[Event]) -> None:
        self.controller.apply(events)
        self._check()

    def _check(self) -> None:
        if self.checks_integrity:
            self.controller.check_integrity()

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def _inject_faults(self) -> None:
        if self.sequences and self._chance(self.faults.abort):
            request_id = self.rng.choice([*self.sequences])
            del self.sequences[request_id]
            self.aborted.add(request_id)
            self.apply([RequestAborted(request_id=request_id)])
        if self.sequences and self._num_preemptions < MAX_PREEMPTIONS and self._chance(self.faults.preempt):
            self._num_preemptions += 1
            request_id = self.rng.choice([*self.sequences])
            self._drop(self.sequences[request_id])
            self.apply([RequestPreempted(request_id=request_id)])

    # Carrying a plan out.

    def _carry_out(self, plan: StepPlan) -> list[Event]:
        for sequence in self._overwritten:
            sequence.gpu_blocks = 0
        self._overwritten.clear()
        for request_id in plan.recompute:
            assert self.sequences[request_id].in_flight == 0, request_id
            self._drop(self.sequences[request_id])
        for request_id in plan.evict:
            sequence = self.sequences[request_id]
            assert sequence.gpu_blocks > 0, f"{request_id} is evicted but holds nothing"
            assert request_id not in plan.run
            sequence.gpu_blocks, sequence.prefetched_to = 0, None
        events: list[Event] = []
        if self.config.kv_groups.window:
            for sequence in (self.sequences[request_id] for request_id in plan.run):
                freed = self._blocks_of(sequence.computed_tokens, sequence.held_tokens)
                sequence.gpu_blocks = min(sequence.gpu_blocks, freed)
        if plan.overwrite is not None:
            written_before = {
                request_id: self.sequences[request_id].computed_tokens for request_id in plan.run
            }
            events += self._launch(plan)
            self._overwrite(plan, written_before)
        for item in plan.prefetch:
            # The first part takes the blocks of all parts, so a later one cannot be refused.
            if item.is_first and (
                not self._may_load(plan, item) or self._chance(self.faults.refuse_prefetch)
            ):
                self.sequences[item.request_id].gpu_blocks = 0
                self.sequences[item.request_id].prefetched_to = None
                events.append(PrefetchRefused(step_id=plan.step_id, request_id=item.request_id))
            else:
                self._load(self.sequences[item.request_id], item)
        if plan.overwrite is None:
            events += self._launch(plan)
        if plan.prefetch:
            num_blocks = sum(item.num_blocks for item in plan.prefetch)
            events.append(
                TransferTimed(step_id=plan.step_id, num_blocks=num_blocks, stage_s=self._per_stage(STEP_S))
            )
        held = self._held({s.spec.request_id: s.gpu_blocks for s in self.sequences.values()})
        assert held <= self.config.gpu_blocks, f"{held} blocks on a GPU of {self.config.gpu_blocks}"
        on_gpu = sum(sequence.gpu_blocks > 0 for sequence in self.sequences.values())
        assert on_gpu <= self.config.max_resident_requests
        if self._shares_by_itself:
            events.append(GpuBlocksObserved(num_free=self.config.gpu_blocks - held))
        live = self._held(
            {
                s.spec.request_id: self._blocks_of(s.computed_tokens, s.computed_tokens)
                for s in self.sequences.values()
            }
        )
        assert live <= self.config.host_blocks, f"{live} blocks on a host of {self.config.host_blocks}"
        return events

    def _may_load(self, plan: StepPlan, item: Prefetch) -> bool:
        """Whether its blocks are free: in a wave the step has run, and hits on cached blocks may have taken them."""
        if plan.overwrite is None:
            return True
        fits = self._fits(self.sequences[item.request_id], 1)
        assert fits or self.faults.cache_hit, f"no room to prefetch {item.request_id}"
        return fits

    def _overwrite(self, plan: StepPlan, written_before: dict[RequestId, int]) -> None:
        """Free the whole blocks of decodes that earlier steps wrote: those are on the host, and no other block is.

        ``written_before``: of each request, the tokens whose KV earlier steps computed.
        """
        assert plan.overwrite is not None
        decodes = plan.run if plan.num_decodes is None else plan.run[: plan.num_decodes]
        for request_id in plan.overwrite:
            assert request_id in decodes, request_id
            sequence, shared = self.sequences[request_id], self._shared_blocks(request_id)
            num_whole = written_before[request_id] // self._block_tokens
            assert num_whole > shared, f"{request_id} is overwritten and frees nothing"
            sequence.gpu_blocks -= num_whole - shared
            self._overwritten.append(sequence)

    def _blocks_of(self, first: int, end: int) -> int:
        """Blocks that hold the first ``end`` tokens, but for what the token ``first`` no longer attends to."""
        groups, size = self.config.kv_groups, self._block_tokens
        num_blocks = ceil_div(end, size)
        begins = first - groups.window_tokens + 1
        in_window = sum((block + 1) * size > begins for block in range(num_blocks)) if groups.window else 0
        return groups.full * num_blocks + groups.window * in_window

    def _held(self, blocks: dict[RequestId, int]) -> int:
        """Blocks in all, a shared prefix counted once."""
        total, prefixes = 0, {}
        for request_id, num_blocks in blocks.items():
            shared = min(num_blocks, self._shared_blocks(request_id))
            if shared:
                prefix = self.sequences[request_id].spec.prefix
                assert prefix is not None
                prefixes[prefix.prefix_id] = max(shared, prefixes.get(prefix.prefix_id, 0))
            total += num_blocks - shared
        return total + sum(prefixes.values())

    def _shared_blocks(self, request_id: RequestId) -> int:
        spec = self.sequences[request_id].spec
        if spec.prefix is None or self.config.kv_groups.window:
            return 0
        num_blocks = spec.prefix.num_tokens // self._block_tokens
        return num_blocks if spec.prompt_tokens > num_blocks * self._block_tokens else 0

    def _cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of its prefix that another request has computed on the GPU."""
        shared = self._shared_blocks(sequence.spec.request_id) * self._block_tokens
        holders = (
            other
            for other in self.sequences.values()
            if other is not sequence
            and other.spec.prefix == sequence.spec.prefix
            and self._shared_blocks(other.spec.request_id)
            and (other.prefetched_to is None or other.found_prefix)
        )
        return shared if any(o.gpu_blocks and o.computed_tokens >= shared for o in holders) else 0

    def _load(self, sequence: Sequence, item: Prefetch) -> None:
        assert sequence.in_flight == 0, "prefetched while in flight"
        assert sequence.is_prefilled, "prefetched before its prompt was complete"
        if item.is_first:
            assert sequence.gpu_blocks == 0, "prefetched while resident"
            assert item.first_block in (0, self._shared_blocks(sequence.spec.request_id))
            sequence.gpu_blocks = self._blocks_of(sequence.computed_tokens, sequence.computed_tokens + 1)
            sequence.held_tokens = sequence.computed_tokens + 1
            sequence.found_prefix = item.first_block > 0
        else:
            assert sequence.prefetched_to == item.first_block, "parts out of order"
        sequence.prefetched_to = item.first_block + item.num_blocks
        if item.is_last:
            assert sequence.prefetched_to == self._blocks_of(
                sequence.computed_tokens, sequence.computed_tokens
            )
            sequence.prefetched_to = None

    def _launch(self, plan: StepPlan) -> list[Event]:
        events: list[Event] = []
        ran: list[tuple[RequestId, int, bool]] = []  # with its life, and whether a token comes of it
        assert len(plan.run) == len(plan.run_tokens) == len(set(plan.run))
        assert len(plan.run) <= self.config.max_num_seqs
        match plan.phase:
            case Phase.PREFILL:
                assert sum(plan.run_tokens) <= self.config.prefill_chunk_tokens
                num_decodes = 0
            case Phase.DECODE:
                num_decodes = len(plan.run)
            case Phase.MIXED:
                assert sum(plan.run_tokens) <= self.controller.config.step_tokens
                assert plan.num_decodes is not None
                num_decodes = plan.num_decodes
        for index, (request_id, num_tokens) in enumerate(zip(plan.run, plan.run_tokens, strict=True)):
            sequence = self.sequences[request_id]
            assert sequence.prefetched_to is None, f"{request_id} runs before all of it is copied"
            if index < num_decodes:
                assert num_tokens == 1
                assert sequence.is_prefilled, request_id
                assert sequence.gpu_blocks > 0, request_id
                assert sequence.in_flight == 0 or self._token_will_be_there(sequence), request_id
            else:
                assert not sequence.is_prefilled, request_id
            # Hits on blocks that were free, earlier in this plan, may have left too few for this one.
            fits = not self.checks_each_run or self._fits(sequence, num_tokens)
            assert fits or self.faults.cache_hit, f"no room to run {request_id}"
            if not fits or self._chance(self.faults.refuse_run):
                events.append(RunRefused(step_id=plan.step_id, request_id=request_id))
                continue
            if sequence.computed_tokens == 0 and (hit := self._look_up_cache(plan, sequence, num_tokens)):
                # It moves the planned tokens into a block of the request's own, which may not be free.
                fits = not self.checks_each_run or self._fits(sequence, num_tokens)
                assert fits or self.faults.cache_hit, f"no room to run {request_id} behind its prefix"
                if not fits:
                    sequence.computed_tokens = 0
                    events.append(RunRefused(step_id=plan.step_id, request_id=request_id))
                    continue
                events += hit
            sequence.gpu_blocks = self._blocks_to_run(sequence, num_tokens)
            sequence.computed_tokens += num_tokens
            sequence.held_tokens = max(sequence.held_tokens, sequence.computed_tokens)
            sequence.in_flight += 1
            sequence.last_step = self._num_steps
            ran.append((request_id, sequence.life, sequence.is_prefilled))
        if ran:
            self._num_steps += 1
            self._in_flight.append((plan, ran))
        return events

    def _token_will_be_there(self, sequence: Sequence) -> bool:
        """Whether the last stage hands the request's token to the first before this step, and it is not the last."""
        num_stages = len(self.config.stages)
        return (
            num_stages > 1
            and sequence.in_flight == 1
            and self._num_steps - sequence.last_step >= num_stages
            and sequence.num_outputs + 1 < sequence.spec.max_tokens
        )

    def _look_up_cache(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> list[Event]:
        num_hit = self._cached_tokens(sequence)
        if self._chance(self.faults.cache_hit):
            chance_hit = self.rng.randint(1, sequence.spec.prompt_tokens)
            num_hit = max(num_hit, chance_hit if self._fits(sequence, chance_hit + num_tokens) else 0)
        if num_hit == 0:
            return []
        sequence.computed_tokens = min(num_hit, sequence.target_tokens - num_tokens)
        return [
            PrefixCacheHit(
                step_id=plan.step_id, request_id=sequence.spec.request_id, num_tokens=sequence.computed_tokens
            )
        ]

    def _blocks_to_run(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that it holds once it runs so many more tokens."""
        first = sequence.computed_tokens
        needed = self._blocks_of(first, first + num_tokens)
        return max(sequence.gpu_blocks, needed)

    def _fits(self, sequence: Sequence, num_tokens: int) -> bool:
        blocks = {s.spec.request_id: s.gpu_blocks for s in self.sequences.values()}
        blocks[sequence.spec.request_id] = self._blocks_to_run(sequence, num_tokens)
        return self._held(blocks) <= self.config.gpu_blocks

    def _drop(self, sequence: Sequence) -> None:
        sequence.computed_tokens = sequence.gpu_blocks = sequence.in_flight = sequence.held_tokens = 0
        sequence.prefetched_to = None
        sequence.target_tokens = sequence.spec.prompt_tokens + sequence.num_outputs
        sequence.life += 1

    # Landing steps.

    def _complete_oldest(self) -> None:
        plan, ran = self._in_flight.popleft()
        finished: list[RequestId] = []
        for request_id, life, makes_output in ran:
            sequence = self.sequences.get(request_id)
            if sequence is None or sequence.life != life:
                continue
            sequence.in_flight -= 1
            if not makes_output:
                continue
            sequence.num_outputs += 1
            sequence.outputs_left -= 1
            if sequence.outputs_left == 0:
                finished.append(request_id)
                self.finished[request_id] = sequence.num_outputs
                del self.sequences[request_id]
        predicted_s = plan.decision.predicted_step_s
        self.apply(
            [
                StepCompleted(step_id=plan.step_id, finished=tuple(finished)),
                StepTimed(
                    step_id=plan.step_id, stage_s=self._per_stage(predicted_s * self.rng.uniform(0.9, 1.1))
                ),
            ]
        )

    def _per_stage(self, seconds: float) -> tuple[float, ...]:
        return (seconds,) * len(self.config.stages)
