"""Run the notebooks and keep their outputs: python tools/run_notebooks.py [notebooks/NAME.ipynb …].

Paths of this machine in the outputs are shown from the repository on. Those that Databricks is to import as source are
written into notebooks/databricks too.
"""

import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

REPOSITORY = Path(__file__).resolve().parents[1]
AS_SOURCE = ("columns", "plan_a_night")
"""The notebooks that are written as Databricks sources."""


def readable(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Return a cell's outputs without log lines and emptied displays; text that follows on text is one output."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            if output.name == "stderr":
                continue
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
                continue
        elif output.output_type == "display_data" and not "".join(output.data.values()).strip():
            continue
        kept.append(output)
    return kept


def databricks_source(notebook: NotebookNode) -> str:
    """Return the notebook as a Python file that Databricks imports as a notebook: no outputs, text as comments."""
    cells = [
        cell.source
        if cell.cell_type == "code"
        else "\n".join(f"# MAGIC {line}".rstrip() for line in ("%md", *cell.source.splitlines()))
        for cell in notebook.cells
    ]
    return "# Databricks notebook source\n" + "\n\n# COMMAND ----------\n\n".join(cells) + "\n"


def main() -> None:
    given = [Path(name) for name in sys.argv[1:]]
    for path in given or sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(REPOSITORY)}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of the run, which would change at each
            if cell.cell_type == "code":
                cell.outputs = readable(cell.outputs)
        text = nbformat.writes(notebook).replace(str(REPOSITORY), ".")
        path.write_text(json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if path.stem in AS_SOURCE:
            source = path.parent / "databricks" / f"{path.stem}.py"
            source.parent.mkdir(exist_ok=True)
            source.write_text(databricks_source(notebook), encoding="utf-8")


if __name__ == "__main__":
    main()
