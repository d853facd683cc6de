"""The README's install lines, as they stand there, in an empty environment, with the wheel of ``make wheel``."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## Install\n")[2].partition("\n## ")[0]
LINES = re.findall(r"^    (.*(?:pip install|make wheel).*)$", SECTION, re.MULTILINE)


def run(command: list[str] | str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that has the wheel where the README says, and the overrides."""
    directory = tmp_path_factory.mktemp("checkout")
    wheel = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory / "dist")]
    run(wheel, cwd=REPOSITORY)
    (directory / "requirements").symlink_to(REPOSITORY / "requirements")
    return directory


def environment(directory: Path) -> dict[str, str]:
    """Make an empty environment; return the variables of a shell in which it is active."""
    venv.create(directory, with_pip=True)
    path = f"{directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"  # uv is this one's
    return {**os.environ, "VIRTUAL_ENV": str(directory), "PATH": path}


def test_the_readme_says_how_to_build_the_wheel_and_three_ways_to_install_it() -> None:
    assert LINES[0] == "make wheel"
    assert "make wheel" not in LINES[1:]
    assert [re.search(r"whl\[(\w+)\]", line)[1] for line in LINES[1:]] == ["spark", "gpu", "cpu"]  # type: ignore[index]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert "hatchling build -t wheel -d dist\n" in makefile


def test_setup_names_the_package_of_libnuma_where_it_is_missing(tmp_path: Path) -> None:
    python = tmp_path / "python"  # finds everything but libnuma
    python.write_text('#!/bin/sh\ncase "$2" in *libnuma*) exit 1 ;; esac\n')
    python.chmod(0o755)
    variables = {"PYTHON": str(python), "VENV": str(tmp_path / "venv"), "LOCK": "requirements/cpu.lock"}
    done = subprocess.run(
        ["bash", "tools/setup.sh"],
        cwd=REPOSITORY,
        env={**os.environ, **variables, "UV_VERSION": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "apt-get install libnuma1" in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.long
def test_the_wheel_for_spark_installs_and_its_commands_start(checkout: Path, tmp_path: Path) -> None:
    active = environment(tmp_path / "spark")
    run(["bash", "-ec", LINES[1]], cwd=checkout, env=active)
    assert "Spark        4." in run(["bash", "-c", "pipemax doctor || true"], cwd=checkout, env=active)
    assert "--input" in run(["pipemax", "annotate", "--help"], cwd=checkout, env=active)
    modules = "import pipemax, pipemax_spark; from pipemax_spark import annotate, annotate_table, pipemax_udf"
    run(["python", "-c", modules], cwd=tmp_path, env=active)


@pytest.mark.long
@pytest.mark.parametrize("extra", ["gpu", "cpu"])
def test_the_wheel_with_an_engine_can_be_resolved(checkout: Path, tmp_path: Path, extra: str) -> None:
    """Resolved only: they are 7 and 9 GB. uv in place of pip, which downloads what it resolves."""
    active = environment(tmp_path / extra)
    (line,) = (line for line in LINES if f"[{extra}]" in line)
    line = re.sub(r"^(uv )?pip install", "uv pip install --dry-run", line)
    run(["bash", "-ec", line], cwd=checkout, env=active)


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_gpu_lock_has_what_its_packages_require_on_each_python(version: str) -> None:
    uv = str(Path(sys.executable).with_name("uv"))
    options = ["--python-version", version, "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
    resolved = run([uv, "pip", "compile", "requirements/gpu.lock", *options], cwd=REPOSITORY)
    assert resolved == (REPOSITORY / "requirements" / "gpu.lock").read_text(encoding="utf-8")
