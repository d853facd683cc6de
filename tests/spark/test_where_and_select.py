"""``--where`` and ``--select``: which rows of the input are annotated, and which of their columns are kept."""

from typing import Any

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import PromptSource
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs, Nights, words


def counts(run: Jobs, **options: Any) -> tuple[int, int, int, int]:
    """(rows in, skipped, out, left out)."""
    summary = run.run(**options)
    return summary.rows_in, summary.rows_skipped, summary.rows_out, summary.rows_left_out


@pytest.mark.long
def test_another_predicate_does_the_rest_and_only_selected_columns_are_kept(run: Jobs) -> None:
    run.write_input([(i, f"word {i}", "x") for i in range(20)], "id long, text string, secret string")
    options = {"id_columns": ("ID",), "select": ("secret", "id")}
    assert counts(run, **options, where="id < 12") == (12, 0, 12, 0)
    assert "20 rows" not in run.printed
    assert "12 rows where id < 12" in run.printed
    assert counts(run, **options, where="id >= 10 AND text LIKE 'word%'") == (10, 2, 8, 0)
    rows = run.rows()
    assert [list(row) for row in rows] == [["secret", "id", "annotation"]] * 20
    assert all(row["annotation"]["text"] == expected_text(f"Say word {row['id']}", 16) for row in rows)


@pytest.mark.long  # two jobs; a column of answers is a struct like any other
def test_the_output_is_the_input_of_another_job_whose_answers_are_read_and_not_kept(run: Jobs) -> None:
    run.write_input([(i, f"word {i}") for i in range(5)])
    run.run(id_columns=("id",))
    chained = {"input": run.output, "output": str(run.directory / "chained")}
    source = PromptSource(template="Say {annotation.text}")
    where = "annotation.error IS NULL AND id < 3"
    found = counts(run, **chained, source=source, id_columns=("id",), select=("id",), where=where)
    assert found == (3, 0, 3, 0)
    again = run.spark.read.format("delta").load(chained["output"]).collect()
    assert {row["id"]: row["annotation"]["text"] for row in again} == {
        i: expected_text(f"Say {expected_text(f'Say word {i}', 16)}", 16) for i in range(3)
    }


@pytest.mark.long  # the first test has two predicates, test_incremental the nights
@pytest.mark.parametrize("id_columns", [("id",), ()])
def test_a_nightly_job_with_another_predicate_annotates_rows_that_the_first_skipped(
    nights: Nights, id_columns: tuple[str, ...]
) -> None:
    nights.append(words(0, 10))
    even = {"id_columns": id_columns, "where": "id % 2 = 0"}
    assert nights.run(**even) == (5, 0, 5)
    nights.append(words(10, 14))
    assert nights.run(**even) == (2, 0, 2)
    assert nights.run(id_columns=id_columns, where="id < 12") == (12, 6, 6)
    assert nights.run(id_columns=id_columns) == (14, 13, 1)
    assert nights.ids() == list(range(14))


def test_a_wrong_predicate_or_selection_is_reported_at_once(run: Jobs) -> None:
    run.write_input([(1, "a")])
    ids = {"id_columns": ("id",)}
    for options, told in (
        ({"where": "nope > 1"}, "--where 'nope > 1' is not a condition on the input: .*nope"),
        ({"where": "id"}, "--where 'id' is not a condition on the input: .*not a boolean"),
        ({"where": "id >"}, "--where 'id >' is not a condition on the input"),
        ({"where": "rand() < 0.5"}, "selects different rows each time it is evaluated"),
        ({"select": ("id",)}, "--select needs --id-columns"),
        ({"select": ("text",), **ids}, "--select leaves out 'id'"),
        ({"select": ("id", "txt"), **ids}, "there is no column 'txt'. Did you mean 'text'"),
    ):
        with pytest.raises(JobError, match=told):
            run.run(**options)
