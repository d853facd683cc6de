"""What is left, written down in slices and read back in chunks, by Spark itself."""

from collections import Counter
from pathlib import Path
from statistics import correlation, mean
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812
from pyspark.testing import assertDataFrameEqual

from pipemax_spark.request.columns import RequestColumns, without_request_columns
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows.chunks import (
    Chunk,
    RowOrder,
    SlicedRows,
    order_of_last_chunk,
    write_slices,
)
from pipemax_spark.rows.equal_rows import frequent_keys, group_of, shared_rank
from pipemax_spark.rows.left import rows_left
from pipemax_spark.rows.partition_keys import partition_keys


def keyed(rows: Any) -> Any:
    return RequestColumns(PromptSource(prompt_column="text")).add_with_keys(rows)


def sliced_rows(
    spark: Any, directory: Path, rows: Any, *, by_prefix: bool = False, with_keys: Any = None, **options: Any
) -> SlicedRows:
    """The rows as they are read back, after they were written by their ids unless ``options`` say otherwise."""
    given = {"identity": F.col("id"), "slots": 2, "by_prefix": by_prefix, **options}
    with_keys = keyed(rows) if with_keys is None else with_keys
    span = write_slices(with_keys, str(directory / "rows"), **given)
    return SlicedRows(spark, [span], rows.schema, by_prefix=by_prefix)


def chunk_of(sliced: SlicedRows, first: int, end: int) -> Chunk:
    return Chunk(number=first, first_slice=first, end_slice=end, rows=sum(sliced.slice_rows[first:end]))


