"""Jobs through real Spark and Delta: every row exactly once, whatever ran before."""

import json
import re
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.report.engine_log import ENGINE_METRICS, SCHEMA
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows import prompt_sizes
from pipemax_spark.storage.tables import DeltaTable
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs


def texts(jobs: Jobs) -> Counter[str]:
    return Counter(row["text"] for row in jobs.rows())


def test_every_row_is_answered_once_and_a_rerun_does_only_what_is_new(run: Jobs) -> None:
    run.write_input([(i, f"word {i}") for i in range(300)])
    file = run.directory / "summary.json"
    summary = run.run(id_columns=("id",), summary=str(file))
    assert (summary.rows_in, summary.rows_out, summary.rows_error, summary.rows_skipped) == (300, 300, 0, 0)
    written = json.loads(file.read_text())
    assert (written["complete"], written["rows_left"], written["ended_by"]) == (True, 0, "done")
    rows = run.rows()
    assert sorted(row["id"] for row in rows) == list(range(300))
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}") for row in rows)
    assert {row["annotation"]["error"] for row in rows} == {None}

    table = DeltaTable(run.spark, run.output)
    version = table.version()
    again = run.run(id_columns=("id",))
    assert (again.rows_out, again.rows_skipped, again.engines) == (0, 300, 0)
    assert "nothing new to do" in run.printed
    assert table.version() == version, "a run that finds nothing to do leaves the table as it is"

    run.write_input([(i, f"word {i}") for i in range(310)])
    more = run.run(id_columns=("id",))
    assert (more.rows_out, more.rows_skipped) == (10, 300)
    assert sorted(row["id"] for row in run.rows()) == list(range(310))

    other = PromptSource(template="Shout {text}")
    with pytest.raises(JobError, match=r"template was .*Say \{text\}.* is .*Shout \{text\}.*--new-spec"):
        run.run(id_columns=("id",), source=other)


@pytest.mark.long  # two jobs; tests/unit/spark compares specs
def test_under_new_spec_another_template_makes_rows_of_its_own(run: Jobs) -> None:
    run.write_input([(i, f"word {i}") for i in range(10)])
    run.run(id_columns=("id",))
    other = PromptSource(template="Shout {text}")
    run.run(id_columns=("id",), source=other, new_spec=True, limit=5)
    by_spec = Counter(row["annotation"]["spec_hash"] for row in run.rows())
    assert sorted(by_spec.values()) == [5, 10]


@pytest.mark.long
def test_without_ids_equal_rows_are_counted_and_under_sampling_each_is_computed(run: Jobs) -> None:
    sampling = GenerationSpec(max_tokens=16, temperature=0.5)
    run.write_input([(1, "a"), (1, "a"), (2, "b")])
    first = run.run(generation=sampling)
    assert (first.rows_out, first.rows_reused) == (3, 0)
    assert texts(run) == {"a": 2, "b": 1}
    run.write_input([(1, "a"), (1, "a"), (1, "a"), (2, "b"), (3, "c")])
    summary = run.run(generation=sampling)
    assert summary.rows_out == 2
    assert texts(run) == {"a": 3, "b": 1, "c": 1}


def test_equal_requests_are_computed_once_over_all_chunks_and_every_row_gets_the_answer(run: Jobs) -> None:
    # 1,000 rows with 300 prompts, one of them in 400 rows, several chunks, and ids that tell equal rows apart.
    run.write_input([(i, "often" if i % 5 < 2 else f"thing {i % 500}") for i in range(1_000)])
    summary = run.run(id_columns=("id",), commit_every=timedelta(milliseconds=1))
    assert (summary.rows_out, summary.rows_error, summary.rows_reused) == (1_000, 0, 1_000 - 301)
    assert "699, which took the answer of a row with an equal request" in run.printed
    rows = run.rows()
    assert sorted(row["id"] for row in rows) == list(range(1_000))
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}") for row in rows)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"source": PromptSource(prompt_column="txt")}, r"no column 'txt'\. Did you mean 'text'\?"),
        ({"id_columns": ("text",)}, r"not unique: text='a' \(2 rows\)"),
        ({"input": "/nowhere/in.parquet"}, "does not exist"),
        ({"input": "no_such_table"}, "there is no table 'no_such_table'"),
        ({"engine": {"model": "fake", "polcy": 1}}, "unknown field 'polcy'"),
        ({"engine_python": "/nowhere/python"}, "cannot be run on an executor"),
    ],
)
def test_bad_options_are_refused_before_any_engine_starts(run: Jobs, changes: dict, told: str) -> None:
    run.write_input([(1, "a"), (2, "a")])
    with pytest.raises(ValueError, match=told):
        run.run(**changes)


