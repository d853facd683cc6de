"""Columns of any name that Spark accepts, flat and in structs, and columns called like this package's own helpers."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pipemax_spark import annotate
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.spark.helper_columns import free_name, name_in
from pipemax_spark.spark.sql import quoted
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs

NAMES = (
    *("a.b", "..", "c`d", "`q`", " ", "x ", " y", "it's", 'say "x"', "#", "a{b}", "c!r", "k:v", "t\tn"),
    *("l\nf", "x,y", "p(q)", "e=f;", "\\", "%20", "*", "$1", "a[0]", "-1", "?x/", "@v", "🙂", "e\u0301"),
    *("日本 語", "ÄÖ", "null", "1", "s", "t", "outcomes", "UPPER", "annotation.text", "a.b.c"),
    *("__pipemax_prompt", "__PIPEMAX_key", "__pipemax__slice", "__pipemax_rank", "__pipemax_done"),
    *("__pipemax_occurrence", "__pipemax_left", "__pipemax_times", "__pipemax_hash"),
)
INNER = StructType([StructField(name, StringType()) for name in NAMES])
SCHEMA = StructType([StructField("id", LongType()), *INNER.fields, StructField("in.ner", INNER)])
TEMPLATE = "".join(f"{{{quoted(name)}}} {{`in.ner`.{quoted(name)}}} " for name in NAMES)


def row(number: int, **changes: Any) -> tuple[Any, ...]:
    values = [changes.get(name, f"{name} {number}") for name in NAMES]
    return number, *values, tuple(f"{name} of {number}" for name in NAMES)


def prompt(number: int) -> str:
    return "".join(f"{name} {number} {name} of {number} " for name in NAMES)


def put(run: Jobs, rows: list[tuple[Any, ...]]) -> None:
    run.spark.createDataFrame(rows, SCHEMA).createOrReplaceTempView("odd_names")


@pytest.mark.long  # annotate() has the names in make test
@pytest.mark.parametrize("retries", [False, True])
def test_a_job_carries_every_name_over_also_where_it_retries(run: Jobs, retries: bool) -> None:
    put(run, [row(0), row(1), row(1), row(2, **{"c`d": None})])
    options = {"input": "odd_names", "source": PromptSource(template=TEMPLATE), "max_error_rate": 1.0}
    done = [run.run(**options, retry_errors=again) for again in (False, True)[: 1 + retries]]
    assert [(each.rows_out, each.rows_skipped) for each in done if each] == [(4, 0), (1, 3)][: 1 + retries]
    rows = run.rows()
    assert sorted(found["id"] for found in rows) == [0, 1, 1, 2]
    for found in rows:
        number = found["id"]
        expected = dict(zip(SCHEMA.names, row(number, **({"c`d": None} if number == 2 else {})), strict=True))
        annotation = found.pop("annotation")
        assert found == expected | {"in.ner": dict(zip(NAMES, expected["in.ner"], strict=True))}
        assert annotation["text"] == (None if number == 2 else expected_text(prompt(number), 16))


@pytest.mark.long  # the first test has the names, test_redo_changed the changes
def test_every_name_can_be_an_id_or_be_selected_and_changed_rows_are_done_again(run: Jobs) -> None:
    put(run, [row(0), row(1)])
    options = {
        "input": "odd_names",
        "id_columns": NAMES[:-8],
        "select": ("id", *NAMES[:-8], "__pipemax_times", "in.ner"),
    }
    source = PromptSource(template="Say {in.ner.a.b} {__pipemax_times}")
    assert run.run(**options, source=source) is not None
    put(run, [row(0), row(1, __pipemax_times="changed"), row(2)])
    done = [run.run(**options, source=source, redo_changed=again) for again in (True, False)]
    assert [(each.rows_out, each.rows_skipped) for each in done if each] == [(2, 1), (0, 3)]
    assert {found["id"]: found["annotation"]["text"] for found in run.rows()} == {
        number: expected_text(f"Say a.b of {number} {times}", 16)
        for number, times in ((0, "__pipemax_times 0"), (1, "changed"), (2, "__pipemax_times 2"))
    }


def test_annotate_takes_every_name_and_keeps_it(spark: Any, fake: dict[str, Any], tmp_path: Path) -> None:
    frame = spark.createDataFrame([row(0), row(1)], SCHEMA)
    options = fake | {"max_tokens": 16}
    kept = annotate(frame, template=TEMPLATE, work_dir=str(tmp_path), output_column="an.swer", **options)
    assert kept.columns == [*SCHEMA.names, "an.swer"]
    found = [each.asDict() for each in kept.collect()]
    assert sorted(each["an.swer"]["text"] for each in found) == [expected_text(prompt(n), 16) for n in (0, 1)]
    assert {each["id"]: each["__pipemax_prompt"] for each in found} == {
        n: f"__pipemax_prompt {n}" for n in (0, 1)
    }
    asked = annotate(frame, prompt_column="a.b", ask={"one": "{`in.ner`.`c``d`}?"}, **options).collect()
    assert sorted(each["one"]["text"] for each in asked) == [
        expected_text(f"a.b {n}\n\nc`d of {n}?", 16) for n in (0, 1)
    ]


def test_a_helper_has_more_underscores_than_any_column_and_is_found_by_them() -> None:
    for own in (
        [],
        ["id", "pipemax_key", "__pipemax"],
        ["__pipemax_key"],
        ["__PIPEMAX__key", "__pipemax_prompt"],
    ):
        free = free_name("__pipemax_key", own)
        assert free.lower() not in map(str.lower, own)
        assert name_in("__pipemax_key", [*own, free]) == free
        assert name_in("__pipemax_rank", [free, *own]) == free_name("__pipemax_rank", own)
    assert free_name("__pipemax_key", ["id"]) == "__pipemax_key"
