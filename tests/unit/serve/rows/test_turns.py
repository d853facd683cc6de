"""Which rows run together while the row that kills the engine is looked for; the engine is a list."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipemax.api import Completion, GenerationRequest
from pipemax.domain.errors import EngineDiedError
from pipemax.serve.rows.journal import Journal
from pipemax.serve.rows.turns import Turns
from pipemax.wire import ErrorCode
from tests.fakes.idle_engine import IdleEngine


class ListEngine(IdleEngine):
    """Remembers what runs; dies when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.dead = False
        self.is_machine_fault = False

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self.dead:
            raise EngineDiedError("dead", is_machine_fault=self.is_machine_fault)
        self.running += [request.request_id for request in requests]

    def abort(self, request_ids: Sequence[str]) -> None:
        self.running = [name for name in self.running if name not in request_ids]

    def poll(self, timeout_s: float) -> list[Completion]:
        done = [Completion(request_id=name, text="x") for name in self.running]
        self.running = []
        return done


def _submit(turns: Turns, engine: ListEngine, rows: str) -> list[Completion]:
    """Each letter is a row; equal letters of two cases are equal rows."""
    requests = [GenerationRequest(request_id=row, prompt=row) for row in rows]
    return turns.submit(engine, requests, [row.lower().encode() * 16 for row in rows])


def _finish(turns: Turns, engine: ListEngine) -> None:
    turns.record_ends(engine.poll(0.0))
    turns.release(engine)


def _suspecting(path: Path, rows: str) -> tuple[Turns, ListEngine]:
    """A server whose predecessor was killed while it ran the rows."""
    _submit(Turns(Journal(path)), ListEngine(), rows)
    return Turns(Journal(path)), ListEngine()


def num_suspects(turns: Turns) -> int:
    """As people are told."""
    told = turns.describe()
    return int(told.split(" rows that may have killed the engine")[0]) if told else 0


def test_without_suspects_everything_runs_at_once(tmp_path: Path) -> None:
    turns, engine = Turns(Journal(tmp_path / "j")), ListEngine()
    assert _submit(turns, engine, "ab") == []
    assert _submit(turns, engine, "c") == []
    assert engine.running == ["a", "b", "c"]


def test_a_suspect_group_runs_by_itself_and_other_rows_after_it(tmp_path: Path) -> None:
    turns, engine = _suspecting(tmp_path / "j", "abcd")
    assert num_suspects(turns) == 4
    _submit(turns, engine, "bxcda")
    assert engine.running == ["b", "a"]
    _submit(turns, engine, "y")
    assert engine.running == ["b", "a"]
    _finish(turns, engine)
    assert sorted(engine.running) == ["c", "d"]
    _finish(turns, engine)
    assert engine.running == ["x", "y"]
    assert num_suspects(turns) == 0


def test_rows_of_the_running_group_join_it(tmp_path: Path) -> None:
    turns, engine = _suspecting(tmp_path / "j", "abcd")
    _submit(turns, engine, "a")
    _submit(turns, engine, "cb")
    assert engine.running == ["a", "b"]


def test_others_run_while_no_suspect_is_here_and_let_one_pass_when_it_comes(tmp_path: Path) -> None:
    turns, engine = _suspecting(tmp_path / "j", "abcd")
    _submit(turns, engine, "x")
    _submit(turns, engine, "y")
    assert engine.running == ["x", "y"]
    _submit(turns, engine, "c")
    _submit(turns, engine, "z")
    assert engine.running == ["x", "y"]
    _finish(turns, engine)
    assert engine.running == ["c"]
    _finish(turns, engine)
    assert engine.running == ["z"]


def test_equal_rows_of_two_tasks_are_one_suspect(tmp_path: Path) -> None:
    turns, engine = _suspecting(tmp_path / "j", "aAb")
    assert num_suspects(turns) == 2
    _submit(turns, engine, "bAa")
    assert engine.running == ["A", "a"]


def test_a_task_that_ends_takes_its_suspects_along(tmp_path: Path) -> None:
    turns, engine = _suspecting(tmp_path / "j", "abcd")
    _submit(turns, engine, "abcdx")
    turns.abort(engine, ["a", "b", "c"])
    assert num_suspects(turns) == 1
    _finish(turns, engine)
    assert engine.running == ["d"]


def test_a_suspect_stays_while_an_equal_row_waits(tmp_path: Path) -> None:
    turns, engine = _suspecting(tmp_path / "j", "abcd")
    _submit(turns, engine, "aAc")
    turns.abort(engine, ["a"])
    assert num_suspects(turns) == 4


