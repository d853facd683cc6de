"""A cascade's decisions in Spark are those in Python, to the last bit."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from pipemax.wire import GenerationSpec
from pipemax_spark.cascade.certificate import certify
from pipemax_spark.cascade.coins import coin_sql, tie_break_sql
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import Kept, LabelledRow
from pipemax_spark.job.cascade_options import answers_of
from pipemax_spark.job.cascade_rows import CascadeRows, keeps_small, manifest_digest, sampled_rows
from pipemax_spark.options import Certified, JobOptions
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.request.questions import read_questions

_DRAW = Draw(
    seed="0123456789abcdef0123456789abcdef",
    rows=2_000,
    agree=0.9,
    confidence=0.95,
    sample_share=0.25,
    spec_hash="spec",
    manifest_digest="rows",
)


def test_coins_of_spark_are_those_of_python(spark: Any) -> None:
    names = ["", "a", "ü", "\u65e5\u672c", "a\tb", "x" * 300]
    rows = [(name, number) for name in names for number in (1, 2, 10**6)]
    frame = spark.createDataFrame(rows, "name string, number long").selectExpr(
        "name",
        "number",
        f"{coin_sql(_DRAW.seed, 'name', 'number')} AS coin",
        f"{tie_break_sql(_DRAW.seed, 'name')} AS tie",
    )
    for name, number, coin, tie in frame.collect():
        assert (coin, tie) == (_DRAW.coin(name, number), _DRAW.tie_break(name))


def test_equal_rows_have_a_coin_each_whatever_their_order(spark: Any) -> None:
    rows = [(i % 40, f"text {i % 40}") for i in range(4_000)]
    first, second = (
        sampled_rows(spark.createDataFrame(shuffled, "id long, text string"), _DRAW, ())
        for shuffled in (rows, rows[::-1])
    )
    counts = Counter(row["id"] for row in first.collect())
    assert counts == Counter(row["id"] for row in second.collect())
    assert 850 < sum(counts.values()) < 1_150
    assert len(set(counts.values())) > 5, "one coin for all copies would take all of them or none"


def test_which_rows_keep_the_small_answer_is_what_the_certificate_says(spark: Any) -> None:
    draw = random.Random(7)
    scores = [*(round(draw.random(), 1) for _ in range(400)), None, math.nan, math.inf, -math.inf, 0.0, -0.0]
    keys = [f"key {number}" for number in range(len(scores))]
    sampled = [
        LabelledRow(score, _DRAW.tie_break(key), draw.random() > (score or 0.0))
        for key, score in zip(keys, scores, strict=True)
    ]
    frame = spark.createDataFrame([*zip(keys, scores, strict=True)], "key string, score double")
    for labelled in (sampled, sampled[:20], []):
        certificate = certify(_DRAW, labelled)
        tie = F.expr(tie_break_sql(_DRAW.seed, "key"))
        kept = frame.select("key", keeps_small(certificate, F.col("score"), tie).alias("keeps")).collect()
        expected = [
            certificate.keeps(score, _DRAW.tie_break(key), is_sampled=False)
            for key, score in zip(keys, scores, strict=True)
        ]
        assert [bool(row["keeps"]) for row in kept] == expected


def test_a_manifest_is_known_by_its_rows_in_any_order(spark: Any) -> None:
    rows = [(i, f"text {i}") for i in range(100)]
    first, second, other = (
        manifest_digest(spark.createDataFrame(some, "id long, text string"))
        for some in (rows, rows[::-1], rows[:-1])
    )
    assert first == second != other


_ERROR = "error struct<code: string, message: string>"
_TABLE = (
    f"id long, text string, kind struct<text: string, probability: double, {_ERROR}>, "
    f"deal struct<text: string, parsed: struct<price: bigint>, logprob_sum: double, "
    f"field_probabilities: map<string, double>, {_ERROR}>, "
    f"annotation struct<prompt_tokens: int, {_ERROR}, completed_at: timestamp>"
)


def _options(**changes: Any) -> JobOptions:
    values: dict[str, Any] = {
        "input": "in",
        "output": "out",
        "source": PromptSource(template="{text}"),
        "engine": {"model": "large"},
        "log_dir": Path("logs"),
    }
    return JobOptions(**values | changes)


def _answers_of_a_row(rng: random.Random, number: int, *, errs: float) -> tuple[Any, ...]:
    """A row of ``_TABLE``, whose answers are those of its number but for this share of mistakes, which are unsure."""
    price, kind = number % 7, "ab"[number % 2]
    is_wrong, is_other = rng.random() < errs, rng.random() < errs
    sure = [rng.uniform(0.3, 0.8) if wrong else rng.uniform(0.5, 1) for wrong in (is_wrong, is_other)]
    fault = ("engine_error", "x") if number % 50 == 0 and errs else None
    deal = price + is_other
    return (
        number,
        f"text {number}",
        (kind if not is_wrong else "c", sure[0], None),
        (
            json.dumps({"price": deal, "note": f"{errs}"}),
            (deal,),
            -9.0,
            {"price": sure[1], "note": 0.01},
            fault,
        ),
        (5, fault, datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)),
    )


def test_a_row_keeps_the_small_answers_if_each_of_them_may_be_kept(spark: Any) -> None:
    """Of a choice and of a schema's field, over tables as the jobs of a cascade write them."""
    plain = GenerationSpec()
    schema = {"type": "object", "properties": {"price": {"type": "integer"}}, "required": ["price"]}
    asked = {
        "kind": {"template": "?", "choice": ["a", "b", "c"]},
        "deal": {"template": "?", "response_format": schema},
    }
    options = _options(
        generation=plain,
        ask=read_questions(asked, plain),
        id_columns=("id",),
        agree_fields=("deal.price",),
        certified=Certified(spec={}, model="large"),
    )
    answers, draw = answers_of(options), replace(_DRAW, rows=900, agree=0.9, sample_share=0.3)
    rows = spark.range(900).selectExpr("id", "concat('text ', id) AS text")
    rng = random.Random(1)
    small = {number: _answers_of_a_row(rng, number, errs=0.15) for number in range(900)}
    is_sampled = {row["id"] for row in sampled_rows(rows, draw, ("id",)).collect()}
    large = [_answers_of_a_row(rng, number, errs=0.0) for number in sorted(is_sampled)]
    both = CascadeRows(
        options,
        rows=rows,
        small=spark.createDataFrame([*small.values()], _TABLE),
        labels=spark.createDataFrame(large, _TABLE),
    )
    labelled = list(both.labelled(draw, answers))
    assert len(labelled) == len(is_sampled)
    assert len({kind.answered_us for kind, _ in labelled}) == len(labelled)
    certificates = [certify(draw, (of_row[place].row for of_row in labelled)) for place in (0, 1)]
    assert [certificate.cut.kept for certificate in certificates] == [Kept.ABOVE, Kept.ABOVE]

    final = both.answered(certificates, answers, rows.schema, "spec", models=("small", "large")).collect()
    of_large = {row["id"] for row in final if row["annotation"]["model"] == "large"}
    kept = {row["id"]: row for row in final if row["annotation"]["model"] == "small"}
    assert of_large == is_sampled
    expected = {
        number
        for number, (_, _, kind, deal, _) in small.items()
        if number not in is_sampled
        and deal[4] is None
        and certificates[0].keeps(kind[1], 0.0, is_sampled=False)
        and certificates[1].keeps(deal[3]["price"], 0.0, is_sampled=False)
    }
    assert kept.keys() == expected
    assert 50 < len(expected) < 600
    for number, row in kept.items():
        _, _, kind, deal, _ = small[number]
        scores = kind[1], deal[3]["price"]
        assert (row["kind"]["score"], row["deal"]["score"]) == pytest.approx(scores)
        assert row["annotation"]["score"] == pytest.approx(min(scores))
        assert (row["kind"]["text"], row["deal"]["parsed"]["price"]) == (kind[0], deal[1][0])
        assert {row[name]["model"] for name in ("kind", "deal", "annotation")} == {"small"}


