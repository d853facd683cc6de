"""Jobs from Airflow and dbt, each in an environment of its own that ``make test-versions`` makes."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipemax_spark import transform
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs
from tests.spark.processes import SMALL_SPARK

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS = REPOSITORY / ".venv-versions"
AIRFLOW, DBT = ENVIRONMENTS / "airflow" / "bin", ENVIRONMENTS / "dbt" / "bin"

pytestmark = pytest.mark.long  # environments of their own

KILLED_ONCE = """#!/bin/sh
if [ ! -e '{marker}' ]; then
  touch '{marker}'
  "$@" &
  until grep -qs '"add"' '{output}'/_delta_log/*.json; do sleep 0.1; done
  kill -9 0
fi
exec "$@"
"""


@pytest.fixture
def airflow(tmp_path: Path) -> dict[str, str]:
    """The variables of an Airflow with a database of its own."""
    if not AIRFLOW.exists():
        pytest.skip(f"{AIRFLOW} is made by make test-versions")
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "PYTHONPATH": str(REPOSITORY / "deploy" / "airflow"),
        "PYSPARK_SUBMIT_ARGS": f"{SMALL_SPARK} pyspark-shell",
    }
    (tmp_path / "dags").mkdir()
    subprocess.run([AIRFLOW / "airflow", "db", "migrate"], env=environ, check=True, capture_output=True)
    return environ


def in_airflow(environ: dict[str, str], script: Path, *arguments: str) -> None:
    done = subprocess.run(
        [AIRFLOW / "python", script, *arguments], env=environ, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]


def test_airflow_tries_a_killed_job_again_which_does_the_rest_and_hands_its_summary_on(
    run: Jobs, airflow: dict[str, str]
) -> None:
    rows = [(number, f"word {number}") for number in range(1_500)]
    run.write_input(rows)
    options, summary = run.defaults, run.directory / "from_xcom.json"
    engine = run.directory / "engine.yaml"
    engine.write_text("model: fake\nmax_num_seqs: 16\nvllm: {fake: {tokens_per_s: 1500}}\n")
    wrapper = run.directory / "killed_once"
    wrapper.write_text(KILLED_ONCE.format(marker=run.directory / "marker", output=options.output))
    command = [
        *("sh", str(wrapper), "env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"),
        *(sys.executable, str(REPOSITORY / "jobs" / "annotate.py")),
        *("--input", options.input, "--output", options.output, "--template", options.source.template or ""),
        *("--engine", str(engine), "--engine-python", options.engine_python or "", "--max-tokens", "16"),
        *("--commit-every", "2s", "--log-dir", str(options.log_dir), "--mlflow-experiment", ""),
    ]
    given = {"TRIED_COMMAND": json.dumps(command), "TRIED_SUMMARY": str(summary)}
    script = shutil.copy(
        REPOSITORY / "tests/spark/airflow_try.py", Path(airflow["AIRFLOW__CORE__DAGS_FOLDER"])
    )
    in_airflow(airflow | given, script, "job")
    done = run.rows()
    assert Counter((row["id"], row["text"]) for row in done) == Counter(rows)
    assert len({row["annotation"]["run_id"] for row in done}) == 2
    facts = json.loads(summary.read_text())
    assert (facts["ended_by"], facts["complete"]) == ("done", True)
    assert 0 < facts["rows_out"] < 1_500


def test_airflow_tries_again_only_what_another_try_can_mend(airflow: dict[str, str]) -> None:
    in_airflow(airflow, REPOSITORY / "tests/spark/airflow_try.py", "ends")
    in_airflow(airflow, REPOSITORY / "deploy" / "airflow" / "annotate_dag.py")


def test_dbt_reads_the_example_project_and_its_model_annotates_new_rows_only(
    spark: Any, engine_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not DBT.exists():
        pytest.skip(f"{DBT} is made by make test-versions")
    project = REPOSITORY / "deploy" / "dbt"
    variables = {"HOST": "https://example.cloud.databricks.com", "TOKEN": "none", "HTTP_PATH": "/sql/1"}
    environ = {
        "PATH": os.environ["PATH"],
        "DBT_SEND_ANONYMOUS_USAGE_STATS": "false",
        **{f"DATABRICKS_{name}": value for name, value in variables.items()},
    }
    target = [
        "--profiles-dir",
        project,
        "--project-dir",
        project,
        "--target-path",
        tmp_path,
        "--log-path",
        tmp_path,
    ]
    parsed = subprocess.run(
        [DBT / "dbt", "parse", *target], env=environ, check=False, capture_output=True, text=True
    )
    assert parsed.returncode == 0, parsed.stdout
    assert "deprecat" not in parsed.stdout.split("Registered adapter")[-1].lower(), parsed.stdout
    (model,) = json.loads((tmp_path / "manifest.json").read_text())["nodes"].values()
    assert (model["language"], model["config"]["unique_key"]) == ("python", "ticket_id")
    assert model["depends_on"]["nodes"] == ["source.tickets.warehouse.tickets"]

    # dbt runs a model on Databricks only: here its function runs as dbt would call it.
    names: dict[str, Any] = {}
    exec(model["raw_code"], names)
    real = transform.annotate

    def with_fake_engine(rows: Any, **arguments: Any) -> Any:
        return real(rows, **{**arguments, "engine": fake_config(), "engine_python": engine_python})

    monkeypatch.setattr("pipemax_spark.annotate", with_fake_engine)
    spark.createDataFrame(
        [(n, f"body {n}") for n in range(5)], "ticket_id long, body string"
    ).createOrReplaceTempView("tickets")
    first = names["model"](_Dbt(spark, is_incremental=False), spark)
    first.where("ticket_id < 3").localCheckpoint().createOrReplaceTempView("tickets_labelled")
    second = names["model"](_Dbt(spark, is_incremental=True), spark).collect()
    assert sorted(row["ticket_id"] for row in second) == [3, 4]
    assert all(row["annotation"]["text"] and row["annotation"]["error"] is None for row in second)


class _Dbt:
    """What dbt gives to a model."""

    this = "tickets_labelled"
    config = staticmethod(SimpleNamespace)

    def __init__(self, spark: Any, *, is_incremental: bool) -> None:
        self._spark = spark
        self.is_incremental = is_incremental

    def source(self, _schema: str, name: str) -> Any:
        return self._spark.table(name)
