"""``deploy/databricks``: the bundle against the field names of Databricks' own SDK, and against this package."""

import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
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
BUNDLE = REPOSITORY / "deploy" / "databricks" / "databricks.yml"
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


def unpack(**variables: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", BUNDLE.parent / "unpack_engine.sh"],
        env={"PATH": "/usr/bin:/bin", **{name: str(path) for name, path in variables.items()}},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_init_script_says_which_file_is_missing(tmp_path: Path) -> None:
    archive, wheel = tmp_path / "engine.tar", tmp_path / "pipemax.whl"
    done = unpack(PIPEMAX_ENGINE_ARCHIVE=archive, PIPEMAX_WHEEL=wheel)
    assert (done.returncode, f"{archive} is not there" in done.stderr) == (1, True)
    archive.touch()
    done = unpack(PIPEMAX_ENGINE_ARCHIVE=archive, PIPEMAX_WHEEL=wheel)
    assert (done.returncode, f"{wheel} is not there" in done.stderr) == (1, True)
    assert "PIPEMAX_WHEEL: name the wheel" in unpack(PIPEMAX_ENGINE_ARCHIVE=archive).stderr


def test_the_wheel_that_the_nodes_install_is_the_one_of_the_task(job: dict[str, Any]) -> None:
    variables = job["job_clusters"][0]["new_cluster"]["spark_env_vars"]
    (task,) = job["tasks"]
    assert [library["whl"] for library in task["libraries"]] == [variables["PIPEMAX_WHEEL"]]


@pytest.mark.long
def test_an_unpacked_engine_has_the_wheel_of_the_volume(tmp_path: Path) -> None:
    packed, unpacked, archive = tmp_path / "packed", tmp_path / "unpacked", tmp_path / "engine.tar"
    venv.create(packed, with_pip=True)
    # What the archive has of requirements/gpu.lock is here what this environment has.
    (site_packages,) = packed.glob("lib/python3.*/site-packages")
    (site_packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(["tar", "--create", "--file", archive, "--directory", packed, "."], check=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    done = unpack(PIPEMAX_ENGINE_ARCHIVE=archive, PIPEMAX_WHEEL=wheel, PIPEMAX_ENGINE_DIRECTORY=unpacked)
    assert done.returncode == 0, done.stderr
    (installed,) = unpacked.glob("lib/python3.*/site-packages/pipemax/serve/main.py")
    assert installed.read_text() == (REPOSITORY / "engine/pipemax/serve/main.py").read_text()
