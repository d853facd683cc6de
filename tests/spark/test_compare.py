"""``pipemax compare``: the same drawn rows under two templates, by one engine that ends with it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipemax.wire import GenerationSpec
from pipemax_spark import compare_prompts
from pipemax_spark.cli import compare_app
from pipemax_spark.errors import JobError
from pipemax_spark.job.compare import CompareOptions, run_comparison
from pipemax_spark.job.trial import in_drawn_order
from pipemax_spark.report.comparison import Comparison
from pipemax_spark.report.intervals import mcnemar_p
from pipemax_spark.report.summary import counted
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs
from tests.spark.processes import SMALL_SPARK, servers_of

BIN = Path(sys.executable).parent
LABELS = ("bug", "question", "praise")
TEMPLATES = ("Say {text}", "Shout {text}")
Compared = Callable[..., Comparison]


@pytest.fixture(scope="module")
def own_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An engine's Python of this file: no other test's engines count as left behind."""
    return write_engine_python(tmp_path_factory.mktemp("engine") / "python")


@pytest.fixture
def table(run: Jobs) -> str:
    rows = [(i, None if i == 2 else f"word {i}", None if i == 1 else LABELS[i % 3]) for i in range(60)]
    run.write_input(rows, "id long, text string, label string")
    return run.defaults.input


@pytest.fixture
def compared(run: Jobs, table: str, own_python: str) -> Compared:
    """Compares two templates; the engine has ended by then."""

    def run_with(
        second: str = TEMPLATES[1], *, rows: int = 60, page: str | None = None, **changes: Any
    ) -> Any:
        job = replace(
            run.defaults,
            output="",
            engine_python=own_python,
            **{"generation": GenerationSpec(choice=LABELS), "id_columns": ("id",)} | changes,
        )
        options = CompareOptions(job=job, other_template=second, rows=rows, page=page)
        try:
            with run.terminal() as terminal:
                return run_comparison(run.spark, options, terminal)
        finally:
            assert not servers_of(own_python), "no engine stays"

    return run_with


