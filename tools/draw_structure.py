"""Draw the packages' folders and modules at two commits.

python tools/draw_structure.py BEFORE AFTER FILE.svg. A cell is a module, as wide as its lines; a row of cells is a
folder.
"""

import subprocess
import sys
from pathlib import PurePosixPath

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

PACKAGES = ("engine/pipemax", "pipemax_spark")
WIDTH_LINES = 1_000
"""Lines of a full row."""


def modules(commit: str) -> dict[str, list[tuple[str, int]]]:
    """Return folder → (module, lines), at this commit."""
    found: dict[str, list[tuple[str, int]]] = {}
    names = _git("ls-tree", "-r", "--name-only", commit, *PACKAGES).splitlines()
    for name in names:
        path = PurePosixPath(name)
        if path.suffix == ".py" and path.stem not in ("__init__", "__main__"):
            lines = _git("show", f"{commit}:{name}").count("\n")
            found.setdefault(str(path.parent).removeprefix("engine/"), []).append((path.stem, lines))
    return found


def draw(axes: Axes, folders: dict[str, list[tuple[str, int]]], title: str) -> float:
    """Draw each folder as a block of rows, and return the height of all."""
    y = 0.0
    for folder, files in folders.items():
        axes.text(0, y - 0.15, f"{folder}/  ({len(files)})", fontsize=7, weight="bold", va="bottom")
        x = 0.0
        for name, lines in sorted(files, key=lambda file: -file[1]):
            width = max(lines, 9 * len(name))
            if x + width > WIDTH_LINES:
                x, y = 0.0, y + 1
            axes.add_patch(
                Rectangle((x, y), width, 0.85, facecolor="#dbe7f4", edgecolor="#4a6a8a", linewidth=0.5)
            )
            axes.text(x + width / 2, y + 0.42, name, fontsize=4.6, ha="center", va="center")
            x += width
        y += 2.1
    axes.set(xlim=(0, WIDTH_LINES), title=title)
    axes.axis("off")
    return y


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def main(before: str, after: str, file: str) -> None:
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    figure, both = plt.subplots(1, 2, figsize=(13, 15))
    commits = {"before": before, "after": after}
    height = max(
        draw(axes, modules(commit), name) for axes, (name, commit) in zip(both, commits.items(), strict=True)
    )
    for axes in both:
        axes.set_ylim(height, -1)
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
