"""``conf/databricks``: the bundle against the field names of Databricks' own SDK, and against this package."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from databricks.sdk.service.compute import ClusterSpec
from databricks.sdk.service.jobs import JobSettings

from pipemax.wire import PACKAGE_VERSION
from pipemax_spark.cli import app

REPOSITORY = Path(__file__).resolve().parents[3]
BUNDLE = REPOSITORY / "conf" / "databricks" / "databricks.yml"
TOP_LEVEL = {"bundle", "variables", "resources", "targets"}


@pytest.fixture(scope="module")
def bundle() -> dict[str, Any]:
    return yaml.safe_load(BUNDLE.read_text())


@pytest.fixture(scope="module")
def job(bundle: dict[str, Any]) -> dict[str, Any]:
    return bundle["resources"]["jobs"]["annotate"]


def test_databricks_jobs_have_every_field_with_such_a_value(job: dict[str, Any]) -> None:
    # The SDK drops what it does not know, and enum values that do not exist.
    assert JobSettings.from_dict(job).as_dict() == job
    (cluster,) = job["job_clusters"]
    assert ClusterSpec.from_dict(cluster["new_cluster"]).as_dict() == cluster["new_cluster"]


def test_the_sdk_notices_an_unknown_field(job: dict[str, Any]) -> None:
    wrong = {**job, "max_concurrent_run": 1}
    assert JobSettings.from_dict(wrong).as_dict() != wrong


def test_every_variable_is_declared_and_described(bundle: dict[str, Any]) -> None:
    assert set(bundle) == TOP_LEVEL
    used = set(re.findall(r"\$\{var\.(\w+)\}", BUNDLE.read_text()))
    assert used == set(bundle["variables"])
    assert all({"description", "default"} == set(variable) for variable in bundle["variables"].values())


def test_the_task_calls_this_package_with_options_that_it_has(job: dict[str, Any]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (task,) = job["tasks"]
    wheel_task = task["python_wheel_task"]
    assert wheel_task["package_name"] == project["name"]
    assert wheel_task["entry_point"] in project["scripts"]
    wheel = f"{project['name'].replace('-', '_')}-{PACKAGE_VERSION}-py3-none-any.whl"
    assert [library["whl"].rpartition("/")[2] for library in task["libraries"]] == [wheel]
    command = typer.main.get_command(app)
    options = command.make_context("pipemax-annotate", list(wheel_task["parameters"])).params
    assert options["id_columns"] == "ticket_id"
    assert options["template"] == r"Summarise in one sentence:\n{body}"


def test_the_databricks_job_runs_nightly_on_dedicated_gpu_compute_one_run_at_a_time(
    job: dict[str, Any],
) -> None:
    cluster = job["job_clusters"][0]["new_cluster"]
    assert "-gpu-ml-" in cluster["spark_version"]
    assert cluster["data_security_mode"] == "DATA_SECURITY_MODE_DEDICATED"
    assert cluster["spark_env_vars"]["HF_TOKEN"].startswith("{{secrets/"), (
        "a secret by its name, not its value"
    )
    assert (len(job["schedule"]["quartz_cron_expression"].split()), job["max_concurrent_runs"]) == (6, 1)


def test_the_driver_which_runs_no_engine_has_a_smaller_gpu_node_than_the_workers(
    bundle: dict[str, Any], job: dict[str, Any]
) -> None:
    cluster = job["job_clusters"][0]["new_cluster"]
    assert cluster["node_type_id"] == "${var.node_type}"
    assert cluster["driver_node_type_id"] == "${var.driver_node_type}"
    sizes = {
        name: bundle["variables"][name]["default"].split(".") for name in ("node_type", "driver_node_type")
    }
    (worker_family, worker_size), (driver_family, driver_size) = sizes.values()
    assert worker_family == driver_family == "g6", "Databricks takes GPU nodes only"
    assert int(driver_size.removesuffix("xlarge")) < int(worker_size.removesuffix("xlarge"))


def test_the_init_script_says_which_archive_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", BUNDLE.parent / "unpack_engine.sh"],
        env={"PATH": "/usr/bin:/bin", "PIPEMAX_ENGINE_ARCHIVE": str(tmp_path / "engine.tar")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{tmp_path / 'engine.tar'} is not there" in done.stderr
