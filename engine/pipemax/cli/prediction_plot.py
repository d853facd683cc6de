"""Draw predicted step times against measured ones, for ``pipemax calibrate``. Imports matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

_DPI = 150


def plot_predictions(pairs: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, title: str) -> Path:
    """Draw (predicted, measured) seconds of steps, a panel for each kind, as in ``fig:predict``.

    The band is 5 % wide.
    """
    kinds = {name: np.array(points) for name, points in pairs.items() if points}
    figure = Figure(figsize=(3.4 * max(1, len(kinds)), 3.6))
    for index, (name, points) in enumerate(kinds.items()):
        axes = figure.add_subplot(1, len(kinds), index + 1)
        predicted_ms, measured_ms = 1e3 * points.T
        ends = np.array([points.min(), points.max()]) * 1e3
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.fill_between(ends, 0.95 * ends, 1.05 * ends, color="0.85")
        axes.scatter(measured_ms, predicted_ms, s=5, alpha=0.5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.tick_params(which="both", labelsize=6)
        axes.xaxis.set_minor_formatter(NullFormatter())  # they would overlap
        axes.set_title(f"{name}, {len(points)} step times", fontsize=8)
        axes.set_xlabel("measured, ms", fontsize=8)
        axes.set_ylabel("predicted, ms", fontsize=8)
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    return path
