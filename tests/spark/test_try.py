"""``pipemax try``: the first rows under one prompt after the other, by one engine that ends with it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyspark
import pytest
from typer.testing import CliRunner

from pipemax.wire import GenerationSpec
from pipemax_spark.cli import try_app
from pipemax_spark.errors import JobError
from pipemax_spark.executor.questions import Question
from pipemax_spark.job.arguments import OPTIONS
from pipemax_spark.job.trial import UNUSED, TrialOptions, run_trial
from pipemax_spark.request.prompts import PromptSource
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import expected_text, fake_config
from tests.spark.conftest import Jobs
from tests.spark.processes import SMALL_SPARK, servers_of
from tests.waiting import wait_until

BIN = Path(sys.executable).parent
Trials = Callable[..., str]


@pytest.fixture(scope="module")
def own_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An engine's Python of this file: no other test's engines count as left behind."""
    return write_engine_python(tmp_path_factory.mktemp("engine") / "python")


@pytest.fixture
def table(spark: Any, tmp_path: Path) -> str:
    path = str(tmp_path / "in.parquet")
    rows = [(i, None if i == 2 else f"word {i}", i * 10) for i in range(60)]
    spark.createDataFrame(rows, "id long, text string, size long").coalesce(1).write.parquet(path)
    return path


@pytest.fixture
def tried(run: Jobs, table: str, own_python: str) -> Trials:
    """Runs a trial, and returns what it printed; its engine has ended by then, whatever became of the trial."""

    def run_with(*templates: str, rows: int = 4, once: bool = False, **changes: Any) -> str:
        defaults = {"input": table, "output": "", "engine_python": own_python}
        options = TrialOptions(job=replace(run.defaults, **(defaults | changes)), rows=rows, once=once)
        left = iter(templates)
        try:
            with run.terminal() as terminal:
                run_trial(run.spark, options, terminal, lambda: next(left, None))
        finally:
            assert not servers_of(own_python), "no engine stays"
        return run.printed

    return run_with


def answers(printed: str) -> list[str]:
    return re.findall(r"^ +\d+ answer  (.*)$", printed, re.MULTILINE)


def said(prefix: str, words: Iterable[int]) -> list[str]:
    return [expected_text(f"{prefix} word {i}") for i in words]


def test_the_first_rows_are_shown_with_answer_tokens_seconds_and_error(tried: Trials) -> None:
    printed = tried(once=True)
    assert answers(printed) == said("Say", (0, 1, 3))
    assert "   1 prompt  Say word 0\n" in printed
    assert re.search(r"^ +1 took +3 \+ \d+ tokens, \d+\.\d s$", printed, re.MULTILINE)
    assert re.search(r"^ +3 error +empty_prompt: .*column of its template is: text$", printed, re.MULTILINE)
    assert "3 of 4 rows without an error, 1 empty_prompt;" in printed


def test_templates_are_answered_by_one_engine_and_a_wrong_one_is_explained(tried: Trials, table: str) -> None:
    wrong = PromptSource(template="Say {txt}")
    printed = tried("Say {text}", "{text", "Shout {size}: {text}", source=wrong, where="id < 2")
    assert printed.count("loaded in") == 1
    assert answers(printed) == [
        *said("Say", (0, 1)),
        expected_text("Shout 0: word 0"),
        expected_text("Shout 10: word 1"),
    ]
    assert "no column 'txt'. Did you mean 'text'?" in printed
    assert "write {{ and }} for braces that are text" in printed
    assert [path.name for path in Path(table).parent.iterdir() if path.name != "in.parquet"] == ["logs"]


@pytest.mark.long  # an engine of its own
def test_a_template_takes_the_place_of_a_prompt_column_and_questions_stay(tried: Trials) -> None:
    ask = tuple(
        Question(name=name, template=f"{name}?", generation=GenerationSpec(max_tokens=16))
        for name in ("topic", "tone")
    )
    printed = tried("Read {text}. ", source=PromptSource(prompt_column="text"), ask=ask, rows=1)
    assert f"   1 topic   {expected_text('word 0' + chr(10) * 2 + 'topic?')}" in printed
    assert f"   1 tone    {expected_text('Read word 0. tone?')}" in printed


