"""Own the one resident engine: start it when first needed, share it, and replace it when another is needed.

One thread owns the engine: it starts, polls, replaces and closes it. Sessions, on their own threads, only ask whether
their engine is ready, and call ``submit`` and ``abort``. The host knows nothing of Flight.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipemax.api import Engine, EngineStats
from pipemax.checkpoint.fingerprint import content_of
from pipemax.domain.errors import EngineDiedError, EngineStartError
from pipemax.endpoint_config import AnyConfig, EndpointConfig
from pipemax.serve.gpu_locks import GpuLocks
from pipemax.serve.limits import Timings
from pipemax.serve.membership import (
    EngineFailures,
    Member,
    Readiness,
    Ready,
    Refused,
    Waiting,
    conflict_of,
    next_to_load,
)
from pipemax.serve.sessions import EngineSessions
from pipemax.wire import ProcessIdentity, ServerStats, SessionErrorCode

log = logging.getLogger(__name__)

EngineFactory = Callable[[AnyConfig], Engine]
_POLL_TIMEOUT_S = 0.1
_REST_S = 0.5


@dataclass(slots=True)
class _Resident:
    engine: Engine
    config: AnyConfig
    engine_id: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """An engine that is being loaded."""

    member: Member
    """The member that it is loaded for first."""
    since_s: float
    instead_of: str
    """The engine that it replaces, in words that follow the model's name; empty if it replaces none."""


@dataclass(slots=True)
class _State:
    """Everything that the host's lock guards."""

    members: list[Member] = field(default_factory=list)
    resident: _Resident | None = None
    load: _Load | None = None
    unused_since_s: float = 0.0
    failures: EngineFailures = field(default_factory=EngineFailures)
    last_failure: str = ""
    refusal: Refused | None = None
    """Holds for every session once the engine has died or the server stops."""
    engine_starts: int = 0


