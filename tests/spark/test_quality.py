"""How good the answers are, by the committed rows: compared with right answers, and how sure and valid they are."""

import re
from collections import Counter
from html import unescape
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.report.accuracy import ERROR, OTHER, accuracies_of, is_wrong
from pipemax_spark.request.golds import Gold
from pipemax_spark.request.questions import ANNOTATION, read_questions
from tests.spark.conftest import Jobs
from tests.spark.test_report import headings_of, page_of

LABELS = ("bug", "question", "praise")
TEXT = Gold(column="gold", answers=ANNOTATION, json_property=None)
Answer = tuple[str | None, str | None]
"""Text and error's code."""


def frame(spark: Any, rows: list[tuple[Any, ...]], gold: str = "string") -> Any:
    """Rows of a right answer, an answer and an error."""
    schema = f"gold {gold}, annotation struct<text string, error struct<code string>>"
    values = [(gold, (text, None if error is None else (error,))) for gold, text, error in rows]
    return spark.createDataFrame(values, schema)


def test_confusions_errors_other_answers_and_rows_without_a_right_answer_are_counted(spark: Any) -> None:
    rows = frame(
        spark,
        [
            *[("a", "a", None)] * 4,
            *[("a", "b", None)] * 2,
            *[("b", "b", None)] * 2,
            ("b", "a", None),
            ("a", "zebra", None),
            ("b", None, None),
            ("b", "b", "response_format"),
            *[(None, "a", None)] * 3,
            (None, None, "engine_error"),
        ],
    )
    [accuracy] = accuracies_of(rows, [TEXT], shows_values=True)
    assert (accuracy.right, accuracy.rows) == (6, 12)
    assert (accuracy.rows_error, accuracy.rows_without_gold) == (1, 4)
    confusions = accuracy.confusions
    assert confusions is not None
    assert confusions.classes == ["a", "b"]
    # a, b, another answer, an error
    assert confusions.counts("a") == [4, 2, 1, 0]
    assert confusions.counts("b") == [1, 2, 1, 1]
    assert confusions.recall("a") == pytest.approx(4 / 7)
    assert confusions.precision("a") == pytest.approx(4 / 5)
    assert confusions.precision("b") == pytest.approx(2 / 4)
    assert confusions.most_frequent()[0] == ("a", "b", 2)
    assert rows.where(is_wrong(rows, TEXT)).count() == 5, "neither errors nor rows without a right answer"
    facts = dict(accuracy.facts())
    assert facts["Accuracy"] == (
        "50.0% (95 %: 25.4% to 74.6%): 6 of 12 rows agree with column 'gold'; 1 with an error, which counts as wrong; "
        "4 more without a value there"
    )
    assert facts["  confused"].startswith("most often 'a' as 'b' 2, ")
    [hidden] = accuracies_of(rows, [TEXT], shows_values=False)
    assert (hidden.right, hidden.confusions) == (6, None), "classes are values of rows"


def test_more_than_twenty_classes_have_an_accuracy_and_no_matrix(spark: Any) -> None:
    for classes in (20, 21):
        rows = frame(spark, [(f"c{i}", f"c{i % 20}", None) for i in range(classes)] + [(None, "c0", None)])
        [accuracy] = accuracies_of(rows, [TEXT], shows_values=True)
        assert (accuracy.right, accuracy.rows, accuracy.rows_without_gold) == (20, classes, 1)
        assert (accuracy.confusions is None) is (classes == 21)


def test_numbers_of_different_types_are_compared_as_numbers_and_texts_as_texts(spark: Any) -> None:
    schema = "gold {}, annotation struct<parsed struct<size {}>, error string>"
    gold = Gold(column="gold", answers=ANNOTATION, json_property="size")
    for kinds, pairs, right in [
        (("int", "double"), [(3, 3.0), (4, 4.5)], 1),
        (("bigint", "bigint"), [(2**60, 2**60), (2**60, 2**60 + 1)], 1),
        (("string", "bigint"), [("3", 3), ("three", 3)], 1),
        (("boolean", "boolean"), [(True, True), (False, True)], 1),
    ]:
        rows = spark.createDataFrame([(one, ((two,), None)) for one, two in pairs], schema.format(*kinds))
        [accuracy] = accuracies_of(rows, [gold], shows_values=True)
        assert (accuracy.right, accuracy.rows) == (right, 2), kinds


