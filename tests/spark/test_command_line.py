"""The command as people type it: what it says when something is missing, and where it can be run from."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipemax.wire import GenerationSpec
from pipemax_spark.cli import app, main
from pipemax_spark.options import JobOptions
from pipemax_spark.request.prompts import PromptSource
from tests.spark.processes import SMALL_SPARK, processes_with
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ARGUMENTS = ("--input", "in.parquet", "--output", "out", "--model", "m", "--prompt-column", "text")


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*ARGUMENTS, *arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--template", "{text}"), "give exactly one of prompt-column, messages-column and template"),
        (("--on-error", "ignore"), "on-error is 'ignore'; give 'row'"),
        (("--if-running", "wait"), "if-running is 'wait'; give 'fail'"),
        (("--expect-rows", "5"), "expect-rows is '5'; write it as MINIMUM:MAXIMUM"),
        (("--max-cost", "200"), "--max-cost needs --price-per-hour"),
        (("--done-by", "tomorrow"), "done-by is 'tomorrow'; write a time such as 06:00"),
        (("--commit-every", "often"), "commit-every is 'often'; write it as 15m, 900s or 1h"),
        (("--response-format", "/no/such/file"), "response-format '/no/such/file' cannot be read"),
        (
            ("--response-format", '{"type": "json_schema"}'),
            "response-format of type 'json_schema' has no json_schema",
        ),
        (("--engine", "/no/such/file"), "engine '/no/such/file' cannot be read: there is no such file"),
        (("--input-option", "sep"), "input-option 'sep' is not of the form KEY=VALUE"),
        (("--gold-column", "label"), "gold-column 'label' is compared with the property of that name"),
        (("--output", "in.parquet"), "input and output are both 'in.parquet'"),
        (("--incremental", "--limit", "3"), "--limit cannot be combined with --incremental"),
        (("--checkpoint", "c"), "--checkpoint says how --incremental reads its input"),
    ],
)
def test_a_wrong_call_ends_with_2_and_says_why(arguments: tuple[str, ...], told: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert f"Error: {told}" in output


@pytest.mark.long  # a process
def test_an_interrupt_while_the_jvm_starts_leaves_none_behind(tmp_path: Path) -> None:
    mark = f"spark.pipemax.test={tmp_path}"
    command = [
        BIN / "pipemax-annotate",
        "--output",
        tmp_path / "out",
        "--log-dir",
        tmp_path,
        *ARGUMENTS[:2],
        *ARGUMENTS[4:],
    ]
    environment = os.environ | {"PYSPARK_SUBMIT_ARGS": f"{SMALL_SPARK} --conf {mark} pyspark-shell"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: processes_with("\0org.apache.spark.deploy.SparkSubmit\0", mark), 120, "the JVM")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Interrupted" in said
    wait_until(lambda: not processes_with(mark), 120, "the end of the JVM")


def test_every_option_of_a_job_can_be_given_on_the_command_line() -> None:
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    shown = re.split(r"[\s,]+", output)
    assert "[default: 15m]" in output
    names = {each.name for kind in (JobOptions, PromptSource, GenerationSpec) for each in fields(kind)}
    assert {
        f"--{name.replace('_', '-')}"
        for name in names - {"source", "generation", "certified", "over_connect"}
    } <= {*shown}


@pytest.mark.long  # a process
def test_without_java_the_remedy_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [BIN / "pipemax-annotate", *ARGUMENTS],
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "Spark needs Java 17 or newer, and 'java' was not found; install one" in done.stderr


@pytest.mark.long  # three processes
def test_spark_submit_needs_no_environment_and_names_the_package_that_is_missing(tmp_path: Path) -> None:
    """From /, with an empty environment; and with settings that have no Delta."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "log4j2.properties").write_text("rootLogger.level = error\n")
    done = subprocess.run(
        [
            BIN / "spark-submit",
            REPOSITORY / "jobs" / "annotate.py",
            *ARGUMENTS,
            "--log-dir",
            tmp_path / "logs",
        ],
        cwd="/",
        env={
            "SPARK_CONF_DIR": str(tmp_path / "conf"),
            **{name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ},
            "PATH": "/usr/local/bin:/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    told = "start the job with: spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0"
    assert told in done.stdout  # where spark-submit sends what the driver says


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], None), (["--max-tokens", "0"], 2)])
def test_a_scheduler_s_call_returns_after_success(
    arguments: list[str], code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipemax-annotate", *arguments])
    if code is None:
        main()
    else:
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code
