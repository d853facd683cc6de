"""What a dry run says of the template's order and of the rows' order, through Spark."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from pipemax.wire import GenerationSpec, PreflightReply
from pipemax_spark.executor.questions import Question
from pipemax_spark.job.worth_a_try import worth_a_try
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows import field_counts, prompt_sizes
from pipemax_spark.rows.field_counts import count_fields
from tests.spark.conftest import Jobs
from tests.spark.spark_work import counted

ROWS = 2_400
INSTRUCTIONS = (
    "Say in one word what this is about, in English, whatever language the text itself is written in."
)


@pytest.fixture(scope="module")
def rows(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A row in eight has no brand; of those that have one, half are equal to another row."""
    path = str(tmp_path_factory.mktemp("products") / "in.parquet")
    made = spark.range(ROWS, numPartitions=4).select(
        "id",
        F.format_string("category %03d", F.col("id") % 300).alias("category"),
        F.when(F.col("id") % 8 != 7, F.format_string("brand %02d", F.col("id") % 60)).alias("brand"),
        F.rpad(F.sha2((F.col("id") % (ROWS // 2)).cast("string"), 256), 400, "x").alias("body"),
    )
    made.write.parquet(path)
    return spark.read.parquet(path)


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_sizes, "KEPT_TOKENS", 1_000)


def test_combinations_of_columns_are_counted_in_one_pass(spark: Any, rows: Any) -> None:
    with counted(spark) as work:
        counts = count_fields(rows, "{brand} {category}: {body}", "UTC", rows_in=ROWS, reuses=True)
    assert work.rows_read == ROWS
    expected = rows.where("brand IS NOT NULL")
    assert counts.combinations == {
        names: expected.select(*names).distinct().count() for names in counts.combinations
    }
    assert len(counts.combinations) == 7
    assert counts.rows == 1_050
    assert counts.characters == {"brand": 8.0, "category": 12.0, "body": 400.0}
    every = count_fields(rows, "{brand}", "UTC", rows_in=ROWS, reuses=False)
    assert (every.rows, every.combinations) == (2_100, {frozenset({"brand"}): 60})


def test_of_many_columns_only_those_that_come_first_are_counted(rows: Any) -> None:
    wide = rows.select(*(F.lit(f"{n}").alias(f"c{n}") for n in range(7)))
    counts = count_fields(wide, "".join(f"{{c{n}}}" for n in range(7)), "UTC", rows_in=ROWS, reuses=False)
    assert counts.combinations == {frozenset(f"c{n}" for n in range(size)): 1 for size in range(1, 8)}


def test_nothing_is_counted_where_no_row_has_a_prompt(rows: Any) -> None:
    assert count_fields(rows.where("brand IS NULL"), "{brand}", "UTC", rows_in=300, reuses=True) is None


def test_a_bounded_number_of_rows_is_counted(spark: Any, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_counts, "LOOKED_AT_ROWS", 400)
    counts = count_fields(rows, "{body}", "UTC", rows_in=ROWS, reuses=False)
    assert counts.rows <= 400 + 16


@pytest.mark.usefixtures("small_cache")
def test_each_kind_of_prompt_has_the_findings_that_apply_to_it(run: Jobs, rows: Any) -> None:
    options, question = run.defaults, Question(name="q", template="Why?", generation=GenerationSpec())
    long_category = F.rpad("category", 300, "-")

    def chat(content: Any) -> Any:
        return F.array(F.struct(F.lit("user").alias("role"), content.alias("content")))

    some = rows.where("id < 600 AND brand IS NOT NULL")
    some = some.select(
        *("category", "brand", "body"),
        F.lit("a.png").alias("photo"),
        F.concat(long_category, "body").alias("text"),
        chat(F.concat(long_category, "body")).alias("chat"),
        chat(F.array(F.struct(F.concat(long_category, "body").alias("text")))).alias("parts"),
    ).cache()
    num_rows = some.count()

    def changes(engine: dict[str, Any] | None = None, **changed: Any) -> list[str]:
        checked: Any = SimpleNamespace(reply=PreflightReply(engine=engine or {}))
        job = replace(options, **changed)
        return [finding.change for finding in worth_a_try(job, checked, some, num_rows, of_template=True)]

    behind = PromptSource(template=f"{{body}}\n{INSTRUCTIONS}")
    first = "24 of 124 prompt tokens are text behind {body}; put it first, and all rows share it"
    assert changes(source=behind) == [first]
    assert changes(source=behind, ask=(question,)) == [first.replace("124", "125")]
    assert changes(source=behind, ask=(question,) * 4) == [], (
        "the document is in the cache three times of four"
    )
    assert changes(source=replace(behind, image_column="photo")) == [], "images come first"
    assert changes({"enable_prefix_caching": False}, source=behind) == []
    assert changes(source=behind, generation=GenerationSpec(task="embed")) == []
    for source in (PromptSource(prompt_column="text"), PromptSource(messages_column="chat")):
        assert changes(source=source) == ["--group-by-prefix"]
        assert changes(source=source, group_by_prefix=True) == []
    assert changes(source=PromptSource(messages_column="parts")) == [], "parts may be images"
    assert changes(source=PromptSource(prompt_column="body")) == []
    some.unpersist()
