"""PipeMax itself: ``pipemax.control`` decides every step, and this file carries the plans out on the simulated machine.

A plan's copies begin on a stage when the step before it has left that stage (until then that step may still read the
blocks that they overwrite), and a step waits on each stage for the copies of what it runs. In a wave, whose copies
overwrite blocks that the plan's own step reads, those of a group of layers begin when that step has computed the group,
and the next step waits for them before it computes the group. A step counts as completed when its KV has reached the
host. GPUs that share a stage each copy their part over their own link, and the stage has what it needs when the last
one has.
"""

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from pipemax.control.controller import Controller
from pipemax.control.controller_config import ControllerConfig
from pipemax.control.decision_trace import TraceWriter
from pipemax.domain.events import Event, StepCompleted, StepTimed, TransferTimed
from pipemax.domain.plan import StepId, StepPlan
from pipemax.domain.specs import Parallelism
from pipemax.domain.units import RequestId, ceil_div
from pipemax.sim.event_queue import Priority
from pipemax.sim.links import Direction
from pipemax.sim.machine import Machine, summarize_machines
from pipemax.sim.pipeline import Step
from pipemax.sim.result import Progress, SimulationResult
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, controller_config
from pipemax.sim.systems.pipemax_tokens import StartedStep, TokenBook
from pipemax.sim.systems.scenario import Scenario

