"""Write the charts of a run to files: one picture, and a drawing of each chart for the report's page.

``python -m pipemax_spark.report.plot PICTURE DRAWINGS`` reads the engines' tracks from standard input, an Arrow stream
of each, and writes PICTURE.png and the SVG files of the directory DRAWINGS.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from pipemax_spark.report.charts import (
    TimeAxis,
    add_phase_legend,
    draw_kv_use,
    draw_rates,
    draw_step_times,
)
from pipemax_spark.report.engine_tracks import EngineTrack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_STRIPS = 4
"""Maximum number of engines whose KV use gets its own strip."""


def plot(by_server: Mapping[str, EngineTrack], path: Path) -> None:
    """Write all charts of the servers' tracks as one PNG."""
    tracks = list(by_server.values())
    time = TimeAxis.of(tracks)
    strips = max(1, min(MOST_STRIPS, len(tracks)))
    figure = _figure(10, 6.5 + 1.6 * strips)
    grid = figure.add_gridspec(strips + 2, 1, height_ratios=[3, *[1.6] * strips, 3.4])
    rates = figure.add_subplot(grid[0])
    draw_rates(rates, by_server, time, of_tokens=False)
    rates.set_title(f"Each engine's throughput, mean of {time.rate_window_s:.0f} s")
    for i in range(strips):
        strip = figure.add_subplot(grid[i + 1], sharex=rates)
        if i < len(tracks):
            draw_kv_use(strip, tracks[i], f"engine {i + 1}", time)
    strip.set_xlabel(time.label)
    add_phase_legend(strip, tracks)
    steps = figure.add_subplot(grid[strips + 1])
    draw_step_times(steps, tracks, time)
    steps.set_title("Step times, one for each report")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw_all(by_server: Mapping[str, EngineTrack], directory: Path) -> None:
    """Write ``rows.svg``, ``tokens.svg``, ``kv.svg`` and ``steps.svg`` into the directory."""
    tracks = list(by_server.values())
    time = TimeAxis.of(tracks)
    directory.mkdir(parents=True, exist_ok=True)
    for name, of_tokens in (("rows", False), ("tokens", True)):
        figure = _figure(10, 3.2)
        axes = figure.add_subplot()
        draw_rates(axes, by_server, time, of_tokens=of_tokens)
        axes.set_xlabel(time.label)
        _save(figure, directory / f"{name}.svg")
    strips = max(1, min(MOST_STRIPS, len(tracks)))
    figure = _figure(10, 0.9 + 1.6 * strips)
    for i, strip in enumerate(figure.subplots(strips, 1, sharex=True, squeeze=False)[:, 0]):
        if i < len(tracks):
            draw_kv_use(strip, tracks[i], f"engine {i + 1}", time)
    strip.set_xlabel(time.label)
    add_phase_legend(strip, tracks)
    _save(figure, directory / "kv.svg")
    figure = _figure(10, 3.8)
    draw_step_times(figure.add_subplot(), tracks, time)
    _save(figure, directory / "steps.svg")


def _figure(width: float, height: float) -> "Figure":
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mpl.rcParams["svg.fonttype"] = "none"  # text stays text: smaller, and a reader can search it
    mpl.rcParams["path.simplify_threshold"] = 0.5
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: "Figure", path: Path) -> None:
    figure.savefig(path, format="svg", dpi=120, bbox_inches="tight", metadata={"Date": None})


def _main() -> None:
    source = pa.BufferReader(sys.stdin.buffer.read())
    tracks = {}
    while source.tell() < source.size():
        server_id, track = EngineTrack.from_arrow(pa.ipc.open_stream(source).read_all())
        tracks[server_id] = track
    plot(tracks, Path(sys.argv[1]))
    draw_all(tracks, Path(sys.argv[2]))


if __name__ == "__main__":
    _main()
