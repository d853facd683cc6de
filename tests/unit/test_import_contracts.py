"""A module that nobody listed anywhere is under the import contracts all the same."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

NEWCOMERS = {
    "engine/pipemax/newcomer.py": "import pickle\nimport pyspark\nimport torch\nimport vllm\n",
    "engine/pipemax/serve/newcomer.py": "def late():\n    import vllm\n",
    "engine/pipemax/serve/flow/newcomer.py": "from pipemax.serve.server import EngineServer\n",
    "engine/pipemax/vllm_ext/newcomer.py": "import pipemax.policy.compare\n",
    "engine/pipemax/control/planners/newcomer.py": "import yaml\nfrom pipemax.config import EngineConfig\n",
    "engine/pipemax/sim/systems/newcomer.py": "import matplotlib\nfrom pipemax.presets import load_node\n",
    "engine/pipemax/tuning/newcomer.py": "from pipemax.presets import load_node\n",
    "engine/pipemax/domain/newcomer.py": "import numpy\n",
    "engine/pipemax/transfer/newcomer.py": "from pipemax.control.controller import Controller\n",
    "engine/pipemax/node/process.py": "import pydantic\n",
    "pipemax_spark/newcomer.py": "import torch\nimport transformers\nfrom pipemax.config import EngineConfig\n",
    "pipemax_spark/cascade/newcomer.py": "import numpy\n",
    "pipemax_spark/storage/newcomer.py": "from pipemax_spark.rows.left import rows_left\n",
    "engine/pipemax/policy/newcomer.py": "def late():\n    from lab.bench.windows import main\n",
}
"""What is added to each file, most of which are new."""

BROKEN = [
    ("Imports point down, and every package has its place", "pipemax.newcomer"),
    (
        "Imports point down, and every package has its place",
        "pipemax.vllm_ext is not allowed to import pipemax.policy",
    ),
    ("Imports point down on Spark's side too", "pipemax_spark.newcomer"),
    (
        "Imports point down on Spark's side too",
        "pipemax_spark.storage is not allowed to import pipemax_spark.rows",
    ),
    ("No cycle", "No cycles are allowed in pipemax.serve"),
    ("vLLM is imported only in vllm_ext", "pipemax.newcomer -> vllm"),
    ("vLLM is imported only in vllm_ext", "pipemax.serve.newcomer -> vllm"),
    ("torch is imported", "pipemax.newcomer -> torch"),
    ("torch is imported", "pipemax_spark.newcomer -> torch"),
    ("The domain knows", "pipemax.domain.newcomer -> numpy"),
    ("The controller knows", "pipemax.control.planners.newcomer -> pipemax.config"),
    ("The controller knows", "pipemax.control.planners.newcomer -> yaml"),
    ("The simulator knows", "pipemax.sim.systems.newcomer -> matplotlib"),
    ("The simulator knows", "pipemax.sim.systems.newcomer -> pipemax.presets"),
    ("The tuner knows", "pipemax.tuning.newcomer -> pipemax.presets"),
    ("The transfer engine knows", "pipemax.transfer.newcomer -> pipemax.control.controller"),
    ("The wire", "pipemax.node.process -> pydantic"),
    ("Spark's side sees", "pipemax_spark.newcomer -> pipemax.config"),
    ("Spark's side sees", "pipemax_spark.newcomer -> transformers"),
    ("The cascade's decisions know", "pipemax_spark.cascade.newcomer -> numpy"),
    ("The engine knows nothing", "pipemax.newcomer -> pyspark"),
    ("The product knows nothing of the laboratory", "pipemax.policy.newcomer -> lab"),
    ("Nothing is unpickled", "pipemax.newcomer -> pickle"),
]
"""What is said below the heading of which contract."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What import-linter says of a copy of the packages with the newcomers in it."""
    root = tmp_path_factory.mktemp("repository")
    for package in ("engine/pipemax", "pipemax_spark", "tools"):
        shutil.copytree(REPOSITORY / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    for name, imports in NEWCOMERS.items():
        with (root / name).open("a", encoding="utf-8") as file:
            file.write(imports)
    ran = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "engine"), str(root)]), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stdout


def test_every_contract_fails_for_a_new_module_that_breaks_it(report: str) -> None:
    assert re.search(r"Contracts: 0 kept, \d+ broken", report), report


@pytest.mark.parametrize(("contract", "says"), BROKEN)
def test_a_broken_contract_names_the_new_module(report: str, contract: str, says: str) -> None:
    _, _, broken = report.partition("Broken contracts")
    sections = re.split(r"\n(?=.*\n-{8,}\n)", broken)
    assert any(part.lstrip().startswith(contract) and says in part for part in sections), broken