STORED_TENSORS_PER_LAYER = 2
"""Keys and values leave the GPU as contiguous tensors of each layer, before they are paged (Section 3.4.2)."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Transfer:
    """A plan's prefetch."""

    step_id: StepId
    num_blocks: int
    copies_left: int
    """Those of all stages that have not ended."""
    stage_s: list[float]
    """By stage: the seconds of its copies so far."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Copy:
    """One stage's part of a transfer, over all of its layers or over one of the groups of a wave."""

    transfer: _Transfer
    after: int
    """Number of parts of steps that must have been computed on the stage before it begins."""
    group: int
    """The part of the next step that needs it: the first one needs what covers all layers."""
    num_groups: int
    """How many copies make up the transfer on this stage."""
    gpus_left: int
    queued_s: float = 0.0
    seconds: float = 0.0
    """Of the stage's GPU that took longest."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """A step in flight."""

    plan: StepPlan
    started: StartedStep
    must_have: StepId | None
    """The last plan whose copies the step needs."""
    stage_s: list[float] = field(default_factory=list)
    parts_left: int
    """Parts still to end: the pipeline, and the stores of every GPU."""


class PipeMaxSystem:
    """One run. The laboratory's ablations are subclasses with another machine, controller or layout."""

    machine_class = Machine

    def __init__(self, scenario: Scenario, options: PipeMaxOptions | None = None) -> None:
        self._scenario = scenario
        self._options = options or PipeMaxOptions()
        self._queue, self._links, recording = scenario.start()
        tensor = self._options.tensor
        if scenario.node.num_gpus % tensor:
            raise ValueError(f"{tensor} GPUs a stage do not divide the node's {scenario.node.num_gpus}")
        self._n = scenario.node.num_gpus // tensor
        self._machine = self.machine_class(
            self._queue,
            self._links,
            scenario.node,
            scenario.model,
            Parallelism(pipeline=self._n, tensor=tensor),
            recording,
            measured=scenario.measured,
            block_tokens=scenario.block_tokens,
            frees_windows=self._options.frees_windows,
            gate=self._may_start,
            on_stage_start=self._store,
            on_part_end=self._part_computed,
        )
        self._progress = Progress(
            scenario.workload,
            self._queue,
            [self._machine.usage],
            stops_at_drain=scenario.stops_at_drain,
            stops_below=scenario.stops_below,
        )
        config = controller_config(self._machine, scenario.workload, self._options, self.pieces_of_layers)
        self._trace = TraceWriter(scenario.decisions_path, config) if scenario.decisions_path else None
        self._controller = self.make_controller(config)
        self._tokens = TokenBook(
            scenario.workload,
            scenario.model.window_tokens,
            block_tokens=config.block_tokens,
            shares_prefix=not config.kv_groups.window,
        )
        self._events: list[Event] = [*self._tokens.admissions()]
        self._num_submitted = 0
        self._num_parts = config.wave_groups or 1
        self._computed = [0] * self._n  # parts of steps, by stage
        self._copies = [deque[_Copy]() for _ in range(self._n)]  # not yet ended, by stage
        self._last_copy_s = [0.0] * scenario.node.num_gpus
        self._flights: dict[int, _Flight] = {}  # by step number
        self._arriving: dict[RequestId, StepId] = {}  # the last plan that copies for a request
        self._plan_is_due = False

    def make_controller(self, config: ControllerConfig) -> Controller:
        return Controller(config, self._trace)

    def pieces_of_layers(self, num_layers: int) -> int:
        """Return in how many contiguous pieces a block of so many layers lies: in one, as blocks come first."""
        return 1

    def simulate(self) -> SimulationResult:
        """Simulate to the end."""
        with self._trace or nullcontext():
            self._plan_soon()
            self._queue.run()
        return summarize_machines(
            self._options.name,
            self._scenario.workload,
            [self._machine],
            self._progress,
            recomputed_tokens=self._tokens.recomputed_tokens,
        )

    # Plans.

    def _plan_soon(self) -> None:
        """Plan once for everything that happens at this instant."""
        if not self._plan_is_due:
            self._plan_is_due = True
            self._queue.at(self._queue.now_s(), Priority.DECIDE, self._plan)

    def _plan(self) -> None:
        """Plan and submit until the pipeline is full or the controller waits for an event."""
        self._plan_is_due = False
        while len(self._flights) < self._n and not self._progress.all_done:
            self._controller.apply(self._events)
            self._events = []
            plan = self._controller.plan_step(self._queue.now_s())
            if plan.is_empty:
                # Liveness: with nothing in flight, no event would ever lead to another plan.
                assert self._flights or any(self._copies), plan.decision
                return
            self._carry_out(plan)

    def _carry_out(self, plan: StepPlan) -> None:
        for request in plan.recompute:
            self._machine.usage.tokens_done -= self._tokens.recompute(request)
        num_blocks = sum(item.num_blocks for item in plan.prefetch)
        if num_blocks:
            for item in plan.prefetch:
                self._arriving[item.request_id] = plan.step_id
            self._prefetch(plan.step_id, num_blocks, is_wave=bool(plan.overwrite))
        if plan.run:
            self._run(plan, num_blocks)

    def _run(self, plan: StepPlan, num_blocks: int) -> None:
        started = self._tokens.start(plan)
        self._events += started.hits
        self._machine.usage.tokens_done += sum(hit.num_tokens for hit in started.hits)
        needed = [self._arriving.pop(request) for request in plan.run if request in self._arriving]
        flight = _Flight(
            plan=plan,
            started=started,
            must_have=max(needed, default=None),
            parts_left=self._n * self._options.tensor + 1,
        )
        number = self._num_submitted
        self._num_submitted += 1
        self._flights[number] = flight
        step = self._machine.run(
            started.work,
            lambda step: self._part_done(step.number),
            prefetched_tokens=num_blocks * self._machine.capacity.block_tokens,
            num_parts=self._num_parts,
        )
        flight.stage_s += step.stage_s

    # Host → GPU.

    def _prefetch(self, step_id: StepId, num_blocks: int, *, is_wave: bool) -> None:
        num_groups = self._num_parts if is_wave else 1
        transfer = _Transfer(
            step_id=step_id,
            num_blocks=num_blocks,
            copies_left=num_groups * self._n,
            stage_s=[0.0] * self._n,
        )
        before = self._num_submitted * self._num_parts
        for stage in range(self._n):
            for group in range(num_groups):
                copy = _Copy(
                    transfer=transfer,
                    after=before + (group + 1 if is_wave else 0),
                    group=group,
                    num_groups=num_groups,
                    gpus_left=self._options.tensor,
                )
                self._copies[stage].append(copy)
                if self._computed[stage] == copy.after:
                    self._begin_copy(stage, copy)

    def _begin_copy(self, stage: int, copy: _Copy) -> None:
        copy.queued_s = self._queue.now_s()
        num_blocks = copy.transfer.num_blocks
        layers = ceil_div(self._machine.times.layers[stage], copy.num_groups)
        for gpu in self._machine.gpus_of(stage):
            self._links.copy(
                gpu,
                Direction.HOST_TO_GPU,
                num_bytes=num_blocks * self._machine.block_bytes(stage) / copy.num_groups,
                num_pieces=num_blocks * self.pieces_of_layers(layers),
                on_done=partial(self._copied, stage, gpu, copy),
            )

    def _copied(self, stage: int, gpu: int, copy: _Copy) -> None:
        # The engine is first in, first out: a copy that waited began when the one before it ended.
        seconds = self._queue.now_s() - max(copy.queued_s, self._last_copy_s[gpu])
        self._last_copy_s[gpu] = self._queue.now_s()
        copy.seconds = max(copy.seconds, seconds)
        copy.gpus_left -= 1
        if copy.gpus_left:
            return
        ended, transfer = self._copies[stage].popleft(), copy.transfer
        assert ended is copy, (ended.transfer.step_id, ended.group, transfer.step_id, copy.group)
        transfer.stage_s[stage] += copy.seconds
        transfer.copies_left -= 1
        if not transfer.copies_left:
            self._events.append(
                TransferTimed(
                    step_id=transfer.step_id,
                    num_blocks=transfer.num_blocks,
                    stage_s=tuple(transfer.stage_s),
                )
            )
            if not self._flights:
                self._plan_soon()
        self._machine.pipeline.poke(stage)

    def _may_start(self, stage: int, step: Step, part: int) -> bool:
        """Return whether the copies that a part of a step needs have ended on a stage."""
        must_have = self._flights[step.number].must_have
        pending = self._copies[stage]
        return (
            must_have is None
            or not pending
            or (pending[0].transfer.step_id, pending[0].group) > (must_have, part)
        )

    # Stages.

    def _store(self, stage: int, step: Step) -> None:
        """Store the KV of a step's tokens on the host while the stage computes."""
        layers = self._machine.times.layers[stage]
        # Of a grain, as much as of a token: a row's grains are computed in a fraction of its steps.
        num_bytes = step.tokens * self._machine.times.kv_bytes_per_token(stage) / self._scenario.grain
        for gpu in self._machine.gpus_of(stage):
            self._links.copy(
                gpu,
                Direction.GPU_TO_HOST,
                num_bytes=num_bytes,
                num_pieces=layers * STORED_TENSORS_PER_LAYER,
                on_done=partial(self._part_done, step.number),
            )

    def _part_computed(self, stage: int, step: Step, part: int) -> None:
        self._computed[stage] = step.number * self._num_parts + part + 1
        for copy in self._copies[stage]:
            if copy.after == self._computed[stage]:
                self._begin_copy(stage, copy)

    def _part_done(self, number: int) -> None:
        """Count one part of a step as ended, and complete the step with the last.

        A part ends when the step has left the pipeline, or when its KV on one GPU has reached the host.
        """
        flight = self._flights[number]
        flight.parts_left -= 1
        if flight.parts_left:
            return
        del self._flights[number]
        finished = self._tokens.complete(flight.started.outputs)
        self._events.append(StepCompleted(step_id=flight.plan.step_id, finished=finished))
        seen_s = tuple(seconds * (1 + self._options.estimator_bias) for seconds in flight.stage_s)
        self._events.append(StepTimed(step_id=flight.plan.step_id, stage_s=seen_s))
        for request in finished:
            self._progress.finish(int(request))
        self._scenario.report(self._progress.num_finished)
        self._plan_soon()
