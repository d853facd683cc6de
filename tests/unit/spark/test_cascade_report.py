"""What the report and MLflow say of a cascade."""

from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.cascade.batches import ONE_ANSWER, OpenBatch
from pipemax_spark.cascade.certificate import certify
from pipemax_spark.cascade.equality import Answers, Equality
from pipemax_spark.cascade.ledger import Ledger
from pipemax_spark.cascade.ordered_rows import KEEP_NONE, LabelledRow
from pipemax_spark.cascade.promise import Promise
from pipemax_spark.job.cascade_answers import ComparedAnswer
from pipemax_spark.job.cascade_facts import AskedAgain, Finding, Labelled, certified_facts, passed_facts
from pipemax_spark.job.cascade_repeats import rows_to_ask
from pipemax_spark.report.cascade_part import cascade_part
from pipemax_spark.report.cascade_texts import cascade_facts, cascade_metrics, with_costs
from tests.unit.cascade.draws import make_draw

LABELLED = [
    Labelled(
        row=LabelledRow(1 - number / 1_000, 0.5, number % 10 == 9 or number >= 150),
        small="<b>" if number % 2 else "c",
        large="c",
        answered_us=number,
    )
    for number in range(200)
]
RUN: dict[str, Any] = {
    "rows": 1_000,
    "rows_kept": 600,
    "rows_sampled": 200,
    "small_model": "little",
    "large_model": "big",
    "phases": {
        "small": {"rows": 1_000, "seconds": 360.0, "tokens": 5_000, "cost": 1.0},
        "labels": {"rows": 200, "seconds": 720.0, "tokens": 1_000, "cost": 4.0},
    },
}
FINAL = {"rows": 200, "seconds": 720.0, "tokens": 1_400, "cost": 6.0}


def findings(*columns: str) -> list[Finding]:
    draw = make_draw(rows=1_000, agree=0.9, sample_share=0.2)
    return [
        Finding(
            answer=ComparedAnswer(
                column=column, generation=GenerationSpec(), equality=Equality(answers=Answers.TEXT)
            ),
            labelled=LABELLED,
            certificate=certify(draw, (one.row for one in LABELLED)),
        )
        for column in columns
    ]


def facts_of(*columns: str, shows_answers: bool = True) -> dict[str, Any]:
    return RUN | certified_facts(findings(*columns), 600, confidence=0.95, shows_answers=shows_answers)


def test_costs_with_the_small_model_stand_next_to_those_of_the_large_one_by_its_own_rate() -> None:
    facts = with_costs(facts_of("annotation"), FINAL, is_complete=True)
    assert facts["costs"] == {
        "both": {"seconds": 1_800, "tokens": 7_400, "cost": 11},
        "large_alone": {"seconds": 3_600, "tokens": 6_000, "cost": 25},
    }
    assert dict(cascade_facts(facts)) == {
        "by model": "600 rows (60.0%) little, 400 (40.0%) big",
        "what it took": "0.50 h at work, 7,400 tokens, cost 11.00; the large model alone about 1.00 h at work, 6,000 "
        "tokens, cost 25.00, by the rate of its own rows",
        "large model with itself": "not known: the run has too few rows to ask for some again",
    }


def test_costs_with_the_small_model_have_the_rows_that_were_asked_again() -> None:
    facts = facts_of("annotation")
    before = with_costs(facts, FINAL, is_complete=True)["costs"]
    again = {"rows": 10, "seconds": 36.0, "tokens": 50, "cost": 0.5}
    facts["phases"] = facts["phases"] | {"again_labels": again}
    assert with_costs(facts, FINAL, is_complete=True)["costs"] == {
        "both": {"seconds": 1_836, "tokens": 7_450, "cost": 11.5},
        "large_alone": before["large_alone"],
    }


def test_costs_have_the_pilot_that_both_models_answered_first() -> None:
    facts = facts_of("annotation")
    facts["phases"] = facts["phases"] | {
        "pilot_small": {"rows": 300, "seconds": 90.0, "tokens": 100, "cost": 0.5},
        "pilot_labels": {"rows": 100, "seconds": 360.0, "tokens": 600, "cost": 2.5},
    }
    assert with_costs(facts, FINAL, is_complete=True)["costs"] == {
        "both": {"seconds": 2_250, "tokens": 8_100, "cost": 14},
        "large_alone": {"seconds": 3_600, "tokens": 6_000, "cost": 25},
    }


