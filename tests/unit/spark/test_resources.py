"""Which GPUs an engine is given, by whoever knows of its executor's: file, environment, script, nobody."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipemax_spark.executor.resources import gpu_environment


@pytest.fixture
def start_executor(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """A process whose command line is that of an executor; its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> int:
        command = ["sh", "-c", "echo ready; read line", "executor", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # before this its command line may still be empty
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def resources_file(directory: Path, *addresses: str) -> str:
    allocation = {"id": {"componentName": "spark.executor", "resourceName": "gpu"}, "addresses": addresses}
    path = directory / "resource-executor.json"
    path.write_text(json.dumps([allocation]))
    return str(path)


def discovery_script(directory: Path, text: str = '{"name": "gpu", "addresses": ["2", "3"]}') -> str:
    script = directory / "discover"
    script.write_text(f"#!/bin/sh\necho '{text}'\n")
    script.chmod(0o755)
    return str(script)


def test_the_worker_s_file_goes_before_the_script(
    start_executor: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    pid = start_executor("--resourcesFile", resources_file(tmp_path, "4", "5"))
    environment = gpu_environment(pid, discovery_script(tmp_path))
    assert environment == {"CUDA_VISIBLE_DEVICES": "4,5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_the_container_s_devices_go_before_the_script(
    start_executor: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert gpu_environment(start_executor(), discovery_script(tmp_path)) == {}


def test_the_script_tells_where_nothing_else_does(start_executor: Callable[..., int], tmp_path: Path) -> None:
    environment = gpu_environment(start_executor(), discovery_script(tmp_path))
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize("text", ["no JSON", '{"name": "gpu"}'])
def test_an_unusable_discovery_script_costs_a_warning(
    start_executor: Callable[..., int], tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert gpu_environment(start_executor(), discovery_script(tmp_path, text)) == {}
    assert "the engine takes every GPU it sees" in caplog.text


def test_without_any_source_of_gpus_the_engine_takes_all_visible_ones(
    start_executor: Callable[..., int],
) -> None:
    assert gpu_environment(start_executor()) == {}