def test_the_report_says_how_sure_how_unanimous_and_how_right_the_answers_are(run: Jobs) -> None:
    rows = [(i, f"row {i}", None if i == 39 else LABELS[i % 3]) for i in range(40)]
    run.write_input(rows, "id long, text string, label string")
    generation = GenerationSpec(choice=LABELS, logprobs=True)
    summary = run.run(generation=generation, id_columns=("id",), gold_column="label")
    written = run.rows()
    answers = {row["id"]: row["annotation"] for row in written}
    sure = {i: answer["probabilities"][answer["text"]] for i, answer in answers.items()}
    wrong = [i for i in range(39) if answers[i]["text"] != LABELS[i % 3]]
    assert re.search(
        rf"^Accuracy +[\d.]+% \(95 %: .* to .*\): {39 - len(wrong)} of 39 rows .*; 1 more without a value there$",
        run.printed,
        re.MULTILINE,
    )
    texts = Counter(answer["text"] for answer in answers.values())
    [choices] = re.findall(r"^Choices +annotation\.text: (.*)$", run.printed, re.MULTILINE)
    assert set(choices.split(", ")) == {f"{text} {n / 40:.1%}" for text, n in texts.items()}
    unsure = sum(p < 0.5 for p in sure.values())
    assert f"{unsure} of 40 answers ({unsure / 40:.1%}) are below 0.5" in run.printed
    page = page_of(run)
    assert "How right the answers are" in headings_of(page)
    matrix = page.partition("<h3>Answers by the right answer</h3>")[2].partition("</table>")[0]
    assert OTHER not in matrix
    assert ERROR not in matrix
    for label in LABELS:
        counts = Counter(answers[i]["text"] for i in range(39) if LABELS[i % 3] == label)
        assert f"<td class='part'>{label}</td>" in matrix
        for count in counts.values():
            assert f">{count}</td>" in matrix
    worst = page.partition("<h3>Wrong answers</h3>")[2].partition("<h2>")[0]
    shown = [int(i) for i in re.findall(r"<span class='soft'>id</span> (\d+)", worst)]
    assert shown == sorted(wrong, key=lambda i: (-sure[i], i))[:10]
    assert "those first of which the model was the surest" in worst
    again = run.run(generation=generation, id_columns=("id",), gold_column="label", no_sample=True)
    assert again.rows_out == 0
    assert again.accuracies == summary.accuracies
    [entry] = summary.accuracies
    assert (entry["question"], entry["rows"], entry["right"]) == (None, 39, 39 - len(wrong))
    assert entry["low"] < entry["right"] / 39 < entry["high"]
    assert f"{39 - len(wrong)} of 39 rows agree with column 'label'" in run.printed
    assert "confused" not in run.printed, "classes are values of rows"


@pytest.mark.long  # as the report above
def test_questions_have_accuracy_agreement_and_invalid_answers_of_their_own(run: Jobs) -> None:
    marks = {3: "[[error]]"}
    rows = [(i, f"row {i}", marks.get(i, ""), LABELS[i % 3]) for i in range(30)]
    run.write_input(rows, "id long, text string, mark string, kind string")
    sampled = {"template": "Why?", "n": 3, "temperature": 1.0, "seed": 1, "attempts": 2}
    asked = read_questions(
        {"topic": {"template": "Topic? {mark}", "choice": list(LABELS)}, "why": sampled},
        run.defaults.generation,
    )
    run.run(ask=asked, id_columns=("id",), gold_column={"topic": "kind"})
    written = {row["id"]: row for row in run.rows()}
    right = sum(
        row["topic"]["error"] is None and row["topic"]["text"] == row["kind"] for row in written.values()
    )
    assert re.search(
        rf"^Accuracy +topic: .*: {right} of 30 rows agree with column 'kind'; 1 with", run.printed, re.M
    )
    agreements = [row["why"]["agreement"] for row in written.values()]
    unanimous = sum(agreement == 1.0 for agreement in agreements) / 30
    assert f"why: all samples agree in {unanimous:.1%} of 30 rows" in run.printed
    page = unescape(page_of(run))
    [table] = re.findall(r"<h3>Agreement of the samples of 'why'</h3><p>.*?</p><table>(.*?)</table>", page)
    shown = {name: int(rows) for name, rows in re.findall(r"<td>(\d+%)</td><td class='n'>(\d+)</td>", table)}
    assert shown == Counter(f"{agreement:.0%}" for agreement in agreements)
    assert "How right the answers of 'topic' are" in headings_of(page)
