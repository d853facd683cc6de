"""``--cascade``: a small model's answers stay where few of them differ from the large one's, and are certified."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.cascade.certificate import Certificate
from pipemax_spark.errors import JobError, NewSpec
from pipemax_spark.job import cascade
from pipemax_spark.job.cascade import CascadeJob
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.request.questions import read_questions
from pipemax_spark.storage.cascade_store import CascadeStore
from tests.fakes.pooled import LABELS, vector
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs, object_schema

_CHOICES = ("bread", "cheese", "fruit", "nuts")
_SMALL = {**fake_config("fake-small", errs=0.2)}


@pytest.fixture
def jobs(run: Jobs) -> Jobs:
    run.defaults = replace(
        run.defaults,
        id_columns=("id",),
        generation=GenerationSpec(choice=_CHOICES),
        cascade=_SMALL,
        agree=0.9,
    )
    return run


def with_cascade(run: Jobs) -> Jobs:
    """The jobs, with a cascade of four choices and a summary."""
    run.defaults = replace(
        run.defaults,
        id_columns=("id",),
        generation=GenerationSpec(choice=_CHOICES),
        cascade=_SMALL,
        agree=0.9,
        summary=str(run.directory / "summary.json"),
    )
    return run


def run_cascade(jobs: Jobs, **changes: Any) -> Any:
    with jobs.terminal() as terminal:
        return CascadeJob(jobs.spark, replace(jobs.defaults, **changes), terminal).run()


def texts(first: int, end: int) -> list[tuple[int, str]]:
    return [(i, f"shop sells item {i}") for i in range(first, end)]


def large_answers(jobs: Jobs) -> dict[int, str]:
    """What the large model says of all rows, in a table of its own."""
    other = str(jobs.directory / "large-alone")
    with jobs.terminal() as terminal:
        cascade.AnnotationJob(jobs.spark, replace(jobs.defaults, cascade=None, output=other), terminal).run()
    return {
        row["id"]: row["annotation"]["text"] for row in jobs.spark.read.format("delta").load(other).collect()
    }


SEED = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise holds for most seeds, not for all: what a test sees is that of one."""
    monkeypatch.setattr(cascade, "new_seed", lambda: SEED)


