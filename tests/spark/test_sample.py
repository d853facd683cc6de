"""Samples of tables: how much of a table is read for them, and what they hold."""

from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.executor.questions import Question
from pipemax_spark.request.columns import RequestColumns
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows.prefix import sample_by_beginning
from pipemax_spark.rows.sample import SomeRows, sample_requests
from tests.spark.spark_work import counted, set_to

ROWS, FILES = 10_000, 50
COLUMNS = RequestColumns(PromptSource(prompt_column="text"))


@pytest.fixture(scope="module")
def source(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("sampled") / "in")
    rows = spark.range(ROWS, numPartitions=FILES).selectExpr(
        "id", "concat(rpad(concat('document ', id div 5), 90, '.'), ' question ', id) AS text"
    )
    rows.write.format("delta").save(path)
    return path


@pytest.fixture
def rows(spark: Any, source: str) -> Any:
    """A table whose files are read one by one, as large files are."""
    settings = ("spark.sql.files.maxPartitionBytes", "spark.sql.files.openCostInBytes")
    with set_to(spark, dict.fromkeys(settings, "100000")):
        found = spark.read.format("delta").load(source)
        found.count()  # so that the table's log has been read
        yield found


def sample_prompts(rows: Any, columns: RequestColumns, rows_in: int) -> list[str | None]:
    return [request["prompt"] for request in sample_requests(rows, columns, rows_in)]


@pytest.mark.long
def test_a_sample_for_auto_reads_a_bounded_number_of_files(
    spark: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipemax_spark.rows.sample._LOOKED_AT_ROWS", 4_000)
    assert rows.rdd.getNumPartitions() == FILES
    with counted(spark) as work:
        prompts = sample_prompts(rows, COLUMNS, ROWS)
    assert 800 <= len(prompts) <= 1_000
    # Delta reads its log for the plan: 4 tasks, some 200 rows.
    assert 20 <= work.tasks <= 30
    assert 4_000 <= work.rows_read <= 4_500
    ids = [int((prompt or "").rsplit(" ", 1)[1]) for prompt in prompts]
    assert len({i * FILES // ROWS for i in ids}) == 20, "they come from many files"
    assert min(ids) < ROWS / 4 < ROWS * 3 / 4 < max(ids)
    assert len({i % 200 for i in ids}) > 100, "they come from all over a file"


def test_a_sample_for_prefixes_reads_a_bounded_number_of_files_and_keeps_groups_whole(
    spark: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipemax_spark.rows.prefix.LOOKED_AT_ROWS", 4_000)
    with counted(spark) as work:
        sampled = sample_by_beginning(rows, rows["text"], rows_in=ROWS)
    prompts = sampled.texts
    assert 500 <= len(prompts) <= 2_000
    assert work.rows_read <= 4_000 + 1_000 + 1_000
    groups = [prompt.split(" question ")[0] for prompt in prompts]
    assert len(groups) >= 4 * len(set(groups))


def test_a_view_that_shuffles_is_sampled_from_its_first_rows(spark: Any, rows: Any) -> None:
    view = rows.groupBy("text").count()
    prompts = sample_prompts(view, COLUMNS, ROWS)
    assert 800 <= len(prompts) <= 1_000
    assert len(set(prompts)) == len(prompts)


def test_splits_without_a_row_are_skipped_and_a_sample_without_rows_is_empty(spark: Any) -> None:
    rows = spark.range(900, numPartitions=18)
    some = SomeRows.of(rows, rows_in=900, looked_at_rows=800)
    first, second = some._draws
    assert sorted((*first, *second)) == list(range(18))
    only_second = some.rows.where(f"id div 50 IN ({', '.join(map(str, second))})")
    assert {row["id"] // 50 for row in some.collect(only_second, 1_000)} == set(second)
    assert some.collect(some.rows.where("id < 0"), 1_000) == []


def test_a_small_table_is_sampled_whole(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(900, numPartitions=3).selectExpr("cast(id AS string) AS text")
    assert sample_prompts(rows, COLUMNS, 900) == [str(i) for i in range(900)]


def test_a_condition_that_selects_rows_of_no_drawn_split_still_has_a_sample(spark: Any, rows: Any) -> None:
    found = rows.where(f"id % {ROWS // FILES} = {ROWS // FILES - 1} AND id > {ROWS - 300}")
    assert found.count() == 2
    # As if each of them stood for a million.
    assert len(sample_prompts(found, COLUMNS, 2_000_000)) == 2


def test_a_sampled_row_is_the_request_that_its_task_makes(spark: Any) -> None:
    rows = spark.sql(
        """SELECT array(named_struct('role', 'user', 'content', 'Weather?', 'name', 'Ada'),
            named_struct('role', 'assistant', 'content', 'rain', 'name', NULL)) AS chat,
          named_struct('max_tokens', n) AS options FROM VALUES ('3'), ('n/a') AS t(n)"""
    )
    columns = RequestColumns(PromptSource(messages_column="chat"), overrides_column="options")
    good, bad = sample_requests(rows, columns, 2)
    assert [(turn["role"], turn["content"], turn["fields"]) for turn in good["messages"]] == [
        ("user", "Weather?", '{"name": "Ada"}'),
        ("assistant", "rain", None),
    ]
    assert (good["overrides"]["max_tokens"], good["fault"]) == (3, None)
    assert bad["fault"]["code"] == "invalid_parameter"


def test_a_sampled_row_with_questions_is_all_of_its_requests_without_its_image(spark: Any) -> None:
    rows = spark.sql("SELECT cast(x'68ff' AS string) AS text, x'00' AS photo UNION ALL SELECT 'a', x'00'")
    questions = tuple(
        Question(name=name, template=f"{name}?", generation=GenerationSpec()) for name in ("x", "y")
    )
    columns = RequestColumns(PromptSource(prompt_column="text", image_column="photo"), questions=questions)
    requests = sample_requests(rows, columns, 2)
    assert [request.get("fault") and request["fault"]["code"] for request in requests] == [
        *["invalid_prompt"] * 2,
        None,
        None,
    ]
    assert [(one["prompt"], one["question"]) for one in requests[2:]] == [("a\n\nx?", 0), ("a\n\ny?", 1)]
    assert requests[2]["images"] == [{"content": None, "source": "image"}]