def test_a_dry_run_counts_and_writes_nothing(run: Jobs) -> None:
    run.write_input([(1, "one two"), (2, "three four")])
    run.dry_run()
    assert "2 to do" in run.printed
    assert "(counted over all rows)" in run.printed
    assert "Time     no estimate: this driver has no record of an earlier run of this job" in run.printed
    assert "\nSay " in run.printed
    assert not (run.directory / "out").exists()
    run.dry_run(generation=GenerationSpec(max_tokens=16, system=r"Briefly.\nNow."))
    assert r"the system message has \n as two characters" in " ".join(run.printed.split())


@pytest.mark.long
def test_a_dry_run_says_hours_and_cost_by_the_record_of_an_earlier_run_and_bounds_by_how_it_varied(
    run: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_sizes, "KEPT_TOKENS", 1_000)
    run.defaults = replace(run.defaults, id_columns=("id",), source=PromptSource(template="{text} {kind}"))
    kind = "a kind that has a long name, of quite a few words, so that it is worth finding in the cache"
    rows = [(i, f"word {i} " + "of many " * (i % 7), f"{kind} {i % 300}") for i in range(3_000)]
    run.write_input(rows, "id long, text string, kind string")
    run.run(limit=5)
    [record] = (run.directory / "runs").iterdir()

    def recorded(waiting: int, prefill: float = 0.8) -> str:
        """What a dry run prints after a minute at 10 rows/s, in which so many rows waited."""
        at = datetime(2026, 11, 27, tzinfo=UTC)
        reports = [
            dict.fromkeys(SCHEMA.names)
            | {"at": at + timedelta(seconds=second), "server_id": "a", "state": "ready"}
            | {"waiting_requests": waiting, "rows_done": 10 * second}
            | {"metrics": [("time_prefill_s", prefill * second), ("time_decode_s", (1 - prefill) * second)]}
            for second in range(60)
        ]
        pq.write_table(pa.Table.from_pylist(reports, schema=SCHEMA), record / ENGINE_METRICS)
        run.dry_run(price_per_hour=3_600.0)
        return run.printed

    full, decoding, idle = recorded(5), recorded(5, prefill=0.01), recorded(0)
    assert (
        "Time     about 5 min 0 s, cost 299.50 (95 %: 5 min 0 s, cost 299.50 to 5 min 0 s, cost 299.50)"
        in full
    )
    assert f"on 1 engine as in run {record.name}, without their start" in full
    low, high = (int(bound.replace(",", "")) for bound in re.findall(r"95 %: ([\d,]+) to ([\d,]+)", full)[0])
    mean = int(re.findall(r"about ([\d,]+) in prompts", full)[0].replace(",", ""))
    assert low < mean < high
    assert "Time     at most 5 min 0 s, cost 299.50 on 1 engine" in idle
    assert "which were full for 0 s only" in idle
    order = "Cache    {kind} before {text}, and --group-by-prefix: "
    share = r"\d\d % of prompt tokens from the cache instead of \d %"
    assert re.search(rf"^{re.escape(order)}{share}, about 1\.\d times the rows/s, [\d.]+ s less$", full, re.M)
    no_gain = f"no gain in rows/s: decode took 99 % of the engines' time in run {record.name}"
    assert re.search(rf"{share}, {no_gain}$", decoding, re.M)
    assert re.search(rf"^{re.escape(order)}{share}$", idle, re.M), "its speed is not known"


@pytest.mark.long  # test_ends has a limit and the run after it
def test_rows_beyond_a_limit_are_counted_and_a_later_run_annotates_and_compacts_them(run: Jobs) -> None:

    def num_files() -> int:
        return int(run.spark.sql(f"DESCRIBE DETAIL delta.`{run.output}`").collect()[0]["numFiles"])

    run.write_input([(i, f"word {i}") for i in range(30)])
    first = run.run(id_columns=("id",), limit=10)
    assert (first.rows_out, first.rows_skipped, first.rows_left_out) == (10, 0, 20)
    assert "20 (left out by --limit)" in run.printed
    # Rows of the output that are no longer in the input count nowhere.
    gone = {row["id"] for row in run.rows()}
    run.write_input([(i, f"word {i}") for i in range(30) if i not in gone] + [(100, "new")])
    second = run.run(id_columns=("id",), limit=5)
    assert (second.rows_in, second.rows_out, second.rows_skipped, second.rows_left_out) == (21, 5, 0, 16)
    assert num_files() > 1
    third = run.run(id_columns=("id",), compact=True)
    assert (third.rows_out, third.rows_skipped, third.rows_left_out) == (16, 5, 0)
    assert num_files() == 1, "compacting joins the files of all chunks"
    assert "small files were compacted into 1" in run.printed
    assert sorted(row["id"] for row in run.rows()) == [*range(30), 100]
    assert run.run(id_columns=("id",)).rows_skipped == 21, "compacting changes no row"
