"""The rules by which a row that kills the engine is found, against a model of an engine that dies."""

import random
from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from pipemax.serve.rows.suspects import CONDEMNED_IN_A_ROW, DEATHS_ALONE, Suspects


def _key(number: int) -> bytes:
    return number.to_bytes(16)


class Application:
    """Rows, of which some kill whatever engine runs them, under a server that restarts after each death."""

    def __init__(self, rows: int, guilty: set[int], *, rng: random.Random, kill_rate: float = 0.0) -> None:
        self.open = {_key(row) for row in range(rows)}
        self.guilty = {_key(row) for row in guilty}
        self.completed: set[bytes] = set()
        self.condemned: set[bytes] = set()
        self.guilty_deaths = 0
        self.suspects = Suspects()
        self._rng = rng
        self._kill_rate = kill_rate
        self._killed_alone: set[bytes] = set()

    def run(self) -> None:
        """Until every row is completed or condemned, or the engine is to blame."""
        while self.open and not self.suspects.refused_jobs:
            self.suspects.record_job("job")
            refused = self.open & self.suspects.condemned
            self.condemned |= refused
            self.open -= refused
            # Not every row comes back at once.
            present = {key for key in sorted(self.open) if self._rng.random() < 0.8}
            group = self.suspects.choose_group(present)
            self._turn(sorted(present if group is None else present & group))
            # Through the journal, as a successor would read it.
            self.suspects = Suspects.from_json(self.suspects.to_json())

    def _turn(self, running: list[bytes]) -> None:
        self._rng.shuffle(running)
        while running:
            if self._is_killed(running):
                self.suspects.record_death(running)
                return
            key = running.pop()
            if key in self.guilty:
                self.guilty_deaths += 1
                self.suspects.record_death([*running, key])
                return
            self.open.remove(key)
            self.completed.add(key)
            self.suspects.record_end([key])
            self.suspects.record_good()

    def _is_killed(self, running: list[bytes]) -> bool:
        """From outside; one row is hit alone at most once, for twice is what the rules cannot tell from guilt."""
        if self._rng.random() >= self._kill_rate:
            return False
        if len(running) > 1:
            return True
        hit_before = running[0] in self._killed_alone or running[0] in self.guilty
        self._killed_alone.add(running[0])
        return not hit_before


_ROWS = st.integers(1, 120)


@given(st.data(), st.integers(0, 2**32))
def test_exactly_the_guilty_rows_are_condemned_whatever_is_killed(data: st.DataObject, seed: int) -> None:
    rows = data.draw(_ROWS)
    guilty = data.draw(st.sets(st.integers(0, rows - 1), max_size=4))
    kill_rate = data.draw(st.sampled_from([0.0, 0.01, 0.1]))
    application = Application(rows, guilty, rng=random.Random(seed), kill_rate=kill_rate)
    application.run()
    assert application.condemned <= application.guilty
    if application.suspects.refused_jobs:
        assert len(guilty) >= CONDEMNED_IN_A_ROW
    else:
        assert application.condemned == application.guilty
        assert application.completed == {_key(row) for row in range(rows)} - application.guilty


@given(st.data(), st.integers(0, 2**32))
def test_deaths_are_bounded_by_the_guilty_and_the_logarithm_of_the_rows(
    data: st.DataObject, seed: int
) -> None:
    rows = data.draw(_ROWS)
    guilty = data.draw(st.sets(st.integers(0, rows - 1), max_size=4))
    application = Application(rows, guilty, rng=random.Random(seed))
    application.run()
    assert application.guilty_deaths <= len(guilty) * (ceil(log2(rows)) + DEATHS_ALONE)


@given(st.integers(2 * CONDEMNED_IN_A_ROW, 300), st.integers(0, 2**32))
def test_an_engine_that_dies_of_every_row_is_blamed_and_its_rows_are_acquitted(rows: int, seed: int) -> None:
    application = Application(rows, set(range(rows)), rng=random.Random(seed))
    application.run()
    assert application.suspects.refused_jobs == {"job"}
    assert application.suspects.condemned == set()
    assert application.suspects.count == 0
    assert len(application.condemned) < CONDEMNED_IN_A_ROW
    assert application.guilty_deaths <= CONDEMNED_IN_A_ROW * (ceil(log2(rows)) + DEATHS_ALONE)


def test_absent_suspect_groups_do_not_block_others() -> None:
    suspects = Suspects()
    suspects.record_death([_key(row) for row in range(4)])
    assert suspects.choose_group({_key(9)}) is None
    assert suspects.choose_group({_key(3), _key(9)}) == {_key(2), _key(3)}


def test_a_completed_row_resets_the_count_of_deaths() -> None:
    suspects = Suspects()
    suspects.record_death([_key(1)])
    suspects.record_end([_key(1)])
    suspects.record_death([_key(1)])
    assert suspects.condemned == set()
    suspects.record_death([_key(1)])
    assert suspects.condemned == {_key(1)}


def test_rows_in_error_do_not_speak_for_the_engine() -> None:
    suspects = Suspects()
    for row in range(CONDEMNED_IN_A_ROW):
        suspects.record_job("job")
        for _ in range(DEATHS_ALONE):
            suspects.record_death([_key(row)])
        suspects.record_end([_key(99)])
        suspects.record_job("job")
    # The job had joined again when the last row was condemned.
    assert suspects.refused_jobs == {"job"}