def test_a_cascade_that_its_pilot_has_ended_says_why_and_has_no_costs() -> None:
    refused = RUN | {"sentence": "All 1,000 rows go to the large model.", "rows_kept": 0, "phases": {}}
    facts = with_costs(refused, FINAL, is_complete=True)
    assert facts["costs"] is None
    assert dict(cascade_facts(facts))["by model"] == "0 rows (0.0%) little, 1,000 (100.0%) big"
    assert cascade_metrics(facts) == {
        "cascade_rows": 1_000,
        "cascade_rows_kept": 0,
        "cascade_rows_sampled": 200,
    }
    assert "All 1,000 rows go to the large model." in cascade_part(facts)


@pytest.mark.parametrize("is_resumed", [True, False])
def test_costs_are_left_out_of_a_run_that_has_not_done_all_of_the_work(is_resumed: bool) -> None:
    facts = facts_of("annotation")
    if is_resumed:
        facts["phases"] = {"small": facts["phases"]["small"] | {"rows": 0}}
    facts = with_costs(facts, FINAL, is_complete=is_resumed)
    assert facts["costs"] is None
    assert "what it took" not in dict(cascade_facts(facts))


def test_costs_without_prices_are_hours_and_tokens() -> None:
    facts = facts_of("annotation")
    facts["phases"] = {name: phase | {"cost": None} for name, phase in facts["phases"].items()}
    texts = dict(cascade_facts(with_costs(facts, FINAL | {"cost": None}, is_complete=True)))
    assert "cost" not in texts["what it took"]


def test_the_page_shows_agreement_with_intervals_by_label_and_tenth_and_the_surest_disagreements() -> None:
    page = cascade_part(with_costs(facts_of("annotation"), FINAL, is_complete=True))
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    # The last quarter of the sample differs.
    tenths = facts_of("annotation")["tenths"]
    assert [tenth["agreeing"] for tenth in tenths] == [18] * 7 + [9, 0, 0]
    assert "90.0% (95 %: 69.9% to 97.2%)" in page
    assert page.index("0.991") < page.index("0.981"), "the surest first"
    assert cascade_part(None) == ""


def test_rows_are_not_shown_where_none_may_be() -> None:
    page = cascade_part(facts_of("annotation", shows_answers=False))
    assert "&lt;b&gt;" not in page
    assert "The cascade" in page


def test_each_question_has_a_sentence_tables_and_a_metric() -> None:
    facts = facts_of("topic", "tone")
    page = cascade_part(facts)
    assert facts["sentence"].startswith("topic: ")
    assert " tone: " in facts["sentence"]
    assert facts["sentence"].endswith("Together this holds with 95 % confidence.")
    assert "topic: Sampled rows that differ" in page
    assert "tone: Sampled rows that differ" in page
    metrics = cascade_metrics(facts)
    assert metrics["cascade_rows_kept"] == 600
    assert metrics["cascade_max_misses_topic"] == metrics["cascade_max_misses_tone"] > 0


def test_metrics_hold_the_bound_and_the_costs() -> None:
    metrics = cascade_metrics(with_costs(facts_of("annotation"), FINAL, is_complete=True))
    assert metrics["cascade_max_misses"] == findings("annotation")[0].certificate.max_misses
    assert metrics["cascade_large_alone_seconds"] == 3_600
    assert metrics["cascade_both_cost"] == 11


@pytest.mark.parametrize("is_audited", [True, False])
def test_a_batch_of_a_growing_table_has_its_ledger_in_the_facts_and_the_metrics(is_audited: bool) -> None:
    ledger = Ledger.begin(Promise(agree=0.9, confidence=0.95), first_rows=1_000, spec_hash="spec", number=1)
    batch = OpenBatch.of({ONE_ANSWER: ledger}, rows=1_000, manifest_digest="rows", kept_before=50)
    after = batch.close({ONE_ANSWER: [one.row for one in LABELLED]})[ONE_ANSWER]
    (of_certificate,) = findings("annotation")
    finding = replace(of_certificate, certificate=after)
    certified = certified_facts([finding], 600, confidence=0.95, shows_answers=True)
    facts = RUN | (certified if is_audited else passed_facts(batch, confidence=0.95))
    metrics = cascade_metrics(facts)
    assert (metrics["cascade_ledger_batches"], metrics["cascade_ledger_seen_rows"]) == (1, 1_000)
    assert metrics["cascade_ledger_max_misses"] == (after.ledger.max_misses if is_audited else 0)
    kept = 650 if is_audited else 50
    assert facts["sentence"].startswith(f"After run 1, {kept} of 1,000 rows keep the small answer.")
    assert facts["sentence"] in unescape(cascade_part(facts))


