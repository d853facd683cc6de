"""A cascade's decisions in Spark are those in Python, to the last bit."""

import math
import random
from collections import Counter
from typing import Any

from pyspark.sql import functions as F  # noqa: N812

from pipemax_spark.cascade.certificate import certify
from pipemax_spark.cascade.coins import coin_sql, tie_break_sql
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import LabelledRow
from pipemax_spark.job.cascade_rows import keeps_small, manifest_digest, sampled_rows

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
