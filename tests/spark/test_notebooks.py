"""The notebooks run from top to bottom, with the fake engine for the demo model, and define nothing."""

import ast
import json
import runpy
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
import yaml

from pipemax.presets import read_preset
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import fake_config
from tests.spark.processes import servers_of

pytestmark = pytest.mark.long  # kernels of Jupyter

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[tuple[str, list[str]]]:
    """Source and tags of each."""
    return [
        ("".join(cell["source"]), cell["metadata"].get("tags", []))
        for cell in json.loads(notebook.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]


def run(notebook: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """What its names stand for at the end; ``parameters`` replace what the cell with that tag has set."""
    names: dict[str, Any] = {}
    for number, (source, tags) in enumerate(code_cells(notebook), 1):
        exec(compile(source, f"{notebook.name}, cell {number}", "exec"), names)
        if "parameters" in tags:
            assert parameters.keys() <= names.keys(), "a parameter that the notebook does not have"
            names |= parameters
    return names


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_defines_nothing_and_its_outputs_name_no_error_and_no_home(notebook: Path) -> None:
    for source, _ in code_cells(notebook):
        kinds = {type(node) for node in ast.walk(ast.parse(source))}
        assert not kinds & {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda}
    outputs = [
        output for cell in json.loads(notebook.read_text())["cells"] for output in cell.get("outputs", [])
    ]
    assert outputs, "tools/run_notebooks.py makes them"
    assert not any(output["output_type"] == "error" for output in outputs)
    assert str(Path.home()) not in json.dumps(outputs)


def test_databricks_sources_are_those_of_the_notebooks() -> None:
    tool = runpy.run_path(str(REPOSITORY / "tools" / "run_notebooks.py"))
    sources = REPOSITORY / "notebooks" / "databricks"
    assert sorted(path.stem for path in sources.glob("*.py")) == sorted(tool["AS_SOURCE"])
    for path in sources.glob("*.py"):
        notebook = nbformat.read(REPOSITORY / "notebooks" / f"{path.stem}.ipynb", as_version=4)
        assert path.read_text(encoding="utf-8") == tool["databricks_source"](notebook)
        compile(path.read_text(encoding="utf-8"), path.name, "exec")


def test_the_notebook_runs_the_job_plots_its_results_and_stops_its_engine(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    matplotlib.use("agg")
    parameters = {
        "engine": fake_config(model="notebook"),
        "engine_python": write_engine_python(tmp_path / "python"),
        "output": str(tmp_path / "labelled"),
        "num_rows": 60,
    }
    names = run(REPOSITORY / "notebooks" / "annotate.ipynb", parameters)
    assert (names["summary"].rows_out, names["summary"].rows_error) == (60, 0)
    assert "60 rows in" in names["summary"]._repr_html_()
    rows = names["labelled"].collect()
    assert len(rows) == len({row["package"] for row in rows}) == 60
    assert all(row["annotation"]["parsed"]["section"] for row in rows)
    assert names["by_section"]["rows"].sum() <= 60
    assert names["figure"].axes[0].get_title() == "the 15 commonest sections"
    plt.close(names["figure"])
    assert not servers_of(parameters["engine_python"])


def test_the_notebook_of_columns_asks_by_udf_schema_sql_and_for_embeddings(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    matplotlib.use("agg")
    parameters = {
        "engine": fake_config(model="columns"),
        "embedder": fake_config(model="columns of vectors") | {"task": "embed"},
        "engine_python": write_engine_python(tmp_path / "python"),
        "num_rows": 20,
    }
    names = run(REPOSITORY / "notebooks" / "columns.ipynb", parameters)
    assert all(row["text"] and row["error"] is None for row in names["answers"].collect())
    assert names["labelled"].where("annotation.parsed.section IS NULL").count() == 0
    assert {row["cut_at_three_tokens"] for row in names["in_sql"].collect()} == {"length"}
    assert names["similarities"].shape == (20, 20)
    plt.close(names["figure"])
    assert not servers_of(parameters["engine_python"])


def test_the_notebook_of_a_night_plans_it_and_says_how_many_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    (REPOSITORY / "logs").mkdir(exist_ok=True)
    matplotlib.use("agg")
    model = read_preset("models", "llama2-70b") | {"name": "little", "num_layers": 4}
    (tmp_path / "little.yaml").write_text(yaml.safe_dump(model))
    nodes = [{"name": name, "gpu": "L20", "num_gpus": 2, "host_memory_gib": 64} for name in ("cheap", "dear")]
    prices = {}
    for price, node in enumerate(nodes, 1):
        (tmp_path / f"{node['name']}.yaml").write_text(yaml.safe_dump(node))
        prices[str(tmp_path / f"{node['name']}.yaml")] = float(price)
    parameters = {"rows": 2_000, "model": str(tmp_path / "little.yaml"), "nodes": prices, "hours_left": 0.25}
    names = run(REPOSITORY / "notebooks" / "plan_a_night.ipynb", parameters)
    assert {*names["table"]["node"]} == {"cheap", "dear"}
    assert names["best"]["node"] == "cheap"
    assert names["plan"]["nodes"] >= 1
    plt.close(names["figure"])
