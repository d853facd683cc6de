"""Reach vLLM's core from the engine's process: call our scheduler there, hear of the core's death, and end it.

vLLM looks up the method of a utility call by its name on ``EngineCore``, and passes nothing on to the scheduler. So the
core gets two more methods, in the process where PipeMax's scheduler is made. Only plain values cross. The core may
also live in the caller's process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), where the methods are called directly.
"""

import logging
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)

_CALL_SCHEDULER = "pipemax_call_scheduler"
_HOLD_REQUESTS = "pipemax_hold_requests"
_DEATH_LOOK_S = 0.5
_CORE_SETTLES_S = 1.0
"""How long a core that is reported dead may take to have its exit code."""


# -- in the core's process ------------------------------------------------------------------------------------


def answer_calls() -> None:
    """Have the core hand calls on to its scheduler. Call this in the core's process."""
    setattr(EngineCore, _CALL_SCHEDULER, _call_scheduler)
    setattr(EngineCore, _HOLD_REQUESTS, _hold_requests)


def _call_scheduler(core: EngineCore, method: str, arguments: Sequence[Any], when_idle: bool) -> Any:
    scheduler = _idle_scheduler(core) if when_idle else core.scheduler
    return getattr(scheduler, method)(*arguments)


def _hold_requests(core: EngineCore, is_on: bool) -> None:
    if is_on:
        scheduler = _idle_scheduler(core)
        while scheduler.has_requests():  # that have ended, of which the workers have not been told
            core.step_fn()
            _idle_scheduler(core)
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL if is_on else PauseState.UNPAUSED)


def _idle_scheduler(core: EngineCore) -> Any:
    """Return the scheduler once nothing is in flight: the last request may have ended while further steps were."""
    while core.batch_queue:
        core.step_fn()
    return core.scheduler


# -- in the engine's process ----------------------------------------------------------------------------------


def call_scheduler(engine: LLMEngine, method: str, *arguments: object, when_idle: bool = False) -> Any:
    """Return the answer of the scheduler's method, which a core in another process gives between two steps.

    ``when_idle``: the core first ends the steps in flight.
    """
    return _call(engine, _CALL_SCHEDULER, method, arguments, when_idle)


def hold_requests(engine: LLMEngine, is_on: bool) -> None:
    """Have an idle engine begin no request from now on, or begin those that were added meanwhile."""
    _call(engine, _HOLD_REQUESTS, is_on)


def send_to_scheduler(engine: LLMEngine, method: str, *arguments: object) -> Future[Any] | None:
    """Call the scheduler's method and do not wait for the answer: vLLM's ``call_utility`` without its last line.

    The order holds: requests, aborts and calls take one socket and one queue, and the core empties the queue in order
    before each step. The answer comes on a thread of vLLM's client. A failed call is logged here and in the core. If
    the core is dead, do nothing and return ``None``.
    """
    client: Any = engine.engine_core
    answer: Future[Any] = Future()
    answer.add_done_callback(_log_failure)
    if isinstance(client, InprocClient):
        answer.set_result(call_scheduler(engine, method, *arguments))
    elif client.resources.engine_dead:
        return None
    else:
        call_id = uuid.uuid1().int >> 64
        # Before the call is sent: vLLM's output thread looks up the answer's id, and dies if it cannot find it.
        client.utility_results[call_id] = answer
        call = (0, call_id, _CALL_SCHEDULER, (method, arguments, False))
        client._send_input(EngineCoreRequestType.UTILITY, call)
    return answer


def _call(engine: LLMEngine, method: str, *arguments: object) -> Any:
    client: Any = engine.engine_core  # the clients' base class in vLLM lacks the method that each client has
    if isinstance(client, InprocClient):
        return getattr(client.engine_core, method)(*arguments)
    return client.call_utility(method, *arguments)


def _log_failure(answer: Future[Any]) -> None:
    error = answer.exception()
    if error is not None:
        log.error("vLLM's core did not carry out a call: %s", error)


def core_processes(engine: LLMEngine) -> list[Any]:
    """Return the core's processes; none for a core in this process."""
    client: Any = engine.engine_core
    return [] if isinstance(client, InprocClient) else _processes(client)


def core_exit_code(engine: LLMEngine) -> int | None:
    """Return how vLLM's core process ended; None while it runs, and for a core in this process."""
    client: Any = engine.engine_core
    if isinstance(client, InprocClient) or not client.resources.engine_dead:
        return None
    for process in _processes(client):
        process.join(_CORE_SETTLES_S)
        if process.exitcode:
            return int(process.exitcode)
    return None


def end_core(engine: LLMEngine, limit_s: float) -> None:
    """End vLLM's processes. Those of an engine that has not failed may take until the limit."""
    client: Any = engine.engine_core
    if isinstance(client, InprocClient):
        client.shutdown()
    else:
        client.shutdown(timeout=None if client.resources.engine_dead else limit_s)


def watch_core(engine: LLMEngine, closed: threading.Event) -> None:
    """Begin a thread that tells of the core's death, for a core in another process."""
    client: Any = engine.engine_core
    if not isinstance(client, InprocClient):
        threading.Thread(target=tell_death, args=(client, closed), name="core-death", daemon=True).start()


def tell_death(client: Any, closed: threading.Event) -> None:
    """Have who waits for a dead core's output or answer hear of it, until ``closed``.

    A core that raises says so before it ends, to who waits for output. One that is killed says nothing: vLLM's client
    notices, closes the connection, and would let both wait forever.
    """
    while not closed.wait(_DEATH_LOOK_S):
        if client.resources.engine_dead:
            for answer in list(client.utility_results.values()):
                with suppress(InvalidStateError):  # it has come
                    answer.set_exception(EngineDeadError())
            client.outputs_queue.put_nowait(EngineDeadError())
            return


def _processes(client: Any) -> list[Any]:
    return list(getattr(client.resources.engine_manager, "processes", ()))
