"""What a page, a summary or a log shows of rows that are to be forgotten."""

import json
from pathlib import Path

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.job.forget import ForgetOptions, read_ids
from pipemax_spark.report.forgetting import FORGOTTEN, Traces

TRACES = Traces([{"id": "17", "name": "Ann"}], ["a letter about the dog next door", "No"])


@pytest.mark.parametrize(
    "text",
    [
        "<div><span class='soft'>id</span> 17 · x</div>",
        "<div><span class='soft'>id</span> 18 · x</div><div><span class='soft'>id</span> 17 · x</div>",
        "<div><span class='soft'>name</span> A<wbr>nn</div>",
        "<pre>Summarise:\na letter about the\ndog next door</pre>",
        "<pre>a letter about the dog next door&#x27;s cat</pre>",
    ],
)
def test_a_page_that_shows_an_id_or_a_text_of_the_rows_is_replaced_whole(text: str) -> None:
    kept = TRACES.without("report.html", f"<h1>Report</h1>{text}")
    assert kept is not None
    assert not TRACES.are_in(kept)


@pytest.mark.parametrize(
    "text", ["<td>17</td>", "id 170", "id 1", "name Anna", "No errors", "a letter about"]
)
def test_other_rows_and_counts_stay(text: str) -> None:
    for name in ("report.html", "annotate.log", "summary.json"):
        assert TRACES.without(name, json.dumps(text)) is None


def test_of_a_summary_only_the_texts_go_and_of_a_log_only_the_lines() -> None:
    facts = {"rows": 17, "cascade": {"disagreements": [{"small": "a letter about the dog next door, or"}]}}
    kept = json.loads(TRACES.without("summary.json", json.dumps(facts)) or "")
    assert kept == {"rows": 17, "cascade": {"disagreements": [{"small": FORGOTTEN}]}}
    log = "ids are not unique: id=17 (2 rows)\nanother line\n"
    assert TRACES.without("annotate.log.1", log) == f"{FORGOTTEN}\nanother line\n"


def test_ids_are_read_from_lines_or_from_the_columns_that_the_first_line_names(tmp_path: Path) -> None:
    file = str(tmp_path / "ids")
    Path(file).write_text('id,name\n17,Ann\n\n18,"Bo, B"\n')
    assert read_ids(file, ("name", "id")) == [("Ann", "17"), ("Bo, B", "18")]
    assert read_ids(file, ("id",))[1] == ("17,Ann",)
    with pytest.raises(JobError, match="has no column 'day'; its first line names the id columns"):
        read_ids(file, ("id", "day"))
    with pytest.raises(JobError, match="give --ids FILE or --where CONDITION"):
        ForgetOptions(output="t", id_columns=("id",), ids=file, where="true")
