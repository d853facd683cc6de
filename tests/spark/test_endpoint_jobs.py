"""A model that an endpoint serves: the job, the DataFrame function, the UDF and the SQL functions over it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from pipemax.wire import GenerationSpec
from pipemax_spark import annotate, annotate_table, pipemax_udf, register_functions
from pipemax_spark.errors import JobError, failure_text
from pipemax_spark.functions.ready import Kind
from pipemax_spark.job.trial import TrialOptions
from pipemax_spark.job.tune import run_tuning
from tests.endpoints.openai_server import OPENAI, OpenAIServer, openai_server
from tests.spark.conftest import Jobs, words

WORDS = [f"said: Say word {number}" for number in range(40)]


@pytest.fixture(scope="module")
def served() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


@pytest.fixture
def job(run: Jobs, served: OpenAIServer) -> Jobs:
    """A job over 40 rows, in this environment: a fake engine has no part in it."""
    run.defaults = replace(run.defaults, engine=served.config(), engine_python=None)
    run.write_input(words(0, 40))
    return run


def test_annotate_table_annotates_each_row_once_and_its_second_call_asks_nothing(
    job: Jobs, served: OpenAIServer, spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {name: value for name, value in served.config().items() if name != "model_revision"}
    call = {
        "input": job.defaults.input,
        "output": job.output,
        "template": "Say {text}",
        "mlflow_experiment": "",
        "log_dir": job.directory / "logs",
    }
    with pytest.raises(JobError, match=r"model_revision is missing: a server's model can change unseen"):
        annotate_table(spark, engine=engine, **call)
    summary = annotate_table(spark, engine=engine, unpinned_model=True, **call)
    assert (summary.rows_out, summary.rows_error) == (40, 0)
    printed = capsys.readouterr().out
    assert "demo at 1 endpoint, prompt and output at most 512 tokens" in printed
    assert "Policy" not in printed, "the endpoint schedules by itself"
    assert sorted(row["annotation"]["text"] for row in job.rows()) == sorted(WORDS)
    asked = len(served.bodies)
    assert annotate_table(spark, engine=engine, unpinned_model=True, **call).rows_out == 0
    assert len(served.bodies) == asked + 2, "only the check asks"


def test_a_dry_run_counts_tokens_by_the_server_and_starts_nothing(job: Jobs) -> None:
    job.dry_run()
    assert "counted over all rows" in job.printed
    assert "estimated" not in job.printed
    assert "as the model would see it:\n\nSay word " in job.printed


@pytest.mark.long  # as the dry run above
def test_a_dry_run_says_what_is_estimated_and_what_is_unknown(job: Jobs) -> None:
    with openai_server(can=OPENAI, facts={}) as server:
        job.dry_run(engine=server.config())
    assert "estimated from characters, because the endpoint counts no tokens" in job.printed
    assert "demo at 1 endpoint, which does not say how many tokens prompt and output may have" in job.printed
    assert "as it would be sent:\n\nuser: Say word " in job.printed


def test_what_the_endpoint_cannot_do_is_said_before_the_output_is_claimed(job: Jobs) -> None:
    with (
        openai_server(can=frozenset({"chat"}), facts={}) as server,
        pytest.raises(JobError, match="choice is given, and this server follows none"),
    ):
        job.run(engine=server.config(), generation=GenerationSpec(choice=("bug", "praise")))
    assert not (job.directory / "out").exists()


@pytest.mark.long  # tests/serve has the refusals
def test_a_refusal_in_mid_run_ends_the_job_by_name_and_the_next_run_asks_for_the_rest(job: Jobs) -> None:
    def serves_another(path: str, body: dict[str, Any]) -> web.Response | None:
        if "word" in str(body) and len(server.bodies) > 12:
            server.answers_as = "demo-2026-12"
        return None

    with openai_server(early=serves_another) as server:
        engine = server.config(max_concurrency=1)
        with pytest.raises(Exception, match="answered as model") as caught:
            job.run(engine=engine)
        text = failure_text(caught.value)
        assert text.startswith("endpoint_refused: endpoint http://127.0.0.1:")
        assert "answered as model 'demo-2026-12', and the run began with 'demo'" in text
        server.answers_as, server.early = None, lambda path, body: None
        asked = len(server.bodies)
        job.run(engine=engine)
        asked_for_rest = len(server.bodies) - asked - 2
    assert sorted(row["annotation"]["text"] for row in job.rows()) == sorted(WORDS)
    assert asked_for_rest <= 40 - 11, "what was answered before is kept"


def test_a_dataframe_is_annotated_with_choices(spark: Any, served: OpenAIServer) -> None:
    frame = spark.createDataFrame(words(0, 5), "id long, text string")
    rows = annotate(frame, engine=served.config(), template="Say {text}", choice=["bug", "praise"]).collect()
    assert [row["annotation"]["text"] for row in rows] == ["bug"] * 5


def test_a_udf_answers_in_the_order_of_its_input(spark: Any, served: OpenAIServer) -> None:
    ask = pipemax_udf(engine=served.config(), max_tokens=16)
    frame = spark.createDataFrame(words(0, 20), "id long, text string")
    texts = [row[0] for row in frame.select(ask("text").text).collect()]
    assert texts == [f"said: word {number}" for number in range(20)]


@pytest.mark.long  # servers of two kinds
@pytest.mark.parametrize("fields", [{}, {"can": OPENAI, "facts": {}}])
def test_the_ready_functions_ask_as_the_server_can(spark: Any, fields: dict[str, Any]) -> None:
    with openai_server(**fields) as server:
        register_functions(spark, engine=server.config())
        frame = spark.createDataFrame([(0, "fine")], "id long, text string")
        frame.createOrReplaceTempView("texts")
        query = "SELECT pm_classify(text, array('bug', 'praise')), pm_extract(text, array('city')) FROM texts"
        label, place = spark.sql(query).head()
    for kind in Kind:
        spark.sql(f"DROP TEMPORARY FUNCTION IF EXISTS {kind.value}")
    assert label == "bug"
    assert place == '{"city": "text"}'


def test_settings_of_an_engine_are_not_tuned_at_an_endpoint(job: Jobs, spark: Any) -> None:
    with job.terminal() as terminal, pytest.raises(JobError, match="whose server decides them"):
        run_tuning(spark, TrialOptions(job=job.defaults), terminal)
