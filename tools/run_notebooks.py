"""Run the notebooks and keep their outputs: python tools/run_notebooks.py [notebooks/NAME.ipynb …].

Paths of this machine in the outputs are shown from the repository on.
"""

import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    given = [Path(name) for name in sys.argv[1:]]
    for path in given or sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(REPOSITORY)}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of the run, which would change at each
            if cell.cell_type == "code":
                cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        text = nbformat.writes(notebook).replace(str(REPOSITORY), ".")
        path.write_text(json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