def test_suspects_that_never_return_are_cleared(tmp_path: Path) -> None:
    now_s = 0.0
    Journal(tmp_path / "j").start([b"a" * 16, b"b" * 16])
    turns = Turns(Journal(tmp_path / "j"), absent_suspects_s=60.0, clock=lambda: now_s)
    engine = ListEngine()
    now_s = 1000.0  # the model loads
    turns.release(engine)
    now_s = 1059.0
    turns.release(engine)
    assert num_suspects(turns) == 2
    now_s = 1061.0
    turns.release(engine)
    assert num_suspects(turns) == 0


def test_a_condemned_row_is_answered_with_an_error_and_never_runs_again(tmp_path: Path) -> None:
    turns, engine = _suspecting(tmp_path / "j", "a")
    _submit(turns, engine, "a")
    turns = Turns(Journal(tmp_path / "j"))
    for row in "aA":
        engine = ListEngine()
        (refused,) = _submit(turns, engine, f"{row}b")
        assert refused.request_id == row
        assert refused.error is not None
        assert refused.error.code == ErrorCode.ENGINE_DIED
        assert engine.running == ["b"]
        _finish(turns, engine)


def test_rows_that_a_dead_engine_did_not_take_are_not_suspect(tmp_path: Path) -> None:
    turns, engine = Turns(Journal(tmp_path / "j")), ListEngine()
    _submit(turns, engine, "ab")
    engine.dead = True
    with pytest.raises(EngineDiedError):
        _submit(turns, engine, "cde")
    turns.abort(engine, ["a", "b"])  # what the sessions do when they hear of the death
    assert num_suspects(Turns(Journal(tmp_path / "j"))) == 2


def test_aborts_after_a_death_do_not_clear_suspects(tmp_path: Path) -> None:
    turns, engine = Turns(Journal(tmp_path / "j")), ListEngine()
    _submit(turns, engine, "ab")
    turns.freeze()
    turns.abort(engine, ["a", "b"])
    turns.close(in_order=False)
    assert num_suspects(Turns(Journal(tmp_path / "j"))) == 2


def test_an_engine_that_dies_of_every_row_is_refused_only_to_its_job(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for _ in range(6):
        turns, engine = Turns(Journal(path)), ListEngine()
        assert turns.join("nightly") is None
        for row in "abc":
            if not engine.running:
                _submit(turns, engine, row)
    turns = Turns(Journal(path))
    assert "whatever row" in (turns.join("nightly") or "")
    assert turns.join("another") is None
    assert _submit(turns, ListEngine(), "abc") == []


def test_only_the_rows_that_a_dead_engine_names_are_suspect(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    turns = Turns(Journal(path))
    _submit(turns, ListEngine(), "abcd")
    turns.freeze({"b", "c"})
    turns.abort(ListEngine(), ["b"])  # as a session does that hears of the death
    successor, engine = Turns(Journal(path)), ListEngine()
    assert num_suspects(successor) == 2
    _submit(successor, engine, "abcd")
    assert len(engine.running) == 1, "the suspects run apart, by themselves"
    assert set(engine.running) < {"b", "c"}


def test_suspects_that_were_not_in_the_part_that_died_stay_suspect(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    turns, engine = _suspecting(path, "abcdefgh")
    _submit(turns, engine, "abcdefgh")
    group = set(engine.running)
    named = min(group)
    turns.freeze({named})
    assert num_suspects(Turns(Journal(path))) == 8


def test_a_fault_of_the_machine_leaves_all_suspects_as_they_were(tmp_path: Path) -> None:
    turns, engine = _suspecting(tmp_path / "j", "abcd")
    _submit(turns, engine, "abx")
    assert engine.running == ["a", "b"]
    turns.freeze(EngineDiedError("CUDA error", is_machine_fault=True).suspects)
    turns.close(in_order=False)
    again = Journal(tmp_path / "j")
    assert sorted(len(group) for group in again.suspects.groups) == [2, 2]


def test_a_fault_of_the_machine_that_a_submission_meets_accuses_no_row(tmp_path: Path) -> None:
    turns, engine = Turns(Journal(tmp_path / "j")), ListEngine()
    _submit(turns, engine, "ab")
    engine.dead = engine.is_machine_fault = True
    with pytest.raises(EngineDiedError):
        _submit(turns, engine, "c")
    turns.close(in_order=False)
    assert num_suspects(Turns(Journal(tmp_path / "j"))) == 0
