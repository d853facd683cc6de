"""Decide which engine is loaded and which sessions must wait, as rules over plain values.

This module knows neither threads nor engines; ``engine_host`` holds the lock and carries the decisions out.
"""

from dataclasses import dataclass, field, replace

from pipemax.api import Engine
from pipemax.endpoint_config import AnyConfig
from pipemax.serve.limits import Timings
from pipemax.wire import ProcessIdentity, SessionErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The session has no engine yet."""

    detail: str
    other_config: bool = False
    """Another job's engine is in use; this wait may be as long as that job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The session's engine is ready."""

    engine: Engine
    content: bytes
    """Identifies what the engine was loaded from: see ``pipemax.checkpoint.fingerprint``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The session cannot continue."""

    code: SessionErrorCode
    detail: str


Readiness = Waiting | Ready | Refused


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """An open session's claim on an engine."""

    config: AnyConfig
    engine_id: str
    job_id: str
    task: str
    daemon: ProcessIdentity
    since_s: float
    refusal: Refused | None = None


@dataclass(slots=True)
class EngineFailures:
    """Engines that did not start, or that no further start would help.

    The same job is refused again at once; another job is a new attempt.
    """

    _failures: dict[str, tuple[Refused, frozenset[str]]] = field(default_factory=dict)
    """By the engine's id: the last refusal, and the jobs that have heard of one."""

    def record(self, engine_id: str, refusal: Refused, job_ids: set[str]) -> None:
        _, known_to = self._failures.get(engine_id, (refusal, frozenset[str]()))
        self._failures[engine_id] = refusal, known_to | job_ids

    def forget(self, engine_id: str) -> None:
        self._failures.pop(engine_id, None)

    def known_to(self, engine_id: str, job_id: str) -> Refused | None:
        refusal, jobs = self._failures.get(engine_id, (None, frozenset[str]()))
        if refusal is None or job_id not in jobs:
            return None
        return replace(refusal, detail=f"{refusal.detail} (not tried again in this job)")


def next_to_load(
    members: list[Member], resident_id: str | None, *, resident_unused_s: float, grace_s: float
) -> Member | None:
    """Return the oldest waiting member, once the resident engine has had no session for the grace time."""
    waiting = [m for m in members if m.refusal is None and m.engine_id != resident_id]
    if not waiting:
        return None
    in_use = any(m.engine_id == resident_id and m.refusal is None for m in members)
    if resident_id is not None and (in_use or resident_unused_s < grace_s):
        return None
    return min(waiting, key=lambda m: m.since_s)


def conflict_of(
    waiting: Member, holders: list[Member], *, still_s: float, timings: Timings
) -> Refused | None:
    """Return a refusal if ``waiting`` and the resident engine's sessions wait for each other.

    Two annotations with different configs, chained within one stage, deadlock: the second reads what the first yields,
    and the first cannot end until it is read. The only sign of it here is that nothing has moved for ``still_s``.
    """
    same_task = [m for m in holders if m.task == waiting.task and m.daemon == waiting.daemon]
    patience_s = timings.same_task_conflict_s if same_task else timings.still_conflict_s
    if not holders or still_s < patience_s:
        return None
    holder = (same_task or holders)[0]
    return Refused(
        code=SessionErrorCode.ENGINE_CONFLICT,
        detail=(
            f"two engine configs are in use at once on this executor: {holder.task} holds the engine of model "
            f"{holder.config.model!r}, {waiting.task} needs one of model {waiting.config.model!r} (config "
            f"{waiting.engine_id}{_differences(holder, waiting)}), and nothing has moved for {still_s:.0f} s. Write "
            "the first annotation to a table before the second starts, or give both the same engine config."
        ),
    )


def _differences(holder: Member, waiting: Member) -> str:
    """Name the settings in which the two configs differ; nothing if the models differ, which are named already."""
    holder_config, waiting_config = (
        engine.config.model_dump(mode="json", exclude={"row_lengths"}) for engine in (holder, waiting)
    )
    if holder_config["model"] != waiting_config["model"]:
        return ""
    return "".join(
        f"; {name} is {holder_config[name]!r} there and {waiting_config[name]!r} here"
        for name in waiting_config
        if holder_config[name] != waiting_config[name]
    )