class EngineHost:
    """Owns the resident engine. Public methods are thread-safe and return at once, except ``wait_until_closed``."""

    def __init__(
        self, factory: EngineFactory, sessions: EngineSessions, timings: Timings, gpus: GpuLocks
    ) -> None:
        self._factory = factory
        self._gpus = gpus
        self._sessions = sessions
        self._timings = timings
        self._changed = threading.Condition()
        self._state = _State()
        self._moved_at_s = time.monotonic()
        self._polled_at_s = time.monotonic()
        self._polling = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, refusal: Refused) -> None:
        """Refuse every session from now on, and make the engine's thread close the engine and end."""
        with self._changed:
            self._state.refusal = self._state.refusal or refusal
            self._changed.notify_all()

    def wait_until_closed(self, timeout_s: float) -> bool:
        """Wait, after ``stop``, until the engine has closed. Return ``False`` if it takes longer than this."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def join(self, config: AnyConfig, *, job_id: str, task: str, daemon: ProcessIdentity) -> Member:
        """Claim the config's engine for a session, until ``leave``."""
        member = Member(
            config=config,
            engine_id=config.engine_id(),
            job_id=job_id,
            task=task,
            daemon=daemon,
            since_s=time.monotonic(),
        )
        with self._changed:
            member.refusal = self._state.failures.known_to(member.engine_id, job_id)
            self._state.members.append(member)
            self._changed.notify_all()
        return member

    def leave(self, member: Member) -> None:
        with self._changed:
            self._state.members.remove(member)
            self._state.unused_since_s = time.monotonic()
            self._changed.notify_all()

    def note_movement(self) -> None:
        """Note that a session has sent or taken a row: so the sessions that hold the engine are not stuck."""
        self._moved_at_s = time.monotonic()

    def readiness(self, member: Member) -> Readiness:
        """Return whether the member's engine is ready, or why the member must wait or is refused."""
        now_s = time.monotonic()
        with self._changed:
            state = self._state
            refusal = state.refusal or member.refusal
            if refusal is not None:
                return refusal
            if state.load is not None:
                return self._waiting_for(state.load, member, now_s)
            if state.resident is None:
                return Waiting(detail=f"about to load model {member.config.model}")
            if state.resident.engine_id == member.engine_id:
                return Ready(engine=state.resident.engine, content=state.resident.content)
            holders = [m for m in state.members if m.engine_id == state.resident.engine_id]
            conflict = conflict_of(
                member, holders, still_s=self._still_s(member, now_s), timings=self._timings
            )
            if conflict is not None:
                member.refusal = conflict
                return conflict
            holder = f"the engine of model {state.resident.config.model}"
            return Waiting(detail=f"waiting for {holder}: {len(holders)} tasks use it", other_config=True)

    def responds(self) -> bool:
        """Return ``False`` while ``Engine.poll`` is stuck; loading and closing may take any time."""
        return not self._polling or time.monotonic() - self._polled_at_s < self._timings.poll_stall_s

    def stats(self) -> ServerStats:
        """Return the server's statistics as far as the host knows them."""
        now_s, host_name, identity = time.monotonic(), socket.gethostname(), ProcessIdentity.of_this_process()
        with self._changed:
            state = self._state
            name, detail = "starting", ""
            if state.refusal is not None:  # final: clients wait for this server's successor
                name, detail = "stopping", state.refusal.detail
            elif state.load is not None:
                name, detail = "loading", self._waiting_for(state.load, state.load.member, now_s).detail
            elif state.resident is not None:
                name = "ready"
            elif state.last_failure:
                name, detail = "failed", state.last_failure
            is_fault = state.refusal is not None and state.refusal.code is SessionErrorCode.MACHINE_FAULT
            engine = state.resident.engine.stats() if state.resident else EngineStats()
            return ServerStats(
                server_id=f"{host_name}:{identity}",
                host=host_name,
                pid=identity.pid,
                at_unix_s=time.time(),
                state=name,
                detail=detail,
                engine_starts=state.engine_starts,
                phase=engine.phase,
                running_requests=engine.running_requests,
                waiting_requests=engine.waiting_requests,
                kv_usage=engine.kv_usage,
                engine_metrics=dict(engine.metrics),
                policy=engine.policy,
                replicas=list(engine.replicas),
                gpus=list(self._gpus.gpus),
                machine_fault=detail if is_fault else "",
            )

    def _waiting_for(self, load: _Load, member: Member, now_s: float) -> Waiting:
        other = load.member.engine_id != member.engine_id
        doing = self._gpus.wait_reason or f"loading model {load.member.config.model}{load.instead_of}"
        detail = f"{doing}, {int(now_s - load.since_s)} s"
        return Waiting(detail=f"{detail} (another job's)" if other else detail, other_config=other)

    def _still_s(self, member: Member, now_s: float) -> float:
        if self._sessions.running_rows() > 0:
            self._moved_at_s = now_s
        return now_s - max(self._moved_at_s, member.since_s)

    # From here on, everything runs on the engine's thread.

    def _run(self) -> None:
        try:
            while self._state.refusal is None:
                self._step()
        except Exception as error:
            # The engine is useless without this thread: whatever ends it, tell every session.
            log.exception("the engine died")
            died = (
                error
                if isinstance(error, EngineDiedError)
                else EngineDiedError(f"the engine died: {error!r}")
            )
            self._sessions.engine_died(died.suspects)
            refusal = self._refusal_of(died)
            self.stop(refusal)
            self._sessions.death_announced(refusal.detail)
        finally:
            self._close_resident()

    def _refusal_of(self, died: EngineDiedError) -> Refused:
        if not died.is_machine_fault:
            return Refused(code=SessionErrorCode.ENGINE_DIED, detail=str(died))
        gpus = f", GPU {', '.join(self._gpus.gpus)}" if self._gpus.gpus else ""
        detail = f"{died}; this is a fault of the machine {socket.gethostname()}{gpus}, and no row's"
        return Refused(code=SessionErrorCode.MACHINE_FAULT, detail=detail)

    def _step(self) -> None:
        with self._changed:
            state = self._state
            target = next_to_load(
                state.members,
                state.resident.engine_id if state.resident else None,
                resident_unused_s=time.monotonic() - state.unused_since_s,
                grace_s=self._timings.replace_grace_s,
            )
            resident = state.resident
            load = None
            if target is not None:
                instead_of = f" in place of {resident.config.model}" if resident else ""
                load = _Load(member=target, since_s=time.monotonic(), instead_of=instead_of)
                # Under the same lock as the choice: a session that joins now must not get the old engine.
                state.load = load
            elif resident is None:
                self._changed.wait(_REST_S)
                return
        if load is not None:
            self._load(load)
            self._sessions.wake_all()
        elif resident is not None:
            self._poll(resident)

    def _load(self, load: _Load) -> None:
        state, target = self._state, load.member
        log.info("loading model %s (config %s)%s", target.config.model, target.engine_id, load.instead_of)
        self._close_resident()
        needs_gpus = not isinstance(target.config, EndpointConfig)
        if needs_gpus and not self._gpus.take(gives_up=lambda: state.refusal is not None):
            return
        content = content_of(target.config, load=state.engine_starts)
        try:
            engine = self._factory(target.config)
        except (EngineStartError, EngineDiedError) as error:
            self._record_failure(target, str(error))
        except Exception as error:
            log.exception("the engine's start raised an unexpected error")
            self._record_failure(
                target, f"the engine of model {target.config.model!r} did not start: {error!r}"
            )
        else:
            self._sessions.feed(engine, target.config)  # no session knows of it yet
            with self._changed:
                state.resident = _Resident(engine, target.config, target.engine_id, content)
                state.load = None
                state.engine_starts += 1
                state.failures.forget(target.engine_id)
                state.last_failure = ""
            self.note_movement()
            log.info("model %s is ready after %.1f s", target.config.model, time.monotonic() - load.since_s)

    def _record_failure(
        self,
        failed: Member | _Resident,
        reason: str,
        code: SessionErrorCode = SessionErrorCode.ENGINE_START_FAILED,
    ) -> None:
        """Refuse every session of an engine, and those that its jobs open later."""
        state = self._state
        log.error("no engine: %s", reason)
        refusal = Refused(code=code, detail=reason)
        with self._changed:
            state.load = None
            state.last_failure = reason
            members = [m for m in state.members if m.engine_id == failed.engine_id]
            job_ids = {m.job_id for m in members}
            if isinstance(failed, Member):
                job_ids.add(failed.job_id)
            state.failures.record(failed.engine_id, refusal, job_ids)
            for member in members:
                member.refusal = refusal

    def _poll(self, resident: _Resident) -> None:
        self._polled_at_s, self._polling = time.monotonic(), True
        try:
            completions = resident.engine.poll(_POLL_TIMEOUT_S)
        except EngineDiedError as died:
            if not died.ends_run:
                raise
            # The server stays, and refuses what Spark tries again at once: a successor would only meet the same.
            self._record_failure(resident, str(died), SessionErrorCode.ENDPOINT_REFUSED)
            self._close_resident()
            self._sessions.wake_all()
            return
        finally:
            self._polling = False
        if completions:
            self._sessions.rows_ended(completions)
        self._sessions.feed(resident.engine, resident.config)

    def _close_resident(self) -> None:
        state = self._state
        with self._changed:
            resident, state.resident = state.resident, None
        if resident is not None:
            log.info("closing the engine of model %s", resident.config.model)
            resident.engine.close()
