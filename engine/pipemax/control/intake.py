"""Applies each event to the controller's state. It decides nothing."""

from pipemax.control.planners.prefill import OutputLengths
from pipemax.control.state.batches import Flights
from pipemax.control.state.request import Place
from pipemax.control.state.table import RequestTable
from pipemax.control.times.stage_estimators import StageEstimators
from pipemax.domain.events import (
    Event,
    GpuBlocksObserved,
    InputEnded,
    InputOpened,
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
from pipemax.domain.units import RequestId


class Intake:
    """Applies events to the requests and the estimators."""

    def __init__(
        self, table: RequestTable, flights: Flights, times: StageEstimators, outputs: OutputLengths
    ) -> None:
        self._table = table
        self._flights = flights
        self._times = times
        self._outputs = outputs
        self.input_open = False
        self.prefetched: set[RequestId] = set()
        """Prefetched by the last plan, so that the engine may still refuse it."""

    def apply(self, event: Event) -> None:
        match event:
            case StepCompleted():
                self._complete(event)
            case RequestAdmitted():
                self._table.admit(event.request, self._outputs.expected_kv_tokens(event.request))
            case RequestAborted():
                state = self._table.find(event.request_id)
                if state is not None:
                    self._table.remove(state)
            case StepTimed():
                self._times.observe_step(event)
            case TransferTimed():
                self._times.observe_transfer(event)
            case PrefixCacheHit():
                self._hit(event)
            case RunRefused():
                self._refuse_run(event)
            case PrefetchRefused():
                self._refuse_prefetch(event)
            case RequestPreempted():
                self._preempt(event)
            case GpuBlocksObserved():
                self._table.observe_free_gpu_blocks(event.num_free)
            case InputOpened():
                self.input_open = True
            case InputEnded():
                self.input_open = False

    def _complete(self, event: StepCompleted) -> None:
        flight = self._flights.land(event.step_id)
        spent = self._table.complete(flight)
        if event.finished:
            ran = {state.id: state for state in flight.states}
            for request_id in event.finished:
                if request_id not in ran:
                    raise ValueError(f"{request_id} finished with step {event.step_id}, which did not run it")
                state = ran[request_id]
                spent.pop(request_id, None)
                if self._table.find(request_id) is state:
                    self._outputs.observe(state.output_tokens)
                    self._table.remove(state)
        if spent:
            raise ValueError(
                f"with step {event.step_id} {[*spent]} have max_tokens outputs and did not finish"
            )

    def _hit(self, event: PrefixCacheHit) -> None:
        flight = self._flights.latest(event.step_id)
        index = flight.position(event.request_id)
        state = flight.states[index]
        if state.place is not Place.PREFILLING or event.num_tokens <= state.cached_tokens:
            return
        computed = min(state.target_tokens, event.num_tokens + flight.tokens[index])
        self._table.observe_hit(state, cached_tokens=event.num_tokens, computed_tokens=computed)
        flight.makes_output[index] = computed >= state.target_tokens
        self._times.forget(event.step_id)

    def _refuse_run(self, event: RunRefused) -> None:
        flight = self._flights.latest(event.step_id)
        index = flight.position(event.request_id)
        state = flight.states[index]
        if state.life == flight.lives[index]:
            self._table.retract(state, flight.tokens[index])
        flight.drop(index)
        self._times.forget(event.step_id)
        if not flight.states:
            self._flights.drop_latest()

    def _refuse_prefetch(self, event: PrefetchRefused) -> None:
        if event.request_id not in self.prefetched:
            raise ValueError(f"the last plan does not prefetch request {event.request_id}")
        state = self._table.find(event.request_id)
        if state is not None and state.place in (Place.RESIDENT, Place.PREFETCHING):
            self._table.evict(state)

    def _preempt(self, event: RequestPreempted) -> None:
        state = self._table.find(event.request_id)
        if state is not None and state.place is not Place.WAITING:
            self._table.recompute(state)