def test_rows_that_are_asked_again_have_a_request_each_and_their_answers_are_compared(spark: Any) -> None:
    """Of 40 requests, five copies each, of which the large model answers every tenth otherwise the second time."""
    options = _options(generation=GenerationSpec(choice=("a", "b")), id_columns=("id",))
    (answer,) = answers_of(options)
    kind = f"id long, text string, annotation struct<text: string, probability: double, {_ERROR}>"
    rows = spark.range(200).selectExpr("id", "concat('text ', id % 40) AS text")

    def answered(some: Any, of_request: Any) -> Any:
        values = [(row["id"], row["text"], of_request(int(row["text"].split()[1]))) for row in some.collect()]
        return spark.createDataFrame(values, kind)

    labels = answered(
        rows, lambda number: ("a", 0.9, ("engine_error", "x")) if number == 3 else ("a", 0.9, None)
    )
    both = CascadeRows(options, rows=rows, small=labels.limit(0), labels=labels)
    chosen = both.drawn_requests(rows, _DRAW, 30)
    drawn = {row["text"] for row in chosen.collect()}
    assert (chosen.count(), len(drawn), chosen.columns) == (30, 30, ["id", "text"])
    shuffled = both.drawn_requests(rows.orderBy("id", ascending=False), _DRAW, 30)
    assert {row["text"] for row in shuffled.collect()} == drawn, "whichever copy it is"
    again = answered(both.drawn_requests(rows, _DRAW, 40), lambda number: ("ab"[number % 10 == 7], 0.9, None))
    (repeated,) = both.repeated(again, [answer])
    assert (repeated.rows, repeated.same) == (40, 35), "four answers are others, and one was an error"


def test_classes_of_several_labels_are_a_set_as_sure_as_the_label_nearest_to_one_half(spark: Any) -> None:
    rows = [
        ("a", {"a": 0.9, "b": 0.1}, 0.9, None),
        ("a", {"a": 0.9, "b": 0.8}, 0.9, None),
        ("a", {"a": 0.4, "b": 0.1}, 0.4, None),
        (None, None, None, ("engine_error", "x")),
    ]
    kind = f"label string, probabilities map<string, double>, probability double, {_ERROR}"
    annotation = F.struct(F.struct("label", "probabilities", "probability", "error").alias("annotation"))
    (answer,) = answers_of(_options(generation=GenerationSpec(task="classify")))
    found = (
        spark.createDataFrame(rows, kind).select(answer.score(annotation), answer.value(annotation)).collect()
    )
    scores, values = zip(*found, strict=True)
    assert [*scores[:3]] == pytest.approx([0.9, 0.3, 0.1])
    assert scores[3] is values[3] is None
    assert [answer.equality.shown(value) for value in values[:3]] == ["a", "a, b", "(none)"]
