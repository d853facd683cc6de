"""The notebooks run from top to bottom, with the fake engine for the demo model, and define nothing."""

import ast
import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest

from tests.fakes.engine import fake_config

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
def test_a_notebook_defines_nothing_and_keeps_no_output(notebook: Path) -> None:
    for source, _ in code_cells(notebook):
        kinds = {type(node) for node in ast.walk(ast.parse(source))}
        assert not kinds & {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda}
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)


def test_the_notebook_labels_its_table_and_draws_it(
    spark: Any, engine_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    matplotlib.use("agg")
    parameters = {
        "engine": fake_config(model="notebook"),
        "engine_python": engine_python,
        "output": str(tmp_path / "labelled"),
        "num_rows": 60,
    }
    names = run(REPOSITORY / "notebooks" / "annotate.ipynb", parameters)
    rows = names["labelled"].collect()
    assert len(rows) == len({row["package"] for row in rows}) == 60
    assert all(row["a"]["error"] is None and row["a"]["parsed"]["section"] for row in rows)
    assert names["by_section"]["rows"].sum() <= 60
    assert names["figure"].axes[0].get_title() == "the 15 commonest sections"
    plt.close(names["figure"])
