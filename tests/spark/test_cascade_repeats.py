"""A cascade asks the large model for some sampled rows again, which describes it and decides nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.job import cascade, cascade_repeats
from pipemax_spark.storage.cascade_store import CascadeStore
from tests.fakes.engine import makes_mistake
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs
from tests.spark.test_cascade import SEED, die_at, facts_of, run_cascade, texts, with_cascade
from tests.spark.test_cascade import _DiedError as DiedError

_WAVERS = 0.4


@pytest.fixture
def jobs(run: Jobs, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Of 400 rows 60 are asked again, and the large model then answers many of them otherwise."""
    monkeypatch.setattr(cascade, "new_seed", lambda: SEED)
    monkeypatch.setattr(cascade_repeats, "_MAX_SHARE", 0.15)
    run.write_input(texts(0, 400))
    jobs = with_cascade(run)
    jobs.defaults = replace(jobs.defaults, engine=fake_config("fake", wavers=_WAVERS))
    return jobs


def part(jobs: Jobs, name: str) -> dict[int, str]:
    """The texts that a part of the epoch has, by id."""
    (path,) = jobs.directory.rglob(f"cascade/*/1/{name}")
    rows = jobs.spark.read.format("delta").load(str(path)).collect()
    return {row["id"]: row["annotation"]["text"] for row in rows}


@pytest.mark.long  # two runs
def test_second_answers_are_counted_once_and_the_first_ones_are_certified_and_written(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        die_at(patch, CascadeStore, "put", name="certificate", after=False)
        with pytest.raises(DiedError):
            run_cascade(jobs)
    again = part(jobs, "again_labels")
    assert run_cascade(jobs).complete
    assert part(jobs, "again_labels") == again, "they are not asked a third time"
    labels, facts = part(jobs, "labels"), facts_of(jobs, "summary.json")
    assert len(again) == 60
    assert again.keys() <= labels.keys()
    wavering = {key for key in again if makes_mistake(f"Say shop sells item {key}", _WAVERS)}
    apart = {key for key, text in again.items() if text != labels[key]}
    assert apart <= wavering
    assert len(apart) > 5, "of four choices, another word may have the same one"
    assert facts["asked_again"] == {"rows": 60, "same": 60 - len(apart)}
    written = {row["id"]: row["annotation"]["text"] for row in jobs.rows()}
    assert len(written) == len(jobs.rows()) == 400
    assert all(written[key] == labels[key] for key in labels)
    page = max(Path(jobs.directory, "runs").glob("*/report.html"), key=lambda path: path.stat().st_mtime_ns)
    assert f"asked again, {60 - len(apart)} of 60 rows had the same answer" in page.read_text()


@pytest.mark.long  # two runs
def test_a_death_among_the_second_answers_is_finished_by_the_next_run(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = cascade.Phases.run, []

    def dies(self: Any, options: Any) -> Any:
        seen.append(Path(options.output).name)
        if seen[-1] == "again_labels":
            raise DiedError("in the midst")
        return real(self, options)

    with monkeypatch.context() as patch:
        patch.setattr(cascade.Phases, "run", dies)
        with pytest.raises(DiedError):
            run_cascade(jobs)
    assert seen == ["small", "labels", "again_labels"]
    first, (rows,) = part(jobs, "labels"), jobs.directory.rglob("cascade/*/1/again")
    asked = {row["id"] for row in jobs.spark.read.format("delta").load(str(rows)).collect()}
    assert run_cascade(jobs).complete
    assert part(jobs, "labels") == first
    assert part(jobs, "again_labels").keys() == asked
    facts = json.loads((jobs.directory / "summary.json").read_text())["cascade"]
    assert facts["asked_again"]["rows"] == len(asked) == 60
    assert facts["phases"]["again_labels"]["tokens"] > 0
    assert sorted(row["id"] for row in jobs.rows()) == list(range(400))
