"""``conf/spark``: each file is one that Spark can read, and says of executors and engines what it must."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyspark
import pytest
import yaml
from py4j.protocol import Py4JJavaError
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

from pipemax_spark.spark.session import DELTA_PACKAGES

CONF = Path(__file__).resolve().parents[2] / "conf" / "spark"
DEPLOY = CONF.parents[1] / "deploy"
FILES = sorted(CONF.glob("*.conf"))
ON_GPUS = [file for file in FILES if file.stem != "local"]
KUBERNETES, YARN = (
    "org.apache.spark.deploy.k8s.Config$",
    "org.apache.spark.deploy.yarn.config.package$",
)
"""Spark registers its settings when these are loaded."""
FAMILIES = re.compile(
    r"spark\.master|spark\.(executor|task)\.resource\.gpu\.(amount|vendor|discoveryScript)"
    r"|spark\.kubernetes\.executor\.(secretKeyRef\.\w+"
    r"|volumes\.persistentVolumeClaim\.\w+\.(options\.claimName|mount\.(path|readOnly)))"
)
"""Names that Spark composes, so that no list has them."""


def settings_of(file: Path) -> dict[str, str]:
    lines = [line.strip() for line in file.read_text().splitlines()]
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    names = [pair[0] for pair in pairs]
    assert len(set(names)) == len(names), f"{file.name} sets something twice"
    return dict(pairs)


def default_of(dockerfile: str, argument: str) -> str:
    lines = (DEPLOY / dockerfile).read_text().splitlines()
    (value,) = (line.partition("=")[2] for line in lines if line.startswith(f"ARG {argument}="))
    return value


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_spark_knows_every_setting_and_can_read_its_value(spark: Any, file: Path) -> None:
    jvm = spark._jvm
    for registry in (KUBERNETES, YARN):
        jvm.java.lang.Class.forName(registry)
    for name, value in settings_of(file).items():
        entry = jvm.org.apache.spark.internal.config.ConfigEntry.findEntry(name)
        assert entry is not None or FAMILIES.fullmatch(name), f"{file.name}: Spark has no setting {name}"
        if entry is not None:
            entry.valueConverter().apply(value)


def test_a_wrong_value_of_a_spark_setting_is_detected(spark: Any) -> None:
    entry = spark._jvm.org.apache.spark.internal.config.ConfigEntry.findEntry("spark.executor.memory")
    with pytest.raises(Exception, match="sixteen"):
        entry.valueConverter().apply("sixteen")


@pytest.mark.parametrize("file", ON_GPUS, ids=lambda file: file.stem)
def test_an_executor_has_gpus_and_its_tasks_are_limited_by_cores_only(file: Path) -> None:
    settings = settings_of(file)
    assert int(settings["spark.executor.resource.gpu.amount"]) >= 1
    assert int(settings["spark.executor.cores"]) >= 2
    assert not settings.keys() & {"spark.task.cpus", "spark.task.resource.gpu.amount"}
    assert settings["spark.speculation"] == settings["spark.dynamicAllocation.enabled"] == "false"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_spark_takes_a_profile_of_tasks_only_for_every_cluster(spark: Any, file: Path) -> None:
    jvm = spark._jvm.org.apache.spark
    conf = jvm.SparkConf(False)
    for name, value in settings_of(file).items():
        conf.set(name, value)
    manager = jvm.resource.ResourceProfileManager(conf, jvm.scheduler.LiveListenerBus(conf))
    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build
    refusal = pytest.raises(Py4JJavaError, match="TaskResourceProfiles are only supported for")
    with nullcontext() if file in ON_GPUS else refusal:
        assert manager.isSupported(profile._java_resource_profile)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_delta_fits_the_spark_of_the_lock_and_no_engine_is_kept_from_starting(file: Path) -> None:
    settings = settings_of(file)
    packages = settings.get("spark.jars.packages")
    if file == CONF / "kubernetes.conf":  # its image has the jars
        assert packages is None
        packages = default_of("spark.Dockerfile", "DELTA_PACKAGE")
    assert packages == DELTA_PACKAGES["4.2"]
    assert "spark.executor.pyspark.memory" not in settings


def test_the_images_have_what_the_settings_of_kubernetes_name() -> None:
    dockerfile, conf = (DEPLOY / "spark.Dockerfile").read_text(), (CONF / "kubernetes.conf").read_text()
    assert f"apache/spark:{pyspark.__version__}-scala2.13-java17-ubuntu" == default_of(
        "spark.Dockerfile", "SPARK_IMAGE"
    )
    assert "local:///opt/pipemax/jobs/annotate.py" in conf
    assert "COPY jobs/annotate.py /opt/pipemax/jobs/" in dockerfile
    assert "--engine-python /opt/pipemax/engine/bin/python" in conf
    assert "-m venv /opt/pipemax/engine" in (DEPLOY / "engine.Dockerfile").read_text()
    for name in ("engine.Dockerfile", "spark.Dockerfile"):
        users = [line for line in (DEPLOY / name).read_text().splitlines() if line.startswith("USER ")]
        assert users[-1] == "USER 185:185"


def test_the_pod_template_is_where_the_settings_say_and_has_shared_memory() -> None:
    name = settings_of(CONF / "kubernetes.conf")["spark.kubernetes.executor.podTemplateFile"]
    template = yaml.safe_load((CONF.parents[1] / name).read_text())
    (container,) = template["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (volume,) = template["spec"]["volumes"]
    assert (mounts[volume["name"]], volume["emptyDir"]["medium"]) == ("/dev/shm", "Memory")


@pytest.mark.long  # a process
def test_spark_asks_kubernetes_for_a_pod_that_an_engine_fits_in() -> None:
    settings = settings_of(CONF / "kubernetes.conf")
    told = subprocess.run(
        [sys.executable, "-m", "tests.spark.executor_pod"],
        cwd=CONF.parents[1],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pod = json.loads(told)
    spec = pod["spec"]
    (container,) = spec["containers"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert limits["nvidia.com/gpu"] == settings["spark.executor.resource.gpu.amount"]
    # The heap and the overhead, in which all of the engine's memory has to be.
    assert limits["memory"] == requests["memory"] == f"{(16 + 448) * 1024}Mi"
    assert requests["cpu"] == settings["spark.executor.cores"]
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    models = volumes[mounted["/models"]]["persistentVolumeClaim"]
    assert (models["claimName"], models["readOnly"]) == ("models", True)
    (token,) = (variable for variable in container["env"] if variable["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["name"] == "hub"
    (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    selected = rule["labelSelector"]["matchLabels"].items()
    assert selected <= pod["metadata"]["labels"].items(), "a second executor next to it"