@pytest.mark.parametrize("is_audited", [True, False])
def test_each_question_of_a_growing_table_has_its_ledger_in_the_facts_and_the_metrics(
    is_audited: bool,
) -> None:
    promise = Promise(agree=0.9, confidence=0.95).of_each(2)
    ledger = Ledger.begin(promise, first_rows=1_000, spec_hash="spec", number=1)
    of_questions = {"topic": ledger, "tone": ledger}
    batch = OpenBatch.of(of_questions, rows=1_000, manifest_digest="rows", kept_before=50)
    right = [one._replace(differs=False) for one in (of_row.row for of_row in LABELLED)]
    ends = batch.close({"topic": [one.row for one in LABELLED], "tone": right})
    certified = certified_facts(
        [replace(one, certificate=ends[one.answer.name]) for one in findings("topic", "tone")],
        600,
        confidence=0.95,
        shows_answers=True,
    )
    facts = RUN | (certified if is_audited else passed_facts(batch, confidence=0.95))
    kept = 650 if is_audited else 50
    assert facts["sentence"].startswith(f"topic: After run 1, {kept} of 1,000 rows keep the small answer.")
    assert "97.5 % confidence" in facts["sentence"]
    assert facts["sentence"].endswith("Together this holds with 95 % confidence.")
    assert facts["sentence"] in unescape(cascade_part(facts))
    metrics = cascade_metrics(facts)
    for name, end in ends.items():
        found = end.ledger.differing_rows if is_audited else 0
        assert metrics[f"cascade_ledger_differing_rows_{name}"] == found
    assert "cascade_max_misses_topic" not in metrics, "that of a batch is the ledger's"


def test_a_useless_small_model_keeps_nothing_and_the_ledger_still_counts_what_differed() -> None:
    ledger = Ledger.begin(Promise(agree=0.6, confidence=0.6), first_rows=1_000, spec_hash="spec", number=1)
    batch = OpenBatch.of({ONE_ANSWER: ledger}, rows=1_000, manifest_digest="rows", kept_before=50)
    wrong = [replace(one, row=one.row._replace(differs=True)) for one in LABELLED]
    after = batch.close({ONE_ANSWER: [one.row for one in wrong]})[ONE_ANSWER]
    (of_certificate,) = findings("annotation")
    finding = replace(of_certificate, labelled=wrong, certificate=after)
    assert finding.applied.cut == KEEP_NONE
    sentence = finding.sentence(0)
    assert sentence.startswith("All 1,000 rows go to the large model: of ")
    assert "After run 1, 50 of 1,000 rows keep the small answer." in sentence
    assert after.ledger.differing_rows == after.cut.differing_above + 1


@pytest.mark.parametrize(
    ("rows", "asked"), [(20, 0), (1_999, 0), (2_000, 20), (29_999, 299), (30_000, 300), (10**9, 300)]
)
def test_at_most_a_hundredth_of_the_rows_and_300_are_asked_again(rows: int, asked: int) -> None:
    assert rows_to_ask(rows, sampled_rows=rows // 3) == asked
    assert rows_to_ask(rows, sampled_rows=15) == 0


def test_how_often_the_large_model_has_repeated_its_answer_is_in_the_page_and_the_metrics() -> None:
    one, other = (
        replace(finding, asked_again=AskedAgain(rows=300, same=same))
        for finding, same in zip(findings("topic", "tone"), (298, 300), strict=True)
    )
    facts = RUN | certified_facts([one, other], 600, confidence=0.95, shows_answers=False)
    told = "topic: asked again, 298 of 300 rows had the same answer: 99.3% (95 %: 97.6% to 99.8%)"
    assert ("large model with itself", told) in cascade_facts(facts)
    assert told in unescape(cascade_part(facts))
    metrics = cascade_metrics(facts)
    assert (metrics["cascade_asked_again_rows_topic"], metrics["cascade_asked_again_same_tone"]) == (300, 300)
    assert "cascade_asked_again_rows" not in cascade_metrics(facts_of("annotation"))
