"""Run the notebooks and keep their outputs: python tools/run_notebooks.py [notebooks/NAME.ipynb …].

Paths of this machine in the outputs are shown from the repository on.
"""

import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

REPOSITORY = Path(__file__).resolve().parents[1]


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


if __name__ == "__main__":
    main()
