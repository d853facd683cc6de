"""Draw what a large table cost before and costs now: `python lab/bench/scale_picture.py` reads lab/results/scale.json.

A figure without a value before was not measured there. Figures are those of lab/results/scale.md, which names the
command of each.
"""

import argparse
import json
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).resolve().parents[1] / "results"
_BEFORE, _NOW = "#b0b0b0", "#137b80"


def draw(figures: list[dict[str, Any]], path: Path) -> None:
    """Write one bar for each value, scaled to the larger of its pair, because the units differ."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.8 * len(figures) + 0.6), layout="constrained")
    axes = figure.subplots()
    for row, values in enumerate(figures):
        longest = max(value for value in (values["before"], values["now"]) if value is not None)
        for offset, color, name in ((-0.2, _BEFORE, "before"), (0.2, _NOW, "now")):
            value = values[name]
            share = (value or 0.0) / longest
            axes.barh(row + offset, share, height=0.36, color=color, label=name if row == 0 else None)
            text = "not measured" if value is None else f"{value:,g} {values['unit']}"
            axes.text(share + 0.01, row + offset, text, va="center", fontsize="small")
    axes.set_yticks(range(len(figures)), [values["what"] for values in figures])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.25), xticks=[])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=2)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--figures", type=Path, default=_RESULTS / "scale.json")
    parser.add_argument("--to", type=Path, default=_RESULTS / "img" / "scale_before_and_now.png")
    args = parser.parse_args()
    draw(json.loads(args.figures.read_text()), args.to)


if __name__ == "__main__":
    main()
