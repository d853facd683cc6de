"""The one command that has those of the job and of the engine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipemax_spark.cli import command, pipemax
from pipemax_spark.errors import JobError

INSTALLED = Path(sys.executable).with_name("pipemax")


def test_the_command_has_the_job_and_what_the_engine_has() -> None:
    shown = CliRunner().invoke(command(), ["--help"], env={"COLUMNS": "120"}).output
    names = set(re.findall(r"(?m)^  ([a-z-]+) ", shown))
    assert {"annotate", "try", "compare", "plan-capacity", "check-node", "trace"} <= names
    assert "Before you rent a node" in shown


@pytest.mark.parametrize("name", ["annotate", "try", "tune", "compare"])
def test_the_commands_of_spark_s_side_load_nothing_of_the_engine(name: str) -> None:
    loads = (
        f"import sys; sys.argv = ['pipemax', '{name}', '--version']\n"
        "from pipemax_spark.cli import pipemax\n"
        "pipemax()\n"
        "assert not {'pydantic', 'pipemax.cli'} & set(sys.modules), 'loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["pipemax"]), done.stderr


def test_completion_is_installed_for_the_whole_command_only() -> None:
    """A shell function for ``pipemax annotate`` would be one that no shell takes."""
    shown = {
        words: subprocess.run([INSTALLED, *words, "--help"], capture_output=True, text=True).stdout
        for words in ((), ("annotate",), ("try",), ("tune",), ("compare",))
    }
    assert [words for words, text in shown.items() if "--install-completion" in text] == [()]
    assert all("--model" in text for words, text in shown.items() if words)


def test_the_job_s_usage_names_the_command_as_it_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipemax", "annotate", "--nothing"])
    with pytest.raises(SystemExit):
        pipemax()
    assert "Usage: pipemax annotate" in capsys.readouterr().err


def test_the_command_is_there_without_the_engine_s_packages() -> None:
    without = (
        "import sys; sys.modules.update(pydantic=None, torch=None)\n"
        "from pipemax_spark.cli import command\n"
        "import typer.testing\n"
        "print(typer.testing.CliRunner().invoke(command(), ['--help']).output)\n"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=120)
    assert "annotate" in done.stdout, done.stderr
    assert "plan-capacity" in done.stdout


def test_the_job_is_named_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    printed = []

    def no_spark(*_: object, **__: object) -> None:
        printed.append(capsys.readouterr().out)
        raise JobError("no Spark here")

    monkeypatch.setattr("pipemax_spark.spark.session.get_session", no_spark)
    output = tmp_path / "out"
    arguments = [
        "--input",
        "texts",
        "--output",
        str(output),
        "--id-columns",
        "id",
        "--template",
        "{text}",
        "--model",
        "m",
    ]
    monkeypatch.setattr(sys, "argv", ["pipemax", "annotate", *arguments, "--log-dir", str(tmp_path / "logs")])
    with pytest.raises(SystemExit, match="2"):
        pipemax()
    assert printed == [f"Job      texts to {output}\n"]
