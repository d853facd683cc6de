"""The centralized engine (PipeMax, §3.3): events in, one plan per step out.

A deterministic function of its config and the events. The simulator drives it with a virtual clock, the vLLM
scheduler with the wall clock, a recorded trace with the times in it; all get the same plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pipemax.control.controller_config import ControllerConfig, StageConfig
from pipemax.control.intake import Intake
from pipemax.control.planners.decode import DecodePlanner, DecodeStep
from pipemax.control.planners.mixed import MixedPlanner, MixedStep
from pipemax.control.planners.phase import MemoryLoad, PhasePolicy
from pipemax.control.planners.prefetch import PrefetchPlanner, PrefetchStep
from pipemax.control.planners.prefill import OutputLengths, PrefillPlanner, PrefillStep
from pipemax.control.planners.throttle import PromptThrottle
from pipemax.control.state.batches import Flights, Rotation
from pipemax.control.state.table import RequestTable
from pipemax.control.times.estimator import PhaseWork, Work
from pipemax.control.times.stage_estimators import StageEstimators
from pipemax.domain.events import Event
from pipemax.domain.plan import Batching, Decision, Phase, PhaseReason, StepId, StepPlan
from pipemax.domain.units import ceil_div


class TraceSink(Protocol):
    """A recorder of a controller's events and plans."""

    def events(self, events: Sequence[Event]) -> None: ...

    def plan(self, now_s: float, plan: StepPlan) -> None: ...


@dataclass(frozen=True, slots=True)
class _Step:
    """A formed step of any phase, before the prefetch."""

    formed: PrefillStep | DecodeStep | MixedStep
    tokens: list[int]
    work: Work
    stage_s: tuple[float, ...]
    """Predicted seconds on each stage; zeros where nothing runs."""
    level_s: tuple[float, ...] | None = None
    """Those that the next batch's step should come close to, where they differ: a mixed step's without the attention of
    its prompts."""
    num_decodes: int | None = None
    """In a mixed step."""


