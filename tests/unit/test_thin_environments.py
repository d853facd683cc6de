"""What `make test-versions` runs loads in its environments, which have few of the engine's packages."""

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
THIN = [*(REPOSITORY / "requirements").glob("versions-*.lock")]

LOAD = """
import importlib, sys

missing, *modules = sys.argv[1:]
sys.modules |= dict.fromkeys(missing.split())
for module in modules:
    importlib.import_module(module)
"""


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def packages_of(lock: Path) -> set[str]:
    return {normal(line.partition("==")[0]) for line in lock.read_text().splitlines() if "==" in line}


def modules_to_run() -> list[str]:
    """The modules that the script runs, and the conftests above them."""
    script = (REPOSITORY / "tools" / "test_versions.sh").read_text()
    files = {*re.findall(r"tests/spark/\w+\.py", script)}
    files |= {f"tests/spark/iceberg/{path.name}" for path in REPOSITORY.glob("tests/spark/iceberg/test_*.py")}
    files |= {"tests/conftest.py", "tests/spark/conftest.py"}
    return sorted(file.removesuffix(".py").replace("/", ".") for file in files)


@pytest.mark.long  # make test-versions runs them
def test_the_tests_of_other_spark_releases_load_with_the_packages_of_their_locks() -> None:
    thin = set.intersection(*map(packages_of, THIN))
    missing = [
        module
        for module, packages in packages_distributions().items()
        if module.isidentifier()
        and module not in ("pipemax", "pipemax_spark", "tests")
        and not any(normal(package) in thin for package in packages)
    ]
    assert "jsonschema" in missing, "the engine's packages, which are here, are refused"
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, " ".join(missing), *modules_to_run()],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
