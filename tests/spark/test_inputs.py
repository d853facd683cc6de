"""What can be read, and what the rows look like at the other end."""

import json

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.storage.sources import read_source
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs

AWKWARD = 'quoted "word", comma;\nand a line break, 日本語'


@pytest.mark.long  # test_text_inputs.py has the files
def test_a_csv_file_with_all_that_csv_allows(run: Jobs) -> None:
    path = run.directory / "rows.csv"
    quoted = AWKWARD.replace('"', '""')
    path.write_text(f'id,Long Text\n1,"{quoted}"\n2,plain\n', encoding="utf-8")
    run.run(input=str(path), source=PromptSource(prompt_column="long text"), id_columns=("id",))
    rows = {row["id"]: row for row in run.rows()}
    assert rows["1"]["Long Text"] == AWKWARD
    assert rows["1"]["annotation"]["text"] == expected_text(AWKWARD, 16)
    assert rows["2"]["annotation"]["text"] == expected_text("plain", 16)


@pytest.mark.long  # tests/unit/spark/test_overrides.py has the rules
def test_a_row_s_overrides_name_its_adapter_and_equal_prompts_of_other_adapters_are_other_requests(
    run: Jobs,
) -> None:
    named: dict[int, str | None] = {1: "red", 2: "blue", 3: None, 4: "red"}
    run.write_input(
        [(row, "[[lora]]", (adapter,)) for row, adapter in named.items()],
        "id long, text string, options struct<lora: string>",
    )
    generation = GenerationSpec(lora="green", max_tokens=16)
    summary = run.run(generation=generation, overrides_column="options", id_columns=("id",))
    assert summary.rows_reused == 1
    answers = {row["id"]: row["annotation"]["text"] for row in run.rows()}
    assert answers == {row: adapter or "green" for row, adapter in named.items()}


def test_a_delta_table_is_read_as_it_was_when_the_job_began(run: Jobs) -> None:
    path = str(run.directory / "table")
    for first in (0, 10):
        run.spark.range(first, first + 10).write.format("delta").mode("append").save(path)
    source = read_source(run.spark, path)
    run.spark.range(100, 200).write.format("delta").mode("append").save(path)
    assert source.version == 1
    assert source.rows.count() == 20


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "no_such_table",
            r"there is no table 'no_such_table'; for files, give a path such as \./no_such_table",
        ),
        ("/no/such/path", "does not exist"),
        ("{directory}/empty", "give --input-format parquet, csv or json"),
        ("{directory}/broken.parquet", "cannot be read"),
    ],
)
def test_an_unreadable_input_is_refused_with_the_reason(run: Jobs, name: str, told: str) -> None:
    for directory in ("empty", "broken.parquet"):
        (run.directory / directory).mkdir()
    with pytest.raises(JobError, match=told):
        read_source(run.spark, name.format(directory=run.directory))


def test_a_delta_table_is_read_at_the_version_that_the_user_names_or_the_option_is_refused(
    run: Jobs,
) -> None:
    path = str(run.directory / "table")
    run.spark.range(3).write.format("delta").save(path)
    (first,) = run.spark.sql(f"DESCRIBE HISTORY delta.`{path}`").select("timestamp").collect()
    run.spark.range(3, 7).write.format("delta").mode("append").save(path)
    for options, version, rows in (
        ({}, 1, 7),
        ({"versionAsOf": "0"}, 0, 3),
        ({"VERSIONASOF": "1"}, 1, 7),
        ({"timestampAsOf": str(first[0])}, 0, 3),
        ({"readChangeFeed": "false"}, 1, 7),
    ):
        source = read_source(run.spark, path, options=options)
        assert (source.version, source.rows.count()) == (version, rows), options
        assert source.tells_appends == (
            not {"versionasof", "timestampasof"} & {name.lower() for name in options}
        )
    run.spark.range(3).createOrReplaceTempView("plain_view")
    for name, options, told in (
        (path, {"versionAsOf": "9"}, "cannot be read: .*9"),
        (path, {"versionAsOf": "first"}, "cannot be read"),
        (path, {"timestampAsOf": "2001-01-01"}, "cannot be read"),
        (
            path,
            {"versionAsOf": "0", "timestampAsOf": "2026-01-01"},
            "both choose a version; give one of them",
        ),
        (path, {"readChangeFeed": "true", "startingVersion": "0"}, "readChangeFeed reads a table's changes"),
        (
            "plain_view",
            {"versionAsOf": "0"},
            "versionAsOf is for a table or for files, and 'plain_view' is a view",
        ),
    ):
        with pytest.raises(JobError, match=told):
            read_source(run.spark, name, options=options)
    with pytest.raises(JobError, match="reads what was appended"):
        run.run(input=path, input_option={"versionAsOf": "0"}, incremental=True, id_columns=("id",))


def test_input_options_go_to_every_reader_and_come_after_this_package_s_own(run: Jobs) -> None:
    (run.directory / "rows.csv").write_text("1;one\n2;two\n")
    options = {"HEADER": "false", "sep": ";"}
    assert read_source(run.spark, str(run.directory / "rows.csv"), options=options).rows.count() == 2
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    batch["body"] = {"model": "m", "messages": [{"role": "user", "content": "one"}]}  # type: ignore[assignment]
    (run.directory / "batch").mkdir()
    for name in ("one.jsonl", "two.jsonl"):
        (run.directory / "batch" / name).write_text(json.dumps(batch | {"custom_id": name}) + "\n")
    found = read_source(
        run.spark,
        str(run.directory / "batch"),
        file_format="openai-batch",
        options={"pathGlobFilter": "one*"},
    )
    assert [row["custom_id"] for row in found.rows.collect()] == ["one.jsonl"]
