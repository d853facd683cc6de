"""The steps that were planned and whose outputs have not come back yet, oldest first."""

from collections import deque
from dataclasses import dataclass

from pipemax.control.state.request_state import RequestState
from pipemax.domain.plan import StepId
from pipemax.domain.units import RequestId


@dataclass(slots=True, kw_only=True)
class Flight:
    """The requests of one step, in parallel lists."""

    step_id: StepId
    states: list[RequestState]
    lives: list[int]
    """Each request's ``life`` when the step was planned. If it has changed since, the step no longer concerns it."""
    tokens: list[int]
    makes_output: list[bool]
    """Whether the step makes an output token for each request: a decode or a prompt's last chunk does."""

    def position(self, request_id: RequestId) -> int:
        """Return a request's position in the lists. Raise ``ValueError`` if the step does not run it."""
        for index, state in enumerate(self.states):
            if state.id == request_id:
                return index
        raise ValueError(f"step {self.step_id} does not run request {request_id}")

    def drop(self, index: int) -> None:
        """Forget the request at a position: the step does not run it after all."""
        del self.states[index], self.lives[index], self.tokens[index], self.makes_output[index]


class Flights:
    """The planned steps, which complete in order. Each request that a step runs is told the step's number."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self.num_launched = 0
        """Steps planned so far of which something ran."""

    def __bool__(self) -> bool:
        return bool(self._flights)

    def launch(self, step_id: StepId, states: list[RequestState], tokens: list[int]) -> None:
        for state in states:
            state.last_step = self.num_launched
        self.num_launched += 1
        flight = Flight(
            step_id=step_id,
            states=states,
            lives=[state.life for state in states],
            tokens=tokens,
            makes_output=[state.computed_tokens >= state.target_tokens for state in states],
        )
        self._flights.append(flight)

    def land(self, step_id: StepId) -> Flight:
        """Remove and return the oldest step, whose outputs came back. Raise ``ValueError`` if that is another one."""
        if not self._flights or self._flights[0].step_id != step_id:
            oldest = self._flights[0].step_id if self._flights else None
            raise ValueError(f"step {step_id} completed, but the oldest in flight is {oldest}")
        return self._flights.popleft()

    def latest(self, step_id: StepId) -> Flight:
        """Return the step planned last, which may still be corrected. Raise ``ValueError`` if that is another one."""
        if not self._flights or self._flights[-1].step_id != step_id:
            latest = self._flights[-1].step_id if self._flights else None
            raise ValueError(f"step {step_id} is corrected, but the one planned last is {latest}")
        return self._flights[-1]

    def drop_latest(self) -> None:
        """Forget the step planned last, of which nothing runs."""
        self._flights.pop()
        self.num_launched -= 1