def test_two_templates_are_compared_by_answers_truth_tokens_and_cost(
    compared: Compared, run: Jobs, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    comparison = compared(gold_column="label", price_per_hour=36.0, page=str(page))
    assert run.printed.count("loaded in") == 1
    assert comparison.rows_in == len(comparison.pairs) == 60
    assert sorted(int(one.ids["id"]) for one, _ in comparison.pairs) == [*range(60)]
    pairs = {int(one.ids["id"]): (one, two) for one, two in comparison.pairs}
    assert pairs[7][0].prompt == "Say word 7"
    assert pairs[7][1].prompt == "Shout word 7"
    answers = {i: (one.answers["annotation"], two.answers["annotation"]) for i, (one, two) in pairs.items()}
    equal = sum(one == two for i, (one, two) in answers.items() if i != 2)
    assert 0 < equal < 59
    assert f": {equal} of 59 rows that both have answered" in run.printed
    truths = {i: LABELS[i % 3] for i in range(60) if i != 1}
    for side, name in enumerate("AB"):
        right = sum(answers[i][side] == truth for i, truth in truths.items())
        assert comparison.right(side, "annotation") == (right, 59)
        assert re.search(
            rf"^Accuracy of {name} +.*: {right} of 59 rows, by column 'label'$", run.printed, re.M
        )
    only = [
        sum(answers[i][side] == truth != answers[i][1 - side] for i, truth in truths.items())
        for side in (0, 1)
    ]
    assert f"A in {counted(only[0], 'row')}, B in {only[1]}; " in run.printed
    assert f"p = {mcnemar_p(*only):.2g} " in run.printed
    seconds = comparison.answered[0].seconds
    assert f"cost {seconds / 100:,.2f}; 1 row with an error" in run.printed, "36 an hour are 0.01 a second"
    shown = re.findall(r"^ *(\d+) A +(\w+)$", run.printed, re.MULTILINE)
    assert len(shown) == 20
    assert all(answers[int(i)][0] == text != answers[int(i)][1] for i, text in shown)
    assert f"The answers of {60 - equal - 1 - 20} further rows differ." in run.printed
    text = unescape(page.read_text(encoding="utf-8"))
    assert text.count("prompt B") == 59 - equal
    assert "answer A, right" in text
    assert not [
        path.name for path in tmp_path.iterdir() if path.name not in ("in.parquet", "logs", "page.html")
    ]


@pytest.mark.long  # as the command above
def test_python_compares_as_the_command_does_and_draws_the_same_rows(
    spark: Any, table: str, own_python: str, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = compare_prompts(
        spark,
        input=table,
        templates=TEMPLATES,
        rows=10,
        engine=fake_config(),
        engine_python=own_python,
        id_columns="id",
        choice=LABELS,
        no_sample=True,
    )
    assert not servers_of(own_python)
    drawn = [int(one.ids["id"]) for one, _ in comparison.pairs]
    order = [row["id"] for row in in_drawn_order(spark.read.parquet(table).repartition(7), 0).collect()]
    assert drawn == order[:10]
    assert drawn != sorted(drawn)
    assert "<td" in comparison._repr_html_()
    printed = capsys.readouterr().out
    assert str(comparison) in printed
    assert not re.search(r"^ *\d+ A ", printed, re.MULTILINE), "no row is shown"
    with pytest.raises(TypeError, match="output"):
        compare_prompts(spark, input=table, templates=TEMPLATES, output="out")


def test_columns_that_cannot_be_hashed_do_not_hinder_the_draw(spark: Any) -> None:
    rows = spark.range(20).selectExpr("id", "map('a', id) AS m", "id % 2 = 0 AS even", "array(id) AS ids")
    orders = [[row["id"] for row in in_drawn_order(rows, seed).collect()] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == [*range(20)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"where": "id > 1000"}, "has no rows where id > 1000"),
        ({"second": "Say {text}"}, "both templates are the same text"),
        ({"second": "Say {txt}"}, "no column 'txt'"),
        ({"rows": 0}, "rows is 0"),
        ({"gold_column": "colour"}, "colour"),
    ],
)
def test_what_cannot_be_compared_is_refused_without_an_engine(
    compared: Compared, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(JobError, match=reason):
        compared(**changes)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("in.parquet", "--model", "m"), "two templates are compared, and 0 are given"),
        (("in.parquet", "--model", "m", *("--template", "{a}") * 3), "and 3 are given; give two"),
        (("--model", "m", "--template", "{a}", "--template", "{b}"), "no input is named"),
        (("in.parquet", "--template", "{a}", "--template", "{b}"), "no model is named"),
    ],
)
def test_a_wrong_call_ends_with_2_and_says_why(arguments: tuple[str, ...], reason: str) -> None:
    result = CliRunner().invoke(compare_app, [*arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())


def test_help_names_what_is_compared_and_leaves_out_what_is_about_the_output() -> None:
    shown = CliRunner().invoke(compare_app, ["--help"], env={"COLUMNS": "80"}).output.split()
    assert {"--rows", "--template", "--draw-seed", "--page", "--gold-column", "--price-per-hour"} <= set(
        shown
    )
    assert not {"--output", "--incremental", "--prompt-column"} & set(shown)


@pytest.mark.long  # a process
def test_the_command_compares_on_this_machine_and_leaves_a_page_and_no_process(
    table: str, own_python: str, tmp_path: Path
) -> None:
    arguments = [
        *(BIN / "pipemax", "compare", "--input", table, "--output", tmp_path / "out", "--model", "fake"),
        *("--template", r"Say\n{text}", "--template", "Shout {text}", "--engine-python", own_python),
        *("--rows", "5", "--commit-every", "often", "--id-columns", "id", "--ask", "kind=Which?"),
    ]
    environment = os.environ | {"PYSPARK_SUBMIT_ARGS": f"{SMALL_SPARK} pyspark-shell"}
    done = subprocess.run(
        arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ignored  --output, --commit-every:" in done.stdout
    assert re.search(r"^Template A +'Say\\n\{text\}'$", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^ *\d+ A +reply to Say word \d+Which\?$", done.stdout, re.MULTILINE)) >= 4
    assert f"Page               {tmp_path / 'compare.html'}" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"in.parquet", "artifacts", "compare.html"}
    assert not servers_of(own_python)
