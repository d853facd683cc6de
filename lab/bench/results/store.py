"""The figures of all cells, in one file of JSON lines that grows: a cell is a line, written when it is done."""

import json
from pathlib import Path
from typing import Any

from lab.bench.results.cells import Cell


class Store:
    """What was run. One process writes to its file."""

    def __init__(self, file: Path) -> None:
        """Read the file if there is one. A line that was cut off by a kill is left out: its cell runs again."""
        self._file = file
        self._figures: dict[str, dict[str, Any]] = {}
        lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
        for line in lines[:-1]:
            entry = json.loads(line)
            self._figures[entry.pop("cell")] = entry
        if lines and lines[-1]:
            file.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")

    def __contains__(self, cell: Cell) -> bool:
        return cell.name in self._figures

    def __getitem__(self, cell: Cell) -> dict[str, Any]:
        """Return what a cell's run gave. ``KeyError`` unless it was run."""
        return self._figures[cell.name]

    def __setitem__(self, cell: Cell, figures: dict[str, Any]) -> None:
        """Append the cell to the file."""
        self._figures[cell.name] = figures
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"cell": cell.name} | figures, ensure_ascii=False) + "\n")