class Controller:
    """Decides what each step does. Not thread-safe: one owner calls ``apply`` and ``plan_step`` in turn."""

    def __init__(self, config: ControllerConfig, trace: TraceSink | None = None) -> None:
        self._trace = trace
        self._flights = Flights()
        self._times = StageEstimators(config)
        self._outputs = OutputLengths(config.initial_output_tokens)
        self._num_plans = 0
        self._num_switches = 0
        self._begin(config)

    def _begin(self, config: ControllerConfig) -> None:
        self._table = RequestTable(
            gpu_blocks=config.gpu_blocks,
            host_blocks=config.host_blocks,
            block_tokens=config.block_tokens,
            groups=config.kv_groups,
        )
        self._rotation = Rotation(config.num_batches)
        self._intake = Intake(self._table, self._flights, self._times, self._outputs)
        self._awaiting_since_s: float | None = None
        self._awaited_s = 0.0
        self.config = config
        self._phase = Phase.MIXED if config.batching is Batching.MIXED else Phase.PREFILL
        throttle = PromptThrottle(config)
        self._phases = throttle if config.batching is Batching.MIXED else PhasePolicy(config)
        self._prefill = PrefillPlanner(config, self._table, self._phases, self._outputs)
        self._decode = DecodePlanner(config, self._table, self._rotation, self._flights, self._times)
        self._mixed = MixedPlanner(config, self._table, self._rotation, self._decode, self._prefill, throttle)
        self._prefetch = PrefetchPlanner(config, self._table, self._rotation, self._times)

    def apply(self, events: Sequence[Event]) -> None:
        """Apply events in their order. Raise ``ValueError`` for an event that violates the contract."""
        if self._trace is not None and events:
            self._trace.events(events)
        for event in events:
            self._intake.apply(event)

    def plan_step(self, now_s: float) -> StepPlan:
        """Plan the next step.

        If the plan is empty (``plan.is_empty``), call again after the next event, or at ``plan.wait_until_s`` where
        that is set. A step whose ``run`` is empty has no ``StepCompleted``.
        """
        self._table.begin_plan(self._num_plans)
        load = self._estimate_load(now_s)
        reason = self._choose_phase(load)
        step = self._form_batch(reason)
        prefetch = self._plan_prefetch(step)
        plan = self._commit(reason, step, prefetch, now_s)
        if self._trace is not None:
            self._trace.plan(now_s, plan)
        return plan

    def recalibrate(self, stages: Sequence[StageConfig]) -> None:
        """Replace the stages' coefficients, and forget the output lengths seen so far.

        The requests that ran before were there to be measured. A trace does not record this call. Raise
        ``ValueError`` if the number of stages differs.
        """
        if len(stages) != len(self.config.stages):
            raise ValueError(f"a calibration of {len(stages)} stages for {len(self.config.stages)}")
        self._times.recalibrate(stages)
        self._outputs.forget()

    def resize_gpu(self, gpu_blocks: int) -> None:
        """Plan for a GPU pool of this many blocks, as a new controller would that knows its step times.

        A trace does not record this call. Raise ``ValueError`` if there are requests, or the size is not possible.
        """
        self._begin_again(replace(self.config, gpu_blocks=gpu_blocks), "the GPU pool is to be resized")

    def use_batching(self, batching: Batching, mixed_step_tokens: int | None = None) -> None:
        """Plan by this batching, as a new controller would that knows its step times.

        ``mixed_step_tokens``: see ``ControllerConfig``.

        A trace does not record this call. Raise ``ValueError`` if there are requests.
        """
        config = replace(self.config, batching=batching, mixed_step_tokens=mixed_step_tokens)
        self._begin_again(config, "the batching is to change")

    def _begin_again(self, config: ControllerConfig, purpose: str) -> None:
        if self.num_unfinished or self._flights:
            raise ValueError(f"{purpose} while {self.num_unfinished} requests are under way")
        self._begin(config)
        self._outputs.forget()

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def num_switches(self) -> int:
        """The number of phase switches so far."""
        return self._num_switches

    @property
    def is_steady(self) -> bool:
        """Whether the prefetch budget of this decode phase has settled (PipeMax, §3.3.2, steady phase)."""
        return self._prefetch.is_steady

    @property
    def times(self) -> StageEstimators:
        """The step time predictions and their errors, for metrics."""
        return self._times

    @property
    def num_unfinished(self) -> int:
        """The number of requests that were admitted and have neither finished nor been aborted."""
        return len(self._table)

    @property
    def admission_demand_tokens(self) -> int:
        """How many more KV tokens (prompt + expected output) the input side may send.

        The host pool can take this many by the end of the current or next prefill phase without passing its high
        watermark. The number is negative if more is waiting already. The paper has no counterpart: there all requests
        wait from the start.
        """
        blocks = self._phases.admission_demand_blocks(self._phase, self._load())
        return blocks * self.config.block_tokens

    @property
    def kv_tokens_per_request(self) -> float | None:
        """The mean KV tokens of the host pool that a live request takes by its expected end; None without requests.

        A shared prefix is counted once.
        """
        table = self._table
        if not len(table):
            return None
        return (table.reserved_blocks * table.block_tokens + table.waiting_kv_tokens) / len(table)

    def check_integrity(self) -> None:
        """Recount everything; raise ``AssertionError`` with the values if a count differs. O(live): for tests."""
        self._table.check_integrity(self._rotation)

    # Estimate.

    def _estimate_load(self, now_s: float) -> MemoryLoad:
        if self._awaiting_since_s is not None:
            self._awaited_s += now_s - self._awaiting_since_s
            self._awaiting_since_s = None
        return self._load()

    def _load(self) -> MemoryLoad:
        table = self._table
        return MemoryLoad(
            num_waiting=table.num_waiting,
            waiting_blocks=ceil_div(table.waiting_kv_tokens, table.block_tokens),
            next_fits=self._prefill.next_fits(),
            num_prefilling=table.num_prefilling,
            num_decodable=table.num_decodable,
            live_blocks=table.live_blocks,
            reserved_blocks=table.reserved_blocks,
            input_open=self._intake.input_open,
            awaited_s=self._awaited_s,
        )

    # Choose phase.

    def _choose_phase(self, load: MemoryLoad) -> PhaseReason:
        phase, reason = self._phases.choose(self._phase, load)
        if phase is not self._phase:
            self._phase = phase
            self._num_switches += 1
            self._awaited_s = 0.0
            match phase:
                case Phase.PREFILL:
                    self._table.dissolve(self._rotation)
                case Phase.DECODE:
                    self._decode.initialize()
                    self._prefetch.initialize()
        return reason

    # Form batch.

    def _form_batch(self, reason: PhaseReason) -> _Step:
        formed: PrefillStep | DecodeStep
        match self._phase:
            case Phase.PREFILL:
                formed = self._prefill.form(anything_in_flight=bool(self._flights))
                tokens = formed.tokens
                work = PhaseWork(phase=self._phase, size=sum(tokens), kv_tokens=formed.token_pairs)
            case Phase.DECODE:
                formed = self._decode.form()
                tokens = [1] * len(formed.states)
                work = PhaseWork(phase=self._phase, size=len(tokens), kv_tokens=formed.kv_tokens)
            case Phase.MIXED:
                return self._form_mixed(begins=reason is PhaseReason.FILL_HOST)
        return _Step(formed, tokens, work, self._times.predict(work))

    def _form_mixed(self, *, begins: bool) -> _Step:
        formed = self._mixed.form(begins=begins, anything_in_flight=bool(self._flights))
        work, tokens = formed.work, formed.tokens
        if tokens:
            self._times.expect_fill(sum(tokens) if formed.prompts.states else 0)
        level_s = self._times.predict(replace(work, token_pairs=0))
        return _Step(formed, tokens, work, self._times.predict(work), level_s, num_decodes=work.num_decodes)

    # Prefetch.

    def _plan_prefetch(self, step: _Step) -> PrefetchStep:
        if self._phase is Phase.PREFILL:
            return PrefetchStep()
        formed = step.formed
        if formed.states:
            decodes = formed.decodes if isinstance(formed, MixedStep) else formed
            running = {state.id for state in decodes.states} if self.config.wave_groups else ()
            return self._prefetch.plan(step.stage_s, level_s=step.level_s, running=running)
        if self._rotation.num_requests == 0:
            return self._prefetch.plan_forced()
        return PrefetchStep()  # none of D_i may run: outputs come first

    # Commit.

    def _commit(self, reason: PhaseReason, step: _Step, prefetch: PrefetchStep, now_s: float) -> StepPlan:
        step_id = StepId(self._num_plans)
        self._num_plans += 1
        states = step.formed.states
        decision = self._explain(reason, step, prefetch)
        if states:
            self._flights.launch(step_id, [*states], [*step.tokens])
            self._times.remember(step_id, step.work, prefetch.budget_blocks)
            if self._phase is not Phase.PREFILL:
                self._rotation.iteration += 1
        wait_until_s = None
        if reason is PhaseReason.AWAIT_INPUT:
            self._awaiting_since_s = now_s
            wait_until_s = now_s + max(0.0, self.config.input_grace_s - self._awaited_s)
        self._intake.prefetched = {item.request_id for item in prefetch.items}
        return StepPlan(
            step_id=step_id,
            phase=self._phase,
            run=tuple(state.id for state in states),
            run_tokens=tuple(step.tokens),
            num_decodes=step.num_decodes,
            evict=tuple(state.id for state in (*step.formed.evicted, *prefetch.evicted)),
            overwrite=tuple(state.id for state in prefetch.overwritten) if self.config.wave_groups else None,
            recompute=tuple(state.id for state in step.formed.recomputed),
            prefetch=tuple(prefetch.items),
            wait_until_s=wait_until_s,
            decision=decision,
        )

    @property
    def _overwritten_batch(self) -> int:
        return self._rotation.executing if self.config.wave_groups else self._rotation.overwritten

    def _explain(self, reason: PhaseReason, step: _Step, prefetch: PrefetchStep) -> Decision:
        table, rotation = self._table, self._rotation
        decodes = self._phase is not Phase.PREFILL
        runs = bool(step.formed.states) and decodes
        return Decision(
            reason=reason,
            iteration=rotation.iteration if decodes else 0,
            executing_batch=rotation.executing if runs else None,
            next_batch=rotation.next if runs else None,
            overwritten_batch=self._overwritten_batch if runs else None,
            prefetch_mode=prefetch.mode,
            predicted_step_s=max(step.stage_s),
            budget_blocks=prefetch.budget_blocks,
            prefetched_blocks=prefetch.num_blocks,
            gap_s=prefetch.gap_s,
            run_kv_tokens=step.work.kv_tokens,
            num_waiting=table.num_waiting,
            num_parked=table.num_parked,
            num_resident=table.num_on_gpu,
            free_gpu_blocks=table.free_gpu_blocks,
            free_host_blocks=table.free_host_blocks,
            live_blocks=table.live_blocks,
        )
