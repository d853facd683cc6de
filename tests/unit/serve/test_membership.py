"""Who gets the one engine, and who is told that they wait for each other."""

from typing import Any

from pipemax.config import EngineConfig
from pipemax.serve.limits import Timings
from pipemax.serve.membership import EngineFailures, Member, Refused, conflict_of, next_to_load
from pipemax.wire import ProcessIdentity, SessionErrorCode

_TIMINGS = Timings(same_task_conflict_s=10, still_conflict_s=120)
_DAEMON = ProcessIdentity(pid=1, start_ticks=1)


def _member(model: str, **changes: Any) -> Member:
    values = {"job_id": "job", "task": "task 1", "daemon": _DAEMON, "since_s": 0.0} | changes
    return Member(config=EngineConfig(model=model), engine_id=model, **values)


def _next(*members: Member, resident: str | None = "a", unused_s: float = 99.0) -> Member | None:
    return next_to_load(list(members), resident, resident_unused_s=unused_s, grace_s=2.0)


def test_the_first_engine_loads_at_once_for_whoever_waits_longest() -> None:
    older, newer = _member("b", since_s=1.0), _member("c", since_s=2.0)
    assert _next(newer, older, resident=None, unused_s=0.0) is older
    assert _next(resident=None) is None


def test_an_engine_is_replaced_only_after_no_session_uses_it_for_a_while() -> None:
    waiting = _member("b")
    assert _next(_member("a"), waiting) is None
    assert _next(waiting, unused_s=1.0) is None
    assert _next(waiting) is waiting


def test_refused_sessions_neither_load_nor_hold_an_engine() -> None:
    refusal = Refused(code=SessionErrorCode.ENGINE_START_FAILED, detail="")
    assert _next(_member("b", refusal=refusal)) is None
    waiting = _member("b")
    assert _next(_member("a", refusal=refusal), waiting) is waiting


def test_sessions_of_one_task_conflict_soon_others_later() -> None:
    waiting = _member("b")
    same, other = _member("a"), _member("a", task="task 2")
    assert conflict_of(waiting, [same], still_s=9.0, timings=_TIMINGS) is None
    conflict = conflict_of(waiting, [other, same], still_s=11.0, timings=_TIMINGS)
    assert conflict is not None
    assert conflict.code is SessionErrorCode.ENGINE_CONFLICT
    assert conflict_of(waiting, [other], still_s=119.0, timings=_TIMINGS) is None
    assert conflict_of(waiting, [other], still_s=121.0, timings=_TIMINGS) is not None
    assert conflict_of(waiting, [], still_s=999.0, timings=_TIMINGS) is None


def test_a_start_failure_is_remembered_for_the_jobs_that_saw_it() -> None:
    failures = EngineFailures()
    refusal = Refused(code=SessionErrorCode.ENGINE_START_FAILED, detail="no memory")
    failures.record("a", refusal, {"job 1"})
    refused = failures.known_to("a", "job 1")
    assert refused is not None
    assert refused.code is SessionErrorCode.ENGINE_START_FAILED
    assert "no memory" in refused.detail
    assert failures.known_to("a", "job 2") is None
    assert failures.known_to("b", "job 1") is None
    failures.forget("a")
    assert failures.known_to("a", "job 1") is None


def test_a_conflict_over_one_model_names_the_settings_that_differ() -> None:
    compact, other = _member("m"), _member("m", since_s=1.0)
    other.config, other.engine_id = EngineConfig(model="m", json_whitespace="any"), "other"
    refused = conflict_of(other, [compact], still_s=200.0, timings=_TIMINGS)
    assert refused is not None
    assert "; json_whitespace is 'compact' there and 'any' here)" in refused.detail
