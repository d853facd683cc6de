"""The pilot inside a run with ``--cascade``: both models answer it before the sample share is chosen."""

import json
import re
from typing import Any

import pytest

from pipemax_spark.cascade.draw import Draw
from pipemax_spark.engines.stop import stop_engines
from pipemax_spark.job import cascade
from pipemax_spark.job.run_pilot import Cost
from tests.spark.conftest import Jobs
from tests.spark.test_cascade import SEED, facts_of, large_answers, run_cascade, texts, with_cascade

_LOADED = re.compile(r"loading model (\S+) \(config")


@pytest.fixture
def jobs(run: Jobs, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Of 400 rows some 60 are in the pilot. The engine server begins with the test, and its log with it."""
    stop_engines(run.spark, force=True)
    monkeypatch.setattr(cascade, "new_seed", lambda: SEED)
    monkeypatch.setattr(cascade, "pilot_share", lambda rows: 60 / rows)
    run.write_input(texts(0, 400))
    return with_cascade(run)


def loaded(jobs: Jobs) -> list[str]:
    """The models that the engine server has loaded, in this order."""
    return [
        name for log in (jobs.directory / "logs").glob("*.log") for name in _LOADED.findall(log.read_text())
    ]


def parts(jobs: Jobs, name: str) -> dict[int, Any]:
    """A part of the epoch, by id; empty if there is none."""
    return {
        row["id"]: row.asDict(recursive=True)
        for path in jobs.directory.rglob(f"cascade/*/1/{name}")
        for row in jobs.spark.read.format("delta").load(str(path)).collect()
    }


@pytest.mark.long  # four jobs
def test_the_pilot_chooses_the_sample_and_keeps_the_large_answer_with_one_swap_of_engines(jobs: Jobs) -> None:
    summary = run_cascade(jobs)
    assert summary.complete
    assert loaded(jobs) == ["fake-small", "fake"], "the large engine stays from the pilot to the last row"
    pilot, sample = parts(jobs, "pilot"), parts(jobs, "sample")
    assert 30 < len(pilot) < 90
    assert not pilot.keys() & sample.keys()
    facts = facts_of(jobs, "summary.json")
    draw = Draw(**facts["certificate"]["draw"])
    assert (draw.pilot_share, facts["rows_pilot"]) == (60 / 400, len(pilot))
    default = draw.promise.default_sample_share(400)
    assert draw.sample_share in [pytest.approx(default * 0.1 * 25 ** (step / 14)) for step in range(15)]
    rows, large = {row["id"]: row["annotation"] for row in jobs.rows()}, large_answers(jobs)
    assert rows.keys() == large.keys()
    assert all(rows[key]["model"] == "fake" for key in pilot.keys() | sample.keys())
    misses = sum(row["text"] != large[key] for key, row in rows.items())
    assert misses <= facts["certificate"]["max_misses"] <= 40


@pytest.mark.long  # five jobs
def test_a_pilot_that_pays_before_the_small_pass_is_the_same_pilot(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "comes_first", lambda rows, engine: True)
    monkeypatch.setattr(Cost, "of", lambda *_, rows: Cost(ratio=0.01))
    assert run_cascade(jobs).complete
    assert loaded(jobs) == ["fake-small", "fake", "fake-small", "fake"]
    pilot = parts(jobs, "pilot")
    assert parts(jobs, "pilot_small").keys() == pilot.keys()
    assert facts_of(jobs, "summary.json")["rows_kept"] > 0
    assert all(row["annotation"]["model"] == "fake" for row in jobs.rows() if row["id"] in pilot)


@pytest.mark.long  # three jobs
def test_a_cascade_that_does_not_pay_ends_before_the_small_pass(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "comes_first", lambda rows, engine: True)
    monkeypatch.setattr(Cost, "of", lambda *_, rows: Cost(ratio=1.0))
    assert run_cascade(jobs).complete
    assert loaded(jobs) == ["fake-small", "fake"]
    assert parts(jobs, "small") == {}
    assert {row["annotation"]["model"] for row in jobs.rows()} == {"fake"}
    assert len(jobs.rows()) == 400
    sentence = json.loads((jobs.directory / "summary.json").read_text())["cascade"]["sentence"]
    assert sentence.startswith("All 400 rows go to the large model. The small model agrees on ")
    assert "no threshold pays" in sentence


@pytest.mark.long  # three jobs
def test_a_sample_share_of_ones_own_is_taken_as_it_is(jobs: Jobs) -> None:
    assert run_cascade(jobs, cascade_sample=0.4).complete
    facts = facts_of(jobs, "summary.json")
    draw = facts["certificate"]["draw"]
    assert (draw["sample_share"], draw["pilot_share"]) == (0.4, 0)
    assert 120 < facts["rows_sampled"] < 200
    assert parts(jobs, "pilot") == {}
