"""``--reuse``: an answer that an earlier output of the same spec holds is taken over, not computed again."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobError, TooManyErrorsError
from pipemax_spark.executor.questions import Question
from pipemax_spark.storage.tables import DeltaTable, Transaction
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs, Nights
from tests.spark.test_written_rows import DyingTable, chunk_of_each_slice  # noqa: F401  a fixture

FAILS = "[[error]]"


@pytest.fixture
def earlier(run: Jobs) -> str:
    """An output with the answers of word 0 to word 9, and an error; ``run`` then writes another one."""
    run.write_input([*((number, f"word {number}") for number in range(10)), (10, FAILS)])
    run.defaults = replace(run.defaults, id_columns=("id",))
    run.run()
    name = run.output
    run.output = str(run.directory / "later")
    run.defaults = replace(run.defaults, output=run.output)
    return name


def texts(jobs: Jobs) -> Counter[str]:
    """The texts of the rows, each of which has the right answer."""
    rows = jobs.rows()
    for row in rows:
        assert row["text"] == FAILS or row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16)
    assert len({row["id"] for row in rows}) == len(rows)
    return Counter(row["text"] for row in rows)


def test_rows_of_another_table_take_the_good_answers_of_the_same_spec(run: Jobs, earlier: str) -> None:
    rows = [*((100 + number, f"word {number % 12}") for number in range(24)), (200, FAILS)]
    run.write_input(rows)
    run.dry_run(reuse=earlier)
    assert "20 rows would take answers of" in run.printed
    assert "5 to do" in run.printed
    summary = run.run(reuse=earlier)
    assert (summary.rows_in, summary.rows_skipped, summary.rows_from_table, summary.rows_out) == (
        25,
        20,
        20,
        5,
    )
    assert summary.rows_error == 1, "an error is not taken over"
    assert "20 rows took answers of" in run.printed
    assert (
        f"20, which took that of a row in the table of --reuse ({summary.tokens_from_table:,}" in run.printed
    )
    assert texts(run) == Counter(text for _, text in rows)
    old = {row["annotation"]["run_id"] for row in run.spark.read.format("delta").load(earlier).collect()}
    run_ids = {row["id"]: row["annotation"]["run_id"] for row in run.rows()}
    assert {run_ids[100]} == old, "the annotation names the run that computed it"
    assert run_ids[110] not in old
    taken = [row["annotation"] for row in run.rows() if row["annotation"]["run_id"] in old]
    assert summary.tokens_from_table == sum(one["prompt_tokens"] + one["completion_tokens"] for one in taken)


@pytest.mark.long
def test_a_table_that_answers_all_rows_starts_no_engine(run: Jobs, earlier: str) -> None:
    run.write_input([(100 + number, f"word {number}") for number in range(10)])
    summary = run.run(reuse=earlier)
    assert (summary.rows_from_table, summary.rows_out, summary.engines, summary.complete) == (10, 0, 0, True)
    assert "nothing is left to compute, no engine was started" in run.printed
    assert sum(texts(run).values()) == 10
    pages = [path.read_text() for path in run.directory.rglob("report.html")]
    assert sum("in the table of --reuse" in page for page in pages) == 1
    again = run.run(reuse=earlier)
    assert (again.rows_from_table, again.rows_skipped) == (0, 10)


@pytest.mark.long
def test_a_table_that_cannot_answer_is_refused_by_name(run: Jobs, earlier: str) -> None:
    run.write_input([(100, "word 1")])

    def refused(**changes: Any) -> str:
        with pytest.raises(JobError) as error:
            run.run(**{"reuse": earlier, **changes})
        return str(error.value)

    told = refused(engine={"model": "another"})
    assert "has no rows under this job's spec" in told
    assert 'model was "fake' in told
    shorter = refused(generation=GenerationSpec(max_tokens=8))
    assert "max_tokens was 16, is 8" in shorter
    assert "lacks the column" not in shorter
    assert "there is no such" in refused(reuse=str(run.directory / "nowhere"))
    assert "each row is to have its own" in refused(generation=GenerationSpec(max_tokens=16, temperature=0.5))
    assert "--compute-each" in refused(compute_each=True)
    without = str(run.directory / "without")
    rows = run.spark.read.format("delta").load(earlier)
    rows.select("id").write.format("delta").save(without)
    assert "holds no annotations" in refused(reuse=without)
    narrow = str(run.directory / "narrow")  # a copy has none of the table's properties
    rows.select("id", "annotation").write.format("delta").save(narrow)
    assert "lacks a column from which its requests were made" in refused(reuse=narrow)
    assert not DeltaTable(run.spark, run.output).exists()
    run.run()
    assert "is the output itself" in refused(reuse=run.output)


class DyingAfterReuse(DeltaTable):
    """A table after whose commit of reused rows the run fails."""

    def append(self, rows: Any, transaction: Transaction) -> None:
        super().append(rows, transaction)
        if "reuses answers" in transaction.note:
            raise RuntimeError("the run dies")


@pytest.mark.long  # three jobs
@pytest.mark.parametrize("id_columns", [("id",), ()])
def test_a_run_that_dies_after_it_has_taken_answers_over_leaves_every_row_to_be_done_once(
    run: Jobs, earlier: str, id_columns: tuple[str, ...]
) -> None:
    rows = [(100 + number, f"word {number}") for number in range(20)]
    run.write_input(rows)
    with pytest.raises(RuntimeError, match="the run dies"):
        run.run(table=DyingAfterReuse(run.spark, run.output), reuse=earlier, id_columns=id_columns)
    assert len(run.rows()) == 10
    summary = run.run(reuse=earlier, id_columns=id_columns)
    assert (summary.rows_from_table, summary.rows_skipped, summary.rows_out) == (0, 10, 10)
    assert texts(run) == Counter(text for _, text in rows)


@pytest.mark.long  # three runs
def test_what_was_left_after_the_answers_were_taken_over_is_not_looked_for_again(
    run: Jobs, earlier: str
) -> None:
    often = timedelta(milliseconds=1)
    run.defaults = replace(run.defaults, input=str(run.directory / "in"), commit_every=often)
    rows = run.spark.range(100, 2_100, numPartitions=2).selectExpr("id", "concat('word ', id % 1000) AS text")
    rows.write.format("delta").save(run.defaults.input)
    with pytest.raises(RuntimeError, match="the run dies"):
        run.run(table=DyingTable(run.spark, run.output, dies_at=2), reuse=earlier)
    summary = run.run(reuse=earlier)
    assert "this run uses them as they are" in run.printed
    assert summary.rows_from_table == 0
    assert texts(run) == Counter(f"word {number % 1000}" for number in range(100, 2_100))


@pytest.mark.long
def test_a_limit_counts_the_rows_that_are_computed(run: Jobs, earlier: str) -> None:
    run.write_input([(100 + number, f"word {number}") for number in range(20)])
    summary = run.run(reuse=earlier, limit=4)
    assert (summary.rows_from_table, summary.rows_out, summary.rows_left) == (10, 4, 6)
    assert len(run.rows()) == 14


@pytest.mark.long
def test_a_row_that_is_sampled_by_its_own_settings_takes_no_answer(run: Jobs, earlier: str) -> None:
    sampling = "CASE WHEN id % 2 = 0 THEN named_struct('temperature', 0.5D) END AS sampling"

    def write(first: int) -> None:
        rows = run.spark.range(first, first + 10).selectExpr("id", "concat('w ', id % 5) AS text", sampling)
        rows.write.mode("overwrite").parquet(str(run.directory / "in.parquet"))

    run.defaults = replace(run.defaults, overrides_column="sampling")
    write(0)
    run.run()
    name, run.output = run.output, str(run.directory / "last")
    run.defaults = replace(run.defaults, output=run.output)
    write(100)
    assert run.run(reuse=name).rows_from_table == 5


@pytest.mark.long
def test_answers_to_several_questions_are_taken_over_together(run: Jobs, earlier: str) -> None:
    asked = tuple(
        Question(name=name, template=f"{name}?", generation=run.defaults.generation)
        for name in ("what", "why")
    )
    run.defaults = replace(run.defaults, ask=asked, select=("id", "text"))
    run.write_input([(number, f"word {number}") for number in range(5)])
    run.run()
    before = {row["text"]: (row["what"]["text"], row["why"]["text"]) for row in run.rows()}
    name, run.output = run.output, str(run.directory / "last")
    run.defaults = replace(run.defaults, output=run.output)
    run.write_input([(100 + number, f"word {number}") for number in range(5)])
    assert run.run(reuse=name).rows_from_table == 5
    assert {row["text"]: (row["what"]["text"], row["why"]["text"]) for row in run.rows()} == before


@pytest.mark.long
def test_each_batch_of_a_table_that_grows_takes_answers_over(nights: Nights) -> None:
    run = nights.jobs
    run.write_input([(number, f"word {number}") for number in range(10)])
    run.run(id_columns=("id",))
    name, run.output = run.output, str(run.directory / "later")
    run.defaults = replace(run.defaults, output=run.output, id_columns=("id",))
    nights.append([(100, "word 1"), (101, "new")])
    assert nights.run(reuse=name) == (2, 1, 1)
    nights.append([(102, "word 2")])
    assert nights.run(reuse=name) == (1, 1, 0)
    assert nights.ids() == [100, 101, 102]


@pytest.mark.long
def test_a_run_with_too_many_errors_is_not_turned_green_by_answers_of_a_later_table(
    run: Jobs, earlier: str
) -> None:
    later, first = run.output, run.directory / "first"
    run.write_input([(number, FAILS) for number in range(5)])
    with pytest.raises(TooManyErrorsError):
        run.run(output=str(first))
    run.write_input([(number, f"number {number}") for number in range(5)])
    run.run(output=later)
    run.write_input([*((number, FAILS) for number in range(5)), (100, "number 1")])
    for _ in range(2):  # the first one takes an answer over; the other one finds nothing to do
        with pytest.raises(TooManyErrorsError):
            run.run(output=str(first), reuse=later)
