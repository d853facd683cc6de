"""Calls to the scheduler reach it through vLLM's own client and core, in one process and between two."""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import (
    BackgroundResources,
    InprocClient,
    SyncMPClient,
    _process_utility_output,
)
from vllm.v1.engine.exceptions import EngineDeadError

from pipemax.control.times.profiling import Profile
from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.vllm_ext.core_calls import (
    ask_step_records,
    fixed_times,
    held,
    set_input_open,
    set_limits,
    take_profile,
)
from pipemax.vllm_ext.seam.core_client import answer_calls, tell_death
from tests.waiting import wait_until

_COUNTS = ("prompt_tokens", "decodes", "kv_tokens", "running", "waiting", "preempted")
STEPS = StepRecords.from_plain({**{name: [1, 2] for name in _COUNTS}, "seconds": [None, 0.5], "dropped": 3})


@dataclass
class FakeScheduler:
    heard: list[Any] = field(default_factory=list)
    num_ended: int = 0
    """Requests that have ended, of which the workers have not been told."""

    def take_profile(self) -> dict[str, Any]:
        return {"steps": [], "copies": []}

    def set_input_open(self, is_open: bool) -> None:
        self.heard.append(is_open)

    def add_request(self, request: Any) -> None:
        self.heard.append(request)

    def has_requests(self) -> bool:
        return self.num_ended > 0

    def set_pause_state(self, state: PauseState) -> None:
        self.heard.append(state)

    def set_limits(self, step_tokens: int, running_rows: int) -> None:
        self.heard.append((step_tokens, running_rows))

    def take_step_records(self) -> dict[str, Any]:
        return STEPS.to_plain()

    def learn_times(self, is_on: bool) -> None:
        self.heard.append(f"learns {is_on}")


class FakeCoreProcess(EngineCoreProc):
    """vLLM's core with a scheduler only: it takes in what a client sent when it is told to."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.batch_queue = None
        self.step_fn = self._tell_ended

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.scheduler.add_request(request)

    def _tell_ended(self) -> Any:
        self.scheduler.num_ended -= 1
        self.scheduler.heard.append("step")
        return {}, False

    def take_in(self) -> None:
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get())

    def shutdown(self) -> None:
        pass


class QueueClient(SyncMPClient):
    """vLLM's client with queues for sockets; ``take_answers`` does what its output thread does."""

    def __init__(self, core: FakeCoreProcess) -> None:
        self._core = core
        self.resources = BackgroundResources(ctx=None)
        self.utility_results = {}

    def _send_input(self, request_type: EngineCoreRequestType, request: Any) -> None:
        self._core.input_queue.put((request_type, request))

    def take_answers(self) -> None:
        while not self._core.output_queue.empty():
            _, outputs = self._core.output_queue.get()
            _process_utility_output(outputs.utility_output, self.utility_results)


class InProcessClient(InprocClient):
    def __init__(self, core: EngineCore) -> None:
        self.engine_core = core


@pytest.fixture(autouse=True)
def _answered() -> None:
    answer_calls()


def engine_of(client: Any) -> Any:
    return SimpleNamespace(engine_core=client)


def make_pair(scheduler: Any) -> tuple[FakeCoreProcess, QueueClient]:
    core = FakeCoreProcess(scheduler)
    return core, QueueClient(core)


def test_the_input_signal_does_not_wait_for_the_core_and_keeps_its_place_among_requests() -> None:
    core, client = make_pair(scheduler := FakeScheduler())
    set_input_open(engine_of(client), True)
    client._send_input(EngineCoreRequestType.ADD, ("request", 0))
    set_input_open(engine_of(client), False)
    assert scheduler.heard == [], "the core is busy with a step"
    core.take_in()
    assert scheduler.heard == [True, "request", False]


def test_limits_and_records_of_steps_do_not_wait_for_the_core() -> None:
    core, client = make_pair(scheduler := FakeScheduler())
    taken: list[StepRecords] = []
    set_limits(engine_of(client), StepLimits(step_tokens=64, running_rows=8))
    ask_step_records(engine_of(client), taken.append)
    assert (scheduler.heard, taken) == ([], []), "the core is busy with a step"
    core.take_in()
    assert scheduler.heard == [(64, 8)]
    client.take_answers()
    assert [records.to_plain() for records in taken] == [STEPS.to_plain()]
    assert client.utility_results == {}


def test_a_core_that_cannot_take_the_input_signal_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    core, client = make_pair(SimpleNamespace())
    set_input_open(engine_of(client), True)
    core.take_in()
    with caplog.at_level(logging.ERROR, logger="pipemax"):
        client.take_answers()
    assert "set_input_open" in caplog.text


def test_a_dead_core_is_sent_no_input_signal() -> None:
    core, client = make_pair(FakeScheduler())
    client.resources.engine_dead = True
    set_input_open(engine_of(client), True)
    assert core.input_queue.empty()
    assert client.utility_results == {}


def test_who_waits_for_a_core_that_was_killed_hears_of_it() -> None:
    """vLLM's client has noticed, and passes nothing on to a step or a call that waits."""
    core, client = make_pair(FakeScheduler())
    client.outputs_queue = queue.Queue()
    told: queue.Queue[str] = queue.Queue()

    def wait(what: str, call: Callable[[], Any]) -> None:
        with pytest.raises(EngineDeadError):
            call()
        told.put(what)

    for what, call in (("call", lambda: take_profile(engine_of(client))), ("step", client.get_output)):
        threading.Thread(target=wait, args=(what, call), daemon=True).start()
    wait_until(lambda: not core.input_queue.empty())
    client.resources.engine_dead = True
    tell_death(client, threading.Event())
    assert {told.get(timeout=30), told.get(timeout=30)} == {"call", "step"}


def test_nothing_is_told_of_a_core_that_is_closed() -> None:
    _, client = make_pair(FakeScheduler())
    client.outputs_queue = queue.Queue()
    closed = threading.Event()
    closed.set()
    client.resources.engine_dead = True
    tell_death(client, closed)
    assert client.outputs_queue.empty()


def test_a_core_in_the_same_process_is_called_directly() -> None:
    core = FakeCoreProcess(scheduler := FakeScheduler())
    engine = engine_of(InProcessClient(core))
    assert take_profile(engine) == Profile([], [])
    set_input_open(engine, True)
    assert scheduler.heard == [True]
    assert core.input_queue.empty()


def test_requests_that_are_held_begin_together_once_the_last_run_is_over() -> None:
    core = FakeCoreProcess(scheduler := FakeScheduler(num_ended=2))
    with held(engine_of(InProcessClient(core))):
        scheduler.add_request("first")
        scheduler.add_request("second")
    assert scheduler.heard == ["step", "step", PauseState.PAUSED_ALL, "first", "second", PauseState.UNPAUSED]


def test_step_times_are_learned_again_after_a_failure() -> None:
    core = FakeCoreProcess(scheduler := FakeScheduler())
    with pytest.raises(ZeroDivisionError), fixed_times(engine_of(InProcessClient(core))):
        raise ZeroDivisionError
    assert scheduler.heard == ["learns False", "learns True"]
