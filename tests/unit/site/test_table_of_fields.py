"""A field that is added to the table of fields is on the wire, in the annotation, in batch files, help and docs.

The fields are added by text to the table in a copy of the tree, in which no other file is changed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SETTINGS_TABLE, CARRIED_TABLE = "engine/pipemax/sampling.py", "engine/pipemax/generation.py"
SETTING = """    typical_p: float = setting(
        0.0, "Leave out tokens below this share.", row_type=pa.float64(), openai_names=("typical_p",)
    )
"""
CARRIED = """    entropy: float | None = carried(
        None, pa.float64(), "how torn the model was", is_asked=lambda settings: settings.typical_p > 0
    )
"""
USE = r"""
import json
from dataclasses import replace

import pyarrow as pa
import reference
from typer.testing import CliRunner

from pipemax.config import EngineConfig
from pipemax.serve.rows.arrow_rows import FinishedRow, completion_batch, requests_of
from pipemax.wire import GenerationSpec
from pipemax_spark.cli import command
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.openai_batch import parsed_lines
from pipemax_spark.executor.requests import request_batch
from pipemax_spark.executor.task import Annotator, TaskPlan, annotation_type
from tests.fakes.engine import FakeEngine

message = {"role": "user", "content": "one two"}
line = {"custom_id": "a", "body": {"messages": [message], "typical_p": "0.5"}}
(row,) = next(parsed_lines(iter([pa.record_batch({"value": [json.dumps(line)]})]))).to_pylist()

generation = GenerationSpec(typical_p=0.25)
overrides = pa.array([{"typical_p": 0.5}, None])
batch = request_batch(0, 2, prompt=pa.array(["one two", "three"]), overrides=overrides)
requests, faults = requests_of(batch, job=generation.sampling(), system=None, id_prefix="")

engine = FakeEngine(EngineConfig(model="m"))
engine.submit(requests)
ended = []
while len(ended) < len(requests):
    ended += engine.poll(1.0)
ended.sort(key=lambda completion: completion.request_id)
finished = [
    FinishedRow(row_id=number, completion=replace(completion, entropy=number + 0.5), completed_at_us=1)
    for number, completion in enumerate(ended)
]
options = EngineOptions(engine={"model": "m"}, generation=generation, job_id="j")
plan = TaskPlan(options=options, spec_hash="s", run_id="r", output_column="annotation")
annotations = Annotator(plan).annotations(completion_batch(finished))
help_page = CliRunner().invoke(command(), ["annotate", "--help"], env={"COLUMNS": "200"}).output
print(json.dumps({
    "batch file": row["overrides"]["typical_p"],
    "engine": [request.sampling.typical_p for request in requests],
    "faults": faults,
    "struct": [annotation_type(spec).get_field_index("entropy") >= 0 for spec in (generation, GenerationSpec())],
    "annotations": [annotation["entropy"] for annotation in annotations.to_pylist()],
    "texts": [bool(annotation["text"]) for annotation in annotations.to_pylist()],
    "help": "--typical-p" in help_page and "Leave out tokens below this share." in help_page,
    "docs": ["`typical_p`" in reference.row_settings(), "how torn the model was" in reference.annotation()],
}))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the product and of what the test needs, with one more field of each kind in the table."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("engine/pipemax", "pipemax_spark", "tests/fakes", "tools/site"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    added = (
        (SETTINGS_TABLE, "    task: str = setting(", SETTING),
        (CARRIED_TABLE, "    is_reused: bool = False", CARRIED),
    )
    for file, mark, field in added:
        table = (copy / file).read_text(encoding="utf-8")
        assert table.count(mark) == 1
        (copy / file).write_text(table.replace(mark, field + mark), encoding="utf-8")
    return copy


def run(tree: Path, *arguments: str) -> str:
    path = os.pathsep.join(str(tree / name) for name in ("engine", ".", "tools/site"))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fields_that_only_the_table_names_are_wherever_fields_are(tree: Path) -> None:
    shown: dict[str, Any] = json.loads(run(tree, "-c", USE).splitlines()[-1])
    assert shown == {
        "batch file": 0.5,
        "engine": [0.5, 0.25],
        "faults": [],
        "struct": [True, False],
        "annotations": [0.5, 1.5],
        "texts": [True, True],
        "help": True,
        "docs": [True, True],
    }


def test_the_docs_show_both_tables() -> None:
    for page, name in (("input", "row settings"), ("output", "annotation")):
        assert f"<!-- table: {name} -->" in (ROOT / f"docs/guide/{page}.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_fields_that_only_the_table_names_have_their_types(tree: Path) -> None:
    use = tree / "use.py"
    use.write_text(
        "from dataclasses import replace\n"
        "from pipemax.generation import Completion, Sampling\n"
        "half: float = Sampling(typical_p=0.5).typical_p\n"
        "torn: float | None = replace(Completion(request_id='a'), entropy=half).entropy\n",
        encoding="utf-8",
    )
    modules = ("pipemax.generation", "pipemax.wire", "pipemax.serve.rows", "pipemax_spark.executor")
    packages = [part for module in modules for part in ("-p", module)]
    run(tree, "-m", "mypy", *packages)
    run(tree, "-m", "mypy", "--strict", "use.py")
    use.write_text(use.read_text(encoding="utf-8") + "text: str = Sampling().typical_p\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="Incompatible types in assignment"):
        run(tree, "-m", "mypy", "--strict", "use.py")
