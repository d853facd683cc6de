"""A served engine of two replicas tries n-gram speculation on one of them while rows run, and remembers the result."""

from pathlib import Path
from typing import Any

import pytest

from pipemax.config import EngineConfig
from pipemax.serve.flow.live_tuning import MAY_NOT_SPECULATE
from pipemax.tuning.remembered import load_entries
from tests.serve.test_tuning import remember
from tests.unit.replicas.test_replica_set import replica_set
from tests.unit.replicas.test_speculation import STRICT, seen
from tests.unit.serve.flow.served_replicas import CONFIG, Served


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


@pytest.mark.long  # a dozen starts of processes
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
        pytest.param(
            set(), CONFIG.model_copy(update={"tune": False}), id="tuning is off", marks=pytest.mark.long
        ),
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