def test_slices_hold_each_row_once_and_are_alike(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(4_000, numPartitions=3).selectExpr("id", "repeat('x', id % 100) AS text")
    sliced = sliced_rows(spark, tmp_path, rows, slices=8)
    assert sliced.rows == 4_000
    chunks = [chunk_of(sliced, 0, 3), chunk_of(sliced, 3, 8)]
    parts = [sliced.read(chunk, partitions=4) for chunk in chunks]
    assertDataFrameEqual(parts[0].unionAll(parts[1]), without_request_columns(keyed(rows)))
    for part in parts:
        assert part.rdd.getNumPartitions() == 4
        sizes = part.groupBy(F.spark_partition_id()).agg(F.count("*"), F.sum(F.length("text"))).collect()
        assert len(sizes) == 4, "no partition is empty"
        lengths = [row[2] for row in sizes]
        assert max(lengths) <= 1.2 * min(lengths), "long prompts are dealt out evenly"


@pytest.mark.long  # speed
def test_every_task_writes_equally_many_slices(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(2_000).selectExpr("id", "'x' AS text")
    sliced_rows(spark, tmp_path, rows, slices=32, slots=4)
    slices_of_task = Counter(file.name[:10] for file in tmp_path.rglob("part-*.parquet"))
    assert list(slices_of_task.values()) == [2] * 16


def test_a_partition_key_is_hashed_to_its_partition(spark: Any) -> None:
    for partitions in (1, 2, 7, 64):
        keys = partition_keys(partitions)
        frame = spark.createDataFrame([(key, place) for place, key in enumerate(keys)], "key int, place int")
        placed = frame.repartition(partitions, "key").select("place", F.spark_partition_id().alias("at"))
        assert all(row["place"] == row["at"] for row in placed.collect())


def test_equal_rows_are_counted_and_rows_that_differ_a_little_are_not_equal(spark: Any) -> None:
    instant, later = "2026-01-01 00:00:00.000001", "2026-01-01 00:00:00.000002"
    values = [
        ("x", 1.0, instant),
        ("x", 1.0, instant),
        ("x", 1.0, later),
        ("", None, instant),
        (None, None, instant),
    ]

    def frame(rows: list[tuple[Any, ...]]) -> Any:
        made = spark.createDataFrame(rows, "a string, b double, at string")
        return made.withColumn("at", F.to_timestamp("at")).select("a", "b", "at")

    left = rows_left(frame(values), frame([values[0], values[3]]), ())
    assert left.schema.simpleString() == frame(values).schema.simpleString()
    assertDataFrameEqual(left, frame([values[1], values[2], values[4]]))


@pytest.mark.parametrize("ids", [("id",), ()])
def test_a_small_batch_is_compared_with_all_rows_ever_done_without_shuffling_those(
    spark: Any, ids: tuple[str, ...]
) -> None:
    done = spark.range(10_000).selectExpr("id", "concat('word ', id) AS text")
    batch = spark.range(9_990, 10_010).selectExpr("id", "concat('word ', id) AS text")
    few, many = (rows_left(batch, done, ids, are_few=are_few) for are_few in (True, False))
    assertDataFrameEqual(few, many)
    assert sorted(row["id"] for row in few.collect()) == list(range(10_000, 10_010))
    assert "BroadcastHashJoin" in (plan := few._jdf.queryExecution().executedPlan().toString())
    assert "LeftSemi, BuildRight" in plan


@pytest.mark.long  # speed
def test_sorted_slices_hold_each_row_once_and_keep_prompts_that_begin_alike_together(
    spark: Any, tmp_path: Path
) -> None:
    rows = spark.range(3_000, numPartitions=3).selectExpr(
        "id", "concat('document ', id % 100, ' question ', id) AS text"
    )
    sliced = sliced_rows(spark, tmp_path, rows, slices=6, by_prefix=True)
    chunks = [chunk_of(sliced, 0, 1), chunk_of(sliced, 1, 6)]
    parts = [sliced.read(chunk, partitions=4) for chunk in chunks]
    assertDataFrameEqual(parts[0].unionAll(parts[1]), without_request_columns(keyed(rows)))
    seen = [
        (number, row["at"], row["text"].split(" question ")[0], row["text"])
        for number, part in enumerate(parts)
        for row in part.select("text", F.spark_partition_id().alias("at")).collect()
    ]
    assert len({place[:2] for place in seen}) == 8, "no partition is empty"
    # Cut from end to end: next to a cut, a document's questions are in one piece, one behind the other.
    pieces = {place[:3] for place in seen}
    assert len(pieces) <= 100 + 8
    for piece in {place[:2] for place in seen}:
        texts = [text for *place, _, text in seen if tuple(place) == piece]
        assert texts == sorted(texts)


@pytest.mark.parametrize("by_prefix", [False, True])
def test_a_row_s_slice_does_not_depend_on_the_order_in_which_rows_come(
    spark: Any, tmp_path: Path, by_prefix: bool
) -> None:
    """As when a lost executor's part of a shuffle is computed again."""
    rows = spark.range(2_000).selectExpr("id", "concat('document ', id % 9) AS text")
    with_keys = keyed(rows)

    def slices_of(frame: Any, name: str) -> dict[int, int]:
        path = str(tmp_path / name)
        write_slices(frame, path, identity=F.col("id"), slices=8, slots=2, by_prefix=by_prefix)
        found = spark.read.parquet(path)
        (slice_column,) = [name for name in found.columns if "slice" in name]
        return {row["id"]: row[slice_column] for row in found.collect()}

    one_order = slices_of(with_keys.repartition(3), "one")
    another_order = slices_of(with_keys.orderBy(F.rand(1)).repartition(5), "another")
    assert one_order == another_order
    assert len(set(one_order.values())) == 8


def by_partition(part: Any) -> list[list[Any]]:
    """The rows of each partition, in order."""
    rows: list[list[Any]] = part.rdd.glom().collect()
    return rows


@pytest.mark.long  # speed
def test_the_last_chunk_begins_with_long_prompts_on_every_executor(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(4_000, numPartitions=3).selectExpr("id", "repeat('x', id % 1000) AS text")
    sliced = sliced_rows(spark, tmp_path, rows, slices=8)
    chunk = chunk_of(sliced, 2, 8)
    part = sliced.read(chunk, partitions=8, order=RowOrder.LAST_RANK_FIRST, executors=2)
    assertDataFrameEqual(part, sliced.read(chunk, partitions=8))
    lengths = [[len(row["text"]) for row in rows] for rows in by_partition(part)]
    assert len(lengths) == 8
    for of_partition in lengths:  # slices are alike, not equal: a place in one is nearly the same in another
        assert correlation(range(len(of_partition)), of_partition) < -0.9, "the longest first"
    means = [mean(of_partition) for of_partition in lengths]
    for executor_means in (means[::2], means[1::2]):
        assert executor_means == sorted(executor_means, reverse=True)
    for first, second in zip(means[::2], means[1::2], strict=True):
        assert first == pytest.approx(second, rel=0.15), "every executor gets as many long ones"
    sizes = [len(of_partition) for of_partition in lengths]
    assert max(sizes) <= 1.3 * min(sizes)
    assert by_partition(part) == by_partition(part), "a task that is tried again has the same rows"
    shortest_first = sliced.read(chunk, partitions=8, order=RowOrder.FIRST_RANK_FIRST, executors=2)
    first, *_, last = (mean(len(row["text"]) for row in rows) for rows in by_partition(shortest_first))
    assert first < 0.5 * last


@pytest.mark.long  # speed
def test_rows_own_max_tokens_come_before_the_length_of_their_prompt(spark: Any, tmp_path: Path) -> None:
    # Long prompts have short answers here, and every tenth row says nothing that counts, so that the job's 500 count.
    rows = spark.range(2_000).selectExpr(
        "id",
        "repeat('x', 2000 - id) AS text",
        "named_struct('max_tokens', if(id % 10 = 0, if(id % 20 = 0, NULL, 'n/a'), string(id))) AS sampling",
    )
    columns = RequestColumns(PromptSource(prompt_column="text"), overrides_column="sampling")
    assert columns.has_own_max_tokens(rows.schema)
    path = str(tmp_path / "rows")
    span = write_slices(
        columns.add_with_keys(rows), path, identity=F.col("id"), slices=4, slots=2, max_tokens=500
    )
    sliced = SlicedRows(spark, [span], rows.schema)
    part = sliced.read(chunk_of(sliced, 0, 4), partitions=4, order=RowOrder.LAST_RANK_FIRST)
    tokens = [
        [500 if row["id"] % 10 == 0 else int(row["sampling"]["max_tokens"]) for row in rows]
        for rows in by_partition(part)
    ]
    means = [mean(of_partition) for of_partition in tokens]
    assert means == sorted(means, reverse=True)
    assert means[0] > 3 * means[-1]


@pytest.mark.parametrize(
    ("own", "length_correlation", "order"),
    [
        (True, None, RowOrder.LAST_RANK_FIRST),
        (False, None, RowOrder.AS_DEALT),
        (False, 0.1, RowOrder.AS_DEALT),
        (False, 0.5, RowOrder.LAST_RANK_FIRST),
        (False, -0.5, RowOrder.FIRST_RANK_FIRST),
    ],
)
def test_prompts_order_the_last_chunk_only_if_they_have_told_how_long_answers_are(
    own: bool, length_correlation: float | None, order: RowOrder
) -> None:
    found = order_of_last_chunk(has_own_max_tokens=own, length_correlation=length_correlation)
    assert found is order


@pytest.mark.long  # speed
def test_equal_requests_go_to_one_task_unless_they_are_very_many(spark: Any, tmp_path: Path) -> None:
    # 1,000 prompts with three rows each, 2,000 rows with one prompt, and 600 without any.
    prompt = "CASE WHEN id < 3000 THEN concat('prompt ', id % 1000) WHEN id < 5000 THEN 'hello' ELSE ' ' END"
    rows = spark.range(5_600, numPartitions=3).selectExpr("id", f"{prompt} AS text")
    with_keys = keyed(rows)
    (hello,) = with_keys.where("text = 'hello'").select("__pipemax_key").distinct().collect()
    frequent = frequent_keys(with_keys, rows_in=20_000, slices=8)
    assert frequent == {hello[0]: 3}, "a third of eight slices"
    group = group_of(with_keys, F.col("id").cast("string"), frequent)
    options = {"identity": group, "slices": 8, "equal_together": True}
    sliced = sliced_rows(spark, tmp_path, rows, with_keys=with_keys, **options)
    assert sliced.rows == 5_600
    places = Counter[tuple[str, int, int]]()
    tasks_of, empties = dict[str, set[tuple[int, int]]](), Counter[int]()
    for number in range(8):
        for order in (RowOrder.AS_DEALT, RowOrder.LAST_RANK_FIRST):
            part = sliced.read(chunk_of(sliced, number, number + 1), partitions=4, order=order)
            found = part.select("text", F.spark_partition_id()).collect()
            if order is RowOrder.AS_DEALT:
                empties[number] += sum(row[0] == " " for row in found)
                places.update((row[0], number, row[1]) for row in found)
            else:
                tasks = dict[str, set[int]]()
                for text, task in found:
                    tasks.setdefault(text, set()).add(task)
                assert all(len(own) == 1 for text, own in tasks.items() if text.startswith("prompt"))
    for text, number, task in places:
        tasks_of.setdefault(text, set()).add((number, task))
    assert all(len(tasks) == 1 for text, tasks in tasks_of.items() if text.startswith("prompt"))
    assert len(tasks_of) == 1_002
    assert {number for number, _ in tasks_of["hello"]} <= set(range(8))
    assert len(tasks_of["hello"]) > 6, "in several slices, and there in several tasks"
    assert min(empties.values()) > 40, "rows without a prompt are in all slices"


@pytest.mark.long  # speed
def test_keeping_equal_requests_together_costs_no_further_shuffle_or_sort(spark: Any) -> None:
    rows = spark.range(100).withColumn("slice", F.col("id") % 5).withColumn("writer", F.col("slice") % 2)
    rows = rows.repartition(2, "writer").sortWithinPartitions("slice", "writer", "id")
    rows = rows.withColumn("place", F.monotonically_increasing_id())
    ranked = rows.withColumn("place", shared_rank(("slice", "writer"), ("id",), place="place"))
    plan = ranked._jdf.queryExecution().executedPlan().toString()
    assert (plan.count("Exchange"), plan.count("Sort "), "Window" in plan) == (1, 1, True)
    assertDataFrameEqual(ranked, rows)  # rows that are not equal keep their places