@pytest.mark.long  # an engine of its own
def test_lines_of_text_files_that_are_no_rows_are_passed_over(tried: Trials, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "word 0"}\n{"text": \n{"text": "word 1"}\n')
    assert answers(tried(input=str(path), input_format="json", once=True)) == said("Say", (0, 1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"where": "id > 1000"}, "has no rows where id > 1000"),
        ({"no_sample": True}, "--no-sample shows no rows"),
        ({"source": PromptSource(template="{txt}"), "once": True}, "no column 'txt'"),
        ({"engine": {"model": "fake", "polcy": 1}}, "unknown field 'polcy'"),
    ],
)
def test_what_cannot_be_tried_is_refused_without_an_engine(
    tried: Trials, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(JobError, match=reason):
        tried(**changes)


@pytest.mark.long  # an engine's start
def test_an_engine_that_does_not_start_ends_the_trial_with_its_reason(tried: Trials) -> None:
    with pytest.raises(Exception, match="no memory is left"):
        tried("Shout {text}", engine=fake_config(start_error="no memory is left"))


def test_the_command_takes_the_job_s_options_and_its_help_leaves_out_those_about_the_output() -> None:
    assert set(OPTIONS) >= UNUSED
    shown = CliRunner().invoke(try_app, ["--help"], env={"COLUMNS": "80"}).output.split()
    for option in ("--rows", "--once", "--template", "--where", "--engine-python", "--response-format"):
        assert option in shown
    for option in ("--output", "--incremental", "--no-sample", "--commit-every"):
        assert option not in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--model", "m"), "no input is named"),
        (("a.parquet", "--input", "b.parquet"), "the input is 'a.parquet', and --input is 'b.parquet'"),
        (("a.parquet", "--prompt-column", "text", "--rows", "0"), "Invalid value for '--rows'"),
        (("a.parquet", "--prompt-column", "text"), "no model is named"),
        (("a.parquet", "--model", "m"), "give exactly one of prompt-column, messages-column and template"),
    ],
)
def test_a_wrong_call_ends_with_2_and_says_why(arguments: tuple[str, ...], reason: str) -> None:
    result = CliRunner().invoke(try_app, [*arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())


@pytest.fixture
def command(table: str, own_python: str, tmp_path: Path) -> dict[str, Any]:
    """The command line of a job with ``try`` in place of ``annotate``, as ``subprocess`` takes it."""
    arguments = [
        *(BIN / "pipemax", "try", "--input", table, "--output", tmp_path / "out", "--id-columns", "id"),
        *("--template", "Say {text}", "--engine-python", own_python, "--rows", "2"),
        *("--commit-every", "often", "--summary", tmp_path / "summary.json", "--incremental"),
    ]
    return {
        "args": arguments,
        "cwd": tmp_path,
        "env": os.environ | {"PYSPARK_SUBMIT_ARGS": f"{SMALL_SPARK} pyspark-shell"},
        "text": True,
    }


@pytest.mark.long  # a process
def test_the_job_s_own_command_line_runs_on_this_machine_writes_nothing_and_leaves_no_process(
    command: dict[str, Any], own_python: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    command["args"] += ["--model", "fake"]
    conf = tmp_path_factory.mktemp("spark") / "conf"
    shutil.copytree(Path(pyspark.__file__).parent / "conf", conf)
    with (conf / "spark-defaults.conf").open("a") as file:
        file.write("\nspark.master spark://no.such.cluster:7077\n")
    command["env"]["SPARK_CONF_DIR"] = str(conf)
    done = subprocess.run(**command, input="\nShout {text}\n", capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert answers(done.stdout) == [*said("Say", (0, 1)), *said("Shout", (0, 1))]
    assert "Ignored  --output, --id-columns, --incremental, --commit-every, --summary:" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"in.parquet", "artifacts"}
    assert not servers_of(own_python)


@pytest.mark.long  # a process
def test_ctrl_c_while_rows_are_answered_ends_with_130_and_leaves_no_process(
    command: dict[str, Any], own_python: str, tmp_path: Path
) -> None:
    (held := tmp_path / "held").touch()
    config = fake_config(held_by=str(held), held_row_s=600.0)
    (tmp_path / "engine.json").write_text(json.dumps(config))  # YAML, too
    command["args"] += ["--engine", "engine.json"]
    command |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    printed = ""
    with subprocess.Popen(**command, start_new_session=True) as process:
        assert process.stdout is not None
        while "Engine   loaded" not in printed:
            printed += (line := process.stdout.readline())
            assert line, printed
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, error = process.communicate(timeout=300)
    assert process.returncode == 130, error
    assert "Interrupted." in error
    wait_until(lambda: not servers_of(own_python), 120, "the engine's end")
