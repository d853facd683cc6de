"""A served engine of two replicas tries n-gram speculation on one of them while rows run, and remembers the result."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipemax.api import Completion, GenerationRequest, Sampling
from pipemax.config import EngineConfig
from pipemax.replicas.replica_set import ReplicaSet
from pipemax.serve.flow.live_tuning import MAY_NOT_SPECULATE, LiveTuning
from pipemax.tuning.canary import CanaryRules
from pipemax.tuning.remembered import load_entries
from tests.fakes.settings import expected_text
from tests.serve.test_tuning import remember
from tests.unit.replicas.test_replica_set import replica_set
from tests.unit.replicas.test_speculation import STRICT, seen

CONFIG = EngineConfig(model="fake", replicas=2)
IN_FLIGHT = 100
FASTER = 5.0
"""The tuning's clock runs as many times faster."""


class OneJob:
    def __init__(self) -> None:
        self.has: frozenset[str] = frozenset()

    def jobs(self) -> frozenset[str]:
        return frozenset({"job"})

    def share_left(self) -> int:
        return 1_000_000

    def traits(self) -> frozenset[str]:
        return self.has


class Served:
    """An engine, its rows and its tuning."""

    def __init__(self, engine: ReplicaSet, config: EngineConfig = CONFIG) -> None:
        self.engine, self._config, self.job = engine, config, OneJob()
        self.rows: dict[int, Completion] = {}
        self._sent = 0
        self.begin()

    def begin(self) -> None:
        """As for another job."""
        rules = CanaryRules(pairs=2, block_s=FASTER)
        self.tuning = LiveTuning(self.job, lambda: FASTER * time.monotonic(), canary_rules=rules)

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline_s, (self.tuning.note, self.engine.stats().replicas)
            self.step()

    def step(self) -> None:
        """Send as many rows as have ended, and take those that end."""
        if count := IN_FLIGHT - (self._sent - len(self.rows)):
            self.submit(count)
        ended = self.engine.poll(0.05)
        for row in ended:
            assert self.rows.setdefault(int(row.request_id), row) is row, "each row comes once"
        self.tuning.learn(ended)
        self.tuning.see(self.engine, self._config)

    def submit(self, count: int, **sampling: Any) -> None:
        numbers = range(self._sent, self._sent + count)
        self.engine.submit(
            [
                GenerationRequest(request_id=f"{n}", prompt=f"prompt {n}", sampling=Sampling(**sampling))
                for n in numbers
            ]
        )
        self._sent += count

    def finish(self) -> None:
        """Take the rows that are left, and expect the answer of each."""
        while len(self.rows) < self._sent:
            for row in self.engine.poll(0.05):
                assert self.rows.setdefault(int(row.request_id), row) is row, "each row comes once"
        assert {n: row.text for n, row in self.rows.items()} == {
            n: expected_text(f"prompt {n}") for n in range(self._sent)
        }


def options(tmp_path: Path, **speculating: Any) -> dict[str, Any]:
    """A fake whose tuning has been remembered, so that a trial begins at once."""
    tunings, limits = tmp_path / "model.yaml", (2048, 16)
    remember(tunings, limits)
    return {
        "tokens_per_s": 200.0,
        "most_running": 4,
        "most_limits": limits,
        "tunings": str(tunings),
        "speculating": speculating,
    }


def test_where_it_wins_all_replicas_get_it_and_the_next_job_begins_with_it(tmp_path: Path) -> None:
    with replica_set(2, limits=STRICT, **options(tmp_path, tokens_per_s=800.0)) as engine:
        served = Served(engine)
        served.run_until(lambda: seen(engine, "speculates") == [True, True])
        assert "it was best before; 0 s; n-gram speculation: +" in served.tuning.note
        assert served.tuning.note.endswith(", taken")
        assert seen(engine, "restarts") == [1, 1]
        (entry,) = load_entries(tmp_path / "model.yaml")
        assert entry.speculation is not None
        assert entry.speculation.is_taken

        served.begin()
        served.run_until(lambda: served.tuning.note.endswith(", taken, as remembered"))
        assert seen(engine, "restarts") == [1, 1], "it is on already"
        served.finish()

        served.submit(1, temperature=0.5, seed=7)
        served.run_until(lambda: seen(engine, "speculates") == [False, False])
        served.finish()


@pytest.mark.long  # a trial that is lost is one with synthetic replicas, too (tests/unit/tuning/test_canary.py)
@pytest.mark.parametrize(
    ("speculating", "said"),
    [
        pytest.param({"tokens_per_s": 50.0}, "not taken", id="slower"),
        pytest.param({"start_error": "no memory"}, "it does not start here", id="refused"),
    ],
)
def test_where_it_loses_the_replica_goes_back_and_the_next_job_does_not_try_again(
    speculating: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with replica_set(2, limits=STRICT, **options(tmp_path, **speculating)) as engine:
        served = Served(engine)
        served.run_until(lambda: served.tuning.note.endswith(said))
        served.run_until(lambda: seen(engine, "restarts") == [0, 2] and seen(engine, "state")[1] == "up")
        assert seen(engine, "speculates") == [False, False]

        served.begin()
        served.run_until(lambda: bool(served.tuning.note))
        for _ in range(40):
            served.step()
        assert seen(engine, "restarts") == [0, 2]
        served.finish()


@pytest.mark.parametrize(
    ("has", "config"),
    [
        pytest.param({MAY_NOT_SPECULATE}, CONFIG, id="a job with a sampled row"),
        pytest.param(set(), CONFIG.model_copy(update={"tune": False}), id="tuning is off"),
    ],
)
def test_what_is_not_to_be_tried_is_not(has: set[str], config: EngineConfig, tmp_path: Path) -> None:
    with replica_set(2, **options(tmp_path)) as engine:
        served = Served(engine, config)
        served.job.has = frozenset(has)
        served.run_until(lambda: bool(served.tuning.note) or (not config.tune and len(served.rows) > 100))
        assert "speculation" not in served.tuning.note
        assert seen(engine, "restarts") == [0, 0]
        served.finish()