def facts_of(jobs: Jobs, summary: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((jobs.directory / summary).read_text())["cascade"]
    return facts


@pytest.mark.long  # four jobs
def test_kept_answers_differ_from_the_large_models_no_more_often_than_the_certificate_allows(
    jobs: Jobs,
) -> None:
    jobs.write_input(texts(0, 1_000))
    summary = run_cascade(jobs, summary=str(jobs.directory / "summary.json"))
    assert summary.complete
    facts, printed = facts_of(jobs, "summary.json"), " ".join(jobs.printed.split())
    rows = {row["id"]: row["annotation"] for row in jobs.rows()}
    assert len(rows) == len(jobs.rows()) == 1_000
    by_model = Counter(row["model"] for row in rows.values())
    assert by_model["fake-small"] == facts["rows_kept"] > 300
    certificate = Certificate.from_json(json.dumps(facts["certificate"]))
    large = large_answers(jobs)
    misses = sum(row["text"] != large[key] for key, row in rows.items())
    assert 0 < misses <= certificate.max_misses <= certificate.budget_rows == 100
    assert all(row["text"] == large[key] for key, row in rows.items() if row["model"] == "fake")
    threshold = certificate.cut.threshold
    assert threshold is not None
    assert min(row["score"] for row in rows.values() if row["model"] == "fake-small") >= threshold[0]
    assert facts["sentence"].split(". ")[0] in printed

    again = run_cascade(jobs)
    assert (again.rows_out, again.engines, len(jobs.rows())) == (0, 0, 1_000)
    jobs.write_input(texts(0, 1_400))
    more = run_cascade(jobs)
    assert (more.complete, len({row["id"] for row in jobs.rows()}), len(jobs.rows())) == (True, 1_400, 1_400)


class _DiedError(Exception):
    """In place of a death of the driver."""


def die_at(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, *, name: str | None, after: bool
) -> None:
    """Have a method raise once, for a call with this first argument, before or after its work."""
    real, has_died = getattr(owner, method), []

    def dying(self: Any, first: Any, *others: Any, **named: Any) -> Any:
        is_it = not has_died and (name is None or first == name)
        if is_it and not after:
            has_died.append(True)
            raise _DiedError(method)
        result = real(self, first, *others, **named)
        if is_it:
            has_died.append(True)
            raise _DiedError(method)
        return result

    monkeypatch.setattr(owner, method, dying)


@pytest.mark.long  # a run for each place
def test_a_run_that_dies_between_any_two_steps_is_finished_under_the_same_certificate(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.write_input(texts(0, 400))
    seeds = iter([SEED, *(f"{number:032x}" for number in range(100))])
    monkeypatch.setattr(cascade, "new_seed", lambda: next(seeds))
    monkeypatch.setattr(cascade, "pilot_share", lambda rows: 40 / rows)
    places: list[tuple[str, str | None, bool]] = [
        ("write", "rows", True),
        ("put", "draw", False),
        ("put", "draw", True),
        ("write", "pilot", True),
        ("put", "pilot", False),
        ("put", "pilot", True),
        ("write", "sample", True),
        ("put", "certificate", False),
        ("put", "certificate", True),
        ("write", "answers", True),
    ]
    for method, name, after in places:
        with monkeypatch.context() as patch:
            die_at(patch, CascadeStore, method, name=name, after=after)
            with pytest.raises(_DiedError):
                run_cascade(jobs)
    summary = run_cascade(jobs, summary=str(jobs.directory / "summary.json"))
    assert summary.complete
    ids = [row["id"] for row in jobs.rows()]
    assert sorted(ids) == list(range(400))
    (records,) = jobs.directory.rglob("records")
    texts_of = {
        row["name"]: row["text"] for row in jobs.spark.read.format("delta").load(str(records)).collect()
    }
    assert texts_of.keys() == {"draw", "pilot", "certificate"}
    # The seed that was drawn and not recorded has counted for nothing.
    assert json.loads(texts_of["draw"])["seed"] == f"{0:032x}"
    assert json.loads(texts_of["certificate"]) == facts_of(jobs, "summary.json")["certificate"]
    small = {
        row["id"]: row["annotation"]["text"]
        for row in jobs.spark.read.format("delta").load(str(records.parent / "small")).collect()
    }
    answers = {row["id"]: row["annotation"] for row in jobs.rows()}
    assert all(row["text"] == small[key] for key, row in answers.items() if row["model"] == "fake-small")


@pytest.mark.long  # four jobs
def test_rows_without_ids_are_each_sampled_by_a_coin_of_their_own(jobs: Jobs) -> None:
    jobs.defaults = replace(jobs.defaults, id_columns=())
    jobs.write_input([(i % 200, f"shop sells item {i % 200}") for i in range(600)])
    summary = run_cascade(jobs, summary=str(jobs.directory / "summary.json"))
    assert summary.complete
    assert Counter(row["id"] for row in jobs.rows()) == dict.fromkeys(range(200), 3)
    by_request: dict[int, set[tuple[str, str]]] = {}
    for row in jobs.rows():
        by_request.setdefault(row["id"], set()).add((row["annotation"]["model"], row["annotation"]["text"]))
    assert {len(answers) for answers in by_request.values()} == {1}, "equal requests have one answer"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation": GenerationSpec()}, "free text"),
        ({"agree": 1.0}, "agree is 1: no sample can promise"),
        ({"confidence": 0.0}, "confidence is 0"),
        ({"canary": 100}, "--canary"),
        ({"cascade": fake_config("fake")}, "same model"),
        ({"agree_fields": ("a",)}, "agree-fields"),
    ],
)
def test_what_a_cascade_cannot_prove_is_refused_by_name(
    jobs: Jobs, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        run_cascade(jobs, **changes)
    assert not Path(jobs.output).exists()


@pytest.mark.long  # a job
def test_too_few_rows_go_to_the_large_model(jobs: Jobs) -> None:
    jobs.write_input(texts(0, 20))
    summary = run_cascade(jobs)
    assert summary.complete
    assert {row["annotation"]["model"] for row in jobs.rows()} == {"fake"}
    assert "too few" in jobs.printed


@pytest.mark.long  # two engines
def test_the_dry_run_forecasts_what_would_be_kept_and_writes_nothing(jobs: Jobs) -> None:
    jobs.write_input(texts(0, 2_000))
    assert run_cascade(jobs, dry_run=True) is None
    printed = " ".join(jobs.printed.split())
    assert re.search(r"The small model agrees on (8|9)\d % of 300 rows; at 90 % agreement", printed), printed
    assert re.search(r"plan-capacity --kept-share 0\.\d+:0\.\d+:0\.\d+", printed), printed
    assert not Path(jobs.output).exists()


@pytest.mark.long  # three jobs
def test_a_small_model_that_is_mostly_wrong_where_it_is_surest_keeps_nothing(jobs: Jobs) -> None:
    jobs.write_input(texts(0, 400))
    wrong = fake_config("fake-small", errs=1.0)
    summary = run_cascade(jobs, cascade=wrong, agree=0.7, summary=str(jobs.directory / "summary.json"))
    assert summary.complete
    facts = facts_of(jobs, "summary.json")
    assert facts["certificate"]["cut"]["kept"] == "above"
    assert facts["rows_kept"] == 0
    assert facts["sentence"].startswith("All 400 rows go to the large model: of ")
    assert {row["annotation"]["model"] for row in jobs.rows()} == {"fake"}


@pytest.mark.long  # four jobs; tests/spark/test_cascade_rows.py shows the rows
def test_each_question_has_a_certificate_and_a_row_keeps_only_what_all_of_them_allow(jobs: Jobs) -> None:
    jobs.write_input(texts(0, 500))
    # The large model thinks, the small one does not; thoughts are no part of what is compared.
    thoughtful = GenerationSpec(max_tokens=64, include_reasoning=True)
    schema = object_schema(price={"type": "integer"}, note={"type": "string"})
    ask = read_questions(
        {
            "kind": {"template": " Kind?", "choice": list(_CHOICES)},
            "deal": {"template": " Deal?", "response_format": json.loads(schema)},
        },
        thoughtful,
    )
    changes: dict[str, Any] = {
        "generation": thoughtful,
        "engine": {**jobs.defaults.engine, "reasoning_parser": "qwen3"},
        "ask": ask,
        "agree": 0.8,
        "agree_fields": ("deal.price",),
    }
    summary = run_cascade(jobs, **changes, summary=str(jobs.directory / "summary.json"))
    assert summary.complete
    facts, rows = facts_of(jobs, "summary.json"), {row["id"]: row for row in jobs.rows()}
    assert len(rows) == len(jobs.rows()) == 500
    kept = [row for row in rows.values() if row["annotation"]["model"] == "fake-small"]
    assert len(kept) == facts["rows_kept"] > 50
    certificates = {
        name: Certificate.from_json(json.dumps(of_question["certificate"]))
        for name, of_question in facts["questions"].items()
    }
    assert {certificate.draw.confidence for certificate in certificates.values()} == {0.975}
    assert facts["sentence"].endswith("Together this holds with 95 % confidence.")
    for row in kept:
        for name, certificate in certificates.items():
            assert (row[name]["model"], row[name]["reasoning"]) == ("fake-small", None)
            threshold = certificate.cut.threshold
            assert threshold is not None
            assert row[name]["score"] >= threshold[0]
        assert row["annotation"]["score"] == min(row[name]["score"] for name in certificates)
    assert all(row["kind"]["reasoning"] for row in rows.values() if row["annotation"]["model"] == "fake")
    with jobs.terminal() as terminal:
        alone = replace(jobs.defaults, **changes, cascade=None, output=str(jobs.directory / "large-alone"))
        cascade.AnnotationJob(jobs.spark, alone, terminal).run()
    large = {row["id"]: row for row in jobs.spark.read.format("delta").load(alone.output).collect()}
    misses = {
        "kind": sum(row["kind"]["text"] != large[key]["kind"]["text"] for key, row in rows.items()),
        "deal": sum(
            row["deal"]["parsed"]["price"] != large[key]["deal"]["parsed"]["price"]
            for key, row in rows.items()
        ),
    }
    for name, certificate in certificates.items():
        assert 0 < misses[name] <= certificate.max_misses <= certificate.budget_rows == 100


@pytest.mark.long  # four jobs
def test_classes_and_scores_are_kept_as_far_as_they_agree(jobs: Jobs) -> None:
    jobs.write_input(texts(0, 400))
    classify = {
        "generation": GenerationSpec(task="classify"),
        "engine": {"model": "fake", "task": "classify"},
    }
    summary = run_cascade(jobs, **classify, agree=0.8, summary=str(jobs.directory / "summary.json"))
    assert summary.complete
    facts, rows = facts_of(jobs, "summary.json"), {row["id"]: row["annotation"] for row in jobs.rows()}
    by_model = Counter(row["model"] for row in rows.values())
    assert by_model["fake-small"] == facts["rows_kept"] > 50
    truth = {number: LABELS[int(vector(f"Say {text}", 2).argmax())] for number, text in texts(0, 400)}
    misses = sum(row["label"] != truth[number] for number, row in rows.items())
    assert 0 < misses <= facts["certificate"]["max_misses"] <= 80
    assert all(row["score"] == row["probability"] for row in rows.values() if row["model"] == "fake-small")

    scoring = {
        "generation": GenerationSpec(task="score"),
        "engine": {"model": "fake", "task": "score"},
        "source": PromptSource(prompt_column="text", query_column="text"),
        "agree_tolerance": "0.01",
    }
    output = str(jobs.directory / "scored")
    summary = run_cascade(jobs, **scoring, output=output, summary=str(jobs.directory / "scores.json"))
    assert summary.complete
    scored = [row["annotation"] for row in jobs.spark.read.format("delta").load(output).collect()]
    assert {round(row["score"], 4) for row in scored} == {1.0}, "of a text with itself"
    facts = facts_of(jobs, "scores.json")
    assert facts["certificate"]["cut"]["kept"] == "all"
    assert facts["rows_kept"] == 400 - facts["rows_sampled"]


@pytest.mark.long  # four jobs
def test_under_new_spec_replace_a_cascade_replaces_the_large_model_s_rows(jobs: Jobs) -> None:
    jobs.write_input(texts(0, 400))
    assert jobs.run(cascade=None).rows_out == 400
    assert run_cascade(jobs, new_spec=NewSpec.REPLACE).complete
    rows = {row["id"]: row["annotation"] for row in jobs.rows()}
    assert len(rows) == len(jobs.rows()) == 400
    assert len({row["spec_hash"] for row in rows.values()}) == 1
    assert {row["model"] for row in rows.values()} == {"fake", "fake-small"}
